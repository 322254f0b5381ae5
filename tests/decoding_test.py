"""Both loops: equality, edges, randomness, counts. Laws: see conformance."""

import functools

import jax
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import FinishReason

GREEDY = SamplingConfig(temperature=0.0)
SAMPLED = SamplingConfig(temperature=1.0)
VOCAB = 12


def make_request(
  batch=1,
  gamma=0,
  sampling=GREEDY,
  slots=20,
  seed=0,
  ids=None,
  inputs=(1, 2, 3),
  **options,
):
  """One shape for all tests, so that they share programs."""
  rows = np.zeros((batch, 5), np.int32)
  rows[:, : np.shape(inputs)[-1]] = inputs
  ids = np.asarray(range(batch) if ids is None else ids, np.int32)
  keys = toy_requests.keys_of(jax.random.key(seed), ids)
  return decode_state.new_request(
    rows,
    keys,
    sampling,
    slots=slots,
    gamma=gamma,
    **{'stop_ids': [1]} | options,
  )


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


@functools.cache
def cycle(period=10):
  """A chain that counts 2, 3, ... and goes on: greedy output is known."""
  table = np.zeros((VOCAB, VOCAB))
  table[0, 2] = 30.0
  for token in range(2, 2 + period):
    table[token, 2 + (token - 1) % period] = 30.0
  return toy_models.MarkovModel(table)


@pytest.mark.parametrize('perfect', [True, False])
def test_stop_at_each_position_of_a_draft(perfect):
  """The chain 2, 3, ..., 11 stops at each of its tokens in turn."""
  gamma, target = 3, cycle()
  draft = target if perfect else cycle(3)
  stops = np.arange(2, 12)
  for stop in stops:
    request = make_request(gamma=gamma, stop_ids=[int(stop)])
    result = speculate(target, draft, request)
    expected = np.arange(2, stop + 1)
    assert result.length[0] == len(expected)
    np.testing.assert_array_equal(result.tokens[0, : len(expected)], expected)
    assert not result.tokens[0, len(expected) :].any()
    assert not result.log_probs[0, len(expected) :].any()
    assert result.finish_reason[0] == FinishReason.STOP
  # On the last token of the budget it is a stop too.
  request = make_request(gamma=gamma, stop_ids=(5,), max_length=4)
  result = speculate(target, draft, request)
  assert (result.length[0], result.finish_reason[0]) == (4, FinishReason.STOP)


@pytest.mark.parametrize('gamma', [1, 3])
def test_budget_ends_at_each_position_of_a_draft(gamma):
  target = cycle()
  limits = np.arange(0, 12)
  request = make_request(batch=12, slots=11, gamma=gamma, max_length=limits)
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
  # Every round adds its accepted tokens and one of the target's.
  np.testing.assert_array_equal(limits, stats.num_accepted + stats.num_rounds)


@pytest.mark.parametrize('gamma', [0, 3])
def test_min_length_holds_stops_back(gamma):
  target = random_markov(2, VOCAB, order=1, scale=0.5)
  minimum = [0, 3, 8, 20, 5, 1]
  options = dict(
    batch=6, sampling=SAMPLED, stop_ids=(1, 2, 3, 4), min_length=minimum
  )
  result = speculate(target, target, make_request(gamma=gamma, **options))
  for row, least in enumerate(minimum):
    early = result.tokens[row, : min(least, result.length[row])]
    assert not np.isin(early, [1, 2, 3, 4]).any()
    assert result.length[row] >= min(least, 20)
  if gamma:
    # The drafter knows of it too: nothing of its own is turned away.
    np.testing.assert_array_equal(
      result.stats.num_accepted, result.stats.num_tested
    )


def test_log_probs_are_the_models_own():
  """Of temperature 1 and unfiltered, whatever the sampling was."""
  target = random_markov(1, VOCAB, order=2)
  draft = random_markov(2, VOCAB, order=1)
  sampling = SamplingConfig(temperature=0.5, top_k=3)
  result = speculate(
    target, draft, make_request(gamma=3, sampling=sampling, max_length=8)
  )
  prefix, inputs = [0], (1, 2, 3)
  for i in range(result.length[0]):
    logits = target.logits_after(prefix, inputs)
    expected = jax.nn.log_softmax(logits)[result.tokens[0, i]]
    np.testing.assert_allclose(result.log_probs[0, i], expected, atol=1e-5)
    prefix.append(int(result.tokens[0, i]))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('gamma', [0, 2])
def test_logits_that_are_no_distribution_end_the_row(bad, gamma):
  """Row 0 reaches the bad state after three tokens; row 1 never does."""
  table = np.array(cycle().params['table'])
  table[4, :] = bad
  target = toy_models.MarkovModel(table)
  request = make_request(
    batch=2, gamma=gamma, max_length=[20, 2], sampling=SAMPLED
  )
  result = speculate(target, target, request)
  assert result.finish_reason[0] == FinishReason.INVALID
  assert result.finish_reason[1] == FinishReason.LENGTH
  np.testing.assert_array_equal(result.tokens[0, :3], [2, 3, 4])
  assert result.length[0] == 4  # the token that could not be chosen is last
