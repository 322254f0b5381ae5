"""Calibration: the choice of gamma, the file, what it holds for; its rule."""

import dataclasses
import json
import re

import numpy as np
import pytest

from specdec_jax import analysis
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import CalibrationError, Choice
from specdec_jax.measure import calibrate
from specdec_jax.measure.calibrate import CallCosts, choose_gamma
from specdec_jax.models import backend
from specdec_jax.request import Drafting
from toy_calibration import choice, make

COSTS = CallCosts([1 + 0.05 * size for size in range(9)], 0.1, 0.02, 2.0, 0.5)


def factor(gamma, alpha, length=30):
  """By hand: both loops read the input, and rounds take what they take."""
  rounds = analysis.expected_rounds([alpha] * length, gamma)
  a_round = COSTS.call_cost[gamma] + gamma * 0.1 + 0.02
  return (2.0 + length) / (2.0 + 0.5 + rounds * a_round)


def rate(alpha, length, error=0.0):
  """A record of proposals that are accepted independently."""
  rounds = [analysis.expected_rounds([alpha] * length, x) for x in range(9)]
  made = {'num_tokens': 7 * length, 'num_outputs': 7}
  rounds = [number / length for number in rounds]
  return made | {'rounds': rounds, 'rounds_errors': [error] * 9}


def test_gamma_is_the_best_of_all():
  record = rate(0.8, 30, 0.01)
  chosen = choose_gamma(record, COSTS, 1)
  factors = [1.0, *(factor(gamma, 0.8) for gamma in range(1, 9))]
  assert chosen.factors == pytest.approx(factors)
  assert 0 < chosen.gamma == int(np.argmax(factors)) < 8
  assert chosen.expected_speed_up == max(factors)
  # Its interval is that of the rounds, at its 95 % ends.
  a_round = COSTS.call_cost[chosen.gamma] + chosen.gamma * 0.1 + 0.02
  rounds = record['rounds'][chosen.gamma]
  ends = (32 / (2.5 + 30 * a_round * (rounds + x)) for x in (0.0196, -0.0196))
  assert chosen.interval == pytest.approx([*ends])
  # For long outputs it is the paper's closed form.
  (_, found, *_) = choose_gamma(rate(0.8, 1000), COSTS, 1).factors
  want = analysis.walltime_factor(0.8, 1, 0.1, 1.05 + 0.02)
  assert found == pytest.approx(float(want), rel=3e-3)
  # Where none pays it is 0.
  dear = CallCosts([1.0 + 0.9 * size for size in range(5)], 0.5)
  chosen = choose_gamma(rate(0.3, 30), dear, 1)
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


NOISY = [1.0, 0.9, 0.89, 0.93, 1.02, 1.33]  # of an idle machine
FALLING = [1.0, 1.2, 1.4, 0.51]


@pytest.mark.parametrize(
  'calls, rounds, words',
  [
    (NOISY, {1: 1.0, 4: 1.3}, ''),
    (FALLING, {}, 'a call over 4 tokens took 0.36 .* over 3'),
    ([2.0, 1.1, 1.2, 1.3], {}, 'a call over 2 tokens took 0.55 .* over 1'),
    (NOISY, {1: 2.0, 4: 1.3}, 'a round over 4 proposals took 0.65'),
    (NOISY, {1: 0.5, 4: 1.3}, 'a round with 1 proposals took 0.56 .* call in'),
  ],
)
def test_more_is_never_cheaper(calls, rounds, words):
  times = {f'call_{size}': ms for size, ms in enumerate(calls, 1)}
  times |= {f'round_{gamma}': ms for gamma, ms in rounds.items()}
  wrong = calibration.contradiction(times | {'encoder': 9.0})
  assert re.search(words, wrong) and bool(wrong) == bool(words)
  if not wrong:  # what noise is left does not reach a prediction
    costs = calibrate.call_costs(times | {'encoder': 1.0, 'draft_encoder': 0.0})
    assert costs.call_cost == pytest.approx((1.0,) * 4 + (1.02, 1.33))


