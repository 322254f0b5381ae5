"""The arrays of Hugging Face folders, in safetensors files."""

import contextlib
import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import jax.numpy as jnp
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints.disk_arrays import Index, pieces, row_of, whole
from specdec_jax.checkpoints.huggingface_names import Row

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
HEAD = 'lm_head.weight'  # the output layer's, in all families
INDEX = f'{WEIGHTS}.index.json'
_SHOWN = 8
_JSON_BYTES = 64 << 20  # limit; the index of the largest models has 1 MiB
# safetensors' names of dtypes.
_FLOATS: dict[str, Any] = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': jnp.bfloat16,
}
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Stored:
  """An array of a safetensors file, a `DiskArray`.

  The files are mapped into memory, and mapped pages count as this process's
  memory until they are unmapped: so each piece opens its file again.

  Attributes:
    path: the file.
    name: name of the array in the file.
    shape: shape of the array.
    kind: safetensors' name of its dtype, such as 'BF16'.
  """

  path: str
  name: str
  shape: tuple[int, ...]
  kind: str

  order: ClassVar[Literal['C']] = 'C'

  @property
  def dtype(self) -> np.dtype:
    """The dtype; only for arrays that `check_floats` accepts."""
    return np.dtype(_FLOATS[self.kind])

  @property
  def chunk(self) -> tuple[int, ...]:
    return row_of(self.shape)

  def read(self, index: Index) -> np.ndarray:
    """Returns a part of the array.

    Raises:
      ValueError: the file was changed or removed since it was opened.
    """
    with opened(self.path) as file:
      return file.get_slice(self.name)[index]

  def read_into(self, out: np.ndarray, index: Index) -> None:
    out[...] = self.read(index)


class View:
  """A `DiskArray` that gives a stored array the shape and values of T5X.

  Its row in a table of names says how the stored array differs.
  """

  def __init__(self, stored: Stored, row: Row):
    self.shape = row.shape
    self.dtype = stored.dtype
    # A chunk is a row in the file; if transposed, it is a column here.
    self.order: Literal['C', 'F'] = 'F' if row.transposed else 'C'
    self.chunk = _turned(row_of(_turned(row.shape, row)), row)
    self._stored = stored
    self._row = row

  def read_into(self, out: np.ndarray, index: Index) -> None:
    index = _turned(index, self._row)
    if self._row.third is not None:
      *rest, last = index
      first = self._row.third * self.shape[-1]
      index = (*rest, slice(first + last.start, first + last.stop))
    self._stored.read_into(out.T if self._row.transposed else out, index)
    if self._row.scale != 1.0:
      out[...] = out * self._row.scale


def _turned(axes: tuple[T, ...], row: Row) -> tuple[T, ...]:
  return axes[::-1] if row.transposed else axes


def warn_of_images(source: str, count: int) -> None:
  """Warns that so many arrays, of images, are left out; 0 is nothing."""
  if count:
    warnings.warn(
      f'{source!r}: {count} arrays are for images and are skipped: the'
      ' network here reads text alone.',
      stacklevel=3,
    )


def same(one: Stored, other: Stored) -> bool:
  """Whether two arrays have the same shape and values."""
  return one.shape == other.shape and all(
    np.array_equal(one.read(piece), other.read(piece))
    for piece in pieces(whole(one.shape), one.chunk, 8)
  )


def has_no_head(stored: Mapping[str, Stored], embedding: str) -> bool:
  """Whether there is no output layer, or one that is the embedding."""
  return HEAD not in stored or (
    embedding in stored and same(stored[HEAD], stored[embedding])
  )


def open_folder(folder: pathlib.Path) -> dict[str, Stored]:
  """Returns name -> array, for all safetensors files of a folder.

  Raises:
    ValueError: a file is missing or broken, or two files have the same array.
  """
  import_safetensors()
  found: dict[str, Stored] = {}
  for file_name in _weight_files(folder):
    for name, stored in open_file(folder / file_name).items():
      if name in found:
        first = found[name]
        raise ValueError(
          f'{os.fspath(folder)!r} has {name} twice: in'
          f' {os.path.basename(first.path)} {list(first.shape)} and in'
          f' {file_name} {list(stored.shape)}.'
        )
      found[name] = stored
  return found


def open_file(path: pathlib.Path) -> dict[str, Stored]:
  """Returns name -> array of one safetensors file.

  Raises:
    ValueError: the file is missing or broken.
  """
  found = {}
  with opened(os.fspath(path)) as file:
    for name in file.keys():  # noqa: SIM118  it is not a dict
      array = file.get_slice(name)
      shape = tuple(array.get_shape())
      found[name] = Stored(os.fspath(path), name, shape, array.get_dtype())
  return found


def check_floats(arrays: Mapping[str, Stored], source: str) -> None:
  """Raises ValueError with the name of an array that is not floating."""
  for name, array in arrays.items():
    if array.kind not in _FLOATS:
      raise ValueError(
        f'{source!r}: {name} is {array.kind}, expected one of'
        f' {", ".join(_FLOATS)}.'
      )


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
  """Opens a safetensors file.

  Raises:
    ValueError: it is missing, cut short, or not a safetensors file.
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


def _weight_files(folder: pathlib.Path) -> Iterator[str]:
  if (folder / WEIGHTS).exists():
    yield WEIGHTS
  elif (folder / INDEX).exists():
    index = read_json(folder / INDEX)
    shards = index.get('weight_map')
    if not isinstance(shards, dict) or not shards:
      raise ValueError(f'{os.fspath(folder / INDEX)!r} has no weight_map.')
    for name, shard in shards.items():
      # A path would lead out of the folder.
      if not isinstance(shard, str) or pathlib.Path(shard).name != shard:
        raise ValueError(
          f'{os.fspath(folder / INDEX)!r}: weight_map has {name} in {shard!r};'
          ' expected the name of a file of the same folder.'
        )
    yield from sorted(set(shards.values()))
  else:
    found = sorted(path.name for path in folder.iterdir())[:_SHOWN]
    raise ValueError(
      f'{os.fspath(folder)!r} has neither {WEIGHTS} nor {INDEX}, only'
      f' {found}; save the model with safe_serialization=True.'
    )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    ValueError: the file is missing, not a regular file, too large, or holds
      something else.
  """
  try:
    value = json.loads(files.read_small(path, _JSON_BYTES).decode())
  except OSError as error:
    raise ValueError(
      f'{os.fspath(path)!r} cannot be read: {error.strerror}. Expected a'
      ' Hugging Face folder with config.json and safetensors in it.'
    ) from error
  except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
    raise ValueError(f'{os.fspath(path)!r} is not JSON: {error}.') from error
  if not isinstance(value, dict):
    raise ValueError(f'{os.fspath(path)!r} is not a JSON object.')
  return value


def import_safetensors() -> Any:
  """Returns the package safetensors.

  Raises:
    ValueError: it is not installed.
  """
  try:
    import safetensors
    import safetensors.numpy
  except ImportError as error:
    raise ValueError(
      'Hugging Face folders need the package safetensors, which is not'
      " installed: pip install 'specdec_jax[huggingface]'"
    ) from error
  return safetensors
