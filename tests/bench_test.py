"""The benchmark measures what it says; how fast it is, is not tested."""

import dataclasses
import json

import jax
import pytest
import rich.console

from specdec_jax import bench, partitioning
from specdec_jax.bench import calls, timing
from specdec_jax.models import t5
from specdec_jax.probs import SamplingConfig

TARGET = t5.T5(
  t5.T5Config(
    vocab_size=50,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    num_encoder_layers=1,
    num_decoder_layers=2,
    mlp_dim=24,
  )
)


def test_functions_take_turns_and_preparation_is_not_timed(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(timing.time, 'perf_counter', lambda: clock[0])
  order = []

  def make(name, cost):
    def prepare():
      clock[0] += 100.0

      def run():
        order.append(name)
        clock[0] += cost

      return run

    return prepare

  seconds = timing.interleave({'a': make('a', 1.0), 'b': make('b', 3.0)}, 3)
  assert order == ['a', 'b'] * 4  # one warm-up
  assert seconds == {'a': [1.0] * 3, 'b': [3.0] * 3}
  assert timing.summarise([3.0, 1.0, 2.0], 10) == {
    'median': 20.0,
    'min': 10.0,
    'max': 30.0,
  }


def test_bytes_of_a_call_are_counted_from_shapes():
  params = partitioning.place(
    jax.jit(TARGET.init)(jax.random.key(0)),
    partitioning.Placement(kernel_layout='in_out'),
  )
  inputs = jax.numpy.ones((3, 7), jax.numpy.int32)
  request = calls.make_request(inputs, 20, 0, SamplingConfig(0.0), 0)
  attention = 4 * 16 * 16  # self-attention
  attention += 2 * 16 * 16  # cross-attention: queries and output
  layer = attention + 3 * 16 * 24 + 3 * 16
  weights = 2 * layer + 16 * 50 + 16 + 2 * 32
  caches = 3 * 2 * 2 * 16 * (64 + 7)  # rows, layers, k and v, H * D, slots
  expected = 4 * (weights + caches)
  assert calls.decoder_bytes(TARGET, params, request) == expected


def test_a_whole_run_of_a_tiny_pair(tmp_path):
  draft = t5.T5(dataclasses.replace(TARGET.config, num_decoder_layers=1))
  path = tmp_path / 'out/record.json'
  config = bench.BenchmarkConfig(
    target=TARGET,
    draft=draft,
    gamma=3,
    call_sizes=(1, 4),
    input_len=8,
    decode_len=32,
    calls_a_run=2,
    repeats=2,
    output_file=str(path),
  )
  console = rich.console.Console(record=True, width=120)
  record = bench.benchmark(config, console)
  assert json.loads(path.read_text()) == record
  assert record['call_cost']['1'] == 1.0
  assert record['rounds'] == sum(record['histogram'])
  emitted = sum(n * (i + 1) for i, n in enumerate(record['histogram']))
  assert emitted == 32
  a_round = (
    record['times_ms']['draft_round']['median']
    + record['times_ms']['verify_call']['median']
  )
  assert record['predicted_ms'] == pytest.approx(record['rounds'] * a_round)
  assert record['machine']['jax'] == jax.__version__
  assert 'verify_call' in console.export_text()


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'gamma': 0}, 'gamma must be at least 1, got 0'),
    ({'repeats': 0}, 'repeats must be at least 1'),
    ({'call_sizes': (2, 4)}, 'call_sizes must hold 1'),
  ],
)
def test_config_says_what_is_wrong(options, words):
  with pytest.raises(ValueError, match=words):
    bench.BenchmarkConfig(target=TARGET, **options)
