"""Opens and writes Hugging Face folders, and fetches them from the hub.

`families` has the names of the folders' arrays, and `config_json` reads
config.json. Arrays are in safetensors files. The package safetensors comes with
the extra `[huggingface]`, huggingface_hub with `[hub]`.

A LoRA adapter is merged into a model's kernels while these are read. A folder
of PEFT has adapter_config.json and adapter_model.safetensors, with two thin
kernels, A [r, in] and B [out, r], for each kernel W that was adapted. The
merged kernel is W + s * B A, with s = lora_alpha / r, or lora_alpha / sqrt(r)
for rank-stabilised LoRA. The sum is computed in float32, and rounded to W's
dtype. PEFT names modules as transformers does, so an adapter's names fit those
in the model's files.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints import config_json, disk_arrays, families
from specdec_jax.checkpoints.config_json import CONFIG, FolderFacts, SpecialIds
from specdec_jax.checkpoints.disk_arrays import Arrays, DiskArray, Index, Path
from specdec_jax.checkpoints.families import WORDS, Described, Family, Row
from specdec_jax.checkpoints.t5x import check_params
from specdec_jax.checks import fields as checks
from specdec_jax.checks.fields import check_type, package, unexpected
from specdec_jax.models import sizes
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.families import config_of, network_of
from specdec_jax.models.t5 import T5Config

WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'
# The files to fetch from the hub, without weights for other frameworks.
# sentencepiece.bpe.model is the vocabulary of M2M-100.
PATTERNS = f"""
config.json generation_config.json model*.safetensors {INDEX} spiece.model
sentencepiece.bpe.model tokenizer* vocab.json merges.txt added_tokens.json
special_tokens_map.json chat_template*
""".split()


# These functions open a folder.


def _open_files(folder: pathlib.Path) -> dict[str, DiskArray]:
  """Returns the arrays of all safetensors files of a folder, by name.

  Raises:
    ValueError: a file is missing or broken, or two files have the same array.
  """
  arrays: dict[str, DiskArray] = {}
  for file_name in _weight_files(folder):
    for name, array in open_file(folder / file_name).items():
      _add(arrays, name, array, folder)
  return arrays


def _weight_files(folder: pathlib.Path) -> list[str]:
  if os.path.lexists(folder / WEIGHTS):
    return [WEIGHTS]
  if not os.path.lexists(folder / INDEX):
    names = sorted(path.name for path in folder.iterdir())[:8]
    advice = 'Save the model with safe_serialization=True.'
    raise unexpected(os.fspath(folder), f'{WEIGHTS} or {INDEX}', names, advice)
  index, where = files.read_json(folder / INDEX), os.fspath(folder / INDEX)
  check_type(f'{where}: weight_map', index.get('weight_map'), Mapping[str, str])
  for tensor, shard in index['weight_map'].items():
    # A name with slashes could lead out of the folder.
    if pathlib.Path(shard).name != shard:
      expected = 'names of files of the same folder'
      raise unexpected(f'{where}: {tensor}', expected, shard)
  return sorted({*index['weight_map'].values()})


def _add(
  arrays: dict[str, DiskArray], name: str, array: DiskArray, source: object
) -> None:
  """Adds an array to those of a folder; ValueError if it is there already."""
  if name in arrays:
    both = f'as {arrays[name].where} and as {array.where}'
    raise ValueError(f'{str(source)!r} has an array twice: {both}.')
  arrays[name] = array


def open_huggingface(
  folder: Path,
  network: LanguageModel | None = None,
  dtype: disk_arrays.Dtype = None,
  adapter: Path | None = None,
) -> tuple[FolderFacts, dict[str, DiskArray]]:
  """Finds the arrays of a model, without reading them.

  Args:
    folder: folder with config.json and model.safetensors (or its shards).
    network: the network that the folder should hold; None: any network.
    dtype: dtype in which the arrays must fit into memory.
    adapter: folder of a LoRA adapter to merge, as this module's docstring
      describes; None: no adapter.

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
    stored = _adapted(stored, adapter, family)
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
  shapes = {row.name: row.stored_shape for row in table.values()}
  expected = {n: jax.ShapeDtypeStruct(x, float) for n, x in shapes.items()}
  check_params(stored, expected, repr(source))
  expected_config = config_of(network)
  if isinstance(expected_config, type(config)):
    config_json.check_config(facts.config, expected_config, source)
  elif network is not None:
    check_params(table, param_shapes(network), repr(source))
  return facts, {n: _view(stored[row.name], row) for n, row in table.items()}


