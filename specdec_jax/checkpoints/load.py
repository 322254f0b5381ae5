"""Parameters from wherever they are: one function for every kind."""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax.numpy as jnp

from specdec_jax.checkpoints import orbax_params, scanned, t5x
from specdec_jax.checkpoints.disk_arrays import (
  DiskArray,
  Params,
  Shardings,
  check_config_fits,
  load_arrays,
)
from specdec_jax.checkpoints.huggingface import open_huggingface
from specdec_jax.checkpoints.huggingface_arrays import CONFIG
from specdec_jax.files.locations import Location, few, open_location
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.t5 import T5Config

T5X_FILE = 'checkpoint'
_STEP = re.compile(r'checkpoint_(\d+)')
_HUB_ID = re.compile(r'[\w-][\w.-]*(/[\w-][\w.-]*)?')
_KINDS = (
  f"T5X's file {T5X_FILE!r}, Orbax's {orbax_params.METADATA!r} or Hugging"
  f" Face's {CONFIG!r}"
)


def load(
  path: str | os.PathLike[str],
  network: LanguageModel | None = None,
  *,
  dtype: Any = None,
  sharding: Shardings = None,
) -> Params:
  """Loads the parameters of a checkpoint, of whichever kind it is.

  Known are T5X's msgpack file with all arrays inside; T5X's folder of such a
  file and TensorStore's arrays; Orbax's folder, of parameters or of T5X's
  training state; Hugging Face's folder, or its name on the hub. An optimiser's
  state is not read. Stacks that were trained as a scan become single layers.

  Arrays go to their dtype and device one after another: the host holds what
  stays there, and beside it at most twice the largest array. Missing bytes are
  always seen; changed ones only where arrays have a checksum, which are those
  that gzip compressed, as T5X does: not Orbax's, nor those inside a msgpack or
  safetensors file, nor what was compressed by blosc or zstd.

  Args:
    path: a file or folder, `gs://bucket/folder`, or an id of the hub.
    network: such as `T5(config)`: names and shapes are compared with its own
      before anything is read. Needed for scanned stacks.
    dtype: of the arrays returned; None keeps the file's.
    sharding: None for NumPy arrays on the host; a JAX Device or Sharding; a
      nested dict of these, or a function from names
      ('decoder/layers_0/mlp/wo/kernel') to them.

  Returns:
    Nested dict of arrays, named as T5X names them.

  Raises:
    ValueError: nothing is there, or nothing that is known; no memory could
      hold it (gives the bytes needed and there); an array is missing, unknown,
      there twice, of another shape or broken (names it, and the sizes in which
      the model differs); `dtype` is not a floating one, or `sharding` does not
      fit.
  """
  opened = open_checkpoint(path, network, dtype=dtype)
  return opened.read(dtype, sharding)


@dataclasses.dataclass(frozen=True)
class Opened:
  """A checkpoint whose arrays have been found and checked, but not read.

  Attributes:
    source: where it is.
    arrays: by the names that T5X gives them.
    config: the shape of its model, where the checkpoint describes it.
  """

  source: str
  arrays: Mapping[str, DiskArray]
  config: T5Config | GPTConfig | None = None

  def read(self, dtype: Any = None, sharding: Shardings = None) -> Params:
    """Reads the arrays; arguments, result and errors are those of `load`."""
    return load_arrays(self.arrays, self.source, dtype, sharding)


def open_checkpoint(
  path: str | os.PathLike[str],
  network: LanguageModel | None = None,
  *,
  described: Mapping[str, Any] | None = None,
  dtype: Any = None,
) -> Opened:
  """Finds the arrays of a checkpoint of whichever kind.

  Args:
    path: as of `load`.
    network: likewise.
    described: config.json of a Hugging Face folder, where it has been read.
    dtype: that the arrays will have, to see whether they can fit in memory.

  Raises:
    ValueError: as `load`, but for what is seen only when arrays are read.
  """
  check_dtype(dtype)
  check_network(network, dtype)
  location = locate(path)
  if is_huggingface(location):
    config, found = open_huggingface(location.path, network, described, dtype)
    return Opened(location.path, found, config)
  return Opened(str(location), open_arrays(location, network))


