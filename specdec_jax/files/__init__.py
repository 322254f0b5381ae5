"""Reads lines and small files, and writes files whole or not at all.

A line that cannot be used comes with an error that says why. Reading takes
bounded memory, even if a line or a pipe has no end.
"""

import codecs
import contextlib
import json
import os
import stat
import sys
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar

from specdec_jax.checks.fields import unexpected
from specdec_jax.files import shipped

MAX_LINE = 16 << 20  # a longer line, in bytes, becomes an error
# Limits of a pipe, which may have no end (a file has one).
MAX_PIPE = 1 << 30  # the most bytes
MAX_PIPE_LINES = 10_000_000
# A .gz file may unpack to at most this many times its size. gzip makes text 3
# to 20 times smaller, but a file of zeros a thousand times.
MAX_RATIO = 200
# The ratio is not checked before a file has unpacked to this many bytes.
_FREE = 16 << 20
_CHUNK = 1 << 16
_SHOWN = 200  # an error shows this many bytes of a line that is too long
MOST_JSON = 256 << 20  # the most bytes of a JSON file
_KINDS = {
  stat.S_IFIFO: 'a pipe',
  stat.S_IFCHR: 'a device',
  stat.S_IFBLK: 'a device',
  stat.S_IFSOCK: 'a socket',
  stat.S_IFDIR: 'a folder',
}
T = TypeVar('T')


class BrokenOff(ValueError):
  """A file's end cannot be read, although its first lines could."""


class TextLine(NamedTuple):
  """A line of a text file.

  Attributes:
    text: the line without its line feed, or only the beginning of a line that
      is too long; U+FFFD stands for bytes that are not UTF-8.
    error: why the line cannot be used, or None.
  """

  text: str
  error: str | None = None


def lines(path: str | os.PathLike[str]) -> Iterator[TextLine]:
  """Yields the lines of a text file, plain or `.gz`, or of a pipe.

  Only a line feed ends a line; a last line without a line feed counts. A byte
  order mark at the beginning and carriage returns before line feeds are left
  out. `MAX_LINE`, `MAX_PIPE`, `MAX_PIPE_LINES` and `MAX_RATIO` bound memory.

  Args:
    path: a file or a named pipe; '-' is stdin.

  Raises:
    ValueError: the file cannot be read, or exceeds the limits, or was changed
      while it was read.
    BrokenOff: the first lines could be read, but not the rest, for example
      because compressed data are damaged or cut short; the line in which the
      file breaks off is lost.
  """
  path = os.fspath(path)
  before, number = state(path), 0
  try:
    with _opened(path) as (stream, is_pipe):
      chunks: Iterable[bytes] = iter(lambda: stream.read(_CHUNK), b'')
      chunks = _unpacked(chunks, path) if path.endswith('.gz') else chunks
      chunks = _bounded(chunks, path) if is_pipe else chunks
      for number, (line, size) in enumerate(_split(chunks), 1):
        bom = codecs.BOM_UTF8 if number == 1 else b''
        yield _text_line(line.removeprefix(bom), size)
    if state(path) != before:
      advice = 'Run again when nobody writes it.'
      raise ValueError(f'{path!r} was changed while it was read. {advice}')
  except (OSError, EOFError, zlib.error) as error:
    why = reason(error)
    if number:
      where = f'{path!r} could not be read on after line {number}'
      advice = 'It is damaged or cut short; copy it again from its source.'
      raise BrokenOff(f'{where}: {why}. {advice}') from error
    raise ValueError(
      f'{path!r} could not be read as text: {why}. Expected UTF-8 text, plain'
      f" or .gz, or '-' for stdin; paths are relative to {os.getcwd()}"
    ) from error


def reason(error: Exception) -> object:
  """Returns an error's reason, without the number and path of an OSError."""
  return error.strerror or error if isinstance(error, OSError) else error


def state(path: str) -> tuple[int, int] | None:
  """Returns a file's size and time of change, by which changes are noticed.

  The result is None if there is no regular file.
  """
  try:
    status = os.stat(shipped.find(path))
  except OSError:
    return None
  is_file = path != '-' and stat.S_ISREG(status.st_mode)
  return (status.st_size, status.st_mtime_ns) if is_file else None


def text_lines(path: str | os.PathLike[str]) -> Iterator[str]:
  """Yields the texts of `lines`; every line must be usable.

  Raises:
    ValueError: as for `lines`; or a line cannot be used, whose number is in the
      message.
  """
  for number, line in enumerate(lines(path), 1):
    if line.error is not None:
      raise ValueError(f'{os.fspath(path)!r} line {number}: {line.error}.')
    yield line.text


