"""Arrays in safetensors files.

The package safetensors comes with the extra `[huggingface]`.
"""

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints.disk_arrays import DiskArray, Index
from specdec_jax.checkpoints.families import Row
from specdec_jax.checks.fields import package, unexpected

# safetensors' names of dtypes.
_FLOATS: dict[str, Any] = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': jnp.bfloat16,
}


def view(stored: DiskArray, row: Row) -> DiskArray:
  """Makes our array from the one in a file."""

  def read(index: Index) -> np.ndarray:
    index = index[::-1] if row.transposed else index
    if row.third is not None:
      *rest, last = index
      first = row.third * row.shape[-1]
      index = (*rest, slice(first + last.start, first + last.stop))
    part = stored.read(index)
    part = part.T if row.transposed else part
    return part if row.scale == 1.0 else part.astype(np.float32) * row.scale

  return DiskArray(row.shape, stored.dtype, read)


def open_file(path: str | os.PathLike[str]) -> dict[str, DiskArray]:
  """Returns name -> array of a safetensors file.

  A file is mapped into memory, and mapped pages count as this process's memory
  until they are unmapped. So each read opens the file again.

  Raises:
    ValueError: the file is missing or broken, or an array is not of floats.
  """
  path = os.fspath(path)
  arrays = {}

  def read(name: str, index: Index) -> np.ndarray:
    with opened(path) as file:
      return file.get_slice(name)[index]

  with opened(path) as file:
    for name in file.keys():  # noqa: SIM118  it is not a dict
      array = file.get_slice(name)
      shape, kind = tuple(array.get_shape()), array.get_dtype()
      if kind not in _FLOATS:
        raise unexpected(f'{path}: {name}', f'one of {[*_FLOATS]}', kind)
      arrays[name] = DiskArray(
        shape,
        np.dtype(_FLOATS[kind]),
        functools.partial(read, name),
        f'{name} in {os.path.basename(path)}',
      )
  return arrays


def write_file(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
  """Writes a safetensors file, whole or not at all, an array at a time.

  The format is the length of a JSON header, the header, and the arrays' bytes
  (https://github.com/huggingface/safetensors). The package's writer would copy
  all arrays at once.

  Raises:
    OSError: the disk is full or the folder not writable.
  """
  kinds = {np.dtype(dtype): kind for kind, dtype in _FLOATS.items()}
  # transformers refuses a file that does not name its framework.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name, array in arrays.items():
    start, end = end, end + array.nbytes
    header[name] = {
      'dtype': kinds[np.dtype(array.dtype)],
      'shape': list(array.shape),
      'data_offsets': [start, end],
    }
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  contents = (np.ascontiguousarray(a).tobytes() for a in arrays.values())
  files.write_atomically(
    path, itertools.chain([len(text).to_bytes(8, 'little') + text], contents)
  )


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
  """Opens a safetensors file.

  Raises:
    ValueError: it is missing or broken, or the package is not installed.
  """
  files.check_regular(path)
  safetensors = import_safetensors()
  try:
    file = safetensors.safe_open(path, framework='numpy')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
      f'{path!r} is missing, cut short or not a safetensors file ({error});'
      ' copy it again.'
    ) from error
  with file:
    yield file


def import_safetensors() -> Any:
  """Returns the package safetensors; ValueError if it is not installed."""
  return package('A Hugging Face folder', 'safetensors', 'huggingface')
