"""The experiment behind Appendix A.1: what becomes of one proposal.

A token is drawn from the drafter's distribution; Algorithm 1 then accepts it,
or rejects it and draws another one. The exact probabilities of both outcomes
are known for each token (with lenience, see `verify`). `simulate` shows them,
and compares them with many random runs of the library's own `verify`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax import lax
from scipy import special

from specdec_jax import analysis, probs
from specdec_jax.checks.fields import check_types
from specdec_jax.measure.table import Cell, Column, Table, say
from specdec_jax.measure.table import console as terminal
from specdec_jax.paper.speculative_execution import settle
from specdec_jax.verify import check_lenience

MAX_SAMPLES = 10**9  # counts are int32
# A correct `verify` fails the check for one seed in a million.
ALPHA = 1e-6
_CHUNK_ENTRIES = 1 << 21  # probabilities that are processed together


@dataclasses.dataclass(frozen=True)
class SimulateConfig:
  """One experiment.

  Attributes:
    target: the target's probabilities; V numbers that sum to 1 within 0.001.
    draft: the drafter's probabilities, over the same tokens.
    num_samples: proposals of the Monte Carlo check.
    lenience: in (0, 1], 1 is lossless.
    seed: seed of the Monte Carlo check.

  Raises:
    ValueError: `target` and `draft` are not two distributions over the same
      tokens, or a number is out of range.
  """

  target: Sequence[float]
  draft: Sequence[float]
  num_samples: int = 1_000_000
  lenience: float = 1.0
  seed: int = 0

  def __post_init__(self):
    check_types(self)
    check_lenience(self.lenience)
    for name in ('target', 'draft'):
      shape = np.shape(getattr(self, name))
      if len(shape) != 1:
        raise ValueError(f'{name} must be V probabilities, got shape {shape}')
    analysis.acceptance_prob(np.asarray(self.target), np.asarray(self.draft))
    if not 1 <= self.num_samples <= MAX_SAMPLES:
      raise ValueError(
        f'num_samples must be in [1, {MAX_SAMPLES}], got {self.num_samples}'
      )
    if not -(1 << 63) <= self.seed < 1 << 63:
      raise ValueError(f'seed must fit in 64 bits, got {self.seed}')


@dataclasses.dataclass(frozen=True)
class Outcomes:
  """Exact probabilities of the outcomes of one proposal, for each token.

  Attributes:
    accepted: float64[V], probability that the token is proposed and kept.
    resampled: float64[V], probability that the token replaces a rejected
      proposal.
  """

  accepted: np.ndarray
  resampled: np.ndarray

  @property
  def total(self) -> np.ndarray:
    """float64[V], the distribution of the emitted token."""
    return self.accepted + self.resampled

  @property
  def acceptance_prob(self) -> float:
    """beta, the probability that the proposal is accepted."""
    return float(self.accepted.sum())


def outcomes(
  target_probs: Sequence[float] | np.ndarray,
  draft_probs: Sequence[float] | np.ndarray,
  lenience: float = 1.0,
) -> Outcomes:
  """The exact law of one proposal; Appendix A.1, and `verify` for lenience.

  Args:
    target_probs: float[V], normalised here.
    draft_probs: float[V], normalised here too.
    lenience: in (0, 1].
  """
  target, draft = _normalised(target_probs), _normalised(draft_probs)
  accepted = np.minimum(draft, target / lenience)
  residual = np.maximum(target - draft, 0)
  mass = residual.sum()
  # Without a residual both distributions are equal, and nothing is rejected.
  rejected = max(1 - accepted.sum(), 0) if mass > 0 else 0.0
  return Outcomes(accepted, residual * (rejected / (mass or 1.0)))


def measure(config: SimulateConfig) -> np.ndarray:
  """Runs `verify`; counts of accepted and resampled tokens, int64[2, V]."""
  size = len(config.target)
  lenience = None
  if config.lenience != 1:
    lenience = jnp.float32(config.lenience)
  counts = _count(
    _normalised(config.target).astype(np.float32),
    _normalised(config.draft).astype(np.float32),
    lenience,
    jax.random.key(config.seed),
    np.int32(config.num_samples),
    chunk=max(1, min(_CHUNK_ENTRIES // size, 1 << 16)),
  )
  return np.asarray(counts, np.int64)[: 2 * size].reshape(2, size)


@functools.partial(jax.jit, static_argnames='chunk')
def _count(target_probs, draft_probs, lenience, key, num_samples, chunk):
  """Counts int32[2 V + 1]: accepted, resampled, padding of the last chunk."""
  size = target_probs.shape[0]

  def cell(index):
    own = jax.random.fold_in(key, index)
    guess = probs.sample(draft_probs, probs.draft_key(own, 0))
    token, accepted = settle(guess, target_probs, draft_probs, own, lenience)
    found = jnp.where(accepted, token, size + token)
    return jnp.where(index < num_samples, found, 2 * size)

  def add(number, counts):
    index = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
    cells = jax.vmap(cell)(index)
    return counts + jnp.bincount(cells, length=2 * size + 1)

  num_chunks = (num_samples + chunk - 1) // chunk
  zeros = jnp.zeros(2 * size + 1, jnp.int32)
  return lax.fori_loop(0, num_chunks, add, zeros)


def simulate(
  config: SimulateConfig, console: rich.console.Console | None = None
) -> dict[str, Any]:
  """Prints the exact law and the Monte Carlo check of it.

  Returns:
    The record: 'exact' and 'measured' with lists 'accepted', 'resampled' and
    'total' of V numbers each; 'z' with the same lists of differences, in
    standard errors; 'acceptance_prob'; 'p_value' of a chi-squared test over all
    2 V outcomes; 'agrees', whether that p-value is at least `ALPHA`.
  """
  console = console or terminal()
  exact = outcomes(config.target, config.draft, config.lenience)
  law = np.stack([exact.accepted, exact.resampled])
  counts = measure(config)
  expected = _by_outcome(law)
  measured = _by_outcome(counts / config.num_samples)
  errors = {
    name: standard_error(values, config.num_samples)
    for name, values in expected.items()
  }
  z_scores = {
    name: z_score(measured[name], expected[name], errors[name])
    for name in expected
  }
  p_value = chi_squared_p_value(counts, law)
  record = {
    'kind': 'simulation',
    **dataclasses.asdict(config),
    'acceptance_prob': exact.acceptance_prob,
    'exact': _lists(expected),
    'measured': _lists(measured),
    'z': _lists(z_scores),
    'p_value': p_value,
    'agrees': p_value >= ALPHA,
  }
  console.print(_exact_table(config, exact))
  console.print(_measured_table(config, measured, errors, z_scores))
  for line in _notes(config, exact, record):
    say(console, line)
  return record


def standard_error(expected: np.ndarray, num_samples: int) -> np.ndarray:
  """Standard error of a frequency in `num_samples` draws of a probability."""
  return np.sqrt(expected * np.maximum(1 - expected, 0) / num_samples)


def z_score(
  measured: np.ndarray, expected: np.ndarray, error: np.ndarray
) -> np.ndarray:
  """The deviation in standard errors; infinite where the error is 0.

  Where error and deviation are both 0, the result is 0.
  """
  deviation = measured - expected
  impossible = np.copysign(np.inf, deviation)
  certain = np.where(np.abs(deviation) < 1e-12, 0.0, impossible)
  return np.where(error > 0, deviation / np.where(error > 0, error, 1), certain)


def _by_outcome(pair: np.ndarray) -> dict[str, np.ndarray]:
  """The rows accepted and resampled by name, and their sum."""
  return {'accepted': pair[0], 'resampled': pair[1], 'total': pair.sum(axis=0)}


def _lists(arrays: dict[str, np.ndarray]) -> dict[str, list[float]]:
  return {name: array.tolist() for name, array in arrays.items()}


def _normalised(values: Sequence[float] | np.ndarray) -> np.ndarray:
  array = np.asarray(values, np.float64)
  return array / array.sum()


def _exact_table(config: SimulateConfig, exact: Outcomes) -> Table:
  shown = {
    'target': _normalised(config.target),
    'draft': _normalised(config.draft),
    'accepted': exact.accepted,
    'resampled': exact.resampled,
    'total': exact.total,
  }
  rows: list[list[Cell]] = [
    [token, *map(float, row)]
    for token, row in enumerate(zip(*shown.values(), strict=True))
  ]
  rows.append(['sum', *(float(values.sum()) for values in shown.values())])
  columns = [Column(name, '.6f', align='right') for name in shown]
  if config.lenience != 1:
    columns.append(Column('at most', '.6f', missing=''))
    most = [float(one) / config.lenience for one in shown['target']]
    rows = [[*row, cell] for row, cell in zip(rows, [*most, None], strict=True)]
  first = Column('token', align='right')
  return Table('One proposal, exactly', [first, *columns], rows)


def _measured_table(config, measured, errors, z_scores) -> Table:
  columns: list[Column | str] = ['token']
  values: list[np.ndarray] = [np.arange(len(config.target))]
  for name in measured:
    columns.append(Column(name, '.6f'))
    values.append(measured[name])
    if name == 'total':
      columns.append(Column('error', '.6f'))
      values.append(errors[name])
    columns.append(Column('z', '+.2f', align='right'))
    values.append(z_scores[name])
  rows = [list(row) for row in zip(*(v.tolist() for v in values), strict=True)]
  title = f'Measured in {config.num_samples:,} proposals; z in standard errors'
  return Table(title, columns, rows)


def _notes(config, exact: Outcomes, record) -> list[str]:
  """Sentences below the tables."""
  beta = exact.acceptance_prob
  error = float(standard_error(np.asarray(beta), config.num_samples))
  share = float(np.sum(record['measured']['accepted']))
  notes = [
    f'Accepted: {beta:.6f} exactly, {share:.6f} ± {error:.6f} measured.',
    'Chi-squared over all outcomes:'
    f' p = {record["p_value"]:.3g}{"" if record["agrees"] else ", WRONG"}.',
  ]
  if config.lenience != 1:
    target = _normalised(config.target)
    moved = np.abs(exact.total - target).sum() / 2
    worst = np.max(exact.total[target > 0] / target[target > 0])
    notes.append(
      f'Lossy: lenience {config.lenience:g} moves {moved:.6f} of the'
      f' probability. Some token comes {worst:.4f} times as often as it should,'
      f' none more than {1 / config.lenience:.4f} times.'
    )
  return notes


def chi_squared_p_value(observed, expected_probs) -> float:
  """p-value of Pearson's chi-squared test of counts against probabilities.

  Cells with expected counts below 5 are pooled, the least likely first, so that
  the statistic has its asymptotic law. If something with probability 0 was
  observed, p is 0.

  Args:
    observed: int[...], counts.
    expected_probs: float[...] of the same shape, summing to 1.

  Raises:
    ValueError: shapes differ, nothing was observed, the sum is not 1.
  """
  observed = np.asarray(observed, np.float64)
  expected = np.asarray(expected_probs, np.float64)
  if observed.shape != expected.shape:
    raise ValueError(
      f'shapes differ: counts {observed.shape}, probs {expected.shape}'
    )
  if not observed.sum() > 0:
    raise ValueError('no observations')
  if not abs(expected.sum() - 1) < 1e-4 or expected.min() < 0:
    raise ValueError(f'expected_probs must sum to 1, got {expected.sum()}')
  observed, expected = observed.ravel(), expected.ravel()
  if observed[expected == 0].any():
    return 0.0
  expected = expected * (observed.sum() / expected.sum())
  order = np.argsort(expected)
  # Pools all cells below 5, and as many of the least likely as reach 5.
  pooled = max(
    int(np.sum(expected < 5)),
    int(np.searchsorted(np.cumsum(expected[order]), 5)) + 1,
  )
  cells = [
    np.append(counts[order[pooled:]], counts[order[:pooled]].sum())
    for counts in (observed, expected)
  ]
  if len(cells[0]) == 1:
    return 1.0
  statistic = np.sum((cells[0] - cells[1]) ** 2 / cells[1])
  return float(special.chdtrc(len(cells[0]) - 1, statistic))
