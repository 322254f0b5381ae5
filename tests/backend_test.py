"""What is traced for a GPU or TPU computes what is traced for a CPU.

It runs on the CPU here: the programs differ, not what they mean.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
from causal_lm_test import GEMMA3
from gpt_test import GPT2
from gpt_test import T5X as GPT_T5X
from models_test import OWN_BIAS, T5_1_0, T5_1_1
from specdec_jax import partitioning
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure.t5x_style import T5XStyle
from specdec_jax.models import (
  backend,
  blocks,
  causal_lm,
  gpt,
  kv_cache,
  layers,
  norms,
  products,
  t5,
  t5gemma,
)
from specdec_jax.models.base import param_shapes
from specdec_jax.probs import SamplingConfig
from t5gemma_test import ONE, TWO
from toy_requests import quick_jit, request_of

NETWORKS = {
  't5_1_1': t5.T5(T5_1_1),
  't5_1_0': t5.T5(T5_1_0),
  'own_bias': t5.T5(OWN_BIAS),
  't5x_style': T5XStyle(T5_1_1),
  'gpt2': gpt.GPT(GPT2),
  'gpt_t5x': gpt.GPT(GPT_T5X),
  'gemma3': causal_lm.CausalLM(GEMMA3),
  't5gemma': t5gemma.T5Gemma(ONE),
  't5gemma2': t5gemma.T5Gemma(TWO),
}
INPUTS = (5, 7, 11, 3, 0)
GREEDY = SamplingConfig(0.0)


def on(kind, network):
  """Its parameters, as they are placed on such a device."""
  with backend.compiled_for(kind):
    return partitioning.place(_initial(network))


@functools.cache
def _initial(network):
  return small_vocabulary.weights(network, 0)


def logits_of_calls(kind, network, batch, slots):
  """Logits of calls of 3, 1 and 4 tokens; the last is after a rewind."""
  params = on(kind, network)
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(2, 60, (batch, 8)).astype(np.int32))
  inputs = jnp.asarray(np.tile(np.array(INPUTS, np.int32), (batch, 1)))

  def calls(params, inputs, tokens):
    cache = network.prefill(params, inputs, slots)
    first, cache = network.extend(params, cache, tokens[:, :3])
    second, cache = network.extend(params, cache, tokens[:, 3:4])
    length = cache.length - jnp.arange(batch)  # each row at its own place
    cache = network.rewind(cache, length)
    third, cache = network.extend(params, cache, tokens[:, 4:])
    return jnp.concatenate([first, second, third], 1), cache

  with backend.compiled_for(kind):
    return quick_jit(calls)(params, inputs, tokens)


@pytest.mark.parametrize(
  ('name', 'batch'),
  [
    ('t5_1_1', 1),
    pytest.param('gemma3', 3, marks=pytest.mark.slow),
    *(
      pytest.param(*other, marks=pytest.mark.slow)
      for other in (
        ('t5x_style', 1),  # in small in benchmark_test
        ('gpt2', 1),
        ('t5_1_1', 3),
        ('own_bias', 3),
        ('gpt_t5x', 3),
        ('t5gemma', 1),
        ('t5gemma2', 3),
      )
    ),
  ],
)
def test_logits_are_the_same(name, batch):
  network = NETWORKS[name]
  want, _ = logits_of_calls('cpu', network, batch, 150)
  have, cache = logits_of_calls('gpu', network, batch, 150)
  np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-4)
  on_tpu, _ = logits_of_calls('tpu', network, batch, 150)
  np.testing.assert_allclose(on_tpu, want, rtol=2e-4, atol=2e-4)
  # One array of a layer, but where T5X's own writing is what is compared.
  assert bool(cache.joined) == (name != 't5x_style')
  assert bool(cache.keys) == (name == 't5x_style')
  assert cache.num_slots == 150 and cache.num_layers == {
    'gemma3': 4,
    't5gemma': 3,
    't5gemma2': 3,
  }.get(name, 2)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_norm_of_one_row_is_the_same(dtype):
  """It is computed as that of two rows: to the bit, and as another program."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(1, 1, 48)) * 100, dtype)
  norm = norms.RMSNorm(dtype)
  params = {'params': {'scale': jnp.asarray(rng.normal(size=48), 'float32')}}
  made, texts = {}, {}
  for kind in ('cpu', 'gpu'):
    with backend.compiled_for(kind):
      made[kind] = jax.jit(norm.apply)(params, x)
      texts[kind] = jax.jit(norm.apply).lower(params, x).as_text()
  np.testing.assert_array_equal(made['gpu'], made['cpu'])
  assert 'tensor<2x48x' in texts['gpu'] and '2x48x' not in texts['cpu']


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('out', [48, 8])
def test_what_is_added_to_a_product_of_one_row_is_the_same(dtype, out):
  """A bias and a residual are terms of the sum, not kernels behind it."""
  rng = np.random.default_rng(0)

  def numbers(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  kernel, x = numbers(out, 48), numbers(1, 1, 48)
  added = numbers(out), numbers(1, 1, out)

  def product(*added):
    with backend.compiled_for(product.kind):
      return jax.jit(products.dense_out_in)(kernel, x, added=added)

  product.kind = 'cpu'
  want = np.asarray(product(*added), np.float32)
  product.kind = 'gpu'
  near = {'float32': 1e-5, 'bfloat16': 0.1}[dtype]
  have = np.asarray(product(*added), np.float32)
  np.testing.assert_allclose(have, want, rtol=near / 10, atol=near)
  for one in added:  # Control: either is needed.
    less = np.asarray(product(one), np.float32)
    assert np.abs(less - want).max() > 1


@pytest.mark.parametrize('copied', [1 << 20, 0])
@pytest.mark.parametrize('rows', [1, 3, products.MOST_COPIED_ROWS + 1])
@pytest.mark.parametrize('result', [None, 'float32'])
def test_a_product_with_blocks_is_the_same(rows, result, copied, monkeypatch):
  monkeypatch.setattr(products, '_MOST_COPIED', copied)
  rng = np.random.default_rng(0)

  def numbers(*shape):
    return jnp.asarray(rng.normal(size=shape), 'float32')

  kernel, x = numbers(48, 3 * blocks.WIDTH), numbers(2, rows, 48)
  out = kernel.shape[1]
  beside = numbers(out), [numbers(out), numbers(2, rows, out)]
  cut = blocks.in_blocks(kernel)
  given = x, result, *beside
  want = products.dense_in_out(kernel, *given)
  product = functools.partial(products.dense_blocks, result_dtype=result)
  made = jax.jit(
    lambda cut, x, scale, added: product(cut, x, scale=scale, added=added)
  )
  have = made(cut, x, *beside)
  is_loop = 'while' in made.lower(cut, x, *beside).as_text()
  assert is_loop == (2 * rows > products.MOST_COPIED_ROWS and not copied)
  assert have.dtype == want.dtype
  np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
  # Control: where an output lies matters.
  turned = products.dense_blocks(cut[::-1], *given)
  assert np.abs(turned - want).max() > 1


@pytest.mark.parametrize('divides', [True, False])
@pytest.mark.parametrize('rows', [1, 3, 40])
def test_an_embedding_is_an_output_layer_on_any_device(rows, divides):
  table = layers.Embed(70, 48, divides_logits=divides)
  tokens = jnp.zeros((1, 1), jnp.int32)
  params = table.init(jax.random.key(0), tokens)
  x = jax.random.normal(jax.random.key(1), (2, rows, 48))
  made = {}
  for kind in ('cpu', 'gpu', 'tpu'):
    with backend.compiled_for(kind):
      made[kind] = jax.jit(lambda p, x: table.apply(p, x, method='attend'))(
        params, x
      )
  embedding = np.asarray(params['params']['embedding'], np.float64)
  want = np.asarray(x) @ embedding.T / (np.sqrt(48) if divides else 1)
  for kind, have in made.items():
    np.testing.assert_allclose(have, want, atol=1e-4, err_msg=kind)


def test_t5x_style_is_the_same_for_a_drafter_that_reads_features():
  """Else heads would be timed beside a target of our own style."""
  network = NETWORKS['t5x_style']
  params = param_shapes(network)
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  cache = jax.eval_shape(
    lambda params, inputs: network.prefill(params, inputs, 8), params, tokens
  )

  def products(call):
    text = jax.jit(call).lower(params, cache, tokens).as_text()
    return text.count('dot_general'), text.count('gather')

  def by_features(params, cache, tokens):
    features, cache = network.extend_features(params, cache, tokens)
    return network.head(params, features), cache

  assert products(by_features) == products(network.extend)


def decode(kind, target, draft, batch, sampling=GREEDY):
  request = request_of(batch, 3, sampling, 140, inputs=INPUTS, seed=1)
  loop = Loop(target, small_model(draft))
  params = PairParams(on(kind, target), on(kind, draft))
  with backend.compiled_for(kind):
    return loop, params, request


@pytest.mark.parametrize(
  ('name', 'batch'),
  [('t5_1_1', 1), pytest.param('gpt_t5x', 2, marks=pytest.mark.slow)],
)
def test_loops_give_the_same_tokens(name, batch):
  target, draft = NETWORKS[name], NETWORKS['t5_1_0']
  made = {}
  for kind in ('cpu', 'gpu', 'tpu'):
    loop, params, request = decode(kind, target, draft, batch)
    with backend.compiled_for(kind):
      made[kind] = quick_jit(loop.decode)(params, request)
  wanted = made.pop('cpu')
  for one in made.values():
    np.testing.assert_array_equal(one.tokens, wanted.tokens)
    counts = map(jax.tree.leaves, (one.stats, wanted.stats))
    for have, want in zip(*counts, strict=True):
      np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize(
  ('kind', 'expected'), [('gpu', 0), ('tpu', 0), ('cpu', 1)]
)
def test_a_greedy_round_has_conditionals_on_a_cpu_alone(kind, expected):
  """Of 150 slots a CPU has two buckets; and what is traced is traced anew."""
  target = NETWORKS['t5_1_1']
  loop, params, request = decode(kind, target, target, 1)
  with backend.compiled_for(kind):
    text = jax.jit(loop.decode).lower(params, request).as_text()
  assert ('stablehlo.case' in text) == bool(expected)


def test_kernels_are_out_in_on_one_gpu():
  network = NETWORKS['t5_1_1']
  names = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(on('gpu', network))
  ]
  assert any('kernel_out_in' in name for name in names)
  assert not any(name.endswith("'kernel']") for name in names)


