"""Sets of texts as automata: languages of regexes, spelled in UTF-8 or JSON.

A `Language` can add itself to a nondeterministic automaton, so that its texts
lead to a given state. Its minimal deterministic automaton is made when it is
needed. Bounds on memory and time are checked while an automaton is made.
"""

import contextlib
import contextvars
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np

MOST_STATES = 1 << 16
MOST_POSITIONS = 1 << 17  # the most states of a nondeterministic automaton
_MOST_CELLS = 1 << 23  # the limit of (states) * (classes of symbols)
# A deterministic automaton's state is a set of a nondeterministic one's states.
# This is the most members of all these sets together.
_MOST_MEMBERS = 1 << 21

# The first and the last symbol of each interval.
Intervals = tuple[tuple[int, int], ...]
_CHARACTERS = 0x110000
_TOP = _CHARACTERS + 16  # symbols after all characters mark anchors of regexes
_deadline = contextvars.ContextVar('deadline', default=math.inf)


class TooLarge(ValueError):
  """An automaton has more states, or takes longer to make, than is allowed."""

  expected = 'what makes a smaller automaton'


class NotFollowed(ValueError):
  """A regex is invalid, or has parts that automata do not support."""

  expected = 'a regex of Python that an automaton can follow'


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
  """Limits the processor time that a `with` block may spend on automata.

  Once it is over, `check_time` raises TooLarge in this thread.
  """
  token = _deadline.set(time.thread_time() + seconds)
  try:
    yield
  finally:
    _deadline.reset(token)


def check_time() -> None:
  """Raises TooLarge if the time that `deadline` allows is over."""
  if time.thread_time() > _deadline.get():
    raise TooLarge('its automaton takes too long to make')


def check_size(size: int, most: int, what: str) -> None:
  """Raises TooLarge if `size`, a number of `what`, is above `most`."""
  if size > most:
    raise TooLarge(f'it has more than {most} {what}')


class Dfa(NamedTuple):
  """A complete deterministic automaton of N states.

  State 0 is dead: from there no text is accepted.

  Attributes:
    cuts: int[I], the symbol at which each interval begins, the first at 0.
    classes: int[I], the class of the symbols of each interval.
    step: int32[N, C], the next state after each state and class.
    accepting: bool[N], the states in which a text may end.
    start: the state in which a text begins.
  """

  cuts: np.ndarray
  classes: np.ndarray
  step: np.ndarray
  accepting: np.ndarray
  start: int

  def intervals(self) -> list[Intervals]:
    """Returns the intervals of the symbols of each class."""
    ends = [*(self.cuts[1:] - 1).tolist(), _TOP - 1]
    listed: list[list[tuple[int, int]]] = [[] for _ in self.step[0]]
    for low, high, kind in zip(
      self.cuts.tolist(), ends, self.classes.tolist(), strict=True
    ):
      listed[kind].append((low, high))
    return [*map(tuple, listed)]


class _Nfa:
  """A nondeterministic automaton under construction; state 0 accepts.

  Attributes:
    labels: set of symbols -> its number.
    edges: for each state, pairs of a label and the next state.
    empty: for each state, the states that it reaches without a symbol.
  """

  def __init__(self):
    self.labels: dict[Intervals, int] = {}
    self.edges: list[list[tuple[int, int]]] = []
    self.empty: list[list[int]] = []
    self._begins: dict[tuple[Language, int], int] = {}
    self.new()

  def new(self, *following: int) -> int:
    """Adds a state that reaches others without a symbol; returns its number."""
    check_size(len(self.edges), MOST_POSITIONS, 'positions')
    if not len(self.edges) % 256:
      check_time()
    self.edges.append([])
    self.empty.append([*following])
    return len(self.edges) - 1

  def label(self, intervals: Intervals) -> int:
    """Returns the number that identifies a set of symbols."""
    return self.labels.setdefault(intervals, len(self.labels))

  def begin(self, language: 'Language', end: int) -> int:
    """Returns a state from which the texts of a language lead to `end`."""
    if (language, end) not in self._begins:
      self._begins[language, end] = language.add(self, end)
    return self._begins[language, end]


