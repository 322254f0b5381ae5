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

from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.fallback import Fallback
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import encoded_for
from specdec_jax.types import Draft, FinishReason, Generation, LengthRule

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
    draft: what was judged in the last round; None if nothing is.
  """

  generation: Generation
  num_rounds: jax.Array
  live_rounds: jax.Array
  draft: Draft | None = None

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
  if request.stop_ids.ndim > 1:
    changes['stop_ids'] = request.stop_ids[rows]
  sampling = jax.tree.map(
    lambda leaf: leaf[rows] if leaf.ndim else leaf, request.sampling
  )
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
  simply: bool = False,
  ends: tuple[LengthRule | None, Fallback | None] | None = None,
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
    simply: static, every running row is greedy, has no `min_length`, and its
      log-probabilities are not wanted, whatever the pool has room for.
    ends: the rule and the fallback of these rounds, made for `gamma`; None is
      those of the rows, made for theirs.

  Returns:
    The pool after the last round, and what the host sees of it.

  Raises:
    ValueError: the rule or the fallback was made for another gamma, so that it
      would be read past its end.
  """
  request = pool.request.replace(gamma=gamma)
  if ends is not None:
    rule, fallback = ends
    request = request.replace(rule=rule, fallback=fallback)
  most = request.rule.most if request.rule is not None else gamma
  if request.fallback is not None:
    most = min(most, len(request.fallback.costs) - 1)
  if gamma > most:
    raise ValueError(
      f'gamma = {gamma}: expected at most {most}, which the rule and the'
      ' fallback of these rounds were made for. Give `ends` of this gamma.'
    )
  if simply:
    request = request.replace(
      greedy=True, forbids_stops=False, with_log_probs=False
    )
  live_before = jnp.sum(pool.state.running)
  enough = jnp.minimum(enough, live_before)

  def step(state):
    return loop.step(params, request, state)

  def going_on(carry):
    num_rounds, _, (state, _) = carry
    finished = live_before - jnp.sum(state.running)
    return (num_rounds < max_rounds) & (finished < enough)

  def one_round(carry):
    num_rounds, live_rounds, (state, _) = carry
    live_rounds += jnp.sum(state.running, dtype=jnp.int32)
    return num_rounds + 1, live_rounds, step(state)

  zero = jnp.int32(0)
  nothing = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, pool.state)[1]
  )
  num_rounds, live_rounds, (state, draft) = lax.while_loop(
    going_on, one_round, (zero, zero, (pool.state, nothing))
  )
  generation = decode_state.generation(pool.request, state)
  view = PoolView(generation, num_rounds, live_rounds, draft)
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
  inputs = request.inputs
  encoded = encoded_for(loop.drafter, loop.target, params.target, inputs)
  drafter_state = loop.drafter.begin(
    params.draft, inputs, slots, known, encoded
  )
  features = None
  if loop.drafter.reads_features:
    # The plain loop did not keep any. From the next round on there are some.
    features = speculative.no_features(
      loop.target, params.target, state.target_cache
    )
  histogram = state.stats.histogram
  more = gamma + 1 - histogram.shape[1]
  # The caches keep their slots.
  request = request.replace(gamma=gamma, tree=loop.drafter.tree)
  request = request.replace(slots=slots - request.draft_slots - 1)
  nothing = jnp.zeros_like(state.stats.num_accepted)
  stats = state.stats.replace(
    histogram=jnp.pad(histogram, ((0, 0), (0, more))),
    num_passed=nothing if request.judges_blocks else None,
  )
  state = state.replace(
    drafter_state=drafter_state, stats=stats, features=features
  )
  return Pool(request, state)


def _typed(leaf: jax.Array) -> jax.Array:
  """The array without a weak type: a round would lose it, and so recompile."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return leaf  # keys
  return lax.convert_element_type(leaf, leaf.dtype)
