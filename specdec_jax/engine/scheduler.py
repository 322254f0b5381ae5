"""The scheduler queues rows, and decodes each kind of row in its own lane.

A row is one output to decode, or one beam search. A `Lane` has the rows of one
kind, whose compiled programs no other kind can use. `Scheduler.submit` queues
rows. Each `Scheduler.step` moves rows into pools, runs rounds of decoding on
the device, and returns updates of the rows; `drain` steps until no row is left.
There are two kinds of pool. A `SlotPool` gives the slot of a finished row to
the next row. `FixedBatches` decodes one batch after another. On a CPU, several
pools may share the rows of one kind (`SideBySide`).

Unless rows are cancelled, decisions follow from the rows and from the device's
results, never from a clock, so that all processes of a run decide alike.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from specdec_jax.checks.fields import Bound, Checked
from specdec_jax.decoding.pool import PoolPrograms, PoolView
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.padding import padded_rows, rounded_up
from specdec_jax.engine.programs import Programs
from specdec_jax.engine.request import (
  Row,
  TextRequest,
  Update,
  joined,
  widest_of,
)
from specdec_jax.engine.slots import Slots
from specdec_jax.models import backend
from specdec_jax.request import Drafting, Request, whole_buckets
from specdec_jax.types import FinishReason, Positive

_LOG = logging.getLogger(__name__)
# The host reads the results after at most _MAX_ROUNDS rounds, and after at most
# _FEW_ROUNDS if a row has stop strings or new rows may come.
_MAX_ROUNDS = 32
_FEW_ROUNDS = 4
# The same limit while a single row runs and none waits. It is three times as
# large if that row is decoded without a drafter.
_ALONE_ROUNDS = 12
_SHRINK_AFTER = 16  # steps after which a pool that is too large shrinks
_MOST_POOLS = 4  # the most pools of all lanes beside a pool of ordinary rows
_PIECE_ROUNDS = 4  # rounds of a beam search between two steps of other rows
IDLE_LANES = 2  # idle lanes that keep their programs
_READ_TOKENS = 64  # a call that reads fewer tokens takes as long as with these
# `SideBySide` has at most _MOST_BESIDE pools, because Python runs one thread at
# a time. Each has at least _LEAST_ROWS rows, because smaller pools are slower.
_MOST_BESIDE, _LEAST_ROWS = 8, 8
_PAUSE_SECONDS = 5.0  # a lane counts as idle after so long without rows
# At most so many lanes are compiled. Another one waits until one has no rows.
_MOST_LANES = 16

_Queue = collections.deque[Row]
Told = list[tuple[Row, Update]]


@dataclasses.dataclass(frozen=True)
class PoolSettings(Checked):
  """The settings of a pool of slots; none of them changes a greedy output.

  Attributes:
    rows: B, the number of slots, which is the number of rows that are decoded
      together.
    refill: while rows wait, the number of finished rows whose slots the host
      refills together; None is an eighth of the rows, or more for short inputs,
      see `refill_of`. A smaller number keeps the slots fuller and takes more of
      the host's time.
    gammas: number of rows -> the `Drafting` of greedy rows in a pool of at most
      so many rows, see `Calibration.plan`. The largest number of rows replaces
      `rows`. Sampled rows have the engine's gamma, so that a sample does not
      depend on how many other rows are running. None: all rows have the
      engine's gamma.
    sizes: the numbers of rows that the pool may have, so that it shrinks when
      few rows are left; None: the numbers of rows in `gammas`, or only `rows`.

  Raises:
    ValueError: a value is outside its range.
  """

  rows: Positive = 16
  refill: Positive | None = None
  gammas: Annotated[Mapping[Positive, Drafting], Bound(1)] | None = None
  sizes: Sequence[Positive] | None = None

  def pool_sizes(self, multiple: int) -> list[int]:
    """Returns the numbers of rows that the pool may have, in order.

    Args:
      multiple: the number of devices that share the rows; each size is rounded
        up to a multiple of it.
    """
    sizes = self.sizes or self.gammas or [self.rows]
    return sorted({rounded_up(size, multiple) for size in sizes})

  def share(self, number: int) -> 'PoolSettings':
    """Returns the settings of one of `number` pools that share the rows."""

    def part(size: int) -> int:
      return max(1, size // number)

    return PoolSettings(
      part(self.rows),
      self.refill and part(self.refill),
      self.gammas and {part(x): self.gammas[x] for x in sorted(self.gammas)},
      self.sizes and sorted(set(map(part, self.sizes))),
    )

  def refill_of(self, width: int, multiple: int = 1) -> int:
    """Returns `refill`, or its default for inputs of a usual width.

    Several short inputs are prefilled in one call, because it takes as long as
    a call for one of them: both load the same kernels.

    Args:
      width: the usual width of padded inputs, in tokens.
      multiple: the number of devices that share the rows.
    """
    rows = self.pool_sizes(multiple)[-1]
    together = min(_READ_TOKENS // width, rows // 2)
    return min(self.refill or max(1, rows // 8, together), rows)


class DraftPolicy:
  """Decides how long drafts are, by the rows of the pool and their options.

  A greedy row's output does not depend on what is proposed, so its drafts may
  have the length that is quickest for the present pool. A sample depends on
  where drafts end, so sampled rows always have the engine's gamma.

  Attributes:
    by_rows: number of rows -> the `Drafting` of greedy rows in a pool of at
      most so many rows.
    longest: the most proposals of any draft.
    skips_rounds: whether pools of some sizes decode without the drafter.
  """

  def __init__(self, settings: PoolSettings, base: Drafting, multiple: int):
    """Decides the gamma for each number of rows by the settings of a pool.

    Args:
      settings: the settings of the pool; `gammas` and `rows` are used.
      base: how drafts for samples are made; if its gamma is 0, all rows are
        decoded without the drafter.
      multiple: the rows of a pool are rounded up to a multiple of this. If two
        numbers round to the same one, the plan for the larger is used, which
        usually proposes fewer tokens.
    """
    self._base = base
    plan = (base.gamma and settings.gammas) or {settings.rows: base}
    self.by_rows = {rounded_up(x, multiple): plan[x] for x in sorted(plan)}
    gammas = [base.gamma, *(x.gamma for x in self.by_rows.values())]
    self.longest = max(gammas)
    self.skips_rounds = self.longest > 0 and 0 in gammas

  @property
  def gammas(self) -> dict[int, int]:
    """Number of rows -> gamma of greedy rows; empty if nothing is drafted."""
    plan = self.by_rows if self.longest else {}
    return {rows: drafting.gamma for rows, drafting in plan.items()}

  def drafting(self, size: int, varies: bool, plainly: bool) -> Drafting:
    """Returns the drafting of a pool's next rounds.

    Args:
      size: rows of the pool.
      varies: whether gamma may depend on the size.
      plainly: whether to decode without the drafter.
    """
    if plainly:
      return Drafting()
    return self.by_rows[_fitting(self.by_rows, size)] if varies else self._base


def _fitting(sizes: Sequence[int] | Mapping[int, Any], rows: int) -> int:
  """Returns the smallest size that holds the rows, or else the largest one."""
  return min((size for size in sizes if size >= rows), default=max(sizes))


class RowPool:
  """Rows of one kind that are decoded together.

  Attributes:
    waiting: rows that are not decoded yet; the caller's lock guards it.
    rounds: gamma -> number of rounds that ran; only a `SlotPool` counts them.
    is_closed: whether the pool takes no more rows, so that it ends and makes
      room for another pool.
  """

  def __init__(self):
    """Makes a pool without rows."""
    self.waiting: _Queue = collections.deque()
    self.rounds: collections.Counter[int] = collections.Counter()
    self.is_closed = False
    self._rows: list[Row] = []

  @property
  def running(self) -> list[Row]:
    """The rows that are being decoded."""
    return self._rows

  @property
  def has_work(self) -> bool:
    """Whether there is a row that waits or runs."""
    return bool(self.waiting or self.running)

  def step(self) -> Told:
    """Decodes some rounds; returns the updates of the rows."""
    raise NotImplementedError

  def warmup(self, rows: Sequence[Row]) -> bool:
    """Compiles the programs that rows like these need, and no larger ones.

    Returns:
      Whether there was anything to compile.
    """
    raise NotImplementedError


class SlotPool(RowPool):
  """Decodes rows of one kind; the slot of a finished row goes to the next row.

  A use is a tuple that tells which program was called, and with which shapes.
  ('read', rows, widths) prefills rows; ('rounds', rows, simply, plainly) runs
  rounds; ('alone', widths, plainly) prefills the only row of a pool and runs
  its first rounds. `simply` means that all rows are greedy and need neither
  log-probabilities nor `min_length`, `plainly` that the drafter is not used.

  Attributes:
    policy: decides how long drafts are.
    sizes: the numbers of rows that the pool may have, in order.
    compiled: the uses that need no compilation. A step that would use another
      program calls one of these instead, with larger arrays or for more kinds
      of rows. None: steps compile what they need, and expect no rows beyond
      those that are queued.
    used: the uses of all steps so far.
  """

  def __init__(
    self,
    programs: Programs,
    settings: PoolSettings,
    rows: Sequence[Row],
    example: Request | None = None,
    counts: Sequence[int] | None = None,
    lock: threading.Condition | None = None,
    compiled: set[Any] | None = None,
    beside: int = 1,
  ):
    """Checks the memory and gets the programs; runs nothing on the device.

    Args:
      programs: the programs of the pair.
      settings: the settings of the pool.
      rows: the rows to expect, in order. At first the pool is as wide as the
        input of the first row. How many rows are prefilled together depends on
        the width of the middle row.
      example: a `Request` of one of the rows; None makes it of the first row,
        and all rows must then share their `Terms`.
      counts: the numbers of rows that may be prefilled together, in order;
        None: only `refill`.
      lock: the lock that is held while `waiting` changes; None makes one.
      compiled: the uses that need no compilation; None: steps compile.
      beside: the number of pools that share the rows of `settings`, this pool
        included.

    Raises:
      ValueError: the pools cannot fit into memory.
    """
    super().__init__()
    settings = settings.share(beside)
    multiple, self._widest = programs.row_multiple, widest_of(rows)
    if example is None:
      example = joined(rows[:1], least=self._widest)
    self.policy = DraftPolicy(settings, example.drafting, multiple)
    self.sizes = settings.pool_sizes(multiple)
    usual_width = max(rows[len(rows) // 2].widths)
    self._refill = settings.refill_of(usual_width, multiple)
    self._counts = counts or [rounded_up(self._refill, multiple)]
    self._shared = example.replace(skips_rounds=self.policy.skips_rounds)
    gamma = self.policy.longest
    draft_slots = example.with_drafting(gamma=gamma).draft_slots
    num_slots = whole_buckets(self._widest[1] + example.slots + draft_slots)
    call = self._widest[0], num_slots, 1 + draft_slots
    programs.memory_check.check(self.sizes[-1] * beside, *call)
    # Requests with and without prompts get the same number of cache slots.
    tokens, count = num_slots - draft_slots, self._counts[-1]
    self._slots = Slots(programs.pool, self._shared, tokens, gamma, count)
    self._first_width = rows[0].widths[0]
    # All pools of this kind share these programs.
    self.programs = self._slots.programs
    self.lock = lock or threading.Condition()
    # The view of rounds that the device still runs, and their gamma.
    self._coming: tuple[PoolView, int] | None = None
    self._too_large = 0  # steps for which a smaller pool would have been enough
    self.compiled = compiled
    self.used: set[Any] = set()

  @property
  def running(self) -> list[Row]:
    """The rows that have a slot."""
    return [row for _, row in self._slots.taken]

  def step(self) -> Told:
    """Waits for the rounds of the last step, and starts the next ones.

    Returns:
      The updates of the rows that have finished or that stream.
    """
    view, heard = self._collect()
    with self.lock:
      left = [row for row in self.waiting if not row.is_cancelled]
      self.waiting.clear()
      self.waiting.extend(left)
    self._resize()
    self._fill()
    self._advance()
    # The device is busy from here until the next step fetches its results.
    return [
      (row, row.update(view, slot, is_last)) for row, slot, is_last in heard
    ]

  def rehearse(
    self, rows: Sequence[Row], size: int, then: Sequence[int] = ()
  ) -> None:
    """Decodes rows, so that the programs that they need are compiled.

    Args:
      rows: the rows; one of them must stream, and its output must be longer
        than one round can make it.
      size: the number of rows that the pool has at first.
      then: the numbers of rows that the pool has after each further step.
    """
    sizes, self.sizes = self.sizes, [size]
    self.waiting.extend(rows)
    for other in then:
      self.step()
      self.sizes = [other]
    while self.has_work:
      self.step()
    self.sizes = sizes

  def warmup(self, rows: Sequence[Row]) -> bool:
    """Decodes short outputs, in the pool for the rows and in all smaller ones.

    This compiles the programs that the rows need.

    Returns:
      Whether there was anything to compile.
    """
    by_width = {row.widths: row for row in rows}
    first = _fitting(self.sizes, len(rows))
    plan = jax.tree.structure(self.policy.by_rows)
    key = plan, *self.sizes, first, *sorted(by_width)
    if key in self.programs.warm:
      return False
    length = self.policy.longest + 2
    short = [by_width[widths].shortened(length) for widths in sorted(by_width)]
    for row in short:
      self.rehearse([row], first)
    smaller = [size for size in self.sizes[::-1] if size < first]
    for size, then in zip([first, *smaller], smaller, strict=False):
      self.rehearse([dataclasses.replace(short[-1])], size, [then])
    self.programs.warm.add(key)
    return True

  # The parts of a step.

  def _collect(self) -> tuple[Any, list[tuple[Row, int, bool]]]:
    """Fetches the results of the last rounds from the device.

    Returns:
      The view of the pool; and a list of (row, its slot, whether it has ended)
      with each row that gets an update.
    """
    if self._coming is None:
      return None, []
    (coming, gamma), self._coming = self._coming, None
    view = jax.device_get(coming)
    self.rounds[gamma] += int(view.num_rounds)
    view, slots = self._with_reasons(view), self._slots
    heard = [(row, slot, True) for row, slot in slots.release(view)]
    heard += [(row, slot, False) for slot, row in slots.taken if row.streams]
    return view, [each for each in heard if not each[0].is_cancelled]

  def _with_reasons(self, view: PoolView) -> PoolView:
    """Ends rows that are cancelled, or whose text has a stop string.

    Returns:
      The view with the finish reasons of these rows.
    """
    generation = view.generation
    reasons: Any = np.array(generation.finish_reason)
    for slot, row in self._slots.taken:
      if row.is_cancelled:
        reasons[slot] = FinishReason.LENGTH
      elif row.options.stop_strings and not view.is_free[slot]:
        if row.read(generation, slot).stop_end is not None:
          reasons[slot] = FinishReason.STOP_STRING
    if np.array_equal(reasons, generation.finish_reason):
      return view
    self._slots.set_reasons(reasons)
    generation = dataclasses.replace(generation, finish_reason=reasons)
    return dataclasses.replace(view, generation=generation)

  def _resize(self) -> None:
    """Changes the pool to the smallest size that is enough for all rows.

    It grows at once. It also shrinks at once if no row runs, or if no row waits
    and no more rows will come. Otherwise it shrinks after it has been too large
    for `_SHRINK_AFTER` steps.
    """
    slots, running, is_closed = self._slots, self.running, self.compiled is None
    sizes = [x for x in self.sizes if self._may('rounds', x, False, False)]
    fits = _fitting(sizes, len(running) + len(self.waiting))
    if not slots.owners:
      # Each size needs a program of its own to make a new pool. Where nothing
      # may be compiled, a pool is made with the smallest size and then resized.
      slots.begin(fits if is_closed else min(sizes), self._first_width)
    size = len(slots.owners)
    self._too_large = self._too_large + 1 if fits < size else 0
    at_once = not running or is_closed and not self.waiting
    shrinks = self._too_large > (0 if at_once else _SHRINK_AFTER)
    if fits > size or shrinks:
      slots.resize(fits)
      self._too_large = 0

  def _fill(self) -> None:
    """Gives free slots to the rows that have waited longest."""
    while free := len(self._slots.free):
      with self.lock:
        rows = [*itertools.islice(self.waiting, min(self._counts[-1], free))]
      if not rows:
        return
      self._read(rows)
      # A row is always in `waiting` or in `running`, even if reading it fails.
      with self.lock:
        for _ in rows:
          self.waiting.popleft()

  def _read(self, rows: Sequence[Row]) -> None:
    """Prefills rows into free slots.

    In a pool of one slot, the program that runs the first rounds prefills the
    row.
    """
    slots = self._slots
    count = min(count for count in self._counts if count >= len(rows))
    # Copies of the first row fill the batch up, so that there are few programs.
    filled = [*rows, *[rows[0]] * (count - len(rows))]
    request, first = joined(filled, shared=self._shared), rows[0]
    widths = request.inputs.shape[1], request.prompt_width
    share_stops = np.ndim(self._shared.stop_ids) == 1
    is_alone = len(slots.owners) == 1 and (share_stops or first.is_simple)
    if is_alone and self._may('alone', widths, first.is_plain):
      self.used.add(('alone', widths, first.is_plain))
      slots.hold(request, first)
      return
    if not self._may('read', count, widths):
      request = joined(filled, least=self._widest, shared=self._shared)
    self.used.add(('read', count, widths))
    slots.admit(request, rows)

  def _advance(self) -> None:
    """Starts the next rounds on the device."""
    rows, size = self.running, len(self._slots.owners)
    if not rows:
      return
    simply = all(row.is_simple for row in rows)
    plainly = simply and all(row.is_plain for row in rows)
    if not self._may('rounds', size, simply, plainly):
      simply = plainly = False  # the general program is always compiled
    self.used.add(('rounds', size, simply, plainly))
    varies = simply or self._shared.greedy
    drafting = self.policy.drafting(size, varies, plainly)
    limits = self._max_rounds(rows, drafting.gamma), self._enough(len(rows))
    view = self._slots.run(*limits, drafting, simply)
    self._coming = view, drafting.gamma

  def _max_rounds(self, rows: Sequence[Row], gamma: int) -> int:
    """Returns the most rounds of a step; new rows get slots only after it."""
    if any(row.streams for row in rows):
      return 1
    if any(row.options.stop_strings for row in rows):
      return _FEW_ROUNDS
    if self.compiled is None:
      return _MAX_ROUNDS
    if len(rows) + len(self.waiting) > 1:
      return _FEW_ROUNDS
    return _ALONE_ROUNDS if gamma else 3 * _ALONE_ROUNDS

  def _enough(self, running: int) -> int:
    """Returns the number of finished rows that ends a step early.

    The number is one while new rows may come, `refill` while rows wait, and
    otherwise the number after which the pool can shrink.
    """
    if self.compiled is not None:
      return 1
    if self.waiting:
      return self._refill
    smaller = [x for x in self.sizes if x < len(self._slots.owners)]
    return running - max(smaller, default=0)

  def _may(self, *use: Any) -> bool:
    """Returns whether the program of a use is compiled, or may be compiled."""
    return self.compiled is None or use in self.compiled


class SideBySide(RowPool):
  """Pools that share the rows of one kind; each decodes in its own thread.

  On a CPU, XLA uses several cores only for matrix products. So two programs at
  once are quicker than one program over all rows.
  """

  def __init__(self, pools: Sequence[RowPool]):
    """Keeps the pools, which share their programs; starts no thread."""
    super().__init__()
    self._pools = pools
    # Updates of rows. When a pool has ended, the future of its thread follows.
    self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._num_left = 0  # pools that still decode

  def step(self) -> Told:
    """Waits for a step of any pool; returns the updates of its rows.

    All rows count as running until the last one has ended.

    Raises:
      Exception: what a pool's step raised in its thread.
    """
    if self.waiting:  # deal the rows to the pools, and start the threads
      self._rows = [*self.waiting]
      self.waiting.clear()
      self._num_left = len(self._pools)
      threads = concurrent.futures.ThreadPoolExecutor(self._num_left)
      for first, pool in enumerate(self._pools):
        pool.waiting.extend(self._rows[first :: len(self._pools)])
        threads.submit(self._drain, pool).add_done_callback(self._told.put)
      threads.shutdown(wait=False)
    updates = self._told.get()
    if not isinstance(updates, concurrent.futures.Future):
      return updates
    self._num_left -= 1
    self._rows = self._rows if self._num_left else []
    return updates.result()

  def _drain(self, pool: RowPool) -> Told:
    while pool.has_work:
      self._told.put(pool.step())
    return []

  def warmup(self, rows: Sequence[Row]) -> bool:
    """Compiles what each pool needs for its share of such rows.

    Returns:
      Whether there was anything to compile.
    """
    number = len(self._pools)
    parts = [rows[first::number] for first in range(number)]
    return any([x.warmup(y) for x, y in zip(self._pools, parts, strict=True)])


class FixedBatches(RowPool):
  """Decodes rows of one kind, one batch after another.

  The rows must not have stop strings. Fixed batches are quicker than a
  `SlotPool` if all rows fit into one batch. Beam searches always run in them.
  """

  def __init__(self, programs: Programs, rows: int, num_rounds: int = 0):
    """Keeps the arguments; runs nothing on the device.

    Args:
      programs: the programs of the pair.
      rows: the most rows of a batch.
      num_rounds: the number of rounds of a step; if it is 0, each step decodes
        a whole batch in one call.
    """
    super().__init__()
    self._programs, self._size, self._num_rounds = programs, rows, num_rounds
    self._pieces: Iterator[Any] = iter(())

  def step(self) -> Told:
    """Decodes a batch, or some rounds of it; returns the updates of its rows.

    There are no updates before the end of the batch.
    """
    if all(row.is_cancelled for row in self._rows):
      self._rows = []
      while self.waiting and len(self._rows) < self._size:
        row = self.waiting.popleft()
        if not row.is_cancelled:
          self._rows.append(row)
      self._pieces = self._decode(self._rows)
    generation = next(self._pieces, None)
    if generation is None:
      return []
    rows, self._rows = self._rows, []
    terms = rows[0].terms
    return [
      (row, Update(outputs=terms.outputs(generation, place)))
      for place, row in enumerate(rows)
      if not row.is_cancelled
    ]

  def warmup(self, rows: Sequence[Row]) -> bool:
    """Compiles the programs of the batches.

    If a step runs only some rounds of a batch, the batches are decoded for it.

    Returns:
      Whether there was anything to compile.
    """
    programs, before = self._programs, self._programs.count
    for at in range(0, len(rows), self._size):
      some = rows[at : at + self._size]
      if self._num_rounds:
        for _ in self._decode(some):
          pass
      else:
        programs.compile(functools.partial(joined, some), len(some))
    return programs.count > before

  def _decode(self, rows: Sequence[Row]) -> Iterator[Any]:
    """Decodes a batch; yields None between two steps, and at last the result.

    The result is a `Generation`; a batch without rows has none.
    """
    request_of = functools.partial(joined, rows)
    if self._num_rounds and rows:
      request = self._programs.exactly(request_of, len(rows))
      yield from self._programs.decode_in_pieces(request, self._num_rounds)
    elif rows:
      yield self._programs.decode(request_of, len(rows))


@dataclasses.dataclass(eq=False)
class Lane:
  """The rows of one kind, which share their programs with no other rows.

  Attributes:
    example: a row of the kind, from which rows for compiling are made.
    waiting: rows that wait for the programs, or for a pool.
    uses: the compiled uses of programs, see `SlotPool`; None before they are
      compiled.
    programs: the programs of the lane's slot pools; None for fixed batches.
    is_kept: whether the programs are kept for ever.
    last_used: `time.monotonic()` when the last row came, or a pool ended.
    pools: `Terms.pool_key`, a key of stop ids and constraint -> the pool that
      decodes the rows with this key.
  """

  example: Row
  waiting: _Queue = dataclasses.field(default_factory=collections.deque)
  uses: set[Any] | None = None
  programs: PoolPrograms | None = None
  is_kept: bool = False
  last_used: float = 0.0
  pools: dict[Any, RowPool] = dataclasses.field(default_factory=dict)

  @property
  def rows(self) -> list[Row]:
    """All rows of the lane, waiting or running."""
    pools = [*self.pools.values()]
    rows = [row for pool in pools for row in [*pool.waiting, *pool.running]]
    return [*self.waiting, *rows]

  @property
  def is_wanted(self) -> bool:
    """Whether the lane has a row that is not cancelled."""
    return any(not row.is_cancelled for row in self.rows)

  @property
  def name(self) -> str:
    """A name for messages: the options that make these rows special."""
    options = self.example.options
    names = [*options.rules, *['min_p'] * bool(options.min_p)]
    if options.num_beams is not None:
      names.insert(0, f'a search of {options.num_beams} beams')
    return ', '.join(names)


class Scheduler:
  """Decodes rows of all kinds, each kind in a lane of its own.

  Ordinary rows are those without rules, beams and `min_p`. If a pool for them
  is given, it decodes them, and `step` compiles nothing. A row of another kind
  then waits in its lane until another thread has called `compile` for that
  lane. Without such a pool, `step` compiles the programs that it needs.

  Attributes:
    lanes: kind -> lane, in the order of their last use.
  """

  def __init__(
    self,
    programs: Programs,
    settings: PoolSettings,
    in_batches: bool = False,
    ordinary: SlotPool | None = None,
  ):
    """Keeps the arguments; runs nothing on the device.

    Args:
      programs: the programs of the pair.
      settings: the settings of the lanes' pools.
      in_batches: whether rows that fit into one batch are decoded as a batch.
      ordinary: the pool of ordinary rows; None: all rows go into lanes.
    """
    self._programs, self._settings = programs, settings
    self._in_batches, self._ordinary = in_batches, ordinary
    self.lanes: dict[Any, Lane] = {}
    # The lock guards all queues.
    self.lock = ordinary.lock if ordinary else threading.Condition()
    self.rounds: Mapping[int, int] = {}

  # Methods that any thread may call.

  def submit(self, rows: Sequence[Row]) -> list[Lane]:
    """Queues rows; returns the lanes that must be compiled for them."""
    fresh = []
    with self.lock:
      for row in rows:
        kind = self.kind_of(row)
        if kind is None and self._ordinary is not None:
          self._ordinary.waiting.append(row)
          continue
        lane = self.lanes.pop(kind, None)
        if lane is None:
          lane = Lane(row)
          fresh.append(lane)
        self.lanes[kind] = lane  # the lane that was used last comes last
        lane.last_used = time.monotonic()
        lane.waiting.append(row)
      self.lock.notify()
    return fresh

  def cancel(self, rows: Iterable[Row]) -> None:
    """Ends rows without an update."""
    with self.lock:
      for row in rows:
        row.is_cancelled = True
      self.lock.notify()

  def kind_of(self, row: Row) -> Any:
    """Returns the key of a row's lane; None if the ordinary pool decodes it."""
    if self._ordinary is None:
      return id(row.terms)
    options = row.options
    is_special = options.num_beams is not None or options.min_p or options.rules
    return row.kind if is_special else None

  @property
  def pools(self) -> list[RowPool]:
    """All pools: the ordinary one, and those of the lanes."""
    lanes = [[*lane.pools.values()] for lane in [*self.lanes.values()]]
    return sum(lanes, [self._ordinary] if self._ordinary else [])

  @property
  def num_waiting(self) -> int:
    """The number of rows that are not decoded yet."""
    queues = [x.waiting for x in [*self.lanes.values(), *self.pools]]
    return sum(not row.is_cancelled for rows in queues for row in [*rows])

  @property
  def num_running(self) -> int:
    """The number of rows that are being decoded."""
    return sum(len(pool.running) for pool in self.pools)

  @property
  def has_work(self) -> bool:
    """Whether a step would do anything."""
    is_ready = any(map(self._is_ready, self.lanes.values()))
    return is_ready or any(pool.has_work for pool in self.pools)

  # Methods that only the decoding thread calls.

  def step(self) -> Told:
    """Moves rows into pools, and steps each pool; returns the updates."""
    updates = self._ordinary.step() if self._ordinary is not None else []
    while (lane := self._next_lane()) is not None:
      updates += self._alone(lane, self._enter)
    for lane in [*self.lanes.values()]:
      updates += self._alone(lane, self._step)
    return updates

  def _alone(self, lane: Lane, run: Callable[[Lane], Told]) -> Told:
    """Calls `run` for a lane; if it raises, only the rows of this lane end.

    Without a pool of ordinary rows, the error is raised to the caller.
    """
    try:
      return run(lane)
    except Exception:
      if self._ordinary is None:
        raise
      return self.fail(lane)

  def _step(self, lane: Lane) -> Told:
    """Steps the pools of a lane."""
    updates: Told = []
    for key, pool in [*lane.pools.items()]:
      updates += pool.step()
      if not pool.has_work:
        with self.lock:
          del lane.pools[key]
          lane.last_used = time.monotonic()
    return updates

  def fail(self, lane: Lane) -> Told:
    """Ends all rows of a lane because of the exception being handled."""
    _LOG.exception('Rows of a kind failed: %s', lane.name)
    with self.lock:
      rows, lane.waiting, lane.pools = lane.rows, collections.deque(), {}
      if lane.uses is None:  # the next row of this kind compiles again
        self._drop(lane)
    return [(row, Update(error='failed alone')) for row in rows]

  def drain(self) -> Iterator[tuple[Row, Update]]:
    """Decodes all rows that were queued; yields their updates."""
    while self.has_work:
      yield from self.step()

  def run(self, request: TextRequest) -> Iterator[tuple[int, Any]]:
    """Decodes a request; yields index and outputs of each row as it ends.

    The outputs of a row are those that `TextRequest.completions` takes. They
    are not kept after they are yielded.
    """
    self.submit(self._in_order(request.rows))
    try:
      for row, update in self.drain():
        if update.outputs:
          yield row.index, update.outputs
    except BaseException:  # also if the caller closes the iterator
      self.cancel(request.rows)
      raise

  def generate(self, request: TextRequest) -> list[Completion]:
    """Decodes a request; returns its completions, in order."""
    return request.completions(dict(self.run(request)))

  def warmup(self, request: TextRequest) -> float:
    """Compiles what `run` needs for a request like this one.

    Returns:
      Seconds that it took; 0.0 if everything had been compiled.
    """
    begin, rows = time.perf_counter(), self._in_order(request.rows)
    is_new = bool(rows) and self._pool_of(rows).warmup(rows)
    return time.perf_counter() - begin if is_new else 0.0

  # Methods that only the compiling thread calls, if there is one.

  def compile(self, lane: Lane) -> bool:
    """Compiles a lane's programs by decoding short outputs.

    If all rows of the lane are cancelled, the lane is removed instead.

    Returns:
      True if the lane is compiled or removed; False if new rows came in the
      meantime, so that `compile` must be called again.
    """
    with self.lock:
      wanted = lane.is_wanted or lane.is_kept
    uses = self._rehearse(lane) if wanted else None
    with self.lock:
      lane.uses = uses
      is_over = uses is not None or not lane.is_wanted
      if uses is None and is_over:
        self._drop(lane)
      self.lock.notify()
    return is_over

  def keep(self, row: Row) -> None:
    """Compiles the programs of a lane, and keeps them for ever.

    Args:
      row: a row of the lane's kind; it is not decoded.
    """
    with self.lock:
      lane = self.lanes.setdefault(self.kind_of(row), Lane(row))
      lane.is_kept = True
    self.compile(lane)

  def _rehearse(self, lane: Lane) -> set[Any]:
    """Decodes short outputs to compile a lane's programs; returns their uses.

    Fixed batches have no uses.
    """
    pool, size = self._pool_of([lane.example]), self._settings.rows
    row = lane.example.shortened(lane.example.terms.shared.gamma + 2)
    if isinstance(pool, FixedBatches):
      pool.warmup([row])
      return set()
    assert isinstance(pool, SlotPool)
    # The second time compiles programs for arrays that other programs placed.
    for _ in range(2):
      rows = [dataclasses.replace(row) for _ in range(min(2, size))]
      pool.rehearse(rows, size)
    lane.programs = pool.programs
    return pool.used | {('rounds', size, False, False)}

  def forget_idle(self, before: float = 0.0) -> bool:
    """Frees the programs of the least recently used lane, if it is idle.

    Args:
      before: frees the lane if its last use was before this `time.monotonic()`;
        0 frees it to make room for another lane, if `IDLE_LANES` are idle or
        `_MOST_LANES` are compiled.

    Returns:
      True if no lane is left to be freed. False if one was freed, or if there
      is no room because all of `_MOST_LANES` lanes have rows.
    """
    with self.lock:
      ready = [
        x for x in self.lanes.values() if x.uses is not None and not x.is_kept
      ]
      idle = [lane for lane in ready if not (lane.waiting or lane.pools)]
      if before or len(ready) < _MOST_LANES:
        # A client that asks again at once should not wait for a compilation.
        latest = before or time.monotonic() - _PAUSE_SECONDS
        idle = [lane for lane in idle if lane.last_used < latest]
        if not idle or not before and len(idle) < IDLE_LANES:
          return True
      for lane in idle[:1]:
        self._drop(lane)
    for lane in idle[:1]:
      self._programs.forget(lane.programs or joined([lane.example]))
    return False

  def _drop(self, lane: Lane) -> None:
    for kind in [x for x, other in self.lanes.items() if other is lane]:
      del self.lanes[kind]

  # Pools and the rows in them.

  def _in_order(self, rows: Sequence[Row]) -> list[Row]:
    """Sorts rows for slots by length; fixed batches keep their order."""
    if self._is_batch(rows):
      return [*rows]
    key = lambda row: (row.widths, len(row.inputs) + len(row.prompt))  # noqa: E731
    return sorted(rows, key=key)

  def _is_batch(self, rows: Sequence[Row]) -> bool:
    """Returns whether rows are decoded in fixed batches."""
    if not rows or rows[0].options.num_beams is not None:
      return True
    fits = self._in_batches and len(rows) <= self._settings.rows
    return fits and not (rows[0].options.stop_strings or rows[0].streams)

  def _is_ready(self, lane: Lane) -> bool:
    """Returns whether a lane has waiting rows and needs no compilation."""
    compiles = self._ordinary is None or lane.uses is not None
    return compiles and bool(lane.waiting)

  def _next_lane(self) -> Lane | None:
    """Returns the lane whose first row enters a pool next; None if no row can.

    If a row needs a new pool while there are `_MOST_POOLS`, the pool with the
    fewest rows is closed. It takes no more rows, and so it ends. Otherwise
    lanes that always have rows would keep all pools.
    """
    with self.lock:
      lanes = [x for x in self.lanes.values() if self._is_ready(x)]
      pools = [x for y in self.lanes.values() for x in y.pools.values()]
      is_full = self._ordinary is not None and len(pools) >= _MOST_POOLS
      for lane in sorted(lanes, key=lambda lane: lane.waiting[0].deadline):
        pool = lane.pools.get(lane.waiting[0].terms.pool_key)
        if not (is_full if pool is None else pool.is_closed):
          return lane
        if pool is None and not any(other.is_closed for other in pools):
          fewest = lambda pool: len(pool.waiting) + len(pool.running)  # noqa: E731
          min(pools, key=fewest).is_closed = True
    return None

  def _enter(self, lane: Lane) -> Told:
    """Moves the first row of a lane to a pool, unless the row is cancelled.

    Returns:
      An empty list: no output changes.
    """
    with self.lock:
      row, key = lane.waiting[0], lane.waiting[0].terms.pool_key
      if key not in lane.pools and not row.is_cancelled:
        rows = [*lane.waiting] if self._ordinary is None else [row]
        lane.pools[key] = pool = self._pool_of(rows, lane.uses)
        self.rounds = pool.rounds
      lane.waiting.popleft()
      if not row.is_cancelled:
        lane.pools[key].waiting.append(row)
    return []

  def _num_pools(self, rows: Sequence[Row]) -> int:
    """Returns how many pools share the rows; on a CPU up to one for each core.

    Other devices, and schedulers with a pool of ordinary rows, use one pool.
    """
    if self._ordinary is not None or not backend.is_one_cpu():
      return 1
    together = min(len(rows), self._settings.pool_sizes(1)[-1])
    most = min(backend.num_cores(), _MOST_BESIDE)
    return max(1, min(most, together // _LEAST_ROWS))

  def _pool_of(
    self, rows: Sequence[Row], compiled: set[Any] | None = None
  ) -> RowPool:
    """Makes the pool that decodes rows of one kind; runs nothing.

    Args:
      rows: rows of one kind, in the order in which they will come.
      compiled: the uses that need no compilation, see `SlotPool`; None: the
        pool compiles what it needs.

    Raises:
      ValueError: the pool cannot fit into memory.
    """
    programs, settings = self._programs, self._settings
    if self._is_batch(rows):
      if self._ordinary is None:
        return FixedBatches(programs, settings.rows)
      return FixedBatches(programs, 1, _PIECE_ROUNDS)
    # Rows that fit into one batch are all prefilled in one call.
    if self._in_batches and len(rows) <= settings.rows:
      size = padded_rows(len(rows))
      settings = PoolSettings(rows=size, refill=size)
    number, args = self._num_pools(rows), (programs, settings, rows)
    pools = [
      SlotPool(*args, lock=self.lock, compiled=compiled, beside=number)
      for _ in range(number)
    ]
    return SideBySide(pools) if number > 1 else pools[0]
