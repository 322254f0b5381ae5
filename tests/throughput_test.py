"""The throughput measurement on a small random pair, and its picture."""

import gzip
import json
import time

import gin
import jax.numpy as jnp
import pytest
import rich.console

from continuous_test import engine_of, make_t5, make_texts
from specdec_jax.cli import gin_flags
from specdec_jax.engine.completion import Completion, CompletionStats
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.measure import (
  throughput,
  throughput_picture,
  timed_runs,
)
from specdec_jax.measure.throughput import SHORTEST

PNG = b'\x89PNG\r\n\x1a\n'


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
    return timed_runs.read_examples(examples, engine, count, weights, seed)

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
    with pytest.raises(ValueError, match='no line of at most 2 tokens'):
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
  mixed = timed_runs.run_fixed(Clock(), texts, 2, sort=False)
  alike = timed_runs.run_fixed(Clock(), texts, 2, sort=True)
  assert (mixed.occupancy, alike.occupancy) == (43 / 80, 43 / 44)
  assert mixed.num_tokens == alike.num_tokens == 43
  assert alike.seconds < mixed.seconds
  assert alike.record()['median_latency'] < mixed.record()['median_latency']
  last = timed_runs.run_fixed(Clock(), texts[:3], 2, sort=False)
  assert len(last.latency) == 3 and last.num_tokens == 23
  assert last.latency == sorted(last.latency)


@pytest.mark.slow
def test_measurement_and_picture(engine, examples, tmp_path):
  console = rich.console.Console(record=True, width=140)
  config = throughput.ThroughputConfig(
    lambda: engine,
    examples,
    num_examples=12,
    batch_size=2,
    repeats=2,
    looks=((1, 2), (8, 1)),
    sweep_batches=(1, 2),
    sweep_examples=4,
    memory_examples=400,
    output_file=str(tmp_path / 'throughput.json'),
  )
  record = throughput.measure_throughput(config, console)
  assert json.loads((tmp_path / 'throughput.json').read_text()) == record
  assert len(record['ways']) == len(record['ratios']) == 4
  tokens = {row['tokens'] for row in record['ways'].values()}
  assert len(tokens) == 1, 'all ways decode the same'
  assert 0 < record['ways'][SHORTEST]['host_fraction'] < 1
  assert [row['refill'] for row in record['looks']] == [2, 1]
  found = [(row['batch_size'], row['mode']) for row in record['sweep']]
  assert found == [(b, m) for b in (1, 2) for m in ('plain', 'speculative')]
  early, late = record['memory']['early'], record['memory']['late']
  assert late['buffers'] <= early['buffers']
  assert late['buffer_bytes'] <= early['buffer_bytes']
  printed = console.export_text()
  assert 'continuous / fixed, sorted' in printed

  pytest.importorskip('matplotlib', reason='needs the extra [plots]')
  throughput_picture.plot_throughput(tmp_path / 'a.png', record)
  throughput_picture.plot_throughput(tmp_path / 'b.png', record)
  assert (tmp_path / 'a.png').read_bytes().startswith(PNG)
  assert (tmp_path / 'a.png').read_bytes() == (tmp_path / 'b.png').read_bytes()


def test_a_picture_of_nothing(tmp_path):
  with pytest.raises(ValueError, match='no sweep over batch sizes'):
    throughput_picture.plot_throughput(tmp_path / 'a.png', {'sweep': []})


def test_memory_is_seen_to_grow():
  """The control: a decoder that keeps everything."""

  class Leaking(Continuous):
    kept = []

    def warmup(self, texts, **_):
      return 0.0

    def run(self, texts, **_):
      for index, _ in enumerate(texts):
        self.kept.append(jnp.zeros((9,)))
        yield index, None

  found = timed_runs.watch_memory(Leaking(None, PoolSettings()), ['x'] * 600)
  assert found['late']['buffers'] > found['early']['buffers'] + 200
  assert found['examples'] == 600


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'num_examples': 0}, 'num_examples must be at least 1'),
    ({'join_weights': ()}, 'join_weights must be'),
    ({'sweep_batches': (0,)}, 'sweep_batches must be.* at least 1'),
    ({'refill': 0}, 'refill must be at least 1'),
    ({'max_rounds': 0}, 'max_rounds must be at least 1'),
  ],
)
def test_bad_settings(changes, message):
  with pytest.raises(ValueError, match=message):
    throughput.ThroughputConfig(lambda: None, 'x', **changes)


def test_gin_file():
  flags = ['--gin_file=gin/runs/throughput_demo.gin', '--gin.NUM_EXAMPLES=7']
  with gin.unlock_config():
    gin.clear_config()
    gin_flags.load(gin_flags.parse_flags(flags))
    config = gin_flags.build(throughput.ThroughputConfig)
  assert config.num_examples == 7 and config.batch_size == 16