def locate(path: str | os.PathLike[str]) -> Location:
  """Returns the file or folder of one checkpoint; fetches what is on the hub.

  Raises:
    ValueError: there is none, or there are several.
  """
  location = open_location(path)
  if not location.exists():
    if not _may_be_on_the_hub(path):
      raise ValueError(
        f'No checkpoint could be read at {str(location)!r}: No such file or'
        ' folder.'
      )
    from specdec_jax.checkpoints import huggingface_fetch

    try:
      return Location(os.fspath(huggingface_fetch.fetch(os.fspath(path))))
    except ValueError as error:
      raise ValueError(
        f'No checkpoint could be read at {str(location)!r}: No such file or'
        f' folder; and on the Hugging Face hub: {error}'
      ) from error
  if location.is_folder():
    _check_single(location)
  return location


def is_huggingface(location: Location) -> bool:
  """Whether this is a folder of Hugging Face's."""
  return location.is_folder() and CONFIG in location.names()


def open_arrays(
  location: Location, network: LanguageModel | None = None
) -> dict[str, DiskArray]:
  """Finds the parameters of a T5X or Orbax checkpoint without reading them.

  Raises:
    ValueError: as `load`.
  """
  source = str(location)
  if not location.is_folder():
    arrays = t5x.open_t5x(location)
  elif orbax_params.is_orbax(location):
    arrays = orbax_params.open_orbax(location)
  else:
    arrays = t5x.open_t5x(location.child(T5X_FILE))
  for name, array in arrays.items():
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(
        f'{source!r}: {name} is {array.dtype}, expected floating-point numbers.'
      )
  if network is None:
    if scanned.is_scanned(arrays):
      raise ValueError(
        f'{source!r} has all layers of a stack in one array; give the network,'
        ' whose shapes tell how to cut them.'
      )
    return arrays
  expected = param_shapes(network)
  if scanned.is_scanned(arrays):
    shapes = t5x.shapes_of(flax.traverse_util.flatten_dict(expected, sep='/'))
    heads = getattr(getattr(network, 'config', None), 'num_heads', None)
    arrays = scanned.unroll(arrays, shapes, heads, source)
  t5x.check_params(arrays, expected, repr(source))
  return arrays


def check_dtype(dtype: Any) -> None:
  """Raises ValueError unless `dtype` is None or a floating one."""
  try:
    known = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    known = False
  if not known:
    raise ValueError(
      f"dtype must be a floating one, such as 'bfloat16', got {dtype!r}."
    )


def check_network(network: LanguageModel | None, dtype: Any = None) -> None:
  """Checks a network before any of its arrays is thought of; see `load`.

  Raises:
    ValueError: it is none, or no memory could hold it.
  """
  if network is None:
    return
  if not callable(getattr(network, 'init', None)):
    raise ValueError(
      f'Expected a network, such as T5(T5Config(...)) (gin: %T5_1_1_XL), got'
      f' {network!r}.'
    )
  config = getattr(network, 'config', None)
  check_config_fits(config, 'The network', dtype)


def _check_single(folder: Location) -> None:
  """Raises ValueError unless the folder is one checkpoint."""
  names = folder.names()
  if CONFIG in names or T5X_FILE in names or orbax_params.is_orbax(folder):
    return
  steps = [int(m[1]) for name in names if (m := _STEP.fullmatch(name))]
  if steps:
    newest = folder.child(f'checkpoint_{max(steps)}')
    found = ', '.join(f'checkpoint_{step}' for step in sorted(steps))
    raise ValueError(
      f'{str(folder)!r} holds {found}; name one of them. The newest is'
      f' {str(newest)!r}.'
    )
  raise ValueError(
    f'{str(folder)!r} is no checkpoint: expected {_KINDS} in it, found'
    f' {few(names)}.'
  )


def _may_be_on_the_hub(path: str | os.PathLike[str]) -> bool:
  """Whether a path that leads nowhere looks like an id of the hub."""
  if not isinstance(path, str) or not _HUB_ID.fullmatch(path):
    return False
  # A mistyped name beside other files is a path.
  return not path.endswith('.msgpack') and not os.path.isdir(
    os.path.dirname(path)
  )
