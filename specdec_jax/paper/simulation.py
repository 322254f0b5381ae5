"""Simulates a single proposal, to check Appendix A.1 of the paper.

A token is drawn from the drafter's distribution. Algorithm 1 accepts the token,
or rejects it and draws another one. Closed forms give the probability of both
outcomes for each token, also with lenience (see `verify`). `simulate` compares
these probabilities with many random runs of the library's `verify`:

  print(simulate((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)))
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from specdec_jax import analysis, probs
from specdec_jax.checks.fields import unexpected
from specdec_jax.paper.speculative_execution import settle
from specdec_jax.verify import check_lenience

MAX_SAMPLES = 10**8  # a sample takes four bytes
# The level of the test: a correct `verify` fails for one seed in a million.
ALPHA = 1e-6
_CHUNK_ENTRIES = 1 << 21  # the number of probabilities in memory at a time

Probs = Sequence[float] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Simulation:
  """The exact and the measured distribution; `str` returns a table of both.

  Attributes:
    law: float64[2, V], the exact probabilities that each token is accepted
      (row 0), or is drawn after a rejection (row 1).
    counts: int64[2, V], counts of these outcomes in runs of `verify`.
    lenience: in (0, 1]; 1 is lossless.
  """

  law: np.ndarray
  counts: np.ndarray
  lenience: float

  @property
  def p_value(self) -> float:
    """The p-value of a chi-squared test of `counts` against `law`."""
    return chi_squared_p_value(self.counts, self.law)

  @property
  def agrees(self) -> bool:
    """Whether the test passes at the level `ALPHA`."""
    return self.p_value >= ALPHA

  def __str__(self) -> str:
    runs, wrong = self.counts.sum(), '' if self.agrees else ', WRONG'
    shares = self.counts / runs
    columns = *self.law, self.law.sum(axis=0), shares.sum(axis=0)
    lines = ['token  accepted  resampled     total  measured']
    lines += [
      f'{token:5}  {row[0]:.6f}  {row[1]:9.6f}  {row[2]:.6f}  {row[3]:.6f}'
      for token, row in enumerate(zip(*columns, strict=True))
    ]
    lines.append(
      f'Accepted: {self.law[0].sum():.6f} exactly, {shares[0].sum():.6f} of'
      f' {runs:,} runs. Chi-squared: p = {self.p_value:.3g}{wrong}.'
    )
    if self.lenience != 1:
      lines.append(
        f'Lossy: with lenience {self.lenience:g} a token may come up to'
        f' {1 / self.lenience:g} times as often as the target draws it.'
      )
    return '\n'.join(lines)


def simulate(
  target_probs: Probs,
  draft_probs: Probs,
  num_samples: int = 1_000_000,
  lenience: float = 1.0,
  seed: int = 0,
) -> Simulation:
  """Compares the exact distribution of one proposal with runs of `verify`.

  Args:
    target_probs: float[V], the target's probabilities; sum 1 within 0.001.
    draft_probs: float[V], the drafter's probabilities of the same tokens.
    num_samples: number of runs, at most `MAX_SAMPLES`.
    lenience: in (0, 1]; 1 is lossless.
    seed: seed of the runs.

  Raises:
    ValueError: the probabilities are not two distributions over the same
      tokens, or a number is out of range.
  """
  check_lenience(lenience)
  analysis.acceptance_prob(np.asarray(target_probs), np.asarray(draft_probs))
  if np.ndim(target_probs) != 1:
    shape = np.shape(target_probs)
    raise unexpected('target_probs', 'an array of shape (V,)', shape)
  if not 1 <= num_samples <= MAX_SAMPLES:
    raise unexpected('num_samples', f'1 to {MAX_SAMPLES}', num_samples)
  laws = target_probs, draft_probs
  pair = [_normalised(law).astype(np.float32) for law in laws]
  leeway = None if lenience == 1 else jnp.float32(lenience)
  counts = _count(*pair, leeway, jax.random.key(seed), num_samples)
  law = outcomes(target_probs, draft_probs, lenience)
  return Simulation(law, np.asarray(counts, np.int64), lenience)


def outcomes(
  target_probs: Probs, draft_probs: Probs, lenience: float = 1.0
) -> np.ndarray:
  """Returns the exact probabilities of all outcomes of one proposal.

  The equations are those of Appendix A.1, and of `verify` for lenience.

  Args:
    target_probs: float[V]; this function normalises them.
    draft_probs: float[V]; this function normalises them.
    lenience: in (0, 1]; 1 is lossless.

  Returns:
    float64[2, V]. Row 0 has the probability of each token to be proposed and
    accepted; the sum of this row is beta. Row 1 has the probability of each
    token to replace a rejected proposal. The sum of both rows is the
    distribution of the emitted token.
  """
  target, draft = _normalised(target_probs), _normalised(draft_probs)
  accepted = np.minimum(draft, target / lenience)
  residual = np.maximum(target - draft, 0)
  mass = residual.sum()
  # Without a residual both distributions are equal, and nothing is rejected.
  rejected = max(1 - accepted.sum(), 0) if mass > 0 else 0.0
  return np.stack([accepted, residual * (rejected / (mass or 1.0))])


@functools.partial(jax.jit, static_argnames='num_samples')
def _count(target_probs, draft_probs, lenience, key, num_samples):
  """Counts accepted and resampled tokens in many runs, int32[2, V]."""
  size = target_probs.shape[0]

  def cell(index):
    run_key = jax.random.fold_in(key, index)
    guess = probs.sample(draft_probs, probs.draft_key(run_key, 0))
    token, accepted = settle(
      guess, target_probs, draft_probs, run_key, lenience
    )
    return jnp.where(accepted, token, size + token)

  together = max(1, min(_CHUNK_ENTRIES // size, 1 << 16))
  cells = lax.map(cell, jnp.arange(num_samples), batch_size=together)
  return jnp.bincount(cells, length=2 * size).reshape(2, size)


def _normalised(values: Probs) -> np.ndarray:
  array = np.asarray(values, np.float64)
  return array / array.sum()


def chi_squared_p_value(observed, expected_probs) -> float:
  """Returns the p-value of Pearson's chi-squared test of counts.

  Cells with expected counts below 5 are pooled, the least likely first, so that
  the statistic has its asymptotic law. If an outcome of probability 0 was
  observed, p is 0.

  Args:
    observed: int[...], counts.
    expected_probs: float[...] of the same shape, summing to 1.

  Raises:
    ValueError: the shapes differ, nothing was observed, or the sum is not 1.
  """
  observed = np.asarray(observed, np.float64)
  expected = np.asarray(expected_probs, np.float64)
  if observed.shape != expected.shape:
    raise unexpected('observed', f'shape {expected.shape}', observed.shape)
  if not observed.sum() > 0:
    raise unexpected('observed', 'a count above 0', observed)
  if not abs(expected.sum() - 1) < 1e-4 or expected.min() < 0:
    raise unexpected('expected_probs', 'a sum of 1', expected.sum())
  if observed[expected == 0].any():
    return 0.0
  order = np.argsort(expected, axis=None)
  observed, expected = observed.ravel()[order], expected.ravel()[order]
  expected *= observed.sum() / expected.sum()
  # Pools all cells with expected counts below 5, and further cells, the least
  # likely first, until the pool has an expected count of 5.
  reaching = np.searchsorted(np.cumsum(expected), 5) + 1
  pooled = max(np.sum(expected < 5), reaching)
  first = np.append(0, np.arange(pooled, len(expected)))
  observed = np.add.reduceat(observed, first)
  expected = np.add.reduceat(expected, first)
  if len(first) == 1:
    return 1.0
  statistic = np.sum((observed - expected) ** 2 / expected)
  return float(special.chdtrc(len(first) - 1, statistic))
