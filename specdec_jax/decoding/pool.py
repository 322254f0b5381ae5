"""Continuous batching on the device: B slots, and rows that come and go.

A `Pool` is a request and a state of B rows, each at its own place in its own
output. Rows that have read their inputs (`read`) are copied into free slots
(`RowLayout.admit`), and `run` does rounds of the loops' own steps until some
rows are finished. No shape changes when a row does, so nothing recompiles.
`row_layout` knows where a row lies in all these arrays.
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
    request: what is asked of each; `prompt` is None, for it has been read, but
      `prompt_length` is there.
    state: how far they are.
  """

  request: Request
  state: DecodeState


@struct.dataclass
class PoolView:
  """What the host sees between two runs of rounds.

  Attributes:
    generation: of the B rows, finished or not.
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
  """The rows int[K] of a request; the other fields are those of the whole."""
  changes = {
    name: getattr(request, name)[rows]
    for name in _BATCHED
    if getattr(request, name) is not None
  }
  temperature = request.sampling.temperature[rows]
  sampling = request.sampling.replace(temperature=temperature)
  return request.replace(**changes, sampling=sampling)


def read(loop: Loop, params: PairParams, request: Request) -> Pool:
  """Reads inputs and prompts: rows as `RowLayout.admit` takes them."""
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
  """Rounds of the loop's step, for as long as the host is not needed.

  Args:
    loop: plain or speculative.
    params: of both models.
    pool: the rows; a finished one idles until it is replaced.
    max_rounds: int32[], after which the host looks in any case.
    enough: int32[], rows that must have finished for the host to be asked.
      Where fewer are running it is asked when all have.
    gamma: static, proposals a round; at most those the pool has room for.

  Returns:
    The pool behind the last round, and what the host sees of it.
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

  It reads their inputs again, and all that they have as if it were a prompt.
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
  """Without a weak type, which a round would lose and compile anew for."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return leaf  # keys
  return lax.convert_element_type(leaf, leaf.dtype)
