"""One scheduler: rows that come at any time share the slots of one engine.

`submit` queues rows. Each `step` gives free slots to those that wait, starts
rounds on the device, and says what became of the rows; `drain` steps until
nothing is left. `Continuous` feeds it a list of texts, `Engine.stream` one
text, and `serving` feeds it from other threads.

Without cancelled rows its decisions follow from the rows and from the device's
answers, never from a clock, so that all processes of a run decide alike.
"""

import collections
import copy
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from specdec_jax.checks.fields import Bound, Checked, unexpected
from specdec_jax.decoding.pool import Pool, PoolPrograms, PoolView, take_rows
from specdec_jax.engine.completion import Completion, Text
from specdec_jax.engine.padding import rounded_up
from specdec_jax.engine.request import TextBatch, TextRow, joined
from specdec_jax.engine.trace import Round
from specdec_jax.request import Drafting, Request, whole_buckets
from specdec_jax.types import FinishReason, Generation, Positive

# Rounds after which the host looks in any case, and where it looks for a stop
# string or others may come.
_MAX_ROUNDS = 32
_FEW_ROUNDS = 4
_ALONE_ROUNDS = 12  # where one row runs and none waits; plain ones: 3 times
_SHRINK_AFTER = 16  # steps with a pool that is larger than it need be


@dataclasses.dataclass(frozen=True)
class PoolSettings(Checked):
  """How rows go through the slots; no setting changes a greedy output.

  Attributes:
    rows: B, slots; rows that are decoded together.
    refill: the host looks earlier once this many rows have finished; None is an
      eighth of the rows. A smaller number keeps the slots fuller and takes more
      of the host's time.
    gammas: rows -> how greedy rows in a pool of so many or fewer rows are
      drafted for, as `Calibration.plan` has it. The largest number of rows
      replaces `rows`. Sampled rows have the engine's gamma, so that a sample
      does not depend on how many other rows are running. None is the engine's
      gamma for all.
    sizes: rows of the pools that rows may be moved to when fewer are left; None
      is the rows of `gammas`, or `rows` alone.

  Raises:
    ValueError: a value is outside its range.
  """

  rows: Positive = 16
  refill: Positive | None = None
  gammas: Annotated[Mapping[Positive, Drafting], Bound(1)] | None = None
  sizes: Sequence[Positive] | None = None

  def pool_sizes(self, multiple: int) -> list[int]:
    """Rows of the pools, in order; multiples of the devices that split rows."""
    sizes = self.sizes or self.gammas or [self.rows]
    return sorted({rounded_up(size, multiple) for size in sizes})


class DraftPolicy:
  """How long drafts are, by the rows of the pool and what these ask for.

  A greedy row's output is the target's own whatever is proposed to it, so its
  drafts may be what is quickest just now. A sample depends on where drafts end,
  so sampled rows always have the engine's gamma.

  Attributes:
    room: the longest draft.
    skips_rounds: whether rows go on without the drafter in some pools.
  """

  def __init__(self, settings: PoolSettings, request: Request, multiple: int):
    """
    Args:
      settings: has `gammas`.
      request: has the drafting of sampled rows; gamma 0 decodes all rows
        plainly.
      multiple: pools have a multiple of so many rows. Of pools that become one
        the larger one's gamma stays: it was chosen for more rows, whose calls
        cost more, so it rather proposes too few tokens.
    """
    self._base = request.drafting
    self._by_rows = {settings.rows: self._base}
    if settings.gammas is not None and request.gamma:
      plan = sorted(settings.gammas.items())
      self._by_rows = {rounded_up(rows, multiple): one for rows, one in plan}
    gammas = [self._base.gamma, *(one.gamma for one in self._by_rows.values())]
    self.room = max(gammas)
    self.skips_rounds = self.room > 0 and 0 in gammas

  @property
  def gammas(self) -> dict[int, int]:
    """Rows -> gamma of greedy rows; empty without drafts."""
    if not self.room:
      return {}
    return {rows: one.gamma for rows, one in self._by_rows.items()}

  def of(self, size: int, varies: bool, plainly: bool) -> Drafting:
    """How the rounds of a pool are drafted for.

    Args:
      size: rows of the pool.
      varies: whether gamma may depend on the size.
      plainly: whether no row is to be drafted for.
    """
    if plainly:
      return Drafting()
    if not varies:
      return self._base
    larger = [rows for rows in self._by_rows if rows >= size]
    return self._by_rows[min(larger, default=max(self._by_rows))]


