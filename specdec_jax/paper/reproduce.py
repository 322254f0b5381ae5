"""Makes the paper's tables and figures, for `specdec reproduce`."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax import files
from specdec_jax.checks.fields import check_choice, check_types, unexpected
from specdec_jax.checks.memory import DoesNotFitError
from specdec_jax.engine.engine import Engine
from specdec_jax.measure.acceptance import MeasureAlphaConfig, measure_alpha
from specdec_jax.measure.calls import COSTS_NOTE, BenchmarkConfig, benchmark
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.paper import plots, printed, tables
from specdec_jax.partitioning import place
from specdec_jax.report import Column, Record, Table, record
from specdec_jax.report.console import console as terminal
from specdec_jax.report.plot import load_matplotlib
from specdec_jax.report.table import plain_markdown

ITEMS = tuple(f'{kind}{i}' for kind in ('table', 'figure') for i in range(1, 6))
_NEEDS = {
  'table2': ('suite', 'drafts'),
  'table4': ('suite', 'drafts'),
  'figure1': ('engine', 'text'),
  'figure5': ('engine', 'text', 'costs'),
}
_PICTURES = {'figure2', 'figure3', 'figure4', 'figure5'}
# These figures show a generation, which is decoded each time.
_NO_RECORDS = {'figure1', 'figure5'}


@dataclasses.dataclass(frozen=True)
class ReproduceConfig:
  """The paper's tables and figures to make, and the measurements they need.

  Attributes:
    items: names of tables and figures, table1 to table5 and figure1 to figure5,
      in the order of the report.
    output_dir: folder that gets report.md, pictures and HTML pages.
    records_dir: folder with the records of measurements, a file for each row of
      Table 2 and for each of `alphas` that names no file of its own; None: the
      folder `records` in output_dir.
    measure: whether to measure values that have no record yet; if False, the
      tables show only the records that exist.
    suite: the benchmark of Tables 2 and 4 and of the points of Figure 4, with a
      network in place of T5-XXL, one input length, one output length, and a
      name of the pair of models. Each row has the paper's gamma and
      temperature, and proposals are accepted at random at the paper's rate.
    drafts: 't5_small', 't5_base' and 't5_large' -> network used in its place;
      rows of other drafters are left out.
    alphas: functions that return configurations of measurements of acceptance
      rates, with different names, for Tables 3 and 5; they are called only if
      `measure` is True. Without them these tables show all records in
      records_dir.
    engine: function that returns the engine whose generation Figures 1 and 5
      show.
    costs: benchmark of the same pair, for Figure 5, which shows a generation
      with each of its gammas and below these a plain one.
    text: the text that is decoded in Figures 1 and 5.

  Raises:
    ValueError: an item is unknown, or a field that an item needs is missing; or
      `measure` is False and an item is one that is never read from a record.
  """

  items: Sequence[str]
  output_dir: str
  records_dir: str | None = None
  measure: bool = True
  suite: BenchmarkConfig | None = None
  drafts: Mapping[str, T5] = dataclasses.field(default_factory=dict)
  alphas: Sequence[Callable[[], MeasureAlphaConfig]] = ()
  engine: Callable[[], Engine] | None = None
  costs: BenchmarkConfig | None = None
  text: str = ''

  def __post_init__(self):
    check_types(self)
    for item in self.items:
      check_choice('items', item, ITEMS)
      for field in _NEEDS.get(item, ()):
        if not (value := getattr(self, field)):
          raise unexpected(field, f'one for {item}', value)
      if item in _NO_RECORDS and not self.measure:
        expected = f'True for {item}, which keeps no record'
        raise unexpected('measure', expected, self.measure)
    for name in self.drafts:
      drafts = {row.draft for row in printed.TABLE2}
      check_choice('drafts', name, drafts)

  @property
  def records(self) -> str:
    """The folder of the records."""
    return self.records_dir or os.path.join(self.output_dir, 'records')

  @property
  def rows(self) -> list[printed.Table2Row]:
    """Table 2's rows whose drafter is in `drafts`."""
    return [row for row in printed.TABLE2 if row.draft in self.drafts]


