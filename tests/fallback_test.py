"""A drafter that rests where it is wrong: outputs, counts, costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from drafter_conformance_test import adaptive_rule
from specdec_jax.decoding import fallback, speculative
from specdec_jax.decoding.fallback import Rests, of_round_costs
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import catch_up_calls, small_model
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.models import backend
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import DecodeStats, Draft, Verdict

VOCAB, GAMMA, ROWS = 5, 3, 4
TARGET = toy_models.random_markov(1, VOCAB, order=2, scale=1.2, input_scale=1)
# Never right: it says the opposite of the target.
WRONG = toy_models.MarkovModel(
  -4 * TARGET.params['table'], -4 * TARGET.params['offset']
)
DRAFTER = small_model(TARGET)
INPUTS = np.random.default_rng(0).integers(1, VOCAB, (ROWS, 4))
COSTS = jax.tree.map(
  jnp.asarray, of_round_costs([1.0, 1.9, 1.9, 1.9], 1.5, first_rest=32)
)
RULE = adaptive_rule(GAMMA)


def _request(slots, sampling, **changes):
  request = toy_requests.request_of(
    ROWS, GAMMA, sampling, slots, inputs=(0,), seed=3
  )
  given = {'inputs': jnp.asarray(INPUTS), 'fallback': COSTS}
  return request.replace(**given | changes)


@toy_requests.quick_jit
def _decode(request, params):
  return Loop(TARGET, DRAFTER).decode(
    PairParams(TARGET.params, params), request
  )


@toy_requests.quick_jit
def _plain(request):
  request = request.replace(gamma=0, rule=None, fallback=None)
  return Loop(TARGET).decode(PairParams(TARGET.params, None), request)


GREEDY = SamplingConfig(0.0)


@toy_requests.quick_jit
def account(costs, rests, accepted, length):
  """A row's account after a round that accepts so many of its proposals."""
  draft = Draft(jnp.zeros((1, GAMMA), jnp.int32), None, jnp.array([length]))
  verdict = Verdict(jnp.array([accepted]), jnp.array([0]))
  stats = DecodeStats.none(1, GAMMA)
  running = jnp.array([True])
  after = fallback.after_round(costs, rests, stats, running, draft, verdict)
  return after[0]


# c, what a token more in a call adds, gamma: as measured on one core and on
# two, and of a pair whose rounds cost much.
@pytest.mark.parametrize(
  ('cost', 'slope', 'gamma'), [(0.19, 0.02, 4), (0.3, 0.12, 2), (0.3, 0.1, 4)]
)
def test_a_drafter_that_is_always_wrong_takes_a_twentieth(cost, slope, gamma):
  """At most, of any output of 128 tokens and more, its catching up counted."""

  def call_cost(size):
    return 1 + slope * (size - 1)

  def most_lost(made):
    lost, rests, missed = [0.0], Rests.none(1), 0
    for _ in range(512):
      rested = bool(rests.left[0])
      calls = 2 * cost * catch_up_calls(missed) + float(made.costs[gamma]) - 1
      lost.append(lost[-1] + (0 if rested else calls))
      missed = missed + 1 if rested else 0
      rests = account(made, rests, 0, gamma * (not rested))
    return np.array(lost)[lengths]

  made = fallback.of_costs(cost, call_cost, gamma, adapts=False)
  lengths = np.arange(fallback.LEAST_OUTPUT, 512)
  assert np.all(most_lost(made) < 0.05 * lengths)
  # Control: with more patience it takes more.
  patient = made.replace(patience=np.float32(40))
  assert np.any(most_lost(patient) > 0.05 * lengths)


