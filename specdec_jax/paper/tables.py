"""The paper's tables, row by row with predicted and measured values."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import analysis
from specdec_jax.measure.methods import ALL
from specdec_jax.paper import printed, table2_suite
from specdec_jax.paper.report import Comparison, Row

_CLOSED = 'a closed form, nothing is run'
_NO_CHECKPOINTS = 'its checkpoints were not given'

_FORMS = {
  'against T5X-style': '.3f',
  'c': '.4f',
  'c here': '.4f',
  'v(gamma + 1)': '.3f',
  'plain ms/token': '.3f',
  'error': '.4f',
  'proposes': '.3f',
  'observed': '.3f',
  'tokens per call': '.3f',
}

Records = Sequence[Mapping[str, Any]]


def table1() -> list[Comparison]:
  """Table 1 as two tables: speed, and arithmetic operations."""

  def compare(name: str, title: str, quantity: str, factor) -> Comparison:
    """`factor` names a field of `Table1Row` and a function of `analysis`."""
    closed_form = getattr(analysis, factor)
    rows = [
      Row(
        {'alpha': row.acceptance_rate, 'gamma': row.gamma},
        getattr(row, factor),
        float(closed_form(row.acceptance_rate, row.gamma, 0.0)),
        not_measured=_CLOSED,
      )
      for row in printed.TABLE1
    ]
    return Comparison(name, title, quantity, rows)

  return [
    compare(
      'table1_speed',
      'Table 1: SPEED',
      'walltime factor, c = 0',
      'walltime_factor',
    ),
    compare(
      'table1_operations',
      'Table 1: OPERATIONS',
      'operations factor, c-hat = 0',
      'operations_factor',
    ),
  ]


def table2(
  records: Mapping[str, Any], rows: Sequence[printed.Table2Row], missing: str
) -> Comparison:
  """Table 2: walltime against the plain loop.

  Args:
    records: the records, as `table2_suite.read` returns them.
    rows: rows of the paper to show.
    missing: why a row has no record.
  """
  shown = []
  for row in rows:
    keys = _keys(row)
    found = records.get(table2_suite.row_name(row))
    if found is None:
      (expected,) = [r for r in printed.TABLE4 if _keys(r) == keys]
      shown.append(
        Row(
          keys,
          row.speedup,
          _expected(expected),
          not_measured=missing,
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
          'against T5X-style': measured['t5x_style_speed_up'],
          'c': measured['cost_ratio'],
          'v(gamma + 1)': setting['call_cost'][str(row.gamma + 1)],
          'plain ms/token': setting['times_ms']['plain_loop']['median'],
        },
        notes=(
          f'{found["name"]}; acceptance of the timed run'
          f' {measured["acceptance_rate"]:.3f}; its calls say'
          f' {measured["measured_over_predicted"] - 1:+.1%}'
        ),
      )
    )
  return Comparison(
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
    forms=_FORMS,
    even=1.0,
  )


def table4(
  records: Mapping[str, Any], rows: Sequence[printed.Table2Row], missing: str
) -> Comparison:
  """Table 4: what Theorem 3.8 expects, and c."""
  wanted = [_keys(row) for row in rows]
  shown = []
  for row in printed.TABLE4:
    if _keys(row) not in wanted:
      continue
    found = records.get(table2_suite.row_name(row))
    measured = {} if found is None else _only(found)[1]
    shown.append(
      Row(
        {**_keys(row), 'c of the paper': row.cost_ratio},
        row.expected,
        _expected(row),
        measured.get('speed_up'),
        not_measured=missing if found is None else '',
        forced_acceptance=found and found['forced_acceptance'],
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
    caption=(
      "Paper: its EXP. Predicted: Theorem 3.8 with the paper's alpha and c,"
      ' which its table rounds to two decimals.'
    ),
    forms=_FORMS,
    even=1.0,
  )


def methods(records: Records) -> Comparison:
  """Ways to speculate, of which the paper has one: a fixed gamma, by token.

  Args:
    records: records of `methods.compare_methods`, one a pair. Of several inputs
      all together are shown.
  """
  shown = [
    Row(
      {
        'pair': record['pair'],
        'T': row['temperature'],
        'method': row['method'],
      },
      measured=row['speed_up'],
      spread=tuple(row['speed_up_interval']),
      details={
        'tokens per call': row['tokens_per_call'],
        'ms per token': row['ms_per_token'],
      },
    )
    for record in records
    for row in record['rows_measured']
    if row['input'] == ALL
  ]
  return Comparison(
    'methods',
    'Ways to speculate',
    'walltime of plain over speculative decoding',
    shown,
    caption='Spread: a 95 % interval over texts.',
    forms=_FORMS,
    even=1.0,
  )


def table3(records: Records) -> Comparison:
  """Table 3: acceptance rates; those measured here, then the paper's others.

  Args:
    records: records of `alpha.measure_alpha`. A row that stands in for a row of
      the paper is shown with the paper's value.
  """
  values = {
    (row.target, row.draft, row.temperature): row.acceptance_rate
    for row in printed.TABLE3
  }
  details = (
    'stands in for',
    'error',
    'proposes',
    'observed',
    'gamma',
    'tokens per call',
    'tokens',
  )
  lossless = [
    row
    for record in records
    for row in record['rows']
    if row['lenience'] == 1  # the others are in Table 5
  ]
  return Comparison(
    'table3',
    'Table 3: acceptance rates',
    'alpha, Corollary 3.6',
    _rates(lossless, values, ('target', 'draft', 'T'), details),
    caption=(
      "Paper: of the row that 'stands in for' names, whose models and data are"
      ' others. Measured: mean acceptance probability of proposals; error: its'
      ' standard error over texts; proposes: of the tokens, the share that'
      ' there was a proposal for. Observed: accepted over tested proposals of'
      ' real runs with this gamma; tokens per call: of the target, in these'
      ' runs.'
    ),
    forms=_FORMS,
  )


def table5(records: Records) -> Comparison:
  """Table 5: alpha by lenience; those measured here, then the paper's others.

  Args:
    records: records of `alpha.measure_alpha`. The paper's table has only
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
    if None not in (row['alpha'], row['observed'])
  ]
  return Comparison(
    'table5',
    'Table 5: acceptance rates by lenience',
    'alpha',
    _rates(
      proposing,
      values,
      ('target', 'draft', 'T', 'lenience'),
      ('stands in for', 'error', 'observed'),
    ),
    caption=(
      'Below lenience 1 the output is lossy: a token may come up to 1 /'
      ' lenience times as often as the target would draw it. Alpha is over the'
      " target's own tokens, sum min(p / l, q), and at temperature 0 the share"
      ' of proposals with p >= l max(p); observed is of lenient runs. Paper: of'
      " the row that 'stands in for' names, whose models and data are others."
    ),
    forms=_FORMS,
  )


