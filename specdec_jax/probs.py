"""Turns logits into distributions and tokens, and derives random numbers.

Functions take one row of logits unless their names end in `_batch`.
Speculative sampling compares two distributions *after* temperature, top-k and
top-p (Leviathan et al. 2023, Section 2.2), so both models go through the one
`standardise` below. Nothing sorts or scans the whole vocabulary: at V = 32128
on a CPU that costs more than the rest of the sampling together.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax.checks.fields import Bound, check_types, is_a, unexpected
from specdec_jax.types import Array, Count

_FLOAT32 = np.finfo(np.float32)
_TINY = float(_FLOAT32.tiny)

_FEW_IDS = 16  # tokens are compared with up to so many ids one by one
# `top_tokens` splits logits into blocks of these sizes.
_BLOCK, _LEAST_BLOCK = 128, 32

# The purposes of the random numbers of one row in one round, see `draft_key`.
_ACCEPT, _RESAMPLE, _FIRST_DRAFT = 0, 1, 2


@struct.dataclass
class SamplingParams:
  """`SamplingConfig` as arrays: changing the values does not recompile.

  Attributes:
    temperature: float32[B], 0 is argmax.
    top_k: int32[B], 0 is off.
    top_p: float32[B], 1 is off.
    min_p: float32[B], 0 is off; None leaves it out of the program.
  """

  temperature: Array
  top_k: Array
  top_p: Array
  min_p: Array | None = None


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """The sampling settings: temperature, then top-k, top-p and min-p.

  Attributes:
    temperature: one number for all examples or one for each; 0 is argmax.
    top_k: keeps the k likeliest tokens and those tied with the k-th; 0 is off.
    top_p: keeps the likeliest tokens that together reach this probability after
      top-k, and those tied with the last of them; 1 is off.
    min_p: keeps tokens with at least this fraction of the probability of the
      likeliest token; 0 is off.

  Raises:
    ValueError: a value is of the wrong type or outside its range.

  Examples:
    >>> sampling = sd.SamplingConfig(temperature=0.7, top_k=40, top_p=0.9)
    >>> sampling.greedy
    False
    >>> sd.SamplingConfig(temperature=0).greedy
    True
  """

  temperature: float | Sequence[float] = 1.0
  top_k: Count = 0
  # A float64 may be above 0 and yet 0 in float32.
  top_p: Annotated[float, Bound(_TINY, 1)] = 1.0
  min_p: Annotated[float, Bound(0, 1)] = 0.0

  def __post_init__(self):
    temperature: Any = self.temperature
    if hasattr(temperature, 'tolist'):
      temperature = temperature.tolist()
    several = is_a(temperature, Sequence[float])
    numbers = list(temperature) if several else [temperature]
    if not numbers or not all(map(_is_temperature, numbers)):
      expected = 'a number >= 0 that float32 can hold, or one an example'
      raise unexpected('temperature', expected, self.temperature)
    # Fields become Python numbers and tuples, so that configs compare and hash
    # by value.
    floats = tuple(map(float, numbers))
    object.__setattr__(self, 'temperature', floats if several else floats[0])
    check_types(self)
    object.__setattr__(self, 'top_k', int(self.top_k))
    object.__setattr__(self, 'top_p', float(self.top_p))

  @property
  def greedy(self) -> bool:
    """Whether every example takes the argmax."""
    return not np.any(self.temperature)

  def params(self, batch: int) -> SamplingParams:
    """Returns the values as arrays for `batch` examples.

    Raises:
      ValueError: `temperature` is a sequence of another length than `batch`.
    """
    temperature = np.asarray(self.temperature, np.float32)
    if temperature.ndim and temperature.size != batch:
      expected = f'one number, or one for each of {batch} examples'
      raise unexpected('temperature', expected, self.temperature)
    return SamplingParams(
      temperature=np.broadcast_to(temperature, (batch,)),
      top_k=np.full((batch,), self.top_k, np.int32),
      top_p=np.full((batch,), self.top_p, np.float32),
      min_p=np.full((batch,), self.min_p, np.float32) if self.min_p else None,
    )


def standardise(
  logits: jax.Array,
  temperature: Array,
  top_k: Array,
  top_p: Array,
  filters: tuple[jax.Array, jax.Array],
  min_p: Array | None = None,
) -> jax.Array:
  """Returns the distribution that tokens are drawn from, for one row of logits.

  Temperature 0 is the exact one-hot of the argmax, the first one on ties.
  Tokens tied with the last one that top-k or top-p keeps are kept as well, so
  the result does not depend on the order of the vocabulary.

  Args:
    logits: float[V]; -inf masks a token.
    temperature: float32[], >= 0.
    top_k: int32[]; 0 is off.
    top_p: float32[] in (0, 1]; 1 is off.
    filters: bool[] each, whether any row of the batch has top-k, and any top-p:
      a filter that no row has costs nothing at run time.
    min_p: float32[] in [0, 1]; None is off.

  Returns:
    float32[V] that sums to 1 within rounding; meaningless (mostly NaN) if
    `valid_logits` is False.
  """
  logits = logits.astype(jnp.float32)
  # Only the threshold passes through the conditionals: a vocabulary-sized
  # result would be copied out of them even when they have nothing to do.
  by_rank, by_mass = filters
  logit_threshold = lax.cond(
    by_rank,
    lambda: jnp.where(
      (top_k > 0) & (top_k < logits.size),
      largest_threshold(logits, jnp.ones_like(logits), top_k),
      -jnp.inf,
    ),
    lambda: jnp.float32(-jnp.inf),
  )
  scaled = (logits - jnp.max(logits)) / jnp.where(
    temperature > 0, temperature, 1.0
  )
  weights = jnp.where(logits >= logit_threshold, jnp.exp(scaled), 0.0)
  weight_threshold = lax.cond(
    by_mass,
    lambda: jnp.where(
      top_p < 1,
      largest_threshold(weights, weights, top_p * jnp.sum(weights)),
      0.0,
    ),
    lambda: jnp.float32(0.0),
  )
  weights = jnp.where(weights >= weight_threshold, weights, 0.0)
  if min_p is not None:  # the largest weight is 1
    weights = jnp.where(weights >= min_p, weights, 0.0)
  argmax_one_hot = lax.iota(jnp.int32, logits.size) == greedy_token(logits)
  return jnp.where(
    temperature > 0,
    weights / jnp.sum(weights),
    argmax_one_hot.astype(jnp.float32),
  )


def standardise_batch(logits: jax.Array, params: SamplingParams) -> jax.Array:
  """Standardises logits float[B, S, V]; each example has its own settings.

  `filters` is not mapped over, so that its conditionals stay conditionals; with
  a mapped predicate XLA would compute both branches for all rows.
  """
  settings = params.temperature, params.top_k, params.top_p
  filters = jnp.any(params.top_k > 0), jnp.any(params.top_p < 1)
  over_positions = jax.vmap(standardise, in_axes=(0, *[None] * 5))
  over_examples = jax.vmap(over_positions, in_axes=(0, 0, 0, 0, None, 0))
  return over_examples(logits, *settings, filters, params.min_p)


def largest_threshold(
  values: jax.Array, weights: jax.Array, mass: Array
) -> jax.Array:
  """Finds the largest t in `values` with sum(weights[values >= t]) >= mass.

  This is the boundary value of top-k (weights 1, mass k) and of top-p (values
  and weights the probabilities, mass the wanted probability), found exactly
  and without a sort. Sums in a fixed order are monotone in t even in floating
  point, so bisection is sound; and it runs over the 2^32 floats in their own
  order, not over the reals, so 32 halvings leave one float.

  Args:
    values: float32[V] without NaN.
    weights: float32[V], >= 0. Sums of ones are exact up to V = 2^24.
    mass: number[]. Above the sum of all weights it gives -inf, which keeps
      every token; at or below 0 it gives the maximum.

  Returns:
    float32[].
  """
  mass = jnp.asarray(mass).astype(jnp.float32)
  # These are the ordered images of -inf and of the float after +inf.
  low, high = jnp.uint32(0x007FFFFF), jnp.uint32(0xFF800001)

  def halve(_, bracket):
    low, high = bracket
    middle = low + (high - low) // 2
    # Floats are compared, not their images: -0.0 and 0.0 are a tie.
    above = jnp.where(values >= _ordered_float(middle), weights, 0.0)
    reached = jnp.sum(above) >= mass
    return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

  low, _ = lax.fori_loop(0, 32, halve, (low, high))
  return jnp.minimum(_ordered_float(low), jnp.max(values))


def sample(probs: jax.Array, key: jax.Array) -> jax.Array:
  """Draws one token; consumes `key`.

  Args:
    probs: float32[V], >= 0; need not sum to 1. With a positive sum, a token of
      probability 0 is never drawn; otherwise the result is some id below V.
    key: PRNG key.

  Returns:
    int32[].
  """
  return inverse_cdf(probs, jax.random.uniform(key, (2,), jnp.float32))


def inverse_cdf(probs: jax.Array, uniforms: jax.Array) -> jax.Array:
  """Returns the token at `uniforms` of a two-level inverse CDF.

  The vocabulary is laid out as a table of about sqrt(V) columns (column-wise
  sums are the vectorised ones). The first uniform chooses a column, the second
  a token in it, so only 2 sqrt(V) numbers are summed cumulatively. It takes two
  independent uniforms, rather than one and its remainder, because one float32
  uniform has only 2^23 values: too few for a long tail of rare tokens.

  Args:
    probs: float32[V], >= 0; need not sum to 1.
    uniforms: float32[2] in [0, 1).

  Returns:
    int32[]: an id of positive probability if there is one.
  """
  size = probs.shape[0]
  columns = num_columns(size)
  padding = -size % columns
  table = jnp.pad(probs, (0, padding)).reshape(-1, columns)
  column = _first_above(jnp.sum(table, axis=0), uniforms[0])
  row = _first_above(table[:, column], uniforms[1])
  return jnp.minimum(row * columns + column, size - 1)


def num_columns(vocab_size: int) -> int:
  """Returns the columns of the table in `inverse_cdf`, a power of 2."""
  return 1 << (vocab_size.bit_length() - 1) // 2


def greedy_token(logits: jax.Array) -> jax.Array:
  """Returns the argmax over the last axis, the first index on ties.

  It takes two plain reductions, because XLA's argmax is one reduction over
  pairs, which takes seven times as long on a CPU.

  Args:
    logits: float[..., V].

  Returns:
    int32[...]: always a valid id; an arbitrary one if the logits hold NaN.
  """
  last = logits.shape[-1] - 1
  indices = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  at_maximum = logits == jnp.max(logits, axis=-1, keepdims=True)
  return jnp.min(jnp.where(at_maximum, indices, last), axis=-1)


def top_tokens(
  logits: jax.Array,
  count: int,
  token_ids: jax.Array | None = None,
  forbidden: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Finds the `count` largest logits and their ids; the first ids on ties.

  A long row is split into blocks. The largest logits lie in the `count` blocks
  with the largest maxima, or in one more block for each forbidden token, which
  may be the largest of its block.

  Args:
    logits: float[..., V].
    count: static, at most V.
    token_ids: int32[K], tokens that some rows forbid; None forbids nothing.
    forbidden: bool[...], the rows in which these tokens have the logit -inf.

  Returns:
    float[..., count] and int32[..., count], from the largest on; and
    float[...], the largest logit of a row, forbidden ones too.
  """
  size, rows = logits.shape[-1], logits.shape[:-1]
  if token_ids is None or forbidden is None:
    token_ids = jnp.zeros((0,), jnp.int32)
    forbidden = jnp.zeros(rows, bool)
  block = _block_size(size)
  needed = count + token_ids.shape[0]
  if size <= 4 * block * needed:
    allowed = forbid(logits, token_ids, forbidden)
    return *lax.top_k(allowed, count), jnp.max(logits, axis=-1)
  blocks = logits
  if size % block:
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, -size % block)]
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf)
  blocks = blocks.reshape(*rows, -1, block)
  maxima = jnp.max(blocks, axis=-1)
  _, chosen = lax.top_k(maxima, needed)
  chosen = jnp.sort(chosen, axis=-1)  # smaller ids stay first
  few = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
  ids = chosen[..., None] * block + jnp.arange(block)
  few, ids = (x.reshape(*rows, -1) for x in (few, ids))
  few = forbid(few, token_ids, forbidden, ids)
  values, index = lax.top_k(few, count)
  ids = jnp.take_along_axis(ids, index, axis=-1)
  return values, ids, jnp.max(maxima, axis=-1)


