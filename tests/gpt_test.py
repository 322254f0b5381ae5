"""Decoder-only models: parity with themselves, names, sizes of gin files."""

import dataclasses
import functools
import math

import flax.traverse_util
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import partitioning
from specdec_jax.cli import gin_flags
from specdec_jax.models.gpt import GPT, GPTConfig

GPT2 = GPTConfig(
  vocab_size=60,
  emb_dim=24,
  num_heads=3,
  num_layers=2,
  head_dim=8,
  mlp_dim=40,
  num_positions=160,
)
T5X = dataclasses.replace(
  GPT2,
  head_dim=12,  # heads * head_dim is not emb_dim
  mlp_activations=('gelu', 'linear'),
  num_positions=0,
  norm='rms',
  use_bias=False,
)
UNTIED = dataclasses.replace(GPT2, logits_via_embedding=False)
FAMILIES = {'GPT-2': GPT2, 'T5X': T5X, 'untied': UNTIED}
two_families = pytest.mark.parametrize(
  'config', [UNTIED, T5X], ids=['untied', 'T5X']
)

# Compiled once a network and shape, not dispatched operation by operation.
logits_of = jax.jit(GPT.logits, static_argnums=0)
extend = jax.jit(GPT.extend, static_argnums=0)
prefill = jax.jit(GPT.prefill, static_argnums=(0, 3))


@functools.cache
def shapes(config):
  return jax.eval_shape(GPT(config).init, jax.random.key(0))


