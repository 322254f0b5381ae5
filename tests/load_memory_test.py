"""How much memory `checkpoints.load` takes beside what it returns."""

import os

import flax.serialization
import numpy as np
import pytest

from load_test import run

MEASURE = """
  import json, re, sys
  import flax.serialization, jax, tensorstore
  from specdec_jax import checkpoints
  from specdec_jax.checkpoints import disk_arrays

  def status(field):
    with open('/proc/self/status') as stream:
      return int(re.search(field + r':\\s+(\\d+) kB', stream.read())[1]) << 10

  path, dtype, place, piece = sys.argv[1:]
  disk_arrays.PIECE_BYTES = int(piece)
  device = jax.devices()[0]
  jax.block_until_ready(jax.numpy.ones(3))
  before = status('VmRSS')
  if place == 'control':
    with open(path, 'rb') as stream:
      tree = flax.serialization.msgpack_restore(stream.read())
    params = tree['optimizer']['target']
  else:
    params = checkpoints.load(
      path,
      dtype=None if dtype == 'None' else dtype,
      sharding=device if place == 'device' else None,
    )
  loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  print(json.dumps([status('VmHWM'), before, loaded]))
"""
MIB = 1 << 20
needs_proc = pytest.mark.skipif(
  not os.path.exists('/proc/self/status'),
  reason='measures memory by /proc/self/status',
)


def write(folder, rows, stored):
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


@needs_proc
@pytest.mark.parametrize(
  ('kind', 'dtype', 'place'),
  [('stored', 'bfloat16', 'device'), ('file', 'None', 'host')],
)
def test_memory(tmp_path, kind, dtype, place):
  """Six arrays of 32 MiB: no more than two of them beside what is loaded.

  To a device some pieces are on their way, too.
  """
  path = tmp_path / 'checkpoint_1'
  rows, total = 8 * 1024, 6 * 32 * MIB
  write(path, rows, kind == 'stored')
  peak, before, loaded = run(MEASURE, path, dtype, place, 4 * MIB)
  assert loaded == total // (1 if dtype == 'None' else 2)
  assert peak > before + loaded * 0.9  # it does measure
  on_its_way = 8 * MIB if place == 'device' else 0
  assert peak - before - loaded < 2 * 32 * MIB + on_its_way
  if kind == 'file':
    # The bound is one that flax's own reader does not keep.
    path = path / 'checkpoint'
    peak, before, loaded = run(MEASURE, path, dtype, 'control', 4 * MIB)
    assert peak - before - loaded > 4 * 32 * MIB