def _block_size(size: int) -> int:
  """Returns the size of the blocks of a row, a power of two.

  It is the largest one up to `_BLOCK` that divides `size`, because other rows
  must be padded, which copies them. If it would be less than `_LEAST_BLOCK`, it
  is `_BLOCK` all the same.
  """
  divisor = min(size & -size, _BLOCK)
  return divisor if divisor >= _LEAST_BLOCK else _BLOCK


def top_prob(logits: jax.Array) -> jax.Array:
  """Returns the largest probability of float[..., V], at temperature 1."""
  logits = logits.astype(jnp.float32)
  maximum = jnp.max(logits, axis=-1, keepdims=True)
  return 1 / jnp.sum(jnp.exp(logits - maximum), axis=-1)


def log_prob_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """Returns log softmax(logits)[token], in nats, without the whole softmax.

  This is the model's own probability, at temperature 1 and without top-k or
  top-p.

  Args:
    logits: float[..., V].
    tokens: int32[...], ids below V.

  Returns:
    float32[...].
  """
  logits = logits.astype(jnp.float32)
  maximum = jnp.max(logits, axis=-1, keepdims=True)
  total = jnp.sum(jnp.exp(logits - maximum), axis=-1)
  chosen = jnp.take_along_axis(logits, tokens[..., None], -1, mode='clip')
  return (chosen - maximum)[..., 0] - jnp.log(total)