class Language:
  """A set of texts; `+` concatenates, `|`, `&` and `-` are set operations."""

  def __init__(self, add: Callable[[_Nfa, int], int]):
    """Takes a function that adds the language to an automaton.

    The function takes the automaton and an end state. It returns a state from
    which the language's texts lead to the end state.
    """
    self.add = add

  def __add__(self, other: 'Language') -> 'Language':
    return concat([self, other])

  def __or__(self, other: 'Language') -> 'Language':
    return union([self, other])

  def __and__(self, other: 'Language') -> 'Language':
    return (self._others() | other._others())._others()

  def __sub__(self, other: 'Language') -> 'Language':
    return (self._others() | other)._others()

  def repeat(self, least: int, most: int | None = None) -> 'Language':
    """Returns the concatenations of `least` to `most` of its texts.

    If `most` is None, there is no upper bound.
    """

    def add(nfa: _Nfa, end: int) -> int:
      begin = end
      if most is None:
        begin = nfa.new(end)
        nfa.empty[begin].append(nfa.begin(self, begin))
      for _ in range((most or least) - least):
        begin = nfa.new(nfa.begin(self, begin), end)
      for _ in range(least):
        begin = nfa.begin(self, begin)
      return begin

    return Language(add)

  def _others(self) -> 'Language':
    """Returns the complement, all other sequences of symbols."""
    return _automaton(self.dfa._replace(accepting=~self.dfa.accepting))

  @functools.cached_property
  def dfa(self) -> Dfa:
    """The language's minimal deterministic automaton.

    Raises:
      TooLarge: the automaton has too many states, or takes too long to make.
    """
    nfa = _Nfa()
    return _minimal(_determined(nfa, nfa.begin(self, 0)))

  @property
  def is_empty(self) -> bool:
    """Whether the language has no text."""
    return self.dfa.start == 0

  def matches(self, text: str | bytes) -> bool:
    """Returns whether the language has a text, in characters or in bytes."""
    symbols = text if isinstance(text, bytes) else map(ord, text)
    state = self.dfa.start
    for symbol in symbols:
      place = np.searchsorted(self.dfa.cuts, symbol, 'right') - 1
      state = self.dfa.step[state, self.dfa.classes[place]]
    return bool(self.dfa.accepting[state])

  def shortest(self) -> list[int] | None:
    """Returns the symbols of a shortest text; None for the empty language."""
    firsts = [intervals[0][0] for intervals in self.dfa.intervals()]
    texts: dict[int, Any] = {self.dfa.start: ()}
    todo = [self.dfa.start] if self.dfa.start else []
    for state in todo:  # the loop appends to the list
      if self.dfa.accepting[state]:
        return [*texts[state]]
      for symbol, target in zip(firsts, self.dfa.step[state], strict=True):
        if target and target not in texts:
          texts[target] = (*texts[state], symbol)
          todo.append(target)
    return None


@functools.lru_cache(1 << 10)
def _symbols(intervals: Intervals) -> Language:
  def add(nfa: _Nfa, end: int) -> int:
    begin = nfa.new()
    nfa.edges[begin].append((nfa.label(intervals), end))
    return begin

  return Language(add)


def concat(parts: Iterable[Language]) -> Language:
  """Returns the texts that concatenate one text of each part."""
  listed = [*parts]

  def add(nfa: _Nfa, end: int) -> int:
    for part in reversed(listed):
      end = nfa.begin(part, end)
    return end

  return Language(add)


def union(parts: Iterable[Language]) -> Language:
  """Returns the texts that belong to any of the parts."""
  listed = [*parts]
  return Language(
    lambda nfa, end: nfa.new(*(nfa.begin(part, end) for part in listed))
  )


