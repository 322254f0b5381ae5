"""Continuous batching on the device: B slots, and rows that come and go.

A `Pool` is a request and a state of B rows, each at its own position in its own
output. `read` reads the inputs of new rows, `RowLayout.admit` copies them into
free slots, and `run` makes rounds of the loop's own step until some rows are
finished. A new row in a slot changes no shape, so nothing recompiles.

The axis of an array that counts rows is the one that grows with the batch;
tracing two batch sizes shows which one that is. An array without such an axis,
such as a position bias, is the same for all rows. So this works for any
`Drafter` and `LanguageModel`.
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

_SHARED = None  # stands for the axis of rows in arrays that all rows share


@struct.dataclass
class Pool:
  """B rows that are being decoded.

  Attributes:
    request: the request of all rows. Its `prompt` is one token wide, whatever
      `prompt_length` is, because the prompts have been read.
    state: the state of the rows.
  """

  request: Request
  state: DecodeState


@struct.dataclass
class PoolView:
  """The arrays that the host reads between two runs of rounds.

  Attributes:
    generation: the output of the B rows so far, finished or not.
    num_rounds: int32[], rounds that ran.
    draft: the draft of the last round; None in the plain loop.
  """

  generation: Generation
  num_rounds: jax.Array
  draft: Draft | None = None

  @property
  def is_free(self) -> jax.Array:
    """bool[B], rows that are finished or never began."""
    return self.generation.finish_reason != FinishReason.RUNNING


def take_rows(request: Request, rows: np.ndarray) -> Request:
  """Returns the request with some of its rows; `rows` is int[K], indices."""
  return request.replace(**jax.tree.map(lambda leaf: leaf[rows], request.rows))


def read(loop: Loop, params: PairParams, request: Request) -> Pool:
  """Reads inputs and prompts; returns the rows, for `RowLayout.admit`."""
  state = loop.start(params, request)
  request = request.replace(
    prompt=request.prompt[:, :1],
    # The slots of the prompts now count as slots for tokens.
    slots=request.slots + request.prompt_width - 1,
  )
  return jax.tree.map(_typed, Pool(request, state))


def run(
  loop: Loop,
  params: PairParams,
  pool: Pool,
  max_rounds: jax.Array | int,
  enough: jax.Array,
  drafting: Drafting,
  greedy_only: bool = False,
) -> tuple[Pool, PoolView]:
  """Runs rounds of the loop's step until enough rows have finished.

  Args:
    loop: the loop, plain or speculative.
    params: the parameters of both models.
    pool: the rows; a finished row idles until it is replaced.
    max_rounds: int32[], the most rounds.
    enough: int32[], the number of rows that must finish; if fewer rows are
      running, all of these.
    drafting: the drafting of these rounds; its gamma is at most that of the
      pool's request.
    greedy_only: static, whether every running row is greedy, without
      `min_length` and log-probabilities. The program is then simpler than the
      pool's request asks for.

  Returns:
    The pool after the last round, and the host's view of it.

  Raises:
    ValueError: the thresholds of `drafting` were made for a smaller gamma.
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

  no_draft = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, pool.state)[1]
  )
  num_rounds, (state, draft) = lax.while_loop(
    going_on, one_round, (jnp.int32(0), (pool.state, no_draft))
  )
  generation = decode_state.generation(pool.request, state)
  return pool.replace(state=state), PoolView(generation, num_rounds, draft)


