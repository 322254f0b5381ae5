"""Reports of what was compiled: a table on the terminal, and report.md.

Those of pairs; `slices_report` and `beams_report` are made of the same parts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax.checks.memory import GIB
from specdec_jax.measure.table import Column, Table, say

Results = Mapping[str, Any]
# The row of a record -> its cell in a column.
Show = Callable[[Results], str | None]
# By the names of columns. Trailing blanks tell those with the same name apart.
Columns = dict[str, Show]


def in_gb(size: float | None) -> str | None:
  """A size as a cell, in units of 10^9 bytes."""
  return None if size is None else f'{size / 1e9:.3f}'


def in_gib(size: float | None) -> str | None:
  """A size as a cell, in units of 2^30 bytes."""
  return None if size is None else f'{size / GIB:.2f}'


def _ratio(part: float | None, whole: float | None) -> str | None:
  return None if part is None or whole is None else f'{part / whole:.4f}'


_PAIR: Columns = {
  'task': lambda r: r['task'],
  'draft': lambda r: r['draft'],
  'T': lambda r: f'{r["temperature"]:g}',
  'gamma': lambda r: str(r['gamma']),
}
_SPEED = _PAIR | {
  'alpha': lambda r: f'{r["acceptance_rate"]:.2f}',
  'c': lambda r: f'{r["cost_ratio"]:.4f}',
  'v(gamma+1)': lambda r: f'{r["call_cost"]:.4f}',
  'target call, ms': lambda r: f'{r["target_call_ms"]:.2f}',
  'predicted factor': lambda r: f'{r["walltime_factor"]:.2f}',
  'with v = 1': lambda r: f'{r["theorem_3_8"]:.2f}',
  "paper's speed-up": lambda r: f'{r["speedup"]:.1f}',
}
_MEMORY = _PAIR | {
  'fits': lambda r: 'yes' if r['memory']['fits'] else 'NO',
  'peak GiB': lambda r: in_gib(r['memory']['peak_bytes']),
  'target parameters': lambda r: in_gib(r['memory']['target_parameter_bytes']),
  'draft parameters': lambda r: in_gib(r['memory']['draft_parameter_bytes']),
  'target caches': lambda r: in_gib(r['memory']['target_cache_bytes']),
  'draft caches': lambda r: in_gib(r['memory']['draft_cache_bytes']),
  'temporaries of the loop': lambda r: in_gib(
    r['programs']['speculative_run'].get('temporaries_bytes')
  ),
}
_BYTES = _PAIR | {
  'target, 1 token': lambda r: in_gb(r['bytes_counted']['target_call_1']),
  'XLA': lambda r: in_gb(r['bytes_xla']['target_call_1']),
  'target, gamma + 1': lambda r: in_gb(r['bytes_counted']['target_call_n']),
  'XLA ': lambda r: in_gb(r['bytes_xla']['target_call_n']),
  'draft, 1 token': lambda r: in_gb(r['bytes_counted']['draft_call_1']),
  'XLA  ': lambda r: in_gb(r['bytes_xla']['draft_call_1']),
  'c by XLA': lambda r: _ratio(
    r['bytes_xla']['draft_call_1'], r['bytes_xla']['target_call_1']
  ),
}


_LOOPS = ('plain_start', 'plain_run', 'speculative_start', 'speculative_run')


def _total(
  record: Results, finding: str, field: str, names: Sequence[str] = _LOOPS
) -> int:
  """Sums a finding over the programs of the loops, or over those of `names`."""
  return sum(
    program[finding][field]
    for name, program in record['programs'].items()
    if finding in program and name in names
  )


def _of(part: str, text: Callable[[Results, Results], str]) -> Show:
  """Text of the costs of a 'token', of the draft's 'step' or of a 'round'."""

  def show(record):
    costs = record['costs'][part]
    return None if costs is None else text(costs, record)

  return show


def _launched(part: str, name: str) -> Show:
  return _of(part, lambda costs, _: f'{costs[name]:,}')


def _per_layer(part: str, layers: str) -> Show:
  return _of(part, lambda costs, r: f'{costs["layer_kernels"] / r[layers]:.1f}')


