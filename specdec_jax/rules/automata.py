"""Automata over token ids: which tokens may follow, and the state after each.

The automata of the constraints are made on the host, see `constraints`.
`joined` puts those of a batch into the tables of one `Automata` on the device,
padded to few sizes, so that another regex or schema recompiles nothing. State
`FREE` allows every token: it is that of rows without a constraint.
"""

import dataclasses
import functools
from typing import Any

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
class ByBytes:
  """T states that read the bytes of a token, `FREE` the first of them.

  Attributes:
    step: int32[T, 256], the state behind each state and byte.
    spelled: uint8[S], the bytes of all tokens behind each other.
    spans: int32[V + 1], where those of each token begin.
  """

  step: Array
  spelled: Array
  spans: Array

  def next_state(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """The state after a token, int32[]."""
    step, spelled = jnp.asarray(self.step), jnp.asarray(self.spelled)
    return lax.fori_loop(
      self.spans[token],
      self.spans[token + 1],
      lambda place, at: step[at, spelled[place]],
      jnp.where(state < step.shape[0], state, FREE),
    )


@struct.dataclass
class ById:
  """N states and E edges; the edges of a state are sorted by their tokens.

  Attributes:
    first: int32[N + 1], the first edge of each state; behind it the next one's.
    tokens: int32[E], the token of each edge.
    targets: int32[E], the state after it.
  """

  first: Array
  tokens: Array
  targets: Array

  def edge(
    self, state: jax.Array, token: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The edge of a state with a token, int32[]; and whether there is one."""
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
  """States of `by_bytes`, or `FREE` alone, and behind these T those of `by_id`.

  A part that no row of a batch needs is None, and no part of the program.

  Attributes:
    by_bytes: of texts.
    by_id: of choices.
    bits_of: int32[T + N], the row of `bits` of each state; -1 where it has few
      edges.
    bits: uint32[R, ceil(V / 32)], the tokens that a state allows.
    only: int32[R], the token of a row that allows one alone; else -1.
  """

  by_bytes: ByBytes | None
  by_id: ById | None
  bits_of: Array
  bits: Array
  only: Array

  @property
  def _behind(self) -> int:
    """T, the first state of `by_id`."""
    return 1 if self.by_bytes is None else self.by_bytes.step.shape[0]

  def next_state(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """The state after a token, int32[].

    One that is not allowed has no probability: nothing behind it is kept, so
    the state after it does not matter.
    """
    after = jnp.full_like(state, FREE)
    if self.by_bytes is not None:
      after = self.by_bytes.next_state(state, token)
    if self.by_id is None:
      return after
    at = jnp.maximum(state - self._behind, 0)
    place, is_edge = self.by_id.edge(at, token)
    target = jnp.where(is_edge, self._behind + self.by_id.targets[place], FREE)
    return jnp.where(state < self._behind, after, target)

  def allowed(self, state: jax.Array, vocab_size: int) -> jax.Array:
    """bool[V], the tokens that may follow a state int32[]."""
    row = self.bits_of[state]
    words = self.bits[jnp.maximum(row, 0)]
    flags = (words[:, None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    by_bits = flags.reshape(-1)[:vocab_size] > 0
    if self.by_id is None:
      return by_bits
    at = jnp.maximum(state - self._behind, 0)
    place = self.by_id.first[at] + jnp.arange(_FEW)
    is_edge = place < self.by_id.first[at + 1]
    tokens = jnp.where(is_edge, self.by_id.tokens[place], vocab_size)
    few = jnp.zeros((vocab_size,), bool).at[tokens].set(True, mode='drop')
    return jnp.where(row == _NONE, few, by_bits)

  def only_token(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[], whether one token alone may follow; and that token, int32[]."""
    row = self.bits_of[state]
    only: Any = self.only[jnp.maximum(row, 0)]
    if self.by_id is not None:
      at = jnp.maximum(state - self._behind, 0)
      begin = self.by_id.first[at]
      is_one = self.by_id.first[at + 1] == begin + 1
      few = jnp.where(is_one, self.by_id.tokens[begin], _NONE)
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
  by_bytes = by_id = None
  if texts:
    missing = _size(size, _LEAST_STATES) - size
    steps.append(np.zeros((missing, 256), np.int32))
    rows_of.append(np.zeros((missing,), np.int32))
    step = np.concatenate(steps).astype(np.int32)
    by_bytes, size = ByBytes(step, texts[0].spelled, texts[0].spans), len(step)
  more: dict[bytes, int] = {}
  if tries:
    by_id, few, more = _joined_tries(tries, vocab_size, num_rows)
    rows_of.append(few)
    begins = np.cumsum([size, *(part.num_states for part in tries)]).tolist()
    starts |= zip(tries, begins, strict=False)
  words = np.frombuffer(b''.join(more), '<u4').reshape(-1, every.shape[1])
  missing = _size(num_rows + len(more), _LEAST_ROWS) - num_rows - len(more)
  words = np.pad(np.concatenate([*bits, words]), ((0, missing), (0, 0)))
  only.append(np.full((len(more) + missing,), _NONE, np.int32))
  states = np.concatenate(rows_of).astype(np.int32)
  tables = Automata(by_bytes, by_id, states, words, np.concatenate(only))
  return tables, [starts[part] for part in parts]


def _joined_tries(
  parts: list[Trie], vocab_size: int, row: int
) -> tuple[ById, np.ndarray, dict[bytes, int]]:
  """The tables of tries, the rows of their states, and what is in these.

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
  return ById(first, tokens, targets), bits_of, rows


def _size(needed: int, least: int) -> int:
  """The least of the sizes of a table that is enough."""
  while least < needed:
    least *= _STEP
  return least
