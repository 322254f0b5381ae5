"""T5X's decode functions with speculation, and bases of T5X's classes.

The decode functions have T5X's names and arguments. T5X gives a decode function
`tokens_to_logits`, which reads one token per call.
`t5x_plugin.EncoderDecoderModel` gives it a `Pair` instead: both models, their
parameters and the inputs, which is all that a whole loop needs. gin's bindings
and `decoder_params` reach these functions as they reach T5X's.

T5X gives its decoding functions the variables of a train state as arguments:
the parameters, and `flax_mutables`, all other collections. The drafter's
parameters are a collection of their own, `drafter`, with the logical axes of
their module. So T5X's partitioner splits them as it splits the target's, while
the target's tree, and with it its checkpoints, scores, losses and optimiser,
stays as it is. A tree of both under `params` would change all of these.

A target's checkpoint has no such collection. T5X can change a state while it
restores it (`RestoreCheckpointConfig.state_transformation_fns`), and places it
afterwards: `restore_drafter` adds the drafter there. T5X's `infer.py` offers no
other way without a change: its only other source of arrays is
`fallback_to_scratch`, which would also hide that the target's checkpoint lacks
arrays.
"""

import copy
import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import checkpoints
from specdec_jax.checks.fields import check_number, unexpected
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.options import Options
from specdec_jax.models.base import param_shapes
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.probs import SamplingConfig, SamplingParams
from specdec_jax.request import Drafting, Request
from specdec_jax.types import Generation

Variables = Mapping[str, Any]
COLLECTION = 'drafter'
MIN_TEMPERATURE = 1e-4  # T5X takes the argmax up to this temperature


class Pair(NamedTuple):
  """Both models and their inputs.

  Attributes:
    loop: the target and its drafter.
    params: the parameters of both.
    inputs: int32[B, E], the encoder's inputs, 0 past each row's end.
    gamma: proposals per round.
    has_prompt: whether outputs begin with the argument `inputs` of the decode
      function; otherwise only the shape of this argument is used.
  """

  loop: Loop
  params: PairParams
  inputs: jax.Array
  gamma: int
  has_prompt: bool