@dataclasses.dataclass(frozen=True)
class Update:
  """What a row's listener is told.

  Attributes:
    text: text that is new, and will not change.
    tokens: ids that are new.
    log_probs: of these, if the row wants them.
    completion: the whole output, at its end.
    round: what became of the last draft, if the row shows rounds.
    beams: the outputs of a beam search instead, the best one first.
    error: why it ends without an output: 'deadline', 'stopped', 'failed', or
      'failed alone'.
  """

  text: str = ''
  tokens: Sequence[int] = ()
  log_probs: Sequence[float] = ()
  completion: Completion | None = None
  round: Round[int] | None = None
  beams: Sequence[Completion] = ()
  error: str | None = None

  @property
  def is_last(self) -> bool:
    """Whether nothing follows."""
    is_done = self.completion is not None or bool(self.beams)
    return is_done or self.error is not None


@dataclasses.dataclass(eq=False)
class Row:
  """One output that is to be decoded.

  Attributes:
    batch: its text and options, as the engine takes them.
    index: its row of the batch.
    streams: whether there are updates before the end.
    is_plain: whether it is to be decoded without a drafter, where no other row
      runs beside it.
    shows_rounds: whether its updates have rounds; then it streams.
    is_cancelled: whether nobody wants it any more.
  """

  batch: TextBatch
  index: int = 0
  streams: bool = False
  is_plain: bool = False
  shows_rounds: bool = False
  is_cancelled: bool = False
  num_accepted: int = 0
  num_passed: int = 0
  num_told: int = 0  # tokens
  num_sent: int = 0  # characters
  num_read: int = 0  # tokens that are in its text

  @property
  def is_simple(self) -> bool:
    """Whether the program without sampling and log-probabilities is enough."""
    options = self.batch.options
    greedy = options.sampling.greedy and not options.min_length
    return greedy and not options.log_probs

  @property
  def source(self) -> TextRow:
    """What the row is made of."""
    return self.batch.rows[self.index]

  @functools.cached_property
  def _text(self) -> Text:
    return self.batch.text()

  def read(self, generation: Generation, slot: int) -> Text:
    """Its text so far, without a stop id."""
    has_stop_id = generation.finish_reason[slot] == FinishReason.STOP
    end: Any = generation.length[slot] - has_stop_id
    tokens: Any = generation.tokens[slot, self.num_read : end]
    self._text.extend(tokens)
    self.num_read += len(tokens)
    return self._text

  def completion(self, generation: Generation, slot: int) -> Completion:
    """The whole output, once it is finished."""
    done = self.batch.completion(generation, slot)
    if not self.batch.options.stop_strings:
      return done
    return self.read(generation, slot).cut(done)

  def last_round(self, view: PoolView, slot: int) -> Round[int] | None:
    """The row's last round, if a chain was judged in it.

    Args:
      view: of a pool that has run one round.
      slot: the row's.
    """
    draft, generation = view.draft, view.generation
    if draft is None or draft.tree is not None:
      return None
    length: Any = draft.length[slot]
    proposed: Any = draft.tokens[slot, :length]
    end = generation.length[slot]
    new: Any = generation.tokens[slot, self.num_told : end]
    accepted = int(generation.stats.num_accepted[slot]) - self.num_accepted
    self.num_accepted += accepted
    after = new[accepted : accepted + 1].tolist()
    passed = int(generation.stats.num_passed[slot]) - self.num_passed
    self.num_passed += passed
    as_block = self.batch.request.judges_blocks
    return Round(
      proposed.tolist(),
      accepted,
      after[0] if after else None,
      passed if as_block else None,
    )


def widths_of(request: Request) -> tuple[int, int]:
  """Widths of inputs and prompts."""
  return request.inputs.shape[1], request.prompt_width


