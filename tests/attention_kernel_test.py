"""The kernel of a decoder's attention, interpreted, beside the plain code."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backend_test
from backend_test import NETWORKS
from gpu_check_test import _nothing_is_kept, check, compiles_kernels, settings  # noqa: F401
from specdec_jax.measure import environment, memory
from specdec_jax.models import (
  attention_kernel,
  backend,
  kv_cache,
  layers,
  t5gemma,
)
from specdec_jax.models.base import param_shapes
from specdec_jax.models.tree import static_tree
from specdec_jax.partitioning import Placement
from toy_requests import quick_jit

# Rounding of sums in float32, of results in bfloat16.
NEAR = {'float32': 2e-6, 'bfloat16': 2e-2}
SHAPES = [  # B, S, H, K, D, slots
  pytest.param((3, 5, 2, 2, 16, 150), 'float32'),
  pytest.param((2, 8, 2, 2, 16, 40), 'bfloat16'),
  pytest.param((2, 3, 6, 2, 16, 40), 'float32'),
  pytest.param((1, 2, 2, 1, 64, 1100), 'float32'),  # programs share slots
  *(
    pytest.param(*other, marks=pytest.mark.slow)
    for other in (
      ((1, 1, 2, 2, 16, 16), 'float32'),
      ((1, 16, 2, 2, 32, 129), 'float32'),
      ((2, 7, 3, 3, 64, 64), 'float32'),
      ((1, 1, 4, 4, 64, 136), 'bfloat16'),
      ((3, 16, 2, 2, 64, 300), 'bfloat16'),
      ((2, 100, 2, 2, 16, 130), 'float32'),  # two tiles, as of beams
      ((2, 16, 14, 2, 64, 140), 'float32'),
      ((1, 8, 4, 1, 256, 1100), 'bfloat16'),
    )
  ),
]
interpreted = functools.partial(backend.kernels, 'interpreted')


def numbers(dtype, *shapes):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def position_bias(heads, slots):
  relative = np.arange(2 * slots) - (slots - 1)
  (bias,) = numbers('float32', (heads, 2 * slots))
  return jnp.where(relative > 0, layers.MASKED, bias)


def lengths(batch, num_queries, slots):
  """An empty row, a full one, and one in between."""
  most = slots - num_queries
  return jnp.asarray([most, 0, most // 2][:batch], jnp.int32)


def same(have, want, dtype):
  have, want = (np.asarray(x, np.float32) for x in (have, want))
  np.testing.assert_allclose(have, want, rtol=NEAR[dtype], atol=NEAR[dtype])


def plain_step(
  queries, keys, values, joined, bias, length, tree=None, beside=(), **scores
):
  written = kv_cache.write_joined(joined, keys, values, length)
  if tree is None:
    bias = kv_cache.read_position_bias(bias, length, queries.shape[1])
  else:
    bias = kv_cache.read_tree_bias(bias, tree)
  return layers.attend(
    queries, *written, bias, 'td', beside=beside, **scores
  ), written


def step_args(shape, dtype, heads_of_bias=None):
  batch, num_queries, heads, kept, size, slots = shape
  asked, new = ((batch, num_queries, count, size) for count in (heads, kept))
  args = numbers(dtype, asked, new, new, (2, batch, kept, slots, size))
  args[0] *= size**-0.5  # as networks scale them
  args.append(position_bias(heads_of_bias or heads, slots))
  args.append(lengths(batch, num_queries, slots))
  return args


def kernel_step(*args, **options):
  with backend.compiled_for('gpu'), interpreted():
    return quick_jit(functools.partial(attention_kernel.step, **options))(*args)


def both_steps(shape, dtype, heads_of_bias=None):
  args = step_args(shape, dtype, heads_of_bias)
  return kernel_step(*args), quick_jit(plain_step)(*args), args


@pytest.mark.parametrize(('shape', 'dtype'), SHAPES)
def test_a_step_writes_and_attends_as_the_plain_code(shape, dtype):
  (mixed, written), (want, wanted), args = both_steps(shape, dtype)
  same(mixed, want, dtype)
  np.testing.assert_array_equal(written, wanted)
  # Control: a bias that is one slot away.
  *most, bias, length = args
  wrong, _ = quick_jit(plain_step)(*most, jnp.roll(bias, 1, 1), length)
  with pytest.raises(AssertionError):
    same(mixed, wrong, dtype)


def some_tree(num_queries, length, slots):
  """Tokens that hang anywhere, and see some of the past alone, as beams do."""
  rng = np.random.default_rng(1)
  parents = [int(rng.integers(-1, i)) for i in range(num_queries)]
  one = static_tree(parents, length, slots)
  old = jnp.arange(slots) < length[:, None, None]
  some = jnp.asarray(rng.random(one.visible.shape) < 0.5)
  return one.replace(visible=one.visible & (some | ~old))


@pytest.mark.parametrize(('shape', 'dtype'), SHAPES)
def test_tokens_of_a_tree_see_their_ancestors(shape, dtype):
  args = step_args(shape, dtype)
  tree = some_tree(shape[1], args[-1], shape[-1])
  mixed, written = kernel_step(*args, tree)
  want, wanted = quick_jit(plain_step)(*args, tree)
  same(mixed, want, dtype)
  np.testing.assert_array_equal(written, wanted)
  # Controls: places or ancestors of another tree.
  ways = [{'slot_positions': tree.slot_positions + 1}]
  if shape[0] > 1:
    ways.append({'visible': jnp.roll(tree.visible, 1, 0)})
  for other in ways:
    wrong, _ = quick_jit(plain_step)(*args, tree.replace(**other))
    with pytest.raises(AssertionError):
      same(mixed, wrong, dtype)


@pytest.mark.parametrize('is_tree', [False, True])
@pytest.mark.parametrize(
  ('shape', 'dtype'),
  [
    ((3, 4, 4, 2, 16, 40), 'float32'),
    pytest.param((1, 3, 2, 1, 256, 600), 'bfloat16', marks=pytest.mark.slow),
  ],
)
def test_scores_are_scaled_and_capped_and_see_an_encoder(shape, dtype, is_tree):
  batch, num_queries, _, kept, size, slots = shape
  args = step_args(shape, dtype, 1)
  args += [some_tree(num_queries, args[-1], slots)] * is_tree
  encoded = (batch, kept, size, 70)
  beside = numbers(dtype, encoded, encoded)
  held = jnp.asarray([70, 1, 33][:batch])
  beside.append(layers.padding_bias(jnp.arange(70) < held[:, None]))
  options = {'beside': tuple(beside), 'scale': 3.0, 'softcap': 2.0}
  mixed, _ = kernel_step(*args, **options)

  def plain(**changed):
    plain = functools.partial(plain_step, **(options | changed))
    return quick_jit(plain)(*args)[0]

  same(mixed, plain(), dtype)
  for control in ({'beside': ()}, {'scale': 1.0}, {'softcap': 0.0}):
    with pytest.raises(AssertionError):
      same(mixed, plain(**control), dtype)


def test_a_mask_that_all_heads_share():
  (mixed, _), (want, _), _ = both_steps((2, 3, 2, 2, 16, 20), 'float32', 1)
  same(mixed, want, 'float32')


def test_unused_slots_are_not_read():
  shape = (2, 2, 2, 2, 16, 150)
  (mixed, _), _, args = both_steps(shape, 'float32')
  queries, keys, values, joined, bias, length = args
  unused = jnp.arange(150) >= length[:, None]
  spoilt = jnp.where(unused[None, :, None, :, None], jnp.nan, joined)
  again, _ = kernel_step(queries, keys, values, spoilt, bias, length)
  same(again, mixed, 'float32')


@pytest.mark.parametrize(('shape', 'dtype'), SHAPES)
def test_cross_attention_leaves_padding_out(shape, dtype):
  batch, num_queries, heads, kept, size, slots = shape
  encoded = (batch, kept, size, slots)
  args = numbers(dtype, (batch, num_queries, heads, size), encoded, encoded)
  args[0] *= size**-0.5
  held = jnp.asarray([slots, 1, slots // 2][:batch])
  bias = layers.padding_bias(jnp.arange(slots) < held[:, None])
  with interpreted():
    have = quick_jit(attention_kernel.cross)(*args, bias)
  same(have, quick_jit(layers.attend)(*args, bias), dtype)
  # Control: another row's padding.
  if batch > 1:
    wrong = quick_jit(layers.attend)(*args, jnp.roll(bias, 1, 0))
    with pytest.raises(AssertionError):
      same(have, wrong, dtype)


@pytest.fixture
def _long_inputs(monkeypatch):
  """Those of the other tests are too short for the kernel."""
  monkeypatch.setattr(backend_test, 'INPUTS', (*range(3, 20), 0))


def network(name, layers=2):
  one = NETWORKS[name]
  sizes = {'head_dim': 16, 'emb_dim': 32, 'mlp_dim': 48}
  if isinstance(one, t5gemma.T5Gemma):
    stacks = {
      stack: dataclasses.replace(getattr(one.config, stack), **sizes)
      for stack in ('encoder', 'decoder')
    }
    return t5gemma.T5Gemma(dataclasses.replace(one.config, **stacks))
  if one.has_encoder:
    sizes |= {'num_encoder_layers': 1, 'num_decoder_layers': layers}
  config = dataclasses.replace(one.config, **sizes)
  return dataclasses.replace(one, config=config)


@pytest.mark.usefixtures('_long_inputs')
@pytest.mark.parametrize(
  ('name', 'layers', 'batch'),
  [
    ('t5_1_1', 1, 2),
    pytest.param('t5_1_1', 2, 1, marks=pytest.mark.slow),
    pytest.param('own_bias', 2, 3, marks=pytest.mark.slow),
    pytest.param('gpt2', 2, 3, marks=pytest.mark.slow),
    pytest.param('gpt_t5x', 2, 1, marks=pytest.mark.slow),
    pytest.param('gemma3', 4, 3, marks=pytest.mark.slow),
    pytest.param('t5gemma', 3, 3, marks=pytest.mark.slow),
    pytest.param('t5gemma2', 3, 3, marks=pytest.mark.slow),
  ],
)
def test_logits_are_the_same(name, layers, batch):
  calls = functools.partial(
    backend_test.logits_of_calls, 'gpu', network(name, layers), batch, 40
  )
  want, _ = calls()
  with interpreted():
    have, _ = calls()
  np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures('_long_inputs')
@pytest.mark.parametrize(
  'name',
  [
    'gpt_t5x',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('own_bias', 'gpt2', 'gemma3', 't5gemma', 't5gemma2')
    ),
  ],
)
def test_logits_of_a_tree_are_the_same(name):
  one = network(name)
  parents = (-1, -1, 0, 0, 1, 3)
  made = {}

  def call(params, inputs, tokens):
    cache = one.prefill(params, inputs, 40)
    _, cache = one.extend(params, cache, tokens[:, :5])
    cache = one.rewind(cache, cache.length - jnp.arange(2))
    tree = static_tree(parents, cache.length, 40)
    return one.extend(params, cache, tokens[:, 5:], tree)[0]

  params = backend_test.on('gpu', one)
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(2, 60, (2, 11)).astype(np.int32))
  inputs = jnp.asarray([backend_test.INPUTS] * 2, jnp.int32)
  for setting in ('off', 'interpreted'):
    with backend.kernels(setting), backend.compiled_for('gpu'):
      text = str(jax.make_jaxpr(call)(params, inputs, tokens))
      assert ('pallas_call' in text) == (setting != 'off')
      made[setting] = quick_jit(call)(params, inputs, tokens)
  np.testing.assert_allclose(*made.values(), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.usefixtures('_long_inputs')
@pytest.mark.parametrize('batch', [1, 3])
def test_loops_give_the_same_tokens(batch):
  pair = network('t5_1_1'), network('t5_1_0')
  made = {}
  for setting in ('off', 'interpreted'):
    with backend.kernels(setting):
      loop, params, request = backend_test.decode('gpu', *pair, batch)
      with backend.compiled_for('gpu'):
        made[setting] = quick_jit(loop.decode)(params, request)
  want, have = made.values()
  np.testing.assert_array_equal(have.tokens, want.tokens)
  jax.tree.map(np.testing.assert_array_equal, have.stats, want.stats)


def traced(setting, name='t5_1_1', kind='gpu', split=False, **config):
  """Traces a call of two tokens."""
  one = network(name)
  one = dataclasses.replace(
    one, config=dataclasses.replace(one.config, **config)
  )
  with backend.compiled_for('gpu'), backend.kernels(setting):
    params = memory.param_shapes(one, Placement())
  tokens = jax.ShapeDtypeStruct((1, 18), jnp.int32)

  def call(params, tokens):
    cache = one.prefill(params, tokens, 40)
    return one.extend(params, cache, tokens[:, :2])

  around = backend.split() if split else contextlib.nullcontext()
  with backend.compiled_for(kind), backend.kernels(setting), around:
    return str(jax.make_jaxpr(call)(params, tokens))


def test_what_a_kernel_does_not_take_is_said_once_or_an_error():
  backend._say_once.cache_clear()
  with pytest.warns(UserWarning, match='heads of 8 numbers') as told:
    # Products are kernels nevertheless.
    text = traced('on', head_dim=8, num_heads=4)
    assert 'name=product' in text and 'name=step' not in text
    traced('on', head_dim=8, num_heads=4)
  assert len(told) == 2  # self-attention and cross-attention
  for setting in ('forced', 'interpreted'):
    with pytest.raises(ValueError, match="heads of 8 .* Set kernels to 'on'"):
      traced(setting, head_dim=8, num_heads=4)
  with pytest.raises(ValueError, match='split over several devices'):
    traced('forced', split=True)
  with pytest.raises(ValueError, match='for GPUs, and this is a CPU'):
    traced('forced', kind='cpu')
  with pytest.raises(ValueError, match="'yes', expected one of"):
    backend.kernels('yes')


def test_a_long_prompt_is_no_step():
  one = network('gpt_t5x')
  params = param_shapes(one)

  def call(params, tokens):
    return one.extend(params, one.prefill(params, tokens, 140), tokens)

  def taken(count):
    tokens = jax.ShapeDtypeStruct((1, count), jnp.int32)
    with backend.compiled_for('gpu'), backend.kernels('forced'):
      return 'pallas_call' in str(jax.make_jaxpr(call)(params, tokens))

  assert taken(128) and not taken(129)


def test_kernels_are_off_unless_they_are_asked_for(monkeypatch):
  assert backend.kernel_setting() == 'off'
  assert 'kernels' not in environment.describe()
  monkeypatch.setenv('SPECDEC_KERNELS', 'on')
  assert backend.kernel_setting() == environment.describe()['kernels'] == 'on'
  assert 'pallas_call' not in traced('off')
  monkeypatch.setenv('SPECDEC_KERNELS', 'yes')
  with pytest.raises(ValueError, match="SPECDEC_KERNELS .* is 'yes', expected"):
    backend.kernel_setting()
  assert traced('on').count('pallas_call[') == 2 * 8  # two layers


@pytest.mark.parametrize(
  ('queries', 'kept', 'slots', 'dtype', 'reason'),
  [
    ((1, 1, 3, 16), 2, 40, 'float32', 'heads cannot share'),
    ((1, 1, 2, 80), 2, 40, 'float32', 'power of two'),
    ((1, 1, 2, 512), 2, 40, 'float32', 'to 256'),
    ((1, 1, 2, 16), 2, 15, 'float32', '15 slots'),
    ((1, 1, 2, 16), 2, 40, 'float16', 'float16'),
    ((1, 16, 2, 16), 2, 40, 'float32', ''),
    ((1, 128, 8, 256), 2, 40, 'bfloat16', ''),
  ],
)
def test_shapes_that_are_refused(queries, kept, slots, dtype, reason):
  one = jax.ShapeDtypeStruct(queries, dtype)
  said = attention_kernel.refusal(one, kept, slots)
  assert reason in said and bool(said) == bool(reason)


@compiles_kernels
@pytest.mark.usefixtures('_nothing_is_kept')
def test_kernels_are_compiled_for_a_gpu(tmp_path):
  costs = {}
  for setting in ('off', 'forced'):
    config = settings(tmp_path / setting, kernels=setting)
    results, _ = check(config)
    (record,) = results['rows']
    costs[setting] = record['costs']
    calls = record['programs']['plain_run']['custom_calls']
    assert any('triton' in name for name in calls) == (setting == 'forced')
  for part, fewer in (('token', 1), ('step', 1), ('round', 20)):
    before, after = (costs[name][part] for name in ('off', 'forced'))
    assert after['kernels'] <= before['kernels'] - fewer, part
    assert after['written_bytes'] <= before['written_bytes']
    # A layer writes the same keys and values, in place.
    assert after['updated_bytes'] == before['updated_bytes']
    assert after['copied_bytes'] == 0