def _tidy(
  stored: Arrays, family: Family, described: Described, source: str
) -> tuple[dict[str, DiskArray], bool]:
  """Selects the arrays that a model reads, and renames them.

  The new names are those in `families.table`.

  Returns:
    The arrays, and whether the output layer is the embedding. As in
    transformers, config.json decides this, unless the folder has an array for
    each and they differ.

  Raises:
    ValueError: the folder has an array twice, or two arrays that must be equal
      differ.
  """
  arrays: dict[str, DiskArray] = {}
  for name, array in stored.items():
    name = family.name_of(name)
    if re.fullmatch(f'{family.skipped}|{family.images}', name):
      continue
    _add(arrays, name, array, source)
  count = sum(bool(re.search(family.images, name)) for name in stored)
  if count:
    skipped = f'{count} arrays are for images and are skipped'
    why = f'{source!r}: {skipped}: the network here reads text alone.'
    warnings.warn(why, stacklevel=3)
  aliases = family.aliases
  if config_json.has_own_tables(family, described):
    # transformers then reads no embedding that both share.
    arrays.pop('shared.weight', None)
    aliases = {}
  for other, name in aliases.items():
    if not _is_one(arrays, other, name):
      shapes = [f'{x} {list(arrays[x].shape)}' for x in (other, name)]
      both = f'{" and ".join(shapes)} differ: expected one array'
      raise ValueError(f'{source!r}: {both}. Correct one.')
  tied = config_json.is_tied(family, described)
  tied = tied and _is_one(arrays, family.head, family.embedding)
  if family.ties_by_arrays and tied and family.embedding in arrays:
    if not config_json.scales_output(described):
      # Here a T5's embedding, as output layer, divides its input by sqrt(M). If
      # that of transformers does not, the output layer becomes a separate
      # array.
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
  equal = array is first
  if not equal and array.shape == first.shape:
    one, two = map(disk_arrays.load_array, (array, first))
    equal = np.array_equal(one, two)
  if equal:
    del arrays[other]
  return equal


# These functions write a folder.


