"""Makes the automata over tokens of choices, regexes and JSON schemas."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csgraph, csr_array

from specdec_jax.checks.fields import unexpected
from specdec_jax.rules import automata, languages
from specdec_jax.rules.automata import Automaton, ByBytes, ById
from specdec_jax.rules.languages import Dfa, Language

# An automaton must be made in so much processor time.
SECONDS = 3.5
_MOST_BITS = 1 << 30  # the limit of (different rows of allowed tokens) * V
_CHUNK = 1 << 25


def of_choices(
  choices: Sequence[Sequence[int]], stop_ids: Sequence[int], vocab_size: int
) -> Automaton:
  """Makes a trie of outputs, each of which ends with a stop id.

  Args:
    choices: ids of each output, without a stop id.
    stop_ids: ids that end an output.
    vocab_size: V.

  Raises:
    ValueError: a choice is empty, occurs twice, or has a stop id inside.
  """
  nodes: dict[tuple[int, int], int] = {}  # (node, token) -> the next node
  leaves: dict[int, None] = {}
  for ids in choices:
    node = 0
    for token in ids:
      node = nodes.setdefault((node, token), len(nodes) + 1)
    if not len(ids) or not {*stop_ids}.isdisjoint(ids):
      raise unexpected('choices', 'ids before what ends an output', ids)
    if node in leaves:
      expected = 'each of them once (they are compared as ids)'
      raise unexpected('choices', expected, ids)
    leaves[node] = None
  end = len(nodes) + 1
  nodes |= {(leaf, stop): end for leaf in leaves for stop in stop_ids}
  edges = np.array([*nodes], np.int32)
  order = np.lexsort(edges.T[::-1])
  states, tokens = edges[order].T
  first = np.cumsum([0, *np.bincount(states, minlength=end + 1)])
  targets = np.fromiter(nodes.values(), np.int32, len(nodes))[order]
  many = np.flatnonzero(np.diff(first) > automata.FEW)
  flags = np.zeros((len(many), vocab_size), bool)
  for row, state in zip(flags, many, strict=True):
    row[tokens[first[state] : first[state + 1]]] = True
  bits_of = np.full((end + 1,), automata.NONE, np.int32)
  bits_of[many] = np.arange(len(many))
  return Automaton(
    ById(first.astype(np.int32), tokens, targets),
    bits_of,
    automata.packed(flags),
    np.full((len(many),), automata.NONE, np.int32),
    0,
  )


class _Level(NamedTuple):
  """One level of a byte trie: its N nodes are prefixes of the same length.

  Attributes:
    before: int[N], the parent of each node, on the level before.
    kinds: int[N], the class of the last byte.
    words: the tokens that end on this level.
    nodes: the node in which each of these tokens ends.
  """

  before: np.ndarray
  kinds: np.ndarray
  words: np.ndarray
  nodes: np.ndarray


class _Walks(NamedTuple):
  """W walks through an automaton along a trie, sorted by the trie's nodes.

  Attributes:
    bounds: int[N + 1], the first walk of each node.
    origins: int[W], the index of the state in which each walk began.
    states: int[W], the state that each walk has reached.
  """

  bounds: np.ndarray
  origins: np.ndarray
  states: np.ndarray


def _walked(
  dfa: Dfa, tree: list[_Level], states: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, _Walks]]:
  """Walks all words of a trie from several states at once, byte by byte.

  Walks that cannot reach an accepting state are dropped.

  Yields:
    For each level the words that end there, the node of each, and the walks.
  """
  walks = _Walks(np.array([0, len(states)]), np.arange(len(states)), states)
  for level in tree:
    languages.check_time()
    place, node = _spans(walks.bounds, level.before)
    reached = dfa.step[walks.states[place], level.kinds[node]]
    keep = np.flatnonzero(reached)
    counts = np.bincount(node[keep], minlength=len(level.before))
    walks = _Walks(
      np.append(0, np.cumsum(counts)),
      walks.origins[place[keep]],
      reached[keep],
    )
    yield level.words, level.nodes, walks


def _spans(
  bounds: np.ndarray, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the walks of the given nodes, and the index of each walk's node."""
  counts = bounds[nodes + 1] - bounds[nodes]
  which = np.repeat(np.arange(len(nodes)), counts)
  skipped = bounds[nodes] - np.append(0, np.cumsum(counts)[:-1])
  return np.arange(len(which)) + skipped[which], which


