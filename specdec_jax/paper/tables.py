"""Makes tables of the paper's values, the predicted and the measured ones.

A value measured with forced acceptance is marked in its row and in the title:
the weights were random, and proposals were accepted at random at a given rate.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import analysis
from specdec_jax.paper import printed
from specdec_jax.report.table import Cell, Column, Table, plain_markdown

_NO_CHECKPOINTS = 'their checkpoints were not given, or proposed nothing'
_FORCED = 'forced alpha'
_RATIO = 'measured / predicted'
_FORMS = {
  **dict.fromkeys(('paper', 'predicted', 'measured', _RATIO), '.2f'),
  **dict.fromkeys(('c', 'c here', 'error'), '.4f'),
  **dict.fromkeys(('v(gamma + 1)', 'plain ms/token', 'proposes'), '.3f'),
  'alpha of the run': '.3f',
}
Row = Mapping[str, Cell]
Measured = Sequence[Mapping[str, Any]]  # rows of `measure_alpha`'s records


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A comparison of the paper's, the predicted and the measured values.

  Attributes:
    title: such as 'Table 2: speed-up'.
    caption: sentences under the title that explain the values.
    rows: at least one row, column -> value, as `compared` returns it.
    missing: why some rows have no measured value.
  """

  title: str
  caption: str
  rows: Sequence[Row]
  missing: str

  def table(self) -> Table:
    """Returns a table of the measured rows, or of all if none is measured."""
    measured = [row for row in self.rows if row['measured'] is not None]
    rows = measured or self.rows
    notes = []
    if missing := len(self.rows) - len(measured):
      notes.append(
        f'{missing} of {len(self.rows)} rows not measured: {self.missing}.'
      )
    ratios: list[Any] = [row[_RATIO] for row in measured if row[_RATIO]]
    if ratios:
      notes.append(
        f'Measured over predicted, {len(ratios)} rows: median'
        f' {statistics.median(ratios):.2f}, from {min(ratios):.2f} to'
        f' {max(ratios):.2f}.'
      )
    names = max(rows, key=len)  # some rows may lack columns of details
    columns = [Column(name, _FORMS.get(name, '')) for name in names]
    forced: list[Any] = [row[_FORCED] for row in rows]
    body = [[row.get(name) for name in names] for row in rows]
    title = titled(self.title, forced)
    return Table(title, columns, body, notes).without_empty()

  def markdown(self) -> str:
    """Returns title, caption, table and notes as Markdown, for a report."""
    table = self.table()
    parts = [f'## {plain_markdown(table.title)}', plain_markdown(self.caption)]
    parts += [table.markdown(), *map(plain_markdown, table.notes)]
    return '\n\n'.join(parts)


def compared(
  keys: Row,
  paper: float | None,
  predicted: float | None = None,
  measured: float | None = None,
  forced: float | None = None,
  details: Row | None = None,
) -> Row:
  """Returns a row of a `Comparison`.

  Args:
    keys: columns that identify the row, such as {'task': 'ende', 'gamma': 7}.
    paper: the paper's value.
    predicted: the value from the paper's equations.
    measured: the measured value.
    forced: the rate at which proposals were accepted at random; None if the
      models' probabilities decided.
    details: further columns.
  """
  ratio = measured / predicted if measured and predicted else None
  values = {'paper': paper, 'predicted': predicted, 'measured': measured}
  values |= {_FORCED: forced, _RATIO: ratio}
  return {**keys, **values, **(details or {})}


def titled(title: str, rates: Sequence[float | None]) -> str:
  """Adds a remark to a title if values were measured with forced acceptance.

  Args:
    title: the title without the remark.
    rates: for each value, the rate at which proposals were accepted at random;
      None if the models' probabilities decided.
  """
  forced = sorted({rate for rate in rates if rate is not None})
  if not forced:
    return title
  alphas = ' to '.join(f'{rate:g}' for rate in forced[:: len(forced) - 1 or 1])
  number = sum(rate is not None for rate in rates)
  part = f': {number} of {len(rates)}' if number < len(rates) else ''
  return f'{title} (forced alpha={alphas}, random weights{part})'


def row_name(row: printed.Table2Row) -> str:
  """Returns the name of a row of Tables 2 and 4, such as 'ende-t5_small-T0'."""
  return f'{row.task}-{row.draft}-T{row.temperature}'


def table1() -> list[Comparison]:
  """Returns Table 1 as two tables: speed, and arithmetic operations."""
  tables = []
  for name, index, closed_form, factor in (
    ('SPEED', 3, analysis.walltime_factor, 'walltime factor, c'),
    ('OPERATIONS', 2, analysis.operations_factor, 'operations factor, c-hat'),
  ):
    rows = []
    for row in printed.TABLE1:
      keys = {'alpha': row[0], 'gamma': row[1]}
      predicted = float(closed_form(row[0], row[1], 0.0))
      rows.append(compared(keys, row[index], predicted))
    texts = f'Table 1: {name}', f'{factor} = 0'
    tables.append(Comparison(*texts, rows, 'a closed form, nothing is run'))
  return tables


