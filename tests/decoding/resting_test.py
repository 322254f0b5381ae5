"""When a draft ends and when a drafter rests: laws, outputs, counts, costs.

`drafters/conformance_test` runs an adaptive length through the demands on every
drafter.
"""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax.decoding import resting, speculative
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.pool import take_rows
from specdec_jax.decoding.resting import Rests
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters import base
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import (
  adaptive_draft,
  catch_up_calls,
  plain_rule,
  small_model,
)
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.models import backend
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import Drafting, RestPolicy
from specdec_jax.types import Draft, Verdict
from toy_drafters import adaptive_rule
from verify_laws import law_error, pair

VOCAB, GAMMA, ROWS = 5, 3, 6
TARGET = toy_models.random_markov(1, VOCAB, order=2, scale=1.2, input_scale=1)
_NOISE = toy_models.random_markov(2, VOCAB, order=2, scale=0.6).params['table']
NEAR = TARGET.params | {'table': TARGET.params['table'] + _NOISE}
# Never right: it says the opposite of the target.
WRONG = {name: -4 * array for name, array in TARGET.params.items()}
DRAFTER = small_model(TARGET)
INPUTS = np.random.default_rng(0).integers(1, VOCAB, (ROWS, 4))
GREEDY = SamplingConfig(0.0)
COSTS = jax.tree.map(
  jnp.asarray,
  RestPolicy(np.float32([1, 1.9, 1.9, 1.9]), np.float32(1.5), np.int32(32)),
)
# Of one dtype that is not weak, as all that replaces a part of it: one program.
RULE = jax.tree.map(np.float32, adaptive_rule(GAMMA))


def _request(slots, **changes):
  request = toy_requests.request_of(
    ROWS, GAMMA, GREEDY, slots, inputs=(0,), seed=3, **changes
  )
  return request.replace(inputs=jnp.asarray(INPUTS))


@toy_requests.quick_jit
def _decode(request, draft):
  params = PairParams(TARGET.params, draft)
  return Loop(TARGET, DRAFTER).decode(params, request)


@toy_requests.quick_jit
def _plain(request):
  request = request.replace(drafting=Drafting())
  return Loop(TARGET).decode(PairParams(TARGET.params, None), request)


# --- Drafts that end early ----------------------------------------------------


def _lengths(draft, gamma, vocab_size, rule):
  """How much of each of V^gamma drafts the shipped loop proposes.

  Row by row it is made to draw the tokens of one of them.
  """
  proposals = list(itertools.product(range(vocab_size), repeat=gamma))
  tokens = jnp.array(proposals)
  logits = jnp.array(
    [[np.log(draft(t[:i])) for i in range(gamma)] for t in proposals]
  )
  batch = len(proposals)
  context = toy_requests.context_of(
    [(0,)] * batch, gamma, SamplingConfig(1.0), budget=jnp.full((batch,), gamma)
  )
  rule = jax.tree.map(jnp.asarray, rule)
  context = context.within(drafting=Drafting(gamma, rule))

  def draw(logits, context, place):
    drawn = jnp.take_along_axis(tokens, place[:, None], axis=1)[:, 0]
    return drawn, jax.nn.softmax(logits)

  def read(index, token):
    del token
    return logits[:, index + 1], index + 1

  # In place of random numbers, where they would be used.
  places = jnp.tile(jnp.arange(gamma)[:, None], (1, batch))
  with mock.patch.multiple(
    base, draft_uniforms=lambda context: places, draw=draw
  ):
    made = toy_requests.quick_jit(
      lambda context: adaptive_draft(logits[:, 0], 0, context, read)[0]
    )(context)
  np.testing.assert_array_equal(made.tokens[:, 0], tokens[:, 0])
  found = np.asarray(made.length)
  return dict(zip(proposals, found.tolist(), strict=True))


def test_law_of_a_draft_that_ends_early():
  """The joint law of gamma + 1 tokens, over all drafts and random numbers."""
  target, draft = pair(20, 6)
  seen = set()
  for rule in (adaptive_rule(2), plain_rule([0.45] * 2, [0.0] * 2)):
    lengths = _lengths(draft, 2, 6, rule)
    seen |= set(lengths.values())
    assert law_error(target, draft, 2, 6, length=lengths.get) < 1e-6
  assert len(seen) > 1  # or no draft ended early


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours():
  """Alone it makes narrower calls, and its loop ends earlier.

  Rows are drawn, their drafts adapt, and some of their rounds rest.
  """
  rests = COSTS.replace(patience=np.float32(0.01))
  request = _request(40, draft_rule=RULE, rests=rests, greedy=False)
  request = request.replace(sampling=SamplingConfig(1.0).params(ROWS))
  together = _decode(request, NEAR)
  each = (take_rows(request, np.array([i])) for i in range(ROWS))
  alone = (_decode(row, NEAR) for row in each)
  alone = jax.tree.map(lambda *rows: np.concatenate(rows), *alone)
  np.testing.assert_array_equal(together.tokens, alone.tokens)
  jax.tree.map(np.testing.assert_array_equal, together.stats, alone.stats)
  assert np.any(together.stats.fallback_rounds)