def _typed(leaf: jax.Array) -> jax.Array:
  """Drops a weak type, since a round drops it and would compile once more."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return leaf  # arrays of PRNG keys have no weak type
  return lax.convert_element_type(leaf, leaf.dtype)


class RowLayout:
  """The axis of rows of each array of a `Pool`."""

  def __init__(self, loop: Loop, params: PairParams, request: Request):
    """Traces `read` with rows of a request without prompts.

    Args:
      loop: the loop that decodes the pool.
      params: the parameters of both models.
      request: a request of placeholder rows, as many as are read together.

    Raises:
      ValueError: an array grows with the batch in two axes.
    """
    count = request.inputs.shape[0]

    def shapes(number: int) -> list[Any]:
      def read_rows(params, request):
        rows = take_rows(request, np.zeros((number,), np.int32))
        return read(loop, params, rows)

      return jax.tree.leaves(jax.eval_shape(read_rows, params, request))

    both = zip(shapes(count), shapes(2 * count), strict=True)
    self.axes = [_axis(a, b) for a, b in both]

  def admit(
    self, pool: Pool, rows: Pool, places: jax.Array, count: jax.Array
  ) -> Pool:
    """Copies rows into slots, in place if the pool is donated.

    Args:
      pool: the pool, whose rows in `places` are replaced.
      rows: K rows that were read, as wide as the pool.
      places: int32[B], the slots of the first `count` of these rows.
      count: int32[], number of rows to copy.
    """

    def copy_row(index, pool):
      def copied(axis, leaf, source):
        row = lax.dynamic_slice_in_dim(source, index, 1, axis)
        return lax.dynamic_update_slice_in_dim(leaf, row, places[index], axis)

      return self._changed(copied, pool, rows)

    return lax.fori_loop(0, count, copy_row, pool)

  def repeated(self, empty_row: Pool, batch: int) -> Pool:
    """Returns a pool of `batch` free slots, copies of a placeholder row."""
    return self._changed(
      lambda axis, leaf: jnp.repeat(leaf, batch, axis), empty_row
    )

  def widened(self, pool: Pool, empty_row: Pool) -> Pool:
    """Returns the pool with inputs as wide as those of `empty_row`."""
    return self._changed(_widened, pool, empty_row)

  def only(self, pool: Pool, rows: jax.Array) -> Pool:
    """Returns the pool with only its rows int32[K]."""
    return self._changed(lambda axis, leaf: jnp.take(leaf, rows, axis), pool)

  def _changed(self, change, pool: Pool, *others: Pool) -> Pool:
    """Applies change(axis, leaf, ...) to each leaf of a pool that has rows."""
    leaves, tree = jax.tree.flatten(pool)
    each = zip(self.axes, leaves, *map(jax.tree.leaves, others), strict=True)
    return tree.unflatten(
      leaf if axis is _SHARED else change(axis, leaf, *more)
      for axis, leaf, *more in each
    )


class PoolPrograms:
  """The jitted functions of one loop, with their parameters bound.

  All functions that return a pool place it as `read` does. Otherwise each
  program might place it differently over the devices, and the next program
  would be compiled again for each placement. On one device, it would be
  compiled again for each mixture of arrays from the host and from other
  programs. Each device has a whole copy of the host's view.

  Attributes:
    warm: keys of the kinds of rows for which all programs are compiled.
  """

  def __init__(self, loop: Loop, params: PairParams, example: Request):
    """Traces `read` with a request of placeholder rows, see `RowLayout`."""
    self.warm: set[Any] = set()
    self._layout = layout = RowLayout(loop, params, example)
    read_rows = functools.partial(read, loop)
    run_rounds = functools.partial(run, loop)
    # Both programs that run rounds share one trace.
    inner_run = jax.jit(run_rounds, static_argnums=5)

    def read_wide(params, request, empty_row):
      return layout.widened(read_rows(params, request), empty_row)

    def begun(params, request, max_rounds, drafting, greedy_only):
      pool, enough = read_rows(params, request), jnp.int32(1)
      return inner_run(params, pool, max_rounds, enough, drafting, greedy_only)

    def bound(function, **options):
      return functools.partial(jax.jit(function, **options), params)

    # `read` makes rows as wide as the pool, so that `admit` is one program.
    self.read = bound(read_wide)
    self._read_rows = bound(read_rows)
    copied = placed = jax.tree.leaves(params)[0].sharding
    if isinstance(placed, NamedSharding):
      copied = NamedSharding(placed.mesh, PartitionSpec())
      placed = shardings(self._read_rows(example))
    jit = functools.partial(jax.jit, out_shardings=placed)
    self._only = jax.jit(layout.only)
    self.repeated = jit(layout.repeated, static_argnums=1)
    self.smaller = jit(layout.only)
    self.widened = jit(layout.widened)
    # The pool is donated, so that it is updated in place.
    self.admit = jit(layout.admit, donate_argnums=0)
    view = {'out_shardings': (placed, copied)}
    self.run = bound(run_rounds, static_argnums=5, donate_argnums=1, **view)
    # `begin` reads a row into a pool of its own, and runs its first rounds.
    self.begin = bound(begun, static_argnums=4, **view)

  def empty_row(self, request: Request) -> Pool:
    """Reads a request of placeholder rows; returns a pool of one such row."""
    return self._only(self._read_rows(request), np.zeros((1,), np.int32))


def _axis(few: Any, many: Any) -> int | None:
  """Returns the axis in which two arrays differ; None if they do not."""
  differ = np.flatnonzero(np.not_equal(few.shape, many.shape)).tolist()
  if len(differ) > 1:
    expected = f'at most one axis of rows (twice as many: {many.shape})'
    raise unexpected('array of a state', expected, few.shape)
  return differ[0] if differ else _SHARED


def _widened(axis: int, leaf: jax.Array, row: jax.Array) -> jax.Array:
  """Pads `leaf` with the values of `row` to the size of `row`.

  The axis of rows keeps its size.

  Args:
    axis: the axis of rows.
    leaf: an array of rows.
    row: the same array of a single, wider row.
  """
  wide = jnp.repeat(row, leaf.shape[axis], axis)
  if wide.shape == leaf.shape:
    return leaf
  return lax.dynamic_update_slice(wide, leaf, (0,) * leaf.ndim)
