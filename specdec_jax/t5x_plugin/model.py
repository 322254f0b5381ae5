"""The parts that the classes of `t5x_plugin` add to T5X's classes.

T5X gives its decoding functions the variables of a train state as arguments:
the parameters, and `flax_mutables`, all other collections. The drafter's
parameters are a collection of their own, `drafter`, with the logical axes of
their module. So T5X's partitioner splits them as it splits the target's, while
the target's tree, and with it its checkpoints, scores, losses and optimiser,
stays as it is. A tree of both under `params` would change all of these.

A target's checkpoint has no such collection. T5X can change a state while it
restores it (`RestoreCheckpointConfig.state_transformation_fns`), and places it
afterwards: `restore_drafter` adds the drafter there. T5X's `infer.py` offers no
other way without a change: its own second checkpoint is `fallback_to_scratch`,
which would also hide arrays that the target lacks.
"""

import copy
import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import flax
import jax
import jax.numpy as jnp

from specdec_jax import checkpoints
from specdec_jax.checks.fields import check_number, unexpected
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models.base import param_shapes
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.t5x_plugin.decode_fns import DECODE_FNS, Pair

Variables = Mapping[str, Any]
COLLECTION = 'drafter'
_AXES = f'{COLLECTION}_axes'


def import_t5x(module: str) -> Any:
  """Imports a module of T5X.

  Raises:
    ValueError: T5X is not installed.
  """
  try:
    return importlib.import_module(f't5x.{module}')
  except ImportError as error:
    raise ValueError(
      f't5x.{module} cannot be imported: {error}. The plug-in for T5X needs'
      ' T5X, which no registry has; see https://github.com/google-research/t5x.'
    ) from error


def network_of(module: Any, what: str = 'module') -> T5:
  """Returns the network of this library that fits a T5X module's parameters.

  Args:
    module: `Transformer` of T5X's `examples/t5`, or any module whose `config`
      has its sizes and whose parameters have its names and shapes.
    what: name of the module in messages.

  Raises:
    ValueError: it is another kind of module.
  """
  try:
    sizes: dict[str, Any] = {
      field.name: getattr(module.config, field.name, field.default)
      for field in dataclasses.fields(T5Config)
    }
    sizes |= {'dtype': jnp.dtype(sizes['dtype']).name, 'dropout_rate': 0.0}
    network = T5(T5Config(**sizes))
  except (AttributeError, ValueError) as error:
    expected = 'a t5x.examples.t5.network.Transformer, whose config has sizes'
    raise unexpected(what, expected, type(module).__name__) from error
  key, token = jax.random.PRNGKey(0), jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = functools.partial(module.init, key, enable_dropout=False)
  shapes = jax.eval_shape(lambda ids: init(ids, ids, ids)['params'], token)
  try:
    checkpoints.check_params(shapes, param_shapes(network), what)
  except ValueError as error:
    advice = "T5X's examples/t5 fits; examples/scalable_t5 has other shapes."
    raise ValueError(f'{error} {advice}') from error
  return network


def restore_drafter(
  state: Mapping[str, Any],
  wanted: Mapping[str, Any],
  *,
  checkpoint: str | os.PathLike[str],
  module: Any,
  dtype: Any = None,
  is_resuming: bool = False,
) -> dict[str, Any]:
  """Adds the drafter's parameters to a state that T5X restores.

  It goes into `RestoreCheckpointConfig.state_transformation_fns`.

  Args:
    state: the contents of the target's checkpoint.
    wanted: not used; T5X gives the state that it restores into.
    checkpoint: the drafter's, of any kind that `specdec_jax.load` reads.
    module: the drafter's, see `EncoderDecoderModel.draft_module`.
    dtype: dtype of the parameters; None is the checkpoint's own.
    is_resuming: not used; T5X tells whether it continues a run.

  Raises:
    ValueError: as for `network_of` and `specdec_jax.checkpoints.load`.
  """
  del wanted, is_resuming
  network = network_of(module, 'draft_module')
  params = checkpoints.load(checkpoint, network, dtype=dtype)
  mutables = dict(state.get('flax_mutables', {}), **{COLLECTION: params})
  return dict(state, flax_mutables=mutables)