def _ms(part: str, name: str = 'ms') -> Show:
  return _of(part, lambda costs, _: f'{costs[name]:.2f}')


def _mb(part: str, name: str) -> Show:
  return _of(part, lambda costs, _: f'{costs[f"{name}_bytes"] / 1e6:,.1f}')


def _factor(over: str) -> Show:
  def show(record):
    factor = record['walltime_factor'].get(over)
    return None if factor is None else f'{factor:.2f}'

  return show


# Of a token of the plain loop, of a draft step, of a round: blanks as above.
_KERNELS = _PAIR | {
  'kernels per token': _launched('token', 'kernels'),
  'in branches, least': _launched('token', 'branch_kernels'),
  'most': _launched('token', 'most_branch_kernels'),
  'conditionals': _launched('token', 'conditionals'),
  'per layer': _per_layer('token', 'target_layers'),
  'per draft step': _launched('step', 'kernels'),
  'in branches, least ': _launched('step', 'branch_kernels'),
  'most ': _launched('step', 'most_branch_kernels'),
  'conditionals ': _launched('step', 'conditionals'),
  'per layer ': _per_layer('step', 'draft_layers'),
  'per round': _launched('round', 'kernels'),
  'in branches, least  ': _launched('round', 'branch_kernels'),
  'most  ': _launched('round', 'most_branch_kernels'),
  'conditionals  ': _launched('round', 'conditionals'),
}
_TIMES = _PAIR | {
  'alpha': lambda r: f'{r["acceptance_rate"]:.2f}',
  'token, ms': _ms('token'),
  'by bytes': _ms('token', 'bytes_ms'),
  "T5X's token": _ms('T5X'),
  'draft step, ms': _ms('step'),
  'by bytes ': _ms('step', 'bytes_ms'),
  'round, ms': _ms('round'),
  'by bytes  ': _ms('round', 'bytes_ms'),
  'factor': _factor('plain'),
  'over T5X': _factor('T5X'),
  'by bytes alone': _factor('bytes'),
  "paper's speed-up": lambda r: f'{r["speedup"]:.1f}',
}
_WRITTEN = _PAIR | {
  'read per round, GB': lambda r: in_gb(r['costs']['round']['read_bytes']),
  'written, MB': _mb('round', 'written'),
  'of it copies of caches': _mb('round', 'copied'),
  'of it weights': _mb('round', 'rewritten'),
  'written per token, MB': _mb('token', 'written'),
  'into caches': _mb('token', 'updated'),
  'weights copied or relaid once per run, MB': lambda r: (
    f'{_once(r, "rewritten_bytes") / 1e6:,.1f}'
  ),
}


def _once(record: Results, name: str) -> int:
  """Bytes that both programs of the speculative loop move before its rounds."""
  programs = (
    record['programs'][f'speculative_{part}'] for part in ('start', 'run')
  )
  return sum(program['launched']['once'][name] for program in programs)


_FALLBACKS = _PAIR | {
  'programs': lambda r: str(sum(n in r['programs'] for n in _LOOPS)),
  'state keeps its shape': lambda r: (
    'yes' if r['state_keeps_its_shape'] else 'NO'
  ),
  'state in place': lambda r: _in_place(r),
  'waits for the host': lambda r: str(
    sum(p.get('host_transfers', 0) for p in r['programs'].values())
  ),
  'weights in float32': lambda r: str(_total(r, 'float32_weights', 'count')),
  'weights relaid once a run, GiB': lambda r: in_gib(
    _total(r, 'relaid_weights', 'once_bytes', ['speculative_run'])
  ),
  'in each round, GB': lambda r: in_gb(
    _total(r, 'relaid_weights', 'looped_bytes', ['speculative_run'])
  ),
  'caches relaid once a run, GiB': lambda r: in_gib(
    _total(r, 'relaid_caches', 'once_bytes', ['speculative_run'])
  ),
  'in each round, GB ': lambda r: in_gb(
    _total(r, 'relaid_caches', 'looped_bytes', ['speculative_run'])
  ),
  'loops over rows': lambda r: str(
    r['programs']['speculative_run'].get('row_loops', 0)
  ),
}

