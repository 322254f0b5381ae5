"""Closed forms of Leviathan et al. 2023: what speculation should gain.

The paper's symbols: alpha is `acceptance_rate`, gamma is `gamma`, c is
`cost_ratio`, c-hat is `operations_ratio`, l is `lenience`, p is `target_probs`,
q is `draft_probs`. Equations, theorems and sections are the paper's. Only v(m)
is not in the paper: the time of a target call over m tokens in units of a call
over one token (`call_cost`; the paper assumes 1 for every m).

All functions take numbers or arrays of any shapes that broadcast, compute in
the arrays' own float type (float32 if they have none) and can be jitted, mapped
and differentiated. Values out of range raise a ValueError; under a
transformation they are tracers and cannot be checked.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specdec_jax.checks.fields import check_number, unexpected

# A range in words, and a test whether numbers are in it; NaN is in no range.
_Range = tuple[str, Callable[[np.ndarray], np.ndarray]]
_RATE: _Range = ('in [0, 1]', lambda x: (x >= 0) & (x <= 1))
_COST: _Range = ('finite and >= 0', lambda x: (x >= 0) & (x < np.inf))
_POSITIVE: _Range = ('finite and > 0', lambda x: (x > 0) & (x < np.inf))

_INT32_MAX = np.iinfo(np.int32).max
_WHOLE: _Range = (
  f'that is whole, in [0, {_INT32_MAX}]',
  lambda x: (x >= 0) & (x <= _INT32_MAX),
)
# The most that a sum of probabilities, or a measured v(1), may differ from 1.
_TOLERANCE = 1e-3


def expected_tokens(acceptance_rate: ArrayLike, gamma: ArrayLike) -> jax.Array:
  """Returns the mean tokens of one step, E(alpha, gamma); Eq. 1.

  The quotient (1 - alpha^(gamma + 1)) / (1 - alpha) is computed as the sum that
  it stands for, 1 + alpha + ... + alpha^gamma. So it is exact at alpha = 1,
  where it is gamma + 1, and all its derivatives are right there and at 0.

  Args:
    acceptance_rate: float[...] in [0, 1].
    gamma: int[...], >= 0.

  Returns:
    float[...] in [1, gamma + 1].

  Raises:
    ValueError: a value is out of range, or gamma is not whole.
  """
  rate, steps = jnp.broadcast_arrays(
    _checked('acceptance_rate', acceptance_rate, _RATE),
    _checked('gamma', gamma, _WHOLE),
  )
  concrete = _concrete(gamma)
  most = _INT32_MAX if concrete is None else int(concrete.max(initial=0))
  return 1 + rate * _power_sum(rate, steps, most.bit_length())


def expected_rounds(betas: Sequence[float], gamma: int) -> float:
  """Returns the mean number of rounds of an output.

  num_tokens / E(alpha, gamma) ignores two things that this mean takes into
  account: the last round may yield tokens past the end, and some parts of an
  output are accepted more often than others. If a round that begins at position
  i yields k tokens with probability P(i, k), then R(i) = 1 + sum over k of
  P(i, k) R(i + k), and R is 0 past the end.

  Args:
    betas: probability that a proposal is accepted at each position of the
      output, its end included.
    gamma: proposals per round; with 0 each round gives one token.

  Example:
    expected_rounds([0.8] * 16, gamma=4)  # 5.2, and 16 / 3.36 is 4.8
  """
  rounds = np.zeros(len(betas) + gamma + 1)
  for place in reversed(range(len(betas))):
    reach = np.cumprod([1.0, *betas[place : place + gamma]])
    probs = reach - np.append(reach[1:], 0.0)
    rounds[place] = 1 + probs @ rounds[place + 1 : place + 1 + len(probs)]
  return float(rounds[0])


def acceptance_prob(
  target_probs: ArrayLike, draft_probs: ArrayLike, lenience: ArrayLike = 1.0
) -> jax.Array:
  """Returns beta, the probability that a proposal is accepted.

  It is sum min(p, q) (Theorem 3.5). Its mean over prefixes is alpha (Corollary
  3.6). With lenience (A.5), where p is compared with l q, it is sum min(p / l,
  q): a smaller lenience accepts more and is lossy, since a token may be drawn
  with a probability of up to p / l. Lenience 0 accepts all.

  This is the form for sampling. For the one-hot rows of temperature 0, no
  lenience > 0 changes anything: there, the paper compares the target's
  probabilities before the argmax and accepts a token whose probability is at
  least l * max(p) (the inequality is printed the other way round).

  Args:
    target_probs: float[..., V], standardised.
    draft_probs: float[..., V], standardised in the same way.
    lenience: float[...] in [0, 1].

  Returns:
    float[...] in [0, 1].

  Raises:
    ValueError: the vocabularies differ, a row is not a distribution, or
      lenience is out of range.
  """
  target, draft = _distributions(target_probs, draft_probs)
  leeway = _checked('lenience', lenience, _RATE)[..., None]
  target, draft, leeway = _aligned(target, draft, leeway)
  accepted = leeway * draft <= target
  # Where `accepted` is false, leeway is positive.
  partly = target / jnp.where(accepted, 1, leeway)
  total = jnp.sum(jnp.where(accepted, draft, partly), axis=-1)
  return jnp.clip(total, 0, 1)  # rounding may lead outside of [0, 1]


def walltime_factor(
  acceptance_rate: ArrayLike,
  gamma: ArrayLike,
  cost_ratio: ArrayLike,
  call_cost: ArrayLike = 1.0,
) -> jax.Array:
  """Returns the speed-up of decoding, E / (v(gamma + 1) + gamma c).

  With v = 1 this is Theorem 3.8, which assumes that a target call over
  gamma + 1 tokens takes as long as one over a single token.

  Args:
    acceptance_rate: float[...] in [0, 1].
    gamma: int[...], >= 0.
    cost_ratio: float[...], >= 0, time of a draft call in target calls.
    call_cost: v(gamma + 1), float[...] > 0: the time of a target call over
      gamma + 1 tokens in calls over one token.

  Returns:
    float[...]: 1 at gamma = 0, less than 1 if speculation is slower.

  Raises:
    ValueError: a value is out of range, or gamma is not whole.
  """
  tokens, steps, draft_cost, target_cost = _aligned(
    expected_tokens(acceptance_rate, gamma),
    _checked('gamma', gamma, _WHOLE),
    _checked('cost_ratio', cost_ratio, _COST),
    _checked('call_cost', call_cost, _POSITIVE),
  )
  return tokens / (target_cost + steps * draft_cost)


def operations_factor(
  acceptance_rate: ArrayLike, gamma: ArrayLike, operations_ratio: ArrayLike
) -> jax.Array:
  """Returns the factor of Theorem 3.11, (gamma c-hat + gamma + 1) / E.

  Speculation takes so many times the arithmetic operations of plain decoding.

  Arguments and errors are those of `walltime_factor`, and `operations_ratio` is
  float[...] >= 0: the drafter's operations per token / the target's.
  Returns float[...], >= 1.
  """
  tokens, steps, ratio = _aligned(
    expected_tokens(acceptance_rate, gamma),
    _checked('gamma', gamma, _WHOLE),
    _checked('operations_ratio', operations_ratio, _COST),
  )
  return (steps * ratio + steps + 1) / tokens


def optimal_gamma(
  acceptance_rate: ArrayLike, cost_ratio: ArrayLike, max_gamma: int
) -> jax.Array:
  """Returns the gamma with the largest walltime factor; Section 3.5.

  Args:
    acceptance_rate: float[...] in [0, 1].
    cost_ratio: float[...], >= 0.
    max_gamma: the largest gamma to consider.

  Returns:
    int32[...]: the smallest of the best gammas. 0 is plain decoding:
    speculation does not pay. If it is `max_gamma`, a larger gamma may be better
    still.

  Raises:
    ValueError: a value is out of range.
  """
  check_number('max_gamma', max_gamma, 0)
  factors = walltime_factor(
    _checked('acceptance_rate', acceptance_rate, _RATE)[..., None],
    np.arange(max_gamma + 1, dtype=np.int32),
    _checked('cost_ratio', cost_ratio, _COST)[..., None],
  )
  return jnp.argmax(factors, axis=-1).astype(jnp.int32)


def oracle_factor(
  acceptance_rate: ArrayLike, cost_ratio: ArrayLike
) -> jax.Array:
  """Returns the factor that no gamma can exceed, the oracle of Section 3.5.

  The oracle sets gamma to the number of proposals that will be accepted. So a
  step yields 1 / (1 - alpha) tokens, and takes one target call and a draft call
  for each of these tokens but one: 1 / (1 - alpha + alpha c). If c >= 1 it
  never drafts, and the factor is 1.

  Arguments and errors are those of `walltime_factor`. Returns float[...], >= 1;
  infinite at alpha = 1, c = 0.
  """
  rate, cost = _aligned(
    _checked('acceptance_rate', acceptance_rate, _RATE),
    _checked('cost_ratio', cost_ratio, _COST),
  )
  return 1 / (1 - rate + rate * jnp.minimum(cost, 1))


def _power_sum(rate: jax.Array, count: jax.Array, num_bits: int) -> jax.Array:
  """Returns 1 + rate + rate^2 + ..., the first `count` powers; float[...]."""
  # The loop goes through the bits of `count` from the top: each bit doubles the
  # number of powers, and adds one power if the bit is set. There are only sums
  # and products of numbers >= 0, so no digits cancel; in the quotient of Eq. 1
  # they do near alpha = 1.
  total, power = jnp.zeros_like(rate), jnp.ones_like(rate)
  for bit in reversed(range(num_bits)):
    total, power = total * (1 + power), power * power
    odd = (count >> bit) & 1 == 1
    total = jnp.where(odd, 1 + rate * total, total)
    power = jnp.where(odd, rate * power, power)
  return total


def _concrete(value: ArrayLike) -> np.ndarray | None:
  """Returns the value as a NumPy array; None for a tracer."""
  return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def _checked(name: str, value: ArrayLike, allowed: _Range) -> jax.Array:
  """Returns `value` as float[...], or as int32[...] if `allowed` is `_WHOLE`.

  Raises ValueError if a value is out of range; of a tracer, only the type is
  checked.
  """
  concrete, (words, in_range) = _concrete(value), allowed
  array = jnp.asarray(value) if concrete is None else concrete
  is_float, is_whole = _is(array, jnp.floating), _is(array, jnp.integer)
  if not (is_whole or is_float and allowed is not _WHOLE):
    raise unexpected(name, f'a number {words}', value)
  if concrete is not None:
    wrong = concrete[~in_range(concrete)].tolist()
    if wrong:
      raise unexpected(name, f'a number {words}', wrong[0])
  kind = jnp.int32 if allowed is _WHOLE else float
  return jnp.asarray(value) if is_float else jnp.asarray(value).astype(kind)


def _is(array: np.ndarray | jax.Array, kind) -> bool:
  return jnp.issubdtype(array.dtype, kind)


def _aligned(*arrays: jax.Array) -> list[jax.Array]:
  """Broadcasts arrays, and converts them to the float type of the floats."""
  floats = [array for array in arrays if _is(array, jnp.floating)]
  dtype = jnp.result_type(*floats)
  cast = (array.astype(dtype) for array in arrays)
  return list(jnp.broadcast_arrays(*cast))  # JAX 0.12 returns a tuple


def _distributions(
  target_probs: ArrayLike, draft_probs: ArrayLike
) -> list[jax.Array]:
  """Checks two distributions; returns them as float[..., V] of one shape.

  Tracers are not checked.
  """
  named = {'target_probs': target_probs, 'draft_probs': draft_probs}
  arrays = [_checked(name, value, _COST) for name, value in named.items()]
  sizes = [array.shape[-1:] for array in arrays]
  if sizes[0] != sizes[1] or sizes[0] in ((), (0,)):
    shapes = [array.shape for array in arrays]
    raise unexpected('target_probs, draft_probs', 'one vocabulary', shapes)
  for name, value in named.items():
    concrete = _concrete(value)
    if concrete is not None:
      sums = np.atleast_1d(concrete.sum(axis=-1, dtype=np.float64))
      wrong = sums[np.abs(sums - 1) > _TOLERANCE].tolist()
      if wrong:
        raise unexpected(name, 'a sum of 1 over the vocabulary', wrong[0])
  return _aligned(*arrays)
