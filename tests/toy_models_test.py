"""Tests of the toy models and of the assertions that other tests rest on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models


def _extend(model, cache, tokens):
  extend = jax.jit(model.extend)
  return extend(model.params, cache, jnp.asarray(tokens, jnp.int32))


def _prefill(model, inputs, max_length):
  return model.prefill(model.params, jnp.asarray(inputs, jnp.int32), max_length)


def test_markov_cache_shows_mistakes():
  model = toy_models.random_markov(1, vocab_size=6, order=2)
  _, cache = _extend(model, _prefill(model, [[1]], 4), [[0, 1, 2]])
  # A rewind that keeps a token too many or too few changes the law.
  right = model.rewind(cache, jnp.array([2], jnp.int32))
  wrong = model.rewind(cache, jnp.array([1], jnp.int32))
  assert not np.allclose(
    _extend(model, right, [[3]])[0], _extend(model, wrong, [[3]])[0]
  )
  # A rewind forwards, over slots never written.
  ahead = model.rewind(right, jnp.array([3], jnp.int32))
  assert np.isnan(_extend(model, ahead, [[3]])[0]).all()
  # A write past the end clamps onto live slots.
  assert np.isnan(_extend(model, cache, [[3, 4]])[0]).any()


def test_chi_squared_against_a_known_value():
  # 60 throws of a die; statistic 13.4 at 5 degrees of freedom has p = 0.0199.
  observed = [5, 8, 9, 8, 10, 20]
  p_value = toy_models.chi_squared_p_value(observed, np.full(6, 1 / 6))
  assert p_value == pytest.approx(0.0199, abs=1e-4)
