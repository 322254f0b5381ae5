"""Loads a folder and prints the peak of host memory, in a process of its own.

The peak is VmHWM of /proc/self/status: `ru_maxrss` keeps the peak of the
process that this one was forked from.
"""

import json
import pathlib
import sys

import jax
import numpy as np


def memory(field):
  """Bytes of VmRSS (now) or VmHWM (the peak)."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith(f'{field}:'):
      return int(line.split()[1]) << 10
  raise ValueError(f'no {field} in /proc/self/status')


def load_all_at_once(folder, dtype, sharding):
  """What `load_huggingface` must not do: keep the file while arrays grow."""
  import safetensors

  del sharding
  with safetensors.safe_open(
    folder / 'model.safetensors', framework='numpy'
  ) as file:
    arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return None, {name: a.astype(dtype) for name, a in arrays.items()}


def main(folder, how, dtype):
  from specdec_jax.checkpoints import huggingface

  load = load_all_at_once if how == 'at_once' else huggingface.load_huggingface
  sharding = jax.devices()[0] if how == 'device' else None
  jax.block_until_ready(jax.numpy.ones(3))  # starts the backend
  before = memory('VmRSS')
  _, params = load(pathlib.Path(folder), np.dtype(dtype), sharding)
  leaves = jax.tree.leaves(params)
  assert {leaf.dtype for leaf in leaves} == {np.dtype(dtype)}
  loaded = sum(leaf.nbytes for leaf in leaves)
  extra = memory('VmHWM') - before - loaded
  print(json.dumps({'loaded': loaded, 'extra': extra, 'before': before}))


if __name__ == '__main__':
  main(*sys.argv[1:])
