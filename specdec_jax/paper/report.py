"""Side by side: what the paper says, what is predicted, what was measured.

A `Comparison` is data; its `table` is for readers, `unrounded` for programs,
and `write` leaves a folder with report.md and a CSV and a JSON of each. Forced
acceptance is said wherever a number of it stands.
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
  """One row: what it is of, and the three values.

  Attributes:
    keys: what tells the row from others, such as {'task': 'ende', 'gamma': 7};
      the same names in all rows of a comparison.
    paper: the paper's value; None if it has none.
    predicted: by the closed forms; None if nothing can be predicted.
    measured: None if it was not measured.
    spread: lowest and highest measured value, such as of the repeats.
    not_measured: why; needed where `measured` is None.
    forced_acceptance: the rate at which proposals were accepted whatever they
      were, with random weights; None for real acceptance.
    details: further columns behind `measured`; a row may lack some.
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
      value if isinstance(value, str) else f'{key} {Column(key).text(value)}'
      for key, value in self.keys.items()
    )

  @property
  def remarks(self) -> str:
    """The notes, behind what must not be overlooked."""
    parts = [forced_label(self.forced_acceptance), self.notes]
    return '; '.join(part for part in parts if part)

  @property
  def measured_over_predicted(self) -> float | None:
    """How far the prediction holds; None where one of both is missing."""
    if self.measured is None or not self.predicted:
      return None
    return self.measured / self.predicted

  def measured_text(self, decimals: int) -> str | None:
    """The measured value with its spread; says if it was forced."""
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
    name: of its files, such as 'table2'.
    title: such as 'Table 2: walltime improvement'.
    quantity: what the three values are, with their unit.
    rows: at least one.
    decimals: of the values where they are shown; the CSV has them all.
    caption: a sentence or more under the title.
    forms: name of a detail -> how its numbers are shown, as `Column.form`.
    even: the value at which nothing is won or lost; a picture marks it.

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
          f' {list(row.keys)} behind {want}.'
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
    """The rows that a reader is shown: those measured, or all if none is."""
    measured = [row for row in self.rows if row.measured is not None]
    return measured or list(self.rows)

  def table(self, *, remarks: bool = False) -> Table:
    """The listed rows; what became of the others is a line.

    Args:
      remarks: whether there is a column of them.
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
    """A line for each reason why rows were not measured."""
    reasons = collections.Counter(
      row.not_measured for row in self.rows if row.not_measured
    )
    where = f'; they are in {self.name}.csv'
    if len(self.listed) == len(self.rows):  # they are above
      where = ''
    return [
      f'{count} row{"s" * (count > 1)} not measured{where}: {reason}.'
      for reason, count in reasons.items()
    ]

  def unrounded(self) -> Table:
    """All rows, all digits."""
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
    """Its part of a report."""
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


def agreement(compared: Comparison) -> str:
  """One sentence on measured against predicted; '' where nothing has both."""
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
  """Writes report.md, and CSV and JSON a comparison, each whole or not at all.

  Args:
    output_dir: is made if it is not there.
    comparisons: in the order of the report; may be empty if there are figures.
    title: of the report.
    machine: `environment.describe()` of where it was measured.
    figures: file name in `output_dir` -> what it shows.

  Returns:
    The files; report.md is the last, so that it names none that is missing.

  Raises:
    ValueError: two comparisons have one name.
    OSError: the folder cannot be made or written.
  """
  names = [one.name for one in comparisons]
  if len(set(names)) < len(names):
    raise ValueError(f'Tables must have names of their own, got {names}.')
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
    # Alone in brackets a picture would show; a page only a link.
    mark = '!' if name.endswith('.png') else ''
    parts.append(f'{mark}[{plain_markdown(meaning)}]({name})\n')
  of = [[str(key), str(value)] for key, value in machine.items()]
  parts.append(Table('', ['machine', ''], of).markdown() + '\n')
  path = folder / REPORT
  files.write_atomically(path, '\n'.join(parts).encode())
  return [*written, path]
