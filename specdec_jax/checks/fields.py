"""Checks that the fields of a configuration have the types it declares."""

import collections.abc
import dataclasses
import numbers
import os
import types
import typing
from typing import Any, Literal, Union

_WORDS = {
  bool: 'True or False',
  int: 'a whole number',
  float: 'a number',
  str: 'text',
  type(None): 'None',
}
_SEQUENCES = (tuple, list, collections.abc.Sequence)


def check_types(config: Any) -> None:
  """Checks the fields of a dataclass by their annotations.

  A whole number counts as a number; True and NaN do not. A list is accepted
  for a tuple. Not checked are the contents of mappings, and classes that are
  neither built in nor dataclasses: these may be protocols.

  Args:
    config: an instance; call this from its `__post_init__`.

  Raises:
    ValueError: a field has another type; the message names the field, the
      expected type and the value.
  """
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if not _is_a(value, hints[field.name]):
      raise ValueError(
        f'{type(config).__name__}.{field.name}: expected'
        f' {_described(hints[field.name])}, got {_shortened(value)}'
        f' ({type(value).__name__}).{_hint(value, hints[field.name])}'
      )


def _hint(value: Any, hint: Any) -> str:
  """Advice if one text was given where a sequence of texts is expected."""
  if isinstance(value, str) and _is_a([value], hint):
    return f' Write [{_shortened(value)}].'
  return ''


def _is_a(value: Any, hint: Any) -> bool:
  origin, inside = typing.get_origin(hint), typing.get_args(hint)
  if origin in (Union, types.UnionType):
    return any(_is_a(value, option) for option in inside)
  if origin is Literal:
    return any(type(value) is type(word) and value == word for word in inside)
  kind = origin or hint
  if kind is collections.abc.Callable:
    return callable(value)
  if kind is collections.abc.Mapping:
    return isinstance(value, collections.abc.Mapping)
  if kind in _SEQUENCES:
    return _is_sequence(value, inside)
  if kind is bool:
    return isinstance(value, bool)
  if kind in (int, float):
    number = numbers.Integral if kind is int else numbers.Real
    # A NaN passes every comparison with a bound.
    return (
      isinstance(value, number)
      and not isinstance(value, bool)
      and value == value
    )
  if kind in _WORDS or kind is os.PathLike or dataclasses.is_dataclass(kind):
    return isinstance(value, kind)
  return True


def _is_sequence(value: Any, inside: tuple[Any, ...]) -> bool:
  # Looks at methods, because arrays are not `Sequence`s.
  has_items = hasattr(value, '__len__') and hasattr(value, '__getitem__')
  if not has_items or isinstance(value, str | bytes | collections.abc.Mapping):
    return False
  if len(inside) > 1 and inside[1] is not Ellipsis:
    return len(value) == len(inside) and all(map(_is_a, value, inside))
  return not inside or all(_is_a(item, inside[0]) for item in value)


def _described(hint: Any) -> str:
  origin, inside = typing.get_origin(hint), typing.get_args(hint)
  if origin in (Union, types.UnionType):
    return _either([_described(option) for option in inside])
  if origin is Literal:
    return _either([repr(word) for word in inside])
  kind = origin or hint
  if kind is collections.abc.Callable:
    return 'a function'
  if kind is collections.abc.Mapping:
    return 'a dict'
  if kind in _SEQUENCES:
    items = [_described(item) for item in inside if item is not Ellipsis]
    if len(items) == 1:
      return f'a sequence, each {items[0]}'
    return f'a sequence ({", ".join(items)})' if items else 'a sequence'
  if kind is os.PathLike:
    return 'a path'
  return str(_WORDS.get(kind) or getattr(kind, '__name__', kind))


def _either(words: list[str]) -> str:
  """Joins words as 'a, b or c'."""
  return ' or '.join(filter(None, [', '.join(words[:-1]), words[-1]]))


def _shortened(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else f'{text[:80]}...'
