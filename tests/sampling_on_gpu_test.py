"""Sampling as it is traced for a GPU: same laws, and nothing that waits.

The tests of `probs` and `verify` that are about meaning, and the exact laws
with their controls, are here once more. They run on the CPU: the programs
differ.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from backend_test import NETWORKS, decode
from drafter_conformance_test import (  # noqa: F401
  SAMPLINGS,
  test_control_residual_replaced_by_target,
)
from drafter_conformance_test import (
  test_plain_output_has_the_targets_law as plain_has_the_targets_law,
)
from drafter_conformance_test import (
  test_sampled_output_has_the_targets_law as has_the_targets_law,
)
from probs_test import (  # noqa: F401
  test_greedy_token_is_argmax_with_first_index_on_ties,
  test_inverse_cdf_at_the_ends_of_the_uniforms,
  test_inverse_cdf_has_exactly_the_law,
  test_inverse_cdf_never_draws_probability_zero,
  test_inverse_cdf_survives_a_cumulative_sum_that_is_not_monotone,
  test_inverse_cdf_without_any_mass_is_still_an_id,
  test_largest_threshold_edges,
  test_largest_threshold_is_the_kth_largest,
  test_log_prob_of_equals_log_softmax,
  test_sample_chi_squared,
  test_standardise_batch_is_standardise_of_each_row,
  test_standardise_equals_sorting,
  test_standardise_is_exactly_one_hot_at_temperature_zero,
  test_standardise_keeps_ties_at_the_boundary,
  test_standardise_of_extreme_values,
  test_top_p_acts_on_the_distribution_after_top_k,
  test_top_p_is_met_exactly_where_probabilities_are,
  test_valid_logits,
)
from specdec_jax import probs
from specdec_jax.models import backend
from specdec_jax.probs import SamplingConfig
from toy_requests import quick_jit
from verify_law_test import (  # noqa: F401
  test_control_a_drafter_that_drops_unlikely_tokens,
  test_control_draft_reported_otherwise_than_drawn,
  test_control_plain_target_as_residual,
  test_control_residual_after_short_draft,
  test_law_of_a_draft_shorter_than_gamma,
  test_law_of_a_drafter_that_denies_its_own_token,
  test_law_of_adversarial_pairs,
  test_law_of_deterministic_drafts,
  test_law_of_gamma_zero,
  test_law_of_random_pairs,
  test_law_of_standardised_pairs,
)


@pytest.fixture(autouse=True)
def _on_a_gpu():
  with backend.compiled_for('gpu'):
    yield


@pytest.mark.parametrize(
  'name',
  [
    'small_model',
    pytest.param('trigram', marks=pytest.mark.slow),
    pytest.param('cascade', marks=pytest.mark.slow),
  ],
)
def test_sampled_output_has_the_targets_law(name):
  has_the_targets_law(name)


@pytest.mark.parametrize(
  'sampling',
  [
    pytest.param(name, marks=() if name == 'all' else pytest.mark.slow)
    for name in SAMPLINGS
  ],
)
def test_plain_output_has_the_targets_law(sampling):
  plain_has_the_targets_law(sampling)


def of_cpu(function, *args):
  with backend.compiled_for('cpu'):
    return np.asarray(quick_jit(function)(*args))


@pytest.mark.parametrize(
  'size', [1, pytest.param(5, marks=pytest.mark.slow), 2000]
)
def test_both_ways_give_the_same(size):
  """The same thresholds to the last bit, tokens, and laws within rounding."""
  rng = np.random.default_rng(size)
  values = rng.normal(scale=3, size=size).astype(np.float32)
  values[rng.integers(size, size=size // 3)] = -np.inf
  values[rng.integers(size, size=size // 3)] = values[0]  # ties
  ones = np.ones_like(values)
  search = quick_jit(probs.largest_threshold)
  for k in (-1, 0, 1, 2, 40, 300, size - 1, size, size + 1):
    have = search(values, ones, np.int32(k))
    want = of_cpu(lambda *a: probs.largest_threshold(*a), values, ones, k)
    np.testing.assert_array_equal(have, want)

  config = SamplingConfig(0.8, top_k=40, top_p=0.9)
  params = config.params(1)
  rows = values[None, None]
  have = quick_jit(probs.standardise_batch)(rows, params)
  want = of_cpu(lambda *a: probs.standardise_batch(*a), rows, params)
  np.testing.assert_allclose(have, want, atol=1e-6)

  uniforms = rng.random((500, 2)).astype(np.float32)
  over_uniforms = jax.vmap(probs.inverse_cdf, (None, 0))
  have = np.asarray(quick_jit(over_uniforms)(want[0, 0], uniforms))
  want = of_cpu(lambda *a: over_uniforms(*a), want[0, 0], uniforms)
  assert np.mean(have == want) > 0.99  # all but at a rounded end


def test_what_is_drawn_at_once_is_what_was_drawn_apart():
  key = jax.random.key(3)
  have = probs.draft_uniforms(key, 4)
  for index in range(4):
    own = jax.random.uniform(probs.draft_key(key, index), (2,))
    np.testing.assert_array_equal(have[index], own)
  for gamma in (0, 1, 5):
    accept, resample = probs.verdict_uniforms(key, gamma)
    own = jax.random.uniform(probs.accept_key(key), (gamma,))
    np.testing.assert_array_equal(accept, own)
    own = jax.random.uniform(probs.resample_key(key), (2,))
    np.testing.assert_array_equal(resample, own)


def test_what_is_off_is_no_part_of_the_program():
  off = SamplingConfig().params(2)
  assert off.top_k is None and off.top_p is None
  on = SamplingConfig(top_k=3).params(2)
  assert on.top_k == 3 and on.top_p is None
  on = SamplingConfig(top_p=0.5).params(2)
  assert on.top_k is None and on.top_p == 0.5
  # Other values are no other program: only on and off are.
  standardise = jax.jit(lambda *args: probs.standardise_batch(*args))
  for k in (1, 40, 5000):
    standardise(jnp.zeros((2, 1, 8)), SamplingConfig(top_k=k).params(2))
  assert standardise._cache_size() == 1
  with backend.compiled_for('cpu'):
    there = SamplingConfig().params(2)
  assert (there.top_k, there.top_p) == (0, 1)


def operations(jaxpr):
  """Names of all operations of a program, however deep inside of others."""
  for equation in jaxpr.eqns:
    steps = equation.params.get('length'), equation.params.get('unroll')
    # A TPU's cache is written row by row, by a loop that is unrolled.
    whole = equation.primitive.name == 'scan' and steps[0] <= steps[1]
    yield 'unrolled' if whole else equation.primitive.name
    for inner in jax_core.jaxprs_in_params(equation.params):
      yield from operations(inner)


PLAIN, FILTERED = SamplingConfig(1.0), SamplingConfig(0.7, top_k=40, top_p=0.9)


@pytest.mark.parametrize(
  ('config', 'kind'),
  [
    (PLAIN, 'gpu'),
    (FILTERED, 'gpu'),
    (FILTERED, 'cpu'),
    *(
      pytest.param(*other, marks=pytest.mark.slow)
      for other in ((PLAIN, 'cpu'), (PLAIN, 'tpu'), (FILTERED, 'tpu'))
    ),
  ],
)
def test_a_sampled_round_does_not_wait_for_the_host(config, kind):
  """No conditional, no loop but the rounds' and the draft's, and no sort."""
  target, draft = NETWORKS['gpt_t5x'], NETWORKS['t5_1_0']
  with backend.compiled_for(kind):
    loop, params, request = decode(kind, target, draft, 1, config)
    traced = jax.make_jaxpr(loop.decode)(params, request)
  names = collections.Counter(operations(traced.jaxpr))
  assert not names['sort'] + names['top_k']
  if kind == 'cpu':  # top-k and top-p: of the first proposal, others, target
    assert names['cond'] >= 6 and names['scan'] + names['while'] > 2
  else:
    assert (names['cond'], names['scan'], names['while']) == (0, 1, 1)


def test_sampled_tokens_are_those_of_a_cpu():
  target, draft = NETWORKS['gpt_t5x'], NETWORKS['t5_1_0']
  config = SamplingConfig(0.7, top_k=40, top_p=0.9)
  made = []
  for kind in ('cpu', 'gpu'):
    with backend.compiled_for(kind):
      loop, params, request = decode(kind, target, draft, 2, config)
      made.append(quick_jit(loop.decode)(params, request))
  np.testing.assert_array_equal(made[0].tokens, made[1].tokens)
  np.testing.assert_array_equal(
    made[0].stats.num_accepted, made[1].stats.num_accepted
  )
  assert np.any(np.asarray(made[0].stats.num_accepted) > 0)
