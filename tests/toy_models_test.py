"""Tests of the toy models and of the assertions that other tests rest on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
from specdec_jax.probs import SamplingConfig
from verify_laws import UNIFORM_GRID


def _extend(model, cache, tokens):
  extend = jax.jit(model.extend)
  return extend(model.params, cache, jnp.asarray(tokens, jnp.int32))


def _prefill(model, inputs, max_length):
  return model.prefill(model.params, jnp.asarray(inputs, jnp.int32), max_length)


@pytest.mark.parametrize('order', [1, 2])
def test_markov_logits_are_those_of_the_table(order):
  model = toy_models.random_markov(
    0, vocab_size=5, order=order, input_scale=1.0
  )
  inputs = [[1, 2, 0], [4, 0, 0]]
  logits, cache = _extend(
    model, _prefill(model, inputs, 4), [[0, 3, 4], [0, 1, 1]]
  )
  np.testing.assert_array_equal(cache.length, [3, 3])
  for row, tokens in enumerate([(0, 3, 4), (0, 1, 1)]):
    for step in range(3):
      np.testing.assert_allclose(
        logits[row, step],
        model.logits_after(tokens[: step + 1], inputs[row]),
        atol=1e-6,
      )


def test_markov_order_two_after_ragged_rewind_equals_fresh_cache():
  model = toy_models.random_markov(1, vocab_size=6, order=2)
  _, cache = _extend(model, _prefill(model, [[1], [1]], 6), [[0, 1, 2, 3]] * 2)
  cache = model.rewind(cache, jnp.array([1, 3], jnp.int32))
  logits, cache = _extend(model, cache, [[5, 4], [5, 4]])
  for row, kept in enumerate([(0,), (0, 1, 2)]):
    np.testing.assert_array_equal(
      logits[row, -1], model.logits_after(kept + (5, 4))
    )
    np.testing.assert_array_equal(
      logits[row, 0], model.logits_after(kept + (5,))
    )


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


def test_markov_law_with_stop_ids_pads():
  model = toy_models.random_markov(2, vocab_size=3)
  law = model.law(3, SamplingConfig(), stop_ids=(1,))
  assert law.shape == (3, 3, 3)
  assert law.sum() == pytest.approx(1)
  assert law[1, 0, 0] == pytest.approx(law[1].sum())
  assert law[2, 1, 0] == pytest.approx(law[2, 1].sum())


def test_markov_law_is_the_product_of_softmaxes():
  model = toy_models.random_markov(3, vocab_size=4, order=2, input_scale=1.0)
  config = SamplingConfig(temperature=0.5)
  law = model.law(2, config, inputs=(2, 3))
  first = jax.nn.softmax(model.logits_after((0,), (2, 3)) / 0.5)
  second = jax.nn.softmax(model.logits_after((0, 1), (2, 3)) / 0.5)
  np.testing.assert_allclose(law[1], first[1] * second, rtol=1e-5)


@pytest.mark.parametrize(
  'table, offset',
  [(np.zeros(3), None), (np.zeros((2, 3)), None), (np.zeros((2, 2)), [1.0])],
)
def test_markov_rejects_misshapen_tables(table, offset):
  with pytest.raises(ValueError, match='table|input_offset'):
    toy_models.MarkovModel(table, offset)


def test_count_ngrams():
  counts = toy_models.count_ngrams([[0, 1], [0, 1], [2, 0]], vocab_size=3)
  expected = np.zeros((3, 3), int)
  expected[0, 1], expected[2, 0] = 2, 1
  np.testing.assert_array_equal(counts, expected)
  with pytest.raises(ValueError, match='ids'):
    toy_models.count_ngrams([[0, 3]], vocab_size=3)
  with pytest.raises(ValueError, match='shape'):
    toy_models.count_ngrams([0, 1], vocab_size=3)


def test_chi_squared_against_a_known_value():
  # 60 throws of a die; statistic 13.4 at 5 degrees of freedom has p = 0.0199.
  observed = [5, 8, 9, 8, 10, 20]
  p_value = toy_models.chi_squared_p_value(observed, np.full(6, 1 / 6))
  assert p_value == pytest.approx(0.0199, abs=1e-4)
  toy_models.assert_chi_squared(observed, np.full(6, 1 / 6), alpha=0.01)
  with pytest.raises(AssertionError, match='60 observations'):
    toy_models.assert_chi_squared(observed, np.full(6, 1 / 6), alpha=0.05)


def test_chi_squared_p_values_are_uniform_with_pooling():
  # 1,000 tables of 500 draws, many cells expected below 5; seed 0.
  rng = np.random.default_rng(0)
  law = rng.dirichlet(np.full(60, 0.3))
  draws = rng.multinomial(500, law, size=1000)
  p_values = np.array([toy_models.chi_squared_p_value(d, law) for d in draws])
  for level in (0.05, 0.5, 0.95):
    # Four standard errors of a proportion over 1,000.
    tolerance = 4 * np.sqrt(level * (1 - level) / 1000)
    assert np.mean(p_values < level) == pytest.approx(level, abs=tolerance)


def test_chi_squared_edges():
  assert toy_models.chi_squared_p_value([10, 1], [1.0, 0.0]) == 0
  assert toy_models.chi_squared_p_value([10, 0], [1.0, 0.0]) == 1
  with pytest.raises(ValueError, match='sum to 1'):
    toy_models.chi_squared_p_value([1, 1], [0.5, 0.6])
  with pytest.raises(ValueError, match='no observations'):
    toy_models.chi_squared_p_value([0, 0], [0.5, 0.5])
  with pytest.raises(ValueError, match='shapes'):
    toy_models.chi_squared_p_value([1], [0.5, 0.5])


def test_sampler_law_counts_the_grid_of_the_uniform_generator():
  drawn = jax.random.uniform(jax.random.key(0), (100_000,)) * UNIFORM_GRID
  np.testing.assert_array_equal(drawn, np.round(drawn))
  assert np.any(np.asarray(drawn) % 2 == 1)
