"""Writes files whole or not at all."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from typing import Any

from specdec_jax.files.reading import check_regular


def make_folder(path: str | os.PathLike[str]) -> None:
  """Makes a folder that can be written, or finds it there.

  Raises:
    ValueError: it cannot be made or written.
  """
  try:
    os.makedirs(path, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
  except OSError as error:
    raise ValueError(
      f'The folder {os.fspath(path)!r} cannot be written:'
      f' {error.strerror or error}. Give another one.'
    ) from error


def check_writable(path: str | os.PathLike[str]) -> None:
  """Checks before a long run that its file can be written; makes its folder.

  Raises:
    ValueError: it cannot, or a folder or a device is in its place.
  """
  check_regular(path)
  make_folder(os.path.dirname(os.fspath(path)) or '.')


def write_atomically(
  path: str | os.PathLike[str], data: bytes | Iterable[bytes]
) -> None:
  """Replaces the file with `data`; after a crash the old file is still there.

  The bytes are written to a temporary file in the same folder; when they are on
  the disk, it is renamed to `path`. A device or a pipe is written to.

  Raises:
    OSError: the folder is missing or not writable, or the disk is full.
  """
  path = os.fspath(path)
  parts = [data] if isinstance(data, bytes) else data
  if os.path.exists(path) and not os.path.isfile(path):
    with open(path, 'wb') as stream:
      stream.writelines(parts)
    return
  folder = os.path.dirname(path) or '.'
  try:
    handle, temporary = tempfile.mkstemp(
      dir=folder, prefix=f'.{os.path.basename(path)}.', suffix='.tmp'
    )
  except OSError as error:
    error.filename = path  # nobody knows the temporary one
    raise
  try:
    with os.fdopen(handle, 'wb') as stream:
      stream.writelines(parts)
      stream.flush()
      os.fsync(stream.fileno())
    # mkstemp makes files private; results should have the usual permissions.
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
    path: the file; it is replaced.
    value: any value that `json.dumps` accepts.
    indent: spaces per level.
    **options: further options of `json.dumps`, such as sort_keys.

  Raises:
    OSError: the folder cannot be made or written, or the disk is full.
    TypeError: `value` is not JSON; nothing is written then.
  """
  text = json.dumps(value, indent=indent, **options) + '\n'
  os.makedirs(os.path.dirname(os.fspath(path)) or '.', exist_ok=True)
  write_atomically(path, text.encode())
