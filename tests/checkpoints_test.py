"""Single-file T5X checkpoints: round trips, real files, broken files."""

import dataclasses
import pathlib

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import checkpoints
from specdec_jax.checkpoints import disk_arrays, t5x, t5x_sizes
from specdec_jax.models import t5

FIXTURE = (
  pathlib.Path(__file__).resolve().parents[2]
  / 'shared/fixtures/t5x/legacy_msgpack.checkpoint_0'
)

CONFIG = t5.T5Config(
  vocab_size=16,
  emb_dim=8,
  num_heads=2,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=4,
  mlp_dim=12,
)


@pytest.fixture(scope='module')
def params():
  return t5.T5(CONFIG).init(jax.random.key(0))


def expected(config):
  return jax.eval_shape(t5.T5(config).init, jax.random.key(0))


def test_round_trip_keeps_every_bit(params, tmp_path):
  path = tmp_path / 'new folder' / 'model.msgpack'
  checkpoints.save_t5x(path, params, step=7)
  loaded = checkpoints.load(path)
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  tree = flax.serialization.msgpack_restore(path.read_bytes())
  assert tree['version'] == 3
  assert int(tree['optimizer']['state']['step']) == 7
  assert [p.name for p in path.parent.iterdir()] == ['model.msgpack']


def test_bfloat16_round_trip(params, tmp_path):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, params, step=0, dtype=jnp.bfloat16)
  on_disk = checkpoints.load(path)
  loaded = checkpoints.load(path, dtype=jnp.float32)

  def check(disk, value, original):
    assert disk.dtype == jnp.bfloat16
    assert value.dtype == np.float32
    rounded = original.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(value, rounded)

  jax.tree.map(check, on_disk, loaded, params)
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert path.stat().st_size < 2 * size + 10_000


@pytest.mark.skipif(
  not FIXTURE.exists(), reason='needs the checkpoints in ../shared'
)
def test_a_checkpoint_that_t5x_wrote_loads_without_renaming():
  loaded = checkpoints.load(FIXTURE)
  config = t5.T5Config(
    vocab_size=32128,
    emb_dim=8,
    num_heads=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=3,
    mlp_dim=16,
  )
  checkpoints.check_params(loaded, expected(config), str(FIXTURE))


def test_missing_file():
  path = 'nowhere/model.msgpack'
  with pytest.raises(ValueError, match=path):
    checkpoints.load(path)


def cut(kept):
  return lambda whole: whole[: int(kept * len(whole))]


def cut_behind(name):
  return lambda whole: whole[: whole.index(name) + 70]


def tree(**values):
  return lambda _: flax.serialization.msgpack_serialize(values)


def there_twice(_):
  array = flax.serialization.msgpack_serialize(np.ones(2, np.float32))
  twice = b'\x82' + 2 * (b'\xa1a' + array)
  return b'\x82\xa7version\x03\xa9optimizer\x81\xa6target' + twice


@pytest.mark.parametrize(
  ('change', 'named'),
  [
    (cut(0.0), '(0 bytes)'),
    (cut(0.1), 'cut short'),
    (cut(0.5), 'cut short'),
    (cut(0.99), 'cut short'),
    (cut_behind(b'token_embedder'), 'optimizer/target/token_embedder/embed'),
    (lambda whole: whole + b'abc', '3 bytes too many'),
    (there_twice, 'optimizer/target/a'),
    (lambda _: b'PK\x03\x04 some archive', 'not a T5X checkpoint'),
    (tree(params={}), "['params']"),
    (tree(version=0, optimizer={'target': {}}), 'version 0'),
    (tree(version=1, optimizer={'target': {}}), 'version 1'),
    (tree(version=4, optimizer={'target': {}}), 'version 4'),
  ],
)
def test_files_that_are_broken_or_others(params, tmp_path, change, named):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, params, step=0)
  path.write_bytes(change(path.read_bytes()))
  with pytest.raises(ValueError) as caught:
    checkpoints.load(path)
  assert str(path) in str(caught.value) and named in str(caught.value)


