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
FEW = 32  # edges of a state that has no row of bits
_WORD = 32
NONE = -1  # no row of bits, and no token
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
    place = self.by_id.first[at] + jnp.arange(FEW)
    is_edge = place < self.by_id.first[at + 1]
    tokens = jnp.where(is_edge, self.by_id.tokens[place], vocab_size)
    few = jnp.zeros((vocab_size,), bool).at[tokens].set(True, mode='drop')
    return jnp.where(row == NONE, few, by_bits)

  def only_token(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[], whether one token alone may follow; and that token, int32[]."""
    row = self.bits_of[state]
    only: Any = self.only[jnp.maximum(row, 0)]
    if self.by_id is not None:
      at = jnp.maximum(state - self._behind, 0)
      begin = self.by_id.first[at]
      is_one = self.by_id.first[at + 1] == begin + 1
      few = jnp.where(is_one, self.by_id.tokens[begin], NONE)
      only = jnp.where(row == NONE, few, only)
    return only >= 0, only


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """An automaton of one constraint on the host; parts as in `Automata`.

  Attributes:
    tables: a `ByBytes`, of which state 0 is `FREE`, or a `ById`.
    bits_of: int32[T] or int32[N].
    bits: uint32[R, ceil(V / 32)].
    only: int32[R].
    start: the state in which it begins.
  """

  tables: Any
  bits_of: np.ndarray
  bits: np.ndarray
  only: np.ndarray
  start: int

  def first_tokens(self, vocab_size: int) -> np.ndarray:
    """The ids that an output may begin with, of an automaton by bytes."""
    row = self.bits[self.bits_of[self.start]].view(np.uint8)
    flags = np.unpackbits(row, bitorder='little')[:vocab_size]
    return np.flatnonzero(flags)


def packed(flags: np.ndarray) -> np.ndarray:
  """Rows of `Automata.bits` of rows of flags bool[R, V]."""
  missing = -flags.shape[1] % _WORD
  flags = np.pad(flags, ((0, 0), (0, missing)))
  return np.packbits(flags, axis=1, bitorder='little').view('<u4')


@functools.lru_cache(maxsize=8)  # rows of one constraint come again and again
def joined(
  parts: tuple[Automaton, ...], vocab_size: int
) -> tuple[Automata, list[int]]:
  """The tables of some automata, and the state in which each begins."""
  texts = [part for part in parts if isinstance(part.tables, ByBytes)]
  choices = [part for part in parts if isinstance(part.tables, ById)]
  starts: dict[Automaton, int] = {}
  by_bytes = by_id = None
  size, bits_of = 1, [np.zeros((1,), np.int32)]
  bits, only = [packed(np.ones((1, vocab_size), bool))], [np.array([NONE])]

  def add(part: Automaton, first: int, begin: int) -> None:
    """Adds the rows of a part's states from one on, where states begin."""
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
    size, like = len(step), texts[0].tables
    by_bytes = ByBytes(step, like.spelled, like.spans)
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
  tables = Automata(
    by_bytes,
    by_id,
    np.concatenate(bits_of).astype(np.int32),
    _padded(np.concatenate(bits), _LEAST_ROWS, 0),
    _padded(np.concatenate(only).astype(np.int32), _LEAST_ROWS, NONE),
  )
  return tables, [starts[part] for part in parts]


def _padded(table: np.ndarray, least: int, fill: int) -> np.ndarray:
  """A table as long as the least of its sizes that is enough."""
  while least < len(table):
    least *= _STEP
  missing = [(0, least - len(table))] + [(0, 0)] * (table.ndim - 1)
  return np.pad(table, missing, constant_values=fill).astype(table.dtype)
