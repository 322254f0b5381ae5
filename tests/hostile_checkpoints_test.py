"""Checkpoints and vocabularies that nobody should load: a line says why.

Nothing outside the folder is read, a pipe is not waited for, and no kind of
value in a file of metadata ends in a traceback.
"""

import json
import os
import shutil

import flax.serialization
import jax
import numpy as np
import pytest

from specdec_jax import checkpoints
from specdec_jax.checkpoints import huggingface, t5x_msgpack
from specdec_jax.files.locations import Location
from specdec_jax.models import t5
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.vocabulary import open_vocabulary

CONFIG = t5.T5Config(
  vocab_size=16,
  emb_dim=8,
  num_heads=2,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=4,
  mlp_dim=12,
)
ARRAY = 'decoder/layers_0/mlp/wo/kernel'
DEEP = '[' * 100_000
# What stands where another kind of value belongs.
WRONG = (None, True, -1, 1.5, 1 << 62, float('nan'), 'x', '', [], [1], {})


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder with the same parameters in each format."""
  folder = tmp_path_factory.mktemp('saved')
  params = jax.tree.map(np.asarray, t5.T5(CONFIG).init(jax.random.key(0)))
  checkpoints.save_t5x(folder / 'file' / 'checkpoint', params, step=0)
  checkpoints.save_orbax(folder / 'orbax', params)
  _save_stored(folder / 'stored', params)
  return folder


def _save_stored(folder, params):
  """What T5X writes: one array in a folder of TensorStore's, others inside."""
  import tensorstore as ts

  array = params
  for name in ARRAY.split('/'):
    array = array[name]
  spec = {
    'driver': 'zarr',
    'kvstore': {'driver': 'file', 'path': f'{folder}/array/'},
    'metadata': {'dtype': '<f4', 'shape': list(array.shape)},
  }
  ts.open(spec, create=True).result().write(array).result()
  _write_spec(folder, params, {})


def _write_spec(folder, params, change):
  spec = {
    'driver': 'zarr',
    'kvstore': {'driver': 'file', 'path': 'array'},
    'metadata': {'shape': [12, 8]},
    **change,
  }
  tree = jax.tree.map(lambda leaf: leaf, params)
  tree['decoder']['layers_0']['mlp']['wo']['kernel'] = spec
  whole = {'version': 3, 'optimizer': {'target': tree}}
  (folder / 'checkpoint').write_bytes(
    flax.serialization.msgpack_serialize(whole)
  )


@pytest.fixture(scope='module')
def huggingface_saved(tmp_path_factory, saved):
  pytest.importorskip('safetensors')
  folder = tmp_path_factory.mktemp('huggingface') / 'model'
  params = checkpoints.load(saved / 'file')
  huggingface.save_huggingface(folder, CONFIG, params)
  return folder


def copied(folder, tmp_path):
  return shutil.copytree(folder, tmp_path / 'copy')


def refused(folder, network=None):
  """The message about a checkpoint; it may be of no other kind."""
  with pytest.raises(ValueError) as caught:
    checkpoints.load(folder, network)
  return str(caught.value)


# What a folder may not reach.


@pytest.mark.parametrize(
  'shard',
  ['../other/model.safetensors', '{}/model.safetensors', 'a/b', 7],
)
def test_an_index_names_files_of_its_folder(huggingface_saved, tmp_path, shard):
  other = shutil.copytree(huggingface_saved, tmp_path / 'other')
  folder = copied(huggingface_saved, tmp_path)
  (folder / 'model.safetensors').unlink()
  shard = shard.format(other) if isinstance(shard, str) else shard
  index = {'weight_map': {'shared.weight': shard}}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  message = refused(folder)
  assert repr(shard) in message and 'shared.weight' in message


@pytest.mark.parametrize('path', ['../other/array', '../../etc'])
def test_a_specification_names_arrays_of_its_folder(saved, tmp_path, path):
  shutil.copytree(saved / 'stored', tmp_path / 'other')
  folder = copied(saved / 'stored', tmp_path)
  params = checkpoints.load(saved / 'file')
  _write_spec(folder, params, {'kvstore': {'driver': 'file', 'path': path}})
  assert ARRAY in refused(folder)


# What is no file.


def _pipe(path):
  os.mkfifo(path)


def _device(path):
  path.symlink_to('/dev/zero')


def _folder(path):
  path.mkdir()


KINDS = (_pipe, _device, _folder)


@pytest.mark.parametrize('make', KINDS)
@pytest.mark.parametrize(
  'name',
  [
    'file/checkpoint',
    'orbax/_METADATA',
    'orbax/manifest.ocdbt',
    'stored/checkpoint',
    'stored/array/.zarray',
    'stored/array/0.0',
  ],
)
def test_only_regular_files_of_a_checkpoint(saved, tmp_path, name, make):
  folder = copied(saved, tmp_path)
  (folder / name).unlink()
  make(folder / name)
  message = refused((folder / name).parents[name.count('/') - 1])
  assert str(folder) in message


@pytest.mark.parametrize('make', KINDS)
@pytest.mark.parametrize('name', ['config.json', 'model.safetensors'])
def test_only_regular_files_of_a_huggingface_folder(
  huggingface_saved, tmp_path, name, make
):
  folder = copied(huggingface_saved, tmp_path)
  (folder / name).unlink()
  make(folder / name)
  assert name in refused(folder)


