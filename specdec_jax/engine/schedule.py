"""Which texts are decoded at once, and in which order they come.

The part of continuous batching that needs no device; see `continuous`.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.checks.arguments import check_number
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import check_choice
from specdec_jax.decoding.state import Request
from specdec_jax.engine.options import check_gamma
from specdec_jax.engine.padding import (
  SMALLEST_INPUT,
  SMALLEST_PROMPT,
  next_power_of_two,
  rounded_up,
)

ORDERS = ('shortest', 'given')


@dataclasses.dataclass(frozen=True)
class PoolSettings:
  """How texts go through the slots; none of it changes a greedy output.

  Attributes:
    rows: B, slots; texts that are decoded at once.
    max_rounds: N, rounds after which the host looks in any case.
    refill: finished rows that make the host look before; None is an eighth of
      the rows. Fewer keep the slots fuller and take more of the host.
    read_rows: texts that are read at once, ahead of a free slot; None is half
      of the rows.
    order: which text is next: 'shortest' by its length in tokens, so that rows
      that decode together are alike and half of the texts are soon done; or as
      'given', for texts whose order matters.
    gammas: rows -> gamma: at the end, when nothing is left to fill free slots,
      the rows still running move to the smallest of these pools that holds
      them, and go on with its gamma; 0 decodes plainly. The largest takes the
      place of `rows`. See `Calibration.gammas`. None is the engine's
      gamma and one pool.
    deterministic: whether a sample must not depend on how many others there
      were; then `gammas` may only differ at temperature 0.

  Raises:
    ValueError: a value is outside its range.
  """

  rows: int = 16
  max_rounds: int = 32
  refill: int | None = None
  read_rows: int | None = None
  order: str = 'shortest'
  gammas: Mapping[int, int] | None = None
  deterministic: bool = True

  def __post_init__(self):
    check_types(self)
    for name in ('rows', 'max_rounds', 'refill', 'read_rows'):
      if getattr(self, name) is not None:
        check_number(name, getattr(self, name), 1)
    check_choice('order', self.order, ORDERS)
    if self.gammas is not None:
      if not self.gammas:
        raise ValueError('gammas must name a number of rows, or be None.')
      for rows, gamma in self.gammas.items():
        check_number('rows of gammas', rows, 1)
        check_gamma(gamma)

  def in_multiples_of(self, number: int) -> 'PoolSettings':
    """The same for devices that share the rows: each has as many of a pool.

    Of two pools that become one, the larger one's gamma stays: more rows make
    a call dearer, so that it rather proposes too little.
    """
    gammas = self.gammas
    if gammas is not None:
      gammas = {
        rounded_up(rows, number): gammas[rows] for rows in sorted(gammas)
      }
    rows = rounded_up(self.rows, number)
    return dataclasses.replace(self, rows=rows, gammas=gammas)


@dataclasses.dataclass
class PoolStats:
  """Times and counts of one run through a pool, so far.

  Attributes:
    seconds: wall time.
    host_seconds: of these, when the device had nothing to do: from each answer
      of it until its next work was given.
    looks: how often the host was asked.
    rounds: gamma -> rounds that ran.
    live_rounds: sum over rounds of the rows that were running.
    slot_rounds: sum over rounds of the slots.
    outputs: texts that were finished.
    slot_seconds: sum over them of the time from a slot to the output.
  """

  seconds: float = 0.0
  host_seconds: float = 0.0
  looks: int = 0
  rounds: dict[int, int] = dataclasses.field(default_factory=dict)
  live_rounds: int = 0
  slot_rounds: int = 0
  outputs: int = 0
  slot_seconds: float = 0.0

  @property
  def occupancy(self) -> float:
    """Running rows / slots, the mean over rounds; 1 before any."""
    return self.live_rounds / self.slot_rounds if self.slot_rounds else 1.0

  @property
  def host_fraction(self) -> float:
    """The part of the time in which the device waited for the host."""
    return self.host_seconds / self.seconds if self.seconds else 0.0

  @property
  def in_slot(self) -> float:
    """Mean seconds from a text's slot until its output was known."""
    return self.slot_seconds / self.outputs if self.outputs else 0.0


@dataclasses.dataclass
class Group:
  """Rows that were read together, and how many of them have had a slot.

  Attributes:
    rows: of the batch.
    staged: what `RowLayout.admit` copies.
    width: of the inputs that they have room for.
    taken: how many have had a slot.
  """

  rows: list[int]
  staged: Any
  width: int
  taken: int = 0

  @property
  def left(self) -> int:
    """How many wait for one."""
    return len(self.rows) - self.taken


class Queue:
  """The rows of a batch in the order of decoding, in groups read together.

  Attributes:
    groups: those that have not been read.
    read_rows: how many are read together.
  """

  def __init__(
    self,
    request: Request,
    rows: Sequence[int],
    settings: PoolSettings,
    multiple: int = 1,
  ):
    """Rows are counted as `TextBatch.rows` counts them.

    `multiple` is `Limits.batch_multiple`: of it as many are read together.
    """
    self._inputs = request.inputs.shape[1]
    self._prompts = request.prompt_width
    last = request.inputs.shape[1] - np.argmax(request.inputs[:, ::-1] != 0, 1)
    self._length = np.where(np.any(request.inputs != 0, 1), last, 0)
    self._prompt = np.broadcast_to(request.first_length, self._length.shape)
    self.groups: collections.deque[list[int]] = collections.deque()
    read_rows = settings.read_rows or max(1, settings.rows // 2)
    self.read_rows = rounded_up(read_rows, multiple)
    sort = settings.order == 'shortest'
    if sort:
      rows = sorted(rows, key=self._size)
    for row in rows:
      last_group = self.groups[-1] if self.groups else []
      full = len(last_group) in (0, self.read_rows)
      # As given, a group is as wide as its longest.
      if full or (sort and self.bucket(last_group[0]) != self.bucket(row)):
        self.groups.append([row])
      else:
        last_group.append(row)

  def _size(self, row: int) -> tuple[tuple[int, int], int]:
    return self.bucket(row), int(self._length[row] + self._prompt[row])

  def bucket(self, row: int) -> tuple[int, int]:
    """Widths of the arrays that its input and its prompt are read in."""
    width = next_power_of_two(max(SMALLEST_INPUT, int(self._length[row])))
    prompt = int(self._prompt[row]) - 1
    if self._prompts > 1:
      prompt = next_power_of_two(max(SMALLEST_PROMPT, prompt))
    return min(width, self._inputs), min(1 + prompt, self._prompts)

  def widths(self, rows: Sequence[int]) -> tuple[int, int]:
    """Those that hold all of these rows."""
    inputs, prompts = zip(*map(self.bucket, rows), strict=True)
    return max(inputs), max(prompts)
