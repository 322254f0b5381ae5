"""A T5 made deeper, without a change of what it says.

The layers that are added begin as copies of the layer below them whose blocks
write nothing to the residual stream: their output kernels are zero (the
function-preserving growth of Chen et al. 2016, Net2Net; Gong et al. 2019). What
they read is then already useful when training begins to use it.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from specdec_jax.models.base import Params
from specdec_jax.models.t5 import T5Config
from specdec_jax.training.slicing import WRITERS

_STACKS = {'encoder': 'num_encoder_layers', 'decoder': 'num_decoder_layers'}


def grown(params: Params, small: T5Config, large: T5Config) -> Params:
  """Returns parameters of `large` that compute what `params` compute.

  Args:
    params: parameters of a T5 with `small`'s sizes, T5X's names.
    small: the sizes that are there.
    large: the sizes to grow to: more layers, all else as in `small`.

  Returns:
    float32 NumPy arrays with T5X's names; old layers are spread evenly among
    the new ones.

  Raises:
    ValueError: the sizes differ in more than layers, or `large` has fewer.
  """
  _check(small, large)
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
  result: dict[str, Any] = {**params}
  for stack, field in _STACKS.items():
    have, want = getattr(small, field), getattr(large, field)
    old = params[stack]
    rest = {k: v for k, v in old.items() if not k.startswith('layers_')}
    for new in range(want):
      # An old layer stands at the first of the places that have its quotient.
      source = new * have // want
      layer = old[f'layers_{source}']
      is_first = new == 0 or (new - 1) * have // want < source
      rest[f'layers_{new}'] = layer if is_first else _silent(layer)
    result[stack] = rest
  return result


def _silent(layer: Params) -> Params:
  """The layer, with output kernels of zero."""

  def written(path, leaf):
    writes = any(key.key in WRITERS for key in path)
    return np.zeros_like(leaf) if writes else leaf

  return jax.tree_util.tree_map_with_path(written, layer)


def _check(small: T5Config, large: T5Config) -> None:
  layers = {name: getattr(large, name) for name in _STACKS.values()}
  fewer = [name for name in layers if layers[name] < getattr(small, name)]
  if dataclasses.replace(small, **layers) != large or fewer:
    raise ValueError(
      'A model grows by layers alone: expected the sizes of its first'
      f' checkpoint with as many layers or more, got {large} after {small}.'
    )
