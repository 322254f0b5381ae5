"""Files: text line by line, and writing whole or not at all."""

import contextlib
import gzip
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import Any


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
  """Replaces `path` by `data`; a crash or a full disk leaves the old file.

  The bytes go to a temporary file in the same folder, reach the disk, and are
  then renamed onto `path`.

  Raises:
    OSError: the folder is missing or not writable, or the disk is full.
  """
  path = os.fspath(path)
  folder = os.path.dirname(path) or '.'
  handle, temporary = tempfile.mkstemp(
    dir=folder, prefix=f'.{os.path.basename(path)}.', suffix='.tmp'
  )
  try:
    with os.fdopen(handle, 'wb') as stream:
      stream.write(data)
      stream.flush()
      os.fsync(stream.fileno())
    # mkstemp makes files private; a result is as readable as any other file.
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(temporary, 0o666 & ~umask)
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)
    raise


def write_json(
  path: str | os.PathLike[str], value: Any, *, indent: int = 1, **options
) -> None:
  """Writes a value as JSON, whole or not at all; makes its folder.

  Args:
    path: is replaced.
    value: what `json.dumps` takes.
    indent: blanks a level.
    **options: further ones of `json.dumps`, such as sort_keys.

  Raises:
    OSError: the folder cannot be made or written, or the disk is full.
    TypeError: `value` is not JSON; nothing is written then.
  """
  text = json.dumps(value, indent=indent, **options) + '\n'
  os.makedirs(os.path.dirname(os.fspath(path)) or '.', exist_ok=True)
  write_atomically(path, text.encode())


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


def text_lines(
  path: str | os.PathLike[str], encoding: str = 'utf-8'
) -> Iterator[str]:
  """Yields the lines of a text file, plain or `.gz`, without their ends.

  Only a line feed ends a line.

  Raises:
    ValueError: the file cannot be read, or is not of this encoding.
  """
  path = os.fspath(path)
  opener = gzip.open if path.endswith('.gz') else open
  try:
    with opener(path, 'rt', encoding=encoding, newline='\n') as stream:
      for line in stream:
        yield line.rstrip('\r\n')
  except (OSError, EOFError, UnicodeDecodeError) as error:
    raise ValueError(f'{path!r} could not be read as text: {error}') from error
