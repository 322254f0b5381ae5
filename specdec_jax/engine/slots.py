"""Slots: a pool of rows on the device, and the owner of each of its slots."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.pool import Pool, PoolPrograms, PoolView, take_rows
from specdec_jax.engine.request import Row
from specdec_jax.request import Drafting, Request, keys_of_rows
from specdec_jax.types import FinishReason


class Slots:
  """A pool on the device, and the owner of each of its slots.

  Attributes:
    owners: the owner of each slot; None if it is free.
    programs: what runs on the device.
    width: width of the inputs that rows are read with; it only grows.
  """

  def __init__(
    self,
    programs: Callable[[Request], PoolPrograms],
    request: Request,
    tokens: int,
    room: int,
    read_rows: int,
  ):
    """Gets the pool's programs; `begin` makes the slots.

    Args:
      programs: returns the pool's programs, given as many rows without text as
        are read together.
      request: any request of the kind that will be read, on the host.
      tokens: slots of the caches for prompts and outputs.
      room: the largest gamma; the caches have further slots for its draft.
      read_rows: rows that are read together, for tracing.
    """
    self._request, self._read_rows = request, read_rows
    self._gamma, self._tokens = room, tokens
    # The request that `hold` leaves for the next `run`.
    self._unread: Request | None = None
    self.programs = programs(self._example(request.inputs.shape[1]))
    self._empty_rows: dict[int, Pool] = {}
    self.owners: list[Row | None] = []

  def begin(self, size: int, width: int) -> None:
    """Makes `size` free slots, for inputs of this width."""
    self.width = self._pool_width = width
    self.owners = [None] * size
    self._pool: Any = None  # the pool is made when it is needed

  def _example(self, width: int) -> Request:
    """Makes rows without text, as many as are read together."""
    count = self._read_rows
    # JAX compiles each operation on keys outside a program, and keeps it.
    request = self._request.replace(keys=np.zeros((1,), np.uint32))
    nothing = np.zeros((count,), np.int32)
    rows = take_rows(request, nothing)
    return self._in_slots(rows.replace(prompt=rows.prompt[:, :1])).replace(
      keys=keys_of_rows(*np.zeros((2, count), np.uint32)),
      inputs=np.full((count, width), rows.pad_id, np.int32),
      max_length=nothing,
      prompt_length=nothing + 1,
    )

  def _empty_row(self, width: int) -> Pool:
    if width not in self._empty_rows:
      self._empty_rows[width] = self.programs.empty_row(self._example(width))
    return self._empty_rows[width]

  def _in_slots(self, request: Request) -> Request:
    """Returns the request with the cache slots of the pool's other rows."""
    made = request.with_drafting(gamma=self._gamma)
    return made.replace(slots=self._tokens - request.prompt_width)

  def admit(self, request: Request, rows: Sequence[Row]) -> None:
    """Reads rows and gives them free slots.

    Args:
      request: the request of these rows, and of others that fill it up; inputs
        and prompts are padded to the width at which they are read.
      rows: the owners of the slots.
    """
    self.width = max(self.width, request.inputs.shape[1])
    self._make()
    empty, free = self._empty_row(self.width), self.free[: len(rows)]
    read = self.programs.read(self._in_slots(request), empty)
    places = np.zeros((len(self.owners),), np.int32)
    places[: len(free)] = free
    count = np.int32(len(free))
    self._pool = self.programs.admit(self._pool, read, places, count)
    for slot, row in zip(free, rows, strict=True):
      self.owners[slot] = row

  def hold(self, request: Request, owner: Row) -> None:
    """Gives a row the slot of a pool of one; the next `run` reads it.

    The pool becomes the row itself, as wide as its input: `hold` and `run` are
    one call of the device, where `admit` and `run` are three and a copy.

    Args:
      request: the request of this row, see `admit`.
      owner: the owner of the slot.
    """
    self._unread = self._in_slots(request)
    self.width = max(self.width, request.inputs.shape[1])
    self.owners = [owner]

  def _make(self) -> None:
    """Makes the pool, unless there is one, with room for inputs of `width`."""
    if self._pool is None:
      empty = self._empty_row(self._pool_width)
      self._pool = self.programs.repeated(empty, len(self.owners))
    # Step by step, so that there are few programs.
    while self.width > self._pool_width:
      self._pool_width = min(2 * self._pool_width, self.width)
      empty = self._empty_row(self._pool_width)
      self._pool = self.programs.widened(self._pool, empty)

  @property
  def free(self) -> list[int]:
    """The slots without an owner."""
    return [slot for slot, row in enumerate(self.owners) if row is None]

  @property
  def taken(self) -> list[tuple[int, Row]]:
    """The slots with an owner, and their owners."""
    return [(i, row) for i, row in enumerate(self.owners) if row is not None]

  def resize(self, size: int) -> None:
    """Moves the rows to a pool of another size, in which they must fit."""
    self._make()
    taken = self.taken
    free = size - len(taken)
    places = np.array([*(slot for slot, _ in taken), *[0] * free], np.int32)
    self._pool = self.programs.smaller(self._pool, places)
    self.owners = [*(row for _, row in taken), *[None] * free]
    # Each new slot holds a copy of another row, which must not run.
    reasons = np.full((size,), FinishReason.RUNNING, np.int32)
    reasons[len(taken) :] = FinishReason.LENGTH
    self.set_reasons(reasons)

  def run(
    self, max_rounds: int, enough: int, drafting: Drafting, simply: bool
  ) -> PoolView:
    """Starts the next rounds on the device, see `decoding.pool.run`."""
    rounds = np.int32(max_rounds)
    if self._unread is not None:
      request, self._unread = self._unread, None
      self._pool, view = self.programs.begin(request, rounds, drafting, simply)
      self._pool_width = request.inputs.shape[1]
    else:
      limits = rounds, np.int32(enough)
      run = self.programs.run
      self._pool, view = run(self._pool, *limits, drafting, simply)
    return view

  def set_reasons(self, reasons: np.ndarray) -> None:
    """Ends rows: the finish reason of each, int32[B]."""
    state = self._pool.state.with_reasons(reasons)
    self._pool = dataclasses.replace(self._pool, state=state)

  def release(self, view: PoolView) -> list[tuple[Row, int]]:
    """Frees the slots of finished rows; returns (owner, slot) of each."""
    done = [(row, slot) for slot, row in self.taken if view.is_free[slot]]
    for _, slot in done:
      self.owners[slot] = None
    return done
