"""T5X's checkpoints: msgpack files, specifications, scanned stacks."""

import dataclasses
import re

import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from folders import write_stored
from repository import T5X_FIXTURES, needs_fixtures
from specdec_jax import checkpoints
from specdec_jax.checkpoints import t5x
from specdec_jax.models import t5
from specdec_jax.models.base import param_shapes
from toy_families import TINY, assert_same, make

PARAMS = make(TINY)[1]


def network(**changes):
  return t5.T5(dataclasses.replace(TINY, **changes))


FLAT = flatten_dict(PARAMS, sep='/')


# A single file.


def test_the_tree_of_a_file(tmp_path):
  """As T5X reads it."""
  path = tmp_path / 'new folder' / 'model.msgpack'
  checkpoints.save_t5x(path, PARAMS, step=7, dtype=jnp.bfloat16)
  narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
  tree = flax.serialization.msgpack_restore(path.read_bytes())
  assert tree['version'] == 3
  assert int(tree['optimizer']['state']['step']) == 7
  assert_same(tree['optimizer']['target'], narrow)
  assert_same(checkpoints.load(path), narrow)


def tree(version=3, **target):
  values = {'version': version, 'optimizer': {'target': target}}
  return flax.serialization.msgpack_serialize(values)


def of_shape(shape):
  """A msgpack file whose array, (shape, dtype, bytes), has this shape."""
  array = msgpack.ExtType(1, msgpack.packb((shape, 'float32', b'\0' * 4)))
  return msgpack.packb({'a': array})


ENTRY = b'\xa1a' + flax.serialization.msgpack_serialize(np.ones(2, np.float32))
TARGET = b'\x82\xa7version\x03\xa9optimizer\x81\xa6target'


def test_files_that_are_broken_or_others(tmp_path):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, PARAMS, step=0)
  whole = path.read_bytes()
  for data, named in (
    (b'', '(0 bytes)'),
    (whole[: int(0.99 * len(whole))], 'cut short'),
    (whole[: whole.index(b'token_emb') + 70], 'target/token_embedder/embed'),
    (whole + b'abc', '3 bytes too many'),
    (TARGET + b'\x82' + 2 * ENTRY, 'optimizer/target/a'),
    (b'PK\x03\x04 some archive', 'not a T5X checkpoint'),
    (flax.serialization.msgpack_serialize({'params': {}}), "['params']"),
    (tree(1), 'version'),
    (tree(4), 'version'),
    *((of_shape(x), 'at a: ') for x in ([2.0], [-1, -1], ['a'], [True])),
    *((of_shape(x), 'at a: ') for x in ([[1]], 3, None)),
    # Sizes that the file has not.
    *(
      (bytes([head]) + b'\xff' * 4 + b'\x01\x02', 'is cut short')
      for head in (0xDB, 0xDD, 0xDF, 0xC6, 0xC9)
    ),
    (b'model_checkpoint_path: "model.ckpt-1"', 'TensorFlow'),
    (tree(a=np.ones(2, np.uint16)), 'uint16'),
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
      checkpoints.load(path)
    assert str(path) in str(caught.value) and named in str(caught.value)


def test_all_shapes_and_types(tmp_path, monkeypatch):
  """Arrays above 1 GiB are written in parts, here above 64 bytes."""
  monkeypatch.setattr(flax.serialization, 'MAX_CHUNK_SIZE', 64)
  arrays = {
    'a': np.arange(3, dtype=np.float64),
    'b': np.float32(3.5),
    'c': np.zeros((0, 4), np.float32),
    'd': np.arange(143, dtype=np.float32).reshape(13, 11),
    'e': {'f': np.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 4)},
  }
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, arrays, step=0)
  assert b'__msgpack_chunked_array__' in path.read_bytes()
  assert_same(checkpoints.load(path), arrays)


# Comparing with a network.


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (dict(emb_dim=12), 'emb_dim is 8, expected 12'),
    (dict(num_heads=5, head_dim=2), 'num_heads is 2, expected 5'),
    (dict(num_decoder_layers=3), 'num_decoder_layers is 2, expected 3'),
    (dict(logits_via_embedding=True), 'logits_via_embedding is False'),
    (dict(bias_per_layer=True), 'layers_1/relpos_bias'),
    (dict(mlp_activations=('relu',)), r'len.mlp_activations. is 2, expected 1'),
    (dict(num_encoder_layers=0, encoder_dim=6), 'encoder_dim is|unknown: enc'),
  ],
  ids=str,
)
def test_sizes_are_seen_in_shapes(change, words):
  other = network(**change)
  with pytest.raises(ValueError, match=words):
    checkpoints.check_params(PARAMS, param_shapes(other))
  shapes = t5x.shapes_of(param_shapes(other))
  assert t5x.infer_config(shapes, 'x') == other.config


# Arrays in TensorStore's folders.


