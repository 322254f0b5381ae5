"""Converts a checkpoint of any kind to one of three formats.

Only this library reads kernels of eight bits in Orbax's and T5X's formats;
transformers has no T5 whose kernels have a scale per output.
"""

import dataclasses
import math
import os
import pathlib
import tempfile
from typing import Literal

import flax.traverse_util
import jax

from specdec_jax import files
from specdec_jax.checkpoints import config_json, huggingface, orbax, t5x
from specdec_jax.checkpoints.disk_arrays import Params
from specdec_jax.checkpoints.load import (
  MADE_OF,
  TARGET,
  Opened,
  check_dtype,
  locate,
  open_checkpoint,
)
from specdec_jax.checks.fields import check_types, unexpected
from specdec_jax.models.families import config_of
from specdec_jax.models.integers import INT4, INT8, is_scale
from specdec_jax.models.t5 import T5, T5Config

Format = Literal['orbax', 'safetensors', 't5x']
# T5X's infer.py and InteractiveModel recognise a checkpoint by its folder's
# name.
_T5X_FILE = pathlib.Path('checkpoint_0', 'checkpoint')
# Casting floats to one of these dtypes does not change their `fingerprint`.
_AS_BEFORE = (None, 'float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
  """The settings of a conversion.

  Attributes:
    checkpoint_path: a path that `checkpoints.load` reads.
    output: a new folder. For 't5x' it is T5X's MODEL_DIR: the checkpoint is its
      folder `checkpoint_0`.
    format: 'orbax' for this library, 'safetensors' for Hugging Face's, 't5x'
      for T5X's, in a single msgpack file.
    network: `T5(config)` of the checkpoint. It is needed for scanned stacks,
      and if the activations are not those of T5 1.0 or 1.1; None reads the
      sizes from the checkpoint.
    revision: branch, tag or commit of an id of the Hugging Face hub.
    dtype: dtype of the output, e.g. 'bfloat16'; None keeps the checkpoint's.
      'int8' rounds kernels, for all formats but 'safetensors'; loading then
      reads a quarter of the bytes of float32, and need not round.

  Raises:
    ValueError: `format` or `dtype` is unknown, or `output` is an address.
  """

  checkpoint_path: str
  output: str
  format: Format = 'orbax'
  network: T5 | None = None
  dtype: str | None = None
  revision: str | None = None

  def __post_init__(self):
    check_types(self)
    check_dtype(self.dtype)
    only_floats = self.format == 'safetensors'
    if self.dtype == INT4 or (self.dtype == INT8 and only_floats):
      expected = "one of floats, or 'int8' for 'orbax' and 't5x'"
      advice = f'A model is rounded as it is loaded (--dtype {self.dtype}).'
      raise unexpected('dtype', expected, self.dtype, advice)
    if '://' in self.output:
      raise unexpected('output', 'a path on this machine', self.output)


def convert(config: ConvertConfig) -> str:
  """Converts a checkpoint; the output is written whole or not at all.

  Returns:
    A line of text with the output's path and its numbers of arrays and
    parameters.

  Raises:
    ValueError: `output` exists already; or the checkpoint cannot be read, does
      not fit the network, or has kernels of eight bits while `dtype` is not a
      float type.
    OSError: the disk is full or the folder not writable.
  """
  output = pathlib.Path(config.output)
  if output.exists():
    raise unexpected(f'output {config.output}', 'a new path', 'one that exists')
  files.make_folder(output.parent)
  location = locate(config.checkpoint_path, config.revision)
  opened = open_checkpoint(location, config.network, dtype=config.dtype)
  if opened.is_rounded and (config.dtype is None or config.dtype == INT8):
    field = f'dtype of {location}, whose kernels have eight bits'
    raise unexpected(field, 'a dtype of floats, such as float32', config.dtype)
  needs_sizes = config.format == 'safetensors'
  sizes = _sizes(config, opened, str(location)) if needs_sizes else None
  params = opened.read(config.dtype)
  if config.dtype == INT8:
    params = _as_on_disk(params, opened)
  about = {n: text for n, text in opened.about.items() if n == TARGET}
  rounds = opened.is_rounded or config.dtype not in _AS_BEFORE
  if rounds or MADE_OF in opened.about:
    made_of = opened.made_of()
    about |= {MADE_OF: made_of[-1]} if made_of else {}
  if config.format == 'orbax':
    orbax.save_orbax(output, params, about)
  else:
    with tempfile.TemporaryDirectory(
      dir=output.parent, prefix=f'.{output.name}.', ignore_cleanup_errors=True
    ) as unfinished:
      written = pathlib.Path(unfinished) / output.name
      if sizes is None:
        t5x.save_t5x(written / _T5X_FILE, params, step=0, about=about or None)
      else:
        ids = opened.facts.ids if opened.facts else config_json.T5_IDS
        huggingface.save_huggingface(written, sizes, params, ids, about)
      os.rename(written, output)
  counted = (x.shape for name, x in opened.arrays.items() if not is_scale(name))
  total, count = sum(map(math.prod, counted)), len(jax.tree.leaves(params))
  suffix = f' of {sizes}' if sizes else ''
  if config.format == 't5x':
    output /= _T5X_FILE.parent
  return f'{output}: {count} arrays, {total:,} parameters{suffix}'


def _as_on_disk(params: Params, opened: Opened) -> Params:
  """Casts arrays to their dtype on disk, except rounded kernels and scales."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  for name, array in opened.arrays.items():
    if flat[name].dtype != INT8:
      flat[name] = flat[name].astype(array.dtype)
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def _sizes(config: ConvertConfig, opened: Opened, source: str) -> T5Config:
  """Returns the model's configuration for a Hugging Face folder."""
  sizes = config_of(config.network)
  if sizes is None and opened.facts:
    sizes = opened.facts.config
  if sizes is None:
    shapes = {name: array.shape for name, array in opened.arrays.items()}
    sizes = t5x.infer_config(shapes, source)
  if not isinstance(sizes, T5Config):
    raise unexpected(source, 'a T5 for safetensors', type(sizes).__name__)
  return sizes
