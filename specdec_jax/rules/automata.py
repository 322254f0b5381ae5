"""Automata over token ids: which tokens may follow, and the state after each.

An `Automaton` is made on the host, see `constraints`. `joined` puts those of a
batch into the tables of one `Automata` on the device, padded to few sizes, so
that another regex or schema recompiles nothing. State `FREE` allows every
token: it is that of rows without a constraint.
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
MOST_EDGES = 1 << 26  # 512 MB on the device
_FEW = 32  # edges of a state that has no row of bits
_WORD = 32
_NO_BITS = -1
_LEAST_STATES, _LEAST_EDGES, _LEAST_ROWS = 1 << 10, 1 << 18, 1 << 6
_STEP = 4  # between two sizes of a table


@struct.dataclass
class Automata:
  """N states and E edges; the edges of a state are sorted by their tokens.

  Attributes:
    first: int32[N + 1], the first edge of each state; behind it the next one's.
    tokens: int32[E], the token of each edge.
    targets: int32[E], the state after it.
    bits_of: int32[N], the row of `bits` of each state; -1 where it has few
      edges.
    bits: uint32[R, ceil(V / 32)], the tokens that a state allows.
  """

  first: Array
  tokens: Array
  targets: Array
  bits_of: Array
  bits: Array

  def next_state(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """The state after a token, int32[]; `FREE` after one that is not allowed.

    Such a token has no probability: nothing behind it is kept.
    """
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
    found = (place < end) & (self.tokens[place] == token)
    return jnp.where(found, self.targets[place], FREE)

  def allowed(self, state: jax.Array, vocab_size: int) -> jax.Array:
    """bool[V], the tokens that may follow a state int32[]."""
    row = self.bits_of[state]
    words = self.bits[jnp.maximum(row, 0)]
    flags = (words[:, None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    by_bits = flags.reshape(-1)[:vocab_size] > 0
    place = self.first[state] + jnp.arange(_FEW)
    is_edge = place < self.first[state + 1]
    tokens = jnp.where(is_edge, self.tokens[place], vocab_size)
    few = jnp.zeros((vocab_size,), bool).at[tokens].set(True, mode='drop')
    return jnp.where(row == _NO_BITS, few, by_bits)

  def only_token(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[], whether one token alone may follow; and that token, int32[]."""
    begin = self.first[state]
    return self.first[state + 1] == begin + 1, self.tokens[begin]


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """One automaton on the host, as `Automata`; it begins in state 0."""

  first: np.ndarray
  tokens: np.ndarray
  targets: np.ndarray

  @property
  def num_states(self) -> int:
    """States that it has."""
    return self.first.size - 1


@functools.lru_cache(maxsize=8)  # rows of one constraint come again and again
def joined(
  parts: tuple[Automaton, ...], vocab_size: int
) -> tuple[Automata, list[int]]:
  """The tables of some automata, and the state in which each begins."""
  starts = np.cumsum([1, *(part.num_states for part in parts)]).tolist()
  ends = np.cumsum([0, *(part.tokens.size for part in parts)]).tolist()
  num_states, num_edges = starts.pop(), ends[-1]
  first = np.full(_size(num_states, _LEAST_STATES) + 1, num_edges, np.int32)
  first[FREE] = 0
  tokens = np.full(_size(num_edges, _LEAST_EDGES), vocab_size, np.int32)
  targets = np.zeros_like(tokens)
  bits_of = np.full(first.size - 1, _NO_BITS, np.int32)
  bits_of[FREE] = 0
  every = np.ones((vocab_size + -vocab_size % _WORD,), np.uint8)
  rows = {np.packbits(every, bitorder='little').tobytes(): 0}
  for part, start, begin in zip(parts, starts, ends[:-1], strict=True):
    size = part.tokens.size
    first[start : start + part.num_states] = part.first[:-1] + begin
    tokens[begin : begin + size] = part.tokens
    targets[begin : begin + size] = part.targets + start
    for state in np.flatnonzero(np.diff(part.first) > _FEW).tolist():
      flags = np.zeros_like(every)
      flags[part.tokens[part.first[state] : part.first[state + 1]]] = 1
      row = np.packbits(flags, bitorder='little').tobytes()
      bits_of[start + state] = rows.setdefault(row, len(rows))
  words = np.frombuffer(b''.join(rows), '<u4').reshape(len(rows), -1)
  missing = _size(len(rows), _LEAST_ROWS) - len(rows)
  bits = np.pad(words, ((0, missing), (0, 0)))
  return Automata(first, tokens, targets, bits_of, bits), starts


def _size(needed: int, least: int) -> int:
  """The least of the sizes of a table that is enough."""
  while least < needed:
    least *= _STEP
  return least
