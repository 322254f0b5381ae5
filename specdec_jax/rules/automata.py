"""Automata over token ids: which tokens may follow, and the state after each.

The automata of the constraints are made on the host, see `constraints`.
`joined` puts those of a batch into the tables of one `Automata` on the device,
padded to few sizes, so that another regex or schema recompiles nothing. State
`FREE` allows every token: it is that of rows without a constraint.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax.types import Array

FREE = 0
_FEW = 32  # edges of a state that has no row of bits
_WORD = 32
_NONE = -1
_LEAST_STATES, _LEAST_EDGES, _LEAST_ROWS = 1 << 12, 1 << 18, 1 << 8
_STEP = 4  # between two sizes of a table


@struct.dataclass
class Automata:
  """T states that read a token byte by byte, and behind them N by its id.

  State `FREE` is the first of the T. A part that no row of a batch needs is
  None, and no part of the program.

  Attributes:
    step: int32[T, 256], the state behind each state and byte.
    spelled: uint8[S], the bytes of all tokens behind each other.
    spans: int32[V + 1], where those of each token begin.
    first: int32[N + 1], the first edge of each of the N states; behind it the
      next one's.
    tokens: int32[E], the token of each edge; those of a state are sorted.
    targets: int32[E], which of the N is the state after it.
    bits_of: int32[T + N], the row of `bits` of each state; -1 where it has few
      edges.
    bits: uint32[R, ceil(V / 32)], the tokens that a state allows.
    only: int32[R], the token of a row that allows one alone; else -1.
  """

  step: Array | None
  spelled: Array | None
  spans: Array | None
  first: Array | None
  tokens: Array | None
  targets: Array | None
  bits_of: Array
  bits: Array
  only: Array

  @property
  def _num_spelled(self) -> int:
    return 1 if self.step is None else self.step.shape[0]

  def next_state(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """The state after a token, int32[].

    One that is not allowed has no probability: nothing behind it is kept, so
    the state after it does not matter.
    """
    after = jnp.full_like(state, FREE)
    if self.step is not None:
      step, spelled, spans = self.step, self.spelled, self.spans
      after = lax.fori_loop(
        spans[token],
        spans[token + 1],
        lambda place, at: step[at, spelled[place]],
        jnp.where(state < step.shape[0], state, FREE),
      )
    if self.first is None:
      return after
    place, is_edge = self._edge(state, token)
    target = self._num_spelled + self.targets[place]
    by_id = jnp.where(is_edge, target, FREE)
    return jnp.where(state < self._num_spelled, after, by_id)

  def _edge(
    self, state: jax.Array, token: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The edge of a state with a token, int32[]; and whether there is one."""
    tokens, row = self.tokens, self._row(state)
    end = self.first[row + 1]

    def halve(_, bounds):
      low, high = bounds
      middle = (low + high) // 2
      above = (tokens[middle] >= token) | (low >= high)
      return (
        jnp.where(above, low, middle + 1),
        jnp.where(above & (low < high), middle, high),
      )

    steps = tokens.shape[0].bit_length()
    place, _ = lax.fori_loop(0, steps, halve, (self.first[row], end))
    return place, (place < end) & (tokens[place] == token)

  def _row(self, state: jax.Array) -> jax.Array:
    """The row of `first` of a state; of one of the T any."""
    return jnp.maximum(state - self._num_spelled, 0)

  def allowed(self, state: jax.Array, vocab_size: int) -> jax.Array:
    """bool[V], the tokens that may follow a state int32[]."""
    row = self.bits_of[state]
    words = self.bits[jnp.maximum(row, 0)]
    flags = (words[:, None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    by_bits = flags.reshape(-1)[:vocab_size] > 0
    if self.first is None:
      return by_bits
    at = self._row(state)
    place = self.first[at] + jnp.arange(_FEW)
    is_edge = place < self.first[at + 1]
    tokens = jnp.where(is_edge, self.tokens[place], vocab_size)
    few = jnp.zeros((vocab_size,), bool).at[tokens].set(True, mode='drop')
    return jnp.where(row == _NONE, few, by_bits)

  def only_token(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[], whether one token alone may follow; and that token, int32[]."""
    row = self.bits_of[state]
    only = self.only[jnp.maximum(row, 0)]
    if self.first is not None:
      at = self._row(state)
      begin = self.first[at]
      is_one = self.first[at + 1] == begin + 1
      few = jnp.where(is_one, self.tokens[begin], _NONE)
      only = jnp.where(row == _NONE, few, only)
    return only >= 0, only


@dataclasses.dataclass(frozen=True, eq=False)
class Trie:
  """An automaton by ids on the host, as in `Automata`; it begins in state 0."""

  first: np.ndarray
  tokens: np.ndarray
  targets: np.ndarray

  @property
  def num_states(self) -> int:
    """States that it has."""
    return self.first.size - 1

  def first_tokens(self, vocab_size: int) -> np.ndarray:
    """The ids that an output may begin with."""
    del vocab_size
    return self.tokens[: self.first[1]]


@dataclasses.dataclass(frozen=True, eq=False)
class Spelled:
  """An automaton by bytes on the host, as in `Automata`; state 0 is `FREE`.

  Attributes:
    spelled: as in `Automata`, of the vocabulary.
    spans: as in `Automata`, of the vocabulary.
    step: int32[T, 256].
    bits_of: int32[T].
    bits: uint32[R, ceil(V / 32)].
    only: int32[R].
    start: the state in which it begins.
  """

  spelled: np.ndarray
  spans: np.ndarray
  step: np.ndarray
  bits_of: np.ndarray
  bits: np.ndarray
  only: np.ndarray
  start: int

  def first_tokens(self, vocab_size: int) -> np.ndarray:
    """The ids that an output may begin with."""
    row = self.bits[self.bits_of[self.start]].view(np.uint8)
    flags = np.unpackbits(row, bitorder='little')[:vocab_size]
    return np.flatnonzero(flags)


Automaton = Trie | Spelled


@functools.lru_cache(maxsize=8)  # rows of one constraint come again and again
def joined(
  parts: tuple[Automaton, ...], vocab_size: int
) -> tuple[Automata, list[int]]:
  """The tables of some automata, and the state in which each begins."""
  tries = [part for part in parts if isinstance(part, Trie)]
  texts = [part for part in parts if isinstance(part, Spelled)]
  starts: dict[Automaton, int] = {}
  every = np.full((1, -(-vocab_size // _WORD)), 0xFFFFFFFF, np.uint32)
  bits, only = [every], [np.array([_NONE], np.int32)]
  steps, rows_of = [np.zeros((1, 256), np.int32)], [np.zeros((1,), np.int32)]
  size, num_rows = 1, 1
  for part in texts:
    # Its state 0 is the `FREE` of all.
    steps.append(part.step[1:] + (size - 1) * (part.step[1:] > 0))
    rows_of.append(part.bits_of[1:] + num_rows)
    bits.append(part.bits)
    only.append(part.only)
    starts[part] = part.start + size - 1
    size, num_rows = size + len(part.step) - 1, num_rows + len(part.bits)
  spelled = [None] * 3
  if texts:
    missing = _size(size, _LEAST_STATES) - size
    steps.append(np.zeros((missing, 256), np.int32))
    rows_of.append(np.zeros((missing,), np.int32))
    step = np.concatenate(steps).astype(np.int32)
    spelled, size = [step, texts[0].spelled, texts[0].spans], len(step)
  edges, more = [None] * 3, {}
  if tries:
    *edges, few, more = _joined_tries(tries, vocab_size, num_rows)
    rows_of.append(few)
    begins = np.cumsum([size, *(part.num_states for part in tries)]).tolist()
    starts |= zip(tries, begins, strict=False)
  words = np.frombuffer(b''.join(more), '<u4').reshape(-1, every.shape[1])
  missing = _size(num_rows + len(more), _LEAST_ROWS) - num_rows - len(more)
  words = np.pad(np.concatenate([*bits, words]), ((0, missing), (0, 0)))
  only.append(np.full((len(more) + missing,), _NONE, np.int32))
  states = np.concatenate(rows_of).astype(np.int32)
  tables = Automata(*spelled, *edges, states, words, np.concatenate(only))
  return tables, [starts[part] for part in parts]


def _joined_tries(
  parts: list[Trie], vocab_size: int, row: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[bytes, int]]:
  """`first`, `tokens`, `targets` and `bits_of` of tries, and rows of bits.

  Args:
    parts: the tries.
    vocab_size: V.
    row: the first row of bits that is theirs.
  """
  starts = np.cumsum([0, *(part.num_states for part in parts)]).tolist()
  ends = np.cumsum([0, *(part.tokens.size for part in parts)]).tolist()
  num_states, num_edges = starts.pop(), ends[-1]
  first = np.full(_size(num_states, _LEAST_STATES) + 1, num_edges, np.int32)
  tokens = np.full(_size(num_edges, _LEAST_EDGES), vocab_size, np.int32)
  targets = np.zeros_like(tokens)
  bits_of = np.full(first.size - 1, _NONE, np.int32)
  every = np.zeros((vocab_size + -vocab_size % _WORD,), np.uint8)
  rows: dict[bytes, int] = {}
  for part, start, begin in zip(parts, starts, ends[:-1], strict=True):
    size = part.tokens.size
    first[start : start + part.num_states] = part.first[:-1] + begin
    tokens[begin : begin + size] = part.tokens
    targets[begin : begin + size] = part.targets + start
    for state in np.flatnonzero(np.diff(part.first) > _FEW).tolist():
      flags = np.zeros_like(every)
      flags[part.tokens[part.first[state] : part.first[state + 1]]] = 1
      packed = np.packbits(flags, bitorder='little').tobytes()
      bits_of[start + state] = rows.setdefault(packed, row + len(rows))
  return first, tokens, targets, bits_of, rows


def _size(needed: int, least: int) -> int:
  """The least of the sizes of a table that is enough."""
  while least < needed:
    least *= _STEP
  return least
