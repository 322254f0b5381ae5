"""Identifies a model's parameters, whatever their place, dtype and sharding."""

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints.disk_arrays import load_array

_SAMPLED = 64  # about how many values of an array are used


def fingerprint(params: Any) -> str:
  """Identifies a model's parameters, as a checkpoint has them, by a string.

  It depends on names, shapes and some values of every array; floating-point
  values are rounded to bfloat16. Another shape, another training run or another
  step of the run gives another string. Whether the values were read as float32
  or as bfloat16 does not matter, because rounding them again changes nothing.

  Args:
    params: a pytree of arrays, on the host, on a device or in shards; or on
      disk (`DiskArray`), of which one at a time is read.
  """
  digest = hashlib.sha256()
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  for path, leaf in flat:
    digest.update(f'{jax.tree_util.keystr(path)}{leaf.shape}'.encode())
    size = math.prod(leaf.shape)
    stride = max(1, size // _SAMPLED)
    # By index, because flattening a sharded array would gather it.
    index = np.unravel_index(np.arange(0, size, stride), leaf.shape)
    there = leaf if hasattr(leaf, '__getitem__') else load_array(leaf)
    some = np.asarray(there[index])
    del there
    if jnp.issubdtype(some.dtype, jnp.floating):
      some = some.astype(jnp.bfloat16)
    digest.update(some.astype(np.float32).tobytes())
  return digest.hexdigest()[:16]
