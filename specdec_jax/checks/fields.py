"""Checks values that users give, and imports optional packages for them."""

import collections.abc
import dataclasses
import difflib
import functools
import importlib
import math
import numbers
import os
import types
import typing
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, NamedTuple, Union

# Type -> what errors call its values.
WORDS = {
  bool: 'True or False',
  int: 'a whole number',
  float: 'a finite number',
  str: 'text',
  type(None): 'None',
}
# Annotations by these types accept a sequence of any kind.
SEQUENCES = (tuple, list, collections.abc.Sequence)

# Cached, because a server checks the same classes with each request.
_hints_of: Any = functools.cache(typing.get_type_hints)


class Bound(NamedTuple):
  """The allowed range of a number, or of the length of a sequence or a text.

  It is part of an annotation. For example, a field `lengths` with the
  annotation `Annotated[Sequence[Positive], Bound(2)]` must have two or more
  numbers, each 1 or more.
  """

  least: float
  most: float = math.inf
  is_open: bool = False  # whether `least` itself is outside of the range


def check_types(config: Any) -> None:
  """Checks the fields of a dataclass by their annotations.

  A whole number counts as a number; True, NaN and infinity do not. A list or an
  array is accepted for a tuple. An annotation may have a `Bound`. Classes that
  are neither built in nor dataclasses or named tuples are not checked, because
  they may be protocols.

  Args:
    config: an instance; call this from its `__post_init__`.

  Raises:
    ValueError: a field has another type; the message names the field, the
      expected type and the value.
  """
  hints = _hints_of(type(config), include_extras=True)
  for field in dataclasses.fields(config):
    check_type(field.name, getattr(config, field.name), hints[field.name])


class Checked:
  """A base class of dataclasses that checks their fields by their annotations.

  A subclass with more to check calls `check_types` in its own `__post_init__`.

  Raises:
    ValueError: as for `check_types`.
  """

  def __post_init__(self):
    check_types(self)


def check_type(name: str, value: Any, hint: Any) -> None:
  """Raises ValueError unless a value has the type of an annotation."""
  if is_a(value, hint):
    return
  advice = ''
  if isinstance(value, str) and is_a([value], hint):
    advice = f'Write [{shortened(value)}].'
  raise unexpected(name, _described(hint), value, advice)


def unexpected(
  name: str, expected: str, value: Any, advice: str = ''
) -> ValueError:
  """Makes the error for a wrong value: what was expected, and what came.

  Example: `raise unexpected('gamma', 'a whole number from 1', gamma)`.

  Args:
    name: the field, flag or argument.
    expected: the values that it may have, as in 'a whole number from 1'.
    value: the value that it has.
    advice: a sentence that says what to do; '' if the rest makes it clear.
  """
  message = f'{name}: expected {expected}, got {shortened(value)}. {advice}'
  return ValueError(message.rstrip())


def is_a(value: Any, hint: Any) -> bool:
  """Returns whether `check_types` would accept a value for an annotation."""
  origin, inside = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    if hasattr(value, '__len__') and not _is_within(value, inside[1]):
      return False  # a wrong length needs no check of the items
    return is_a(value, inside[0]) and _is_within(value, inside[1])
  if origin in (Union, types.UnionType):
    return any(is_a(value, option) for option in inside)
  if origin is Literal:
    return any(type(value) is type(word) and value == word for word in inside)
  kind = origin or hint
  if kind is collections.abc.Callable:
    return callable(value)
  if kind is collections.abc.Mapping:
    is_mapping = isinstance(value, collections.abc.Mapping)
    pairs = value.items() if is_mapping and inside else ()
    return is_mapping and all(all(map(is_a, pair, inside)) for pair in pairs)
  if kind in SEQUENCES:
    return _is_sequence(value, inside)
  if kind in (int, float):
    number = numbers.Integral if kind is int else numbers.Real
    is_number = isinstance(value, number) and not isinstance(value, bool)
    return is_number and (kind is int or is_finite(value))
  is_record = dataclasses.is_dataclass(kind) or hasattr(kind, '_fields')
  if kind in WORDS or kind is os.PathLike or is_record:
    return isinstance(value, kind)
  return True


def _is_within(value: Any, bound: Bound) -> bool:
  # An array without dimensions has the method, which raises TypeError.
  has_length = hasattr(value, '__len__') and getattr(value, 'ndim', True)
  size = len(value) if has_length else value
  least = size > bound.least if bound.is_open else size >= bound.least
  return least and size <= bound.most


def _is_sequence(value: Any, inside: tuple[Any, ...]) -> bool:
  if hasattr(value, 'tolist'):
    value = value.tolist()
  # The methods are checked, because not every type with items is a `Sequence`.
  has_items = hasattr(value, '__len__') and hasattr(value, '__getitem__')
  if not has_items or isinstance(value, str | bytes | collections.abc.Mapping):
    return False
  if len(inside) > 1 and inside[1] is not Ellipsis:
    return len(value) == len(inside) and all(map(is_a, value, inside))
  kinds = set(map(type, value))
  if not inside:
    return True
  is_union = typing.get_origin(inside[0]) in (Union, types.UnionType)
  options = typing.get_args(inside[0]) if is_union else inside[:1]
  if len(kinds) == 1 and kinds <= {int, str}.intersection(options):
    return True  # a loop in Python would be slow for long prompts
  return all(is_a(item, inside[0]) for item in value)


