"""Compares methods of decoding, at several temperatures and numbers of rows.

A method is an engine with options, such as a fixed or an adaptive gamma, drafts
judged by token or as a block, a tree, or heads. Texts are decoded one at a
time, or many at a time by continuous batching, plainly and by every method. The
order is random, so that noise of the machine affects all methods alike.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.console import Console

from specdec_jax.checks.fields import Bound, Checked, check_types, unexpected
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.completion import total
from specdec_jax.engine.engine import Engine
from specdec_jax.measure.calibrate import START, for_host, predicted_speed_up
from specdec_jax.measure.calls import Advance, Timed, decode_in_turn
from specdec_jax.report import Column, Record, Table, bar, record
from specdec_jax.report.plot import PALETTE, save_plot
from specdec_jax.text.tasks import read_prompts
from specdec_jax.types import Amount, Positive

KIND = 'methods'  # the record's kind
PLAIN = 'plain'
_START = 'start'
_DRAWS = 2000  # bootstrap samples of the texts, for intervals
_INTERVAL = (2.5, 97.5)  # the percentiles of an interval


@dataclasses.dataclass(frozen=True)
class Method(Checked):
  """A method of decoding.

  Attributes:
    name: name of the method in tables.
    options: options of `Engine.generate`, such as gamma and verification.
    engine: makes the method's engine; None takes the engine of the comparison.
      All methods have the same target.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  engine: Callable[[], Engine] | None = None


@dataclasses.dataclass(frozen=True)
class CompareConfig:
  """A comparison of methods with the plain loop.

  Attributes:
    engine: makes the engine; called after all cheap checks.
    input_file: the texts, one a line.
    methods: the methods to compare.
    gammas: each gamma adds a method that proposes so many tokens per round. Its
      speed-up is also predicted if a calibration or `acceptance` is given.
    temperatures: temperatures to compare at; 0 is greedy.
    rows: numbers of texts that are decoded together; with 1 each text is timed
      separately, with more all texts are timed at once, by continuous batching.
    num_lines: how many lines are decoded; None decodes all of them.
    repeats: timed repetitions; above temperature 0 each draws other samples.
    calibrations: files of `specdec calibrate`, one per temperature, which
      predict speed-ups and say where an 'adaptive' gamma ends a draft; if such
      a file says that no gamma pays, 'adaptive' decodes plainly. An entry None
      is skipped.
    acceptance: record of the pair's acceptance rates; if there is no
      calibration, calls are timed on this host to predict speed-ups, see
      `calibrate.for_host`.
    output_file: path of the record, JSON; None writes none.
    plot_file: path of the picture, PNG; None draws none.
    name: name of the pair, for the title.

  Raises:
    ValueError: a number is too small, or two methods have the same name.
  """

  engine: Callable[[], Engine]
  input_file: str
  methods: Sequence[Method] = ()
  gammas: Sequence[Positive] = ()
  temperatures: Annotated[Sequence[Amount], Bound(1)] = (0.0, 1.0)
  rows: Annotated[Sequence[Positive], Bound(1)] = (1,)
  num_lines: Annotated[int, Bound(2)] | None = None
  repeats: Positive = 3
  calibrations: Sequence[str | None] = ()
  acceptance: str | None = None
  output_file: str | None = None
  plot_file: str | None = None
  name: str = 'methods'

  def __post_init__(self):
    check_types(self)
    names = [PLAIN, *(method.name for method in self.all_methods)]
    if len(names) < 2 or len({*names, _START}) <= len(names):
      expected = f'different names, none of them {PLAIN!r} or {_START!r}'
      raise unexpected('methods', expected, names[1:])

  @property
  def all_methods(self) -> list[Method]:
    """The methods of `methods`, and a method for each of `gammas`."""
    sizes = dict.fromkeys(self.gammas)
    return [*self.methods, *(Method(f'gamma {x}', {'gamma': x}) for x in sizes)]


