"""Input lines: read from a file, checked one by one, their tokens counted.

A line that cannot be decoded has an `error`; it never stops the other lines.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from specdec_jax import files
from specdec_jax.text.local_tasks import kind_of, parse


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the input.

  Attributes:
    text: the input in the file; of a line that cannot be read the line. U+FFFD
      stands for bytes that are not UTF-8; of more than `files.MAX_LINE` bytes
      it is only the beginning.
    num_tokens: tokens of the whole text as the target reads it; 0 before
      `count_tokens`, and for a line without anything to read, which gives an
      empty output.
    error: why the line cannot be decoded, or None.
  """

  text: str
  num_tokens: int = 0
  error: str | None = None


def read_lines(path: str) -> Iterator[Line]:
  """Reads one input per line; raises the errors of `files.lines`.

  A line with invalid UTF-8, too many bytes or another format than its file gets
  an `error`.

  Args:
    path: a file, plain or `.gz`, or a named pipe; '-' is stdin. Its ending says
      what a line is: inputs<TAB>targets (.tsv), a JSON object with 'inputs'
      (.jsonl), otherwise the input. Targets are not looked at.
  """
  kind = kind_of(path)
  for number, line in enumerate(files.lines(path), 1):
    try:
      example = parse(line, kind, f'line {number}', targets_field=None)
    except ValueError as error:
      yield Line(line.text, error=str(error).rstrip('.'))
    else:
      yield Line(example['inputs'])


def read_inputs(path: str) -> list[str]:
  """The texts of `read_lines`; every line must be usable.

  A source with several references is there several times in its file, and once
  among these texts.

  Raises:
    ValueError: as for `files.lines`; or a line cannot be used, with its number.
  """
  texts = []
  for line in read_lines(path):
    if line.error is not None:
      raise ValueError(f'{path!r} {line.error}.')
    texts.append(line.text)
  return texts if kind_of(path) == 'txt' else list(dict.fromkeys(texts))


def check_some(path: str, lines: Sequence[Line]) -> None:
  """Raises ValueError if all lines of a file are broken: the file is wrong."""
  if lines and all(line.error for line in lines):
    raise ValueError(
      f'{path!r} has no line of text; expected UTF-8, one example per line.'
      f' {lines[0].error}.'
    )


def count_tokens(
  lines: Sequence[Line], count: Callable[[str], int], limit: int | None
) -> list[Line]:
  """Returns the lines with `num_tokens`, and an error if they are too long.

  Args:
    lines: the lines as read.
    count: counts the tokens of a text, such as `Engine.num_input_tokens`.
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
      error=f'line {number}: {line.num_tokens} tokens (its end included); the'
      f" maximum is {limit}. Shorten it, or set on_too_long to 'truncate'",
    )

  return [counted(index + 1, line) for index, line in enumerate(lines)]
