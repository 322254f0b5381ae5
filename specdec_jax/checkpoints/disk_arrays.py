"""Arrays on disk, which are read one at a time, straight to their devices.

If an array is split over devices, each process reads only its parts.
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from specdec_jax import files
from specdec_jax.checks import memory
from specdec_jax.checks.fields import unexpected
from specdec_jax.files import locations
from specdec_jax.files.locations import Location
from specdec_jax.models import integers
from specdec_jax.partitioning import put

# TensorStore reads an array in pieces of this size, or of one chunk if chunks
# are larger.
PIECE_BYTES = 128 << 20
_SAMPLED = 64  # about this many values of an array decide its fingerprint
# The errors that code raises when it reads metadata of an unexpected form.
WRONG_DATA = AttributeError, LookupError, RecursionError, TypeError, ValueError

Path: TypeAlias = str | os.PathLike[str]
Params = dict[str, Any]
About: TypeAlias = Mapping[str, str] | None  # texts stored with parameters
Shape = tuple[int, ...]
Index = tuple[slice, ...]
Spans = Sequence[tuple[int, int]]  # (offset, size) of the parts of an array
Dtype: TypeAlias = DTypeLike | None
Layout: TypeAlias = jax.Device | Sharding
# The device or sharding of all arrays, or a function from an array's T5X name
# to its device or sharding; None is the host.
Shardings: TypeAlias = Layout | Callable[[str], Layout | None] | None


@dataclasses.dataclass(frozen=True, eq=False)
class DiskArray:
  """An array that has not been read.

  Attributes:
    shape: shape of the whole array.
    dtype: dtype of the array on disk.
    read: function that returns the part at an index, in `dtype` or in float32;
      it raises ValueError with the reason if the file is missing, cut short or
      corrupt.
    where: the array's name and file, for messages.
    cast: function from a dtype to the same array in that dtype; None: NumPy
      casts what was read.
  """

  shape: Shape
  dtype: np.dtype
  read: Callable[[Index], np.ndarray]
  where: str = ''
  cast: Callable[[Any], 'DiskArray'] | None = None


Arrays = Mapping[str, DiskArray]


def load_arrays(
  arrays: Arrays, source: str, dtype: Dtype = None, sharding: Shardings = None
) -> Params:
  """Reads arrays one after another, each to its devices or to the host.

  Args:
    arrays: T5X's name, with slashes -> array. Kernels of eight bits are read
      unchanged; `in_floats` converts them.
    source: path of the checkpoint, for messages.
    dtype: dtype of the result; None keeps the file's. 'int8' and 'int4' apply
      to kernels, which then come with their scales; see `models.integers`.
    sharding: the devices of each array; None for NumPy arrays on the host.

  Returns:
    Nested dict of arrays.

  Raises:
    ValueError: the arrays do not fit into memory; `sharding` does not fit; or
      an array cannot be read (the message names it).
  """
  kinds = {n: _dtype_of(n, dtype) or array.dtype for n, array in arrays.items()}
  needed = sum(memory.array_bytes(arrays[n].shape, x) for n, x in kinds.items())
  free = memory.free_bytes if sharding is None else memory.all_bytes
  advice = 'Take a smaller model, bfloat16, or more devices.'
  memory.check_room(f'The parameters of {source!r}', needed, free, advice)
  layouts = {n: _layout_of(sharding, n, a.shape) for n, a in arrays.items()}
  flat: dict[str, Any] = {}

  def read(name: str, *options: Any) -> Any:
    try:
      return load_array(arrays[name], *options)
    except ValueError as error:
      raise broken(source, name, str(error)) from error

  for name, array in arrays.items():
    wanted, where = _dtype_of(name, dtype), f'{source!r}: {name}'
    if integers.is_integers(wanted) and wanted != array.dtype:
      # A kernel is read as a whole, because all of its rows decide the scales.
      kernel, scale = integers.quantise(read(name), where, wanted)
      flat[name] = put(kernel, layouts[name])
      layout = _layout_of(sharding, f'{name}_scale', scale.shape)
      flat[f'{name}_scale'] = put(scale, layout)
      del kernel
    elif integers.is_scale(name):
      scale = np.asarray(read(name, wanted))
      integers.check_scale(scale, where)
      flat[name] = put(scale, layouts[name])
    else:
      flat[name] = read(name, wanted, layouts[name])
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def in_floats(arrays: Arrays) -> dict[str, DiskArray]:
  """Converts a checkpoint's kernels of eight bits to float32.

  Each integer is multiplied by the scale of its output. Training, other formats
  and CPUs need this form of the model.

  Args:
    arrays: T5X's name, with slashes -> array; scales must fit their kernels.
  """
  floats = {n: a for n, a in arrays.items() if not integers.is_scale(n)}
  for name, array in floats.items():
    if array.dtype == integers.INT8:
      floats[name] = _product(name, array, arrays[f'{name}_scale'])
  return floats


def _product(name: str, kernel: DiskArray, factors: DiskArray) -> DiskArray:
  """Returns a kernel [in, out] of integers, which reads as floats.

  The integers are multiplied by their scales, the array `factors`.
  """

  def read(index: Index) -> np.ndarray:
    scale = np.asarray(load_array(factors, jnp.float32))
    integers.check_scale(scale, f'{name}_scale')
    return kernel.read(index).astype(np.float32) * scale[index[1]]

  return DiskArray(kernel.shape, np.dtype(np.float32), read)


def _dtype_of(name: str, dtype: Dtype) -> Any:
  """Returns the dtype of one array; a dtype of integers is for kernels only."""
  if not integers.is_integers(dtype) or integers.is_kernel(name):
    return dtype
  # An embedding is only ever read in the dtype of the computation.
  is_table = name.rpartition('/')[2] == 'embedding'
  return integers.computes_in() if is_table else 'float32'


def load_array(
  array: DiskArray, dtype: Dtype = None, layout: Sharding | None = None
) -> np.ndarray | jax.Array:
  """Reads an array to its devices, or to the host.

  Args:
    array: an array of any shape.
    dtype: dtype of the result; None keeps the file's.
    layout: the devices of the array; None for a NumPy array on the host. A
      shard that several devices share is read once.

  Raises:
    ValueError: the array cannot be read; the message says why.
  """
  if layout is None:
    return _read(array, tuple(slice(0, size) for size in array.shape), dtype)
  shards: dict[Any, np.ndarray] = {}

  def shard(index: Any) -> np.ndarray:
    parts = zip(index, array.shape, strict=True)
    bounds = tuple(part.indices(size)[:2] for part, size in parts)
    if bounds not in shards:
      part = tuple(slice(*bound) for bound in bounds)
      shards[bounds] = _read(array, part, dtype)
    return shards[bounds]

  loaded = jax.make_array_from_callback(array.shape, layout, shard)
  # The wait keeps the host from holding copies of several arrays.
  return jax.block_until_ready(loaded)


def _read(array: DiskArray, index: Index, dtype: Dtype) -> np.ndarray:
  """Reads a part of an array."""
  if dtype is not None and array.cast is not None:
    array = array.cast(dtype)
  part = np.asarray(array.read(index))
  return part.astype(dtype or array.dtype, copy=not part.flags.writeable)


def _layout_of(sharding: Shardings, name: str, shape: Shape) -> Sharding | None:
  """Returns the sharding of the array `name`; None for the host.

  Raises:
    ValueError: `sharding` is of an unknown kind, or the shape cannot be divided
      in this way.
  """
  layout = sharding(name) if callable(sharding) else sharding
  if layout is None:
    return None
  if isinstance(layout, jax.Device):
    layout = SingleDeviceSharding(layout)
  if not isinstance(layout, Sharding):
    kinds = 'a jax Device or Sharding, a function from names to them, or None'
    raise unexpected(f'sharding of {name}', kinds, layout)
  try:
    layout.shard_shape(shape)
  except ValueError as error:
    why = f'{name} {list(shape)} cannot be laid out by {layout}: {error}'
    raise ValueError(why) from error
  return layout


def broken(source: str, name: str, why: str) -> ValueError:
  """Makes the error for an array that cannot be read."""
  advice = 'Its file is missing, cut short or corrupt; copy it again.'
  where = f'{source!r}: the array {name} cannot be read'
  return ValueError(f'{where}: {why}. {advice}')


def file_array(
  location: Location, shape: Shape, dtype: np.dtype, spans: Spans
) -> DiskArray:
  """Returns a `DiskArray` for a part of a larger file, in C order.

  Args:
    location: the file.
    shape: shape of the array.
    dtype: dtype of the array in the file.
    spans: (offset, size) in bytes of each part, in order.
  """
  row = math.prod(shape[1:]) * dtype.itemsize

  def read(index: Index) -> np.ndarray:
    rows = index[0] if index else slice(0, 1)
    data = b''.join(read_bytes(rows.start * row, rows.stop * row))
    values = np.frombuffer(data, dtype)
    if not index:
      return values[0]
    return values.reshape(-1, *shape[1:])[:, *index[1:]]

  def read_bytes(start: int, stop: int) -> Iterator[bytes]:
    """Yields the parts of the array's bytes from `start` to `stop`."""
    first = 0  # the index of the span's first byte in the array
    for offset, size in spans:
      begin, end = max(start - first, 0), min(stop - first, size)
      if begin < end:
        if not (part := location.read(offset + begin, end - begin)):
          raise ValueError(f'{location} ends inside the array')
        yield part
      first += size

  return DiskArray(shape, dtype, read)


