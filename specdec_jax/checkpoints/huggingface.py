"""Hugging Face folders of T5 1.0 and 1.1: config.json and safetensors.

What things are called there is in `huggingface_names`. The package safetensors
comes with the extra `[huggingface]`.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints import huggingface_names as names
from specdec_jax.checkpoints.t5x import check_params
from specdec_jax.models.t5 import T5Config

Params = dict[str, Any]

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
_INDEX = f'{WEIGHTS}.index.json'
_SHOWN = 8
_FLOATS = ('F64', 'F32', 'F16', 'BF16')

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
) -> None:
  """Writes a folder that transformers' `from_pretrained` reads.

  config.json is written last: where it is, the rest is whole.

  Args:
    folder: made if needed; files of these names are replaced.
    config: shape of the model.
    params: its parameters as a checkpoint has them, not as placed.
    dtype: of the arrays on disk, e.g. jnp.bfloat16; None keeps theirs.

  Raises:
    ValueError: the package safetensors is missing, `params` are not those of
      `config`, or transformers has no word for its activations.
    OSError: the disk is full or the folder not writable.
  """
  safetensors = _import_safetensors()
  described = names.describe(config)
  check_params(params, names.shapes(config))
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  arrays = {}
  for name, row in names.table(config).items():
    array = np.asarray(flat[row.name], dtype)
    # A transposed view would be written in the order of its memory.
    arrays[name] = np.ascontiguousarray(array.T if row.transposed else array)
  described['torch_dtype'] = arrays[_EMBEDDING].dtype.name
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / CONFIG).unlink(missing_ok=True)
  temporary = folder / f'.{WEIGHTS}.tmp'
  try:
    # transformers refuses a file that does not say whose it is.
    safetensors.numpy.save_file(arrays, temporary, metadata={'format': 'pt'})
    os.replace(temporary, folder / WEIGHTS)
  finally:
    temporary.unlink(missing_ok=True)
  ids = {'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0}
  _write_json(folder / 'generation_config.json', ids)
  _write_json(folder / CONFIG, described | ids)


def load_huggingface(
  folder: str | os.PathLike[str], dtype: Any = None
) -> tuple[T5Config, Params]:
  """Reads a folder of one or several safetensors files.

  Whether the output layer is the embedding is read from the weights, since
  transformers 5 writes `tie_word_embeddings: true` for every T5.

  Args:
    folder: with config.json and model.safetensors (or its shards).
    dtype: of the arrays returned; None keeps the files'.

  Returns:
    The model's shape, and a nested dict of NumPy arrays named as T5X does.

  Raises:
    ValueError: the package safetensors is missing; a file is missing or
      broken; the architecture is not T5 1.0 or 1.1; an array is missing,
      unknown, there twice or of another shape, with its name and its shapes.
  """
  folder = pathlib.Path(folder)
  described = _read_json(folder / CONFIG)
  with contextlib.ExitStack() as stack:
    arrays = _open_all(folder, stack)
    _drop_aliases(arrays, folder)
    tied = _HEAD not in arrays or _same(arrays, _HEAD, _EMBEDDING)
    scaled = _scales_output(described, tied)
    if tied and scaled:
      arrays.pop(_HEAD, None)
    elif _HEAD not in arrays and _EMBEDDING in arrays:
      # T5 1.0 always rescales what a shared embedding reads, so a head that
      # does not is a layer of its own here.
      arrays[_HEAD] = arrays[_EMBEDDING]
    config = names.read_config(
      described, tied and scaled, os.fspath(folder / CONFIG)
    )
    table = names.table(config)
    _check(arrays, table, folder)
    flat = {}
    for name, row in table.items():
      array = arrays[name][:]
      if dtype is not None:
        array = array.astype(dtype)
      if name == _HEAD and scaled:
        array = (array * config.emb_dim**-0.5).astype(array.dtype)
      flat[row.name] = array.T if row.transposed else array
  return config, flax.traverse_util.unflatten_dict(flat, sep='/')


def _scales_output(described: Mapping[str, Any], tied: bool) -> bool:
  """Whether transformers divides what the output layer reads by sqrt(M)."""
  explicit = described.get('scale_decoder_outputs')  # transformers 5 writes it
  if explicit is not None:
    return bool(explicit)
  if described.get('model_type') != 't5':
    return False  # mT5 has T5 1.1's output layer
  return tied and described.get('tie_word_embeddings') is not False


def _check(
  arrays: Mapping[str, Any],
  table: Mapping[str, names.Row],
  folder: pathlib.Path,
) -> None:
  """Raises ValueError unless names, shapes and types are the table's."""

  def shaped(shape):
    return jax.ShapeDtypeStruct(tuple(shape), np.float32)

  check_params(
    {name: shaped(array.get_shape()) for name, array in arrays.items()},
    {name: shaped(row.shape) for name, row in table.items()},
    repr(os.fspath(folder)),
  )
  for name, array in arrays.items():
    if array.get_dtype() not in _FLOATS:
      raise ValueError(
        f'{os.fspath(folder)!r}: {name} is {array.get_dtype()}, expected one of'
        f' {", ".join(_FLOATS)}.'
      )


