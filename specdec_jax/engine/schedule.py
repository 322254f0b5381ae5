"""Which texts are decoded together, and in which order.

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
from specdec_jax.engine.text_batch import Ends

ORDERS = ('shortest', 'given')


@dataclasses.dataclass(frozen=True)
class PoolSettings:
  """How texts go through the slots; no setting changes a greedy output.

  Attributes:
    rows: B, slots; texts that are decoded together.
    max_rounds: N, rounds after which the host looks in any case.
    refill: the host looks earlier once this many rows have finished; None is an
      eighth of the rows. A smaller number keeps the slots fuller and takes more
      of the host's time.
    read_rows: texts that are read together, before a slot is free; None is half
      of the rows.
    order: which text is next: 'shortest' takes the text of the fewest tokens,
      so that rows that decode together are alike and half of the texts are soon
      done; 'given' keeps the order of the texts.
    gammas: rows -> gamma: at the end, when no text is left to fill free slots,
      the rows still running move to the smallest of these pools that holds
      them, and go on with its gamma; 0 decodes plainly. The largest pool
      replaces `rows`. See `Calibration.gammas`. None is one pool with the
      engine's gamma.
    ends: rows -> where drafts of that pool end, and its drafter rests, made for
      its gamma. See `Calibration.ends`. None is what the engine says of each
      gamma.
    deterministic: whether a sample must not depend on how many other rows were
      running; then `gammas` may only differ at temperature 0.

  Raises:
    ValueError: a value is outside its range.
  """

  rows: int = 16
  max_rounds: int = 32
  refill: int | None = None
  read_rows: int | None = None
  order: str = 'shortest'
  gammas: Mapping[int, int] | None = None
  ends: Mapping[int, Ends] | None = None
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
    if self.ends is not None and set(self.ends) != set(self.gammas or ()):
      raise ValueError(
        f'ends must be of the rows of gammas, {sorted(self.gammas or ())}, got'
        f' {sorted(self.ends)}.'
      )

  def in_multiples_of(self, number: int) -> 'PoolSettings':
    """The same with rows rounded up: `number` devices share them evenly.

    If two pools become equal, the larger one's gamma stays: it was chosen for
    more rows, whose calls cost more, so it rather proposes too few tokens.
    """

    def rounded(by_rows: Mapping[int, Any] | None) -> dict[int, Any] | None:
      if by_rows is None:
        return None
      return {
        rounded_up(rows, number): by_rows[rows] for rows in sorted(by_rows)
      }

    return dataclasses.replace(
      self,
      rows=rounded_up(self.rows, number),
      gammas=rounded(self.gammas),
      ends=rounded(self.ends),
    )


@dataclasses.dataclass
class PoolStats:
  """Times and counts of one run through a pool, so far.

  Attributes:
    seconds: wall time.
    host_seconds: the part of it in which the device had nothing to do: from
      each answer of the device until the host gave it its next work.
    looks: how often the host looked at the device's results.
    rounds: gamma -> rounds that ran.
    live_rounds: sum over rounds of the rows that were running.
    slot_rounds: sum over rounds of the slots.
    outputs: texts that were finished.
    slot_seconds: sum over these texts of the time from getting a slot to the
      output.
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
    """Running rows / slots, the mean over rounds; 1 before the first round."""
    return self.live_rounds / self.slot_rounds if self.slot_rounds else 1.0

  @property
  def host_fraction(self) -> float:
    """The part of the time in which the device waited for the host."""
    return self.host_seconds / self.seconds if self.seconds else 0.0

  @property
  def in_slot(self) -> float:
    """Mean seconds from when a text gets a slot until its output is known."""
    return self.slot_seconds / self.outputs if self.outputs else 0.0


class Queue:
  """The rows of a batch in the order of decoding, in groups read together.

  Attributes:
    groups: groups of rows that have not been read.
    read_rows: how many rows are read together.
  """

  def __init__(
    self,
    request: Request,
    rows: Sequence[int],
    settings: PoolSettings,
    multiple: int = 1,
  ):
    """Rows are numbered by their place in `TextBatch.rows`.

    The number of rows that are read together is rounded up to `multiple`, which
    is `Limits.batch_multiple`.
    """
    self._inputs = request.inputs.shape[1]
    self._prompts = request.prompt_width
    is_token = np.asarray(request.inputs) != request.pad_id
    last = request.inputs.shape[1] - np.argmax(is_token[:, ::-1], 1)
    self._length = np.where(np.any(is_token, 1), last, 0)
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
      # With order 'given', a group is as wide as its longest text.
      if full or (sort and self.bucket(last_group[0]) != self.bucket(row)):
        self.groups.append([row])
      else:
        last_group.append(row)

  def _size(self, row: int) -> tuple[tuple[int, int], int]:
    return self.bucket(row), int(self._length[row] + self._prompt[row])

  def bucket(self, row: int) -> tuple[int, int]:
    """Widths of the arrays that a row's input and prompt are read in."""
    width = next_power_of_two(max(SMALLEST_INPUT, int(self._length[row])))
    prompt = int(self._prompt[row]) - 1
    if self._prompts > 1:
      prompt = next_power_of_two(max(SMALLEST_PROMPT, prompt))
    return min(width, self._inputs), min(1 + prompt, self._prompts)

  def widths(self, rows: Sequence[int]) -> tuple[int, int]:
    """Widths of input and prompt that hold all of these rows."""
    inputs, prompts = zip(*map(self.bucket, rows), strict=True)
    return max(inputs), max(prompts)
