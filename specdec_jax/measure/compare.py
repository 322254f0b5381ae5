"""Ways to decode beside each other: methods x temperatures x rows at once.

A method is an engine with options: a gamma, an adaptive one, drafts judged by
token or as a block, a tree, heads. One text at a time, or many by continuous
batching, are decoded plainly and by every method in random order, so that
whatever slows the machine for a while slows all of them.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import rich.console

from specdec_jax.checks.fields import Bound, Checked, check_types, unexpected
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.completion import total
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import ADAPTIVE
from specdec_jax.measure import table
from specdec_jax.measure.calibrate import for_host, predicted_speed_up
from specdec_jax.measure.calls import Run, interleave
from specdec_jax.measure.record import Record, where
from specdec_jax.measure.record import new as new_record
from specdec_jax.measure.table import PALETTE, Column, Table
from specdec_jax.text.tasks import read_prompts
from specdec_jax.types import Amount, Positive

KIND = 'methods'  # of a record
PLAIN = 'plain'
_DRAWS = 2000  # of texts, for the interval of the speed-up
_INTERVAL = (2.5, 97.5)  # percent


@dataclasses.dataclass(frozen=True)
class Method(Checked):
  """One way to decode.

  Attributes:
    name: what tables call it.
    options: of `Engine.generate`, such as gamma and verification.
    engine: makes its engine; None takes that of the comparison. All methods
      have one target.
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
    methods: what is compared.
    gammas: each adds a method that proposes so many tokens a round, whose
      speed-up is also predicted where a calibration or `acceptance` is given.
    temperatures: 0 is greedy.
    rows: texts that are decoded together: 1 times each text by itself, more
      times all of them, by continuous batching.
    num_lines: how many lines are decoded; None is all of them.
    repeats: timed repetitions; above temperature 0 each draws other samples.
    calibrations: files of `specdec calibrate`, one a temperature, by which a
      gamma that is 'adaptive' ends and speed-ups are predicted; where one says
      that no gamma pays, 'adaptive' decodes plainly. None is left out.
    acceptance: without a calibration, a record of the pair's acceptance: calls
      are timed here, see `calibrate.for_host`. None predicts nothing.
    output_file: path of the record, JSON; None writes none.
    plot_file: path of the picture, PNG; None draws none.
    name: of the pair, for the title.

  Raises:
    ValueError: a number is too small, or two methods have one name.
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
    if len(names) < 2 or len(set(names)) < len(names):
      expected = f'different names, none of them {PLAIN!r}'
      raise unexpected('methods', expected, names[1:])

  @property
  def all_methods(self) -> list[Method]:
    """The methods, and those of `gammas`."""
    fixed = [
      Method(f'gamma {gamma}', {'gamma': gamma})
      for gamma in dict.fromkeys(self.gammas)
    ]
    return [*self.methods, *fixed]


class Timed(NamedTuple):
  """What one method took for each part of the texts, summed over repetitions.

  Attributes:
    ms: float[N], times.
    tokens: int[N], tokens of the outputs.
    calls: int[N], calls of the target.
    acceptance_rate: of all parts; None if nothing was proposed.
  """

  ms: np.ndarray
  tokens: np.ndarray
  calls: np.ndarray
  acceptance_rate: float | None


def compare(
  config: CompareConfig, console: rich.console.Console | None = None
) -> Record:
  """Times every method; prints a table, writes the record and the picture.

  Returns:
    The record: its table as `Table.to_json` has it, the name of the pair, the
    layout of its kernels, and `rows_measured`: of each method, temperature and
    number of rows its tokens a call, ms a token and speed-up, both with 95 %
    intervals over texts (None where all texts were timed together); and the
    predicted speed-up, or None.

  Raises:
    ValueError: the texts cannot be decoded, an engine cannot be made, a
      calibration is of another pair or machine, or a greedy output differs from
      the plain one.
  """
  console = table.started(config, console)
  loaded = [calibration.load(path) for path in config.calibrations if path]
  # Engines that are equal are made once.
  makers = [method.engine for method in config.all_methods]
  made = {m: m() for m in dict.fromkeys([config.engine, *makers]) if m}
  engine = made[config.engine]
  for one in loaded:
    one.check(engine.fingerprints)
  known: dict[float, Calibration | None] = {
    one.temperature: one for one in loaded
  }
  if config.acceptance and not loaded:
    with table.bar(console, 'Timing calls on this host'):
      for temperature in config.temperatures:
        known[temperature] = for_host(
          engine, config.acceptance, 1, temperature, console
        )
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )[: config.num_lines]
  settings = list(itertools.product(config.temperatures, config.rows))
  measured = []
  steps = len(settings) * config.repeats
  with table.bar(console, 'Compiling and timing', steps) as advance:
    for temperature, rows in settings:
      chosen = known.get(temperature)
      measured += _rows(config, made, chosen, texts, temperature, rows, advance)
  greedy = known.get(0.0)
  shown = _table(config, measured, len(texts))
  content = {
    'pair': config.name,
    'kernel_layout': engine.kernel_layout,
    'chosen': None if greedy is None else greedy.at(1).gamma,
    'rows_measured': measured,
  }
  record = new_record(KIND, shown.to_json() | content)
  table.finish(config, console, record, shown)
  if config.plot_file:
    plot(config.plot_file, record)
  return record