_FALLBACKS_ON_GPU = {
  name: _FALLBACKS[name]
  for name in (*_PAIR, 'programs', 'state keeps its shape', 'state in place')
} | {'weights in float32': _FALLBACKS['weights in float32']}


def _in_place(record: Results) -> str | None:
  """Whether the speculative loop updates its caches in place."""
  program = record['programs']['speculative_run']
  sizes = record['memory']
  caches = sizes['target_cache_bytes'] + sizes['draft_cache_bytes']
  if 'in_place_bytes' not in program:
    return None
  return 'yes' if program['in_place_bytes'] >= caches else 'NO'


def table(columns: Columns, rows: Sequence[Results], title: str = '') -> Table:
  """A table with a line for each row; its first two columns are texts."""
  return Table(
    title,
    [
      Column(name.strip(), align='left' if i < 2 else 'right')
      for i, name in enumerate(columns)
    ],
    [[show(row) for show in columns.values()] for row in rows],
  )


def lines_of(columns: Columns, rows: Sequence[Results]) -> list[str]:
  """The table in Markdown, and the empty line after it."""
  return [table(columns, rows).markdown(), '']


def heading(settings: Mapping[str, Any], what: str) -> list[str]:
  """The lines that all reports begin with; `what` introduces the device."""
  of = ', '.join(
    f'{name} {settings[name]}'
    for name in ('jax', 'libtpu', 'jax_cuda12_plugin')
    if name in settings
  )
  return [
    f'# {settings["name"]}',
    '',
    'Compiled, not run: no such device was there. Written by `specdec'
    ' compile-check` from `results.json`.',
    '',
    f'- {what}: {settings["compiled_for"]}; {of}.',
  ]


def missing(names: Sequence[str]) -> list[str]:
  """A line on the rows that are not there yet; none if all are."""
  if not names:
    return []
  return [f'- {len(names)} not compiled yet: {", ".join(names)}.']


def markdown(results: Results) -> str:
  """The report, made from the contents of results.json."""
  settings, rows = results['settings'], results['rows']
  parts = _gpu_parts if results['kind'] == 'gpu_check' else _tpu_parts
  lines = [
    *heading(settings, 'For one'),
    f'- Memory that programs may use: {settings["usable_gib"]:.2f} GiB;'
    f' bandwidth taken as {settings["gb_per_s"]:.0f} GB/s.',
    f'- Batch {settings["batch"]}, {settings["param_dtype"]} parameters,'
    f' computation in {settings["target"]["config"]["dtype"]}.',
    # Records from before they could be chosen are those without.
    f'- Hand-written kernels: {settings.get("kernels", "off")}.',
    *(
      f'- {task}: {length} input tokens, up to'
      f' {settings["decode_lens"][task]} output tokens.'
      for task, length in settings['input_lens'].items()
    ),
    *missing(results['missing']),
    '',
    *parts(settings, rows),
    '',
    *_refusals(rows),
  ]
  return '\n'.join(lines).rstrip() + '\n'


def _gpu_parts(settings: Results, rows: Sequence[Results]) -> list[str]:
  return [
    '## Kernels',
    '',
    'What is launched per token of the plain loop, per draft step and per round'
    ' with all its steps. A conditional takes one of its branches and waits for'
    ' the host. Kernels in a layer are per layer.',
    '',
    *lines_of(_KERNELS, rows),
    '## What kernels and bytes predict',
    '',
    f'A time is bytes over bandwidth, {settings["kernel_us"]:g} microseconds a'
    f' kernel, {settings["conditional_us"]:g} a conditional and'
    f' {settings.get("wait_us", 0):g} a wait of the programs of a kernel for'
    ' each other: estimates, not measured. Of a conditional it is the branch of'
    ' the fewest kernels, that'
    ' of no top-k and no top-p. The factor is over the plain loop, with the'
    " alpha of the paper's Table 2 and i.i.d. acceptance. T5X's own loop is"
    ' taken to launch'
    f' {settings["t5x_kernels"]} kernels per token and to move the same bytes.',
    '',
    *lines_of(_TIMES, rows),
    '## Bytes beside what must be read',
    '',
    'What a kernel only updates, as a cache, is counted by what it changes.'
    ' Weights are those that a kernel reads and writes in another form.',
    '',
    *lines_of(_WRITTEN, rows),
    *_memory(rows),
    '## Recompilation and fallbacks',
    '',
    *_STATE,
    *lines_of(_FALLBACKS_ON_GPU, rows),
  ]


