"""Llama, Qwen and Gemma: against plain NumPy, and against themselves."""

import dataclasses
import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import causal_numpy
from specdec_jax import partitioning
from specdec_jax.models import backend, sizes
from specdec_jax.models.causal_lm import CausalLM, CausalLMConfig
from specdec_jax.models.rope import Rope

LLAMA = CausalLMConfig(
  vocab_size=60,
  emb_dim=24,
  num_heads=6,
  num_kv_heads=2,
  num_layers=3,
  head_dim=10,  # heads * head_dim is not emb_dim
  mlp_dim=40,
  rope=Rope(5e5, factor=8.0, original_length=24),
  norm_epsilon=1e-5,
)
QWEN2 = dataclasses.replace(
  LLAMA, qkv_bias=True, rope=Rope(1e6), num_kv_heads=6
)
QWEN3 = dataclasses.replace(
  LLAMA, qk_norm=True, rope=Rope(1e6), logits_via_embedding=True
)
GEMMA2 = dataclasses.replace(
  LLAMA,
  rope=Rope(),
  mlp_activations=('gelu', 'linear'),
  layer_kinds=('local', 'global'),
  window=9,
  norm_offset=1.0,
  post_norms=True,
  query_scalar=7.0,
  score_softcap=5.0,
  logit_softcap=3.0,
  scale_embeddings=True,
  logits_via_embedding=True,
)
GEMMA3 = dataclasses.replace(
  GEMMA2,
  num_kv_heads=1,
  rope=Rope(1e6, factor=8.0),
  local_rope=Rope(),
  layer_kinds=('local', 'local', 'global'),
  num_layers=4,
  qk_norm=True,
  score_softcap=0.0,
  logit_softcap=0.0,
)
FAMILIES = {
  'Llama 3': LLAMA,
  'Qwen 2': QWEN2,
  'Qwen 3': QWEN3,
  'Gemma 2': GEMMA2,
  'Gemma 3': GEMMA3,
}
two_families = pytest.mark.parametrize(
  'config',
  [
    pytest.param(LLAMA, id='Llama 3', marks=pytest.mark.slow),
    pytest.param(GEMMA3, id='Gemma 3'),
  ],
)

# Compiled once a network and shape, not dispatched operation by operation.
logits_of = jax.jit(CausalLM.logits, static_argnums=0)
extend = jax.jit(CausalLM.extend, static_argnums=0)
prefill = jax.jit(CausalLM.prefill, static_argnums=(0, 3))


@functools.cache
def shapes(config):
  return jax.eval_shape(CausalLM(config).init, jax.random.key(0))


