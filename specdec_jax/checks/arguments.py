"""Numbers that a caller gave, held against the least that they may be."""

import itertools
import numbers
from typing import Any


def check_number(name: str, value: Any, least: float) -> None:
  """Raises ValueError where a number is too small.

  Args:
    name: what the message calls it.
    value: what was given.
    least: an int asks for a whole number.
  """
  if isinstance(least, int) and (
    not isinstance(value, numbers.Integral) or isinstance(value, bool)
  ):
    raise ValueError(f'{name} must be a whole number, got {value!r}.')
  # The other way round a NaN would pass.
  if not value >= least:
    raise ValueError(f'{name} must be at least {least:g}, got {value}.')


def check_at_least(config: Any, **least: float) -> None:
  """Raises ValueError where a number of `config` is too small.

  Args:
    config: a dataclass.
    **least: field -> the least that it may be; an int asks for whole numbers.
  """
  for field, minimum in least.items():
    name = f'{type(config).__name__}.{field}'
    check_number(name, getattr(config, field), minimum)


def check_all_at_least(config: Any, **least: float) -> None:
  """Raises ValueError where a sequence is empty or has too small a number."""
  for field, minimum in least.items():
    name, values = f'{type(config).__name__}.{field}', getattr(config, field)
    if not values or not all(value >= minimum for value in values):
      raise ValueError(
        f'{name} must be one or more numbers of at least {minimum:g}, got'
        f' {tuple(values)}.'
      )


def check_increasing(config: Any, **least: int) -> None:
  """Raises ValueError where a sequence is empty, too small, or falls anywhere.

  Args:
    config: a dataclass.
    **least: field -> what its first number is at least; each of the others is
      larger than the one before.
  """
  for field, minimum in least.items():
    values = getattr(config, field)
    if not values or any(
      low >= high for low, high in itertools.pairwise((minimum - 1, *values))
    ):
      raise ValueError(
        f'{type(config).__name__}.{field} is {values}; expected increasing'
        f' lengths >= {minimum}.'
      )
