"""How parameters are laid out, and over which devices.

Checkpoints keep T5X's layout: kernels of [in, out], one for each projection.
Two things are decided here, and only here; `models.products` and
`models.layers` accept either choice and know it by the parameters' names:

- On one GPU kernels are stored as [out, in], so that a product with one row is
  one kernel that reads whole rows of weights (`products.dense_out_in`).
- On a CPU they are stored as `models.cpu_layout` has measured: [in, out],
  [out, in], or, where few rows meet them, as a decoder's, in blocks
  of outputs (`products.dense_blocks`).
- Projections that read the same input are joined into one product, unless the
  product is split: most of a small model's call is the starting of products.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import check_choice
from specdec_jax.models import backend, blocks, cpu_layout, integers
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.cpu_layout import Layout
from specdec_jax.models.layers import PARAM_DTYPES
from specdec_jax.models.model import Model
from specdec_jax.partitioning.axes import (
  MESH_AXES,
  REPLICATED,
  LogicalAxes,
)
from specdec_jax.partitioning.partition import Partition

# Module -> name of its joined kernel, the kernels joined, in order, and their
# axis. A joined kernel is not split: equal parts of query | key | value do not
# contain whole heads, and each layer would exchange activations to put them
# right. Interleaving the kernels by device would work, but depends on the
# number of devices; and starting one product instead of three saves next to
# nothing compared with an all-reduce.
_JOINED = {
  'attention': ('qkv', ('query', 'key', 'value'), 'joined_kv'),
  'self_attention': ('qkv', ('query', 'key', 'value'), 'joined_kv'),
  'mlp': ('wi_joined', ('wi_0', 'wi_1'), 'mlp'),
}
_OUT_AXIS = {'kernel': 1, 'kernel_out_in': 0, 'bias': 0, integers.SCALE: 0}


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where and how a model's parameters live.

  Attributes:
    dtype: dtype of the parameters on the device: 'float32', 'bfloat16', or
      'int8' or 'int4', which are those of kernels; the rest is then float32.
      None is the dtype that a model was loaded with, or else float32.
    kernel_layout: 'in_out' as T5X stores kernels, 'out_in' transposed, 'blocks'
      for those of a decoder in blocks of 64 outputs, 'auto' for out_in on one
      GPU, what was measured on this processor for float32 on a CPU (or what
      SPECDEC_KERNEL_LAYOUT says in the environment), else in_out.
    join_projections: whether query, key and value of self-attention, and both
      input layers of a gated MLP, become one product each, unless it is split.
    data: devices that share the rows of a request; 0 is as many as `model`
      leaves.
    model: devices that share the weights; 0 is as many as `data` leaves.
    axes: which dimensions are split over these devices.
    across_hosts: whether the devices of all processes form one mesh; the
      processes must then do everything together. Otherwise each process has its
      own mesh.

  Raises:
    ValueError: a value is unknown, or a number is too small.
  """

  dtype: str | None = None
  kernel_layout: Literal['auto'] | Layout = 'auto'
  join_projections: bool = True
  data: int = 1
  model: int = 1
  axes: LogicalAxes = LogicalAxes()
  across_hosts: bool = False

  def __post_init__(self):
    check_types(self)
    if self.dtype is not None:
      check_choice('Placement.dtype', self.dtype, PARAM_DTYPES)
    if min(self.data, self.model) < 0 or self.data == self.model == 0:
      raise ValueError(
        'Placement.data and model are numbers of devices; one of them may be 0,'
        f' for all that the other leaves; got {self.data} and {self.model}.'
      )
    if self.kernel_layout == 'blocks' and not self.on_one_device:
      raise ValueError(
        "Placement.kernel_layout 'blocks' is for one device, and this is a mesh"
        f' of data={self.data}, model={self.model}, whose parts have no whole'
        " blocks. Leave the layout 'auto', or data and model 1."
      )

  @property
  def on_one_device(self) -> bool:
    """Whether JAX's default device holds everything."""
    return self.data == self.model == 1

  @property
  def param_dtype(self) -> str:
    """The dtype of parameters that were not loaded with one."""
    return self.dtype or 'float32'

  def loaded(self, model: Model) -> 'Placement':
    """The same with the dtype that `model` was loaded with, if it has one.

    Raises:
      ValueError: the placement has another.
    """
    if model.dtype is None:
      return dataclasses.replace(self, dtype=self.param_dtype)
    if self.dtype not in (None, model.dtype):
      raise ValueError(
        f'Placement.dtype is {self.dtype!r}, and {model.name or repr(model)!r}'
        f' was loaded with dtype={model.dtype!r}. Give one of the two, or the'
        ' same twice (gin: DTYPE, DRAFT_DTYPE).'
      )
    return dataclasses.replace(self, dtype=model.dtype)

  def replicated(self) -> 'Placement':
    """The same with the whole model on each device, as for a drafter."""
    return dataclasses.replace(self, axes=REPLICATED)

  @property
  def layout(self) -> str:
    """How kernels are stored: 'in_out', 'out_in' or 'blocks'."""
    if self.kernel_layout != 'auto':
      return self.kernel_layout
    if self.on_one_device and backend.ways().prefers_out_in:
      return 'out_in'
    if (
      backend.kind() == 'cpu'
      and self.on_one_device
      and self.dtype != 'bfloat16'
    ):
      return cpu_layout.cpu_layout().kernel_layout
    return 'in_out'

  def joins(self, axis: str) -> bool:
    """Returns whether kernels with this output axis are joined."""
    over = getattr(self.axes, axis)
    # 0 may turn out to be 1 device or more, so kernels stay apart then too.
    whole = over is None or getattr(self, over) == 1
    return self.join_projections and whole

  def partition(self, devices: Sequence[Any] | None = None) -> Partition | None:
    """The mesh of these devices, and what is split over it.

    Args:
      devices: devices to choose from; the first ones are taken. None is JAX's.

    Returns:
      The partition; None on one device.

    Raises:
      ValueError: the mesh's size does not divide the number of devices.
    """
    if self.on_one_device:
      return None
    if devices is None:
      devices = jax.devices() if self.across_hosts else jax.local_devices()
    sizes = {'data': self.data, 'model': self.model}
    for name, other in (MESH_AXES, MESH_AXES[::-1]):
      sizes[name] = sizes[name] or len(devices) // sizes[other]
    size = sizes['data'] * sizes['model']
    if size == 0 or len(devices) % size:
      raise ValueError(
        f'Placement(data={self.data}, model={self.model}) is a mesh of'
        f' {size or self.data + self.model} devices, which does not divide the'
        f' {len(devices)} devices there are.'
      )
    mesh = jax.make_mesh(
      tuple(sizes.values()),
      tuple(sizes),
      (AxisType.Auto,) * len(sizes),
      devices=devices[:size],
    )
    return Partition(mesh, self.axes)

  def shardings_of(self, network: LanguageModel) -> Any:
    """Where `checkpoints.load` puts parameters; None leaves them on the host.

    It is None for one device; `place` then moves the parameters to it.

    Raises:
      ValueError: the network cannot be split in this way.
    """
    partition = self.partition()
    if partition is None:
      return None
    partition.check(network)
    return partition.parameter


