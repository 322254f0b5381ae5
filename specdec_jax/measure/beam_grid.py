"""Beam search over gamma and the drafter's width: times, levels, predictions.

Each repetition decodes the same lines with every setting in turn, so that
whatever slows the machine for a while slows all of them.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.drafters.base import encoded_for
from specdec_jax.engine.completion import total
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import calls, timing
from specdec_jax.measure.measured_pair import Pair
from specdec_jax.measure.progress import bar
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.record import Record, load
from specdec_jax.measure.table import Column, Table, between, show, started

_CALLS_A_RUN = 20


@dataclasses.dataclass(frozen=True)
class BeamGridConfig:
  """A measurement of plain and speculative beam search.

  Attributes:
    engine: makes the engine, whose drafter is a small model; called after all
      cheap checks.
    input_file: the prompts, one per line; they are decoded one at a time.
    widths: K, beams.
    gammas: levels that are proposed in a round.
    draft_factors: the drafter's beams, in multiples of K.
    alpha: exponent of the brevity penalty.
    num_lines: how many lines are decoded; None is all of them.
    repeats: timed repetitions.
    output_file: path of the record, JSON; None writes none.

  Raises:
    ValueError: a number is too small.
  """

  engine: Callable[[], Engine]
  input_file: str
  widths: Sequence[int] = (2, 4)
  gammas: Sequence[int] = (1, 2, 3, 4)
  draft_factors: Sequence[int] = (1, 2, 4, 6)
  alpha: float = 0.6
  num_lines: int | None = None
  repeats: int = 5
  output_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_all_at_least(self, widths=1, gammas=1, draft_factors=1)
    check_at_least(self, alpha=0.0, repeats=1)
    if self.num_lines is not None:
      check_at_least(self, num_lines=1)


@dataclasses.dataclass(frozen=True)
class BeamChoice:
  """The quickest way of a beam search, by measured times.

  Attributes:
    num_beams: K.
    gamma: levels that are proposed in a round; 0 if no speculation pays.
    draft_beams: U, beams of the drafter; 0 likewise.
    speed_up: over the plain search, the median; 1 at gamma 0.
  """

  num_beams: int
  gamma: int
  draft_beams: int
  speed_up: float

  @classmethod
  def of(cls, record: Mapping[str, Any], num_beams: int) -> 'BeamChoice':
    """The choice of a record of `beam_grid`, for one of its widths."""
    best = record['choices'][str(num_beams)]['measured']
    if best is None:
      return cls(num_beams, 0, 0, 1.0)
    return cls(num_beams, **best)


class Setting(NamedTuple):
  """How lines are decoded; gamma 0 is the plain beam search, width 0 greedy."""

  width: int
  gamma: int = 0
  draft_beams: int = 0

  @classmethod
  def of(cls, found: Mapping[str, Any]) -> 'Setting':
    """The setting that a dictionary of results is of."""
    return cls(*(found[name] for name in cls._fields))


@dataclasses.dataclass
class _Found:
  """What one setting took.

  Attributes:
    seconds: of all lines, in each repetition.
    num_calls: calls of the target.
    num_levels: levels of the searches.
    num_differences: lines whose beams are not those of the plain search.
  """

  seconds: list[float] = dataclasses.field(default_factory=list)
  num_calls: int = 0
  num_levels: int = 0
  num_differences: int = 0


def beam_grid(
  config: BeamGridConfig, console: rich.console.Console | None = None
) -> Record:
  """Times every setting; prints a table and writes the record.

  Returns:
    The record: its table as `Table.to_json` has it; `points`, a dictionary for
    each setting; and `choices`: for each width the setting with the largest
    measured and with the largest predicted speed-up, None if none is above 1.

  Raises:
    ValueError: the prompts cannot be decoded, or the drafter knows no beams.
  """
  console = started(config, console)
  engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )[: config.num_lines]
  settings = [Setting(0)]
  for width in dict.fromkeys(config.widths):
    settings.append(Setting(width))
    settings += [
      Setting(width, gamma, factor * width)
      for factor in dict.fromkeys(config.draft_factors)
      for gamma in dict.fromkeys(config.gammas)
    ]
  steps = (len(settings) + 1) * (config.repeats + 1)
  with bar(console, 'Compiling', steps) as advance:
    found = _decode_all(config, engine, texts, settings, advance)
    costs = _costs(engine, texts, settings, config.repeats, advance)
  points = [_point(one, found, costs, len(texts)) for one in settings]
  record = _record(config, points, len(texts))
  show(console, record, config.output_file)
  return record


def levels_a_call(path: str | os.PathLike[str]) -> dict[Setting, float]:
  """What a record of `beam_grid` says of each of its speculative settings.

  Raises:
    ValueError: the file is not such a record.
  """
  found = load(path, 'table')
  if 'choices' not in found:
    raise ValueError(
      f'{path!r} is not a record of beam searches: expected one that `specdec'
      ' measure --gin_file=gin/runs/beams_demo.gin` wrote.'
    )
  return {
    Setting.of(one): one['levels'] for one in found['points'] if one['gamma']
  }


def _decode_all(config, engine, texts, settings, advance):
  """What each setting took, by setting."""
  found = {one: _Found() for one in settings}
  for number in range(config.repeats + 1):
    beams: dict[int, list[list[int]]] = {}
    for setting in settings:
      begin = time.perf_counter()
      outputs = [
        engine.generate([text], **_options(config, setting)) for text in texts
      ]
      took = time.perf_counter() - begin
      advance()
      one = found[setting]
      if number:  # the first one compiled
        one.seconds.append(took)
        continue
      stats = total([best.stats for *_, best in outputs])
      one.num_calls = stats.num_target_calls
      one.num_levels = stats.num_tokens
      tokens = [[beam.tokens for beam in of_text] for of_text in outputs]
      plain = beams.setdefault(setting.width, tokens)
      one.num_differences = sum(
        a != b for a, b in zip(plain, tokens, strict=True)
      )
    advance.say('Measuring')
  return found


def _options(config: BeamGridConfig, setting: Setting) -> dict[str, Any]:
  """What `Engine.generate` is asked for."""
  if not setting.width:
    return {'speculative': False}
  options = {
    'num_beams': setting.width,
    'num_samples': setting.width,
    'alpha': config.alpha,
    'speculative': setting.gamma > 0,
  }
  if setting.gamma:
    options |= {'gamma': setting.gamma, 'draft_beams': setting.draft_beams}
  return options


def _costs(
  engine: Engine, texts, settings: Sequence[Setting], repeats: int, advance
) -> dict[tuple[str, int], float]:
  """Seconds of a call of 'target' and 'draft' over so many tokens."""
  sizes = {
    ('target', one.width + one.gamma * one.draft_beams) for one in settings
  }
  for one in settings:
    if one.gamma:
      sizes |= {('draft', 2 * one.width), ('draft', one.draft_beams)}
  sizes -= {('target', 0)}
  drafter = engine.drafter
  assert drafter is not None and drafter.network is not None  # it gave beams
  pairs = {
    'target': Pair(engine.target, None, engine.params),
    'draft': Pair(
      drafter.network, None, engine.params._replace(target=engine.params.draft)
    ),
  }
  longest = max(texts, key=engine.num_input_tokens)
  widest = max(settings, key=lambda one: one.gamma * one.draft_beams)
  request = engine.request(
    [longest],
    gamma=widest.gamma,
    num_beams=widest.width,
    draft_beams=widest.draft_beams,
  )
  encoded = encoded_for(
    drafter, engine.target, engine.params.target, request.inputs
  )
  functions = {
    f'{model} {size}': calls.target_calls(
      pairs[model], request, size, _CALLS_A_RUN, encoded
    )
    for model, size in sorted(sizes)
  }
  seconds = timing.interleave(functions, repeats + 1, advance)
  return {
    (model, size): statistics.median(seconds[f'{model} {size}']) / _CALLS_A_RUN
    for model, size in sorted(sizes)
  }


def predicted_speed_up(
  setting: Setting, levels: float, costs: Mapping[tuple[str, int], float]
) -> float:
  """Levels a call over the cost of a round, in calls of the plain search.

  Args:
    setting: a speculative one.
    levels: levels a call.
    costs: the times of calls of 'target' and 'draft', by tokens in a call. The
      drafter first reads 2 K tokens, then U of each level but the last.
  """
  width, gamma, draft_beams = setting
  a_round = costs['target', width + gamma * draft_beams]
  a_round += costs['draft', 2 * width]
  a_round += (gamma - 1) * costs['draft', draft_beams]
  return levels * costs['target', width] / a_round


def _point(
  setting: Setting,
  found: Mapping[Setting, _Found],
  costs: Mapping[tuple[str, int], float],
  num_lines: int,
) -> dict[str, Any]:
  """The numbers of one setting; times are in ms."""
  one, plain = found[setting], found[Setting(setting.width)]
  pairs = zip(plain.seconds, one.seconds, strict=True)
  factors = sorted(before / after for before, after in pairs)
  levels = one.num_levels / one.num_calls
  median = 1e3 * statistics.median(one.seconds)
  return setting._asdict() | {
    'levels': levels,
    'call_ms': median / one.num_calls,
    'line_ms': median / num_lines,
    'speed_up': statistics.median(factors),
    'least': factors[0],
    'most': factors[-1],
    'predicted': predicted_speed_up(setting, levels, costs)
    if setting.gamma
    else None,
    'differences': one.num_differences,
  }


def _best(
  points: Sequence[Mapping[str, Any]], by: str
) -> dict[str, Any] | None:
  best = max(points, key=lambda one: one[by])
  if best[by] <= 1:
    return None
  return {name: best[name] for name in ('gamma', 'draft_beams', by)}


def _record(
  config: BeamGridConfig, points: Sequence[Mapping[str, Any]], lines: int
) -> Record:
  columns = (
    Column('beams', missing='greedy'),
    Column('gamma', missing='plain'),
    "drafter's beams",
    Column('levels a call', '.2f'),
    Column('call', '.2f', 'ms'),
    Column('line', '.1f', 'ms'),
    Column('speed-up', '.2f'),
    'least to most',
    Column('predicted', '.2f'),
  )
  rows = [
    [
      one['width'] or None,
      one['gamma'] or None,
      one['draft_beams'] or None,
      one['levels'] if one['gamma'] else None,
      one['call_ms'],
      one['line_ms'],
      one['speed_up'] if one['gamma'] else None,
      between(one['least'], one['most']) if one['gamma'] else None,
      one['predicted'],
    ]
    for one in points
  ]
  choices, notes = {}, []
  for width in dict.fromkeys(config.widths):
    own = [one for one in points if one['width'] == width and one['gamma']]
    choices[str(width)] = {
      by: _best(own, name)
      for by, name in (('measured', 'speed_up'), ('predicted', 'predicted'))
    }
    notes.append(f'{width} beams: {_verdict(choices[str(width)])}')
  differences = sum(one['differences'] for one in points)
  searches = lines * sum(one['gamma'] > 0 for one in points)
  notes.append(
    f'Speculative searches whose beams are not those of the plain search:'
    f' {differences} of {searches}.'
  )
  title = (
    f'Beam search, alpha {config.alpha:g}: {lines} lines of'
    f' {config.input_file}, one at a time, {config.repeats} repetitions'
  )
  table = Table(title, columns, rows, notes)
  return table.record(points=list(points), choices=choices)


def _verdict(choice: Mapping[str, Any]) -> str:
  """What is best for a width, by measured and by predicted times."""

  def said(by: str, name: str) -> str:
    best = choice[by]
    if best is None:
      return f'no speculation pays by {by} times'
    return (
      f'best by {by} times is gamma {best["gamma"]} with'
      f' {best["draft_beams"]} beams of the drafter, {best[name]:.2f}'
    )

  return f'{said("measured", "speed_up")}; {said("predicted", "predicted")}.'
