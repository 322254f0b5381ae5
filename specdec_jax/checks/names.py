"""Errors for unknown names, with the known names that are near."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any


def check_choice(name: str, value: Any, known: Collection[str]) -> None:
  """Raises ValueError unless a value is one of the known words.

  Args:
    name: name of the value, for the message.
    value: the value that was given.
    known: the words.
  """
  if value not in tuple(known):
    raise ValueError(
      f'{name} is {value!r}, expected one of {sorted(known)}.'
      f'{nearest(str(value), known, or_all=False)}'
    )


def nearest(name: str, known: Iterable[str], or_all: bool = True) -> str:
  """Says which of the known names are near, for the end of a message.

  Args:
    name: the name that was given; upper and lower case do not matter.
    known: the known names.
    or_all: whether to list all known names if none is near.

  Returns:
    ' Nearest known: a, b.', ' Known: a, b, c, d.', or nothing.
  """
  names = sorted(set(known))
  lower = {candidate.lower(): candidate for candidate in names}
  close = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.6)
  if close:
    return f' Nearest known: {", ".join(lower[match] for match in close)}.'
  return f' Known: {", ".join(names)}.' if names and or_all else ''