class Slots:
  """A pool on the device, and the owner of each of its slots.

  Attributes:
    owners: the owner of each slot; None if it is free.
    programs: what runs on the device.
    width: width of the inputs that rows are read with; it only grows.
  """

  def __init__(
    self,
    programs: Callable[[Request], PoolPrograms],
    request: Request,
    tokens: int,
    room: int,
    read_rows: int,
  ):
    """Makes no slots; call `begin`.

    Args:
      programs: gives those of rows without text, as many as are read together.
      request: any request of the kind that will be read, on the host.
      tokens: slots of the caches for prompts and outputs.
      room: the largest gamma, for whose draft they have more.
      read_rows: rows that are read together, for tracing.
    """
    self._request, self._read_rows = request, read_rows
    self._gamma, self._tokens = room, tokens
    self._unread: Request | None = None  # see `hold`
    self.programs = programs(self._example(request.inputs.shape[1]))
    self._empty_rows: dict[int, Pool] = {}
    self.owners: list[Row | None] = []

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
      prompt=rows.prompt[:, :1],
      prompt_length=np.ones((count,), np.int32),
      drafting=rows.drafting.replace(gamma=self._gamma),
      slots=self._tokens - 1,
    )

  def _empty_row(self, width: int) -> Pool:
    if width not in self._empty_rows:
      row = self.programs.empty_row(self._example(width))
      self._empty_rows[width] = row
    return self._empty_rows[width]

  def _in_slots(self, request: Request) -> Request:
    """The request, with the cache slots that all others have."""
    return request.replace(
      drafting=request.drafting.replace(gamma=self._gamma),
      slots=self._tokens - request.prompt_width,
    )

  def admit(self, request: Request, rows: Sequence[Row]) -> None:
    """Reads rows and gives them free slots.

    Args:
      request: of these rows, and perhaps more to fill it up; inputs and prompts
        are as wide as they are to be read.
      rows: their owners.
    """
    self.width = max(self.width, request.inputs.shape[1])
    empty = self._empty_row(self.width)
    programs = self.programs
    self._make()
    read = programs.read(self._in_slots(request), empty)
    free = self.free[: len(rows)]
    places = np.zeros((len(self.owners),), np.int32)
    places[: len(free)] = free
    self._pool = programs.admit(self._pool, read, places, np.int32(len(free)))
    for slot, row in zip(free, rows, strict=True):
      self.owners[slot] = row

  def hold(self, request: Request, owner: Row) -> None:
    """Gives a row the slot of a pool of one; the next `run` reads it.

    The pool becomes the row itself, as wide as its input: `hold` and `run` are
    one call of the device, where `admit` and `run` are three and a copy.

    Args:
      request: of this row, as for `admit`.
      owner: the row's.
    """
    self._unread = self._in_slots(request)
    self.width = max(self.width, request.inputs.shape[1])
    self.owners = [owner]

  def _make(self) -> None:
    """Makes the pool, unless there is one, with room for inputs of `width`."""
    if self._pool is None:
      empty = self._empty_row(self._pool_width)
      self._pool = self.programs.repeated(empty, len(self.owners))
    if self.width > self._pool_width:
      empty = self._empty_row(self.width)
      self._pool = self.programs.widened(self._pool, empty)
      self._pool_width = self.width

  @property
  def free(self) -> list[int]:
    """The slots without an owner."""
    return [slot for slot, row in enumerate(self.owners) if row is None]

  @property
  def rows(self) -> list[Row]:
    """The rows that have a slot."""
    return [row for row in self.owners if row is not None]

  def resize(self, size: int) -> None:
    """Moves the rows to a pool of another size, in which they must fit."""
    if size == len(self.owners):
      return
    self._make()
    running = [slot for slot, row in enumerate(self.owners) if row is not None]
    free = size - len(running)
    places = np.array([*running, *[0] * free], np.int32)
    self._pool = self.programs.smaller(self._pool, places)
    self.owners = [*self.rows, *[None] * free]
    # The new slots hold copies of another row.
    reasons = np.full((size,), FinishReason.RUNNING, np.int32)
    reasons[len(running) :] = FinishReason.LENGTH
    self.set_reasons(reasons)

  def run(
    self, max_rounds: int, enough: int, drafting: Drafting, simply: bool
  ) -> PoolView:
    """Starts the next rounds on the device, see `decoding.pool.run`."""
    rounds, finished = np.int32(max_rounds), np.int32(enough)
    if self._unread is not None:
      request, self._unread = self._unread, None
      self._pool, view = self.programs.begin(request, rounds, drafting, simply)
      self._pool_width = request.inputs.shape[1]
      return view
    self._pool, view = self.programs.run(
      self._pool, rounds, finished, drafting, simply
    )
    return view

  def set_reasons(self, reasons: np.ndarray) -> None:
    """Ends rows: the finish reason of each, int32[B]."""
    state = self._pool.state.with_reasons(reasons)
    self._pool = dataclasses.replace(self._pool, state=state)

  def release(self, view: PoolView) -> list[tuple[Row, int]]:
    """Frees the slots of finished rows; returns (owner, slot) of each."""
    done = [
      (row, slot)
      for slot, row in enumerate(self.owners)
      if row is not None and view.is_free[slot]
    ]
    for _, slot in done:
      self.owners[slot] = None
    return done


