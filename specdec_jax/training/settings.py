"""What a folder's unfinished work was begun with, so that nothing is mixed."""

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
    settings: nested dicts of JSON values: all that decides the result.

  Returns:
    The settings as one text: what is made with them may be sealed with it.

  Raises:
    same_run.OtherRunError: the file holds other settings; each is named with
      both values.
    files.BrokenFileError: the file holds no settings at all.
    OSError: it cannot be written.
  """
  path = os.fspath(path)
  if os.path.exists(path):
    same_run.check(
      _read(path),
      settings,
      f'{path!r} belongs to a run of other settings',
      'Continue it with its own, or choose another folder.',
    )
  else:
    files.write_json(path, settings, indent=2, sort_keys=True, default=str)
  return json.dumps(settings, indent=2, sort_keys=True, default=str)


def _read(path: str) -> dict[str, Any]:
  try:
    with open(path, encoding='utf-8') as stream:
      found = json.load(stream)
  except (ValueError, OSError, RecursionError) as error:
    raise _broken(path, f'cannot be read as JSON ({error})') from error
  if not isinstance(found, dict) or not found:
    raise _broken(path, f'holds {found!r}, not the settings of a run')
  return found


def _broken(path: str, why: str) -> files.BrokenFileError:
  return files.BrokenFileError(
    f'{path!r} {why}, so it is not known what the work beside it was begun'
    ' with. If you know that it is of these settings, remove this file;'
    ' otherwise choose another folder.'
  )
