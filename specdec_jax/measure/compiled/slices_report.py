"""The report of `tpu_slices`: memory, and what a slice's chips exchange."""

import rich.console

from specdec_jax.measure.compiled.report import (
  Columns,
  Results,
  heading,
  in_gb,
  in_gib,
  lines_of,
  missing,
  table,
)

_ON_SLICE: Columns = {
  'pair': lambda r: r['pair'],
  'slice': lambda r: r['slice'],
  'data x model': lambda r: ' x '.join(str(n) for n in r['mesh'].values()),
}
_MEMORY = _ON_SLICE | {
  'fits': lambda r: 'yes' if r['fits'] else 'NO',
  'peak GiB': lambda r: in_gib(r['program'].get('peak_bytes')),
  'target, whole': lambda r: in_gib(r['target_bytes']),
  'target': lambda r: in_gib(r['target_chip_bytes']),
  'draft': lambda r: in_gib(r['draft_chip_bytes']),
  'temporaries': lambda r: in_gib(r['program'].get('temporaries_bytes')),
}
_STEP = _ON_SLICE | {
  'target call, GB': lambda r: in_gb(r['target_call_bytes']),
  'draft call, GB': lambda r: in_gb(r['draft_call_bytes']),
  'all-reduces': lambda r: _exchanged(r, 'all-reduce', 'count'),
  'their MB': lambda r: _exchanged(r, 'all-reduce', 'bytes'),
  'all-gathers': lambda r: _exchanged(r, 'all-gather', 'count'),
  'their MB ': lambda r: _exchanged(r, 'all-gather', 'bytes'),
  'others': lambda r: _exchanged(r, None, 'count'),
  'weights gathered': lambda r: _if_compiled(r, str(r['weights_gathered'])),
  'compiled in, s': lambda r: _if_compiled(
    r, f'{r["program"].get("compile_seconds", 0):.0f}'
  ),
}


def _if_compiled(record: Results, text: str) -> str | None:
  return None if 'refused' in record['program'] else text


def _exchanged(record: Results, op: str | None, field: str) -> str | None:
  """Sum over the exchanges of a round; None is all kinds without a column."""
  kinds = record['exchanged']['round']
  own = ('all-reduce', 'all-gather')
  wanted = [k for k in kinds if (k == op if op else k not in own)]
  total = sum(kinds[kind][field] for kind in wanted)
  text = str(total) if field == 'count' else f'{total / 1e6:.3f}'
  return _if_compiled(record, text)


def markdown(results: Results) -> str:
  """The report of `tpu_slices`, made from the contents of results.json."""
  settings, rows = results['settings'], results['rows']
  refused = [row for row in rows if 'refused' in row['program']]
  lines = [
    *heading(settings, 'For'),
    f'- Memory of a chip that programs may use: {settings["usable_gib"]:.2f}'
    ' GiB.',
    f'- Batch {settings["batch"]}, {settings["input_len"]} input tokens, up to'
    f' {settings["decode_len"]} output tokens, gamma {settings["gamma"]},'
    ' sampled.',
    '- The target is split over all chips of `model`, the drafter is whole on'
    ' each. One program holds the whole generation.',
    *missing(results['missing']),
    '',
    '## Memory of a chip, GiB',
    '',
    "The peak is the compiler's. Parameters are a chip's part of them.",
    '',
    *lines_of(_MEMORY, rows),
    '## A round: what a chip reads, and what the chips exchange',
    '',
    'Bytes of a call are counted: the weights of the decoder on a chip, and its'
    ' part of all caches. A round is one call of the target over gamma + 1'
    ' tokens and gamma of the drafter. Exchanges are those of the compiled'
    ' round, bytes being what a chip has afterwards.',
    '',
    *lines_of(_STEP, rows),
    *(
      f'{row["pair"]} does not fit on {row["slice"]}:'
      f' {row["program"]["refused"]}\n'
      for row in refused
    ),
  ]
  return '\n'.join(lines).rstrip() + '\n'


def show(console: rich.console.Console, results: Results) -> None:
  """Prints memory and exchanges of each row."""
  names = ('all-reduces', 'all-gathers', 'weights gathered')
  columns = {**_ON_SLICE, 'fits': _MEMORY['fits']}
  columns['peak GiB'] = _MEMORY['peak GiB']
  columns |= {name: _STEP[name] for name in names}
  console.print(table(columns, results['rows'], results['settings']['name']))
