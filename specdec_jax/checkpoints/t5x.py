"""T5X's own checkpoints: a msgpack file, alone or with TensorStore's folders.

The tree is {'version': 3, 'optimizer': {'target': parameters, 'state':
{'step', 'param_states'}}}. Parameter names are T5X's, so nothing is renamed. A
leaf is an array inside the file, or the specification of an array in a folder
beside it. Only driver and path are taken from a specification: its bucket may
be a dummy, the path is relative to the checkpoint, and everything else is in
the array's folder.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints import t5x_sizes
from specdec_jax.checkpoints.disk_arrays import (
  DiskArray,
  FileArray,
  Params,
  broken,
  open_stored,
)
from specdec_jax.checkpoints.t5x_msgpack import read_tree
from specdec_jax.files.locations import Location

VERSION = 3
_READABLE = (2, 3)
_SHOWN = 8
_DRIVERS = ('zarr', 'zarr3')
_KVSTORES = ('file', 'gfile', 'gcs')
_TENSORFLOW = b'model_checkpoint_path'


def save_t5x(
  path: str | os.PathLike[str],
  params: Params,
  step: int,
  dtype: Any = None,
  about: Mapping[str, str] | None = None,
) -> None:
  """Writes parameters to the single file `path`, whole or not at all.

  Args:
    path: the file; its folder is made if needed.
    params: nested dict of arrays.
    step: number of updates that the parameters have had.
    dtype: dtype of the floating-point arrays on disk, e.g. jnp.bfloat16; None
      keeps theirs.
    about: what else the file is to say, for `read_about`, such as 'target',
      the `fingerprint` of the only target that a drafter is for; readers of
      T5X's format do not look at it.

  Raises:
    OSError: the disk is full or the folder not writable.
  """

  def to_disk(leaf):
    array = np.asarray(leaf)
    if dtype is not None and jnp.issubdtype(array.dtype, jnp.floating):
      array = array.astype(dtype)
    return array

  tree: dict[str, Any] = {
    'version': VERSION,
    'optimizer': {
      'target': jax.tree.map(to_disk, params),
      'state': {'step': np.asarray(step, np.int32), 'param_states': {}},
    },
  }
  if about is not None:
    tree['about'] = dict(about)
  path = os.fspath(path)
  os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
  files.write_atomically(path, flax.serialization.msgpack_serialize(tree))


def read_about(location: Location) -> dict[str, Any]:
  """What `save_t5x` was told to write beside the parameters; {} is nothing.

  Raises:
    ValueError: the file is missing, cut short, or not msgpack.
  """
  tree = read_tree(location)
  about = tree.get('about') if isinstance(tree, dict) else None
  return about if isinstance(about, dict) else {}


def open_t5x(location: Location) -> dict[str, DiskArray]:
  """Finds the parameters of a checkpoint without reading them.

  The optimiser's state is neither opened nor needed.

  Args:
    location: the msgpack file; T5X calls it `checkpoint`, in a folder of its
      own.

  Returns:
    name -> array, names with slashes.

  Raises:
    ValueError: the file is missing, cut short or not a T5X checkpoint; or an
      array's folder is missing or does not fit the file (the message names the
      array).
  """
  source = str(location)
  if location.read(0, len(_TENSORFLOW)) == _TENSORFLOW:
    raise ValueError(
      f'{source!r} is a TensorFlow checkpoint of T5; expected the same model'
      " in T5X's format, see gs://t5-data/pretrained_models/t5x."
    )
  leaves = dict(_leaves(_target(read_tree(location), source)))
  if not leaves:
    raise ValueError(f'{source!r} is a T5X checkpoint without any parameter.')
  specs = {}
  for name, leaf in leaves.items():
    if isinstance(leaf, Mapping):
      specs[name] = _resolve(leaf, location.parent(), name, source)
    elif not isinstance(leaf, FileArray):
      raise ValueError(
        f'{source!r}: parameter {name!r} is not an array but'
        f' {type(leaf).__name__}.'
      )
  stored = {}
  if specs:
    stored = open_stored(specs, lambda n, why: broken(source, n, why))
  for name, array in stored.items():
    metadata = leaves[name].get('metadata') or {}
    if not isinstance(metadata, Mapping):
      raise broken(
        source,
        name,
        f'its metadata are {type(metadata).__name__}, expected a dict',
      )
    said = metadata.get('shape')
    if said is not None and said != list(array.shape):
      raise broken(
        source,
        name,
        f'its folder has {list(array.shape)}, the file says {said}',
      )
  return {name: stored.get(name, leaf) for name, leaf in leaves.items()}


def check_params(params: Params, expected: Any, source: str = 'params') -> None:
  """Compares names and shapes with what a model expects.

  Args:
    params: nested dict of arrays, or of anything with a shape.
    expected: the model's tree of anything with a shape, e.g. from
      `jax.eval_shape(model.init, key)`.
    source: where `params` came from, for the message.

  Raises:
    ValueError: they differ; the message has each parameter that is missing,
      unknown, or of another shape, with both shapes, and the sizes of a T5 that
      differ.
  """
  have = flax.traverse_util.flatten_dict(params, sep='/')
  want = flax.traverse_util.flatten_dict(expected, sep='/')
  shapes = [
    f'{name} is {list(have[name].shape)}, expected {list(leaf.shape)}'
    for name, leaf in want.items()
    if name in have and tuple(have[name].shape) != tuple(leaf.shape)
  ]
  problems = [
    _listed('missing', sorted(want.keys() - have.keys())),
    _listed('unknown', sorted(have.keys() - want.keys())),
    _listed('wrong shape', shapes),
  ]
  if any(problems):
    sizes = t5x_sizes.differences(shapes_of(have), shapes_of(want))
    raise ValueError(
      f'The parameters of {source} are not those of this model'
      f' configuration: {"; ".join(filter(None, [sizes, *problems]))}.'
    )


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  return {name: tuple(array.shape) for name, array in arrays.items()}


def _target(tree: Any, source: str) -> Any:
  """The parameters in the tree of a file."""
  try:
    target = tree['optimizer']['target']
  except (KeyError, TypeError, IndexError) as error:
    if not isinstance(tree, dict):
      raise ValueError(
        f'{source!r} is cut short or not a T5X checkpoint: expected a tree,'
        f' found {type(tree).__name__}.'
      ) from error
    raise ValueError(
      f'{source!r} is a msgpack file but not a T5X checkpoint: expected'
      f' optimizer/target inside, found {sorted(tree)[:_SHOWN]}.'
    ) from error
  if tree.get('version', 0) not in _READABLE:
    raise ValueError(
      f'{source!r} is a T5X checkpoint of version {tree.get("version", 0)},'
      f' expected one of {_READABLE}.'
    )
  if not isinstance(target, dict):
    raise ValueError(
      f'{source!r}: optimizer/target is {type(target).__name__}, expected a'
      ' tree of parameters.'
    )
  return target


def _leaves(
  tree: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  for name, value in tree.items():
    is_spec = isinstance(value, Mapping) and {'driver', 'kvstore'} <= set(value)
    if isinstance(value, Mapping) and not is_spec:
      yield from _leaves(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value


def _resolve(
  spec: Mapping[str, Any], folder: Location, name: str, source: str
) -> dict[str, Any]:
  """TensorStore's specification of an array of this checkpoint."""
  kvstore = spec['kvstore'] if isinstance(spec['kvstore'], Mapping) else {}
  # TensorStore before 0.1.14 had the path beside the kvstore.
  path = kvstore.get('path', spec.get('path'))
  if (
    spec['driver'] not in _DRIVERS
    or kvstore.get('driver') not in _KVSTORES
    or not isinstance(path, str)
  ):
    raise ValueError(
      f'{source!r}: the specification of {name} has driver'
      f' {spec["driver"]!r}, kvstore {kvstore.get("driver")!r} and path'
      f' {path!r}; expected driver {" or ".join(_DRIVERS)}, kvstore'
      f' {", ".join(_KVSTORES)} and a path.'
    )
  where = folder.kvstore()
  where['path'] += path.rstrip('/') + '/'
  return {'driver': spec['driver'], 'kvstore': where}


def _listed(kind: str, names: list[str]) -> str:
  if not names:
    return ''
  more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
  return f'{kind}: {", ".join(names[:_SHOWN])}{more}'
