"""The slots of a pool on the device, and which row has which slot."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from specdec_jax.decoding.pool import Pool, PoolPrograms, PoolView, take_rows
from specdec_jax.decoding.state import Request
from specdec_jax.types import FinishReason

# (rows without text, as many as are read together; whether rows have prompts)
# -> the programs for these.
Compiled = Callable[[Request, bool], PoolPrograms]
_Owner = TypeVar('_Owner', bound=Hashable)


class Slots(Generic[_Owner]):
  """A pool on the device, and the owner of each of its slots.

  Attributes:
    owners: the owner of each slot; None if it is free.
    width: width of the inputs that rows are read with; it only grows.
  """

  def __init__(
    self,
    compiled: Compiled,
    request: Request,
    num_slots: int,
    room: int,
    read_rows: int,
  ):
    """Makes no slots; call `begin`.

    Args:
      compiled: gives the programs.
      request: any request of the kind that will be read, on the host.
      num_slots: T, slots of the caches.
      room: the largest gamma that the caches have slots for.
      read_rows: rows that are read together, for tracing.
    """
    self._request, self._read_rows = request, read_rows
    # These give all requests without prompts the same number of slots.
    draft_slots: int = request.replace(gamma=room).draft_slots
    self._gamma, self._tokens = room, num_slots - draft_slots
    self._empty_rows: dict[int, Pool] = {}
    self._unread: tuple[Request, bool] | None = None  # see `hold`
    example = self._example(request.inputs.shape[1])
    self._programs = compiled(example, request.prompt is not None)
    self.owners: list[_Owner | None] = []

  def begin(self, size: int, width: int) -> None:
    """Makes `size` free slots, for inputs of this width."""
    self.width = self._pool_width = width
    self.owners = [None] * size
    self._pool: Any = None  # until it is needed

  def _example(self, width: int) -> Request:
    """Rows without text, as many as are read together."""
    count = self._read_rows
    rows: Any = take_rows(self._request, np.zeros((count,), np.int32))
    return rows.replace(
      inputs=np.full((count, width), rows.pad_id, np.int32),
      max_length=np.zeros((count,), np.int32),
      prompt=None,
      prompt_length=None,
      gamma=self._gamma,
      slots=self._tokens - 1,
    )

  def _empty_row(self, width: int) -> Pool:
    if width not in self._empty_rows:
      row = self._programs.empty_row(self._example(width))
      self._empty_rows[width] = row
    return self._empty_rows[width]

  def _in_slots(self, request: Request) -> Request:
    """The request, with the cache slots that all others have."""
    return request.replace(
      gamma=self._gamma, slots=self._tokens - request.prompt_width
    )

  def admit(
    self, request: Request, rows: Sequence[_Owner], plainly: bool = False
  ) -> None:
    """Reads rows and gives them free slots.

    Args:
      request: of these rows, and perhaps more to fill it up; inputs and prompts
        are as wide as they are to be read.
      rows: their owners.
      plainly: whether only the target reads them: greedy rows that will not be
        drafted for. What is proposed to them all the same is rarely accepted.
    """
    self.width = max(self.width, request.inputs.shape[1])
    empty = self._empty_row(self.width)
    programs = self._programs
    self._make()
    self._widen()
    read = programs.read_plainly if plainly else programs.read
    staged = read(self._in_slots(request), empty)
    free = self.free[: len(rows)]
    places = np.zeros((len(self.owners),), np.int32)
    places[: len(free)] = free
    self._pool = programs.admit(
      self._pool, staged, empty, places, np.int32(len(free))
    )
    for slot, row in zip(free, rows, strict=True):
      self.owners[slot] = row

  def hold(
    self, request: Request, owner: _Owner, plainly: bool = False
  ) -> None:
    """Gives a row the slot of a pool of one; the next `run` reads it.

    The pool becomes the row itself, as wide as its input: `hold` and `run` are
    one call of the device, where `admit` and `run` are three and a copy.

    Args:
      request: of this row, as for `admit`.
      owner: the row's.
      plainly: as for `admit`.
    """
    self._unread = self._in_slots(request), plainly
    self.width = max(self.width, request.inputs.shape[1])
    self.owners = [owner]

  def _make(self) -> None:
    """Makes the pool, unless there is one."""
    if self._pool is None:
      empty = self._empty_row(self._pool_width)
      self._pool = self._programs.repeated(empty, len(self.owners))

  def _widen(self) -> None:
    """Makes room for inputs that are as wide as those that were read."""
    if self.width > self._pool_width:
      empty = self._empty_row(self.width)
      self._pool = self._programs.widened(self._pool, empty)
      self._pool_width = self.width

  @property
  def free(self) -> list[int]:
    """The slots without an owner."""
    return [slot for slot, row in enumerate(self.owners) if row is None]

  @property
  def rows(self) -> list[_Owner]:
    """The rows that have a slot."""
    return [row for row in self.owners if row is not None]

  def resize(self, size: int) -> None:
    """Moves the rows to a pool of another size, in which they must fit."""
    if size == len(self.owners):
      return
    self._make()
    self._widen()
    running = [slot for slot, row in enumerate(self.owners) if row is not None]
    free = size - len(running)
    places = np.array([*running, *[0] * free], np.int32)
    self._pool = self._programs.smaller(self._pool, places)
    self.owners = [*self.rows, *[None] * free]
    # The new slots hold copies of another row.
    reasons = np.full((size,), FinishReason.RUNNING, np.int32)
    reasons[len(running) :] = FinishReason.LENGTH
    self.set_reasons(reasons)

  def run(
    self,
    max_rounds: int,
    enough: int,
    gamma: int,
    simply: bool = False,
    ends: Any = None,
  ) -> PoolView:
    """Starts the next rounds on the device, see `decoding.pool.run`."""
    rounds, finished = np.int32(max_rounds), np.int32(enough)
    if self._unread is not None:
      (request, plainly), self._unread = self._unread, None
      empty = self._empty_row(self.width) if plainly else None
      self._pool, view = self._programs.begin(
        request, empty, rounds, gamma, simply, ends
      )
      self._pool_width = request.inputs.shape[1]
      return view
    self._pool, view = self._programs.run(
      self._pool, rounds, finished, gamma, simply, ends
    )
    return view

  def set_reasons(self, reasons: np.ndarray) -> None:
    """Ends rows: the finish reason of each, int32[B]."""
    state = self._pool.state.with_reasons(reasons)
    self._pool = dataclasses.replace(self._pool, state=state)

  def release(self, view: PoolView) -> list[tuple[_Owner, int]]:
    """Frees the slots of finished rows; returns (owner, slot) of each."""
    done = []
    for slot, is_free in enumerate(view.is_free):
      row = self.owners[slot]
      if is_free and row is not None:
        done.append((row, slot))
        self.owners[slot] = None
    return done
