"""Ways to speculate, measured beside each other."""

import dataclasses
import functools

import pytest

import toy_calibration
import toy_models
from specdec_jax.measure import compare as comparisons
from specdec_jax.measure.calls import decode_in_turn
from specdec_jax.measure.compare import CompareConfig, Method, compare


@pytest.fixture(scope='module')
def config(tokenizer, folder) -> CompareConfig:
  """A comparison of a drafter that is right with one that often is not."""
  path = folder / 'lines.txt'
  path.write_text('one two\nthree\nfour five six\n')
  limits = {'max_input_len': 16, 'max_decode_len': 16}
  # Made once: their programs are compiled once.
  make = functools.partial(toy_models.chain_engine, tokenizer, **limits)
  makers = (functools.partial(make, noise=noise) for noise in (0.0, 5.0))
  good, bad = map(functools.cache, makers)
  methods = [Method('good'), Method('bad', engine=bad)]
  return CompareConfig(good, str(path), methods, repeats=2)


def test_a_better_drafter_has_more_tokens_a_call(config):
  record = compare(config)
  rows = {(x['method'], x['temperature']): x for x in record['rows_measured']}
  assert len(rows) == 4
  for temperature in (0.0, 1.0):
    good, bad = (rows[name, temperature] for name in ('good', 'bad'))
    assert good['tokens_per_call'] > bad['tokens_per_call'] >= 1
    assert good['acceptance_rate'] > bad['acceptance_rate']
    for row in (good, bad):
      for name in ('tokens_per_call', 'speed_up'):
        low, high = row[f'{name}_interval']
        assert low <= row[name] <= high
  assert record['columns'][:3] == ['T', 'rows', 'method']
  assert [row[2] for row in record['rows']] == ['good', 'bad'] * 2


def test_many_texts_are_decoded_together(config):
  changes = {'methods': [Method('good')], 'temperatures': (0.0,)}
  config = dataclasses.replace(config, rows=(1, 2), **changes)
  alone, together = compare(config)['rows_measured']
  assert (alone['rows'], together['rows']) == (1, 2)
  # A greedy output is the same; all of them are one measurement.
  for name in ('acceptance_rate', 'tokens_per_call'):
    assert alone[name] == together[name]
  assert together['speed_up'] > 0 and together['speed_up_interval'] is None


def test_a_way_with_other_outputs_is_found_out(config):
  methods = [Method('shorter', {'max_length': 3})]
  with pytest.raises(ValueError, match="greedy output of 'shorter'"):
    compare(dataclasses.replace(config, methods=methods))


def test_gammas_are_measured_beside_predicted(config, tmp_path, monkeypatch):
  engine, picture = config.engine(), tmp_path / 'curve.png'
  path = str(tmp_path / 'calibration.json')
  changes = {'temperatures': (0.0,), 'calibrations': [path], 'num_lines': 2}
  config = dataclasses.replace(config, engine=lambda: engine, **changes)
  costs = {f'call_{size}': 0.9 + 0.1 * size for size in (1, 2, 3)}
  costs |= {'round_1': 1.2, 'encoder': 2.0, 'draft_encoder': 0.5}
  times = {'times_ms': {name: {'median': ms} for name, ms in costs.items()}}

  def decode(*args, **options):
    timed = decode_in_turn(*args, **options)
    # A toy's call takes less than the machine's noise.
    start = timed['start']
    start = start._replace(ms=timed['plain'].ms / start.tokens.mean())
    return timed | {'start': start}

  monkeypatch.setattr('specdec_jax.measure.compare.decode_in_turn', decode)

  def run(best, **changes):
    toy_calibration.make(
      fingerprints=engine.fingerprints,
      choices=[toy_calibration.choice(1, best)],
      record={'acceptance_rate': {'rounds': [1.0, 0.6]}, 'costs': [times]},
    ).save(path)
    return compare(dataclasses.replace(config, **changes))

  record = run(1, gammas=(1, 3), methods=(), plot_file=str(picture))
  rows = record['rows_measured']
  assert [row['gamma'] for row in rows] == [1, 3] and record['chosen'] == 1
  known, unknown = (row['predicted'] for row in rows)
  # An output's start, in either way, leaves less than a token's factor.
  assert 1 < known < 1 / 0.6 / 1.2 and unknown is None
  # Where no gamma pays, one that adapts is the plain loop.
  adaptive = [Method('adaptive', {'gamma': 'adaptive'})]
  (row,) = run(0, methods=adaptive)['rows_measured']
  assert row['acceptance_rate'] is None and row['tokens_per_call'] == 1
  (shown,) = comparisons.side_by_side([record]).rows
  assert shown[3] == 1 and shown[4] == rows[0]['speed_up']
  with pytest.raises(ValueError, match=r'chosen gamma, 2, .*\[1, 3\]'):
    comparisons.side_by_side([record | {'chosen': 2}])
  assert picture.read_bytes().startswith(b'\x89PNG')
