"""Hugging Face folders of T5 models: config.json and safetensors.

What things are called there is in `huggingface_names`, how arrays are read in
`huggingface_arrays`, and how a hub id becomes a folder in `huggingface_fetch`.
The package safetensors comes with the extra `[huggingface]`.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints import gpt2_names
from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints import huggingface_names as names
from specdec_jax.checkpoints.huggingface_arrays import (
  CONFIG,
  INDEX,
  WEIGHTS,
  Layouts,
  Stored,
)
from specdec_jax.checkpoints.huggingface_names import SpecialIds
from specdec_jax.checkpoints.t5x import check_params
from specdec_jax.checks import memory
from specdec_jax.models import sizes
from specdec_jax.models.t5 import T5Config

Params = dict[str, Any]

GENERATION = 'generation_config.json'
MAX_SHARD_BYTES = 5_000_000_000

_EMBEDDING = 'shared.weight'
_HEAD = 'lm_head.weight'
# Other names of the embedding, and a table that no version of T5 reads.
_ALIASES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
_UNUSED = (
  'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
)


def save_huggingface(
  folder: str | os.PathLike[str],
  config: T5Config,
  params: Params,
  dtype: Any = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  ids: SpecialIds = names.T5_IDS,
) -> None:
  """Writes a folder that transformers' `from_pretrained` reads.

  config.json is written last: where it is, the rest is whole. One file's
  arrays are copied at a time.

  Args:
    folder: made if needed; the weights and configuration in it are replaced.
    config: shape of the model.
    params: its parameters as a checkpoint has them, not as placed.
    dtype: of the arrays on disk, e.g. jnp.bfloat16; None keeps theirs.
    max_shard_bytes: of the arrays in one file; what does not fit goes to
      several, and one array that is larger to a file of its own.
    ids: with a meaning of their own, T5's unless given.

  Raises:
    ValueError: the package safetensors is missing, `params` are not those of
      `config`, or transformers has no word for its activations.
    OSError: the disk is full or the folder not writable.
  """
  arrays.import_safetensors()
  described = names.describe(config)
  check_params(params, names.shapes(config))
  if max_shard_bytes < 1:
    raise ValueError(
      f'max_shard_bytes must be at least 1, got {max_shard_bytes}.'
    )
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  table = names.table(config)
  shards = _shards(table, flat, dtype, max_shard_bytes)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / CONFIG).unlink(missing_ok=True)
  for file_name, members in shards.items():
    _write_weights(folder / file_name, members, table, flat, dtype)
  if len(shards) > 1:
    _write_index(folder, shards, sum(_bytes(a, dtype) for a in flat.values()))
  # Those of an earlier save would be read instead, or beside.
  for old in folder.glob('model*.safetensors'):
    if old.name not in shards:
      old.unlink()
  if len(shards) == 1:
    (folder / INDEX).unlink(missing_ok=True)
  said = names.describe_ids(ids)
  files.write_json(folder / GENERATION, said, indent=2, sort_keys=True)
  embedding = flat[table[_EMBEDDING].name]
  described['torch_dtype'] = np.dtype(dtype or embedding.dtype).name
  files.write_json(folder / CONFIG, described | said, indent=2, sort_keys=True)


def _bytes(array: Any, dtype: Any) -> int:
  return array.size * np.dtype(dtype or array.dtype).itemsize


def _shards(
  table: Mapping[str, names.Row],
  flat: Mapping[str, Any],
  dtype: Any,
  limit: int,
) -> dict[str, list[str]]:
  """Returns file name -> names of its arrays, in order."""
  groups: list[list[str]] = [[]]
  filled = 0
  for name, row in table.items():
    size = _bytes(flat[row.name], dtype)
    if groups[-1] and filled + size > limit:
      groups.append([])
      filled = 0
    groups[-1].append(name)
    filled += size
  if len(groups) == 1:
    return {WEIGHTS: groups[0]}
  return {
    f'model-{i:05}-of-{len(groups):05}.safetensors': group
    for i, group in enumerate(groups, 1)
  }


def _write_weights(
  path: pathlib.Path,
  members: list[str],
  table: Mapping[str, names.Row],
  flat: Mapping[str, Any],
  dtype: Any,
) -> None:
  tensors = {}
  for name in members:
    row = table[name]
    array = np.asarray(flat[row.name], dtype)
    # A transposed view would be written in the order of its memory.
    tensors[name] = np.ascontiguousarray(array.T if row.transposed else array)
  temporary = path.with_name(f'.{path.name}.tmp')
  try:
    temporary.touch()
    mode = temporary.stat().st_mode
    # transformers refuses a file that does not say whose it is.
    arrays.import_safetensors().numpy.save_file(
      tensors, temporary, metadata={'format': 'pt'}
    )
    temporary.chmod(mode)  # the package makes files private
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _write_index(
  folder: pathlib.Path, shards: Mapping[str, list[str]], total: int
) -> None:
  weight_map = {n: shard for shard, members in shards.items() for n in members}
  index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
  files.write_json(folder / INDEX, index, indent=2, sort_keys=True)


def load_huggingface(
  folder: str | os.PathLike[str],
  dtype: Any = None,
  sharding: Layouts = None,
  described: Mapping[str, Any] | None = None,
) -> tuple[T5Config, Params]:
  """Reads a folder of one or several safetensors files.

  Whether the output layer is the embedding is read from the weights, since
  transformers 5 writes `tie_word_embeddings: true` for every T5. Arrays are
  read and placed one after another, so that no more than one is on the host
  beside those that stay there.

  Args:
    folder: with config.json and model.safetensors (or its shards).
    dtype: of the arrays returned; None keeps the files'.
    sharding: None for NumPy arrays; a jax Device or Sharding for all arrays;
      or a function from an array's name ('decoder/layers_0/mlp/wo/kernel') to
      one of these.
    described: config.json, where it has been read.

  Returns:
    The model's shape, and a nested dict of arrays named as T5X does.

  Raises:
    ValueError: the package safetensors is missing; a file is missing or
      broken; the architecture is no T5 that is supported; an array is
      missing, unknown, there twice or of another shape, with its name and its
      shapes; or it cannot be laid out by `sharding`.
  """
  folder = pathlib.Path(folder)
  described = described or arrays.read_json(folder / CONFIG)
  stored = arrays.open_folder(folder)
  _drop_aliases(stored, folder)
  tied = _HEAD not in stored or _same(stored, _HEAD, _EMBEDDING)
  scaled = _scales_output(described, tied)
  if tied and scaled:
    stored.pop(_HEAD, None)
  elif _HEAD not in stored and _EMBEDDING in stored:
    # T5 1.0 always rescales what a shared embedding reads, so a head that
    # does not is a layer of its own here.
    stored[_HEAD] = stored[_EMBEDDING]
  config = names.read_config(
    described, tied and scaled, os.fspath(folder / CONFIG)
  )
  check_room(config, folder, dtype, sharding)
  special_ids(folder, described)
  table = names.table(config)
  shapes = {name: row.shape for name, row in table.items()}
  check_stored(stored, shapes, folder)
  layouts: dict[str, arrays.Layout | None] = {}
  for name, row in table.items():
    shape = row.shape[::-1] if row.transposed else row.shape
    layouts[name] = arrays.layout_of(sharding, row.name, shape)
  flat = {}
  for name, row in table.items():
    scale = config.emb_dim**-0.5 if name == _HEAD and scaled else 1.0
    flat[row.name] = arrays.load(
      stored[name], row.transposed, layouts[name], dtype, scale
    )
  return config, flax.traverse_util.unflatten_dict(flat, sep='/')


def check_room(
  config: Any, folder: pathlib.Path, dtype: Any, sharding: Layouts
) -> None:
  """Raises ValueError where no memory could hold what config.json says."""
  there = memory.host_bytes() if sharding is None else memory.all_bytes()
  bytes_each = 2 if dtype is None else np.dtype(dtype).itemsize
  sizes.check_params(
    config, bytes_each, there, f'The model of {os.fspath(folder)!r}'
  )


def special_ids(
  folder: str | os.PathLike[str], described: Mapping[str, Any] | None = None
) -> SpecialIds:
  """Reads which ids start, end and fill the sequences of a folder's model.

  Args:
    folder: with config.json, and perhaps generation_config.json.
    described: config.json, where it has been read.

  Raises:
    ValueError: config.json is missing or broken, an id is no number, or the
      decoder starts with another id than 0.
  """
  folder = pathlib.Path(folder)
  described = described or arrays.read_json(folder / CONFIG)
  if (folder / GENERATION).exists():
    given = arrays.read_json(folder / GENERATION)
    # Generation follows this file where it says something.
    given = {key: value for key, value in given.items() if value is not None}
    described = {**described, **given}
  return names.read_ids(described, os.fspath(folder))


def check_type(described: Mapping[str, Any], where: str) -> None:
  """Raises ValueError unless config.json is a T5's or GPT-2's."""
  known = (*names.MODEL_TYPES, gpt2_names.MODEL_TYPE)
  names.check_word(where, 'model_type', described.get('model_type'), known)


def _scales_output(described: Mapping[str, Any], tied: bool) -> bool:
  """Whether transformers divides what the output layer reads by sqrt(M)."""
  explicit = described.get('scale_decoder_outputs')  # transformers 5 writes it
  if explicit is not None:
    return bool(explicit)
  if described.get('model_type') != 't5':
    return False  # mT5 has T5 1.1's output layer
  return tied and described.get('tie_word_embeddings') is not False


def check_stored(
  stored: Mapping[str, Stored],
  shapes: Mapping[str, tuple[int, ...]],
  folder: pathlib.Path,
) -> None:
  """Raises ValueError unless names and shapes are these, and types floats."""

  def shaped(shape):
    return jax.ShapeDtypeStruct(tuple(shape), np.float32)

  check_params(
    {name: shaped(array.shape) for name, array in stored.items()},
    {name: shaped(shape) for name, shape in shapes.items()},
    repr(os.fspath(folder)),
  )
  arrays.check_floats(stored, folder)


def _drop_aliases(stored: dict[str, Stored], folder: pathlib.Path) -> None:
  """Leaves one of the embedding's names, and none that T5 does not read."""
  stored.pop(_UNUSED, None)
  for alias in _ALIASES:
    if alias not in stored:
      continue
    if _EMBEDDING not in stored:
      stored[_EMBEDDING] = stored[alias]
    elif not _same(stored, alias, _EMBEDDING):
      raise ValueError(
        f'{os.fspath(folder)!r} has the embedding twice, and not the same one:'
        f' {alias} {list(stored[alias].shape)} and {_EMBEDDING}'
        f' {list(stored[_EMBEDDING].shape)}.'
      )
    del stored[alias]


def _same(stored: Mapping[str, Stored], one: str, other: str) -> bool:
  if one not in stored or other not in stored:
    return False
  return arrays.same(stored[one], stored[other])
