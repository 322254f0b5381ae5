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


def test_a_fixed_gamma_of_even_acceptance_is_the_papers_equation():
  """Over long outputs of one beta: Eq. 1 and Theorem 3.8 with v."""
  rate, cost = 0.7, 0.1
  even = [Output(np.full(4000, rate), np.full(4000, 0.5), 0)]
  for gamma in (1, 5):
    calls = on('tpu', calibrate.costs_of_calls, V, gamma)
    costs = calibrate.Costs(cost, calls)
    found = calibrate.expected(fixed(gamma), even, costs)
    want = analysis.walltime_factor(rate, gamma, cost, V[gamma])
    assert found.tokens / found.time == pytest.approx(float(want), rel=1e-3)
    assert found.accepted / found.tested == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize('device, call_cost', [('tpu', [1.0] * 16), ('cpu', V)])
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


def calibrated(prices, confidence) -> Calibration:
  choice = calibration.Choice(1, 4, 1.5, (1.4, 1.6), (1.0, 1.5), prices)
  return Calibration(
    {'target': 'a'}, 'cpu', 0.0, (choice,), {}, confidence=confidence
  )


def test_a_calibration_keeps_the_rule_and_needs_its_table(tmp_path):
  prices = calibrate.best_prices(TABLE, OUTPUTS, 0.15, V)
  made = calibrated(prices, TABLE)
  path = str(tmp_path / 'calibration.json')
  made.save(path)
  assert calibration.load(path) == made
  rule = calibration.load(path).rule(1)
  assert rule.most == len(prices.worth) == len(rule.worth_asking)
  assert len(rule.acceptance) == len(rule.confidences) + 1
  assert rule.to_json()['worth'] == pytest.approx(list(prices.worth))
  for without in (calibrated(None, TABLE), calibrated(prices, None)):
    with pytest.raises(CalibrationError, match='table of confidence'):
      without.rule(1)


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
