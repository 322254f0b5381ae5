"""Both loops: equality, edges, randomness, counts. Laws: see conformance."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax import probs
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.small_model import small_model
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft, FinishReason

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


def speculate(target, draft, request, drafter=None):
  """Plainly with a gamma of 0."""
  params = PairParams(target.params, draft.params)
  drafter = (drafter or model_drafter(draft)) if request.gamma else None
  return jax.device_get(_decode(target, drafter, params, request))


# One object a model: a loop is compiled once for each, not once a test.
random_markov = functools.cache(toy_models.random_markov)
model_drafter = functools.cache(small_model)


@functools.cache
def cycle(period=10, scale=30.0):
  """A chain that counts 2, 3, ... and goes on: greedy output is known."""
  table = np.zeros((VOCAB, VOCAB))
  table[0, 2] = scale
  for token in range(2, 2 + period):
    table[token, 2 + (token - 1) % period] = scale
  return toy_models.MarkovModel(table)


def always(token_of):
  """A deterministic drafter that proposes token_of(last token)."""

  def propose(params, state, context):
    del params
    index = context.length[:, None] - 1
    token = jnp.take_along_axis(context.tokens, index, axis=1)
    drafted = []
    for _ in range(context.gamma):
      token = token_of(token)
      drafted.append(token)
    tokens = jnp.concatenate(drafted, axis=1)
    length = jnp.full(tokens.shape[:1], context.gamma, jnp.int32)
    return Draft(tokens, None, length), state

  return Drafter(lambda *_: (), propose, lambda state, _: state)


@functools.cache
def mostly_wrong():
  return always(lambda token: token % 3 + 2)


@pytest.mark.parametrize('perfect', [True, False])
def test_stop_at_each_position_of_a_draft(perfect):
  """The chain 2, 3, ..., 11 stops at each of its tokens in turn."""
  gamma = 3
  target = cycle()
  drafter = None if perfect else mostly_wrong()
  stops = np.arange(2, 12)
  for stop in stops:
    request = make_request(gamma=gamma, stop_ids=[int(stop)])
    result = speculate(target, target, request, drafter)
    expected = np.arange(2, stop + 1)
    assert result.length[0] == len(expected)
    np.testing.assert_array_equal(result.tokens[0, : len(expected)], expected)
    assert not result.tokens[0, len(expected) :].any()
    assert not result.log_probs[0, len(expected) :].any()
    assert result.finish_reason[0] == FinishReason.STOP
  # On the last token of the budget it is a stop too.
  request = make_request(gamma=gamma, stop_ids=(5,), max_length=4)
  result = speculate(target, target, request, drafter)
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


def test_a_row_does_not_depend_on_its_neighbours():
  target = random_markov(1, VOCAB, order=2, input_scale=1.0)
  draft = random_markov(2, VOCAB, order=1, input_scale=1.0)
  inputs = np.random.default_rng(1).integers(1, VOCAB, (6, 4))
  options = dict(gamma=3, sampling=SAMPLED, seed=9)
  together = speculate(
    target, draft, make_request(batch=6, inputs=inputs, **options)
  )
  alone = speculate(
    target, draft, make_request(inputs=inputs[4:5], ids=[4], **options)
  )
  np.testing.assert_array_equal(together.tokens[4], alone.tokens[0])
  np.testing.assert_array_equal(
    together.stats.histogram[4], alone.stats.histogram[0]
  )
  other = speculate(
    target, draft, make_request(inputs=inputs[4:5], ids=[5], **options)
  )
  assert (other.tokens[0] != alone.tokens[0]).any()


def test_counts_add_up():
  target = random_markov(1, VOCAB, order=2, scale=2.0)
  draft = random_markov(4, VOCAB, order=1)
  request = make_request(batch=6, gamma=3, sampling=SAMPLED, stop_ids=[])
  result = speculate(target, draft, request)
  stats = result.stats
  np.testing.assert_array_equal(stats.histogram.sum(axis=1), stats.num_rounds)
  accepted = (stats.histogram * np.arange(4)).sum(axis=1)
  np.testing.assert_array_equal(accepted, stats.num_accepted)
  # Every round adds its accepted tokens and one of the target's.
  np.testing.assert_array_equal(result.length, accepted + stats.num_rounds)
  assert (stats.num_tested >= stats.num_accepted).all()
  assert (stats.num_tested <= stats.num_accepted + stats.num_rounds).all()


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


def test_stop_ids_that_come_too_early_are_masked():
  """Rows that have 0 and 3 tokens of 2; places that stand for other ids."""
  logits = jnp.zeros((2, 3, 4))
  stop_ids, produced = jnp.array([1, -1]), jnp.array([0, 3])
  limits = jnp.array([2, 2])
  masked = probs.forbid_early_stops(logits, stop_ids, produced, limits)
  want = np.zeros((2, 3, 4))
  want[0, :2, 1] = -np.inf
  np.testing.assert_array_equal(masked, want)
  ids = jnp.tile(jnp.array([1, 0, 2, 1]), (2, 3, 1))
  masked = probs.forbid_early_stops(logits, stop_ids, produced, limits, ids)
  want = np.zeros((2, 3, 4))
  want[0, :2, [0, 3]] = -np.inf
  np.testing.assert_array_equal(masked, want)
  # Rows that have stop ids of their own.
  each = jnp.array([[1, -1], [2, 3]])
  masked = probs.forbid_early_stops(
    logits, each, jnp.array([0, 1]), jnp.array([1, 3])
  )
  where = np.argwhere(np.isneginf(np.asarray(masked))).tolist()
  assert where == [[0, 0, 1], [1, 0, 2], [1, 0, 3], [1, 1, 2], [1, 1, 3]]
  request = types.SimpleNamespace(stop_ids=each)
  stops = decode_state.is_stop(request, np.array([[1, 2], [1, 2]]))
  assert stops.tolist() == [[True, False], [False, True]]
