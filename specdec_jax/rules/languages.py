"""Sets of texts as automata over characters: regexes, strings of JSON.

A `Language` is an expression; it becomes a minimal automaton where one is
needed. The bounds are checked while an expression grows and while its automaton
is made, so that no pattern takes more memory or time than they allow.
"""

import collections
import contextlib
import contextvars
import functools
import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np

MOST_STATES = 1 << 16
MOST_POSITIONS = 1 << 17  # characters of an expression, repetitions written out
_MOST_CELLS = 1 << 23  # states times classes of symbols
_MOST_MEMBERS = 1 << 21  # positions in the sets that become states

Intervals = tuple[tuple[int, int], ...]  # of code points, ends included
_CHARACTERS: Intervals = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_MARK = 0x110000  # symbols from here on say where an anchor stands
_TOP = 0x110010
_deadline = contextvars.ContextVar('deadline', default=math.inf)


class TooLarge(ValueError):
  """An automaton has more states, or takes longer to make, than is allowed."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
  """Inside, what takes this thread longer to make is `TooLarge`."""
  token = _deadline.set(time.thread_time() + seconds)
  try:
    yield
  finally:
    _deadline.reset(token)


def check_time() -> None:
  """Raises TooLarge if the time of `deadline` is over."""
  if time.thread_time() > _deadline.get():
    raise TooLarge('its automaton takes too long to make')


def check_size(size: int, most: int, what: str) -> None:
  """Raises TooLarge if there are more than so many of something."""
  if size > most:
    raise TooLarge(f'its automaton has more than {most} {what}')


class Dfa(NamedTuple):
  """A complete deterministic automaton of N states; state 0 is dead.

  Attributes:
    cuts: int[I], where intervals of symbols begin, the first at 0.
    classes: int[I], the class of the symbols of each interval.
    step: int32[N, C], the state behind each state and class.
    accepting: bool[N].
    start: the state in which it begins.
  """

  cuts: np.ndarray
  classes: np.ndarray
  step: np.ndarray
  accepting: np.ndarray
  start: int

  def intervals(self) -> list[list[tuple[int, int]]]:
    """Of each class the intervals of its symbols."""
    found: list[list[tuple[int, int]]] = [[] for _ in self.step[0]]
    ends = np.append(self.cuts[1:], _TOP) - 1
    for low, high, kind in zip(self.cuts, ends, self.classes, strict=True):
      found[kind].append((int(low), int(high)))
    return found


class _Nfa:
  """An automaton that grows: edges by labels, and edges without a symbol."""

  def __init__(self):
    self.labels: dict[Intervals, int] = {}
    self.edges: list[list[tuple[int, int]]] = [[]]
    self.empty: list[list[int]] = [[]]

  def new(self) -> int:
    self.edges.append([])
    self.empty.append([])
    return len(self.edges) - 1

  def label(self, intervals: Intervals) -> int:
    return self.labels.setdefault(intervals, len(self.labels))


class Language:
  """A set of texts; `+` joins, `|`, `&` and `-` are those of sets.

  Attributes:
    size: positions of the expression, its repetitions written out.
  """

  def __init__(self, kind: str, parts: Any, size: int):
    """Takes the kind of expression, what is in it, and its size."""
    check_size(size, MOST_POSITIONS, 'positions')
    self.kind, self.parts, self.size = kind, parts, size

  def __add__(self, other: 'Language') -> 'Language':
    return concat([self, other])

  def __or__(self, other: 'Language') -> 'Language':
    return union([self, other])

  def __and__(self, other: 'Language') -> 'Language':
    return (self._others() | other._others())._others()

  def __sub__(self, other: 'Language') -> 'Language':
    return (self._others() | other)._others()

  def repeat(self, least: int, most: int | None = None) -> 'Language':
    """So many of its texts behind each other; None: no bound."""
    times = least + 1 if most is None else most
    return Language('repeat', (self, least, most), 1 + times * (1 + self.size))

  def _others(self) -> 'Language':
    """All sequences of symbols that are not in it."""
    cuts, classes, step, accepting, start = self.dfa
    step = np.pad(step + 1, ((1, 0), (0, 0)))
    accepting = np.pad(~accepting, (1, 0))
    return _language(Dfa(cuts, classes, step, accepting, start + 1))

  @functools.cached_property
  def dfa(self) -> Dfa:
    """Its minimal automaton.

    Raises:
      TooLarge: it has too many states, or takes too long.
    """
    if self.kind == 'dfa':
      return _minimal(self.parts)
    nfa = _Nfa()
    return _minimal(_determined(nfa, self._emit(nfa, 0)))

  @property
  def is_empty(self) -> bool:
    """Whether it has no text."""
    return not self.dfa.accepting.any()

  def matches(self, text: str) -> bool:
    """Whether it has this text."""
    state = self.dfa.start
    for char in map(ord, text):
      place = np.searchsorted(self.dfa.cuts, char, 'right') - 1
      state = self.dfa.step[state, self.dfa.classes[place]]
    return bool(self.dfa.accepting[state])

  def shortest(self) -> str | None:
    """One of its shortest texts; None if it has none."""
    dfa, reached = self.dfa, [self.dfa.accepting]
    while not reached[-1][dfa.start]:
      check_time()
      reached.append(reached[-1] | reached[-1][dfa.step].any(axis=1))
      if len(reached) > len(dfa.step):
        return None
    state, text = dfa.start, ''
    firsts = [(*ranges, (0, 0))[0][0] for ranges in dfa.intervals()]
    for is_near in reached[-2::-1]:
      kind = int(np.argmax(is_near[dfa.step[state]]))
      state, text = int(dfa.step[state, kind]), text + chr(firsts[kind])
    return text

  def _emit(self, nfa: _Nfa, state: int) -> int:
    """Adds what leads from a state to the state that is returned."""
    if self.kind == 'characters':
      end = nfa.new()
      nfa.edges[state].append((nfa.label(self.parts), end))
      return end
    check_time()
    if self.kind == 'concat':
      for part in self.parts:
        state = part._emit(nfa, state)
      return state
    end = nfa.new()
    if self.kind == 'union':
      for part in self.parts:
        nfa.empty[part._emit(nfa, state)].append(end)
    elif self.kind == 'repeat':
      part, least, most = self.parts
      for _ in range(least):
        state = part._emit(nfa, state)
      for _ in range((most or least) - least):
        nfa.empty[state].append(end)
        state = part._emit(nfa, state)
      nfa.empty[state].append(end)
      if most is None:
        nfa.empty[part._emit(nfa, end)].append(end)
        # What follows is not part of the loop.
        nfa.empty[end].append(nfa.new())
        end += len(nfa.edges) - 1 - end
    elif self.kind == 'graph':
      edges, start, finals = self.parts
      states: Any = collections.defaultdict(nfa.new)
      nfa.empty[state].append(states[start])
      for source, part, target in edges:
        nfa.empty[part._emit(nfa, states[source])].append(states[target])
      for final in finals:
        nfa.empty[states[final]].append(end)
    else:
      self._emit_dfa(nfa, state, end)
    return end

  def _emit_dfa(self, nfa: _Nfa, begin: int, end: int) -> None:
    """Adds the states of its automaton; marks of anchors are erased."""
    dfa = self.parts.dfa if self.kind == 'erased' else self.dfa
    base = len(nfa.edges)
    nfa.edges += ([] for _ in dfa.step)
    nfa.empty += ([] for _ in dfa.step)
    nfa.empty[begin].append(base + dfa.start)
    for state in np.flatnonzero(dfa.accepting).tolist():
      nfa.empty[base + state].append(end)
    for kind, intervals in enumerate(dfa.intervals()):
      column = dfa.step[:, kind]
      sources = np.flatnonzero(column)
      pairs = zip(sources.tolist(), column[sources].tolist(), strict=True)
      kept = intervals
      if self.kind == 'erased':
        kept = [pair for pair in intervals if pair[0] < _MARK]
      label = nfa.label(tuple(kept))
      for source, target in pairs:
        if kept:
          nfa.edges[base + source].append((label, base + target))
        if len(kept) < len(intervals):
          nfa.empty[base + source].append(base + target)


def characters(intervals: Iterable[tuple[int, int]]) -> Language:
  """One character out of closed intervals of code points."""
  kept = (
    (max(low, first), min(high, last))
    for low, high in intervals
    for first, last in _CHARACTERS
  )
  return Language('characters', tuple(p for p in kept if p[0] <= p[1]), 1)


@functools.lru_cache(1 << 10)
def _character(symbol: int) -> Language:
  return Language('characters', ((symbol, symbol),), 1)


def concat(parts: Iterable[Language]) -> Language:
  """Texts of each, behind each other."""
  listed = tuple(parts)
  return Language('concat', listed, sum(part.size for part in listed))


def union(parts: Iterable[Language]) -> Language:
  """Texts of any of them."""
  listed = tuple(parts)
  return Language('union', listed, 1 + sum(part.size for part in listed))


def graph(
  edges: Iterable[tuple[int, Language, int]], start: int, finals: Iterable[int]
) -> Language:
  """Texts along the paths from a state to one of the final ones.

  Args:
    edges: a state, the texts that lead from it, and the state behind them.
    start: the state in which a text begins.
    finals: the states in which it may end.
  """
  listed = tuple(edges)
  size = 1 + sum(1 + part.size for _, part, _ in listed)
  return Language('graph', (listed, start, tuple(finals)), size)


def literal(text: str) -> Language:
  """One text."""
  check_size(len(text), MOST_POSITIONS, 'positions')
  return concat(_character(ord(char)) for char in text)


def words(texts: Sequence[str]) -> Language:
  """These texts."""
  check_size(sum(map(len, texts)), MOST_POSITIONS, 'positions')
  return union(map(literal, texts))


def _language(dfa: Dfa) -> Language:
  return Language('dfa', dfa, len(dfa.step))


ANY = characters(_CHARACTERS)
EVERY = ANY.repeat(0)
EMPTY = concat(())
NOTHING = union(())


# Determinising and minimising.


def _determined(nfa: _Nfa, end: int) -> Dfa:
  """The automaton of sets of positions."""
  cuts, classes, covered = _classes([*nfa.labels])
  num_classes = 1 + int(classes.max())
  numbers: dict[frozenset[int], int] = {frozenset(): 0}
  again: dict[frozenset[int], int] = {}  # before their closure
  subsets, rows, members = [frozenset[int]()], [], 0

  @functools.cache
  def closure(state: int) -> frozenset[int]:
    """The states behind a state without a symbol, of those that have edges."""
    nonlocal members
    check_time()
    reached, todo = {state}, [state]
    while todo:
      more = {*nfa.empty[todo.pop()]} - reached
      reached |= more
      todo += more
    kept = frozenset(s for s in reached if nfa.edges[s] or s == end)
    members += len(kept)
    check_size(members, _MOST_MEMBERS, 'positions in its states')
    return kept

  def number(targets: frozenset[int]) -> int:
    nonlocal members
    if targets not in again:
      subset = frozenset[int]().union(*map(closure, targets))
      again[targets] = numbers.setdefault(subset, len(subsets))
      if again[targets] == len(subsets):
        subsets.append(subset)
        members += len(subset)
    return again[targets]

  start = number(frozenset([0]))
  for subset in subsets:  # it grows
    check_time()
    following: dict[int, set[int]] = {}
    for state in subset:
      for label, target in nfa.edges[state]:
        for kind in covered[label]:
          following.setdefault(kind, set()).add(target)
    row = np.zeros((num_classes,), np.int32)
    for kind, targets in following.items():
      row[kind] = number(frozenset(targets))
    rows.append(row)
    check_size(len(subsets), MOST_STATES, 'states')
    check_size(len(subsets) * num_classes, _MOST_CELLS, 'edges')
    check_size(members, _MOST_MEMBERS, 'positions in its states')
  accepting = np.array([end in subset for subset in subsets])
  return Dfa(cuts, classes, np.stack(rows), accepting, start)


def _classes(
  labels: list[Intervals],
) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
  """Classes of symbols that are in the same labels.

  Returns:
    `cuts` and `classes` of a `Dfa`, and of each label its classes.
  """
  pairs = [(low, high + 1) for label in labels for low, high in label]
  cuts = np.unique([0, _MARK, *itertools.chain.from_iterable(pairs)])
  bounds = np.searchsorted(cuts, np.array(pairs or [(0, 0)])).T
  # Symbols of the same labels have the same sum of these labels' numbers.
  rng = np.random.default_rng(0)
  sizes = [len(label) for label in labels]
  numbers = rng.integers(1 << 63, size=len(labels), dtype=np.uint64)
  numbers = np.repeat(numbers, sizes) if pairs else np.zeros((1,), np.uint64)
  sums = np.zeros((len(cuts) + 1,), np.uint64)
  np.add.at(sums, bounds[0], numbers)
  np.subtract.at(sums, bounds[1], numbers)
  _, classes = np.unique(np.cumsum(sums)[:-1], return_inverse=True)
  spans = iter(bounds.T.tolist())
  covered = [
    np.unique(
      np.concatenate(
        [classes[slice(*next(spans))] for _ in label] or [classes[:0]]
      )
    ).tolist()
    for label in labels
  ]
  keep = cuts < _TOP
  return cuts[keep], classes[keep], covered


def _minimal(dfa: Dfa) -> Dfa:
  """The automaton with the fewest states of the same language."""
  rng = np.random.default_rng(1)
  numbers = rng.integers(1 << 63, size=len(dfa.step), dtype=np.uint64)
  # Symbols that lead everywhere to the same states are of one class.
  _, kinds, classes = np.unique(
    numbers @ dfa.step.astype(np.uint64), True, True
  )
  # A class without symbols would lead to states that no text reaches.
  used, classes = np.unique(classes[dfa.classes], return_inverse=True)
  columns = np.ascontiguousarray(dfa.step.T[kinds[used]])
  block = blocks(columns, dfa.accepting)
  _, first = np.unique(block, return_index=True)
  # Numbered as they are reached, the dead one first.
  step = block[columns[:, first]].T
  order, reached = [int(block[0])], np.zeros((len(first),), bool)
  reached[block[0]] = True
  todo = np.unique(block[[dfa.start]])
  while (todo := todo[~reached[todo]]).size:
    reached[todo] = True
    order += todo.tolist()
    todo = np.unique(step[todo])
  numbers = np.zeros((len(first),), np.int32)
  numbers[order] = np.arange(len(order))
  keep = np.flatnonzero(np.diff(classes, prepend=-1) | (dfa.cuts == _MARK))
  return Dfa(
    dfa.cuts[keep],
    classes[keep],
    numbers[step[order]],
    dfa.accepting[first[order]],
    int(numbers[block[dfa.start]]),
  )


def blocks(
  columns: np.ndarray, kinds: np.ndarray, most: int | None = None
) -> np.ndarray:
  """Numbers of states, int[N], that are the same where states are equal.

  States are told apart by where they lead; only those that lead to a state
  whose number has changed are looked at again.

  Args:
    columns: int[C, N], the state behind each, by the class of the symbol.
    kinds: int[N], 0 or 1; states of two kinds differ. That of state 0 is 0.
    most: how many symbols may be read to tell two states apart.
  """
  symbols, sources = np.nonzero(columns)  # the dead one's number never changes
  targets = columns[symbols, sources]
  before = sources[np.argsort(targets, kind='stable')]
  bounds = np.cumsum([0, *np.bincount(targets, minlength=kinds.size)])
  rng = np.random.default_rng(0)
  hashes = rng.integers(1 << 63, size=kinds.size + 2, dtype=np.uint64)
  weights = rng.integers(1 << 63, size=(len(columns), 1), dtype=np.uint64)
  block = kinds.astype(np.int64)
  totals = np.bincount(block, minlength=kinds.size + 2)
  size, todo = 2, np.arange(kinds.size)
  for _ in range(kinds.size if most is None else most):
    if not todo.size:
      break
    check_time()
    mixed = (hashes[block[columns[:, todo]]] * weights).sum(axis=0)
    _, at, group, counts = np.unique(
      mixed + hashes[block[todo]], True, True, True
    )
    owner = block[todo[at]]
    is_dead = np.isin(np.arange(counts.size), group[todo == 0])
    ranked = np.lexsort((-counts, ~is_dead, owner))
    largest = ranked[np.unique(owner[ranked], return_index=True)[1]]
    # Of a block the states that are not looked at keep the number, else the
    # largest part, or that of the dead state.
    sums = np.bincount(owner, counts)
    is_new = np.ones(counts.shape, bool)
    is_new[largest] = sums[owner[largest]] < totals[owner[largest]]
    numbers = np.where(is_new, size + np.cumsum(is_new) - 1, owner)
    np.subtract.at(totals, owner[is_new], counts[is_new])
    size += int(np.count_nonzero(is_new))
    totals[numbers[is_new]] = counts[is_new]
    block[todo] = numbers[group]
    moved = todo[is_new[group]]
    spans = [before[bounds[state] : bounds[state + 1]] for state in moved]
    todo = np.unique(np.concatenate([*spans, moved[:0]]))
  return block


# Spelling symbols by others: characters in bytes, or in a string of JSON.

Spelling = list[Intervals]  # of each place the symbols that it may have


def _split(low: int, high: int, places: Sequence[int]) -> Iterator[Spelling]:
  """Numbers from `low` to `high` as digits, each out of an interval.

  Args:
    low: the least number.
    high: the greatest number.
    places: the value of each place, as (100, 10, 1).
  """
  place, *rest = places
  (first, low), (last, high) = divmod(low, place), divmod(high, place)
  if not rest:
    yield [((first, last),)]
    return
  ends: list[tuple[int, int, int, int]] = []
  if first == last:
    parts = [(first, last, low, high)]
  else:
    parts = [(first, first, low, place - 1)] if low else []
    ends = [(last, last, 0, high)] if high < place - 1 else []
    parts += [(first + bool(parts), last - len(ends), 0, place - 1), *ends]
  for start, stop, least, most in parts:
    if start <= stop:
      for digits in _split(least, most, rest):
        yield [((start, stop),), *digits]


def _clipped(low: int, high: int, ranges: Intervals) -> Iterator[Any]:
  for first, last in ranges:
    if low <= last and first <= high:
      yield max(low, first), min(high, last)


def _shifted(digits: Intervals, by: int) -> Intervals:
  return tuple((low + by, high + by) for low, high in digits)


def _utf8(low: int, high: int) -> Iterator[Spelling]:
  for size, first, last, lead in (
    (1, 0, 0x7F, 0),
    (2, 0x80, 0x7FF, 0xC0),
    (3, 0x800, 0xD7FF, 0xE0),
    (3, 0xE000, 0xFFFF, 0xE0),
    (4, 0x10000, 0x10FFFF, 0xF0),
  ):
    places = [64**i for i in reversed(range(size))]
    for pair in _clipped(low, high, ((first, last),)):
      for digits in _split(pair[0], pair[1], places):
        head, *tail = digits
        yield [_shifted(head, lead), *(_shifted(d, 0x80) for d in tail)]


_SHORT = dict(zip(b'"\\\b\f\n\r\t', b'"\\bfnrt', strict=True))
_RAW = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))


def _json(low: int, high: int) -> Iterator[Spelling]:
  """Raw where JSON allows it, or as json.dumps escapes."""
  for pair in _clipped(low, high, _RAW):
    yield [(pair,)]
  backslash: Spelling = [((0x5C, 0x5C),)]
  for symbol, letter in _SHORT.items():
    if low <= symbol <= high:
      yield [*backslash, ((letter, letter),)]
  longer = [(0, 7), (11, 11), (14, 31), (127, 0xD7FF), (0xE000, 0xFFFF)]
  unit: Spelling = [*backslash, ((0x75, 0x75),)]
  for pair in _clipped(low, high, tuple(longer)):
    for digits in _split(pair[0], pair[1], [4096, 256, 16, 1]):
      yield [*unit, *map(_hex, digits)]
  d: Intervals = ((0x64, 0x64),)
  for first, last in _clipped(low, high, ((0x10000, 0x10FFFF),)):
    places = [1 << i for i in (18, 14, 10, 8, 4, 0)]
    for digits in _split(first - 0x10000, last - 0x10000, places):
      upper, lower = _shifted(digits[0], 8), _shifted(digits[3], 12)
      yield [
        *(*unit, d, *map(_hex, [upper, *digits[1:3]])),
        *(*unit, d, *map(_hex, [lower, *digits[4:]])),
      ]


def _hex(digits: Intervals) -> Intervals:
  ((low, high),) = digits
  parts = [(low + 48, min(high, 9) + 48), (max(low, 10) + 87, high + 87)]
  return tuple(part for part in parts if part[0] <= part[1])


def _spelled(dfa: Dfa, spell: Any) -> Dfa:
  """The automaton of the spellings of its texts."""
  spellings = [
    (tuple(spelling), kind)
    for kind, intervals in enumerate(dfa.intervals())
    for low, high in intervals
    for spelling in spell(low, high)
    if dfa.step[:, kind].any()
  ]
  nodes: dict[Any, int] = {}
  root = _node(spellings, nodes)
  cuts, classes, covered = _classes(
    [label for node in nodes for label, _, _ in node]
  )
  size, count = len(dfa.step), 1 + int(classes.max())
  check_size(size * len(nodes), _MOST_CELLS, 'edges')
  rng = np.random.default_rng(2)
  weights = rng.integers(1 << 63, size=count, dtype=np.uint64)
  hashes = rng.integers(1 << 63, size=size, dtype=np.uint64)
  hashes[0] = 0  # of the dead state, and of what leads nowhere else
  # In a symbol, a state and a node are what the spellings from there lead to.
  # Nodes are behind those that they lead to.
  inside = np.zeros((size, len(nodes)), np.uint64)
  kinds = iter(covered)
  for node, number in nodes.items():
    for _, is_last, value in node:
      after = hashes[dfa.step[:, value]] if is_last else inside[:, value]
      inside[:, number] += weights[next(kinds)].sum(dtype=np.uint64) * after
  inside[:, root] = 0  # these states are in no symbol
  values, firsts, states = np.unique(inside, True, True)
  states = states.reshape(inside.shape) + size - (values[0] == 0)
  states[inside == 0] = 0
  check_size((size + len(values)) * count, 2 * _MOST_CELLS, 'edges')
  step = np.zeros((size + len(values), count), np.int32)
  origins, places = np.divmod(firsts, len(nodes))
  kinds = iter(covered)
  for node, number in nodes.items():
    at = origins[(places == number) & (values > 0)]
    rows = states[at, number]
    if number == root:
      at = rows = np.arange(size)
    for _, is_last, value in node:
      after = dfa.step[at, value] if is_last else states[at, value]
      step[np.ix_(rows, next(kinds))] = after[:, None]
  accepting = np.zeros((len(step),), bool)
  accepting[:size] = dfa.accepting
  return Dfa(cuts, classes, step, accepting, dfa.start)


def _node(spellings: list[tuple[Any, int]], nodes: dict[Any, int]) -> int:
  """The number of the node of a tree that reads some spellings."""
  bounds = sorted(
    {
      bound
      for (head, *_), _ in spellings
      for low, high in head
      for bound in (low, high + 1)
    }
  )
  edges: dict[Any, list[tuple[int, int]]] = {}
  inside: list[list[Any]] = [[] for _ in bounds]
  places = {bound: place for place, bound in enumerate(bounds)}
  for (head, *tail), kind in spellings:
    for low, high in head:
      for place in range(places[low], places[high + 1]):
        inside[place].append((tail, kind))
  for place, after in enumerate(inside[:-1]):
    if after:
      tail, kind = after[0]
      target = (False, _node(after, nodes)) if tail else (True, kind)
      edges.setdefault(target, []).append(
        (bounds[place], bounds[place + 1] - 1)
      )
  node = tuple((tuple(pairs), *target) for target, pairs in edges.items())
  return nodes.setdefault(node, len(nodes))


def json_string(values: Language) -> Language:
  """The JSON of strings, quotes included.

  Characters are as they are where JSON allows it, or as json.dumps escapes
  them.
  """
  quote = literal('"')
  return concat([quote, _language(_spelled(values.dfa, _json)), quote])


def in_bytes(language: Language) -> Dfa:
  """The minimal automaton of the UTF-8 of its texts; symbols are bytes."""
  return _minimal(_spelled(language.dfa, _utf8))


# Regexes, as Python's own parser has them.

_UNKNOWN = {
  'ASSERT': 'lookarounds',
  'ASSERT_NOT': 'lookarounds',
  'GROUPREF': 'backreferences',
  'GROUPREF_EXISTS': 'conditions on groups',
  'ATOMIC_GROUP': 'atomic groups',
  'POSSESSIVE_REPEAT': 'possessive repetitions',
}


def regex(pattern: str, search: bool = False) -> Language:
  """The texts that a regex of Python's `re` matches as a whole.

  Args:
    pattern: the regex.
    search: whether it need only match somewhere, as `pattern` of JSON schemas;
      there `$` is the end, and classes such as `\\d` are of ASCII.

  Raises:
    ValueError: it is no regex, or has what is not followed.
  """
  check_size(len(pattern), MOST_POSITIONS, 'characters')
  reader = _Reader(search)
  try:
    tree = _parser.parse(pattern, re.ASCII if search else 0)
    language = reader.read(tree, tree.state.flags)
  except (re.error, RecursionError, OverflowError) as error:
    raise ValueError(f'it is no regex of Python: {error}') from error
  if search:
    language = concat([EVERY, language, EVERY])
  if not reader.marks:
    return language
  placed = language - union(reader.misplaced())
  return Language('erased', placed, len(placed.dfa.step))


class _Reader:
  """Makes languages of parsed regexes, in which marks stand for anchors.

  Attributes:
    marks: anchors, each with whether words are of ASCII, and their symbols.
  """

  def __init__(self, search: bool):
    self._search = search
    self._known: dict[tuple[str, int], Language] = {}
    self.marks: dict[tuple[str, bool], int] = {}

  def read(self, tree: Any, flags: int) -> Language:
    """The language of a tree, by the flags that hold there."""
    return concat(self._read(kind, value, flags) for kind, value in tree)

  def _read(self, kind: Any, value: Any, flags: Any) -> Language:
    check_time()
    match str(kind):
      case 'BRANCH':
        return union(self.read(tree, flags) for tree in value[1])
      case 'SUBPATTERN':
        _, added, removed, tree = value
        return self.read(tree, _compiler._combine_flags(flags, added, removed))
      case 'MAX_REPEAT' | 'MIN_REPEAT':
        least, most, tree = value
        bound = None if most == _constants.MAXREPEAT else int(most)
        return self.read(tree, flags).repeat(int(least), bound)
      case 'AT':
        name = str(value).removeprefix('AT_').removesuffix('_STRING')
        if value in (_constants.AT_BEGINNING, _constants.AT_END):
          if flags & re.MULTILINE:
            name = 'LINE_' + name
          elif name == 'END' and not self._search:
            name = 'LAST_LINE'
        key = name, bool(flags & re.ASCII)
        return _character(self.marks.setdefault(key, _MARK + len(self.marks)))
      case name if name in _UNKNOWN:
        raise ValueError(f'{_UNKNOWN[name]} are not followed')
    known = self._known
    if (node := (repr((kind, value)), flags)) not in known:
      known[node] = _one_of((kind, value), flags)
    return known[node]

  def misplaced(self) -> Iterator[Language]:
    """Texts with marks of which one is where its anchor does not match."""
    some = union(map(_character, self.marks.values()))
    marks, rest = some.repeat(0), (ANY | some).repeat(0)
    newline = literal('\n')
    other = ANY - newline
    for (name, is_ascii), symbol in self.marks.items():
      word = _one_of(_parser.parse(r'\w')[0], re.ASCII * is_ascii)
      gap = ANY - word
      before = [marks | rest + gap + marks, rest + word + marks]
      behind = [marks | marks + gap + rest, marks + word + rest]
      match name:
        case 'BEGINNING':
          pairs = [(rest + ANY + rest, rest)]
        case 'END':
          pairs = [(rest, rest + ANY + rest)]
        case 'LAST_LINE':
          after = rest + other + rest | rest + ANY + rest + ANY + rest
          pairs = [(rest, after)]
        case 'LINE_BEGINNING':
          pairs = [(rest + other + marks, rest)]
        case 'LINE_END':
          pairs = [(rest, marks + other + rest)]
        case 'BOUNDARY':
          pairs = [*zip(before, behind, strict=True)]
        case _:
          pairs = [*zip(before, reversed(behind), strict=True)]
          if not re.match(r'\B', ''):  # before Python 3.14
            pairs.append((marks, marks))
      for left, right in pairs:
        yield concat([left, _character(symbol), right])


@functools.cache
def _every_character() -> str:
  return ''.join(map(chr, range(_MARK)))


def _one_of(node: Any, flags: int) -> Language:
  """The characters that a node of a parsed regex matches, as `re` has it."""
  if node[0] == _constants.LITERAL and not flags & re.IGNORECASE:
    return characters([(node[1], node[1])])
  state = _parser.State()
  state.flags = flags
  state.str = ''
  one = _parser.SubPattern(state, [node])
  repeated = (_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, one))
  found = _compiler.compile(_parser.SubPattern(state, [repeated]), flags)
  spans = (match.span() for match in found.finditer(_every_character()))
  return characters((begin, end - 1) for begin, end in spans)
