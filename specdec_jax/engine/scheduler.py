"""One scheduler: rows that come at any time share the slots of one engine.

`submit` queues rows. Each `step` gives free slots to those that wait, starts
rounds on the device, and says what became of the rows; `drain` steps until
nothing is left. `Continuous` feeds it a list of texts, `Engine.stream` one
text, and `serving` feeds it from other threads.

Without cancelled rows its decisions follow from the rows and from the device's
answers, never from a clock, so that all processes of a run decide alike.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.checks.fields import check_number, check_types, unexpected
from specdec_jax.decoding.pool import Pool, PoolPrograms, PoolView, take_rows
from specdec_jax.decoding.state import Request, keys_of_rows, whole_buckets
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.padding import padded, rounded_up
from specdec_jax.engine.request import (
  Drafting,
  TextBatch,
  check_gamma,
)
from specdec_jax.engine.trace import Round
from specdec_jax.types import FinishReason

# Rounds after which the host looks in any case, and where it looks for a stop
# string.
_MAX_ROUNDS = 32
_STOP_STRING_ROUNDS = 4
_ALONE_ROUNDS = 12  # where one row runs and none waits; plain ones are shorter
_SHRINK_AFTER = 16  # steps with a pool that is larger than it need be

# (rows without text, as many as are read together; whether rows have prompts)
# -> the programs for these.
Compiled = Callable[[Request, bool], PoolPrograms]


@dataclasses.dataclass(frozen=True)
class PoolSettings:
  """How rows go through the slots; no setting changes a greedy output.

  Attributes:
    rows: B, slots; rows that are decoded together.
    refill: the host looks earlier once this many rows have finished; None is an
      eighth of the rows. A smaller number keeps the slots fuller and takes more
      of the host's time.
    gammas: rows -> gamma of greedy rows in a pool of so many or fewer rows, or
      a `Drafting` as `Calibration.plan` has it; 0 decodes plainly. The largest
      number of rows replaces `rows`. Sampled rows have the engine's gamma, so
      that a sample does not depend on how many other rows are running. None is
      the engine's gamma for all.
    sizes: rows of the pools that rows may be moved to when fewer are left; None
      is the rows of `gammas`, or `rows` alone.
    least_length: greedy rows that may have fewer tokens are decoded plainly,
      see `Calibration.least_length`.

  Raises:
    ValueError: a value is outside its range.
  """

  rows: int = 16
  refill: int | None = None
  gammas: Mapping[int, int | Drafting] | None = None
  sizes: Sequence[int] | None = None
  least_length: int = 0

  def __post_init__(self):
    check_types(self)
    for name in ('rows', 'refill'):
      if getattr(self, name) is not None:
        check_number(name, getattr(self, name), 1)
    if self.gammas is not None:
      if not self.gammas:
        raise unexpected('gammas', 'rows -> gamma, or None', self.gammas)
      for rows, gamma in self.gammas.items():
        check_number('rows of gammas', rows, 1)
        if not isinstance(gamma, Drafting):
          check_gamma(gamma)

  def pool_sizes(self, multiple: int) -> list[int]:
    """Rows of the pools, in order; multiples of the devices that split rows."""
    sizes = self.sizes or self.gammas or [self.rows]
    return sorted({rounded_up(size, multiple) for size in sizes})


@dataclasses.dataclass
class PoolStats:
  """Times and counts of one run through a pool, so far.

  Attributes:
    seconds: wall time.
    host_seconds: the part of it in which the device had nothing to do: from
      each answer of the device until the host gave it its next work.
    rounds: gamma -> rounds that ran.
    live_rounds: sum over rounds of the rows that were running.
    slot_rounds: sum over rounds of the slots.
    outputs: rows that were finished.
    slot_seconds: sum over these rows of the time from getting a slot to the
      output.
  """

  seconds: float = 0.0
  host_seconds: float = 0.0
  rounds: dict[int, int] = dataclasses.field(default_factory=dict)
  live_rounds: int = 0
  slot_rounds: int = 0
  outputs: int = 0
  slot_seconds: float = 0.0

  @property
  def occupancy(self) -> float:
    """Running rows / slots, the mean over rounds; 1 before the first round."""
    return self.live_rounds / self.slot_rounds if self.slot_rounds else 1.0

  @property
  def host_fraction(self) -> float:
    """The part of the time in which the device waited for the host."""
    return self.host_seconds / self.seconds if self.seconds else 0.0

  @property
  def in_slot(self) -> float:
    """Mean seconds from when a row gets a slot until its output is known."""
    return self.slot_seconds / self.outputs if self.outputs else 0.0


class DraftPolicy:
  """How long drafts are, by the rows of the pool and what these ask for.

  A greedy row's output is the target's own whatever is proposed to it, so its
  drafts may be what is quickest just now. A sample depends on where drafts end,
  so sampled rows always have the engine's gamma.

  Attributes:
    room: the longest draft.
    skips_rounds: whether rows go on without the drafter in some pools.
    least_length: see `PoolSettings`.
  """

  def __init__(
    self,
    engine: Any,
    settings: PoolSettings,
    request: Request,
    multiple: int = 1,
  ):
    """
    Args:
      engine: says how drafts of each gamma end.
      settings: `gammas` and `least_length`.
      request: has the gamma and the rule of sampled rows; gamma 0 decodes all
        rows plainly.
      multiple: pools have a multiple of so many rows. Of pools that become one
        the larger one's gamma stays: it was chosen for more rows, whose calls
        cost more, so it rather proposes too few tokens.

    Raises:
      ValueError: gammas are longer than the drafts of a rule.
    """
    self._base = Drafting(request.gamma, request.rule, request.fallback)
    self._by_rows = {settings.rows: self._base}
    if settings.gammas is not None and request.gamma:
      self._by_rows = {}
      for rows, gamma in sorted(settings.gammas.items()):
        self._by_rows[rounded_up(rows, multiple)] = (
          gamma
          if isinstance(gamma, Drafting)
          else engine.drafting_of(gamma, request.rule)
        )
    gammas = [self._base.gamma, *(one.gamma for one in self._by_rows.values())]
    self.room = max(gammas)
    self.skips_rounds = self.room > 0 and 0 in gammas
    self.least_length = settings.least_length

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

  def is_too_short(self, batch: TextBatch) -> bool:
    """Whether rows end before their drafter pays."""
    least = self.least_length if batch.rows else 0
    return least > 0 and int(batch.request.max_length[0]) < least


@dataclasses.dataclass(frozen=True)
class Update:
  """What a row's listener is told.

  Attributes:
    text: text that is new, and will not change.
    tokens: ids that are new.
    log_probs: of these, if the row wants them.
    completion: the whole output, at its end.
    num_drafted: tokens that were proposed to the row so far.
    round: what became of the last draft, if the row shows rounds.
    beams: the outputs of a beam search instead, the best one first.
    error: why it ends without an output: 'deadline', 'stopped', 'failed', or
      'search failed'.
  """

  text: str = ''
  tokens: Sequence[int] = ()
  log_probs: Sequence[float] = ()
  completion: Completion | None = None
  num_drafted: int = 0
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
  began: float = 0.0  # when it got its slot
  num_rounds: int = 0
  num_drafted: int = 0
  num_accepted: int = 0
  num_passed: int = 0
  num_told: int = 0  # tokens
  num_sent: int = 0  # characters

  def __post_init__(self):
    self.text = self.batch.text() if self.streams else None

  @property
  def is_simple(self) -> bool:
    """Whether the program without sampling and log-probabilities is enough."""
    options = self.batch.options
    greedy = options.sampling.greedy and not options.min_length
    return greedy and not options.log_probs

  @property
  def widths(self) -> tuple[int, int]:
    """Widths of the arrays that its input and its prompt are read in."""
    return self.batch.widths(self.index)

  @property
  def example_id(self) -> int:
    """What its random numbers derive from, beside the seed."""
    place = self.batch.rows[self.index]
    ids = self.batch.options.example_ids
    return place if ids is None else ids[place]

  def last_round(self, view: PoolView, slot: int) -> Round[int] | None:
    """The row's last round, if a chain was judged in it.

    Args:
      view: of a pool that has run one round.
      slot: the row's.
    """
    draft, generation = view.draft, view.generation
    if draft is None or draft.parents is not None:
      return None
    length: Any = draft.length[slot]
    proposed: Any = draft.tokens[slot, :length]
    end = generation.length[slot]
    new: Any = generation.tokens[slot, self.num_told : end]
    accepted = int(generation.stats.num_accepted[slot]) - self.num_accepted
    self.num_accepted += accepted
    after = new[accepted : accepted + 1].tolist()
    passed = None
    # Greedy drafts are judged token by token, whatever the others are.
    if generation.stats.num_passed is not None:
      passed = int(generation.stats.num_passed[slot]) - self.num_passed
      self.num_passed += passed
    is_sampled = not self.batch.options.sampling.greedy
    return Round(
      proposed.tolist(),
      accepted,
      after[0] if after else None,
      passed if is_sampled else None,
    )


def joined(
  rows: Sequence[Row], like: Request, least: tuple[int, int] = (0, 0)
) -> Request:
  """One request of all rows.

  Args:
    rows: each with a text.
    like: has what all rows share: static fields, and the values of which it has
      one for all rows.
    least: widths that inputs and prompts have at least.
  """
  places = [(row.batch.request, row.index) for row in rows]
  width, prompt_width = (
    max(sizes)
    for sizes in zip(least, *(row.widths for row in rows), strict=True)
  )

  def each(name: str) -> Any:
    return np.array([getattr(one, name)[i] for one, i in places], np.int32)

  inputs, prompts = zip(*(r.batch.ids(r.index) for r in rows), strict=True)
  sampling = jax.tree.map(
    lambda *leaves: np.array(
      [leaf[i] for leaf, (_, i) in zip(leaves, places, strict=True)]
    ),
    *(one.sampling for one, _ in places),
  )
  changes: dict[str, Any] = {
    'inputs': padded(inputs, len(rows), width, like.pad_id)[0]
  }
  if np.ndim(like.stop_ids) > 1:  # each row has values of its own
    stops: Any = np.full((len(rows), like.stop_ids.shape[1]), -1, np.int32)
    for to, (request, _) in zip(stops, places, strict=True):
      ids = request.stop_ids[request.stop_ids >= 0]
      to[: len(ids)] = ids
    changes['stop_ids'] = stops
  if like.prompt is not None:
    prompt = padded(prompts, len(rows), prompt_width)
    changes['prompt'], changes['prompt_length'] = prompt
  return dataclasses.replace(
    like,
    keys=keys_of_rows(
      np.array([r.batch.options.seed & 0xFFFFFFFF for r in rows], np.uint32),
      np.array([row.example_id for row in rows], np.uint32),
    ),
    sampling=sampling,
    min_length=each('min_length'),
    max_length=each('max_length'),
    **changes,
  )


def widths_of(request: Request) -> tuple[int, int]:
  """Widths of inputs and prompts."""
  return request.inputs.shape[1], request.prompt_width


class Slots:
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
    """Makes no slots; call `begin`.

    Args:
      compiled: gives the programs.
      request: any request of the kind that will be read, on the host.
      num_slots: T, slots of the caches.
      room: the largest gamma that the caches have slots for.
      read_rows: rows that are read together, for tracing.
    """
    self._request, self._read_rows = request, read_rows
    # These give all requests without prompts the same number of slots.
    draft_slots: int = request.replace(gamma=room).draft_slots
    self._gamma, self._tokens = room, num_slots - draft_slots
    self._empty_rows: dict[int, Pool] = {}
    self._unread: Request | None = None  # see `hold`
    example = self._example(request.inputs.shape[1])
    self._programs = compiled(example, request.prompt is not None)
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
      prompt=None,
      prompt_length=None,
      gamma=self._gamma,
      slots=self._tokens - 1,
    )

  def _empty_row(self, width: int) -> Pool:
    if width not in self._empty_rows:
      row = self._programs.empty_row(self._example(width))
      self._empty_rows[width] = row
    return self._empty_rows[width]

  def _in_slots(self, request: Request) -> Request:
    """The request, with the cache slots that all others have."""
    return request.replace(
      gamma=self._gamma, slots=self._tokens - request.prompt_width
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
    programs = self._programs
    self._make()
    self._widen()
    staged = programs.read(self._in_slots(request), empty)
    free = self.free[: len(rows)]
    places = np.zeros((len(self.owners),), np.int32)
    places[: len(free)] = free
    self._pool = programs.admit(
      self._pool, staged, empty, places, np.int32(len(free))
    )
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
    """Makes the pool, unless there is one."""
    if self._pool is None:
      empty = self._empty_row(self._pool_width)
      self._pool = self._programs.repeated(empty, len(self.owners))

  def _widen(self) -> None:
    """Makes room for inputs that are as wide as those that were read."""
    if self.width > self._pool_width:
      empty = self._empty_row(self.width)
      self._pool = self._programs.widened(self._pool, empty)
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
    self._widen()
    running = [slot for slot, row in enumerate(self.owners) if row is not None]
    free = size - len(running)
    places = np.array([*running, *[0] * free], np.int32)
    self._pool = self._programs.smaller(self._pool, places)
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
    gamma, rule, fallback = drafting
    of_rows = self._request.rule, self._request.fallback
    # Those of the rows are on the device.
    is_theirs = rule is of_rows[0] and fallback is of_rows[1]
    how = gamma, simply, None if is_theirs else (rule, fallback)
    if self._unread is not None:
      request, self._unread = self._unread, None
      self._pool, view = self._programs.begin(request, rounds, *how)
      self._pool_width = request.inputs.shape[1]
      return view
    self._pool, view = self._programs.run(self._pool, rounds, finished, *how)
    return view

  def set_reasons(self, reasons: np.ndarray) -> None:
    """Ends rows: the finish reason of each, int32[B]."""
    state = self._pool.state.with_reasons(reasons)
    self._pool = dataclasses.replace(self._pool, state=state)

  def release(self, view: PoolView) -> list[tuple[Row, int]]:
    """Frees the slots of finished rows; returns (owner, slot) of each."""
    done = []
    for slot, is_free in enumerate(view.is_free):
      row = self.owners[slot]
      if is_free and row is not None:
        done.append((row, slot))
        self.owners[slot] = None
    return done


class Scheduler:
  """Decodes rows as they come.

  A use of a program is a tuple: ('rounds', rows, simply, plainly), ('alone',
  widths, plainly) or ('read', rows, widths).

  Attributes:
    policy: how long drafts are.
    stats: times and counts.
    compiled: the uses that need no compilation; None allows all. What else a
      step would use is done by a program of larger arrays, or for more kinds of
      rows.
    used: the uses so far.
    is_closed: whether no row will come that is not queued.
  """

  def __init__(
    self,
    engine: Any,
    settings: PoolSettings,
    request: Request,
    compiled: Compiled,
    widest: tuple[int, int],
    first_width: int | None = None,
    multiple: int = 1,
    counts: Sequence[int] | None = None,
  ):
    """Runs nothing.

    Args:
      engine: the engine whose models decode.
      settings: of the pool.
      request: has what all rows share, see `joined`.
      compiled: gives the programs of the pool.
      widest: widths of the widest inputs and prompts.
      first_width: of the inputs that the pool has room for at first, and grows
        from; None is the widest.
      multiple: rows are split over so many devices.
      counts: numbers of rows that are read together, in order; None is
        `refill`.

    Raises:
      ValueError: the pool cannot fit into memory, or as `DraftPolicy`.
    """
    self.policy = DraftPolicy(engine, settings, request, multiple)
    self._sizes = settings.pool_sizes(multiple)
    most = self._sizes[-1]
    self._refill = min(settings.refill or max(1, most // 8), most)
    self._counts = counts or [rounded_up(self._refill, multiple)]
    self._like = dataclasses.replace(
      request, skips_rounds=self.policy.skips_rounds
    )
    self._is_exact = np.ndim(request.stop_ids) == 1  # of one kind of rows
    room = self.policy.room
    draft_slots = dataclasses.replace(request, gamma=room).draft_slots
    num_slots = whole_buckets(widest[1] + engine.max_decode_len + draft_slots)
    engine.room.check(most, widest[0], num_slots, 1 + draft_slots)
    self._slots = Slots(compiled, self._like, num_slots, room, self._counts[-1])
    self._widest, self._first_width = widest, first_width or widest[0]
    self._waiting: collections.deque[Row] = collections.deque()
    self._lock = threading.Condition()  # of the queue
    self._coming: tuple[PoolView, int] | None = None  # with its gamma
    self._answered: float | None = None
    self._too_large = 0  # steps since the pool had to be as large as it is
    self.compiled: set[Any] | None = None
    self.used: set[Any] = set()
    self.is_closed = False
    self.stats = PoolStats()

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
  def num_waiting(self) -> int:
    """Rows without a slot."""
    return len(self._waiting)

  @property
  def num_running(self) -> int:
    """Rows that have a slot."""
    return len(self._slots.rows)

  def drain(self) -> Iterator[tuple[Row, Update]]:
    """Decodes all rows that were queued; yields what becomes of them."""
    begin, before = time.perf_counter(), self.stats.seconds
    self.is_closed = True
    while self.has_work:
      yield from self.step()
      self.stats.seconds = before + time.perf_counter() - begin

  def step(self) -> list[tuple[Row, Update]]:
    """Waits for the rounds of the last step, and starts the next ones.

    Returns:
      What the last rounds brought, for rows that have finished or stream.
    """
    view, done = self._collect()
    self._drop_cancelled()
    self._resize()
    self._fill()
    self._advance()
    # The device is busy from here until its answer.
    updates = [(row, self._last_update(row, view, slot)) for row, slot in done]
    for slot, row in self._streaming:
      updates.append((row, self._next_update(row, view, slot)))
    return updates

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

  def _collect(self) -> tuple[Any, list[tuple[Row, int]]]:
    """The device's answer, and the finished rows with the slots they had."""
    self._streaming: list[tuple[int, Row]] = []
    if self._coming is None:
      return None, []
    coming, gamma = self._coming
    self._coming = None
    view = jax.device_get(coming)
    self._answered = time.perf_counter()
    view = self._with_reasons(view, gamma)
    self._count(view, gamma)
    done = self._slots.release(view)
    self.stats.outputs += len(done)
    for row, _ in done:
      self.stats.slot_seconds += self._answered - row.began
    # Later they may be in other slots.
    for slot, owner in enumerate(self._slots.owners):
      if owner is not None and owner.streams and not owner.is_cancelled:
        self._streaming.append((slot, owner))
    return view, [(row, slot) for row, slot in done if not row.is_cancelled]

  def _with_reasons(self, view: PoolView, gamma: int) -> PoolView:
    """Ends rows that are cancelled, or whose text holds a stop string."""
    generation = view.generation
    stats = generation.stats
    reasons: Any = np.array(generation.finish_reason)
    for slot, row in enumerate(self._slots.owners):
      if row is None:
        continue
      rounds = int(stats.num_rounds[slot])
      row.num_drafted += gamma * (rounds - row.num_rounds)
      row.num_rounds = rounds
      if stats.num_drafted is not None:
        row.num_drafted = int(stats.num_drafted[slot])
      if row.is_cancelled:
        reasons[slot] = FinishReason.LENGTH
      elif row.batch.options.stop_strings and not view.is_free[slot]:
        tokens: Any = generation.tokens[slot, : generation.length[slot]]
        if row.batch.has_stop_string(tokens):
          reasons[slot] = FinishReason.STOP_STRING
    if np.array_equal(reasons, generation.finish_reason):
      return view
    self._slots.set_reasons(reasons)
    generation = dataclasses.replace(generation, finish_reason=reasons)
    return dataclasses.replace(view, generation=generation)

  def _count(self, view: PoolView, gamma: int) -> None:
    stats, rounds = self.stats, int(view.num_rounds)
    stats.rounds[gamma] = stats.rounds.get(gamma, 0) + rounds
    stats.live_rounds += int(view.live_rounds)
    stats.slot_rounds += rounds * len(self._slots.owners)

  def _drop_cancelled(self) -> None:
    with self._lock:
      if any(row.is_cancelled for row in self._waiting):
        left = [row for row in self._waiting if not row.is_cancelled]
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
      now = time.perf_counter()
      if self._answered is not None:  # the device has something to do again
        self.stats.host_seconds += now - self._answered
        self._answered = None
      for row in rows:
        row.began = now

  def _read(self, rows: Sequence[Row]) -> None:
    """Reads rows into free slots; a row alone with its first rounds."""
    slots = self._slots
    count = min(count for count in self._counts if count >= len(rows))
    # Filled up, so that there are few programs.
    filled = [*rows, *[rows[0]] * (count - len(rows))]
    request = joined(filled, self._like)
    widths = widths_of(request)
    is_alone = len(slots.owners) == 1 and (self._is_exact or rows[0].is_simple)
    if is_alone and self._may('alone', widths, rows[0].is_plain):
      self.used.add(('alone', widths, rows[0].is_plain))
      slots.hold(request, rows[0])
      return
    if not self._may('read', count, widths):
      request = joined(filled, self._like, self._widest)
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
    if self._answered is not None:
      self.stats.host_seconds += time.perf_counter() - self._answered
      self._answered = None

  def _max_rounds(self, rows: Sequence[Row], gamma: int) -> int:
    """Rounds until the next step, in which nobody who comes gets a slot."""
    if any(row.streams for row in rows):
      return 1  # somebody watches
    if any(row.batch.options.stop_strings for row in rows):
      return _STOP_STRING_ROUNDS
    if self.is_closed:
      return _MAX_ROUNDS
    if len(rows) + len(self._waiting) > 1:
      return _STOP_STRING_ROUNDS
    return _ALONE_ROUNDS if gamma else 3 * _ALONE_ROUNDS

  def _enough(self, running: int) -> int:
    """Rows whose end is worth a step: all that come are waited for."""
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

  def _last_update(self, row: Row, view: PoolView, slot: int) -> Update:
    """The whole output of a row."""
    done = row.batch.completion(view.generation, slot)
    log_probs = done.log_probs if row.batch.options.log_probs else []
    return Update(
      done.text[row.num_sent :],
      done.tokens[row.num_told :],
      log_probs[row.num_told :],
      completion=done,
      num_drafted=row.num_drafted,
      round=row.last_round(view, slot) if row.shows_rounds else None,
    )

  def _next_update(self, row: Row, view: PoolView, slot: int) -> Update:
    """What is new of a row that streams, of the text that will not change."""
    generation, output = view.generation, row.text
    assert output is not None
    tokens: Any = generation.tokens[slot, : generation.length[slot]]
    output.extend(tokens[row.num_told :])
    text = output.ready
    log_probs: Any = generation.log_probs[slot, row.num_told : len(tokens)]
    update = Update(
      text[row.num_sent :],
      tokens[row.num_told :].tolist(),
      log_probs.tolist() if row.batch.options.log_probs else [],
      round=row.last_round(view, slot) if row.shows_rounds else None,
    )
    row.num_sent, row.num_told = len(text), len(tokens)
    return update
