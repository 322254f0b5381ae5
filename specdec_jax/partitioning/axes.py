"""Logical axes: what each dimension of an array is, and what it is split over.

The names are T5X's. A network does not know them: the tables below say by its
name which axes a parameter has, and by its field which a cache has.
"""

import dataclasses
import re

from specdec_jax.checks.names import check_choice

# The two axes of a mesh: requests are split over the one, weights over the
# other.
DATA, MODEL = 'data', 'model'
MESH_AXES = (DATA, MODEL)

Axes = tuple[str | None, ...]

# What a parameter's name ends in -> its axes.
_PARAMETERS: tuple[tuple[str, Axes], ...] = (
  ('token_embedder/embedding', ('vocab', 'embed')),
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
  (r'\w*norm/(scale|bias)', ('embed',)),
)
_RULES = tuple(
  (re.compile(f'(.*/)?{ending}'), axes) for ending, axes in _PARAMETERS
)

# A field of `KVCache` -> the axes of its arrays, see there.
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
  """What each logical axis is split over: 'data', 'model' or None, nothing.

  The defaults are Megatron's tensor parallelism with requests beside it: each
  block of a layer (attention, MLP) begins with kernels that are split by their
  outputs and ends with one that is split by its inputs, so that it needs one
  all-reduce, at its end: two a layer, and three in a decoder layer with
  cross-attention, whose queries are made of the whole sum that self-attention
  ends with. To keep cross-attention whole on each device would save the third,
  and read a seventh of the decoder's weights on each for it (XXL's).

  Attributes:
    batch: rows of a request. Over 'data': rows have nothing to do with each
      other, so nothing is exchanged but whether all are finished.
    embed: M. Over nothing: it is what every block reads whole; split, each
      kernel would have to be gathered, or each product be added up twice.
    heads: H, of caches and relative biases. Over 'model': a head attends by
      itself, so that its keys and values stay where they are made.
    kv: D. Over nothing: the scores of a head are a sum over it.
    joined_kv: H * D, the heads of a kernel. Over 'model', as `heads`: it is
      the same dimension before it is cut into heads.
    mlp: width of the feed-forward block. Over 'model': its activations are
      taken number by number.
    vocab: V. Over 'model': the embedding and the output layer are the largest
      arrays there are. Costs a sum of the rows that are looked up, and one
      gathering of the logits.
    relpos_buckets: over nothing: a table of 32 columns.
    abspos_buckets: learned positions. Over nothing: a row of them is read.
    length: slots of a cache, positions of an input. Over nothing: rows write
      at places of their own, which may be on any device.
    layers: over nothing: each layer is an array of its own, so there is no
      such dimension; and of devices that hold a layer each, all but one would
      wait.

  Raises:
    ValueError: a mesh axis is not known; two axes of one array are split over
      the same one; `heads` and `joined_kv` differ; no array has the axis.
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
        'LogicalAxes.heads and joined_kv are one dimension, after and before'
        f' it is cut into heads: give both the same, got {self.heads!r} and'
        f' {self.joined_kv!r}.'
      )
    for name, axes in (*_PARAMETERS, *CACHE.items()):
      self._check_distinct(name, axes)

  def split(self, axes: Axes) -> Axes:
    """The mesh axis of each logical one."""
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


# Each device has all of the model: for a drafter. Split, each layer of each of
# its gamma calls a round would wait for all-reduces.
REPLICATED = LogicalAxes(heads=None, joined_kv=None, mlp=None, vocab=None)


def axes_of_parameter(name: str) -> Axes:
  """Logical axes of a parameter, such as 'decoder/layers_0/mlp/wo/kernel'.

  Raises:
    ValueError: no rule knows it.
  """
  stored, transposed = re.subn('kernel_out_in$', 'kernel', name)
  for pattern, axes in _RULES:
    if pattern.fullmatch(stored):
      return axes[::-1] if transposed else axes
  endings = [ending for ending, _ in _PARAMETERS]
  raise ValueError(
    f'No rule says which axes the parameter {name!r} has; those there are for'
    f' names that end in {", ".join(endings)}.'
  )
