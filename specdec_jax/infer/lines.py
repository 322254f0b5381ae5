"""Lines of text in: read from a file, checked one by one, fitted to the engine.

A line that cannot be decoded carries an `error`; it never stops the others.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
  """What is needed of `tokenizer.Tokenizer`."""

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the input, as it goes to the engine.

  Attributes:
    inputs: what the file had; U+FFFD stands for bytes that are no UTF-8.
    text: what is decoded: `inputs` or its beginning; empty passes through.
    error: why the line cannot be decoded, or None.
  """

  inputs: str
  text: str
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
    text = piece.decode('utf-8')
  except UnicodeDecodeError as error:
    return Line(
      inputs=piece.decode('utf-8', errors='replace'),
      text='',
      error=f'line {number}: not valid UTF-8 (byte 0x{piece[error.start]:02x}'
      f' at byte {error.start + 1} of the line)',
    )
  return Line(inputs=text, text=text if text.strip() else '')


def fit_lines(
  lines: Sequence[Line],
  tokenizer: Tokenizer,
  max_input_len: int,
  on_too_long: str,
) -> list[Line]:
  """Returns `lines` with those longer than the engine takes cut or marked.

  Args:
    lines: as read.
    tokenizer: the engine's.
    max_input_len: tokens, the end of the sequence included.
    on_too_long: 'error' or 'truncate'.
  """
  limit = max_input_len - 1  # one for the end-of-sequence token

  def fit(index: int, line: Line) -> Line:
    ids = tokenizer.encode(line.text) if line.text else []
    if len(ids) <= limit:
      return line
    if on_too_long == 'error':
      return dataclasses.replace(
        line,
        error=f'line {index + 1}: {len(ids)} tokens, the maximum is {limit};'
        " shorten it or set on_too_long to 'truncate'",
      )
    # A cut piece may tokenise into more pieces than it came from.
    kept = limit
    while len(tokenizer.encode(tokenizer.decode(ids[:kept]))) > (limit):
      kept -= 1
    return dataclasses.replace(line, text=tokenizer.decode(ids[:kept]))

  return [fit(index, line) for index, line in enumerate(lines)]
