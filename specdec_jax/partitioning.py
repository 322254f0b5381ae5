"""Places arrays on devices: meshes, placements, layouts of kernels.

Logical axes are names of an array's dimensions, as in T5X. Networks do not name
them: the tables below have the axes of a parameter by its name, and those of a
cache's array by its field. `LogicalAxes` maps logical axes to axes of the mesh,
and `follow` splits a network's caches and logits like its parameters.

Checkpoints have T5X's layout: kernels of [in, out], one per projection. This
module alone changes that layout, in two ways; `models.products` and
`models.layers` recognise the results by the parameters' names:

- On a CPU kernels get the layout that `models.cpu_layout` has measured:
  [in, out], [out, in], or, for kernels such as a decoder's that multiply few
  rows, blocks of outputs (`products.dense_blocks`).
- Kernels of projections of the same input are concatenated, unless the result
  would be split over devices. One product then replaces several, and starting
  products takes most of the time of a small model's call.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import flax.core
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from specdec_jax.checks.fields import check_choice, check_types, unexpected
from specdec_jax.models import backend, base, cpu_layout, integers
from specdec_jax.models.base import LanguageModel, NetworkWrapper, Params
from specdec_jax.models.cpu_layout import Layout
from specdec_jax.models.families import config_of
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.layers import PARAM_DTYPES
from specdec_jax.models.model import Model

# The two axes of a mesh: one splits the rows of requests, the other weights.
DATA: Final = 'data'
MODEL: Final = 'model'
MeshAxis = Literal['data', 'model']

Axes = tuple[str | None, ...]

# Pattern of the end of a parameter's name -> its axes.
_PARAMETERS: tuple[tuple[str, Axes], ...] = (
  ('token_embedder/embedding', ('vocab', 'embed')),
  ('image_end_embedding', ('embed',)),
  ('position_embedder/embedding', ('abspos_buckets', 'embed')),
  ('relpos_bias/rel_embedding', ('heads', 'relpos_buckets')),
  (r'(query|key|value|qkv)/kernel', ('embed', 'joined_kv')),
  (r'(query|key|value|qkv)/bias', ('joined_kv',)),
  ('out/kernel', ('joined_kv', 'embed')),
  (r'wi(_\d|_joined)?/kernel', ('embed', 'mlp')),
  (r'wi(_\d|_joined)?/bias', ('mlp',)),
  ('wo/kernel', ('mlp', 'embed')),
  ('(out|wo)/bias', ('embed',)),
  ('logits_dense/kernel', ('embed', 'vocab')),
  ('logits_bias', (None, 'vocab')),
  ('(query|key)_norm/scale', ('kv',)),
  (r'\w*norm/(scale|bias)', ('embed',)),
  ('place', (None,)),  # of `other_ids.Shortlisted`
)

# A field of `KVCache` -> the axes of its arrays.
CACHE: dict[str, Axes] = {
  'keys': ('batch', 'heads', 'kv', 'length'),
  'values': ('batch', 'heads', 'kv', 'length'),
  'cross_keys': ('batch', 'heads', 'kv', 'length'),
  'cross_values': ('batch', 'heads', 'kv', 'length'),
  'cross_bias': ('batch', None, None, 'length'),
  'position_bias': ('heads', 'length'),
  'length': ('batch',),
}


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
  """The mesh axis that splits each logical axis; None: it is not split.

  The mesh axes are 'data' and 'model'. The defaults are Megatron's tensor
  parallelism, with requests split as well. Each block of a layer (attention,
  MLP) begins with kernels that are split by their outputs and ends with a
  kernel that is split by its inputs, so that it needs only one all-reduce, at
  its end. That makes two all-reduces per layer, and three in a decoder layer
  with cross-attention, whose queries need the complete sum at the end of
  self-attention. Keeping cross-attention whole on each device would save the
  third, but each device would then read all weights of cross-attention, a
  seventh of the decoder's in T5-XXL.

  Attributes:
    batch: rows of a request, by default split over 'data'. Rows are
      independent, so devices only exchange whether all rows are finished.
    embed: M, by default not split, because every block reads all of it: a split
      would gather each kernel, or sum each product twice.
    heads: H, of caches and relative biases, by default split over 'model'.
      Heads are independent, so keys and values stay on their device. Kernels'
      axes of size H * D are split in the same way.
    mlp: width of the feed-forward block, by default split over 'model', since
      activations are elementwise.
    vocab: V, by default split over 'model', because the embedding and the
      output layer are the largest arrays. The split costs a sum of the
      embeddings that are looked up, and one exchange that gathers the logits.

  Other axes are never split: not D, because the scores of a head are a sum over
  it, and not positions and slots, because each row writes at its own position.

  Raises:
    ValueError: a mesh axis is unknown, or splits two axes of one array.
  """

  batch: MeshAxis | None = DATA
  embed: MeshAxis | None = None
  heads: MeshAxis | None = MODEL
  mlp: MeshAxis | None = MODEL
  vocab: MeshAxis | None = MODEL

  def __post_init__(self):
    check_types(self)
    for name, axes in (*_PARAMETERS, *CACHE.items()):
      split = [mesh_axis for mesh_axis in self.split(axes) if mesh_axis]
      if len(set(split)) < len(split):
        only = 'at most one of them over each mesh axis'
        raise unexpected(f'LogicalAxes of {name} {axes}', only, split)

  def split(self, axes: Axes) -> Axes:
    """Returns the mesh axis of each logical axis."""
    split = {**vars(self), 'joined_kv': self.heads}
    return tuple(split.get(name or '') for name in axes)


# With these axes each device has the whole model, which suits a drafter: if it
# were split, each layer would wait for all-reduces in each of the drafter's
# gamma calls per round.
REPLICATED = LogicalAxes(heads=None, mlp=None, vocab=None)


def axes_of_parameter(name: str) -> Axes:
  """Returns the axes of a parameter such as 'decoder/layers_0/mlp/wo/kernel'.

  Raises:
    ValueError: no rule covers the name.
  """
  if name.endswith('/kernel_scale'):
    return axes_of_parameter(name.removesuffix('_scale'))[-1:]
  stored, transposed = re.subn('kernel_out_in$', 'kernel', name)
  for ending, axes in _PARAMETERS:
    if re.fullmatch(f'(.*/)?{ending}', stored):
      return axes[::-1] if transposed else axes
  endings = ', '.join(ending for ending, _ in _PARAMETERS)
  raise unexpected('parameter', f'a name that ends in {endings}', name)


@dataclasses.dataclass(frozen=True)
class Partition:
  """The split of arrays over devices; XLA (GSPMD) adds the communication.

  Attributes:
    mesh: the devices, with the axes 'data' and 'model'.
    axes: the mesh axis of each logical axis.
  """

  mesh: Mesh
  axes: LogicalAxes

  def sharding(self, *axes: str | None) -> NamedSharding:
    """Returns the sharding of an array with these logical axes.

    Without axes, the array is whole on each device.
    """
    return NamedSharding(self.mesh, PartitionSpec(*self.axes.split(axes)))

  @property
  def row_multiple(self) -> int:
    """Number of parts into which a request's rows are split."""
    return math.prod(self._sizes(('batch',)).values())

  def parameter(self, name: str) -> NamedSharding:
    """Returns the sharding of a parameter by its name, for `checkpoints.load`.

    Raises:
      ValueError: no rule covers the name, or it is the name of concatenated
        projections that would be split.
    """
    axes = axes_of_parameter(name)
    if re.search(r'\b(qkv|wi_joined)/', name) and self._sizes(axes):
      expected = 'parameters as the checkpoint has them'
      got = 'several projections in one kernel, which cannot be split by heads'
      raise unexpected(name, expected, got)
    return self.sharding(*axes)

  def check(self, network: LanguageModel) -> None:
    """Raises ValueError unless a network's arrays can be split in this way."""
    config = config_of(network)
    stacks = (config.shape.encoder, config.shape.decoder) if config else ()
    for stack in filter(None, stacks):
      # The number of devices may divide a kernel's H * D, but not H.
      for name in ('num_heads', 'num_kv_heads'):
        heads = getattr(stack, name)
        self._check_shape(f'attention, {name}', ('heads',), (heads,))
    flat = flax.traverse_util.flatten_dict(base.param_shapes(network), sep='/')
    for name, leaf in flat.items():
      self._check_shape(name, axes_of_parameter(name), leaf.shape)

  def place(self, params: Params) -> Params:
    """Splits parameters over the devices, and moves them there.

    Args:
      params: NumPy arrays, of which each device gets only its part, or JAX
        arrays.

    Raises:
      ValueError: an array cannot be split in this way.
    """
    placed = {}
    flat = flax.traverse_util.flatten_dict(params, sep='/')
    for name, leaf in flat.items():
      self._check_shape(name, axes_of_parameter(name), leaf.shape)
      placed[name] = put(leaf, self.parameter(name))
    return flax.traverse_util.unflatten_dict(placed, sep='/')

  def request(self, request: Any) -> Any:
    """Returns `ShapeDtypeStruct`s of a `Request`, with its rows split.

    Raises:
      ValueError: the rows cannot be split in this way.
    """

    def placed(path, leaf):
      name = jax.tree_util.keystr(path)
      axes = ('batch',) if path[0].name in request.rows else ()
      self._check_shape(f'Request{name}', axes, leaf.shape)
      where = self.sharding(*axes)
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(placed, request)

  def _sizes(self, axes: Axes) -> dict[int, int]:
    """Returns, for each dimension that is split, its number of parts."""
    split = enumerate(self.axes.split(axes))
    sizes = {i: self.mesh.shape[name] for i, name in split if name}
    return {i: size for i, size in sizes.items() if size > 1}

  def _check_shape(self, name: str, axes: Axes, shape: Any) -> None:
    for i, size in self._sizes(axes).items():
      if shape[i] % size:
        devices = f'{size} devices of {self.axes.split(axes)[i]!r}'
        expected = f'a multiple of the {devices}'
        advice = f'Or leave LogicalAxes.{axes[i]} None.'
        where = f'{name}: axis {axes[i]!r}'
        raise unexpected(where, expected, shape[i], advice)


