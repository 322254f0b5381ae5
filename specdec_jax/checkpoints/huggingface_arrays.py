"""Arrays in safetensors files, read a piece at a time.

The files are mapped into memory, and what is mapped counts as this process's
memory until it is unmapped. So each piece opens its file anew: beside the
array that is being filled, no more than one piece of it is held.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from specdec_jax import files

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'
_SHOWN = 8
_JSON_BYTES = 64 << 20  # the index of the largest models has 1 MiB
_PIECE_BYTES = 64 << 20
# safetensors' names of the types, and what an element takes.
_FLOATS = {'F64': 8, 'F32': 4, 'F16': 2, 'BF16': 2}

Index = tuple[slice, ...]
Layout: TypeAlias = jax.Device | Sharding
# None leaves arrays on the host; a callable takes T5X's name of an array.
Layouts: TypeAlias = Layout | Callable[[str], Layout | None] | None


@dataclasses.dataclass(frozen=True)
class Stored:
  """An array on disk.

  Attributes:
    path: the file.
    name: of the array in it.
    shape: of the array.
    dtype: safetensors' name of its type, such as 'BF16'.
  """

  path: str
  name: str
  shape: tuple[int, ...]
  dtype: str

  def read(
    self, index: Index, dtype: Any = None, scale: float = 1.0
  ) -> np.ndarray:
    """Returns a part of the array.

    Args:
      index: a slice with step 1 a dimension.
      dtype: of the result; None is the file's.
      scale: what it is multiplied by, in the result's dtype.

    Raises:
      ValueError: the file has changed or gone since it was opened.
    """
    (start, stop), *rest = _ranges(index, self.shape)
    step = self._rows()
    if stop - start <= step:
      return self._piece([(start, stop), *rest], dtype, scale)
    filled: np.ndarray | None = None
    for first in range(start, stop, step):
      piece = self._piece(
        [(first, min(first + step, stop)), *rest], dtype, scale
      )
      if filled is None:
        filled = np.empty((stop - start, *piece.shape[1:]), piece.dtype)
      filled[first - start :][: len(piece)] = piece
    return cast(np.ndarray, filled)

  def _rows(self) -> int:
    width = int(np.prod(self.shape[1:])) * _FLOATS.get(self.dtype, 8)
    return max(1, _PIECE_BYTES // width)

  def _piece(
    self, ranges: list[tuple[int, int]], dtype: Any, scale: float
  ) -> np.ndarray:
    with opened(self.path) as file:
      piece = file.get_slice(self.name)[tuple(slice(*r) for r in ranges)]
    if dtype is not None:
      piece = piece.astype(dtype, copy=False)
    return piece if scale == 1.0 else (piece * scale).astype(piece.dtype)


def same(one: Stored, other: Stored) -> bool:
  """Whether two arrays have the same shape and values."""
  if one.shape != other.shape:
    return False
  for first in range(0, one.shape[0], one._rows()):
    rows = (slice(first, first + one._rows()), *[slice(None)] * 8)
    index = rows[: len(one.shape)]
    if not np.array_equal(one.read(index), other.read(index)):
      return False
  return True


def load(
  stored: Stored,
  transposed: bool,
  layout: Layout | None,
  dtype: Any = None,
  scale: float = 1.0,
) -> np.ndarray | jax.Array:
  """Reads an array and places it; nothing of it stays on the host then.

  Args:
    stored: the array.
    transposed: whether the result is its transpose.
    layout: of the result; None leaves it on the host, as a NumPy array.
    dtype: of the result; None is the file's.
    scale: what it is multiplied by.
  """

  def read(index: Index) -> np.ndarray:
    if not transposed:
      return stored.read(index, dtype, scale)
    return stored.read(index[::-1], dtype, scale).T

  shape = stored.shape[::-1] if transposed else stored.shape
  return place(read, shape, layout)


def place(
  read: Callable[[Index], np.ndarray],
  shape: tuple[int, ...],
  layout: Layout | None,
) -> np.ndarray | jax.Array:
  """Reads an array's parts to where they belong.

  A part that several devices have is read once, and one part is on the host
  at a time.

  Args:
    read: returns the part of the array at an index.
    shape: of the array.
    layout: None for all of it on the host, as a NumPy array.
  """
  whole = tuple(slice(0, size) for size in shape)
  if layout is None:
    return read(whole)
  sharding = as_sharding(layout)
  holders: dict[Any, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(_ranges(whole if index is None else index, shape))
    holders.setdefault(bounds, []).append(device)
  shards = []
  for bounds, devices in holders.items():
    host = read(tuple(slice(*part) for part in bounds))
    placed = [jax.device_put(host, device) for device in devices]
    # Or the host's copies of several parts would be alive at once.
    shards += jax.block_until_ready(placed)
    del host
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def layout_of(
  layouts: Layouts, name: str, shape: tuple[int, ...]
) -> Layout | None:
  """Returns where the array `name` goes.

  Raises:
    ValueError: `layouts` is none of the kinds, or the shape cannot be divided
      so.
  """
  if callable(layouts):
    layouts = layouts(name)
  if layouts is None:
    return None
  if not isinstance(layouts, jax.Device | Sharding):
    raise ValueError(
      f'sharding of {name} is {layouts!r}; expected a jax Device or Sharding, a'
      ' function from names to them, or None for NumPy arrays.'
    )
  try:
    as_sharding(layouts).shard_shape(shape)
  except ValueError as error:
    raise ValueError(
      f'{name} {list(shape)} cannot be laid out by {layouts}: {error}'
    ) from error
  return layouts


def as_sharding(layout: Layout) -> Sharding:
  """Returns a device as a sharding, and a sharding as it is."""
  if isinstance(layout, jax.Device):
    return SingleDeviceSharding(layout)
  return layout


def _ranges(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
  return [
    part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
  ]


def open_folder(folder: pathlib.Path) -> dict[str, Stored]:
  """Returns name -> array of all of a folder's safetensors files.

  Raises:
    ValueError: a file is missing or broken, or an array there twice.
  """
  import_safetensors()
  found: dict[str, Stored] = {}
  for file_name in _weight_files(folder):
    path = os.fspath(folder / file_name)
    with opened(path) as file:
      for name in file.keys():  # noqa: SIM118  it is no dict
        array = file.get_slice(name)
        shape = tuple(array.get_shape())
        stored = Stored(path, name, shape, array.get_dtype())
        if name in found:
          first = found[name]
          raise ValueError(
            f'{os.fspath(folder)!r} has {name} twice: in'
            f' {os.path.basename(first.path)} {list(first.shape)} and in'
            f' {file_name} {list(shape)}.'
          )
        found[name] = stored
  return found


def check_floats(arrays: Mapping[str, Stored], folder: pathlib.Path) -> None:
  """Raises ValueError with the name of an array that is not floating."""
  for name, array in arrays.items():
    if array.dtype not in _FLOATS:
      raise ValueError(
        f'{os.fspath(folder)!r}: {name} is {array.dtype}, expected one of'
        f' {", ".join(_FLOATS)}.'
      )


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
  """Opens a safetensors file.

  Raises:
    ValueError: it is missing, cut short, or no such file.
  """
  files.check_regular(path)
  safetensors = import_safetensors()
  try:
    file = safetensors.safe_open(path, framework='numpy')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
      f'{path!r} is missing, cut short or no safetensors file ({error}); copy'
      ' it again.'
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
    ValueError: the file is missing, no regular one, too large, or holds
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
    raise ValueError(f'{os.fspath(path)!r} is no JSON object.')
  return value


def import_safetensors() -> Any:
  """Returns the package.

  Raises:
    ValueError: it is not installed.
  """
  try:
    import safetensors
    import safetensors.numpy
  except ImportError as error:
    raise ValueError(
      'Hugging Face folders need the package safetensors, which is not'
      " installed: pip install -e '.[huggingface]'"
    ) from error
  return safetensors
