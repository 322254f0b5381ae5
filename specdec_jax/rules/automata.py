"""Automata over token ids: which tokens may follow, and the state after each.

The automata of the constraints are made on the host, see `constraints`.
`joined` puts those of a batch into the tables of one `Automata` on the device,
padded to few sizes, so that another regex or schema recompiles nothing. State
`FREE` allows every token; rows without a constraint stay in it.
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
FEW = 32  # the most edges of a state whose tokens are listed, without a bit set
_WORD = 32
NONE = -1  # marks a state without a row of bits, and a missing token
_LEAST_STATES, _LEAST_EDGES, _LEAST_ROWS = 1 << 12, 1 << 18, 1 << 8
_STEP = 4  # the factor from one size of a table to the next


@struct.dataclass
class ByBytes:
  """An automaton of T states that reads tokens byte by byte; `FREE` is state 0.

  Attributes:
    step: int32[T, 256], the next state after each state and byte.
    spelled: uint8[S], the bytes of all tokens, concatenated.
    spans: int32[V + 1], the place in `spelled` where each token begins.
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
    first: int32[N + 1], the first edge of each state; first[i + 1] ends it.
    tokens: int32[E], the token of each edge.
    targets: int32[E], the state after it.
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

  States 0..T - 1 are those of `by_bytes` (`FREE` alone without it), states
  T..T + N - 1 those of `by_id`. A part that no row of a batch needs is None, so
  that the compiled program does not contain it.

  Attributes:
    by_bytes: the automata of regexes and schemas.
    by_id: the automata of choices.
    bits_of: int32[T + N], the row of `bits` of each state; -1 for a state with
      at most `FEW` edges, which are read from `by_id`.
    bits: uint32[R, ceil(V / 32)], a bit for each token that is allowed.
    only: int32[R], the token of a row that allows a single one; else -1.
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
    only: Any = self.only[jnp.maximum(row, 0)]
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
    bits_of: int32[T] or int32[N], see `Automata`.
    bits: uint32[R, ceil(V / 32)], see `Automata`.
    only: int32[R], see `Automata`.
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
  """Joins automata into one table; also returns where each of them begins."""
  texts = [part for part in parts if isinstance(part.tables, ByBytes)]
  choices = [part for part in parts if isinstance(part.tables, ById)]
  starts: dict[Automaton, int] = {}
  by_bytes = by_id = None
  size, bits_of = 1, [np.zeros((1,), np.int32)]
  bits, only = [packed(np.ones((1, vocab_size), bool))], [np.array([NONE])]

  def add(part: Automaton, first: int, begin: int) -> None:
    """Appends a part's states from `first` on, numbered from `begin` on."""
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
  """Pads a table to the next of its sizes: least * 4 ** n."""
  while least < len(table):
    least *= _STEP
  missing = [(0, least - len(table))] + [(0, 0)] * (table.ndim - 1)
  return np.pad(table, missing, constant_values=fill).astype(table.dtype)
