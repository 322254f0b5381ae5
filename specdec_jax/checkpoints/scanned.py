"""Cuts stacks of layers that T5X trained as a scan into one array per layer.

In `scalable_t5` a stack's layers are one module, `encoder/encoder` or
`encoder/layers`, and each parameter has one more axis, that of the layers: the
second (`param_scan_axis=1`), or the first in models that were scanned over it.
Without that axis, kernels of attention are [M, H, D] and [H, D, M] there. Each
layer has its own relative bias (`T5Config.bias_per_layer`); for a network with
one bias per stack, all of them must be the same.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np

from specdec_jax.checkpoints.disk_arrays import (
  DiskArray,
  Index,
  broken,
  load_array,
)
from specdec_jax.checkpoints.t5x_sizes import STACKED, differences

_BIAS = 'relpos_bias/rel_embedding'

Shape = tuple[int, ...]


class _Held:
  """Keeps the stacked array that was read last, whole."""

  stack: DiskArray | None = None
  data: np.ndarray | None = None

  def read(self, stack: DiskArray) -> np.ndarray:
    if self.stack is not stack or self.data is None:
      self.data = None  # frees the previous one before reading
      self.data = cast(np.ndarray, load_array(stack))
      self.stack = stack
    return self.data


class _Layer:
  """One layer of a stacked array."""

  order: Literal['C'] = 'C'

  def __init__(
    self, stack: DiskArray, axis: int, number: int, shape: Shape, held: _Held
  ):
    self.shape = self.chunk = shape
    self.dtype = stack.dtype
    self._stack = stack
    self._place = (slice(None),) * axis + (number,)
    self._held = held

  def read_into(self, out: np.ndarray, index: Index) -> None:
    layer = self._held.read(self._stack)[self._place]
    out[...] = layer.reshape(self.shape)[index]


def is_scanned(arrays: Mapping[str, Any]) -> bool:
  """Whether some of the arrays are stacked."""
  return any(STACKED.fullmatch(name) for name in arrays)


def unroll(
  arrays: Mapping[str, DiskArray],
  expected: Mapping[str, Shape],
  num_heads: int | None,
  source: str,
) -> dict[str, DiskArray]:
  """Replaces each stacked array by its layers.

  The layers of one array follow each other, so that it is read only once.

  Args:
    arrays: T5X's name -> array; arrays outside of stacks stay as they are.
    expected: name -> shape, for each parameter of the network.
    num_heads: H, for kernels that have heads on an axis; None if unknown.
    source: where the arrays come from, for messages.

  Raises:
    ValueError: an array's layers are on no axis, or on either of two axes, or
      an array is there twice; the message names it, with both shapes.
  """
  stacks = {}
  found: dict[str, DiskArray] = {}
  for name, array in arrays.items():
    if match := STACKED.fullmatch(name):
      stacks[name] = match[1], match[2]
    else:
      found[name] = array
  axes = _axes(stacks, arrays, expected, num_heads, source)
  held = _Held()
  for name, (stack, inner) in stacks.items():
    array = arrays[name]
    if name not in axes:
      layers: dict[str, DiskArray] = {name: array}  # for the check of names
    elif f'{stack}/{inner}' in expected:  # the relative bias, one per stack
      _check_shared(array, axes[name], name, source)
      bias = f'{stack}/{_BIAS}'
      layers = {bias: _Layer(array, axes[name], 0, expected[bias], held)}
    else:
      names = [
        f'{stack}/layers_{i}/{inner}' for i in range(_count(expected, stack))
      ]
      layers = {
        layer: _Layer(array, axes[name], i, expected[layer], held)
        for i, layer in enumerate(names)
      }
    for layer in layers.keys() & found.keys():
      raise ValueError(
        f'{source!r} has {layer} twice: alone, {list(found[layer].shape)}, and'
        f' in {name}, {list(array.shape)}.'
      )
    found |= layers
  return found


def _check_shared(stack: DiskArray, axis: int, name: str, source: str) -> None:
  """Raises ValueError unless all layers have the same relative bias."""
  try:
    layers = np.moveaxis(_Held().read(stack), axis, 0)
  except ValueError as error:
    raise broken(source, name, str(error)) from error
  if not all(np.array_equal(layers[0], layer) for layer in layers):
    raise ValueError(
      f'{source!r}: {name}, {list(stack.shape)}, has another relative bias in'
      ' each layer. This network has one for all layers of a stack; set'
      ' bias_per_layer of its configuration.'
    )


def _axes(
  stacks: Mapping[str, tuple[str, str]],
  arrays: Mapping[str, DiskArray],
  expected: Mapping[str, Shape],
  num_heads: int | None,
  source: str,
) -> dict[str, int]:
  """The layers' axis in each stacked array; it is the same in all of them."""
  possible: dict[str, set[int]] = {}
  for name, (stack, inner) in stacks.items():
    alone = f'{stack}/layers_0/{inner}'
    if inner == _BIAS and alone not in expected:
      alone = f'{stack}/{inner}'  # one per stack
    if alone not in expected:
      continue
    shape, count = arrays[name].shape, _count(expected, stack)
    shapes = _as_stored(inner, expected[alone], num_heads)
    possible[name] = {
      axis
      for axis in (0, 1)
      if shape[axis : axis + 1] == (count,)
      and shape[:axis] + shape[axis + 1 :] in shapes
    }
    if not possible[name]:
      sizes = differences({n: a.shape for n, a in arrays.items()}, expected)
      raise ValueError(
        f'The parameters of {source!r} are not those of this model'
        f' configuration: {f"{sizes}; " if sizes else ""}{name} is'
        f' {list(shape)}, expected {count} layers of'
        f' {" or ".join(str(list(s)) for s in shapes)}, stacked on the first or'
        ' second axis.'
      )
  common = set.intersection({0, 1}, *possible.values())
  if possible and len(common) != 1:
    name = next(iter(possible))
    raise ValueError(
      f'{source!r}: the layers of {name}, {list(arrays[name].shape)}, may be'
      ' on its first or its second axis, and the other stacked arrays do not'
      ' show which.'
      if common
      else f'{source!r}: the layers are on the first axis in some stacked'
      f' arrays and on the second in others: {possible}.'
    )
  return dict(zip(possible, itertools.repeat(min(common, default=0))))


def _as_stored(
  inner: str, shape: Shape, num_heads: int | None
) -> tuple[Shape, ...]:
  """The shapes that one layer of a parameter may have in a file."""
  module, _, leaf = inner.rpartition('/')
  kind = module.rpartition('/')[2]
  if leaf != 'kernel' or num_heads is None or 'attention' not in module:
    return (shape,)
  if kind == 'out':
    return shape, (num_heads, shape[0] // num_heads, shape[1])
  return shape, (shape[0], num_heads, shape[1] // num_heads)


def _count(expected: Mapping[str, Shape], stack: str) -> int:
  """How many layers the network has in a stack."""
  return len(
    {
      name.split('/')[1]
      for name in expected
      if name.startswith(f'{stack}/layers_')
    }
  )
