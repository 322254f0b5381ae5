"""Bytes, counted from shapes: what a run holds, and what a call must move.

Nothing here makes an array of a model: parameters and caches are known from
`jax.eval_shape`, so that a pair that does not fit is refused before it loads.
"""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import partitioning
from specdec_jax.bench import settings
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models import kv_cache
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.t5 import T5
from specdec_jax.probs import SamplingConfig

GIB = 2**30

# What cross-attention's keys and values were made with, once, by `prefill`.
ONCE = ('encoder_decoder_attention/key/', 'encoder_decoder_attention/value/')


class DoesNotFitError(ValueError):
  """A run needs more memory than the device has."""


def tree_bytes(tree: Any) -> int:
  """Bytes of all leaves, arrays or `ShapeDtypeStruct`s; keys count nothing."""
  return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _leaf_bytes(leaf: Any) -> int:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return 0
  return int(np.prod(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize


def param_shapes(
  network: LanguageModel, placement: partitioning.Placement
) -> Params:
  """`ShapeDtypeStruct`s of a model's parameters as `placement` lays them."""

  def init():
    return partitioning.place(network.init(jax.random.key(0)), placement)

  return jax.eval_shape(init)


def param_bytes(network: LanguageModel, dtype: str = 'float32') -> int:
  """Bytes of a model's parameters in `dtype`."""
  return tree_bytes(param_shapes(network, partitioning.Placement(dtype)))


def cache_bytes(
  network: LanguageModel, batch: int, input_len: int, num_slots: int
) -> int:
  """Bytes of a model's caches.

  Args:
    network: whose computation's dtype is that of its caches.
    batch: B.
    input_len: E.
    num_slots: T, such as `Request.cache_slots`.
  """
  inputs = jax.ShapeDtypeStruct((batch, input_len), jnp.int32)

  def prefill(inputs):
    params = network.init(jax.random.key(0))
    return network.prefill(params, inputs, num_slots)

  return tree_bytes(jax.eval_shape(prefill, inputs))


def request_shapes(
  batch: int, input_len: int, decode_len: int, gamma: int, greedy: bool
) -> Request:
  """A `Request` whose arrays are `ShapeDtypeStruct`s.

  Args:
    batch: B.
    input_len: E.
    decode_len: tokens of a run at most.
    gamma: proposals a round; 0 for the plain loop.
    greedy: temperature 0; else any other.
  """

  def make():
    per_row = jnp.zeros((batch,), jnp.int32)
    return Request(
      inputs=jnp.zeros((batch, input_len), jnp.int32),
      keys=jax.random.split(jax.random.key(0), batch),
      sampling=SamplingConfig(temperature=0.0 if greedy else 1.0).params(batch),
      stop_ids=jnp.zeros((4,), jnp.int32),
      min_length=per_row,
      max_length=per_row,
      slots=decode_len,
      gamma=gamma,
      greedy=greedy,
    )

  return jax.eval_shape(make)


class CallBytes(NamedTuple):
  """Bytes that one call of a T5's decoder must move at least.

  Attributes:
    weights: every parameter of the decoder but those that cross-attention's
      keys and values were made with, and the output layer.
    embeddings: the rows of the call's tokens.
    self_attention: keys and values of the bucket attended to, the mean over a
      run that fills its slots.
    cross_attention: keys and values of the input.
    written: keys and values of the call's tokens.
  """

  weights: int
  embeddings: int
  self_attention: int
  cross_attention: int
  written: int

  @property
  def total(self) -> int:
    """All of them."""
    return sum(self)


def call_bytes(
  network: T5, params: Params, request: Request, num_tokens: int = 1
) -> CallBytes:
  """Counts what one call of a T5's decoder must move.

  Args:
    network: the model.
    params: its parameters as placed, arrays or `ShapeDtypeStruct`s.
    request: batch, input and slots of the run.
    num_tokens: m, tokens a row that the call reads.
  """
  flat = flax.traverse_util.flatten_dict(params['decoder'], sep='/')
  weights = sum(
    _leaf_bytes(leaf)
    for name, leaf in flat.items()
    if not any(part in name for part in ONCE)
  )
  table = params['token_embedder']['embedding']
  config = network.config
  if config.logits_via_embedding:
    weights += _leaf_bytes(table)
  batch, width = request.inputs.shape
  sizes = kv_cache.buckets(request.cache_slots)
  attended = [
    min(size for size in sizes if size >= position + num_tokens)
    for position in range(request.slots)
  ]
  itemsize = jnp.dtype(config.dtype).itemsize
  head_width = config.num_heads * config.head_dim
  per_slot = 2 * config.num_decoder_layers * head_width * itemsize * batch
  row = table.shape[1] * jnp.dtype(table.dtype).itemsize
  return CallBytes(
    weights=weights,
    embeddings=batch * num_tokens * row,
    self_attention=per_slot * sum(attended) // len(attended),
    cross_attention=per_slot * width,
    written=per_slot * num_tokens,
  )


def draft_round_bytes(network: T5, params: Params, request: Request) -> int:
  """Bytes that gamma proposals of a small model move.

  One call over the last two committed tokens and gamma - 1 over one; see
  `drafters.small_model`.
  """
  first, other = (
    call_bytes(network, params, request, size).total for size in (2, 1)
  )
  return first + (request.gamma - 1) * other


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run whose memory is to be known before anything is loaded.

  Attributes:
    target: the model that decides.
    draft: the model that proposes; None for plain decoding.
    batch: B.
    input_len: E.
    decode_len: tokens of a run at most.
    gamma: proposals a round; 0 without a draft.
    greedy: temperature 0.
    param_dtype: of the parameters on the device.

  Raises:
    ValueError: a number is too small.
  """

  target: T5
  draft: T5 | None = None
  batch: int = 1
  input_len: int = 128
  decode_len: int = 128
  gamma: int = 4
  greedy: bool = True
  param_dtype: str = 'float32'

  def __post_init__(self):
    settings.check_at_least(self, batch=1, input_len=1, decode_len=1, gamma=0)


def plan_bytes(plan: Plan) -> dict[str, int]:
  """What a run holds on the device, part by part.

  The working set is an estimate from the largest arrays of a step and of the
  encoder; all else is exact but for a device's padding. What loading holds
  beside it, such as a checkpoint in the host's memory, is not counted.

  Returns:
    name of the part -> bytes.
  """
  request = request_shapes(
    plan.batch,
    plan.input_len,
    plan.decode_len,
    0 if plan.draft is None else plan.gamma,
    plan.greedy,
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
  caches = {
    'target caches': tree_bytes(state.target_cache),
    'draft caches': tree_bytes(state.drafter_state),
  }
  rest = tree_bytes((state, request)) - sum(caches.values())
  return {
    'target parameters': tree_bytes(target),
    'draft parameters': tree_bytes(draft),
    **caches,
    'working set': rest + _working_set(plan, request),
  }


def _working_set(plan: Plan, request: Request) -> int:
  """Bytes of the largest temporaries, of a step or of an encoder."""
  # Logits of a call as they come, masked, standardised and as logarithms.
  rows = 4 * (request.gamma + 1)
  if not plan.greedy:
    rows += 2 * request.gamma  # the draft's distributions, stacked
  step = 4 * plan.batch * rows * plan.target.vocab_size
  networks = [plan.target] + ([plan.draft] if plan.draft else [])
  return max(step, *(_encoder_bytes(plan, network) for network in networks))


def _encoder_bytes(plan: Plan, network: T5) -> int:
  config = network.config
  scores = config.num_heads * plan.input_len**2
  # The relative bias, shared by the batch; scores, weights and a temporary of
  # the softmax between them for each row.
  attention = 4 * scores * (1 + 3 * plan.batch)
  width = (len(config.mlp_activations) + 1) * config.mlp_dim
  hidden = 4 * plan.batch * plan.input_len * (width + 2 * config.emb_dim)
  return attention + hidden


def device_bytes(device: jax.Device | None = None) -> int | None:
  """Bytes that the device's memory has for this process.

  Args:
    device: the first one unless given.

  Returns:
    Of an accelerator the limit of its allocator, None if it names none; of a
    CPU the machine's memory.
  """
  device = device or jax.devices()[0]
  if device.platform != 'cpu':
    return (device.memory_stats() or {}).get('bytes_limit')
  try:
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (AttributeError, OSError, ValueError):
    return None  # not a Unix


def check_fits(plan: Plan, limit: int | None) -> dict[str, int]:
  """Refuses a run that the device's memory cannot hold.

  Args:
    plan: the run.
    limit: bytes that there are, as `device_bytes` says; None is not known and
      refuses nothing.

  Returns:
    What `plan_bytes` counts.

  Raises:
    DoesNotFitError: more is needed; it says what of.
  """
  parts = plan_bytes(plan)
  needed = sum(parts.values())
  if limit is not None and needed > limit:
    listed = ', '.join(f'{name} {gib(size)}' for name, size in parts.items())
    raise DoesNotFitError(
      f'This run needs {gib(needed)} of memory and the device has'
      f' {gib(limit)}: {listed}. Take bfloat16 parameters, smaller models, a'
      ' smaller batch, or shorter inputs and outputs.'
    )
  return parts


def gib(size: int) -> str:
  """Bytes as text, in GiB, or MiB below a tenth of one."""
  return (
    f'{size / GIB:.2f} GiB' if size >= GIB / 10 else f'{size / 2**20:.2f} MiB'
  )
