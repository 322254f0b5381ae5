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
from gpu_check_test import _nothing_is_kept, check, needs_cuda, settings  # noqa: F401
from specdec_jax.measure import environment
from specdec_jax.models import attention_kernel, backend, kv_cache, layers
from specdec_jax.models.base import param_shapes
from toy_requests import quick_jit

# Rounding of sums in float32, of results in bfloat16.
NEAR = {'float32': 2e-6, 'bfloat16': 2e-2}
SHAPES = [  # B, S, H, D, slots
  pytest.param((3, 5, 2, 16, 150), 'float32'),
  pytest.param((2, 8, 2, 16, 40), 'bfloat16'),
  *(
    pytest.param(*other, marks=pytest.mark.slow)
    for other in (
      ((1, 1, 2, 16, 16), 'float32'),
      ((1, 16, 2, 32, 129), 'float32'),
      ((2, 7, 3, 64, 64), 'float32'),
      ((1, 1, 4, 64, 136), 'bfloat16'),
      ((3, 16, 2, 64, 300), 'bfloat16'),
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


def plain_step(queries, keys, values, joined, bias, length):
  written = kv_cache.write_joined(joined, keys, values, length)
  bias = kv_cache.read_position_bias(bias, length, queries.shape[1])
  return layers.attend(queries, *written, bias, 'td'), written


def both_steps(shape, dtype, heads_of_bias=None):
  batch, num_queries, heads, size, slots = shape
  one = (batch, num_queries, heads, size)
  args = numbers(dtype, one, one, one, (2, batch, heads, slots, size))
  args.append(position_bias(heads_of_bias or heads, slots))
  args.append(lengths(batch, num_queries, slots))
  with backend.compiled_for('gpu'), interpreted():
    have = quick_jit(attention_kernel.step)(*args)
  return have, quick_jit(plain_step)(*args), args


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


def test_a_mask_that_all_heads_share():
  (mixed, _), (want, _), _ = both_steps((2, 3, 2, 16, 20), 'float32', 1)
  same(mixed, want, 'float32')


def test_unused_slots_are_not_read():
  shape = (2, 2, 2, 16, 150)
  (mixed, _), _, args = both_steps(shape, 'float32')
  queries, keys, values, joined, bias, length = args
  unused = jnp.arange(150) >= length[:, None]
  spoilt = jnp.where(unused[None, :, None, :, None], jnp.nan, joined)
  with backend.compiled_for('gpu'), interpreted():
    again, _ = quick_jit(attention_kernel.step)(
      queries, keys, values, spoilt, bias, length
    )
  same(again, mixed, 'float32')


@pytest.mark.parametrize(('shape', 'dtype'), SHAPES)
def test_cross_attention_leaves_padding_out(shape, dtype):
  batch, num_queries, heads, size, slots = shape
  kept = (batch, heads, size, slots)
  args = numbers(dtype, (batch, num_queries, heads, size), kept, kept)
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
  sizes = {'head_dim': 16}
  if NETWORKS[name].has_encoder:
    sizes |= {'num_encoder_layers': 1, 'num_decoder_layers': layers}
  config = dataclasses.replace(NETWORKS[name].config, **sizes)
  return dataclasses.replace(NETWORKS[name], config=config)


@pytest.mark.usefixtures('_long_inputs')
@pytest.mark.parametrize(
  ('name', 'layers', 'batch'),
  [
    ('t5_1_1', 1, 2),
    pytest.param('t5_1_1', 2, 1, marks=pytest.mark.slow),
    pytest.param('own_bias', 2, 3, marks=pytest.mark.slow),
    pytest.param('gpt2', 2, 3, marks=pytest.mark.slow),
    pytest.param('gpt_t5x', 2, 1, marks=pytest.mark.slow),
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
  params = param_shapes(one)
  tokens = jax.ShapeDtypeStruct((1, 18), jnp.int32)

  def call(params, tokens):
    cache = one.prefill(params, tokens, 40)
    return one.extend(params, cache, tokens[:, :2])

  around = backend.split() if split else contextlib.nullcontext()
  with backend.compiled_for(kind), backend.kernels(setting), around:
    return str(jax.make_jaxpr(call)(params, tokens))


def test_what_a_kernel_does_not_take_is_said_once_or_an_error():
  backend._say_once.cache_clear()
  with pytest.warns(UserWarning, match='heads of 12 numbers') as told:
    assert 'pallas_call' not in traced('on', head_dim=12)
    traced('on', head_dim=12)
  assert len(told) == 2  # self-attention and cross-attention
  for setting in ('forced', 'interpreted'):
    with pytest.raises(ValueError, match="heads of 12 .* Set kernels to 'on'"):
      traced(setting, head_dim=12)
  with pytest.raises(ValueError, match='split over several devices'):
    traced('forced', split=True)
  with pytest.raises(ValueError, match='for GPUs, and this is a CPU'):
    traced('forced', kind='cpu')
  with pytest.raises(ValueError, match='none is written for this network'):
    traced('forced', 'gemma3')
  with pytest.raises(ValueError, match="'yes', expected one of"):
    backend.kernels('yes')


def test_kernels_are_off_unless_they_are_asked_for(monkeypatch):
  assert backend.kernel_setting() == 'off'
  assert 'kernels' not in environment.describe()
  monkeypatch.setenv('SPECDEC_KERNELS', 'on')
  assert backend.kernel_setting() == environment.describe()['kernels'] == 'on'
  assert 'pallas_call' not in traced('off')
  monkeypatch.setenv('SPECDEC_KERNELS', 'yes')
  with pytest.raises(ValueError, match="SPECDEC_KERNELS .* is 'yes', expected"):
    backend.kernel_setting()
  assert traced('on').count('pallas_call[') == 4  # two layers


@pytest.mark.parametrize(
  ('queries', 'kept', 'slots', 'dtype', 'reason'),
  [
    ((1, 17, 2, 16), 2, 40, 'float32', '17 queries'),
    ((1, 1, 4, 16), 2, 40, 'float32', 'heads share'),
    ((1, 1, 2, 80), 2, 40, 'float32', 'power of two'),
    ((1, 1, 2, 16), 2, 15, 'float32', '15 slots'),
    ((1, 1, 2, 16), 2, 40, 'float16', 'float16'),
    ((1, 16, 2, 16), 2, 40, 'float32', ''),
  ],
)
def test_shapes_that_are_refused(queries, kept, slots, dtype, reason):
  one = jax.ShapeDtypeStruct(queries, dtype)
  said = attention_kernel.refusal(one, kept, slots)
  assert reason in said and bool(said) == bool(reason)


@needs_cuda
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
