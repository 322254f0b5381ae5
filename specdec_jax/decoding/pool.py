"""Continuous batching on the device: B slots, and rows that come and go.

A `Pool` is a request and a state of B rows, each at its own place in its own
output. Rows that have read their inputs (`read`) are copied into free slots
(`RowLayout.admit`), and `run` does rounds of the loop's own step until some
rows are finished. A slot that gets another row changes no shape, so nothing
recompiles.

An array's axis of rows is the one that grows with the batch; it is found by
tracing two batch sizes. An array without such an axis, such as a position bias,
is the same for all rows. So this works for any `Drafter` and `LanguageModel`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.checks.fields import unexpected
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState
from specdec_jax.partitioning import shardings
from specdec_jax.request import Drafting, Request
from specdec_jax.types import Draft, FinishReason, Generation

_SHARED = None  # the axis of a leaf that belongs to no row


@struct.dataclass
class Pool:
  """B rows that are being decoded.

  Attributes:
    request: the request of each row; `prompt` is one token wide, because
      prompts have been read, whatever `prompt_length` is.
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
    draft: what was judged in the last round; None if nothing is.
  """

  generation: Generation
  num_rounds: jax.Array
  draft: Draft | None = None

  @property
  def is_free(self) -> jax.Array:
    """bool[B], rows that are finished, or never began."""
    return self.generation.finish_reason != FinishReason.RUNNING


def take_rows(request: Request, rows: np.ndarray) -> Request:
  """The request with only its rows int[K]; fields without rows stay as is."""
  return request.replace(**jax.tree.map(lambda leaf: leaf[rows], request.rows))


def read(loop: Loop, params: PairParams, request: Request) -> Pool:
  """Reads inputs and prompts; returns rows for `RowLayout.admit`."""
  state = loop.start(params, request)
  request = request.replace(
    prompt=request.prompt[:, :1],
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
  drafting: Drafting,
  greedy_only: bool = False,
) -> tuple[Pool, PoolView]:
  """Runs rounds of the loop's step, for as long as the host is not needed.

  Args:
    loop: plain or speculative.
    params: the parameters of both models.
    pool: the rows; a finished row idles until it is replaced.
    max_rounds: int32[], rounds after which the host looks in any case.
    enough: int32[], the host looks once this many rows have finished. If fewer
      rows are running, it looks once all of them have.
    drafting: of these rounds; its gamma is at most that of the pool's request.
    greedy_only: static, every running row is greedy, has no `min_length`, and
      its log-probabilities are not wanted, whatever the pool has room for.

  Returns:
    The pool after the last round, and what the host sees of it.

  Raises:
    ValueError: the drafting's rules were made for a smaller gamma.
  """
  drafting.check()
  request = pool.request.replace(drafting=drafting)
  if greedy_only:
    request = request.replace(
      greedy=True, forbids_stops=False, with_log_probs=False
    )
  live_before = jnp.sum(pool.state.running)
  enough = jnp.minimum(enough, live_before)

  def step(state):
    return loop.step(params, request, state)

  def going_on(carry):
    num_rounds, (state, _) = carry
    finished = live_before - jnp.sum(state.running)
    return (num_rounds < max_rounds) & (finished < enough)

  def one_round(carry):
    num_rounds, (state, _) = carry
    return num_rounds + 1, step(state)

  nothing = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, pool.state)[1]
  )
  num_rounds, (state, draft) = lax.while_loop(
    going_on, one_round, (jnp.int32(0), (pool.state, nothing))
  )
  generation = decode_state.generation(pool.request, state)
  view = PoolView(generation, num_rounds, draft)
  return pool.replace(state=state), view


def _typed(leaf: jax.Array) -> jax.Array:
  """The array without a weak type: a round would lose it, and so recompile."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return leaf  # keys
  return lax.convert_element_type(leaf, leaf.dtype)