class Speculates:
  """A T5X model that decodes by speculation, and is otherwise unchanged.

  It is a base of `t5x_plugin.EncoderDecoderModel`; the other one is T5X's.
  """

  decode_fn: Any  # T5X's model has these attributes
  output_vocabulary: Any
  _default_decoder_params: Any

  def __init__(self, model: Any, draft_module: Any, gamma: int = 4):
    """Copies all attributes of `model`.

    Args:
      model: T5X's `EncoderDecoderModel`, with a decode function of this
        package.
      draft_module: the drafter, a module such as the model's own.
      gamma: tokens that the drafter proposes per round.

    Raises:
      ValueError: `model` or a module is of another kind, their vocabularies
        differ, or the decode function does not speculate.
    """
    if not isinstance(model, import_t5x('models').EncoderDecoderModel):
      expected = 'a t5x.models.EncoderDecoderModel'
      raise unexpected('model', expected, type(model).__name__)
    check_number('gamma', gamma, 1)
    check_decode_fn(model.decode_fn)
    target = network_of(model.module)
    draft = network_of(draft_module, 'draft_module')
    if target.vocab_size != draft.vocab_size:
      expected = f"the target's, {target.vocab_size}"
      raise unexpected("draft_module's vocab_size", expected, draft.vocab_size)
    vars(self).update(vars(model))
    self.draft_module = draft_module
    self._model = model
    self._gamma = gamma
    self._loop = Loop(target, small_model(draft))

  def get_initial_variables(self, *args: Any, **kwargs: Any) -> Variables:
    """Returns T5X's variables of the target and the drafter's collection."""
    draft_model = copy.copy(self._model)
    draft_model.module = self.draft_module
    target, draft = (
      model.get_initial_variables(*args, **kwargs)
      for model in (self._model, draft_model)
    )
    names = {'params': COLLECTION, 'params_axes': _AXES}
    draft = {new: draft[old] for old, new in names.items() if old in draft}
    return flax.core.freeze({**target, **draft})

  def predict_batch(
    self,
    params: Variables,
    batch: Mapping[str, jax.Array],
    rng: jax.Array | None = None,
    flax_mutables: Variables | None = None,
  ) -> jax.Array:
    """Returns the tokens of `predict_batch_with_aux`."""
    return self.predict_batch_with_aux(
      params, batch, rng, flax_mutables=flax_mutables
    )[0]

  def predict_batch_with_aux(
    self,
    params: Variables,
    batch: Mapping[str, jax.Array],
    rng: jax.Array | None = None,
    decoder_params: MutableMapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    prompt_with_targets: bool = False,
    flax_mutables: Variables | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Decodes a batch, with T5X's arguments and results.

    Args:
      params: the target's parameters.
      batch: `encoder_input_tokens` int32[B, E], and `decoder_input_tokens`
        int32[B, L], whose shape is that of the outputs.
      rng: key of the samples.
      decoder_params: further arguments of the decode function.
      return_all_decodes: whether to return all of an example's decodes.
      num_decodes: decodes of each example.
      prompt_with_targets: whether outputs begin with the targets.
      flax_mutables: holds the drafter's parameters. T5X passes those of its
        train state to any function with an argument of this name.

    Returns:
      Tokens int32[B, L] and `scores` float32[B]; with all decodes
      int32[B, num_decodes, L] and float32[B, num_decodes], the best one last.

    Raises:
      ValueError: the drafter has no parameters, or `rng` is given twice.
    """
    defaults = self._default_decoder_params
    if return_all_decodes is None:
      return_all_decodes = defaults.return_all_decodes
    if num_decodes is None:
      num_decodes = defaults.num_decodes
    decoder_params = dict(decoder_params or {})
    if rng is not None:
      if decoder_params.get('decode_rng') is not None:
        expected = 'one PRNG key: None beside decode_rng of decoder_params'
        raise unexpected('rng', expected, rng)
      decoder_params['decode_rng'] = rng
    eos_id = self.output_vocabulary.eos_id or 1
    decoder_params.setdefault('eos_id', eos_id)

    prompt = batch['decoder_input_tokens']
    # An end of sequence in a prompt would end the output.
    if prompt_with_targets:
      prompt = prompt * (prompt != eos_id)
    decodes, scores = self.decode_fn(
      inputs=prompt,
      cache={},
      tokens_to_logits=Pair(
        loop=self._loop,
        params=PairParams(params, _drafter_params(flax_mutables)),
        inputs=batch['encoder_input_tokens'],
        gamma=self._gamma,
        has_prompt=prompt_with_targets,
      ),
      num_decodes=num_decodes,
      cache_offset=0,
      **decoder_params,
    )
    if return_all_decodes:
      return decodes, {'scores': scores}
    return decodes[:, -1], {'scores': scores[:, -1]}


class RestoresDrafter:
  """T5X's `InteractiveModel`, which restores the drafter too.

  It is a base of `t5x_plugin.InteractiveModel`; the other one is T5X's. T5X's
  class makes its `RestoreCheckpointConfig` itself and accepts no transformation
  for it, so this class adds the transformation when that attribute is set.
  """

  def __init__(
    self,
    *args: Any,
    model: Any,
    draft_checkpoint: str | os.PathLike[str],
    **kwargs: Any,
  ):
    """Takes T5X's arguments, and the path of the drafter's parameters.

    Args:
      *args: T5X's.
      model: a `t5x_plugin.EncoderDecoderModel`.
      draft_checkpoint: see `restore_drafter`.
      **kwargs: T5X's.
    """
    self._restore_drafter = functools.partial(
      restore_drafter,
      checkpoint=draft_checkpoint,
      module=model.draft_module,
      dtype=kwargs.get('dtype'),
    )
    super().__init__(*args, model=model, **kwargs)  # type: ignore[call-arg]

  @property
  def _restore_checkpoint_cfg(self) -> Any:
    return self._restore_config

  @_restore_checkpoint_cfg.setter
  def _restore_checkpoint_cfg(self, config: Any) -> None:
    if config is not None:
      config.state_transformation_fns = (
        *config.state_transformation_fns,
        self._restore_drafter,
      )
    self._restore_config = config


def check_decode_fn(decode_fn: Any) -> None:
  """Raises ValueError unless a decode function, as gin wraps it, speculates."""
  inner = decode_fn
  while isinstance(inner, functools.partial) or hasattr(inner, '__wrapped__'):
    is_wrapped = hasattr(inner, '__wrapped__')
    inner = inner.__wrapped__ if is_wrapped else inner.func
  if inner not in DECODE_FNS:
    names = ' or '.join(f'@t5x_plugin.{fn.__name__}' for fn in DECODE_FNS)
    expected = f"{names}, which speculate (T5X's default is beam_search)"
    raise unexpected('decode_fn', expected, getattr(inner, '__name__', inner))


def _drafter_params(flax_mutables: Variables | None) -> Variables:
  if not flax_mutables or COLLECTION not in flax_mutables:
    advice = (
      'Restore it: utils.RestoreCheckpointConfig.state_transformation_fns ='
      ' [@t5x_plugin.restore_drafter].'
    )
    raise unexpected('flax_mutables', "the drafter's parameters", None, advice)
  return flax_mutables[COLLECTION]