def compare(config: CompareConfig, console: Console | None = None) -> Record:
  """Times every method; prints a table, writes the record and the picture.

  Returns:
    The record. It has the table as `Table.to_json` returns it, the name of the
    pair, the layout of its kernels, and `rows_measured`. These have, for each
    method, temperature and number of rows, the milliseconds per token; the
    tokens per call and the speed-up, with 95 % intervals over texts (None where
    all texts were timed together); and the predicted speed-up, or None.

  Raises:
    ValueError: the texts cannot be decoded, an engine cannot be made, a
      calibration is of another pair or machine, or a greedy output differs from
      the plain one.
  """
  paths = config.output_file, config.input_file, config.plot_file
  console = record.begin(console, *paths)
  files = [calibration.load(path) for path in config.calibrations if path]
  # Methods with the same function `engine` share one engine.
  makers = [method.engine for method in config.all_methods]
  engines = {m: m() for m in dict.fromkeys([config.engine, *makers]) if m}
  engine = engines[config.engine]
  calibrations: dict[float, Calibration | None] = {}
  for measured in files:
    measured.check(engine.fingerprints)
    calibrations[measured.temperature] = measured
  if config.acceptance and not files:
    with bar(console, 'Timing calls on this host'):
      for temperature in config.temperatures:
        calibrations[temperature] = for_host(
          engine, config.acceptance, 1, temperature, console, 'always'
        )
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.config.max_input_len
  )[: config.num_lines]
  settings = list(itertools.product(config.temperatures, config.rows))
  rows, steps = list[dict[str, Any]](), len(settings) * config.repeats
  with bar(console, 'Compiling and timing', steps) as advance:
    for temperature, count in settings:
      known = calibrations.get(temperature)
      comparison = _Comparison(config, engines, texts, temperature, known)
      rows += comparison.rows(count, advance)
  greedy = calibrations.get(0.0)
  table = _table(config, rows, len(texts))
  content = {
    'pair': config.name,
    'kernel_layout': engine.kernel_layout,
    'chosen': None if greedy is None else greedy.at(1).gamma,
    'rows_measured': rows,
  }
  done = record.new(KIND, table.to_json() | content)
  record.finish(config.output_file, console, done, table)
  if config.plot_file:
    plot(config.plot_file, done)
  return done


class _Comparison(NamedTuple):
  """A comparison at one temperature: its engines, texts and calibration."""

  config: CompareConfig
  engines: Mapping[Any, Engine]
  texts: Sequence[str]
  temperature: float
  measured: Calibration | None

  def rows(self, rows: int, advance: Advance) -> Iterator[Record]:
    """Times all methods on batches of `rows` texts; yields a record of each."""
    config, measured = self.config, self.measured
    engine = self.engines[config.engine]
    methods = {PLAIN: (engine, {'speculative': False}), _START: (engine, START)}
    for method in config.all_methods:
      options = dict(method.options)
      # A calibration sets the thresholds of an adaptive gamma, or turns
      # speculation off.
      if options.get('gamma') == 'adaptive' and measured is not None:
        if measured.at(1).gamma:
          options['gamma'] = measured.rule(1)
        else:
          options['speculative'] = False
      engine = self.engines[method.engine or config.engine]
      methods[method.name] = engine, options
    numbers = range(len(self.texts))
    parts = [numbers] if rows > 1 else [range(n, n + 1) for n in numbers]
    timed = decode_in_turn(
      methods,
      self.texts,
      parts,
      config.repeats,
      advance,
      temperature=self.temperature,
      batch_size=rows,
    )
    plain, start = timed[PLAIN], timed.pop(_START)
    if self.temperature == 0:
      for name, other in timed.items():
        for outputs, right in zip(other.outputs, plain.outputs, strict=True):
          _check_equal(name, outputs[0], right[0])
    known = measured if rows == 1 else None  # costs are those of one row
    for method in config.all_methods:
      gamma, predicted = method.options.get('gamma'), None
      if known and isinstance(gamma, int) and gamma in config.gammas:
        predicted = predicted_speed_up(known, gamma, plain, start, np.mean)
      yield {
        'method': method.name,
        'temperature': self.temperature,
        'rows': rows,
        'gamma': gamma if isinstance(gamma, int) else None,
        **_with_intervals(timed[method.name], plain),
        'predicted': predicted,
      }


def _check_equal(name: str, outputs: Any, plain: Any) -> None:
  """Raises ValueError if a method's greedy output is not the plain loop's."""
  for output, right in zip(outputs, plain, strict=True):
    if output.tokens != right.tokens:
      field = f'The greedy output of {name!r}'
      expected = f"the plain loop's, {right.tokens}"
      advice = 'A near tie of two logits can do so; anything else is a defect.'
      raise unexpected(field, expected, output.tokens, advice)


def _with_intervals(timed: Timed, plain: Timed) -> dict[str, Any]:
  """Returns a method's measured numbers, with intervals over texts."""
  count = timed.ms.shape[1]
  drawn = np.random.default_rng(0).integers(count, size=(_DRAWS, count))
  # The first row picks each text once; the others are bootstrap samples.
  picks = np.vstack([np.arange(count), drawn])

  def ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    return over[picks].sum(-1) / under[picks].sum(-1)

  calls = np.array([part.num_target_calls for part in timed.stats])
  ms, plain_ms = (ratio(x.ms.sum(axis=0), x.tokens) for x in (timed, plain))
  values = {
    'tokens_per_call': ratio(timed.tokens, calls),
    'ms_per_token': ms,
    'plain_ms_per_token': plain_ms,
    'speed_up': plain_ms / ms,
  }
  measured: Record = {name: value[0].item() for name, value in values.items()}
  measured['acceptance_rate'] = total(timed.stats).acceptance_rate
  for name in ('tokens_per_call', 'speed_up'):
    interval = np.percentile(values[name][1:], _INTERVAL).tolist()
    measured[f'{name}_interval'] = interval if count > 1 else None
  return measured


