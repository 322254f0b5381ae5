"""A benchmark's record as tables in the terminal."""

from collections.abc import Callable
from typing import Any

import rich.console
import rich.progress
import rich.table

from specdec_jax.bench.run import BenchmarkConfig, benchmark, num_steps


def show(
  config: BenchmarkConfig, console: rich.console.Console | None = None
) -> dict[str, Any]:
  """Runs a benchmark behind a progress bar, prints its tables; its record."""
  console = console or rich.console.Console()
  record = with_progress(
    console,
    'Measuring',
    num_steps(config),
    lambda advance: benchmark(config, advance),
  )
  for setting in record['settings']:
    _print_setting(console, record, setting)
  return record


def with_progress(
  console: rich.console.Console,
  label: str,
  total: int,
  work: Callable[[Callable[..., None]], Any],
) -> Any:
  """Returns work(advance), behind a bar where the console is a terminal."""
  progress = rich.progress.Progress(
    console=console, transient=True, disable=not console.is_terminal
  )
  with progress:
    task = progress.add_task(label, total=total)
    return work(lambda count=1: progress.advance(task, count))


def forced_note(record: dict[str, Any]) -> str:
  """What every table and plot of forced acceptance has to say; else ''."""
  rate = record['forced_acceptance']
  if rate is None:
    return ''
  return f' (acceptance forced to {rate}, {record["weights"]} weights)'


def _print_setting(console, record, setting) -> None:
  title = (
    f'{record["name"]}: batch {setting["batch"]}, input'
    f' {setting["input_len"]}, output {setting["decode_len"]}, temperature'
    f' {setting["temperature"]}{forced_note(record)}'
  )
  table = rich.table.Table(title=title)
  table.add_column('what')
  for column in ('median ms', 'min', 'max', 'against one token'):
    table.add_column(column, justify='right')
  for name, times in setting['times_ms'].items():
    ratio = setting['call_cost'].get(name.removeprefix('call_'))
    table.add_row(
      name,
      *(f'{times[key]:.3f}' for key in ('median', 'min', 'max')),
      '' if ratio is None else f'{ratio:.2f}',
    )
  console.print(table)
  console.print(
    f'plain loop {setting["plain_gb_per_s"]:.1f} GB/s of'
    f' {setting["matvec_gb_per_s"]:.1f} GB/s'
    f' ({100 * setting["bandwidth_fraction"]:.0f} %)'
  )
  for row in setting['gammas']:
    console.print(
      f'gamma {row["gamma"]}: {row["speculative_ms"]:.1f} ms measured,'
      f' {row["predicted_ms"]:.1f} ms predicted from {row["rounds"]} rounds'
      f' ({100 * (row["measured_over_predicted"] - 1):+.0f} %);'
      f' acceptance {row["acceptance_rate"]:.3f}{forced_note(record)},'
      f' c {row["cost_ratio"]:.3f}, speed-up {row["speed_up"]:.2f},'
      f' expected {row["expected_speed_up"]:.2f}'
    )
