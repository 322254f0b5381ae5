"""Lines of text in: read from a file, checked one by one, fitted to the engine.

A line that cannot be decoded carries an `error`; it never stops the others.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from specdec_jax import files


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the input.

  Attributes:
    text: what the file had; U+FFFD stands for bytes that are no UTF-8. Of a
      line of more than `files.MAX_LINE` bytes, its beginning.
    num_tokens: of the whole text as the target reads it; 0 for a line without
      anything to read, which passes through, and before `count_tokens`.
    error: why the line cannot be decoded, or None.
  """

  text: str
  num_tokens: int = 0
  error: str | None = None


def read_lines(path: str) -> Iterator[Line]:
  """Reads one example a line; see `files.lines`, also for what it raises.

  Invalid UTF-8 or too many bytes give that line an `error`.

  Args:
    path: a file, plain or `.gz`, or a named pipe; '-' is stdin.
  """
  for number, (text, error) in enumerate(files.lines(path), 1):
    yield Line(text, error=error and f'line {number}: {error}')


def check_some(path: str, lines: Sequence[Line]) -> None:
  """Raises ValueError where all lines of a file are broken: then it is."""
  if lines and all(line.error for line in lines):
    raise ValueError(
      f'{path!r} has no line of text; expected UTF-8, one example a line.'
      f' {lines[0].error}.'
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
