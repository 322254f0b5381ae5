"""One run of many texts through a pool of slots, as the host directs it.

Texts queue, slots are filled as rows finish, completions come out. While the
device decodes, the host prepares the next texts and turns finished tokens into
text. Its decisions depend only on the texts and on the device's answers, never
on a clock, so that all hosts of a run decide alike.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.decoding.pool import PoolView, take_rows
from specdec_jax.decoding.state import whole_buckets
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.schedule import PoolSettings, PoolStats, Queue
from specdec_jax.engine.slots import Compiled, Group, Slots
from specdec_jax.engine.text_batch import STOP_STRING_ROUNDS, Ends, TextBatch


@dataclasses.dataclass(frozen=True)
class Rehearsal:
  """A short run to compile a batch's programs: a few texts, one token each.

  Attributes:
    rows: rows of the batch that take part.
    size: slots of the pool; the rehearsal uses no other pool.
  """

  rows: Sequence[int]
  size: int


class PoolRun:
  """One run of a batch's texts through the slots."""

  def __init__(
    self,
    compiled: Compiled,
    batch: TextBatch,
    settings: PoolSettings,
    max_decode_len: int,
    rehearsal: Rehearsal | None = None,
  ):
    """Decides shapes and order.

    Args:
      compiled: gives the programs.
      batch: the texts; its gamma is the default one, 0 for the plain loop.
      settings: how the texts go through the slots.
      max_decode_len: tokens of an output that the caches have room for.
      rehearsal: decodes only the rows of this rehearsal; None is all texts.
    """
    if batch.options.stop_strings:
      few = min(settings.max_rounds, STOP_STRING_ROUNDS)
      settings = dataclasses.replace(settings, max_rounds=few)
    settings = settings.in_multiples_of(batch.batch_multiple)
    self._batch, self._settings = batch, settings
    self.stats = PoolStats()
    rows: Sequence[int] = range(len(batch.rows))
    request: Any = batch.request
    host = jax.tree.map(np.asarray, request.replace(keys=None))
    if rehearsal is not None:
      rows = rehearsal.rows
      host = host.replace(max_length=np.ones_like(host.max_length))
    self._request: Any = host.replace(keys=request.keys)
    self._gammas = {settings.rows: batch.request.gamma}
    self._ends: Mapping[int, Ends] = {}  # of the rows themselves
    if settings.gammas is not None and batch.request.gamma:
      self._gammas = dict(settings.gammas)
      self._ends = settings.ends or {}
    most = max(self._gammas.values())  # that there is room for
    tokens = host.prompt_width + max_decode_len
    room = host.replace(gamma=most).draft_slots
    self._num_slots = whole_buckets(tokens + room)  # of the caches
    # The largest pool, unless all fit into a smaller one.
    sizes = [size for size in self._gammas if size >= len(rows)]
    self._size = min(sizes, default=max(self._gammas))
    self._sizes = list(self._gammas)
    if rehearsal is not None:
      self._size, self._sizes = rehearsal.size, [rehearsal.size]
    settings = dataclasses.replace(settings, rows=self._size)
    self._refill = min(settings.refill or max(1, self._size // 8), self._size)
    self._queue = Queue(self._request, rows, settings, batch.batch_multiple)
    self._staged: collections.deque[Group[int]] = collections.deque()
    self._slots: Slots[int] = Slots(
      compiled,
      self._request,
      self._num_slots,
      most,
      self._queue.read_rows,
    )
    self._since: dict[int, float] = {}  # row -> when it got its slot
    self._answered: float | None = None

  @property
  def shapes(self) -> Any:
    """The shapes that decide which programs are needed."""
    rows = [row for group in self._queue.groups for row in group]
    buckets = tuple(sorted({self._queue.bucket(row) for row in rows}))
    tree = jax.tree.structure(self._request)
    return tree, buckets, self._num_slots, self._size

  def rehearsals(self) -> list[Rehearsal]:
    """Small runs that together use every program of the first pool.

    There is one for each width; the last has texts of all widths.
    """
    bucket, size = self._queue.bucket, self._size
    rows = [row for group in self._queue.groups for row in group]
    first = {bucket(row): row for row in reversed(rows)}
    chosen = [first[bucket] for bucket in sorted(first)]
    found = [Rehearsal([row], size) for row in chosen]
    if len(chosen) > 1:
      found.append(Rehearsal(chosen, size))
    return found

  def rehearse_smaller_pools(self) -> None:
    """Uses the programs of the smaller pools; call it after all texts are done.

    A pool becomes smaller only when no text is left to be read, so by then it
    is as wide as the widest text.
    """
    for size in sorted(self._gammas, reverse=True):
      if size < self._size:
        self._move(range(size))
        self._advance()

  def completions(self) -> Iterator[tuple[int, Completion]]:
    """Yields the index and completion of each text as it is finished."""
    start = time.perf_counter()
    self._begin()
    done: list[tuple[int, int]] = []
    view: Any = None
    while True:
      self._fill()
      self._shrink()
      running = bool(self._slots.running)
      coming = self._advance() if running else None
      # The device is busy from here until its answer.
      if running and self._num_staged() <= 2 * self._refill:
        self._stage()
      for row, slot in done:
        one = self._batch.completion(view.generation, slot)
        yield self._batch.rows[row], one
      if coming is None:
        return
      view = jax.device_get(coming)
      self._answered = time.perf_counter()
      if self._batch.options.stop_strings:
        view = self._stop_at_strings(view)
      done = self._harvest(view)
      self.stats.seconds = time.perf_counter() - start

  def _begin(self) -> None:
    """Makes an empty pool, wide enough for the texts that come first.

    With order 'given', the first texts may be of any width, so the pool is as
    wide as the widest of all. A rehearsal has only some of the texts, but must
    begin as wide as the run that it prepares.
    """
    ahead: Sequence[int] = self._queue.groups[0]
    if self._settings.order == 'given':
      ahead = range(len(self._batch.rows))
    width = self._queue.widths(ahead)[0]
    self._slots.begin(self._size, width, self._gammas[self._size] > 0)

  def _num_staged(self) -> int:
    return sum(group.left for group in self._staged)

  def _busy(self) -> None:
    """The device has something to do again."""
    if self._answered is not None:
      self.stats.host_seconds += time.perf_counter() - self._answered
      self._answered = None

  def _stage(self) -> bool:
    """Begins to read the next group; False if there is none."""
    queue = self._queue
    if not queue.groups:
      return False
    rows = queue.groups.popleft()
    width, prompt_width = queue.widths(rows)
    # Filled up: a shorter last group would need a program of its own.
    filled = [*rows, *[rows[0]] * (queue.read_rows - len(rows))]
    request: Any = take_rows(self._request, np.array(filled))
    request = request.replace(inputs=request.inputs[:, :width])
    if request.prompt is not None:
      request = request.replace(prompt=request.prompt[:, :prompt_width])
    self._staged.append(self._slots.read(request, rows))
    return True

  def _fill(self) -> None:
    """Gives free slots to rows that have been read."""
    while self._slots.free and (self._staged or self._stage()):
      group = self._staged[0]
      rows = self._slots.admit(group)
      self._busy()
      self._since |= dict.fromkeys(rows, time.perf_counter())
      if not group.left:
        self._staged.popleft()

  @property
  def _is_last(self) -> bool:
    """Whether nothing is left to fill a free slot."""
    return not self._staged and not self._queue.groups

  def _shrink(self) -> None:
    """Moves the last rows to a smaller pool, if they fit into one."""
    running, free = self._slots.running, self._slots.free
    sizes = [size for size in self._sizes if size >= len(running)]
    if not self._is_last or not running or min(sizes) >= self._size:
      return
    self._move([*running, *free][: min(sizes)])

  def _move(self, kept: Sequence[int]) -> None:
    """Keeps only the slots `kept`, in a pool of their number."""
    before, gamma = self._gammas[self._size], self._gammas[len(kept)]
    self._size = len(kept)
    self._slots.keep(kept)
    if not before and gamma:
      self._slots.give_drafter()

  def _advance(self) -> PoolView:
    """Starts the next rounds on the device."""
    enough = self._refill
    if self._is_last:
      running = len(self._slots.running)
      smaller = [size for size in self._sizes if size < self._size]
      enough = running - max(smaller, default=0)
    gamma = self._gammas[self._size]
    ends = self._ends.get(self._size)
    view = self._slots.run(self._settings.max_rounds, enough, gamma, ends=ends)
    self._busy()
    return view

  def _stop_at_strings(self, view: PoolView) -> PoolView:
    """Ends the running rows whose text holds a stop string."""
    generation = view.generation
    produced: Any = {
      slot: generation.tokens[slot, : generation.length[slot]]
      for slot in self._slots.running
    }
    # NumPy arrays on the host, as everything in the view.
    reasons: Any = generation.finish_reason
    reasons = self._batch.with_stop_strings(reasons, produced)
    self._slots.set_reasons(reasons)
    generation = dataclasses.replace(generation, finish_reason=reasons)
    return dataclasses.replace(view, generation=generation)

  def _harvest(self, view: PoolView) -> list[tuple[int, int]]:
    """Frees the slots of finished rows; returns (row, slot) of each."""
    stats, gamma = self.stats, self._gammas[self._size]
    rounds = int(view.num_rounds)
    stats.looks += 1
    stats.rounds[gamma] = stats.rounds.get(gamma, 0) + rounds
    stats.live_rounds += int(view.live_rounds)
    stats.slot_rounds += rounds * self._size
    done = self._slots.release(view)
    now = time.perf_counter()
    stats.outputs += len(done)
    stats.slot_seconds += sum(now - self._since.pop(row) for row, _ in done)
    return done
