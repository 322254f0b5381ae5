"""Ways to speculate, measured beside each other."""

import dataclasses
import functools
import gzip
import json
import time

import pytest
import rich.console

import small_vocabulary
from continuous_test import engine_of, make_t5, make_texts
from specdec_jax import Engine
from specdec_jax.engine.calibration import Calibration, Choice, device_name
from specdec_jax.engine.completion import Completion, CompletionStats
from specdec_jax.measure.compare import (
  FIXED,
  PLAIN,
  SPECULATIVE,
  CompareConfig,
  Method,
  ThroughputConfig,
  compare,
  measure_throughput,
  plot_methods,
  plot_throughput,
  read_examples,
  run_fixed,
  side_by_side,
)
from specdec_jax.measure.record import describe
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
    methods=[
      Method('good', {'gamma': 3}),
      Method('good, by token', {'gamma': 3, 'verification': 'token'}),
      Method('bad', {'gamma': 3}, bad),
    ],
    input_file=lines,
    repeats=2,
  )
  return dataclasses.replace(config, **changes)


def test_a_better_drafter_has_more_tokens_a_call(tokenizer, lines, tmp_path):
  path = tmp_path / 'record.json'
  record = compare(
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


def test_a_mixed_input_has_rows_for_each_file(tokenizer, lines, tmp_path):
  """As many lines of each file; together they are a mean by tokens."""
  other = tmp_path / 'other.txt'
  other.write_text('six five\nfour\n')
  config = dataclasses.replace(
    _config(tokenizer, lines),
    methods=[Method('good', {'gamma': 3})],
    input_file=[lines, str(other)],
    temperatures=(0.0,),
    repeats=1,
  )
  record = compare(config)
  rows = {(row['method'], row['input']): row for row in record['rows_measured']}
  assert {part for _, part in rows} == {'all', lines, str(other)}
  parts = [rows['good', part]['tokens'] for part in (lines, str(other))]
  assert rows['good', 'all']['tokens'] == sum(parts) and min(parts) > 0
  assert record['rows'][0][1] == 'all'


def test_a_way_with_other_outputs_is_found_out(tokenizer, lines):
  other = functools.partial(_engine, tokenizer, 0.0, 5.0)
  config = _config(tokenizer, lines)
  config = dataclasses.replace(
    config, methods=[*config.methods, Method('other target', {}, other)]
  )
  with pytest.raises(ValueError, match="'other target' gives another greedy"):
    compare(config)


@pytest.mark.parametrize('names', [[], ['plain'], ['a', 'a']])
def test_names(tokenizer, lines, names):
  with pytest.raises(ValueError, match='CompareConfig.methods'):
    CompareConfig(Engine, lines, [Method(name) for name in names])


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
    compare(config)


def test_gammas_are_measured_beside_predicted(tokenizer, tmp_path):
  engine = small_vocabulary.engine_with_itself(tokenizer)
  (tmp_path / 'lines.txt').write_text('the red dog\na cat sleeps\nx\n')
  choice = Choice(
    1, 1, 1.5, (1.4, 1.6), (1.0, 1.5, 1.25), None, 0.1, (1.0, 1.1, 1.2)
  )
  record = {
    'acceptance_rate': {'alpha': 0.8},
    'costs': [{'times_ms': {'call_1': {'median': 1.0}}}],
  }
  path, plot = str(tmp_path / 'calibration.json'), tmp_path / 'curve.png'
  Calibration(engine.fingerprints, device_name(), 0.0, [choice], record).save(
    path
  )
  config = CompareConfig(
    lambda: engine,
    str(tmp_path / 'lines.txt'),
    gammas=(1, 3),
    temperatures=(0.0,),
    calibrations=(path,),
    num_lines=2,
    repeats=2,
    plot_file=str(plot),
  )
  record = compare(config, rich.console.Console(quiet=True))
  rows = record['rows_measured']
  assert [row['gamma'] for row in rows] == [1, 3] and record['chosen'] == 1
  known, unknown = (row['predicted'] for row in rows)
  # An output's start, in either way, leaves less than a token's factor.
  assert 1 < known < 1.8 / 1.2 and unknown is None
  for row in rows:
    assert 0 < row['least'] <= row['speed_up'] <= row['most']
    done = engine.generate(['the red dog', 'a cat sleeps'], gamma=row['gamma'])
    tokens, calls = (
      sum(getattr(each.stats, name) for each in done)
      for name in ('num_tokens', 'num_target_calls')
    )
    assert row['tokens_per_call'] == tokens / calls
  (shown,) = side_by_side([record]).rows
  assert shown[3] == 1 and shown[4] == rows[0]['speed_up']
  before = plot.read_bytes()
  plot_methods(plot, record)
  assert plot.read_bytes() == before  # the same record, the same picture


# Many texts at once.


@pytest.fixture(scope='module')
def engine(tokenizer):
  return engine_of(make_t5(0), make_t5(1), tokenizer, max_input_len=32)


@pytest.fixture(scope='module')
def examples(folder):
  """Two columns, compressed; one line is too long, one is empty."""
  lines = [*make_texts(12), '', 'the dog ' * 60]
  path = folder / 'pairs.tsv.gz'
  path.write_bytes(gzip.compress('\n'.join(f'{x}\ty' for x in lines).encode()))
  return str(path)


def test_examples_are_ragged_and_fit(engine, examples):
  def read(count, seed=0, weights=(1.0, 1.0)):
    return read_examples(examples, engine, count, weights, seed)

  texts = read(30)
  assert texts == read(30) != read(30, seed=1)
  assert texts[:9] == read(9)
  lengths = [len(engine.input_ids(text)) for text in texts]
  assert len(texts) == 30 and max(lengths) <= 32 and min(lengths) > 1
  assert not any('\t' in text for text in texts)
  lines = {text for text in read(200, weights=(1.0,))}
  assert len(lines) <= 12 < len(set(read(200)))
  engine.max_input_len, most = 2, engine.max_input_len
  try:
    with pytest.raises(ValueError, match='lines of at most 2 tokens'):
      read(3)
  finally:
    engine.max_input_len = most


class Clock:
  """An engine whose text of n letters takes n calls of 1 ms."""

  max_input_len = 100

  def input_ids(self, text):
    return list(text)

  def warmup(self, texts, **_):
    return 0.0

  def generate(self, texts, **_):
    time.sleep(1e-3 * max(map(len, texts)))
    return [
      Completion('', [], [], 'stop', CompletionStats(len(t), len(t)))
      for t in texts
    ]


def test_fixed_batches():
  """What is known of it: rounds that a batch computes are its longest's."""
  texts = ['x' * n for n in (1, 20, 2, 20)]
  run = run_fixed(Clock(), texts, 2)
  assert run['occupancy'] == 43 / 44 and run['tokens'] == 43
  assert 0 < run['median_latency'] < run['seconds']
  last = run_fixed(Clock(), texts[:3], 2)  # filled up
  assert last['tokens'] == 23 and last['occupancy'] == 23 / 44


@pytest.mark.slow
def test_measurement_and_picture(engine, examples, tmp_path):
  console = rich.console.Console(record=True, width=140)
  config = ThroughputConfig(
    lambda: engine,
    examples,
    num_examples=4,
    batches=(1, 2),
    repeats=2,
    output_file=str(tmp_path / 'throughput.json'),
    plot_file=str(tmp_path / 'a.png'),
  )
  record = measure_throughput(config, console)
  assert json.loads((tmp_path / 'throughput.json').read_text()) == record
  modes = (FIXED, PLAIN, SPECULATIVE)
  found = [(row['batch_size'], row['mode']) for row in record['sweep']]
  assert found == [(rows, mode) for rows in (1, 2) for mode in modes]
  for rows in (1, 2):
    tokens = {r['tokens'] for r in record['sweep'] if r['batch_size'] == rows}
    assert len(tokens) == 1, 'all modes decode the same'
  assert 0 < record['sweep'][-1]['host_fraction'] < 1
  assert 'speculative' in console.export_text()
  plot_throughput(tmp_path / 'b.png', record)
  assert (tmp_path / 'a.png').read_bytes() == (tmp_path / 'b.png').read_bytes()


@pytest.mark.parametrize(
  'changes', [{'num_examples': 0}, {'join_weights': ()}, {'batches': (0,)}]
)
def test_bad_settings(changes):
  with pytest.raises(ValueError, match=next(iter(changes))):
    ThroughputConfig(lambda: None, 'x', **changes)
