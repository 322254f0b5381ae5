"""Writes files whole or not at all, with checksums that are kept in them."""

import contextlib
import hashlib
import json
import os
import tempfile
from typing import Any

from specdec_jax.files.regular import check_regular

_SEAL = b'sha256 '  # begins the first line of a sealed file


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


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
  """Replaces the file with `data`; after a crash the old file is still there.

  The bytes are written to a temporary file in the same folder; when they are on
  the disk, it is renamed to `path`. A device or a pipe is written to.

  Raises:
    OSError: the folder is missing or not writable, or the disk is full.
  """
  path = os.fspath(path)
  if os.path.exists(path) and not os.path.isfile(path):
    with open(path, 'wb') as stream:
      stream.write(data)
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
      stream.write(data)
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


class BrokenFileError(ValueError):
  """A sealed file is missing or was changed; the text names it and says why."""


def write_sealed(
  path: str | os.PathLike[str], data: bytes, of: str = ''
) -> None:
  """Writes a line with a checksum, then `data`; whole or not at all.

  Args:
    path: the file; it is replaced.
    data: any bytes.
    of: a text that says what the data belong to. It is part of the checksum,
      but not written, so that a sealed file of something else is not accepted.

  Raises:
    OSError: as for `write_atomically`.
  """
  write_atomically(path, _seal(data, of) + b'\n' + data)


def read_sealed(path: str | os.PathLike[str], of: str = '') -> bytes:
  """Reads data that `write_sealed` wrote.

  Raises:
    BrokenFileError: the file is missing or cannot be read, or it has no
      checksum, or a wrong one.
  """
  path = os.fspath(path)
  if os.path.exists(path) and not os.path.isfile(path):
    raise BrokenFileError(f'{path} is not a file')  # reading a pipe would wait
  try:
    with open(path, 'rb') as stream:
      found = stream.read()
  except OSError as error:
    raise BrokenFileError(
      f'{path} cannot be read ({error.strerror or error})'
    ) from error
  if not found:
    raise BrokenFileError(f'{path} is empty')
  seal, _, data = found.partition(b'\n')
  if not seal.startswith(_SEAL):
    raise BrokenFileError(
      f'{path} does not begin with a checksum: another program or an earlier'
      ' version wrote it, or it is damaged'
    )
  if seal != _seal(data, of):
    raise BrokenFileError(
      f'{path} does not fit its checksum: it is damaged, cut short, or of'
      ' another run'
    )
  return data


def _seal(data: bytes, of: str) -> bytes:
  digest = hashlib.sha256(of.encode() + b'\0' + data)
  return _SEAL + digest.hexdigest().encode()


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