@pytest.mark.parametrize('batch', [1, 3, 40])
def test_caches_are_written_the_same(batch):
  """Each row at its own place, 40 of them in a loop over some at once."""
  heads, slots, size, new = 2, 9, 4, 3
  rng = np.random.default_rng(0)

  def numbers(*shape):
    return jnp.asarray(rng.normal(size=shape).astype(np.float32))

  keys, values = (numbers(batch, new, heads, size) for _ in range(2))
  start = jnp.asarray(rng.integers(0, slots - new + 1, batch), jnp.int32)
  apart = numbers(batch, heads, size, slots)
  joined = numbers(2, batch, heads, slots, size)
  for kind, write, args in (
    ('tpu', kv_cache.write, (apart, keys, start)),
    ('gpu', kv_cache.write_joined, (joined, keys, values, start)),
  ):
    want = quick_jit(write)(*args)
    with backend.compiled_for(kind):
      have = quick_jit(write)(*args)
    np.testing.assert_array_equal(have, want)
    # It is another program, unless rows and heads may be on several devices.
    with backend.compiled_for(kind):
      text = jax.jit(write).lower(*args).as_text()
      with backend.split():
        split = jax.jit(write).lower(*args).as_text()
    with backend.split():
      mapped = jax.jit(write).lower(*args).as_text()
    assert mapped == split != text


def copied_in_loops(target, split):
  """How often a loop copies a layer's keys or values in a round."""
  request = request_of(1, 0, GREEDY, 100, inputs=INPUTS, seed=0)
  assert request.cache_slots <= 128, 'more slots are read by a conditional'
  params = PairParams(on('cpu', target), None)
  with backend.split() if split else contextlib.nullcontext():
    lowered = jax.jit(Loop(target).decode).lower(params, request)
  slots = rf'\d+,{target.config.num_heads},\d+,{request.cache_slots}'
  loops, _, entry = lowered.compile().as_text().partition('\nENTRY')
  assert f',{request.cache_slots}]' in entry
  return len(re.findall(rf'\[{slots}\]\S* copy\(', loops))


def test_a_token_copies_no_cache_on_a_cpu():
  target = NETWORKS['t5_1_1']
  assert not copied_in_loops(target, split=False)
  # Written outside of a branch they are, several times.
  assert copied_in_loops(target, split=True)
