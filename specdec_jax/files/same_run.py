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


class OtherRunError(ValueError):
  """Files that were found belong to another run; the text says what differs."""


def differences(before: Any, now: Any, name: str = '') -> list[str]:
  """Lists where two JSON values differ, each with its place and both values.

  Both are first converted to JSON: tuples become lists, and objects that JSON
  does not know become text. A missing key equals a key with None, so that a
  new setting that is not in use makes no difference.
  """
  return _differences(_plain(before), _plain(now), name)


def check(
  before: Any, now: Mapping[str, Any], what: str, what_to_do: str
) -> None:
  """Raises OtherRunError unless the settings that were found are this run's.

  Args:
    before: the settings that were found.
    now: this run's settings.
    what: which settings were found and where, as the beginning of a sentence.
    what_to_do: sentences that tell the user what to do.
  """
  if not (found := differences(before, now)):
    return
  more = len(found) - _SHOWN
  listed = '; '.join(found[:_SHOWN]) + (f'; and {more} more' * (more > 0))
  raise OtherRunError(f'{what}: {listed}. {what_to_do}')


def _plain(value: Any) -> Any:
  return json.loads(json.dumps(value, default=str))


def _differences(before: Any, now: Any, name: str) -> list[str]:
  if isinstance(before, dict) and isinstance(now, dict):
    found = []
    for key in sorted({*before, *now}):
      inner = f'{name}.{key}' if name else key
      found += _differences(before.get(key), now.get(key), inner)
    return found
  if before == now:
    return []
  return [f'{name or "all"} was {_shown(before)}, is {_shown(now)}']


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'