class RowLayout:
  """The axis of each leaf of a `Pool` that counts the rows."""

  def __init__(self, loop: Loop, params: PairParams, request: Request):
    """Traces `read` on rows of a request without prompts; computes nothing.

    Args:
      loop: the loop whose state it is.
      params: the parameters of both models.
      request: a request of rows without text, as many as are read together.

    Raises:
      ValueError: an array grows with the batch in two axes.
    """
    shapes = functools.partial(jax.eval_shape, functools.partial(read, loop))
    few = shapes(params, request)
    twice = np.zeros((2 * request.inputs.shape[0],), np.int32)
    many = shapes(params, take_rows(request, twice))
    both = zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True)
    self.axes = [_axis(a, b) for a, b in both]

  def admit(
    self, pool: Pool, rows: Pool, places: jax.Array, count: jax.Array
  ) -> Pool:
    """Copies rows into slots, in place if the pool is donated.

    Args:
      pool: the pool; its rows in `places` are lost.
      rows: K rows that were read, as wide as the pool.
      places: int32[B], the slots that the first rows of the K go to.
      count: int32[], how many rows to copy.
    """

    def one(index, pool):
      def copied(axis, leaf, source):
        row = lax.dynamic_slice_in_dim(source, index, 1, axis)
        return lax.dynamic_update_slice_in_dim(leaf, row, places[index], axis)

      return self._changed(copied, pool, rows)

    return lax.fori_loop(0, count, one, pool)

  def repeated(self, empty_row: Pool, batch: int) -> Pool:
    """A pool of `batch` free slots."""
    return self._changed(
      lambda axis, leaf: jnp.repeat(leaf, batch, axis), empty_row
    )

  def widened(self, pool: Pool, empty_row: Pool) -> Pool:
    """The pool with room for longer inputs, as wide as those of `empty_row`."""
    return self._changed(_widened, pool, empty_row)

  def only(self, pool: Pool, rows: jax.Array) -> Pool:
    """The pool with only its rows int32[K]."""
    return self._changed(lambda axis, leaf: jnp.take(leaf, rows, axis), pool)

  def _changed(self, change, pool: Pool, *others: Pool) -> Pool:
    """The pool with change(axis, leaf, ...) of each leaf that has rows."""
    leaves, tree = jax.tree.flatten(pool)
    each = zip(self.axes, leaves, *map(jax.tree.leaves, others), strict=True)
    return tree.unflatten(
      leaf if axis is _SHARED else change(axis, leaf, *more)
      for axis, leaf, *more in each
    )


class PoolPrograms:
  """Jitted functions of one loop, with their parameters bound.

  Those that return a pool leave it where `read` put it. Otherwise each program
  might lay it out differently over the devices, and the next program would be
  compiled for that layout; or, on one device, for each mixture of arrays that
  the host has put there and others. The arrays that the host looks at are whole
  on each device.
  """

  def __init__(self, loop: Loop, params: PairParams, example: Request):
    """Takes the arguments of `RowLayout`; `example` is its `request`."""
    self._layout = layout = RowLayout(loop, params, example)
    read_rows = functools.partial(read, loop)
    run_rounds = functools.partial(run, loop)
    # Traced once for both programs that run rounds.
    inner_run = jax.jit(run_rounds, static_argnums=5)

    def read_wide(params, request, empty_row):
      return layout.widened(read_rows(params, request), empty_row)

    def begun(params, request, max_rounds, drafting, greedy_only):
      pool, enough = read_rows(params, request), jnp.int32(1)
      return inner_run(params, pool, max_rounds, enough, drafting, greedy_only)

    def bound(function, **options):
      return functools.partial(jax.jit(function, **options), params)

    # As wide as the pool, so that `admit` is one program for all widths.
    self.read = bound(read_wide)
    self._read_rows = bound(read_rows)
    placed: Any = jax.tree.leaves(params)[0].sharding
    whole = placed
    if isinstance(placed, NamedSharding):
      whole = NamedSharding(placed.mesh, PartitionSpec())
      placed = shardings(self._read_rows(example))
    pool: dict[str, Any] = {'out_shardings': placed}
    both: dict[str, Any] = {'out_shardings': (placed, whole)}
    self._only = jax.jit(layout.only)
    self.repeated = jax.jit(layout.repeated, static_argnums=1, **pool)
    self.smaller = jax.jit(layout.only, **pool)
    self.widened = jax.jit(layout.widened, **pool)
    # The pool is donated, so that it is updated in place.
    self.admit = jax.jit(layout.admit, donate_argnums=0, **pool)
    self.run = bound(run_rounds, static_argnums=5, donate_argnums=1, **both)
    # Reading and the first rounds of a row that has a pool of its own.
    self.begin = bound(begun, static_argnums=4, **both)

  def empty_row(self, request: Request) -> Pool:
    """One row that has read nothing; `request` must be of rows without text."""
    return self._only(self._read_rows(request), np.zeros((1,), np.int32))


def _axis(few: Any, many: Any) -> int | None:
  """The axis in which two shapes differ; None if they are equal."""
  differ = np.flatnonzero(np.not_equal(few.shape, many.shape)).tolist()
  if len(differ) > 1:
    expected = f'at most one axis of rows (twice as many: {many.shape})'
    raise unexpected('array of a state', expected, few.shape)
  return differ[0] if differ else _SHARED


def _widened(axis: int, leaf: jax.Array, row: jax.Array) -> jax.Array:
  """`leaf`, filled up from `row` to the size of `row` in all other axes."""
  whole = jnp.repeat(row, leaf.shape[axis], axis)
  if whole.shape == leaf.shape:
    return leaf
  return lax.dynamic_update_slice(whole, leaf, (0,) * leaf.ndim)
