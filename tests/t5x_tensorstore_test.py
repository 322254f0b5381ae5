"""T5X's checkpoints whose arrays lie in TensorStore's folders: all variants."""

import pathlib
import shutil

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import checkpoints
from specdec_jax.checkpoints import disk_arrays
from specdec_jax.files import locations
from specdec_jax.models import t5

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / 'shared/fixtures/t5x'
needs_fixtures = pytest.mark.skipif(
  not FIXTURES.exists(), reason='needs the checkpoints in ../shared'
)

NETWORK = t5.T5(
  t5.T5Config(
    vocab_size=24,
    emb_dim=8,
    num_heads=2,
    num_encoder_layers=3,
    num_decoder_layers=3,
    head_dim=5,
    mlp_dim=12,
  )
)


@pytest.fixture(scope='module')
def params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape, np.float32),
    jax.eval_shape(NETWORK.init, jax.random.key(0)),
  )


def write(folder, params, *, chunks=None, kvstore=None, version=3, **spec):
  """Writes what T5X does: arrays in folders, the optimiser's among them.

  Args:
    folder: made here.
    params: nested dict.
    chunks: cuts of each axis; arrays of one axis stay inside the file.
    kvstore: of the specifications in the file.
    version: of the file.
    **spec: also of the specifications; `path` puts it at their top level.
  """
  import tensorstore as ts

  folder.mkdir()

  def leaf(prefix, name, array):
    if array.ndim < 2:
      return array
    path = f'{prefix}.{name.replace("/", ".")}/'
    cut = [-(-size // (chunks or 1)) for size in array.shape]
    dtype = str(array.dtype)
    metadata = {'chunks': cut, 'compressor': {'id': 'gzip', 'level': 1}}
    metadata['shape'] = list(array.shape)
    here = {'driver': 'file', 'path': f'{folder}/{path}'}
    full = {'driver': 'zarr', 'dtype': dtype, 'metadata': metadata}
    ts.open({**full, 'kvstore': here}, create=True).result().write(
      array
    ).result()
    said = {**full, 'kvstore': dict(kvstore or {'driver': 'file'}), **spec}
    if 'path' in spec:
      return {**said, 'path': path}
    return {**said, 'kvstore': {**said['kvstore'], 'path': path}}

  flat = flax.traverse_util.flatten_dict(params, sep='/')
  target = {name: leaf('target', name, a) for name, a in flat.items()}
  state = {n: {'v': leaf('state.param_states', n, a)} for n, a in flat.items()}

  def nested(tree):
    return flax.traverse_util.unflatten_dict(tree, sep='/')

  optimizer = {
    'target': nested(target),
    'state': {'step': np.int32(7), 'param_states': nested(state)},
  }
  (folder / 'checkpoint').write_bytes(
    flax.serialization.msgpack_serialize(
      {'version': version, 'optimizer': optimizer}
    )
  )
  return folder


def assert_equal(loaded, params, dtype=None):
  assert jax.tree.structure(loaded) == jax.tree.structure(params)

  def compare(leaf, original):
    assert leaf.dtype == (dtype or original.dtype)
    np.testing.assert_array_equal(leaf, original.astype(leaf.dtype))

  jax.tree.map(compare, loaded, params)


@pytest.mark.parametrize(
  'variant',
  [
    {},
    dict(kvstore={'driver': 'gfile'}),
    dict(kvstore={'driver': 'gcs', 'bucket': 't5x-dummy-bucket'}),
    dict(version=2, path='', kvstore={'driver': 'gcs', 'bucket': 'x'}),
    dict(chunks=3),
    dict(chunks=2, version=2, path=''),
  ],
  ids=['file', 'gfile', 'gcs', 'old path', 'chunks', 'old chunks'],
)
def test_variants(tmp_path, params, variant):
  folder = write(tmp_path / 'checkpoint_7', params, **variant)
  for path in (folder, str(folder) + '/', folder / 'checkpoint'):
    assert_equal(checkpoints.load(path, NETWORK), params)
  assert_equal(checkpoints.load(f'file://{folder}', NETWORK), params)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', jnp.float32])
@pytest.mark.parametrize('piece', [1, 200, 1 << 27])
def test_read_in_pieces_and_cast(tmp_path, params, monkeypatch, dtype, piece):
  monkeypatch.setattr(disk_arrays, 'PIECE_BYTES', piece)
  folder = write(tmp_path / 'checkpoint_7', params, chunks=3)
  loaded = checkpoints.load(folder, dtype=dtype)
  assert_equal(loaded, params, jnp.dtype(dtype))


def test_bfloat16_on_disk(tmp_path, params):
  narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
  folder = write(tmp_path / 'checkpoint_7', narrow)
  assert_equal(checkpoints.load(folder), narrow)
  assert_equal(checkpoints.load(folder, dtype='float32'), narrow, jnp.float32)


def test_the_state_of_the_optimiser_is_not_needed(tmp_path, params):
  folder = write(tmp_path / 'checkpoint_7', params)
  gone = list(folder.glob('state.*'))
  assert gone
  for path in gone:
    shutil.rmtree(path)
  assert_equal(checkpoints.load(folder, NETWORK), params)


NAME = 'encoder/layers_1/mlp/wo/kernel'


@pytest.mark.parametrize(
  'harm',
  [
    lambda folder: (folder / '0.0').unlink(),
    lambda folder: (folder / '1.1').write_bytes(b''),
    lambda folder: (folder / '1.0').write_bytes(
      (folder / '1.0').read_bytes()[:-25]
    ),
    lambda folder: (folder / '1.0').write_bytes(b'no gzip at all'),
    lambda folder: (folder / '.zarray').write_text('{"shape": [12'),
    lambda folder: (folder / '.zarray').unlink(),
    shutil.rmtree,
    lambda folder: (folder / '.zarray').write_text(
      (folder / '.zarray').read_text().replace('[12,8]', '[12,9]')
    ),
  ],
  ids='gone empty cut other badmeta nometa nofolder reshaped'.split(),
)
def test_broken_arrays_are_named(tmp_path, params, harm):
  folder = write(tmp_path / 'checkpoint_7', params, chunks=2)
  harm(folder / f'target.{NAME.replace("/", ".")}')
  with pytest.raises(ValueError) as caught:
    checkpoints.load(folder)
  text = str(caught.value)
  assert f'the array {NAME} cannot be read: ' in text
  assert text.endswith('cut short or corrupt; copy it again.')
  assert 'tensorstore_spec' not in text


def test_a_chunk_of_zeros_is_no_missing_chunk(tmp_path, params):
  zeros = jax.tree.map(np.zeros_like, params)
  folder = write(tmp_path / 'checkpoint_7', zeros, chunks=2)
  assert_equal(checkpoints.load(folder), zeros)


@pytest.mark.parametrize(
  ('spec', 'words'),
  [
    (dict(driver='n5'), "driver 'n5'.* expected driver zarr"),
    (dict(kvstore={'driver': 's3'}), "kvstore 's3'.* file, gfile, gcs"),
  ],
)
def test_specifications_of_another_kind(tmp_path, params, spec, words):
  folder = write(tmp_path / 'checkpoint_7', params, **spec)
  with pytest.raises(ValueError, match=words):
    checkpoints.load(folder)


def test_integers_are_no_parameters(tmp_path):
  folder = write(tmp_path / 'checkpoint_7', {'a': np.ones((2, 2), np.uint16)})
  with pytest.raises(ValueError, match='a is uint16, expected floating-point'):
    checkpoints.load(folder)


def test_tensorflow_checkpoint(tmp_path):
  (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1"')
  with pytest.raises(ValueError, match='is a TensorFlow checkpoint of T5'):
    checkpoints.load(tmp_path)


def test_addresses_in_a_bucket():
  place = locations.open_location('gs://bucket/some/checkpoint_7/')
  assert place.kvstore() == {
    'driver': 'gcs',
    'bucket': 'bucket',
    'path': 'some/checkpoint_7/',
  }
  inner = place.child('checkpoint')
  assert str(inner) == 'gs://bucket/some/checkpoint_7/checkpoint'
  assert inner.parent().kvstore() == place.kvstore()


@needs_fixtures
def test_checkpoints_that_t5x_wrote():
  config = t5.T5Config(
    vocab_size=128,
    emb_dim=32,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=16,
    mlp_dim=64,
  )
  network = t5.T5(config)
  inputs = jnp.asarray([[5, 9, 17, 1], [3, 1, 0, 0]], jnp.int32)
  targets = jnp.asarray([[0, 8, 3], [0, 90, 2]], jnp.int32)

  program = jax.jit(network.logits)

  def logits(folder, prefix=''):
    path = f'{prefix}{FIXTURES / folder / "checkpoint_0"}'
    found = checkpoints.load(path, network)
    return np.asarray(program(found, inputs, targets))

  stored = logits('tensorstore')
  assert np.isfinite(stored).all() and stored.std() > 0.1
  # One training state; its two copies differ in the last bit of some numbers.
  np.testing.assert_allclose(logits('orbax'), stored, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(logits('tensorstore', 'file://'), stored)


@needs_fixtures
def test_an_array_of_orbax_that_t5x_wrote_is_read_exactly(tmp_path):
  import tensorstore as ts

  root = FIXTURES / 'orbax/checkpoint_0/state'
  base = {'driver': 'file', 'path': f'{root}/'}
  kvstore = {'driver': 'ocdbt', 'base': base, 'path': ''}
  kvstore['path'] = 'target.decoder.logits_dense.kernel/'
  wanted = ts.open({'driver': 'zarr', 'kvstore': kvstore}).result()
  loaded = checkpoints.load(FIXTURES / 'orbax/checkpoint_0')
  np.testing.assert_array_equal(
    loaded['decoder']['logits_dense']['kernel'], wanted.read().result()
  )
