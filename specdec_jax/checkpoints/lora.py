"""LoRA adapters, which are merged into a model's kernels while these are read.

A folder of PEFT has adapter_config.json and adapter_model.safetensors, with two
thin kernels, A [r, in] and B [out, r], for each kernel W that was adapted. The
merged kernel is W + s * B A, with s = lora_alpha / r, or lora_alpha / sqrt(r)
for rank-stabilised LoRA. The sum is computed in float32, and rounded to W's
dtype.

PEFT's modules are those of transformers, so the names are those of the files.
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
# PEFT begins the names of all modules with this prefix.
_PREFIX = 'base_model.model.'
_HALF = re.compile(r'(.+)\.lora_([AB])(?:\.\w+)?\.weight')
_READ = {'peft_type', 'r', 'lora_alpha', 'use_rslora'}
_NO_MATTER = {*WORDS['adapter']['no_matter']}
# Supported values. Other initialisations (pissa, olora, loftq, ...) change W,
# and the adapter is a difference from the changed W.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
  'bias': ('none', None),
  'peft_type': ('LORA',),
  'init_lora_weights': (True, False, None, 'gaussian', 'orthogonal', 'eva'),
}
_OTHER = 'It is an adapter of another model.'
_MERGE = "Merge it with PEFT's merge_and_unload, and load the result."


def _merged(
  kernel: DiskArray, down: DiskArray, up: DiskArray, scale: float, in_out: bool
) -> DiskArray:
  """Adds an adapter to a kernel.

  Args:
    kernel: [out, in], or [in, out] if `in_out`, as in GPT-2.
    down: A, [r, in].
    up: B, [out, r].
    scale: s.
    in_out: see `kernel`.
  """

  def read(index: Index) -> np.ndarray:
    part = kernel.read(index)
    out, into = index[::-1] if in_out else index
    ranks = slice(0, down.shape[0])
    change = up.read((out, ranks)).astype(np.float32)
    change = change @ down.read((ranks, into)).astype(np.float32)
    if not np.isfinite(change).all():
      raise ValueError(
        f'{down.where}: A and B of {kernel.where} have numbers that are not'
        ' finite: the adapter is broken, or its training diverged.'
      )
    change = change.T if in_out else change
    added = part.astype(np.float32) + np.float32(scale) * change
    return added.astype(part.dtype)

  return dataclasses.replace(kernel, read=read)


def adapted(
  stored: Mapping[str, DiskArray],
  adapter: str | os.PathLike[str],
  family: Family,
) -> dict[str, DiskArray]:
  """Adds the arrays of an adapter to those of a model.

  Args:
    stored: the arrays, by transformers' names.
    adapter: PEFT's folder.
    family: the model's family.

  Raises:
    ValueError: a file is missing or broken; the adapter is of another kind, has
      an unknown field that may change the result, or an array that does not fit
      the model (the message has the names).
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
    in_out = family.kernels_in_out
    shape = kernel.shape[::-1] if in_out else kernel.shape
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
    adapted[name] = _merged(kernel, down, up, scale, in_out)
  return adapted


def _halves(folder: pathlib.Path) -> dict[str, tuple[DiskArray, DiskArray]]:
  """Returns the A and B of each module."""
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
  """Raises ValueError for an unknown field, unless its value is neutral."""
  neutral: tuple[Any, ...] = (None, False, '', [], {})
  others = described.keys() - _READ - _NO_MATTER - _SUPPORTED.keys()
  values = dict.fromkeys(sorted(others), neutral) | _SUPPORTED
  for name, allowed in values.items():
    if (value := described.get(name)) not in allowed:
      raise unexpected(f'{where}: {name}', f'one of {allowed}', value, _MERGE)
  check_number(f'{where}: r', described.get('r'), 1)
  check_type(f'{where}: lora_alpha', described.get('lora_alpha'), float)
  check_type(f'{where}: use_rslora', described.get('use_rslora'), bool | None)
