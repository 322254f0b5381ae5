"""Checkpoints of T5X models whose layers were trained as a scan."""

import re

import flax.traverse_util
import jax
import numpy as np
import pytest

from specdec_jax import checkpoints
from specdec_jax.models import t5

SIZES = dict(
  vocab_size=24,
  emb_dim=8,
  num_heads=2,
  num_encoder_layers=3,
  num_decoder_layers=2,
  head_dim=5,
  mlp_dim=12,
)
HEADS = SIZES['num_heads']


def network(**changes):
  return t5.T5(t5.T5Config(**{**SIZES, **changes}))


def flat_params(model):
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return {
    name: rng.standard_normal(leaf.shape, np.float32)
    for name, leaf in flax.traverse_util.flatten_dict(shapes, sep='/').items()
  }


def with_heads(name, kernel):
  """[M, H, D] and [H, D, M], as `scalable_t5` has them."""
  if 'attention/' not in name or not name.endswith('kernel'):
    return kernel
  if name.endswith('out/kernel'):
    return kernel.reshape(HEADS, -1, kernel.shape[1])
  return kernel.reshape(kernel.shape[0], HEADS, -1)


def scan(flat, axis, module='layers', heads=False, bias=None):
  """Stacks layers; `bias` changes the relative bias of the i-th layer."""
  stacked, layers = {}, {}
  for name, array in flat.items():
    found = re.fullmatch(r'(\w+)/layers_(\d+)/(.+)', name)
    if not found:
      stacked[name] = array
      continue
    stack, inner = found[1], found[3]
    inside = stack if module == 'stack' else module
    if heads:
      array = with_heads(name, array)
    layers.setdefault(f'{stack}/{inside}/{inner}', []).append(array)
  if bias is not None:
    for stack in ('encoder', 'decoder'):
      table = stacked.pop(f'{stack}/relpos_bias/rel_embedding')
      norm = f'{stack}/layers_%d/pre_mlp_layer_norm/scale'
      count = sum(norm % i in flat for i in range(9))
      inside = stack if module == 'stack' else module
      layers[f'{stack}/{inside}/relpos_bias/rel_embedding'] = [
        bias(i, table) for i in range(count)
      ]
  return stacked | {n: np.stack(arrays, axis) for n, arrays in layers.items()}


def save(path, flat):
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  checkpoints.save_t5x(path, params, step=0)
  return path


def assert_loads(path, model, flat, **options):
  loaded = checkpoints.load(path, model, **options)
  loaded = flax.traverse_util.flatten_dict(loaded, sep='/')
  assert loaded.keys() == flat.keys()
  for name, array in flat.items():
    np.testing.assert_array_equal(loaded[name], array, err_msg=name)


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('module', ['layers', 'stack'])
@pytest.mark.parametrize('heads', [False, True])
def test_unrolled_on_load(tmp_path, axis, module, heads):
  model = network()
  flat = flat_params(model)
  stacked = scan(flat, axis, module, heads)
  assert len(stacked) < len(flat)
  path = save(tmp_path / 'model', stacked)
  assert_loads(path, model, flat)
  assert_loads(path, model, flat, sharding=jax.devices()[0])


def test_heads_on_the_second_axis_are_not_layers(tmp_path):
  """[H, L, D, M] with as many heads as layers: the norms tell the axis."""
  model = network(num_encoder_layers=2)
  flat = flat_params(model)
  for axis in (0, 1):
    path = save(tmp_path / f'{axis}', scan(flat, axis, 'stack', heads=True))
    assert_loads(path, model, flat)


def test_same_bias_in_each_layer(tmp_path):
  model = network()
  flat = flat_params(model)
  stacked = scan(flat, 1, 'stack', bias=lambda i, table: table)
  assert stacked['encoder/encoder/relpos_bias/rel_embedding'].shape == (
    2,
    3,
    32,
  )
  assert_loads(save(tmp_path / 'model', stacked), model, flat)


def test_another_bias_in_each_layer(tmp_path):
  flat = flat_params(network())
  stacked = scan(flat, 1, 'stack', bias=lambda i, table: table + i)
  path = save(tmp_path / 'model', stacked)
  with pytest.raises(ValueError, match='rel_embedding.*set bias_per_layer'):
    checkpoints.load(path, network())


@pytest.mark.parametrize('axis', [0, 1])
def test_a_bias_of_each_layer(tmp_path, axis):
  """As `scalable_t5` has it: one array for all layers, [H, L, 32]."""
  model = network(bias_per_layer=True)
  flat = flat_params(model)
  stacked = scan(flat, axis, 'stack', heads=True)
  tables = stacked['encoder/encoder/relpos_bias/rel_embedding']
  assert tables.shape == ((2, 3, 32) if axis else (3, 2, 32))
  assert_loads(save(tmp_path / 'model', stacked), model, flat)


def test_network_is_needed(tmp_path):
  path = save(tmp_path / 'model', scan(flat_params(network()), 1))
  with pytest.raises(ValueError, match='all layers of a stack in one array'):
    checkpoints.load(path)


def test_axes_that_nothing_tells_apart(tmp_path):
  changes = dict(emb_dim=2, num_encoder_layers=2, head_dim=1, mlp_dim=2)
  model = network(**changes)
  path = save(tmp_path / 'model', scan(flat_params(model), 1))
  with pytest.raises(ValueError, match=r'coder/\S+, \[2, 2, 2\], may be on it'):
    checkpoints.load(path, model)


def test_axes_that_contradict_each_other(tmp_path):
  model = network()
  flat = flat_params(model)
  stacked, other = scan(flat, 1), scan(flat, 0)
  name = 'decoder/layers/mlp/wo/kernel'
  path = save(tmp_path / 'model', {**stacked, name: other[name]})
  with pytest.raises(ValueError, match=f'first axis in some.*{name}'):
    checkpoints.load(path, model)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (dict(emb_dim=16), 'emb_dim is 8, expected 16'),
    (dict(num_encoder_layers=5), 'num_encoder_layers is 3, expected 5'),
    (dict(mlp_dim=13), r'mlp_dim is 12, expected 13; .*/wi_0/kernel is \[8, '),
    (dict(num_heads=5, head_dim=2), 'num_heads is 2, expected 5'),
  ],
)
def test_another_network(tmp_path, change, words):
  path = save(tmp_path / 'm', scan(flat_params(network()), 1, heads=True))
  with pytest.raises(ValueError, match=words):
    checkpoints.load(path, network(**change))


def test_unknown_missing_and_twice(tmp_path):
  flat = flat_params(network())
  stacked = scan(flat, 1)
  path = tmp_path / 'model'
  name = 'encoder/layers/mlp/wo/kernel'
  save(path, {**stacked, 'encoder/layers/mlp/wx/kernel': stacked[name]})
  with pytest.raises(ValueError, match='unknown: encoder/layers/mlp/wx/kern'):
    checkpoints.load(path, network())
  save(path, {n: a for n, a in stacked.items() if n != name})
  with pytest.raises(ValueError, match='missing: encoder/layers_0/mlp/wo/kern'):
    checkpoints.load(path, network())
  one = 'encoder/layers_1/mlp/wo/kernel'
  save(path, {**stacked, one: flat[one]})
  twice = rf'{one} twice: alone, \[12, 8\], and in {name}, \[12, 3, 8\]'
  with pytest.raises(ValueError, match=twice):
    checkpoints.load(path, network())
