"""Where a row lies in the arrays of a `Pool`, and how it is put there.

An array's axis of rows is the one that grows with the batch; it is found by
tracing two batch sizes. An array without such an axis, such as a position bias,
is the same for all rows. So this works for any `Drafter` and `LanguageModel`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.decoding import pool as decode_pool
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.pool import Pool
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.models import backend

_SHARED = None  # the axis of a leaf that belongs to no row


class RowLayout:
  """The axis of each leaf of a `Pool` that counts the rows.

  A target's cache that has read no prompt holds nothing in its slots: these
  leaves are not copied from the rows that were read, but emptied.
  """

  def __init__(
    self, loop: Loop, params: PairParams, request: Request, prompted: bool
  ):
    """Traces `read` on rows of a request without prompts; computes nothing.

    Args:
      loop: the loop whose state it is.
      params: the parameters of both models.
      request: a request of rows without text, as many as are read together.
      prompted: whether rows will have prompts.

    Raises:
      ValueError: an array grows with the batch in two axes.
    """
    size = request.inputs.shape[0]

    def leaves(batch):
      rows = decode_pool.take_rows(request, np.zeros((batch,), np.int32))
      read = functools.partial(decode_pool.read, loop)
      pool = jax.eval_shape(read, params, rows)
      return jax.tree.leaves(pool), pool

    few, pool = leaves(size)
    many, _ = leaves(2 * size)
    self.axes = [_axis(a, b) for a, b in zip(few, many, strict=True)]
    empty = Pool(
      jax.tree.map(lambda _: False, pool.request),
      jax.tree.map(lambda _: False, pool.state).replace(
        target_cache=self._has_slots(loop, params, request)
      ),
    )
    self.empty = [
      is_empty and not prompted and axis is not _SHARED
      for is_empty, axis in zip(jax.tree.leaves(empty), self.axes, strict=True)
    ]

  @staticmethod
  def _has_slots(loop, params, request):
    """Whether each leaf of the target's cache has an axis of slots."""

    # Of a tree several nodes share a place of the sequence.
    most = {} if request.tree is None else {'longest': request.longest}

    def cache(size):
      return jax.eval_shape(
        lambda params, inputs: loop.target.prefill(
          params, inputs, size, **most
        ),
        params.target,
        request.inputs,
      )

    size = request.cache_slots
    return jax.tree.map(
      lambda a, b: a.shape != b.shape, cache(size), cache(size - 1)
    )

  def without_drafter(self, pool: Pool, empty_row: Pool) -> Pool:
    """The rows as if their drafter had read nothing; so it need not.

    `empty_row` is at least as wide as the rows.
    """
    empty = self.repeated(empty_row, pool.request.inputs.shape[0]).state
    drafter_state = jax.tree.map(
      lambda leaf, none: none[tuple(map(slice, leaf.shape))],
      pool.state.drafter_state,
      empty.drafter_state,
    )
    state = pool.state.replace(drafter_state=drafter_state)
    return pool.replace(state=state)

  def staged(self, pool: Pool, empty_row: Pool) -> tuple[jax.Array, ...]:
    """The leaves that `admit` copies, as wide as those of `empty_row`."""
    parts = zip(
      jax.tree.leaves(pool),
      jax.tree.leaves(empty_row),
      self.axes,
      self.empty,
      strict=True,
    )
    return tuple(
      _widened(leaf, row, axis)
      for leaf, row, axis, is_empty in parts
      if axis is not _SHARED and not is_empty
    )

  def admit(
    self,
    pool: Pool,
    staged: tuple[jax.Array, ...],
    empty_row: Pool,
    first: jax.Array,
    places: jax.Array,
    count: jax.Array,
  ) -> Pool:
    """Copies rows into slots, in place if the pool is donated.

    Args:
      pool: the pool; its rows in `places` are lost.
      staged: leaves of K rows, from `staged`.
      empty_row: a row that has read nothing.
      first: int32[], the first of the K rows to copy.
      places: int32[B], the slots that this row and the ones after it go to.
      count: int32[], how many rows to copy.
    """
    leaves, tree = jax.tree.flatten(pool)
    empty = jax.tree.leaves(empty_row)

    def one(index, leaves):
      rest = iter(staged)
      return [
        leaf
        if axis is _SHARED
        else _copied(leaf, places[index], row, 0, axis)
        if is_empty
        else _copied(leaf, places[index], next(rest), first + index, axis)
        for leaf, row, axis, is_empty in zip(
          leaves, empty, self.axes, self.empty, strict=True
        )
      ]

    return tree.unflatten(lax.fori_loop(0, count, one, leaves))

  def repeated(self, empty_row: Pool, batch: int) -> Pool:
    """A pool of `batch` free slots."""
    leaves, tree = jax.tree.flatten(empty_row)
    return tree.unflatten(
      leaf if axis is _SHARED else jnp.repeat(leaf, batch, axis)
      for leaf, axis in zip(leaves, self.axes, strict=True)
    )

  def widened(self, pool: Pool, empty_row: Pool) -> Pool:
    """The pool with room for longer inputs, as wide as those of `empty_row`."""
    leaves, tree = jax.tree.flatten(pool)
    return tree.unflatten(
      leaf if axis is _SHARED else _widened(leaf, row, axis)
      for leaf, row, axis in zip(
        leaves, jax.tree.leaves(empty_row), self.axes, strict=True
      )
    )

  def only(self, pool: Pool, rows: jax.Array) -> Pool:
    """The pool with only its rows int32[K]."""
    leaves, tree = jax.tree.flatten(pool)
    return tree.unflatten(
      leaf if axis is _SHARED else jnp.take(leaf, rows, axis)
      for leaf, axis in zip(leaves, self.axes, strict=True)
    )


