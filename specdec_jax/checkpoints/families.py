"""Families of Hugging Face folders: their fields and array names, as data.

A folder's `model_type` names its `Family`, a table of families.toml. It maps
fields of config.json to those of our configuration, lists fields that may have
only one value, and has transformers' names of our modules. `table` lists where
a file has each array of this library.

Kernels are [out, in] in files and [in, out] here; GPT-2's are [in, out] in
both. Where transformers scales and this library does not, or the reverse, the
factor becomes part of a kernel or a norm. In transformers GPT-2 and BART divide
queries by sqrt(D); an output layer that is GPT-2's embedding does not divide
its input by sqrt(M), as it does here; and a T5 may divide the input of a
separate output layer by sqrt(M).
"""

import pathlib
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import flax.traverse_util

from specdec_jax.checks.fields import check_choice
from specdec_jax.models.base import param_shapes
from specdec_jax.models.families import Config, network_of

Described = Mapping[str, Any]  # config.json, or a part of it
_HERE = pathlib.Path(__file__)
# Names in Hugging Face files that all model families share.
WORDS: dict[str, Any] = tomllib.loads(
  _HERE.with_name('transformers.toml').read_text('utf-8')
)


class Family(NamedTuple):
  """The data of a family: of all folders with the same `model_type`.

  Attributes:
    make: name of the function in `config_json` that makes the configuration.
    embedding: transformers' name of the array of the embedding that may also be
      the output layer.
    names: names of our modules -> transformers' names, with * for the number of
      a layer; and the same for arrays outside of modules.
    fields: our configuration's field -> config.json's.
    settings: fields of our configuration -> their values in all models of the
      family.
    defaults: fields of config.json -> their values if it leaves them out.
    read: further fields of config.json that the function `make` reads.
    fixed: fields of config.json -> the only values that the network supports.
    same: fields of config.json -> fields that they must be equal to.
    tied: whether the output layer is the embedding if config.json does not
      tell.
    ties_by_arrays: whether the arrays alone, not config.json, decide if the
      output layer is the embedding.
    head: transformers' name of the array of the output layer.
    prefix: pattern of the beginning of names in a file, which is removed,
      except for its group 'kept', if any.
    skipped: pattern of names of arrays that no model reads.
    images: pattern of names of arrays that only images need.
    aliases: names of arrays -> names of arrays that they must be equal to.
    zeros: names of arrays that are 0 if a file leaves them out.
    kernels_in_out: whether kernels in a file are [in, out], and one kernel has
      those of query, key and value as its thirds (GPT-2).
    scales_queries: whether transformers divides queries by sqrt(D) after their
      projection.
    stack: the `Family` of both stacks of a T5Gemma; None in other families.
  """

  make: str
  embedding: str
  names: Mapping[str, str]
  fields: Mapping[str, str] = {}
  settings: dict[str, Any] = {}
  defaults: dict[str, Any] = {}
  read: Collection[str] = ()
  fixed: dict[str, Any] = {}
  same: Mapping[str, str] = {}
  tied: bool = True
  ties_by_arrays: bool = False
  head: str = 'lm_head.weight'
  prefix: str = ''
  skipped: str = '(?!)'
  images: str = '(?!)'
  aliases: Mapping[str, str] = {}
  zeros: Collection[str] = ()
  kernels_in_out: bool = False
  scales_queries: bool = False
  stack: 'Family | None' = None

  def name_of(self, stored: str) -> str:
    """Returns an array's name in a file without the prefix."""
    prefix = re.match(self.prefix, stored)
    if prefix is None:
      return stored
    return (prefix.groupdict().get('kept') or '') + stored[prefix.end() :]


def read_tables(file: pathlib.Path) -> dict[str, Any]:
  """Reads a TOML file whose tables may extend the table that `like` names.

  Tables whose names begin with _ are left out, because they only serve to be
  extended.
  """
  tables = tomllib.loads(file.read_text('utf-8'))

  def whole(value: Any) -> Any:
    if not isinstance(value, dict):
      return value
    table = {name: whole(v) for name, v in value.items() if name != 'like'}
    base = value.get('like')
    return _merged(whole(tables[base]), table) if base else table

  return {n: whole(x) for n, x in tables.items() if not n.startswith('_')}


def _merged(base: Any, value: Any) -> Any:
  """Extends a value by another: merges dicts and joins lists."""
  if isinstance(value, dict):
    base = base or {}
    return base | {name: _merged(base.get(name), value[name]) for name in value}
  return [*(base or []), *value] if isinstance(value, list) else value


def _family(table: Any) -> Family:
  stack = {'stack': _family(table['stack'])} if 'stack' in table else {}
  return Family(**table | stack)


_TABLES = read_tables(_HERE.with_name('families.toml'))
FAMILIES = {name: _family(table) for name, table in _TABLES.items()}


def family_of(described: Described, where: str) -> Family:
  """Returns the family of a config.json; ValueError if it is unknown."""
  word = described.get('model_type')
  check_choice(f'{where}: model_type', word, FAMILIES)
  return FAMILIES[str(word)]


class Row(NamedTuple):
  """Where, and in which form, a file of transformers has one of our arrays.

  Attributes:
    name: transformers' name of the array.
    shape: shape of our array.
    transposed: whether the array in the file is the transpose of ours.
    third: which third of the last axis in the file is our array: 0, 1 or 2;
      None: the whole axis.
    scale: factor by which values from the file are multiplied.
  """

  name: str
  shape: tuple[int, ...]
  transposed: bool = False
  third: int | None = None
  scale: float = 1.0

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of the whole array in the file."""
    shape = self.shape[::-1] if self.transposed else self.shape
    return shape if self.third is None else (*shape[:-1], 3 * shape[-1])

  def to_file(self, array: Any) -> Any:
    """Returns our array in the form of a file; `third` must be None."""
    if self.scale != 1.0:
      array = (array.astype('float32') / self.scale).astype(array.dtype)
    return array.T if self.transposed else array


def table(
  family: Family, config: Config, scales_head: bool = False
) -> dict[str, Row]:
  """Returns the `Row` of each array of a model, by our name of the array.

  Args:
    family: the family of the file.
    config: configuration of the model.
    scales_head: whether transformers divides the input of a separate output
      layer by sqrt(M), see `config_json.scales_output`.
  """
  decoder, tokens = config.shape.decoder, config.shape.tokens
  thirds = ('query', 'key', 'value') if family.kernels_in_out else ()
  rows = {}
  shapes = param_shapes(network_of(config))
  for name, leaf in flax.traverse_util.flatten_dict(shapes, sep='/').items():
    module, _, kind = re.sub(r'layers_\d+', 'layers_*', name).rpartition('/')
    part = module.rpartition('/')[2]
    stored = family.names[module or name]
    if module:
      stored += '.bias' if kind == 'bias' else '.weight'
    if number := re.search(r'layers_(\d+)', name):
      stored = stored.replace('*', number[1])
    scale = 1.0
    if part == 'query' and family.scales_queries:
      scale = decoder.head_dim**-0.5
    elif part == 'logits_dense' and scales_head:
      scale = tokens.emb_dim**-0.5
    elif part == 'decoder_norm' and family.kernels_in_out:
      scale = tokens.emb_dim**0.5 if tokens.logits_via_embedding else 1.0
    is_out_in = not family.kernels_in_out or part == 'logits_dense'
    transposed = is_out_in and kind in ('kernel', 'rel_embedding')
    third = thirds.index(part) if part in thirds else None
    rows[name] = Row(stored, leaf.shape, transposed, third, scale)
  return rows
