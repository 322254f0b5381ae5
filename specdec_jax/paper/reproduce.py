"""The run of scripts/reproduce.py: measures tables and figures, writes them."""

import dataclasses
import functools
import glob
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax import files
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.memory import DoesNotFitError
from specdec_jax.engine import trace
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.trace_page import html_page
from specdec_jax.measure import canvas, environment, record
from specdec_jax.measure import methods as compared_methods
from specdec_jax.measure.alpha import MeasureAlphaConfig, measure_alpha
from specdec_jax.measure.benchmark import BenchmarkConfig, benchmark, grid
from specdec_jax.measure.table import console as terminal
from specdec_jax.paper import (
  plots,
  printed,
  report,
  tables,
  timeline,
  trace_picture,
)
from specdec_jax.paper import table2_suite as table_suite

ITEMS = tuple(
  [f'table{i}' for i in range(1, 6)]
  + [f'figure{i}' for i in range(1, 6)]
  + ['methods']
)
_NEEDS = {
  'table2': ('suite',),
  'table4': ('suite',),
  'figure1': ('engine',),
  'figure5': ('engine', 'costs'),
}
_PICTURES = {'table2', 'figure2', 'figure3', 'figure4', 'figure5', 'methods'}
# They show one generation, which is decoded again each time.
_NO_RECORDS = {'figure1', 'figure5'}


@dataclasses.dataclass(frozen=True)
class ReproduceConfig:
  """Which tables and figures of the paper to compare, and with what.

  Attributes:
    items: tables and figures, from `ITEMS`, in the order of the report;
      'methods' is not of the paper: ways to speculate beside each other, one
      table of all records of `methods.compare_methods` in `records_dir`.
    output_dir: folder that gets report.md, a CSV for each table, pictures and
      pages.
    records_dir: folder of the records of measurements: a file for each row of
      the suite, and for each of `alphas` that names no file of its own; None is
      `records` in output_dir.
    measure: whether to measure what has no record; if False, the tables show
      only the records that exist.
    suite: what Tables 2 and 4 and the points of Figure 4 are measured with.
    alphas: functions that return the measurements of acceptance rates for
      Tables 3 and 5, each with another name; called only if `measure` is True.
      Without them these tables show all records in `records_dir`.
    engine: returns the engine whose generation Figures 1 and 5 show.
    costs: measurement of the call costs of the same pair, for Figure 5; its
      gammas are the rows above the plain one.
    text: the text that is decoded in Figures 1 and 5.

  Raises:
    ValueError: an item is unknown, or a field that it needs is missing; or
      `measure` is False and an item keeps no record.
  """

  items: Sequence[str]
  output_dir: str
  records_dir: str | None = None
  measure: bool = True
  suite: table_suite.SuiteConfig | None = None
  alphas: Sequence[Callable[[], MeasureAlphaConfig]] = ()
  engine: Callable[[], Engine] | None = None
  costs: BenchmarkConfig | None = None
  text: str = ''

  def __post_init__(self):
    check_types(self)
    for item in self.items:
      if item not in ITEMS:
        raise ValueError(
          f'ReproduceConfig.items: expected some of {ITEMS}, got {item!r}.'
        )
      for field in _NEEDS.get(item, ()):
        if getattr(self, field) is None:
          raise ValueError(f'{item} needs ReproduceConfig.{field}.')
    if self.records_dir is None:
      folder = table_suite.records_of(self.output_dir)
      object.__setattr__(self, 'records_dir', folder)
    if self.suite is not None and self.suite.output_dir is None:
      suite = dataclasses.replace(self.suite, output_dir=self.records_dir)
      object.__setattr__(self, 'suite', suite)
    if _NO_RECORDS & set(self.items):
      if not self.text.strip():
        raise ValueError('Figures 1 and 5 need ReproduceConfig.text to decode.')
      if not self.measure:
        raise ValueError(
          'ReproduceConfig.measure: Figures 1 and 5 keep no record that could'
          ' be shown; expected True, got False.'
        )
    if 'figure5' in self.items and self.costs is not None:
      settings = len(list(grid(self.costs)))
      alone = self.costs.draft is None and self.costs.drafter is None
      if settings != 1 or alone:
        raise ValueError(
          'Figure 5 needs ReproduceConfig.costs of one setting, with a draft or'
          f' a drafter; got {settings} settings, draft = {self.costs.draft},'
          f' drafter = {self.costs.drafter}.'
        )


