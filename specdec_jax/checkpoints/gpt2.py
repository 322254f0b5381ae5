"""Hugging Face folders of GPT-2: config.json and safetensors.

What things are called there is in `gpt2_names`; arrays are read as those of T5
are, by `huggingface_arrays`. The package safetensors comes with the extra
`[huggingface]`.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np

from specdec_jax.checkpoints import gpt2_names as names
from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints.huggingface import check_room, check_stored
from specdec_jax.checkpoints.huggingface_arrays import (
  CONFIG,
  Index,
  Layouts,
  Stored,
)
from specdec_jax.models.gpt import GPTConfig

Params = dict[str, Any]

# The whole model's name in files that were saved with an output layer.
_PREFIX = 'transformer.'
# Causal masks, which older files hold.
_MASKS = re.compile(r'h\.\d+\.attn\.(masked_)?bias')


@dataclasses.dataclass(frozen=True)
class _Third(Stored):
  """A third of an array along its last axis; `shape` is the third's."""

  whole: Stored
  number: int

  def read(
    self, index: Index | None = None, dtype: Any = None, scale: float = 1.0
  ) -> np.ndarray:
    *rest, last = index or tuple(slice(0, size) for size in self.shape)
    width = self.shape[-1]
    start, stop, _ = last.indices(width)
    first = self.number * width
    part = (*rest, slice(first + start, first + stop))
    return self.whole.read(part, dtype, scale)


def load_gpt2(
  folder: str | os.PathLike[str],
  dtype: Any = None,
  sharding: Layouts = None,
  described: Mapping[str, Any] | None = None,
) -> tuple[GPTConfig, Params]:
  """Reads a folder of one or several safetensors files.

  Whether the output layer is the embedding is read from the weights. Two
  factors of GPT-2's are moved into weights, see `models.gpt`: query
  projections are divided by sqrt(D), and the last norm multiplied by sqrt(M)
  where the embedding is shared.

  Args:
    folder: with config.json and model.safetensors (or its shards).
    dtype: of the arrays returned; None keeps the files'.
    sharding: None for NumPy arrays; a jax Device or Sharding for all arrays;
      or a function from an array's name ('decoder/layers_0/mlp/wo/kernel') to
      one of these.
    described: config.json, where it has been read.

  Returns:
    The model's shape, and a nested dict of arrays.

  Raises:
    ValueError: the package safetensors is missing; a file is missing or
      broken; the architecture is no GPT-2; an array is missing, unknown,
      there twice or of another shape, with its name and its shapes; or it
      cannot be laid out by `sharding`.
  """
  folder = pathlib.Path(folder)
  described = described or arrays.read_json(folder / CONFIG)
  stored = _open(folder)
  tied = names.HEAD not in stored or (
    names.EMBEDDING in stored
    and arrays.same(stored[names.HEAD], stored[names.EMBEDDING])
  )
  if tied:
    stored.pop(names.HEAD, None)
  config = names.read_config(described, tied, os.fspath(folder / CONFIG))
  check_room(config, folder, dtype, sharding)
  table = names.table(config)
  shapes = {row.name: row.stored_shape for row in table.values()}
  check_stored(stored, shapes, folder)
  layouts = {
    name: arrays.layout_of(sharding, name, row.shape)
    for name, row in table.items()
  }
  flat = {}
  for name, row in table.items():
    whole = stored[row.name]
    if row.third is not None:
      whole = _Third(
        whole.path, whole.name, row.shape, whole.dtype, whole, row.third
      )
    flat[name] = arrays.load(
      whole, row.transposed, layouts[name], dtype, row.scale
    )
  return config, flax.traverse_util.unflatten_dict(flat, sep='/')


def _open(folder: pathlib.Path) -> dict[str, Stored]:
  """Arrays by their names without prefix, and without masks."""
  found: dict[str, Stored] = {}
  for name, array in arrays.open_folder(folder).items():
    short = name.removeprefix(_PREFIX)
    if _MASKS.fullmatch(short):
      continue
    if short in found:
      raise ValueError(
        f'{os.fspath(folder)!r} has {short} twice: with and without'
        f' {_PREFIX!r} before it.'
      )
    found[short] = array
  return found
