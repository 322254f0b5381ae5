"""Both loops: equality, edges, randomness, counts. Laws: see conformance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import FinishReason
from toy_models import cycle

GREEDY = SamplingConfig(temperature=0.0)
SAMPLED = SamplingConfig(temperature=1.0)
VOCAB = 12


def make_request(batch=1, gamma=0, sampling=GREEDY, **options):
  """Of 20 tokens; limits are arrays, or numbers of all rows."""
  options = {'stop_ids': [1], 'with_log_probs': True} | options
  for name in options.keys() & {'min_length', 'max_length'}:
    limit = np.broadcast_to(options[name], batch)
    options[name] = jnp.asarray(limit, jnp.int32)
  every = batch, gamma, sampling, 20
  inputs = (1, 2, 3, 0, 0)
  return toy_requests.request_of(*every, inputs=inputs, seed=0, **options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(target, drafter, params, request):
  return Loop(target, drafter).decode(params, request)


def speculate(target, draft, request):
  """Plainly with a gamma of 0."""
  params = PairParams(target.params, draft.params)
  drafter = model_drafter(draft) if request.gamma else None
  result = jax.device_get(_decode(target, drafter, params, request))
  stats = result.stats
  np.testing.assert_array_equal(stats.histogram.sum(axis=1), stats.num_rounds)
  accepted = stats.histogram @ np.arange(request.gamma + 1)
  np.testing.assert_array_equal(accepted, stats.num_accepted)
  assert (stats.num_tested >= accepted).all()
  assert (stats.num_tested <= accepted + stats.num_rounds).all()
  return result


# One object a model: a loop is compiled once for each, not once a test.
random_markov = functools.cache(toy_models.random_markov)
model_drafter = functools.cache(small_model)


@pytest.mark.parametrize('perfect', [True, False])
def test_stop_at_each_position_of_a_draft(perfect):
  """The chain 2, 3, ..., 11 stops at each of its tokens in turn."""
  target = cycle()
  draft = target if perfect else cycle(3)
  # On the last token of the budget it is a stop too.
  for stop, limit in (*((stop, 20) for stop in range(2, 12)), (5, 4)):
    request = make_request(gamma=3, stop_ids=[stop], max_length=limit)
    result = speculate(target, draft, request)
    expected = np.arange(2, stop + 1)
    assert result.length[0] == len(expected)
    np.testing.assert_array_equal(result.tokens[0, : len(expected)], expected)
    assert not result.tokens[0, len(expected) :].any()
    assert not result.log_probs[0, len(expected) :].any()
    assert result.finish_reason[0] == FinishReason.STOP


@pytest.mark.parametrize('gamma', [1, 3])
def test_budget_ends_at_each_position_of_a_draft(gamma):
  target, limits = cycle(), np.arange(0, 12)
  request = make_request(12, gamma, max_length=limits)
  result = speculate(target, target, request)
  np.testing.assert_array_equal(result.length, limits)
  np.testing.assert_array_equal(result.finish_reason, FinishReason.LENGTH)
  for row, limit in enumerate(limits):
    expected = 2 + np.arange(limit) % 10
    np.testing.assert_array_equal(result.tokens[row, :limit], expected)
  # What was not proposed is in no count: a perfect drafter stays perfect.
  stats = result.stats
  np.testing.assert_array_equal(stats.num_accepted, stats.num_tested)
  np.testing.assert_array_equal(stats.num_rounds, -(-limits // (gamma + 1)))


@pytest.mark.parametrize('gamma', [0, 3])
def test_min_length_holds_stops_back(gamma):
  target, minimum = random_markov(2, VOCAB, scale=0.5), [0, 3, 8, 20, 5, 1]
  options = dict(stop_ids=(1, 2, 3, 4), min_length=minimum, forbids_stops=True)
  request = make_request(6, gamma, SAMPLED, **options)
  result = speculate(target, target, request)
  for row, least in enumerate(minimum):
    early = result.tokens[row, : min(least, result.length[row])]
    assert not np.isin(early, [1, 2, 3, 4]).any()
    assert result.length[row] >= least
  # The drafter knows of it too: nothing of its own is turned away.
  stats = result.stats
  np.testing.assert_array_equal(stats.num_accepted, stats.num_tested)


def test_log_probs_are_the_models_own():
  """Of temperature 1 and unfiltered, whatever the sampling was."""
  target = random_markov(1, VOCAB, order=2)
  sampling = SamplingConfig(temperature=0.5, top_k=3)
  request = make_request(gamma=3, sampling=sampling)
  result = speculate(target, random_markov(2, VOCAB), request)
  tokens = result.tokens[0, : result.length[0]].tolist()
  for i, token in enumerate(tokens):
    want = jax.nn.log_softmax(target.logits_after((0, *tokens[:i])))[token]
    np.testing.assert_allclose(result.log_probs[0, i], want, atol=1e-5)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('gamma', [0, 2])
def test_logits_that_are_no_distribution_end_the_row(bad, gamma):
  """Row 0 reaches the bad state after three tokens; row 1 never does."""
  table = np.array(cycle().params['table'])
  table[4, :] = bad
  target = toy_models.MarkovModel(table)
  request = make_request(2, gamma, SAMPLED, max_length=[20, 2])
  result = speculate(target, target, request)
  want = [FinishReason.INVALID, FinishReason.LENGTH]
  np.testing.assert_array_equal(result.finish_reason, want)
  np.testing.assert_array_equal(result.tokens[0, :3], [2, 3, 4])
  assert result.length[0] == 4  # the token that could not be chosen is last


def test_control_a_chains_cache_shows_mistakes():
  """What the loops' tests rest on: a wrong rewind or slot shows as NaN."""
  model = toy_models.random_markov(1, VOCAB, order=2)

  def extend(cache, *tokens):
    return model.extend(model.params, cache, jnp.array([tokens], jnp.int32))

  empty = model.prefill(model.params, jnp.array([[1]]), 4)
  _, cache = extend(empty, 0, 1, 2)
  # A rewind that keeps a token too many or too few changes the law.
  right, wrong = (model.rewind(cache, jnp.array([n])) for n in (2, 1))
  assert not np.allclose(extend(right, 3)[0], extend(wrong, 3)[0])
  # A rewind forwards, over slots never written; a write past the end.
  ahead = model.rewind(right, jnp.array([3]))
  assert np.isnan(extend(ahead, 3)[0]).all()
  assert np.isnan(extend(cache, 3, 4)[0]).any()
