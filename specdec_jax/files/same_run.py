"""Whether what lies on disk is of this very run: one comparison for all.

A run writes what decides its result beside it, as JSON. Who finds such a
description compares it with his own; where they differ, nothing is mixed.
"""

import json
from collections.abc import Mapping
from typing import Any

_SHOWN = 5  # differences in a message
_LONGEST = 200  # characters of a value in it


class OtherRunError(ValueError):
  """What was found is of another run; the text says what differs."""


def differences(before: Any, now: Any, name: str = '') -> list[str]:
  """Says where two JSON values differ, one text a place with both values.

  Tuples are lists here, as in a file, and what JSON does not know is its text.
  A key that is missing is as one of None: a setting that came later and is not
  in use changes nothing.
  """
  return _differences(_plain(before), _plain(now), name)


def check(
  before: Any, now: Mapping[str, Any], what: str, what_to_do: str
) -> None:
  """Raises OtherRunError unless what was found is of this run.

  Args:
    before: the settings that were found.
    now: this run's.
    what: where which settings were found, the beginning of a sentence.
    what_to_do: sentences for the user.
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
