"""The run of scripts/reproduce.py: what is measured, what it leaves."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import rich.console

from specdec_jax import environment, files, paper
from specdec_jax.bench import suite as table_suite
from specdec_jax.bench.memory import DoesNotFitError
from specdec_jax.bench.run import BenchmarkConfig, benchmark, grid
from specdec_jax.engine import Engine
from specdec_jax.field_types import check_types
from specdec_jax.measure.alpha import MeasureAlphaConfig, measure_alpha
from specdec_jax.reproduce import (
  canvas,
  plots,
  report,
  tables,
  timeline,
  trace,
)
from specdec_jax.reproduce.trace_page import html_page

ITEMS = tuple(
  [f'table{i}' for i in range(1, 6)] + [f'figure{i}' for i in range(1, 6)]
)
_NEEDS = {
  'table2': ('suite',),
  'table4': ('suite',),
  'figure1': ('engine',),
  'figure5': ('engine', 'costs'),
}
_PICTURES = {'table2', 'figure2', 'figure3', 'figure4', 'figure5'}
_PIPED_WIDTH = 240


@dataclasses.dataclass(frozen=True)
class ReproduceConfig:
  """Tables and figures of the paper, and what stands beside them.

  Attributes:
    items: of `ITEMS`, in the order of the report.
    output_dir: gets report.md, a CSV a table, pictures and pages.
    suite: what Tables 2 and 4 and the points of Figure 4 are measured with; its
      own output_dir keeps a record a row, `records` in this one if it is None.
    run_suite: whether rows without a record are measured; else they are listed
      as not measured.
    alphas: measurements of acceptance rates that Tables 3 and 5 show.
    engine: whose generation is the trace of Figures 1 and 5.
    costs: the call costs of the same pair, for Figure 5; its gammas are the
      rows above the plain one.
    text: that is decoded in Figures 1 and 5.

  Raises:
    ValueError: an item is unknown, or what it needs is missing.
  """

  items: Sequence[str]
  output_dir: str
  suite: table_suite.SuiteConfig | None = None
  run_suite: bool = True
  alphas: Sequence[MeasureAlphaConfig] = ()
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
    given = self.suite
    if given is not None and given.output_dir is None:
      records = os.path.join(self.output_dir, 'records')
      given = dataclasses.replace(given, output_dir=records)
      object.__setattr__(self, 'suite', given)
    if {'figure1', 'figure5'} & set(self.items) and not self.text.strip():
      raise ValueError('Figures 1 and 5 need ReproduceConfig.text to decode.')
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
    ValueError: matplotlib is missing where a picture is to be drawn; nothing
      was measured then.
  """
  console = console or rich.console.Console()
  if _PICTURES & set(config.items):
    canvas.load_matplotlib()  # or hours later there would be none
  os.makedirs(config.output_dir, exist_ok=True)
  work = _Work(config, console)
  for item in config.items:
    getattr(work, item)()
  if not console.is_terminal:  # a pipe has no edge to fold at
    console.width = max(console.width, _PIPED_WIDTH)
  for table in work.tables:
    console.print(report.rich_table(table))
  written = report.write(
    config.output_dir,
    work.tables,
    title='The paper, what is predicted, what was measured',
    machine=work.machine(),
    figures=work.figures,
  )
  return [*(_path(config, name) for name in work.figures), *written]


def _path(config: ReproduceConfig, name: str) -> pathlib.Path:
  return pathlib.Path(config.output_dir) / name


class _Work:
  """Collects tables and figures; what two items need is measured once."""

  def __init__(self, config: ReproduceConfig, console: rich.console.Console):
    self.config = config
    self.console = console
    self.tables: list[report.Table] = []
    self.figures: dict[str, str] = {}
    self._suite: tuple[dict[str, Any], str] | None = None
    self._engine: Engine | None = None

  @functools.cached_property
  def _alphas(self) -> list[dict[str, Any]]:
    return [
      measure_alpha(config, self.console) for config in self.config.alphas
    ]

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
    page = html_page(
      rounds, source=self.config.text, note=trace.summary(rounds)
    )
    path = self._figure('figure1.html', 'Figure 1: one generation, as a page')
    files.write_atomically(path, page.encode())

  def figure2(self):
    path = self._figure('figure2.png', 'Figure 2: expected tokens a round')
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
          label=f'gamma {row["gamma"]}',
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
      # A drafter may cost less than what can be measured beside noise.
      max(0.0, setting['gammas'][0]['cost_ratio'] * one),
      {int(size): ratio * one for size, ratio in setting['call_cost'].items()},
    )
    path = self._figure('figure5.png', 'Figure 5: calls over time')
    timeline.plot_timeline(path, runs, times)

  def machine(self) -> dict[str, Any]:
    """Where the records were measured; this machine if there are none."""
    records = list(self._suite[0].values()) if self._suite else []
    if '_alphas' in self.__dict__:  # they were asked for
      records += self._alphas
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

  def _rows(self) -> list[paper.Table2Row]:
    assert self.config.suite is not None  # checked by the config
    return table_suite.rows(self.config.suite)

  def _records(self) -> tuple[dict[str, Any], str]:
    """The suite's records, and why those that are missing are missing."""
    config = self.config.suite
    assert config is not None  # checked by the config
    if self._suite is None:
      missing = 'there is no record of it'
      if self.config.run_suite:
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
