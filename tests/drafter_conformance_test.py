"""The suite that every drafter runs through: one list, the same demands.

A new drafter is a line in `DRAFTERS`. Each must be lossless (greedy equality,
and chi-squared on joint n-grams of sampled output, beside negative controls
that must fail), must not recompile, and must be right after every acceptance
count, alone and in a ragged batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax.speculative as algorithm
from specdec_jax import testing
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.small_model import small_model
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft

VOCAB = 5
LENGTH = 4  # tokens whose joint law is tested: several rounds, V^4 cells
ROWS = 20_000  # samples a test
ALPHA = 1e-3  # of a false alarm, once and for all with the seed below
SEED = 20
STOP = 1

# Order 2: one stale, skipped or doubled slot changes the distribution.
TARGET = testing.random_markov(1, VOCAB, order=2, scale=1.2)
DRAFT = testing.random_markov(2, VOCAB, order=2, scale=0.8)


def _short_drafts(model) -> Drafter:
  """`small_model` that proposes 0, 1, ... gamma tokens, row by row."""
  drafter = small_model(model)

  def propose(params, state, context):
    draft, state = drafter.propose(params, state, context)
    length = (context.length + jnp.arange(len(context.length))) % (
      context.gamma + 1
    )
    return draft.replace(length=length.astype(jnp.int32)), state

  return drafter._replace(propose=propose)


def _constant(token: int) -> Drafter:
  """Proposes one token again and again, deterministically (one-hot)."""

  def propose(params, state, context):
    del params
    batch = context.length.shape[0]
    tokens = jnp.full((batch, context.gamma), token, jnp.int32)
    return Draft(tokens, None, jnp.full((batch,), context.gamma)), state

  return Drafter(lambda *_: (), propose, lambda state, _: state)


# name -> (drafter, its parameters)
DRAFTERS = {
  'small_model': (small_model(DRAFT), DRAFT.params),
  'small_model_is_target': (small_model(TARGET), TARGET.params),
  'short_drafts': (_short_drafts(DRAFT), DRAFT.params),
  'deterministic': (_constant(3), ()),
}
every_drafter = pytest.mark.parametrize('name', DRAFTERS)


def request_of(rows, gamma, sampling, slots=LENGTH, max_length=None):
  keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
    jax.random.key(SEED), jnp.arange(rows)
  )
  limits = slots if max_length is None else max_length
  return decode_state.Request(
    inputs=jnp.ones((rows, 2), jnp.int32),
    keys=keys,
    sampling=sampling.params(rows),
    stop_ids=jnp.array([STOP, -1]),
    min_length=jnp.zeros((rows,), jnp.int32),
    max_length=jnp.broadcast_to(jnp.asarray(limits, jnp.int32), (rows,)),
    slots=slots,
    gamma=gamma,
    greedy=sampling.greedy,
    with_log_probs=False,
  )


@functools.partial(jax.jit, static_argnums=0)
def _decode(drafter, params, request):
  pair = PairParams(TARGET.params, params)
  state = speculative.start(TARGET, drafter, pair, request)
  limit = decode_state.NO_ROUND_LIMIT
  state = speculative.run(TARGET, drafter, pair, request, state, limit)
  return decode_state.generation(request, state)


@jax.jit
def _plain(request):
  state = autoregressive.start(TARGET, TARGET.params, request)
  limit = decode_state.NO_ROUND_LIMIT
  state = autoregressive.run(TARGET, TARGET.params, request, state, limit)
  return decode_state.generation(request, state)


def p_value(tokens, sampling) -> float:
  law = TARGET.law(LENGTH, sampling, inputs=(1, 1), stop_ids=(STOP,))
  return testing.chi_squared_p_value(testing.count_ngrams(tokens, VOCAB), law)


def decode_p_value(drafter, params, gamma, sampling) -> float:
  result = _decode(drafter, params, request_of(ROWS, gamma, sampling))
  return p_value(jax.device_get(result.tokens), sampling)


SAMPLINGS = {
  't1': SamplingConfig(1.0),
  't0.7': SamplingConfig(0.7),
  'top_k': SamplingConfig(1.0, top_k=3),
  'top_p': SamplingConfig(1.0, top_p=0.8),
}


@pytest.mark.parametrize('sampling', SAMPLINGS)
@pytest.mark.parametrize('gamma', [1, 3])
@every_drafter
def test_sampled_output_has_the_targets_law(name, gamma, sampling):
  """chi-squared on the joint law of 4 tokens, stop id and ends included."""
  drafter, params = DRAFTERS[name]
  assert decode_p_value(drafter, params, gamma, SAMPLINGS[sampling]) > ALPHA


@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_plain_output_has_the_targets_law(sampling):
  """The oracle of the other tests is itself held against the closed form."""
  sampling = SAMPLINGS[sampling]
  result = _plain(request_of(ROWS, 0, sampling))
  assert p_value(jax.device_get(result.tokens), sampling) > ALPHA


# Negative controls: each of these is wrong, and the test above must see it.


def test_control_residual_replaced_by_target(monkeypatch):
  def wrong(draft, target_probs, num_accepted):
    del draft
    return target_probs[num_accepted]

  monkeypatch.setattr(algorithm, 'next_token_weights', wrong)
  drafter = small_model(DRAFT)  # a new object: compiled with the patch
  assert decode_p_value(drafter, DRAFT.params, 3, SAMPLINGS['t1']) < ALPHA


def test_control_residual_after_a_shorter_draft(monkeypatch):
  def wrong(draft, target_probs, num_accepted):
    index = jnp.minimum(num_accepted, draft.probs.shape[0] - 1)
    residual = jnp.maximum(target_probs[num_accepted] - draft.probs[index], 0.0)
    within = num_accepted < draft.probs.shape[0]
    return jnp.where(within, residual, target_probs[num_accepted])

  monkeypatch.setattr(algorithm, 'next_token_weights', wrong)
  drafter = _short_drafts(DRAFT)
  assert decode_p_value(drafter, DRAFT.params, 3, SAMPLINGS['t1']) < ALPHA


def test_control_draft_probs_standardised_otherwise_than_drawn():
  """Sampled at temperature 0.7, reported as at temperature 1."""
  honest = small_model(DRAFT)

  def propose(params, state, context):
    sharp = context.sampling.replace(
      temperature=context.sampling.temperature * 0.7
    )
    sharp_context = context.replace(sampling=sharp)
    draft, state = honest.propose(params, state, sharp_context)
    flat = draft.probs**0.7  # undoes the sharpening
    flat = flat / flat.sum(axis=-1, keepdims=True)
    return draft.replace(probs=flat), state

  wrong = honest._replace(propose=propose)
  assert decode_p_value(wrong, DRAFT.params, 3, SAMPLINGS['t1']) < ALPHA


def test_a_drafter_may_sample_otherwise_if_it_says_so():
  """The positive twin: temperature 0.7, reported as such, is lossless."""
  honest = small_model(DRAFT)

  def propose(params, state, context):
    sharp = context.sampling.replace(
      temperature=context.sampling.temperature * 0.7
    )
    return honest.propose(params, state, context.replace(sampling=sharp))

  other = honest._replace(propose=propose)
  assert decode_p_value(other, DRAFT.params, 3, SAMPLINGS['t1']) > ALPHA


def test_control_a_stale_target_cache():
  """A target that is not rewound after a rejection has another law."""

  class Stale(testing.MarkovModel):
    def rewind(self, cache, length):
      kept = jnp.maximum(cache.length - 2, length)  # forgets too little
      return super().rewind(cache, jnp.minimum(kept, cache.length))

  stale = Stale(np.asarray(TARGET.params['table']))
  pair = PairParams(stale.params, DRAFT.params)
  request = request_of(ROWS, 3, SAMPLINGS['t1'])
  drafter = small_model(DRAFT)

  @jax.jit
  def decode():
    state = speculative.start(stale, drafter, pair, request)
    state = speculative.run(stale, drafter, pair, request, state, 20)
    return decode_state.generation(request, state)

  assert p_value(jax.device_get(decode().tokens), SAMPLINGS['t1']) < ALPHA


@pytest.mark.parametrize('rows', [1, 7])
@every_drafter
def test_greedy_equality(name, rows):
  """Ragged budgets from 0 to a full buffer; gamma 1 to 8."""
  drafter, params = DRAFTERS[name]
  greedy = SamplingConfig(0.0)
  limits = np.array([24, 0, 1, 2, 5, 23, 24][:rows])
  want = jax.device_get(_plain(request_of(rows, 0, greedy, 24, limits)))
  for gamma in (1, 2, 5, 8):
    request = request_of(rows, gamma, greedy, 24, limits)
    have = jax.device_get(_decode(drafter, params, request))
    np.testing.assert_array_equal(have.tokens, want.tokens)
    np.testing.assert_array_equal(have.finish_reason, want.finish_reason)


@every_drafter
def test_does_not_recompile(name):
  drafter, params = DRAFTERS[name]
  request = request_of(3, 2, SamplingConfig(1.0), 12)
  _decode(drafter, params, request)
  size = _decode._cache_size()
  other = request_of(3, 2, SamplingConfig([0.5, 2.0, 0.0], 2, 0.7), 12, 5)
  jax.block_until_ready(_decode(drafter, params, other))
  assert _decode._cache_size() == size


@every_drafter
def test_state_after_every_acceptance_count(name):
  """A fresh drafter given the same tokens proposes what the used one does.

  The verdict is forced to each count 0..gamma, three rounds in a row.
  """
  drafter, params = DRAFTERS[name]
  gamma, slots = 3, 20
  request = request_of(1, gamma, SamplingConfig(0.0), slots)
  rng = np.random.default_rng(0)
  propose = jax.jit(drafter.propose)
  for count in range(gamma + 1):
    tokens = np.zeros((1, slots), np.int32)
    length = 1
    used = drafter.init(params, request.inputs, slots)
    for _ in range(3):
      draft, used = propose(params, used, _context(request, tokens, length))
      fresh = _fresh_state(drafter, params, request, tokens, length)
      again, _ = propose(params, fresh, _context(request, tokens, length))
      np.testing.assert_array_equal(draft.tokens, again.tokens)
      kept = np.asarray(draft.tokens)[0, :count]
      tokens[0, length : length + count] = kept
      tokens[0, length + count] = rng.integers(2, VOCAB)
      length += count + 1
      used = drafter.commit(used, jnp.array([length]))


def _context(request, tokens, length):
  return Context(
    tokens=jnp.asarray(tokens),
    length=jnp.array([length]),
    keys=request.keys,
    sampling=request.sampling,
    stop_ids=request.stop_ids,
    min_length=request.min_length,
    gamma=request.gamma,
    greedy=True,
    forbids_stops=False,
  )


def _fresh_state(drafter, params, request, tokens, length):
  """The state of a drafter that saw only committed tokens, one a round."""
  state = drafter.init(params, request.inputs, tokens.shape[1])
  for seen in range(1, length):
    _, state = drafter.propose(params, state, _context(request, tokens, seen))
    state = drafter.commit(state, jnp.array([seen + 1]))
  return state
