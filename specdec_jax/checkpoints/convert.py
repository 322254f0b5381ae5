"""Converts a checkpoint of any kind to one of three formats."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
from typing import Any

import jax

from specdec_jax.checkpoints import huggingface, orbax_params, t5x, t5x_sizes
from specdec_jax.checkpoints.disk_arrays import Params, load_arrays
from specdec_jax.checkpoints.load import (
  check_dtype,
  is_huggingface,
  locate,
  made_for,
  open_arrays,
)
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import check_choice
from specdec_jax.files.locations import Location
from specdec_jax.models.int8 import INT8
from specdec_jax.models.t5 import T5, T5Config

FORMATS = ('orbax', 'safetensors', 't5x')


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
  """What to convert, and to what.

  Attributes:
    checkpoint_path: anything that `checkpoints.load` reads.
    output: a new folder; a new file for 't5x'.
    format: 'orbax' for this library, 'safetensors' for Hugging Face's, 't5x'
      for a single msgpack file.
    network: `T5(config)` of the checkpoint. Needed for scanned stacks, and if
      the activations are not those of T5 1.0 or 1.1; None reads the sizes from
      the checkpoint.
    dtype: dtype of the arrays that are written, e.g. 'bfloat16'; None keeps
      theirs.

  Raises:
    ValueError: `format` or `dtype` is unknown, or `output` is an address.
  """

  checkpoint_path: str
  output: str
  format: str = 'orbax'
  network: T5 | None = None
  dtype: str | None = None

  def __post_init__(self):
    check_types(self)
    check_choice('ConvertConfig.format', self.format, FORMATS)
    check_dtype(self.dtype)
    if self.dtype == INT8:
      raise ValueError(
        'dtype int8 is made when a model is loaded (load(path, dtype="int8"),'
        ' specdec decode --dtype int8), from a checkpoint of any other dtype;'
        " write it in 'bfloat16' or as it is."
      )
    if '://' in self.output:
      raise ValueError(
        f'output must be on this machine, got {self.output!r}; copy it from'
        ' there.'
      )


def convert(config: ConvertConfig) -> str:
  """Converts a checkpoint; the output is written whole or not at all.

  Returns:
    A line that says what was written.

  Raises:
    ValueError: `output` exists already, or the checkpoint cannot be read or
      does not fit the network.
    OSError: the disk is full or the folder not writable.
  """
  output = pathlib.Path(config.output)
  if output.exists():
    raise ValueError(
      f'{config.output!r} exists already; name another output or remove it.'
    )
  location = locate(config.checkpoint_path)
  sizes, params = _load(config, location)
  output.parent.mkdir(parents=True, exist_ok=True)
  target = made_for(location)
  if sizes is not None:
    _save_safetensors(output, sizes, params, location, target)
  elif config.format == 'orbax':
    orbax_params.save_orbax(output, params)
  else:
    about = {'target': target} if target else None
    t5x.save_t5x(output, params, step=0, about=about)
  leaves = jax.tree.leaves(params)
  total = sum(leaf.size for leaf in leaves)
  of = f' of {sizes}' if sizes else ''
  return f'{config.output}: {len(leaves)} arrays, {total:,} parameters{of}'


def _load(
  config: ConvertConfig, location: Location
) -> tuple[T5Config | None, Params]:
  """The parameters, and the sizes if the format needs them (safetensors)."""
  source, network = str(location), config.network
  sizes: Any = network.config if network else None
  if is_huggingface(location):
    found, params = huggingface.load_huggingface(
      location.path, config.dtype, network=network
    )
    if isinstance(found, T5Config):
      sizes = sizes or found
    elif config.format == 'safetensors':
      raise ValueError(
        f'{source!r} is not a T5; only a T5 is written as safetensors. Choose'
        " 'orbax' or 't5x'."
      )
  else:
    arrays = open_arrays(location, network)
    if config.format == 'safetensors' and sizes is None:
      sizes = t5x_sizes.infer_config(t5x.shapes_of(arrays), source)
    params = load_arrays(arrays, source, config.dtype)
  if config.format != 'safetensors':
    return None, params
  if not isinstance(sizes, T5Config):
    raise ValueError(
      f'{source!r} is not a T5; the format safetensors is only for T5. Write'
      ' it as t5x or orbax.'
    )
  return sizes, params


def _save_safetensors(
  output: pathlib.Path,
  sizes: T5Config,
  params: Params,
  source: Location,
  target: str,
) -> None:
  ids = huggingface.names.T5_IDS
  if is_huggingface(source):
    ids = huggingface.special_ids(source.path)
  unfinished = output.with_name(f'.{output.name}.tmp')
  with contextlib.suppress(FileNotFoundError):
    shutil.rmtree(unfinished)
  try:
    huggingface.save_huggingface(
      unfinished, sizes, params, ids=ids, made_for=target
    )
    os.rename(unfinished, output)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
