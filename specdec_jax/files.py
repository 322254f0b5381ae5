"""Files: text line by line, and writing whole or not at all."""

import contextlib
import gzip
import json
import os
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
