"""Checks whether files on disk belong to this run, by comparing settings.

A run writes the settings that decide its result beside the result, as JSON. A
later run compares these settings with its own; if they differ, it raises an
error instead of mixing results.
"""

import json
from collections.abc import Mapping
from typing import Any

_SHOWN = 5  # most differences in a message
_LONGEST = 200  # most characters of a value in a message


def differences(before: Any, now: Any) -> list[str]:
  """Lists where two JSON values differ, each with its place and both values.

  Both are first converted to JSON: tuples become lists, and objects of other
  classes become text. A missing key equals a key with None, so that a new
  setting that is not in use makes no difference.
  """
  return _differences(_plain(before), _plain(now), '')


def check(
  before: Any, now: Mapping[str, Any], what: str, what_to_do: str
) -> None:
  """Raises ValueError unless the settings in a file are this run's.

  Args:
    before: the settings in the file.
    now: this run's settings.
    what: names the settings and the file, as the beginning of a sentence.
    what_to_do: sentences that tell the user what to do.
  """
  if not (lines := differences(before, now)):
    return
  more = len(lines) - _SHOWN
  listed = '; '.join(lines[:_SHOWN]) + (f'; and {more} more' * (more > 0))
  raise ValueError(f'{what}: {listed}. {what_to_do}')


def _plain(value: Any) -> Any:
  return json.loads(json.dumps(value, default=str))


def _differences(before: Any, now: Any, name: str) -> list[str]:
  if isinstance(before, dict) and isinstance(now, dict):
    return [
      difference
      for key in sorted({*before, *now})
      for difference in _differences(
        before.get(key), now.get(key), f'{name}.{key}'.lstrip('.')
      )
    ]
  if before == now:
    return []
  texts = [repr(value) for value in (before, now)]
  was, now = (
    text[:_LONGEST] + '...' * (len(text) > _LONGEST) for text in texts
  )
  return [f'{name or "all"} was {was}, is {now}']
