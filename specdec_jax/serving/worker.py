"""The engine's scheduler with a thread of its own, and its warm-up.

Requests come from other threads. One thread directs the device; another one
compiles what is not compiled yet. Nothing here knows of HTTP.
"""

import asyncio
import collections
import dataclasses
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.checks.fields import unexpected
from specdec_jax.decoding.pool import PoolPrograms
from specdec_jax.engine import compilation_cache
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import TextBatch
from specdec_jax.engine.scheduler import (
  PoolSettings,
  Row,
  Scheduler,
  Update,
  shortened,
  widths_of,
)
from specdec_jax.request import BLOCK, TOKEN, Request
from specdec_jax.serving.log import say
from specdec_jax.serving.protocol import ApiError
from specdec_jax.serving.settings import ServeSettings

_LOG = logging.getLogger(__name__)
_NOT_READY = 'The server is not ready yet: it compiles.'
_READ_TOGETHER = 4  # rows, where several wait
_SEARCH_ROUNDS = 4  # of a beam search, between two steps of the rows
_RULED_ROWS = 4  # of a pool of rows with the same rules
_MOST_POOLS = 4  # of these
_IDLE_LANES = 4  # whose programs are kept, beside those of the start
_MOST_LANES = 16  # if all are in use
_LOOK_SECONDS = 0.1  # between two looks at rows whose time may be over
_STOP_IDS = 8  # that each row has room for, if the engine has no more
# Kinds of rows for which rounds have programs of their own.
_SAMPLED, _GREEDY, _PLAIN = 'sampled', 'greedy', 'greedy, no drafter'


@dataclasses.dataclass(eq=False)
class Lane:
  """Rows of one kind, which need programs that other rows do not.

  Attributes:
    batch: of one of them.
    is_plain: `Row.is_plain` of all.
    waiting: rows that wait for the programs, or for a pool.
    uses: `Scheduler.used` once the programs are compiled; None before.
    programs: these, of rows in pools.
    is_kept: whether they are never forgotten.
  """

  batch: TextBatch
  is_plain: bool = False
  waiting: list['ServedRow'] = dataclasses.field(default_factory=list)
  uses: set[Any] | None = None
  programs: PoolPrograms | None = None
  is_kept: bool = False

  @property
  def is_wanted(self) -> bool:
    """Whether a row waits that nobody has cancelled."""
    return any(not row.is_cancelled for row in self.waiting)

  @property
  def name(self) -> str:
    """What is special about its rows."""
    options = self.batch.options
    names = [*options.rules, *['min_p'] * bool(options.min_p)]
    if options.num_beams is not None:
      names.insert(0, f'a search of {options.num_beams} beams')
    return ', '.join(names)


@dataclasses.dataclass(eq=False, kw_only=True)
class ServedRow(Row):
  """One output that is asked for; or a beam search.

  Attributes:
    tell: is called with each update, by the thread of the worker.
    deadline: `time.monotonic()` at which it ends in any case.
    search: runs more rounds of a beam search, see `Engine.search`; None for
      other rows.
    lane: of a row that needs programs of its own; None for others.
  """

  tell: Callable[[Update], None]
  deadline: float = math.inf
  search: Callable[[int], list[Completion] | None] | None = None
  lane: Lane | None = None

  @property
  def kind(self) -> Any:
    """What the programs depend on; None if those of all rows do."""
    request = self.batch.request
    has_rules = (
      request.token_rules is not None or request.sampling.min_p is not None
    )
    if self.search is None and not has_rules:
      return None
    leaves, tree = jax.tree.flatten(request)
    return tree, self.is_plain, self.source.widths, *map(np.shape, leaves)


