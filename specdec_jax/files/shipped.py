"""Finds the files that are shipped with the library: gin files, the demo pair.

In a checkout of the repository they are in its folders gin/ and demo/; an
installed wheel has them in `specdec_jax/shipped/`. A path such as
'demo/target.msgpack' leads to the same file in both cases, from any working
folder.
"""

import os
import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_IN_WHEEL = _PACKAGE / 'shipped'
# The folder that holds gin/ and demo/.
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent
_FOLDERS = ('gin', 'demo')
_MODELS = {'demo': 'demo/target.msgpack', 'demo-draft': 'demo/draft.msgpack'}


def find(path: str | os.PathLike[str]) -> str:
  """Returns the path of a shipped file, or any other path unchanged.

  Args:
    path: a path relative to the working folder, whose files take precedence; an
      absolute path; or an address.
  """
  path = os.fspath(path)
  parts = pathlib.PurePath(path).parts
  if not parts or parts[0] not in _FOLDERS or '..' in parts:
    return path
  shipped = ROOT / path
  return path if os.path.lexists(path) or not shipped.exists() else str(shipped)


def model(path: str | os.PathLike[str]) -> str:
  """Returns the path of a shipped model, 'demo' or 'demo-draft'.

  Any other path is returned unchanged.
  A Hugging Face folder of that name in the working folder takes precedence.
  """
  path = os.fspath(path)
  is_folder = os.path.exists(os.path.join(path, 'config.json'))
  return path if is_folder else _MODELS.get(path, path)
