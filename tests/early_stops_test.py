"""Stop ids before `min_length`: one function masks them for both sides."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax import probs
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_table import fit
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.uniform import uniform
from specdec_jax.probs import SamplingConfig

VOCAB, STOP, GAMMA = 4, 1, 3
MODEL = toy_models.random_markov(0, VOCAB)
CORPUS = [[0, *np.random.default_rng(0).integers(0, VOCAB, 200)]]
TABLE = fit(CORPUS, 2, VOCAB)
DRAFTERS = {
  'small_model': (small_model(MODEL), MODEL.params),
  'ngram': (ngram(TABLE), TABLE),
  'cascade': (cascade(MODEL, uniform(VOCAB)), (MODEL.params, ())),
}


def test_what_is_masked():
  """Rows that have 0 and 3 tokens of 2; places that stand for other ids."""
  logits = jnp.zeros((2, 3, VOCAB))
  stop_ids, produced = jnp.array([STOP, -1]), jnp.array([0, 3])
  limits = jnp.array([2, 2])
  masked = probs.forbid_early_stops(logits, stop_ids, produced, limits)
  want = np.zeros((2, 3, VOCAB))
  want[0, :2, STOP] = -np.inf
  np.testing.assert_array_equal(masked, want)
  ids = jnp.tile(jnp.array([STOP, 0, 2, STOP]), (2, 3, 1))
  masked = probs.forbid_early_stops(logits, stop_ids, produced, limits, ids)
  want = np.zeros((2, 3, VOCAB))
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


@pytest.mark.parametrize('name', DRAFTERS)
def test_no_drafter_proposes_a_stop_id_too_early(name):
  """Each row has two more to produce; only its third may be a stop id."""
  drafter, params = DRAFTERS[name]
  rows = 200
  request = toy_requests.request_of(
    rows,
    GAMMA,
    SamplingConfig(1.0),
    20,
    inputs=(2,),
    seed=1,
    stop_ids=(STOP,),
    forbids_stops=True,
  )
  tokens = jnp.zeros((rows, request.cache_slots + 1), jnp.int32)
  tokens = tokens.at[:, 1].set(2)
  length = jnp.full((rows,), 2)
  prompt = tokens[:, :2]
  state = drafter.init(params, request.inputs, request.cache_slots, prompt)

  @toy_requests.quick_jit
  def propose(params, state, min_length):
    shorter = request.replace(min_length=jnp.full((rows,), min_length))
    context = speculative.context_of(shorter, tokens, length, request.keys)
    return drafter.propose(params, state, context)[0]

  for min_length, first in ((3, 2), (0, 0)):
    draft = jax.device_get(propose(params, state, min_length))
    assert draft.length.min() == GAMMA
    stops = (draft.tokens == STOP).any(axis=0)
    assert stops.tolist() == [False] * first + [True] * (GAMMA - first)
    assert (draft.probs[:, :first, STOP] == 0).all()
