"""Stores measurements of this processor in the user's cache folder."""

import contextlib
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
  make: Callable[[], Any] | None,
  read: Callable[[Any], _Result],
) -> _Result | None:
  """Returns the measurement that an earlier process stored, or makes a new one.

  A new measurement is stored, unless the folder cannot be written. A broken
  file, or a file with another key, leads to a warning and a new measurement.

  Args:
    name: what is measured; the file's name begins with this name.
    key: all that decides the measurement, such as the processor and the
      versions of libraries; JSON values.
    make: function that measures and returns JSON values. None: nothing is
      measured, and without a stored measurement the result is None.
    read: function that turns these JSON values into the result; it raises
      ValueError, LookupError or TypeError for values that `make` cannot have
      returned.
  """
  digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
  path = user_cache() / f'{name}-{digest[:12]}.json'
  if path.exists():
    try:
      content = read_json(path)
      if content['key'] != key:
        raise ValueError(f'expected the key {key}, got {content["key"]}')
      return read(content['value'])
    except (OSError, ValueError, LookupError, TypeError) as error:
      advice = 'is not used' if make is None else 'is measured again'
      warnings.warn(
        f'{str(path)!r} is not what was measured here ({error}); it {advice}.',
        stacklevel=2,
      )
  if make is None:
    return None
  value = make()
  # If the file cannot be written, the next process measures again.
  with contextlib.suppress(OSError):
    write_json(path, {'key': key, 'value': value})
  # JSON changes some values, such as tuples, which become lists. A new
  # measurement is therefore read like a stored one.
  return read(json.loads(json.dumps(value)))
