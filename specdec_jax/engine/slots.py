"""A pool of rows on the device, and the row that owns each of its slots.

A slot is one index along the batch axis of the pool's arrays. To read a row is
to prefill it: to run the models over its input and prompt.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.pool import Pool, PoolPrograms, PoolView, take_rows
from specdec_jax.engine.request import Row
from specdec_jax.request import Drafting, Request, keys_of_rows
from specdec_jax.types import FinishReason


class Slots:
  """A pool on the device, and the row that owns each of its slots.

  Attributes:
    owners: the row that owns each slot; None if the slot is free.
    programs: the compiled programs of the pool.
    width: the width to which inputs are padded; it only grows.
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
      programs: returns the pool's programs, given a request of `read_rows`
        placeholder rows, which have no text.
      request: any request of the kind that will be read, with arrays on the
        host.
      tokens: the cache slots of a row for its prompt and output.
      room: the largest gamma; the caches have room for its draft beside
        `tokens`.
      read_rows: the number of rows that are read together.
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
    self._pool: Any = None  # `_make` makes the pool when it is needed

  def _example(self, width: int) -> Request:
    """Makes a request of `read_rows` placeholder rows, which have no text."""
    count = self._read_rows
    # Integers replace the keys, because JAX would compile a program to index
    # keys, and keep it.
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
    """Returns the request with as many cache slots as the pool's rows have."""
    made = request.with_drafting(gamma=self._gamma)
    return made.replace(slots=self._tokens - request.prompt_width)

  def admit(self, request: Request, rows: Sequence[Row]) -> None:
    """Reads rows and gives them free slots.

    Args:
      request: the request of these rows, and after them of rows that only fill
        up the batch; inputs and prompts are padded.
      rows: the rows that get the slots.
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
    """Gives a row the slot of a pool of one; the next `run` reads the row.

    The row becomes the whole pool, which is as wide as its input. `hold` and
    `run` call one program on the device, while `admit` and `run` call three and
    copy the row.

    Args:
      request: the request of this row; its input and prompt are padded.
      owner: the row that gets the slot.
    """
    self._unread = self._in_slots(request)
    self.width = max(self.width, request.inputs.shape[1])
    self.owners = [owner]

  def _make(self) -> None:
    """Makes the pool if there is none, and widens its inputs to `width`."""
    if self._pool is None:
      empty = self._empty_row(self._pool_width)
      self._pool = self.programs.repeated(empty, len(self.owners))
    # The width doubles at each step, so that there are few programs.
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
    # Each free slot holds a copy of some row, which must not run.
    reasons = np.full((size,), FinishReason.RUNNING, np.int32)
    reasons[len(taken) :] = FinishReason.LENGTH
    self.set_reasons(reasons)

  def run(
    self, max_rounds: int, enough: int, drafting: Drafting, simply: bool
  ) -> PoolView:
    """Starts the next rounds on the device; returns the host's view of them.

    Args:
      max_rounds: the most rounds.
      enough: the number of finished rows that ends the rounds early.
      drafting: how many tokens these rounds propose, and what ends a draft.
      simply: whether all running rows are greedy and need neither
        log-probabilities nor `min_length`.
    """
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
    """Sets the finish reasons, int32[B], of all rows; RUNNING rows go on."""
    state = self._pool.state.with_reasons(reasons)
    self._pool = dataclasses.replace(self._pool, state=state)

  def release(self, view: PoolView) -> list[tuple[Row, int]]:
    """Frees the slots of finished rows; returns (owner, slot) of each."""
    done = [(row, slot) for slot, row in self.taken if view.is_free[slot]]
    for _, slot in done:
      self.owners[slot] = None
    return done
