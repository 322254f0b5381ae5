"""Continuous batching: many texts through an engine, a fixed number at once.

The host side of `decoding.slots`: texts queue, slots are filled as rows finish,
completions come out. While the device decodes, the host prepares what is next
and turns what is finished into text. What it decides depends on the texts and
on the device's answers alone, never on a clock, so that hosts that see the same
decide alike.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.completion import Completion
from specdec_jax.decoding import slots
from specdec_jax.decoding.layout import Programs
from specdec_jax.decoding.slots import Look, Loop, Pool
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.engine import Engine, Texts
from specdec_jax.job import STOP_STRING_ROUNDS, Job
from specdec_jax.schedule import Group, Load, Queue, Settings
from specdec_jax.types import FinishReason

# (speculative, with prompts, rows without text) -> what is compiled for such.
Compiled = Callable[[bool, bool, Request], Programs]


class Schedule:
  """One pass of a job's texts through the slots."""

  def __init__(
    self,
    compiled: Compiled,
    job: Job,
    settings: Settings,
    max_decode_len: int,
    rows: Sequence[int] | None = None,
    max_length: Sequence[int] | None = None,
  ):
    """Decides shapes and order.

    Args:
      compiled: gives the programs.
      job: the texts; its gamma is the default one, 0 for the plain loop.
      settings: how they go through.
      max_decode_len: that the caches have room for.
      rows: of the job, those to decode; None is all.
      max_length: their limits, instead of the job's.
    """
    if job.options.stop_strings:
      few = min(settings.max_rounds, STOP_STRING_ROUNDS)
      settings = dataclasses.replace(settings, max_rounds=few)
    self._compiled, self._job, self._settings = compiled, job, settings
    self.load = Load()
    rows = range(len(job.rows)) if rows is None else rows
    request: Any = job.request
    host = jax.tree.map(np.asarray, request.replace(keys=None))
    if max_length is not None:
      limits = host.max_length.copy()
      limits[list(rows)] = max_length
      host = host.replace(max_length=limits)
    self._request: Any = host.replace(keys=request.keys)
    self._gammas = {settings.rows: job.request.gamma}
    if settings.gammas is not None and job.request.gamma:
      self._gammas = dict(settings.gammas)
    self._room = max(self._gammas.values())  # for proposals
    tokens = host.prompt_width + max_decode_len
    self._num_slots = -(-(tokens + self._room) // 64) * 64  # of the caches
    # The largest pool, unless all fit into a smaller one.
    sizes = [size for size in self._gammas if size >= len(rows)]
    self._size = min(sizes, default=max(self._gammas))
    settings = dataclasses.replace(settings, rows=self._size)
    self._refill = min(settings.refill or max(1, self._size // 8), self._size)
    self._queue = Queue(self._request, rows, settings)
    self._staged: collections.deque[Group] = collections.deque()
    self._owners: list[int | None] = [None] * self._size
    self._since: dict[int, float] = {}  # row -> when it got its slot
    self._answered: float | None = None
    self._empty_rows: dict[tuple[bool, int], Pool] = {}

  @property
  def shapes(self) -> Any:
    """What the programs that are needed depend on."""
    rows = [row for group in self._queue.groups for row in group]
    buckets = tuple(sorted({self._queue.bucket(row) for row in rows}))
    tree = jax.tree.structure(self._request)
    return tree, buckets, self._num_slots, self._size

  def rehearsals(self) -> Iterator[tuple[list[int], list[int]]]:
    """Rows and limits of small passes that go through every program."""
    rows = [row for group in self._queue.groups for row in group]
    first = {self._queue.bucket(row): row for row in reversed(rows)}
    chosen = [first[bucket] for bucket in sorted(first)]
    if len(self._gammas) > 1:
      some, step = rows[: self._size], self._room + 1
      most = int(self._request.max_length.max())
      yield some, [min(most, (i + 1) * step) for i in range(len(some))]
    for row in chosen:
      yield [row], [1]
    if len(chosen) > 1:
      yield chosen, [1] * len(chosen)

  def completions(self) -> Iterator[tuple[int, Completion]]:
    """Yields the index and completion of each text as it is finished."""
    start = time.perf_counter()
    self._begin()
    done: list[tuple[int, int]] = []
    look: Any = None
    while True:
      self._fill()
      self._shrink()
      running = any(row is not None for row in self._owners)
      coming = self._advance() if running else None
      # From here on until the answer the device is busy.
      if running and self._num_staged() <= 2 * self._refill:
        self._stage()
      for row, slot in done:
        one = self._job.completion(look.generation, slot)
        yield self._job.rows[row], one
      if coming is None:
        return
      look = jax.device_get(coming)
      self._answered = time.perf_counter()
      if self._job.options.stop_strings:
        look = self._stop_at_strings(look)
      done = self._harvest(look)
      self.load.seconds = time.perf_counter() - start

  def _begin(self) -> None:
    """An empty pool, wide enough for the texts that come first."""
    groups = self._queue.groups
    ahead = groups if self._settings.order == 'given' else [groups[0]]
    self._width = max(self._queue.widths(rows)[0] for rows in ahead)
    self._pool_width = self._width
    self._use(self._gammas[self._size])
    row = self._empty_row(self._width)
    self._pool: Pool = self._programs.repeated(row, self._size)

  def _use(self, gamma: int) -> None:
    """Programs of the plain loop where gamma is 0, else of the other one."""
    self._speculative = gamma > 0
    prompted = self._request.prompt is not None
    example = self._example(self._request.inputs.shape[1])
    self._programs = self._compiled(self._speculative, prompted, example)

  @property
  def _static(self) -> dict[str, int]:
    """What gives every request the same number of slots, but for prompts."""
    gamma = self._room if self._speculative else 0
    return {'gamma': gamma, 'slots': self._num_slots - gamma}

  def _example(self, width: int) -> Request:
    """Rows without text, as many as are read at once."""
    static = self._static
    static['slots'] -= 1
    count = self._queue.read_rows
    rows: Any = slots.take(self._request, np.zeros((count,), np.int32))
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
      self.load.host_seconds += time.perf_counter() - self._answered
      self._answered = None

  def _stage(self) -> bool:
    """Begins to read the next group; False if there is none."""
    queue = self._queue
    if not queue.groups:
      return False
    rows = queue.groups.popleft()
    width, prompt_width = queue.widths(rows)
    self._width = max(self._width, width)
    # A shorter last group would compile anew.
    filled = [*rows, *[rows[0]] * (queue.read_rows - len(rows))]
    request: Any = slots.take(self._request, np.array(filled))
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
    free = [slot for slot, row in enumerate(self._owners) if row is None]
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

  def _running(self) -> list[int]:
    return [slot for slot, row in enumerate(self._owners) if row is not None]

  def _shrink(self) -> None:
    """Moves the last rows to a smaller pool, if one is allowed that fits."""
    running = self._running()
    sizes = [size for size in self._gammas if size >= len(running)]
    if not self._is_last or not running or min(sizes) >= self._size:
      return
    free = [slot for slot, row in enumerate(self._owners) if row is None]
    kept = [*running, *free][: min(sizes)]
    before, gamma = self._gammas[self._size], self._gammas[min(sizes)]
    self._owners = [self._owners[slot] for slot in kept]
    self._size = min(sizes)
    self._pool = self._programs.only(self._pool, np.array(kept, np.int32))
    if not before and gamma:
      self._use(gamma)
      self._pool = self._programs.with_drafter(self._pool, self._room)

  def _advance(self) -> Look:
    """Begins the next rounds."""
    enough = self._refill
    if self._is_last:
      running = len(self._running())
      smaller = [size for size in self._gammas if size < self._size]
      enough = running - max(smaller, default=0)
    gamma = self._gammas[self._size]
    self._pool, look = self._programs.run(
      self._pool,
      np.int32(self._settings.max_rounds),
      np.int32(enough),
      gamma,
    )
    self._busy()
    return look

  def _stop_at_strings(self, look: Look) -> Look:
    """Ends the running rows whose text holds a stop string."""
    generation = look.generation
    reason = np.array(generation.finish_reason)
    for slot in self._running():
      tokens = generation.tokens[slot, : generation.length[slot]]
      running = reason[slot] == FinishReason.RUNNING
      if running and self._job.has_stop_string(tokens):
        reason[slot] = FinishReason.STOP_STRING
    state = self._pool.state
    # Where it was, or the next run would be compiled anew.
    placed = jax.device_put(reason, state.finish_reason.sharding)
    self._pool = self._pool.replace(state=state.replace(finish_reason=placed))
    return look.replace(generation=generation.replace(finish_reason=reason))

  def _harvest(self, look: Look) -> list[tuple[int, int]]:
    """Rows that have finished, with the slots that they leave."""
    load, gamma = self.load, self._gammas[self._size]
    rounds = int(look.num_rounds)
    load.looks += 1
    load.rounds[gamma] = load.rounds.get(gamma, 0) + rounds
    load.live_rounds += int(look.live_rounds)
    load.slot_rounds += rounds * self._size
    done = []
    for slot, is_free in enumerate(slots.is_free(look)):
      row = self._owners[slot]
      if is_free and row is not None:
        done.append((row, slot))
        self._owners[slot] = None
        load.outputs += 1
        load.slot_seconds += time.perf_counter() - self._since.pop(row)
    return done


class Continuous:
  """Decodes any number of texts with an engine, `settings.rows` at once.

  Attributes:
    engine: whose models decode.
    settings: how.
    load: of the run that was begun last.
  """

  def __init__(self, engine: Engine, settings: Settings | None = None):
    self.engine = engine
    self.settings = settings or Settings()
    self.load = Load()
    self._programs: dict[Any, Programs] = {}
    self._warm: set[Any] = set()

  def generate(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> list[Completion]:
    """`Engine.generate` of any number of texts: a completion each, in order.

    A text that cannot be decoded gives a completion with an error and the
    others go on, as if `on_too_long` were 'report'; it may be 'truncate'.

    Args:
      texts: as for `Engine.generate`.
      speculative: likewise.
      **options: likewise. Stop strings are looked for between rounds.

    Raises:
      ValueError: an option is out of range.
    """
    found = dict(self.run(texts, speculative=speculative, **options))
    return [found[index] for index in range(len(texts))]

  def run(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> Iterator[tuple[int, Completion]]:
    """Yields index and completion of each text as soon as it is finished.

    Nothing is kept of what has been yielded. Arguments and errors as of
    `generate`.
    """
    job = self._job(texts, speculative, options)
    self.load = Load()
    yield from sorted(job.passed_over.items())
    if job.rows:
      schedule = self._schedule(job)
      self.load = schedule.load
      yield from schedule.completions()

  def warmup(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> float:
    """Compiles what `generate` of such texts needs; seconds, 0.0 if nothing."""
    begin = time.perf_counter()
    job = self._job(texts, speculative, options)
    if not job.rows:
      return 0.0
    schedule = self._schedule(job)
    if schedule.shapes in self._warm:
      return 0.0
    for rows, max_length in schedule.rehearsals():
      for _ in self._schedule(job, rows, max_length).completions():
        pass
    self._warm.add(schedule.shapes)
    return time.perf_counter() - begin

  def _job(self, texts: Texts, speculative: bool, options) -> Job:
    if options.get('on_too_long') != 'truncate':
      options = {**options, 'on_too_long': 'report'}
    job = self.engine.job(texts, speculative, **options)
    gammas = self.settings.gammas or {}
    varied = speculative and len(set(gammas.values())) > 1
    sampled = not job.options.sampling.greedy
    if varied and sampled and self.settings.deterministic:
      raise ValueError(
        f'gammas = {dict(gammas)} changes with the number of running rows, and'
        ' samples at a temperature above 0 would change with it. Give all the'
        ' same gamma, set temperature 0, or deterministic=False.'
      )
    return job

  def _schedule(self, job: Job, *limits) -> Schedule:
    length = self.engine.max_decode_len
    return Schedule(self._compiled, job, self.settings, length, *limits)

  def _compiled(
    self, speculative: bool, prompted: bool, example: Request
  ) -> Programs:
    key: Any = speculative, prompted, jax.tree.structure(example)
    key = *key, example.inputs.shape[0]
    if key not in self._programs:
      engine, params = self.engine, self.engine.params
      loop = Loop(engine.target, engine.drafter if speculative else None)
      if not speculative:
        params = PairParams(params.target, None)
      self._programs[key] = Programs(loop, params, example, prompted)
    return self._programs[key]
