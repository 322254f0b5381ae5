"""Arrays that are still on disk: read in pieces, straight to where they go.

No more than a piece of an array is held beside what is returned: a piece is
some 100 MiB, or one chunk of a file whose chunks are larger.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints.huggingface_arrays import Layout, place
from specdec_jax.files.locations import (
  READ_SECONDS,
  STORE_ERRORS,
  Location,
  reading,
  reason,
)

PIECE_BYTES = 128 << 20

Index = tuple[slice, ...]


class DiskArray(Protocol):
  """An array that has not been read."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def dtype(self) -> np.dtype: ...

  def read_into(self, out: np.ndarray, index: Index) -> None:
    """Writes the part at `index` to `out`, in the dtype of `out`.

    Raises:
      ValueError: the file is missing, cut short or corrupt; says why.
    """
    ...


def load_array(
  array: DiskArray, dtype: Any, layout: Layout | None
) -> np.ndarray | jax.Array:
  """Reads an array to its place.

  Args:
    array: of any shape.
    dtype: of the result; None keeps the file's.
    layout: None for a NumPy array, or a JAX Device or Sharding. A shard that
      several devices have is read once, and one is on the host at a time.

  Raises:
    ValueError: it cannot be read; says why.
  """

  def read(index: Index) -> np.ndarray:
    parts = [part.stop - part.start for part in index]
    out = np.empty(parts, array.dtype if dtype is None else dtype)
    array.read_into(out, index)
    return out

  return place(read, array.shape, layout)


class FileArray:
  """An array inside a larger file, in C order, in one or more spans."""

  def __init__(
    self,
    location: Location,
    shape: Sequence[int],
    dtype: np.dtype,
    spans: Sequence[tuple[int, int]],
  ):
    """
    Args:
      location: the file.
      shape: of the array.
      dtype: of the file.
      spans: (offset, size) in bytes of each part, in order.

    Raises:
      ValueError: the spans are not as long as the array.
    """
    self.shape = tuple(shape)
    if not all(type(size) is int and size >= 0 for size in self.shape):
      raise ValueError(f'an array of shape {list(shape)}')
    self.dtype = dtype
    self._location = location
    self.spans = spans
    have = sum(size for _, size in spans)
    if have != math.prod(self.shape) * dtype.itemsize:
      raise ValueError(
        f'{dtype} {list(shape)} needs {math.prod(shape) * dtype.itemsize}'
        f' bytes, found {have}'
      )

  def read_into(self, out: np.ndarray, index: Index) -> None:
    if not self.shape:
      number = self._read(0, self.dtype.itemsize)
      out[...] = np.frombuffer(number, self.dtype)[0]
      return
    row = math.prod(self.shape[1:]) * self.dtype.itemsize
    step = max(1, PIECE_BYTES // max(row, 1))
    first = index[0].start
    for start in range(first, index[0].stop, step):
      stop = min(start + step, index[0].stop)
      data = self._read(start * row, (stop - start) * row)
      rows = np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])
      out[start - first : stop - first] = rows[(slice(None), *index[1:])]

  def _read(self, start: int, size: int) -> bytes:
    """Bytes of the array, which may lie in several spans."""
    parts = []
    for offset, length in self.spans:
      if size > 0 and start < length:
        part = self._location.read(offset + start, min(size, length - start))
        if not part:
          raise ValueError(f'{self._location} ends inside the array')
        parts.append(part)
        size -= len(part)
        start = 0
      else:
        start -= length
    return parts[0] if len(parts) == 1 else b''.join(parts)


class StoredArray:
  """An array of TensorStore's, chunked or not."""

  def __init__(self, store: Any):
    self.shape = tuple(store.shape)
    self.dtype = np.dtype(store.dtype.numpy_dtype)
    self._store = store

  def read_into(self, out: np.ndarray, index: Index) -> None:
    import tensorstore as ts

    store = self._store
    if out.dtype != self.dtype:
      store = ts.cast(store, ts.dtype(out.dtype))
    target = ts.array(out)
    start = [part.start for part in index]
    chunk = self._store.chunk_layout.read_chunk.shape
    try:
      for piece in pieces(index, chunk, self.dtype.itemsize):
        there = tuple(
          slice(part.start - low, part.stop - low)
          for part, low in zip(piece, start, strict=True)
        )
        source = store[piece].translate_to[0] if piece else store
        into = target[there].translate_to[0] if piece else target
        into.write(source).result(timeout=READ_SECONDS)
    except STORE_ERRORS as error:
      raise ValueError(reason(error)) from error


def pieces(
  index: Index, chunk: Sequence[int], itemsize: int
) -> Iterator[Index]:
  """Cuts a part of an array along its chunks, so that none is read twice.

  Args:
    index: the part.
    chunk: shape of a chunk; chunks begin at multiples of it.
    itemsize: bytes of an element.

  Yields:
    Parts of at most PIECE_BYTES, but no smaller than a chunk.
  """
  shape = [max(1, size) for size in chunk]
  for axis in reversed(range(len(shape))):
    room = PIECE_BYTES // (math.prod(shape) * itemsize)
    needed = -(-index[axis].stop // shape[axis])
    shape[axis] *= max(1, min(room, needed))
  cuts = []
  for part, size in zip(index, shape, strict=True):
    begin = range(part.start // size * size, part.stop, size)
    cuts.append(
      [slice(max(b, part.start), min(b + size, part.stop)) for b in begin]
    )
  return itertools.product(*cuts)


def _irregular(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
  """What lies among local arrays and is no file: name -> why, of one at most.

  TensorStore would wait for a pipe.
  """
  seen = set()
  for name, spec in specs.items():
    store = spec['kvstore'].get('base', spec['kvstore'])
    if store['driver'] == 'file' and store['path'] not in seen:
      seen.add(store['path'])
      try:
        files.check_all_regular(store['path'])
      except ValueError as error:
        return {name: str(error).rstrip('.')}
  return {}


def open_stored(
  specs: Mapping[str, Mapping[str, Any]],
  complain: Callable[[str, str], ValueError],
) -> dict[str, StoredArray]:
  """Opens arrays of TensorStore's, all at once, without reading them.

  Args:
    specs: name -> driver and kvstore.
    complain: makes the error out of a name and what is wrong with it.

  Raises:
    ValueError: by `complain`, for the first that cannot be opened.
  """
  import tensorstore as ts

  for name, why in _irregular(specs).items():
    raise complain(name, why)
  # A missing chunk would read as zeros. T5X and Orbax write those too.
  strict = {'fill_missing_data_reads': False}
  opening = {}
  for name, spec in specs.items():
    try:
      opening[name] = ts.open(
        {**spec, **strict}, open=True, read=True, context=reading()
      )
    except STORE_ERRORS as error:  # a path that leads out of the checkpoint
      raise complain(name, reason(error)) from error
  found = {}
  for name, future in opening.items():
    try:
      found[name] = StoredArray(future.result(timeout=READ_SECONDS))
    except STORE_ERRORS as error:
      raise complain(name, reason(error)) from error
  return found
