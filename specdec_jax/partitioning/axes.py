"""Logical axes: names of an array's dimensions, and how each of them is split.

The names are T5X's. A network does not know them: the tables below give the
axes of a parameter by the parameter's name, and the axes of a cache's array by
its field.
"""

import dataclasses
import re

from specdec_jax.checks.names import check_choice

# The two axes of a mesh: requests are split over the first, weights over the
# second.
DATA, MODEL = 'data', 'model'
MESH_AXES = (DATA, MODEL)

Axes = tuple[str | None, ...]

# The end of a parameter's name -> its axes.
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
  ('(query|key)_norm/scale', ('kv',)),
  (r'\w*norm/(scale|bias)', ('embed',)),
  ('place', (None,)),  # of `models.shortlist`
)
_RULES = tuple(
  (re.compile(f'(.*/)?{ending}'), axes) for ending, axes in _PARAMETERS
)

# A field of `KVCache` -> the axes of its arrays; see `KVCache`.
CACHE: dict[str, Axes] = {
  'keys': ('batch', 'heads', 'kv', 'length'),
  'values': ('batch', 'heads', 'kv', 'length'),
  'joined': (None, 'batch', 'heads', 'length', 'kv'),
  'cross_keys': ('batch', 'heads', 'kv', 'length'),
  'cross_values': ('batch', 'heads', 'kv', 'length'),
  'cross_bias': ('batch', None, None, 'length'),
  'position_bias': ('heads', 'length'),
  'length': ('batch',),
}


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
  """The mesh axis that each logical axis is split over; None is not split.

  The mesh axes are 'data' and 'model'. The defaults are Megatron's tensor
  parallelism, with requests split as well. Each block of a layer (attention,
  MLP) begins with kernels that are split by their outputs and ends with a
  kernel that is split by its inputs, so that it needs only one all-reduce, at
  its end. That makes two all-reduces per layer, and three in a decoder layer
  with cross-attention, whose queries need the complete sum that self-attention
  ends with. Keeping cross-attention whole on each device would save the third,
  but each device would read all its weights: a seventh of the decoder's (XXL).

  Attributes:
    batch: rows of a request. Split over 'data': rows are independent, so the
      only exchange is whether all rows are finished.
    embed: M. Not split: every block reads all of it; if it were split, each
      kernel would have to be gathered, or each product summed twice.
    heads: H, of caches and relative biases. Split over 'model': each head
      attends by itself, so its keys and values stay where they are made.
    kv: D. Not split: the scores of a head are a sum over it.
    joined_kv: H * D, the heads of a kernel. Split over 'model', like `heads`:
      it is the same dimension before it is cut into heads.
    mlp: width of the feed-forward block. Split over 'model': its activations
      are elementwise.
    vocab: V. Split over 'model': the embedding and the output layer are the
      largest arrays. The split costs a sum of the rows that are looked up, and
      one gathering of the logits.
    relpos_buckets: buckets of relative positions. Not split: a table has only
      32 columns.
    abspos_buckets: learned positions. Not split: only a row of them is read.
    length: slots of a cache, positions of an input. Not split: each row writes
      at its own place, which could be on any device.
    layers: layers of a stack. Not split: each layer is an array of its own, so
      no array has this dimension; and if each device held one layer, all
      devices but one would wait.

  Raises:
    ValueError: a mesh axis is unknown; two axes of one array are split over the
      same mesh axis; `heads` and `joined_kv` differ; no array has the axis.
  """

  batch: str | None = DATA
  embed: str | None = None
  heads: str | None = MODEL
  kv: str | None = None
  joined_kv: str | None = MODEL
  mlp: str | None = MODEL
  vocab: str | None = MODEL
  relpos_buckets: str | None = None
  abspos_buckets: str | None = None
  length: str | None = None
  layers: str | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      self._check_known(field.name)
    if self.heads != self.joined_kv:
      raise ValueError(
        'LogicalAxes.heads and joined_kv are the same dimension, after and'
        ' before it is cut into heads: give both the same value, got'
        f' {self.heads!r} and {self.joined_kv!r}.'
      )
    for name, axes in (*_PARAMETERS, *CACHE.items()):
      self._check_distinct(name, axes)

  def split(self, axes: Axes) -> Axes:
    """The mesh axis of each logical axis."""
    return tuple(None if name is None else getattr(self, name) for name in axes)

  def _check_known(self, name: str) -> None:
    value = getattr(self, name)
    if value is None:
      return
    check_choice(f'LogicalAxes.{name}', value, MESH_AXES)
    tables = [axes for _, axes in (*_PARAMETERS, *CACHE.items())]
    if not any(name in axes for axes in tables):
      raise ValueError(
        f'LogicalAxes.{name} is {value!r}, but no array has that axis: each'
        ' layer is an array of its own. Leave it None.'
      )

  def _check_distinct(self, what: str, axes: Axes) -> None:
    taken: dict[str, str] = {}
    for name, mesh_axis in zip(axes, self.split(axes), strict=True):
      if mesh_axis is None or name is None:
        continue
      if mesh_axis in taken:
        raise ValueError(
          f'LogicalAxes.{taken[mesh_axis]} and {name} are both split over'
          f' {mesh_axis!r}, and {what} has both; set one of them to None.'
        )
      taken[mesh_axis] = name


# Each device has the whole model: for a drafter. If it were split, each layer
# would wait for all-reduces in each of the drafter's gamma calls per round.
REPLICATED = LogicalAxes(heads=None, joined_kv=None, mlp=None, vocab=None)


def axes_of_parameter(name: str) -> Axes:
  """Logical axes of a parameter, such as 'decoder/layers_0/mlp/wo/kernel'.

  Raises:
    ValueError: no rule covers it.
  """
  if name.endswith('/kernel_scale'):
    return axes_of_parameter(name.removesuffix('_scale'))[-1:]
  stored, transposed = re.subn('kernel_out_in$', 'kernel', name)
  for pattern, axes in _RULES:
    if pattern.fullmatch(stored):
      return axes[::-1] if transposed else axes
  endings = [ending for ending, _ in _PARAMETERS]
  raise ValueError(
    f'No rule says which axes the parameter {name!r} has; there are rules for'
    f' names that end in {", ".join(endings)}.'
  )
