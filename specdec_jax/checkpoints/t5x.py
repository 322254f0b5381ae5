"""T5X's own checkpoints: a msgpack file, alone or with TensorStore's folders.

The tree is {'version': 3, 'optimizer': {'target': parameters, 'state':
{'step', 'param_states'}}}. Parameters have T5X's names. A leaf is an array
inside the file, or the specification of an array in a folder beside it. Only
driver and path of a specification are used: its bucket may be a dummy, the path
is relative to the checkpoint, and all else is in the array's folder.

Stacks that were trained as a scan (`scalable_t5`) become single layers. A
scanned stack is one module, `encoder/encoder` or `encoder/layers`, whose
parameters have one more axis for the layers, the second (`param_scan_axis=1`)
or the first. Without that axis, attention kernels are [M, H, D] and [H, D, M].
Each layer has a relative bias, see `T5Config.bias_per_layer`.
"""

import collections
import functools
import math
import os
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from specdec_jax import files
from specdec_jax.checkpoints import disk_arrays
from specdec_jax.checkpoints.disk_arrays import About, DiskArray, Path, Shape
from specdec_jax.checks.fields import unexpected
from specdec_jax.files.locations import Location, few
from specdec_jax.models.t5 import T5Config

Shapes = Mapping[str, Shape]

VERSION = 3
_READABLE = (2, 3)
_TENSORFLOW = b'model_checkpoint_path'
# Pattern of the name of an array that holds all layers of a scanned stack.
_STACKED = re.compile(r'(encoder|decoder)/(?:layers|\1)/(.+)')
_BIAS = 'relpos_bias/rel_embedding'
_NORM = 'pre_mlp_layer_norm/scale'


def save_t5x(
  path: Path,
  params: disk_arrays.Params,
  step: int,
  dtype: disk_arrays.Dtype = None,
  about: About = None,
) -> None:
  """Writes parameters to the single file `path`, whole or not at all.

  Args:
    path: the file; its folder is made if needed.
    params: nested dict of arrays.
    step: number of training steps that led to the parameters.
    dtype: dtype of the floating-point arrays on disk, e.g. jnp.bfloat16; None
      does not cast.
    about: more texts to write, which `open_t5x` returns and T5X ignores, such
      as 'target', the `fingerprint` of a drafter's only target.

  Raises:
    OSError: the disk is full or the folder not writable.
  """

  def to_disk(leaf):
    array = np.asarray(leaf)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(dtype) if dtype is not None and is_float else array

  state = {'step': np.asarray(step, np.int32), 'param_states': {}}
  trees = {'target': jax.tree.map(to_disk, params), 'state': state}
  tree: dict[str, Any] = {'version': VERSION, 'optimizer': trees}
  tree |= {} if about is None else {'about': dict(about)}
  path = os.fspath(path)
  os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
  files.write_atomically(path, flax.serialization.msgpack_serialize(tree))


