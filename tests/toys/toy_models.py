"""Exact toy models and exact laws, for tests.

A `MarkovModel` is a `LanguageModel` whose distribution is known in closed
form, so that whatever decodes with it can be compared with the truth:

    model = random_markov(seed=0, vocab_size=5, order=2)
    observed = count_ngrams(tokens_of_some_loop[:, :3], vocab_size=5)
    law = joint_law(model.next_probs(SamplingConfig()), 3, vocab_size=5)
    assert chi_squared_p_value(observed, law) > 1e-3

Where the space is small enough to enumerate a whole step, `exact` goes further.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.engine.engine import Engine
from specdec_jax.models import cpu_layout
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.model import Model
from specdec_jax.paper.simulation import chi_squared_p_value  # noqa: F401

# A prefix of generated tokens -> float[V], the law of the next one.
NextProbs = Callable[[tuple[int, ...]], np.ndarray]

_UNWRITTEN = -1


@struct.dataclass
class MarkovCache:
  """What a `MarkovModel` remembers.

  Attributes:
    tokens: int32[B, T], the tokens fed so far, at their slots; -1 elsewhere.
    length: int32[B], slots written.
    offset: float32[B, V], what the inputs add to all logits of the row.
  """

  tokens: jax.Array
  length: jax.Array
  offset: jax.Array


class MarkovModel(LanguageModel):
  """A Markov chain of order 1 or 2 as a `LanguageModel`, strict about caches.

  The logits come from the *cached* tokens, and a slot that was never written,
  or was rewound, reads as NaN. So a loop that rewinds too far, skips a
  position, overruns its buffer or reads a stale slot shows as NaN or, at order
  2, as another distribution. Slot -1 (before the start) counts as token 0.

  Attributes:
    vocab_size: V.
    order: how many of the last cached tokens the logits depend on.
    params: {'table': float32[V, V] or [V, V, V], 'offset': float32[V, V]}.
  """

  vocab_size = 0
  has_encoder = True  # inputs shift the logits of their row

  def __init__(self, table, input_offset=None):
    """Makes the chain.

    Args:
      table: float[V, V], logits of the next token given the last one; or
        float[V, V, V], given the last but one and the last.
      input_offset: float[V, V]; every input token that is not padding (0)
        adds its row to all logits of its example. None adds nothing.
    """
    table = np.asarray(table, np.float32)
    self.vocab_size = size = table.shape[-1]
    self.order = table.ndim - 1
    offset = np.zeros((size, size)) if input_offset is None else input_offset
    offset = jnp.asarray(np.asarray(offset, np.float32))
    self.params = {'table': jnp.asarray(table), 'offset': offset}

  def __eq__(self, other):
    """Chains of one size are one program: their tables are its arguments."""
    if type(self) is not MarkovModel or type(other) is not MarkovModel:
      return self is other  # what a subclass does is not known here
    return (self.vocab_size, self.order) == (other.vocab_size, other.order)

  def __hash__(self):
    return hash((type(self), self.vocab_size, self.order))

  @property
  def encoded_dim(self) -> int:
    """V: what each input adds to the logits."""
    return self.vocab_size

  def init(self, key: jax.Array):
    """The parameters: they are given, not random."""
    del key
    return self.params

  def encode(self, params, inputs: jax.Array) -> jax.Array:
    """What each input adds to the logits of its row, float32[B, E, V]."""
    present = (inputs != 0)[..., None]
    return jnp.where(present, params['offset'][inputs], 0.0)

  def prefill(
    self, params, inputs: jax.Array, max_length: int, longest=None, encoded=None
  ) -> MarkovCache:
    """An empty cache of `max_length` slots for inputs int32[B, E]."""
    del longest
    batch = inputs.shape[0]
    if encoded is None:
      encoded = self.encode(params, inputs)
    return MarkovCache(
      tokens=jnp.full((batch, max_length), _UNWRITTEN, jnp.int32),
      length=jnp.zeros((batch,), jnp.int32),
      offset=jnp.sum(encoded, 1),
    )

  def extend(
    self, params, cache: MarkovCache, tokens: jax.Array, tree=None
  ) -> tuple[jax.Array, MarkovCache]:
    """Writes tokens int32[B, S] at `cache.length`; float32[B, S, V], cache.

    The features are the logits themselves.

    A write past the last slot is clamped as `dynamic_update_slice` does it,
    over slots that are live. In a `tree` a token whose parent is not the only
    visible token at its place reads as NaN.
    """
    slots = _write(cache.tokens, tokens, cache.length)
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = cache.length[:, None] + steps
    context = tuple(
      _read(slots, positions - back)
      if tree is None
      else _read_ancestor(slots, tree, back)
      for back in reversed(range(self.order))
    )
    bad = functools.reduce(
      jnp.logical_or, [(t < 0) | (t >= self.vocab_size) for t in context]
    )
    logits = params['table'][context] + cache.offset[:, None, :]
    cache = MarkovCache(slots, cache.length + tokens.shape[1], cache.offset)
    return jnp.where(bad[..., None], jnp.nan, logits), cache

  def embed(self, params, tokens: jax.Array) -> jax.Array:
    """One-hot rows float32[..., V] of tokens int32[...]."""
    del params
    return jax.nn.one_hot(tokens, self.vocab_size)

  def head(self, params, features: jax.Array) -> jax.Array:
    """The features [..., V] themselves."""
    del params
    return features

  def rewind(self, cache: MarkovCache, length: jax.Array) -> MarkovCache:
    """Forgets the slots from `length` int32[B] on."""
    slots = lax.broadcasted_iota(jnp.int32, cache.tokens.shape, 1)
    kept = slots < length[:, None]
    tokens = jnp.where(kept, cache.tokens, _UNWRITTEN)
    return MarkovCache(tokens, length, cache.offset)

  def keep(self, cache: MarkovCache, length, slots) -> MarkovCache:
    """Moves what is in slots int32[B, N] to `length` int32[B] and on."""
    moved = jnp.take_along_axis(cache.tokens, slots, axis=1)
    tokens = _write(cache.tokens, moved, length)
    kept = MarkovCache(tokens, length + slots.shape[1], cache.offset)
    return self.rewind(kept, kept.length)

  def logits_after(
    self, tokens: Sequence[int], inputs: Sequence[int] = ()
  ) -> np.ndarray:
    """float32[V], the logits once `tokens` (the start token first) were fed."""
    table, offset = (np.asarray(self.params[k]) for k in ('table', 'offset'))
    context = (0, *tokens)[-self.order :]
    added = sum((offset[i] for i in inputs if i), np.zeros_like(offset[0]))
    return table[context] + added

  def next_probs(
    self, config: probs.SamplingConfig, inputs: Sequence[int] = ()
  ) -> NextProbs:
    """The standardised law of the next token given the generated ones."""
    params = config.params(1)

    @functools.cache
    def law(prefix: tuple[int, ...]) -> np.ndarray:
      logits = self.logits_after((0, *prefix), inputs)
      made = _standardise(jnp.asarray(logits)[None, None], params)
      return np.asarray(made)[0, 0]

    return law


class MarkovOnEncoder(MarkovModel):
  """A chain that reads another chain's inputs, and has none of its own."""

  reads_encoder = True

  def encode(self, params, inputs):
    raise AssertionError('expected the target to encode the inputs')


