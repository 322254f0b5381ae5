"""Automata over token ids, which tell the tokens that may follow a state.

Automata are made on the host: `of_choices` makes one of choices, a `Vocabulary`
one of a regex or a JSON schema. `joined` concatenates the automata of a batch
into the tables of one `Automata` on the device. The tables are padded to a few
sizes, so that another regex or schema recompiles nothing. State `FREE` allows
every token; rows without a constraint stay in it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from scipy.sparse import csgraph, csr_array

from specdec_jax.checks.fields import unexpected
from specdec_jax.rules import languages
from specdec_jax.rules.languages import Dfa, Language
from specdec_jax.types import Array

FREE = 0
# A state with at most so many edges has its tokens listed; other states have a
# bit for each token.
FEW = 32
_WORD = 32
NONE = -1  # marks a state without a row of bits, and a missing token
_LEAST_STATES, _LEAST_EDGES, _LEAST_ROWS = 1 << 12, 1 << 18, 1 << 8
_STEP = 4  # the factor from one size of a table to the next
# The most seconds of processor time that making an automaton may take.
SECONDS = 3.5
_MOST_BITS = 1 << 30  # the most bits of all different rows of allowed tokens
_CHUNK = 1 << 25


@struct.dataclass
class ByBytes:
  """An automaton of T states that reads tokens byte by byte; `FREE` is state 0.

  Attributes:
    step: int32[T, 256], the next state after each state and byte.
    spelled: uint8[S], the bytes of all tokens, concatenated.
    spans: int32[V + 1], the index in `spelled` where each token begins; it ends
      where the next one begins.
  """

  step: Array
  spelled: Array
  spans: Array

  def next_state(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the state after a token, int32[]."""
    step, spelled = jnp.asarray(self.step), jnp.asarray(self.spelled)
    return lax.fori_loop(
      self.spans[token],
      self.spans[token + 1],
      lambda place, at: step[at, spelled[place]],
      jnp.where(state < step.shape[0], state, FREE),
    )


