"""The paper's tables with what is predicted and what was measured, as reports.

A `Comparison` is data; its `table` is for readers, `unrounded` for programs.
Every number that was measured with forced acceptance is marked: proposals were
accepted at random, whatever they were, with random weights.
"""

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import analysis, files
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Cell, Column, Table, plain_markdown
from specdec_jax.paper import printed

REPORT = 'report.md'
_NO_CHECKPOINTS = 'its checkpoints were not given'
_MEASURED = Column('measured', missing='not measured', align='right')
_FORMS = {
  **dict.fromkeys(('paper', 'predicted', 'measured / predicted'), '.2f'),
  **dict.fromkeys(('c', 'c here', 'error'), '.4f'),
  **dict.fromkeys(('v(gamma + 1)', 'plain ms/token', 'proposes'), '.3f'),
}
Records = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Row:
  """One row: its keys and the three values.

  Attributes:
    keys: what tells the row from others, such as {'task': 'ende', 'gamma': 7};
      the same names in all rows of a comparison.
    paper: the paper's value; None if it has none.
    predicted: value from the closed forms; None if there is no prediction.
    measured: the measured value; None if it was not measured.
    not_measured: why there is no measured value.
    forced_acceptance: the rate at which proposals were accepted; None for real
      acceptance.
    details: further columns after `measured`; a row may lack some of them.
    notes: anything else.
  """

  keys: Mapping[str, Cell]
  paper: float | None = None
  predicted: float | None = None
  measured: float | None = None
  not_measured: str = ''
  forced_acceptance: float | None = None
  details: Mapping[str, Cell] = dataclasses.field(default_factory=dict)
  notes: str = ''

  @property
  def remarks(self) -> str:
    """The notes, after the mark of forced acceptance if there is any."""
    parts = [self.notes] if self.notes else []
    if self.forced_acceptance is not None:
      parts.insert(0, _forced([self.forced_acceptance]))
    return '; '.join(parts)

  @property
  def measured_over_predicted(self) -> float | None:
    """How far the prediction holds; None if either value is missing."""
    if self.measured is None or not self.predicted:
      return None
    return self.measured / self.predicted

  def cells(self) -> dict[str, Cell]:
    """All columns, the numbers unrounded, by name."""
    return {
      **self.keys,
      'paper': self.paper,
      'predicted': self.predicted,
      'measured': self.measured,
      'forced_acceptance': self.forced_acceptance,
      'measured / predicted': self.measured_over_predicted,
      **self.details,
      'not_measured': self.not_measured,
      'notes': self.remarks,
    }

  def shown(self) -> dict[str, Cell]:
    """The columns for readers; forced acceptance is marked at the value."""
    cells = self.cells()
    del cells['forced_acceptance'], cells['not_measured']
    if self.measured is not None:
      forced = self.forced_acceptance is not None
      mark = ' (forced)' if forced else ''
      cells['measured'] = f'{self.measured:.2f}{mark}'
    return cells


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Rows of one quantity.

  Attributes:
    name: name of its files, such as 'table2'.
    title: such as 'Table 2: walltime improvement'.
    quantity: what the three values are, with their unit.
    rows: at least one row.
    caption: one or more sentences under the title.
  """

  name: str
  title: str
  quantity: str
  rows: Sequence[Row]
  caption: str = ''

  @property
  def full_title(self) -> str:
    """The title, with forced acceptance if there is any."""
    return titled(self.title, [row.forced_acceptance for row in self.rows])

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
    hidden = () if remarks else ('notes',)
    return self._table([row.shown() for row in self.listed], hidden)

  def unrounded(self) -> Table:
    """A table of all rows, with all digits."""
    cells = [row.cells() for row in self.rows]
    return self._table(cells, ('measured / predicted',))

  def _table(
    self, rows: Sequence[Mapping[str, Cell]], hidden: Sequence[str]
  ) -> Table:
    # A row may lack details: the longest has the order of the columns.
    longest = max(rows, key=len)
    names = [name for name in longest if name not in hidden]
    columns = [Column(name, _FORMS.get(name, '')) for name in names]
    columns[names.index('measured')] = _MEASURED
    body = [[row.get(name) for name in names] for row in rows]
    return Table(self.full_title, columns, body, self._notes())

  def _notes(self) -> list[str]:
    """Why rows were not measured, a line a reason; how predictions hold."""
    reasons = collections.Counter(
      row.not_measured for row in self.rows if row.not_measured
    )
    hidden = len(self.listed) < len(self.rows)
    where = f'; they are in {self.name}.csv' if hidden else ''
    notes = [
      f'{count} row{"s" * (count > 1)} not measured{where}:'
      f' {reason.rstrip(".")}.'
      for reason, count in reasons.items()
    ]
    all_ratios = [row.measured_over_predicted for row in self.rows]
    if ratios := [ratio for ratio in all_ratios if ratio is not None]:
      notes.append(
        f'Measured over predicted, {len(ratios)} rows: median'
        f' {statistics.median(ratios):.2f}, from {min(ratios):.2f} to'
        f' {max(ratios):.2f}.'
      )
    return notes

  def markdown(self) -> str:
    """The comparison's part of a report."""
    shown = self.table(remarks=True)
    measured = sum(row.measured is not None for row in self.rows)
    about = (
      f'{self.quantity}; {measured} of {len(self.rows)} rows measured.'
      f' {self.caption}'
    )
    parts = [
      f'## {plain_markdown(self.full_title)}',
      plain_markdown(about),
      shown.markdown(),
      *map(plain_markdown, shown.notes),
      f'Unrounded: [{self.name}.csv]({self.name}.csv)',
    ]
    return '\n\n'.join(parts) + '\n'


