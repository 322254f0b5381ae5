"""T5Gemma 1 and 2: against plain NumPy, and against themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import t5gemma_numpy
from causal_lm_test import GEMMA2, GEMMA3
from specdec_jax import partitioning
from specdec_jax.measure import memory
from specdec_jax.models import backend, sizes
from specdec_jax.models.base import param_shapes
from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig
from specdec_jax.training import losses

# The encoder is wider than the decoder and has other heads, as in 9B-2B.
ONE = T5GemmaConfig(
  dataclasses.replace(
    GEMMA2, emb_dim=20, num_heads=4, num_layers=2, logit_softcap=0.0
  ),
  GEMMA2,
)
_TWO = dataclasses.replace(GEMMA3, num_kv_heads=2, num_layers=3)
TWO = T5GemmaConfig(_TWO, _TWO, merged_attention=True, image_end_id=7)
FAMILIES = {'T5Gemma': ONE, 'T5Gemma 2': TWO}
families = pytest.mark.parametrize('config', FAMILIES.values(), ids=FAMILIES)
# What T5Gemma 2 shows for both: its attention alone reads encoder and decoder.
one_is_slow = pytest.mark.parametrize(
  'config',
  [
    pytest.param(ONE, id='T5Gemma', marks=pytest.mark.slow),
    pytest.param(TWO, id='T5Gemma 2'),
  ],
)

logits_of = jax.jit(T5Gemma.logits, static_argnums=0)
extend = jax.jit(T5Gemma.extend, static_argnums=0)
prefill = jax.jit(T5Gemma.prefill, static_argnums=(0, 3))


@functools.cache
def make(config, seed=0):
  """A model whose scales are not 1."""
  rng = np.random.default_rng(seed)

  def draw(leaf):
    return rng.standard_normal(leaf.shape).astype(np.float32) / 4

  network = T5Gemma(config)
  return network, jax.tree.map(draw, param_shapes(network))


def batch(seed, lengths=(30, 3, 17), width=32):
  """Inputs [3, 32] of several lengths, and 40 tokens of each output."""
  rng = np.random.default_rng(seed)
  inputs = np.zeros((len(lengths), width), np.int32)
  for row, length in zip(inputs, lengths, strict=True):
    row[:length] = rng.integers(2, 60, length)
  fed = rng.integers(2, 60, (len(lengths), 40)).astype(np.int32)
  fed[:, 0] = 2
  inputs[0, 5] = fed[0, 9] = 7  # the end of an image
  return jnp.asarray(inputs), jnp.asarray(fed)


@families
def test_logits_are_those_of_plain_numpy(config):
  network, params = make(config)
  inputs, fed = batch(1)
  have = logits_of(network, params, inputs, fed)
  for row, length in ((0, 30), (1, 3)):
    want = t5gemma_numpy.logits(
      config, params, np.asarray(inputs[row, :length]), np.asarray(fed[row])
    )
    assert np.std(want) > 0.1
    np.testing.assert_allclose(have[row], want, atol=1e-4 * abs(want).max())


def changed(config, stack=None, **fields):
  if stack is None:
    return dataclasses.replace(config, **fields)
  one = dataclasses.replace(getattr(config, stack), **fields)
  return dataclasses.replace(config, **{stack: one})


@pytest.mark.parametrize(
  ('config', 'change'),
  [
    (ONE, {'stack': 'encoder', 'window': 10}),
    (ONE, {'stack': 'encoder', 'layer_kinds': ('global', 'local')}),
    (ONE, {'stack': 'decoder', 'window': 10}),
    (ONE, {'stack': 'decoder', 'score_softcap': 0.0}),
    (TWO, {'stack': 'encoder', 'window': 10}),
    (TWO, {'stack': 'encoder', 'window': 8}),
    (TWO, {'stack': 'decoder', 'window': 10}),
    (TWO, {'stack': 'decoder', 'local_rope': None}),
    (TWO, {'image_end_id': 8}),
  ],
)
def test_every_field_is_seen(config, change):
  """The negative control of the test above: one field differs."""
  network, params = make(config)
  inputs, fed = batch(1)
  want = logits_of(network, params, inputs, fed)
  have = logits_of(T5Gemma(changed(config, **change)), params, inputs, fed)
  assert np.abs(have - want).max() > 1e-3 * np.abs(want).max()


def read_all(network, params, inputs, fed, sizes, slots=150):
  """Logits of `fed`, read in calls of these sizes."""
  cache = prefill(network, params, inputs, slots)
  pieces, at = [], 0
  for size in sizes:
    logits, cache = extend(network, params, cache, fed[:, at : at + size])
    pieces.append(logits)
    at += size
  np.testing.assert_array_equal(cache.length, [at] * len(fed))
  return np.concatenate(pieces, axis=1)


@pytest.mark.parametrize(
  ('config', 'layout', 'kind'),
  [
    (TWO, 'in_out', 'cpu'),
    (ONE, 'in_out', 'gpu'),
    pytest.param(ONE, 'out_in', 'cpu', marks=pytest.mark.slow),
    pytest.param(TWO, 'out_in', 'gpu', marks=pytest.mark.slow),
    pytest.param(TWO, 'in_out', 'tpu', marks=pytest.mark.slow),
  ],
)
def test_extend_in_pieces_equals_teacher_forcing(config, layout, kind):
  network, params = make(config)
  inputs, _ = batch(2)
  rng = np.random.default_rng(2)
  # Attended over 128 slots first, then over all.
  fed = jnp.asarray(rng.integers(2, 60, (3, 150)).astype(np.int32))
  want = logits_of(network, params, inputs, fed)
  placed = partitioning.place(
    params, partitioning.Placement(kernel_layout=layout)
  )
  assert {'qkv', 'out'} <= set(placed['decoder']['layers_1']['self_attention'])
  with backend.compiled_for(kind):
    have = read_all(network, placed, inputs, fed, (1, 62, 1, 62, 12, 12))
  np.testing.assert_allclose(have, want, atol=5e-5 * np.abs(want).max())


@one_is_slow
def test_rows_at_their_own_places_and_rewound(config):
  network, params = make(config)
  inputs, fed = batch(3)
  want = np.asarray(logits_of(network, params, inputs, fed))
  cache = prefill(network, params, inputs, 24)
  _, cache = extend(network, params, cache, fed[:, :16])
  starts = np.array([16, 11, 0])
  cache = network.rewind(cache, jnp.asarray(starts))
  new = np.stack([fed[b, s : s + 4] for b, s in enumerate(starts)])
  logits, cache = extend(network, params, cache, jnp.asarray(new))
  for row, begin in enumerate(starts):
    np.testing.assert_allclose(
      logits[row],
      want[row, begin : begin + 4],
      atol=5e-5 * np.abs(want).max(),
    )
  np.testing.assert_array_equal(cache.length, starts + 4)


@one_is_slow
def test_padding_does_not_show(config):
  network, params = make(config)
  inputs, fed = batch(4, (9, 3, 14), width=16)
  want = logits_of(network, params, inputs, fed)
  wide = jnp.pad(inputs, ((0, 0), (0, 16)))
  have = logits_of(network, params, wide, fed)
  np.testing.assert_allclose(have, want, atol=2e-5 * np.abs(want).max())
  # Negative control: one more token does.
  more = logits_of(network, params, wide.at[1, 3].set(5), fed)
  assert np.abs(more - want)[1].max() > 1e-3 * np.abs(want).max()


@one_is_slow
def test_bfloat16_stays_close(config):
  network, params = make(config)
  half = T5Gemma(dataclasses.replace(config, dtype='bfloat16'))
  assert half.config.encoder.dtype == half.config.decoder.dtype == 'bfloat16'
  want = logits_of(network, params, *batch(5))
  have = logits_of(half, params, *batch(5))
  assert have.dtype == jnp.float32
  error = float(jnp.sqrt(jnp.mean((have - want) ** 2)))
  assert 0 < error < 0.1 * float(jnp.std(want))


@pytest.mark.parametrize(
  'config', [pytest.param(ONE, marks=pytest.mark.slow), TWO]
)
def test_gradients_reach_every_array(config):
  network, params = make(config)
  inputs, fed = batch(6)

  @jax.jit
  def loss(params):
    read = losses.shift_right(fed, network)
    logits = network.logits(params, inputs, read)
    return losses.cross_entropy(logits, fed, 0.0, 0.0).mean()

  for path, leaf in jax.tree.leaves_with_path(jax.grad(loss)(params)):
    assert np.isfinite(leaf).all() and np.any(leaf), path


def test_shift_right_begins_with_the_models_own_id():
  fed = jnp.array([[5, 6, 7]])
  assert losses.shift_right(fed, T5Gemma(ONE)).tolist() == [[2, 5, 6]]
  other = T5Gemma(dataclasses.replace(ONE, start_id=9))
  assert losses.shift_right(fed, other).tolist() == [[9, 5, 6]]


@families
def test_sizes_are_counted_without_a_network(config):
  untied = changed(config, 'decoder', logits_via_embedding=False)
  for one in (config, untied, changed(config, 'decoder', post_norms=False)):
    leaves = jax.tree.leaves(param_shapes(T5Gemma(one)))
    assert sizes.num_params(one) == sum(leaf.size for leaf in leaves)


@families
def test_bytes_of_a_call(config):
  """The encoder and what is read of it once are no part of a call."""
  network, decoder = T5Gemma(config), config.decoder
  request = memory.request_shapes(1, 16, 32, 2, greedy=True)
  found = memory.call_bytes(network, param_shapes(network), request)
  table = decoder.vocab_size * decoder.emb_dim
  weights = sizes.num_params(config)
  of_encoder = sum(
    leaf.size for leaf in jax.tree.leaves(param_shapes(network)['encoder'])
  )
  keys = decoder.num_kv_heads * decoder.head_dim
  once = 0 if config.merged_attention else 2 * config.encoded_dim * keys
  assert found.weights == 4 * (weights - of_encoder - 3 * once)
  assert found.cross_attention == 4 * 2 * 3 * keys * 16
  assert found.weights > 4 * table  # which is the output layer
  assert found.embeddings == 4 * decoder.emb_dim
  plan = memory.Plan(
    network, network, input_len=16, decode_len=32, gamma=2,
    param_dtype='float32',
  )  # fmt: skip
  room = memory.check_fits(plan, None)
  assert room['target parameters'] == 4 * weights


@pytest.mark.parametrize(
  ('config', 'change', 'words'),
  [
    (ONE, {'stack': 'encoder', 'vocab_size': 61}, 'one vocab_size .* 61 of'),
    (TWO, {'stack': 'encoder', 'emb_dim': 20}, 'one emb_dim of both'),
    (ONE, {'start_id': 60}, 'start_id must be an id below 60, got 60'),
    (TWO, {'image_end_id': -1}, 'image_end_id must be an id below 60'),
    (ONE, {'dtype': 'float16'}, "'float16', .*'bfloat16', 'float32'"),
    (ONE, {'encoder': None}, 'T5GemmaConfig.encoder: expected CausalLMConfig'),
  ],
)
def test_config_says_what_is_wrong(config, change, words):
  with pytest.raises(ValueError, match=words):
    changed(config, **change)
