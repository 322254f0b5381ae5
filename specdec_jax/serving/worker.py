"""Decodes rows in one thread, and compiles programs in another.

Any thread may queue rows. Nothing here reads or writes HTTP.
"""

import contextlib
import dataclasses
import functools
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from specdec_jax.checks import memory
from specdec_jax.checks.fields import unexpected
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import Row, Update, joined
from specdec_jax.engine.scheduler import Lane, PoolSettings, Scheduler, SlotPool
from specdec_jax.request import Drafting, Request
from specdec_jax.serving.protocol import ApiError
from specdec_jax.serving.settings import LOG, ServeSettings, say, say_since

_NOT_READY = 'The server is not ready yet: it compiles.'
_READ_TOGETHER = 4  # the most waiting rows that are read in one call
_LANE_ROWS = 4  # rows in the pool of a lane
_KEEP_SECONDS = 60.0  # for which a lane's programs are kept after its last row
# Seconds after which Python lets another thread run while one compiles. With
# Python's default of 0.005, requests during a compilation took seven times as
# long; with this value, twice.
_TURN_SECONDS = 0.0005
_LOOK_SECONDS = 0.1  # between two checks for rows past their deadline
_STOP_IDS = 8  # stop ids per row, or more if the engine has more
_Tell = Callable[[int, Update], None]
# Pairs: a name for the log, and a function that compiles what it names.
_Runs = Iterator[tuple[str, Callable[[], object]]]
# Kinds of rows whose rounds need different programs.
_SAMPLED, _GREEDY, _PLAIN = 'sampled', 'greedy', 'greedy, no drafter'


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
  """Lets other threads of Python run often beside this one."""
  before = sys.getswitchinterval()
  sys.setswitchinterval(_TURN_SECONDS)
  try:
    yield
  finally:
    sys.setswitchinterval(before)


