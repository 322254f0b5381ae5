"""Checks that numbers given by a caller are not too small."""

import itertools
from typing import Any

from specdec_jax.checks.fields import is_a, shortened


def check_number(
  name: str, value: Any, least: float, instead: str = ''
) -> None:
  """Raises ValueError if a value is no number, or too small.

  Args:
    name: name of the value, for the message.
    value: the value that was given.
    least: the least value allowed; if it is an int, only whole numbers are.
    instead: what to do where it is too small, a sentence.
  """
  if not is_a(value, type(least)):
    kind = 'a whole number' if isinstance(least, int) else 'a finite number'
    raise ValueError(f'{name} must be {kind}, got {shortened(value)}.')
  if value < least:
    message = (
      f'{name} must be at least {least:g}, got {shortened(value)}. {instead}'
    )
    raise ValueError(message.rstrip())


def check_at_least(config: Any, **least: float) -> None:
  """Raises ValueError if a number of `config` is too small.

  Args:
    config: a dataclass.
    **least: field -> its least value; if that is an int, only whole numbers
      are allowed.
  """
  for field, minimum in least.items():
    name = f'{type(config).__name__}.{field}'
    check_number(name, getattr(config, field), minimum)


def check_all_at_least(config: Any, **least: float) -> None:
  """Raises ValueError if a sequence is empty or has too small a number."""
  for field, minimum in least.items():
    name, values = f'{type(config).__name__}.{field}', getattr(config, field)
    if not values or not all(value >= minimum for value in values):
      raise ValueError(
        f'{name} must be one or more numbers of at least {minimum:g}, got'
        f' {tuple(values)}.'
      )


def check_increasing(config: Any, **least: int) -> None:
  """Raises ValueError if a sequence is empty, too small, or not increasing.

  Args:
    config: a dataclass.
    **least: field -> the least value of its first number; each further number
      must be larger than the one before.
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
