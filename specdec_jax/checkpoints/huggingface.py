"""Opens and writes Hugging Face folders, and fetches them from the hub.

`families` has the names of their arrays, and `config_json` reads config.json.
The package safetensors comes with the extra `[huggingface]`, huggingface_hub
with `[hub]`.
"""

import os
import pathlib
import re
import warnings
from collections.abc import Mapping

import flax.traverse_util
import jax
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints import (
  config_json,
  families,
  generation,
  lora,
  safetensors_files,
)
from specdec_jax.checkpoints.config_json import CONFIG, FolderFacts, SpecialIds
from specdec_jax.checkpoints.disk_arrays import (
  DiskArray,
  Dtype,
  Params,
  load_array,
)
from specdec_jax.checkpoints.families import Described, Family
from specdec_jax.checkpoints.t5x import check_params
from specdec_jax.checks.fields import check_type, package, unexpected
from specdec_jax.models import sizes
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.families import config_of, network_of
from specdec_jax.models.t5 import T5Config

WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'
# The files to fetch from the hub, without weights for other frameworks.
PATTERNS = (
  CONFIG,
  generation.FILE,
  'model*.safetensors',
  INDEX,
  'spiece.model',
  'sentencepiece.bpe.model',  # the vocabulary of M2M-100
  'tokenizer*',
  'vocab.json',
  'merges.txt',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template*',
)


# These functions open a folder.


def _open_files(folder: pathlib.Path) -> dict[str, DiskArray]:
  """Returns name -> array for all safetensors files of a folder.

  Raises:
    ValueError: a file is missing or broken, or two files have the same array.
  """
  arrays: dict[str, DiskArray] = {}
  for file_name in _weight_files(folder):
    opened = safetensors_files.open_file(folder / file_name)
    for name in arrays.keys() & opened.keys():
      raise _twice(folder, arrays[name], opened[name])
    arrays |= opened
  return arrays


def _weight_files(folder: pathlib.Path) -> list[str]:
  if os.path.lexists(folder / WEIGHTS):
    return [WEIGHTS]
  if not os.path.lexists(folder / INDEX):
    expected = f'{WEIGHTS} or {INDEX}'
    names = sorted(path.name for path in folder.iterdir())[:8]
    advice = 'Save the model with safe_serialization=True.'
    raise unexpected(os.fspath(folder), expected, names, advice)
  index, where = files.read_json(folder / INDEX), os.fspath(folder / INDEX)
  check_type(f'{where}: weight_map', index.get('weight_map'), Mapping[str, str])
  for tensor, shard in index['weight_map'].items():
    # The path could lead out of the folder.
    if pathlib.Path(shard).name != shard:
      expected = 'names of files of the same folder'
      raise unexpected(f'{where}: {tensor}', expected, shard)
  return sorted({*index['weight_map'].values()})


def _twice(source: object, first: DiskArray, second: DiskArray) -> ValueError:
  return ValueError(
    f'{str(source)!r} has an array twice: as {first.where} and as'
    f' {second.where}.'
  )


def open_huggingface(
  folder: str | os.PathLike[str],
  network: LanguageModel | None = None,
  dtype: Dtype = None,
  adapter: str | os.PathLike[str] | None = None,
) -> tuple[FolderFacts, dict[str, DiskArray]]:
  """Finds the arrays of a model, without reading them.

  Args:
    folder: folder with config.json and model.safetensors (or its shards).
    network: the network that the folder should hold.
    dtype: the arrays must fit into memory in this dtype.
    adapter: folder of a LoRA adapter to merge, see `lora`.

  Returns:
    The folder's facts, and its arrays by their T5X names.

  Raises:
    ValueError: the package safetensors is missing; a file is missing or broken;
      the architecture is not supported, or not `network`'s; or an array is
      missing, unknown, there twice or of another shape (the message has its
      name and shapes).
  """
  source = os.fspath(folder)
  if '://' in source:
    raise unexpected(source, 'a folder on this machine', 'one in a bucket')
  folder = pathlib.Path(folder)
  described = files.read_json(folder / CONFIG)
  family = families.family_of(described, source)
  stored, tied = _tidy(_open_files(folder), family, described, source)
  if adapter is not None:
    stored = lora.adapted(stored, adapter, family)
  config = config_json.read_config(described, os.fspath(folder / CONFIG), tied)
  facts = config_json.read_facts(folder, described, config)
  itemsize = 2 if dtype is None else jax.numpy.dtype(dtype).itemsize
  sizes.check_params(config, f'The model of {source!r}', itemsize)
  scales_head = config_json.scales_output(described) and not tied
  table = families.table(family, config, scales_head)
  for row in table.values():
    if row.name not in stored and row.name in family.zeros:
      zeros = np.zeros(row.stored_shape, np.float32)
      stored[row.name] = DiskArray(zeros.shape, zeros.dtype, zeros.__getitem__)
  expected = {
    row.name: jax.ShapeDtypeStruct(row.stored_shape, np.float32)
    for row in table.values()
  }
  check_params(stored, expected, repr(source))
  expected_config = config_of(network)
  if isinstance(expected_config, type(config)):
    config_json.check_config(facts.config, expected_config, source)
  elif network is not None:
    check_params(table, param_shapes(network), repr(source))
  views = {
    name: safetensors_files.view(stored[row.name], row)
    for name, row in table.items()
  }
  return facts, views