def _forced(rates: Sequence[float]) -> str:
  low, high = min(rates), max(rates)
  to = '' if low == high else f' to {high:g}'
  return f'forced alpha={low:g}{to}, random weights'


def titled(title: str, rates: Sequence[float | None]) -> str:
  """The title, with a remark if values were measured with forced acceptance.

  Args:
    title: the title without the remark.
    rates: `forced_acceptance` of each value; None for real acceptance.
  """
  forced = [rate for rate in rates if rate is not None]
  if not forced:
    return title
  some = f': {len(forced)} of {len(rates)}' if len(forced) < len(rates) else ''
  return f'{title} ({_forced(forced)}{some})'


def write(
  output_dir: str,
  comparisons: Sequence[Comparison],
  machine: Mapping[str, Any],
  figures: Mapping[str, str],
) -> list[pathlib.Path]:
  """Writes report.md, and a CSV and a JSON file for each comparison.

  Each file is written whole or not at all.

  Args:
    output_dir: the folder, which exists.
    comparisons: in the order of the report.
    machine: `record.describe()` of the machine that measured.
    figures: file name in `output_dir` -> what the figure shows.

  Returns:
    The files; report.md is the last, so that all files it names exist.

  Raises:
    OSError: a file cannot be written.
  """
  folder = pathlib.Path(output_dir)
  parts = ['# The paper, what is predicted, what was measured\n']
  written = []
  for compared in comparisons:
    path = folder / f'{compared.name}.csv'
    files.write_atomically(path, compared.unrounded().csv().encode())
    shown = path.with_suffix('.json')
    Record('table', compared.table().to_json(), machine).save(shown)
    written += [path, shown]
    parts.append(compared.markdown())
  for name, meaning in figures.items():
    # Pictures are shown in the report; pages are linked.
    mark = '!' if name.endswith('.png') else ''
    parts.append(f'{mark}[{plain_markdown(meaning)}]({name})\n')
  rows = [[str(key), str(value)] for key, value in machine.items()]
  parts.append(Table('', ['machine', ''], rows).markdown() + '\n')
  path = folder / REPORT
  files.write_atomically(path, '\n'.join(parts).encode())
  return [*written, path]


