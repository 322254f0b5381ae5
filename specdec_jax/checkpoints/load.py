"""Loads parameters from checkpoints of all supported kinds."""

import contextlib
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.checkpoints import disk_arrays, huggingface, orbax, t5x
from specdec_jax.checkpoints.config_json import ABOUT, CONFIG, FolderFacts
from specdec_jax.checkpoints.disk_arrays import Arrays, Dtype, Params, Shardings
from specdec_jax.checks.fields import unexpected
from specdec_jax.files import shipped
from specdec_jax.files.locations import Location, few, open_location
from specdec_jax.models import sizes
from specdec_jax.models.base import LanguageModel, NetworkWrapper, param_shapes
from specdec_jax.models.families import config_of
from specdec_jax.models.integers import INT8, INTEGERS, is_kernel

T5X_FILE = 'checkpoint'
# Keys of the fingerprints that a checkpoint may hold: that of a drafter's only
# target, and that of the parameters before rounding.
TARGET, MADE_OF = ABOUT
_STEP = re.compile(r'checkpoint_(\d+)')
_HUB_ID = re.compile(r'([\w-][\w.-]*(/[\w-][\w.-]*)?)(@[\w./-]+)?')


def load(
  path: disk_arrays.Path,
  network: LanguageModel | None = None,
  *,
  dtype: Dtype = None,
  sharding: Shardings = None,
) -> Params:
  """Loads the parameters of a checkpoint of any supported kind.

  The kinds are T5X's msgpack file with all arrays inside; T5X's folder with
  such a file and TensorStore's arrays; Orbax's folder of parameters, or of
  T5X's training state; a Hugging Face folder, or its id on the hub. An
  optimiser's state is not read. Stacks that were trained as a scan become
  single layers.

  Arrays are cast and moved to their device one after another. Besides the
  arrays that stay there, the host holds at most twice the largest array.
  Missing bytes are always noticed. Changed bytes are noticed only in arrays
  with a checksum, which are those that T5X has compressed by gzip. They are not
  noticed in Orbax's arrays, in msgpack or safetensors files, or in arrays
  compressed by blosc or zstd.

  Args:
    path: a file or folder, `gs://bucket/folder`, or an id of the hub, such as
      'google/flan-t5-small', or 'google/x@main' for a branch, tag or commit.
    network: such as `T5(config)`. Its names and shapes are compared with the
      checkpoint's before arrays are read. Checkpoints with scanned stacks need
      a network; for others it may be None.
    dtype: dtype of the arrays returned; None keeps the file's. 'int8' and
      'int4' apply to kernels, which then come with their scales, see
      `models.integers`. Kernels that `convert` wrote as int8 are read unchanged
      or converted to floats or int4.
    sharding: None for NumPy arrays on the host; a JAX Device or Sharding, or a
      function from names ('decoder/layers_0/mlp/wo/kernel') to them.

  Returns:
    Nested dict of arrays, with T5X's names.

  Raises:
    ValueError: there is no checkpoint of a supported kind; it does not fit into
      memory (the message has the bytes needed and available); an array is
      missing, unknown, there twice, of another shape or broken (the message
      names it, and the sizes in which the model differs); `dtype` is not a
      floating-point type; or `sharding` does not fit.
  """
  return open_checkpoint(path, network, dtype=dtype).read(dtype, sharding)