def until_broken(items: Iterator[T]) -> tuple[list[T], str | None]:
  """Reads items of a file until it breaks off.

  Returns:
    The items, and why the file broke off; None if it was read to its end.

  Raises:
    ValueError: as for `lines`; also if the file breaks off before any item.
  """
  before: list[T] = []
  try:
    for item in items:
      before.append(item)
  except BrokenOff as error:
    if not before:
      raise
    return before, str(error)
  return before, None


def writable(text: str) -> str:
  """Replaces lone surrogates by U+FFFD, so that the text can be written.

  JSON's escapes can hold these halves of characters, but UTF-8 cannot.
  """
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[BinaryIO, bool]]:
  """Opens a file or pipe; yields its stream, and whether it is a pipe.

  A pipe may have no end.
  """
  if path == '-':
    if sys.stdin is None:
      raise ValueError("'-' is stdin, which is closed; give text or a file.")
    yield sys.stdin.buffer, True
    return
  path = shipped.find(path)
  mode = os.stat(path).st_mode
  if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
    raise ValueError(f'{path!r} is a device; expected a file or a pipe.')
  with open(path, 'rb', buffering=0) as stream:
    yield stream, stat.S_ISFIFO(mode)


def _bounded(chunks: Iterable[bytes], path: str) -> Iterator[bytes]:
  sizes = {'bytes': 0, 'lines': 0}
  for chunk in chunks:
    sizes['bytes'] += len(chunk)
    sizes['lines'] += chunk.count(b'\n')
    for unit, most in (('bytes', MAX_PIPE), ('lines', MAX_PIPE_LINES)):
      if sizes[unit] > most:
        why = f'More than {most:,} {unit} came from {path!r}'
        advice = 'which may have no end; put so much text in a file'
        raise ValueError(f'{why}, {advice}.')
    yield chunk


def _unpacked(chunks: Iterable[bytes], path: str) -> Iterator[bytes]:
  """Unpacks gzip data, up to the first damaged byte."""
  inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)
  read, unpacked = 0, 0
  for data in chunks:
    read += len(data)
    piece = b''
    # After a full piece zlib may hold more unpacked text, even if no packed
    # data are left.
    while data or len(piece) == _CHUNK:
      if inflate.eof:
        data = data.lstrip(b'\0')  # zeros may follow a member of a .gz file
        if not data:
          break
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)
      before = inflate.copy()
      try:
        piece = inflate.decompress(data, _CHUNK)
      except zlib.error:
        # The loop yields the text before the damaged byte, and raises the error
        # again there.
        for byte in data:
          yield before.decompress(bytes([byte]))
        raise
      unpacked += len(piece)
      if unpacked > _FREE + MAX_RATIO * read:
        most = f'{MAX_RATIO} times its size, which text does not do'
        advice = 'if the file is right, unpack it with gunzip'
        raise ValueError(f'{path!r} unpacks to more than {most}; {advice}.')
      yield piece
      data = inflate.unconsumed_tail or inflate.unused_data
  if read and not inflate.eof:
    raise EOFError('its compressed data have no end')


