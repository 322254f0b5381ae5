"""Ways to speculate, measured beside each other."""

import dataclasses
import functools
import json

import pytest
import rich.console

from specdec_jax import Engine
from specdec_jax.measure.calibration import Calibration, Choice
from specdec_jax.measure.environment import describe
from specdec_jax.measure.methods import Method, MethodsConfig, compare_methods
from specdec_jax.paper import reproduce
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


def _config(tokenizer, lines, **changes) -> MethodsConfig:
  good = functools.partial(_engine, tokenizer, 0.0)
  bad = functools.partial(_engine, tokenizer, 5.0)
  config = MethodsConfig(
    methods=[
      Method('good', good, {'gamma': 3}),
      Method('good, by token', good, {'gamma': 3, 'verification': 'token'}),
      Method('bad', bad, {'gamma': 3}),
    ],
    input_file=lines,
    repeats=2,
  )
  return dataclasses.replace(config, **changes)


def test_a_better_drafter_has_more_tokens_a_call(tokenizer, lines, tmp_path):
  path = tmp_path / 'record.json'
  record = compare_methods(
    _config(tokenizer, lines, output_file=str(path)),
  )
  rows = {
    (row['method'], row['temperature']): row for row in record['rows_measured']
  }
  assert len(rows) == 6
  for temperature in (0.0, 1.0):
    good, bad = (rows[name, temperature] for name in ('good', 'bad'))
    assert good['tokens_per_call'] > bad['tokens_per_call'] >= 1
    assert good['acceptance_rate'] > bad['acceptance_rate']
    for row in (good, bad):
      low, high = row['tokens_per_call_interval']
      assert low <= row['tokens_per_call'] <= high
      low, high = row['speed_up_interval']
      assert low <= row['speed_up'] <= high
  kept = json.loads(path.read_text())
  assert [row[1] for row in kept['rows']][:3] == [
    'good',
    'good, by token',
    'bad',
  ]


def test_reproduce_shows_all_pairs_in_one_table(tokenizer, lines, tmp_path):
  quiet = rich.console.Console(quiet=True)
  for name in ('one', 'two'):
    config = _config(
      tokenizer,
      lines,
      repeats=1,
      temperatures=(0.0,),
      name=f'Pair {name}',
      output_file=str(tmp_path / 'records' / f'{name}.json'),
    )
    compare_methods(config, quiet)
  asked = reproduce.ReproduceConfig(('methods',), str(tmp_path))
  written = reproduce.reproduce(asked, quiet)
  assert {'methods_one.png', 'methods_two.png', 'methods.csv'} <= {
    path.name for path in written
  }
  report = written[-1].read_text()
  assert report.count('| Pair one |') == report.count('| Pair two |') == 3


def test_reproduce_says_how_to_measure_what_it_lacks(tmp_path):
  asked = reproduce.ReproduceConfig(('methods',), str(tmp_path))
  with pytest.raises(ValueError, match='gin/runs/methods.gin'):
    reproduce.reproduce(asked, rich.console.Console(quiet=True))


def test_a_mixed_input_has_rows_for_each_file(tokenizer, lines, tmp_path):
  """As many lines of each file; together they are a mean by tokens."""
  other = tmp_path / 'other.txt'
  other.write_text('six five\nfour\n')
  good = _config(tokenizer, lines).methods[:1]
  config = MethodsConfig(
    good, [lines, str(other)], temperatures=(0.0,), repeats=1
  )
  record = compare_methods(config)
  rows = {(row['method'], row['input']): row for row in record['rows_measured']}
  assert {part for _, part in rows} == {'all', lines, str(other)}
  parts = [rows['good', part]['tokens'] for part in (lines, str(other))]
  assert rows['good', 'all']['tokens'] == sum(parts) and min(parts) > 0
  assert record['rows'][0][1] == 'all'


def test_a_way_with_other_outputs_is_found_out(tokenizer, lines):
  other = functools.partial(_engine, tokenizer, 0.0, 5.0)
  config = _config(tokenizer, lines)
  config = dataclasses.replace(
    config, methods=[*config.methods, Method('other target', other)]
  )
  with pytest.raises(ValueError, match="'other target' gives another greedy"):
    compare_methods(config)


def test_ways_with_one_engine_share_it(tokenizer, lines):
  made = []

  def engine():
    made.append(_engine(tokenizer, 0.0))
    return made[-1]

  config = MethodsConfig(
    [Method('one', engine, {'gamma': 1}), Method('two', engine, {'gamma': 2})],
    lines,
    temperatures=(0.0,),
    repeats=1,
  )
  compare_methods(config)
  assert len(made) == 1


@pytest.mark.parametrize('names', [[], ['plain'], ['a', 'a']])
def test_names(tokenizer, lines, names):
  with pytest.raises(ValueError, match='names of their own'):
    MethodsConfig([Method(name, Engine) for name in names], lines)


def test_a_calibration_of_another_pair_is_refused(tokenizer, lines, tmp_path):
  path = str(tmp_path / 'calibration.json')
  Calibration(
    fingerprints={'target': 'a', 'draft': 'b'},
    device=describe()['device'],
    temperature=0.0,
    choices=(Choice(1, 2, 1.5, (1.4, 1.6), (1.0, 1.3, 1.5)),),
    record={},
  ).save(path)
  config = _config(tokenizer, lines, calibrations=[path])
  with pytest.raises(ValueError, match='made for something else'):
    compare_methods(config)