def temperature_sample(
  inputs: jax.Array,
  cache: Any,
  tokens_to_logits: Pair,
  eos_id: int,
  decode_rng: jax.Array | None = None,
  num_decodes: int = 1,
  temperature: float | jax.Array = 1.0,
  topk: int = 1,
  topp: float = 0.0,
  cache_offset: int = 0,
  max_decode_steps: int | jax.Array | None = None,
  max_decode_steps_hard_limit: int | None = None,
  rescale_log_probs: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """Samples as T5X's `decoding.temperature_sample`, by speculative decoding.

  At temperature 0 the tokens are T5X's. Above it they have T5X's distribution,
  but are other samples, because each decode of each example has its own key
  here. T5X's arguments for callbacks in each step do not exist, since a step
  here is a round of several tokens.

  Args:
    inputs: int32[B, L], 0 first, then each row's prompt (see
      `Pair.has_prompt`), then 0.
    cache: not used; the loop makes its own.
    tokens_to_logits: a `Pair`.
    eos_id: id that ends an output.
    decode_rng: a PRNG key; None is the key of seed 0.
    num_decodes: samples of each example.
    temperature: a number or float[B]; up to 1e-4 the argmax is taken.
    topk: number of most probable tokens to sample from; 0 is off.
    topp: total probability of the most probable tokens to sample from; 0.0 is
      off.
    cache_offset: not used.
    max_decode_steps: the most tokens after the prompt; None is L.
    max_decode_steps_hard_limit: upper limit of `max_decode_steps`, if that is
      given.
    rescale_log_probs: whether scores use the distribution after temperature,
      top-k and top-p, so that they are 0.0 at temperature 0; otherwise scores
      use the model's own distribution.

  Returns:
    Tokens int32[B, num_decodes, L], each row its prompt and its output, then 0;
    and their scores float32[B, num_decodes], the sum of the log-probabilities
    of the output. The best score is the last.

  Raises:
    ValueError: `topk` and `topp` are both given, or `max_decode_steps` is more
      than L.
  """
  del cache, cache_offset  # arguments that T5X gives to any decode function
  pair = tokens_to_logits
  sampling, greedy = _sampling(inputs.shape[0], temperature, topk, topp)
  has_scores = not (greedy and rescale_log_probs)
  length = inputs.shape[1]
  steps = length if max_decode_steps is None else max_decode_steps
  if max_decode_steps is not None and max_decode_steps_hard_limit:
    steps = jnp.minimum(steps, max_decode_steps_hard_limit)
  if _are_concrete(steps) and np.any(steps > length):
    expected = f'{length} at most, the tokens of the targets'
    raise unexpected('max_decode_steps', expected, steps)

  def each(rows):
    return jnp.repeat(rows, num_decodes, axis=0)

  tokens, done = _decode(
    pair._replace(inputs=each(pair.inputs)),
    each(inputs),
    eos_id,
    steps,
    keys=_keys(decode_rng, inputs.shape[0] * num_decodes),
    sampling=jax.tree.map(each, sampling),
    greedy=greedy,
    with_log_probs=has_scores,
    log_probs_as_drawn=rescale_log_probs,
  )
  shape = (inputs.shape[0], num_decodes)
  scores = jnp.zeros(shape)
  if has_scores:
    scores = jnp.sum(done.log_probs, axis=1).reshape(shape)
  order = jnp.argsort(scores, axis=1)
  return (
    jnp.take_along_axis(tokens.reshape(*shape, -1), order[..., None], axis=1),
    jnp.take_along_axis(scores, order, axis=1),
  )


def beam_search(
  inputs: jax.Array,
  cache: Any,
  tokens_to_logits: Pair,
  eos_id: int,
  num_decodes: int = 4,
  alpha: float = 0.6,
  max_decode_len: int | None = None,
  decode_rng: jax.Array | None = None,
  cache_offset: int = 0,
  draft_beams: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Finds the beams of T5X's `decoding.beam_search`, by speculative decoding.

  The beams differ from T5X's only after a prompt of L - 1 tokens: T5X repeats
  the last token of the prompt, while this function searches for the one token
  that is left.

  Args:
    inputs: int32[B, L], as for `temperature_sample`.
    cache: not used; the search makes its own.
    tokens_to_logits: a `Pair`.
    eos_id: id that ends a beam.
    num_decodes: K, the width of the search.
    alpha: exponent of the brevity penalty, >= 0.
    max_decode_len: length of the outputs, prompt included; None is L.
    decode_rng: not used; a search draws nothing.
    cache_offset: not used.
    draft_beams: beams of the drafter; None is 2 K.

  Returns:
    Tokens int32[B, K, L], each row its prompt and its output, then 0; and their
    scores float32[B, K], the best one last. If a search finishes fewer than K
    beams, the first ones are 0 and their scores -1e7, as in T5X.

  Raises:
    ValueError: a number is too small or too large.
  """
  del cache, decode_rng, cache_offset
  pair = tokens_to_logits
  options = Options(num_beams=num_decodes, alpha=alpha, draft_beams=draft_beams)
  length = inputs.shape[1] if max_decode_len is None else max_decode_len
  padding = max(0, length - inputs.shape[1])
  prompt = jnp.pad(inputs, ((0, 0), (0, padding)))[:, :length]
  batch = prompt.shape[0]
  tokens, done = _decode(
    pair,
    prompt,
    eos_id,
    length,
    keys=_keys(None, batch),
    sampling=SamplingConfig(0.0).params(batch),
    greedy=True,
    with_log_probs=False,
    beams=options.beam_settings(num_ends=1),
  )
  if pair.has_prompt:  # missing beams have no prompt
    tokens = jnp.where(done.length[:, None] > 0, tokens, 0)
  scores = jnp.asarray(done.scores).reshape(batch, num_decodes)
  return tokens.reshape(batch, num_decodes, length), scores


def _decode(
  pair: Pair, prompt: jax.Array, eos_id: int, steps: Any, **settings: Any
) -> tuple[jax.Array, Generation]:
  """Decodes with a pair of models.

  Args:
    pair: both models and their inputs.
    prompt: int32[B, L], 0 first, see `Pair.has_prompt`.
    eos_id: id that ends an output.
    steps: the most tokens after a prompt.
    **settings: further fields of the `Request`.

  Returns:
    int32[N B, L], prompt and output of each of a row's N outputs; and the
    `Generation` of these N B rows.
  """
  length = prompt.shape[1]
  # The tokens of each row's prompt: none, unless the pair has prompts.
  produced = jnp.zeros(prompt.shape[:1], jnp.int32)
  if pair.has_prompt:
    produced = jnp.sum(prompt[:, 1:] != 0, axis=1, dtype=jnp.int32)
  request = Request(
    inputs=pair.inputs,
    stop_ids=jnp.array([eos_id], jnp.int32),
    min_length=jnp.zeros_like(produced),
    max_length=jnp.minimum(steps, length - produced),
    slots=length,
    drafting=Drafting(pair.gamma),
    prompt=prompt if pair.has_prompt else jnp.zeros_like(prompt[:, :1]),
    prompt_length=produced + 1,
    **settings,
  )
  done = pair.loop.decode(pair.params, request)
  tokens = done.tokens
  if pair.has_prompt:
    num_outputs = tokens.shape[0] // prompt.shape[0]
    before = jnp.pad(prompt[:, 1:], ((0, 0), (0, 1)))
    before, produced = (
      jnp.repeat(rows, num_outputs, axis=0) for rows in (before, produced)
    )
    place = jnp.arange(length) - produced[:, None]
    moved = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1)
    tokens = jnp.where(place < 0, before, moved)
  return tokens, done


def _sampling(batch: int, temperature, topk, topp):
  """Returns T5X's arguments as `SamplingParams`, and if all rows are greedy.

  Arguments may be traced; a traced temperature counts as not greedy.
  """
  if _are_concrete(topk, topp) and topk and topp:
    expected = f'0 beside topp = {topp} (it is 1 by default)'
    raise unexpected('topk', expected, topk)
  greedy = _are_concrete(temperature) and bool(
    np.all(np.asarray(temperature) <= MIN_TEMPERATURE)
  )
  temperature = jnp.asarray(temperature, jnp.float32)
  temperature = jnp.where(temperature > MIN_TEMPERATURE, temperature, 0.0)
  top_p = jnp.asarray(topp, jnp.float32)
  params = SamplingParams(
    temperature=jnp.broadcast_to(temperature, (batch,)),
    top_k=jnp.full((batch,), topk, jnp.int32),
    top_p=jnp.broadcast_to(jnp.where(top_p > 0, top_p, 1.0), (batch,)),
  )
  return params, greedy


def _are_concrete(*values: Any) -> bool:
  """Returns whether none of the arguments is traced."""
  return not any(isinstance(value, jax.core.Tracer) for value in values)


def _keys(rng: jax.Array | None, rows: int) -> jax.Array:
  """Derives a key for each row from T5X's key of the batch."""
  if rng is None:
    rng = jax.random.key(0)
  elif not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
    rng = jax.random.wrap_key_data(rng)
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(rows))


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
    ValueError: the module is of another kind.
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

  Add this function to `RestoreCheckpointConfig.state_transformation_fns`.

  Args:
    state: the contents of the target's checkpoint.
    wanted: not used; T5X gives the state that it restores into.
    checkpoint: the drafter's checkpoint, of any kind that `specdec_jax.load`
      reads.
    module: the drafter's module, as for `EncoderDecoderModel`'s `draft_module`.
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

  `t5x_plugin.EncoderDecoderModel` derives from this class and from T5X's class
  of that name.
  """

  decode_fn: Any  # the class of T5X has these attributes
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
    names = {'params': COLLECTION, 'params_axes': f'{COLLECTION}_axes'}
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
      flax_mutables: the collection with the drafter's parameters. T5X passes
        the collections of its train state to any function with an argument of
        this name.

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
    if not flax_mutables or COLLECTION not in flax_mutables:
      field = 'utils.RestoreCheckpointConfig.state_transformation_fns'
      advice = f'Restore it: {field} = [@t5x_plugin.restore_drafter].'
      expected = "the drafter's parameters"
      raise unexpected('flax_mutables', expected, None, advice)
    prompt = batch['decoder_input_tokens']
    # An end of sequence in a prompt would end the output.
    if prompt_with_targets:
      prompt = prompt * (prompt != eos_id)
    decodes, scores = self.decode_fn(
      inputs=prompt,
      cache={},
      tokens_to_logits=Pair(
        loop=self._loop,
        params=PairParams(params, flax_mutables[COLLECTION]),
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

  `t5x_plugin.InteractiveModel` derives from this class and from T5X's class of
  that name. T5X's class makes its `RestoreCheckpointConfig` itself and accepts
  no transformation for it, so this class adds the transformation when that
  attribute is set.
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
      *args: positional arguments of T5X's class.
      model: a `t5x_plugin.EncoderDecoderModel`.
      draft_checkpoint: path of the drafter's checkpoint.
      **kwargs: named arguments of T5X's class.
    """
    self._restore_drafter = functools.partial(
      restore_drafter,
      checkpoint=draft_checkpoint,
      module=model.draft_module,
      dtype=kwargs.get('dtype'),
    )
    super().__init__(*args, model=model, **kwargs)  # type: ignore[call-arg]

  def __setattr__(self, name: str, value: Any) -> None:
    if name == '_restore_checkpoint_cfg' and value is not None:
      value.state_transformation_fns = (
        *value.state_transformation_fns,
        self._restore_drafter,
      )
    super().__setattr__(name, value)


def check_decode_fn(decode_fn: Any) -> None:
  """Raises ValueError unless a decode function, as gin wraps it, speculates."""
  inner = decode_fn
  while isinstance(inner, functools.partial) or hasattr(inner, '__wrapped__'):
    is_wrapped = hasattr(inner, '__wrapped__')
    inner = inner.__wrapped__ if is_wrapped else inner.func
  if inner not in (temperature_sample, beam_search):
    expected = '@t5x_plugin.temperature_sample or @t5x_plugin.beam_search'
    got = getattr(inner, '__name__', inner)
    advice = "T5X's own functions do not speculate; its beam_search is default."
    raise unexpected('decode_fn', expected, got, advice)
