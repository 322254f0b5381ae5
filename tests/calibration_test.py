"""Calibration: the choice of gamma, the file, what it holds for."""

import dataclasses
import json
import types

import numpy as np
import pytest

from specdec_jax import analysis
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import (
  BeamChoice,
  Calibration,
  Choice,
)
from specdec_jax.engine.request import Drafting
from specdec_jax.measure import calibrate
from specdec_jax.measure.calibrate import Measured, choose_gamma


def exact(value):
  return Measured(value, 0.0)


def test_gamma_is_the_best_of_all():
  call_cost = [exact(1 + 0.05 * size) for size in range(9)]
  found = choose_gamma(exact(0.8), exact(0.1), call_cost)
  factors = [
    float(analysis.measured_walltime_factor(0.8, g, 0.1, 1 + 0.05 * g))
    for g in range(9)
  ]
  assert found.factors == pytest.approx(factors)
  assert found.gamma == int(np.argmax(factors)) == 5
  assert found.expected_speed_up == pytest.approx(max(factors))
  assert found.interval == pytest.approx((max(factors),) * 2)
  # Speculation that does not pay is gamma 0.
  call_cost = [exact(1.0 + 0.9 * size) for size in range(5)]
  found = choose_gamma(exact(0.3), exact(0.5), call_cost)
  assert (found.gamma, found.expected_speed_up) == (0, 1.0)


def test_the_interval_holds_what_errors_do():
  """Only alpha is uncertain: the ends are the factors at its 95 % ends."""
  call_cost = [exact(1.0)] * 5
  found = choose_gamma(Measured(0.7, 0.02), exact(0.05), call_cost)
  gamma = found.gamma
  ends = [
    float(analysis.walltime_factor(0.7 + sign * 1.96 * 0.02, gamma, 0.05))
    for sign in (-1, 1)
  ]
  assert found.interval == pytest.approx(ends, rel=0.01)
  wider = choose_gamma(Measured(0.7, 0.06), exact(0.05), call_cost)
  assert wider.interval[0] < ends[0] - 0.05


def rounds(call, **times):
  """A record's times: `call` of any size, and what rounds take."""
  sizes = {f'call_{size}': 2 * call(size) for size in range(1, 10)}
  times = sizes | {name: 2 * value for name, value in times.items()}
  return {n: {'median': v, 'error': 0.02} for n, v in times.items()}


@pytest.mark.parametrize(
  'besides, slope, want',
  [
    ((1, 4, 8), 0.1, (0.1, 0.3)),
    ((4,), 0.1, (0.175, 0.0)),  # of one gamma all of it is the proposals'
    ((1, 4, 8), -0.02, (0.0, 0.3 - 0.02 * 13 / 3)),
  ],
)
def test_costs_of_rounds_are_told_from_those_of_proposals(besides, slope, want):
  def call(size):
    return 1 + 0.05 * (size - 1)

  times = rounds(
    call, **{f'round_{g}': call(g + 1) + 0.3 + slope * g for g in besides}
  )
  found, rest = calibrate._round_costs(times)
  assert (found.value, rest) == pytest.approx(want)
  assert found.error > 0


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
  path = str(tmp_path / 'calibration.json')
  for made in (make(), make(beams=BeamChoice(4, 2, 8, 1.25))):
    made.save(path)
    assert calibration.load(path) == made


def test_what_a_calibration_is_not_of():
  models = {'target': 'aa', 'draft': 'bb'}
  make().check(models)
  for made, given, said in (
    (make(), models | {'draft': 'cc'}, "draft was 'bb', is 'cc'"),
    (make(device='abacus'), models, "device was 'abacus', is"),
  ):
    with pytest.raises(calibration.CalibrationError, match=said):
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
    with pytest.raises(calibration.CalibrationError, match=said):
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
