"""Finds what the devices of a compiled program exchange, from its text."""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

_HEAD = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*\{$')
_CALLED = re.compile(
  r'(?:body|condition|calls|called_computations|to_apply|true_computation'
  r'|false_computation)=\{?%?([\w.-]+)'
)
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_ENTRY = re.compile(r'^ENTRY %?([\w.-]+)', re.MULTILINE)
_BITS = re.compile(r'\D+(\d+)')
# A `-done` instruction is not counted: its `-start` is.
_COLLECTIVE = re.compile(
  r'^\s+(?:ROOT )?%?[\w.-]+ = (\(?.*?) (all-reduce|all-gather|reduce-scatter'
  r'|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all)'
  r'(-start)?\('
)
_SHAPE = re.compile(r'([a-z]\w*)\[([\d,]*)\]')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
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
  entry = _entry(text)
  return list(_walk(_computations(text), entry, 1, False))


def _walk(
  known: dict[str, list[str]], name: str, times: int, looped: bool
) -> Iterator[Collective]:
  for line in known.get(name, []):
    if found := _COLLECTIVE.match(line):
      yield _collective(found, times, looped)
    inner, inside = times, looped
    if ' while(' in line:
      trips = _TRIPS.search(line)
      # Only the loop of rounds has no known number of turns: it ends when its
      # rows are finished.
      inner, inside = (times * int(trips[1]), looped) if trips else (1, True)
    for one in _called_by(line):
      yield from _walk(known, one, inner, inside)


def _collective(found: re.Match, times: int, looped: bool) -> Collective:
  parts = _SHAPE.findall(found[1])
  if found[3] and found[2] != 'all-reduce' and len(parts) > 1:
    # The shapes are (inputs, outputs, flags of the device); keeps the outputs.
    parts = [part for part in parts if part[1]]
    parts = parts[len(parts) // 2 :]
  shapes = tuple(
    tuple(int(size) for size in dims.split(',') if size) for _, dims in parts
  )
  sizes = (
    math.prod(shape) * _itemsize(dtype)
    for shape, (dtype, _) in zip(shapes, parts, strict=True)
  )
  return Collective(found[2], shapes, int(sum(sizes)), times, looped)


def of_weights(
  found: Iterable[Collective], weights: Collection[tuple[int, ...]]
) -> list[Collective]:
  """The exchanges that put a whole weight together.

  Args:
    found: the exchanges, from `find`.
    weights: whole shapes of the parameters that are split.
  """
  known = {_trimmed(shape) for shape in weights}
  return [
    one
    for one in found
    if one.op != 'all-reduce'
    and any(_trimmed(shape) in known for shape in one.shapes)
  ]


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
  """The sizes in sorted order: a weight may be gathered as its transpose."""
  return tuple(sorted(size for size in shape if size > 1))


def totals(found: Iterable[Collective]) -> dict[str, dict[str, Any]]:
  """Count and bytes by kind, outside of rounds ('once') and per round."""
  sums: dict[str, dict[str, Any]] = {'once': {}, 'round': {}}
  for one in found:
    kinds = sums['round' if one.looped else 'once']
    kind = kinds.setdefault(one.op, collections.Counter())
    kind['count'] += one.times
    kind['bytes'] += one.times * one.bytes
  return {
    when: {op: dict(kinds[op]) for op in sorted(kinds)}
    for when, kinds in sums.items()
  }


def _computations(text: str) -> dict[str, list[str]]:
  """Name of each computation -> its lines."""
  found: dict[str, list[str]] = {}
  lines: list[str] = []
  for line in text.splitlines():
    if head := _HEAD.match(line):
      lines = found.setdefault(head[2], [])
    else:
      lines.append(line)
  return found


def _called_by(line: str) -> set[str]:
  """Names of the computations that an instruction calls."""
  names = set(_CALLED.findall(line))
  for branches in _BRANCHES.findall(line):
    names |= {part.strip().lstrip('%') for part in branches.split(',')}
  return names


def _entry(text: str) -> str:
  """Name of the computation that a program begins with; '' without one."""
  found = _ENTRY.search(text)
  return found[1] if found else ''


def _itemsize(dtype: str) -> float:
  """Bytes of a number, from its name in a program."""
  bits = _BITS.match(dtype)
  return int(bits[1]) / 8 if bits else 1