def graph(
  start: Any,
  following: Callable[[Any], Iterable[tuple[Language, Any]]],
  is_final: Callable[[Any], Any],
) -> Language:
  """Returns the texts along the paths from a node to a final node.

  Args:
    start: the node in which a text begins; nodes are any hashable values.
    following: returns the edges of a node, pairs of a language and the next
      node.
    is_final: returns whether a text may end in a node.
  """

  def add(nfa: _Nfa, end: int) -> int:
    states = {start: nfa.new()}
    todo = [start]
    for node in todo:  # the loop appends to the list
      if is_final(node):
        nfa.empty[states[node]].append(end)
      for part, target in following(node):
        if target not in states:
          states[target] = nfa.new()
          todo.append(target)
        nfa.empty[states[node]].append(nfa.begin(part, states[target]))
    return states[start]

  return Language(add)


def literal(text: str) -> Language:
  """Returns the language that has a single text."""
  check_size(len(text), MOST_POSITIONS, 'positions')
  return concat(_symbols(((ord(char), ord(char)),)) for char in text)


def words(texts: Sequence[str]) -> Language:
  """Returns the language that has exactly these texts."""
  check_size(sum(map(len, texts)), MOST_POSITIONS, 'positions')
  return union(map(literal, texts))


def _automaton(dfa: Dfa, parts: Sequence[Language] = ()) -> Language:
  """Returns the texts of an automaton.

  Args:
    dfa: the automaton.
    parts: languages, each of which replaces the class of symbols with its
      index; by default each class stands for its own symbols.
  """
  parts = parts or [*map(_symbols, dfa.intervals())]

  def following(state: int) -> Iterator[tuple[Language, int]]:
    for part, target in zip(parts, dfa.step[state].tolist(), strict=True):
      if target or dfa.accepting[0]:
        yield part, target

  return graph(dfa.start, following, dfa.accepting.__getitem__)


ANY = _symbols(((0, _CHARACTERS - 1),))
EVERY = ANY.repeat(0)
EMPTY = concat(())
NOTHING = union(())


# These functions make automata deterministic and minimal.


def _determined(nfa: _Nfa, start: int) -> Dfa:
  """Makes the automaton deterministic: a state is a set of old states.

  The old states are called positions here.
  """
  cuts, classes, covered = _classes([*nfa.labels])
  states, numbers = [frozenset[int]()], {frozenset[int](): 0}
  rows, members = list[list[int]](), 0

  def count(number: int) -> None:
    nonlocal members
    members += number
    check_size(members, _MOST_MEMBERS, 'positions in its states')

  @functools.cache
  def closure(position: int) -> frozenset[int]:
    """Returns the positions reached without a symbol, without dead ends."""
    reached, todo = {position}, [position]
    while todo:
      more = {*nfa.empty[todo.pop()]} - reached
      reached |= more
      todo += more
    useful = frozenset(x for x in reached if nfa.edges[x] or x == 0)
    count(len(useful))
    return useful

  @functools.cache
  def number(targets: frozenset[int]) -> int:
    subset = frozenset[int]().union(*map(closure, targets))
    count(len(targets) + len(subset))
    if subset not in numbers:
      numbers[subset] = len(states)
      states.append(subset)
    return numbers[subset]

  begin = number(frozenset([start]))
  for subset in states:  # the loop appends to the list
    if not len(rows) % 64:
      check_time()
    following: list[set[int]] = [set() for _ in range(1 + int(classes.max()))]
    for label, target in itertools.chain(*(nfa.edges[x] for x in subset)):
      for kind in covered[label]:
        following[kind].add(target)
    rows.append([number(frozenset(targets)) for targets in following])
    check_size(len(states), MOST_STATES, 'states')
    check_size(len(states) * len(following), _MOST_CELLS, 'edges')
  accepting = np.array([0 in subset for subset in states])
  return Dfa(cuts, classes, np.array(rows, np.int32), accepting, begin)