def _rates(
  measured: Records,
  values: Mapping[tuple[Any, ...], float],
  names: Sequence[str],
  details: Sequence[str],
) -> list[Row]:
  """Rows of acceptance rates, then the paper's rows that have no stand-in.

  Args:
    measured: rows of `alpha.measure_alpha`'s records.
    values: the paper's values, by the values of the columns `names`.
    names: names of the columns that tell rows apart.
    details: names of further columns.
  """
  shown, stood_in_for = [], set()
  for row in measured:
    at = (row['temperature'], row['lenience'])[: len(names) - 2]
    pair = row.get('paper') or ()
    stood_in_for.add(key := (*pair, *at))
    keys = (row['target'], row['draft'], *at)
    known = {
      'stands in for': ', '.join(pair) if key in values else None,
      'error': row.get('standard_error'),
      # Older records lack it; their drafters always propose.
      'proposes': row.get('proposes', 1.0),
      'observed': row.get('observed'),
      'gamma': row.get('gamma'),
      'tokens per call': row.get('tokens_per_call'),
      'tokens': row['num_tokens'],
    }
    shown.append(
      Row(
        dict(zip(names, keys, strict=True)),
        values.get(key),
        measured=row['alpha'],
        not_measured='it proposed nothing' if row['alpha'] is None else '',
        details={name: known[name] for name in details},
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


def _only(record: Mapping[str, Any]) -> tuple[Any, Any]:
  """The one setting and the one gamma of a suite's record."""
  (setting,) = record['settings']
  (measured,) = setting['gammas']
  return setting, measured
