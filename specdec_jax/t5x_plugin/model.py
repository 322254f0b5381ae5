"""What the classes of `t5x_plugin` add to T5X's of the same names.

T5X gives its decoding functions the variables of a train state as arguments:
the parameters, and `flax_mutables`, any further collections. The drafter's
parameters are a collection of their own, `drafter`, with the logical axes of
their module: T5X's partitioner splits them as it splits the target's, and the
target's own tree, so its checkpoints, scores, losses and optimiser, does not
know of them. A tree of both under `params` would change all of these.

A target's checkpoint has no such collection. T5X lets a state be changed while
it is restored (`RestoreCheckpointConfig.state_transformation_fns`), and then
puts it in place: `restore_drafter` adds the drafter there. This is the only way
that T5X's `infer.py` offers without a change: its own second checkpoint is
`fallback_to_scratch`, which would also hide arrays that the target lacks.
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
  """The network of this library with the parameters of a T5X module.

  Args:
    module: `Transformer` of T5X's `examples/t5`, or anything whose `config` has
      its sizes and whose parameters have its names and shapes.
    what: what the module is, for messages.

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

  For `RestoreCheckpointConfig.state_transformation_fns`.

  Args:
    state: what the target's checkpoint has.
    wanted: the state that is restored; not looked at.
    checkpoint: the drafter's, of any kind that `specdec_jax.load` reads.
    module: the drafter's, as `EncoderDecoderModel.draft_module`.
    dtype: dtype of the parameters; None is the checkpoint's own.
    is_resuming: whether T5X continues a run; the same is done then.

  Raises:
    ValueError: as for `network_of` and `specdec_jax.checkpoints.load`.
  """
  del wanted, is_resuming
  network = network_of(module, 'draft_module')
  params = checkpoints.load(checkpoint, network, dtype=dtype)
  mutables = dict(state.get('flax_mutables', {}), **{COLLECTION: params})
  return dict(state, flax_mutables=mutables)


class Speculates:
  """Decodes by speculation; in all else it is the T5X model that it is given.

  The base of `t5x_plugin.EncoderDecoderModel`, whose other base is T5X's class.
  """

  decode_fn: Any  # these are T5X's
  output_vocabulary: Any
  _default_decoder_params: Any

  def __init__(self, model: Any, draft_module: Any, gamma: int = 4):
    """Takes over all that `model` has.

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
    """T5X's variables of the target, and the drafter's collection."""
    of_drafter = copy.copy(self._model)
    of_drafter.module = self.draft_module
    theirs, ours = (
      model.get_initial_variables(*args, **kwargs)
      for model in (self._model, of_drafter)
    )
    names = {'params': COLLECTION, 'params_axes': _AXES}
    ours = {new: ours[old] for old, new in names.items() if old in ours}
    return flax.core.freeze({**theirs, **ours})

  def predict_batch(
    self,
    params: Variables,
    batch: Mapping[str, jax.Array],
    rng: jax.Array | None = None,
    flax_mutables: Variables | None = None,
  ) -> jax.Array:
    """The tokens of `predict_batch_with_aux`."""
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
    """Decodes a batch; arguments and results are T5X's, but for the last.

    Args:
      params: the target's parameters.
      batch: `encoder_input_tokens` int32[B, E], and `decoder_input_tokens`
        int32[B, L], whose shape is that of the outputs.
      rng: key of the samples.
      decoder_params: further arguments of the decode function.
      return_all_decodes: whether to return all of an example's decodes.
      num_decodes: decodes of each example.
      prompt_with_targets: whether outputs begin with the targets.
      flax_mutables: has the drafter's parameters. T5X passes its train state's
        to whatever has an argument of this name.

    Returns:
      Tokens int32[B, L] and `scores` float32[B]; with all decodes
      int32[B, num_decodes, L] and float32[B, num_decodes], the best one last.

    Raises:
      ValueError: there are no drafter's parameters, or `rng` is given twice.
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
    if prompt_with_targets:  # without its end, which would end the output
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
  """T5X's `InteractiveModel`, which restores the drafter as well.

  The base of `t5x_plugin.InteractiveModel`, whose other base is T5X's class.
  That class makes its `RestoreCheckpointConfig` itself, where gin cannot reach
  it, and leaves no place for a transformation: it is added to what is made.
  """

  def __init__(
    self,
    *args: Any,
    model: Any,
    draft_checkpoint: str | os.PathLike[str],
    **kwargs: Any,
  ):
    """T5X's arguments, and where the drafter's parameters are.

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
  """Raises ValueError unless a decode function, as gin wraps it, is ours."""
  inner = decode_fn
  while isinstance(inner, functools.partial) or hasattr(inner, '__wrapped__'):
    is_wrapped = hasattr(inner, '__wrapped__')
    inner = inner.__wrapped__ if is_wrapped else inner.func
  if inner not in DECODE_FNS:
    ours = ' or '.join(f'@t5x_plugin.{fn.__name__}' for fn in DECODE_FNS)
    theirs = getattr(inner, '__name__', inner)
    expected = f"{ours}, which speculate (T5X's default is beam_search)"
    raise unexpected('decode_fn', expected, theirs)


def _drafter_params(flax_mutables: Variables | None) -> Variables:
  if not flax_mutables or COLLECTION not in flax_mutables:
    advice = (
      'Restore it: utils.RestoreCheckpointConfig.state_transformation_fns ='
      ' [@t5x_plugin.restore_drafter].'
    )
    raise unexpected('flax_mutables', "the drafter's parameters", None, advice)
  return flax_mutables[COLLECTION]