def _classes(
  labels: list[Intervals],
) -> tuple[np.ndarray, np.ndarray, list[set[int]]]:
  """Makes classes of the symbols that belong to the same labels.

  Returns:
    `cuts` and `classes` of a `Dfa`, and the classes of each label.
  """
  pairs = [pair for label in labels for pair in label]
  cuts = np.unique(
    [0, _TOP, *(x for low, high in pairs for x in (low, high + 1))]
  )
  check_size(len(labels) * len(cuts), 8 * _MOST_CELLS, 'classes')
  inside = np.zeros((len(labels), len(cuts) - 1), bool)
  for row, label in zip(inside, labels, strict=True):
    for low, high in np.searchsorted(cuts, np.reshape(label, (-1, 2)) + [0, 1]):
      row[low:high] = True
  bits = np.packbits(inside, axis=0)
  classes = np.unique(bits, axis=1, return_inverse=True)[1].reshape(-1)
  covered = [{*classes[row].tolist()} for row in inside]
  return cuts[:-1], classes, covered


def _minimal(dfa: Dfa) -> Dfa:
  """Returns the automaton with the fewest states of the same language."""
  _, first, block = np.unique(blocks(dfa.step.T, dfa.accepting), True, True)
  # Blocks are numbered in the order of their first states, so that the dead
  # state stays the first.
  order = np.argsort(first)
  rank = np.argsort(order)[block].astype(np.int32)
  step = rank[dfa.step[first[order]]]
  # Symbols that lead from each state to the same next state form one class.
  _, columns, classes = np.unique(step, True, True, axis=1)
  classes = classes.reshape(-1)[dfa.classes]
  keep = np.flatnonzero(np.diff(classes, prepend=-1))
  return Dfa(
    dfa.cuts[keep],
    classes[keep],
    step[:, columns],
    dfa.accepting[first[order]],
    int(rank[dfa.start]),
  )


def blocks(
  columns: np.ndarray, kinds: np.ndarray, most: int | None = None
) -> np.ndarray:
  """Returns a number for each state, int[N]; equivalent states share theirs.

  States are told apart by the states that they lead to. Only those that lead to
  a state whose number has changed are looked at again.

  Args:
    columns: int[C, N], the next state after each class of symbols and state.
    kinds: int[N], 0 or 1; states of different kinds are not equivalent.
    most: how many symbols may be read to tell two states apart; None: no limit.
  """
  count = kinds.size
  before = np.argsort(columns, axis=None, kind='stable') % count
  bounds = np.cumsum([0, *np.bincount(columns.reshape(-1), minlength=count)])
  rng = np.random.default_rng(0)
  hashes = rng.integers(1 << 63, size=count + 2, dtype=np.uint64)
  weights = rng.integers(1 << 63, size=(len(columns), 1), dtype=np.uint64)
  block, size, todo = kinds.astype(np.int64), 2, np.arange(count)
  for _ in range(count if most is None else most):
    if not todo.size:
      break
    check_time()
    mixed = (hashes[block[columns[:, todo]]] * weights).sum(axis=0)
    _, at, part, counts = np.unique(
      mixed + hashes[block[todo]], True, True, True
    )
    # If all states of a block are looked at, its largest part keeps the block's
    # number; otherwise the states that are not looked at keep it.
    old, largest = block[todo[at]], np.zeros((count + 2,), np.int64)
    largest[old[np.argsort(counts)]] = np.argsort(counts)
    is_whole = np.bincount(block)[old] == np.bincount(old, counts)[old]
    is_new = ~is_whole | (largest[old] != np.arange(old.size))
    numbers = np.where(is_new, size + np.cumsum(is_new) - 1, old)
    size += int(np.count_nonzero(is_new))
    block[todo] = numbers[part]
    moved = todo[is_new[part]]
    spans = [before[bounds[state] : bounds[state + 1]] for state in moved]
    todo = np.unique(np.concatenate([*spans, moved[:0]]))
  return block


# These functions spell characters by bytes: as UTF-8, or in a string of JSON.