class Worker:
  """Decodes rows as they come; a thread of its own directs the device.

  Attributes:
    engine: the engine whose models decode.
    settings: sizes and limits.
    scheduler: decodes the rows; a kind of rows that needs programs of its own
      has a lane, whose programs another thread compiles meanwhile.
    speculates: whether a drafter is used.
    least_length: a greedy row with a lower limit on its tokens is decoded
      plainly, since a drafter pays only for longer outputs.
    is_compiled: whether all programs are compiled. Rows are taken before that,
      once the programs for one row are compiled; meanwhile pools are smaller,
      and inputs are padded to more tokens.
    failure: the error that ended the threads; None if there was none.
  """

  def __init__(
    self,
    engine: Engine,
    settings: ServeSettings,
    measured: Calibration | None = None,
  ):
    """Starts nothing; call `start`.

    Args:
      engine: the engine whose models decode. If it adapts gamma or lets its
        drafter rest, it decides by the costs in the calibration, if there is
        one.
      settings: sizes and limits.
      measured: a calibration, which decides the gamma of greedy rows by the
        size of their pool. None: they are decoded plainly in pools for whose
        size `Engine.speculation_pays` is false. Sampled rows have the engine's
        gamma in any case.

    Raises:
      ValueError: the slots cannot fit into memory, the engine splits rows over
        devices, or the calibration is of other models or of another device
        (`CalibrationError`).
    """
    self.engine, self.settings = engine, settings
    plan, self.least_length = None, 0
    if measured is not None:
      measured.direct(engine, settings.rows)
      plan = measured.plan(settings.rows, engine.drafting)
      self.least_length = measured.least_length(1)
    elif settings.speculative is None:
      plan = {
        size: engine.drafting if engine.speculation_pays(size) else Drafting()
        for size in settings.sizes
      }
    pool = PoolSettings(settings.rows, gammas=plan, sizes=settings.sizes)
    pays = plan is None or any(drafting.gamma for drafting in plan.values())
    self.speculates: bool = engine.has_drafter and pays
    if settings.speculative is not None:
      self.speculates = settings.speculative
    if self.speculates:
      _ = engine.drafter  # raises if there is none
    # None: the engine decides, which knows where a drafter slows beams down.
    self._drafts = None if self.speculates else False
    if (multiple := engine.programs.row_multiple) > 1:
      expected = '1: a pool of one row cannot be split'
      raise unexpected('Placement.data', expected, multiple)
    self._texts = self._texts_of_all_widths()
    self._counts = (1, _READ_TOGETHER)[: settings.rows]
    widest = self._some(self._texts[-1], max_length=1)
    self._make_pool = functools.partial(
      SlotPool,
      engine.programs,
      pool,
      [widest],
      self._of_any_kind(joined([widest])),
      self._counts,
    )
    self.ordinary: SlotPool = self._make_pool(compiled=set())
    lanes = PoolSettings(rows=min(_LANE_ROWS, settings.rows))
    self.scheduler = Scheduler(engine.programs, lanes, ordinary=self.ordinary)
    self._lock = self.scheduler.lock
    self.is_compiled = False
    self.failure: str | None = None
    self._to_compile = queue.SimpleQueue[Lane | None]()
    self._taken: set[Row] = set()  # rows without their last update
    self._refuses: str | None = _NOT_READY
    self._ends = False
    self._compiler = threading.Thread(target=self._compile, daemon=True)
    self._thread = threading.Thread(target=self._run, daemon=True)

  # Methods that other threads call.

  def start(self) -> None:
    """Starts the compiling thread, which starts the decoding thread."""
    self._compiler.start()

  def rows(
    self, texts: Sequence[Any], tell: _Tell, **options: Any
  ) -> list[Row]:
    """Makes the rows of all outputs of one request, in order.

    Args:
      texts: the inputs.
      tell: is called with a row's index and each update of the row. A caller
        may set other fields of the rows before `take`.
      **options: the options of `Engine.generate`.

    Raises:
      ValueError: the engine refuses a text or an option.
    """
    request = self.engine.text_request(texts, self._drafts, **options)
    rows = [*request.rows]
    for index, outputs in request.passed_over.items():
      rows.insert(index, Row(request.terms, index, passed_over=outputs))
    deadline = time.monotonic() + self.settings.max_seconds
    for row in rows:
      row.tell, row.deadline = tell, deadline
      # The row keeps the kind, so that `take` is quick while it holds a lock.
      is_ordinary = self.scheduler.kind_of(row) is None
      is_short = 0 < row.max_length < self.least_length and row.is_simple
      row.is_plain = is_ordinary and is_short
    return rows

  def take(self, rows: Sequence[Row]) -> None:
    """Queues rows, all of them or none; rows with an empty text end at once.

    Raises:
      ApiError: the queue has no room for all of them, or the server is not
        ready or is stopping.
    """
    decoded = [row for row in rows if not row.passed_over]
    with self._lock:
      if self._refuses is not None:
        raise ApiError(self._refuses, status=503)
      most, waiting = self.settings.max_waiting, self.scheduler.num_waiting
      if waiting + len(rows) > most:
        message = f'{waiting} outputs wait; {len(rows)} more exceed {most}.'
        message += ' Try again later.'
        raise ApiError(message, status=429, code='queue_full')
      self._taken.update(decoded)
      for lane in self.scheduler.submit(decoded):
        self._to_compile.put(lane)
    over = [row for row in rows if row.passed_over]
    self._tell_all((row, Update(outputs=row.passed_over)) for row in over)

  def cancel(self, rows: Iterable[Any]) -> None:
    """Cancels rows; their listeners get no further update."""
    with self._lock:
      self._taken.difference_update(rows)
      self.scheduler.cancel(rows)

  def refuse(self, why: str) -> None:
    """Refuses further rows with the message `why`; earlier rows go on."""
    with self._lock:
      if self._refuses in (None, _NOT_READY):
        self._refuses = why

  def stop(self) -> None:
    """Ends all rows with the error 'stopped', and both threads."""
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
    """Whether the worker is ready, and not stopping."""
    return self._refuses is None

  @property
  def compiling(self) -> list[str]:
    """Names the kinds of rows that wait for their programs."""
    lanes = [*self.scheduler.lanes.values()]
    return [lane.name for lane in lanes if lane.uses is None]

  @property
  def num_rows(self) -> int:
    """The number of rows that were taken and are not finished."""
    return self.scheduler.num_waiting + self.scheduler.num_running

  # Methods of the decoding thread.

  def _run(self) -> None:
    try:
      while not self._ends:
        with self._lock:
          if not (self.scheduler.has_work or self._ends):
            # Rows that wait for programs are no work yet, but have a deadline.
            self._lock.wait(_LOOK_SECONDS if self._taken else None)
          now = time.monotonic()
          late = [row for row in self._taken if row.deadline <= now]
        self._tell_all((row, Update(error='deadline')) for row in late)
        self.cancel(late)
        self._tell_all(self.scheduler.step())
    except Exception as failure:
      self._fail(failure)
    self.is_compiled = False
    with self._lock:
      left = list(self._taken)
    error = 'failed' if self.failure else 'stopped'
    self._tell_all((row, Update(error=error)) for row in left)

  def _fail(self, failure: Exception) -> None:
    """Records a failure, refuses further rows and ends both threads."""
    LOG.exception('The scheduler failed.')
    with self._lock:
      self.failure = repr(failure)
      self._refuses = 'The server has failed; see its log.'
      self._ends, self.is_compiled = True, False
      self._lock.notify()
    self._to_compile.put(None)

  def _tell_all(self, updates: Iterable[tuple[Row, Update]]) -> None:
    for row, update in updates:
      if row.is_cancelled or row.tell is None:
        continue
      if update.is_last:
        self._taken.discard(row)
      try:
        row.tell(row.index, update)
      except RuntimeError:  # the listener's event loop has ended
        self.cancel([row])

  # Methods of the compiling thread.

  def _compile(self) -> None:
    """Compiles all programs; rows are taken once the first are compiled.

    After that, it compiles the programs of each new lane, whose rows wait
    meanwhile.
    """
    begin = time.perf_counter()
    try:
      pool = self._make_pool()
      runs = [*self._rehearsals(pool), *self._short_searches()]
      for number, (name, run) in enumerate(runs, 1):
        if self._ends:
          return
        say('compiling', what=name, number=number, of=len(runs))
        with short_turns():
          run()
        self.ordinary.compiled = pool.used.copy()
        if number == 1:
          self._thread.start()
          with self._lock:
            if self._refuses == _NOT_READY:  # else `refuse` was called
              self._refuses = None
          say_since('ready', begin)
        if not self._to_compile.empty():
          self._compile_lane(self._to_compile.get())
      with self._lock:
        self.is_compiled = not self._ends
      memory.give_back()
      say_since('compiled', begin)
    except Exception as failure:
      self._fail(failure)
    while not self._ends:
      try:
        # No variable here holds a lane, which would keep its programs alive.
        self._compile_lane(self._to_compile.get(timeout=_KEEP_SECONDS / 4))
      except queue.Empty:
        self._forget_lanes(time.monotonic() - _KEEP_SECONDS)

  def _compile_lane(self, lane: Lane | None) -> None:
    """Compiles the programs of a lane, unless its rows were cancelled.

    Args:
      lane: the lane; None, which `stop` queues, compiles nothing.
    """
    if lane is None:
      return
    begin = time.perf_counter()
    self._forget_lanes()
    try:
      with short_turns():
        if not self.scheduler.compile(lane):
          self._to_compile.put(lane)
    except Exception:
      self._tell_all(self.scheduler.fail(lane))
    memory.give_back()
    say_since('compiled a lane', begin, what=lane.name)

  def _forget_lanes(self, before: float = 0.0) -> None:
    """Frees the programs of idle lanes.

    Args:
      before: frees lanes last used before that `time.monotonic()`; 0 frees
        lanes until there is room for another, and waits while all are used.
    """
    number = len(self.scheduler.lanes)
    while not (self.scheduler.forget_idle(before) or self._ends):
      time.sleep(_LOOK_SECONDS)
    left = len(self.scheduler.lanes)
    if left < number:
      memory.give_back()
      say('forgot lanes', left=left)

  def _rehearsals(self, pool: SlotPool) -> _Runs:
    """Yields short decodes that together use all programs.

    The programs that are needed most come first.

    JAX compiles a program again for arrays whose placement comes from another
    program. So each pool is filled from nothing and from each smaller pool, all
    of it twice.

    Args:
      pool: a pool for these decodes alone.

    Yields:
      A name for the log, and a function that decodes, and so compiles.
    """

    def rehearsal(*decodes: tuple[Any, ...]) -> Callable[[], object]:
      return functools.partial(self._rehearse, pool, decodes)

    sizes, counts = self.settings.sizes, self._counts
    several = sizes[min(1, len(sizes) - 1)]
    widest = self._texts[-1]
    for size in sizes:
      pairs = [(x, count) for x in sizes if x <= size for count in counts[:x]]
      moved = [(widest, _SAMPLED, min(n, x), x, (size, x)) for x, n in pairs]
      yield f'{size} rows', rehearsal(*moved, *moved)
      for kind in (_GREEDY, _PLAIN):
        yield f'{size} rows, {kind}', rehearsal((widest, kind, 1, size))
    for text in self._texts:
      inputs = f'inputs of {len(text)}'
      for kind in (_GREEDY, _PLAIN):  # a single row, which others join
        alone = (text, kind, 1, 1, (1, several)), (widest, _SAMPLED, 1, 1)
        yield f'a row alone, {inputs}, {kind}', rehearsal(*alone)
      numbers = [min(count, several) for count in counts[:several]]
      read = [(text, _SAMPLED, number, several) for number in numbers]
      yield f'reading, {inputs}', rehearsal(*read)

  def _rehearse(self, pool: SlotPool, decodes: Iterable[Any]) -> None:
    """Decodes short outputs to compile programs; no one reads the outputs.

    Each item of `decodes` has a text, a kind, a number of rows, the size of the
    pool, and the sizes that the pool takes later.
    """
    # The outputs have more tokens than two rounds make.
    longest = 2 * pool.policy.longest + 3
    longest = min(longest, self.engine.config.max_decode_len)
    for text, kind, count, *sizes in decodes:
      is_sampled = kind == _SAMPLED
      options: dict[str, Any] = {'max_length': longest, 'stop_ids': ()}
      options |= {'log_probs': is_sampled, 'temperature': float(is_sampled)}
      row = self._some(text, **options)
      row.streams, row.is_plain = True, kind == _PLAIN
      rows = [dataclasses.replace(row) for _ in range(count)]
      pool.rehearse(rows, *sizes)

  def _short_searches(self) -> _Runs:
    """Yields a short beam search for each served width and each input width."""
    for width, text in itertools.product(self.settings.beams, self._texts):
      options = {'num_beams': width, 'num_samples': width, 'max_length': 1}
      row = self._some(text, **options)
      name = f'a search of {width} beams, inputs of {len(text)}'
      yield name, functools.partial(self.scheduler.keep, row)

  # Methods that make rows and requests for compilations.

  def _some(self, text: Any, **options: Any) -> Row:
    """Makes a row for warm-up, in any of the target's languages."""
    language = next(iter(self.engine.codec.languages().known), None)
    options |= {'source_lang': language, 'target_lang': language}
    return self.engine.text_request([text], self._drafts, **options).rows[0]

  def _of_any_kind(self, request: Request) -> Request:
    """Returns a copy of a one-row request that stands for rows of any kind.

    Options that rows may differ in (top-k, top-p and stop ids) become arrays
    with one entry per row, and whatever an ordinary row may use is switched on.
    So programs that are compiled for the copy decode all ordinary rows.
    """
    sampling: Any = request.sampling
    top = {'top_k': np.zeros(1, np.int32), 'top_p': np.ones(1, np.float32)}
    num_stops = max(_STOP_IDS, len(self.engine.codec.stop_ids))
    stop_ids: Any = np.full((1, num_stops), -1, np.int32)
    return dataclasses.replace(
      request,
      sampling=sampling.replace(**top),
      stop_ids=stop_ids,
      greedy=False,
      forbids_stops=True,
      with_log_probs=True,
      verification='block' if self.engine.tree is None else 'token',
    )

  def _texts_of_all_widths(self) -> list[list[int]]:
    """Makes a text for each width of padded inputs, the widest last."""
    codec, texts = self.engine.codec, {}
    some_id = codec.tokenizer.inputs.vocab_size - 1
    nothing = codec.input_ids([], next(iter(codec.languages().known), None))
    most = self.engine.config.max_input_len - len(nothing)
    for length in sorted({most, *(1 << n for n in range(most.bit_length()))}):
      text = [some_id] * length
      texts[self._some(text, max_length=1).widths] = text
    return list(texts.values())