def _table(config: CompareConfig, rows: Sequence[Record], lines: int) -> Table:
  def between(row: Record, name: str) -> str | None:
    interval = row[f'{name}_interval']
    return interval and f'{interval[0]:.2f} to {interval[1]:.2f}'

  return Table.from_records(
    f'{config.name}: {lines} lines of {config.input_file}, {config.repeats}'
    ' repetitions; intervals over texts',
    {
      Column('T', 'g'): 'temperature',
      'rows': 'rows',
      'method': 'method',
      Column('tokens per call', '.2f'): 'tokens_per_call',
      '95 %': lambda row: between(row, 'tokens_per_call'),
      Column('ms per token', '.2f'): 'ms_per_token',
      Column('speed-up', '.2f'): 'speed_up',
      '95 % ': lambda row: between(row, 'speed_up'),
      Column('predicted', '.2f'): 'predicted',
    },
    rows,
  ).without_empty()


def side_by_side(records: Sequence[Record]) -> Table:
  """Returns a table with the best and the chosen gamma of each machine.

  Raises:
    ValueError: a record lacks the gamma that was chosen.
  """
  rows = []
  for host in records:
    measured = [row for row in host['rows_measured'] if row['gamma']]
    best = max(measured, key=lambda row: row['speed_up'])
    by_gamma = {row['gamma']: row for row in measured}
    if (gamma := host['chosen']) not in by_gamma:
      expected = f'the chosen gamma, {gamma}, among those that were measured'
      raise unexpected('gammas', expected, [*by_gamma])
    row = {
      'machine': record.where(host),
      'kernels': host['kernel_layout'],
      'best': f'{best["speed_up"]:.2f} (gamma {best["gamma"]})',
    }
    rows.append(by_gamma[gamma] | row)
  columns: dict[Column | str, str] = {
    'machine': 'machine',
    'kernels': 'kernels',
    Column('plain, ms/token', '.2f'): 'plain_ms_per_token',
    'gamma chosen': 'gamma',
    Column('speed-up', '.2f'): 'speed_up',
    Column('predicted', '.2f'): 'predicted',
    'best gamma': 'best',
  }
  return Table.from_records('', columns, rows)


def plot(path: str | os.PathLike[str], comparison: Mapping[str, Any]) -> None:
  """Draws the speed-up of each method, and crosses where it was predicted.

  Args:
    path: path of the PNG, which is written completely or not at all.
    comparison: a result of `compare`.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  rows = comparison['rows_measured']
  names = list(dict.fromkeys(row['method'] for row in rows))
  series: dict[str, list[Any]] = {}
  for row in rows:
    at_once = f', {row["rows"]} rows' if row.get('rows', 1) > 1 else ''
    label = f'temperature {row["temperature"]:g}{at_once}'
    series.setdefault(label, []).append(row)
  height = 0.6 / len(series)

  def draw(figure):
    axes = figure.subplots()
    for i, (label, bars) in enumerate(series.items()):
      places = [names.index(row['method']) + i * height for row in bars]
      none = [None, None]  # None becomes NaN in the array
      values = [
        [x['speed_up'], x.get('predicted'), *(x['speed_up_interval'] or none)]
        for x in bars
      ]
      measured, predicted, *interval = np.array(values, float).T
      color = PALETTE[i % len(PALETTE)]
      style: Record = {'capsize': 3, 'color': color, 'label': label}
      errors = np.abs(interval - measured)
      axes.errorbar(measured, places, None, errors, 'o', **style)
      if not np.isnan(predicted).all():
        name = f'{label}, predicted'
        axes.plot(predicted, places, 'x', color=color, label=name)
    middle = height * (len(series) - 1) / 2
    axes.set_yticks([i + middle for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1, color='#888888', label='plain decoding')
    axes.set_xlabel('times as fast as plain decoding, and its interval')
    # The legend is beside the axes, so that it covers no point.
    axes.legend(loc='upper left', bbox_to_anchor=(1, 1))
    pair = comparison['pair']
    figure.suptitle(f'{pair} on {record.where(comparison)}', fontsize='small')

  save_plot(path, draw, (7.2, 1.2 + 0.35 * len(names)))
