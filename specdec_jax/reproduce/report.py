"""Side by side: what the paper says, what is predicted, what was measured.

A `Table` is data; `markdown`, `csv_text` and `rich_table` show it, and `write`
leaves a folder with report.md and a CSV a table. A row that was not measured
says why, and forced acceptance is said wherever a number of it stands.
"""

import csv
import dataclasses
import io
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import rich.table
import rich.text

from specdec_jax import files

REPORT = 'report.md'
VALUES = ('paper', 'predicted', 'measured')
Cell = str | int | float | None


@dataclasses.dataclass(frozen=True)
class Row:
  """One row: what it is of, and the three values.

  Attributes:
    keys: what tells the row from others, such as {'task': 'ende', 'gamma': 7};
      the same names in all rows of a table.
    paper: the paper's value; None if it has none.
    predicted: by the closed forms; None if nothing can be predicted.
    measured: None if it was not measured.
    spread: lowest and highest measured value, such as of the repeats.
    not_measured: why; needed where `measured` is None.
    forced_acceptance: the rate at which proposals were accepted whatever they
      were, with random weights; None for real acceptance.
    details: further columns behind `measured`; the same names in all rows.
    notes: anything else.

  Raises:
    ValueError: `measured` and `not_measured` are both given or both missing,
      the spread does not enclose it, or forced acceptance lies outside [0, 1]
      or belongs to no measured value.
  """

  keys: Mapping[str, Cell]
  paper: float | None = None
  predicted: float | None = None
  measured: float | None = None
  spread: tuple[float, float] | None = None
  not_measured: str = ''
  forced_acceptance: float | None = None
  details: Mapping[str, Cell] = dataclasses.field(default_factory=dict)
  notes: str = ''

  def __post_init__(self):
    if (self.measured is None) != bool(self.not_measured):
      raise ValueError(
        f'Row {dict(self.keys)} needs either a measured value or the reason'
        f' why there is none, got measured = {self.measured} and not_measured'
        f' = {self.not_measured!r}.'
      )
    if self.spread is not None:
      low, high = self.spread
      if self.measured is None or not low <= self.measured <= high:
        raise ValueError(
          f'spread must enclose the measured value {self.measured}, got'
          f' {self.spread}.'
        )
    rate = self.forced_acceptance
    if rate is not None and self.measured is None:
      raise ValueError(
        f'Row {dict(self.keys)} says forced_acceptance = {rate} of a value that'
        ' was not measured.'
      )
    if rate is not None and not 0 <= rate <= 1:
      raise ValueError(f'forced_acceptance must lie in [0, 1], got {rate}.')

  @property
  def name(self) -> str:
    """The keys on one line."""
    return ', '.join(
      value if isinstance(value, str) else f'{key} {_short(value)}'
      for key, value in self.keys.items()
    )

  @property
  def remarks(self) -> str:
    """The notes, behind what must not be overlooked."""
    parts = [
      forced_label(self.forced_acceptance),
      self.not_measured and f'not measured: {self.not_measured}',
      self.notes,
    ]
    return '; '.join(part for part in parts if part)

  @property
  def measured_over_predicted(self) -> float | None:
    """How far the prediction holds; None where one of both is missing."""
    if self.measured is None or not self.predicted:
      return None
    return self.measured / self.predicted


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of one quantity.

  Attributes:
    name: of its CSV file, such as 'table2'.
    title: such as 'Table 2: walltime improvement'.
    quantity: what the three values are, with their unit.
    rows: at least one.
    decimals: of the values where they are shown; the CSV has them all.
    caption: a sentence or more under the title.

  Raises:
    ValueError: there is no row, or rows differ in their columns.
  """

  name: str
  title: str
  quantity: str
  rows: Sequence[Row]
  decimals: int = 2
  caption: str = ''

  def __post_init__(self):
    if not self.rows:
      raise ValueError(f'Table {self.name!r} has no rows.')
    first = self.rows[0]
    for row in self.rows:
      for field in ('keys', 'details'):
        have, want = list(getattr(row, field)), list(getattr(first, field))
        if have != want:
          raise ValueError(
            f'Rows of table {self.name!r} must have the same {field}, got'
            f' {have} behind {want}.'
          )

  @property
  def full_title(self) -> str:
    """The title, with forced acceptance if there is any."""
    return titled(self.title, [row.forced_acceptance for row in self.rows])

  @property
  def count(self) -> str:
    """How many rows were measured."""
    measured = sum(row.measured is not None for row in self.rows)
    return f'{measured} of {len(self.rows)} rows measured'


def forced_label(rate: float | None) -> str:
  """'forced alpha=0.75, random weights'; '' for real acceptance."""
  return '' if rate is None else f'forced alpha={rate:g}, random weights'


def titled(title: str, rates: Sequence[float | None]) -> str:
  """A title that says which of its values were measured by force.

  Args:
    title: without that.
    rates: `forced_acceptance` of each value; None for real acceptance.
  """
  forced = [rate for rate in rates if rate is not None]
  if not forced:
    return title
  low, high = min(forced), max(forced)
  label = forced_label(low)
  if low != high:
    label = f'forced alpha={low:g} to {high:g}, random weights'
  if len(forced) < len(rates):
    label += f': {len(forced)} of {len(rates)}'
  return f'{title} ({label})'


def header(table: Table) -> list[str]:
  """Names of the columns of `cells`."""
  first = table.rows[0]
  return [
    *first.keys,
    *VALUES,
    'measured / predicted',
    *first.details,
    'notes',
  ]


def cells(table: Table) -> list[list[str]]:
  """Every row as text, in the columns of `header`."""
  return [_cells(row, table.decimals) for row in table.rows]


def _cells(row: Row, decimals: int) -> list[str]:
  def rounded(value: float | None) -> str:
    return '-' if value is None else f'{value:.{decimals}f}'

  measured = 'not measured'
  if row.measured is not None:
    measured = rounded(row.measured)
    if row.spread is not None:
      low, high = (rounded(value) for value in row.spread)
      measured += f' [{low}, {high}]'
    if row.forced_acceptance is not None:
      measured += ' (forced)'
  ratio = row.measured_over_predicted
  return [
    *(_short(value) for value in row.keys.values()),
    rounded(row.paper),
    rounded(row.predicted),
    measured,
    '-' if ratio is None else f'{ratio:.2f}',
    *(_short(value) for value in row.details.values()),
    row.remarks,
  ]


def _short(value: Cell) -> str:
  if value is None:
    return '-'
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def markdown(table: Table) -> str:
  """Returns the table with its title, as GitHub shows it."""
  names = header(table)
  num_keys = len(table.rows[0].keys)
  right = range(num_keys, len(names) - 1)
  rule = ['--:' if i in right else ':--' for i in range(len(names))]
  body = [_line(_escaped(row)) for row in cells(table)]
  parts = [f'## {_inline(table.full_title)}', '']
  about = f'{table.quantity}; {table.count}.'
  if table.caption:
    about += f' {table.caption}'
  parts += [_inline(about), '', _line(_escaped(names)), _line(rule), *body]
  return '\n'.join(parts) + '\n'


def _inline(text: str) -> str:
  flat = ' '.join(text.split())
  return flat.replace('&', '&amp;').replace('<', '&lt;')


def _escaped(row: Sequence[str]) -> list[str]:
  return [
    _inline(cell).replace('\\', '\\\\').replace('|', '\\|') for cell in row
  ]


def _line(row: Sequence[str]) -> str:
  return f'| {" | ".join(row)} |'


def csv_text(table: Table) -> str:
  """Returns the table as CSV, numbers unrounded; missing ones are empty."""
  first = table.rows[0]
  stream = io.StringIO(newline='')
  writer = csv.writer(stream, lineterminator='\n')
  writer.writerow(
    [
      *first.keys,
      *VALUES,
      'measured_low',
      'measured_high',
      'forced_acceptance',
      *first.details,
      'not_measured',
      'notes',
    ]
  )
  for row in table.rows:
    writer.writerow(
      [
        *row.keys.values(),
        *(getattr(row, name) for name in VALUES),
        *(row.spread or (None, None)),
        row.forced_acceptance,
        *row.details.values(),
        row.not_measured,
        row.remarks,
      ]
    )
  return stream.getvalue()


def rich_table(table: Table) -> rich.table.Table:
  """Returns the table for a console, without columns that say nothing."""
  shown = rich.table.Table(
    title=rich.text.Text(table.full_title),
    caption=rich.text.Text(f'{table.quantity}; {table.count}'),
  )
  num_keys, num_columns = len(table.rows[0].keys), len(header(table))
  columns = enumerate(zip(header(table), *cells(table), strict=True))
  said = [one for one in columns if set(one[1][1:]) - {'', '-'}]
  for index, (name, *_) in said:
    number = num_keys <= index < num_columns - 1
    shown.add_column(
      rich.text.Text(name),
      justify='right' if number else 'left',
      overflow='fold',
    )
  for row in zip(*(column[1:] for _, column in said), strict=True):
    shown.add_row(*map(rich.text.Text, row))
  return shown


def agreement(table: Table) -> str:
  """One sentence on measured against predicted; '' where nothing has both."""
  found = [row.measured_over_predicted for row in table.rows]
  ratios = [ratio for ratio in found if ratio is not None]
  if not ratios:
    return ''
  return (
    f'Measured over predicted, {len(ratios)} rows: median'
    f' {statistics.median(ratios):.2f}, from {min(ratios):.2f} to'
    f' {max(ratios):.2f}.'
  )


def write(
  output_dir: str | os.PathLike[str],
  tables: Sequence[Table],
  *,
  title: str,
  introduction: str = '',
  machine: Mapping[str, Any] | None = None,
  figures: Mapping[str, str] | None = None,
) -> list[pathlib.Path]:
  """Writes report.md, and CSV and JSON a table, each whole or not at all.

  Args:
    output_dir: is made if it is not there.
    tables: in the order of the report; may be empty if there are figures.
    title: of the report.
    introduction: below it.
    machine: `environment.describe()` of where it was measured; the JSON needs
      it.
    figures: file name in `output_dir` -> what it shows.

  Returns:
    The files; report.md is the last, so that it names none that is missing.

  Raises:
    ValueError: two tables have one name.
    OSError: the folder cannot be made or written.
  """
  names = [table.name for table in tables]
  if len(set(names)) < len(names):
    raise ValueError(f'Tables must have names of their own, got {names}.')
  folder = pathlib.Path(output_dir)
  folder.mkdir(parents=True, exist_ok=True)
  parts = [f'# {_inline(title)}\n']
  if introduction:
    parts.append(f'{introduction}\n')
  written = []
  for table in tables:
    path = folder / f'{table.name}.csv'
    files.write_atomically(path, csv_text(table).encode())
    written.append(path)
    if machine:
      shown = folder / f'{table.name}.json'
      files.write_json(shown, for_document(table, machine))
      written.append(shown)
    parts.append(markdown(table))
    if sentence := agreement(table):
      parts.append(f'{sentence}\n')
    parts.append(f'Unrounded: [{path.name}]({path.name})\n')
  for name, meaning in (figures or {}).items():
    text = _inline(meaning)
    # Alone in brackets a picture would show; a page only a link.
    mark = '!' if name.endswith('.png') else ''
    parts.append(f'{mark}[{text}]({name})\n')
  if machine:
    parts.append(_machine(machine))
  path = folder / REPORT
  files.write_atomically(path, '\n'.join(parts).encode())
  return [*written, path]


def for_document(table: Table, machine: Mapping[str, Any]) -> dict[str, Any]:
  """The table without its notes, as JSON for a document that takes it in."""
  return {
    'kind': 'table',
    'title': table.full_title,
    'columns': header(table)[:-1],
    'rows': [row[:-1] for row in cells(table)],
    'machine': dict(machine),
  }


def _machine(machine: Mapping[str, Any]) -> str:
  rows = [_escaped([str(key), str(value)]) for key, value in machine.items()]
  lines = [_line(row) for row in (['machine', ''], [':--', ':--'], *rows)]
  return '\n'.join(lines) + '\n'
