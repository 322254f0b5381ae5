"""A T5 of other sizes that begins with what a T5 says.

What is added changes nothing at first (the function-preserving growth of Chen
et al. 2016, Net2Net; Gong et al. 2019). An added layer is a copy of the one
below it whose output kernels are zero. In a wider one, old kernels stand in the
corner of new ones: what reads an added place does so with random numbers, and
nothing writes to it yet, so that training can begin to use it.

Fewer layers than before are evenly spaced ones. Such a model does not say the
same, but it has not forgotten the task, as one with random parameters has.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specdec_jax.models.base import Params
from specdec_jax.models.t5 import T5Config
from specdec_jax.training.slicing import WRITERS, spaced

_STACKS = {'encoder': 'num_encoder_layers', 'decoder': 'num_decoder_layers'}
_WIDTHS = ('emb_dim', 'num_heads', 'head_dim', 'mlp_dim')


def resized(params: Params, before: T5Config, after: T5Config) -> Params:
  """Returns parameters of `after` that begin as `params`.

  Where `after` has as many layers or more, it computes what `params` compute.

  Args:
    params: parameters of a T5 with the sizes of `before`, T5X's names.
    before: the sizes that are there.
    after: the sizes that are wanted: any number of layers in each stack that
      there is, the same widths or larger ones, all else as in `before`.

  Returns:
    float32 NumPy arrays with T5X's names; layers are spread evenly.

  Raises:
    ValueError: the sizes differ in something else, a width is smaller, or a
      stack is added or left out.
  """
  _check(before, after)
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
  result: dict[str, Any] = {**params}
  for stack, field in _STACKS.items():
    have, want = getattr(before, field), getattr(after, field)
    if have:
      result[stack] = _with_layers(params[stack], have, want)
  if any(getattr(before, name) != getattr(after, name) for name in _WIDTHS):
    draw = np.random.default_rng(0)
    result = _wider(result, before, after, draw, ())
    if after.logits_via_embedding:  # which divides by the root of the width
      result['decoder']['decoder_norm']['scale'] *= np.sqrt(
        np.float32(after.emb_dim / before.emb_dim)
      )
  return result


def _with_layers(stack: Params, have: int, want: int) -> dict[str, Any]:
  rest = {k: v for k, v in stack.items() if not k.startswith('layers_')}
  if want < have:
    for new, old in enumerate(spaced(have, want)):
      rest[f'layers_{new}'] = stack[f'layers_{old}']
    return rest
  for new in range(want):
    # An old layer stands at the first of the places that have its quotient.
    source = new * have // want
    layer = stack[f'layers_{source}']
    is_first = new == 0 or (new - 1) * have // want < source
    rest[f'layers_{new}'] = layer if is_first else _silent(layer)
  return rest


def _silent(layer: Params) -> Params:
  """The layer, with output kernels of zero."""

  def written(path, leaf):
    writes = any(key.key in WRITERS for key in path)
    return np.zeros_like(leaf) if writes else leaf

  return jax.tree_util.tree_map_with_path(written, layer)


def _wider(
  tree: Mapping[str, Any],
  before: T5Config,
  after: T5Config,
  draw: np.random.Generator,
  path: tuple[str, ...],
) -> dict[str, Any]:
  result: dict[str, Any] = {}
  for name, value in tree.items():
    if isinstance(value, Mapping):
      result[name] = _wider(value, before, after, draw, (*path, name))
    else:
      result[name] = _wider_leaf(value, (*path, name), before, after, draw)
  return result


def _wider_leaf(
  leaf: np.ndarray,
  path: tuple[str, ...],
  before: T5Config,
  after: T5Config,
  draw: np.random.Generator,
) -> np.ndarray:
  if path[-1] == 'scale':
    # A norm sees as large a sum of squares, over more places.
    scale = np.full(after.emb_dim, leaf.mean())
    scale[: before.emb_dim] = leaf
    root = np.sqrt(before.emb_dim / after.emb_dim)
    return (scale * root).astype(np.float32)
  if path[-1] == 'embedding':
    return _corner(leaf, (len(leaf), after.emb_dim))
  if path[-1] == 'rel_embedding':
    return _corner(leaf, (after.num_heads, *leaf.shape[1:]))
  module, is_attention = path[-2], path[-2] in _HEADED
  old, new = (
    (config.num_heads, config.head_dim) if is_attention else (config.mlp_dim,)
    for config in (before, after)
  )
  if module in WRITERS:
    wide = _corner(leaf.reshape(*old, before.emb_dim), (*new, after.emb_dim))
    return wide.reshape(-1, after.emb_dim)
  if module == 'logits_dense':
    old = new = leaf.shape[1:]
  there = leaf.reshape(before.emb_dim, *old)
  wide = draw.normal(0, leaf.std(), (after.emb_dim, *new)).astype(np.float32)
  wide[tuple(slice(size) for size in there.shape)] = there
  if module == 'key':  # else a head's added places would change its scores
    wide[..., before.head_dim :] = 0
  return wide.reshape(after.emb_dim, -1)


_HEADED = ('query', 'key', 'value', 'out')


def _corner(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Zeros of the shape, with the array in their first places."""
  wide = np.zeros(shape, np.float32)
  wide[tuple(slice(size) for size in array.shape)] = array
  return wide


def _check(before: T5Config, after: T5Config) -> None:
  may_change = {
    name: getattr(after, name) for name in (*_STACKS.values(), *_WIDTHS)
  }
  if dataclasses.replace(before, **may_change) != after:
    raise ValueError(
      'A T5 begins with one that differs from it in numbers of layers and in'
      f' {", ".join(_WIDTHS)} alone; expected sizes like {before}, got {after}.'
    )
  for name in _WIDTHS:
    if getattr(after, name) < getattr(before, name):
      raise ValueError(
        f'A T5 begins with one that is as wide or narrower: expected {name} of'
        f' {getattr(before, name)} or more, got {getattr(after, name)}. A'
        ' narrower one can begin as a slice, see slicing.py.'
      )
  if not before.num_encoder_layers and before.emb_dim != after.emb_dim:
    raise ValueError(
      'A T5 without an encoder keeps its emb_dim, since it reads the output of'
      f" another's: expected {before.emb_dim}, got {after.emb_dim}."
    )
  for name in _STACKS.values():
    if bool(getattr(after, name)) != bool(getattr(before, name)):
      raise ValueError(
        f'{name} is {getattr(before, name)} and would be'
        f' {getattr(after, name)}: layers are spread among those that are'
        ' there, and a stack is not left out.'
      )
