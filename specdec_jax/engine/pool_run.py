"""One run of many texts through a pool of slots, as the host directs it.

Texts queue, slots are filled as rows finish, completions come out. While the
device decodes, the host prepares the next texts and turns finished tokens into
text. Its decisions depend only on the texts and on the device's answers, never
on a clock, so that all hosts of a run decide alike.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.decoding.pool import Pool, PoolView, take_rows
from specdec_jax.decoding.row_layout import PoolPrograms
from specdec_jax.decoding.state import Request, whole_buckets
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.schedule import Group, PoolSettings, PoolStats, Queue
from specdec_jax.engine.text_batch import STOP_STRING_ROUNDS, TextBatch

# (speculative, with prompts, rows without text) -> the programs for these.
Compiled = Callable[[bool, bool, Request], PoolPrograms]


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
    self._compiled, self._batch, self._settings = compiled, batch, settings
    self.stats = PoolStats()
    rows: Sequence[int] = range(len(batch.rows))
    request: Any = batch.request
    host = jax.tree.map(np.asarray, request.replace(keys=None))
    if rehearsal is not None:
      rows = rehearsal.rows
      host = host.replace(max_length=np.ones_like(host.max_length))
    self._request: Any = host.replace(keys=request.keys)
    self._gammas = {settings.rows: batch.request.gamma}
    if settings.gammas is not None and batch.request.gamma:
      self._gammas = dict(settings.gammas)
    self._room = max(self._gammas.values())  # for proposals
    tokens = host.prompt_width + max_decode_len
    self._num_slots = whole_buckets(tokens + self._room)  # of the caches
    # The largest pool, unless all fit into a smaller one.
    sizes = [size for size in self._gammas if size >= len(rows)]
    self._size = min(sizes, default=max(self._gammas))
    self._sizes = list(self._gammas)
    if rehearsal is not None:
      self._size, self._sizes = rehearsal.size, [rehearsal.size]
    settings = dataclasses.replace(settings, rows=self._size)
    self._refill = min(settings.refill or max(1, self._size // 8), self._size)
    self._queue = Queue(self._request, rows, settings, batch.batch_multiple)
    self._staged: collections.deque[Group] = collections.deque()
    self._owners: list[int | None] = [None] * self._size
    self._since: dict[int, float] = {}  # row -> when it got its slot
    self._answered: float | None = None
    self._empty_rows: dict[tuple[bool, int], Pool] = {}

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
      running = bool(self._running())
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
    self._width = self._queue.widths(ahead)[0]
    self._pool_width = self._width
    self._use(self._gammas[self._size])
    row = self._empty_row(self._width)
    self._pool: Pool = self._programs.repeated(row, self._size)

  def _use(self, gamma: int) -> None:
    """Chooses the loop's programs: plain if gamma is 0, else speculative."""
    self._speculative = gamma > 0
    prompted = self._request.prompt is not None
    example = self._example(self._request.inputs.shape[1])
    self._programs = self._compiled(self._speculative, prompted, example)

  @property
  def _static(self) -> dict[str, int]:
    """What gives all requests without prompts the same number of slots."""
    gamma = self._room if self._speculative else 0
    return {'gamma': gamma, 'slots': self._num_slots - gamma}

  def _example(self, width: int) -> Request:
    """Rows without text, as many as are read together."""
    static = self._static
    static['slots'] -= 1
    count = self._queue.read_rows
    rows: Any = take_rows(self._request, np.zeros((count,), np.int32))
    return rows.replace(
      inputs=np.zeros((count, width), np.int32),
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
    self._width = max(self._width, width)
    # Filled up: a shorter last group would need a program of its own.
    filled = [*rows, *[rows[0]] * (queue.read_rows - len(rows))]
    request: Any = take_rows(self._request, np.array(filled))
    static = self._static
    static['slots'] -= prompt_width
    request = request.replace(inputs=request.inputs[:, :width], **static)
    if request.prompt is not None:
      request = request.replace(prompt=request.prompt[:, :prompt_width])
    staged = self._programs.read(request, self._empty_row(self._width))
    self._staged.append(Group(rows, staged, self._width))
    return True

  def _fill(self) -> None:
    """Gives free slots to rows that have been read."""
    free = self._free()
    while free and (self._staged or self._stage()):
      group = self._staged[0]
      empty = self._empty_row(group.width)
      if group.width > self._pool_width:
        self._pool = self._programs.widened(self._pool, empty)
        self._pool_width = group.width
      count = min(len(free), group.left)
      places = np.zeros((self._size,), np.int32)
      places[:count] = free[:count]
      first = group.taken
      self._pool = self._programs.admit(
        self._pool,
        group.staged,
        empty,
        np.int32(first),
        places,
        np.int32(count),
      )
      self._busy()
      for slot, row in zip(
        free, group.rows[first : first + count], strict=False
      ):
        self._owners[slot] = row
        self._since[row] = time.perf_counter()
      del free[:count]
      group.taken += count
      if not group.left:
        self._staged.popleft()

  @property
  def _is_last(self) -> bool:
    """Whether nothing is left to fill a free slot."""
    return not self._staged and not self._queue.groups

  def _free(self) -> list[int]:
    return [slot for slot, row in enumerate(self._owners) if row is None]

  def _running(self) -> list[int]:
    return [slot for slot, row in enumerate(self._owners) if row is not None]

  def _shrink(self) -> None:
    """Moves the last rows to a smaller pool, if they fit into one."""
    running = self._running()
    sizes = [size for size in self._sizes if size >= len(running)]
    if not self._is_last or not running or min(sizes) >= self._size:
      return
    self._move([*running, *self._free()][: min(sizes)])

  def _move(self, kept: Sequence[int]) -> None:
    """Keeps only the slots `kept`, in a pool of their number."""
    before, gamma = self._gammas[self._size], self._gammas[len(kept)]
    self._owners = [self._owners[slot] for slot in kept]
    self._size = len(kept)
    self._pool = self._programs.smaller(self._pool, np.array(kept, np.int32))
    if not before and gamma:
      self._use(gamma)
      self._pool = self._programs.with_drafter(self._pool, self._room)

  def _advance(self) -> PoolView:
    """Starts the next rounds on the device."""
    enough = self._refill
    if self._is_last:
      running = len(self._running())
      smaller = [size for size in self._sizes if size < self._size]
      enough = running - max(smaller, default=0)
    gamma = self._gammas[self._size]
    self._pool, view = self._programs.run(
      self._pool,
      np.int32(self._settings.max_rounds),
      np.int32(enough),
      gamma,
    )
    self._busy()
    return view

  def _stop_at_strings(self, view: PoolView) -> PoolView:
    """Ends the running rows whose text holds a stop string."""
    generation = view.generation
    produced: Any = {
      slot: generation.tokens[slot, : generation.length[slot]]
      for slot in self._running()
    }
    # NumPy arrays on the host, as everything in the view.
    reasons: Any = generation.finish_reason
    reasons = self._batch.with_stop_strings(reasons, produced)
    state = self._pool.state.with_reasons(reasons)
    self._pool = dataclasses.replace(self._pool, state=state)
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
    done = []
    for slot, is_free in enumerate(view.is_free):
      row = self._owners[slot]
      if is_free and row is not None:
        done.append((row, slot))
        self._owners[slot] = None
        stats.outputs += 1
        stats.slot_seconds += time.perf_counter() - self._since.pop(row)
    return done
