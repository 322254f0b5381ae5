"""The benchmark measures what it says; how fast it is, is not tested."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from small_vocabulary import network
from specdec_jax import partitioning
from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_fit import fit
from specdec_jax.measure import (
  benchmark,
  calls,
  measured_pair,
  memory,
  report,
  t5x_style,
  timing,
)
from specdec_jax.models import backend, kv_cache
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft

# All that is compiled has one layer: only shapes matter here.
NETWORK = network(1, vocab_size=50)
DECODER_ONLY = GPT(
  GPTConfig(
    vocab_size=50,
    emb_dim=16,
    num_heads=2,
    num_layers=1,
    head_dim=8,
    mlp_dim=32,
    num_positions=64,
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
  target = network(2, vocab_size=50)
  placement = partitioning.Placement(kernel_layout='in_out')
  params = memory.param_shapes(target, placement)
  request = memory.request_shapes(3, 7, 20, 0, greedy=True)
  attention = 4 * 16 * 16  # self-attention
  attention += 2 * 16 * 16  # cross-attention: queries and output
  layer = attention + 3 * 16 * 32 + 3 * 16
  weights = 2 * layer + 16 * 50 + 16 + 2 * 32
  caches = 3 * 2 * 2 * 16 * (64 + 7)  # rows, layers, k and v, H * D, slots
  expected = 4 * (weights + caches)
  assert calls.decoder_bytes(target, params, request) == expected


def tiny(**options):
  defaults = {'decode_lens': (32,), 'call_sizes': (1,), 'input_lens': (8,)}
  defaults |= {'calls_a_run': 2, 'repeats': 2, 'gammas': (3,)}
  defaults |= {'draft': NETWORK}
  return benchmark.BenchmarkConfig(NETWORK, **defaults | options)


@pytest.fixture(scope='module')
def measured(folder):
  """The file, the record and what was shown of a run."""
  path = folder / 'out/record.json'
  console = rich.console.Console(record=True, width=120)
  config = tiny(batches=(2,), output_file=str(path))
  return path, report.show(config, console), console.export_text()


def test_a_whole_run_of_a_tiny_pair(measured):
  path, record, text = measured
  assert json.loads(path.read_text()) == record
  assert [setting['batch'] for setting in record['settings']] == [2]
  for setting in record['settings']:
    assert setting['call_cost']['1'] == 1.0
    (row,) = setting['gammas']
    assert row['gamma'] == 3
    a_round = setting['times_ms']['round_3']['median']
    assert row['predicted_ms'] == pytest.approx(row['rounds'] * a_round)
    emitted = sum(n * (i + 1) for i, n in enumerate(row['histogram']))
    assert emitted == 32 * setting['batch']
  assert record['machine']['jax'] == jax.__version__
  assert record['weights'] == 'random'
  assert 'round_3' in text
  assert 'forced' not in text


@pytest.mark.slow
def test_what_a_round_takes_more_where_drafts_adapt():
  measured = benchmark.benchmark(tiny(times_adapting=True))
  (setting,) = measured['settings']
  (row,) = setting['gammas']
  assert row['adapting_rounds'] == row['rounds']  # no draft ends early
  times = {k: v['median'] for k, v in setting['times_ms'].items()}
  more = times['speculative_adapting_3'] - times['speculative_3']
  cost = more / row['rounds'] / times['call_1']
  assert row['adapting_cost'] == pytest.approx(cost)


def test_every_gamma_is_predicted_from_its_own_times(monkeypatch):
  """By a clock that says what each thing takes; nothing is compiled."""
  # Seconds: of 2 calls or rounds, of a benchmark, or of 32 tokens.
  takes = {'matvec': 1.0, 'encoder': 1.0, 'plain_loop': 32 * 4.0}
  takes |= {'call_1': 2 * 4.0, 'call_2': 2 * 5.0, 'call_4': 2 * 6.0}
  takes |= {'draft_1': 2 * 1.0, 'round_1': 2 * 6.0, 'speculative_1': 70.0}
  takes |= {'draft_3': 2 * 3.0, 'round_3': 2 * 12.0, 'speculative_3': 60.0}

  def prepare_calls(config, pair, request, gammas, functions):
    return {'bytes_per_call': 1}

  def prepare_gamma(config, pair, request, functions, facts):
    rounds = {1: 10, 3: 5}[request.gamma]
    return {'gamma': request.gamma, 'rounds': rounds, 'acceptance_rate': 0.5}

  def interleave(functions, repeats, advance):
    return {name: [seconds] for name, seconds in takes.items()}

  monkeypatch.setattr(
    benchmark, 'make_pair', lambda *args: measured_pair.Pair(1, 2, 3)
  )
  monkeypatch.setattr(benchmark, '_prepare_calls', prepare_calls)
  monkeypatch.setattr(benchmark, '_prepare_gamma', prepare_gamma)
  monkeypatch.setattr(benchmark.calls, 'matvec', lambda: (None, 1))
  monkeypatch.setattr(benchmark.timing, 'interleave', interleave)
  said = []
  record = benchmark.benchmark(tiny(gammas=(1, 3)), say=said.append)
  (setting,) = record['settings']
  assert [one.split()[0] for one in said] == ['Placing', 'Compiling,', 'First']
  assert setting['call_cost'] == {'1': 1.0, '2': 1.25, '4': 1.5}
  one, three = setting['gammas']
  assert (one['gamma'], three['gamma']) == (1, 3)
  # What a round takes beyond the target's call, for each proposal.
  assert (one['cost_ratio'], three['cost_ratio']) == (0.25, 0.5)
  assert (one['cost_ratio_alone'], three['cost_ratio_alone']) == (0.25, 0.25)
  assert (one['predicted_ms'], three['predicted_ms']) == (60e3, 60e3)
  assert one['measured_over_predicted'] == pytest.approx(7 / 6)
  assert (one['speed_up'], three['speed_up']) == (128 / 70, 128 / 60)
  # E(gamma, alpha) / (v + gamma c), Section 3.
  assert one['expected_speed_up'] == pytest.approx(1.5 / 1.5)
  assert three['expected_speed_up'] == pytest.approx(1.875 / 3)
  assert one['t5x_style_speed_up'] is None


def test_a_round_makes_proposals_that_nothing_reads():
  """Neither the target nor the next round looks at the second of them."""
  made = []

  def propose(params, state, context):
    def second(token):
      made.append(int(token))
      return token

    first = context.tokens[:, :1] + 1
    # A pure call, which the compiler may leave out as any other.
    shape = jax.ShapeDtypeStruct((), first.dtype)
    unread = jax.pure_callback(second, shape, first[0, 0])
    tokens = jnp.concatenate([first, first * 0 + unread], axis=1)
    return Draft(tokens, None, jnp.full((1,), 2, jnp.int32)), state

  drafter = Drafter(lambda *_: (), propose, lambda state, _: state)
  request = calls.make_request(
    jnp.ones((1, 4), jnp.int32), 8, 2, SamplingConfig(temperature=0.0), 0
  )
  pair = measured_pair.Pair(NETWORK, drafter, PairParams(None, ()))
  rounds = calls.pair_rounds(pair, request, 5, with_target=False)
  run = rounds()
  made.clear()  # by the round before the clock starts
  jax.block_until_ready(run())
  assert len(made) == 5


def test_what_a_decoder_only_pair_reads_is_its_prompt():
  inputs = jnp.asarray([[5, 6, 7, 8], [9, 8, 7, 6]])
  request = calls.make_request(
    inputs, 8, 2, SamplingConfig(temperature=0.0), 0, has_encoder=False
  )
  np.testing.assert_array_equal(
    request.prompt, [[0, 5, 6, 7, 8], [0, 9, 8, 7, 6]]
  )
  pair = measured_pair.make_pair(
    DECODER_ONLY, DECODER_ONLY, None, None, partitioning.Placement(), 0
  )
  # Neither model's parameters are the other's.
  sides = {
    calls.encoder_call: pair.params.target,
    calls.start_of_drafter: pair.params.draft,
  }
  empty = DECODER_ONLY.prefill(pair.params.target, inputs, request.cache_slots)
  extend = jax.jit(DECODER_ONLY.extend)
  for read, params in sides.items():
    have = read(pair, request)()()
    _, want = extend(params, empty, request.prompt[:, :-1])
    assert have.length.tolist() == [4, 4]
    np.testing.assert_allclose(have.keys[0], want.keys[0], rtol=1e-5, atol=1e-6)


def test_t5x_style_is_for_a_t5():
  tiny(t5x_style=True)
  with pytest.raises(ValueError, match='for a target that is a GPT'):
    benchmark.BenchmarkConfig(DECODER_ONLY, t5x_style=True)


def test_drafters_without_a_network():
  """What they need is placed and nothing is drawn for them."""
  table = fit([[0, 3, 4, 5]], 2, 50)
  config = tiny(drafter=ngram(table), draft=None)
  pair = measured_pair.make_pair(
    NETWORK, None, None, None, partitioning.Placement(), 0, config.drafter
  )
  assert pair.drafter is config.drafter
  assert isinstance(pair.params.draft.ids, jax.Array)
  record = benchmark.benchmark(config)
  assert record['weights'] == 'random'
  (setting,) = record['settings']
  (row,) = setting['gammas']
  assert row['cost_ratio_alone'] > 0
  with pytest.raises(ValueError, match='a drafter was given, which has its'):
    tiny(drafter=ngram(table), draft_params=table)


def test_the_grid_is_every_combination():
  config = tiny(batches=(1, 4), temperatures=(0.0, 1.0), decode_lens=(32, 64))
  points = list(benchmark.grid(config))
  assert len(set(points)) == 8
  assert points[0] == (1, 8, 32, 0.0)
  assert benchmark.num_steps(config) == 8 * config.repeats


def test_forced_acceptance_is_named_in_the_tables(measured, monkeypatch):
  """That it is forced, tests/suite_test.py shows."""
  record = {**measured[1], 'forced_acceptance': 1.0}
  monkeypatch.setattr(report, 'benchmark', lambda *_: record)
  console = rich.console.Console(record=True, width=160)
  report.show(tiny(forced_acceptance=1.0), console)
  text = ' '.join(console.export_text().split())
  # In the title of both tables.
  assert text.count('random weights, acceptance forced to 1.0') == 2


def test_random_parameters_are_made_in_their_dtype():
  params = measured_pair.random_params(NETWORK, 0, 'bfloat16')
  expected = jax.eval_shape(NETWORK.init, jax.random.key(0))
  assert jax.tree.map(jax.numpy.shape, params) == jax.tree.map(
    lambda leaf: leaf.shape, expected
  )
  assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'bfloat16'}
  tokens = jax.numpy.ones((1, 4), jax.numpy.int32)
  logits = jax.jit(NETWORK.logits)(partitioning.place(params), tokens, tokens)
  assert 0.1 < float(jax.numpy.std(logits)) < 10.0


def test_random_kernels_of_eight_bits():
  placement = partitioning.Placement('int8')
  pair = measured_pair.make_pair(NETWORK, None, None, None, placement, 0)
  with backend.compiled_for('gpu'):
    on_gpu = measured_pair.make_pair(NETWORK, None, None, None, placement, 0)
  names = {leaf.dtype.name for leaf in jax.tree.leaves(on_gpu.params)}
  # What was bfloat16 and is no kernel stays so.
  assert names == {'int8', 'float32', 'bfloat16'}
  tokens = jax.numpy.ones((1, 4), jax.numpy.int32)
  logits = jax.jit(NETWORK.logits)(pair.params.target, tokens, tokens)
  assert 0.1 < float(jax.numpy.std(logits)) < 10.0


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'gammas': (4, 0)}, 'gammas must .* at least 1, got .4, 0.'),
    ({'repeats': 0}, 'repeats must be at least 1'),
    ({'batches': 2}, 'batches: expected a sequence.*, got 2'),
    ({'forced_acceptance': 1.5}, r'must lie in \[0, 1\].*got 1.5'),
    ({'call_sizes': (2, 4)}, 'call_sizes must hold 1'),
  ],
)
def test_config_says_what_is_wrong(options, words):
  with pytest.raises(ValueError, match=words):
    benchmark.BenchmarkConfig(target=NETWORK, **options)


@dataclasses.dataclass
class Numbers:
  """Settings of three kinds."""

  count: int = 1
  share: float = 0.5
  sizes: tuple = (1, 2)


@pytest.mark.parametrize(
  ('value', 'words'),
  [
    ({'count': 0}, r'Numbers.count must be at least 1, got 0\.'),
    ({'count': 1.5}, 'Numbers.count must be a whole number, got 1.5'),
    ({'share': -0.1}, 'Numbers.share must be at least 0, got -0.1'),
    ({'share': float('nan')}, 'Numbers.share must be a finite number, got nan'),
    ({'sizes': ()}, r'Numbers.sizes must .*, got \(\)'),
    ({'sizes': (2, 0)}, r'Numbers.sizes must .* at least 1, got \(2, 0\)'),
  ],
)
def test_checks_of_numbers(value, words):
  def check(config):
    check_at_least(config, count=1, share=0.0)
    check_all_at_least(config, sizes=1)

  check(Numbers())
  with pytest.raises(ValueError, match=words):
    check(Numbers(**value))


def test_the_t5x_style_loop_gives_the_same_logits():
  params = measured_pair.random_params(NETWORK, 0, 'float32')
  inputs = jax.numpy.ones((2, 5), jax.numpy.int32)
  tokens = np.random.default_rng(1).integers(2, 50, (2, 6), np.int32)

  @functools.partial(jax.jit, static_argnums=0)
  def read(model, params):
    cache = model.prefill(params, inputs, 8)
    first, cache = model.extend(params, cache, tokens[:, :1])
    rest, _ = model.extend(params, cache, tokens[:, 1:])
    return first, rest

  ours_and_theirs = (NETWORK, t5x_style.T5XStyle(NETWORK.config))
  results = [read(model, params) for model in ours_and_theirs]
  for ours, theirs in zip(*results, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_one_hot_write_is_a_write():
  rng = np.random.default_rng(0)
  buffer = jax.numpy.asarray(rng.normal(size=(2, 3, 4, 8)), 'float32')
  new = jax.numpy.asarray(rng.normal(size=(2, 2, 3, 4)), 'float32')
  start = jax.numpy.asarray([0, 5])
  np.testing.assert_allclose(
    t5x_style.one_hot_write(buffer, new, start),
    kv_cache.write(buffer, new, start),
    rtol=1e-6,
  )