class Opened(NamedTuple):
  """A checkpoint whose arrays have been found and checked, but not read.

  Attributes:
    source: path or address of the checkpoint.
    arrays: T5X's name -> array.
    facts: the facts of a Hugging Face folder; None for other checkpoints.
    about: the texts that are stored with the arrays, such as the fingerprints
      `TARGET` and `MADE_OF`; {} if the checkpoint has none.
  """

  source: str
  arrays: Arrays
  facts: FolderFacts | None
  about: Mapping[str, str]

  @property
  def is_rounded(self) -> bool:
    """Whether the kernels on disk have eight bits, as `convert` writes."""
    return any(array.dtype == INT8 for array in self.arrays.values())

  def made_of(self) -> tuple[str, ...]:
    """Returns the fingerprints of the parameters, on disk and before rounding.

    For a rounded checkpoint this is only the fingerprint from before it was
    rounded, or () if that is unknown. For other checkpoints all arrays are
    read, one at a time.

    Raises:
      ValueError: an array cannot be read.
    """
    before = (self.about[MADE_OF],) if MADE_OF in self.about else ()
    if self.is_rounded:
      return before
    return (disk_arrays.fingerprint_on_disk(self.arrays), *before)

  def read(self, dtype: Dtype = None, sharding: Shardings = None) -> Params:
    """Reads the arrays; arguments and result are those of `load`."""
    arrays = self.arrays
    if self.is_rounded and dtype not in (None, INT8):
      arrays = disk_arrays.in_floats(arrays)
    return disk_arrays.load_arrays(arrays, self.source, dtype, sharding)


def open_checkpoint(
  path: disk_arrays.Path | Location,
  network: LanguageModel | None = None,
  *,
  dtype: Dtype = None,
  adapter: disk_arrays.Path | None = None,
) -> Opened:
  """Finds the arrays of a checkpoint, without reading them.

  Args:
    path: as for `load`, or the result of `locate`.
    network: as for `load`.
    dtype: dtype in which the arrays must fit into memory.
    adapter: folder of a LoRA adapter to merge, see `huggingface`.

  Raises:
    ValueError: as for `load`, except errors of reading arrays.
  """
  check_dtype(dtype)
  check_network(network, dtype)
  location = path if isinstance(path, Location) else locate(path)
  source, about = str(location), object()
  facts: FolderFacts | None = None
  arrays: Arrays
  if is_huggingface(location):
    facts, arrays = huggingface.open_huggingface(
      location.path, network, dtype, adapter
    )
    if adapter is None:
      about = {n: facts.described.get(field) for n, field in ABOUT.items()}
  elif adapter is not None:
    expected = 'a Hugging Face folder, whose names an adapter goes by'
    advice = 'Write one first (specdec convert --format safetensors).'
    raise unexpected(source, expected, 'another checkpoint', advice)
  else:
    is_folder = location.is_folder()
    if is_folder and orbax.item_of(location):
      arrays, about = orbax.open_orbax(location)
    else:
      file = location.child(T5X_FILE) if is_folder else location
      arrays, about = t5x.open_t5x(file)
    arrays = _checked(arrays, network, source)
  entries = about.items() if isinstance(about, dict) else ()
  texts = {name: text for name, text in entries if isinstance(text, str)}
  return Opened(source, arrays, facts, texts)


def locate(path: disk_arrays.Path, revision: str | None = None) -> Location:
  """Finds the file or folder of one checkpoint, or fetches it from the hub.

  Raises:
    ValueError: there is no checkpoint, or there are several; or a revision is
      given for a path, or for an id that has one already.
  """
  location, name = open_location(shipped.model(path)), os.fspath(path)
  if revision is not None:
    if location.exists() or '@' in name:
      no_id = f'None: {name!r} is no id of the hub, or has its own'
      raise unexpected('revision', no_id, revision)
    name = f'{name}@{revision}'
    location = open_location(name)
  missing = f'No checkpoint could be read at {str(location)!r}'
  if problem := location.problem():
    raise ValueError(f'{missing}: {problem}.')
  if not location.exists():
    missing += ': No such file or folder'
    match = _HUB_ID.fullmatch(name)
    is_file = not match or match[1].endswith('.msgpack')
    # A name that begins with an existing folder counts as a mistyped path.
    is_file = is_file or os.path.isdir(os.path.dirname(name.partition('@')[0]))
    if is_file or not (isinstance(path, str) or revision is not None):
      raise ValueError(f'{missing}.')
    try:
      return Location(os.fspath(huggingface.fetch(name)))
    except ValueError as error:
      missing += f'; and on the Hugging Face hub: {error}'
      raise ValueError(missing) from error
  if location.is_folder():
    _check_single(location)
  return location