def share_devices(
  target: Placement, draft: Placement | None
) -> tuple[Placement, Partition | None, Partition | None]:
  """The placement of a drafter, on the devices of its target.

  Args:
    target: placement of the target.
    draft: placement of the drafter; None is the whole drafter on each of the
      target's devices.

  Returns:
    The drafter's placement, and the partition of each.

  Raises:
    ValueError: the two placements are for different devices.
  """
  draft = target.replicated() if draft is None else draft
  ours, theirs = target.partition(), draft.partition()
  meshes = [None if one is None else one.mesh for one in (ours, theirs)]
  if meshes[0] != meshes[1]:
    shapes = [f'data={one.data}, model={one.model}' for one in (target, draft)]
    raise ValueError(
      'A round is one program, and all of a program runs on one mesh, so'
      f' target ({shapes[0]}) and drafter ({shapes[1]}) must have the same'
      ' mesh. A drafter that is not to be split is whole on each device: give'
      ' axes=REPLICATED, or leave draft_placement None.'
    )
  return draft, ours, theirs


def place(params: Params, placement: Placement = Placement()) -> Params:
  """Returns the parameters on their devices, in their dtype and layout.

  Args:
    params: a nested dict of arrays as a checkpoint has them. They may already
      be placed; then only the dtype changes.
    placement: where and how to place them.

  Returns:
    The same tree, except for kernels: `kernel` [in, out] becomes
    `kernel_out_in` [out, in] if the placement says so, and joined projections
    have one kernel, under the name that `layers` has for it.

  Raises:
    ValueError: an array cannot be split as the placement says.
  """
  partition = placement.partition()
  laid_out = lay_out(params, placement)
  return laid_out if partition is None else partition.place(laid_out)


def place_parts(
  params: Any, placement: Placement = Placement(), models: Any = None
) -> Any:
  """Applies `place` to each model in a pytree; other arrays keep their dtype.

  Args:
    params: parameters of a drafter, as `read_parts` returns them: a model's
      parameters, a table, or a tuple of these.
    placement: placement of the models; other arrays are whole on each device.
    models: `params` as they were before `read_parts`; a `Model` that was loaded
      with a dtype keeps it. None is `params`.

  Raises:
    ValueError: as for `place`.
  """
  partition = placement.partition()

  def is_model(value):
    return isinstance(value, Mapping)

  def part(model, value):
    if is_model(value):
      return place(value, _placement_of(model, placement))
    array = jnp.asarray(value)
    if partition is None:
      return array
    return jax.device_put(array, partition.sharding())

  models = params if models is None else models
  return jax.tree.map(part, models, params, is_leaf=is_model)


