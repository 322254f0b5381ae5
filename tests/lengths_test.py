"""The rule of a draft that adapts: its table, its prices, what it gains."""

import dataclasses

import numpy as np
import pytest

from specdec_jax import analysis
from specdec_jax.drafters.length import unsure_below
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration, CalibrationError
from specdec_jax.measure import acceptance, calibrate
from specdec_jax.measure.acceptance import Output
from specdec_jax.models import backend
from specdec_jax.types import LengthRule


def outputs_of(rng, number=40, size=120):
  """Texts of places that are sure (.95) or not (.35), in runs."""
  made = []
  for text in range(number):
    sure = np.repeat(rng.random(size // 4) < 0.5, 4)
    confidence = np.where(sure, 0.9, 0.3) + rng.uniform(-0.09, 0.09, size)
    betas = (rng.random(size) < np.where(sure, 0.95, 0.35)).astype(float)
    made.append(Output(betas, confidence, text))
  return made


OUTPUTS = outputs_of(np.random.default_rng(0))
TABLE = calibrate.confidence_table(OUTPUTS)
V = tuple(1 + 0.12 * size for size in range(16))


def on(device, function, *args):
  """What a function gives on a device: a TPU's calls are all as wide."""
  with backend.compiled_for(device):
    return function(*args)


def stops_below(acceptance, most):
  """The plain rule to compare with: stop where less acceptance is expected."""
  rule = unsure_below(0.0, most)
  kept = (np.asarray(TABLE.acceptance) >= acceptance).astype(np.float32)
  bounds = np.asarray(TABLE.bounds, np.float32)
  return dataclasses.replace(rule, confidences=bounds, acceptance=kept)


def test_the_table_says_what_was_accepted():
  assert TABLE.acceptance[0] == pytest.approx(0.35, abs=0.05)
  assert TABLE.acceptance[-1] == pytest.approx(0.95, abs=0.03)
  assert sum(TABLE.tokens) == 40 * 120
  assert min(TABLE.tokens) > 400
  assert max(error for error in TABLE.errors if error is not None) < 0.04
  assert TABLE.overall == pytest.approx(0.65, abs=0.03)


def fixed(gamma) -> LengthRule:
  return unsure_below(0.0, gamma)


@pytest.mark.parametrize('gamma', [1, 3, 5])
def test_a_fixed_gamma_of_even_acceptance_is_the_papers_equation(gamma):
  """Over long outputs of one beta: Eq. 1 and Theorem 3.8 with v."""
  rate, cost = 0.7, 0.1
  even = [Output(np.full(4000, rate), np.full(4000, 0.5), 0)]
  calls = on('tpu', calibrate.costs_of_calls, V, gamma)
  found = calibrate.expected(fixed(gamma), even, calibrate.Costs(cost, calls))
  want = analysis.measured_walltime_factor(rate, gamma, cost, V[gamma])
  assert found.tokens / found.time == pytest.approx(float(want), rel=1e-3)
  assert found.accepted / found.tested == pytest.approx(rate, rel=1e-3)


def test_the_rounds_of_an_output_make_its_tokens():
  """Whatever is proposed: each place is produced once."""
  costs = calibrate.Costs(0.1, on('cpu', calibrate.costs_of_calls, V, 3))
  for rule in (fixed(3), unsure_below(0.5, 3)):
    found = calibrate.expected(rule, OUTPUTS, costs)
    # A last round may accept the text's end and draw one token beyond.
    assert found.tokens == pytest.approx(40 * 120, rel=0.01)


def test_a_step_does_not_end_a_draft():
  """4 tokens cost what 3 do: the price of each is half of the step."""
  hull = calibrate._convex(np.array([1.0, 1.2, 1.8, 1.8, 3.0]))
  np.testing.assert_allclose(hull, [1.0, 1.2, 1.5, 1.8, 3.0])
  noisy = calibrate._convex(np.array([1.0, 0.9, 1.1]))
  assert noisy[0] == 1.0 and np.all(np.diff(noisy) >= 0)


# Of the demo's target on one core, and where each token adds the same.
ONE_CORE = [1.0, 0.87, 0.93, 0.98, 1.08, 1.14, 1.25, 1.28]
ONE_CORE += [1.45, 1.45, 1.58, 1.64, 1.80, 1.83, 1.84, 1.80]


@pytest.mark.parametrize(
  'device, call_cost', [('tpu', [1.0] * 16), ('cpu', ONE_CORE), ('cpu', V)]
)
def test_adapting_gains_over_the_best_fixed_gamma(device, call_cost):
  """And over the plain rule of 40 %, on texts that are sure and unsure."""
  cost = 0.15
  prices = on(device, calibrate.best_prices, TABLE, OUTPUTS, cost, call_cost)

  def rate(rule, device):
    calls = on(device, calibrate.costs_of_calls, call_cost, rule.most)
    found = calibrate.expected(rule, OUTPUTS, calibrate.Costs(cost, calls))
    return found.tokens / found.time

  own = rate(calibration.rule_of(TABLE, prices), device)
  assert own == pytest.approx(prices.expected_speed_up, rel=1e-3)
  best = max(rate(fixed(gamma), 'tpu') for gamma in range(1, 9))
  assert own > 1.05 * best
  most = len(prices.worth)
  assert own >= rate(stops_below(0.4, most), device)


def test_a_confidence_that_says_nothing_costs_nothing():
  """The rule is then that of the best fixed gamma."""
  rng = np.random.default_rng(1)
  blind = [
    Output(one.betas, rng.uniform(size=len(one.betas)), one.text)
    for one in OUTPUTS
  ]
  table = calibrate.confidence_table(blind)
  cost, round_cost = 0.05, 0.6
  prices = on('cpu', calibrate.best_prices, table, blind, cost, V, round_cost)

  def rate(gamma):
    calls = on('tpu', calibrate.costs_of_calls, V, gamma) + round_cost
    found = calibrate.expected(
      fixed(gamma), blind, calibrate.Costs(cost, calls)
    )
    return found.tokens / found.time

  best = max(rate(gamma) for gamma in range(1, 9))
  assert best <= prices.expected_speed_up < 1.1 * best


def calibrated(prices, confidence) -> Calibration:
  choice = calibration.Choice(1, 4, 1.5, (1.4, 1.6), (1.0, 1.5), prices)
  return Calibration(
    {'target': 'a'}, 'cpu', 0.0, (choice,), {}, confidence=confidence
  )


def test_a_calibration_keeps_the_rule(tmp_path):
  prices = calibrate.best_prices(TABLE, OUTPUTS, 0.15, V)
  made = calibrated(prices, TABLE)
  path = str(tmp_path / 'calibration.json')
  made.save(path)
  assert calibration.load(path) == made
  rule = calibration.load(path).rule(1)
  assert rule.most == len(prices.worth) == len(rule.worth_asking)
  assert len(rule.acceptance) == len(rule.confidences) + 1
  assert rule.to_json()['worth'] == pytest.approx(list(prices.worth))


def test_a_calibration_without_a_table_is_refused():
  prices = calibrate.best_prices(TABLE, OUTPUTS, 0.15, V)
  for one in (calibrated(None, TABLE), calibrated(prices, None)):
    with pytest.raises(CalibrationError, match='table of confidence'):
      one.rule(1)
  with pytest.raises(CalibrationError, match='table of confidence'):
    dataclasses.replace(calibrated(prices, TABLE), confidence=None).rule(1)


def test_the_spread_is_that_of_texts_and_not_of_chance():
  """200 texts whose rates differ by .1 from their mean, or not at all."""
  rng = np.random.default_rng(1)
  for spread in (0.1, 0.0):
    rates = 0.6 + spread * rng.choice([-1.0, 1.0], 200)
    betas = (rng.random((200, 50)) < rates[:, None]).astype(float)
    outputs = [Output(row, row, i) for i, row in enumerate(betas)]
    found = acceptance._spread(outputs)
    assert found == pytest.approx(spread, abs=0.03)
  nothing = np.zeros(0)
  assert acceptance._spread([Output(nothing, nothing, 'a')] * 3) == 0.0