class Vocabulary:
  """The tokens that stand for text, with their bytes.

  Attributes:
    begins_blank: whether outputs begin with a blank that is not in their text.
  """

  def __init__(
    self,
    spellings: Mapping[bytes, Sequence[int]],
    begins_blank: bool,
    vocab_size: int,
  ):
    """Takes a map from bytes to the ids that they spell, and V."""
    self.begins_blank, self._size = begins_blank, vocab_size
    words: list[bytes] = [b''] * vocab_size
    for word, ids in spellings.items():
      for token in ids:
        words[token] = word
    self._lengths = np.fromiter(map(len, words), np.int32, vocab_size)
    self._spans = np.cumsum([0, *self._lengths]).astype(np.int32)
    self._spelled = np.frombuffer(b''.join(words), np.uint8)
    self._bytes = np.zeros((vocab_size, int(self._lengths.max())), np.uint8)
    inside = np.arange(self._bytes.shape[1]) < self._lengths[:, None]
    self._bytes[inside] = self._spelled
    self._words = {*words} - {b''}
    # Words that other words are composed of: characters, or single bytes.
    self._elements = np.array(
      [
        index
        for index, word in enumerate(words)
        for parts in [_characters(word)]
        if word in parts or not parts <= self._words
      ]
    )

  def automaton(
    self, name: str, language: Language, stop_ids: Sequence[int]
  ) -> Automaton:
    """Makes the automaton of the outputs whose text belongs to a language.

    Args:
      name: the option that the language comes from, for messages.
      language: the UTF-8 of the texts.
      stop_ids: ids that end an output.

    Raises:
      ValueError: no sequence of tokens spells one of the texts.
      TooLarge: it has too many states, or takes too long.
    """
    if self.begins_blank:
      language = languages.literal(' ') + language
    dfa = language.dfa
    kinds = dfa.classes[np.searchsorted(dfa.cuts, range(256), 'right') - 1]
    is_alive = self._alive(dfa, kinds)
    if not is_alive[dfa.start]:
      text = bytes(language.shortest() or b'').decode()[self.begins_blank :]
      raise unwritable(name, text, self.missing(text))
    # The states of a block allow the same tokens.
    block = languages.blocks(
      dfa.step.T, is_alive.astype(np.int64), self._bytes.shape[1]
    )
    _, states, bits_of = np.unique(2 * block + dfa.accepting, True, True)
    languages.check_size(len(states) * self._size, _MOST_BITS, 'bits')
    tree = self._tree(kinds, np.flatnonzero(self._lengths))
    rows, only = [], []
    for part in np.array_split(states, 1 + len(states) * self._size // _CHUNK):
      flags = np.zeros((len(part), self._size), bool)
      for tokens, nodes, walks in _walked(dfa, tree, part):
        place, which = _spans(walks.bounds, nodes)
        is_kept = is_alive[walks.states[place]]
        flags[walks.origins[place], tokens[which]] = is_kept
      flags[:, stop_ids] = dfa.accepting[part, None]
      rows.append(automata.packed(flags))
      is_one = np.bitwise_count(rows[-1]).sum(axis=1) == 1
      only.append(np.where(is_one, flags.argmax(axis=1), -1))
    return Automaton(
      ByBytes(dfa.step[:, kinds], self._spelled, self._spans),
      bits_of,
      np.concatenate(rows),
      np.concatenate(only).astype(np.int32),
      dfa.start,
    )

  def _tree(self, kinds: np.ndarray, words: np.ndarray) -> list[_Level]:
    """Makes the trie of words, over classes of bytes in place of bytes.

    Args:
      kinds: int[256], the class of each byte.
      words: the indices of the words.
    """
    levels, nodes = [], np.zeros_like(words)
    for depth, column in enumerate(self._bytes.T):
      keys = nodes * 256 + kinds[column[words]]
      keys, nodes = np.unique(keys, return_inverse=True)
      is_end = self._lengths[words] == depth + 1
      levels.append(_Level(*np.divmod(keys, 256), words[is_end], nodes[is_end]))
      words, nodes = words[~is_end], nodes[~is_end]
    return levels

  def _alive(self, dfa: Dfa, kinds: np.ndarray) -> np.ndarray:
    """bool[N], the states from which some tokens lead to an accepting one."""
    size = len(dfa.step)
    if len([word for word in self._words if len(word) == 1]) == 256:
      return np.arange(size) > 0
    accepting = np.flatnonzero(dfa.accepting)
    # Edges go backwards: from an end state to the accepting ones, and from each
    # state to those before it.
    edges = [(np.full_like(accepting, size), accepting)]
    tree = self._tree(kinds, self._elements)
    for _, nodes, walks in _walked(dfa, tree, np.arange(size)):
      place, _ = _spans(walks.bounds, np.unique(nodes))
      edges.append((walks.states[place], walks.origins[place]))
    before, behind = np.concatenate(edges, axis=1)
    weights = np.ones(before.shape, np.float32)
    graph = csr_array((weights, (before, behind)), shape=(size + 1, size + 1))
    order = csgraph.breadth_first_order(graph, size, return_predecessors=False)
    return np.isin(np.arange(size), order)

  def missing(self, text: str) -> list[str]:
    """Returns the characters of a text that no tokens spell."""
    return [
      char
      for char in dict.fromkeys(text)
      if not char.isspace()
      and char.encode() not in self._words
      and not {bytes([byte]) for byte in char.encode()} <= self._words
    ]


def unwritable(name: str, text: str, missing: Sequence[str]) -> ValueError:
  """Returns the error of an option whose text has characters without tokens."""
  expected = 'what tokens of this vocabulary can write'
  if missing:
    expected = f'a vocabulary with a token for {" ".join(missing)}'
  return unexpected(name, expected, text, 'Its text cannot be written.')


def _characters(word: bytes) -> set[bytes]:
  """The characters of a word, and the bytes that are parts of others."""
  text = word.decode('utf-8', 'surrogateescape')
  return {char.encode('utf-8', 'surrogateescape') for char in text}
