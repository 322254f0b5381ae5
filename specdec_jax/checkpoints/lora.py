"""LoRA adapters, merged into a model's kernels while these are read.

A folder of PEFT has adapter_config.json and adapter_model.safetensors: for each
kernel W that was adapted two thin ones, A [r, in] and B [out, r]. What is read
is W + s * B A, with s = lora_alpha / r, or lora_alpha / sqrt(r) of rank-
stabilised LoRA: the sum in float32, then rounded to W's dtype.

A module of PEFT is transformers' module, so the names are those of the files.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints.disk_arrays import Index

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'  # before all names, by PEFT
_BEFORE_ALL = ('model', 'language_model', 'transformer')  # by transformers
# T5Gemma 2's encoder has its module for texts, which its files leave out.
_TEXT_MODEL = re.compile(r'\bencoder\.text_model\.')
_HALF = re.compile(r'(.+)\.lora_([AB])(?:\.\w+)?\.weight')
_READ = ('peft_type', 'r', 'lora_alpha', 'alpha_pattern', 'use_rslora')
# Fields that do not change what is merged: names, training, and which modules
# were chosen, which the file itself shows.
_NO_MATTER = {
  'auto_mapping',
  'base_model_name_or_path',
  'corda_config',
  'eva_config',
  'exclude_modules',
  'fan_in_fan_out',  # the kind of the module decides
  'inference_mode',
  'init_lora_weights',  # see _INIT
  'layers_pattern',
  'layers_to_transform',
  'loftq_config',
  'lora_dropout',
  'megatron_config',
  'megatron_core',
  'peft_version',
  'qalora_group_size',  # of use_qalora
  'rank_pattern',  # the shapes show it
  'revision',
  'runtime_config',
  'target_modules',
  'task_type',
}
# Values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {'bias': ('none',)}
# Ways to begin that leave W as it is. Others (pissa, olora, loftq, ...) change
# it, and the adapter is a difference from what they made of it.
_INIT = (True, False, None, 'gaussian', 'orthogonal', 'eva')


@dataclasses.dataclass(frozen=True)
class Adapted(arrays.Stored):
  """A kernel of a safetensors file with what an adapter adds to it.

  Attributes:
    down: A, [r, in].
    up: B, [out, r].
    scale: s.
    is_turned: whether the kernel is [in, out], as GPT-2's; else [out, in].
  """

  down: arrays.Stored
  up: arrays.Stored
  scale: float
  is_turned: bool

  def read(self, index: Index) -> np.ndarray:
    kernel = super().read(index)
    out, into = index[::-1] if self.is_turned else index
    whole = slice(0, self.down.shape[0])
    up = self.up.read((out, whole)).astype(np.float32)
    change = up @ self.down.read((whole, into)).astype(np.float32)
    if not np.isfinite(change).all():
      raise ValueError(
        f'{self.down.path}: A and B of {self.name} have numbers that are not'
        ' finite: the adapter is broken, or its training diverged.'
      )
    change = change.T if self.is_turned else change
    merged = kernel.astype(np.float32) + np.float32(self.scale) * change
    return merged.astype(kernel.dtype)


def adapted(
  stored: Mapping[str, arrays.Stored],
  adapter: str | os.PathLike[str],
  is_turned: bool,
) -> dict[str, arrays.Stored]:
  """The arrays of a model with those of an adapter added to them.

  Args:
    stored: the arrays by transformers' names, perhaps without what stands
      before all of them.
    adapter: PEFT's folder.
    is_turned: whether kernels are [in, out].

  Raises:
    ValueError: a file is missing or broken; the adapter is of another kind, has
      a field that may change what is merged and is not known here, or an array
      that does not fit the model (the message has the names).
  """
  folder = pathlib.Path(adapter)
  source = os.fspath(folder)
  if not (folder / CONFIG).is_file():
    raise ValueError(
      f'{source!r} is no adapter: expected a folder on this machine with'
      f' {CONFIG} and {WEIGHTS}, as PEFT saves it.'
    )
  described = arrays.read_json(folder / CONFIG)
  _check(described, os.fspath(folder / CONFIG))
  found = dict(stored)
  for module, halves in _halves(folder).items():
    name = _name_of(module, stored)
    if name is None:
      raise ValueError(
        f'{source!r} adapts {module}, but the model has no array'
        f' {module}.weight of its own: it is an adapter of another model, or of'
        ' an output layer that is the embedding.'
      )
    kernel, down, up = stored[name], halves['A'], halves['B']
    rank = down.shape[0]
    shape = up.shape[:1] + down.shape[1:]
    if (shape[::-1] if is_turned else shape) != kernel.shape:
      raise ValueError(
        f'{source!r}: {module} has A {list(down.shape)} and B'
        f' {list(up.shape)}, which do not fit the kernel {list(kernel.shape)}'
        f' of {name}: it is an adapter of another model.'
      )
    if up.shape[1:] != (rank,) or not rank:
      raise ValueError(
        f'{source!r}: {module} has A {list(down.shape)} and B'
        f' {list(up.shape)}, which have not one rank.'
      )
    if rank != described['r'] and not described.get('rank_pattern'):
      raise ValueError(
        f'{source!r}: {module} has A {list(down.shape)}, but {CONFIG} says r ='
        f' {described["r"]} and has no rank_pattern: the two files are not of'
        ' one adapter.'
      )
    scale = _scale(described, module, rank)
    found[name] = Adapted(
      kernel.path, kernel.name, kernel.shape, kernel.kind,
      down, up, scale, is_turned,
    )  # fmt: skip
  return found


def _halves(folder: pathlib.Path) -> dict[str, dict[str, arrays.Stored]]:
  """Module -> its 'A' and 'B'."""
  source = os.fspath(folder)
  found: dict[str, dict[str, arrays.Stored]] = {}
  stored = arrays.open_file(folder / WEIGHTS)
  arrays.check_floats(stored, source)
  for name, array in stored.items():
    half = _HALF.fullmatch(name.removeprefix(_PREFIX))
    if half is None or len(array.shape) != 2:
      raise ValueError(
        f'{source!r} has {name} {list(array.shape)}, which is neither the A nor'
        ' the B of a kernel; only LoRA of kernels is merged here. Merge it with'
        " PEFT's merge_and_unload, and load the result."
      )
    found.setdefault(half[1], {})[half[2]] = array
  for module, halves in found.items():
    if len(halves) != 2:
      raise ValueError(f'{source!r}: {module} has only lora_{min(halves)}.')
  if not found:
    raise ValueError(f'{source!r}: {WEIGHTS} is empty.')
  return found


def _name_of(module: str, stored: Mapping[str, Any]) -> str | None:
  """The name of a module's kernel, with or without what is before all names."""
  for one in (module, _TEXT_MODEL.sub('encoder.', module)):
    name = f'{one}.weight'
    while name not in stored:
      first, _, name = name.partition('.')
      if first not in _BEFORE_ALL:
        break
    else:
      return name
  return None