def _rows(
  config: CompareConfig,
  made: Mapping[Any, Engine],
  chosen: Calibration | None,
  texts: Sequence[str],
  temperature: float,
  rows: int,
  advance: Callable[[], None],
) -> list[dict[str, Any]]:
  """What is measured of each method at one temperature and number of rows."""
  methods: dict[str, tuple[Engine, dict[str, Any]]] = {
    PLAIN: (made[config.engine], {'speculative': False})
  }
  for method in config.all_methods:
    options = dict(method.options)
    if options.get('gamma') == ADAPTIVE and chosen is not None:
      if chosen.at(1).gamma:
        options['gamma'] = chosen.rule(1)
      else:
        options['speculative'] = False
    methods[method.name] = made[method.engine or config.engine], options
  timed = _timed(config, methods, texts, temperature, rows, advance)
  plain, measured = timed[PLAIN], []
  for method in config.all_methods:
    gamma: Any = method.options.get('gamma')
    predicted = None
    if gamma in config.gammas and rows == 1 and chosen is not None:
      lengths, ms = plain.tokens // config.repeats, plain.ms / config.repeats
      predicted = predicted_speed_up(chosen, gamma, lengths, ms)
    measured.append(
      {
        'method': method.name,
        'temperature': temperature,
        'rows': rows,
        'gamma': gamma if isinstance(gamma, int) else None,
        **_measured(timed[method.name], plain),
        'predicted': predicted,
      }
    )
  return measured


def _timed(
  config: CompareConfig,
  methods: Mapping[str, tuple[Engine, Mapping[str, Any]]],
  texts: Sequence[str],
  temperature: float,
  rows: int,
  advance: Callable[[], None],
) -> dict[str, Timed]:
  """Decodes the texts by each method in turn, after compiling."""
  numbers = range(len(texts))
  parts = [numbers] if rows > 1 else [range(n, n + 1) for n in numbers]
  outputs: dict[tuple[str, int], list[Any]] = {}

  def run(name: str, place: int) -> Run:
    engine, options = methods[name]
    earlier = outputs[name, place] = []

    def decode():
      done = engine.generate(
        [texts[number] for number in parts[place]],
        temperature=temperature,
        seed=len(earlier),
        example_ids=parts[place],
        log_probs=False,
        batch_size=rows,
        **options,
      )
      earlier.append(done)

    return Run(lambda: decode)

  runs = {
    (name, place): run(name, place)
    for name in methods
    for place in range(len(parts))
  }
  times = interleave(runs, config.repeats, advance)
  if temperature == 0:
    for (name, place), (first, *_) in outputs.items():
      _check_equal(name, first, outputs[PLAIN, place][0])
  timed = {}
  for name in methods:
    places = [(name, place) for place in range(len(parts))]
    stats = [
      # The first one compiled.
      total(one.stats for done in outputs[place][1:] for one in done)
      for place in places
    ]
    timed[name] = Timed(
      np.array([sum(times[place]) for place in places]),
      np.array([part.num_tokens for part in stats]),
      np.array([part.num_target_calls for part in stats]),
      total(stats).acceptance_rate,
    )
  return timed


def _check_equal(name: str, outputs: Any, plain: Any) -> None:
  """Raises ValueError if a method's greedy output is not the plain loop's."""
  for output, right in zip(outputs, plain, strict=True):
    if output.tokens != right.tokens:
      field = f'The greedy output of {name!r}'
      expected = f"the plain loop's, {right.tokens}"
      advice = 'A near tie of two logits can do so; anything else is a defect.'
      raise unexpected(field, expected, output.tokens, advice)