def open_t5x(location: Location) -> tuple[dict[str, DiskArray], Any]:
  """Finds the parameters of a checkpoint without reading them.

  The optimiser's state is neither opened nor needed.

  Args:
    location: the msgpack file; T5X calls it `checkpoint`, in a folder of its
      own.

  Returns:
    The arrays by their names, which have slashes; and the `about` of
    `save_t5x`, or None.

  Raises:
    ValueError: the file is missing, cut short or not a T5X checkpoint; or an
      array's folder is missing or does not fit the file (the message names the
      array).
  """
  source = str(location)
  if location.read(0, len(_TENSORFLOW)) == _TENSORFLOW:
    advice = 'gs://t5-data/pretrained_models/t5x has the same models.'
    other = 'a TensorFlow checkpoint of T5'
    raise unexpected(source, "T5X's format", other, advice)
  tree = read_tree(location)
  leaves = flatten_dict(
    _target(tree, source),
    sep='/',
    is_leaf=lambda _, value: {'driver', 'kvstore'} <= value.keys(),
  )
  if not leaves:
    raise unexpected(source, 'a T5X checkpoint with parameters', leaves)
  specs = {}
  for name, leaf in leaves.items():
    if isinstance(leaf, Mapping):
      kvstore = leaf['kvstore'] if isinstance(leaf['kvstore'], Mapping) else {}
      # TensorStore before 0.1.14 had the path beside the kvstore.
      path = kvstore.get('path', leaf.get('path'))
      if type(path) is not str:
        raise unexpected(f'{source}: the path of {name}', 'text', path)
      where = location.parent().kvstore()
      where['path'] += path.rstrip('/') + '/'
      specs[name] = {'driver': leaf['driver'], 'kvstore': where}
    elif not isinstance(leaf, ArrayBytes):
      why = f'it is of type {type(leaf).__name__}'
      raise disk_arrays.broken(source, name, why)
  stored = disk_arrays.open_stored(specs, source) if specs else {}
  for name, array in stored.items():
    metadata = leaves[name].get('metadata') or {}
    shape = metadata.get('shape') if isinstance(metadata, Mapping) else metadata
    if shape is not None and shape != list(array.shape):
      why = f'its folder has {list(array.shape)}, the file says {shape!r}'
      raise disk_arrays.broken(source, name, why)
  arrays = {
    name: stored.get(name) or disk_arrays.file_array(location, *leaf)
    for name, leaf in leaves.items()
  }
  return arrays, tree.get('about')


def _target(tree: Any, source: str) -> Mapping[str, Any]:
  """Returns the parameters in the tree of a file."""
  optimizer = tree.get('optimizer') if isinstance(tree, dict) else None
  target = optimizer.get('target') if isinstance(optimizer, dict) else None
  if not isinstance(target, dict):
    inside = sorted(tree) if isinstance(tree, dict) else tree
    whole = 'a whole T5X checkpoint, with parameters in optimizer/target'
    raise unexpected(source, whole, inside)
  if (version := tree.get('version', 0)) not in _READABLE:
    raise unexpected(f'{source}: version', f'one of {_READABLE}', version)
  return target


# These functions compare a checkpoint with a network.


def check_params(
  params: disk_arrays.Params, expected: Any, source: str = 'params'
) -> None:
  """Checks that parameters have the names and shapes of a model.

  Args:
    params: nested dict of arrays, or of anything with a shape.
    expected: nested dict of the model's arrays, or of anything with a shape,
      e.g. from `jax.eval_shape(model.init, key)`.
    source: words for the origin of `params`, for the message.

  Raises:
    ValueError: the names or shapes differ; the message has each parameter that
      is missing, unknown, or of another shape, with both shapes, and the sizes
      of a T5 that differ.

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
    >>> expected = jax.eval_shape(network.init, jax.random.key(0))
    >>> sd.check_params(expected, expected, 'mine')
    >>> sd.check_params({}, expected, 'mine')
    Traceback (most recent call last):
      ...
    ValueError: The parameters of mine are not those of this model ...
  """
  have, want = shapes_of(params), shapes_of(expected)
  differ = [name for name in have.keys() & want if have[name] != want[name]]
  problems = {
    'missing': want.keys() - have.keys(),
    'unknown': have.keys() - want.keys(),
    'wrong shape': [
      f'{x} is {list(have[x])}, expected {list(want[x])}' for x in differ
    ],
  }
  lists = [f'{kind}: {few(names)}' for kind, names in problems.items() if names]
  if lists:
    raise _other_model(source, have, want, '; '.join(lists))


def _other_model(
  source: str, have: Shapes, want: Shapes, why: str
) -> ValueError:
  there, here = _sizes(have), _sizes(want)
  fields = ''.join(
    f'{field} is {there[field]}, expected {size}; '
    for field, size in here.items()
    if there.get(field, size) != size
  )
  which = f'The parameters of {source} are not those of this model'
  return ValueError(f'{which} configuration: {fields}{why}.')


def shapes_of(params: Mapping[str, Any]) -> dict[str, Shape]:
  """Returns the shapes of a nested dict's arrays, by names with slashes."""
  flat = flatten_dict(dict(params), sep='/')
  return {name: tuple(leaf.shape) for name, leaf in flat.items()}