def tables_2_and_4(
  records: Mapping[str, Any], rows: Sequence[printed.Table2Row], missing: str
) -> tuple[Comparison, Comparison]:
  """Returns Table 2, of speed-ups, and Table 4, of Theorem 3.8.

  Args:
    records: `row_name` of a row -> benchmark record, if the row has one.
    rows: rows to show, which both tables have.
    missing: why some rows have no record.
  """
  second, fourth = [], []
  for row in rows:
    name = row_name(row)
    columns = 'task', 'draft', 'T', 'gamma', 'alpha'
    keys: dict[str, Cell] = dict(zip(columns, row[:5], strict=True))
    theorem = float(
      analysis.walltime_factor(row.acceptance_rate, row.gamma, row.cost_ratio)
    )
    predicted, measured, details = theorem, (None, None), {}
    if record := records.get(name):
      run, settings = record['gammas'][0], record['settings']
      predicted = run['expected_speed_up']
      measured = run['speed_up'], settings['forced_acceptance']
      details = {
        'c': run['cost_ratio'],
        'v(gamma + 1)': record['call_cost'][str(row.gamma + 1)],
        'plain ms/token': record['times_ms']['plain_loop']['median'],
        'alpha of the run': run['acceptance_rate'],
        'models': settings['name'].removesuffix(f', {name}'),
      }
    second.append(compared(keys, row.speedup, predicted, *measured, details))
    keys = {**keys, 'c of the paper': row.cost_ratio}
    details = {'EMP of the paper': row.speedup, 'c here': details.get('c')}
    fourth.append(compared(keys, row.expected, theorem, *measured, details))
  return (
    Comparison(
      'Table 2: speed-up',
      'Walltime of plain over speculative decoding. Predicted: E(gamma, alpha)'
      " / (v(gamma + 1) + gamma c) with the measured v and c, and the run's own"
      " acceptance rate; of rows that were not measured the paper's alpha and c"
      " by Theorem 3.8. Measured: against this library's plain loop in the same"
      ' run.',
      second,
      missing,
    ),
    Comparison(
      'Table 4: expected and empirical improvement',
      "Walltime factor. Paper: its EXP. Predicted: Theorem 3.8 with the paper's"
      ' alpha and c, which its table rounds to two decimals.',
      fourth,
      missing,
    ),
  )


# Column of a table of rates -> its name in the rows of a record.
_RATE_COLUMNS = {'target': 'target', 'draft': 'draft', 'T': 'temperature'}


def table3(measured: Measured) -> Comparison:
  """Returns Table 3: measured rates, then the paper's rows not measured here.

  Args:
    measured: rows of `measure_alpha`'s records. A row that stands in for a row
      of the paper gets the paper's value.
  """
  rows = _rates(
    # Table 5 has the rows of other leniences.
    [row for row in measured if row['lenience'] == 1],
    {tuple(key): rate for *key, rate in printed.TABLE3},
    _RATE_COLUMNS,
    {'proposes': 'proposes', 'tokens': 'num_tokens'},
  )
  return Comparison(
    'Table 3: acceptance rates',
    "Alpha, Corollary 3.6. Paper: of the row that 'stands in for' names, whose"
    ' models and data are others. Measured: mean acceptance probability of'
    ' proposals; error: its standard error over texts; proposes: of the tokens,'
    ' the share that there was a proposal for.',
    rows,
    _NO_CHECKPOINTS,
  )


def table5(measured: Measured) -> Comparison:
  """Returns Table 5, alpha by lenience: measured rows, then the paper's rows.

  Args:
    measured: rows of `measure_alpha`'s records. The paper's table has only
      temperature 1; its text describes temperature 0 as well.
  """
  values = {
    ('t5_xxl_ende', draft, 1, lenience): rate
    for draft, lenience, rate in printed.TABLE5
  }
  rows = [row for row in measured if row['alpha'] is not None]
  return Comparison(
    'Table 5: acceptance rates by lenience',
    'Below lenience 1 the output is lossy: a token may come up to 1 / lenience'
    " times as often as the target would draw it. Alpha is over the target's"
    ' own tokens, sum min(p / l, q), and at temperature 0 the share of'
    " proposals with p >= l max(p). Paper: of the row that 'stands in for'"
    ' names, whose models and data are others.',
    _rates(rows, values, _RATE_COLUMNS | {'lenience': 'lenience'}, {}),
    _NO_CHECKPOINTS,
  )


def _rates(
  measured: Measured,
  values: Mapping[tuple[Any, ...], float],
  columns: Mapping[str, str],
  details: Mapping[str, str],
) -> list[Row]:
  """Returns measured rows, then the paper's rows for which none was measured.

  A measured row stands in for a row of the paper if it has models of ours in
  place of those of the paper.


  Args:
    measured: rows of `acceptance.measure_alpha`'s records.
    values: values of the columns that identify a row -> the paper's rate.
    columns: the columns that identify a row, as column -> its name in a record;
      the first two are target and draft.
    details: further columns after 'error', as column -> its name in a record.
  """
  rows, stood_in_for = [], set()
  for row in measured:
    keys = {column: row[name] for column, name in columns.items()}
    pair = row.get('paper') or ()
    key = (*pair, *list(keys.values())[2:])
    stood_in_for.add(key)
    more = {
      'stands in for': ', '.join(pair) if key in values else None,
      'error': row.get('standard_error'),
    } | {column: row.get(name) for column, name in details.items()}
    alpha = row['alpha']
    rows.append(compared(keys, values.get(key), measured=alpha, details=more))
  return rows + [
    compared(dict(zip(columns, key, strict=True)), value)
    for key, value in values.items()
    if key not in stood_in_for
  ]
