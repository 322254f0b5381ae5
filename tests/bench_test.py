"""The benchmark measures what it says; how fast it is, is not tested."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import rich.console

from specdec_jax import bench, partitioning
from specdec_jax.bench import calls, models, report, run, t5x_style, timing
from specdec_jax.models import kv_cache, t5
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
    'error': pytest.approx(10 * 1.2533 * 1.4826 / 3**0.5),
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


DRAFT = t5.T5(dataclasses.replace(TARGET.config, num_decoder_layers=1))


def tiny(**options):
  defaults = {'decode_lens': (32,), 'call_sizes': (1,), 'input_lens': (8,)}
  defaults |= {'calls_a_run': 2, 'repeats': 2, 'gammas': (3,)}
  return bench.BenchmarkConfig(TARGET, DRAFT, **defaults | options)


def test_a_whole_run_of_a_tiny_pair(tmp_path):
  path = tmp_path / 'out/record.json'
  console = rich.console.Console(record=True, width=120)
  record = report.show(
    tiny(gammas=(1, 3), batches=(2,), output_file=str(path)), console
  )
  assert json.loads(path.read_text()) == record
  assert [setting['batch'] for setting in record['settings']] == [2]
  for setting in record['settings']:
    assert setting['call_cost']['1'] == 1.0
    assert [row['gamma'] for row in setting['gammas']] == [1, 3]
    for row in setting['gammas']:
      median = {n: t['median'] for n, t in setting['times_ms'].items()}
      a_round = median[f'round_{row["gamma"]}']
      assert row['predicted_ms'] == pytest.approx(row['rounds'] * a_round)
      emitted = sum(n * (i + 1) for i, n in enumerate(row['histogram']))
      assert emitted == 32 * setting['batch']
  assert record['machine']['jax'] == jax.__version__
  text = console.export_text()
  assert 'round_3' in text
  assert 'forced' not in text


def test_the_grid_is_every_combination():
  config = tiny(batches=(1, 4), temperatures=(0.0, 1.0), decode_lens=(32, 64))
  settings = list(run.grid(config))
  assert len(set(settings)) == 8
  assert settings[0] == (1, 8, 32, 0.0)
  assert run.num_steps(config) == 8 * config.repeats


def test_forced_acceptance_is_named_in_the_tables():
  console = rich.console.Console(record=True, width=160)
  config = tiny(forced_acceptance=1.0, repeats=1, t5x_style=True)
  record = report.show(config, console)
  (row,) = record['settings'][0]['gammas']
  assert row['histogram'] == [0, 0, 0, 8]
  assert row['t5x_style_speed_up'] > 0
  text = ' '.join(console.export_text().split())
  assert text.count('acceptance forced to 1.0, random weights') == 2


def test_random_parameters_are_made_in_their_dtype():
  params = models.random_params(TARGET, 0, 'bfloat16')
  expected = jax.eval_shape(TARGET.init, jax.random.key(0))
  assert jax.tree.map(jax.numpy.shape, params) == jax.tree.map(
    lambda leaf: leaf.shape, expected
  )
  assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'bfloat16'}
  logits = TARGET.logits(
    partitioning.place(params),
    jax.numpy.ones((1, 4), jax.numpy.int32),
    jax.numpy.ones((1, 4), jax.numpy.int32),
  )
  assert 0.1 < float(jax.numpy.std(logits)) < 10.0


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'gammas': (4, 0)}, 'gammas must be at least 1, got .4, 0.'),
    ({'repeats': 0}, 'repeats must be at least 1'),
    ({'batches': 2}, 'batches must be a sequence of numbers, got 2'),
    ({'forced_acceptance': 1.5}, r'must lie in \[0, 1\].*got 1.5'),
    ({'call_sizes': (2, 4)}, 'call_sizes must hold 1'),
  ],
)
def test_config_says_what_is_wrong(options, words):
  with pytest.raises(ValueError, match=words):
    bench.BenchmarkConfig(target=TARGET, **options)


def test_the_t5x_style_loop_gives_the_same_logits():
  params = jax.jit(TARGET.init)(jax.random.key(0))
  inputs = jax.numpy.ones((2, 5), jax.numpy.int32)
  tokens = jax.random.randint(jax.random.key(1), (2, 6), 2, 50)
  results = []
  for network in (TARGET, t5x_style.T5XStyle(TARGET.config)):
    cache = network.prefill(params, inputs, 8)
    first, cache = network.extend(params, cache, tokens[:, :1])
    rest, _ = network.extend(params, cache, tokens[:, 1:])
    results.append((first, rest))
  for ours, theirs in zip(*results, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_one_hot_write_is_a_write():
  buffer = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
  new = jax.random.normal(jax.random.key(1), (2, 2, 3, 4))
  start = jax.numpy.asarray([0, 5])
  np.testing.assert_allclose(
    t5x_style.one_hot_write(buffer, new, start),
    kv_cache.write(buffer, new, start),
    rtol=1e-6,
  )