def check_dtypes(params: Any, placement: Placement) -> None:
  """Raises ValueError if a `Model` was loaded with another dtype.

  Args:
    params: a model, or the parameters of a drafter.
    placement: the placement that is to hold for them.
  """
  for model in jax.tree.leaves(params):
    if isinstance(model, Model):
      placement.loaded(model)


def _placement_of(model: Any, placement: Placement) -> Placement:
  """A placement whose dtype is the model's own, if it was loaded with one."""
  dtype = model.dtype if isinstance(model, Model) else None
  return dataclasses.replace(placement, dtype=dtype or placement.dtype)


def read_parts(params: Any, placement: Placement = Placement()) -> Any:
  """Reads the parameters of each `Model` in a pytree; the rest stays as it is.

  With several devices each array goes straight to its shards, otherwise to the
  host.

  Args:
    params: a model, or the parameters of a drafter.
    placement: the placement that `place` will use; a model that was loaded with
      a dtype keeps it.

  Raises:
    ValueError: a checkpoint is broken, or cannot be split as the placement
      says.
  """

  def part(value):
    if not isinstance(value, Model):
      return value
    sharding = placement.shardings_of(value.network)
    own = _placement_of(value, placement)
    found = value.read(own.param_dtype, sharding)
    # What was given, and not read, is still as it was.
    return _rounded(found, own)

  return jax.tree.map(part, params)


def lay_out(params: Params, placement: Placement) -> Params:
  """`place` without moving anything to the devices of a mesh."""
  laid_out = _lay_out(_rounded(params, placement), placement, '')
  return _cut(laid_out, '') if placement.layout == 'blocks' else laid_out


def _rounded(params: Params, placement: Placement) -> Params:
  if not integers.is_integers(placement.dtype):
    return params
  return integers.rounded(params, placement.param_dtype)


def _lay_out(
  params: Mapping[str, Any], placement: Placement, module: str
) -> Params:
  joined, parts, axis = _JOINED.get(module, ('', (), ''))
  if not all(part in params for part in parts) or (
    parts and not placement.joins(axis)
  ):
    parts = ()
  placed = {}
  for name, value in params.items():
    if isinstance(value, Mapping):
      if name not in parts:
        placed[name] = _lay_out(value, placement, name)
    elif name == 'kernel' and placement.layout == 'out_in':
      placed['kernel_out_in'] = _cast(value.T, placement)
    else:
      placed[name] = _cast(value, placement)
  if parts:
    kernels = [_lay_out(params[p], placement, p) for p in parts]
    placed[joined] = {
      name: _concatenate([k[name] for k in kernels], _OUT_AXIS[name])
      for name in kernels[0]
    }
  return placed


def _cut(
  params: Mapping[str, Any], module: str, reads_encoder: bool = False
) -> Params:
  """Parameters whose kernels are in blocks, where few rows meet them.

  An encoder's meet all of an input, and so do those of the keys and values that
  a decoder makes of it.

  Args:
    params: of a module, laid out otherwise.
    module: its name.
    reads_encoder: whether it is in an attention to an encoder's output.
  """
  if module == 'encoder' or (reads_encoder and module in ('key', 'value')):
    return dict(params)
  reads_encoder = module == 'encoder_decoder_attention'
  found = {
    name: _cut(value, name, reads_encoder)
    if isinstance(value, Mapping)
    else value
    for name, value in params.items()
  }
  kernel: Any = found.get('kernel')
  if kernel is not None and kernel.shape[1] % blocks.WIDTH == 0:
    if not isinstance(kernel, jax.core.Tracer):
      kernel = np.asarray(kernel)  # on a CPU the same memory; compiles nothing
    del found['kernel']
    found['kernel_blocks'] = jnp.asarray(blocks.in_blocks(kernel))
  return found


def _cast(value: Any, placement: Placement) -> Any:
  """The array in the placement's dtype; moved only if there is one device."""
  dtype = placement.param_dtype
  if value.dtype == jnp.int32:  # places, no weights
    dtype = value.dtype
  elif integers.is_integers(dtype):  # only kernels are, and are already
    keeps = value.dtype == jnp.bfloat16 or integers.is_integers(value.dtype)
    keeps = keeps and not backend.ways().holds_floats
    dtype = value.dtype if keeps else 'float32'
  if placement.on_one_device:
    return jnp.asarray(value, dtype)
  return value.astype(dtype)


def _concatenate(kernels: Sequence[Any], axis: int) -> Any:
  on_host = all(isinstance(kernel, np.ndarray) for kernel in kernels)
  return (np if on_host else jnp).concatenate(kernels, axis)
