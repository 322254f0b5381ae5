"""How much memory `checkpoints.load` takes beside what it returns."""

import os
import shutil

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
needs_proc = pytest.mark.skipif(
  not os.path.exists('/proc/self/status'),
  reason='measures memory by /proc/self/status',
)


def write_stored(folder, shapes, chunk_rows):
  """A T5X checkpoint of arrays of TensorStore's, written in pieces."""
  import tensorstore as ts

  rng = np.random.default_rng(0)
  noise = rng.standard_normal((1024, 1024), np.float32)
  target = {}
  os.makedirs(folder)
  for name, rows in shapes.items():
    chunks = [chunk_rows.get(name, rows), 1024]
    metadata = {'chunks': chunks, 'compressor': None, 'shape': [rows, 1024]}
    full = {'driver': 'zarr', 'dtype': 'float32', 'metadata': metadata}
    kvstore = {'driver': 'file', 'path': f'{folder}/target.{name}/'}
    store = ts.open({**full, 'kvstore': kvstore}, create=True).result()
    store.write(np.tile(noise, (rows // 1024, 1))).result()
    kvstore = {'driver': 'gfile', 'path': f'target.{name}/'}
    target[name] = {**full, 'kvstore': kvstore}
  tree = {'version': 3, 'optimizer': {'target': target, 'state': {}}}
  data = flax.serialization.msgpack_serialize(tree)
  (folder / 'checkpoint').write_bytes(data)


MIB = 1 << 20


@needs_proc
@pytest.mark.parametrize(
  'kind, dtype',
  [
    ('stored', 'bfloat16'),
    ('file', 'None'),
    pytest.param('stored', 'None', marks=pytest.mark.slow),
    pytest.param('file', 'bfloat16', marks=pytest.mark.slow),
  ],
)
def test_memory(tmp_path, kind, dtype):
  """Six arrays of 32 MiB: no more than two of them beside what is loaded."""
  path = tmp_path / 'checkpoint_1'
  rows = 8 * 1024
  names = 'abcdef'
  if kind == 'stored':
    chunks = dict.fromkeys('abc', 1024)
    write_stored(path, dict.fromkeys(names, rows), chunks)
  else:
    array = np.zeros((rows, 1024), np.float32)
    array[:] = np.arange(rows)[:, None]
    target = dict.fromkeys(names, array)
    tree = {'target': target, 'state': {'param_states': target}}
    data = flax.serialization.msgpack_serialize(
      {'version': 3, 'optimizer': tree}
    )
    path.write_bytes(data)
  peak, before, loaded = run(MEASURE, path, dtype, 'host', 4 * MIB)
  assert loaded == 6 * rows * 1024 * (4 if dtype == 'None' else 2)
  assert peak > before + loaded * 0.9  # it does measure
  assert peak - before - loaded < 2 * 32 * MIB
  if kind == 'file' and dtype == 'None':
    # The bound is one that flax's own reader does not keep.
    peak, before, loaded = run(MEASURE, path, dtype, 'control', 4 * MIB)
    assert peak - before - loaded > 4 * 32 * MIB


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['None', 'bfloat16'])
@pytest.mark.parametrize('place', ['host', 'device'])
def test_memory_of_two_gigabytes(tmp_path, dtype, place):
  """The bound that is promised: twice the largest array plus 1 GiB.

  The largest has 1 GiB in one chunk; two of 512 MiB have one and eight.
  """
  path = tmp_path / 'checkpoint_1'
  rows = 256 * 1024
  shapes = {'a': rows, 'b': rows // 2, 'c': rows // 2}
  try:
    write_stored(path, shapes, {'c': rows // 16})
    peak, _, loaded = run(MEASURE, path, dtype, place, 128 * MIB)
  finally:
    shutil.rmtree(path)
  assert loaded == 2048 * MIB // (1 if dtype == 'None' else 2)
  print(f'{place} {dtype}: {(peak - loaded) // MIB} MiB beside what is loaded')
  assert peak - loaded < 2 * 1024 * MIB + 1024 * MIB
