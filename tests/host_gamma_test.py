"""The gamma that pays on a host, from a pair's known acceptance."""

import json
import pathlib

import pytest

import small_vocabulary
from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.files import host_cache
from specdec_jax.measure import calibrate

COSTS = {'encoder': 2.0, 'draft_encoder': 0.1, 'round_7': 2.7, 'call_1': 1.0}
CHEAP = COSTS | {'call_2': 1.0, 'call_4': 1.1, 'call_5': 1.2, 'call_8': 2.0}
DEAR = COSTS | {'call_2': 2.0, 'call_4': 4.0, 'call_5': 5.0, 'call_8': 8.0}


@pytest.fixture(scope='module')
def engine(tokenizer):
  return small_vocabulary.engine_with_itself(tokenizer)


@pytest.fixture
def acceptance(engine, tmp_path, monkeypatch):
  monkeypatch.setattr(host_cache, 'user_cache', lambda: tmp_path / 'cache')
  row = {'standard_error': 0.02, 'num_tokens': 1600, 'num_outputs': 100}
  row |= {'fingerprints': dict(engine.fingerprints), 'lenience': 1.0}
  rows = [
    row | {'temperature': 0.0, 'alpha': 0.8},
    row | {'temperature': 1.0, 'alpha': 0.01},
  ]
  path = tmp_path / 'acceptance.json'
  path.write_text(json.dumps({'kind': 'alpha', 'version': 1, 'rows': rows}))
  return str(path)


def test_costs_and_acceptance_decide(engine, acceptance, monkeypatch):
  runs = []

  def timed(costs):
    monkeypatch.setattr(
      calibrate, 'host_times', lambda *_: runs.append(1) or costs
    )

  timed(CHEAP)
  measured = calibrate.for_host(engine, acceptance, 1, 0.0)
  choice = measured.at(1)
  assert 3 <= choice.gamma <= 5 and 1.5 < choice.expected_speed_up < 2.5
  low, high = choice.interval
  assert low < choice.expected_speed_up < high
  measured.check(engine.fingerprints)
  assert '1.20' in calibrate.host_verdict(measured)
  timed(DEAR)  # what an earlier start measured counts
  assert calibrate.for_host(engine, acceptance, 1, 0.0).at(1) == choice
  assert len(runs) == 1
  # Other rows are another measurement, and here nothing pays.
  assert calibrate.for_host(engine, acceptance, 2, 0.0).at(2).gamma == 0
  timed(CHEAP)  # nor with proposals that are hardly accepted
  assert calibrate.for_host(engine, acceptance, 1, 1.0).at(1).gamma == 0
  assert len(runs) == 3
  # A layout of kernels is another measurement.
  for layout in ('in_out', 'out_in', 'out_in'):
    monkeypatch.setattr(engine, 'kernel_layout', layout)
    calibrate.for_host(engine, acceptance, 1, 0.0)
  assert len(runs) == 4


def test_calls_are_timed(engine, acceptance):
  times = calibrate.host_times(engine, 1, 0.0)
  assert set(times) == set(CHEAP)
  assert all(time >= 0 for time in times.values()) and times['call_1'] > 0


def test_the_acceptance_of_another_pair_says_nothing(engine, acceptance):
  path = pathlib.Path(acceptance)
  text = path.read_text()
  for change in ({'fingerprints': {'target': 'another'}}, {'lenience': 0.5}):
    record = json.loads(text)
    for row in record['rows']:
      row |= change
    path.write_text(json.dumps(record))
    assert calibrate.for_host(engine, acceptance, 1, 0.0) is None


def test_what_is_shipped_is_of_the_shipped_pair():
  """And `demo_drafters.gin`, with another drafter, has no part in it."""
  for run_file, is_of_pair in ('demo', True), ('demo_drafters', False):
    flags = [f'--gin_file=gin/runs/{run_file}.gin']
    gin_flags.load(flags)
    config = gin_flags.build(infer.DecodeConfig)
    rows = json.loads((gin_flags.ROOT / config.acceptance).read_text())['rows']
    made = config.engine()
    assert made.chooses_gamma
    assert all(
      (row['fingerprints'] == made.fingerprints) == is_of_pair for row in rows
    )