def _measured(timed: Timed, plain: Timed) -> dict[str, Any]:
  """The numbers of one method, with intervals over texts."""
  count = len(timed.ms)
  drawn = np.random.default_rng(0).integers(count, size=(_DRAWS, count))
  picks = np.vstack([np.arange(count), drawn])  # first all texts, each once

  def ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    return over[picks].sum(-1) / under[picks].sum(-1)

  ms, plain_ms = (ratio(one.ms, one.tokens) for one in (timed, plain))
  values = {
    'tokens_per_call': ratio(timed.tokens, timed.calls),
    'ms_per_token': ms,
    'plain_ms_per_token': plain_ms,
    'speed_up': plain_ms / ms,
  }
  measured: dict[str, Any] = {n: value[0].item() for n, value in values.items()}
  measured['acceptance_rate'] = timed.acceptance_rate
  for name in ('tokens_per_call', 'speed_up'):
    ends = np.percentile(values[name][1:], _INTERVAL).tolist()
    measured[f'{name}_interval'] = ends if count > 1 else None
  return measured


def _table(
  config: CompareConfig, measured: Sequence[Mapping[str, Any]], lines: int
) -> Table:
  def between(row: Mapping[str, Any], name: str) -> str | None:
    ends = row[f'{name}_interval']
    return ends and f'{ends[0]:.2f} to {ends[1]:.2f}'

  shown = Table.of(
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
    measured,
  )
  return shown.without_empty()


def side_by_side(records: Sequence[Record]) -> Table:
  """A row a machine: its best gamma, and the one that was chosen for it.

  Raises:
    ValueError: a record lacks the gamma that was chosen.
  """
  rows = []
  for record in records:
    measured = [row for row in record['rows_measured'] if row['gamma']]
    best = max(measured, key=lambda row: row['speed_up'])
    by_gamma = {row['gamma']: row for row in measured}
    if (gamma := record['chosen']) not in by_gamma:
      expected = f'the chosen gamma, {gamma}, among those that were measured'
      raise unexpected('gammas', expected, [*by_gamma])
    rows.append(
      by_gamma[gamma]
      | {
        'machine': where(record),
        'kernels': record['kernel_layout'],
        'best': f'{best["speed_up"]:.2f} (gamma {best["gamma"]})',
      }
    )
  columns: dict[Column | str, str] = {
    'machine': 'machine',
    'kernels': 'kernels',
    Column('plain, ms/token', '.2f'): 'plain_ms_per_token',
    'gamma chosen': 'gamma',
    Column('speed-up', '.2f'): 'speed_up',
    Column('predicted', '.2f'): 'predicted',
    'best gamma': 'best',
  }
  return Table.of('', columns, rows)


def plot(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
  """Draws the speed-up of each method, and crosses where it was predicted.

  Args:
    path: path of the PNG; replaced whole or not at all.
    record: what `compare` returned.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  rows = record['rows_measured']
  names = list(dict.fromkeys(row['method'] for row in rows))
  series: dict[str, list[Any]] = {}
  for row in rows:
    at_once = f', {row["rows"]} rows' if row.get('rows', 1) > 1 else ''
    label = f'temperature {row["temperature"]:g}{at_once}'
    series.setdefault(label, []).append(row)
  height = 0.6 / len(series)

  def draw(figure):
    axes = figure.subplots()
    for i, (label, shown) in enumerate(series.items()):
      places = [names.index(row['method']) + i * height for row in shown]
      measured, predicted, *ends = (
        np.array([row.get(name) for row in shown], float)  # None is NaN
        # Records of before had the extremes of the repetitions.
        for name in ('speed_up', 'predicted', 'least', 'most')
      )
      for place, row in enumerate(shown):
        if interval := row.get('speed_up_interval'):
          ends[0][place], ends[1][place] = interval
      style: Any = {'color': PALETTE[i % len(PALETTE)]}
      errors = np.abs(ends - measured)
      axes.errorbar(
        measured, places, None, errors, 'o', capsize=3, **style, label=label
      )
      if not np.isnan(predicted).all():
        axes.plot(predicted, places, 'x', **style, label=f'{label}, predicted')
    middle = height * (len(series) - 1) / 2
    axes.set_yticks([i + middle for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1, color='#888888', label='plain decoding')
    axes.set_xlabel('times as fast as plain decoding, and its interval')
    axes.legend(loc='upper left', bbox_to_anchor=(1, 1))  # covers no point
    pair = record.get('pair', 'Demo pair')
    figure.suptitle(f'{pair} on {where(record)}', fontsize='small')

  table.save_plot(path, draw, (7.2, 1.2 + 0.35 * len(names)))
