"""A layer in one kernel: its parts interpreted beside the plain code."""

import functools

import jax
import numpy as np
import pytest

import backend_test
from attention_kernel_test import _long_inputs, network, traced  # noqa: F401
from gpu_check_test import _nothing_is_kept, check, compiles_kernels, settings  # noqa: F401
from specdec_jax.models import backend
from specdec_jax.models.tree import static_tree
from specdec_jax.probs import SamplingConfig
from toy_requests import quick_jit

INTERPRETED = 'interpreted layers'


@pytest.fixture
def _few_programs(monkeypatch):
  """Each has several pieces of most parts."""
  monkeypatch.setattr(backend, 'gpu_cores', lambda: 2)


@pytest.mark.usefixtures('_long_inputs', '_few_programs')
@pytest.mark.parametrize(
  ('name', 'layers', 'batch'),
  [
    ('t5_1_1', 1, 2),
    pytest.param('t5_1_1', 2, 2, marks=pytest.mark.slow),
    pytest.param('t5_1_0', 2, 1, marks=pytest.mark.slow),  # no gate
    pytest.param('own_bias', 2, 3, marks=pytest.mark.slow),
  ],
)
def test_logits_are_the_same(name, layers, batch):
  calls = functools.partial(
    backend_test.logits_of_calls, 'gpu', network(name, layers), batch, 40
  )
  want, cache = calls()
  with backend.kernels(INTERPRETED):
    have, written = calls()
  np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-4)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4),
    written,
    cache,
  )


@pytest.mark.usefixtures('_long_inputs')
def test_tokens_of_a_tree_see_their_ancestors():
  one = network('t5_1_1', 1)
  params = backend_test.on('gpu', one)
  tokens = np.random.default_rng(0).integers(2, 60, (2, 9)).astype(np.int32)
  inputs = np.asarray([backend_test.INPUTS] * 2, np.int32)

  def call(parents, params, inputs, tokens):
    cache = one.prefill(params, inputs, 40)
    _, cache = one.extend(params, cache, tokens[:, :5])
    tree = static_tree(parents, cache.length, 40)
    return one.extend(params, cache, tokens[:, 5:], tree)[0]

  def logits(setting, parents=(-1, -1, 0, 1)):
    with backend.kernels(setting), backend.compiled_for('gpu'):
      made = functools.partial(call, parents)
      return quick_jit(made)(params, inputs, tokens)

  have = logits(INTERPRETED)
  np.testing.assert_allclose(have, logits('off'), rtol=2e-4, atol=2e-4)
  # Control: another tree.
  other = logits('off', (-1, -1, 0, 0))
  assert np.abs(have - other).max() > 1e-2


@pytest.mark.slow
@pytest.mark.usefixtures('_long_inputs')
@pytest.mark.parametrize(
  ('batch', 'temperature'), [(1, 0.0), (3, 0.0), (2, (1.0, 0.6)), (2, (0, 1))]
)
def test_loops_give_the_same_tokens(batch, temperature):
  pair = network('t5_1_1'), network('t5_1_0')
  sampling = SamplingConfig(temperature)
  made = {}
  for setting in ('off', INTERPRETED):
    with backend.kernels(setting), backend.compiled_for('gpu'):
      loop, params, request = backend_test.decode('gpu', *pair, batch, sampling)
      assert request.sampling.top_k is None  # else XLA draws
      made[setting] = quick_jit(loop.decode)(params, request)
  want, have = made.values()
  np.testing.assert_array_equal(have.tokens, want.tokens)
  jax.tree.map(np.testing.assert_array_equal, have.stats, want.stats)


def test_layers_are_kernels_where_they_can_be():
  text = traced(INTERPRETED)
  assert text.count('pallas_call[') == 2 * 8  # each part of two layers
  backend._say_once.cache_clear()
  with pytest.warns(UserWarning, match='heads of 8 numbers') as told:
    text = traced('layers', head_dim=8, num_heads=4)
  assert 'name=product' in text and 'name=layer' not in text
  words = ' '.join(str(one.message) for one in told)
  assert 'kernel of layers' in words and len(told) == 3  # and both attentions
  assert traced('layers').count('pallas_call[') == 2
  # Other families have no such kernel, and nothing is said of it.
  assert 'name=layer' not in traced('layers', 'gpt_t5x')
  wrong = "kernel of layers .* 56 numbers.*Set kernels to 'layers'"
  with pytest.raises(ValueError, match=wrong):
    traced('forced layers', mlp_dim=56)


@compiles_kernels
@pytest.mark.usefixtures('_nothing_is_kept')
def test_compiled_a_layer_is_one_kernel(tmp_path):
  costs = {}
  for setting in ('forced', 'layers'):
    results, _ = check(settings(tmp_path / setting, kernels=setting))
    (record,) = results['rows']
    costs[setting] = record['costs']
  before, after = (costs[name]['token'] for name in ('forced', 'layers'))
  # And one that sets the number to zero by which programs wait.
  assert after['kernels'] == before['kernels'] - 7 * 2 + 1
  assert after['layer_kernels'] == 2
  assert (before['waits'], after['waits']) == (0, 7 * 2)
  assert after['updated_bytes'] == before['updated_bytes']
  assert after['copied_bytes'] == 0
