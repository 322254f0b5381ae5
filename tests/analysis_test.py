"""The closed forms against sums, brute force and the paper's numbers.

Where a test says that a formula fits, it also says that a wrong one does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import analysis
from specdec_jax.paper import printed as paper

pytestmark = pytest.mark.usefixtures('strict')

RATES = np.linspace(0, 1, 21, dtype=np.float32)
COSTS = np.array([0, 0.01, 0.05, 0.1, 0.3, 0.8, 1, 2], np.float32)
TARGET = np.array([0.5, 0.3, 0.15, 0.05, 0], np.float32)
DRAFT = np.array([0.2, 0.2, 0.3, 0.1, 0.2], np.float32)


def test_expected_tokens_is_the_mean_of_a_capped_geometric():
  gammas = [0, 1, 2, 3, 7, 16, 100]
  found = analysis.expected_tokens(RATES, np.array(gammas)[:, None])
  rates = RATES.astype(np.float64)
  for gamma, row in zip(gammas, found, strict=True):
    # n of gamma proposals are accepted, and one token follows.
    mean = sum((n + 1) * rates**n * (1 - rates) for n in range(gamma))
    mean += (gamma + 1) * rates**gamma
    np.testing.assert_allclose(row, mean, rtol=1e-6)
    assert row[0] == 1 and row[-1] == gamma + 1


def test_expected_tokens_keeps_its_digits_near_1():
  rate, gamma = np.float32(1 - 1e-5), 16
  right = np.sum(np.float64(rate) ** np.arange(gamma + 1))
  found = analysis.expected_tokens(rate, gamma)
  assert abs(found - right) < 1e-6 * right
  # The quotient of Eq. 1 itself cancels there.
  quotient = (1 - jnp.float32(rate) ** (gamma + 1)) / (1 - rate)
  assert abs(quotient - right) > 5e-5 * right


def brute_force(rate, cost, max_gamma):
  """Walltime factors of gamma = 0 ... max_gamma in float64."""
  gammas = np.arange(max_gamma + 1)
  tokens = np.cumsum(np.float64(rate) ** gammas)
  return tokens / (1 + gammas * np.float64(cost))


def test_factors_by_hand():
  for rate in RATES:
    for cost in COSTS:
      found = analysis.walltime_factor(rate, np.arange(9), cost)
      np.testing.assert_allclose(found, brute_force(rate, cost, 8), rtol=1e-6)
  # 4 proposals of half a call each and 5 positions, for 1.9375 tokens.
  found = analysis.operations_factor(0.5, 4, 0.5)
  np.testing.assert_allclose(found, (4 * 0.5 + 5) / 1.9375, rtol=1e-6)


def test_optimal_gamma_by_brute_force():
  rates, costs = RATES[:, None], COSTS[None]
  found = analysis.optimal_gamma(rates, costs, 30)
  assert found.dtype == jnp.int32
  for i, rate in enumerate(RATES):
    for j, cost in enumerate(COSTS):
      factors = brute_force(rate, cost, 30)
      # Neighbours can be equal to float32; the factor then is as good.
      assert factors[found[i, j]] >= factors.max() * (1 - 1e-6)
      assert (found[i, j] > 0) == (rate > cost)
  assert len(np.unique(found)) > 10


def test_oracle_is_above_every_fixed_gamma():
  rates, costs = RATES[:, None, None], COSTS[None, :, None]
  factors = analysis.walltime_factor(rates, np.arange(60), costs)
  bound = analysis.oracle_factor(rates, costs)
  assert (factors <= bound * (1 + 1e-6)).all()
  # Nor is it far too high: the drafts of all accepted tokens are paid.
  inner = (RATES[:, None] < 0.5) & (COSTS[None] < 0.1)
  assert (factors.max(-1) / bound[..., 0])[inner].min() > 0.8
  assert analysis.oracle_factor(1.0, 0.0) == np.inf
  assert analysis.oracle_factor(0.6, 3.0) == 1


@pytest.mark.parametrize(
  'name, arguments, message',
  [
    ('expected_tokens', (np.float32([0.5, 1.25]), 3), r'in \[0, 1\], got 1.25'),
    ('expected_tokens', (True, 3), 'acceptance_rate.* got True'),
    ('expected_tokens', (0.5, -1), 'gamma.* got -1'),
    ('expected_tokens', (0.5, 2.0), 'gamma.* got 2.0'),
    ('walltime_factor', (0.5, 3, -0.25), 'cost_ratio.* got -0.25'),
    ('operations_factor', (0.5, 3, -1.0), 'operations_ratio.* got -1.0'),
    ('walltime_factor', (0.5, 3, 0.1, 0.0), 'call_cost.* > 0, got 0'),
    ('optimal_gamma', (0.5, 0.1, -1), 'max_gamma.* got -1'),
    ('acceptance_prob', (TARGET, DRAFT, 1.5), 'lenience.* got 1.5'),
    ('acceptance_prob', (TARGET, DRAFT[:4]), r'\(5,\), \(4,\)'),
    ('acceptance_prob', (TARGET, 2 * DRAFT), 'draft_probs.* got 2'),
  ],
)
def test_errors(name, arguments, message):
  with pytest.raises(ValueError, match=message):
    getattr(analysis, name)(*arguments)


def test_errors_are_found_under_jit():
  with pytest.raises(ValueError, match='one vocabulary'):
    jax.jit(analysis.acceptance_prob)(TARGET, DRAFT[:4])
  with pytest.raises(ValueError, match='gamma: expected .* whole'):
    jax.jit(analysis.expected_tokens)(0.5, 2.0)


def test_rounds_of_an_output_that_ends():
  """Beside outputs that are drawn; the closed form for endless ones is less."""
  alpha, length, gamma, outputs = 0.8, 16, 4, 20000
  accepted = np.random.default_rng(0).random((outputs, length, gamma)) < alpha
  kept = np.cumprod(accepted, axis=-1).sum(-1) + 1
  rounds = (np.cumsum(kept, axis=1) < length).sum(1) + 1
  error = rounds.std() / np.sqrt(outputs)
  found = analysis.expected_rounds([alpha] * length, gamma)
  assert abs(rounds.mean() - found) <= 4 * error
  endless = length / float(analysis.expected_tokens(alpha, gamma))
  assert abs(rounds.mean() - endless) > 4 * error  # the control
  assert analysis.expected_rounds([alpha] * length, 0) == length


def test_rounds_of_proposals_that_are_judged_by_their_place():
  """Counted by hand: a round ends behind the first proposal that fails."""
  betas = [1, 1, 0, 1, 1, 1, 1, 0, 0, 1]
  for gamma, rounds in enumerate((10, 7, 5, 5, 4)):
    assert analysis.expected_rounds(betas, gamma) == rounds
  # Accepted proposals that stand together are worth less than as many others.
  alone = analysis.expected_rounds([np.mean(betas)] * 10, 4)
  assert analysis.expected_rounds([1] * 6 + [0] * 4, 4) > alone


# --- The numbers that the paper prints ---------------------------------------


def columns(table):
  """Each field of a table of the paper as one array."""
  return map(np.array, zip(*table, strict=True))


def rounds_to(values, printed, decimals):
  """Which of the values are printed so, with float32's rounding allowed."""
  return np.abs(values - printed) <= 0.5 * 10.0**-decimals + 1e-6


