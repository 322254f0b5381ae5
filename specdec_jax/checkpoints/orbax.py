"""Reads and writes parameters in Orbax's format.

The package Orbax writes this format. TensorStore reads it, also T5X's training
states: `_METADATA` lists the arrays, and only parameters are opened. Importing
Orbax takes seconds, so it is imported only for writing.
"""

import json
import os
from typing import Any

import jax

from specdec_jax.checkpoints import disk_arrays
from specdec_jax.checkpoints.disk_arrays import About, DiskArray, Params, Path
from specdec_jax.checks.fields import unexpected
from specdec_jax.files.locations import Location

METADATA = '_METADATA'
# The folder of a checkpoint that holds its arrays has one of these names, the
# first in T5X, the second in Orbax.
_ITEMS = ('state', 'default')
# The largest metadata that are read, in bytes. Orbax writes about 200 bytes per
# array.
_METADATA_BYTES = 256 << 20
_TEMPORARY = '.orbax-checkpoint-tmp'
# Names of the parameters in a larger tree, which is T5X's training state or
# Flax's variables.
_PARAMS = ('target', 'params')


def save_orbax(folder: Path, params: Params, about: About = None) -> None:
  """Writes parameters to a new folder, whole or not at all.

  Each process of a run writes its own shards.

  Args:
    folder: a new or empty folder.
    params: nested dict of arrays of NumPy or JAX.
    about: more texts to write, which `open_orbax` returns.

  Raises:
    ValueError: the folder is not empty, or there are no parameters.
    OSError: the disk is full or the folder not writable.

  Examples:
    >>> import jax
    >>> sizes = sd.GPTConfig(
    ...   vocab_size=100,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ... )
    >>> network = sd.GPT(sizes)
    >>> sd.save_orbax('toy', network.init(jax.random.key(0)))
    >>> sd.load('toy', network)
    Model(GPT, 'toy')
  """
  if not jax.tree.leaves(params):
    raise unexpected('params', 'arrays', params)
  folder = os.path.abspath(os.fspath(folder))
  if os.path.isdir(folder) and not os.listdir(folder):
    os.rmdir(folder)
  if os.path.exists(folder):
    raise unexpected(folder, 'a new folder', 'one with something in it')
  import orbax.checkpoint as ocp

  os.makedirs(os.path.dirname(folder), exist_ok=True)
  # Orbax writes to a folder with a temporary name and renames it at the end.
  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
    args = ocp.args.StandardSave(params, custom_metadata=dict(about or {}))
    checkpointer.save(folder, args=args)


def open_orbax(folder: Location) -> tuple[dict[str, DiskArray], Any]:
  """Finds the parameters of a checkpoint without reading them.

  Args:
    folder: folder with `_METADATA` in it, or in its folder `state` or
      `default`.

  Returns:
    The arrays by their names, which have slashes; and the `about` of
    `save_orbax`, or None.

  Raises:
    ValueError: writing the folder was not finished, its tree has no parameters,
      or an array is missing (the message names it).
  """
  source = str(folder)
  if _TEMPORARY in source:
    raise unexpected(source, 'a finished checkpoint', 'a part of one')
  folder = item_of(folder) or folder
  described, keys = _read_metadata(folder)
  if not keys:
    raise unexpected(source, 'an Orbax checkpoint with arrays', keys)
  store = folder.kvstore()
  in_one_store = 'manifest.ocdbt' in folder.names()
  driver = 'zarr3' if described.get('use_zarr3') else 'zarr'
  roots = {parts[0] for parts in keys}
  root = next((root for root in _PARAMS if root in roots), None)
  specs = {}
  for parts in keys:
    if root not in (None, parts[0]):
      continue
    path = '.'.join(parts) + '/'
    kvstore = {**store, 'path': store['path'] + path}
    if in_one_store:
      kvstore = {'driver': 'ocdbt', 'base': store, 'path': path}
    name = '/'.join(parts if root is None else parts[1:])
    specs[name] = {'driver': driver, 'kvstore': kvstore}
  arrays = disk_arrays.open_stored(specs, source)
  return arrays, described.get('custom_metadata')


def item_of(folder: Location) -> Location | None:
  """Returns the folder with the metadata; None without Orbax's format."""
  names = folder.names()
  items = [folder, *(folder.child(name) for name in _ITEMS if name in names)]
  return next((item for item in items if METADATA in item.names()), None)


def _read_metadata(folder: Location) -> tuple[dict[str, Any], list[list[str]]]:
  """Reads `_METADATA`; also returns each array's path in the tree."""
  location = folder.child(METADATA)
  try:
    described = json.loads(location.read_all(_METADATA_BYTES))
    entries = described['tree_metadata'].values()
    keys = [[str(key['key']) for key in x['key_metadata']] for x in entries]
    if not all(keys):
      raise ValueError('an array without a name')
    return described, keys
  except disk_arrays.WRONG_DATA as error:
    why = f'not what Orbax writes ({type(error).__name__}: {error})'
    why = f'{str(location)!r} is cut short or {why}; copy it again.'
    raise ValueError(why) from error