def test_a_file_comes_back_as_it_was(tmp_path):
  path = tmp_path / 'calibration.json'
  make().save(str(path))
  assert calibration.load(str(path)) == make()
  # What older versions wrote besides is left out.
  older = make().to_json() | {'beams': None, 'confidence': {'bounds': [0.5]}}
  older['choices'] = [one | {'prices': None} for one in older['choices']]
  path.write_text(json.dumps(older))
  assert calibration.load(str(path)) == make()


def test_what_is_no_calibration_is_refused(tmp_path):
  path = tmp_path / 'x.json'
  whole = json.loads(json.dumps(make().to_json()))
  times = {'call_1': {'median': 2.0}, 'call_2': {'median': 1.0}}

  def with_choice(**changes):
    return whole | {'choices': [whole['choices'][0] | changes]}

  bare = [one | {} for one in whole['choices']]
  del bare[1]['expected_speed_up']
  for content, said in (
    (None, 'x.json'),
    ([], 'x.json'),
    ({'kind': 'benchmark'}, 'benchmark'),
    (whole | {'choices': bare}, 'expected_speed_up'),
    (whole | {'choices': []}, 'no choices'),
    (with_choice(rows=0), 'rows'),
    (with_choice(gamma=10**9), 'gamma'),
    (with_choice(expected_speed_up=float('nan')), 'expected_speed_up'),
    (with_choice(cost_ratio=-1.0), 'cost_ratio'),
    (with_choice(call_cost=FALLING), 'a call over 4 tokens took 0.36'),
    (whole | {'record': {'costs': [{'times_ms': times}]}}, 'call over 2'),
  ):
    if content is not None:
      path.write_text(json.dumps(content))
    with pytest.raises(CalibrationError, match=said):
      calibration.load(str(path))


def test_gamma_by_the_number_of_rows():
  few = {1: {1: 5}, 3: {1: 5, 3: 2}, 4: {1: 5, 4: 2}}
  for rows, gammas in (few | {64: {1: 5, 4: 2, 16: 0, 64: 0}}).items():
    plan = make().plan(rows, Drafting(5))
    assert {size: one.gamma for size, one in plan.items()} == gammas
    assert make().at(rows).gamma == gammas[rows]


@pytest.mark.parametrize('first, expected', [(0.0, 1), (2.0, 4), (3.1, 7)])
def test_from_which_length_on_it_pays(first, expected):
  """A call takes 1 ms: at a speed-up of 2 a token wins half of one."""
  times = {'call_1': {'median': 1.0}, 'draft_encoder': {'median': first}}
  of_two = Choice(1, 1, 2.0, (1.9, 2.1), (1.0, 2.0))
  record = {'costs': [{'times_ms': times}]}
  assert make(choices=[of_two], record=record).least_length(1) == expected


# The rule of a draft that adapts.


def test_a_proposal_must_be_worth_its_costs():
  """By hand, with the one width of a TPU and with a CPU's few."""
  costs = (1.0, 1.1, 1.3, 1.4, 1.6)
  changes = {'expected_speed_up': 2.0, 'cost_ratio': 0.05, 'call_cost': costs}
  four = dataclasses.replace(choice(1, 4), **changes)
  made = make(choices=(four,))
  for device, more in (('tpu', [0.0] * 4), ('cpu', [0.1, *[0.5 / 3] * 3])):
    with backend.compiled_for(device):
      rule = made.rule(1)
    assert rule.most == 4
    np.testing.assert_allclose(rule.worth, 2 * np.array(more), rtol=1e-6)
    want = 2 * (np.array(more) + 0.05)
    np.testing.assert_allclose(rule.worth_asking, want, rtol=1e-6)
  # Where no gamma pays, and only a draft's first proposal may.
  never = dataclasses.replace(four, gamma=0, expected_speed_up=1.0)
  assert make(choices=(never,)).rule(1).most == 1
  with pytest.raises(CalibrationError, match='over 1 to 6 tokens'):
    make().rule(1)
