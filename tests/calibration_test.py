"""Calibration: the choice of gamma, the file, what it holds for; its rule."""

import dataclasses
import json
import types

import numpy as np
import pytest

from specdec_jax import analysis
from specdec_jax.drafters.length import unsure_below
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration, CalibrationError, Choice
from specdec_jax.engine.request import Drafting
from specdec_jax.measure import calibrate
from specdec_jax.measure.acceptance import Output
from specdec_jax.measure.calibrate import CallCosts, choose_gamma
from specdec_jax.models import backend

COSTS = CallCosts([1 + 0.05 * size for size in range(9)], 0.1, 0.02, 2.0, 0.5)


def factor(gamma, alpha, length=30):
  """By hand: both loops read the input, and rounds take what they take."""
  rounds = analysis.expected_rounds(alpha, gamma, length)
  a_round = COSTS.call_cost[gamma] + gamma * 0.1 + 0.02
  return (2.0 + length) / (2.0 + 0.5 + rounds * a_round)


def test_gamma_is_the_best_of_all():
  chosen = choose_gamma(0.8, 0.01, COSTS, 30, 1)
  factors = [1.0, *(factor(gamma, 0.8) for gamma in range(1, 9))]
  assert chosen.factors == pytest.approx(factors)
  assert 0 < chosen.gamma == int(np.argmax(factors)) < 8
  assert chosen.expected_speed_up == max(factors)
  # Its interval is that of alpha, at its 95 % ends.
  low, high = (factor(chosen.gamma, 0.8 + x * 0.0196) for x in (-1, 1))
  assert chosen.interval == pytest.approx((low, high))
  # For long outputs it is the paper's closed form.
  (_, found, *_) = choose_gamma(0.8, 0.01, COSTS, 5000, 1).factors
  want = analysis.walltime_factor(0.8, 1, 0.1, 1.05 + 0.02)
  assert found == pytest.approx(float(want), rel=1e-3)


def test_speculation_that_does_not_pay_is_gamma_0():
  dear = CallCosts([1.0 + 0.9 * size for size in range(5)], 0.5)
  chosen = choose_gamma(0.3, 0.01, dear, 30, 1)
  assert (chosen.gamma, chosen.expected_speed_up) == (0, 1.0)
  assert chosen.interval == (1.0, 1.0)


@pytest.mark.parametrize(
  'gammas, slope, want',
  [
    ((1, 4, 8), 0.1, (0.1, 0.3)),
    ((4,), 0.1, (0.175, 0.0)),  # of one gamma all of it is the proposals'
    ((1, 4, 8), -0.02, (0.0, 0.3 - 0.02 * 13 / 3)),
  ],
)
def test_costs_of_rounds_are_told_from_those_of_proposals(gammas, slope, want):
  def call(size):
    return 2 * (1 + 0.05 * (size - 1))  # of the sizes between, too

  times = {f'call_{size}': call(size) for size in (1, 2, 5, 9)}
  times |= {f'round_{g}': call(g + 1) + 2 * (0.3 + slope * g) for g in gammas}
  found = calibrate.call_costs(times | {'encoder': 4.0, 'draft_encoder': 1.0})
  assert (found.cost_ratio, found.round_cost) == pytest.approx(want)
  assert found.call_cost == pytest.approx([call(m) / 2 for m in range(1, 10)])
  assert (found.start, found.draft_start) == (2.0, 0.5)


def choice(rows, gamma):
  factors = tuple(1 + 0.1 * g for g in range(gamma + 1))
  return Choice(rows, gamma, factors[-1], (factors[-1] - 0.1, 9.0), factors)


def make(**changes):
  fields = {
    'fingerprints': {'target': 'aa', 'draft': 'bb'},
    'device': calibration.device_name(),
    'temperature': 0.0,
    'choices': (choice(1, 5), choice(4, 2), choice(16, 0)),
    'record': {'cost_ratio': 0.1},
  }
  return Calibration(**fields | changes)


def test_a_file_comes_back_as_it_was(tmp_path):
  path = tmp_path / 'calibration.json'
  make().save(str(path))
  assert calibration.load(str(path)) == make()
  # What older versions wrote besides is left out.
  path.write_text(json.dumps(make().to_json() | {'beams': None}))
  assert calibration.load(str(path)) == make()


def test_what_a_calibration_is_not_of():
  models = {'target': 'aa', 'draft': 'bb'}
  make().check(models)
  for made, given, said in (
    (make(), models | {'draft': 'cc'}, "draft was 'bb', is 'cc'"),
    (make(device='abacus'), models, "device was 'abacus', is"),
  ):
    with pytest.raises(CalibrationError, match=said):
      made.check(given)


