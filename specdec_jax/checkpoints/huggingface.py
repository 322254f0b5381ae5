"""Hugging Face folders: config.json and safetensors.

`huggingface_names` (T5), `gpt2_names`, `m2m100_names`, `t5gemma_names`, and
`causal_names` with `causal_config` (Llama, Qwen, Gemma) know their names,
`huggingface_arrays` finds and reads their arrays, and `huggingface_fetch` gets
a folder from the hub by its id. Two factors of GPT-2 are moved into weights,
see `models.gpt`: query projections are divided by sqrt(D), as M2M-100's are,
and the last norm is multiplied by sqrt(M) if the embedding is shared. The
package safetensors comes with the extra `[huggingface]`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints import (
  causal_config,
  causal_names,
  gpt2_names,
  lora,
  m2m100_names,
  t5gemma_names,
)
from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints import huggingface_names as names
from specdec_jax.checkpoints.disk_arrays import (
  DiskArray,
  Params,
  Shardings,
  check_config_fits,
  load_arrays,
)
from specdec_jax.checkpoints.huggingface_arrays import (
  CONFIG,
  INDEX,
  WEIGHTS,
  Stored,
  View,
)
from specdec_jax.checkpoints.huggingface_names import Row, SpecialIds
from specdec_jax.checkpoints.t5x import check_params
from specdec_jax.checks.names import check_choice
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.families import Config
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.models.t5gemma import T5GemmaConfig

GENERATION = 'generation_config.json'
MAX_SHARD_BYTES = 5_000_000_000

_EMBEDDING = 'shared.weight'
# Other names of the embedding, and a table that no version of T5 reads.
_ALIASES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
_UNUSED = (
  'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
)


def save_huggingface(
  folder: str | os.PathLike[str],
  config: T5Config,
  params: Params,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  ids: SpecialIds = names.T5_IDS,
  about: Mapping[str, str] | None = None,
) -> None:
  """Writes a folder that transformers' `from_pretrained` reads.

  config.json is written last: if it exists, everything else is complete. The
  arrays of one file at a time are copied.

  Args:
    folder: made if needed; weights and configuration in it are replaced.
    config: shape of the model.
    params: its parameters as a checkpoint has them, not as placed.
    max_shard_bytes: the most bytes of arrays per file. If there are more, there
      are several files; an array that is larger gets a file of its own.
    ids: the special ids; T5's unless given.
    about: what else config.json is to say, by the keys of `names.ABOUT`;
      transformers does not look at it.

  Raises:
    ValueError: the package safetensors is missing, `params` do not fit
      `config`, or transformers has no name for its activations.
    OSError: the disk is full or the folder not writable.
  """
  arrays.import_safetensors()
  described = names.describe(config)
  check_params(params, names.shapes(T5(config)))
  if max_shard_bytes < 1:
    raise ValueError(
      f'max_shard_bytes must be at least 1, got {max_shard_bytes}.'
    )
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  table = names.table(config)
  shards = _shards(table, flat, max_shard_bytes)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / CONFIG).unlink(missing_ok=True)
  for file_name, members in shards.items():
    _write_weights(folder / file_name, members, flat)
  if len(shards) > 1:
    _write_index(folder, shards, sum(a.nbytes for a in flat.values()))
  # Files of an earlier save would be read instead of these, or besides them.
  for old in folder.glob('model*.safetensors'):
    if old.name not in shards:
      old.unlink()
  if len(shards) == 1:
    (folder / INDEX).unlink(missing_ok=True)
  said = names.describe_ids(ids)
  files.write_json(folder / GENERATION, said, indent=2, sort_keys=True)
  embedding = flat['token_embedder/embedding']
  described['torch_dtype'] = np.dtype(embedding.dtype).name
  for name, text in (about or {}).items():
    described[names.ABOUT[name]] = text
  files.write_json(folder / CONFIG, described | said, indent=2, sort_keys=True)


def _shards(
  table: Mapping[str, Row], flat: Mapping[str, Any], limit: int
) -> dict[str, dict[str, Row]]:
  """Returns file name -> the rows of `table` whose arrays it has, in order."""
  groups: list[dict[str, Row]] = [{}]
  filled = 0
  for name, row in table.items():
    size = flat[name].nbytes
    if groups[-1] and filled + size > limit:
      groups.append({})
      filled = 0
    groups[-1][name] = row
    filled += size
  if len(groups) == 1:
    return {WEIGHTS: groups[0]}
  return {
    f'model-{i:05}-of-{len(groups):05}.safetensors': group
    for i, group in enumerate(groups, 1)
  }


def _write_weights(
  path: pathlib.Path, members: Mapping[str, Row], flat: Mapping[str, Any]
) -> None:
  tensors = {}
  for name, row in members.items():
    array = np.asarray(flat[name])
    # Without a copy a transposed view would be written in its memory order.
    tensors[row.name] = np.ascontiguousarray(
      array.T if row.transposed else array
    )
  temporary = path.with_name(f'.{path.name}.tmp')
  try:
    temporary.touch()
    mode = temporary.stat().st_mode
    # transformers refuses a file that does not name its framework.
    arrays.import_safetensors().numpy.save_file(
      tensors, temporary, metadata={'format': 'pt'}
    )
    temporary.chmod(mode)  # the package makes files private
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _write_index(
  folder: pathlib.Path, shards: Mapping[str, Mapping[str, Row]], total: int
) -> None:
  weight_map = {
    row.name: shard
    for shard, members in shards.items()
    for row in members.values()
  }
  index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
  files.write_json(folder / INDEX, index, indent=2, sort_keys=True)


def load_huggingface(
  folder: str | os.PathLike[str],
  dtype: Any = None,
  sharding: Shardings = None,
  network: LanguageModel | None = None,
) -> tuple[Config, Params]:
  """Reads a model of one or several safetensors files.

  Args:
    folder: folder with config.json and model.safetensors (or its shards).
    dtype: dtype of the arrays returned; None keeps the files'.
    sharding: see `disk_arrays.load_arrays`.
    network: network that the folder should hold; compared before arrays are
      read.

  Returns:
    The model's shape, and a nested dict of arrays with T5X's names.

  Raises:
    ValueError: as for `open_huggingface`; or an array is broken, or cannot be
      laid out by `sharding`.
  """
  config, found = open_huggingface(folder, network, dtype=dtype)
  return config, load_arrays(found, os.fspath(folder), dtype, sharding)


def open_huggingface(
  folder: str | os.PathLike[str],
  network: LanguageModel | None = None,
  described: Mapping[str, Any] | None = None,
  dtype: Any = None,
  adapter: str | os.PathLike[str] | None = None,
) -> tuple[Config, dict[str, DiskArray]]:
  """Finds the arrays of a model without reading them.

  Whether the output layer of a T5 or GPT-2 is the embedding is decided by the
  weights, because transformers 5 writes `tie_word_embeddings: true` for every
  T5.

  Args:
    folder: folder with config.json and model.safetensors (or its shards).
    network: network that the folder should hold.
    described: config.json, if it has been read already.
    dtype: dtype that the arrays will have, to check that they fit in memory.
    adapter: folder of a LoRA adapter that is merged, see `lora`; None is none.

  Returns:
    The model's shape, and its arrays by their T5X names.

  Raises:
    ValueError: the package safetensors is missing; a file is missing or broken;
      the architecture is not supported, or not `network`'s; or an array is
      missing, unknown, there twice or of another shape (the message has its
      name and shapes).
  """
  source = os.fspath(folder)
  if '://' in source:
    raise ValueError(
      f'{source!r} is a Hugging Face folder in a bucket; copy it to this'
      ' machine first.'
    )
  folder = pathlib.Path(folder)
  described = described or arrays.read_json(folder / CONFIG)
  stored = arrays.open_folder(folder)
  tied, head_scaled = None, False
  family = _family(described, source)
  if family is gpt2_names:
    stored, tied = gpt2_names.tidy(stored, source)
  elif family is not names:
    stored = family.tidy(stored, described, source)
  else:
    tied, head_scaled = _tidy_t5(stored, described, source)
    special_ids(folder, described)
  if adapter is not None:
    stored = lora.adapted(stored, adapter, family is gpt2_names)
  config = read_config(described, os.fspath(folder / CONFIG), tied)
  check_config_fits(config, f'The model of {source!r}', dtype)
  if isinstance(config, T5GemmaConfig):
    start = special_ids(folder, described, None).decoder_start
    config = dataclasses.replace(config, start_id=start)
  scaled = {'head_scaled': True} if head_scaled else {}
  table = family.table(config, **scaled)
  _check_stored(stored, table, source)
  _check_network(config, network, table, source, family.FIELDS)
  return config, {
    name: View(stored[row.name], row) for name, row in table.items()
  }


def read_config(
  described: Mapping[str, Any], where: str, tied: bool | None = None
) -> Config:
  """Returns the shape that a config.json describes.

  Args:
    described: config.json.
    where: its path, for messages.
    tied: whether the output layer is the embedding, as the weights show; None
      assumes what most models of the family have.

  Raises:
    ValueError: the architecture is not supported; or a field is missing, or
      differs from what the network here has built in.
  """
  family = _family(described, where)
  if family is causal_names:
    return causal_config.read_config(described, where)
  if family is m2m100_names:
    return m2m100_names.read_config(described, where)
  if family is t5gemma_names:
    return t5gemma_names.read_config(described, where)
  if family is gpt2_names:
    tied = True if tied is None else tied
    return gpt2_names.read_config(described, tied, where)
  return names.read_config(described, bool(tied), where)


def _family(described: Mapping[str, Any], where: str) -> ModuleType:
  """The table of names of a config.json; ValueError if there is none."""
  families = {
    **dict.fromkeys(names.MODEL_TYPES, names),
    gpt2_names.MODEL_TYPE: gpt2_names,
    **dict.fromkeys(causal_config.MODEL_TYPES, causal_names),
    m2m100_names.MODEL_TYPE: m2m100_names,
    **dict.fromkeys(t5gemma_names.MODEL_TYPES, t5gemma_names),
  }
  word = described.get('model_type')
  check_choice(f'{where}: model_type', word, families)
  return families[str(word)]


def _check_stored(
  stored: Mapping[str, Stored], table: Mapping[str, Row], source: str
) -> None:
  """Raises ValueError unless names and shapes fit, and dtypes are floats."""

  def shaped(shape):
    return jax.ShapeDtypeStruct(tuple(shape), np.float32)

  check_params(
    {name: shaped(array.shape) for name, array in stored.items()},
    {row.name: shaped(row.stored_shape) for row in table.values()},
    repr(source),
  )
  arrays.check_floats(stored, source)


def _check_network(
  found: Config,
  network: LanguageModel | None,
  table: Mapping[str, Row],
  source: str,
  fields: Mapping[str, str],
) -> None:
  """Raises ValueError unless a folder's model fits the network."""
  config = getattr(network, 'config', None)
  if isinstance(config, type(found)):
    names.check_config(found, config, source, fields)
  elif network is not None:
    expected = param_shapes(network)
    check_params(dict(table), expected, repr(source))


