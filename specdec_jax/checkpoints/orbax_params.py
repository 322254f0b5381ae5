"""Parameters in Orbax's format; also in T5X's training states of that format.

Orbax writes them. TensorStore reads them, as it does T5X's own format: arrays
are found in `_METADATA`, and only those of the parameters are opened.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import jax

from specdec_jax import files
from specdec_jax.checkpoints.disk_arrays import (
  DiskArray,
  Params,
  broken,
  open_stored,
)
from specdec_jax.files.locations import Location

METADATA = '_METADATA'
# Names that T5X, and Orbax itself, give a tree inside a checkpoint.
_ITEMS = ('state', 'default')
_METADATA_BYTES = 256 << 20  # limit; Orbax writes some 200 bytes per array
_TEMPORARY = '.orbax-checkpoint-tmp'
# Parameters inside a larger tree: T5X's training state, flax's variables.
_PARAMS = ('target', 'params')


def save_orbax(
  folder: str | os.PathLike[str],
  params: Params,
  about: Mapping[str, str] | None = None,
) -> None:
  """Writes parameters to a new folder, whole or not at all.

  Each process of a run writes its own shards.

  Args:
    folder: made here; it must not exist yet, or be empty.
    params: nested dict of arrays, NumPy's or JAX's.
    about: what else the folder is to say, for `read_about`.

  Raises:
    ValueError: the folder holds something, or there are no parameters.
    OSError: the disk is full or the folder not writable.
  """
  if not jax.tree.leaves(params):
    raise ValueError('There are no parameters to save.')
  folder = os.path.abspath(os.fspath(folder))
  if os.path.isdir(folder) and not os.listdir(folder):
    os.rmdir(folder)
  if os.path.exists(folder):
    raise ValueError(
      f'{folder!r} exists already; name a new folder or remove it.'
    )
  import orbax.checkpoint as ocp

  os.makedirs(os.path.dirname(folder), exist_ok=True)
  # Orbax writes to a folder with a temporary name and renames it at the end.
  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
    checkpointer.save(
      folder,
      args=ocp.args.StandardSave(params, custom_metadata=dict(about or {})),
    )


def open_orbax(folder: Location) -> dict[str, DiskArray]:
  """Finds the parameters of a checkpoint without reading them.

  Args:
    folder: folder with `_METADATA` in it, or in its folder `state` or
      `default`.

  Returns:
    name -> array, names with slashes.

  Raises:
    ValueError: writing the folder was not finished, its tree has no parameters,
      or an array is missing (the message names it).
  """
  source = str(folder)
  if _TEMPORARY in source:
    raise ValueError(
      f'Writing {source!r} was never finished; load another checkpoint.'
    )
  folder = _item(folder) or folder
  described, keys = _read_metadata(folder)
  names = _parameters(keys, source)
  root = folder.kvstore()
  together = 'manifest.ocdbt' in folder.names()
  specs = {}
  for name, key in names.items():
    kvstore = {**root, 'path': f'{root["path"]}{key}/'}
    if together:
      kvstore = {'driver': 'ocdbt', 'base': root, 'path': f'{key}/'}
    driver = 'zarr3' if described.get('use_zarr3') else 'zarr'
    specs[name] = {'driver': driver, 'kvstore': kvstore}
  return dict(open_stored(specs, lambda n, why: broken(source, n, why)))


def read_about(folder: Location) -> dict[str, Any]:
  """What `save_orbax` was told to write beside the parameters; {} is nothing.

  Raises:
    ValueError: as for `open_orbax`.
  """
  described, _ = _read_metadata(_item(folder) or folder)
  about = described.get('custom_metadata')
  return about if isinstance(about, dict) else {}


def is_orbax(folder: Location) -> bool:
  """Whether a folder holds an Orbax checkpoint."""
  return _item(folder) is not None


def _item(folder: Location) -> Location | None:
  """The folder of the tree itself."""
  names = folder.names()
  if METADATA in names:
    return folder
  for name in _ITEMS:
    if name in names and METADATA in folder.child(name).names():
      return folder.child(name)
  return None


def _read_metadata(folder: Location) -> tuple[dict[str, Any], list[list[str]]]:
  """The contents of `_METADATA`, and each array's path in the tree."""
  location = folder.child(METADATA)
  try:
    files.check_size(str(location), location.size(), _METADATA_BYTES)
    described = json.loads(location.read(0, location.size()))
    keys = [
      [str(key['key']) for key in entry['key_metadata']]
      for entry in described['tree_metadata'].values()
    ]
    if not all(keys):
      raise ValueError('an array without a name')
    return described, keys
  except (
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
  ) as error:
    raise ValueError(
      f'{str(location)!r} is cut short or not what Orbax writes'
      f' ({type(error).__name__}: {error}); copy it again.'
    ) from error


def _parameters(keys: list[list[str]], source: str) -> dict[str, str]:
  """Names of parameters -> Orbax's names of their arrays."""
  trees: dict[str, dict[str, str]] = {}
  for parts in keys:
    trees.setdefault(parts[0], {})['/'.join(parts[1:])] = '.'.join(parts)
  for root in _PARAMS:
    if root in trees:
      return trees[root]
  if not trees:
    raise ValueError(f'{source!r} is an Orbax checkpoint without any array.')
  return {
    f'{root}/{name}'.rstrip('/'): key
    for root, tree in trees.items()
    for name, key in tree.items()
  }
