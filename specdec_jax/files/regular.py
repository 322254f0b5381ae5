"""Whether a path is a file at all, and no larger than what it should be."""

import os
import stat

_KINDS = {
  stat.S_IFIFO: 'a pipe',
  stat.S_IFCHR: 'a device',
  stat.S_IFBLK: 'a device',
  stat.S_IFSOCK: 'a socket',
  stat.S_IFDIR: 'a folder',
}


def check_regular(path: str | os.PathLike[str]) -> None:
  """Raises ValueError for what is there and no file, or no folder of files.

  To read a pipe or a socket waits for whoever writes it, and a device may have
  no end. What is missing passes: to open it says so.
  """
  try:
    mode = os.stat(path).st_mode
  except OSError:
    return
  if not stat.S_ISREG(mode):
    kind = _KINDS.get(stat.S_IFMT(mode), 'no file')
    raise ValueError(
      f'{os.fspath(path)!r} is {kind}; expected a regular file. Copy its'
      ' contents to one.'
    )


def check_all_regular(folder: str | os.PathLike[str]) -> None:
  """`check_regular` for all that lies in a folder, links to folders apart."""
  try:
    entries = list(os.scandir(folder))
  except OSError:
    return  # to open what should be there says so
  for entry in entries:
    if entry.is_dir(follow_symlinks=False):
      check_all_regular(entry.path)
    elif not entry.is_file() and not entry.is_dir():
      check_regular(entry.path)


def read_small(path: str | os.PathLike[str], most: int) -> bytes:
  """Reads a regular file that should be small.

  Args:
    path: the file.
    most: bytes that it may have.

  Raises:
    ValueError: it is no regular file, or larger; gives both sizes.
    OSError: it is missing or may not be read.
  """
  check_regular(path)
  check_size(path, os.path.getsize(path), most)
  with open(path, 'rb') as stream:
    return stream.read(most)


def check_size(what: str | os.PathLike[str], size: int, most: int) -> None:
  """Raises ValueError for a file of more than `most` bytes."""
  if size > most:
    raise ValueError(
      f'{os.fspath(what)!r} has {size} bytes, expected at most {most}: it is'
      ' another file than its name says.'
    )