def special_ids(
  folder: str | os.PathLike[str],
  described: Mapping[str, Any] | None = None,
  start_id: int | None = 0,
) -> SpecialIds:
  """Reads which ids start, end and pad the sequences of a folder's model.

  Args:
    folder: folder with config.json, and perhaps generation_config.json.
    described: config.json, if it has been read already.
    start_id: the id that the decoder must start with; None is any.

  Raises:
    ValueError: config.json is missing or broken, an id is not a number, or the
      decoder starts with another id.
  """
  folder = pathlib.Path(folder)
  described = described or arrays.read_json(folder / CONFIG)
  if (folder / GENERATION).exists():
    given = arrays.read_json(folder / GENERATION)
    # Its values take precedence for generation.
    given = {key: value for key, value in given.items() if value is not None}
    described = {**described, **given}
  if described.get('model_type') in t5gemma_names.MODEL_TYPES:
    described = t5gemma_names.with_ids(described)
  return names.read_ids(described, os.fspath(folder), start_id)


def _scales_output(described: Mapping[str, Any], tied: bool) -> bool:
  """Whether transformers divides the input of the output layer by sqrt(M)."""
  explicit = described.get('scale_decoder_outputs')  # transformers 5 writes it
  if explicit is not None:
    return bool(explicit)
  if described.get('model_type') != 't5':
    return False  # mT5 has T5 1.1's output layer
  return tied and described.get('tie_word_embeddings') is not False