def _split(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
  """Yields each line's first `MAX_LINE` + 1 bytes, and its number of bytes."""
  line, size = bytearray(), 0
  for chunk in chunks:
    for at, piece in enumerate(chunk.split(b'\n')):
      if at:
        yield bytes(line), size
        line, size = bytearray(), 0
      size += len(piece)
      line += piece[: MAX_LINE + 1 - len(line)]
  if size:
    yield bytes(line), size


def _text_line(line: bytes, size: int) -> TextLine:
  if size > MAX_LINE:
    text = line[:_SHOWN].decode('utf-8', errors='replace')
    return TextLine(text, f'{size:,} bytes; a line has at most {MAX_LINE:,}')
  line = line.removesuffix(b'\r')
  try:
    if b'\0' not in line:
      return TextLine(line.decode('utf-8'))
    why = 'it holds NUL bytes, as UTF-16 text does; expected UTF-8'
  except UnicodeDecodeError as error:
    place = f'byte 0x{line[error.start]:02x} at byte {error.start + 1}'
    why = f'not valid UTF-8 ({place} of the line)'
  return TextLine(line.decode('utf-8', errors='replace'), why)


def check_regular(path: str | os.PathLike[str]) -> None:
  """Raises ValueError if something at `path` is not a regular file.

  Reading a pipe or a socket would wait for its writer, and a device may have no
  end. A missing file passes, because opening it raises.
  """
  try:
    mode = os.stat(path).st_mode
  except OSError:
    return
  if not stat.S_ISREG(mode):
    kind = _KINDS.get(stat.S_IFMT(mode), 'not a file')
    raise ValueError(f'{os.fspath(path)!r} is {kind}; expected a regular file.')


def check_all_regular(folder: str | os.PathLike[str]) -> None:
  """Applies `check_regular` to all files below a folder.

  Links to folders are not followed.
  """
  for root, _, names in os.walk(folder):
    for name in names:
      check_regular(os.path.join(root, name))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
  """Opens a regular file, to read bytes.

  Raises:
    ValueError: the path is not that of a regular file, see `check_regular`.
    OSError: the file is missing or may not be read.
  """
  check_regular(path)
  return open(path, 'rb')


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads the object in a JSON file of at most `MOST_JSON` bytes.

  Raises:
    ValueError: the file is missing, is not a regular file, is too large, or
      does not hold a JSON object; the message names the file.
  """
  place = repr(os.fspath(path))
  try:
    return json_object(read_small(path, MOST_JSON), place)
  except OSError as error:
    raise ValueError(f'{place} cannot be read: {error.strerror}.') from error


def json_object(text: str | bytes, place: str) -> dict[str, Any]:
  """Reads the JSON object in a text.

  Args:
    text: the text of a file or line.
    place: the file or line with the text, as the message names it.

  Raises:
    ValueError: the text is not a JSON object.
  """
  try:
    value = json.loads(text)
  except RecursionError as error:
    raise ValueError(f'{place}: its JSON is nested too deep.') from error
  except ValueError as error:
    raise ValueError(f'{place} is not JSON: {error}.') from error
  if not isinstance(value, dict):
    raise unexpected(place, 'a JSON object', value)
  return value


def read_small(path: str | os.PathLike[str], limit: int) -> bytes:
  """Reads a regular file that should be small.

  Args:
    path: the file.
    limit: the maximal number of bytes.

  Raises:
    ValueError: the file is not a regular one, or is too large; then the message
      has both sizes.
    OSError: the file is missing or may not be read.
  """
  with open_regular(path) as stream:
    check_size(path, os.fstat(stream.fileno()).st_size, limit)
    return stream.read(limit)


def check_size(what: str | os.PathLike[str], size: int, limit: int) -> None:
  """Raises ValueError for a file of more than `limit` bytes.

  Args:
    what: path of the file, for the message.
    size: the file's bytes.
    limit: the most bytes that it may have.
  """
  if size > limit:
    expected = f'at most {limit} bytes in a file of this name'
    raise unexpected(repr(os.fspath(what)), expected, size)


# These functions write: a file is written whole or not at all.


def make_folder(path: str | os.PathLike[str]) -> None:
  """Makes a folder unless it exists, and checks that it is writable.

  Raises:
    ValueError: the folder cannot be made, or no file can be written in it.
  """
  try:
    os.makedirs(path, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
  except OSError as error:
    why = f'cannot be written: {reason(error)}. Give another one.'
    raise ValueError(f'The folder {os.fspath(path)!r} {why}') from error


def check_writable(path: str | os.PathLike[str]) -> None:
  """Makes a file's folder, and checks that the file can be written.

  A long run calls this function before it begins.

  Raises:
    ValueError: the folder cannot be written, or a folder or a device is in the
      file's place.
  """
  check_regular(path)
  make_folder(os.path.dirname(os.fspath(path)) or '.')


def write_atomically(
  path: str | os.PathLike[str], data: bytes | Iterable[bytes]
) -> None:
  """Replaces a file by `data`; after a crash the old file is still there.

  The bytes are written to a temporary file in the same folder; once they are on
  the disk, that file is renamed to `path`. If `path` is a device or a pipe, the
  bytes are written to it directly.

  Raises:
    OSError: the folder is missing or not writable, or the disk is full.
  """
  path = os.fspath(path)
  parts = [data] if isinstance(data, bytes) else data
  if os.path.exists(path) and not os.path.isfile(path):
    with open(path, 'wb') as stream:
      stream.writelines(parts)
    return
  folder, name = os.path.split(path)
  temporary = os.path.join(folder, f'.{name}.{uuid.uuid4().hex[:8]}.tmp')
  try:
    stream = open(temporary, 'xb')
  except OSError as error:
    # The user does not know the temporary file.
    error.filename = path
    raise
  try:
    with stream:
      stream.writelines(parts)
      stream.flush()
      os.fsync(stream.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)
    raise


def write_json(
  path: str | os.PathLike[str], value: Any, *, indent: int = 1, **options
) -> None:
  """Writes a value as JSON, whole or not at all; makes the file's folder.

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