def forbid(
  logits: jax.Array,
  token_ids: jax.Array,
  where: jax.Array,
  ids: jax.Array | None = None,
) -> jax.Array:
  """Masks some tokens in some rows with -inf.

  Args:
    logits: float[..., V].
    token_ids: int32[K]; ids outside the vocabulary are ignored.
    where: bool[...], the rows to mask them in.
    ids: int32[..., V], the token that each logit belongs to; None is 0..V-1.

  Returns:
    float[..., V].
  """
  if ids is None:
    ids = lax.iota(jnp.int32, logits.shape[-1])
  masked = is_one_of(ids, token_ids) & where[..., None]
  return jnp.where(masked, -jnp.inf, logits)


def is_one_of(ids: jax.Array, token_ids: jax.Array) -> jax.Array:
  """Returns bool[...], whether each id is among the token ids.

  Args:
    ids: int32[...].
    token_ids: int32[K], or int32[..., K] with token ids for each of `ids`.
  """
  count = token_ids.shape[-1]
  if count > _FEW_IDS:
    return jnp.any(ids[..., None] == token_ids, axis=-1)
  same = (ids == token_ids[..., i] for i in range(count))
  return functools.reduce(jnp.logical_or, same, jnp.zeros(ids.shape, bool))


def forbid_early_stops(
  logits: jax.Array,
  stop_ids: jax.Array,
  produced: jax.Array,
  min_length: jax.Array,
  ids: jax.Array | None = None,
  places: Array | None = None,
) -> jax.Array:
  """Masks stop ids where a row is too short to end.

  Both the target and drafters call it.

  Args:
    logits: float[B, S, V], logits of S consecutive tokens.
    stop_ids: int32[K], or int32[B, K]; padded with -1.
    produced: int32[B], tokens that each row has before the first of the S.
    min_length: int32[B], tokens that a row must have before a stop id.
    ids: int32[B, S, V], the token that each logit belongs to; None is 0..V-1.
    places: int[S], the number of tokens between the `produced` ones and each of
      the S; None stands for 0, 1, ...

  Returns:
    float[B, S, V].
  """
  if places is None:
    places = jnp.arange(logits.shape[1])
  before = produced[:, None] + places
  if stop_ids.ndim > 1:
    stop_ids = stop_ids[:, None, None]
  return forbid(logits, stop_ids, before < min_length[:, None], ids)