def shardings(tree: Any) -> Any:
  """Returns the sharding of each array or shape in a tree."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def on_host(tree: Any) -> Any:
  """Returns the tree as NumPy arrays.

  Each process gets the whole of an array that is split over processes. If there
  is such an array, all processes must call this function at the same time.
  """

  def gathered(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return leaf
    assert isinstance(leaf.sharding, NamedSharding)
    whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return jax.device_put(leaf, whole)

  return jax.device_get(jax.tree.map(gathered, tree))


def put(value: Any, sharding: Sharding | None) -> Any:
  """Moves an array to its devices, each of which gets only its part.

  Args:
    value: an array of NumPy or JAX.
    sharding: the devices of the array's parts; None returns the array as it is.
  """
  if sharding is None:
    return value
  if isinstance(value, jax.Array):
    return jax.device_put(value, sharding)
  host = np.asarray(value)
  return jax.make_array_from_callback(
    host.shape, sharding, lambda index: host[index]
  )


def follow(network: Any, partition: Partition | None) -> Any:
  """Returns the network with its caches split like its parameters.

  Args:
    network: a `LanguageModel`.
    partition: the partition; None for one device, which returns the network
      itself.

  Raises:
    ValueError: the network cannot be split in this way.
  """
  if partition is None:
    return network
  partition.check(network)
  return Following(network, partition)


@dataclasses.dataclass(frozen=True)
class Following(NetworkWrapper):
  """A `LanguageModel` that constrains the shardings of its arrays.

  XLA would choose most of these shardings by itself, but might choose others
  when the code around a call changes. Here caches are always split by heads and
  rows, so that a round never moves them, and logits are gathered whole on each
  device, in one exchange per call. Then each device verifies and samples alone.
  With a split vocabulary each reduction of verification and sampling would be
  an exchange, and sums would round differently.
  """

  partition: Partition

  def prefill(self, params, inputs, max_length, longest=None, encoded=None):
    cache = self.network.prefill(params, inputs, max_length, longest, encoded)
    return self._held(cache)

  def extend(self, params, cache, tokens, tree=None):
    features, cache = self._split('extend', params, cache, tokens, tree)
    return features, self._held(cache)

  def embed(self, params, tokens):
    return self._split('embed', params, tokens)

  def head(self, params, features):
    logits = self._split('head', params, features)
    # Logits are first split and then gathered: otherwise XLA would gather the
    # kernel of the output layer.
    split, whole = (('batch', None, last) for last in ('vocab', None))
    return self._at(self._at(logits, split), whole)

  def keep(self, cache, length, slots):
    return self._held(self._split('keep', cache, length, slots))

  def _split(self, method, *args):
    with backend.split(True):
      return getattr(self.network, method)(*args)

  def _held(self, cache):
    if not isinstance(cache, KVCache):
      return cache
    held = {}
    for name, axes in CACHE.items():
      place = functools.partial(self._at, axes=axes)
      held[name] = jax.tree.map(place, getattr(cache, name))
    return dataclasses.replace(cache, **held)

  def _at(self, array, axes):
    # Without relative biases `position_bias` has one row for all heads.
    one_row = axes[0] == 'heads' and array.shape[0] == 1
    sharding = self.partition.sharding(*(() if one_row else axes))
    return lax.with_sharding_constraint(array, sharding)


# These classes and functions place parameters.

# Module -> name of its concatenated kernel, names of the kernels that are
# concatenated, in this order, and their output axis. The result is not split
# over devices: equal parts of query | key | value do not contain whole heads,
# so each layer would exchange activations. Interleaving the kernels by device
# would work, but would depend on the number of devices; and compared with the
# time of an all-reduce, one product instead of three saves next to nothing.
_JOINED = {
  'attention': ('qkv', ('query', 'key', 'value'), 'heads'),
  'self_attention': ('qkv', ('query', 'key', 'value'), 'heads'),
  'mlp': ('wi_joined', ('wi_0', 'wi_1'), 'mlp'),
}
_NONE = '', (), ''


@dataclasses.dataclass(frozen=True)
class Placement:
  """The devices, dtype and layout of a model's parameters.

  Attributes:
    dtype: dtype of the parameters on the device: 'float32', 'bfloat16', 'int8'
      or 'int4'. The last two apply to kernels; embeddings then have the dtype
      of the computation (`integers.computes_in`), and all else is float32. None
      means the dtype that a model was loaded with, or else float32.
    kernel_layout: 'in_out' keeps kernels as in T5X, 'out_in' transposes them,
      and 'blocks' cuts a decoder's kernels into blocks of 64 outputs. 'auto'
      means 'in_out', except for float32 on a CPU: there it means the layout
      that was measured to be quickest on this processor, or that the
      environment variable SPECDEC_KERNEL_LAYOUT names.
    data: number of devices that share the rows of a request; 0: the number of
      all devices divided by `model`.
    model: number of devices that share the weights; 0: the number of all
      devices divided by `data`.
    axes: the mesh axis of each logical axis.
    across_hosts: whether the devices of all processes form one mesh, so that
      the processes do everything together. Otherwise each process has its own
      mesh.

  Raises:
    ValueError: a value is unknown, or a number is too small.

  Examples:
    >>> placement = sd.Placement(model=0)  # over all devices
    >>> sd.Engine(target, draft, placement=placement)
    Engine(target=..., draft=..., gamma=4, devices=...)
  """

  dtype: str | None = None
  kernel_layout: Literal['auto'] | Layout = 'auto'
  data: int = 1
  model: int = 1
  axes: LogicalAxes = LogicalAxes()
  across_hosts: bool = False

  def __post_init__(self):
    check_types(self)
    if self.dtype is not None:
      check_choice('dtype', self.dtype, PARAM_DTYPES)
    if min(self.data, self.model) < 0 or self.data == self.model == 0:
      sizes = 'numbers of devices, one of which may be 0 for all that are left'
      raise unexpected('data and model', sizes, [self.data, self.model])
    if self.kernel_layout == 'blocks' and not self.on_one_device:
      only = "'blocks' on one device alone"
      mesh = f'a mesh of data={self.data}, model={self.model}'
      raise unexpected('kernel_layout', only, mesh)

  @property
  def on_one_device(self) -> bool:
    """Whether JAX's default device holds all arrays."""
    return self.data == self.model == 1

  @property
  def param_dtype(self) -> str:
    """The dtype of parameters whose model was loaded without a dtype."""
    return self.dtype or 'float32'

  def for_model(self, model: Any) -> 'Placement':
    """Returns this placement with the dtype that a `Model` was loaded with."""
    dtype = model.dtype if isinstance(model, Model) else None
    return dataclasses.replace(self, dtype=dtype or self.param_dtype)

  def replicated(self) -> 'Placement':
    """Returns this placement with the whole model on each device."""
    return dataclasses.replace(self, axes=REPLICATED)

  @property
  def layout(self) -> str:
    """The layout of kernels: 'in_out', 'out_in' or 'blocks'."""
    on_cpu = backend.kind() == 'cpu' and self.on_one_device
    if on_cpu and self.dtype == integers.INT8:
      return 'out_in'  # `products.dense_int8` needs this layout
    if self.kernel_layout != 'auto':
      return self.kernel_layout
    if on_cpu and self.dtype != 'bfloat16':
      return cpu_layout.cpu_layout().kernel_layout
    return 'in_out'

  def joins(self, axis: str) -> bool:
    """Whether kernels with this output axis are concatenated."""
    mesh_axis = getattr(self.axes, axis)
    # If `data` or `model` is 0, there may be several devices, so kernels are
    # not concatenated then either.
    return mesh_axis is None or getattr(self, mesh_axis) == 1

  def partition(self, devices: Sequence[Any] | None = None) -> Partition | None:
    """Returns the partition over a mesh of devices; None for one device.

    Args:
      devices: devices to choose from; the first ones are used. None: those of
        JAX.

    Raises:
      ValueError: the mesh's size does not divide the number of devices.
    """
    if self.on_one_device:
      return None
    if devices is None:
      devices = jax.devices() if self.across_hosts else jax.local_devices()
    data = self.data or len(devices) // self.model
    model = self.model or len(devices) // self.data
    if data * model == 0 or len(devices) % (data * model):
      divides = f'a mesh that divides the {len(devices)} devices there are'
      raise unexpected('Placement', divides, [self.data, self.model])
    devices = devices[: data * model]
    names, automatic = (DATA, MODEL), (AxisType.Auto,) * 2
    mesh = jax.make_mesh((data, model), names, automatic, devices=devices)
    return Partition(mesh, self.axes)