def _drop_aliases(arrays: dict[str, Any], folder: pathlib.Path) -> None:
  """Leaves one of the embedding's names, and none that T5 does not read."""
  arrays.pop(_UNUSED, None)
  for alias in _ALIASES:
    if alias not in arrays:
      continue
    if _EMBEDDING not in arrays:
      arrays[_EMBEDDING] = arrays[alias]
    elif not _same(arrays, alias, _EMBEDDING):
      raise ValueError(
        f'{os.fspath(folder)!r} has the embedding twice, and not the same one:'
        f' {alias} {arrays[alias].get_shape()} and {_EMBEDDING}'
        f' {arrays[_EMBEDDING].get_shape()}.'
      )
    del arrays[alias]


def _same(arrays: dict[str, Any], one: str, other: str) -> bool:
  if one not in arrays or other not in arrays:
    return False
  first, second = arrays[one], arrays[other]
  if first.get_shape() != second.get_shape():
    return False
  return np.array_equal(first[:], second[:])


def _open_all(
  folder: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
  """Opens the folder's files; returns name -> array, to be read by `[:]`."""
  safetensors = _import_safetensors()
  holders: dict[str, tuple[str, Any]] = {}
  for file_name in _weight_files(folder):
    path = os.fspath(folder / file_name)
    try:
      opened = stack.enter_context(
        safetensors.safe_open(path, framework='numpy')
      )
    except (OSError, safetensors.SafetensorError) as error:
      raise ValueError(
        f'{path!r} is missing, cut short or no safetensors file ({error}); copy'
        ' it again.'
      ) from error
    for name in opened.keys():  # noqa: SIM118  it is no dict
      if name in holders:
        first, other = holders[name]
        raise ValueError(
          f'{os.fspath(folder)!r} has {name} twice: in {first}'
          f' {other.get_slice(name).get_shape()} and in {file_name}'
          f' {opened.get_slice(name).get_shape()}.'
        )
      holders[name] = file_name, opened
  return {n: opened.get_slice(n) for n, (_, opened) in holders.items()}


def _weight_files(folder: pathlib.Path) -> Iterator[str]:
  if (folder / WEIGHTS).exists():
    yield WEIGHTS
  elif (folder / _INDEX).exists():
    index = _read_json(folder / _INDEX)
    if not isinstance(index.get('weight_map'), dict):
      raise ValueError(f'{os.fspath(folder / _INDEX)!r} has no weight_map.')
    yield from sorted(set(index['weight_map'].values()))
  else:
    found = sorted(path.name for path in folder.iterdir())[:_SHOWN]
    raise ValueError(
      f'{os.fspath(folder)!r} has neither {WEIGHTS} nor {_INDEX}, only'
      f' {found}; save the model with safe_serialization=True.'
    )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text('utf-8'))
  except OSError as error:
    raise ValueError(
      f'{os.fspath(path)!r} cannot be read: {error.strerror}. Expected a'
      ' Hugging Face folder with config.json and safetensors in it.'
    ) from error
  except ValueError as error:
    raise ValueError(f'{os.fspath(path)!r} is not JSON: {error}.') from error
  if not isinstance(value, dict):
    raise ValueError(f'{os.fspath(path)!r} is no JSON object.')
  return value


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
  text = json.dumps(value, indent=2, sort_keys=True) + '\n'
  files.write_atomically(path, text.encode())


def _import_safetensors() -> Any:
  try:
    import safetensors
    import safetensors.numpy
  except ImportError as error:
    raise ValueError(
      'Hugging Face folders need the package safetensors, which is not'
      " installed: pip install -e '.[huggingface]'"
    ) from error
  return safetensors
