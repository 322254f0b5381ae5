"""What somebody may have meant by a name that nothing knows."""

import difflib
from collections.abc import Iterable


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