@pytest.mark.parametrize('make', KINDS[:2])
@pytest.mark.parametrize('ending', ['model', 'json', 'msgpack'])
def test_a_path_that_is_no_file(tmp_path, ending, make):
  path = tmp_path / f'hostile.{ending}'
  make(path)
  for read in (checkpoints.load, Tokenizer, open_vocabulary):
    if read is open_vocabulary and ending == 'json':
      pytest.importorskip('tokenizers')
    with pytest.raises(ValueError, match='expected a regular file'):
      read(path)


def test_a_vocabulary_has_a_size(tmp_path):
  path = tmp_path / 'large.model'
  with path.open('wb') as stream:
    stream.truncate(1 << 40)  # takes no room on the disk
  with pytest.raises(ValueError, match=f'{1 << 40} bytes, expected at most'):
    Tokenizer(path)


# Metadata of other kinds.


@pytest.mark.parametrize('text', ['', DEEP, '3', '[]', 'null', '"x"', '\ud800'])
@pytest.mark.parametrize('name', ['config.json', 'generation_config.json'])
def test_json_of_another_kind(huggingface_saved, tmp_path, name, text):
  folder = copied(huggingface_saved, tmp_path)
  (folder / name).write_bytes(text.encode('utf-8', 'surrogatepass'))
  assert name in refused(folder)


@pytest.mark.parametrize('value', WRONG, ids=repr)
def test_fields_of_another_kind(huggingface_saved, tmp_path, value):
  """Each field in turn: it is refused by name, or changes nothing."""
  folder = copied(huggingface_saved, tmp_path)
  whole = json.loads((folder / 'config.json').read_text())
  network = t5.T5(CONFIG)
  for field in (*whole, 'num_layers', 'scale_decoder_outputs'):
    (folder / 'config.json').write_text(json.dumps({**whole, field: value}))
    try:
      checkpoints.load(folder, network)
    except ValueError:
      continue


@pytest.mark.parametrize(
  'value', [*WRONG, {'shape': 3}, {'shape': 'x'}], ids=repr
)
@pytest.mark.parametrize('field', ['metadata', 'driver', 'kvstore'])
def test_specifications_of_another_kind(saved, tmp_path, field, value):
  folder = copied(saved / 'stored', tmp_path)
  _write_spec(folder, checkpoints.load(saved / 'file'), {field: value})
  if field == 'metadata' and not value:
    checkpoints.load(folder)  # the folder's own say it
  else:
    assert ARRAY in refused(folder)


@pytest.mark.parametrize('text', ['', DEEP, *map(json.dumps, WRONG)])
def test_metadata_of_an_array_of_another_kind(saved, tmp_path, text):
  folder = copied(saved / 'stored', tmp_path)
  (folder / 'array' / '.zarray').write_text(text)
  assert ARRAY in refused(folder)


@pytest.mark.parametrize('value', WRONG, ids=repr)
@pytest.mark.parametrize('depth', range(5))
def test_metadata_of_orbax_of_another_kind(saved, tmp_path, depth, value):
  folder = copied(saved / 'orbax', tmp_path)
  whole = json.loads((folder / '_METADATA').read_text())
  place, key = {'whole': whole}, 'whole'
  for _ in range(depth):
    place = place[key]
    key = 'tree_metadata' if 'tree_metadata' in place else 0
    if isinstance(place, dict) and key == 0:
      key = 'key_metadata' if 'key_metadata' in place else next(iter(place))
  if place.get('whole') is whole if isinstance(place, dict) else False:
    whole = value
  else:
    place[key] = value
  (folder / '_METADATA').write_text(json.dumps(whole))
  assert str(folder) in refused(folder, t5.T5(CONFIG))


def test_metadata_of_orbax_that_are_nested_deep(saved, tmp_path):
  folder = copied(saved / 'orbax', tmp_path)
  (folder / '_METADATA').write_text(DEEP)
  assert '_METADATA' in refused(folder)


@pytest.mark.parametrize(
  'shape',
  [[2.0], [-1, -1], ['a'], [None], [True], [[1]], 3, 'x', None],
  ids=repr,
)
def test_shapes_of_another_kind(tmp_path, shape):
  """In a msgpack file, whose arrays are (shape, dtype, bytes)."""
  import msgpack

  packed = msgpack.packb((shape, 'float32', b'\0' * 4))
  array = msgpack.ExtType(1, packed)
  (tmp_path / 'file').write_bytes(msgpack.packb({'a': array}))
  with pytest.raises(ValueError, match='at a: '):
    t5x_msgpack.read_tree(Location(str(tmp_path / 'file')))


@pytest.mark.parametrize('head', [b'\xdb', b'\xdd', b'\xdf', b'\xc6', b'\xc9'])
def test_sizes_that_the_file_has_not(tmp_path, head):
  path = tmp_path / 'file'
  path.write_bytes(head + b'\xff' * 4 + b'\x01\x02')
  with pytest.raises(ValueError, match='is cut short'):
    t5x_msgpack.read_tree(Location(str(path)))


@pytest.mark.parametrize('path', [5, 1.5, None, True, ['a'], ''], ids=repr)
def test_paths_of_another_kind(path):
  with pytest.raises(ValueError, match='path'):
    checkpoints.load(path)
  with pytest.raises(ValueError, match='path'):
    open_vocabulary(path)