def place(
  params: Params, placement: Placement = Placement(), empties: bool = False
) -> Params:
  """Returns the parameters on their devices, in their dtype and layout.

  Args:
    params: a nested dict of arrays as in a checkpoint.
    placement: devices, dtype and layout.
    empties: whether each array is removed from `params` once it is placed, so
      that memory does not hold the whole model twice.

  Returns:
    The same tree, except for kernels: depending on the layout, a `kernel`
    becomes `kernel_out_in` or `kernel_blocks`, and concatenated projections
    have one kernel, `qkv` or `wi_joined`.

  Raises:
    ValueError: an array cannot be split as the placement says.
  """
  partition = placement.partition()
  rounded: Params = integers.rounded(params, placement.param_dtype)
  if not empties:
    rounded = flax.core.unfreeze(rounded)  # new dicts of the same arrays
  laid_out = _lay_out(rounded, placement)
  return laid_out if partition is None else partition.place(laid_out)


def place_parts(params: Any, placement: Placement, models: Any) -> Any:
  """Applies `place` to each model in a pytree; other arrays keep their dtype.

  Args:
    params: parameters of a drafter, the result of `read_parts`: a model's
      parameters, a table, or a tuple of these.
    placement: placement of the models; other arrays are whole on each device.
    models: the argument of `read_parts`; a `Model` that was loaded with a dtype
      keeps that dtype.

  Raises:
    ValueError: as for `place`.
  """
  partition = placement.partition()

  def part(model, value):
    if isinstance(value, Mapping):
      is_read = isinstance(model, Model) and model.given is None
      return place(value, placement.for_model(model), empties=is_read)
    where = partition and partition.sharding()
    return jax.device_put(jnp.asarray(value), where)

  return jax.tree.map(
    part, models, params, is_leaf=lambda value: isinstance(value, Mapping)
  )


