"""Requests that come at any time, through the slots of one engine.

One thread directs the device. Between two looks at it, finished and cancelled
rows leave their slots and the rows that have waited longest get them. Nothing
here knows of HTTP.
"""

import collections
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.decoding.pool import PoolView
from specdec_jax.decoding.row_layout import PoolPrograms
from specdec_jax.decoding.state import (
  BLOCK,
  TOKEN,
  Request,
  whole_buckets,
)
from specdec_jax.engine.completion import Text
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.slots import Slots
from specdec_jax.engine.text_batch import STOP_STRING_ROUNDS
from specdec_jax.engine.trace import Round
from specdec_jax.measure.calibration import Calibration
from specdec_jax.models import backend
from specdec_jax.serving.drafting import Drafting
from specdec_jax.serving.log import say
from specdec_jax.serving.rehearsal import (
  READ_TOGETHER,
  Rehearsal,
  Use,
  widths_of,
)
from specdec_jax.serving.rows import News, Row, read_together
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.types import FinishReason

_LOG = logging.getLogger(__name__)
_ALONE_ROUNDS = 12  # where one row runs and none waits; plain ones are shorter
_NOT_READY = 'The server is not ready yet: it compiles.'
_SEARCH_ROUNDS = 4  # of a beam search, between two looks at the pool
_SHRINK_AFTER = 16  # looks at a pool that is larger than it need be
_STOP_IDS = 8  # that each row has room for, if the engine has no more
_TIMED = 64  # finished rows that the time of a place in the queue is taken from


class Busy(Exception):
  """The queue is full.

  Attributes:
    retry_after: seconds after which there may be room.
  """

  def __init__(self, message: str, retry_after: int):
    super().__init__(message)
    self.retry_after = retry_after


class Stopped(Exception):
  """The server does not take requests: it is stopping, or has failed."""


@dataclasses.dataclass(frozen=True)
class _Look:
  """What the host saw of the pool: outputs, and the slots that they are in.

  Later the rows may be in other slots, or in none.
  """

  view: Any = None
  done: Sequence[tuple[Row, int]] = ()
  running: Sequence[tuple[Any, int]] = ()  # only those that stream