def infer_config(shapes: Shapes, source: str) -> T5Config:
  """Infers a checkpoint's configuration from its shapes.

  Shapes do not show activations. As in the published models, a gated MLP gets
  T5 1.1's `gelu`, a plain one T5 1.0's `relu`.

  Raises:
    ValueError: the shapes are not those of a T5.
  """
  sizes = _sizes(shapes)
  activations = {1: ('relu',), 2: ('gelu', 'linear')}
  try:
    gated = activations[sizes.pop('len(mlp_activations)')]
    return T5Config(**sizes, mlp_activations=gated)
  except (KeyError, TypeError, ValueError) as error:
    why = f'its arrays do not show the sizes of a T5 ({error})'
    raise ValueError(f'{source!r}: {why}: give the network.') from error


# Patterns of parameters' names -> for each axis, the field of `T5Config` that
# is its size; '' for no field.
_SIZES = {
  'token_embedder/embedding': ('vocab_size', 'emb_dim'),
  rf'\w+/(layers_\d+/)?{_BIAS}': ('num_heads', ''),
  r'\w+/layers_\d+/\w*attention/query/kernel': ('', 'heads * head_dim'),
  r'\w+/layers_\d+/encoder_decoder_attention/key/kernel': ('encoder_dim', ''),
  r'\w+/layers_\d+/mlp/wi(_0)?/kernel': ('', 'mlp_dim'),
}


def _sizes(shapes: Shapes) -> dict[str, Any]:
  """Returns the fields of `T5Config` that shapes decide.

  Args:
    shapes: T5X's name -> shape; arrays of scanned stacks decide no fields.
  """
  sizes: dict[str, Any] = {}
  for name, shape in shapes.items():
    for pattern, fields in _SIZES.items():
      if len(shape) == len(fields) and re.fullmatch(pattern, name):
        sizes |= zip(fields, shape, strict=True)
  sizes.pop('', None)
  if 'vocab_size' in sizes:
    sizes['logits_via_embedding'] = 'decoder/logits_dense/kernel' not in shapes
  inner = {name.partition('/mlp/')[2] for name in shapes}
  if gates := [n for n in ('wi/kernel', 'wi_1/kernel') if n in inner]:
    sizes['len(mlp_activations)'] = 1 + gates[0].startswith('wi_1')
  if any(re.fullmatch(rf'.*/layers_\d+/{_BIAS}', name) for name in shapes):
    sizes['bias_per_layer'] = True
  layers = {m[0] for name in shapes if (m := re.match(r'\w+/layers_\d+', name))}
  stacks = collections.Counter(layer.partition('/')[0] for layer in layers)
  sizes |= {f'num_{stack}_layers': count for stack, count in stacks.items()}
  encoded = sizes.pop('encoder_dim', None)
  if stacks.keys() == {'decoder'}:
    sizes['num_encoder_layers'] = 0
    if encoded not in (None, sizes.get('emb_dim')):
      sizes['encoder_dim'] = encoded
  width, heads = sizes.pop('heads * head_dim', 0), sizes.get('num_heads')
  if heads and width and width % heads == 0:
    sizes['head_dim'] = width // heads
  return sizes


# These functions split layers that were trained as a scan.


def is_scanned(arrays: Mapping[str, Any]) -> bool:
  """Whether there are arrays that each hold all layers of a stack."""
  return any(_STACKED.fullmatch(name) for name in arrays)