def test_what_is_no_calibration_is_refused(tmp_path):
  path = tmp_path / 'x.json'
  whole = {'kind': 'calibration', **dataclasses.asdict(make())}
  bare = json.loads(json.dumps(whole))
  del bare['choices'][1]['expected_speed_up']
  for content, said in (
    (None, 'x.json'),
    ('', 'x.json'),
    ('[]', 'x.json'),
    ('{"kind": "benchmark"}', 'benchmark'),
    (json.dumps(bare), 'expected_speed_up'),
    (json.dumps(whole | {'choices': []}), 'no choices'),
  ):
    if content is not None:
      path.write_text(content)
    with pytest.raises(CalibrationError, match=said):
      calibration.load(str(path))


@pytest.mark.parametrize(
  'rows, gamma, gammas',
  [
    (1, 5, {1: 5}),
    (3, 2, {1: 5, 3: 2}),
    (4, 2, {1: 5, 4: 2}),
    (5, 0, {1: 5, 4: 2, 5: 0}),
    (64, 0, {1: 5, 4: 2, 16: 0, 64: 0}),
  ],
)
def test_gamma_by_the_number_of_rows(rows, gamma, gammas):
  assert make().at(rows).gamma == gamma
  engine = types.SimpleNamespace(rule=None, drafting_of=Drafting)
  plan = make().plan(rows, engine)
  assert {size: one.gamma for size, one in plan.items()} == gammas


@pytest.mark.parametrize('first, expected', [(0.0, 1), (2.0, 4), (3.1, 7)])
def test_from_which_length_on_it_pays(first, expected):
  """A call takes 1 ms: at a speed-up of 2 a token wins half of one."""
  times = {'call_1': {'median': 1.0}, 'draft_encoder': {'median': first}}
  of_two = Choice(1, 1, 2.0, (1.9, 2.1), (1.0, 2.0))
  record = {'costs': [{'times_ms': times}]}
  assert make(choices=[of_two], record=record).least_length(1) == expected


# The rule of a draft that adapts: its table, its prices, what it gains.


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


def stops_below(acceptance, most):
  """The plain rule to compare with: stop where less acceptance is expected."""
  rule = unsure_below(0.0, most)
  kept = (np.asarray(TABLE.acceptance) >= acceptance).astype(np.float32)
  bounds = np.asarray(TABLE.bounds, np.float32)
  return dataclasses.replace(rule, confidences=bounds, acceptance=kept)


def test_the_table_says_what_was_accepted():
  assert TABLE.acceptance[0] == pytest.approx(0.35, abs=0.05)
  assert TABLE.acceptance[-1] == pytest.approx(0.95, abs=0.03)
  assert len(TABLE.acceptance) == len(TABLE.bounds) + 1 > 5
  assert TABLE.overall == pytest.approx(0.65, abs=0.03)


def test_a_fixed_gamma_of_even_acceptance_is_the_papers_equation():
  """Over long outputs of one beta: Eq. 1 and Theorem 3.8 with v."""
  rate, cost = 0.7, 0.1
  even = [Output(np.full(4000, rate), np.full(4000, 0.5), 0)]
  for gamma in (1, 5):
    calls = np.full(gamma + 1, V[gamma])  # as on a TPU: all are as wide
    found = calibrate.expected_speed_up(
      unsure_below(0.0, gamma), even, cost, calls
    )
    want = analysis.walltime_factor(rate, gamma, cost, V[gamma])
    assert found == pytest.approx(float(want), rel=1e-3)


@pytest.mark.parametrize('device, call_cost', [('tpu', [1.0] * 16), ('cpu', V)])
def test_adapting_gains_over_the_best_fixed_gamma(device, call_cost):
  """And over the plain rule of 40 %, on texts that are sure and unsure."""
  costs = CallCosts(call_cost, 0.15)

  def gain(rule, device):
    with backend.compiled_for(device):
      calls = calibrate.costs_of_calls(call_cost, rule.most)
    return calibrate.expected_speed_up(rule, OUTPUTS, 0.15, calls)

  with backend.compiled_for(device):
    prices = calibrate.best_prices(TABLE, OUTPUTS, costs)
  own = gain(calibration.rule_of(TABLE, prices), device)
  assert own == pytest.approx(prices.expected_speed_up, rel=1e-3)
  best = max(gain(unsure_below(0.0, gamma), 'tpu') for gamma in range(1, 9))
  assert own > 1.05 * best
  assert own >= gain(stops_below(0.4, len(prices.worth)), device)


def test_a_calibration_keeps_the_rule_and_needs_its_table(tmp_path):
  prices = calibrate.best_prices(TABLE, OUTPUTS, CallCosts(V, 0.15))
  adapts = dataclasses.replace(choice(1, 4), prices=prices)
  made = make(choices=(adapts,), confidence=TABLE)
  path = str(tmp_path / 'calibration.json')
  made.save(path)
  assert calibration.load(path) == made
  rule = calibration.load(path).rule(1)
  assert rule.most == len(prices.worth) == len(rule.worth_asking)
  assert len(rule.acceptance) == len(rule.confidences) + 1
  assert rule.to_json()['worth'] == pytest.approx(list(prices.worth))
  for without in (make(confidence=TABLE), make(choices=(adapts,))):
    with pytest.raises(CalibrationError, match='table of confidence'):
      without.rule(1)
