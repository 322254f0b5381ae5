"""Side by side: what the paper says, what is predicted, what was measured.

A `Comparison` is data; its `table` is for readers, `unrounded` for programs,
and `write` makes a folder with report.md, and a CSV and a JSON file for each
comparison. Every number that was measured with forced acceptance is marked.
"""

import collections
import dataclasses
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Cell, Column, Table, plain_markdown

REPORT = 'report.md'
VALUES = ('paper', 'predicted', 'measured')


@dataclasses.dataclass(frozen=True)
class Row:
  """One row: its keys and the three values.

  Attributes:
    keys: what tells the row from others, such as {'task': 'ende', 'gamma': 7};
      the same names in all rows of a comparison.
    paper: the paper's value; None if it has none.
    predicted: value from the closed forms; None if there is no prediction.
    measured: the measured value; None if it was not measured.
    spread: lowest and highest measured value, such as among the repeats.
    not_measured: why there is no measured value; needed if `measured` is None.
    forced_acceptance: the rate at which proposals were accepted at random,
      whatever they were, with random weights; None for real acceptance.
    details: further columns after `measured`; a row may lack some of them.
    notes: anything else.

  Raises:
    ValueError: `measured` and `not_measured` are both given or both missing,
      the spread does not enclose `measured`, or forced acceptance is outside
      [0, 1] or given without a measured value.
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
        f'Row {dict(self.keys)} has forced_acceptance = {rate}, but no measured'
        ' value.'
      )
    if rate is not None and not 0 <= rate <= 1:
      raise ValueError(f'forced_acceptance must lie in [0, 1], got {rate}.')

  @property
  def name(self) -> str:
    """The keys on one line."""
    return ', '.join(
      value if isinstance(value, str) else f'{key} {Column(key).text(value)}'
      for key, value in self.keys.items()
    )

  @property
  def remarks(self) -> str:
    """The notes, after the mark of forced acceptance if there is any."""
    parts = [forced_label(self.forced_acceptance), self.notes]
    return '; '.join(part for part in parts if part)

  @property
  def measured_over_predicted(self) -> float | None:
    """How far the prediction holds; None if either value is missing."""
    if self.measured is None or not self.predicted:
      return None
    return self.measured / self.predicted

  def measured_text(self, decimals: int) -> str | None:
    """The measured value with its spread; marked if acceptance was forced."""
    if self.measured is None:
      return None
    text = f'{self.measured:.{decimals}f}'
    if self.spread is not None:
      low, high = self.spread
      text += f' [{low:.{decimals}f}, {high:.{decimals}f}]'
    return text + (' (forced)' if self.forced_acceptance is not None else '')


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Rows of one quantity.

  Attributes:
    name: name of its files, such as 'table2'.
    title: such as 'Table 2: walltime improvement'.
    quantity: what the three values are, with their unit.
    rows: at least one row.
    decimals: decimals of the values in tables; the CSV has all digits.
    caption: one or more sentences under the title.
    forms: name of a detail -> how its numbers are shown, as `Column.form`.
    even: the value at which nothing is gained or lost; a picture marks it.

  Raises:
    ValueError: there is no row, or rows differ in their keys.
  """

  name: str
  title: str
  quantity: str
  rows: Sequence[Row]
  decimals: int = 2
  caption: str = ''
  forms: Mapping[str, str] = dataclasses.field(default_factory=dict)
  even: float | None = None

  def __post_init__(self):
    if not self.rows:
      raise ValueError(f'Comparison {self.name!r} has no rows.')
    want = list(self.rows[0].keys)
    for row in self.rows:
      if list(row.keys) != want:
        raise ValueError(
          f'Rows of {self.name!r} must have the same keys, got'
          f' {list(row.keys)} after {want}.'
        )

  @property
  def full_title(self) -> str:
    """The title, with forced acceptance if there is any."""
    return titled(self.title, [row.forced_acceptance for row in self.rows])

  @property
  def about(self) -> str:
    """The quantity, the number of measured rows, and the caption."""
    measured = sum(row.measured is not None for row in self.rows)
    said = f'{self.quantity}; {measured} of {len(self.rows)} rows measured.'
    return f'{said} {self.caption}'.rstrip()

  @property
  def _details(self) -> list[str]:
    return list(
      dict.fromkeys(name for row in self.rows for name in row.details)
    )

  @property
  def listed(self) -> list[Row]:
    """The rows that readers see: the measured rows, or all if none was."""
    measured = [row for row in self.rows if row.measured is not None]
    return measured or list(self.rows)

  def table(self, *, remarks: bool = False) -> Table:
    """The listed rows as a table; notes say why other rows were not measured.

    Args:
      remarks: whether there is a column of remarks.
    """
    form = f'.{self.decimals}f'
    columns: list[Column | str] = [
      *self.rows[0].keys,
      Column('paper', form),
      Column('predicted', form),
      Column('measured', missing='not measured', align='right'),
      Column('measured / predicted', '.2f'),
      *(Column(name, self.forms.get(name, '')) for name in self._details),
      *(['notes'] if remarks else []),
    ]
    body = [
      [
        *row.keys.values(),
        row.paper,
        row.predicted,
        row.measured_text(self.decimals),
        row.measured_over_predicted,
        *map(row.details.get, self._details),
        *([row.remarks] if remarks else []),
      ]
      for row in self.listed
    ]
    notes = [*self._not_measured(), *filter(None, [agreement(self)])]
    return Table(self.full_title, columns, body, notes)

  def _not_measured(self) -> list[str]:
    """One line for each reason why rows were not measured."""
    reasons = collections.Counter(
      row.not_measured for row in self.rows if row.not_measured
    )
    where = f'; they are in {self.name}.csv'
    if len(self.listed) == len(self.rows):  # they are above
      where = ''
    return [
      f'{count} row{"s" * (count > 1)} not measured{where}:'
      f' {reason.rstrip(".")}.'
      for reason, count in reasons.items()
    ]

  def unrounded(self) -> Table:
    """A table of all rows, with all digits."""
    columns = [
      *self.rows[0].keys,
      *VALUES,
      'measured_low',
      'measured_high',
      'forced_acceptance',
      *self._details,
      'not_measured',
      'notes',
    ]
    body = [
      [
        *row.keys.values(),
        *(getattr(row, name) for name in VALUES),
        *(row.spread or (None, None)),
        row.forced_acceptance,
        *map(row.details.get, self._details),
        row.not_measured,
        row.remarks,
      ]
      for row in self.rows
    ]
    return Table(self.full_title, columns, body)

  def markdown(self) -> str:
    """The comparison's part of a report."""
    shown = self.table(remarks=True)
    parts = [
      f'## {plain_markdown(self.full_title)}',
      plain_markdown(self.about),
      shown.markdown(),
      *map(plain_markdown, shown.notes),
      f'Unrounded: [{self.name}.csv]({self.name}.csv)',
    ]
    return '\n\n'.join(parts) + '\n'


