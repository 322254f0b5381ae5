"""Finds what the devices of a compiled program exchange, from its text."""

import collections
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_HEAD = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*\{$')
_CALLED = re.compile(
  r'(?:body|condition|calls|called_computations|to_apply|true_computation'
  r'|false_computation|branch_computations)=(\{[^}]*\}|%?[\w.-]+)'
)
# A `-done` instruction is not counted: its `-start` is.
_COLLECTIVE = re.compile(
  r'^\s+(?:ROOT )?%?[\w.-]+ = (\(?.*?) (all-reduce|all-gather|reduce-scatter'
  r'|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all)'
  r'(?:-start)?\('
)
_SHAPE = re.compile(r'([a-z]\w*)\[([\d,]*)\]')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Collective(NamedTuple):
  """An exchange between the devices of a program.

  Attributes:
    op: such as 'all-reduce'.
    shapes: shapes of the arrays that a device has afterwards.
    bytes: bytes of these arrays.
    times: how often it runs: per run of the program, or per round of the loop
      whose number of rounds is unknown.
    looped: whether it is in that loop.
  """

  op: str
  shapes: tuple[tuple[int, ...], ...]
  bytes: int
  times: int
  looped: bool


def find(text: str) -> list[Collective]:
  """Reads the text of an optimised program, `compiled.as_text()`.

  All branches of a conditional are counted, and both the condition and the body
  of the loop of rounds. So the result is an upper bound.
  """
  known: dict[str, list[str]] = {}
  lines, entry = [], ''
  for line in text.splitlines():
    if head := _HEAD.match(line):
      lines = known.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    else:
      lines.append(line)

  def walk(name: str, times: int, looped: bool) -> Iterator[Collective]:
    for line in known.get(name, []):
      if match := _COLLECTIVE.match(line):
        shapes, size = [], 0.0
        for dtype, dims in _SHAPE.findall(match[1]):
          shapes.append(tuple(map(int, filter(None, dims.split(',')))))
          bits = re.search(r'\d+', dtype)
          size += math.prod(shapes[-1]) * (int(bits[0]) / 8 if bits else 1)
        yield Collective(match[2], tuple(shapes), int(size), times, looped)
      inner, inside = times, looped
      if ' while(' in line:
        trips = _TRIPS.search(line)
        # Only the loop of rounds has no known number of turns: it ends when
        # its rows are finished.
        inner, inside = (times * int(trips[1]), looped) if trips else (1, True)
      called = ' '.join(_CALLED.findall(line))
      for computation in {*re.findall(r'[\w.-]+', called)}:
        yield from walk(computation, inner, inside)

  return list(walk(entry, 1, False))


def trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
  """The sizes in sorted order: a weight may be gathered as its transpose."""
  return tuple(sorted(size for size in shape if size > 1))


def of_a_round(exchanges: Iterable[Collective]) -> dict:
  """Count and bytes by kind of what is exchanged in each round."""
  kinds: dict = collections.defaultdict(collections.Counter)
  for exchange in exchanges:
    if exchange.looped:
      size = exchange.times * exchange.bytes
      kinds[exchange.op].update(count=exchange.times, bytes=size)
  return kinds
