"""Uses each program that traffic may need, so that it is compiled before."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from specdec_jax.decoding.state import Request
from specdec_jax.engine.slots import Slots
from specdec_jax.serving.drafting import Drafting
from specdec_jax.serving.rows import Row

READ_TOGETHER = 4  # rows, where several wait


class Use(NamedTuple):
  """What a server does with programs, which are then compiled.

  Attributes:
    kind: 'rounds' of a pool, 'alone' (a row that is a pool of its own), 'read'
      (rows that are read together) or 'beams'.
    number: of rows, or of beams.
    widths: of the inputs and prompts; () is the widest.
    simply: see `RoundKind`.
    plainly: whether the drafter is left out.
  """

  kind: str
  number: int
  widths: tuple[int, ...] = ()
  simply: bool = False
  plainly: bool = False

  def __str__(self) -> str:
    """It in words, for a log."""
    rows = f'{self.number} row{"s" * (self.number > 1)}'
    words = {
      'rounds': f'rounds of {rows}',
      'alone': 'a row alone',
      'read': f'reading {rows}',
      'beams': f'a search of {self.number} beams',
    }
    inputs = f', inputs of {max(self.widths)}' if self.widths else ''
    greedy = ', greedy' if self.simply else ''
    plainly = ', no drafter' if self.plainly else ''
    return f'{words[self.kind]}{inputs}{greedy}{plainly}'


def widths_of(request: Request) -> tuple[int, int]:
  """Widths of inputs and prompts."""
  return request.inputs.shape[1], request.prompt_width


class Rehearsal:
  """Uses programs in slots of its own, which share them with others.

  Each is used twice: what is compiled depends on where arrays come from, and
  the second time everything follows upon everything.
  """

  def __init__(
    self,
    slots: Slots[Row],
    request_of: Callable[[Sequence[Row]], Request],
    drafting: Drafting,
    sizes: Sequence[int],
    rows: Sequence[Row],
  ):
    """
    Args:
      slots: nobody else's.
      request_of: gives the request of rows that are read together.
      drafting: how rounds draft.
      sizes: of pools, in order; the first is 1.
      rows: one of each width, the widest last.
    """
    self._slots, self._request_of, self._drafting = slots, request_of, drafting
    self._sizes, self._rows = sizes, rows
    self._counts = (1, READ_TOGETHER)[: sizes[-1]]

  def uses(self) -> Mapping[Use, Callable[[], None]]:
    """All of them, the most needed first; only the first suffices for rows."""
    found: dict[Use, Callable[[], None]] = {}
    flags = (False, True)
    for size in self._sizes:
      found[Use('rounds', size)] = functools.partial(self._size, size)
      for plainly in flags:
        use = Use('rounds', size, (), True, plainly)
        found[use] = functools.partial(self._greedy_rounds, size, plainly)
    for row in self._rows:
      widths = widths_of(self._request_of([row]))
      for plainly in flags:
        use = Use('alone', 1, widths, True, plainly)
        found[use] = functools.partial(self._alone, row, plainly)
      for count in self._counts:
        for plainly in {False, self._drafting.reads_plainly}:
          use = Use('read', count, widths, False, plainly)
          found[use] = functools.partial(self._read, row, count, plainly)
    return found

  def _size(self, size: int) -> None:
    """A pool of this size, and its way from and to smaller ones."""
    for _ in range(2):
      for other in self._sizes[: self._sizes.index(size) + 1]:
        self._slots.resize(other)
        for count in self._counts[:other]:
          self._admit(self._rows[-1], count, False)
        self._rounds(other, False, False)
        self._slots.clear()
        self._slots.resize(size)

  def _greedy_rounds(self, size: int, plainly: bool) -> None:
    self._slots.resize(size)
    for _ in range(2):
      self._rounds(size, True, plainly)

  def _alone(self, row: Row, plainly: bool) -> None:
    slots, request = self._slots, self._request_of([row])
    slots.resize(1)
    for _ in range(2):
      slots.hold(request, row, plainly and self._drafting.reads_plainly)
      self._rounds(1, True, plainly)
      self._rounds(1, True, plainly)
      slots.clear()
      self._admit(self._rows[-1], 1, False)  # makes it as wide as all others

  def _read(self, row: Row, count: int, plainly: bool) -> None:
    for size in self._sizes:
      if self._counts[:size][-1] >= count:
        self._slots.resize(size)
        self._admit(row, count, plainly)

  def _admit(self, row: Row, count: int, plainly: bool) -> None:
    request = self._request_of([row] * count)
    self._slots.admit(self._slots.read(request, [row], plainly))
    self._slots.clear()

  def _rounds(self, size: int, simply: bool, plainly: bool) -> None:
    kind = self._drafting.of(size, simply, plainly)
    view = self._slots.run(1, 1, kind.gamma, kind.simply, kind.ends)
    jax.device_get(view)
