"""Parameters from wherever they are: one function for every kind."""

import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.traverse_util
import jax
import jax.numpy as jnp

from specdec_jax.checkpoints import orbax_params, scanned, t5x
from specdec_jax.checkpoints.disk_arrays import DiskArray, load_array
from specdec_jax.checkpoints.huggingface_arrays import (
  CONFIG,
  Layouts,
  layout_of,
  read_json,
)
from specdec_jax.checks import memory
from specdec_jax.files.locations import Location, few, open_location
from specdec_jax.models import sizes
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.t5 import T5Config

Params = dict[str, Any]
# Layouts of all arrays, or a nested dict of them named as the parameters.
Shardings: TypeAlias = Layouts | Mapping[str, Any]

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
  check_dtype(dtype)
  check_network(network, dtype, sharding)
  location = locate(path)
  if is_huggingface(location):
    return load_huggingface(location, network, dtype, sharding)[1]
  arrays = open_arrays(location, network)
  return load_arrays(arrays, str(location), dtype, sharding)


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
  expected = jax.eval_shape(network.init, jax.random.key(0))
  if scanned.is_scanned(arrays):
    shapes = t5x.shapes_of(flax.traverse_util.flatten_dict(expected, sep='/'))
    heads = getattr(getattr(network, 'config', None), 'num_heads', None)
    arrays = scanned.unroll(arrays, shapes, heads, source)
  t5x.check_params(arrays, expected, repr(source))
  return arrays


def load_arrays(
  arrays: Mapping[str, DiskArray],
  source: str,
  dtype: Any = None,
  sharding: Shardings = None,
) -> Params:
  """Reads the arrays one after another; see `load`."""
  needed = sum(
    math.prod(array.shape) * jnp.dtype(dtype or array.dtype).itemsize
    for array in arrays.values()
  )
  memory.check_room(
    f'The parameters of {source!r}',
    needed,
    _there(sharding),
    'Take a smaller model, bfloat16, or more devices.',
  )
  rule = _as_rule(sharding)
  layouts = {n: layout_of(rule, n, a.shape) for n, a in arrays.items()}
  flat = {}
  for name, array in arrays.items():
    try:
      flat[name] = load_array(array, dtype, layouts[name])
    except ValueError as error:
      raise t5x.broken(source, name, str(error)) from error
  return flax.traverse_util.unflatten_dict(flat, sep='/')


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


def check_network(
  network: LanguageModel | None, dtype: Any = None, sharding: Shardings = None
) -> None:
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
  # What is unknown before the file is opened takes two bytes at least.
  bytes_each = 2 if dtype is None else jnp.dtype(dtype).itemsize
  config = getattr(network, 'config', None)
  sizes.check_params(config, bytes_each, _there(sharding), 'The network')


def _there(sharding: Shardings) -> int | None:
  """Bytes that there are for parameters: of the host, or of all devices."""
  return memory.host_bytes() if sharding is None else memory.all_bytes()


def load_huggingface(
  folder: Location,
  network: LanguageModel | None = None,
  dtype: Any = None,
  sharding: Shardings = None,
  described: Mapping[str, Any] | None = None,
) -> tuple[T5Config | GPTConfig, Params]:
  """Reads a Hugging Face folder and compares it with a network; see `load`.

  `described` is its config.json, where it has been read.
  """
  from specdec_jax.checkpoints import (
    gpt2,
    gpt2_names,
    huggingface,
    huggingface_names,
  )

  if not os.path.isdir(folder.path):
    raise ValueError(
      f'{folder.path!r} is a Hugging Face folder in a bucket; copy it to this'
      ' machine first.'
    )
  described = described or read_json(pathlib.Path(folder.path) / CONFIG)
  rule = _as_rule(sharding)
  found: T5Config | GPTConfig
  fields = {}
  if described.get('model_type') == gpt2_names.MODEL_TYPE:
    found, params = gpt2.load_gpt2(folder.path, dtype, rule, described)
    fields = {'fields': gpt2_names.FIELDS}
  else:
    huggingface.check_type(described, folder.path)
    found, params = huggingface.load_huggingface(
      folder.path, dtype, rule, described
    )
  config = getattr(network, 'config', None)
  if isinstance(config, type(found)):
    huggingface_names.check_config(found, config, folder.path, **fields)
  elif network is not None:
    expected = jax.eval_shape(network.init, jax.random.key(0))
    t5x.check_params(params, expected, repr(folder.path))
  return found, params


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


def _as_rule(sharding: Shardings) -> Any:
  """A dict of layouts as a function from names; all else as it is."""
  if not isinstance(sharding, Mapping):
    return sharding
  flat = flax.traverse_util.flatten_dict(dict(sharding), sep='/')

  def rule(name: str) -> Any:
    if name not in flat:
      raise ValueError(f'The dict of shardings has none for {name}.')
    return flat[name]

  return rule