@struct.dataclass
class ById:
  """An automaton of N states whose E edges are token ids, sorted per state.

  Attributes:
    first: int32[N + 1], the index of each state's first edge; the edges of
      state i end before first[i + 1].
    tokens: int32[E], the token of each edge.
    targets: int32[E], the state that each edge leads to.
  """

  first: Array
  tokens: Array
  targets: Array

  def edge(
    self, state: jax.Array, token: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns a state's edge for a token, int32[], and whether there is one."""
    end = self.first[state + 1]

    def halve(_, bounds):
      low, high = bounds
      middle = (low + high) // 2
      above = (self.tokens[middle] >= token) | (low >= high)
      return (
        jnp.where(above, low, middle + 1),
        jnp.where(above & (low < high), middle, high),
      )

    steps = self.tokens.shape[0].bit_length()
    place, _ = lax.fori_loop(0, steps, halve, (self.first[state], end))
    return place, (place < end) & (self.tokens[place] == token)


@struct.dataclass
class Automata:
  """The automata of a batch in one table of states.

  States 0..T - 1 are those of `by_bytes`, or only `FREE` if it is None; states
  T..T + N - 1 are those of `by_id`. A part that no row of a batch needs is
  None, so that the compiled program does not contain it.

  Attributes:
    by_bytes: the automata of regexes and schemas.
    by_id: the automata of choices.
    bits_of: int32[T + N], the row of `bits` of each state; -1 for a state with
      at most `FEW` edges, which are read from `by_id`.
    bits: uint32[R, ceil(V / 32)], a bit for each token, set if it is allowed.
    only: int32[R], the only token that each row of `bits` allows; -1 if it does
      not allow exactly one.
  """

  by_bytes: ByBytes | None
  by_id: ById | None
  bits_of: Array
  bits: Array
  only: Array

  @property
  def _first_by_id(self) -> int:
    """T, the first state of `by_id`."""
    return 1 if self.by_bytes is None else self.by_bytes.step.shape[0]

  def next_state(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the state after a token, int32[].

    A token that is not allowed has probability 0, so that no token after it is
    kept, and the state after it does not matter.
    """
    after = jnp.full_like(state, FREE)
    if self.by_bytes is not None:
      after = self.by_bytes.next_state(state, token)
    if self.by_id is None:
      return after
    at = jnp.maximum(state - self._first_by_id, 0)
    place, is_edge = self.by_id.edge(at, token)
    target = jnp.where(
      is_edge, self._first_by_id + self.by_id.targets[place], FREE
    )
    return jnp.where(state < self._first_by_id, after, target)

  def allowed(self, state: jax.Array, vocab_size: int) -> jax.Array:
    """Returns bool[V], the tokens that may follow a state int32[]."""
    row = self.bits_of[state]
    words = self.bits[jnp.maximum(row, 0)]
    flags = (words[:, None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    by_bits = flags.reshape(-1)[:vocab_size] > 0
    if self.by_id is None:
      return by_bits
    at = jnp.maximum(state - self._first_by_id, 0)
    place = self.by_id.first[at] + jnp.arange(FEW)
    is_edge = place < self.by_id.first[at + 1]
    tokens = jnp.where(is_edge, self.by_id.tokens[place], vocab_size)
    few = jnp.zeros((vocab_size,), bool).at[tokens].set(True, mode='drop')
    return jnp.where(row == NONE, few, by_bits)

  def only_token(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether only one token may follow, and that token, int32[]."""
    row = self.bits_of[state]
    only = self.only[jnp.maximum(row, 0)]
    if self.by_id is not None:
      at = jnp.maximum(state - self._first_by_id, 0)
      begin = self.by_id.first[at]
      is_one = self.by_id.first[at + 1] == begin + 1
      few = jnp.where(is_one, self.by_id.tokens[begin], NONE)
      only = jnp.where(row == NONE, few, only)
    return only >= 0, only


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """The automaton of one constraint, on the host.

  Attributes:
    tables: a `ByBytes`, whose state 0 is `FREE`, or a `ById`.
    bits_of: int32[T] or int32[N], the row of `bits` of each state; -1 for a
      state with at most `FEW` edges, which are read from `tables`.
    bits: uint32[R, ceil(V / 32)], a bit for each token, set if it is allowed.
    only: int32[R], the only token that each row of `bits` allows; -1 if it does
      not allow exactly one.
    start: the state in which an output begins.
  """

  tables: Any
  bits_of: np.ndarray
  bits: np.ndarray
  only: np.ndarray
  start: int

  def first_tokens(self, vocab_size: int) -> np.ndarray:
    """Returns the ids that may come first; the tables must be a `ByBytes`."""
    row = self.bits[self.bits_of[self.start]].view(np.uint8)
    flags = np.unpackbits(row, bitorder='little')[:vocab_size]
    return np.flatnonzero(flags)


def packed(flags: np.ndarray) -> np.ndarray:
  """Packs flags bool[R, V] into the bits of `Automata.bits`."""
  missing = -flags.shape[1] % _WORD
  flags = np.pad(flags, ((0, 0), (0, missing)))
  return np.packbits(flags, axis=1, bitorder='little').view('<u4')


@functools.lru_cache(maxsize=8)  # batches often repeat the same constraints
def joined(
  parts: tuple[Automaton, ...], vocab_size: int
) -> tuple[Automata, list[int]]:
  """Concatenates automata into one table; also returns their start states."""
  texts = [part for part in parts if isinstance(part.tables, ByBytes)]
  choices = [part for part in parts if isinstance(part.tables, ById)]
  starts: dict[Automaton, int] = {}
  by_bytes = by_id = None
  size, bits_of = 1, [np.zeros((1,), np.int32)]
  bits, only = [packed(np.ones((1, vocab_size), bool))], [np.array([NONE])]

  def add(part: Automaton, first: int, begin: int) -> None:
    """Appends an automaton's states from `first` on, as `begin` and so on."""
    rows = part.bits_of[first:]
    bits_of.append(np.where(rows < 0, NONE, rows + sum(map(len, bits))))
    bits.append(part.bits)
    only.append(part.only)
    starts[part] = begin + part.start - first

  if texts:
    steps = [np.zeros((1, 256), np.int32)]
    for part in texts:
      add(part, 1, size)
      step = part.tables.step[1:]
      steps.append(np.where(step > 0, step + size - 1, FREE))
      size += len(step)
    step = _padded(np.concatenate(steps), _LEAST_STATES, FREE)
    bits_of.append(np.zeros((len(step) - size,), np.int32))
    size, tables = len(step), texts[0].tables
    by_bytes = ByBytes(step, tables.spelled, tables.spans)
  if choices:
    firsts, tokens, targets, state, edge = [], [], [], 0, 0
    for part in choices:
      add(part, 0, size + state)
      table = part.tables
      firsts.append(table.first[:-1] + edge)
      tokens.append(table.tokens)
      targets.append(table.targets + state)
      state, edge = state + len(firsts[-1]), edge + len(tokens[-1])
    firsts.append(np.array([edge], np.int32))
    by_id = ById(
      _padded(np.concatenate(firsts), _LEAST_STATES + 1, edge),
      _padded(np.concatenate(tokens), _LEAST_EDGES, vocab_size),
      _padded(np.concatenate(targets), _LEAST_EDGES, 0),
    )
    missing = len(by_id.first) - 1 - state
    bits_of.append(np.full((missing,), NONE, np.int32))
  automata = Automata(
    by_bytes,
    by_id,
    np.concatenate(bits_of).astype(np.int32),
    _padded(np.concatenate(bits), _LEAST_ROWS, 0),
    _padded(np.concatenate(only).astype(np.int32), _LEAST_ROWS, NONE),
  )
  return automata, [starts[part] for part in parts]


def _padded(table: np.ndarray, least: int, fill: int) -> np.ndarray:
  """Pads a table with `fill` to the next of the sizes least * 4 ** n."""
  while least < len(table):
    least *= _STEP
  missing = [(0, least - len(table))] + [(0, 0)] * (table.ndim - 1)
  return np.pad(table, missing, constant_values=fill).astype(table.dtype)


# These functions make automata of choices and languages.


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
  many = np.flatnonzero(np.diff(first) > FEW)
  flags = np.zeros((len(many), vocab_size), bool)
  for row, state in zip(flags, many, strict=True):
    row[tokens[first[state] : first[state + 1]]] = True
  bits_of = np.full((end + 1,), NONE, np.int32)
  bits_of[many] = np.arange(len(many))
  return Automaton(
    ById(first.astype(np.int32), tokens, targets),
    bits_of,
    packed(flags),
    np.full((len(many),), NONE, np.int32),
    0,
  )


# One level of a byte trie, whose N nodes are prefixes of the same length: the
# parent of each node on the level before, int[N]; the class of the last byte,
# int[N]; the tokens that end on this level; and the node in which each ends.
_Level = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _walked(
  dfa: Dfa, tree: list[_Level], states: np.ndarray
) -> Iterator[tuple[np.ndarray, ...]]:
  """Walks all words of a trie from several states at once, byte by byte.

  Walks that cannot reach an accepting state are dropped. The W walks of a level
  are sorted by the trie's nodes.

  Yields:
    Five arrays for each level: the words that end there; the node of each
    word; the index of each node's first walk, int[N + 1]; the index in `states`
    of the state in which each walk began, int[W]; and the state that each walk
    has reached, int[W].
  """
  bounds, origins = np.array([0, len(states)]), np.arange(len(states))
  for before, kinds, words, nodes in tree:
    languages.check_time()
    place, node = _spans(bounds, before)
    states, origins = dfa.step[states[place], kinds[node]], origins[place]
    keep = np.flatnonzero(states)
    counts = np.bincount(node[keep], minlength=len(before))
    bounds = np.append(0, np.cumsum(counts))
    states, origins = states[keep], origins[keep]
    yield words, nodes, bounds, origins, states


def _spans(
  bounds: np.ndarray, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Lists the walks that have reached the given nodes.

  Args:
    bounds: int[N + 1], the index of each node's first walk.
    nodes: int[K], some of the N nodes.

  Returns:
    The indices of the walks, and the index in `nodes` of each walk's node.
  """
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
    """Takes a map from the bytes of tokens to their ids, and V."""
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

    def is_element(word: bytes) -> bool:
      """Returns whether a word is needed to find out what words can spell.

      It is not needed if it has several characters, each of which is a word.
      """
      text = word.decode('utf-8', 'surrogateescape')
      parts = {char.encode('utf-8', 'surrogateescape') for char in text}
      return word in parts or not parts <= self._words

    self._elements = np.flatnonzero([*map(is_element, words)])

  def automaton(
    self, name: str, language: Language, stop_ids: Sequence[int]
  ) -> Automaton:
    """Makes the automaton of the outputs whose text belongs to a language.

    Args:
      name: the option that the language comes from, for messages.
      language: the texts, spelled in UTF-8.
      stop_ids: ids that end an output.

    Raises:
      ValueError: no sequence of tokens spells any of the texts.
      TooLarge: the automaton has too many states, or takes too long to make.
    """
    if self.begins_blank:
      language = languages.literal(' ') + language
    dfa = language.dfa
    kinds = dfa.classes[np.searchsorted(dfa.cuts, range(256), 'right') - 1]
    is_alive = self._alive(dfa, kinds)
    if not is_alive[dfa.start]:
      text = bytes(language.shortest() or b'').decode()[self.begins_blank :]
      raise self.unwritable(name, text)
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
      for tokens, nodes, bounds, origins, reached in _walked(dfa, tree, part):
        place, which = _spans(bounds, nodes)
        flags[origins[place], tokens[which]] = is_alive[reached[place]]
      flags[:, stop_ids] = dfa.accepting[part, None]
      rows.append(packed(flags))
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
      words: the ids of the tokens whose bytes are the words.
    """
    levels, nodes = [], np.zeros_like(words)
    for depth, column in enumerate(self._bytes.T):
      keys = nodes * 256 + kinds[column[words]]
      keys, nodes = np.unique(keys, return_inverse=True)
      is_end = self._lengths[words] == depth + 1
      levels.append((*np.divmod(keys, 256), words[is_end], nodes[is_end]))
      words, nodes = words[~is_end], nodes[~is_end]
    return levels

  def _alive(self, dfa: Dfa, kinds: np.ndarray) -> np.ndarray:
    """Returns bool[N]: whether tokens lead from a state to an accepting one."""
    size = len(dfa.step)
    if len([word for word in self._words if len(word) == 1]) == 256:
      return np.arange(size) > 0
    accepting = np.flatnonzero(dfa.accepting)
    # Edges go backwards: from an additional state to the accepting ones, and
    # from each state to those before it.
    edges = [(np.full_like(accepting, size), accepting)]
    tree = self._tree(kinds, self._elements)
    for _, nodes, bounds, origins, reached in _walked(
      dfa, tree, np.arange(size)
    ):
      place, _ = _spans(bounds, np.unique(nodes))
      edges.append((reached[place], origins[place]))
    before, behind = np.concatenate(edges, axis=1)
    weights = np.ones(before.shape, np.float32)
    graph = csr_array((weights, (before, behind)), shape=(size + 1, size + 1))
    order = csgraph.breadth_first_order(graph, size, return_predecessors=False)
    return np.isin(np.arange(size), order)

  def unwritable(self, name: str, text: str) -> ValueError:
    """Returns the error of an option with a text that no tokens can spell."""
    expected = 'what tokens of this vocabulary can write'
    missing = [
      char
      for char in dict.fromkeys(text)
      if not char.isspace()
      and char.encode() not in self._words
      and not {bytes([byte]) for byte in char.encode()} <= self._words
    ]
    if missing:
      expected = f'a vocabulary with a token for {" ".join(missing)}'
    return unexpected(name, expected, text, 'Its text cannot be written.')