@pytest.mark.parametrize(
  'spec',
  [
    dict(kvstore={'driver': 'gfile', 'path': 'array/'}),
    dict(kvstore={'driver': 'gcs', 'bucket': 'dummy', 'path': 'array'}),
    # As before TensorStore 0.1.14.
    dict(kvstore={'driver': 'gcs', 'bucket': 'dummy'}, path='array/'),
    dict(metadata=None),
  ],
)
def test_specifications(tmp_path, spec):
  write_stored(tmp_path, PARAMS, **spec)
  for path in (tmp_path, tmp_path / 'checkpoint', f'file://{tmp_path}'):
    assert_same(checkpoints.load(path, network()), PARAMS)


@needs_fixtures
def test_checkpoints_that_t5x_wrote():
  model = t5.T5(t5.T5Config(128, 32, 2, 2, 2, 16, 64))
  inputs = jnp.asarray([[5, 9, 17, 1], [3, 1, 0, 0]], jnp.int32)
  targets = jnp.asarray([[0, 8, 3], [0, 90, 2]], jnp.int32)

  program = jax.jit(model.logits)

  def logits(folder, prefix=''):
    path = f'{prefix}{T5X_FIXTURES / folder / "checkpoint_0"}'
    found = checkpoints.load(path, model)
    return np.asarray(program(found, inputs, targets))

  stored = logits('tensorstore')
  assert np.isfinite(stored).all() and stored.std() > 0.1
  # One training state; its two copies differ in the last bit of some numbers.
  np.testing.assert_allclose(logits('orbax'), stored, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(logits('tensorstore', 'file://'), stored)
  # A single file, of another model: it has the names and shapes of ours.
  legacy = t5.T5(t5.T5Config(32128, 8, 4, 2, 2, 3, 16))
  assert checkpoints.load(T5X_FIXTURES / 'legacy_msgpack.checkpoint_0', legacy)


# Stacks that were trained as a scan.


def with_heads(name, kernel):
  """[M, H, D] and [H, D, M], as `scalable_t5` has them."""
  if 'attention/' not in name or not name.endswith('kernel'):
    return kernel
  if name.endswith('out/kernel'):
    return kernel.reshape(TINY.num_heads, -1, kernel.shape[1])
  return kernel.reshape(kernel.shape[0], TINY.num_heads, -1)


def scan(flat, axis, module='layers', heads=False):
  """Stacks layers."""
  stacked, layers = {}, {}
  for name, array in flat.items():
    found = re.fullmatch(r'(\w+)/layers_\d+/(.+)', name)
    if not found:
      stacked[name] = array
      continue
    inside = found[1] if module == 'stack' else module
    array = with_heads(name, array) if heads else array
    layers.setdefault(f'{found[1]}/{inside}/{found[2]}', []).append(array)
  return stacked | {n: np.stack(arrays, axis) for n, arrays in layers.items()}


def save(path, flat):
  checkpoints.save_t5x(path, unflatten_dict(flat, sep='/'), step=0)
  return path


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize(
  ('module', 'heads', 'changes'),
  [
    ('layers', False, {}),
    ('stack', True, {}),
    # As `scalable_t5` has it: one array of biases for all layers, [H, L, 32].
    ('stack', True, {'bias_per_layer': True}),
  ],
)
def test_unrolled_on_load(tmp_path, axis, module, heads, changes):
  model, params = make(dataclasses.replace(TINY, **changes))
  flat = flatten_dict(params, sep='/')
  stacked = scan(flat, axis, module, heads)
  assert len(stacked) < len(flat)
  path = save(tmp_path / 'model', stacked)
  assert_same(checkpoints.load(path, model), params)
  on_device = checkpoints.load(path, model, sharding=jax.devices()[0])
  assert_same(on_device, params)


def test_stacks_that_do_not_fit(tmp_path):
  stacked, other = scan(FLAT, 1), scan(FLAT, 0)
  name, one = 'encoder/layers/mlp/wo/kernel', 'encoder/layers_1/mlp/wo/kernel'
  gone = {n: a for n, a in stacked.items() if n != name}
  heads = scan(FLAT, 1, heads=True)
  for flat, sizes, words in (
    (stacked | {'encoder/layers/x': other[name]}, {}, 'unknown: .*layers/x'),
    (stacked | {name: other[name]}, {}, f'{name} is .* on axis 1'),
    (stacked | {one: FLAT[one]}, {}, rf'{one} twice: alone, and in {name}'),
    (gone, {}, 'missing: encoder/layers_0/mlp/wo/kern'),
    (heads, {'num_encoder_layers': 5}, r'encoder/\S+ is .* expected 5 layers'),
    (heads, {'mlp_dim': 13}, r'/wi_0/kernel is \[8, \d, 12\], .* \[8, 13\]'),
    (heads, {'num_heads': 5, 'head_dim': 2}, 'num_heads is 2, expected 5'),
  ):
    path = save(tmp_path / 'model', flat)
    with pytest.raises(ValueError, match=words):
      checkpoints.load(path, network(**sizes))
  with pytest.raises(ValueError, match='network'):
    checkpoints.load(save(path, stacked))
