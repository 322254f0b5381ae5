"""The paper's tables, row by row beside what is predicted and was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import analysis, paper
from specdec_jax.bench import suite
from specdec_jax.reproduce.report import Row, Table

_CLOSED = 'a closed form: nothing is run'
# A row of the paper's is listed all the same.
_NO_CHECKPOINTS = 'its checkpoints were not given'
_STOCK = 'against T5X-style'
_DETAILS = (_STOCK, 'c', 'v(gamma + 1)', 'plain ms/token')


def table1() -> list[Table]:
  """Table 1: the speed and the arithmetic operations, each a table."""
  speed, operations = [], []
  for row in paper.TABLE1:
    keys = {'alpha': row.acceptance_rate, 'gamma': row.gamma}
    arguments = (row.acceptance_rate, row.gamma, 0.0)
    speed.append(
      Row(
        keys,
        row.walltime_factor,
        float(analysis.walltime_factor(*arguments)),
        not_measured=_CLOSED,
      )
    )
    operations.append(
      Row(
        keys,
        row.operations_factor,
        float(analysis.operations_factor(*arguments)),
        not_measured=_CLOSED,
      )
    )
  return [
    Table('table1_speed', 'Table 1: SPEED', 'walltime factor, c = 0', speed),
    Table(
      'table1_operations',
      'Table 1: OPERATIONS',
      'operations factor, c-hat = 0',
      operations,
    ),
  ]


def table2(
  records: Mapping[str, Any], rows: Sequence[paper.Table2Row], missing: str
) -> Table:
  """Table 2: walltime against the plain loop.

  Args:
    records: of `suite.read`.
    rows: of the paper, that are to be shown.
    missing: why a row has no record.
  """
  shown = []
  for row in rows:
    keys = _keys(row)
    found = records.get(suite.row_name(row))
    if found is None:
      (expected,) = [r for r in paper.TABLE4 if _keys(r) == keys]
      shown.append(
        Row(
          keys,
          row.speedup,
          _expected(expected),
          not_measured=missing,
          details=dict.fromkeys(_DETAILS),
          notes="predicted by Theorem 3.8 from the paper's alpha and c",
        )
      )
      continue
    setting, measured = _only(found)
    shown.append(
      Row(
        keys,
        row.speedup,
        measured['expected_speed_up'],
        measured['speed_up'],
        forced_acceptance=found['forced_acceptance'],
        details={
          _STOCK: round(measured['t5x_style_speed_up'], 3),
          'c': round(measured['cost_ratio'], 4),
          'v(gamma + 1)': round(setting['call_cost'][str(row.gamma + 1)], 3),
          'plain ms/token': round(
            setting['times_ms']['plain_loop']['median'], 3
          ),
        },
        notes=(
          f'{found["name"]}; acceptance of the timed run'
          f' {measured["acceptance_rate"]:.3f}; its calls say'
          f' {measured["measured_over_predicted"] - 1:+.1%}'
        ),
      )
    )
  return Table(
    'table2',
    'Table 2: speed-up',
    'walltime of plain over speculative decoding',
    shown,
    caption=(
      'Predicted: E(gamma, alpha) / (v(gamma + 1) + gamma c) with the measured'
      " v and c, and the timed run's own acceptance rate. Measured: against"
      " this library's plain loop in the same run. Against T5X-style: a plain"
      ' loop with its one-hot embedding and one-hot cache rewrite, written for'
      ' this comparison only.'
    ),
  )


def table4(
  records: Mapping[str, Any], rows: Sequence[paper.Table2Row], missing: str
) -> Table:
  """Table 4: what Theorem 3.8 expects, and c."""
  wanted = [_keys(row) for row in rows]
  shown = []
  for row in paper.TABLE4:
    keys = _keys(row)
    if keys not in wanted:
      continue
    found = records.get(suite.row_name(row))
    c = None if found is None else round(_only(found)[1]['cost_ratio'], 4)
    shown.append(
      Row(
        {**keys, 'c of the paper': row.cost_ratio},
        row.expected,
        _expected(row),
        None if found is None else _only(found)[1]['speed_up'],
        not_measured=missing if found is None else '',
        forced_acceptance=found and found['forced_acceptance'],
        details={'EMP of the paper': row.empirical, 'c here': c},
      )
    )
  return Table(
    'table4',
    'Table 4: expected and empirical improvement',
    'walltime factor',
    shown,
    caption=(
      "Paper: its EXP. Predicted: Theorem 3.8 with the paper's alpha and c,"
      ' which its table rounds to two decimals.'
    ),
  )


def table3(records: Sequence[Mapping[str, Any]]) -> Table:
  """Table 3: acceptance rates; those measured here, then the paper's others.

  Args:
    records: of `measure.measure_alpha`. A row that stands in for one of the
      paper's has that one's value beside it.
  """
  values = {
    (row.target, row.draft, row.temperature): row.acceptance_rate
    for row in paper.TABLE3
  }
  shown, stood_in_for = [], set()
  for record in records:
    for row in record['rows']:
      if row['lenience'] != 1:
        continue  # in Table 5
      key = (*(row.get('paper') or ()), row['temperature'])
      stood_in_for.add(key)
      shown.append(_measured_rate(row, values.get(key)))
  shown += [
    Row(
      {'target': target, 'draft': draft, 'T': temperature},
      value,
      not_measured=_NO_CHECKPOINTS,
      details=dict.fromkeys(_RATE_DETAILS),
    )
    for (target, draft, temperature), value in values.items()
    if (target, draft, temperature) not in stood_in_for
  ]
  return Table(
    'table3',
    'Table 3: acceptance rates',
    'alpha, Corollary 3.6',
    shown,
    caption=(
      "Paper: of the row that 'stands in for' names, whose models and data are"
      ' others. Measured: mean acceptance probability of proposals; error: its'
      ' standard error over texts; proposes: of the tokens, the share that'
      ' there was a proposal for. Observed: accepted over tested proposals of'
      ' real runs with this gamma; tokens a call: of the target, in these runs.'
    ),
  )


_RATE_DETAILS = (
  'stands in for',
  'error',
  'proposes',
  'observed',
  'gamma',
  'tokens a call',
  'tokens',
)


def _measured_rate(row: Mapping[str, Any], value: float | None) -> Row:
  """A row of Table 3 that was measured here, and the paper's value if any."""
  # Records of before there was `proposes` are of drafters that always do.
  details = (
    None if value is None else ', '.join(row['paper']),
    _rounded(row.get('standard_error'), 4),
    round(row.get('proposes', 1.0), 4),
    _rounded(row.get('observed'), 4),
    row.get('gamma'),
    _rounded(row.get('tokens_per_call'), 3),
    row['num_tokens'],
  )
  return Row(
    {'target': row['target'], 'draft': row['draft'], 'T': row['temperature']},
    value,
    measured=row['alpha'],
    not_measured='it proposed nothing' if row['alpha'] is None else '',
    details=dict(zip(_RATE_DETAILS, details, strict=True)),
  )