# Rows of a table: the first and last character of a range, a base, and the
# choices for each byte of the spelling. The bytes are the digits of the number
# `character - base`, each digit an index into the choices for its byte.
_Table = tuple[tuple[int, int, int, tuple[Sequence[int], ...]], ...]
_TAIL, _HEX = range(0x80, 0xC0), b'0123456789abcdef'
_SHORT = zip(b'"\\\b\f\n\r\t', b'"\\bfnrt', strict=True)
_UTF8: _Table = (
  (0, 0x7F, 0, (range(0x80),)),
  (0x80, 0x7FF, 0, (range(0xC0, 0xE0), _TAIL)),
  (0x800, 0xD7FF, 0, (range(0xE0, 0xF0), _TAIL, _TAIL)),
  (0xE000, 0xFFFF, 0, (range(0xE0, 0xF0), _TAIL, _TAIL)),
  (0x10000, 0x10FFFF, 0, (range(0xF0, 0xF8), _TAIL, _TAIL, _TAIL)),
)
_RAW = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F))
_LONG = ((0, 7), (11, 11), (14, 31), (0x7F, 0xD7FF), (0xE000, 0xFFFF))
_UNIT = (b'\\', b'u', _HEX, _HEX, _HEX, _HEX)
_HIGH = (*_UNIT[:2], b'd', b'89ab', *_UNIT[4:])  # the first of two surrogates
_LOW = (*_UNIT[:2], b'd', b'cdef', *_UNIT[4:])
_JSON: _Table = (
  *((low, high, 0, _UTF8[0][3]) for low, high in _RAW),
  *_UTF8[1:],
  *((char, char, char, (b'\\', bytes([x]))) for char, x in _SHORT),
  *((low, high, 0, _UNIT) for low, high in _LONG),
  (0x10000, 0x10FFFF, 0x10000, _HIGH + _LOW),
)


def _digits(low: int, high: int, places: Sequence[Sequence[int]]) -> Language:
  """Returns the numbers from `low` to `high`, written with a symbol per digit.

  For each place, the highest first, `places` has the symbols of its digits.
  """
  symbols, *rest = places
  size = math.prod(map(len, rest))
  (first, low), (last, high) = divmod(low, size), divmod(high, size)
  spans = [(first, last, low, high)]
  if first < last:
    spans = [(first, first, low, size - 1), (last, last, 0, high)]
    spans += [(first + 1, last - 1, 0, size - 1)] if last - first > 1 else []
  return union(
    _symbols(tuple((x, x) for x in symbols[start : stop + 1]))
    + (_digits(least, most, rest) if rest else EMPTY)
    for start, stop, least, most in spans
  )


@functools.lru_cache(1 << 8)
def _spelling(intervals: Intervals, table: _Table) -> Language:
  """Returns how the characters in intervals are written as bytes.

  The table, such as `_UTF8` or `_JSON`, has the bytes of each range of them.
  """
  return _automaton(
    union(
      _digits(max(low, first) - base, min(high, last) - base, places)
      for low, high in intervals
      for first, last, base, places in table
      if low <= last and first <= high
    ).dfa
  )


def _spelled(language: Language, table: _Table) -> Language:
  """Returns the texts of a language, spelled character by character."""
  dfa = language.dfa
  parts = [_spelling(each, table) for each in dfa.intervals()]
  return _automaton(dfa, parts)


def in_bytes(language: Language) -> Language:
  """Returns the UTF-8 of a language's texts; the symbols are bytes."""
  return _spelled(language, _UTF8)


def json_string(values: Language) -> Language:
  """Returns the UTF-8 of strings as JSON, quotes included.

  A character is written as itself where JSON allows it, or as `json.dumps`
  escapes it.
  """
  quote = literal('"')
  return concat([quote, _spelled(values, _JSON), quote])


# These functions read regexes with Python's own parser.

