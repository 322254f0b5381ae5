"""Continuous batching on the device: B slots, and rows that come and go.

A `Pool` is a request and a state of B rows, each at its own place in its own
output. Rows that have read their inputs (`read`) are copied into free slots
(`RowLayout.admit`), and `run` does rounds of the loop's own step until some
rows are finished. A slot that gets another row changes no shape, so nothing
recompiles. `row_layout` knows where a row lies in all these arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.types import FinishReason, Generation

_BATCHED = (
  'inputs',
  'keys',
  'min_length',
  'max_length',
  'prompt',
  'prompt_length',
)


@struct.dataclass
class Pool:
  """B rows that are being decoded.

  Attributes:
    request: the request of each row; `prompt` is None, because prompts have
      been read, but `prompt_length` is there.
    state: how far the rows are.
  """

  request: Request
  state: DecodeState


@struct.dataclass
class PoolView:
  """What the host sees between two runs of rounds.

  Attributes:
    generation: the output of the B rows so far, finished or not.
    num_rounds: int32[], rounds that ran.
    live_rounds: int32[], the sum over these rounds of the rows that were not
      finished.
  """

  generation: Generation
  num_rounds: jax.Array
  live_rounds: jax.Array

  @property
  def is_free(self) -> jax.Array:
    """bool[B], rows that are finished, or never began."""
    return self.generation.finish_reason != FinishReason.RUNNING


def take_rows(request: Request, rows: np.ndarray) -> Request:
  """The request with only its rows int[K]; fields without rows stay as is."""
  changes = {
    name: getattr(request, name)[rows]
    for name in _BATCHED
    if getattr(request, name) is not None
  }
  temperature = request.sampling.temperature[rows]
  sampling = request.sampling.replace(temperature=temperature)
  return request.replace(**changes, sampling=sampling)


def read(loop: Loop, params: PairParams, request: Request) -> Pool:
  """Reads inputs and prompts; returns rows for `RowLayout.admit`."""
  state = loop.start(params, request)
  request = request.replace(
    prompt=None,
    prompt_length=jnp.zeros_like(request.max_length) + request.first_length,
    # The slots of the prompts count as room for tokens now.
    slots=request.slots + request.prompt_width - 1,
  )
  return jax.tree.map(_typed, Pool(request, state))


def run(
  loop: Loop,
  params: PairParams,
  pool: Pool,
  max_rounds: jax.Array,
  enough: jax.Array,
  gamma: int,
) -> tuple[Pool, PoolView]:
  """Runs rounds of the loop's step, for as long as the host is not needed.

  Args:
    loop: plain or speculative.
    params: the parameters of both models.
    pool: the rows; a finished row idles until it is replaced.
    max_rounds: int32[], rounds after which the host looks in any case.
    enough: int32[], the host looks once this many rows have finished. If fewer
      rows are running, it looks once all of them have.
    gamma: static, proposals per round; at most as many as the pool has room
      for.

  Returns:
    The pool after the last round, and what the host sees of it.
  """
  request = pool.request.replace(gamma=gamma)
  live_before = jnp.sum(pool.state.running)
  enough = jnp.minimum(enough, live_before)

  def going_on(carry):
    num_rounds, _, state = carry
    finished = live_before - jnp.sum(state.running)
    return (num_rounds < max_rounds) & (finished < enough)

  def one_round(carry):
    num_rounds, live_rounds, state = carry
    live_rounds += jnp.sum(state.running, dtype=jnp.int32)
    return num_rounds + 1, live_rounds, loop.step(params, request, state)

  zero = jnp.int32(0)
  num_rounds, live_rounds, state = lax.while_loop(
    going_on, one_round, (zero, zero, pool.state)
  )
  generation = decode_state.generation(pool.request, state)
  view = PoolView(generation, num_rounds, live_rounds)
  return pool.replace(state=state), view


def with_drafter(loop: Loop, params: PairParams, pool: Pool, gamma: int):
  """Gives a drafter to rows that the plain loop has decoded so far.

  The drafter reads the rows' inputs, and all their tokens so far as if these
  were a prompt.
  """
  request, state = pool.request, pool.state
  if loop.drafter is None:
    raise ValueError('with_drafter needs a loop with a drafter.')
  slots = request.cache_slots
  known = state.tokens[:, :slots]
  drafter_state = loop.drafter.init(params.draft, request.inputs, slots, known)
  histogram = state.stats.histogram
  more = gamma + 1 - histogram.shape[1]
  histogram = jnp.pad(histogram, ((0, 0), (0, more)))
  state = state.replace(
    drafter_state=drafter_state,
    stats=state.stats.replace(histogram=histogram),
  )
  # The caches keep their slots.
  request = request.replace(gamma=gamma, slots=slots - gamma - 1)
  return Pool(request, state)


def _typed(leaf: jax.Array) -> jax.Array:
  """The array without a weak type: a round would lose it, and so recompile."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return leaf  # keys
  return lax.convert_element_type(leaf, leaf.dtype)