def row_name(row: printed.Table2Row | printed.Table4Row) -> str:
  """The name of a row of Tables 2 and 4, such as 'ende-t5_small-T0'."""
  return f'{row.task}-{row.draft}-T{row.temperature}'


def only(record: Mapping[str, Any]) -> Any:
  """What a benchmark's record has of its one gamma."""
  (measured,) = record['gammas']
  return measured


def table1() -> list[Comparison]:
  """Table 1 as two tables: speed, and arithmetic operations."""

  def compared(name: str, factor: str, cost: str) -> Comparison:
    closed_form = getattr(analysis, factor)
    rows = [
      Row(
        {'alpha': row.acceptance_rate, 'gamma': row.gamma},
        getattr(row, factor),
        float(closed_form(row.acceptance_rate, row.gamma, 0.0)),
        not_measured='a closed form, nothing is run',
      )
      for row in printed.TABLE1
    ]
    quantity = f'{factor.replace("_", " ")}, {cost} = 0'
    title = f'Table 1: {name.upper()}'
    return Comparison(f'table1_{name}', title, quantity, rows)

  return [
    compared('speed', 'walltime_factor', 'c'),
    compared('operations', 'operations_factor', 'c-hat'),
  ]


def table2(
  records: Mapping[str, Any], rows: Sequence[printed.Table2Row], missing: str
) -> Comparison:
  """Table 2: walltime against the plain loop.

  Args:
    records: the records that there are, by `row_name`.
    rows: rows of the paper to show.
    missing: why a row has no record.
  """
  expected = {row_name(row): _expected(row) for row in printed.TABLE4}
  shown = []
  for row in rows:
    name = row_name(row)
    shown.append(
      _speed_up(row, records[name])
      if name in records
      else Row(
        _keys(row),
        row.speedup,
        expected[name],
        not_measured=missing,
        notes="predicted by Theorem 3.8 from the paper's alpha and c",
      )
    )
  return Comparison(
    'table2',
    'Table 2: speed-up',
    'walltime of plain over speculative decoding',
    shown,
    'Predicted: E(gamma, alpha) / (v(gamma + 1) + gamma c) with the measured v'
    " and c, and the timed run's own acceptance rate. Measured: against this"
    " library's plain loop in the same run.",
  )


def _speed_up(row: printed.Table2Row, record: Mapping[str, Any]) -> Row:
  """A row of Table 2 as it was measured."""
  measured, settings = only(record), record['settings']
  return Row(
    _keys(row),
    row.speedup,
    measured['expected_speed_up'],
    measured['speed_up'],
    forced_acceptance=settings['forced_acceptance'],
    details={
      'c': measured['cost_ratio'],
      'v(gamma + 1)': record['call_cost'][str(row.gamma + 1)],
      'plain ms/token': record['times_ms']['plain_loop']['median'],
    },
    notes=(
      f'{settings["name"]}; acceptance of the timed run'
      f' {measured["acceptance_rate"]:.3f}'
    ),
  )


def table4(
  records: Mapping[str, Any], rows: Sequence[printed.Table2Row], missing: str
) -> Comparison:
  """Table 4: what Theorem 3.8 expects, and c; arguments as of `table2`."""
  names = set(map(row_name, rows))
  shown = []
  for row in printed.TABLE4:
    if (name := row_name(row)) not in names:
      continue
    record = records.get(name, {})
    measured = only(record) if record else {}
    settings = record.get('settings', {})
    shown.append(
      Row(
        {**_keys(row), 'c of the paper': row.cost_ratio},
        row.expected,
        _expected(row),
        measured.get('speed_up'),
        not_measured='' if record else missing,
        forced_acceptance=settings.get('forced_acceptance'),
        details={
          'EMP of the paper': row.empirical,
          'c here': measured.get('cost_ratio'),
        },
      )
    )
  return Comparison(
    'table4',
    'Table 4: expected and empirical improvement',
    'walltime factor',
    shown,
    "Paper: its EXP. Predicted: Theorem 3.8 with the paper's alpha and c, which"
    ' its table rounds to two decimals.',
  )