def check_dtypes(params: Any, placement: Placement) -> None:
  """Raises ValueError if a `Model` has another dtype than a placement.

  Args:
    params: a model, or the parameters of a drafter.
    placement: the placement, whose dtype is compared with that of each `Model`.
  """
  for model in jax.tree.leaves(params):
    loaded = placement.for_model(model).dtype
    if placement.dtype not in (None, loaded):
      expected = f'{loaded}, with which {model.name or model!r} was loaded'
      raise unexpected('Placement.dtype', expected, placement.dtype)


def read_parts(params: Any, placement: Placement = Placement()) -> Any:
  """Replaces each `Model` in a pytree by its parameters, which are read.

  With several devices each array is read straight to its devices, otherwise
  into the memory of the host.

  Args:
    params: a model, or the parameters of a drafter as a pytree; parts of it
      that are not a `Model` stay unchanged.
    placement: the placement that the models will have; a model that was loaded
      with a dtype keeps that dtype.

  Raises:
    ValueError: a checkpoint is broken, or cannot be split as the placement
      says.
  """

  partition = placement.partition()

  def part(value):
    if not isinstance(value, Model):
      return value
    if partition is not None:
      partition.check(value.network)
    dtype = placement.for_model(value).param_dtype
    read = value.read(dtype, partition and partition.parameter)
    # Parameters that were given, not read, are not rounded yet.
    return integers.rounded(read, dtype)

  return jax.tree.map(part, params)