# An anchor is read as a mark: a symbol whose number is above those of all
# characters. Texts with a mark where its anchor does not hold are removed; then
# the marks are removed from the remaining texts.
_MARKS = _symbols(((_CHARACTERS, _TOP - 1),)).repeat(0)
_MARKED = _symbols(((0, _TOP - 1),)).repeat(0)
# Whether `\B` matches the empty text, as in Python 3.14 and later.
_B_IN_NOTHING = re.match(r'\B', '') is not None
_BEGINNINGS = [*_parser.parse(r'\A^')]
_ENDS = [*_parser.parse(r'$\Z')]
_LOOKAHEADS = (_constants.ASSERT, _constants.ASSERT_NOT)
_UNKNOWN = {
  'ASSERT': 'lookarounds that are not at the beginning',
  'ASSERT_NOT': 'lookarounds that are not at the beginning',
  'GROUPREF': 'backreferences',
  'GROUPREF_EXISTS': 'conditions on groups',
  'ATOMIC_GROUP': 'atomic groups',
  'POSSESSIVE_REPEAT': 'possessive repetitions',
}


def regex(pattern: str, search: bool = False) -> Language:
  """Returns the texts that a regex of Python's `re` matches as a whole.

  Args:
    pattern: the regex.
    search: whether a match anywhere in the text is enough, as for `pattern` of
      JSON schemas. Then `$` matches only at the end, and `\\d` only ASCII.

  Raises:
    NotFollowed: the regex is invalid, or has parts that are not supported.
    TooLarge: its automaton is too large.
  """
  check_size(len(pattern), MOST_POSITIONS, 'characters')
  reader = _Reader(search)
  try:
    tree = _parser.parse(pattern, re.ASCII if search else 0)
    nodes, flags, place = [*tree], tree.state.flags, 0
    lookaheads, is_begin = [], not search
    while place < len(nodes):
      kind, value = nodes[place]
      if nodes[place] in _BEGINNINGS and not flags & re.MULTILINE:
        place, is_begin = place + 1, True
      elif is_begin and kind in _LOOKAHEADS and value[0] == 1:
        lookaheads.append((kind, [_BEGINNINGS[0], *value[1]]))
        del nodes[place]
      else:
        break
    language = reader.whole(nodes, flags)
    for kind, nodes in lookaheads:
      begun = reader.whole(nodes, flags, EVERY)
      is_wanted = kind == _constants.ASSERT
      language = language & begun if is_wanted else language - begun
  except (re.error, RecursionError, OverflowError) as error:
    raise NotFollowed(f'it is no regex of Python: {error}') from error
  return language


class _Reader:
  """Makes languages of parsed regexes."""

  def __init__(self, search: bool):
    self._search = search
    self._made: dict[tuple[str, int], Language] = {}
    self._marks: dict[tuple[str, Intervals], Language] = {}

  def whole(self, nodes: Any, flags: int, rest: Language = EMPTY) -> Language:
    """Returns the texts that parsed nodes match, each followed by `rest`."""
    nodes, before = [*nodes], EVERY if self._search else EMPTY
    after = EVERY if self._search else rest
    # Anchors at both ends are read without marks. So the automaton of most
    # patterns is made in a third of the time.
    if not flags & re.MULTILINE:
      while nodes and nodes[0] in _BEGINNINGS:
        before = EMPTY
        del nodes[0]
      if nodes and nodes[-1] in _ENDS and (self._search or rest is EMPTY):
        after = EMPTY
        del nodes[-1]
    language = concat([before, self._read(nodes, flags), after])
    if not self._marks:
      return language
    misplaced = (_misplaced(*key, mark) for key, mark in self._marks.items())
    dfa = (language - union(misplaced)).dfa
    return _automaton(dfa, [*map(_without_marks, dfa.intervals())])

  def _read(self, nodes: Any, flags: int) -> Language:
    return concat(self._node(kind, value, flags) for kind, value in nodes)

  def _node(self, kind: Any, value: Any, flags: Any) -> Language:
    match str(kind):
      case 'BRANCH':
        return union(self._read(tree, flags) for tree in value[1])
      case 'SUBPATTERN':
        _, added, removed, tree = value
        return self._read(tree, _compiler._combine_flags(flags, added, removed))
      case 'MAX_REPEAT' | 'MIN_REPEAT':
        least, most, tree = value
        bound = None if most == _constants.MAXREPEAT else int(most)
        return self._read(tree, flags).repeat(int(least), bound)
      case 'AT':
        return self._anchor(value, flags)
      case name if name in _UNKNOWN:
        raise NotFollowed(f'{_UNKNOWN[name]} are not followed')
    key = repr((kind, value)), flags
    if key not in self._made:
      check_time()
      self._made[key] = _symbols(_matched((kind, value), flags))
    return self._made[key]

  def _anchor(self, value: Any, flags: int) -> Language:
    name = str(value).removeprefix('AT_').removesuffix('_STRING')
    inside: Intervals = ((10, 10),)
    if value in (_constants.AT_BEGINNING, _constants.AT_END):
      if flags & re.MULTILINE:
        name = 'LINE_' + name
      elif name == 'END' and not self._search:
        name = 'LAST_LINE'
    elif 'BOUNDARY' in name:
      kind = flags & (re.ASCII | re.UNICODE)
      inside = _matched(_parser.parse(r'\w')[0], kind)
    symbol = _CHARACTERS + len(self._marks)
    return self._marks.setdefault((name, inside), _symbols(((symbol, symbol),)))