def table3(records: Records) -> Comparison:
  """Table 3: acceptance rates; those measured here, then the paper's others.

  Args:
    records: records of `measure_alpha`. A row that stands in for a row of
      the paper is shown with the paper's value.
  """
  values = {tuple(row[:3]): row.acceptance_rate for row in printed.TABLE3}
  details = {
    'error': 'standard_error',
    'proposes': 'proposes',
    'tokens': 'num_tokens',
  }
  rows = [row for record in records for row in record['rows']]
  lossless = [row for row in rows if row['lenience'] == 1]  # see Table 5
  return Comparison(
    'table3',
    'Table 3: acceptance rates',
    'alpha, Corollary 3.6',
    _rates(lossless, values, ('target', 'draft', 'T'), details),
    "Paper: of the row that 'stands in for' names, whose models and data are"
    ' others. Measured: mean acceptance probability of proposals; error: its'
    ' standard error over texts; proposes: of the tokens, the share that there'
    ' was a proposal for.',
  )


def table5(records: Records) -> Comparison:
  """Table 5: alpha by lenience; those measured here, then the paper's others.

  Args:
    records: records of `measure_alpha`. The paper's table has only
      temperature 1; its text describes temperature 0 as well.
  """
  values = {
    ('t5_xxl_ende', row.draft, 1, row.lenience): row.acceptance_rate
    for row in printed.TABLE5
  }
  proposing = [
    row
    for record in records
    for row in record['rows']
    if row['alpha'] is not None
  ]
  details = {'error': 'standard_error'}
  return Comparison(
    'table5',
    'Table 5: acceptance rates by lenience',
    'alpha',
    _rates(proposing, values, ('target', 'draft', 'T', 'lenience'), details),
    'Below lenience 1 the output is lossy: a token may come up to 1 / lenience'
    " times as often as the target would draw it. Alpha is over the target's"
    ' own tokens, sum min(p / l, q), and at temperature 0 the share of'
    " proposals with p >= l max(p). Paper: of the row that 'stands in for'"
    ' names, whose models and data are others.',
  )


def _rates(
  measured: Records,
  values: Mapping[tuple[Any, ...], float],
  names: Sequence[str],
  details: Mapping[str, str],
) -> list[Row]:
  """Rows of acceptance rates, then the paper's rows that have no stand-in.

  Args:
    measured: rows of `acceptance.measure_alpha`'s records.
    values: the paper's values, by the values of the columns `names`.
    names: names of the columns that tell rows apart.
    details: further columns, after 'stands in for': name -> the record's name.
  """
  shown, stood_in_for = [], set()
  for row in measured:
    at = (row['temperature'], row['lenience'])[: len(names) - 2]
    pair = row.get('paper') or ()
    stood_in_for.add(key := (*pair, *at))
    keys = (row['target'], row['draft'], *at)
    stands_in_for = ', '.join(pair) if key in values else None
    shown.append(
      Row(
        dict(zip(names, keys, strict=True)),
        values.get(key),
        measured=row['alpha'],
        not_measured='it proposed nothing' if row['alpha'] is None else '',
        details={'stands in for': stands_in_for}
        | {name: row.get(key) for name, key in details.items()},
      )
    )
  return shown + [
    Row(dict(zip(names, key, strict=True)), value, not_measured=_NO_CHECKPOINTS)
    for key, value in values.items()
    if key not in stood_in_for
  ]


def _keys(row: printed.Table2Row | printed.Table4Row) -> dict[str, Any]:
  return {
    'task': row.task,
    'draft': row.draft,
    'T': row.temperature,
    'gamma': row.gamma,
    'alpha': row.acceptance_rate,
  }


def _expected(row: printed.Table4Row) -> float:
  return float(
    analysis.walltime_factor(row.acceptance_rate, row.gamma, row.cost_ratio)
  )
