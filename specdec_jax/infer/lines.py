"""Lines of text in: read from a file, checked one by one, fitted to the engine.

A line that cannot be decoded carries an `error`; it never stops the others.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the input.

  Attributes:
    text: what the file had; U+FFFD stands for bytes that are no UTF-8.
    num_tokens: of the whole text as the target reads it; 0 for a line without
      anything to read, which passes through, and before `count_tokens`.
    error: why the line cannot be decoded, or None.
  """

  text: str
  num_tokens: int = 0
  error: str | None = None


def read_lines(path: str) -> list[Line]:
  """Reads one example a line; only a newline ends one.

  A last line without a newline counts, a byte order mark and carriage returns
  before newlines do not. Invalid UTF-8 gives that line an `error`.

  Args:
    path: a file, or '-' for stdin.

  Raises:
    ValueError: the file is missing or cannot be read.
  """
  try:
    data = (
      sys.stdin.buffer.read()
      if path == '-'
      else pathlib.Path(path).read_bytes()
    )
  except OSError as error:
    raise ValueError(
      f'The input file {path!r} cannot be read: {error.strerror}. Expected'
      f" UTF-8 text, one example a line, or '-' for stdin; paths are relative"
      f' to {os.getcwd()}'
    ) from error
  pieces = data.removeprefix(b'\xef\xbb\xbf').split(b'\n')
  if not pieces[-1]:
    pieces.pop()
  return [_read_line(piece, i + 1) for i, piece in enumerate(pieces)]


def _read_line(piece: bytes, number: int) -> Line:
  piece = piece.removesuffix(b'\r')
  try:
    return Line(piece.decode('utf-8'))
  except UnicodeDecodeError as error:
    return Line(
      piece.decode('utf-8', errors='replace'),
      error=f'line {number}: not valid UTF-8 (byte 0x{piece[error.start]:02x}'
      f' at byte {error.start + 1} of the line)',
    )


def count_tokens(
  lines: Sequence[Line], count: Callable[[str], int], limit: int | None
) -> list[Line]:
  """Returns `lines` with `num_tokens`, those over the limit with an error.

  Args:
    lines: as read.
    count: tokens of a text as it is read, such as `Engine.num_input_tokens`.
    limit: tokens that a line may have; None is no limit.
  """

  def counted(number: int, line: Line) -> Line:
    if line.error is not None:
      return line
    line = dataclasses.replace(line, num_tokens=count(line.text))
    if limit is None or line.num_tokens <= limit:
      return line
    return dataclasses.replace(
      line,
      error=f'line {number}: {line.num_tokens} tokens (its end included), the'
      f" maximum is {limit}; shorten it, or set on_too_long to 'truncate'",
    )

  return [counted(index + 1, line) for index, line in enumerate(lines)]