def _rounded(number: float | None, decimals: int) -> float | None:
  return None if number is None else round(number, decimals)


def table5(records: Sequence[Mapping[str, Any]]) -> Table:
  """Table 5: alpha by lenience; the paper's rows, then those measured here.

  Args:
    records: of `measure.measure_alpha`. The paper's table is at temperature 1;
      its text has temperature 0 as well.
  """
  shown = [
    Row(
      {
        'target': 't5_xxl_ende',
        'draft': row.draft,
        'T': 1,
        'lenience': row.lenience,
      },
      row.acceptance_rate,
      not_measured=_NO_CHECKPOINTS,
      details={'error': None, 'observed': None},
    )
    for row in paper.TABLE5
  ]
  shown += [
    Row(
      {
        'target': row['target'],
        'draft': row['draft'],
        'T': row['temperature'],
        'lenience': row['lenience'],
      },
      measured=row['alpha'],
      details={
        'error': _rounded(row['standard_error'], 4),
        'observed': _rounded(row['observed'], 4),
      },
    )
    for record in records
    for row in record['rows']
    if None not in (row['alpha'], row['observed'])
  ]
  return Table(
    'table5',
    'Table 5: acceptance rates by lenience',
    'alpha',
    shown,
    caption=(
      'Below lenience 1 the output is lossy: a token may come up to 1 /'
      ' lenience times as often as the target would draw it. Alpha is over the'
      " target's own tokens, sum min(p / l, q), and at temperature 0 the share"
      ' of proposals with p >= l max(p); observed is of lenient runs.'
    ),
  )


def _keys(row: paper.Table2Row | paper.Table4Row) -> dict[str, Any]:
  return {
    'task': row.task,
    'draft': row.draft,
    'T': row.temperature,
    'gamma': row.gamma,
    'alpha': row.acceptance_rate,
  }


def _expected(row: paper.Table4Row) -> float:
  return float(
    analysis.walltime_factor(row.acceptance_rate, row.gamma, row.cost_ratio)
  )


def _only(record: Mapping[str, Any]) -> tuple[Any, Any]:
  """The one setting and the one gamma of a suite's record."""
  (setting,) = record['settings']
  (measured,) = setting['gammas']
  return setting, measured