def is_huggingface(location: Location) -> bool:
  """Whether this is a Hugging Face folder."""
  return location.is_folder() and CONFIG in location.names()


def _checked(
  arrays: Arrays, network: LanguageModel | None, source: str
) -> Arrays:
  """Splits scanned stacks into layers, and compares arrays with a network."""
  factors = _check_dtypes(arrays, source)
  if network is None:
    if t5x.is_scanned(arrays):
      why = f'{source!r} has all layers of a stack in one array'
      raise ValueError(f'{why}: give the network, which says how to cut it.')
    return arrays
  expected = param_shapes(network)
  if t5x.is_scanned(arrays):
    config = config_of(network)
    heads = config.shape.decoder.num_heads if config else None
    arrays = t5x.unroll(arrays, t5x.shapes_of(expected), heads, source)
  alone = {name: arrays[name] for name in arrays.keys() - factors}
  t5x.check_params(alone, expected, repr(source))
  return arrays


def _check_dtypes(arrays: Arrays, source: str) -> set[str]:
  """Checks that arrays are floats, or kernels of eight bits with scales.

  Returns:
    The names of the scales.

  Raises:
    ValueError: an array has another dtype, or scales do not fit their kernel;
      the message names the array.
  """
  factors = set()
  for name, array in arrays.items():
    if array.dtype == INT8 and is_kernel(name) and len(array.shape) == 2:
      factors.add(f'{name}_scale')
      factor = arrays.get(f'{name}_scale')
      shape = None if factor is None else list(factor.shape)
      if shape != list(array.shape[1:]):
        expected = f'{list(array.shape[1:])} beside its kernel of eight bits'
        advice = 'Convert the checkpoint of floats again.'
        raise unexpected(f'{source}: {name}_scale', expected, shape, advice)
    elif not jnp.issubdtype(array.dtype, jnp.floating):
      floats = 'floating-point numbers'
      raise unexpected(f'{source}: {name}', floats, str(array.dtype))
  return factors


def check_dtype(dtype: Dtype) -> None:
  """Raises ValueError unless a dtype is None, of floats, 'int8' or 'int4'."""
  with contextlib.suppress(TypeError):
    known = dtype in (None, *INTEGERS)
    if known or jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
      return
  expected = "a floating-point type, such as 'bfloat16', or 'int8' or 'int4'"
  raise unexpected('dtype', expected, dtype)


def check_network(network: LanguageModel | None, dtype: Dtype = None) -> None:
  """Checks a network before any of its arrays is made or read.

  Raises:
    ValueError: it is not a network, or does not fit into any memory.
  """
  if not isinstance(network, LanguageModel | NetworkWrapper | None):
    expected = 'a network, such as T5(T5Config(...)) (gin: %T5_1_1_XL)'
    raise unexpected('network', expected, network)
  itemsize = 2 if dtype is None else jnp.dtype(dtype).itemsize
  sizes.check_params(config_of(network), 'The network', itemsize)


def _check_single(folder: Location) -> None:
  """Raises ValueError unless the folder is one checkpoint."""
  names = folder.names()
  if CONFIG in names or T5X_FILE in names or orbax.item_of(folder):
    return
  steps = sorted(int(m[1]) for name in names if (m := _STEP.fullmatch(name)))
  if steps:
    several = [f'checkpoint_{step}' for step in steps]
    advice = f'The newest is {str(folder.child(several[-1]))!r}.'
    raise unexpected(str(folder), 'one checkpoint', ', '.join(several), advice)
  kinds = f"T5X's {T5X_FILE!r}, Orbax's {orbax.METADATA!r} or Hugging Face's"
  raise unexpected(str(folder), f'{kinds} {CONFIG!r} in it', few(names))
