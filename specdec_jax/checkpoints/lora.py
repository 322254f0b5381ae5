"""LoRA adapters, merged into a model's kernels while these are read.

A folder of PEFT has adapter_config.json and adapter_model.safetensors: for each
kernel W that was adapted two thin ones, A [r, in] and B [out, r]. What is read
is W + s * B A, with s = lora_alpha / r, or lora_alpha / sqrt(r) of rank-
stabilised LoRA: the sum in float32, then rounded to W's dtype.

A module of PEFT is transformers' module, so the names are those of the files.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax import files
from specdec_jax.checkpoints.disk_arrays import DiskArray, Index
from specdec_jax.checkpoints.families import WORDS, Family
from specdec_jax.checkpoints.safetensors_files import open_file
from specdec_jax.checks.fields import check_number, check_type, unexpected

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'  # before all names, by PEFT
_HALF = re.compile(r'(.+)\.lora_([AB])(?:\.\w+)?\.weight')
_READ = {'peft_type', 'r', 'lora_alpha', 'use_rslora'}
_NO_MATTER = {*WORDS['adapter']['no_matter']}
# Ways to begin that leave W as it is. Others (pissa, olora, loftq, ...) change
# it, and the adapter is a difference from what they made of it.
_KNOWN: dict[str, tuple[Any, ...]] = {
  'bias': ('none', None),
  'peft_type': ('LORA',),
  'init_lora_weights': (True, False, None, 'gaussian', 'orthogonal', 'eva'),
}
_OTHER = 'It is an adapter of another model.'
_MERGE = "Merge it with PEFT's merge_and_unload, and load the result."


def _merged(
  kernel: DiskArray, down: DiskArray, up: DiskArray, scale: float, turned: bool
) -> DiskArray:
  """A kernel with what an adapter adds to it.

  Args:
    kernel: [out, in], or [in, out] where it is turned, as GPT-2's.
    down: A, [r, in].
    up: B, [out, r].
    scale: s.
    turned: see `kernel`.
  """

  def read(index: Index) -> np.ndarray:
    part = kernel.read(index)
    out, into = index[::-1] if turned else index
    ranks = slice(0, down.shape[0])
    change = up.read((out, ranks)).astype(np.float32)
    change = change @ down.read((ranks, into)).astype(np.float32)
    if not np.isfinite(change).all():
      raise ValueError(
        f'{down.where}: A and B of {kernel.where} have numbers that are not'
        ' finite: the adapter is broken, or its training diverged.'
      )
    change = change.T if turned else change
    added = part.astype(np.float32) + np.float32(scale) * change
    return added.astype(part.dtype)

  return dataclasses.replace(kernel, read=read)


def adapted(
  stored: Mapping[str, DiskArray],
  adapter: str | os.PathLike[str],
  family: Family,
) -> dict[str, DiskArray]:
  """The arrays of a model with those of an adapter added to them.

  Args:
    stored: the arrays by the names that the family has for them.
    adapter: PEFT's folder.
    family: of the model.

  Raises:
    ValueError: a file is missing or broken; the adapter is of another kind, has
      a field that may change what is merged and is not known here, or an array
      that does not fit the model (the message has the names).
  """
  folder = pathlib.Path(adapter)
  source = os.fspath(folder)
  if not (folder / CONFIG).is_file():
    both = f'the files {CONFIG} and {WEIGHTS} of PEFT, on this machine'
    raise unexpected(f'adapter {source}', both, 'a path without')
  described = files.read_json(folder / CONFIG)
  _check(described, os.fspath(folder / CONFIG))
  adapted = dict(stored)
  for module, (down, up) in _halves(folder).items():
    name = family.name_of(f'{module}.weight')
    if name not in stored:
      expected = f'a module whose kernel {module}.weight the model has'
      raise unexpected(source, expected, module, _OTHER)
    kernel, rank = stored[name], down.shape[0]
    is_turned = family.kernels_in_out
    shape = kernel.shape[::-1] if is_turned else kernel.shape
    shapes = [list(down.shape), list(up.shape)]
    fits = (*up.shape[:1], *down.shape[1:]) == shape
    if not fits or not rank or up.shape[1] != rank:
      expected = f'A [r, in] and B [out, r] of a kernel {list(shape)}'
      raise unexpected(f'{source}: {module}', expected, shapes, _OTHER)
    if rank != described['r'] and not described.get('rank_pattern'):
      expected = f'A [{described["r"]}, ...], as r of {CONFIG} says'
      raise unexpected(f'{source}: {module}', expected, shapes)
    divided = rank**0.5 if described.get('use_rslora') else rank
    scale = float(described['lora_alpha'] / divided)
    adapted[name] = _merged(kernel, down, up, scale, is_turned)
  return adapted


def _halves(folder: pathlib.Path) -> dict[str, tuple[DiskArray, DiskArray]]:
  """Module -> its A and B."""
  source = os.fspath(folder)
  halves: dict[str, dict[str, DiskArray]] = {}
  for name, array in open_file(folder / WEIGHTS).items():
    half = _HALF.fullmatch(name.removeprefix(_PREFIX))
    if half is None or len(array.shape) != 2:
      expected = 'only A and B of kernels'
      raise unexpected(source, expected, [name, *array.shape], _MERGE)
    halves.setdefault(half[1], {})[half[2]] = array
  for module, pair in halves.items():
    if len(pair) != 2:
      raise unexpected(f'{source}: {module}', 'lora_A and lora_B', [*pair])
  if not halves:
    raise unexpected(f'{source}: {WEIGHTS}', 'A and B of kernels', 'nothing')
  return {module: (pair['A'], pair['B']) for module, pair in halves.items()}


def _check(described: Mapping[str, Any], where: str) -> None:
  """Raises ValueError for a field that is not known and asks for something."""
  neutral: tuple[Any, ...] = (None, False, '', [], {})
  others = described.keys() - _READ - _NO_MATTER - _KNOWN.keys()
  values = dict.fromkeys(sorted(others), neutral) | _KNOWN
  for name, known in values.items():
    if (value := described.get(name)) not in known:
      raise unexpected(f'{where}: {name}', f'one of {known}', value, _MERGE)
  check_number(f'{where}: r', described.get('r'), 1)
  check_type(f'{where}: lora_alpha', described.get('lora_alpha'), float)
  check_type(f'{where}: use_rslora', described.get('use_rslora'), bool | None)