class PoolPrograms:
  """Jitted functions of one loop, with their parameters bound."""

  def __init__(
    self, loop: Loop, params: PairParams, example: Request, prompted: bool
  ):
    """Takes the arguments of `RowLayout`; `example` is its `request`."""
    layout = RowLayout(loop, params, example, prompted)
    read = functools.partial(decode_pool.read, loop)
    run = functools.partial(decode_pool.run, loop)
    # Traced once for both programs that run rounds.
    inner_run = jax.jit(run, static_argnums=(4, 5))

    def staged(params, request, empty_row):
      return layout.staged(read(params, request), empty_row)

    def staged_plainly(params, request, empty_row):
      pool = layout.without_drafter(read(params, request), empty_row)
      return layout.staged(pool, empty_row)

    def begun(params, request, empty_row, max_rounds, gamma, simply, ends):
      pool = read(params, request)
      if empty_row is not None:
        pool = layout.without_drafter(pool, empty_row)
      enough = jnp.int32(1)
      return inner_run(params, pool, max_rounds, enough, gamma, simply, ends)

    def bound(function, **options):
      told = backend.compiler_options()
      jitted = jax.jit(function, compiler_options=told, **options)
      return functools.partial(jitted, params)

    self.read, self.read_plainly = bound(staged), bound(staged_plainly)
    self._only = jax.jit(layout.only)
    self._with_drafter = functools.partial(decode_pool.with_drafter, loop)
    self._read_rows = bound(read)
    self._layout, self._bound = layout, bound
    self._run, self._begun = run, begun
    self._held = False
    device = jax.tree.leaves(params)[0].sharding
    if not isinstance(device, NamedSharding):
      self._hold(device, device)

  def empty_row(self, request: Request) -> Pool:
    """One row that has read nothing; `request` must be of rows without text."""
    rows = self._read_rows(request)
    placed = jax.tree.map(lambda leaf: leaf.sharding, rows)
    kinds = [s for s in jax.tree.leaves(placed) if isinstance(s, NamedSharding)]
    if kinds and not self._held:
      self._hold(placed, NamedSharding(kinds[0].mesh, PartitionSpec()))
    return self._only(rows, np.zeros((1,), np.int32))

  def _hold(self, placed: Any, whole: Any) -> None:
    """Makes the programs that return a pool leave it where it was.

    Otherwise each program might lay the pool out differently over the devices,
    and the next program would be compiled for that layout; or, on one device,
    for each mixture of arrays that the host has put there and others. The
    arrays that the host looks at are whole on each device.
    """
    self._held = True
    pool: dict[str, Any] = {'out_shardings': placed}
    both: dict[str, Any] = {'out_shardings': (placed, whole)}
    layout = self._layout
    self.repeated = jax.jit(layout.repeated, static_argnums=1, **pool)
    self.smaller = jax.jit(layout.only, **pool)
    self.widened = jax.jit(layout.widened, **pool)
    self.with_drafter = self._bound(
      self._with_drafter, static_argnums=2, **pool
    )
    # The pool is donated, so that it is updated in place.
    self.admit = jax.jit(layout.admit, donate_argnums=0, **pool)
    self.run = self._bound(
      self._run,
      static_argnums=(4, 5),
      donate_argnums=1,
      **both,
    )
    # Reading and the first rounds of a row that has a pool of its own.
    self.begin = self._bound(self._begun, static_argnums=(4, 5), **both)


def _axis(few: Any, many: Any) -> int | None:
  """The axis in which two shapes differ; None if they are equal."""
  differ = [
    axis
    for axis, sizes in enumerate(zip(few.shape, many.shape, strict=True))
    if sizes[0] != sizes[1]
  ]
  if len(differ) > 1:
    raise ValueError(
      f'An array of shape {few.shape} has shape {many.shape} for twice as many'
      ' rows: an array of a state must have at most one axis of rows.'
    )
  return differ[0] if differ else _SHARED


def _widened(leaf: jax.Array, row: jax.Array, axis: int) -> jax.Array:
  """`leaf`, filled up from `row` to the size of `row` in all other axes."""
  if leaf.shape == (
    *row.shape[:axis],
    leaf.shape[axis],
    *row.shape[axis + 1 :],
  ):
    return leaf
  whole = jnp.repeat(row, leaf.shape[axis], axis)
  return lax.dynamic_update_slice(whole, leaf, (0,) * leaf.ndim)


def _copied(leaf, slot, source, row, axis):
  """`leaf` with its row `slot` replaced by a row of `source`."""
  new = lax.dynamic_slice_in_dim(source, row, 1, axis)
  return lax.dynamic_update_slice_in_dim(leaf, new, slot, axis)
