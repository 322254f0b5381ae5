"""One table class for all outputs: console, Markdown and JSON.

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
  """How the cells of a column are shown.

  Attributes:
    header: name of the column.
    form: format of numbers, such as '.2f'; '' shows three digits of a float.
    align: 'left' or 'right'; '' is right if all cells look like numbers.
  """

  header: str
  form: str = ''
  align: str = ''

  def text(self, cell: Cell) -> str:
    """A cell as it is shown."""
    if cell is None:
      return '-'
    if isinstance(cell, str):
      return cell
    if self.form:
      return format(cell, self.form)
    return f'{cell:.3g}' if isinstance(cell, float) else str(cell)


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows under columns.

  Attributes:
    title: title above the table; '' is none.
    columns: each a `Column`, or only a header.
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
    """Every row as it is shown."""
    columns = self._columns
    return [
      [column.text(cell) for column, cell in zip(columns, row, strict=True)]
      for row in self.rows
    ]

  def without_empty(self) -> 'Table':
    """The table without columns in which nothing was measured."""
    kept = [
      index
      for index in range(len(self.columns))
      if not self.rows or any(row[index] is not None for row in self.rows)
    ]
    columns = [self.columns[index] for index in kept]
    rows = [[row[index] for index in kept] for row in self.rows]
    return dataclasses.replace(self, columns=columns, rows=rows)

  def _aligned(self, index: int) -> str:
    numbers = all(_NUMBER.fullmatch(row[index]) for row in self.texts)
    return self._columns[index].align or ('right' if numbers else 'left')

  def markdown(self) -> str:
    """The table without title and notes, as GitHub shows it."""
    width = range(len(self.columns))
    rule = ['--:' if self._aligned(i) == 'right' else ':--' for i in width]
    header, *body = (
      [plain_markdown(cell).replace('|', '\\|') for cell in row]
      for row in (self.header, *self.texts)
    )
    return '\n'.join(f'| {" | ".join(row)} |' for row in (header, rule, *body))

  def to_json(self) -> dict[str, Any]:
    """The table as it is shown, for `from_json`."""
    shown = {'title': self.title, 'columns': self.header, 'rows': self.texts}
    return shown | ({'notes': list(self.notes)} if self.notes else {})

  @classmethod
  def from_records(
    cls,
    title: str,
    columns: Mapping[Column | str, str | Callable[[Any], Cell]],
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
  ) -> 'Table':
    """A table of what records say.

    Args:
      title: as for the class.
      columns: each column, with the name of its values or a function of a row.
      rows: mappings.
      notes: as for the class.
    """
    cells = [
      [row[of] if isinstance(of, str) else of(row) for of in columns.values()]
      for row in rows
    ]
    return cls(title, list(columns), cells, notes)

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Table':
    """A table of texts, from the result of `to_json`."""
    columns, rows = value['columns'], value['rows']
    return cls(value['title'], columns, rows, value.get('notes', ()))

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> rich.console.RenderResult:
    """For `console.print`; leaves out columns in which nothing was measured."""
    table = self.without_empty()
    shown = table._rich()
    wanted = rich.measure.Measurement.get(console, options, shown)
    if wanted.maximum > options.max_width:
      shown = table._rich(narrow=True)
    yield shown
    for note in self.notes:
      yield rich.text.Text(note)

  def _rich(self, narrow: bool = False) -> rich.table.Table:
    """The table for rich; if `narrow`, texts are folded, numbers are not."""
    shown = rich.table.Table(
      title=rich.text.Text(self.title) if self.title else None,
      show_lines=narrow,  # without lines, folded rows would run together
    )
    texts = self.texts
    for i, column in enumerate(self._columns):
      name = column.header
      right = self._aligned(i) == 'right'
      if right and narrow:
        widest = max(len(word) for row in texts for word in row[i].split())
        words = max(map(len, name.split()))
        name = textwrap.fill(name, max(widest, words), break_long_words=False)
      shown.add_column(
        rich.text.Text(name),
        justify='right' if right else 'left',
        overflow='fold',
        no_wrap=right and narrow,
      )
    for row in texts:
      # Text, not str: rich would take parts of an output for markup.
      shown.add_row(*map(rich.text.Text, row))
    return shown


def plain_markdown(text: str) -> str:
  """The text on one line, escaped for Markdown and HTML."""
  flat = ' '.join(text.split()).replace('\\', '\\\\')
  return flat.replace('&', '&amp;').replace('<', '&lt;')
