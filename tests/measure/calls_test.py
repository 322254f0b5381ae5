"""The benchmark measures what it says; how fast it is, is not tested."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import toy_models
import toy_requests
from small_vocabulary import decoder_only, network
from specdec_jax import analysis, partitioning
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure import calls
from specdec_jax.models import backend
from specdec_jax.types import Draft

# All that is compiled has one layer: only shapes matter here.
NETWORK = network(1, vocab_size=50)


def test_runs_take_turns_and_preparation_is_not_timed(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(calls.time, 'perf_counter', lambda: clock[0])
  order = []

  def make(name, cost, count):
    def prepare():
      clock[0] += 100.0

      def run():
        order.append(name)
        clock[0] += cost

      return run

    return calls.Run(prepare, count)

  times = calls.interleave({'a': make('a', 1.0, 1), 'b': make('b', 3.0, 2)}, 3)
  for turn in range(4):  # the first is a warm-up
    assert sorted(order[2 * turn : 2 * turn + 2]) == ['a', 'b']
  assert times == {'a': [1e3] * 3, 'b': [1.5e3] * 3}
  error = pytest.approx(1.2533 * 1.4826 / 3**0.5)
  want = {'median': 2.0, 'min': 1.0, 'max': 3.0, 'error': error}
  assert calls.summarise([3.0, 1.0, 2.0]) == want


def test_times_that_cannot_be_are_measured_again(monkeypatch):
  """Some times, and then it is said."""
  start = {'encoder': [1.0] * 3, 'start': [1.0] * 3}
  start['call_1'] = [1.0] * 3
  right, wrong = (start | {'call_2': [ms] * 3} for ms in (1.4, 0.5))
  for series, said, want in (
    ([right], '', 1.4),
    # Of the rounds of both times.
    ([wrong, right], '', 0.95),
    ([wrong] * calls._ATTEMPTS, 'a call over 2 tokens took 0.50', 0.5),
  ):
    left = iter(series)
    monkeypatch.setattr(calls, 'interleave', lambda *_, of=left: next(of))
    moves = list[int]()
    times, found = calls.steady_ms(dict.fromkeys(right), 3, moves.append)
    assert moves == [-3] * (len(series) - 1), 'a bar goes back'
    assert found.startswith(said) and bool(found) == bool(said)
    assert times['call_2']['median'] == want and not [*left]
  # When the time is over it is not measured again.
  monkeypatch.setattr(calls, 'interleave', lambda *_: wrong)
  assert len(calls.steady_ms(dict.fromkeys(right), 3, until=0.0)) == 2


def tiny(**options):
  least = {'call_sizes': (1,), 'decode_len': 32, 'input_len': 8, 'repeats': 2}
  return calls.BenchmarkConfig(NETWORK, NETWORK, **least | options)


@pytest.mark.slow
def test_a_whole_run_of_a_tiny_pair(tmp_path, monkeypatch):
  head, shapes = type(NETWORK).head, []

  def heard(self, params, features):
    shapes.append(features.shape[:2])
    return head(self, params, features)

  monkeypatch.setattr(type(NETWORK), 'head', heard)
  # The calls of a toy take microseconds.
  monkeypatch.setattr(calls, 'contradiction', lambda _: '')
  path = tmp_path / 'out/record.json'
  console = rich.console.Console(record=True, width=120)
  options = {'batch': 2, 'calls_a_run': 2, 'output_file': str(path)}
  options |= {'gammas': (3,), 'call_sizes': (1, 3), 'forced_acceptance': 1.0}
  config = tiny(**options)
  record = calls.benchmark(config, console)
  assert (2, 3) in shapes  # a call ends with the output layer
  assert json.loads(path.read_text()) == record
  median = {name: ms['median'] for name, ms in record['times_ms'].items()}
  cost = median['call_4'] / median['call_1']
  three = median['call_3'] / median['call_1']
  assert record['call_cost'] == {'1': 1.0, '3': three, '4': cost}
  (row,) = record['gammas']
  assert row['gamma'] == 3
  # Eight rounds of four tokens in each row.
  assert row['histogram'] == [0, 0, 0, 16] and row['acceptance_rate'] == 1.0
  # What a round takes beyond the target's call, for each proposal.
  more = max(0.0, median['round_3'] - median['call_4'])
  assert row['cost_ratio'] == pytest.approx(more / 3 / median['call_1'])
  expected = analysis.walltime_factor(1.0, 3, row['cost_ratio'], cost)
  assert row['expected_speed_up'] == pytest.approx(float(expected))
  text = console.export_text()
  assert 'expected speed-up' in text and 'acceptance forced to 1.0' in text
  # Times that contradict themselves predict nothing.
  monkeypatch.setattr(calls, 'contradiction', lambda _: 'a call took less')
  config = dataclasses.replace(config, output_file=None)
  record = calls.benchmark(config, console)
  (row,) = record['gammas']
  assert row['expected_speed_up'] is None and row['speed_up'] > 0
  assert 'No speed-up is predicted: a call took less' in console.export_text()


def test_a_round_makes_proposals_that_are_not_accepted():
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
  request = calls.make_request(NETWORK, 1, 4, 16, 0.0, 0, gamma=2)
  params = PairParams(calls.random_params(NETWORK, 0, 'float32'), ())
  loop = Loop(NETWORK, drafter, calls.forced_judge(0.0))
  run = calls.loop_run(loop, jax.jit(loop.start), params, request, 5)
  prepared = run.prepare()
  made.clear()  # by the rounds before the clock starts
  state = jax.block_until_ready(prepared())
  assert len(made) == run.steps == 5
  assert state.stats.num_accepted.sum() == 0


def test_what_a_decoder_only_pair_reads_is_its_prompt():
  request = calls.make_request(decoder_only(), 2, 4, 8, 0.0, 0, gamma=2)
  assert request.prompt.shape == (2, 5) and request.inputs.shape == (2, 1)
  assert request.prompt[:, 0].tolist() == [0, 0]
  assert request.prompt_length.tolist() == [5, 5]
  assert int(request.prompt[:, 1:].min()) >= 3


def test_random_kernels():
  """They keep the size of activations; of eight bits they are drawn so."""
  params = calls.random_params(NETWORK, 0, 'float32')
  tokens = jnp.ones((1, 4), jnp.int32)
  logits = toy_requests.quick_jit(NETWORK.logits)(params, tokens, tokens)
  assert 0.1 < float(jnp.std(logits)) < 10.0
  config = tiny(placement=partitioning.Placement('int8'))
  with backend.compiled_for('gpu'):
    on_gpu = config.pair()
  names = {leaf.dtype.name for leaf in jax.tree.leaves(on_gpu.params)}
  # What was bfloat16 and is no kernel stays so.
  assert names == {'int8', 'float32', 'bfloat16'}


# Forced acceptance: the loop accepts at the rate that it is told.
ROWS, SLOTS, GAMMA = 64, 61, 3
MARKOV = toy_models.random_markov(1, 6)
MARKOV_DRAFT = toy_models.random_markov(2, 6)
PARAMS = PairParams(MARKOV.params, MARKOV_DRAFT.params)


@functools.partial(jax.jit, static_argnums=1)
def counts(rate, temperature):
  """Of each row: proposals that were accepted and tested, int32[B, 2]."""
  request = calls.make_request(MARKOV, ROWS, 2, SLOTS, temperature, 0, GAMMA)
  loop = Loop(MARKOV, small_model(MARKOV_DRAFT), calls.forced_judge(rate))
  state = loop.run(PARAMS, request, loop.start(PARAMS, request))
  return jnp.stack([state.stats.num_accepted, state.stats.num_tested], 1)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_the_rate_is_the_one_asked_for(temperature):
  """Binomial, 4 standard errors; the other rate must lie outside of them."""
  for asked, other in ((0.3, 0.8), (0.8, 0.3)):
    made = counts(jnp.float32(asked), temperature)
    accepted, tested = np.asarray(made).sum(axis=0)
    error = (asked * (1 - asked) / tested) ** 0.5
    assert tested > 2000 and abs(accepted / tested - asked) < 4 * error
    assert abs(accepted / tested - other) > 4 * error
  # The ends are exact. Nothing is proposed for the last token; if all is
  # accepted there are 15 rounds of 4 tokens, then one of the target's own.
  for asked, ends in ((0.0, [0, SLOTS - 1]), (1.0, [45, 45])):
    assert (np.asarray(counts(jnp.float32(asked), temperature)) == ends).all()