def random_markov(
  seed: int,
  vocab_size: int,
  order: int = 1,
  scale: float = 1.0,
  input_scale: float = 0.0,
) -> MarkovModel:
  """A `MarkovModel` of normal logits of standard deviation `scale`.

  `input_scale` is the standard deviation of what one input token adds.
  """
  rng = np.random.default_rng(seed)
  table = rng.normal(scale=scale, size=(vocab_size,) * (order + 1))
  offset = rng.normal(scale=input_scale, size=(vocab_size, vocab_size))
  return MarkovModel(table, offset)


@functools.cache
def noisy_chain(vocab_size: int, noise: float = 0.0) -> MarkovModel:
  """One chain that its inputs move; with noise, one that often agrees."""
  chain = random_markov(0, vocab_size, scale=2.0, input_scale=0.5)
  other = random_markov(1, vocab_size).params['table']
  table = chain.params['table'] + noise * other
  return MarkovModel(table, chain.params['offset'])


def chain_model(vocab_size: int, noise: float = 0.0) -> Model:
  """`noisy_chain` with its parameters."""
  chain = noisy_chain(vocab_size, noise)
  return Model(chain, chain.params)


def chain_engine(tokenizer, noise: float = 1, **options) -> Engine:
  """An engine of chains, whose drafter is often right; compiled in no time."""
  size = tokenizer.vocab_size
  target, draft = chain_model(size), chain_model(size, noise)
  return Engine(target, draft, tokenizer=tokenizer, **{'gamma': 3} | options)


