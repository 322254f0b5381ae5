"""A mesh of devices, and which part of each array a device has."""

import dataclasses
import math
import re
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax.checks.memory import array_bytes
from specdec_jax.models.base import LanguageModel, Params, param_shapes
from specdec_jax.partitioning.axes import Axes, LogicalAxes, axes_of_parameter
from specdec_jax.types import LengthRule

# Fields of a `Request` that are the same for all of its rows.
_SHARED = (
  '.stop_ids',
  '.top_k',
  '.top_p',
  '.lenience',
  '.penalty',
  *(f'.rule.{field.name}' for field in dataclasses.fields(LengthRule)),
  '.fallback.costs',
  '.fallback.patience',
)
_JOINED = re.compile(r'(.*/)?(qkv|wi_joined)/\w+')


@dataclasses.dataclass(frozen=True)
class Partition:
  """Which part of an array each device has; GSPMD does the rest.

  Attributes:
    mesh: the devices, with the axes 'data' and 'model'.
    axes: which dimensions are split over these axes.
  """

  mesh: Mesh
  axes: LogicalAxes

  def sharding(self, *axes: str | None) -> NamedSharding:
    """The sharding of an array with these logical axes.

    Without axes, the array is whole on each device.
    """
    return NamedSharding(self.mesh, PartitionSpec(*self.axes.split(axes)))

  @property
  def row_multiple(self) -> int:
    """Devices that share a request's rows; must divide the number of rows."""
    return math.prod(self._sizes(('batch',)).values())

  def parameter(self, name: str) -> NamedSharding:
    """The sharding of a parameter, by its name, as `checkpoints.load` needs it.

    Raises:
      ValueError: no rule covers it, or it is a joined kernel that would be
        split.
    """
    sharding = self.sharding(*axes_of_parameter(name))
    if _JOINED.fullmatch(name) and self._sizes(axes_of_parameter(name)):
      raise ValueError(
        f'{name} joins several projections into one product, which cannot be'
        ' split by heads; place the parameters as the checkpoint has them.'
      )
    return sharding

  def check(self, network: LanguageModel) -> None:
    """Raises ValueError unless a network's arrays can be split in this way."""
    config = getattr(network, 'config', None)
    # The stacks of an encoder-decoder may have shapes of their own.
    stacks = [getattr(config, name, None) for name in ('encoder', 'decoder')]
    for stack in (config, *stacks):
      for name in ('num_heads', 'num_kv_heads'):
        heads = getattr(stack, name, None)
        if heads is not None:
          # The devices may divide a kernel's H * D and yet not divide H.
          self._check_shape(f'attention, {name}', ('heads',), (heads,))
    shapes = param_shapes(network)
    for name, leaf in _flat(shapes).items():
      self._check_shape(name, axes_of_parameter(name), leaf.shape)

  def place(self, params: Params) -> Params:
    """Moves parameters to their shards.

    Args:
      params: NumPy arrays, of which each device gets only its part, or JAX
        arrays.

    Raises:
      ValueError: an array cannot be split in this way.
    """
    return self._with_names(params, _put)

  def shapes(self, params: Params) -> Params:
    """`ShapeDtypeStruct`s of parameters (or of shapes), with shardings."""
    return self._with_names(params, _described)

  def request(self, request: Any) -> Any:
    """`ShapeDtypeStruct`s of a `Request`, its rows split by batch.

    Raises:
      ValueError: the rows cannot be split in this way.
    """

    def placed(path, leaf):
      name = jax.tree_util.keystr(path)
      if name.endswith(_SHARED):
        return _described(leaf, self.sharding())
      self._check_shape(f'Request{name}', ('batch',), leaf.shape)
      return _described(leaf, self.sharding('batch'))

    return jax.tree_util.tree_map_with_path(placed, request)

  def _with_names(self, params, function):
    """Applies a function to each array and its sharding; keeps the tree."""
    placed = {}
    for name, leaf in _flat(params).items():
      sharding = self.parameter(name)
      self._check_shape(name, axes_of_parameter(name), leaf.shape)
      placed[name] = function(leaf, sharding)
    return flax.traverse_util.unflatten_dict(placed, sep='/')

  def _sizes(self, axes: Axes) -> dict[int, int]:
    """Dimension -> parts it is split into; whole dimensions are left out."""
    found = enumerate(self.axes.split(axes))
    sizes = {i: self.mesh.shape[name] for i, name in found if name}
    return {i: size for i, size in sizes.items() if size > 1}

  def _check_shape(self, name: str, axes: Axes, shape: Any) -> None:
    for i, size in self._sizes(axes).items():
      if shape[i] % size:
        raise ValueError(
          f'{name}: its axis {axes[i]!r} is {shape[i]} long, which the'
          f' {size} devices of mesh axis {self.axes.split(axes)[i]!r} do not'
          ' divide. Take another number of devices, or leave'
          f' LogicalAxes.{axes[i]} None.'
        )


def described(tree: Any, shardings: Any = None) -> Any:
  """`ShapeDtypeStruct`s of a tree of shapes, with a tree of shardings."""
  if shardings is None:
    return jax.tree.map(_described, tree)
  return jax.tree.map(_described, tree, shardings)


def shardings(tree: Any) -> Any:
  """The sharding of each array or shape in a tree."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def on_host(tree: Any) -> Any:
  """The tree as NumPy arrays.

  Arrays whose parts lie in several processes come whole to each process; then
  all processes must call this at the same time.
  """

  def whole(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return leaf
    where: Any = leaf.sharding
    return jax.device_put(leaf, NamedSharding(where.mesh, PartitionSpec()))

  return jax.device_get(jax.tree.map(whole, tree))


def _flat(params: Params) -> dict[str, Any]:
  return flax.traverse_util.flatten_dict(params, sep='/')


def _described(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _put(value: Any, sharding: NamedSharding) -> jax.Array:
  if isinstance(value, jax.Array):
    return jax.device_put(value, sharding)
  # No device, and no process, is given more than its part.
  host = np.asarray(value)
  return jax.make_array_from_callback(
    host.shape, sharding, lambda index: host[index]
  )


def shard_bytes(tree: Any) -> int:
  """Bytes per device of a tree of arrays, or of shapes with shardings."""

  def size(leaf):
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return 0
    return array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)

  return sum(size(leaf) for leaf in jax.tree.leaves(tree))
