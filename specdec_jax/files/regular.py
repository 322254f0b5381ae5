"""Opens regular files, of the size that they should have, and no others."""

import json
import os
import stat
from typing import Any, BinaryIO

MOST_JSON = 256 << 20  # bytes
_KINDS = {
  stat.S_IFIFO: 'a pipe',
  stat.S_IFCHR: 'a device',
  stat.S_IFBLK: 'a device',
  stat.S_IFSOCK: 'a socket',
  stat.S_IFDIR: 'a folder',
}


def check_regular(path: str | os.PathLike[str]) -> None:
  """Raises ValueError if something at `path` is not a regular file.

  Reading a pipe or a socket would wait for its writer, and a device may have no
  end. A missing file raises nothing here: opening it will.
  """
  try:
    mode = os.stat(path).st_mode
  except OSError:
    return
  if not stat.S_ISREG(mode):
    kind = _KINDS.get(stat.S_IFMT(mode), 'not a file')
    raise ValueError(
      f'{os.fspath(path)!r} is {kind}; expected a regular file. Copy its'
      ' contents to one.'
    )


def check_all_regular(folder: str | os.PathLike[str]) -> None:
  """`check_regular` for all files below a folder; skips links to folders."""
  try:
    entries = list(os.scandir(folder))
  except OSError:
    return  # opening the files will raise
  for entry in entries:
    if entry.is_dir(follow_symlinks=False):
      check_all_regular(entry.path)
    elif not entry.is_file() and not entry.is_dir():
      check_regular(entry.path)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
  """Opens a file of the user's to read bytes.

  Raises:
    ValueError: as for `check_regular`.
    OSError: it is missing or may not be read.
  """
  check_regular(path)
  return open(path, 'rb')


def read_json(path: str | os.PathLike[str]) -> Any:
  """The value of a JSON file of at most `MOST_JSON` bytes.

  Raises:
    ValueError: as for `read_small`; or it is not JSON.
    OSError: it is missing or may not be read.
  """
  try:
    return json.loads(read_small(path, MOST_JSON))
  except RecursionError as error:
    raise ValueError('its values are nested too deeply') from error


def read_small(path: str | os.PathLike[str], most: int) -> bytes:
  """Reads a regular file that should be small.

  Args:
    path: the file.
    most: the most bytes that it may have.

  Raises:
    ValueError: it is not a regular file, or is larger; then the message gives
      both sizes.
    OSError: it is missing or may not be read.
  """
  with open_regular(path) as stream:
    check_size(path, os.fstat(stream.fileno()).st_size, most)
    return stream.read(most)


def check_size(what: str | os.PathLike[str], size: int, most: int) -> None:
  """Raises ValueError for a file of more than `most` bytes."""
  if size > most:
    raise ValueError(
      f'{os.fspath(what)!r} has {size} bytes, expected at most {most}: it is'
      ' not the kind of file that its name says.'
    )