def test_each_price_ends_a_draft():
  """What is worth less than it costs is not proposed, or not asked for."""

  def accepted(**changes):
    found = _decode(_request(40, draft_rule=RULE.replace(**changes)), NEAR)
    return np.asarray(found.stats.num_tested)

  never, always = (np.full(GAMMA, worth, np.float32) for worth in (1, -1))
  assert not accepted(worth=never).any()
  first = accepted(worth=always, worth_asking=never)
  every = accepted(worth=always, worth_asking=always)
  assert np.all(first > 0) and np.all(every >= first) and np.any(every > first)


# --- Drafters that rest -------------------------------------------------------


@toy_requests.quick_jit
def account(costs, rests, accepted, length):
  """A row's account after a round that accepts so many of its proposals."""
  draft = Draft(jnp.zeros((1, GAMMA), jnp.int32), None, jnp.array([length]))
  verdict = Verdict(jnp.array([accepted]), jnp.array([0]))
  return rests.after_round(costs, draft, verdict)


# c, what a token more in a call adds, gamma: as measured on one core and on
# two, and of a pair whose rounds cost much.
@pytest.mark.parametrize(
  ('cost', 'slope', 'gamma'), [(0.19, 0.02, 4), (0.3, 0.12, 2), (0.3, 0.1, 4)]
)
def test_a_drafter_that_is_always_wrong_takes_a_twentieth(cost, slope, gamma):
  """At most, of any output of 128 tokens and more, its catching up counted."""
  made = resting.of_costs(
    cost, lambda size: 1 + slope * (size - 1), gamma, adapts=False
  )
  lengths = np.arange(resting.LEAST_OUTPUT, 512)

  def most_lost(made):
    lost, rests, missed = [0.0], Rests.none(1), 0
    for _ in range(512):
      rested = bool(rests.left[0])
      calls = 2 * cost * catch_up_calls(missed) + float(made.costs[gamma]) - 1
      lost.append(lost[-1] + (0 if rested else calls))
      missed = missed + 1 if rested else 0
      rests = account(made, rests, 0, gamma * (not rested))
    return np.array(lost)[lengths]

  assert np.all(most_lost(made) < 0.05 * lengths)
  # Control: with more patience it takes more.
  patient = made.replace(patience=np.float32(40))
  assert np.any(most_lost(patient) > 0.05 * lengths)


def test_a_wrong_drafter_rests_and_the_output_is_the_plain_one():
  request = _request(200, rests=COSTS)
  have, want = _decode(request, WRONG), _plain(request)
  np.testing.assert_array_equal(have.tokens, want.tokens)
  rested, rounds = have.stats.fallback_rounds, have.stats.num_rounds
  np.testing.assert_array_less(rested, rounds)  # it probes
  np.testing.assert_array_less(0.95 * np.asarray(rounds), rested)


def test_a_right_drafter_never_rests():
  request = _request(200, rests=COSTS)
  stats = _decode(request, TARGET.params).stats
  without = _decode(request.with_drafting(rests=None), TARGET.params).stats
  assert not np.any(stats.fallback_rounds)
  jax.tree.map(np.testing.assert_array_equal, stats, without)


def test_the_drafter_that_comes_back_knows_what_it_missed():
  """After a rest of 32 tokens all its proposals are right again.

  Rows come back at different times, or never rest.
  """
  loop = Loop(TARGET, DRAFTER)
  both = PairParams(TARGET.params, TARGET.params)
  left = jnp.array([0, 32, 5, 32, 0, 1])
  rests = Rests.none(ROWS).replace(left=left)

  @toy_requests.quick_jit
  def run(request):
    state = loop.start(both, request).replace(rests=rests)
    return loop.run(both, request, state)

  stats = run(_request(200, rests=COSTS)).stats
  np.testing.assert_array_equal(stats.fallback_rounds, left)
  # Order 2: with a slot missing it would be wrong, or not a number.
  np.testing.assert_array_equal(stats.num_tested, stats.num_accepted)


def test_any_drafter_may_rest():
  """With no patience each round that accepts little ends in a rest."""
  request = _request(200, rests=COSTS.replace(patience=np.float32(0.01)))
  loop = Loop(TARGET, with_fallback(prompt_lookup(), DRAFTER))
  params = PairParams(TARGET.params, ((), WRONG))
  found = toy_requests.quick_jit(loop.decode)(params, request)
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
  request, widths = _request(10, rests=COSTS), speculative.call_widths
  assert widths(request) == (1, GAMMA + 1)
  assert widths(request.with_drafting(draft_rule=RULE)) == (1, 2, 4)
  with backend.compiled_for('gpu'):
    assert widths(request) == (GAMMA + 1,)