@functools.cache
def make(config, seed=0):
  """A model whose biases are not 0 and whose scales are not 1."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    noise = rng.standard_normal(leaf.shape).astype(np.float32)
    return float(path[-1].key == 'scale') + noise / 3

  return GPT(config), jax.tree_util.tree_map_with_path(draw, shapes(config))


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


@pytest.mark.parametrize(
  ('family', 'layout'), [('GPT-2', 'out_in'), ('T5X', 'in_out')]
)
def test_extend_in_pieces_equals_teacher_forcing(family, layout):
  config = FAMILIES[family]
  model, params = make(config)
  targets = tokens(2, 3, 150)  # attended over 128 slots first, then over all
  expected = logits_of(model, params, None, targets)
  assert np.std(expected) > 0.1
  placed = partitioning.place(
    params, partitioning.Placement(kernel_layout=layout)
  )
  attention = placed['decoder']['layers_1']['self_attention']
  assert set(attention) == {'qkv', 'out'}
  assert ('bias' in attention['qkv']) == config.use_bias
  have = read_all(model, placed, targets, (1, 62, 1, 62, 12, 12))
  np.testing.assert_allclose(have, expected, rtol=5e-5, atol=5e-5)


@two_families
def test_one_token_at_a_time_equals_several(config):
  model, params = make(config)
  targets = tokens(3, 3, 16)
  have = read_all(model, params, targets, [1] * 16)
  want = read_all(model, params, targets, [4, 8, 4])
  np.testing.assert_allclose(have, want, rtol=5e-5, atol=5e-5)


@two_families
def test_rows_at_their_own_places(config):
  model, params = make(config)
  targets = tokens(3, 3, 12)
  expected = np.asarray(logits_of(model, params, None, targets))
  cache = prefill(model, params, targets, 16)
  _, cache = extend(model, params, cache, targets[:, :8])
  starts = np.array([8, 3, 0])
  cache = model.rewind(cache, jnp.asarray(starts))
  new = np.stack([targets[b, s : s + 4] for b, s in enumerate(starts)])
  logits, cache = extend(model, params, cache, jnp.asarray(new))
  for row, begin in enumerate(starts):
    np.testing.assert_allclose(
      logits[row], expected[row, begin : begin + 4], rtol=5e-5, atol=5e-5
    )
  np.testing.assert_array_equal(cache.length, starts + 4)


@two_families
@pytest.mark.parametrize('kept', [0, 1, 8])
def test_rewound_cache_equals_a_fresh_one(config, kept):
  """What lay past a rewind leaves no trace, whatever was written there."""
  model, params = make(config)
  targets = tokens(4, 3, 12)
  fresh = prefill(model, params, targets, 16)
  if kept:
    _, fresh = extend(model, params, fresh, targets[:, :kept])
  _, used = extend(model, params, fresh, tokens(9, 3, 4))
  rewound = model.rewind(used, jnp.full((3,), kept))
  want, _ = extend(model, params, fresh, targets[:, kept : kept + 4])
  have, _ = extend(model, params, rewound, targets[:, kept : kept + 4])
  np.testing.assert_array_equal(have, want)
  # Negative control: without a rewind the past shows.
  past, _ = extend(model, params, used, targets[:, kept : kept + 4])
  assert not np.allclose(past, want, atol=1e-3)


@two_families
def test_positions_matter(config):
  """The same token at another place has other logits."""
  model, params = make(config)
  logits = logits_of(model, params, None, jnp.array([[7, 9, 9, 9]]))
  assert not np.allclose(logits[0, 2], logits[0, 3], atol=1e-3)


@two_families
def test_bfloat16_stays_close(config):
  model, params = make(config)
  half = GPT(dataclasses.replace(config, dtype='bfloat16'))
  want = logits_of(model, params, None, tokens(2, 3, 10))
  have = logits_of(half, params, None, tokens(2, 3, 10))
  assert have.dtype == jnp.float32
  error = float(jnp.sqrt(jnp.mean((have - want) ** 2)))
  assert 0 < error < 0.1 * float(jnp.std(want))


def test_dropout_only_with_a_key():
  model, params = make(dataclasses.replace(T5X, dropout_rate=0.3))
  targets = tokens(2, 3, 5)
  plain = logits_of(model, params, None, targets)
  np.testing.assert_array_equal(plain, logits_of(model, params, None, targets))
  dropped = logits_of(model, params, None, targets, jax.random.key(0))
  assert not np.allclose(plain, dropped)


def test_no_more_tokens_than_learned_positions():
  model, params = make(GPT2)
  assert prefill(model, params, tokens(1, 2, 1), 160).num_slots == 160
  with pytest.raises(ValueError, match='161 slots .* learned 160 positions'):
    model.prefill(params, tokens(1, 2, 1), 161)
  with pytest.raises(ValueError, match='learned 160 positions'):
    model.logits(params, None, tokens(1, 2, 161))
  model, params = make(T5X)
  assert prefill(model, params, tokens(1, 2, 1), 161).num_slots == 161


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('num_heads', 0, 'num_heads must be at least 1, got 0'),
    ('num_positions', -1, 'num_positions must be at least 0, got -1'),
    ('dtype', 'float16', "'float16', .*'bfloat16', 'float32'"),
    ('norm', 'batch', "'layer' or 'rms', got 'batch'"),
    ('mlp_activations', ('swish',), 'swish'),
  ],
)
def test_config_says_what_is_wrong(field, value, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(GPT2, **{field: value})


def test_names_are_those_of_t5x():
  """Of the network in T5X's folder `examples/decoder_only`."""
  config = dataclasses.replace(T5X, num_layers=1)
  flat = flax.traverse_util.flatten_dict(shapes(config), sep='/')
  layer = 'decoder/layers_0'
  assert {name: leaf.shape for name, leaf in flat.items()} == {
    'decoder/token_embedder/embedding': (60, 24),
    'decoder/relpos_bias/rel_embedding': (3, 32),
    f'{layer}/pre_self_attention_layer_norm/scale': (24,),
    f'{layer}/self_attention/query/kernel': (24, 36),
    f'{layer}/self_attention/key/kernel': (24, 36),
    f'{layer}/self_attention/value/kernel': (24, 36),
    f'{layer}/self_attention/out/kernel': (36, 24),
    f'{layer}/pre_mlp_layer_norm/scale': (24,),
    f'{layer}/mlp/wi_0/kernel': (24, 40),
    f'{layer}/mlp/wi_1/kernel': (24, 40),
    f'{layer}/mlp/wo/kernel': (40, 24),
    'decoder/decoder_norm/scale': (24,),
  }
  untied = dataclasses.replace(config, logits_via_embedding=False)
  kernel = shapes(untied)['decoder']['logits_dense']['kernel']
  assert kernel.shape == (24, 60)