def _misplaced(name: str, inside: Intervals, mark: Language) -> Language:
  """Returns the texts in which a mark is where its anchor does not hold.

  Args:
    name: the name of the anchor.
    inside: the newline; for `\\b` and `\\B`, the characters of words.
    mark: the language whose only text is the mark.
  """
  within = _symbols(inside)
  outside = ANY - within
  before = [_MARKED + x + _MARKS + mark for x in (within, outside)]
  after = [_MARKS + x + _MARKED for x in (within, outside)]
  match name:
    case 'BEGINNING':
      return _MARKED + ANY + _MARKED + mark + _MARKED
    case 'END':
      return _MARKED + mark + _MARKED + ANY + _MARKED
    case 'LAST_LINE':
      more = within + _MARKS + ANY | outside
      return concat([_MARKED, mark, _MARKS, more, _MARKED])
    case 'LINE_BEGINNING':
      return before[1] + _MARKED
    case 'LINE_END':
      return _MARKED + mark + after[1]
  before[1] |= _MARKS + mark
  after[1] |= _MARKS
  if name == 'BOUNDARY':
    return before[0] + after[0] | before[1] + after[1]
  differ = before[0] + after[1] | before[1] + after[0]
  return differ if _B_IN_NOTHING else differ | _MARKS + mark + _MARKS


def _without_marks(intervals: Intervals) -> Language:
  """Returns the texts that one symbol of the intervals stands for.

  They are the characters in the intervals, and the empty text if the intervals
  have a mark, the symbol of an anchor.
  """
  characters = [(x, min(y, _CHARACTERS - 1)) for x, y in intervals]
  language = _symbols(tuple(pair for pair in characters if pair[0] <= pair[1]))
  return language | EMPTY if intervals[-1][1] >= _CHARACTERS else language


@functools.cache
def _every_character() -> str:
  return ''.join(map(chr, range(_CHARACTERS)))


def _matched(node: Any, flags: int) -> Intervals:
  """Asks `re` which characters a node of a parsed regex matches."""
  if node[0] == _constants.LITERAL and not flags & re.IGNORECASE:
    return ((node[1], node[1]),)
  state = _parser.State()
  state.flags = flags
  state.str = ''
  single = _parser.SubPattern(state, [node])
  repeated = (_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, single))
  compiled = _compiler.compile(_parser.SubPattern(state, [repeated]), flags)
  spans = (match.span() for match in compiled.finditer(_every_character()))
  return tuple((begin, end - 1) for begin, end in spans)
