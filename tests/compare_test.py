"""Ways to speculate, measured beside each other."""

import dataclasses
import functools
import json

import pytest
import rich.console

import small_vocabulary
from specdec_jax import Engine
from specdec_jax.engine.calibration import Calibration, Choice, device_name
from specdec_jax.measure.compare import (
  CompareConfig,
  Method,
  compare,
  plot,
  side_by_side,
)
from trace_test import chain


@pytest.fixture
def lines(tmp_path):
  path = tmp_path / 'lines.txt'
  path.write_text('one two\nthree\nfour five six\n')
  return str(path)


def _engine(tokenizer, noise, target=0.0):
  return Engine(
    chain(target),
    chain(noise),
    tokenizer=tokenizer,
    max_input_len=16,
    max_decode_len=16,
  )


def _config(tokenizer, lines, **changes) -> CompareConfig:
  good = functools.partial(_engine, tokenizer, 0.0)
  bad = functools.partial(_engine, tokenizer, 5.0)
  config = CompareConfig(
    engine=good,
    methods=[Method('good', {'gamma': 3}), Method('bad', {'gamma': 3}, bad)],
    input_file=lines,
    repeats=2,
  )
  return dataclasses.replace(config, **changes)


def test_a_better_drafter_has_more_tokens_a_call(tokenizer, lines, tmp_path):
  path = tmp_path / 'record.json'
  record = compare(_config(tokenizer, lines, output_file=str(path)))
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


def test_many_texts_are_decoded_together(tokenizer, lines):
  methods = [Method('good', {'gamma': 3})]
  config = _config(
    tokenizer, lines, methods=methods, temperatures=(0.0,), rows=(1, 2)
  )
  alone, together = compare(config)['rows_measured']
  assert (alone['rows'], together['rows']) == (1, 2)
  # A greedy output is the same; all of them are one measurement.
  for name in ('acceptance_rate', 'tokens_per_call'):
    assert alone[name] == together[name]
  assert together['speed_up'] > 0 and together['speed_up_interval'] is None


def test_a_way_with_other_outputs_is_found_out(tokenizer, lines):
  other = functools.partial(_engine, tokenizer, 0.0, 5.0)
  config = _config(tokenizer, lines, methods=[Method('other', {}, other)])
  with pytest.raises(ValueError, match="greedy output of 'other'"):
    compare(config)


@pytest.mark.parametrize('names', [[], ['plain'], ['a', 'a']])
def test_names(lines, names):
  with pytest.raises(ValueError, match='CompareConfig.methods'):
    CompareConfig(Engine, lines, [Method(name) for name in names])


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


def test_gammas_are_measured_beside_predicted(tokenizer, lines, tmp_path):
  engine = small_vocabulary.engine_with_itself(tokenizer)
  picture = tmp_path / 'curve.png'
  config = CompareConfig(
    lambda: engine,
    lines,
    gammas=(1, 3),
    temperatures=(0.0,),
    calibrations=calibrated(tmp_path / 'x.json', engine.fingerprints),
    num_lines=2,
    repeats=2,
    plot_file=str(picture),
  )
  record = compare(config, rich.console.Console(quiet=True))
  paths = calibrated(tmp_path / 'x.json', {'target': 'a', 'draft': 'b'})
  with pytest.raises(ValueError, match='made for something else'):
    compare(dataclasses.replace(config, calibrations=paths))
  rows = record['rows_measured']
  assert [row['gamma'] for row in rows] == [1, 3] and record['chosen'] == 1
  known, unknown = (row['predicted'] for row in rows)
  # An output's start, in either way, leaves less than a token's factor.
  assert 1 < known < 1.8 / 1.2 and unknown is None
  # Where no gamma pays, one that adapts is the plain loop.
  adaptive = dataclasses.replace(
    config,
    methods=[Method('adaptive', {'gamma': 'adaptive'})],
    gammas=(),
    calibrations=calibrated(tmp_path / 'x.json', engine.fingerprints, gamma=0),
    plot_file=None,
  )
  (row,) = compare(adaptive, rich.console.Console(quiet=True))['rows_measured']
  assert row['acceptance_rate'] is None and row['tokens_per_call'] == 1
  (shown,) = side_by_side([record]).rows
  assert shown[3] == 1 and shown[4] == rows[0]['speed_up']
  before = picture.read_bytes()
  plot(picture, record)
  assert picture.read_bytes() == before  # the same record, the same picture