def unroll(
  arrays: disk_arrays.Arrays, expected: Shapes, heads: int | None, source: str
) -> dict[str, DiskArray]:
  """Replaces each array of a scanned stack by one array per layer.

  The layers of an array are neighbours in the result, so reading them in order
  reads the stacked array only once.

  Args:
    arrays: T5X's name -> array; arrays outside of stacks stay as they are.
    expected: name -> shape, for each parameter of the network.
    heads: H, for kernels that have heads on an axis; None if unknown.
    source: path of the checkpoint, for messages.

  Raises:
    ValueError: an array's layers are not on the axis on which the scales of the
      norms have theirs, or an array is there twice; the message names it.
  """
  have = {name: tuple(array.shape) for name, array in arrays.items()}
  # One array is cached, because its layers are read one after another.
  read = functools.lru_cache(1)(disk_arrays.load_array)

  def read_layer(stack: Any, place: Any, shape: Shape, index: Any) -> Any:
    return read(stack)[place].reshape(shape)[index]

  unrolled = {n: a for n, a in arrays.items() if not _STACKED.fullmatch(n)}
  for name, array in arrays.items():
    if not (match := _STACKED.fullmatch(name)):
      continue
    stack, inner = match.groups()
    count = sum(f'{stack}/layers_{i}/{_NORM}' in expected for i in range(999))
    layers = [f'{stack}/layers_{i}/{inner}' for i in range(count)]
    if not layers or layers[0] not in expected:
      unrolled[name] = array  # `check_params` rejects this array later
      continue
    # The shape of a norm shows which axis counts layers, by default the second.
    (emb_dim,) = expected[f'{stack}/layers_0/{_NORM}']
    norm = have.get(name.removesuffix(inner) + _NORM, (emb_dim,))
    axis = 1 if emb_dim == norm[0] else 0
    shape, alone = have[name], expected[layers[0]]
    rest = shape[:axis] + shape[axis + 1 :]
    in_file = _as_stored(layers[0], alone, heads)
    if shape[axis : axis + 1] != (count,) or rest not in in_file:
      each = ' or '.join(str(list(s)) for s in in_file)
      problem = f'{name} is {list(shape)}, expected {count} layers of {each}'
      problem += f' on axis {axis}, as in its norm'
      raise _other_model(repr(source), have, expected, problem)
    for number, layer in enumerate(layers):
      if layer in unrolled:
        raise ValueError(f'{source!r} has {layer} twice: alone, and in {name}.')
      place = (slice(None),) * axis + (number,)
      part = functools.partial(read_layer, array, place, alone)
      unrolled[layer] = DiskArray(alone, array.dtype, part)
  return unrolled