def forced_label(rate: float | None) -> str:
  """'forced alpha=0.75, random weights'; '' for real acceptance."""
  return '' if rate is None else f'forced alpha={rate:g}, random weights'


def titled(title: str, rates: Sequence[float | None]) -> str:
  """The title, with a remark if values were measured with forced acceptance.

  Args:
    title: the title without the remark.
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


def agreement(compared: Comparison) -> str:
  """One sentence that compares measured and predicted values.

  It is '' if no row has both.
  """
  found = [row.measured_over_predicted for row in compared.rows]
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
  comparisons: Sequence[Comparison],
  *,
  title: str,
  machine: Mapping[str, Any],
  figures: Mapping[str, str] | None = None,
) -> list[pathlib.Path]:
  """Writes report.md, and a CSV and a JSON file for each comparison.

  Each file is written whole or not at all.

  Args:
    output_dir: the folder; it is made if it does not exist.
    comparisons: in the order of the report; may be empty if there are figures.
    title: title of the report.
    machine: `environment.describe()` of the machine that measured.
    figures: file name in `output_dir` -> what the figure shows.

  Returns:
    The files; report.md is the last, so that all files it names exist.

  Raises:
    ValueError: two comparisons have one name.
    OSError: the folder cannot be made or written.
  """
  names = [one.name for one in comparisons]
  if len(set(names)) < len(names):
    raise ValueError(f'Tables must have different names, got {names}.')
  folder = pathlib.Path(output_dir)
  folder.mkdir(parents=True, exist_ok=True)
  parts = [f'# {plain_markdown(title)}\n']
  written = []
  for one in comparisons:
    path = folder / f'{one.name}.csv'
    files.write_atomically(path, one.unrounded().csv().encode())
    shown = path.with_suffix('.json')
    Record('table', one.table().to_json(), machine).save(shown)
    written += [path, shown]
    parts.append(one.markdown())
  for name, meaning in (figures or {}).items():
    # Pictures are shown in the report; pages are linked.
    mark = '!' if name.endswith('.png') else ''
    parts.append(f'{mark}[{plain_markdown(meaning)}]({name})\n')
  of = [[str(key), str(value)] for key, value in machine.items()]
  parts.append(Table('', ['machine', ''], of).markdown() + '\n')
  path = folder / REPORT
  files.write_atomically(path, '\n'.join(parts).encode())
  return [*written, path]
