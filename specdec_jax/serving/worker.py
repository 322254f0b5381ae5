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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.checks.fields import unexpected
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import TextBatch
from specdec_jax.engine.scheduler import (
  PoolSettings,
  Row,
  Scheduler,
  Update,
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
_STOP_IDS = 8  # that each row has room for, if the engine has no more
# Kinds of rows for which rounds have programs of their own.
_SAMPLED, _GREEDY, _PLAIN = 'sampled', 'greedy', 'greedy, no drafter'


@dataclasses.dataclass(eq=False, kw_only=True)
class ServedRow(Row):
  """One output that is asked for; or a beam search.

  Attributes:
    tell: is called with each update, by the thread of the worker.
    deadline: `time.monotonic()` at which it ends in any case.
    search: runs more rounds of a beam search, see `Engine.search`; None for
      other rows.
  """

  tell: Callable[[Update], None]
  deadline: float = math.inf
  search: Callable[[int], list[Completion] | None] | None = None


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
    self._ruled: list[ServedRow] = []  # that have no scheduler yet
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
    if row.is_simple and is_short:
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
      if not self.is_compiled and any(row.search for row in rows):
        raise ApiError(_NOT_READY, status=503)
      most, waiting = self.settings.max_waiting, self.num_waiting
      if waiting + len(rows) > most:
        message = (
          f'{waiting} outputs wait, and {len(rows)} more would be more than'
          f' {most}. Try again later.'
        )
        raise ApiError(message, status=429, code='queue_full')
      self._taken.update(decoded)
      self._searches.extend(row for row in decoded if row.search is not None)
      outputs = [row for row in decoded if row.search is None]
      self._ruled += [r for r in outputs if _has_rules(r.batch.request)]
      self.submit(r for r in outputs if not _has_rules(r.batch.request))
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
  def num_waiting(self) -> int:
    """Rows without a slot, and beam searches."""
    waiting: list[Any] = [self._waiting, self._searches, self._ruled]
    waiting += [pool._waiting for pool in [*self._pools.values()]]
    return sum(map(len, waiting))

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
      while True:
        with self._lock:
          while not (self._has_any_work or self._ends):
            self._lock.wait()
        if self._ends:
          break
        self._end_late()
        for row, update in self.step():
          self._tell(row, update)
        self._step_ruled()
        self._search()
    except Exception as failure:
      self._fail(failure)
    self.is_compiled = False
    with self._lock:
      self._waiting.clear()
      self._searches.clear()
      self._ruled.clear()
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
    return bool(self.has_work or self._searches or self._ruled or self._pools)

  def _step_ruled(self) -> None:
    """A step of the rows with rules on tokens.

    Those whose rules are on the same and have the same constraint share a pool,
    whose programs are compiled when they are first needed.
    """
    with self._lock:
      rows = self._ruled.copy()
      self._ruled.clear()
    for row in rows:
      request, source = row.batch.request, row.source
      sizes = map(
        np.shape, jax.tree.leaves((request.token_rules, request.stop_ids))
      )
      ends = request.stop_ids.tobytes(), id(source.rules.automaton)
      key = jax.tree.structure(request), source.widths, *sizes, *ends
      if key not in self._pools:
        if len(self._pools) == _MOST_POOLS:
          self._ruled.append(row)
          continue
        pool = PoolSettings(rows=min(_RULED_ROWS, self.settings.rows))
        self._pools[key] = Scheduler(self.engine, pool, request, source.widths)
      self._pools[key].submit([row])
    for key, scheduler in list(self._pools.items()):
      for done, update in scheduler.step():
        self._tell(done, update)
      if not scheduler.has_work:
        del self._pools[key]

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
      update = Update(error='search failed')
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
    """Compiles all programs; with the first ones there, rows are taken."""
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
      with self._lock:
        self.is_compiled = not self._ends
      say_since('compiled')
    except Exception as failure:
      self._fail(failure)

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
    for width, text in itertools.product(self.settings.beams, self._texts):
      batch = self._some(text, num_beams=width, num_samples=width, max_length=1)
      search = self.engine.search(batch)
      name = f'a search of {width} beams, inputs of {len(text)}'
      yield name, functools.partial(search, 1)

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


def _has_rules(request: Request) -> bool:
  """Whether a request needs other programs than all others share."""
  return request.token_rules is not None or request.sampling.min_p is not None
