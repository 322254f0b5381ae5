"""The settings of a folder's unfinished work, so that runs are not mixed."""

import json
import os
from collections.abc import Mapping
from typing import Any

from specdec_jax import files
from specdec_jax.files import same_run


def claim(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> str:
  """Writes `settings` to `path`, or checks that the same ones are there.

  Args:
    path: a JSON file; its folder is made if needed.
    settings: nested dicts of JSON values: everything that decides the result.

  Returns:
    The settings as one text, with which results can be sealed.

  Raises:
    same_run.OtherRunError: the file holds other settings; each is named with
      both values.
    files.BrokenFileError: the file holds no settings at all.
    OSError: the file cannot be written.
  """
  path = os.fspath(path)
  if os.path.exists(path):
    same_run.check(
      _read(path),
      settings,
      f'{path!r} belongs to a run with other settings',
      'Continue that run with its own settings, or choose another folder.',
    )
  else:
    files.write_json(path, settings, indent=2, sort_keys=True, default=str)
  return json.dumps(settings, indent=2, sort_keys=True, default=str)


def _read(path: str) -> dict[str, Any]:
  try:
    found = files.read_json(path)
  except (ValueError, OSError) as error:
    raise _broken(path, f'cannot be read as JSON ({error})') from error
  if not isinstance(found, dict) or not found:
    raise _broken(path, f'holds {found!r}, not the settings of a run')
  return found


def _broken(path: str, why: str) -> files.BrokenFileError:
  return files.BrokenFileError(
    f'{path!r} {why}, so the settings of the work in this folder are unknown.'
    ' If you know that it was begun with the present settings, remove this'
    ' file; otherwise choose another folder.'
  )