@pytest.mark.parametrize('rule', [None, RULE])
def test_a_wrong_drafter_rests_and_the_output_is_the_plain_one(rule):
  request = _request(200, GREEDY, rule=rule)
  have, want = _decode(request, WRONG.params), _plain(request)
  np.testing.assert_array_equal(have.tokens, want.tokens)
  rested, rounds = have.stats.fallback_rounds, have.stats.num_rounds
  np.testing.assert_array_less(rested, rounds)  # it probes
  np.testing.assert_array_less(0.95 * np.asarray(rounds), rested)
  # What was lost in all, in calls of the target, is under 5 %.
  drafted = np.asarray(rounds - rested)
  lost = np.asarray(rounds) + 0.9 * drafted - np.asarray(have.length)
  assert np.all(lost < 0.05 * 200)


def test_a_right_drafter_never_rests():
  request = _request(100, GREEDY)
  stats = _decode(request, TARGET.params).stats
  assert not np.any(stats.fallback_rounds)
  without = _decode(request.replace(fallback=None), TARGET.params).stats
  assert not np.any(without.fallback_rounds)
  np.testing.assert_array_equal(stats.histogram, without.histogram)


def test_the_drafter_that_comes_back_knows_what_it_missed():
  """After a rest of 32 tokens all its proposals are right again.

  Rows come back at different times, or never rest.
  """
  loop = Loop(TARGET, DRAFTER)
  request = _request(100, GREEDY)
  pair = PairParams(TARGET.params, TARGET.params)
  rests = Rests.none(ROWS).replace(left=jnp.array([0, 32, 5, 32]))

  @toy_requests.quick_jit
  def run(request):
    state = loop.start(pair, request).replace(rests=rests)
    return loop.run(pair, request, state)

  state = run(request)
  np.testing.assert_array_equal(state.stats.fallback_rounds, [0, 32, 5, 32])
  # Order 2: with a slot missing it would be wrong, or not a number.
  np.testing.assert_array_equal(
    state.stats.num_tested, state.stats.num_accepted
  )


def test_any_drafter_may_rest():
  drafter = with_fallback(prompt_lookup(), small_model(WRONG))
  params = (), WRONG.params
  request = _request(100, SamplingConfig(0.0), rule=None)
  loop = Loop(TARGET, drafter)
  decode = toy_requests.quick_jit(loop.decode)
  # With no patience each round that accepts little ends in a rest.
  request = request.replace(fallback=COSTS.replace(patience=np.float32(0.01)))
  found = decode(PairParams(TARGET.params, params), request)
  np.testing.assert_array_equal(found.tokens, _plain(request).tokens)
  assert np.any(found.stats.fallback_rounds)


def test_the_account_of_a_row():
  """Two bad rounds, a rest of 32, a bad probe, 128; gains end it."""
  rests = Rests.none(1)

  def rounds(rests, accepted):
    for n in accepted:
      rests = account(COSTS, rests, n, 3)
    return rests

  assert rounds(rests, [0]).left == 0
  rests = rounds(rests, [0, 0])
  assert rests.left == 32 and rests.count == 1 and rests.loss == 1.5
  rests = rounds(rests, [0] * 32)  # nothing is drafted, nothing is lost
  assert rests.left == 0 and rests.loss == 1.5
  assert rounds(rests, [0]).left == 128
  better = rounds(rests, [2])
  assert better.left == 0 and better.count == 1
  assert rounds(better, [3]).count == 0
  # Gains are remembered, but not for ever.
  assert rounds(better, [3] * 50).loss == -4 * 1.5


def test_calls_of_a_round_that_rests():
  """One token on a CPU; elsewhere there is one width."""
  request = _request(10, GREEDY)
  assert speculative.call_widths(request) == (1, GAMMA + 1)
  assert speculative.call_widths(request.replace(rule=RULE)) == (1, 2, 4)
  with backend.compiled_for('gpu'):
    assert speculative.call_widths(request) == (GAMMA + 1,)
  made = fallback.of_costs(0.2, lambda size: 1 + size / 10, 3, adapts=False)
  np.testing.assert_allclose(made.costs, [1.7, 2.0, 2.0, 2.0], rtol=1e-6)
  made = fallback.of_costs(0.2, lambda size: 1 + size / 10, 3, adapts=True)
  np.testing.assert_allclose(made.costs, [1.3, 1.4, 1.8, 2.0], rtol=1e-6)