def valid_logits(logits: jax.Array) -> jax.Array:
  """Returns bool[...], whether each row of float[..., V] gives a distribution.

  A row gives none if it holds NaN or +inf, or if every token is masked, with
  -inf or with the lowest finite float.
  """
  logits = logits.astype(jnp.float32)
  maximum = jnp.max(logits, axis=-1)
  in_range = (maximum > _FLOAT32.min) & (maximum < jnp.inf)
  # On a CPU the maximum of a long row hides NaN.
  return in_range & ~jnp.any(jnp.isnan(logits), axis=-1)


# The random numbers of one row in one round all derive from one key, through
# these functions and nowhere else. The plain loop samples its token with
# `resample_key`, and so does `verify` when there was nothing to verify:
# speculation with gamma = 0 is the plain loop bit for bit.


def draft_key(key: jax.Array, index: int | jax.Array) -> jax.Array:
  """Returns the key for the `index`-th proposal of this row and round."""
  return jax.random.fold_in(key, _FIRST_DRAFT + index)


def accept_key(key: jax.Array) -> jax.Array:
  """Returns the key for the accept decisions, r_1 ... r_gamma."""
  return jax.random.fold_in(key, _ACCEPT)


def resample_key(key: jax.Array) -> jax.Array:
  """Returns the key for the token that the target draws in this round."""
  return jax.random.fold_in(key, _RESAMPLE)