def reproduce(
  config: ReproduceConfig, console: rich.console.Console | None = None
) -> list[pathlib.Path]:
  """Makes the tables and figures, prints the tables, and writes a report.

  Returns:
    The files that were written; report.md is the last.

  Raises:
    ValueError: a picture is to be drawn and matplotlib is missing; this is
      raised before anything is measured.
  """
  console = console or terminal()
  measures = config.measure and (config.alphas or config.suite)
  paths = list(pathlib.Path(config.records).glob('*.json'))
  if config.records_dir is not None and not measures and not paths:
    field = 'records_dir (--records-dir)'
    expected = 'a folder with records of measurements (NAME.json)'
    raise unexpected(field, expected, config.records)
  if _PICTURES & set(config.items):
    # If matplotlib is missing, this raises an error now, and not after hours of
    # measuring.
    load_matplotlib()
  files.make_folder(config.output_dir)
  work = _Work(config, console)
  for item in config.items:
    getattr(work, item)()
  parts = ['# The paper, what is predicted, what was measured']
  for compared in work.tables:
    console.print(compared.table())
    parts.append(compared.markdown())
  for name, meaning in work.figures.items():
    # The report shows pictures, and has links to pages.
    mark = '' if name.endswith('.html') else '!'
    parts.append(f'{mark}[{meaning}]({name})')
  machines = dict.fromkeys(map(record.where, work.used))
  parts += [f'Measured on {plain_markdown(machine)}.' for machine in machines]
  report = pathlib.Path(config.output_dir) / 'report.md'
  files.write_atomically(report, ('\n\n'.join(parts) + '\n').encode())
  return [*(report.with_name(name) for name in work.figures), report]


class _Work:
  """Collects the tables and figures of a report.

  The method with the name of an item adds the item's tables or figures. A
  measurement that several items need is made only once.
  """

  def __init__(self, config: ReproduceConfig, console: rich.console.Console):
    self.config = config
    self.console = console
    self.tables: list[tables.Comparison] = []
    self.figures: dict[str, str] = {}
    self.used: list[Record] = []
    self._to_measure: list[MeasureAlphaConfig] = []
    for make in config.alphas if config.measure else ():
      alpha = make()
      path = os.path.join(config.records, f'{alpha.name}.json')
      alpha = dataclasses.replace(alpha, output_file=alpha.output_file or path)
      self._to_measure.append(alpha)
    paths = [alpha.output_file for alpha in self._to_measure]
    if len(set(paths)) < len(paths):
      raise unexpected('alphas', 'different names', paths)

  @functools.cached_property
  def _alphas(self) -> list[Any]:
    """The rows of all records of acceptance rates."""
    records = [measure_alpha(alpha, self.console) for alpha in self._to_measure]
    if not records:
      paths = sorted(pathlib.Path(self.config.records).glob('*.json'))
      records = [r for r in map(record.load, paths) if r['kind'] == 'alpha']
    self.used += records
    return [row for measured in records for row in measured['rows']]

  @functools.cached_property
  def _suite(self) -> tuple[dict[str, Record], list[printed.Table2Row], str]:
    """Records of Table 2's rows, these rows, and why some have no record."""
    missing = 'there is no record of them'
    try:
      records = suite_records(self.config, self.console)
    except DoesNotFitError as error:
      missing = str(error).rstrip('.')
      stored = dataclasses.replace(self.config, measure=False)
      records = suite_records(stored, self.console)
    self.used += records.values()
    return records, self.config.rows, missing

  @functools.cached_property
  def _engine(self) -> Engine:
    # `__post_init__` has checked that the field is set.
    assert self.config.engine is not None
    return self.config.engine()

  def _figure(self, name: str, meaning: str) -> pathlib.Path:
    self.figures[name] = meaning
    return pathlib.Path(self.config.output_dir) / name

  def table1(self):
    self.tables += tables.table1()

  def table2(self):
    self.tables.append(tables.tables_2_and_4(*self._suite)[0])

  def table3(self):
    self.tables.append(tables.table3(self._alphas))

  def table4(self):
    self.tables.append(tables.tables_2_and_4(*self._suite)[1])

  def table5(self):
    self.tables.append(tables.table5(self._alphas))

  def figure1(self):
    figure = self._engine.trace(self.config.text)
    self.console.print(figure)
    path = self._figure('figure1.html', 'Figure 1: one generation, as a page')
    files.write_atomically(path, figure.page().encode())
    path = self._figure('figure1.svg', 'Figure 1: one generation')
    files.write_atomically(path, figure.svg().encode())

  def figure2(self):
    path = self._figure('figure2.png', 'Figure 2: expected tokens per round')
    plots.plot_figure2(path)

  def figure3(self):
    plots.plot_figure3(self._figure('figure3.png', 'Figure 3: optimal gamma'))

  def figure4(self):
    records = list(self._suite[0].values()) if self.config.suite else []
    path = self._figure('figure4.png', 'Figure 4: speed and operations')
    plots.plot_figure4(path, records)

  def figure5(self):
    # The benchmark's table is not shown, because it was measured on random ids,
    # while the figure shows the generation of a text.
    quiet = rich.console.Console(quiet=True)
    # `__post_init__` has checked that the field is set.
    assert self.config.costs is not None
    costs = benchmark(self.config.costs, quiet)
    runs = {}
    for gamma in (row['gamma'] for row in costs['gammas']):
      trace = self._engine.trace(self.config.text, gamma=gamma)
      runs[gamma] = [len(x.kept) for x in trace.rounds]
    runs[0] = [1] * sum(runs[gamma])
    path = self._figure('figure5.png', 'Figure 5: calls over time')
    plots.plot_figure5(path, runs, costs)
    self.console.print(figure5_table(runs, costs))


