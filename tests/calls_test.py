"""The benchmark measures what it says; how fast it is, is not tested."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import toy_models
import toy_requests
from small_vocabulary import network
from specdec_jax import partitioning
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_table import fit
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure import calls
from specdec_jax.models import backend
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
  monkeypatch.setattr(calls.time, 'perf_counter', lambda: clock[0])
  order = []

  def make(name, cost):
    def prepare():
      clock[0] += 100.0

      def run():
        order.append(name)
        clock[0] += cost

      return run

    return prepare

  seconds = calls.interleave({'a': make('a', 1.0), 'b': make('b', 3.0)}, 3)
  assert order == ['a', 'b'] * 4  # one warm-up
  assert seconds == {'a': [1.0] * 3, 'b': [3.0] * 3}
  assert calls.summarise([3.0, 1.0, 2.0], 10) == {
    'median': 20.0,
    'min': 10.0,
    'max': 30.0,
    'error': pytest.approx(10 * 1.2533 * 1.4826 / 3**0.5),
  }


def tiny(**options):
  defaults = {'decode_lens': (32,), 'call_sizes': (1,), 'input_lens': (8,)}
  defaults |= {'calls_a_run': 2, 'repeats': 2, 'gammas': (3,)}
  defaults |= {'drafter': NETWORK}
  return calls.BenchmarkConfig(NETWORK, **defaults | options)


@pytest.fixture(scope='module')
def measured(folder):
  """The file, the record and what was shown of a run."""
  path = folder / 'out/record.json'
  console = rich.console.Console(record=True, width=120)
  config = tiny(
    batches=(2,), times_adapting=True, t5x_style=True, output_file=str(path)
  )
  return path, calls.show(config, console), console.export_text()


def test_a_whole_run_of_a_tiny_pair(measured):
  path, record, text = measured
  assert json.loads(path.read_text()) == record
  assert [setting['batch'] for setting in record['settings']] == [2]
  for setting in record['settings']:
    assert setting['call_cost']['1'] == 1.0
    (row,) = setting['gammas']
    assert row['gamma'] == 3
    a_round = setting['times_ms']['round_3']['median']
    assert row['t5x_style_speed_up'] > 0
    assert row['adapting_rounds'] == row['rounds']  # no draft ends early
    assert row['predicted_ms'] == pytest.approx(row['rounds'] * a_round)
    emitted = sum(n * (i + 1) for i, n in enumerate(row['histogram']))
    assert emitted == 32 * setting['batch']
  assert record['machine']['jax'] == jax.__version__
  assert record['weights'] == 'random'
  assert 'round_3' in text
  assert 'forced' not in text


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

  pair = calls.Pair(NETWORK, 2, 3)
  monkeypatch.setattr(calls, 'make_pair', lambda config: pair)
  monkeypatch.setattr(calls, '_prepare_calls', prepare_calls)
  monkeypatch.setattr(calls, '_prepare_gamma', prepare_gamma)
  monkeypatch.setattr(calls, 'matvec', lambda: (None, 1))
  monkeypatch.setattr(calls, 'interleave', interleave)
  said = []
  record = calls.benchmark(tiny(gammas=(1, 3)), say=said.append)
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
  pair = calls.Pair(NETWORK, drafter, PairParams(None, ()))
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
  pair = calls.make_pair(calls.BenchmarkConfig(DECODER_ONLY, DECODER_ONLY))
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


def test_random_kernels_of_eight_bits():
  placement = partitioning.Placement('int8')
  config = calls.BenchmarkConfig(NETWORK, placement=placement)
  pair = calls.make_pair(config)
  with backend.compiled_for('gpu'):
    on_gpu = calls.make_pair(config)
  names = {leaf.dtype.name for leaf in jax.tree.leaves(on_gpu.params)}
  # What was bfloat16 and is no kernel stays so.
  assert names == {'int8', 'float32', 'bfloat16'}
  tokens = jax.numpy.ones((1, 4), jax.numpy.int32)
  logits = jax.jit(NETWORK.logits)(pair.params.target, tokens, tokens)
  assert 0.1 < float(jax.numpy.std(logits)) < 10.0


def test_drafters_without_a_network():
  """What they need is placed and nothing is drawn for them."""
  config = tiny(drafter=ngram(fit([[0, 3, 4, 5]], 2, 50)))
  pair = calls.make_pair(config)
  assert pair.drafter.name == 'ngram'
  assert isinstance(pair.params.draft.ids, jax.Array)
  assert calls.described(config)['weights'] == 'random'


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'gammas': (4, 0)}, 'gammas.*4, 0.'),
    ({'repeats': 0}, 'repeats.*0'),
    ({'batches': 2}, 'batches.*2'),
    ({'forced_acceptance': 1.5}, 'forced_acceptance.*1.5'),
    ({'call_sizes': (2, 4)}, 'call_sizes.*2, 4'),
    ({'target': DECODER_ONLY, 't5x_style': True}, 'target.*GPT'),
  ],
)
def test_config_says_what_is_wrong(options, words):
  with pytest.raises(ValueError, match=words):
    calls.BenchmarkConfig(**{'target': NETWORK} | options)


def test_the_t5x_style_loop_gives_the_same_logits():
  params = calls.random_params(NETWORK, 0, 'float32')
  inputs = jax.numpy.ones((2, 5), jax.numpy.int32)
  tokens = np.random.default_rng(1).integers(2, 50, (2, 6), np.int32)

  @functools.partial(jax.jit, static_argnums=0)
  def read(model, params):
    cache = model.prefill(params, inputs, 8)
    first, cache = toy_requests.read(model, params, cache, tokens[:, :1])
    rest, _ = toy_requests.read(model, params, cache, tokens[:, 1:])
    return first, rest

  ours_and_theirs = (NETWORK, calls.T5XStyle(NETWORK.config))
  results = [read(model, params) for model in ours_and_theirs]
  for ours, theirs in zip(*results, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


# Forced acceptance: the loop accepts at the rate that it is told.
ROWS, SLOTS, GAMMA = 64, 61, 3
MARKOV = toy_models.random_markov(1, 6)
MARKOV_DRAFT = toy_models.random_markov(2, 6)
MARKOV_DRAFTER = small_model(MARKOV_DRAFT)
PARAMS = PairParams(MARKOV.params, MARKOV_DRAFT.params)


@functools.partial(jax.jit, static_argnums=(1, 2))
def histogram(rate, temperature, seed):
  """Rounds of all rows by what they accepted, int32[G + 1]."""
  request = calls.make_request(
    jnp.ones((ROWS, 2), jnp.int32),
    SLOTS,
    GAMMA,
    SamplingConfig(temperature=temperature),
    seed,
  )
  loop = Loop(MARKOV, MARKOV_DRAFTER, calls.forced_judge(rate))
  state = loop.run(PARAMS, request, loop.start(PARAMS, request))
  return jnp.stack([state.stats.num_accepted, state.stats.num_tested], 1)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_the_rate_is_the_one_asked_for(temperature):
  """Binomial, 4 standard errors; the other rate must lie outside of them."""
  for asked, other in ((0.3, 0.8), (0.8, 0.3)):
    counts = histogram(jnp.float32(asked), temperature, 0)
    accepted, tested = np.asarray(counts).sum(axis=0)
    error = (asked * (1 - asked) / tested) ** 0.5
    assert tested > 2000
    assert abs(accepted / tested - asked) < 4 * error
    assert abs(accepted / tested - other) > 4 * error


def test_other_rates_do_not_recompile():
  before = histogram._cache_size()
  for rate in (0.1, 0.5, 0.9):
    histogram(jnp.float32(rate), 0.0, 0)
  assert histogram._cache_size() - before <= 1


def test_the_ends_are_exact():
  accepted, tested = np.asarray(histogram(jnp.float32(0.0), 0.0, 0)).T
  assert not accepted.any()
  assert (tested == SLOTS - 1).all()  # nothing is proposed for the last token
  accepted, tested = np.asarray(histogram(jnp.float32(1.0), 0.0, 0)).T
  # 15 rounds of 4 tokens, then one of the target's own.
  assert (accepted == 45).all() and (tested == 45).all()