class Scheduler:
  """Decodes rows as they come; a thread of its own directs the device.

  Attributes:
    engine: the engine whose models decode.
    settings: sizes and limits.
    drafting: how long drafts are.
    is_compiled: whether all programs are. Rows are taken once those for one row
      are; until the others are, pools are smaller and inputs read wider.
    failure: what ended the threads; None if it is well.
  """

  def __init__(
    self,
    engine: Engine,
    settings: ServeSettings,
    measured: Calibration | None = None,
  ):
    """Starts nothing; call `start`.

    Args:
      engine: the engine whose models decode.
      settings: sizes and limits.
      measured: see `Drafting`.

    Raises:
      ValueError: the slots cannot fit into memory, the engine splits rows over
        devices, or as `Drafting`.
    """
    self.engine, self.settings = engine, settings
    self.is_compiled = False
    self.failure: str | None = None
    self._waiting: collections.deque[Row] = collections.deque()
    self._searches: collections.deque[Row] = collections.deque()
    self._taken: set[Row] = set()  # rows that have not heard their last news
    self._changed = threading.Condition()
    self._refuses: str | None = _NOT_READY
    self._ends = False
    self.drafting = Drafting(engine, settings, measured)
    room = self.drafting.room
    self._compiled: set[Use] = set()
    self._pool_programs: PoolPrograms | None = None
    self._finished: collections.deque[float] = collections.deque(maxlen=_TIMED)
    self._too_large = 0  # looks since the pool had to be as large as it is
    self._num_stops = max(_STOP_IDS, len(engine.stop_ids))
    self._texts = self._all_widths()
    self._shapes = [self._short(text) for text in self._texts]
    if self._shapes[0].batch.batch_multiple > 1:
      raise ValueError(
        'Expected an engine that splits its models over devices, or has one;'
        ' got one that splits rows, which a pool of one row cannot be. Leave'
        ' data out of its Placement.'
      )
    example = self._request([self._shapes[-1]])
    self._widest = widths_of(example)
    draft_slots = dataclasses.replace(example, gamma=room).draft_slots
    width, prompt_width = self._widest
    num_slots = whole_buckets(
      prompt_width + engine.max_decode_len + draft_slots
    )
    engine.room.check(settings.rows, width, num_slots, 1 + draft_slots)
    self._new_slots: Callable[[], Slots[Row]] = lambda: Slots(
      self._programs, example, num_slots, room, READ_TOGETHER
    )
    self._slots = self._new_slots()
    self._compiler = threading.Thread(target=self._compile, daemon=True)
    self._thread = threading.Thread(target=self._run, daemon=True)

  # What other threads call.

  def start(self) -> None:
    """Begins to compile, and soon to decode."""
    self._compiler.start()

  def row(
    self,
    text: Any,
    tell: Callable[[News], None],
    streams: bool = False,
    plain: bool = False,
    shows_rounds: bool = False,
    **options: Any,
  ) -> Row:
    """Makes a row of a text and options of `Engine.generate`.

    Args:
      text: the input.
      tell: see `Row`.
      streams: see `Row`.
      plain: `Row.is_plain`; only of greedy rows, since a sample would depend on
        the rows beside it.
      shows_rounds: see `Row`.
      **options: of `Engine.generate`.

    Raises:
      ValueError: as `Engine.generate`.
    """
    speculative = self.speculates
    searches = options.get('num_beams') is not None
    if searches:
      speculative = speculative and backend.ways().drafts_beams
    batch = self.engine.text_batch([text], speculative, **options)
    search = self.engine.search(batch, speculative) if searches else None
    count = np.sum(batch.request.stop_ids >= 0) if batch.rows else 0
    if count > self._num_stops:
      raise ValueError(
        f'stop_ids has {count} entries, {self._num_stops} at most are served.'
      )
    deadline = time.monotonic() + self.settings.max_seconds
    row = Row(batch, tell, streams, deadline, search, plain, shows_rounds)
    if plain and not row.is_simple:
      raise ValueError(
        'Only greedy rows without log-probabilities are decoded plainly beside'
        f' others; got {batch.options.sampling}.'
      )
    if row.is_simple and self.drafting.is_too_short(batch):
      row.is_plain = True
    return row

  def submit(self, rows: Sequence[Row]) -> None:
    """Queues rows, all of them or none; those without a text end at once.

    Raises:
      Busy: there is no room for all of them.
      Stopped: no rows are taken.
    """
    with self._changed:
      if self._refuses is not None:
        raise Stopped(self._refuses)
      if not self.is_compiled and any(row.search for row in rows):
        raise Stopped(_NOT_READY)
      most, waiting = self.settings.max_waiting, self.num_waiting
      if waiting + len(rows) > most:
        raise Busy(
          f'{waiting} outputs wait, and {len(rows)} more would be more than'
          f' {most}. Try again later.',
          self._retry_after(),
        )
      decoded = [row for row in rows if row.batch.rows]
      self._taken.update(decoded)
      for row in decoded:
        (self._waiting if row.search is None else self._searches).append(row)
      self._changed.notify()
    for row in rows:
      if not row.batch.rows:
        nothing = News(completion=row.batch.passed_over[0])
        row.tell(News(beams=row.search(0) or ()) if row.search else nothing)

  def cancel(self, rows: Iterable[Row]) -> None:
    """Ends rows whose outputs nobody wants any more; they hear nothing."""
    with self._changed:
      for row in rows:
        row.is_cancelled = True
        self._taken.discard(row)
      self._changed.notify()

  def refuse(self, why: str) -> None:
    """Takes no more rows; those that were taken go on."""
    with self._changed:
      if self._refuses in (None, _NOT_READY):
        self._refuses = why

  def stop(self) -> None:
    """Ends all rows with the error 'stopped', and the thread."""
    self.refuse('The server is stopping.')
    with self._changed:
      self._ends = True
      self._changed.notify()

  def join(self) -> None:
    """Waits for the threads to end."""
    self._compiler.join()
    if self._thread.ident is not None:
      self._thread.join()

  @property
  def speculates(self) -> bool:
    """Whether a drafter helps."""
    return self.drafting.speculates

  @property
  def takes_rows(self) -> bool:
    """Whether it is ready, and not stopping."""
    return self._refuses is None

  @property
  def num_waiting(self) -> int:
    """Rows without a slot, and beam searches."""
    return len(self._waiting) + len(self._searches)

  @property
  def num_running(self) -> int:
    """Rows that have a slot."""
    return len(self._slots.running)

  @property
  def num_rows(self) -> int:
    """Rows that were taken and are not done."""
    return self.num_waiting + self.num_running

  def _retry_after(self) -> int:
    times = self._finished
    if len(times) < 2:
      return 1
    each = (times[-1] - times[0]) / (len(times) - 1)
    return max(1, min(60, math.ceil(each * self.num_waiting)))

  # What the thread that compiles does.

  def _compile(self) -> None:
    """Compiles all programs; with the first ones there, rows are taken."""
    try:
      slots = self._new_slots()
      slots.begin(1, self._widest[0], self.speculates)
      rehearsal = Rehearsal(
        slots, self._request, self.drafting, self.settings.sizes, self._shapes
      )
      uses: dict[Use, Callable[[], Any]] = dict(rehearsal.uses())
      for width in self.settings.beams:
        uses |= self._searches_of(width)
      for number, (use, run) in enumerate(uses.items(), 1):
        if self._ends:
          return
        say('compiling', what=str(use), number=number, of=len(uses))
        run()
        self._compiled.add(use)
        if number == 1:
          self._thread.start()
          with self._changed:
            if self._refuses == _NOT_READY:  # else it was told to take none
              self._refuses = None
      with self._changed:
        self.is_compiled = not self._ends
    except Exception as failure:
      self._fail(failure)

  def _fail(self, failure: Exception) -> None:
    """Ends both threads."""
    _LOG.exception('The scheduler failed.')
    with self._changed:
      self.failure = repr(failure)
      self._refuses = 'The server has failed; see its log.'
      self._ends, self.is_compiled = True, False
      self._changed.notify()

  # What the thread that decodes does.

  def _run(self) -> None:
    try:
      self._slots.begin(1, self._widest[0], self.speculates)
      self._decode()
    except Exception as failure:
      self._fail(failure)
    self.is_compiled = False
    with self._changed:
      self._waiting.clear()
      self._searches.clear()
      left = list(self._taken)
    for row in left:
      self._tell(row, News(error='failed' if self.failure else 'stopped'))

  def _decode(self) -> None:
    look = _Look()
    slots = self._slots
    while True:
      with self._changed:
        while not (
          slots.running or self.num_waiting or self._ends or look.done
        ):
          self._changed.wait()
        ends = self._ends
      if not ends:
        self._drop_waiting()
        self._resize()
        self._fill()
      coming = self._advance() if slots.running and not ends else None
      # The device is busy from here until its answer.
      for row, slot in look.done:
        self._end(row, look.view, slot)
      for row, slot in look.running:
        self._tell_so_far(row, look.view, slot)
      if ends:
        return
      self._search()
      look = _Look()
      if coming is not None:
        look = self._look(jax.device_get(coming))

  def _drop_waiting(self) -> None:
    """Takes rows out of the queues that are not wanted, or too late."""
    now = time.monotonic()
    with self._changed:
      every = [*self._waiting, *self._searches]
      late = [row for row in every if row.deadline <= now]
      gone = {*late, *(row for row in every if row.is_cancelled)}
      if gone:
        self._waiting, self._searches = (
          collections.deque(row for row in queue if row not in gone)
          for queue in (self._waiting, self._searches)
        )
    for row in late:
      self._tell(row, News(error='deadline'))

  def _search(self) -> None:
    """Runs some levels of the beam search that came first.

    It has no slot; others run a round or more between two calls. One that
    fails ends alone.
    """
    if not self._searches:
      return
    row = self._searches[0]
    search: Any = row.search
    try:
      found = search(_SEARCH_ROUNDS)
    except Exception:
      _LOG.exception('A beam search failed.')
      news = News(error='search failed')
    else:
      if found is None:
        return
      news = News(beams=found[::-1])  # the best one first
    with self._changed:
      self._searches.popleft()
    self._tell(row, news)

  def _resize(self) -> None:
    """Takes the smallest pool that is enough; a smaller one after a while."""
    slots = self._slots
    size, wanted = len(slots.owners), len(slots.running) + len(self._waiting)
    sizes = [
      s for s in self.settings.sizes if Use('rounds', s) in self._compiled
    ]
    fits = min((s for s in sizes if s >= wanted), default=sizes[-1])
    self._too_large = self._too_large + 1 if fits < size else 0
    idle = not slots.running
    if fits > size or fits < size and (idle or self._too_large > _SHRINK_AFTER):
      slots.resize(fits)
      self._too_large = 0

  def _fill(self) -> None:
    """Gives free slots to the rows that have waited longest."""
    while free := len(self._slots.free):
      most = READ_TOGETHER if free > 1 else 1
      with self._changed:
        count = min(most, free, len(self._waiting))
        rows = [self._waiting.popleft() for _ in range(count)]
      if not rows:
        return
      filled = [rows[0]] * (READ_TOGETHER - count) if count > 1 else []
      others = [row for row in self._slots.owners if row is not None]
      is_plain = self._is_plain(rows + others)
      plainly = self.drafting.reads_plainly and is_plain
      request = self._request([*rows, *filled])
      widths = widths_of(request)
      alone = Use('alone', 1, widths, True, is_plain)
      if len(self._slots.owners) == 1 and rows[0].is_simple:
        if alone in self._compiled:
          self._slots.hold(request, rows[0], plainly)
          continue
      read = Use('read', len(request.inputs), widths, False, plainly)
      if read not in self._compiled:
        request, plainly = self._request([*rows, *filled], self._widest), False
      self._slots.admit(self._slots.read(request, rows, plainly))

  def _is_plain(self, rows: Sequence[Row]) -> bool:
    """Whether rows, all that are to run, need no drafter."""
    return all(row.is_plain for row in rows)

  def _advance(self) -> PoolView:
    """Starts the next rounds."""
    rows = [row for row in self._slots.owners if row is not None]
    simply = all(row.is_simple for row in rows)
    size = len(self._slots.owners)
    plainly = simply and self._is_plain(rows)
    if Use('rounds', size, (), simply, plainly) not in self._compiled:
      simply = plainly = False  # this one is
    kind = self.drafting.of(size, simply, plainly)
    self._gamma = kind.gamma
    rounds = self._rounds(rows, kind.gamma)
    return self._slots.run(rounds, 1, kind.gamma, kind.simply, kind.ends)

  def _rounds(self, rows: Sequence[Row], gamma: int) -> int:
    """Rounds until the next look, in which nobody who comes gets a slot."""
    if any(row.streams for row in rows):
      return 1  # somebody watches
    stops = any(row.batch.options.stop_strings for row in rows)
    if stops or len(rows) + self.num_waiting > 1:
      return STOP_STRING_ROUNDS
    return _ALONE_ROUNDS if gamma else 3 * _ALONE_ROUNDS

  def _look(self, view: PoolView) -> '_Look':
    """Frees slots; says whose outputs are done, and whose go on."""
    found = view.generation
    now = time.monotonic()
    reasons: Any = np.array(found.finish_reason)
    for slot in self._slots.running:
      row: Any = self._slots.owners[slot]
      rounds = int(found.stats.num_rounds[slot])
      row.num_drafted += self._gamma * (rounds - row.num_rounds)
      row.num_rounds = rounds
      if found.stats.num_drafted is not None:
        row.num_drafted = int(found.stats.num_drafted[slot])
      if row.deadline <= now and reasons[slot] == FinishReason.RUNNING:
        self._tell(row, News(error='deadline'))
        row.is_cancelled = True
      if row.is_cancelled:
        reasons[slot] = FinishReason.LENGTH
      elif row.batch.options.stop_strings:
        produced: Any = found.tokens[slot, : found.length[slot]]
        one = reasons[slot : slot + 1]
        one[:] = row.batch.with_stop_strings(one, {0: produced})
    if not np.array_equal(reasons, found.finish_reason):
      self._slots.set_reasons(reasons)
      found = dataclasses.replace(found, finish_reason=reasons)
      view = dataclasses.replace(view, generation=found)
    done = self._slots.release(view)
    running = [(self._slots.owners[slot], slot) for slot in self._slots.running]
    return _Look(
      view,
      [(row, slot) for row, slot in done if not row.is_cancelled],
      [(row, slot) for row, slot in running if row and row.streams],
    )

  def _end(self, row: Row, view: PoolView, slot: int) -> None:
    """Tells a row its whole output."""
    self._finished.append(time.monotonic())
    found = view.generation
    one = row.batch.completion(found, slot)
    log_probs = one.log_probs if row.batch.options.log_probs else []
    news = News(
      one.text[len(row.told) :],
      one.tokens[row.num_told :],
      log_probs[row.num_told :],
      completion=one,
      num_drafted=row.num_drafted,
      round=self._round(row, view, slot),
    )
    self._tell(row, news)

  def _tell_so_far(self, row: Row, view: PoolView, slot: int) -> None:
    """Tells a row what is new, of the text that will not change."""
    found = view.generation
    tokens: Any = found.tokens[slot, : found.length[slot]]
    stops = row.batch.options.stop_strings
    text = Text(self.engine.tokenizer, tokens, stops).stable
    log_probs: Any = found.log_probs[slot, row.num_told : len(tokens)]
    news = News(
      text[len(row.told) :],
      tokens[row.num_told :].tolist(),
      log_probs.tolist() if row.batch.options.log_probs else [],
      round=self._round(row, view, slot),
    )
    row.told, row.num_told = text, len(tokens)
    self._tell(row, news)

  def _round(self, row: Row, view: PoolView, slot: int) -> Round[int] | None:
    """What the last round brought a row; between two looks there was one."""
    if not row.shows_rounds:
      return None
    return row.round_of(view, slot)

  def _tell(self, row: Row, news: News) -> None:
    if row.is_cancelled:
      return
    if news.is_last:
      self._taken.discard(row)
    try:
      row.tell(news)
    except RuntimeError:  # the loop of its listener has ended
      self.cancel([row])

  # Requests and programs.

  def _programs(self, speculative: bool, prompted: bool, example: Request):
    """The programs, which the slots of both threads share."""
    if self._pool_programs is None:
      loop, params = self.engine.loop(speculative)
      self._pool_programs = PoolPrograms(loop, params, example, prompted)
    return self._pool_programs

  def _request(
    self, rows: Sequence[Row], least: tuple[int, int] = (0, 0)
  ) -> Request:
    request = read_together(rows, self._num_stops, self._verification, least)
    return dataclasses.replace(request, skips_rounds=self.drafting.skips_rounds)

  def _all_widths(self) -> list[list[int]]:
    """A text of each width that texts are read in, the widest last."""
    engine, found = self.engine, {}
    none = engine.input_ids([], self._any_languages.get('source_lang'))
    most = engine.max_input_len - len(none)
    some_id = engine.tokenizer.vocab_size - 1
    for length in sorted({most, *(1 << n for n in range(most.bit_length()))}):
      text = [some_id] * length
      request = self._short(text).batch.request
      found[request.inputs.shape[1], request.prompt_width] = text
    return list(found.values())

  def _short(self, text: Sequence[int]) -> Row:
    options = self._any_languages
    return self.row(text, lambda news: None, max_length=1, **options)

  @property
  def _any_languages(self) -> dict[str, Any]:
    """Languages for texts that nobody reads, if the model has any."""
    known = list(self.engine.languages().known)[:1]
    return {
      f'{side}_lang': one for one in known for side in ('source', 'target')
    }

  @property
  def _verification(self) -> str:
    """How sampled drafts are judged: the same for all rows."""
    engine = self.engine
    branches = engine.has_drafter and engine.drafter.tree is not None
    return TOKEN if branches else BLOCK

  def _searches_of(self, width: int) -> Mapping[Use, Callable[[], Any]]:
    """A short beam search of texts of each width."""
    found: dict[Use, Callable[[], Any]] = {}
    for text, short in zip(self._texts, self._shapes, strict=True):
      options = self._any_languages | dict(
        num_beams=width, num_samples=width, max_length=1
      )
      row = self.row(text, lambda news: None, **options)
      use = Use('beams', width, widths_of(self._request([short])))
      found[use] = functools.partial(row.search or int, 1)
    return found
