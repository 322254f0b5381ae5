"""The report of `beam_check`: what a call of each search costs."""

from collections.abc import Mapping

from specdec_jax.measure.beam_grid import Setting
from specdec_jax.measure.compiled.report import Results, heading, missing
from specdec_jax.measure.table import Column, Table


def table(results: Results, levels: Mapping[Setting, float]) -> Table:
  """What a call of each search costs, and what speculation would give.

  Args:
    results: the contents of results.json.
    levels: levels a call of each setting, as far as they were measured.
  """
  rows = results['rows']
  plain = [
    row['cost']['ms'] for row in rows if row['width'] and not row['gamma']
  ]
  cells = []
  for row in rows:
    cost, gamma = row['cost'], row['gamma']
    held = levels.get(Setting.of(row))
    factor = held * plain[0] / cost['ms'] if held and plain else None
    cells.append(
      [
        row['width'] or None,
        gamma or None,
        row['draft_beams'] or None,
        cost['kernels'] + cost['branch_kernels'],
        cost['conditionals'],
        cost['read_bytes'] / 1e9,
        (cost['written_bytes'] + cost['updated_bytes']) / 1e6,
        cost['bytes_ms'],
        cost['ms'],
        held,
        factor,
      ]
    )
  columns = (
    Column('beams', missing='greedy'),
    Column('gamma', missing='plain'),
    "drafter's beams",
    'kernels',
    'conditionals',
    Column('read', '.3f', 'GB'),
    Column('written', '.1f', 'MB'),
    Column('by bytes', '.2f', 'ms'),
    Column('call', '.2f', 'ms'),
    Column('levels a call', '.2f'),
    Column('predicted factor', '.2f'),
  )
  return Table(results['settings']['name'], columns, cells)


def markdown(results: Results, levels: Mapping[Setting, float]) -> str:
  """The report of `beam_check`; see `table`."""
  settings = results['settings']
  lines = [
    *heading(settings, 'For one'),
    f'- Batch 1, {settings["param_dtype"]} parameters; {settings["input_len"]}'
    f' input tokens, up to {settings["decode_len"]} output tokens.',
    f'- Levels a call: measured with another pair, {settings["levels_file"]}.',
    *missing(results['missing']),
    '',
    'A call is one of the target with all that a round does beside it: bytes'
    f' at {settings["gb_per_s"]:,.0f} GB/s, {settings["kernel_us"]:g}'
    f' microseconds a kernel and {settings["conditional_us"]:g} a conditional,'
    ' which are estimates. The factor is over the plain beam search.',
    '',
    table(results, levels).markdown(),
  ]
  return '\n'.join(lines) + '\n'