def reproduce(
  config: ReproduceConfig, console: rich.console.Console | None = None
) -> list[pathlib.Path]:
  """Measures, compares, draws, and writes the report.

  Returns:
    The files that were written; report.md is the last.

  Raises:
    ValueError: a picture is to be drawn and matplotlib is missing; this is
      raised before anything is measured.
  """
  console = console or terminal()
  _check_records(config)
  if _PICTURES & set(config.items):
    canvas.load_matplotlib()  # fails now, not after hours of measuring
  files.make_folder(config.output_dir)
  work = _Work(config, console)
  for item in config.items:
    getattr(work, item)()
  for compared in work.tables:
    console.print(compared.table())
  written = report.write(
    config.output_dir,
    work.tables,
    title='The paper, what is predicted, what was measured',
    machine=work.machine(),
    figures=work.figures,
  )
  return [*(_path(config, name) for name in work.figures), *written]


def _check_records(config: ReproduceConfig) -> None:
  """Raises ValueError if records are to be shown and the folder has none."""
  folder = config.records_dir or ''
  named = folder != table_suite.records_of(config.output_dir)
  measures = config.measure and (config.alphas or config.suite)
  if named and not measures and not glob.glob(f'{glob.escape(folder)}/*.json'):
    raise ValueError(
      f'ReproduceConfig.records_dir (gin: RECORDS_DIR) is {folder!r}, expected'
      ' a folder with records of measurements (NAME.json).'
    )


def _path(config: ReproduceConfig, name: str) -> pathlib.Path:
  return pathlib.Path(config.output_dir) / name


