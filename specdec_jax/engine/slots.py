"""The slots of a pool: who has which, and what the device is told to do.

Both who decodes a batch of texts (`pool_run`) and who serves texts that come at
any time (`serving.scheduler`) direct their slots by this.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from specdec_jax.decoding.pool import Pool, PoolView, take_rows
from specdec_jax.decoding.row_layout import PoolPrograms
from specdec_jax.decoding.state import Request
from specdec_jax.types import FinishReason

# (speculative, with prompts, rows without text) -> the programs for these.
Compiled = Callable[[bool, bool, Request], PoolPrograms]
_Owner = TypeVar('_Owner', bound=Hashable)


@dataclasses.dataclass
class Group(Generic[_Owner]):
  """Rows that were read together, and how many of them have had a slot.

  Attributes:
    rows: whose rows they are.
    staged: the rows as read, which `RowLayout.admit` copies into slots.
    width: width of the inputs that the staged rows have room for.
    taken: how many of the rows have had a slot.
  """

  rows: Sequence[_Owner]
  staged: Any
  width: int
  taken: int = 0

  @property
  def left(self) -> int:
    """How many rows wait for a slot."""
    return len(self.rows) - self.taken


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
    """Runs nothing; call `begin`.

    Args:
      compiled: gives the programs.
      request: any request of the kind that will be read, on the host.
      num_slots: T, slots of the caches.
      room: the largest gamma that the caches have slots for.
      read_rows: rows that are read together, for tracing.
    """
    self._compiled, self._request = compiled, request
    self._num_slots, self._room = num_slots, room
    self._read_rows = read_rows
    self._empty_rows: dict[tuple[bool, int], Pool] = {}
    self._unread: tuple[Request, bool] | None = None  # see `hold`
    self.owners: list[_Owner | None] = []

  def begin(self, size: int, width: int, speculative: bool) -> None:
    """Makes a pool of `size` free slots, for inputs of this width."""
    self.width = self._pool_width = width
    self.owners = [None] * size
    self._use(speculative)
    row = self._empty_row(width)
    self._pool: Pool = self._programs.repeated(row, size)

  def _use(self, speculative: bool) -> None:
    """Chooses the loop's programs."""
    self._speculative = speculative
    prompted = self._request.prompt is not None
    example = self._example(self._request.inputs.shape[1])
    self._programs = self._compiled(speculative, prompted, example)

  @property
  def _static(self) -> dict[str, int]:
    """What gives all requests without prompts the same number of slots."""
    gamma = self._room if self._speculative else 0
    slots: int = self._request.replace(gamma=gamma).draft_slots
    return {'gamma': gamma, 'slots': self._num_slots - slots}

  def _example(self, width: int) -> Request:
    """Rows without text, as many as are read together."""
    static = self._static
    static['slots'] -= 1
    count = self._read_rows
    rows: Any = take_rows(self._request, np.zeros((count,), np.int32))
    return rows.replace(
      inputs=np.full((count, width), rows.pad_id, np.int32),
      max_length=np.zeros((count,), np.int32),
      prompt=None,
      prompt_length=None,
      **static,
    )

  def _empty_row(self, width: int) -> Pool:
    key = self._speculative, width
    if key not in self._empty_rows:
      row = self._programs.empty_row(self._example(width))
      self._empty_rows[key] = row
    return self._empty_rows[key]

  def read(
    self, request: Request, rows: Sequence[_Owner], plainly: bool = False
  ) -> Group[_Owner]:
    """Begins to read rows, for `admit`.

    Args:
      request: of these rows, and perhaps more to fill it up; inputs and prompts
        are as wide as they are to be read.
      rows: their owners.
      plainly: whether only the target reads them: greedy rows that will not be
        drafted for. What is proposed to them all the same is rarely accepted.
    """
    request = self._in_slots(request)
    self.width = max(self.width, request.inputs.shape[1])
    empty = self._empty_row(self.width)
    programs = self._programs
    read = programs.read_plainly if plainly else programs.read
    staged = read(request, empty)
    return Group(rows, staged, self.width)

  def admit(self, group: Group[_Owner]) -> list[_Owner]:
    """Gives free slots to the next rows of a group; returns their owners."""
    self._widen(group.width)
    empty = self._empty_row(group.width)
    free = self.free[: group.left]
    places = np.zeros((len(self.owners),), np.int32)
    places[: len(free)] = free
    first, count = group.taken, len(free)
    self._pool = self._programs.admit(
      self._pool, group.staged, empty, np.int32(first), places, np.int32(count)
    )
    rows = list(group.rows[first : first + count])
    for slot, row in zip(free, rows, strict=True):
      self.owners[slot] = row
    group.taken += count
    return rows

  def hold(
    self, request: Request, owner: _Owner, plainly: bool = False
  ) -> None:
    """Gives a row the slot of a pool of one; the next `run` reads it.

    That pool is the row itself, as wide as its input. What is here and in
    `run` one call would be three with `read` and `admit`, and a copy.

    Args:
      request: of this row, as for `read`.
      owner: the row's.
      plainly: as for `read`.
    """
    self._unread = self._in_slots(request), plainly
    self.owners = [owner]

  def _in_slots(self, request: Request) -> Request:
    """The request, of as many slots as all others have."""
    static = self._static
    static['slots'] -= request.prompt_width
    return request.replace(**static)

  def _widen(self, width: int) -> None:
    """Makes room for inputs of this width."""
    if width > self._pool_width:
      empty = self._empty_row(width)
      self._pool = self._programs.widened(self._pool, empty)
      self._pool_width = width

  @property
  def free(self) -> list[int]:
    """The slots without an owner."""
    return [slot for slot, row in enumerate(self.owners) if row is None]

  @property
  def running(self) -> list[int]:
    """The slots with an owner."""
    return [slot for slot, row in enumerate(self.owners) if row is not None]

  def keep(self, kept: Sequence[int]) -> None:
    """Keeps only the slots `kept`, in a pool of their number."""
    self.owners = [self.owners[slot] for slot in kept]
    self._pool = self._programs.smaller(self._pool, np.array(kept, np.int32))

  def resize(self, size: int) -> None:
    """Moves the rows to a pool of another size, in which they must fit."""
    if size == len(self.owners):
      return
    self._widen(self.width)
    running = self.running
    free = size - len(running)
    self.keep([*running, *[0] * free])
    # What is in the new slots is another row's copy.
    self.owners[len(running) :] = [None] * free
    reasons = np.full((size,), FinishReason.RUNNING, np.int32)
    reasons[len(running) :] = FinishReason.LENGTH
    self.set_reasons(reasons)

  def clear(self) -> None:
    """Frees all slots, whoever has them."""
    size = len(self.owners)
    self.owners = [None] * size
    self.set_reasons(np.full((size,), FinishReason.LENGTH, np.int32))

  def give_drafter(self) -> None:
    """Goes on speculatively with rows that were decoded plainly."""
    self._use(True)
    self._empty_row(self.width)  # says where these programs leave a pool
    self._pool = self._programs.with_drafter(self._pool, self._room)

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