def _as_stored(name: str, shape: Shape, heads: int | None) -> tuple[Shape, ...]:
  """Returns the shapes that one layer of a parameter may have in a file."""
  if heads is None or not re.search(r'attention/\w+/kernel$', name):
    return (shape,)
  if name.endswith('out/kernel'):
    return shape, (heads, shape[0] // heads, shape[1])
  return shape, (shape[0], heads, shape[1] // heads)


# The code below reads the tree in a msgpack file, without the bytes of arrays.
#
# The msgpack package would copy all arrays in the file, also the optimiser's.
# Here only headers are read (https://github.com/msgpack/msgpack spec.md), and
# an array becomes an `ArrayBytes`, which says where its bytes are. Arrays are
# flax's extension types: (shape, name of the dtype, bytes), see
# `flax.serialization`.

_WINDOW = 1 << 16
_ARRAYS = 1, 3  # flax's codes of arrays and of scalars
_CHUNKED = '__msgpack_chunked_array__'
# First byte of a value -> its kind, and the value itself, its size, or the
# `struct` format of the value or size that follows that byte.
_KINDS: dict[int, tuple[str, Any]] = {
  first + i: (kind, value)
  for first, kind, values in (
    (0x00, 'value', range(0x80)),
    (0x80, 'dict', range(16)),
    (0x90, 'list', range(16)),
    (0xA0, 'text', range(32)),
    (0xC0, 'value', [None]),
    (0xC2, 'value', [False, True]),
    (0xC4, 'bytes', '>B >H >I'.split()),
    (0xC7, 'extension', '>B >H >I'.split()),
    (0xCA, 'value', '>f >d >B >H >I >Q >b >h >i >q'.split()),
    (0xD4, 'extension', [1, 2, 4, 8, 16]),
    (0xD9, 'text', '>B >H >I'.split()),
    (0xDC, 'list', '>H >I'.split()),
    (0xDE, 'dict', '>H >I'.split()),
    (0xE0, 'value', range(-0x20, 0)),
  )
  for i, value in enumerate(values)
}


class ArrayBytes(NamedTuple):
  """An array in a file; `spans` are the (offset, size) of its parts."""

  shape: Shape
  dtype: np.dtype
  spans: disk_arrays.Spans


def read_tree(location: Location) -> Any:
  """Returns the file's tree, each array as `ArrayBytes`.

  Raises:
    ValueError: the file is cut short, has more than one tree or is not msgpack;
      the message names the entry where reading failed.
  """
  scanner = _Scanner(location)
  try:
    tree = scanner.value()
    if scanner.position != scanner.size:
      raise ValueError(f'{scanner.size - scanner.position} bytes too many')
  except disk_arrays.WRONG_DATA as error:
    place = f'at {"/".join(scanner.path)}: ' if scanner.path else ''
    why = f'is cut short or not a T5X checkpoint ({place}{error})'
    source = f'{str(location)!r} ({scanner.size} bytes)'
    raise ValueError(f'{source} {why}; copy it again.') from error
  return tree


class _Scanner:
  """Reads a msgpack file, value by value, but skips the bytes of arrays."""

  def __init__(self, location: Location):
    self.size, self.position = location.size(), 0
    self.path: list[str] = []
    self._location, self._window = location, (0, b'')

  def value(self) -> Any:
    first = self._take(1)[0]
    if first not in _KINDS:
      raise ValueError(f'byte {first:#x} begins no value')
    kind, size = _KINDS[first]
    if isinstance(size, str):
      (size,) = struct.unpack(size, self._take(struct.calcsize(size)))
    if kind == 'dict':
      return self._dict(size)
    if kind == 'list':
      return [self.value() for _ in range(size)]
    if kind == 'text':
      return self._take(size).decode()
    if kind == 'bytes':
      return self._skip(size)
    if kind == 'value':
      return size
    code, end = self._take(1)[0], self.position + size
    if code not in _ARRAYS:
      self._skip(size)
      return None
    shape, name, span = self.value()
    if self.position != end:
      raise ValueError('an array of another length than its header says')
    return _array(shape, np.dtype(name), [span])

  def _dict(self, size: int) -> Any:
    entries: dict[str, Any] = {}
    for _ in range(size):
      name = str(self.value())
      self.path.append(name)
      value = self.value()
      if name in entries:
        raise ValueError('it is there twice')
      entries[name] = value
      self.path.pop()
    if _CHUNKED not in entries:
      return entries
    # flax has cut an array into chunks, of at most 2 GiB each.
    shape, parts = (
      [entries[name][str(i)] for i in range(len(entries[name]))]
      for name in ('shape', 'chunks')
    )
    spans = [span for part in parts for span in part.spans]
    return _array(shape, parts[0].dtype, spans)

  def _skip(self, size: int) -> tuple[int, int]:
    span = self.position, size
    self.position += size
    if self.position > self.size:
      raise ValueError(f'it ends at byte {self.position}')
    return span

  def _take(self, size: int) -> bytes:
    """Returns the next bytes; the file is read in windows of many bytes."""
    place, _ = self._skip(size)
    start, data = self._window
    if place < start or place + size > start + len(data):
      start, data = place, self._location.read(place, max(size, _WINDOW))
      self._window = start, data
    taken = data[place - start : self.position - start]
    if len(taken) < size:
      raise ValueError(f'it ends before byte {self.position}')
    return taken


def _array(shape: Any, dtype: np.dtype, spans: disk_arrays.Spans) -> ArrayBytes:
  """Makes an `ArrayBytes`; ValueError unless its spans have its size."""
  if not all(type(size) is int and size >= 0 for size in shape):
    raise ValueError(f'an array of shape {list(shape)}')
  needed = math.prod(shape) * dtype.itemsize
  if (size := sum(size for _, size in spans)) != needed:
    raise ValueError(f'{dtype} {list(shape)} needs {needed} bytes, not {size}')
  return ArrayBytes(tuple(shape), dtype, spans)