def _check(described: Mapping[str, Any], where: str) -> None:
  """Raises ValueError for a field that is not known and asks for something."""
  if described.get('peft_type') != 'LORA':
    raise ValueError(
      f'{where}: peft_type is {described.get("peft_type")!r}; only LORA can be'
      ' merged here.'
    )
  unknown = [
    f'{name} = {value!r}'
    for name, value in described.items()
    if name not in (*_READ, *_NO_MATTER)
    and value not in (None, False, '', [], {}, *_NEUTRAL.get(name, ()))
  ]
  if described.get('init_lora_weights') not in _INIT:
    unknown.append(f'init_lora_weights = {described["init_lora_weights"]!r}')
  if unknown:
    raise ValueError(
      f'{where}: {", ".join(unknown)}: this may change what is merged, and is'
      " not known here. Merge it with PEFT's merge_and_unload, and load the"
      ' result.'
    )
  patterns = described.get('alpha_pattern') or {}
  if not isinstance(patterns, Mapping):
    raise ValueError(
      f'{where}: alpha_pattern is {patterns!r}, expected an object of patterns'
      ' and numbers.'
    )
  for name, value in (
    ('lora_alpha', described.get('lora_alpha')),
    *patterns.items(),
  ):
    if type(value) not in (int, float) or not math.isfinite(value):
      raise ValueError(f'{where}: {name} is {value!r}, expected a number.')
  for pattern in patterns:
    try:
      re.compile(pattern)
    except re.error as error:
      raise ValueError(
        f'{where}: alpha_pattern has {pattern!r}, which is no regular'
        f' expression: {error}.'
      ) from error
  rank = described.get('r')
  if type(rank) is not int or rank < 1:
    raise ValueError(f'{where}: r is {rank!r}, expected a rank, at least 1.')
  if described.get('use_rslora') not in (None, True, False):
    raise ValueError(
      f'{where}: use_rslora is {described["use_rslora"]!r}, expected true or'
      ' false.'
    )


def _scale(described: Mapping[str, Any], module: str, rank: int) -> float:
  """s of a module."""
  alpha = described['lora_alpha']
  for pattern, value in (described.get('alpha_pattern') or {}).items():
    if re.fullmatch(rf'(.*\.)?({pattern})', module):
      alpha = value
      break
  divided = rank**0.5 if described.get('use_rslora') else rank
  return float(alpha / divided)