def figure5_table(runs: Mapping[int, Sequence[int]], costs: Record) -> Table:
  """Returns a table with the numbers of Figure 5.

  Args:
    runs: gamma -> number of new tokens of each round; gamma 0 is plain.
    costs: the record of a benchmark of the pair.
  """
  ends = {g: plots.calls(g, runs[g], costs)[-1].end_ms for g in runs}
  ratios = {row['gamma']: row['cost_ratio'] for row in costs['gammas']}
  notes = [COSTS_NOTE, 'ms and speed-up: of what is drawn, for this text.']
  if wrong := costs.get('contradiction'):
    notes.insert(0, f'These times contradict themselves: {wrong}.')
  rows = []
  for gamma, counts in runs.items():
    cost, ms = costs['call_cost'][str(gamma + 1)], ends[gamma]
    speed_up = None if wrong else ends[0] / ms
    numbers = cost, ratios.get(gamma), sum(counts), len(counts), ms, speed_up
    rows.append([gamma or 'plain', *numbers])
  columns: list[Column | str] = ['gamma', Column('v(gamma + 1)', '.2f')]
  columns += [Column('c', '.3f'), 'tokens', 'calls of the target']
  columns += [Column('ms', '.1f'), Column('speed-up', '.2f')]
  return Table('Figure 5: calls over time', columns, rows, notes)


def suite_records(
  config: ReproduceConfig, console: rich.console.Console
) -> dict[str, Record]:
  """Returns the benchmark records of Table 2's rows.

  If `config.measure`, each row that has no record is measured. The target's
  parameters are made only once for all rows.

  Args:
    config: the benchmark and the folder of its records.
    console: shows a table for each row that is measured.

  Returns:
    A dict of `tables.row_name` -> record, for all rows that have a record.

  Raises:
    DoesNotFitError: memory is too small; raised before any array is made.
    ValueError: the folder has a record with other settings.
  """
  suite = config.suite
  assert suite is not None  # `__post_init__` has checked that it is set
  benchmarks, records = {}, {}
  for row in config.rows:
    name = tables.row_name(row)
    benchmarks[name] = row_suite = dataclasses.replace(
      suite,
      drafter=config.drafts[row.draft],
      gammas=(row.gamma,),
      temperature=float(row.temperature),
      forced_acceptance=row.acceptance_rate,
      call_sizes=(1,),
      output_file=os.path.join(config.records, f'{name}.json'),
      name=f'{suite.name}, {name}',
    )
    path, settings = row_suite.output_file, row_suite.settings
    records[name] = record.earlier(path, 'benchmark', settings)
  missing = [name for name, stored in records.items() if stored is None]
  if config.measure and missing:
    for name in missing:
      benchmarks[name].check_memory()
    (target, _), placement = suite.models, suite.placement
    params = place(target.read(placement.param_dtype), placement)
    target = Model(target.network, params)
    for name in missing:
      measured = dataclasses.replace(benchmarks[name], target=target)
      records[name] = benchmark(measured, console)
  return {name: stored for name, stored in records.items() if stored}