class _Work:
  """Collects tables and figures; measures only once what several items need."""

  def __init__(self, config: ReproduceConfig, console: rich.console.Console):
    self.config = config
    self.console = console
    assert config.records_dir is not None  # set by the config
    self._records_dir = config.records_dir
    self._to_measure = self._placed() if config.measure else []
    self.tables: list[report.Comparison] = []
    self.figures: dict[str, str] = {}
    self._suite: tuple[dict[str, Any], str] | None = None
    self._engine: Engine | None = None

  def _placed(self) -> list[MeasureAlphaConfig]:
    """The measurements of acceptance rates, each with a file for its record."""
    found = []
    for make in self.config.alphas:
      one = make()
      path = os.path.join(self._records_dir, f'{one.name}.json')
      found.append(
        dataclasses.replace(one, output_file=one.output_file or path)
      )
    paths = [one.output_file for one in found]
    if len(set(paths)) < len(paths):
      raise ValueError(
        'ReproduceConfig.alphas must have different records: give them'
        f' different names, got {paths}.'
      )
    return found

  @functools.cached_property
  def _alphas(self) -> list[Mapping[str, Any]]:
    if self._to_measure:
      return [measure_alpha(one, self.console) for one in self._to_measure]
    return list(self._kept('alpha').values())

  @functools.cached_property
  def _methods(self) -> dict[str, record.Record]:
    return self._kept(compared_methods.KIND)

  def _kept(self, kind: str) -> dict[str, record.Record]:
    """All records of a kind, by file: each says what it was measured for."""
    paths = sorted(pathlib.Path(self._records_dir).glob('*.json'))
    found = {path.stem: record.load(path) for path in paths}
    return {name: one for name, one in found.items() if one.kind == kind}

  def table1(self):
    self.tables += tables.table1()

  def table2(self):
    records, missing = self._records()
    table = tables.table2(records, self._rows(), missing)
    self.tables.append(table)
    path = self._figure('table2.png', table.full_title)
    plots.plot_comparison(path, table)

  def table3(self):
    self.tables.append(tables.table3(self._alphas))

  def table4(self):
    records, missing = self._records()
    self.tables.append(tables.table4(records, self._rows(), missing))

  def table5(self):
    self.tables.append(tables.table5(self._alphas))

  def figure1(self):
    engine = self._loaded()
    rounds = trace.spell(
      trace.record(engine, self.config.text), engine.tokenizer
    )
    trace.print_trace(self.console, rounds)
    page = html_page(rounds, source=self.config.text)
    path = self._figure('figure1.html', 'Figure 1: one generation, as a page')
    files.write_atomically(path, page.encode())
    path = self._figure('figure1.png', 'Figure 1: one generation')
    trace_picture.plot_trace(path, rounds, self.config.text)

  def figure2(self):
    path = self._figure('figure2.png', 'Figure 2: expected tokens per round')
    plots.plot_expected_tokens(path)

  def figure3(self):
    path = self._figure('figure3.png', 'Figure 3: optimal gamma')
    plots.plot_optimal_gamma(path)

  def figure4(self):
    points = []
    if self.config.suite is not None:
      points = [
        plots.Point(
          row['acceptance_rate'],
          row['speed_up'],
          label=rf'$\gamma$ = {row["gamma"]}, c = {row["cost_ratio"]:.2f}',
          parameter=row['gamma'],
          forced_acceptance=found['forced_acceptance'],
        )
        for found in self._records()[0].values()
        for row in found['settings'][0]['gammas']
      ]
    path = self._figure('figure4.png', 'Figure 4: speed and operations')
    plots.plot_tradeoff(path, speed_points=points)

  def figure5(self):
    engine, costs = self._loaded(), self.config.costs
    assert costs is not None  # checked by the config
    (setting,) = benchmark(costs)['settings']
    runs, plain = [], 0
    for row in setting['gammas']:
      gamma = row['gamma']
      rounds = trace.record(engine, self.config.text, gamma=gamma)
      kept = [len(one.kept) for one in rounds]
      runs.append(timeline.Run(gamma, kept))
      plain = sum(kept)
    runs.append(timeline.Run(0, [1] * plain))
    one = setting['times_ms']['call_1']['median']
    times = timeline.CallTimes(
      setting['times_ms']['encoder']['median'],
      setting['times_ms']['draft_encoder']['median'],
      # A drafter may cost less than the noise of the measurement.
      max(0.0, setting['gammas'][0]['cost_ratio'] * one),
      {int(size): ratio * one for size, ratio in setting['call_cost'].items()},
    )
    path = self._figure('figure5.png', 'Figure 5: calls over time')
    timeline.plot_timeline(path, runs, times)

  def methods(self):
    if not self._methods:
      raise ValueError(
        f'There is no record of ways to speculate in {self._records_dir!r}.'
        ' Measure some first: specdec measure'
        f' --gin_file=gin/runs/methods.gin --gin.OUTPUT_FILE='
        f'{self._records_dir}/NAME.json'
      )
    self.tables.append(tables.methods(list(self._methods.values())))
    for name, one in self._methods.items():
      path = self._figure(f'methods_{name}.png', f'Speed-up, {one["pair"]}')
      compared_methods.plot_methods(path, one)

  def machine(self) -> dict[str, Any]:
    """The machines of the records; this machine if there are no records."""
    records: list[Mapping[str, Any]] = []
    if self._suite:
      records += self._suite[0].values()
    if '_alphas' in self.__dict__:  # an item has used them
      records += self._alphas
    if '_methods' in self.__dict__:
      records += self._methods.values()
    machines = [record['machine'] for record in records]
    if not machines:
      return environment.describe()
    found = {}
    for key in machines[0]:
      values = dict.fromkeys(machine.get(key) for machine in machines)
      several = ' and '.join(map(str, values))
      found[key] = several if len(values) > 1 else machines[0][key]
    return found

  def _figure(self, name: str, meaning: str) -> pathlib.Path:
    self.figures[name] = meaning
    return _path(self.config, name)

  def _rows(self) -> list[printed.Table2Row]:
    assert self.config.suite is not None  # checked by the config
    return table_suite.rows(self.config.suite)

  def _records(self) -> tuple[dict[str, Any], str]:
    """The suite's records, and the reason why other rows have none."""
    config = self.config.suite
    assert config is not None  # checked by the config
    if self._suite is None:
      missing = 'there is no record of it'
      if self.config.measure:
        try:
          table_suite.run(config, self.console.print)
        except DoesNotFitError as error:
          missing = str(error)
      self._suite = table_suite.read(config), missing
    return self._suite

  def _loaded(self) -> Engine:
    assert self.config.engine is not None  # checked by the config
    if self._engine is None:
      self._engine = self.config.engine()
    return self._engine