def _described(hint: Any) -> str:
  origin, inside = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    words, (least, most, is_open) = _described(inside[0]), inside[1]
    if inside[0] not in (int, float):
      unit = 'characters' if inside[0] is str else 'of them'
      end = ' or more' if math.isinf(most) else f' to {most:g}'
      return f'{words}, {least:g}{end} {unit}'
    end = f' to {most:.15g}' if math.isfinite(most) else ''
    return f'{words} {"above" if is_open else "from"} {least:g}{end}'
  if origin in (Union, types.UnionType):
    return _either([_described(option) for option in inside])
  if origin is Literal:
    return _either([repr(word) for word in inside])
  kind = origin or hint
  if kind is collections.abc.Callable:
    return 'a function'
  if kind is collections.abc.Mapping:
    kinds = [_described(item) for item in inside if item is not Any]
    return f'a dict ({" -> ".join(kinds)})' if len(kinds) > 1 else 'a dict'
  if kind in SEQUENCES:
    items = [_described(item) for item in inside if item is not Ellipsis]
    if len(items) == 1:
      return f'a sequence, each {items[0]}'
    return f'a sequence ({", ".join(items)})' if items else 'a sequence'
  if kind is os.PathLike:
    return 'a path'
  name = kind.__name__ if isinstance(kind, type) else str(kind)
  return WORDS.get(kind, name)


def _either(words: list[str]) -> str:
  """Joins words as 'a, b or c'."""
  return ' or '.join(filter(None, [', '.join(words[:-1]), words[-1]]))


def is_finite(value: Any) -> bool:
  """Returns whether a number is finite, and not too large for a float."""
  try:
    return math.isfinite(value)
  except OverflowError:
    return False


def shortened(value: Any) -> str:
  """Returns a value as text for a message; the middle of a long text is cut."""
  try:
    text = repr(value)
  except ValueError:  # Python refuses to print an integer of so many digits
    text = 'a huge number'
  # The end is shown too, because it matters most in a path.
  return text if len(text) <= 160 else f'{text[:80]}...{text[-80:]}'


# These functions check numbers.


def check_number(name: str, value: Any, least: float) -> None:
  """Raises ValueError if a value is not a number, or too small.

  Args:
    name: name of the value, for the message.
    value: the value that was given.
    least: the least value allowed; if this is an int, only whole numbers are
      allowed.
  """
  if not is_a(value, type(least)) or value < least:
    raise unexpected(name, f'{WORDS[type(least)]} from {least:g}', value)


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
  """Raises ValueError for an id that is outside the vocabulary.

  Args:
    name: name of the ids, for the message.
    ids: the ids to check.
    vocab_size: size of the vocabulary, whose ids are 0 to vocab_size - 1.
  """
  for token in ids:
    if not 0 <= token < vocab_size:
      raise unexpected(name, f'ids of the vocabulary of {vocab_size}', token)


# These functions compare words with those that are known.


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
  """Raises ValueError unless a value is one of the allowed words.

  Args:
    name: name of the value, for the message.
    value: the value that was given.
    choices: the words that are allowed.
  """
  if value not in tuple(choices):
    near = nearest(str(value), choices, or_all=False).lstrip()
    raise unexpected(name, f'one of {sorted(choices)}', value, near)


def nearest(name: str, candidates: Iterable[str], or_all: bool = True) -> str:
  """Lists the known names that are near a name, for the end of a message.

  Args:
    name: the name that was given; upper and lower case do not matter.
    candidates: the known names.
    or_all: whether to list all known names if none is near.

  Returns:
    ' Nearest known: a, b.', ' Known: a, b, c, d.', or nothing.
  """
  names = sorted(set(candidates))
  lower = {candidate.lower(): candidate for candidate in names}
  close = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.6)
  if close:
    return f' Nearest known: {", ".join(lower[match] for match in close)}.'
  return f' Known: {", ".join(names)}.' if names and or_all else ''


# These functions import optional packages.


def package(what: str, module: str, extra: str, otherwise: str = '') -> Any:
  """Imports a module of a package that comes with an extra of this library.

  Args:
    what: the feature that needs the package, as the beginning of a sentence.
    module: full name of the module, such as 'rouge_score.rouge_scorer'.
    extra: name of the extra.
    otherwise: a sentence that says how to do without the package.

  Raises:
    ValueError: the package is not installed; the message says how to install
      it.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{what} needs the package {module.split(".")[0]}, which is not'
      f" installed: pip install 'specdec_jax[{extra}]'. {otherwise}".rstrip()
    ) from error
