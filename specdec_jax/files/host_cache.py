"""Keeps measurements of this processor in the user's cache folder."""

import hashlib
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specdec_jax.files import read_json, write_json
from specdec_jax.files.locations import user_cache

_Result = TypeVar('_Result')


def stored(
  name: str, key: Mapping[str, Any], read: Callable[[Any], _Result]
) -> _Result | None:
  """Returns the measurement of an earlier process, or None; see `measured`."""
  path = _path(name, key)
  if path.exists():
    try:
      content = read_json(path)
      if content['key'] != key:
        raise ValueError(f'expected the key {key}, got {content["key"]}')
      return read(content['value'])
    except (OSError, ValueError, LookupError, TypeError) as error:
      warnings.warn(
        f'{str(path)!r} is not what was measured here ({error}); it is measured'
        ' again.',
        stacklevel=2,
      )
  return None


def measured(
  name: str,
  key: Mapping[str, Any],
  make: Callable[[], Any],
  read: Callable[[Any], _Result],
) -> _Result:
  """Returns a stored measurement of an earlier process, or measures and stores.

  A broken file, or a file with another key, leads to a warning and a new
  measurement. If the folder cannot be written, nothing is stored.

  Args:
    name: the subject; the file's name begins with it.
    key: all that decides the measurement, such as the processor and the
      versions of libraries; JSON values.
    make: measures; returns JSON values.
    read: turns these into the result; raises ValueError, LookupError or
      TypeError for values that `make` cannot have returned.
  """
  earlier = stored(name, key, read)
  if earlier is not None:
    return earlier
  value = make()
  try:
    write_json(_path(name, key), {'key': key, 'value': value})
  except OSError:
    pass  # the next process measures again
  # JSON changes some values: a new measurement is read like a stored one.
  return read(json.loads(json.dumps(value)))


def _path(name: str, key: Mapping[str, Any]) -> pathlib.Path:
  digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
  return user_cache() / f'{name}-{digest.hexdigest()[:12]}.json'
