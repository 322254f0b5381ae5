"""Kernels that are of eight bits on disk, read as floats.

Each number is its integer times the factor of its output (`models.integers`):
the same model as with kernels of integers, for all that wants floats, such as
training, other formats, and a CPU, which gains nothing by integers.
"""

from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints.disk_arrays import (
  DiskArray,
  Index,
  is_rounded,
  load_array,
)
from specdec_jax.models import integers


class _Product:
  """A kernel [in, out] that is read as its integers times their factors."""

  dtype = np.dtype(np.float32)
  order: Literal['C'] = 'C'

  def __init__(self, name: str, kernel: DiskArray, scale: DiskArray):
    self._name, self._kernel, self._scale = name, kernel, scale
    self.shape, self.chunk = kernel.shape, kernel.chunk

  def read_into(self, out: np.ndarray, index: Index) -> None:
    """Writes the part at `index` to `out`, in the dtype of `out`."""
    rounded = np.empty(out.shape, self._kernel.dtype, self._kernel.order)
    self._kernel.read_into(rounded, index)
    scale = np.asarray(load_array(self._scale, jnp.float32))
    integers.check_scale(scale, f'{self._name}_scale')
    out[...] = rounded.astype(np.float32) * scale[index[1]]


def in_floats(arrays: Mapping[str, DiskArray]) -> dict[str, DiskArray]:
  """Arrays of a checkpoint, kernels of eight bits as float32.

  Args:
    arrays: T5X's name, with slashes -> array; factors fit their kernels.
  """
  if not is_rounded(arrays):
    return dict(arrays)
  return {
    name: _Product(name, array, arrays[f'{name}_scale'])
    if array.dtype == integers.INT8
    else array
    for name, array in arrays.items()
    if not integers.is_scale(name)
  }
