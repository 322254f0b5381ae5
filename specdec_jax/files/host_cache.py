"""Keeps measurements of this processor in the user's cache folder."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specdec_jax.files import read_json, write_json
from specdec_jax.files.locations import user_cache

_Result = TypeVar('_Result')


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
  digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
  path = user_cache() / f'{name}-{digest.hexdigest()[:12]}.json'
  if path.exists():
    try:
      stored = read_json(path)
      if stored['key'] != key:
        raise ValueError(f'expected the key {key}, got {stored["key"]}')
      return read(stored['value'])
    except (OSError, ValueError, LookupError, TypeError) as error:
      warnings.warn(
        f'{str(path)!r} is not what was measured here ({error}); it is measured'
        ' again.',
        stacklevel=2,
      )
  value = make()
  try:
    write_json(path, {'key': key, 'value': value})
  except OSError:
    pass  # the next process measures again
  # JSON changes some values: a new measurement is read like a stored one.
  return read(json.loads(json.dumps(value)))