@functools.cache
def make(config, seed=0):
  """A model whose biases are not 0 and whose scales are not 1."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    noise = rng.standard_normal(leaf.shape).astype(np.float32)
    is_scale = path[-1].key == 'scale'
    return is_scale * (1.0 - config.norm_offset) + noise / 3

  return CausalLM(config), jax.tree_util.tree_map_with_path(
    draw, shapes(config)
  )


def tokens(seed, *shape):
  rng = np.random.default_rng(seed)  # which compiles nothing for each shape
  return jnp.asarray(rng.integers(2, 60, shape).astype(np.int32))


def read_all(model, params, targets, sizes):
  """Logits of `targets`, read in calls of these sizes."""
  cache = prefill(model, params, targets, targets.shape[1])
  pieces, at = [], 0
  for size in sizes:
    logits, cache = extend(model, params, cache, targets[:, at : at + size])
    pieces.append(logits)
    at += size
  np.testing.assert_array_equal(cache.length, [at] * len(targets))
  return np.concatenate(pieces, axis=1)


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_are_those_of_plain_numpy(family):
  config = FAMILIES[family]
  model, params = make(config)
  read = tokens(1, 1, 40)
  want = causal_numpy.logits(config, params, np.asarray(read[0]))
  have = logits_of(model, params, None, read)[0]
  assert np.std(want) > 0.1
  np.testing.assert_allclose(have, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
  ('family', 'change'),
  [
    ('Llama 3', {'rope': Rope(5e5)}),
    ('Llama 3', {'norm_epsilon': 1e-2}),
    ('Qwen 3', {'rope': Rope(1e6, factor=2.0)}),
    ('Gemma 2', {'window': 10}),
    ('Gemma 2', {'layer_kinds': ('global', 'local')}),
    ('Gemma 2', {'score_softcap': 0.0}),
    ('Gemma 2', {'logit_softcap': 4.0}),
    ('Gemma 2', {'query_scalar': 0.0}),
    ('Gemma 3', {'local_rope': None}),
    ('Gemma 3', {'scale_embeddings': False}),
    ('Gemma 3', {'norm_offset': 0.0}),
    ('Gemma 3', {'mlp_activations': ('silu', 'linear')}),
  ],
  ids=str,
)
def test_every_field_is_seen(family, change):
  """The negative control of the test above: one field differs."""
  config = FAMILIES[family]
  model, params = make(config)
  other = CausalLM(dataclasses.replace(config, **change))
  read = tokens(1, 1, 40)
  want = logits_of(model, params, None, read)
  have = logits_of(other, params, None, read)
  assert np.abs(have - want).max() > 1e-3 * np.abs(want).max()


@pytest.mark.parametrize(
  ('family', 'layout', 'kind'),
  [
    ('Llama 3', 'out_in', 'cpu'),
    ('Gemma 3', 'in_out', 'cpu'),
    pytest.param('Qwen 2', 'out_in', 'cpu', marks=pytest.mark.slow),
    pytest.param('Qwen 3', 'in_out', 'gpu', marks=pytest.mark.slow),
    ('Gemma 2', 'out_in', 'tpu'),
  ],
)
def test_extend_in_pieces_equals_teacher_forcing(family, layout, kind):
  config = FAMILIES[family]
  model, params = make(config)
  targets = tokens(2, 3, 150)  # attended over 128 slots first, then over all
  expected = logits_of(model, params, None, targets)
  placed = partitioning.place(
    params, partitioning.Placement(kernel_layout=layout)
  )
  attention = placed['decoder']['layers_1']['self_attention']
  assert {'qkv', 'out'} <= set(attention)
  with backend.compiled_for(kind):
    have = read_all(model, placed, targets, (1, 62, 1, 62, 12, 12))
  np.testing.assert_allclose(have, expected, atol=5e-5 * np.abs(expected).max())


def test_keys_are_cached_once_for_the_heads_that_share_them():
  model, params = make(GEMMA3)
  cache = prefill(model, params, tokens(1, 2, 1), 16)
  assert {leaf.shape for leaf in cache.keys} == {(2, 1, 10, 16)}
  assert len(cache.position_bias) == 2  # of local and of global layers


@two_families
def test_rows_at_their_own_places(config):
  model, params = make(config)
  targets = tokens(3, 3, 20)
  expected = np.asarray(logits_of(model, params, None, targets))
  cache = prefill(model, params, targets, 24)
  _, cache = extend(model, params, cache, targets[:, :16])
  starts = np.array([16, 11, 0])
  cache = model.rewind(cache, jnp.asarray(starts))
  new = np.stack([targets[b, s : s + 4] for b, s in enumerate(starts)])
  logits, cache = extend(model, params, cache, jnp.asarray(new))
  for row, begin in enumerate(starts):
    np.testing.assert_allclose(
      logits[row],
      expected[row, begin : begin + 4],
      atol=5e-5 * np.abs(expected).max(),
    )
  np.testing.assert_array_equal(cache.length, starts + 4)


@two_families
def test_rewound_cache_equals_a_fresh_one(config):
  """What lay past a rewind leaves no trace, whatever was written there."""
  model, params = make(config)
  targets = tokens(4, 3, 18)
  cache = prefill(model, params, targets, 20)
  _, fresh = extend(model, params, cache, targets[:, :14])
  _, used = extend(model, params, fresh, tokens(9, 3, 4))
  rewound = model.rewind(used, jnp.full((3,), 14))
  want, _ = extend(model, params, fresh, targets[:, 14:])
  have, _ = extend(model, params, rewound, targets[:, 14:])
  np.testing.assert_array_equal(have, want)
  # Negative control: without a rewind the past shows.
  past, _ = extend(model, params, used, targets[:, 14:16])
  assert not np.allclose(past, want[:, :2], atol=1e-3)


@two_families
def test_bfloat16_stays_close(config):
  model, params = make(config)
  half = CausalLM(dataclasses.replace(config, dtype='bfloat16'))
  want = logits_of(model, params, None, tokens(2, 3, 10))
  have = logits_of(half, params, None, tokens(2, 3, 10))
  assert have.dtype == jnp.float32
  error = float(jnp.sqrt(jnp.mean((have - want) ** 2)))
  assert 0 < error < 0.1 * float(jnp.std(want))


def test_a_scale_near_one_is_not_rounded():
  """Gemma's scales are stored as differences from 1, also in bfloat16."""
  model, params = make(GEMMA3)
  tiny = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf / 300 if path[-1].key == 'scale' else leaf, params
  )
  halved = partitioning.place(tiny, partitioning.Placement(dtype='bfloat16'))
  whole = jax.tree.map(lambda leaf: leaf.astype(np.float32), halved)
  read = tokens(2, 1, 10)
  have = logits_of(model, halved, None, read)
  want = logits_of(model, whole, None, read)
  np.testing.assert_allclose(have, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('num_heads', 0, 'num_heads must be at least 1, got 0'),
    ('num_kv_heads', 4, 'multiple of num_kv_heads.* 6, 4'),
    ('head_dim', 9, 'even head_dim'),
    ('window', 0, 'need a window'),
    ('layer_kinds', ('global',), 'a window needs local layers'),
    ('layer_kinds', ('far',), "'local' or 'global'"),
    ('query_scalar', -1.0, 'query_scalar must be above 0'),
    ('norm_epsilon', 0.0, 'norm_epsilon must be above 0'),
    ('rope', {'base': 1e4}, 'CausalLMConfig.rope: expected Rope'),
    ('dtype', 'float16', "'float16', .*'bfloat16', 'float32'"),
    ('mlp_activations', ('swish',), 'swish'),
  ],
)
def test_config_says_what_is_wrong(field, value, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(GEMMA3, **{field: value})


@pytest.mark.parametrize(
  'wrong',
  [{'base': 1.0}, {'factor': 0.5}, {'high_freq_factor': 1.0}]
  + [{'original_length': -1}],
)
def test_rope_says_what_is_wrong(wrong):
  with pytest.raises(ValueError, match=f'Rope.*{next(iter(wrong))}'):
    Rope(**wrong)


@pytest.mark.parametrize('family', FAMILIES)
def test_sizes_are_counted_without_a_network(family):
  config = FAMILIES[family]
  leaves = jax.tree.leaves(shapes(config))
  assert sizes.num_params(config) == sum(leaf.size for leaf in leaves)


def test_names():
  flat = flax.traverse_util.flatten_dict(shapes(GEMMA3), sep='/')
  layer = 'decoder/layers_0'
  first = {n: x.shape for n, x in flat.items() if n.startswith(layer)}
  assert first == {
    f'{layer}/pre_self_attention_layer_norm/scale': (24,),
    f'{layer}/self_attention/query/kernel': (24, 60),
    f'{layer}/self_attention/key/kernel': (24, 10),
    f'{layer}/self_attention/value/kernel': (24, 10),
    f'{layer}/self_attention/out/kernel': (60, 24),
    f'{layer}/self_attention/query_norm/scale': (10,),
    f'{layer}/self_attention/key_norm/scale': (10,),
    f'{layer}/post_self_attention_layer_norm/scale': (24,),
    f'{layer}/pre_mlp_layer_norm/scale': (24,),
    f'{layer}/mlp/wi_0/kernel': (24, 40),
    f'{layer}/mlp/wi_1/kernel': (24, 40),
    f'{layer}/mlp/wo/kernel': (40, 24),
    f'{layer}/post_mlp_layer_norm/scale': (24,),
  }