def dear_batches(monkeypatch) -> None:
  """Makes a CPU on which calls over more tokens are dear in batches alone."""
  layout = cpu_layout.CpuLayout('in_out', times_ms=(1.0, 1.0, 2.0, 20.0))
  monkeypatch.setattr(cpu_layout, 'cpu_layout', lambda: layout)
  monkeypatch.setattr(jax, 'device_count', lambda: 1)


def joint_law(
  next_probs: NextProbs,
  length: int,
  vocab_size: int,
  stop_ids: Sequence[int] = (),
) -> np.ndarray:
  """Joint law of `length` tokens drawn one after another; float64[V, ..., V].

  After one of `stop_ids` every further token is 0, as loops pad their output.
  Each row of `next_probs` is normalised in float64.
  """
  law: np.ndarray = np.ones(())
  for position in range(length):
    longer = np.zeros((vocab_size,) * (position + 1))
    for prefix in itertools.product(range(vocab_size), repeat=position):
      if set(prefix) & set(stop_ids):
        longer[prefix + (0,)] = law[prefix]
      elif law[prefix]:
        row = np.asarray(next_probs(prefix), np.float64)
        longer[prefix] = law[prefix] * row / row.sum()
    law = longer
  return law


def count_ngrams(tokens, vocab_size: int) -> np.ndarray:
  """Joint counts of the rows of int[N, n]; int64[V, ..., V], n axes."""
  tokens = np.asarray(tokens)
  shape = (vocab_size,) * tokens.shape[1]
  flat = np.ravel_multi_index(tuple(tokens.T), shape)
  return np.bincount(flat, minlength=vocab_size ** len(shape)).reshape(shape)


_standardise = jax.jit(probs.standardise_batch)


@jax.vmap
def _write(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  return lax.dynamic_update_slice(row, new, (start,))


def _read(slots: jax.Array, positions: jax.Array) -> jax.Array:
  """Tokens at int32[B, S]: 0 before the start, unwritten past the end."""
  size = slots.shape[1]
  tokens = jnp.take_along_axis(slots, jnp.clip(positions, 0, size - 1), 1)
  tokens = jnp.where(positions < size, tokens, _UNWRITTEN)
  return jnp.where(positions < 0, 0, tokens)


def _read_ancestor(slots: jax.Array, tree, back: int) -> jax.Array:
  """Of each token of a tree, the ancestor so many places before; [B, S]."""
  place = tree.positions - back
  there = tree.slot_positions[:, None] == place[..., None]
  there &= tree.visible
  token = jnp.sum(jnp.where(there, slots[:, None], 0), axis=2)
  token = jnp.where(jnp.sum(there, axis=2) == 1, token, _UNWRITTEN)
  return jnp.where(place < 0, 0, token)


@functools.cache
def cycle(period=10):
  """A chain that counts 2, 3, ... and goes on: greedy output is known."""
  table = np.zeros((12, 12))
  table[0, 2] = 30.0
  for token in range(2, 2 + period):
    table[token, 2 + (token - 1) % period] = 30.0
  return MarkovModel(table)
