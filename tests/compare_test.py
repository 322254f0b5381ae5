"""Ways to speculate, measured beside each other."""

import dataclasses
import functools
import json

import pytest
import rich.console

import toy_models
from specdec_jax import Engine
from specdec_jax.engine.calibration import Calibration, Choice, device_name
from specdec_jax.measure.compare import (
  CompareConfig,
  Method,
  compare,
  plot,
  side_by_side,
)


@pytest.fixture
def config(tokenizer, tmp_path) -> CompareConfig:
  """A comparison of a drafter that is right with one that often is not."""
  path = tmp_path / 'lines.txt'
  path.write_text('one two\nthree\nfour five six\n')
  limits = {'max_input_len': 16, 'max_decode_len': 16}
  good, bad = (
    functools.partial(toy_models.chain_engine, tokenizer, noise, **limits)
    for noise in (0.0, 5.0)
  )
  methods = [Method('good'), Method('bad', engine=bad)]
  return CompareConfig(good, str(path), methods, repeats=2)


def test_a_better_drafter_has_more_tokens_a_call(config, tmp_path):
  path = tmp_path / 'record.json'
  record = compare(dataclasses.replace(config, output_file=str(path)))
  rows = {
    (row['method'], row['temperature']): row for row in record['rows_measured']
  }
  assert len(rows) == 4
  for temperature in (0.0, 1.0):
    good, bad = (rows[name, temperature] for name in ('good', 'bad'))
    assert good['tokens_per_call'] > bad['tokens_per_call'] >= 1
    assert good['acceptance_rate'] > bad['acceptance_rate']
    for row in (good, bad):
      for name in ('tokens_per_call', 'speed_up'):
        low, high = row[f'{name}_interval']
        assert low <= row[name] <= high
  shown = json.loads(path.read_text())
  assert shown['columns'][:3] == ['T', 'rows', 'method']
  assert [row[2] for row in shown['rows']] == ['good', 'bad'] * 2


def test_many_texts_are_decoded_together(config):
  alone, together = compare(
    dataclasses.replace(
      config, methods=[Method('good')], temperatures=(0.0,), rows=(1, 2)
    )
  )['rows_measured']
  assert (alone['rows'], together['rows']) == (1, 2)
  # A greedy output is the same; all of them are one measurement.
  for name in ('acceptance_rate', 'tokens_per_call'):
    assert alone[name] == together[name]
  assert together['speed_up'] > 0 and together['speed_up_interval'] is None


def test_a_way_with_other_outputs_is_found_out(config):
  methods = [Method('shorter', {'max_length': 3})]
  with pytest.raises(ValueError, match="greedy output of 'shorter'"):
    compare(dataclasses.replace(config, methods=methods))


@pytest.mark.parametrize('names', [[], ['plain'], ['a', 'a']])
def test_names(names):
  with pytest.raises(ValueError, match='CompareConfig.methods'):
    CompareConfig(Engine, 'lines', [Method(name) for name in names])


def calibrated(path, fingerprints, gamma=1):
  costs = {f'call_{size}': 0.9 + 0.1 * size for size in (1, 2, 3)}
  costs |= {'round_1': 1.2, 'encoder': 2.0, 'draft_encoder': 0.5}
  choice = Choice(
    1, gamma, 1.5, (1.4, 1.6), (1.0, 1.5, 1.25), 0.1, (1.0, 1.1, 1.2)
  )
  times = {name: {'median': ms} for name, ms in costs.items()}
  record = {'acceptance_rate': {'alpha': 0.8}, 'costs': [{'times_ms': times}]}
  made = Calibration(fingerprints, device_name(), 0.0, [choice], record)
  made.save(str(path))
  return [str(path)]


def test_gammas_are_measured_beside_predicted(config, tmp_path):
  engine, picture = config.engine(), tmp_path / 'curve.png'
  quiet = rich.console.Console(quiet=True)

  def run(of=engine.fingerprints, gamma=1, **changes):
    given = {'gammas': (1, 3), 'methods': (), 'num_lines': 2} | changes
    given['calibrations'] = calibrated(tmp_path / 'x.json', of, gamma)
    greedy = {'engine': lambda: engine, 'temperatures': (0.0,)}
    return compare(dataclasses.replace(config, **greedy, **given), quiet)

  record = run(plot_file=str(picture))
  with pytest.raises(ValueError, match='made for something else'):
    run({'target': 'a', 'draft': 'b'})
  rows = record['rows_measured']
  assert [row['gamma'] for row in rows] == [1, 3] and record['chosen'] == 1
  known, unknown = (row['predicted'] for row in rows)
  # An output's start, in either way, leaves less than a token's factor.
  assert 1 < known < 1.8 / 1.2 and unknown is None
  # Where no gamma pays, one that adapts is the plain loop.
  adaptive = [Method('adaptive', {'gamma': 'adaptive'})]
  (row,) = run(gamma=0, gammas=(), methods=adaptive)['rows_measured']
  assert row['acceptance_rate'] is None and row['tokens_per_call'] == 1
  (shown,) = side_by_side([record]).rows
  assert shown[3] == 1 and shown[4] == rows[0]['speed_up']
  before = picture.read_bytes()
  plot(picture, record)
  assert picture.read_bytes() == before  # the same record, the same picture