def _tidy_t5(
  stored: dict[str, Stored], described: Mapping[str, Any], source: str
) -> tuple[bool, bool]:
  """Keeps, in `stored`, the arrays that a T5 reads, each under one name.

  Returns:
    Whether the output layer is the embedding, and whether the input of the
    output layer is divided by sqrt(M).
  """
  stored.pop(_UNUSED, None)
  for alias in _ALIASES:
    if alias not in stored:
      continue
    if _EMBEDDING not in stored:
      stored[_EMBEDDING] = stored[alias]
    elif not arrays.same(stored[alias], stored[_EMBEDDING]):
      raise ValueError(
        f'{source!r} has the embedding twice, and not the same one:'
        f' {alias} {list(stored[alias].shape)} and {_EMBEDDING}'
        f' {list(stored[_EMBEDDING].shape)}.'
      )
    del stored[alias]
  tied = arrays.has_no_head(stored, _EMBEDDING)
  scaled = _scales_output(described, tied)
  if tied and scaled:
    stored.pop(arrays.HEAD, None)
  elif arrays.HEAD not in stored and _EMBEDDING in stored:
    # A shared embedding always rescales its input here, as in T5 1.0. So an
    # output layer that does not rescale becomes a separate layer here.
    stored[arrays.HEAD] = stored[_EMBEDDING]
  return tied and scaled, scaled
