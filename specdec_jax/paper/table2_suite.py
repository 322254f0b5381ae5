"""All rows of the paper's Table 2 with forced acceptance, on one device.

Each row is a benchmark with its own file, so that a suite that was stopped can
be resumed. The target's parameters are drawn once for all rows.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import check_types
from specdec_jax.measure.benchmark import (
  BenchmarkConfig,
  benchmark,
  check_memory,
  described,
  grid,
)
from specdec_jax.measure.measured_pair import random_params
from specdec_jax.measure.record import Record, earlier
from specdec_jax.models.t5 import T5
from specdec_jax.paper import printed
from specdec_jax.partitioning import Placement, place


@dataclasses.dataclass(frozen=True)
class SuiteConfig:
  """A suite: Table 2's gammas, temperatures and rates for these models.

  Attributes:
    name: name of the pair's sizes, for reports.
    target: network used in place of T5-XXL.
    drafts: 't5_small', 't5_base' and 't5_large' -> network used in its place;
      rows of a drafter that is not named are left out.
    output_dir: folder that gets a JSON file per row; must be set for `run`.
    placement: layout and dtype of all models.
    input_len: E.
    decode_len: tokens per run.
    repeats: timed rounds, interleaved.
    calls_a_run: calls in one timed loop.
    seed: seed of parameters, inputs and acceptance.

  Raises:
    ValueError: a drafter has no row in Table 2.
  """

  name: str
  target: T5
  drafts: Mapping[str, T5]
  output_dir: str | None = None
  placement: Placement = Placement()
  input_len: int = 64
  decode_len: int = 120
  repeats: int = 7
  calls_a_run: int = 20
  seed: int = 0

  def __post_init__(self):
    check_types(self)
    known = {row.draft for row in printed.TABLE2}
    if unknown := set(self.drafts) - known:
      raise ValueError(
        f'SuiteConfig.drafts names {sorted(unknown)}, Table 2 has'
        f' {sorted(known)}.'
      )


def records_of(output_dir: str) -> str:
  """The folder of a report's records, for `SuiteConfig.output_dir`."""
  return os.path.join(output_dir, 'records')


def row_name(row: printed.Table2Row | printed.Table4Row) -> str:
  """The name of a row, such as 'ende-t5_small-T0'."""
  return f'{row.task}-{row.draft}-T{row.temperature}'


def rows(config: SuiteConfig) -> list[printed.Table2Row]:
  """Table 2's rows whose drafter is in `config.drafts`."""
  return [row for row in printed.TABLE2 if row.draft in config.drafts]


def row_path(output_dir: str | None, row: printed.Table2Row) -> pathlib.Path:
  """Where a row's record lies."""
  return pathlib.Path(output_dir or '.') / f'{row_name(row)}.json'


def run(
  config: SuiteConfig, say: Callable[[str], None] = print
) -> dict[str, Record]:
  """Measures every row that has no record yet.

  Args:
    config: the suite.
    say: gets a line for each row.

  Returns:
    row_name -> its record, including records that were found.

  Raises:
    DoesNotFitError: memory is too small; raised before anything is made.
    ValueError: no folder is given, or it has a record with other settings.
  """
  folder = config.output_dir
  if folder is None:
    raise ValueError('SuiteConfig.output_dir must name a folder, got None.')
  found = read(config)
  todo = [row for row in rows(config) if row_name(row) not in found]
  for row in todo:
    check_memory(_benchmark(config, row, None))
  params = None
  if todo:
    files.make_folder(folder)
    params = place(
      random_params(config.target, config.seed, config.placement.param_dtype),
      config.placement,
    )
  for row in todo:
    record = benchmark(_benchmark(config, row, params))
    (setting,) = record['settings']
    (measured,) = setting['gammas']
    say(
      f'{row_name(row)}: gamma {row.gamma}, acceptance forced to'
      f' {row.acceptance_rate}: speed-up {measured["speed_up"]:.2f}, expected'
      f' {measured["expected_speed_up"]:.2f}, paper {row.speedup}'
    )
  return read(config)


def read(config: SuiteConfig) -> dict[str, Record]:
  """Returns the records that the suite has written so far.

  Raises:
    ValueError: a record has other settings.
  """
  found = {row_name(row): _record(config, row) for row in rows(config)}
  return {name: one for name, one in found.items() if one is not None}


def _record(config: SuiteConfig, row: printed.Table2Row) -> Record | None:
  """A row's record, if there is one."""
  benchmarked = _benchmark(config, row, None)
  (point,) = grid(benchmarked)
  wanted = {**described(benchmarked), **point._asdict(), 'gamma': row.gamma}

  def settings(record: Record) -> dict[str, Any]:
    (setting,) = record['settings']
    (measured,) = setting['gammas']
    # Settings that older records lack are taken to be the wanted ones.
    return {**wanted, **record, **setting, 'gamma': measured['gamma']}

  return earlier(
    row_path(config.output_dir, row),
    'benchmark',
    wanted,
    settings,
    'Remove it, or choose another folder.',
  )


def _benchmark(config, row: printed.Table2Row, params) -> BenchmarkConfig:
  return BenchmarkConfig(
    config.target,
    config.drafts[row.draft],
    target_params=params,
    weights='random',
    t5x_style=True,
    placement=config.placement,
    gammas=(row.gamma,),
    input_lens=(config.input_len,),
    decode_lens=(config.decode_len,),
    temperatures=(float(row.temperature),),
    forced_acceptance=row.acceptance_rate,
    call_sizes=(1,),
    calls_a_run=config.calls_a_run,
    repeats=config.repeats,
    seed=config.seed,
    output_file=str(row_path(config.output_dir, row)),
    name=f'{config.name}, {row_name(row)}',
  )
