"""Checks whether files on disk belong to this run, by comparing settings.

A run writes the settings that decide its result beside the result, as JSON. A
later run compares these settings with its own; if they differ, it raises an
error instead of mixing results.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_SHOWN = 5  # the most differences that a message lists
_ADVICE = 'Continue it with its own settings, or choose another folder.'
_LONGEST = 200  # the most characters of a value in a message


def differences(before: Any, now: Any) -> list[str]:
  """Returns a line of text for each difference between two nested values.

  The line has the names of the keys and both values. The values are first
  converted to JSON: tuples become lists, and objects of other classes become
  text. A missing key equals a key with None, so that a file from before a
  setting existed does not differ from a run in which this setting is None.
  """
  values = [json.loads(json.dumps(x, default=str)) for x in (before, now)]
  return list(_differences(*values))


def check(
  before: Any, now: Mapping[str, Any], what: str, advice: str = _ADVICE
) -> None:
  """Raises ValueError unless the settings in a file are this run's.

  Args:
    before: the settings in the file.
    now: this run's settings.
    what: a clause that says which file has other settings; the message begins
      with it.
    advice: sentences that tell the user what to do.
  """
  if not (lines := differences(before, now)):
    return
  more = len(lines) - _SHOWN
  listed = '; '.join(lines[:_SHOWN]) + (f'; and {more} more' * (more > 0))
  raise ValueError(f'{what}: {listed}. {advice}')


def _differences(before: Any, now: Any, name: str = '') -> Iterator[str]:
  if isinstance(before, dict) and isinstance(now, dict):
    for key in sorted({*before, *now}):
      values, place = (before.get(key), now.get(key)), f'{name}.{key}'
      yield from _differences(*values, place.lstrip('.'))
  elif before != now:
    texts = [repr(value) for value in (before, now)]
    was, now = (x[:_LONGEST] + '...' * (len(x) > _LONGEST) for x in texts)
    yield f'{name or "all"} was {was}, is {now}'