# Parameters in millions and how near they must come: of GPT-2 those of its
# released weights, of the others what their names say, LaMDA's without the
# embedding (Thoppilan et al. 2022).
SIZES = {
  'gpt2_124m': (124.439808, 1e-12),
  'gpt2_1558m': (1557.6112, 1e-12),
  'gpt_97m': (97, 0.01),
  'gpt_6m': (6, 0.04),
  'lamda_137b': (137e3, 0.005),
  'lamda_8b': (8e3, 0.08),
  'lamda_2b': (2e3, 0.05),
  'lamda_100m': (100, 0.05),
}


@dataclasses.dataclass(frozen=True)
class Networks:
  """What a test's gin file fills in: all sizes, included together."""

  found: dict


@pytest.fixture(scope='module')
def networks(folder):
  lines = ['from __gin__ import dynamic_registration', 'import gpt_test']
  paths = [name.replace('_', '/') for name in SIZES]
  lines += [f"include 'gin/models/{path}.gin'" for path in paths]
  found = ', '.join(f"'{name}': %{name.upper()}" for name in SIZES)
  lines.append(f'gpt_test.Networks.found = {{{found}}}')
  path = folder / 'networks.gin'
  path.write_text('\n'.join(lines))
  gin_flags.load(gin_flags.parse_flags([f'--gin_file={path}']))
  yield gin_flags.build(Networks).found
  gin.clear_config()


def count(config):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes(config)))


def count_by_layers(config):
  """`count` from networks of one and two layers: all layers are alike."""
  one, two = (
    count(dataclasses.replace(config, num_layers=number)) for number in (1, 2)
  )
  return one + (config.num_layers - 1) * (two - one)


@pytest.mark.parametrize('name', SIZES)
def test_sizes(name, networks):
  config = networks[name].config
  published, tolerance = SIZES[name]
  found = count_by_layers(config)
  if name.startswith('lamda'):
    found -= config.vocab_size * config.emb_dim
  assert found / 1e6 == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize('config', FAMILIES.values(), ids=FAMILIES)
def test_layers_can_be_counted_one_by_one(config):
  config = dataclasses.replace(config, num_layers=4)
  assert count(config) == count_by_layers(config)


def test_lamda_is_as_published(networks):
  config = networks['lamda_137b'].config
  sizes = config.num_layers, config.emb_dim, config.mlp_dim
  assert sizes == (64, 8192, 65536)
  assert (config.num_heads, config.head_dim) == (128, 128)
  for name in ('lamda_8b', 'lamda_2b', 'lamda_100m'):
    other = networks[name].config
    assert other.mlp_dim == 8 * other.emb_dim
    assert 64 * other.num_heads == other.emb_dim
    same = ('head_dim', 'mlp_activations', 'num_positions', 'norm', 'use_bias')
    assert all(getattr(other, n) == getattr(config, n) for n in same)


@pytest.mark.slow
def test_lamda_137b_needs_no_memory(networks):
  """Its parameters, its cache and a call of it, as shapes alone."""
  model = networks['lamda_137b']
  params = shapes(model.config)
  kinds = {type(leaf) for leaf in jax.tree.leaves(params)}
  assert kinds == {jax.ShapeDtypeStruct}
  assert count(model.config) == count_by_layers(model.config)
  inputs = jax.ShapeDtypeStruct((4, 1), jnp.int32)
  fed = jax.ShapeDtypeStruct((4, 5), jnp.int32)

  def call(params, inputs, fed):
    cache = model.prefill(params, inputs, 256)
    return model.extend(params, cache, fed)

  logits, cache = jax.eval_shape(call, params, inputs, fed)
  assert logits.shape == (4, 5, 32128)
  assert cache.keys[63].shape == (4, 128, 128, 256)
