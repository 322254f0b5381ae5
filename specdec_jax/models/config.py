"""Checks of the families' configurations."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from specdec_jax.checks.fields import (
  check_choice,
  check_number,
  check_types,
  unexpected,
)
from specdec_jax.models.integers import INTEGERS
from specdec_jax.models.products import ACTIVATIONS

# No published model has a quarter of this, and each layer is a module to build.
MOST_LAYERS = 1024
MOST = 2**31 - 1  # an int32 must hold ids, and places in arrays
DTYPES = ('float32', 'bfloat16')  # dtypes of computations
PARAM_DTYPES = (*DTYPES, *INTEGERS)  # dtypes of parameters


def check_config(config: Any, may_be_zero: Sequence[str] = ()) -> None:
  """Checks the fields of a configuration, and turns lists into tuples.

  Args:
    config: a dataclass with `mlp_activations` and `dtype`.
    may_be_zero: names of the whole numbers that may be 0; all others must be at
      least 1.

  Raises:
    ValueError: a size is too small or too large, or a name is unknown.
  """
  check_types(config)
  for field in dataclasses.fields(config):
    name, value = field.name, getattr(config, field.name)
    if isinstance(value, list):
      object.__setattr__(config, field.name, tuple(value))
    if field.type in (int, 'int'):
      most = MOST_LAYERS if field.name.endswith('_layers') else MOST
      check_number(name, value, 0 if field.name in may_be_zero else 1)
      if value > most:
        raise unexpected(name, f'at most {most}', value)
  check_choice('dtype', config.dtype, DTYPES)
  unknown = set(config.mlp_activations) - set(ACTIVATIONS)
  if unknown or not config.mlp_activations:
    names = f'one or more of {sorted(ACTIVATIONS)}'
    raise unexpected('mlp_activations', names, config.mlp_activations)


T = TypeVar('T')


def of_config(kind: type[T], config: Any, **more: Any) -> T:
  """Makes a dataclass from a configuration's fields of the same names.

  Args:
    kind: the dataclass, such as `Stack`.
    config: a family's configuration.
    **more: the fields that the configuration lacks, or that differ.
  """
  names = {field.name for field in dataclasses.fields(cast(Any, kind))}
  same = {
    name: getattr(config, name) for name in names if hasattr(config, name)
  }
  return kind(**same | more)