def draft_uniforms(key: jax.Array, gamma: int) -> jax.Array:
  """Draws the uniforms of `draft_key` 0 to gamma - 1, all at once.

  Returns:
    float32[gamma, 2], for `inverse_cdf`.
  """
  return _uniforms(key, _FIRST_DRAFT, gamma, 2)


def verdict_uniforms(key: jax.Array, gamma: int) -> tuple[jax.Array, jax.Array]:
  """Draws the uniforms of `accept_key` and `resample_key`, both at once.

  Returns:
    r_1 ... r_gamma, float32[gamma]; and float32[2], for `inverse_cdf`.
  """
  accept, resample = _uniforms(key, _ACCEPT, 2, max(gamma, 2))
  return accept[:gamma], resample[:2]


def _uniforms(key: jax.Array, first: int, count: int, width: int) -> jax.Array:
  """Draws float32[count, width], a row for each purpose from `first` on."""
  keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
    key, np.arange(first, first + count, dtype=np.int32)
  )

  def draw(key):
    return jax.random.uniform(key, (width,), jnp.float32)

  return jax.vmap(draw)(keys)


def _first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
  """Inverts the CDF of unnormalised float32[N] at `uniform`; int32[]."""
  # A parallel cumulative sum need not be monotone in floating point, and may
  # grow where a weight is 0. The `where` makes sure that an entry of weight 0
  # is never chosen; and as uniform < 1, the largest sum always exceeds the
  # bound, so that some entry is found.
  cumulative = jnp.where(weights > 0, jnp.cumsum(weights), 0.0)
  bound = uniform * jnp.max(cumulative)
  return jnp.argmax(cumulative > bound).astype(jnp.int32)


def _ordered_float(image: jax.Array) -> jax.Array:
  """Inverts the order-preserving map of the float32 numbers to uint32."""
  sign = jnp.uint32(0x80000000)
  bits = jnp.where(image >= sign, image ^ sign, ~image)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _is_temperature(value) -> bool:
  low, high = _TINY, float(_FLOAT32.max)
  return is_a(value, float) and (value == 0 or low <= value <= high)
