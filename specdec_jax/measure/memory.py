"""Bytes, counted from shapes: what a run holds, and what a call must move.

No array of a model is made here: the shapes of parameters and caches come from
`jax.eval_shape`, so that a pair that does not fit is refused before it loads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp

from specdec_jax import partitioning
from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.memory import DoesNotFitError, array_bytes, gib
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request, new_request
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models import kv_cache, sizes
from specdec_jax.models.base import (
  LanguageModel,
  Params,
  read_prompt,
  reads_encoder,
)
from specdec_jax.probs import SamplingConfig

# Kernels of cross-attention's keys and values, which only `prefill` reads.
_ONCE = ('encoder_decoder_attention/key/', 'encoder_decoder_attention/value/')
_ENCODER = 'encoder/'
_WIDENED = 'float32 of parameters'  # a part of a plan
_TABLE = 'embedder/embedding'  # tokens or positions; a call reads some rows


def tree_bytes(tree: Any) -> int:
  """Bytes of all leaves, arrays or `ShapeDtypeStruct`s, except PRNG keys."""
  return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _leaf_bytes(leaf: Any) -> int:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return 0
  return array_bytes(leaf.shape, leaf.dtype)


def param_shapes(
  network: LanguageModel, placement: partitioning.Placement
) -> Params:
  """`ShapeDtypeStruct`s of a model's parameters, laid out by `placement`."""

  def init():
    return partitioning.place(network.init(jax.random.key(0)), placement)

  return jax.eval_shape(init)


def request_shapes(
  batch: int,
  input_len: int,
  decode_len: int,
  gamma: int,
  greedy: bool,
  has_encoder: bool = True,
) -> Request:
  """A `Request` whose arrays are `ShapeDtypeStruct`s.

  Args:
    batch: B.
    input_len: E.
    decode_len: the most tokens of a run.
    gamma: proposals per round; 0 for the plain loop.
    greedy: whether the temperature is 0.
    has_encoder: whether the target has an encoder; without one the E tokens of
      the input are a prompt, after the start token.
  """

  def make():
    prompts: dict[str, Any] = {}
    if not has_encoder:
      prompts['prompt'] = jnp.zeros((batch, 1 + input_len), jnp.int32)
      prompts['prompt_length'] = jnp.zeros((batch,), jnp.int32)
    return new_request(
      jnp.zeros((batch, input_len if has_encoder else 1), jnp.int32),
      jax.random.split(jax.random.key(0), batch),
      SamplingConfig(temperature=0.0 if greedy else 1.0),
      slots=decode_len,
      gamma=gamma,
      **prompts,
    )

  return jax.eval_shape(make)


class CallBytes(NamedTuple):
  """The least bytes that one call of a decoder must move.

  Attributes:
    weights: the output layer, and every parameter of the decoder except the
      kernels of cross-attention's keys and values.
    embeddings: the rows of the call's tokens, and of their positions if these
      are learned.
    self_attention: keys and values of the bucket that is attended to, as a mean
      over a run that fills its slots.
    cross_attention: keys and values of the input; 0 without an encoder.
    written: keys and values of the call's tokens.
  """

  weights: int
  embeddings: int
  self_attention: int
  cross_attention: int
  written: int

  @property
  def total(self) -> int:
    """The sum of all of these."""
    return sum(self)


