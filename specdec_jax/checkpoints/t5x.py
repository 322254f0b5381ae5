"""T5X's single-file checkpoints: one msgpack file with all arrays inline.

The tree is {'version': 3, 'optimizer': {'target': parameters, 'state':
{'step', 'param_states'}}}. Parameter names are T5X's, so nothing is renamed.
"""

import os
from collections.abc import Mapping
from typing import Any

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import msgpack
import numpy as np

from specdec_jax import files

VERSION = 3
_SHOWN = 8

Params = dict[str, Any]


def save_t5x(
  path: str | os.PathLike[str],
  params: Params,
  step: int,
  dtype: Any = None,
) -> None:
  """Writes parameters to `path`, whole or not at all.

  Args:
    path: the file; its folder is made if needed.
    params: nested dict of arrays.
    step: number of updates they have had.
    dtype: of the floating-point arrays on disk, e.g. jnp.bfloat16; None keeps
      theirs.

  Raises:
    OSError: the disk is full or the folder not writable.
  """

  def to_disk(leaf):
    array = np.asarray(leaf)
    if dtype is not None and jnp.issubdtype(array.dtype, jnp.floating):
      array = array.astype(dtype)
    return array

  tree = {
    'version': VERSION,
    'optimizer': {
      'target': jax.tree.map(to_disk, params),
      'state': {'step': np.asarray(step, np.int32), 'param_states': {}},
    },
  }
  path = os.fspath(path)
  os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
  files.write_atomically(path, flax.serialization.msgpack_serialize(tree))


def load_params(path: str | os.PathLike[str], dtype: Any = None) -> Params:
  """Parameters of a single-file checkpoint.

  Args:
    path: the file.
    dtype: of the floating-point arrays returned; None keeps the file's.

  Returns:
    Nested dict of NumPy arrays, named as T5X names them.

  Raises:
    ValueError: the file is missing, cut short, or not such a checkpoint.
  """
  path = os.fspath(path)
  params = _read_target(path)
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  if not flat:
    raise ValueError(f'{path!r} is a T5X checkpoint without any parameter.')
  for name, leaf in flat.items():
    if isinstance(leaf, Mapping) or not hasattr(leaf, 'dtype'):
      raise ValueError(
        f'{path!r}: parameter {name!r} is not an array but'
        f' {type(leaf).__name__}; expected all arrays in the one file.'
      )
    if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
      flat[name] = leaf.astype(dtype)
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def check_params(params: Params, expected: Any, source: str = 'params') -> None:
  """Compares names and shapes with what a model expects.

  Args:
    params: nested dict of arrays.
    expected: the model's tree of anything with a shape, e.g. from
      `jax.eval_shape(model.init, key)`.
    source: where `params` came from, for the message.

  Raises:
    ValueError: names each parameter that is missing, unknown, or of another
      shape, with both shapes.
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
    raise ValueError(
      f'The parameters of {source} are not those of this model'
      f' configuration: {"; ".join(filter(None, problems))}.'
    )


def _read_target(path: str) -> Params:
  if os.path.isdir(path):
    raise ValueError(
      f'{path!r} is a folder; expected a single-file T5X checkpoint.'
    )
  try:
    with open(path, 'rb') as stream:
      data = stream.read()
  except OSError as error:
    raise ValueError(
      f'No checkpoint could be read at {path!r}: {error.strerror}.'
    ) from error
  try:
    tree = flax.serialization.msgpack_restore(data)
  except (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    msgpack.exceptions.UnpackException,
  ) as error:
    raise ValueError(
      f'{path!r} ({len(data)} bytes) is cut short or no T5X checkpoint'
      f' ({type(error).__name__}: {error}); copy it again.'
    ) from error
  try:
    target = tree['optimizer']['target']
  except (KeyError, TypeError, IndexError) as error:
    found = sorted(tree)[:_SHOWN] if isinstance(tree, dict) else type(tree)
    raise ValueError(
      f'{path!r} is a msgpack file but no T5X checkpoint: expected'
      f' optimizer/target inside, found {found}.'
    ) from error
  if not isinstance(target, dict):
    raise ValueError(
      f'{path!r}: optimizer/target is {type(target).__name__}, expected a'
      ' tree of parameters.'
    )
  return target


def _listed(kind: str, names: list[str]) -> str:
  if not names:
    return ''
  more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
  return f'{kind}: {", ".join(names[:_SHOWN])}{more}'
