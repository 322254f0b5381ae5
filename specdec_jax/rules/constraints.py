"""Automata over tokens: of choices, and of the texts of a language."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csgraph, csr_array

from specdec_jax.checks.fields import unexpected
from specdec_jax.rules import languages
from specdec_jax.rules.automata import Spelled, Trie
from specdec_jax.rules.languages import Language

SECONDS = 4.0  # that an automaton may take to make
_MOST_BITS = 1 << 31  # states that differ in what they allow, times ids
_CHUNK = 1 << 25


def of_choices(
  choices: Sequence[Sequence[int]], stop_ids: Sequence[int]
) -> Trie:
  """A trie of outputs, each of which ends with a stop id.

  Args:
    choices: ids of each, without what ends it.
    stop_ids: ids that end an output.

  Raises:
    ValueError: a choice is empty, or there twice, or ends before its last id.
  """
  sizes = np.fromiter(map(len, choices), np.int64, len(choices))
  table = np.full((len(choices), int(sizes.max())), -1, np.int64)
  table[np.arange(table.shape[1]) < sizes[:, None]] = np.concatenate(
    [np.asarray(ids, np.int64) for ids in choices]
  )
  order = np.lexsort(table.T[::-1])
  rows, sizes = table[order], sizes[order]
  differs = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
  for index in np.flatnonzero(~differs[:, -1])[:1]:
    expected = 'each of them once (they are compared as ids)'
    raise unexpected('choices', expected, rows[index].tolist())
  is_last = np.isin(rows, stop_ids)
  if np.any(is_last) or np.any(sizes == 0):
    row = rows[np.argmax(np.any(is_last, axis=1) | (sizes == 0))]
    expected = 'ids before what ends an output'
    raise unexpected('choices', expected, row[row >= 0].tolist())
  # A node for each prefix, level by level, behind the root.
  is_new = np.pad(differs, ((1, 0), (0, 0)), constant_values=True) & (rows >= 0)
  before = np.cumsum([0, *is_new.sum(axis=0)])
  nodes = np.cumsum(is_new, axis=0) + before[:-1]
  parents = np.pad(nodes[:, :-1], ((0, 0), (1, 0)))
  leaves = nodes[np.arange(len(rows)), sizes - 1]
  end = int(before[-1]) + 1
  edges = np.stack([parents[is_new], rows[is_new], nodes[is_new]])
  ends = [np.repeat(leaves, len(stop_ids)), np.tile(stop_ids, len(leaves))]
  edges = np.append(edges, [*ends, np.full_like(ends[0], end)], axis=1)
  edges = edges[:, np.lexsort((edges[1], edges[0]))].astype(np.int32)
  first = np.cumsum([0, *np.bincount(edges[0], minlength=end + 1)])
  return Trie(first.astype(np.int32), *edges[1:])


class Vocabulary:
  """The tokens that are text, by their bytes.

  Attributes:
    begins_blank: whether outputs begin with a blank that is no text.
  """

  def __init__(
    self,
    spellings: Mapping[bytes, Sequence[int]],
    begins_blank: bool,
    vocab_size: int,
  ):
    """Takes the bytes of tokens -> the ids of these, and V."""
    self.begins_blank, self._size = begins_blank, vocab_size
    words = [word for word, ids in spellings.items() if len(ids)]
    self._lengths = np.fromiter(map(len, words), np.int64, len(words))
    flat = np.frombuffer(b''.join(words), np.uint8)
    self._bytes = np.zeros((len(words), int(self._lengths.max())), np.uint8)
    inside = np.arange(self._bytes.shape[1]) < self._lengths[:, None]
    self._bytes[inside] = flat
    self._word_of = np.full((vocab_size,), len(words))
    for index, word in enumerate(words):
      self._word_of[spellings[word]] = index
    lengths = np.append(self._lengths, 0)[self._word_of]
    self._spans = np.cumsum([0, *lengths]).astype(np.int32)
    ids = np.flatnonzero(lengths)
    rows = self._word_of[ids]
    self._spelled = self._bytes[rows][inside[rows]]
    self._words = {*words}
    # Words that others are made of: characters, or bytes of them.
    self._elements = np.array(
      [
        index
        for index, word in enumerate(words)
        for parts in [_characters(word)]
        if len(word) == 1 or word in parts or not parts <= self._words
      ]
    )

  def automaton(
    self, name: str, language: Language, stop_ids: Sequence[int]
  ) -> Spelled:
    """The automaton of the outputs whose text is one of a language.

    Args:
      name: the option that it comes from, for messages.
      language: the texts.
      stop_ids: ids that end an output.

    Raises:
      ValueError: no sequence of tokens spells one of the texts.
      TooLarge: it has too many states, or takes too long.
    """
    begin = languages.literal(' ' if self.begins_blank else '')
    dfa = languages.in_bytes(begin + language)
    kinds = dfa.classes[np.searchsorted(dfa.cuts, range(256), 'right') - 1]
    is_alive = self._alive(dfa, kinds)
    if not is_alive[dfa.start]:
      raise self._unwritable(name, language)
    # States of one block allow the same tokens.
    block = languages.blocks(
      dfa.step.T, is_alive.astype(np.int64), self._bytes.shape[1]
    )
    _, states, bits_of = np.unique(2 * block + dfa.accepting, True, True)
    languages.check_size(len(states) * self._size, _MOST_BITS, 'bits')
    rows = []
    for part in np.array_split(states, 1 + len(states) * self._size // _CHUNK):
      flags = np.zeros((len(self._lengths) + 1, len(part)), bool)
      for words, nodes, reached in self._walk(dfa, kinds, part):
        flags[words] = is_alive[reached][nodes]
      allowed = flags[self._word_of].T
      allowed[:, stop_ids] = dfa.accepting[part, None]
      rows.append(allowed)
      languages.check_time()
    counts = [row.sum(axis=1) for row in rows]
    is_one = np.concatenate(counts) == 1
    firsts = np.concatenate([row.argmax(axis=1) for row in rows])
    packed = [np.packbits(row, axis=1, bitorder='little') for row in rows]
    bits = np.concatenate(packed)
    bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
    return Spelled(
      self._spelled,
      self._spans,
      dfa.step[:, kinds],
      bits_of,
      np.ascontiguousarray(bits).view('<u4'),
      np.where(is_one, firsts, -1).astype(np.int32),
      dfa.start,
    )

  def _walk(
    self, dfa: Any, kinds: np.ndarray, states: np.ndarray, words: Any = None
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Walks all words from some states at once, byte by byte.

    Args:
      dfa: the automaton.
      kinds: int[256], the class of each byte.
      states: int[R], where the walks begin.
      words: the indices of the words; None is all.

    Yields:
      For each length the words of it, the node of each, and the states of each
      node, int32[nodes, R]. Words that lead to no state are left out.
    """
    words = np.arange(len(self._lengths)) if words is None else words
    nodes, reached = np.zeros_like(words), states[None]
    for depth, column in enumerate(self._bytes.T):
      # Words whose bytes are of the same classes so far share a node.
      keys = nodes * dfa.step.shape[1] + kinds[column[words]]
      keys, nodes = np.unique(keys, return_inverse=True)
      before, kind = np.divmod(keys, dfa.step.shape[1])
      reached = dfa.step[reached[before], kind[:, None]]
      is_end = self._lengths[words] == depth + 1
      yield words[is_end], nodes[is_end], reached
      goes_on = ~is_end & reached.any(axis=1)[nodes]
      words, nodes = words[goes_on], nodes[goes_on]
      if not words.size:
        return

  def _alive(self, dfa: Any, kinds: np.ndarray) -> np.ndarray:
    """bool[N], the states from which some tokens lead to an accepting one."""
    size = len(dfa.step)
    if np.count_nonzero(self._lengths[self._elements] == 1) == 256:
      return np.arange(size) > 0
    accepting = np.flatnonzero(dfa.accepting)
    # From the end to accepting states, and from each state to those before it.
    edges = [(np.full_like(accepting, size), accepting)]
    walks = self._walk(dfa, kinds, np.arange(size), self._elements)
    for _, nodes, reached in walks:
      languages.check_time()
      places, sources = np.nonzero(reached[np.unique(nodes)])
      edges.append((reached[np.unique(nodes)][places, sources], sources))
    before, behind = np.concatenate(edges, axis=1)
    weights = np.ones(before.shape, np.float32)
    graph = csr_array((weights, (before, behind)), shape=(size + 1, size + 1))
    order = csgraph.breadth_first_order(graph, size, return_predecessors=False)
    return np.isin(np.arange(size), order)

  def _unwritable(self, name: str, language: Language) -> ValueError:
    """The error of a language of which no text can be written."""
    text = language.shortest()
    expected = 'what tokens of this vocabulary can write'
    if text is None:
      return unexpected(name, 'a text that matches', 'none')
    missing = sorted(char for char in {*text} if not self._writes(char))
    advice = f'It has no token for {" ".join(missing)}.' if missing else ''
    return unexpected(name, expected, text, advice)

  def _writes(self, char: str) -> bool:
    spelled = char.encode()
    parts = {bytes([byte]) for byte in spelled}
    return spelled in self._words or parts <= self._words


def _characters(word: bytes) -> set[bytes]:
  """The characters of a word, and the bytes that are parts of others."""
  text = word.decode('utf-8', 'surrogateescape')
  return {char.encode('utf-8', 'surrogateescape') for char in text}
