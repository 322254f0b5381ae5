"""What a folder's unfinished work was begun with, so that nothing is mixed."""

import json
import os
from collections.abc import Mapping
from typing import Any

from specdec_jax import files


def claim(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
  """Writes `settings` to `path`, or checks that the same ones are there.

  Args:
    path: a JSON file; its folder is made if needed.
    settings: nested dicts of JSON values: all that decides the result.

  Raises:
    ValueError: the file holds other settings (each is named with both values),
      or is not such a file.
    OSError: it cannot be written.
  """
  path = os.fspath(path)
  wanted = json.loads(json.dumps(settings, default=str))
  if not os.path.exists(path):
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    text = json.dumps(wanted, indent=2, sort_keys=True)
    files.write_atomically(path, f'{text}\n'.encode())
    return
  try:
    with open(path, encoding='utf-8') as stream:
      found = json.load(stream)
  except (ValueError, OSError) as error:
    raise ValueError(f'{path!r} could not be read: {error}') from error
  ours, theirs = _flat(wanted), _flat(found)
  differing = [
    f'{name} is {ours.get(name)!r}, there it was {theirs.get(name)!r}'
    for name in sorted(ours.keys() | theirs.keys())
    if ours.get(name) != theirs.get(name)
  ]
  if differing:
    raise ValueError(
      f'{path!r} belongs to a run of other settings: {"; ".join(differing)}.'
      ' Continue it with its own, or choose another folder.'
    )


def _flat(tree: Any, name: str = '') -> dict[str, Any]:
  if not isinstance(tree, dict):
    return {name: tree}
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= _flat(value, f'{name}.{key}' if name else key)
  return flat