def _stored_array(store: Any, bytes_each: int | None = None) -> DiskArray:
  """Returns a `DiskArray` for an array of TensorStore, chunked or not.

  Args:
    store: the array, which may be cast from another dtype.
    bytes_each: bytes of a number on disk; None: as in `store`.
  """

  import tensorstore as ts

  shape, dtype = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
  bytes_each = bytes_each or dtype.itemsize
  whole, store = store, store if shape else store[ts.newaxis]
  chunk_rows = store.chunk_layout.read_chunk.shape[0]

  def read(index: Index) -> np.ndarray:
    first, *rest = index or (slice(0, 1),)
    sizes = [part.stop - part.start for part in (first, *rest)]
    out = np.empty(sizes, dtype)
    # Besides `out`, TensorStore holds all chunks of a request.
    each = max(1, chunk_rows * out[:1].size * bytes_each)
    step = chunk_rows * max(1, PIECE_BYTES // each)
    try:
      for start in range(first.start // step * step, first.stop, step):
        begin, end = max(start, first.start), min(start + step, first.stop)
        target = ts.array(out[begin - first.start : end - first.start])
        part = store[slice(begin, end), *rest].translate_to[0]
        target.write(part).result(timeout=locations.READ_SECONDS)
    except locations.STORE_ERRORS as error:
      raise ValueError(locations.reason(error)) from error
    return out.reshape(sizes[: len(index)])

  def cast(dtype: Dtype) -> DiskArray:
    cast_to = ts.cast(whole, ts.dtype(jnp.dtype(dtype)))
    return _stored_array(cast_to, bytes_each)

  return DiskArray(shape, dtype, read, cast=cast)


def open_stored(
  specs: Mapping[str, Mapping[str, Any]], source: str
) -> dict[str, DiskArray]:
  """Opens TensorStore arrays, all at the same time, without reading them.

  Args:
    specs: name -> TensorStore's specification, with driver and kvstore.
    source: path of the checkpoint, for messages.

  Raises:
    ValueError: an array cannot be opened; the message names it.
  """
  import tensorstore as ts

  stores = {n: s['kvstore'].get('base', s['kvstore']) for n, s in specs.items()}
  folders = {x['path']: n for n, x in stores.items() if x['driver'] == 'file'}
  for folder, name in folders.items():
    try:
      # TensorStore would wait for ever to read from a pipe.
      files.check_all_regular(folder)
    except ValueError as error:
      raise broken(source, name, str(error).rstrip('.')) from error
  # By default a missing chunk would read as zeros. T5X and Orbax write all
  # chunks, also those of zeros, so a missing one is an error.
  strict = {'fill_missing_data_reads': False}
  opening, arrays = {}, {}
  options = {'open': True, 'read': True, 'context': locations.reading()}
  try:
    for name, spec in specs.items():
      opening[name] = ts.open({**spec, **strict}, **options)
    for name, future in opening.items():
      store = future.result(timeout=locations.READ_SECONDS)
      arrays[name] = _stored_array(store)
  # The path may lead to something that is not an array.
  except locations.STORE_ERRORS as error:
    raise broken(source, name, locations.reason(error)) from error
  return arrays


# These functions make fingerprints of parameters, which do not depend on
# device, dtype or sharding.


def fingerprint(params: Any) -> str:
  """Identifies a model's parameters, as in a checkpoint, by a string.

  The string depends on names, shapes and some values of every array;
  floating-point values are rounded to bfloat16. Another shape, another training
  run or another step of the run gives another string. Values read as float32 or
  as bfloat16 give the same string, because rounding them again changes nothing.

  Args:
    params: a pytree of arrays, on the host, on a device or in shards.
  """
  digest = hashlib.sha256()
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    params, is_leaf=lambda part: isinstance(part, _Sample)
  )
  for path, leaf in leaves:
    shape, some = leaf if isinstance(leaf, _Sample) else _sample(leaf)
    digest.update(f'{jax.tree_util.keystr(path)}{shape}'.encode())
    if jnp.issubdtype(some.dtype, jnp.floating):
      some = some.astype(jnp.bfloat16)
    digest.update(some.astype(np.float32).tobytes())
  return digest.hexdigest()[:16]


def fingerprint_on_disk(arrays: Arrays) -> str:
  """Returns the `fingerprint` of arrays on disk, read one at a time.

  Args:
    arrays: name, with slashes -> array.

  Raises:
    ValueError: an array cannot be read.
  """
  # Arrays are read in this order, in which layers of a scanned stack are
  # neighbours, so that the stack is read once.
  samples = {name: _sample(load_array(array)) for name, array in arrays.items()}
  return fingerprint(flax.traverse_util.unflatten_dict(samples, sep='/'))


class _Sample(NamedTuple):
  """The shape of an array, and some of its values."""

  shape: Shape
  some: np.ndarray


def _sample(array: Any) -> _Sample:
  """Takes some values by index, as a reshape would gather a split array."""
  size = math.prod(array.shape)
  stride = max(1, size // _SAMPLED)
  index = np.unravel_index(np.arange(0, size, stride), array.shape)
  return _Sample(array.shape, np.asarray(array[index]))
