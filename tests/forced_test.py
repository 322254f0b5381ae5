"""Forced acceptance: the loop accepts at the rate that it is told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure import calls, forced
from specdec_jax.probs import SamplingConfig

ROWS, SLOTS, GAMMA = 64, 61, 3
TARGET = toy_models.random_markov(1, 6)
DRAFT = toy_models.random_markov(2, 6)
DRAFTER = small_model(DRAFT)
PARAMS = PairParams(TARGET.params, DRAFT.params)


@functools.partial(jax.jit, static_argnums=(1, 2))
def histogram(rate, temperature, seed):
  """Rounds of all rows by what they accepted, int32[G + 1]."""
  request = calls.make_request(
    jnp.ones((ROWS, 2), jnp.int32),
    SLOTS,
    GAMMA,
    SamplingConfig(temperature=temperature),
    seed,
  )
  loop = Loop(TARGET, DRAFTER, forced.judge(rate))
  state = loop.run(PARAMS, request, loop.start(PARAMS, request))
  return jnp.stack([state.stats.num_accepted, state.stats.num_tested], 1)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_the_rate_is_the_one_asked_for(temperature):
  """Binomial, 4 standard errors; the other rate must lie outside of them."""
  for asked, other in ((0.3, 0.8), (0.8, 0.3)):
    counts = histogram(jnp.float32(asked), temperature, 0)
    accepted, tested = np.asarray(counts).sum(axis=0)
    error = (asked * (1 - asked) / tested) ** 0.5
    assert tested > 2000
    assert abs(accepted / tested - asked) < 4 * error
    assert abs(accepted / tested - other) > 4 * error


def test_other_rates_do_not_recompile():
  before = histogram._cache_size()
  for rate in (0.1, 0.5, 0.9):
    histogram(jnp.float32(rate), 0.0, 0)
  assert histogram._cache_size() - before <= 1


def test_the_ends_are_exact():
  accepted, tested = np.asarray(histogram(jnp.float32(0.0), 0.0, 0)).T
  assert not accepted.any()
  assert (tested == SLOTS - 1).all()  # nothing is proposed for the last token
  accepted, tested = np.asarray(histogram(jnp.float32(1.0), 0.0, 0)).T
  # 15 rounds of 4 tokens, then one of the target's own.
  assert (accepted == 45).all() and (tested == 45).all()


def test_a_seed_decides():
  rate = jnp.float32(0.5)
  same = [np.asarray(histogram(rate, 1.0, 0)) for _ in range(2)]
  np.testing.assert_array_equal(*same)
  assert (same[0] != np.asarray(histogram(rate, 1.0, 1))).any()


@pytest.mark.parametrize('rate', [-0.1, 1.5])
def test_a_rate_outside_0_and_1_is_refused(rate):
  with pytest.raises(ValueError, match=r'must lie in \[0, 1\]'):
    forced.check_rate(rate)
  forced.check_rate(None)
