"""Words that are not known, and what somebody may have meant by them."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any


def check_choice(name: str, value: Any, known: Collection[str]) -> None:
  """Raises ValueError unless a value is one of some words.

  Args:
    name: what the message calls it.
    value: what was given.
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
    name: that came; another case of letters is still near.
    known: names.
    or_all: whether all of them are said where none is near.

  Returns:
    ' Nearest known: a, b.', ' Known: a, b, c, d.', or nothing.
  """
  names = sorted(set(known))
  lower = {candidate.lower(): candidate for candidate in names}
  close = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.6)
  if close:
    return f' Nearest known: {", ".join(lower[match] for match in close)}.'
  return f' Known: {", ".join(names)}.' if names and or_all else ''