def call_bytes(
  network: LanguageModel, params: Params, request: Request, num_tokens: int = 1
) -> CallBytes:
  """Counts what one call of a decoder must move.

  Args:
    network: the model, whose cache is a `KVCache`.
    params: its parameters as placed, arrays or `ShapeDtypeStruct`s.
    request: batch, input or prompt, and slots of the run.
    num_tokens: m, tokens per row that the call reads.
  """
  tables = [
    leaf
    for name, leaf in _flat(params).items()
    if _TABLE in name and not name.startswith(_ENCODER)
  ]
  encoded = None
  if reads_encoder(network):
    alone: Any = network
    width = alone.config.encoded_dim
    encoded = jax.ShapeDtypeStruct((*request.inputs.shape, width), jnp.float32)
  cache: kv_cache.KVCache = jax.eval_shape(
    lambda params, inputs, encoded: read_prompt(
      network,
      params,
      inputs,
      request.cache_slots,
      longest=request.longest,
      encoded=encoded,
    ),
    params,
    request.inputs,
    encoded,
  )
  sizes = kv_cache.buckets(request.cache_slots)
  first = request.prompt_width - 1
  attended = [
    min(size for size in sizes if size >= position + num_tokens)
    for position in range(first, first + request.slots)
  ]
  slots = (cache.keys, cache.values, cache.joined)
  per_slot = tree_bytes(slots) // cache.num_slots
  rows = sum(_leaf_bytes(table) // table.shape[0] for table in tables)
  return CallBytes(
    weights=tree_bytes(decoder_weights(params)),
    embeddings=request.inputs.shape[0] * num_tokens * rows,
    self_attention=per_slot * sum(attended) // len(attended),
    cross_attention=tree_bytes((cache.cross_keys, cache.cross_values)),
    written=per_slot * num_tokens,
  )


def decoder_weights(params: Params) -> list[Any]:
  """The parameters that each call of a decoder reads completely.

  That excludes the encoder and the kernels of cross-attention's keys and
  values, and a table of embeddings unless it is also the output layer.
  """
  flat = _flat(params)
  weights = [
    leaf
    for name, leaf in flat.items()
    if not name.startswith(_ENCODER)
    and _TABLE not in name
    and not any(part in name for part in _ONCE)
  ]
  if not any('logits_dense/' in name for name in flat):
    weights.append(_token_table(flat))
  return weights


def _flat(params: Params) -> dict[str, Any]:
  """Names such as 'decoder/layers_0/mlp/wo/kernel' -> leaf."""
  return flax.traverse_util.flatten_dict(params, sep='/')


def _token_table(flat: dict[str, Any]) -> Any:
  """The decoder's table [V, M] of token embeddings, wherever it is kept."""
  (table,) = (
    leaf
    for name, leaf in flat.items()
    if f'token_{_TABLE}' in name and not name.startswith(_ENCODER)
  )
  return table


def draft_round_bytes(
  network: LanguageModel, params: Params, request: Request
) -> int:
  """Bytes that gamma proposals of a small model move.

  That is one call over the last two committed tokens and gamma - 1 calls over
  one token; see `drafters.small_model`.
  """
  first, other = (
    call_bytes(network, params, request, size).total for size in (2, 1)
  )
  return first + (request.gamma - 1) * other


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run whose memory is counted before anything is loaded.

  Attributes:
    target: the model that decides.
    draft: the model that proposes; None for plain decoding.
    batch: B.
    input_len: E; without an encoder the prompt's tokens after the start token.
    decode_len: the most tokens of a run.
    gamma: proposals per round; ignored without a draft.
    greedy: whether the temperature is 0.
    param_dtype: dtype of the parameters on the device.

  Raises:
    ValueError: a number is too small.
  """

  target: LanguageModel
  draft: LanguageModel | None = None
  batch: int = 1
  input_len: int = 128
  decode_len: int = 128
  gamma: int = 4
  greedy: bool = True
  param_dtype: str = 'float32'

  def __post_init__(self):
    check_types(self)
    check_at_least(self, batch=1, input_len=1, decode_len=1, gamma=0)


def plan_bytes(plan: Plan) -> dict[str, int]:
  """What a run holds on the device, part by part.

  The working set is an estimate from the largest arrays of a step, and of the
  encoder (or else the decoder) that reads the input. 'float32 of parameters' is
  what a CPU makes of bfloat16 for a loop. Everything else is exact, except for
  padding by the device. Memory that only loading needs, such as a checkpoint in
  the host's memory, is not counted.

  Returns:
    Name of the part -> bytes.

  Raises:
    ValueError: prompt, output and draft need more slots than a model has
      positions.
  """
  request = request_shapes(
    plan.batch,
    plan.input_len,
    plan.decode_len,
    0 if plan.draft is None else plan.gamma,
    plan.greedy,
    plan.target.has_encoder,
  )
  placement = partitioning.Placement(plan.param_dtype)
  target = param_shapes(plan.target, placement)
  if plan.draft is None:
    start = functools.partial(autoregressive.start, plan.target)
    state = jax.eval_shape(start, target, request)
    draft = None
  else:
    draft = param_shapes(plan.draft, placement)
    start = functools.partial(
      speculative.start, plan.target, small_model(plan.draft)
    )
    state = jax.eval_shape(start, PairParams(target, draft), request)
  widened = sizes.widened_bytes(plan.target, plan.param_dtype)
  reading = _reading_bytes(plan.target, target, state.target_cache, request)
  if plan.draft is not None:
    own = _reading_bytes(plan.draft, draft, state.drafter_state, request)
    reading = max(reading, own)
    widened += sizes.widened_bytes(plan.draft, plan.param_dtype)
  caches = {
    'target caches': tree_bytes(state.target_cache),
    'draft caches': tree_bytes(state.drafter_state),
  }
  rest = tree_bytes((state, request)) - sum(caches.values())
  return {
    'target parameters': tree_bytes(target),
    'draft parameters': tree_bytes(draft),
    **caches,
    _WIDENED: widened,
    'working set': rest + _working_set(plan, request, reading),
  }


def _working_set(plan: Plan, request: Request, reading: int) -> int:
  """Bytes of the largest temporaries, of a step or of reading the input."""
  # Four forms of a call's logits: raw, masked, standardised, as logarithms.
  rows = 4 * (request.gamma + 1)
  if not plan.greedy:
    rows += 2 * request.gamma  # the draft's distributions, stacked
  return max(4 * plan.batch * rows * plan.target.vocab_size, reading)


def _reading_bytes(
  network: LanguageModel, params: Params, cache: Any, request: Request
) -> int:
  """Bytes of the largest temporaries of an encoder, or of reading a prompt."""
  flat = _flat(params)
  emb_dim = _token_table(flat).shape[1]
  # Heads of queries; several may share one of the cache's.
  config = getattr(network, 'config', None)
  heads = getattr(config, 'num_heads', cache.num_heads)
  hidden = sum(  # kernels of one feed-forward block
    leaf.size
    for name, leaf in flat.items()
    if 'decoder/layers_0/mlp/' in name and 'kernel' in name
  )
  per_token = hidden // emb_dim + 2 * emb_dim
  batch, input_len = request.inputs.shape
  encoder = 0
  if network.has_encoder and not reads_encoder(network):
    scores = heads * input_len**2
    # The relative bias, shared by the batch; and for each row the scores, the
    # weights and a temporary array of the softmax between them.
    encoder = scores * (1 + 3 * batch) + batch * input_len * per_token
  read = batch * (request.prompt_width - 1)
  # Scores over all slots. Each row is at its own place and has its own bias.
  biases = cache.position_bias[0].shape[0]
  prompt = read * (request.cache_slots * (biases + 3 * heads) + per_token)
  return 4 * max(encoder, prompt)


def check_fits(plan: Plan, limit: int | None) -> dict[str, int]:
  """Raises an error for a run that the device's memory cannot hold.

  Args:
    plan: the run.
    limit: free bytes of the device, from `device_bytes`; None is unknown, and
      never raises.

  Returns:
    The result of `plan_bytes`.

  Raises:
    DoesNotFitError: more is needed; the message lists what needs how much.
  """
  parts = plan_bytes(plan)
  needed = sum(parts.values())
  if limit is not None and needed > limit:
    other = 'float32' if parts[_WIDENED] else 'bfloat16'
    listed = ', '.join(f'{name} {gib(size)}' for name, size in parts.items())
    raise DoesNotFitError(
      f'This run needs {gib(needed)} of memory and the device has'
      f' {gib(limit)} free: {listed}. Take {other} parameters, smaller models,'
      ' a smaller batch, or shorter inputs and outputs.'
    )
  return parts