class Scheduler:
  """Decodes rows as they come.

  A use of a program is a tuple: ('rounds', rows, simply, plainly), ('alone',
  widths, plainly) or ('read', rows, widths).

  Attributes:
    policy: how long drafts are.
    rounds: gamma -> rounds that ran.
    compiled: the uses that need no compilation; None allows all. A step that
      would use another program takes one of these with larger arrays or for
      more kinds of rows instead.
    used: the uses so far.
    is_closed: whether no row will come that is not queued.
  """

  def __init__(
    self,
    engine: Any,
    settings: PoolSettings,
    request: Request,
    widest: tuple[int, int],
    first_width: int | None = None,
    counts: Sequence[int] | None = None,
  ):
    """Runs nothing.

    Args:
      engine: the engine whose models decode.
      settings: of the pool.
      request: has what all rows share, see `joined`.
      widest: widths of the widest inputs and prompts.
      first_width: of the inputs that the pool has room for at first, and grows
        from; None is the widest.
      counts: numbers of rows that are read together, in order; None is
        `refill`.

    Raises:
      ValueError: the pool cannot fit into memory.
    """
    multiple = engine.batch_multiple
    self.policy = DraftPolicy(settings, request, multiple)
    self._sizes = settings.pool_sizes(multiple)
    most = self._sizes[-1]
    self._refill = min(settings.refill or max(1, most // 8), most)
    self._counts = counts or [rounded_up(self._refill, multiple)]
    self._like = request.replace(skips_rounds=self.policy.skips_rounds)
    self._is_exact = np.ndim(request.stop_ids) == 1  # of one kind of rows
    room = self.policy.room
    draft_slots = request.with_drafting(gamma=room).draft_slots
    num_slots = whole_buckets(widest[1] + engine.max_decode_len + draft_slots)
    engine.room.check(most, widest[0], num_slots, 1 + draft_slots)
    # So that requests with prompts and without have as many slots.
    programs, tokens = engine.pool_programs, num_slots - draft_slots
    self._slots = Slots(programs, self._like, tokens, room, self._counts[-1])
    self._widest, self._first_width = widest, first_width or widest[0]
    self._waiting: collections.deque[Row] = collections.deque()
    self._lock = threading.Condition()  # of the queue
    self._coming: tuple[PoolView, int] | None = None  # with its gamma
    self._too_large = 0  # steps since the pool had to be as large as it is
    self.compiled: set[Any] | None = None
    self.used: set[Any] = set()
    self.is_closed = False
    self.rounds: collections.Counter[int] = collections.Counter()

  def submit(self, rows: Iterable[Row]) -> None:
    """Queues rows; any thread may call it."""
    with self._lock:
      self._waiting.extend(rows)
      self._lock.notify()

  def cancel(self, rows: Iterable[Row]) -> None:
    """Ends rows without an update; any thread may call it."""
    with self._lock:
      for row in rows:
        row.is_cancelled = True
      self._lock.notify()

  @property
  def has_work(self) -> bool:
    """Whether there is a row that waits or runs."""
    return bool(self._waiting or self._slots.rows or self._coming)

  @property
  def num_running(self) -> int:
    """Rows that have a slot."""
    return len(self._slots.rows)

  @property
  def programs(self) -> PoolPrograms:
    """The programs of its pools, which all schedulers of their kind share."""
    return self._slots.programs

  def drain(self) -> Iterator[tuple[Row, Update]]:
    """Decodes all rows that were queued; yields what becomes of them."""
    self.is_closed = True
    while self.has_work:
      yield from self.step()

  def step(self) -> list[tuple[Row, Update]]:
    """Waits for the rounds of the last step, and starts the next ones.

    Returns:
      What the last rounds brought, for rows that have finished or stream.
    """
    view, told = self._collect()
    self._drop_cancelled()
    self._resize()
    self._fill()
    self._advance()
    # The device is busy from here until its answer.
    return [
      (row, self._update(row, view, slot, is_last))
      for row, slot, is_last in told
    ]

  def rehearse(
    self, rows: Sequence[Row], size: int, then: Sequence[int] = ()
  ) -> None:
    """Decodes rows, so that the programs that they need are compiled.

    Args:
      rows: one streams, and has more tokens than a round makes.
      size: of the pool.
      then: sizes of the pools that the rows are moved to.
    """
    sizes, self.is_closed = self._sizes, True
    self._sizes = [size]
    self.submit(rows)
    for other in then:
      self.step()
      self._sizes = [other]
    for _ in self.drain():
      pass
    self._sizes = sizes

  # The parts of a step.

  def _collect(self) -> tuple[Any, list[tuple[Row, int, bool]]]:
    """The device's answer; rows that hear of it, their slots, whether it ends.

    Later the rows may be in other slots.
    """
    if self._coming is None:
      return None, []
    coming, gamma = self._coming
    self._coming = None
    view = jax.device_get(coming)
    self.rounds[gamma] += int(view.num_rounds)
    view = self._with_reasons(view)
    told = [(row, slot, True) for row, slot in self._slots.release(view)]
    for slot, row in enumerate(self._slots.owners):
      if row is not None and row.streams:
        told.append((row, slot, False))
    return view, [each for each in told if not each[0].is_cancelled]

  def _with_reasons(self, view: PoolView) -> PoolView:
    """Ends rows that are cancelled, or whose text holds a stop string."""
    generation = view.generation
    reasons: Any = np.array(generation.finish_reason)
    for slot, row in enumerate(self._slots.owners):
      if row is None:
        continue
      if row.is_cancelled:
        reasons[slot] = FinishReason.LENGTH
      elif row.batch.options.stop_strings and not view.is_free[slot]:
        if row.read(generation, slot).stop_end is not None:
          reasons[slot] = FinishReason.STOP_STRING
    if np.array_equal(reasons, generation.finish_reason):
      return view
    self._slots.set_reasons(reasons)
    generation = dataclasses.replace(generation, finish_reason=reasons)
    return dataclasses.replace(view, generation=generation)

  def _drop_cancelled(self) -> None:
    with self._lock:
      left = (row for row in self._waiting if not row.is_cancelled)
      self._waiting = collections.deque(left)

  def _resize(self) -> None:
    """Takes the smallest pool that is enough; a smaller one after a while."""
    slots = self._slots
    sizes = [
      size for size in self._sizes if self._may('rounds', size, False, False)
    ]
    running = len(slots.rows)
    wanted = running + len(self._waiting)
    fits = min((s for s in sizes if s >= wanted), default=max(sizes, default=1))
    if not slots.owners:
      # A pool that does not come from a smaller one needs another program.
      first = fits if self.compiled is None else min(sizes)
      slots.begin(first, self._first_width)
    size = len(slots.owners)
    self._too_large = self._too_large + 1 if fits < size else 0
    at_once = not running or (self.is_closed and not self._waiting)
    if (
      fits > size
      or fits < size
      and (at_once or self._too_large > _SHRINK_AFTER)
    ):
      slots.resize(fits)
      self._too_large = 0

  def _fill(self) -> None:
    """Gives free slots to the rows that have waited longest."""
    while free := len(self._slots.free):
      with self._lock:
        most = min(self._counts[-1], free, len(self._waiting))
        rows = [self._waiting.popleft() for _ in range(most)]
      if not rows:
        return
      self._read(rows)

  def _read(self, rows: Sequence[Row]) -> None:
    """Reads rows into free slots; a row alone with its first rounds."""
    slots = self._slots
    count = min(count for count in self._counts if count >= len(rows))
    # Filled up, so that there are few programs.
    filled = [*rows, *[rows[0]] * (count - len(rows))]
    sources = [row.source for row in filled]
    request = joined(sources, self._like)
    widths = widths_of(request)
    is_alone = len(slots.owners) == 1 and (self._is_exact or rows[0].is_simple)
    if is_alone and self._may('alone', widths, rows[0].is_plain):
      self.used.add(('alone', widths, rows[0].is_plain))
      slots.hold(request, rows[0])
      return
    if not self._may('read', count, widths):
      request = joined(sources, self._like, self._widest)
    self.used.add(('read', count, widths))
    slots.admit(request, rows)

  def _advance(self) -> None:
    """Starts the next rounds on the device."""
    rows, size = self._slots.rows, len(self._slots.owners)
    if not rows:
      return
    simply = all(row.is_simple for row in rows)
    plainly = simply and all(row.is_plain for row in rows)
    if not self._may('rounds', size, simply, plainly):
      simply = plainly = False  # this one is there
    self.used.add(('rounds', size, simply, plainly))
    drafting = self.policy.of(size, simply or self._like.greedy, plainly)
    gamma = drafting.gamma
    rounds, enough = self._max_rounds(rows, gamma), self._enough(len(rows))
    self._coming = self._slots.run(rounds, enough, drafting, simply), gamma

  def _max_rounds(self, rows: Sequence[Row], gamma: int) -> int:
    """Rounds until the next step, in which nobody who comes gets a slot."""
    if any(row.streams for row in rows):
      return 1  # somebody watches
    if any(row.batch.options.stop_strings for row in rows):
      return _FEW_ROUNDS
    if self.is_closed:
      return _MAX_ROUNDS
    if len(rows) + len(self._waiting) > 1:
      return _FEW_ROUNDS
    return _ALONE_ROUNDS if gamma else 3 * _ALONE_ROUNDS

  def _enough(self, running: int) -> int:
    """How many rows must finish before the host looks.

    One while others may still come; `refill` while some wait; else as many as
    let the pool become a smaller one.
    """
    if not self.is_closed:
      return 1
    if self._waiting:
      return self._refill
    size = len(self._slots.owners)
    smaller = [s for s in self._sizes if s < size]
    return running - max(smaller, default=0)

  def _may(self, *use: Any) -> bool:
    """Whether a use needs no compilation, or may compile."""
    return self.compiled is None or use in self.compiled

  # What a step says of rows.

  def _update(
    self, row: Row, view: PoolView, slot: int, is_last: bool
  ) -> Update:
    """What is new of a row, of the text that will not change."""
    generation, told = view.generation, row.num_told
    done: Completion | None = None
    if is_last:
      done = row.completion(generation, slot)
      text, tokens, log_probs = done.text, done.tokens, done.log_probs
    else:
      length: Any = generation.length[slot]
      text = row.read(generation, slot).ready
      tokens = generation.tokens[slot, :length].tolist()
      log_probs = generation.log_probs[slot, :length].tolist()
    update = Update(
      text[row.num_sent :],
      tokens[told:],
      log_probs[told:] if row.batch.options.log_probs else [],
      completion=done,
      round=row.last_round(view, slot) if row.shows_rounds else None,
    )
    row.num_sent, row.num_told = len(text), len(tokens)
    return update


class Continuous:
  """Decodes any number of texts with an engine, `settings.rows` at a time.

  Attributes:
    engine: the engine whose models decode.
    settings: how the texts go through the slots.
    rounds: gamma -> rounds of the run that was started last.
  """

  def __init__(self, engine: Any, settings: PoolSettings | None = None):
    """Takes an `Engine`, and the settings of the pool."""
    self.engine = engine
    self.settings = settings or PoolSettings()
    self.rounds: Mapping[int, int] = {}
    self._warm: set[Any] = set()

  def generate(
    self, texts: Sequence[Any] | TextBatch, **options: Any
  ) -> list[Completion]:
    """`Engine.generate` for any number of texts: one completion each, in order.

    A text that cannot be decoded gives a completion with an error and the other
    texts go on, as with `on_too_long='report'`. The only other value that
    `on_too_long` can have here is 'truncate'.

    Args:
      texts: as for `Engine.generate`; or a batch that an engine has made.
      **options: as for `Engine.generate`. Stop strings are looked for between
        rounds.

    Raises:
      ValueError: an option is out of range.
    """
    done = dict(self.run(texts, **options))
    return [done[index] for index in sorted(done)]

  def run(
    self, texts: Sequence[Any] | TextBatch, **options: Any
  ) -> Iterator[tuple[int, Completion]]:
    """Yields index and completion of each text as soon as it is finished.

    A completion that has been yielded is not kept. Arguments and errors are
    those of `generate`.
    """
    batch = self._batch(texts, options)
    yield from sorted(batch.passed_over.items())
    if not batch.rows:
      return
    rows = self._rows(batch)
    scheduler = self._scheduler(batch, rows)
    self.rounds = scheduler.rounds
    scheduler.submit(rows)
    for row, update in scheduler.drain():
      if update.completion is not None:
        yield row.source.index, update.completion

  def stream(
    self, batch: TextBatch, shows_rounds: bool = False
  ) -> Iterator[Update]:
    """Yields what each round brings the only text of a batch.

    Raises:
      ValueError: the target's logits became invalid.
    """
    if batch.rows:
      row = Row(batch, streams=True, shows_rounds=shows_rounds)
      scheduler = self._scheduler(batch, [row])
      scheduler.submit([row])
      for _, update in scheduler.drain():
        done = update.completion
        if done is not None and done.finish_reason == 'error':
          raise ValueError(done.error)
        yield update

  def warmup(self, texts: Sequence[Any] | TextBatch, **options: Any) -> float:
    """Compiles what `generate` needs for texts like these.

    Returns the seconds that it took; 0.0 if everything had been compiled.
    """
    begin = time.perf_counter()
    batch = self._batch(texts, options)
    if not batch.rows:
      return 0.0
    rows = self._rows(batch)
    by_width = {row.source.widths: row.index for row in rows}
    sizes = self.settings.pool_sizes(self.engine.batch_multiple)
    fits = [size for size in sizes if size >= len(rows)]
    first = min(fits, default=sizes[-1])
    key = jax.tree.structure(batch.request), first, *sorted(by_width)
    if key in self._warm:
      return 0.0
    scheduler = self._scheduler(batch, rows)
    short = shortened(batch, scheduler.policy.room)
    widths = sorted(by_width)
    for width in widths:
      scheduler.rehearse([Row(short, by_width[width], streams=True)], first)
    smaller = [size for size in sizes[::-1] if size < first]
    for size, then in zip([first, *smaller], smaller, strict=False):
      row = Row(short, by_width[widths[-1]], streams=True)
      scheduler.rehearse([row], size, [then])
    self._warm.add(key)
    return time.perf_counter() - begin

  def _batch(
    self, texts: Sequence[Any] | TextBatch, options: dict[str, Any]
  ) -> TextBatch:
    """The batch of texts that are decoded one by one; raises for beams."""
    batch: Any = texts
    if not isinstance(texts, TextBatch):
      if options.get('on_too_long') != 'truncate':
        options = {**options, 'on_too_long': 'report'}
      batch = self.engine.text_batch(texts, **options)
    if batch.options.num_beams is not None:
      expected = 'None in a pool; Engine.generate searches'
      raise unexpected('num_beams', expected, batch.options.num_beams)
    return batch

  def _rows(self, batch: TextBatch) -> list[Row]:
    """The shortest first: rows that decode together are then alike."""

    def size(row):
      source = row.source
      return source.widths, len(source.inputs) + len(source.prompt)

    return sorted((Row(batch, i) for i in range(len(batch.rows))), key=size)

  def _scheduler(self, batch: TextBatch, rows: Sequence[Row]) -> Scheduler:
    widths = [row.source.widths for row in rows]
    inputs, prompts = map(max, zip(*widths, strict=True))
    how = self.settings, batch.request, (inputs, prompts), widths[0][0]
    return Scheduler(self.engine, *how)


def shortened(batch: TextBatch, gamma: int) -> TextBatch:
  """A copy of a batch, for a warm-up: its outputs end in their second round."""
  short, length = copy.copy(batch), min(gamma + 2, batch.request.slots)
  short.rows = [
    dataclasses.replace(row, max_length=length) for row in batch.rows
  ]
  short.request = short.request_in(short.num_rows)
  return short
