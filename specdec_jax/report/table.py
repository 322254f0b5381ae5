"""A table that can be printed, or written as Markdown or JSON.

A cell is text, a number, or None for a value that was not measured. Numbers
stay numbers until they are shown, in the format of their column.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
import rich.measure
import rich.table
import rich.text

from specdec_jax.checks.fields import unexpected

Cell = str | int | float | None

_NUMBER = re.compile(r'[-+\d.,%]+')


@dataclasses.dataclass(frozen=True)
class Column:
  """The name of a column, and the format of its cells.

  Attributes:
    header: name of the column.
    form: format of numbers, such as '.2f'; '': a float is shown with three
      significant digits, and an integer with all digits.
  """

  header: str
  form: str = ''

  def text(self, cell: Cell) -> str:
    """Returns a cell of the column as text; '-' for None."""
    if cell is None:
      return '-'
    if isinstance(cell, str):
      return cell
    if self.form:
      return format(cell, self.form)
    return f'{cell:.3g}' if isinstance(cell, float) else str(cell)


@dataclasses.dataclass(frozen=True)
class Table:
  """A table with a title above it and notes below it.

  Attributes:
    title: title above the table, or ''.
    columns: the columns, each a `Column` or only its header.
    rows: rows with a cell for each column.
    notes: sentences below the table.

  Raises:
    ValueError: a row has another number of cells than there are columns.
  """

  title: str
  columns: Sequence[Column | str]
  rows: Sequence[Sequence[Cell]]
  notes: Sequence[str] = ()

  def __post_init__(self):
    for row in self.rows:
      if len(row) != len(self.columns):
        expected = f'{len(self.columns)} cells'
        raise unexpected(f'A row of {self.title!r}', expected, list(row))

  @property
  def _columns(self) -> list[Column]:
    return [Column(c) if isinstance(c, str) else c for c in self.columns]

  @property
  def header(self) -> list[str]:
    """The names of the columns."""
    return [column.header for column in self._columns]

  @property
  def texts(self) -> list[list[str]]:
    """The formatted cells of each row."""
    columns = self._columns
    return [
      [column.text(cell) for column, cell in zip(columns, row, strict=True)]
      for row in self.rows
    ]

  def without_empty(self) -> 'Table':
    """Returns the table without columns in which nothing was measured."""
    filled = [
      index
      for index in range(len(self.columns))
      if not self.rows or any(row[index] is not None for row in self.rows)
    ]
    columns = [self.columns[index] for index in filled]
    rows = [[row[index] for index in filled] for row in self.rows]
    return dataclasses.replace(self, columns=columns, rows=rows)

  @property
  def _is_right(self) -> list[bool]:
    """Whether each column is aligned right, because it has only numbers."""
    columns = range(len(self.columns))
    return [all(_NUMBER.fullmatch(x[i]) for x in self.texts) for i in columns]

  def markdown(self) -> str:
    """Returns the table as Markdown, without title and notes."""
    rule = ['--:' if right else ':--' for right in self._is_right]
    header, *body = (
      [plain_markdown(cell).replace('|', '\\|') for cell in row]
      for row in (self.header, *self.texts)
    )
    return '\n'.join(f'| {" | ".join(row)} |' for row in (header, rule, *body))

  def to_json(self) -> dict[str, Any]:
    """Returns the table as JSON values that `from_json` reads.

    Cells are formatted texts.
    """
    table = {'title': self.title, 'columns': self.header, 'rows': self.texts}
    return table | ({'notes': list(self.notes)} if self.notes else {})

  @classmethod
  def from_records(
    cls,
    title: str,
    columns: Mapping[Column | str, str | Callable[[Any], Cell]],
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
  ) -> 'Table':
    """Makes a table with a row for each record.

    Args:
      title: title above the table.
      columns: column -> name of its values in a record, or a function that
        makes its cell from a record.
      rows: the records.
      notes: sentences below the table.
    """
    cells = [
      [
        row[cell] if isinstance(cell, str) else cell(row)
        for cell in columns.values()
      ]
      for row in rows
    ]
    return cls(title, list(columns), cells, notes)

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Table':
    """Makes a table of texts from the result of `to_json`."""
    columns, rows = value['columns'], value['rows']
    return cls(value['title'], columns, rows, value.get('notes', ()))

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> rich.console.RenderResult:
    """Prints the table without columns in which nothing was measured."""
    table = self.without_empty()
    wide = table._rich()
    size = rich.measure.Measurement.get(console, options, wide)
    fits = size.maximum <= options.max_width
    yield wide if fits else table._rich(narrow=True)
    for note in self.notes:
      yield rich.text.Text(note)

  def _rich(self, narrow: bool = False) -> rich.table.Table:
    """Returns the table as one of the package rich, which prints it.

    If `narrow`, long texts and headers are folded, but numbers are not.
    """
    table = rich.table.Table(
      title=rich.text.Text(self.title) if self.title else None,
      show_lines=narrow,  # without lines, folded rows would run together
    )
    texts = self.texts
    for i, (name, right) in enumerate(
      zip(self.header, self._is_right, strict=True)
    ):
      if right and narrow:
        widest = max(len(word) for row in texts for word in row[i].split())
        words = max(map(len, name.split()))
        name = textwrap.fill(name, max(widest, words), break_long_words=False)
      table.add_column(
        rich.text.Text(name),
        justify='right' if right else 'left',
        overflow='fold',
        no_wrap=right and narrow,
      )
    for row in texts:
      # rich would interpret parts of a str as markup, but not of a Text.
      table.add_row(*map(rich.text.Text, row))
    return table


def plain_markdown(text: str) -> str:
  """Returns the text on one line, escaped for Markdown and HTML."""
  flat = ' '.join(text.split()).replace('\\', '\\\\')
  return flat.replace('&', '&amp;').replace('<', '&lt;')
