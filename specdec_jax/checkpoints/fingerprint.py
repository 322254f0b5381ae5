"""Identifies a model's parameters, whatever their place, dtype and sharding."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints.disk_arrays import DiskArray, load_array

_SAMPLED = 64  # about how many values of an array are used


def fingerprint(params: Any) -> str:
  """Identifies a model's parameters, as a checkpoint has them, by a string.

  It depends on names, shapes and some values of every array; floating-point
  values are rounded to bfloat16. Another shape, another training run or another
  step of the run gives another string. Whether the values were read as float32
  or as bfloat16 does not matter, because rounding them again changes nothing.

  Args:
    params: a pytree of arrays, on the host, on a device or in shards.
  """
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  return _digest((path, leaf.shape, _some(leaf)) for path, leaf in flat)


def fingerprint_on_disk(arrays: Mapping[str, DiskArray]) -> str:
  """`fingerprint` of a nested dict that is on disk; holds an array at a time.

  Args:
    arrays: name, with slashes -> array.

  Raises:
    ValueError: an array cannot be read.
  """
  # In their own order: layers that were cut from one array follow each other.
  parts = {
    tuple(name.split('/')): (array.shape, _some(load_array(array)))
    for name, array in arrays.items()
  }
  return _digest(
    (tuple(map(jax.tree_util.DictKey, keys)), *parts[keys])
    for keys in sorted(parts)
  )


def _some(array: Any) -> np.ndarray:
  """Values of an array that has been read, by index: a reshape would gather."""
  size = math.prod(array.shape)
  stride = max(1, size // _SAMPLED)
  index = np.unravel_index(np.arange(0, size, stride), array.shape)
  return np.asarray(array[index])


def _digest(parts: Iterable[tuple[Any, tuple[int, ...], np.ndarray]]) -> str:
  """Of each array's path, shape and values."""
  digest = hashlib.sha256()
  for path, shape, some in parts:
    digest.update(f'{jax.tree_util.keystr(path)}{shape}'.encode())
    if jnp.issubdtype(some.dtype, jnp.floating):
      some = some.astype(jnp.bfloat16)
    digest.update(some.astype(np.float32).tobytes())
  return digest.hexdigest()[:16]
