"""The speed-up over gamma: measured on real text, beside what was predicted.

Each repetition decodes the same lines plainly and then with every gamma, so
that whatever slows the machine for a while slows all of them.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.engine.completion import Completion, total
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import calibration, host_gamma
from specdec_jax.measure.canvas import PALETTE, save, whiskers
from specdec_jax.measure.progress import bar, status
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, between, show, started

_PLAIN = 0  # gamma of the plain loop
_FIRST = -1  # and of the plain loop that ends with the first token


@dataclasses.dataclass(frozen=True)
class GammaCurveConfig:
  """A measurement of the speed-up over gamma.

  Attributes:
    engine: makes the engine, with a drafter; called after all cheap checks.
    input_file: the prompts, one per line; they are decoded one at a time.
    calibration: path of a file that `specdec calibrate` wrote for this pair on
      this machine; it holds the prediction.
    acceptance: without a calibration, a record of the pair's acceptance: calls
      are timed here then, see `host_gamma`. Without both there is no
      prediction.
    gammas: proposals per round.
    num_lines: how many lines are decoded; None is all of them.
    repeats: timed repetitions.
    output_file: path of the record, JSON; None writes none.
    plot_file: path of the picture, PNG; None draws none.

  Raises:
    ValueError: a number is too small.
  """

  engine: Callable[[], Engine]
  input_file: str
  calibration: str | None = None
  acceptance: str | None = None
  gammas: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8)
  num_lines: int | None = None
  repeats: int = 5
  output_file: str | None = None
  plot_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_all_at_least(self, gammas=1)
    check_at_least(self, repeats=1)
    if self.num_lines is not None:
      check_at_least(self, num_lines=1)


def gamma_curve(
  config: GammaCurveConfig, console: rich.console.Console | None = None
) -> Record:
  """Times every gamma; prints a table, writes the record and the picture.

  Returns:
    The record: its table as `Table.to_json` has it, and `points`: for each
    gamma its tokens per call of the target, its speed-up (median, least and
    most over the repetitions) and the predicted one.

  Raises:
    ValueError: the prompts cannot be decoded, or the calibration is of another
      pair or machine.
  """
  console = started(config, console)
  chosen = config.calibration and calibration.load(config.calibration)
  engine = config.engine()
  if chosen:
    chosen.check(engine.fingerprints)
  elif config.acceptance:
    with status(console, 'Timing calls on this host'):
      chosen = host_gamma.for_host(engine, config.acceptance, 1, 0.0)
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )[: config.num_lines]
  gammas = [_FIRST, _PLAIN, *dict.fromkeys(config.gammas)]
  seconds: dict[int, list[float]] = {gamma: [] for gamma in gammas}
  done: dict[int, list[Completion]] = {}
  with bar(console, 'Compiling', len(gammas) * (config.repeats + 1)) as advance:
    for number in range(config.repeats + 1):
      for gamma in gammas:
        took, done[gamma] = _decode(engine, texts, gamma)
        if number:  # the first one compiled
          seconds[gamma].append(took)
        advance()
      advance.say('Measuring')
  lengths = [one.stats.num_tokens for one in done[_PLAIN]]
  points = [
    _point(
      gamma,
      done[gamma],
      seconds,
      _predicted(chosen, gamma, lengths, seconds) if chosen else None,
    )
    for gamma in gammas[2:]
  ]
  plain_seconds = statistics.median(seconds[_PLAIN])
  record = _record(
    config,
    points,
    len(texts),
    kernel_layout=engine.kernel_layout,
    plain_ms_per_token=1e3 * plain_seconds / sum(lengths),
    chosen=chosen.at(1).gamma if chosen else None,
  )
  show(console, record, config.output_file)
  if config.plot_file:
    plot_gamma_curve(config.plot_file, record)
  return record


def _decode(
  engine: Engine, texts: Sequence[str], gamma: int
) -> tuple[float, list[Completion]]:
  """Seconds that the texts take, one at a time, and their completions."""
  done: list[Completion] = []
  options: dict[str, Any] = {'gamma': gamma}
  if gamma in (_PLAIN, _FIRST):
    options = {'speculative': False}
  if gamma == _FIRST:
    options['max_length'] = 1
  begin = time.perf_counter()
  for text in texts:
    done += engine.generate([text], **options)
  return time.perf_counter() - begin, done


def _predicted(
  chosen: calibration.Calibration,
  gamma: int,
  lengths: Sequence[int],
  seconds: Mapping[int, Sequence[float]],
) -> float | None:
  """The speed-up that a calibration and the plain runs give; None if unknown.

  The calibration says what calls cost beside each other, and what is accepted;
  the plain runs, whole and of one token, what an output takes besides.
  """
  choice = chosen.at(1)
  if gamma + 1 > len(choice.call_cost) or choice.cost_ratio is None:
    return None
  whole, first = (statistics.median(seconds[way]) for way in (_PLAIN, _FIRST))
  count = len(lengths)
  one = (whole - first) / max(1, sum(lengths) - count)
  times = chosen.record['costs'][0]['times_ms']
  return calibration.speed_up_of_outputs(
    lengths,
    chosen.record['acceptance_rate']['alpha'],
    gamma,
    choice.call_cost[gamma] + gamma * choice.cost_ratio + choice.round_cost,
    start=max(0.0, first / one / count - 1),
    draft_start=calibration.first_ms(times) / times['call_1']['median'],
  )


def _point(
  gamma: int,
  done: Sequence[Completion],
  seconds: Mapping[int, Sequence[float]],
  predicted: float | None,
) -> dict[str, Any]:
  pairs = zip(seconds[_PLAIN], seconds[gamma], strict=True)
  ratios = sorted(plain / one for plain, one in pairs)
  return {
    'gamma': gamma,
    'tokens_per_call': total([one.stats for one in done]).tokens_per_call,
    'speed_up': statistics.median(ratios),
    'least': ratios[0],
    'most': ratios[-1],
    'predicted': predicted,
  }


def _record(
  config: GammaCurveConfig,
  points: Sequence[Mapping[str, Any]],
  lines: int,
  **content: Any,
) -> Record:
  columns = (
    'gamma',
    Column('tokens per call', '.2f'),
    Column('speed-up', '.2f'),
    'least to most',
    Column('predicted', '.2f'),
  )
  rows = [
    [
      one['gamma'],
      one['tokens_per_call'],
      one['speed_up'],
      between(one['least'], one['most']),
      one['predicted'],
    ]
    for one in points
  ]
  title = (
    f'Speed-up over gamma: {lines} lines of {config.input_file}, one at a time,'
    f' {config.repeats} repetitions'
  )
  return Table(title, columns, rows).record(points=list(points), **content)


def side_by_side(records: Sequence[Record]) -> Table:
  """A row a machine: its best gamma, and the one that was chosen for it."""
  rows = []
  for record in records:
    points = record['points']
    best = max(points, key=lambda one: one['speed_up'])
    named = {one['gamma']: one for one in points}
    chosen = named.get(record['chosen'], best)
    rows.append(
      [
        record.where,
        record['kernel_layout'],
        record['plain_ms_per_token'],
        chosen['gamma'],
        chosen['speed_up'],
        between(chosen['least'], chosen['most']),
        chosen['predicted'],
        chosen['predicted'] and chosen['predicted'] / chosen['speed_up'],
        f'{best["speed_up"]:.2f} (gamma {best["gamma"]})',
      ]
    )
  columns = (
    'machine',
    'kernels',
    Column('plain, ms/token', '.2f'),
    'gamma chosen',
    Column('speed-up', '.2f'),
    'least to most',
    Column('predicted', '.2f'),
    Column('predicted / measured', '.2f'),
    'best gamma',
  )
  return Table('', columns, rows)


def plot_gamma_curve(
  path: str | os.PathLike[str], record: Mapping[str, Any]
) -> None:
  """Draws the measured points with their spread, and the predicted curve.

  Args:
    path: path of the PNG; replaced whole or not at all.
    record: what `gamma_curve` returned.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  points = record['points']

  def draw(figure):
    axes = figure.subplots()
    gammas = [one['gamma'] for one in points]
    middle = [one['speed_up'] for one in points]
    spread = [(one['least'], one['most']) for one in points]
    axes.axhline(1, color='#888888', linewidth=1)
    axes.annotate('plain decoding', (gammas[0], 0.94), color='#666666')
    known = [one for one in points if one['predicted'] is not None]
    if known:
      axes.plot(
        [one['gamma'] for one in known],
        [one['predicted'] for one in known],
        color=PALETTE[1],
        linestyle='--',
        label='predicted from costs of calls, acceptance and the encoder',
      )
    axes.errorbar(
      gammas,
      middle,
      yerr=whiskers(middle, spread),
      color=PALETTE[0],
      marker='o',
      capsize=3,
      label='measured: median, least and most',
    )
    axes.set_xlabel('gamma: tokens proposed per round')
    axes.set_ylabel('speed-up over plain decoding')
    axes.set_ylim(bottom=0)
    axes.set_xticks(gammas)
    axes.legend(loc='lower center')
    axes.set_title(Record('', {}, record['machine']).where)

  save(path, draw)
