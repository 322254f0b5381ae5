"""Single-file T5X checkpoints: round trips, real files, broken files."""

import pathlib

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import checkpoints
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
  loaded = checkpoints.load_params(path)
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  tree = flax.serialization.msgpack_restore(path.read_bytes())
  assert tree['version'] == 3
  assert int(tree['optimizer']['state']['step']) == 7
  assert [p.name for p in path.parent.iterdir()] == ['model.msgpack']


def test_bfloat16_round_trip(params, tmp_path):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, params, step=0, dtype=jnp.bfloat16)
  on_disk = checkpoints.load_params(path)
  loaded = checkpoints.load_params(path, jnp.float32)

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
  loaded = checkpoints.load_params(FIXTURE)
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
  with pytest.raises(ValueError, match="No checkpoint .* 'nowhere/model': No"):
    checkpoints.load_params('nowhere/model')


def test_folder(tmp_path):
  with pytest.raises(ValueError, match='is a folder; expected a single-file'):
    checkpoints.load_params(tmp_path)


@pytest.mark.parametrize('kept', [0.0, 0.1, 0.5, 0.99])
def test_truncated_file(params, tmp_path, kept):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, params, step=0)
  whole = path.read_bytes()
  size = int(kept * len(whole))
  path.write_bytes(whole[:size])
  with pytest.raises(ValueError, match=rf'\({size} bytes\) is cut short'):
    checkpoints.load_params(path)


def test_other_files(tmp_path):
  path = tmp_path / 'model.msgpack'
  path.write_bytes(b'PK\x03\x04 some archive')
  with pytest.raises(ValueError, match='cut short or no T5X checkpoint'):
    checkpoints.load_params(path)
  path.write_bytes(flax.serialization.msgpack_serialize({'params': {}}))
  with pytest.raises(ValueError, match=r"optimizer/target.*\['params'\]"):
    checkpoints.load_params(path)


def test_failed_write_keeps_the_old_file(params, tmp_path, monkeypatch):
  path = tmp_path / 'model.msgpack'
  checkpoints.save_t5x(path, params, step=1)
  before = path.read_bytes()

  def disk_full(handle):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('specdec_jax.files.os.fsync', disk_full)
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