def _memory(rows: Sequence[Results]) -> list[str]:
  return [
    '## Memory of the pair, GiB',
    '',
    "The peak is the compiler's, of the larger of the two speculative programs,"
    ' both models held.',
    '',
    *lines_of(_MEMORY, rows),
  ]


def _tpu_parts(settings: Results, rows: Sequence[Results]) -> list[str]:
  return [
    '## What the bytes predict',
    '',
    'c and v are ratios of bytes moved, counted from the shapes of parameters'
    ' and live caches; c is that of a whole round of proposals. The predicted'
    ' factor is E(gamma, alpha) / (v(gamma + 1) + gamma c), with the alpha of'
    " the paper's Table 2 and i.i.d. acceptance: what a memory-bound loop"
    " without other costs would reach. The paper's speed-up is against T5X's"
    ' decoding, another baseline than the plain loop here.',
    '',
    *lines_of(_SPEED, rows),
    *_memory(rows),
    '## Bytes of a call, GB',
    '',
    "XLA's figure for the same call is a check, not what the call moves: it"
    ' counts what is prefetched on the chip again.',
    '',
    *lines_of(_BYTES, rows),
    '## Recompilation and fallbacks',
    '',
    *_STATE,
    'A scatter or gather that became a loop over rows runs ten small'
    ' operations a row; a cache is relaid for the layout that the compiler'
    ' prefers inside of the loop.',
    '',
    *lines_of(_FALLBACKS, rows),
    f'Custom calls in the programs: {_custom_calls(rows)}.',
  ]


_STATE = [
  'A run needs the programs counted here, `start` and `run` of each loop. The'
  ' state leaves `run` in the shape in which it came, so a further call'
  ' compiles nothing; sampling, seed and lengths are arguments.',
  '',
]


def _custom_calls(rows: Sequence[Results]) -> str:
  names = {
    name
    for row in rows
    for program in row['programs'].values()
    for name in program.get('custom_calls', {})
  }
  return ', '.join(f'`{name}`' for name in sorted(names)) or 'none'


def _refusals(rows: Sequence[Results]) -> list[str]:
  texts = {text for row in rows for text in row['memory']['refused']}
  lines = [f'Refused by the compiler: {text}' for text in sorted(texts)]
  for row in rows:
    sizes = row['memory']
    if not sizes['fits'] and sizes['peak_bytes'] is not None:
      lines.append(
        f'{row["task"]} with {row["draft"]} does not fit: it needs'
        f' {sizes["peak_bytes"]:,} bytes, and {sizes["usable_bytes"]:,} can be'
        ' used.'
      )
  return list(dict.fromkeys(lines))


def show(console: rich.console.Console, results: Results) -> None:
  """Prints the main table, and the errors for what does not fit."""
  rows = results['rows']
  for part in tables(results):
    console.print(part)
  for text in _refusals(rows):
    say(console, text)


def tables(results: Results) -> list[Table]:
  """Tables of a check of pairs: one for a TPU, two for a GPU."""
  memory = {name: _MEMORY[name] for name in ('peak GiB', 'fits')}
  name, rows = results['settings']['name'], results['rows']
  if results['kind'] == 'gpu_check':
    return [table(_TIMES | memory, rows, name), table(_KERNELS, rows)]
  columns = {**_PAIR, 'alpha': _SPEED['alpha'], 'c': _SPEED['c']}
  columns |= {
    'predicted': _SPEED['predicted factor'],
    'paper': _SPEED["paper's speed-up"],
  }
  return [table(columns | memory, rows, name)]