class Worker(Scheduler):
  """Decodes rows as they come; a thread of its own directs the device.

  Attributes:
    engine: the engine whose models decode.
    settings: sizes and limits.
    speculates: whether a drafter helps.
    least_length: greedy rows that may have fewer tokens are decoded plainly,
      see `Calibration.least_length`.
    is_compiled: whether all programs are. Rows are taken once those for one row
      are; until the others are, pools are smaller and inputs read wider.
    failure: what ended the threads; None if it is well.
    scoring: is held while the target scores outputs, one after another, between
      the rounds of others.
  """

  def __init__(
    self,
    engine: Engine,
    settings: ServeSettings,
    measured: Calibration | None = None,
  ):
    """Starts nothing; call `start`.

    Args:
      engine: the engine whose models decode; with a calibration one that adapts
        or rests goes by its costs.
      settings: sizes and limits.
      measured: a calibration, which says how greedy rows are drafted for.
        Samples have the engine's gamma, whatever else is asked for.

    Raises:
      ValueError: the slots cannot fit into memory, the engine splits rows over
        devices, or the calibration is of something else (`CalibrationError`).
    """
    self.engine, self.settings = engine, settings
    pool = PoolSettings(rows=settings.rows, sizes=settings.sizes)
    pays, self.least_length = True, 0
    if measured is not None:
      measured.direct(engine, settings.rows)
      plan = measured.plan(settings.rows, engine)
      pays = any(drafting.gamma for drafting in plan.values())
      pool = dataclasses.replace(pool, gammas=plan)
      self.least_length = measured.least_length(1)
    self.speculates: bool = engine.has_drafter and pays
    if settings.speculative is not None:
      self.speculates = settings.speculative
    if self.speculates:
      _ = engine.drafter  # raises if there is none
    self._lane_rows = min(_RULED_ROWS, settings.rows)
    self._num_stops = max(_STOP_IDS, len(engine.stop_ids))
    self._texts = self._texts_of_all_widths()
    batch = self._some(self._texts[-1], max_length=1)
    if engine.batch_multiple > 1:
      expected = '1: a pool of one row cannot be split'
      raise unexpected('Placement.data', expected, engine.batch_multiple)
    self._args: Mapping[str, Any] = {
      'engine': engine,
      'settings': pool,
      'request': self._of_any_kind(batch.request),
      'widest': widths_of(batch.request),
      'counts': (1, _READ_TOGETHER)[: settings.rows],
    }
    super().__init__(**self._args)
    self.compiled = set()
    self.is_compiled = False
    self.failure: str | None = None
    self.scoring = asyncio.Lock()
    self._searches: collections.deque[ServedRow] = collections.deque()
    self._lanes: dict[Any, Lane] = {}  # the one that was used last is last
    self._to_compile = queue.SimpleQueue[Lane | None]()
    self._pools: dict[Any, Scheduler] = {}
    self._taken: set[ServedRow] = set()  # that have not heard their last update
    self._refuses: str | None = _NOT_READY
    self._ends = False
    self._compiler = threading.Thread(target=self._compile, daemon=True)
    self._thread = threading.Thread(target=self._run, daemon=True)

  # What other threads call.

  def start(self) -> None:
    """Begins to compile, and soon to decode."""
    self._compiler.start()

  def row(
    self,
    text: Any,
    tell: Callable[[Update], None],
    streams: bool = False,
    plain: bool = False,
    shows_rounds: bool = False,
    **options: Any,
  ) -> ServedRow:
    """Makes a row of a text and options of `Engine.generate`.

    Args:
      text: the input.
      tell: see `ServedRow`.
      streams: see `Row`.
      plain: `Row.is_plain`, of greedy rows alone.
      shows_rounds: see `Row`.
      **options: of `Engine.generate`.

    Raises:
      ValueError: as `Engine.generate`.
    """
    batch, search = self._batch(text, **options), None
    if batch.options.num_beams is not None:
      search = self.engine.search(batch)
    row = ServedRow(
      batch,
      streams=streams,
      is_plain=plain,
      shows_rounds=shows_rounds,
      tell=tell,
      deadline=time.monotonic() + self.settings.max_seconds,
      search=search,
    )
    is_short = any(each.max_length < self.least_length for each in batch.rows)
    if is_short and row.is_simple and row.kind is None:
      row.is_plain = True
    return row

  def take(self, rows: Sequence[ServedRow]) -> None:
    """Queues rows, all of them or none; those without a text end at once.

    Raises:
      ApiError: there is no room for all of them, or no rows are taken.
    """
    decoded = [row for row in rows if row.batch.rows]
    with self._lock:
      if self._refuses is not None:
        raise ApiError(self._refuses, status=503)
      most, waiting = self.settings.max_waiting, self.num_waiting
      if waiting + len(rows) > most:
        message = (
          f'{waiting} outputs wait, and {len(rows)} more would be more than'
          f' {most}. Try again later.'
        )
        raise ApiError(message, status=429, code='queue_full')
      self._taken.update(decoded)
      kinds = [row.kind for row in decoded]
      for row, kind in zip(decoded, kinds, strict=True):
        if kind is not None:
          self._give_lane(row, kind)
      self.submit(row for row in decoded if row.lane is None)
    for row in rows:
      if not row.batch.rows:
        done = row.batch.completions()
        row.tell(
          Update(beams=done) if row.search else Update(completion=done[0])
        )

  def cancel(self, rows: Iterable[Any]) -> None:
    """Ends rows whose outputs nobody wants any more; they hear nothing."""
    with self._lock:
      self._taken.difference_update(rows)
      super().cancel(rows)

  def refuse(self, why: str) -> None:
    """Takes no more rows; those that were taken go on."""
    with self._lock:
      if self._refuses in (None, _NOT_READY):
        self._refuses = why

  def stop(self) -> None:
    """Ends all rows with the error 'stopped', and the thread."""
    self.refuse('The server is stopping.')
    with self._lock:
      self._ends = True
      self._lock.notify()
    self._to_compile.put(None)

  def join(self) -> None:
    """Waits for the threads to end."""
    self._compiler.join()
    if self._thread.ident is not None:
      self._thread.join()

  @property
  def takes_rows(self) -> bool:
    """Whether it is ready, and not stopping."""
    return self._refuses is None

  @property
  def compiling(self) -> list[str]:
    """What kinds of rows wait for their programs."""
    lanes = [*self._lanes.values()]
    return [lane.name for lane in lanes if lane.uses is None]

  @property
  def num_waiting(self) -> int:
    """Rows without a slot, and beam searches."""
    lanes = [lane.waiting for lane in [*self._lanes.values()]]
    special = itertools.chain(self._searches.copy(), *lanes)
    waiting = sum(not row.is_cancelled for row in special)
    pools = [*self._pools.values()]
    return waiting + sum(len(pool._waiting) for pool in [self, *pools])

  @property
  def num_running(self) -> int:
    """Rows that have a slot."""
    pools = [*self._pools.values()]
    return super().num_running + sum(pool.num_running for pool in pools)

  @property
  def num_rows(self) -> int:
    """Rows that were taken and are not done."""
    return self.num_waiting + self.num_running

  # What the thread that decodes does.

  def _run(self) -> None:
    try:
      while not self._ends:
        with self._lock:
          if not (self._has_any_work or self._ends):
            # Rows that wait for programs have no work, but a time that ends.
            self._lock.wait(_LOOK_SECONDS if self._taken else None)
        self._end_late()
        for row, update in self.step():
          self._tell(row, update)
        self._step_lanes()
        self._search()
    except Exception as failure:
      self._fail(failure)
    self.is_compiled = False
    with self._lock:
      self._waiting.clear()
      self._searches.clear()
      self._lanes.clear()
      left = list(self._taken)
    for row in left:
      self._tell(row, Update(error='failed' if self.failure else 'stopped'))

  def _fail(self, failure: Exception) -> None:
    """Ends both threads."""
    _LOG.exception('The scheduler failed.')
    with self._lock:
      self.failure = repr(failure)
      self._refuses = 'The server has failed; see its log.'
      self._ends, self.is_compiled = True, False
      self._lock.notify()
    self._to_compile.put(None)

  def _end_late(self) -> None:
    """Ends the rows whose time is over."""
    now = time.monotonic()
    with self._lock:
      late = [row for row in self._taken if row.deadline <= now]
    for row in late:
      self._tell(row, Update(error='deadline'))
    self.cancel(late)

  @property
  def _has_any_work(self) -> bool:
    ready = any(x.waiting for x in self._lanes.values() if x.uses is not None)
    return bool(self.has_work or self._searches or self._pools or ready)

  def _give_lane(self, row: ServedRow, kind: Any) -> None:
    """Puts a row into the lane of its kind; a new one is to be compiled."""
    lane = self._lanes.pop(kind, None)
    if lane is None:
      lane = Lane(row.batch, row.is_plain)
      self._to_compile.put(lane)
    self._lanes[kind] = row.lane = lane
    lane.waiting.append(row)

  def _step_lanes(self) -> None:
    """A step of each pool of rows whose lanes are compiled.

    Rows of a lane share a pool if they have the same stop ids and constraint.
    """
    with self._lock:
      for lane in self._lanes.values():
        if lane.uses is not None:
          rows, lane.waiting = lane.waiting, []
          lane.waiting = [r for r in rows if not self._gets_turns(lane, r)]
    for key, pool in list(self._pools.items()):
      lane, *_ = key
      try:
        updates = pool.step()
      except Exception:
        self._fail_alone(lane)
        del self._pools[key]
        continue
      for row, update in updates:
        self._tell(row, update)
      if not pool.has_work:
        del self._pools[key]

  def _gets_turns(self, lane: Lane, row: ServedRow) -> bool:
    """Gives a row of a compiled lane to what decodes it; False: it waits."""
    if row.is_cancelled:
      return True
    if row.search is not None:
      self._searches.append(row)
      return True
    request, automaton = row.batch.request, row.source.rules.automaton
    key = lane, request.stop_ids.tobytes(), id(automaton)
    if key not in self._pools:
      if len(self._pools) == _MOST_POOLS:
        return False
      try:
        pool = self._pool_of(row)
      except Exception:  # such as too little memory just now
        self._fail_alone(lane)
        return True
      pool.compiled, self._pools[key] = lane.uses, pool
    self._pools[key].submit([row])
    return True

  def _pool_of(self, row: Row) -> Scheduler:
    """A scheduler of a pool for rows like this one."""
    settings = PoolSettings(rows=self._lane_rows)
    request, widths = row.batch.request, row.source.widths
    return Scheduler(self.engine, settings, request, widths)

  def _fail_alone(self, lane: Lane) -> None:
    """Ends the rows of a lane, and no others, by the exception of now."""
    _LOG.exception('Rows of a kind failed: %s', lane.name)
    with self._lock:
      rows = [row for row in [*self._taken] if row.lane is lane]
    for row in rows:
      self._tell(row, Update(error='failed alone'))
    self.cancel(rows)

  def _search(self) -> None:
    """Runs some levels of the beam search that came first.

    It has no slot; others run a round or more between two calls. One that
    fails ends alone.
    """
    with self._lock:
      left = [row for row in self._searches if not row.is_cancelled]
      self._searches = collections.deque(left)
    if not left:
      return
    search: Any = left[0].search
    try:
      beams = search(_SEARCH_ROUNDS)
    except Exception:
      _LOG.exception('A beam search failed.')
      update = Update(error='failed alone')
    else:
      if beams is None:
        return
      update = Update(beams=beams[::-1])  # the best one first
    with self._lock:
      self._searches.popleft()
    self._tell(left[0], update)

  def _tell(self, row: Any, update: Update) -> None:
    if row.is_cancelled:
      return
    if update.is_last:
      self._taken.discard(row)
    try:
      row.tell(update)
    except RuntimeError:  # the loop of its listener has ended
      self.cancel([row])

  # What the thread that compiles does.

  def _compile(self) -> None:
    """Compiles all programs; with the first ones there, rows are taken.

    Then it compiles those of lanes, whose rows wait meanwhile.
    """
    begin = time.perf_counter()

    def say_since(event: str) -> None:
      say(event, seconds=round(time.perf_counter() - begin, 3))

    try:
      scheduler = Scheduler(**self._args)
      runs = [*self._rehearsals(scheduler), *self._short_searches()]
      for number, (name, run) in enumerate(runs, 1):
        if self._ends:
          return
        say('compiling', what=name, number=number, of=len(runs))
        run()
        self.compiled = scheduler.used.copy()
        if number == 1:
          self._thread.start()
          with self._lock:
            if self._refuses == _NOT_READY:  # else it was told to take none
              self._refuses = None
          say_since('ready')
        if not self._to_compile.empty() and (lane := self._to_compile.get()):
          self._compile_lane(lane)
      with self._lock:
        self.is_compiled = not self._ends
      compilation_cache.give_back()
      say_since('compiled')
    except Exception as failure:
      self._fail(failure)
    while not self._ends and (lane := self._to_compile.get()) is not None:
      self._compile_lane(lane)

  def _compile_lane(self, lane: Lane) -> None:
    """Compiles the programs of a lane, unless nobody wants them any more."""
    begin = time.perf_counter()
    if lane.uses is None and lane.is_wanted:
      self._forget_lanes()
      try:
        self._rehearse_lane(lane)
      except Exception:
        self._fail_alone(lane)
      compilation_cache.give_back()
      seconds = round(time.perf_counter() - begin, 3)
      say('compiled a lane', what=lane.name, seconds=seconds)
    with self._lock:
      if lane.uses is None and lane.is_wanted:  # by rows that have just come
        self._to_compile.put(lane)
      elif lane.uses is None:
        self._drop(lane)
      self._lock.notify()

  def _rehearse_lane(self, lane: Lane) -> None:
    """Decodes short outputs with all programs of a lane."""
    short = shortened(lane.batch, self.policy.room)
    if lane.batch.options.num_beams is not None:
      search = self.engine.search(short)
      while search(_SEARCH_ROUNDS) is None:
        pass
      lane.uses = set()
      return
    row = Row(short, streams=True, is_plain=lane.is_plain)
    pool, size = self._pool_of(row), self._lane_rows
    for _ in range(2):  # see `_rehearsals`
      rows = [dataclasses.replace(row) for _ in range(min(2, size))]
      pool.rehearse(rows, size)
    lane.programs = pool.programs
    lane.uses = pool.used | {('rounds', size, False, False)}

  def _forget_lanes(self) -> None:
    """Makes room for a lane: frees programs that were used longest ago.

    Where too many are in use, it waits.
    """
    while not self._ends:
      with self._lock:
        ready = [lane for lane in self._lanes.values() if lane.uses is not None]
        ready = [lane for lane in ready if not lane.is_kept]
        busy = {row.lane for row in [*self._taken]}
        busy |= {lane for lane, *_ in self._pools}
        idle = [lane for lane in ready if lane not in busy]
        if len(idle) < _IDLE_LANES and len(ready) < _MOST_LANES:
          return
        for lane in idle[:1]:
          self._drop(lane)
      for lane in idle[:1]:
        self.engine.forget(lane.programs or lane.batch.request)
      if not idle:
        time.sleep(_LOOK_SECONDS)

  def _drop(self, lane: Lane) -> None:
    for kind, other in list(self._lanes.items()):
      if other is lane:
        del self._lanes[kind]

  def _rehearsals(
    self, scheduler: Scheduler
  ) -> Iterator[tuple[str, Callable[[], object]]]:
    """Short decodes that together use all programs, the most needed first.

    A program is compiled anew for arrays that another program has placed. So
    each pool is filled afresh and from each smaller one, twice.

    Args:
      scheduler: decodes them; nobody else's.

    Yields:
      What is compiled, and a function that does it.
    """

    def rehearsal(*decodes: tuple[Any, ...]) -> Callable[[], object]:
      return functools.partial(self._rehearse, scheduler, decodes)

    sizes, counts = self.settings.sizes, self._args['counts']
    several = sizes[min(1, len(sizes) - 1)]
    widest = self._texts[-1]
    for size in sizes:
      moved = [
        (widest, _SAMPLED, min(count, other), other, (size, other))
        for other in sizes[: sizes.index(size) + 1]
        for count in counts[:other]
      ]
      yield f'{size} rows', rehearsal(*moved, *moved)
      for kind in (_GREEDY, _PLAIN):
        yield f'{size} rows, {kind}', rehearsal((widest, kind, 1, size))
    for text in self._texts:
      inputs = f'inputs of {len(text)}'
      for kind in (_GREEDY, _PLAIN):  # a row alone; then others come
        alone = (text, kind, 1, 1, (1, several)), (widest, _SAMPLED, 1, 1)
        yield f'a row alone, {inputs}, {kind}', rehearsal(*alone)
      read = [
        (text, _SAMPLED, min(count, several), several)
        for count in counts[:several]
      ]
      yield f'reading, {inputs}', rehearsal(*read)

  def _rehearse(
    self, scheduler: Scheduler, decodes: Iterable[tuple[Any, ...]]
  ) -> None:
    """Decodes: text, kind, rows, size of the pool, and later sizes of each."""
    # More tokens than two rounds make.
    longest = min(2 * self.policy.room + 3, self.engine.max_decode_len)
    for text, kind, count, *sizes in decodes:
      batch = self._some(
        text,
        max_length=longest,
        stop_ids=(),
        log_probs=kind == _SAMPLED,
        temperature=float(kind == _SAMPLED),
      )
      rows = [
        Row(batch, streams=True, is_plain=kind == _PLAIN) for _ in range(count)
      ]
      scheduler.rehearse(rows, *sizes)

  def _short_searches(self) -> Iterator[tuple[str, Callable[[], object]]]:
    """A short beam search of each width, of texts of each width."""

    def compiled(batch: TextBatch) -> None:
      row = ServedRow(batch, tell=print, search=self.engine.search(batch))
      with self._lock:
        lane = self._lanes.setdefault(row.kind, Lane(batch))
        lane.is_kept = True
      self._rehearse_lane(lane)

    for width, text in itertools.product(self.settings.beams, self._texts):
      batch = self._some(text, num_beams=width, num_samples=width, max_length=1)
      name = f'a search of {width} beams, inputs of {len(text)}'
      yield name, functools.partial(compiled, batch)

  # Requests.

  def _batch(self, text: Any, **options: Any) -> TextBatch:
    # The engine knows where beams are slower with a drafter.
    speculative = None if self.speculates else False
    return self.engine.text_batch([text], speculative, **options)

  def _some(self, text: Any, **options: Any) -> TextBatch:
    """The batch of a text that nobody reads, in any language."""
    for language in list(self.engine.languages().known)[:1]:
      options |= {'source_lang': language, 'target_lang': language}
    return self._batch(text, **options)

  def _of_any_kind(self, request: Request) -> Request:
    """A request like this one, whose rows have values of their own."""
    engine = self.engine
    branches = engine.has_drafter and engine.drafter.tree is not None
    shared: Any = request.sampling
    sampling = shared.replace(
      top_k=np.zeros((1,), np.int32), top_p=np.ones((1,), np.float32)
    )
    stop_ids: Any = np.full((1, self._num_stops), -1, np.int32)
    return dataclasses.replace(
      request,
      sampling=sampling,
      stop_ids=stop_ids,
      greedy=False,
      forbids_stops=True,
      with_log_probs=True,
      verification=TOKEN if branches else BLOCK,
    )

  def _texts_of_all_widths(self) -> list[list[int]]:
    """A text of each width that texts are read in, the widest last."""
    engine, texts = self.engine, {}
    some_id = engine.tokenizer.vocab_size - 1
    nothing = engine.input_ids([], next(iter(engine.languages().known), None))
    most = engine.max_input_len - len(nothing)
    for length in sorted({most, *(1 << n for n in range(most.bit_length()))}):
      text = [some_id] * length
      texts[widths_of(self._some(text, max_length=1).request)] = text
    return list(texts.values())