def _lay_out(params: Params, placement: Placement, *modules: str) -> Params:
  """Concatenates, casts and lays out the parameters of a module.

  Args:
    params: the module's parameters; each array is removed from this dict once
      it is laid out.
    placement: dtype and layout.
    *modules: names on the path to the module, from the outermost module to the
      module itself.
  """
  joined, parts, axis = _JOINED.get(modules[-1] if modules else '', _NONE)
  if parts and params.keys() >= {*parts} and placement.joins(axis):
    kernels = [params.pop(part) for part in parts]
    leaves = jax.tree.leaves(kernels)
    xp = np if all(isinstance(x, np.ndarray) for x in leaves) else jnp
    # Kernels are [in, out]; a bias is [out].
    params[joined] = {
      name: xp.concatenate([k[name] for k in kernels], int(name == 'kernel'))
      for name in kernels[0]
    }
  laid_out: Params = {}
  for name in [*params]:
    value = params.pop(name)
    if isinstance(value, Mapping):
      laid_out[name] = _lay_out(value, placement, *modules, name)
    elif name != 'kernel' or placement.layout == 'in_out':
      laid_out[name] = _cast(value, placement)
    elif placement.layout == 'out_in':
      laid_out['kernel_out_in'] = _cast(value.T, placement)
    elif value.shape[1] % cpu_layout.BLOCK or _meets_many_rows(modules):
      laid_out[name] = _cast(value, placement)
    else:
      if not isinstance(value, jax.core.Tracer):
        # NumPy shares the memory of JAX's array on a CPU, and compiles nothing.
        value = np.asarray(value)
      laid_out['kernel_blocks'] = _cast(cpu_layout.in_blocks(value), placement)
  return laid_out


def _meets_many_rows(modules: Sequence[str]) -> bool:
  """Whether a kernel multiplies a whole input at once.

  Kernels in blocks are quicker only for few rows. An encoder's kernels multiply
  many rows, and so do the decoder's kernels that make keys and values from the
  encoder's output.
  """
  return 'encoder' in modules or (
    modules[-2:-1] == ('encoder_decoder_attention',)
    and modules[-1] in ('key', 'value')
  )


def _cast(value: Any, placement: Placement) -> Any:
  """Casts an array to the placement's dtype.

  If there is only one device, the array is also moved there.
  """
  dtype = placement.param_dtype
  if value.dtype == jnp.int32:  # int32 arrays are indices, not weights
    dtype = value.dtype
  elif integers.is_integers(dtype):  # kernels have been rounded already
    keeps = value.dtype == jnp.bfloat16 or integers.is_integers(value.dtype)
    if backend.kind() == 'cpu':
      keeps = placement.on_one_device and value.dtype == integers.INT8
    dtype = value.dtype if keeps else 'float32'
  if placement.on_one_device:
    return jnp.asarray(value, dtype)
  return value.astype(dtype)