def _tidy(
  stored: Mapping[str, DiskArray],
  family: Family,
  described: Described,
  source: str,
) -> tuple[dict[str, DiskArray], bool]:
  """Gives the arrays that a model reads their names in `families.table`.

  Returns:
    The arrays, and whether the output layer is the embedding, by transformers'
    rule: config.json decides, unless the file has two arrays that differ.

  Raises:
    ValueError: an array is there twice.
  """
  arrays: dict[str, DiskArray] = {}
  for name, array in stored.items():
    name = family.name_of(name)
    if re.fullmatch(f'{family.skipped}|{family.images}', name):
      continue
    if name in arrays:
      raise _twice(source, arrays[name], array)
    arrays[name] = array
  count = sum(bool(re.search(family.images, name)) for name in stored)
  if count:
    warnings.warn(
      f'{source!r}: {count} arrays are for images and are skipped: the network'
      ' here reads text alone.',
      stacklevel=3,
    )
  aliases = family.aliases
  if config_json.has_own_tables(family, described):
    # transformers reads no table for both.
    arrays.pop('shared.weight', None)
    aliases = {}
  for other, name in aliases.items():
    if not _is_one(arrays, other, name):
      raise ValueError(
        f'{source!r}: {other} {list(arrays[other].shape)} and {name}'
        f' {list(arrays[name].shape)} differ: expected one array. Correct one.'
      )
  tied = config_json.is_tied(family, described)
  tied = tied and _is_one(arrays, family.head, family.embedding)
  if family.ties_by_arrays and tied and family.embedding in arrays:
    if not config_json.scales_output(described):
      # A T5's shared embedding rescales its input here. If transformers' does
      # not, the output layer becomes a separate array.
      arrays[family.head] = arrays[family.embedding]
      tied = False
  return arrays, tied


def _is_one(arrays: dict[str, DiskArray], other: str, name: str) -> bool:
  """Checks whether two names stand for one array; if so, keeps only `name`.

  A file may have either name, or both.
  """
  if other not in arrays:
    return True
  array, first = arrays[other], arrays.setdefault(name, arrays[other])
  equal = array is first or (
    array.shape == first.shape
    and np.array_equal(load_array(array), load_array(first))
  )
  if equal:
    del arrays[other]
  return equal


# These functions write a folder.


def save_huggingface(
  folder: str | os.PathLike[str],
  config: T5Config | BartConfig,
  params: Params,
  ids: SpecialIds = config_json.T5_IDS,
  about: Mapping[str, str] | None = None,
) -> None:
  """Writes a T5 or BART as a folder that transformers' `from_pretrained` reads.

  config.json is written last: if it exists, everything else is complete. One
  array at a time is copied.

  Args:
    folder: made if needed; weights and configuration in it are replaced.
    config: the model's configuration.
    params: its parameters as in a checkpoint, not as placed.
    ids: the special ids.
    about: fingerprints for config.json, by the keys of `config_json.ABOUT`;
      transformers ignores them.

  Raises:
    ValueError: `params` do not fit `config`, or transformers lacks a name for
      its activations.
    OSError: the disk is full or the folder not writable.
  """
  described = config_json.describe(config)
  family = families.FAMILIES[described['model_type']]
  check_params(params, param_shapes(network_of(config)))
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / CONFIG).unlink(missing_ok=True)
  arrays = {
    row.name: row.to_file(flat[name])
    for name, row in families.table(family, config).items()
  }
  safetensors_files.write_file(folder / WEIGHTS, arrays)
  # Otherwise files of an earlier save would be read, too.
  for old in folder.glob('model*.safetensors*'):
    if old.name != WEIGHTS:
      old.unlink()
  special = config_json.describe_ids(ids)
  files.write_json(folder / generation.FILE, special, indent=2, sort_keys=True)
  dtype = flat['token_embedder/embedding'].dtype
  described |= {'torch_dtype': np.dtype(dtype).name, **special}
  described |= {config_json.ABOUT[n]: text for n, text in (about or {}).items()}
  files.write_json(folder / CONFIG, described, indent=2, sort_keys=True)


# These functions use the hub.


def fetch(name: str) -> pathlib.Path:
  """Returns a local folder with a model from the Hugging Face hub.

  The package huggingface_hub has a cache, and needs the network only for files
  that are missing there.

  Args:
    name: an id, such as 'google/flan-t5-small', or 'ID@REVISION', a branch, tag
      or commit; the main branch by default.

  Raises:
    ValueError: the package is not installed, the hub cannot be reached, it has
      no such model or revision or wants a login for it, or the model has no
      safetensors.
  """
  hub = package(
    'A model of the Hugging Face hub',
    'huggingface_hub',
    'hub',
    'Or give a local folder.',
  )
  hub_id, _, revision = name.partition('@')
  at = f'{hub_id!r}' + (f' at {revision!r}' if revision else '')
  try:
    fetched = hub.snapshot_download(
      hub_id, revision=revision or None, allow_patterns=list(PATTERNS)
    )
  except Exception as error:  # errors of its HTTP client have no base class
    why = ' '.join(str(error).split())
    raise ValueError(
      f'{at} could not be fetched from the hub ({type(error).__name__}: {why}).'
      ' Expected an id that it has, and `hf auth login` where it is private.'
    ) from error
  folder = pathlib.Path(fetched)
  if not any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX)):
    raise ValueError(
      f'{at} of the hub has no {WEIGHTS} and no {INDEX}. Try another revision,'
      f" such as '{hub_id}@refs/pr/1', or save it with safe_serialization=True."
    )
  return folder
