"""Tests of standardise, sample, the likeliest tokens and the keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import verify_laws
from specdec_jax import probs
from specdec_jax.probs import SamplingConfig

_standardise_batch = jax.jit(probs.standardise_batch)
_inverse_cdf = jax.jit(probs.inverse_cdf)

pytestmark = pytest.mark.usefixtures('strict')


def _standardise(logits, config):
  """One row through the batched form, as the loops call it."""
  logits = jnp.asarray(logits, jnp.float32)[None, None]
  return np.asarray(_standardise_batch(logits, config.params(1)))[0, 0]


def _reference(logits, temperature, top_k, top_p):
  """By sorting, in float64."""
  logits = np.asarray(np.asarray(logits, np.float32), np.float64)
  if temperature == 0:
    return np.eye(logits.size)[np.argmax(logits)]
  kept = np.ones(logits.size, bool)
  if 0 < top_k < logits.size:
    kept = logits >= np.sort(logits)[::-1][top_k - 1]
  weights = np.exp((logits - logits.max()) / temperature) * kept
  law = weights / weights.sum()
  if top_p < 1:
    descending = np.sort(law)[::-1]
    last = np.argmax(np.cumsum(descending) >= top_p)
    law = np.where(law >= descending[last], law, 0)
  return law / law.sum()


@pytest.mark.parametrize('top_p', [1.0, 0.9, 1e-6])
@pytest.mark.parametrize('top_k', [0, 3])
@pytest.mark.parametrize('temperature', [0.7, 0.0])
def test_standardise_equals_sorting(temperature, top_k, top_p):
  config = SamplingConfig(temperature, top_k, top_p)
  for size in (1, 6, 500):
    rng = np.random.default_rng(size)
    for scale in (0.3, 3.0):
      logits = rng.normal(scale=scale, size=size)
      want = _reference(logits, temperature, top_k, top_p)
      np.testing.assert_allclose(_standardise(logits, config), want, atol=1e-6)


def test_standardise_is_exactly_one_hot_at_temperature_zero():
  """Next to rows of other temperatures, and with top-k and top-p."""
  logits = jnp.asarray([[[1.0, 3.0, 3.0]]] * 3)
  params = SamplingConfig([0.0, 1.0, 0.0], top_k=2, top_p=0.9).params(3)
  law = np.asarray(_standardise_batch(logits, params))[:, 0]
  np.testing.assert_allclose(law, [[0, 1, 0], [0, 0.5, 0.5], [0, 1, 0]])


def test_standardise_keeps_ties_at_the_boundary():
  logits = np.log(np.array([4, 4, 1, 1, 1e-30]) / 4)
  logits[1] = -0.0  # a tie with 0.0
  few, more = [0.5, 0.5, 0, 0, 0], [0.4, 0.4, 0.1, 0.1, 0]
  for config, expected in (
    (SamplingConfig(top_k=1), few),
    (SamplingConfig(top_k=3), more),
    (SamplingConfig(top_p=1e-9), few),
    (SamplingConfig(top_p=0.85), more),
    # After top-k the first two tokens are all there is of 0.9.
    (SamplingConfig(top_k=2, top_p=0.9), few),
  ):
    law = _standardise(logits, config)
    np.testing.assert_allclose(law, expected, atol=1e-6)


def test_standardise_of_extreme_values():
  logits = [3e38, -3e38, 0.0, -np.inf]
  for options in {}, {'temperature': 1e-30}, {'top_k': 3}, {'top_p': 0.5}:
    law = _standardise(logits, SamplingConfig(**options))
    np.testing.assert_array_equal(law, [1, 0, 0, 0])
  hot = _standardise([1.0, 2.0, -np.inf], SamplingConfig(1e30, top_k=2))
  np.testing.assert_allclose(hot, [0.5, 0.5, 0])
  assert _standardise(np.zeros(3, np.float16), SamplingConfig()).dtype == 'f4'


def test_standardise_off_means_not_computed():
  lowered = _standardise_batch.lower(
    jnp.zeros((2, 3, 16)), SamplingConfig([1.0, 0.5]).params(2)
  )
  hlo = lowered.compile().as_text()
  # One conditional for top-k and one for top-p survive the two vmaps; had
  # their predicates been mapped, both sides would always run.
  assert hlo.count(' conditional(') == 2
  assert ' sort(' not in hlo


def test_inverse_cdf_never_draws_probability_zero():
  # Weights of very different size, so that rounding has every chance.
  for seed in range(5):
    rng = np.random.default_rng(seed)
    law = np.exp(rng.normal(scale=10, size=8000)) * (rng.random(8000) < 0.2)
    law = jnp.asarray(law / law.sum(), jnp.float32)
    uniforms = rng.random((2000, 2)).astype(np.float32)
    uniforms[rng.random((2000, 2)) < 0.2] = 1
    uniforms[rng.random((2000, 2)) < 0.2] = 0
    uniforms = np.minimum(uniforms, np.float32(1 - 2.0**-24))
    tokens = jax.vmap(_inverse_cdf, in_axes=(None, 0))(law, uniforms)
    assert np.all(np.asarray(law)[np.asarray(tokens)] > 0)


@pytest.mark.parametrize('size', [1, 6, 40])
def test_inverse_cdf_has_exactly_the_law(size):
  rng = np.random.default_rng(size)
  law = rng.dirichlet(np.full(size, 0.3)) * (rng.random(size) < 0.7)
  law[0] += 0.1
  law = jnp.asarray(law, jnp.float32)  # Not normalised.
  found = np.asarray(jax.jit(verify_laws.sampler_law)(law), np.float64)
  np.testing.assert_allclose(found, law / law.sum(), atol=1e-6)
  assert np.all(found[np.asarray(law) == 0] == 0)


def test_greedy_token_is_argmax_with_first_index_on_ties():
  rng = np.random.default_rng(0)
  logits = rng.integers(0, 4, size=(20, 3, 50)).astype(np.float32)
  logits[0, 0] = -np.inf
  logits[1, 0, :49] = -np.inf
  found = np.asarray(jax.jit(probs.greedy_token)(logits))
  np.testing.assert_array_equal(found, np.argmax(logits, axis=-1))
  assert found.dtype == np.int32
  logits[:, :, 7] = np.nan
  found = np.asarray(probs.greedy_token(jnp.asarray(logits)))
  assert np.all((found >= 0) & (found < 50))


def test_valid_logits():
  valid = jax.jit(probs.valid_logits)
  logits = np.random.default_rng(0).normal(size=(257, 257)).astype(np.float32)
  logits[:, 5] = -np.inf  # A masked token is allowed.
  assert np.all(valid(logits))
  for bad in (np.nan, np.inf):
    np.fill_diagonal(logits, bad)  # At every position once.
    assert not np.any(valid(logits))
  for masked in (-np.inf, np.finfo(np.float32).min):
    assert not valid(np.full(10, masked, np.float32))
  assert valid(np.full(10, -1e9, np.float32))


# Rows of blocks, of which the last is padded, and rows that are too short.
@pytest.mark.parametrize('size', [40, 12801])
@pytest.mark.parametrize('count', [1, 9])
def test_top_tokens_are_those_of_a_sort(size, count):
  """Stop ids before all others, in a block each, take nobody's place."""
  stops = np.arange(8) * (128 if size > 1024 else 4) + 3
  # Few different values: ties within blocks and between them.
  logits = jnp.round(jax.random.normal(jax.random.key(size), (6, size)) * 2)
  logits = logits.at[:3, stops].set(50.0)
  forbidden = np.array([True, False, True, False, True, False])
  find = jax.jit(probs.top_tokens, static_argnums=1)
  with jax.numpy_rank_promotion('allow'):
    values, ids, largest = find(logits, count, stops, forbidden)
  left = np.array(logits)
  left[np.ix_(forbidden, stops)] = -np.inf
  expected = np.argsort(-left, axis=-1, kind='stable')[:, :count]
  np.testing.assert_array_equal(ids, expected)
  np.testing.assert_array_equal(values, np.take_along_axis(left, expected, -1))
  np.testing.assert_array_equal(largest, np.max(logits, axis=-1))


@pytest.mark.parametrize(
  'name, values',
  [
    ('temperature', [-0.1, np.nan, np.inf, 1e39, 1e-42, [1.0, -1.0]]),
    ('temperature', [[], [[1.0]], [[1.0], [1.0, 2.0]], 'hot', '1.0']),
    ('temperature', [None, True, 10**400]),
    ('top_k', [-1, 2.0, True, None, 2**31]),
    ('top_p', [0.0, 1.1, np.nan, '0.5', True, [0.5], 1e-60]),
  ],
)
def test_sampling_config_rejects(name, values):
  for value in values:
    with pytest.raises(ValueError, match=f'{name}: expected'):
      SamplingConfig(**{name: value})


def test_keys_of_one_round_differ_and_are_reproducible():
  key = jax.random.key(7)
  keys = [probs.accept_key(key), probs.resample_key(key)]
  keys += [probs.draft_key(key, i) for i in range(8)]
  data = {tuple(np.asarray(jax.random.key_data(k))) for k in keys}
  assert len(data) == len(keys)
  traced = jax.jit(probs.draft_key)(key, jnp.int32(3))
  np.testing.assert_array_equal(
    jax.random.key_data(traced), jax.random.key_data(keys[2 + 3])
  )