def test_table1_to_its_two_decimals():
  rate, gamma, operations, speed = columns(paper.TABLE1)
  for factor, printed in (
    (analysis.walltime_factor, speed),
    (analysis.operations_factor, operations),
  ):
    assert rounds_to(factor(rate, gamma, 0.0), printed, 2).all()
    # A step of gamma tokens, or one that counts the drafter, fits nowhere.
    for wrong in factor(rate, gamma - 1, 0.0), factor(rate, gamma, 0.02):
      assert not rounds_to(wrong, printed, 2).any()


def within_rounding(factor):
  """Rows of Table 4 whose EXP some alpha and c, rounded as printed, give."""
  *_, gamma, rate, cost, expected, _ = columns(paper.TABLE2)
  # Factors grow with alpha and shrink with c: the corners are the extremes.
  low = factor(rate - 0.005, gamma, cost + 0.005)
  high = factor(rate + 0.005, gamma, cost - 0.005)
  return (low <= expected + 0.05) & (high >= expected - 0.05)


def test_table4_expected_is_within_rounding():
  assert within_rounding(analysis.walltime_factor).all()

  def no_last_token(rate, gamma, cost):
    return analysis.walltime_factor(rate, gamma - 1, cost)

  # Two digits of alpha and c leave room, but not for this.
  assert (~within_rounding(no_last_token)).sum() >= 3


def test_oracle_gains_up_to_60_percent():
  """Section 3.5: "up to ~60%" over a fixed gamma for typical alpha and c."""
  rate = np.linspace(0.5, 0.95, 46, dtype=np.float32)[None]
  cost = np.array([0.01, 0.02, 0.05, 0.1], np.float32)[:, None]
  gamma = analysis.optimal_gamma(rate, cost, 200)
  best = analysis.walltime_factor(rate, gamma, cost)
  gain = analysis.oracle_factor(rate, cost) / best
  assert 1.5 < gain.max() < 1.65
  # An oracle whose drafts cost nothing is far beyond.
  assert (1 / (1 - rate) / best).max() > 2


def test_factors_printed_in_the_text():
  for rate, gamma, cost, printed, decimals in (
    (0.20, 3, 0, 1.25, 2),  # Section 4.2, bigrams
    (0.75, 8, 0.015, 3.3, 1),  # A.5, lenience at temperature 0
    (0.80, 8, 0.015, 3.9, 1),
    (0.87, 8, 0.015, 4.9, 1),
  ):
    factor = analysis.walltime_factor(rate, gamma, cost)
    assert rounds_to(factor, printed, decimals)