@pytest.mark.parametrize(
  'array',
  [
    np.arange(3, dtype=np.float64),
    np.float32(3.5),
    np.zeros((0, 4), np.float32),
    np.arange(70_000, dtype=np.float32).reshape(7, 100, 100),
    np.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 4),
  ],
  ids=lambda array: f'{array.dtype}-{array.shape}',
)
def test_all_shapes_and_types(tmp_path, array):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, {'a': {'b': array}, 'c': array}, step=0)
  loaded = checkpoints.load(path)
  for leaf in (loaded['a']['b'], loaded['c']):
    assert leaf.dtype == array.dtype
    np.testing.assert_array_equal(leaf, array)


@pytest.mark.parametrize('piece', [16, 40, 1 << 20])
def test_arrays_that_flax_has_cut(tmp_path, monkeypatch, piece):
  """Arrays above 1 GiB are written in parts, here above 64 bytes."""
  monkeypatch.setattr(flax.serialization, 'MAX_CHUNK_SIZE', 64)
  monkeypatch.setattr(disk_arrays, 'PIECE_BYTES', piece)
  array = np.arange(143, dtype=np.float32).reshape(13, 11)
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, {'a': array, 'b': array[:2]}, step=0)
  assert b'__msgpack_chunked_array__' in path.read_bytes()
  loaded = checkpoints.load(path)
  np.testing.assert_array_equal(loaded['a'], array)
  np.testing.assert_array_equal(loaded['b'], array[:2])


def test_failed_write_keeps_the_old_file(params, tmp_path, monkeypatch):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, params, step=1)
  before = path.read_bytes()

  def disk_full(handle):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('specdec_jax.files.writing.os.fsync', disk_full)
  with pytest.raises(OSError, match='No space left'):
    checkpoints.save_t5x(path, params, step=2)
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_check_names_every_difference(params):
  tree = jax.tree.map(lambda leaf: leaf, params)
  checkpoints.check_params(tree, expected(CONFIG))
  tree['decoder']['extra'] = jnp.zeros(3)
  del tree['encoder']['encoder_norm']
  tree['token_embedder']['embedding'] = jnp.zeros((32, 8))
  with pytest.raises(ValueError) as caught:
    checkpoints.check_params(tree, expected(CONFIG), 'model.msgpack')
  text = str(caught.value)
  assert 'parameters of model.msgpack' in text
  assert 'missing: encoder/encoder_norm/scale' in text
  assert 'unknown: decoder/extra' in text
  assert 'token_embedder/embedding is [32, 8], expected [16, 8]' in text
  assert 'configuration: vocab_size is 32, expected 16; missing' in text


@pytest.mark.parametrize(
  'change',
  [
    dict(vocab_size=32),
    dict(emb_dim=12),
    dict(num_heads=4),
    dict(num_encoder_layers=2),
    dict(num_decoder_layers=3),
    dict(head_dim=8),
    dict(mlp_dim=16),
    dict(logits_via_embedding=True),
  ],
  ids=lambda change: next(iter(change)),
)
def test_check_names_the_size_that_differs(params, change):
  other = dataclasses.replace(CONFIG, **change)
  field = next(iter(change))
  have, want = getattr(CONFIG, field), getattr(other, field)
  with pytest.raises(ValueError) as caught:
    checkpoints.check_params(params, expected(other))
  assert f'{field} is {have}, expected {want}' in str(caught.value)
  assert t5x_sizes.infer_config(_shapes(params), 'x') == CONFIG


def test_check_tells_a_gated_network_from_a_plain_one(params):
  plain = dataclasses.replace(CONFIG, mlp_activations=('relu',))
  with pytest.raises(ValueError, match='mlp_activations.* is 2, expected 1'):
    checkpoints.check_params(params, expected(plain))
  assert t5x_sizes.infer_config(_shapes(expected(plain)), 'x') == plain


def test_sizes_of_something_else():
  with pytest.raises(ValueError, match="'x'"):
    t5x_sizes.infer_config({'dense/kernel': (3, 4)}, 'x')


def _shapes(tree):
  return t5x.shapes_of(flax.traverse_util.flatten_dict(tree, sep='/'))
