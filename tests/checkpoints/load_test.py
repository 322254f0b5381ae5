"""`checkpoints.load`: each format read, placed, refused; fingerprints.

Nothing outside of a checkpoint's folder is read, a pipe is not waited for, and
no kind of value in a file of metadata ends in a traceback.
"""

import dataclasses
import json
import os
import shutil

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
import toy_families
from folders import ARRAY, WRONG, write_stored
from specdec_jax import checkpoints
from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.models import t5
from specdec_jax.text.tokenizer import Tokenizer
from toy_families import TINY, assert_same
from toy_processes import output_of

NETWORK, PARAMS = toy_families.make(TINY)


def write_file(folder, params):
  checkpoints.save_t5x(folder / 'checkpoint', params, step=0)


def write_huggingface(folder, params):
  huggingface.save_huggingface(folder, TINY, params)


WRITERS = {'file': write_file, 'huggingface': write_huggingface}
WRITERS |= {'stored': write_stored, 'orbax': checkpoints.save_orbax}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder with the same parameters in each format; not to be changed."""
  folder = tmp_path_factory.mktemp('saved')
  for name, write in WRITERS.items():
    write(folder / name, PARAMS)
  return folder


def refused(folder, *words, network=None, **options):
  """Checks the message about a checkpoint."""
  with pytest.raises(ValueError) as caught:
    checkpoints.load(folder, network, **options)
  for word in words:
    assert word in str(caught.value)


# What is read.


@pytest.mark.parametrize('name', WRITERS)
def test_round_trip(name, tmp_path):
  """Every bit, from paths of every kind."""
  path = tmp_path / 'new' / 'checkpoint_3'
  if name == 'stored':
    path.mkdir(parents=True)
  WRITERS[name](path, PARAMS)
  assert os.listdir(path.parent) == ['checkpoint_3']
  paths = [path, f'{path}/']
  if name != 'huggingface':
    paths += [f'file://{path}', f'file://{path}/']
  for place in paths:
    loaded = checkpoints.load(place, NETWORK)
    assert_same(loaded, PARAMS)
    assert all(x.flags.writeable for x in jax.tree.leaves(loaded))  # NumPy's
  for dtype in ('bfloat16', jnp.float32):
    loaded = checkpoints.load(path, dtype=dtype)
    assert_same(loaded, PARAMS, jnp.dtype(dtype))
    assert fingerprint(loaded) == fingerprint(PARAMS)


def test_fingerprints_tell_parameters_apart():
  kernel = np.arange(300.0, dtype=np.float32).reshape(20, 15) / 7
  params = {'a': {'kernel': kernel}}
  own = fingerprint(params)
  assert own == fingerprint(jax.tree.map(jnp.asarray, params))
  renamed = {'b': params['a']}
  reshaped = {'a': {'kernel': kernel.reshape(15, 20)}}
  trained = {'a': {'kernel': kernel * 1.01}}
  others = {fingerprint(x) for x in (renamed, reshaped, trained)}
  assert len(others | {own}) == 4


@pytest.mark.parametrize(
  ('root', 'item'), [('target', 'state'), ('params', 'default'), ('', '')]
)
def test_trees_of_orbax(tmp_path, root, item):
  """T5X's training state, flax's variables, and parameters alone."""
  import orbax.checkpoint as ocp

  tree = {'a': {'b': np.arange(4.0, dtype=np.float32)}}
  written = {root: tree, 'state': {'v': np.ones(2)}} if root else tree
  path = tmp_path / 'checkpoint_1' / item
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=bool(root))) as c:
    c.save(path, args=ocp.args.PyTreeSave(written))
  assert_same(checkpoints.load(tmp_path / 'checkpoint_1'), tree)


def test_device_and_rule(saved):
  path, device = saved / 'orbax', jax.devices()[0]
  rule = lambda name: device if name.endswith('scale') else None  # noqa: E731
  mixed = checkpoints.load(path, sharding=rule)
  assert isinstance(mixed['token_embedder']['embedding'], np.ndarray)
  assert isinstance(mixed['decoder']['decoder_norm']['scale'], jax.Array)
  refused(path, 'sharding', "'cpu'", sharding='cpu')
  for dtype in ('int16', np.int8, 'int2', 'flot32', bool):
    refused(path, 'dtype', dtype=dtype)


# What is refused, before anything is read.


def copied(saved, tmp_path, name):
  return shutil.copytree(saved / name, tmp_path / 'copy')


@pytest.mark.parametrize('name', WRITERS)
def test_another_network(name, saved, tmp_path):
  other = t5.T5(dataclasses.replace(TINY, mlp_dim=13))
  refused(saved / name, str(saved / name), 'mlp_dim', '13', network=other)


def test_folders_that_are_no_checkpoint(saved, tmp_path):
  refused(tmp_path, str(tmp_path), 'nothing')
  for step in (5, 1000, 200):
    (tmp_path / f'checkpoint_{step}').mkdir()
  names = 'checkpoint_5, checkpoint_200, checkpoint_1000'
  refused(tmp_path, names, f"The newest is '{tmp_path}/checkpoint_1000'")
  for path in ('foo://x', 'file:///nowhere/at-all'):
    refused(path, path)
  refused(f'file://{saved}/huggingface', 'bucket')
  unfinished = tmp_path / 'checkpoint_3.orbax-checkpoint-tmp-17'
  shutil.copytree(saved / 'orbax', unfinished)
  refused(unfinished, str(unfinished))


@pytest.mark.parametrize(
  'shard', ['../other/model.safetensors', '{}/model.safetensors', 7]
)
def test_a_folder_names_only_what_is_in_it(saved, tmp_path, shard):
  shutil.copytree(saved / 'stored', tmp_path / 'another')
  stored = shutil.copytree(saved / 'stored', tmp_path / 'stored')
  kvstore = {'driver': 'file', 'path': '../another/array'}
  write_stored(stored, PARAMS, kvstore=kvstore)
  refused(stored, ARRAY)
  other = shutil.copytree(saved / 'huggingface', tmp_path / 'other')
  folder = copied(saved, tmp_path, 'huggingface')
  (folder / 'model.safetensors').unlink()
  shard = shard.format(other) if isinstance(shard, str) else shard
  index = {'weight_map': {'shared.weight': shard}}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  refused(folder, 'shared.weight', str(shard)[:40])


@pytest.mark.parametrize('kind', ['pipe', 'device', 'folder'])
def test_only_regular_files(saved, tmp_path, kind):
  """Of each file of each format, and of a vocabulary."""
  for number, name in enumerate(
    """
    file/checkpoint orbax/_METADATA orbax/manifest.ocdbt stored/checkpoint
    stored/array/.zarray stored/array/0.0 huggingface/config.json
    huggingface/model.safetensors vocab.model vocab.msgpack
    """.split()
  ):
    folder = shutil.copytree(saved, tmp_path / str(number))
    path = folder / name
    path.unlink(missing_ok=True)
    make = {'pipe': os.mkfifo, 'folder': os.mkdir}
    make.get(kind, lambda path: path.symlink_to('/dev/zero'))(path)
    if name.startswith('vocab'):
      for read in (checkpoints.load, Tokenizer):
        with pytest.raises(ValueError, match='vocab'):
          read(path)
    else:
      refused(folder / name.split('/')[0], str(folder))


@pytest.mark.parametrize('to', ['itself', 'gone'])
def test_a_link_that_leads_nowhere_is_named(saved, tmp_path, to):
  """Not taken for a file that is not there, which says another one's name."""
  for name in """
    config.json model.safetensors generation_config.json shortlist.npz
    tokenizer.json spiece.model
    """.split():
    folder = shutil.copytree(saved / 'huggingface', tmp_path / f'of {name}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name if to == 'itself' else to)
    words = f'{name}.*(No such file|Too many levels)'
    with pytest.raises(ValueError, match=words):
      specdec_jax.load(folder)
  link = tmp_path / 'b'
  link.symlink_to(link if to == 'itself' else to)
  with pytest.raises(ValueError, match='b.: (No such file|Too many levels)'):
    specdec_jax.load(link)


# Metadata of other kinds.

DEEP = '[' * 100_000


@pytest.mark.parametrize('text', ['', DEEP, '[]', '\ud800'])
def test_json_of_another_kind(saved, tmp_path, text):
  for name in """
    huggingface/config.json huggingface/generation_config.json
    stored/array/.zarray orbax/_METADATA
    """.split():
    folder, _, inner = name.partition('/')
    place = shutil.copytree(saved / folder, tmp_path / name.replace('/', '-'))
    (place / inner).write_bytes(text.encode('utf-8', 'surrogatepass'))
    refused(place, ARRAY if folder == 'stored' else inner)


@pytest.mark.parametrize('value', WRONG, ids=repr)
def test_values_of_another_kind(saved, tmp_path, value):
  """Reads a specification; huggingface_test does so for config.json."""
  stored = shutil.copytree(saved / 'stored', tmp_path / 'stored')
  for field in ('metadata', 'driver', 'kvstore'):
    write_stored(stored, PARAMS, **{field: value})
    if field == 'metadata' and not value:
      checkpoints.load(stored)  # the folder's own say it
    else:
      refused(stored, ARRAY)
  (stored / 'array' / '.zarray').write_text(json.dumps(value))
  refused(stored, ARRAY)


HARMED = {'gone': '0.0', 'empty': '1.1', 'cut': '1.0', 'reshaped': '.zarray'}


@pytest.mark.parametrize('harm', HARMED)
def test_broken_arrays_are_named(saved, tmp_path, harm):
  folder = copied(saved, tmp_path, 'stored')
  path = folder / 'array' / HARMED[harm]
  data = path.read_bytes().replace(b'[12,8]', b'[12,9]')
  path.write_bytes({'empty': b'', 'cut': data[:-25]}.get(harm, data))
  if harm == 'gone':
    path.unlink()
  refused(folder, f'the array {ARRAY} cannot be read: ', 'copy it again.')


def test_broken_orbax(saved, tmp_path):
  folder = copied(saved, tmp_path, 'orbax')
  for path in folder.rglob('d/*'):
    path.write_bytes(path.read_bytes()[:100])
  refused(folder, ' cannot be read')


def test_a_chunk_of_zeros_is_no_missing_chunk(tmp_path):
  zeros = jax.tree.map(np.zeros_like, PARAMS)
  write_stored(tmp_path, zeros)
  assert_same(checkpoints.load(tmp_path), zeros)


# How much memory a load takes beside what it returns.

MIB = 1 << 20
MEASURE = """
import json, re, sys
import flax.serialization, jax, tensorstore
from specdec_jax import checkpoints
from specdec_jax.checkpoints import disk_arrays

def status(field):
  with open('/proc/self/status') as stream:
    return int(re.search(field + r':\\s+(\\d+) kB', stream.read())[1]) << 10

path, dtype, place = sys.argv[1:]
disk_arrays.PIECE_BYTES = 4 << 20
device = jax.devices()[0]
jax.block_until_ready(jax.numpy.ones(3))
before = status('VmRSS')
if place == 'control':
  with open(path, 'rb') as stream:
    tree = flax.serialization.msgpack_restore(stream.read())
  params = tree['optimizer']['target']
else:
  sharding = device if place == 'device' else None
  params = checkpoints.load(path, dtype=dtype, sharding=sharding)
loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps([status('VmHWM'), before, loaded]))
"""


def write_large(folder, rows, stored):
  """Six arrays of T5X's: in TensorStore's folders, of which three in chunks.

  Or all in one file, beside an optimiser's state that is not read.
  """
  import tensorstore as ts

  target = dict.fromkeys('abcdef', np.ones((rows, 1024), np.float32))
  state = {} if stored else {'param_states': dict(target)}
  folder.mkdir()
  for name in target if stored else ():
    chunks = [1024 if name in 'abc' else rows, 1024]
    metadata = {'chunks': chunks, 'compressor': None, 'shape': [rows, 1024]}
    full = {'driver': 'zarr', 'dtype': 'float32', 'metadata': metadata}
    kvstore = {'driver': 'file', 'path': f'{folder}/target.{name}/'}
    store = ts.open({**full, 'kvstore': kvstore}, create=True).result()
    store.write(target[name]).result()
    kvstore = {'driver': 'gfile', 'path': f'target.{name}/'}
    target[name] = {**full, 'kvstore': kvstore}
  tree = {'version': 3, 'optimizer': {'target': target, 'state': state}}
  data = flax.serialization.msgpack_serialize(tree)
  (folder / 'checkpoint').write_bytes(data)


@pytest.mark.skipif(
  not os.path.exists('/proc/self/status'), reason='measures memory there'
)
@pytest.mark.parametrize(
  ('kind', 'dtype', 'place'),
  [
    ('stored', 'bfloat16', 'device'),
    pytest.param('file', 'float32', 'host', marks=pytest.mark.slow),
  ],
)
def test_memory(tmp_path, kind, dtype, place):
  """Six arrays of 32 MiB: no more than two of them beside what is loaded.

  To a device some pieces are on their way, too. The least of some processes
  counts: a thread of TensorStore that other processes interrupt frees a chunk
  only after the next one was read, so a busy machine adds arrays by chance.
  """
  path = tmp_path / 'checkpoint_1'
  rows, total = 8 * 1024, 6 * 32 * MIB
  write_large(path, rows, kind == 'stored')
  bound = 2 * 32 * MIB + (8 * MIB if place == 'device' else 0)
  for _ in range(5):
    peak, before, loaded = json.loads(output_of(MEASURE, path, dtype, place))
    assert loaded == total // (1 if dtype == 'float32' else 2)
    assert peak > before + loaded * 0.9  # it does measure
    if (beside := peak - before - loaded) < bound:
      break
  assert beside < bound
  if kind == 'file':
    # The bound is one that flax's own reader does not keep.
    path = path / 'checkpoint'
    output = output_of(MEASURE, path, dtype, 'control')
    peak, before, loaded = json.loads(output)
    assert peak - before - loaded > 4 * 32 * MIB