def save_huggingface(
  folder: Path,
  config: T5Config | BartConfig,
  params: disk_arrays.Params,
  ids: SpecialIds = config_json.T5_IDS,
  about: disk_arrays.About = None,
) -> None:
  """Writes a T5 or BART as a folder that transformers' `from_pretrained` reads.

  config.json is written last: if it exists, everything else is complete. At
  most one array at a time is copied.

  Args:
    folder: the folder, which is made if needed; weights and configuration in it
      are replaced.
    config: the model's configuration.
    params: the model's parameters, laid out as in a checkpoint, not as by
      `partitioning.place`.
    ids: special ids, which are written to config.json and
      generation_config.json.
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
  rows = families.table(family, config).items()
  arrays = {row.name: row.to_file(flat[name]) for name, row in rows}
  _write_file(folder / WEIGHTS, arrays)
  # Otherwise files of an earlier save would be read, too.
  for old in folder.glob('model*.safetensors*'):
    if old.name != WEIGHTS:
      old.unlink()
  ends = ids.eos[0] if len(ids.eos) == 1 else list(ids.eos)
  special = {'eos_token_id': ends, 'pad_token_id': ids.pad}
  special |= {'decoder_start_token_id': ids.decoder_start}
  form: dict[str, Any] = {'indent': 2, 'sort_keys': True}
  files.write_json(folder / config_json.GENERATION, special, **form)
  dtype = flat['token_embedder/embedding'].dtype
  described |= {'torch_dtype': np.dtype(dtype).name, **special}
  described |= {config_json.ABOUT[n]: text for n, text in (about or {}).items()}
  files.write_json(folder / CONFIG, described, **form)


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
  what, otherwise = 'A model of the Hugging Face hub', 'Or give a local folder.'
  hub = package(what, 'huggingface_hub', 'hub', otherwise)
  hub_id, _, revision = name.partition('@')
  at = f'{hub_id!r}' + (f' at {revision!r}' if revision else '')
  try:
    fetched = hub.snapshot_download(
      hub_id, revision=revision or None, allow_patterns=PATTERNS
    )
  except Exception as error:  # errors of its HTTP client have no base class
    why = ' '.join(str(error).split())
    why = f'could not be fetched from the hub ({type(error).__name__}: {why})'
    advice = 'Expected an id that it has; `hf auth login` where it is private.'
    raise ValueError(f'{at} {why}. {advice}') from error
  folder = pathlib.Path(fetched)
  if not any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX)):
    advice = f"Try '{hub_id}@refs/pr/1', or save with safe_serialization=True"
    raise ValueError(f'{at} of the hub: no {WEIGHTS} and no {INDEX}. {advice}.')
  return folder


# These functions merge a LoRA adapter.

ADAPTER = 'adapter_config.json', 'adapter_model.safetensors'
# PEFT begins the names of all modules with a prefix.
_HALF = re.compile(r'(?:base_model\.model\.)?(.+)\.lora_([AB])(\.\w+)?\.weight')
_OTHER = 'It is an adapter of another model.'
_MERGE = "Merge it with PEFT's merge_and_unload, and load the result."


def _adapted(
  stored: Arrays, adapter: Path, family: Family
) -> dict[str, DiskArray]:
  """Merges an adapter into the kernels of a model.

  Args:
    stored: the model's arrays, by transformers' names.
    adapter: the adapter's folder, which PEFT wrote.
    family: the model's family.

  Raises:
    ValueError: a file is missing or broken; the adapter is of another kind, has
      an unknown field that may change the result, or an array that does not fit
      the model (the message has the names).
  """
  source = os.fspath(adapter)
  config, weights = (os.path.join(source, name) for name in ADAPTER)
  if not os.path.isfile(config):
    both = f'the files {" and ".join(ADAPTER)} of PEFT, on this machine'
    raise unexpected(f'adapter {source}', both, 'a path without')
  described = files.read_json(config)
  _check_adapter(described, config)
  halves: dict[str, dict[str, DiskArray]] = {}
  for name, array in open_file(weights).items():
    half = _HALF.fullmatch(name)
    if half is None or len(array.shape) != 2:
      expected = 'only A and B of kernels'
      raise unexpected(source, expected, [name, *array.shape], _MERGE)
    halves.setdefault(half[1], {})[half[2]] = array
  if not halves:
    raise unexpected(weights, 'A and B of kernels', 'nothing')
  adapted = dict(stored)
  for module, pair in halves.items():
    name, where = family.name_of(f'{module}.weight'), f'{source}: {module}'
    if len(pair) != 2:
      raise unexpected(where, 'lora_A and lora_B', [*pair])
    if name not in stored:
      expected = f'a module whose kernel {module}.weight the model has'
      raise unexpected(source, expected, module, _OTHER)
    down, up, kernel = pair['A'], pair['B'], stored[name]
    shape = kernel.shape[::-1] if family.kernels_in_out else kernel.shape
    rank, shapes = down.shape[0], [list(down.shape), list(up.shape)]
    if not rank or shapes != [[rank, *shape[1:]], [*shape[:1], rank]]:
      expected = f'A [r, in] and B [out, r] of a kernel {list(shape)}'
      raise unexpected(where, expected, shapes, _OTHER)
    if rank != described['r'] and not described.get('rank_pattern'):
      expected = f'A [{described["r"]}, ...], as r of {ADAPTER[0]} says'
      raise unexpected(where, expected, shapes)
    divided = rank**0.5 if described.get('use_rslora') else rank
    scale = float(described['lora_alpha'] / divided)
    adapted[name] = _merged(kernel, down, up, scale, family.kernels_in_out)
  return adapted


def _check_adapter(described: Described, where: str) -> None:
  """Raises ValueError for a field that may change the result unnoticed."""
  words = WORDS['adapter']
  names = {'peft_type', *described} - {*words['read'], *words['no_matter']}
  for name in sorted(names):
    value = described.get(name)
    allowed = words['supported'].get(name, [False, '', [], {}])
    if value not in allowed and (value is not None or name == 'peft_type'):
      raise unexpected(f'{where}: {name}', f'one of {allowed}', value, _MERGE)
  checks.check_number(f'{where}: r', described.get('r'), 1)
  check_type(f'{where}: lora_alpha', described.get('lora_alpha'), float)
  check_type(f'{where}: use_rslora', described.get('use_rslora'), bool | None)


def _merged(
  kernel: DiskArray, down: DiskArray, up: DiskArray, scale: float, in_out: bool
) -> DiskArray:
  """Adds an adapter to a kernel.

  Args:
    kernel: [out, in], or [in, out] if `in_out`, as in GPT-2.
    down: A, [r, in].
    up: B, [out, r].
    scale: s, the factor of B A.
    in_out: whether the kernel is [in, out].
  """

  def read(index: Index) -> np.ndarray:
    part = kernel.read(index)
    out, into = index[::-1] if in_out else index
    ranks = slice(0, down.shape[0])
    change = up.read((out, ranks)).astype(np.float32)
    change = change @ down.read((ranks, into)).astype(np.float32)
    if not np.isfinite(change).all():
      why = 'are not finite: the adapter is broken, or its training diverged'
      raise ValueError(f'{down.where}: A and B of {kernel.where} {why}.')
    change = change.T if in_out else change
    added = part.astype(np.float32) + np.float32(scale) * change
    return added.astype(part.dtype)

  return dataclasses.replace(kernel, read=read)


# These functions read and write safetensors files.

# safetensors' names of dtypes.
_DTYPES: dict[str, Any] = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(jnp.bfloat16),
}


def _view(stored: DiskArray, row: Row) -> DiskArray:
  """Returns our array, which reads the one in a file as `row` describes."""

  def read(index: Index) -> np.ndarray:
    index = index[::-1] if row.transposed else index
    if row.third is not None:
      *rest, last = index
      first = row.third * row.shape[-1]
      index = (*rest, slice(first + last.start, first + last.stop))
    part = stored.read(index)
    part = part.T if row.transposed else part
    return part if row.scale == 1.0 else part.astype(np.float32) * row.scale

  return DiskArray(row.shape, stored.dtype, read)


def open_file(path: Path) -> dict[str, DiskArray]:
  """Returns the arrays of a safetensors file, by their names.

  A file is mapped into memory, and mapped pages count as this process's memory
  until they are unmapped. So each read opens the file again, and closes it.

  Raises:
    ValueError: the file is missing or broken, or an array is not of floats.
  """
  path = os.fspath(path)
  arrays = {}

  def read(name: str, index: Index) -> np.ndarray:
    with _opened(path) as file:
      return file.get_slice(name)[index]

  with _opened(path) as file:
    for name in file.keys():  # noqa: SIM118  it is not a dict
      array, where = file.get_slice(name), f'{name} in {os.path.basename(path)}'
      shape, kind = tuple(array.get_shape()), array.get_dtype()
      if kind not in _DTYPES:
        raise unexpected(f'{path}: {name}', f'one of {[*_DTYPES]}', kind)
      part = functools.partial(read, name)
      arrays[name] = DiskArray(shape, _DTYPES[kind], part, where)
  return arrays


def _write_file(path: pathlib.Path, arrays: Mapping[str, Any]) -> None:
  """Writes a safetensors file, whole or not at all, an array at a time.

  The format is the length of a JSON header, the header, and the arrays' bytes
  (https://github.com/huggingface/safetensors). The package's writer would copy
  all arrays at once.

  Raises:
    OSError: the disk is full or the folder not writable.
  """
  kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
  # transformers refuses a file that does not name its framework.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name, array in arrays.items():
    start, end = end, end + array.nbytes
    entry = {'dtype': kinds[np.dtype(array.dtype)], 'shape': list(array.shape)}
    header[name] = entry | {'data_offsets': [start, end]}
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  contents = (np.ascontiguousarray(a).tobytes() for a in arrays.values())
  files.write_atomically(
    path, itertools.chain([len(text).to_bytes(8, 'little') + text], contents)
  )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
  """Opens a safetensors file.

  Raises:
    ValueError: the file is missing or broken, or the package is not installed.
  """
  files.check_regular(path)
  safetensors = import_safetensors()
  try:
    file = safetensors.safe_open(path, framework='numpy')
  except (OSError, safetensors.SafetensorError) as error:
    why = f'is missing, cut short or not a safetensors file ({error})'
    raise ValueError(f'{path!r} {why}; copy it again.') from error
  with file:
    yield file


def import_safetensors() -> Any:
  """Returns the package safetensors; ValueError if it is not installed."""
  return package('A Hugging Face folder', 'safetensors', 'huggingface')
