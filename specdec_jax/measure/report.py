"""Shows a benchmark's record as tables in the terminal."""

from collections.abc import Mapping
from typing import Any

import rich.console

from specdec_jax.measure.benchmark import BenchmarkConfig, benchmark, num_steps
from specdec_jax.measure.progress import bar
from specdec_jax.measure.table import Column, Table
from specdec_jax.measure.table import console as terminal


def show(
  config: BenchmarkConfig, console: rich.console.Console | None = None
) -> Mapping[str, Any]:
  """Runs a benchmark with a progress bar, prints tables; returns its record."""
  console = console or terminal()
  with bar(console, 'Measuring', num_steps(config)) as advance:
    record = benchmark(config, advance, advance.say)
  for setting in record['settings']:
    console.print(times(record, setting))
    console.print(summary(record, setting))
  return record


def forced_note(record: Mapping[str, Any]) -> str:
  """The remark on forced acceptance in a title; '' if acceptance was real."""
  rate = record['forced_acceptance']
  if rate is None:
    return ''
  return f', acceptance forced to {rate}'


def title(record: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
  """The title of one setting's tables."""
  name, weights = record['name'], f'{record["weights"]} weights'
  if weights not in name:
    name = f'{name}: {weights}'
  return (
    f'{name}{forced_note(record)}; batch {setting["batch"]}, input'
    f' {setting["input_len"]}, output {setting["decode_len"]} tokens,'
    f' temperature {setting["temperature"]:g}'
  )


def times(record: Mapping[str, Any], setting: Mapping[str, Any]) -> Table:
  """All times of one setting."""
  columns: list[Column | str] = [
    'what',
    *(Column(name, '.3f') for name in ('median ms', 'min', 'max')),
    Column('against one token', '.2f'),
  ]
  rows = [
    [
      name,
      *(found[key] for key in ('median', 'min', 'max')),
      setting['call_cost'].get(name.removeprefix('call_')),
    ]
    for name, found in setting['times_ms'].items()
  ]
  note = (
    f'plain loop {setting["plain_gb_per_s"]:.1f} GB/s of'
    f' {setting["matvec_gb_per_s"]:.1f} GB/s'
  )
  return Table(title(record, setting), columns, rows, [note])


def summary(record: Mapping[str, Any], setting: Mapping[str, Any]) -> Table:
  """The costs in one setting, and the speed-up for each gamma."""
  plain = setting['times_ms']['plain_loop']['median']
  rows = [
    ['plain loop, ms per token', f'{plain:.2f}'],
    [
      "of a matrix-vector product's bandwidth",
      f'{setting["bandwidth_fraction"]:.0%}',
    ],
    ['compile, plain loop, s', f'{setting["compile_seconds"]["plain"]:.1f}'],
  ]
  rows += [
    [
      f'{name.replace("_", " ")}, a level',
      f'{found["median"] / plain:.2f} tokens',
    ]
    for name, found in setting['times_ms'].items()
    if name.startswith('beams_')
  ]
  rows += [
    [f'v({size})', f'{cost:.2f}']
    for size, cost in setting['call_cost'].items()
    if size != '1'
  ]
  for row in setting['gammas']:
    name = f'gamma {row["gamma"]}: '
    excess = row['measured_over_predicted'] - 1
    rows += [
      [f'{name}c inside a round', f'{row["cost_ratio"]:.3f}'],
      [f'{name}acceptance of the run', f'{row["acceptance_rate"]:.3f}'],
      [f'{name}loop over its rounds, as measured apart', f'{excess:+.1%}'],
      [f'{name}expected speed-up', f'{row["expected_speed_up"]:.2f}'],
      [f'{name}speed-up', f'{row["speed_up"]:.2f}'],
    ]
  return Table(title(record, setting), ['', 'measured'], rows)
