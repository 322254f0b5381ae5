"""Calibrates a pair on this machine: measures, and chooses gamma.

`calibrate` measures the costs of calls and the acceptance rate, which takes
minutes. `for_host` takes the acceptance rate from a record that is shipped with
the drafter, because it does not depend on the processor, and times a few calls,
once on each host.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from specdec_jax.checks.fields import Bound, unexpected
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration, CalibrationError, Choice
from specdec_jax.engine.engine import Engine
from specdec_jax.files import host_cache, shipped
from specdec_jax.measure import calls
from specdec_jax.measure.acceptance import rates
from specdec_jax.measure.calls import Timed, Timing, medians
from specdec_jax.models import backend
from specdec_jax.report import Column, Record, Table, bar, record, say
from specdec_jax.text.tasks import read_prompts
from specdec_jax.types import Minutes, Positive

# Rounds with these gammas are timed. The time of a proposal, and the time of a
# round besides its calls, follow from them.
_ROUND_GAMMAS = 1, 4, 8
MOST_GAMMA = 64  # a program is compiled for each gamma
# On an idle machine the predicted and the measured speed-up differ by less than
# this factor.
_MOST_APART = 1.25
_RUN_TEXTS, _RUN_REPEATS = 16, 3
# With these options `generate` decodes only the first token.
START: dict[str, Any] = {'speculative': False, 'max_length': 1}
When = Literal['unknown', 'never', 'always']
_BUSY = 'Something keeps this machine busy: calibrate again when it is idle.'


@dataclasses.dataclass(frozen=True)
class CalibrateConfig(Timing):
  """Settings of a calibration.

  Attributes:
    engine: makes the engine, with a drafter.
    input_file: the user's own prompts, one a line.
    num_tokens: tokens of the target that alpha is measured on.
    temperature: temperature at which alpha and the costs are measured.
    batches: numbers of rows that are decoded together; a gamma is chosen for
      each.
    max_gamma: the largest gamma considered; calls over up to max_gamma + 1
      tokens are timed.
    repeats: how often each call and round is timed; they take turns, in random
      order.
    minutes: minutes after which measurements are cut short; 0: no limit.
    output_file: path of the calibration, JSON for `specdec decode`; None writes
      no file.

  Raises:
    ValueError: a number is out of its range.
  """

  engine: Callable[[], Engine]
  input_file: str
  num_tokens: Positive = 2000
  batches: Annotated[Sequence[Positive], Bound(1)] = (1,)
  max_gamma: Annotated[int, Bound(1, MOST_GAMMA)] = 16
  output_file: str | None = None
  minutes: Minutes = 60.0
  _: dataclasses.KW_ONLY
  repeats: Annotated[int, Bound(2, 10_000)] = 9


# A dict for each number of rows: 'batch' is that number, 'times_ms' the first
# result of `calls.steady_ms`.
Costs = Sequence[Mapping[str, Any]]


def calibrate(
  config: CalibrateConfig,
  console: Console | None = None,
  costs: Costs | None = None,
  until: float = math.inf,
) -> Calibration:
  """Measures costs and alpha, chooses gamma, and prints the reasons.

  Some prompts are also decoded with the gamma that is chosen for one row. The
  lower of the predicted and the measured speed-up is then reported.

  Args:
    config: the settings of the calibration.
    console: shows the results; None uses stdout.
    costs: result of `time_calls` for a drafter of the same shape; None times
      the calls here.
    until: when measurements are cut short (`time.monotonic()`).

  Raises:
    ValueError: the pair does not fit into memory, or no prompt can be decoded.
    CalibrationError: the timings contradict each other.
  """
  console = record.begin(console, config.output_file, config.input_file)
  until = min(until, time.monotonic() + (60 * config.minutes or math.inf))
  with bar(console, 'Loading the models'):
    engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.config.max_input_len
  )
  if len(set(texts)) < 2:
    # The standard error of an acceptance rate needs differences between texts.
    expected = 'two texts or more that can be decoded'
    raise unexpected('input_file', expected, config.input_file)
  if costs is None:  # timing takes at most half of the time that is left
    now = time.monotonic()
    costs = time_calls(config, engine, console, now + (until - now) / 2)
  with bar(console, 'Tokens', config.num_tokens) as advance:
    measured = rates(
      engine,
      texts,
      config.temperature,
      config.num_tokens,
      advance,
      until,
      most_gamma=config.max_gamma,
      seed=config.seed,
    )
  rate = measured.as_record(measured.overall)
  result = _conclude(engine, config.temperature, rate, costs)
  if result.choices[0].rows == 1 and result.choices[0].gamma:
    with bar(console, 'Running the pair'):
      result = _with_run(result, engine, texts, until)
  record.finish(config.output_file, console, result.to_json(), *report(result))
  return result


def time_calls(
  config: CalibrateConfig, engine: Engine, console: Console, until: float
) -> Costs:
  """Times the calls and rounds of a pair.

  The values of the drafter's parameters do not matter.

  Args:
    config: the settings of the calibration.
    engine: the engine whose pair is timed.
    console: shows the progress.
    until: when timing is cut short (`time.monotonic()`).

  Raises:
    ValueError: the pair does not fit into memory.
    CalibrationError: the timings contradict each other, or the time is over.
  """
  batches = sorted(set(config.batches))
  most = config.max_gamma
  for batch in batches[::-1]:
    check = engine.programs.memory_check
    config.check_fits(check, engine.target, batch, most)
  gammas = sorted({min(gamma, most) for gamma in _ROUND_GAMMAS})
  costs = []
  with bar(console, 'Costs', len(batches) * config.repeats) as advance:
    for batch in batches:
      sizes = range(1, most + 2)
      times = _times(engine, config, batch, sizes, gammas, advance, until)
      costs.append({'batch': batch, 'times_ms': times})
  return costs


def _times(
  engine: Engine,
  timing: Timing,
  batch: int,
  sizes: Sequence[int],
  gammas: Sequence[int],
  advance: Callable[..., None] = lambda *_: None,
  until: float = math.inf,
) -> dict[str, dict[str, float]]:
  """Times calls; raises CalibrationError if the times contradict each other."""
  runs = calls.call_runs(engine, timing, batch, sizes, gammas, until)
  times, wrong = calls.steady_ms(runs, timing.repeats, advance, until)
  if wrong:
    raise CalibrationError(f'Timings contradict themselves: {wrong}. {_BUSY}')
  return times


def _with_run(
  predicted: Calibration, engine: Engine, texts: Sequence[str], until: float
) -> Calibration:
  """Replaces the predicted speed-up for one row by a lower measured one.

  Some texts are decoded one by one, plainly and speculatively in turn.
  """
  choice = predicted.choices[0]
  gamma = choice.gamma
  # Texts of similar lengths need few programs.
  by_length = sorted(dict.fromkeys(texts), key=engine.num_input_tokens)
  first = max(0, (len(by_length) - _RUN_TEXTS) // 2)
  part = by_length[first : first + _RUN_TEXTS]
  methods: dict[str, tuple[Engine, dict[str, Any]]] = {
    'start': (engine, START),
    'plain': (engine, {'speculative': False}),
    'speculative': (engine, {'gamma': gamma}),
  }
  parts = [[index] for index in range(len(part))]
  timed = calls.decode_in_turn(
    methods,
    part,
    parts,
    _RUN_REPEATS,
    until=until,
    temperature=predicted.temperature,
    seed=0,
  )
  start, plain, speculative = timed.values()
  plain_ms, ms = (np.median(x.ms, axis=0).sum() for x in (plain, speculative))
  measured = float(plain_ms / ms)
  expected = predicted_speed_up(predicted, gamma, plain, start, np.median)
  assert expected is not None  # the gamma was chosen by its costs
  speed_up = min(measured, expected)
  low, high = (x * speed_up / choice.expected_speed_up for x in choice.interval)
  run: Record = {'texts': len(part), 'gamma': gamma}
  run |= {'speed_up': measured, 'predicted': expected}
  # A pair that is slower than plain decoding gets gamma 0.
  new: Record = {'gamma': 0, 'expected_speed_up': 1.0, 'interval': (1.0, 1.0)}
  if speed_up > 1:
    new = {'expected_speed_up': speed_up, 'interval': (low, high)}
  choices = dataclasses.replace(choice, **new), *predicted.choices[1:]
  values = {**predicted.record, 'run': run}
  return dataclasses.replace(predicted, choices=choices, record=values)


def predicted_speed_up(
  measured: Calibration, gamma: int, plain: Timed, start: Timed, mean: Any
) -> float | None:
  """Predicts the speed-up of outputs; None if there are no costs of `gamma`.

  The time of a call, and the time that an output takes besides its calls
  (encoder, tokenizer, transfers), come from `plain` and `start`, because the
  machine may have been faster or slower during the calibration. Only ratios of
  times come from the calibration.

  Args:
    measured: the calibration from which ratios of times and acceptance come.
    gamma: proposals per round.
    plain: texts that were decoded plainly.
    start: the same texts, decoded up to their first token, see `START`.
    mean: np.mean or np.median, over the repetitions.
  """
  costs = call_costs(medians(measured.times_ms(1)))
  # Calibrations of older versions have no 'rounds'.
  rounds = measured.record['acceptance_rate'].get('rounds', ())
  length = (plain.tokens // len(plain.ms)).mean().item()
  plain_ms, start_ms = (mean(x.ms, axis=0).mean() for x in (plain, start))
  call_ms = (plain_ms - start_ms) / max(length - 1, 1)
  if gamma >= min(len(rounds), len(costs.call_cost)):
    return None
  # Noise may make the whole run seem quicker than its start.
  if call_ms > 0:
    costs = costs._replace(start=max(costs.start, start_ms / call_ms - 1))
  return float(costs.speed_up(length, length * rounds[gamma], gamma))


def _conclude(
  engine: Engine, temperature: float, rate: Record, costs: Costs
) -> Calibration:
  """Chooses a gamma for each number of rows, by measured acceptance and costs.

  Outputs are assumed to be as long as those of the acceptance measurement.
  """
  choices = tuple(
    choose_gamma(rate, call_costs(medians(x['times_ms'])), x['batch'])
    for x in costs
  )
  values = {'acceptance_rate': dict(rate), 'costs': costs}
  values['machine'] = record.describe()
  where = engine.fingerprints, backend.device_name()
  return Calibration(*where, temperature, choices, values)


class CallCosts(NamedTuple):
  """The costs of calls; the unit is a call of the target over one token.

  Attributes:
    call_cost: v(1), v(2), ...: the cost of a call over 1, 2, ... tokens.
    cost_ratio: c, the cost of a proposal.
    round_cost: cost of a round besides its calls.
    start: cost of the target's call that reads the input.
    draft_start: cost of the drafter's call that reads the input.
  """

  call_cost: Sequence[float]
  cost_ratio: float
  round_cost: float = 0.0
  start: float = 0.0
  draft_start: float = 0.0

  def speed_up(self, length: float, rounds: float, gamma: int) -> float:
    """Returns the expected speed-up of outputs that are decoded one at a time.

    Unlike the paper's factor per token, it includes the calls that read the
    input.

    Args:
      length: mean number of tokens, the end included.
      rounds: mean number of rounds, see `analysis.expected_rounds`.
      gamma: proposals per round; 0 is the plain loop.
    """
    if not gamma:
      return 1.0
    a_round = self.call_cost[gamma] + gamma * self.cost_ratio + self.round_cost
    starts = self.start + self.draft_start
    return (self.start + length) / (starts + a_round * rounds)


def call_costs(times: Mapping[str, float]) -> CallCosts:
  """Returns the costs of calls that follow from the median times of calls.

  Costs of calls are interpolated between the sizes that were timed, and a call
  over more tokens costs at least as much as one over fewer. The time of a round
  less that of the target's call is fitted by a line as a function of gamma. The
  line's slope is c, and its value at gamma 0 is the cost of a round besides its
  calls. Negative results, by noise around the cost of a small drafter, become
  0. With a single gamma the whole difference is the cost of proposals.

  Args:
    times: name -> milliseconds, with the names of `calls.steady_ms`.
  """
  unit = times['call_1']
  sizes, call_ms = calibration.numbered(times, 'call_')
  # Noise in kernels of one row may make a call over two tokens seem cheaper.
  costs = np.maximum(calibration.rising(call_ms) / unit, 1.0)
  call_cost = np.interp(range(1, sizes[-1] + 1), sizes, costs)
  gammas, rounds = calibration.numbered(times, 'round_')
  more = rounds / unit - call_cost[gammas]
  slope, besides = 0.0, -1.0
  if len(gammas) > 1:
    slope, besides = np.polyfit(gammas, more, 1)
  if besides < 0:  # a line through the origin is fitted instead
    slope, besides = gammas @ more / (gammas @ gammas), 0.0
  if slope < 0:
    slope, besides = 0.0, max(0.0, more.mean())
  starts = times['encoder'] / unit, times['draft_encoder'] / unit
  proposal, a_round = float(slope), float(besides)
  return CallCosts(tuple(call_cost.tolist()), proposal, a_round, *starts)


def choose_gamma(rate: Record, costs: CallCosts, rows: int) -> Choice:
  """Chooses the gamma with the largest speed-up, see `CallCosts.speed_up`.

  Args:
    rate: a result of `Rates.as_record`; the errors of its rounds give the
      interval.
    costs: the costs of calls; gamma + 1 is at most their number of tokens.
    rows: the number of rows that these costs were measured with.
  """
  length = rate['num_tokens'] / rate['num_outputs']

  def speed_up(gamma: int, errors: float = 0.0) -> float:
    more = errors * (rate['rounds_errors'][gamma] or 0)
    rounds = max(rate['rounds'][gamma] + more, 1 / (gamma + 1))
    return costs.speed_up(length, length * rounds, gamma)

  sizes = min(len(costs.call_cost), len(rate['rounds']))
  factors = tuple(map(speed_up, range(sizes)))
  gamma = int(np.argmax(factors))
  interval = speed_up(gamma, 1.96), speed_up(gamma, -1.96)
  of_calls = costs.cost_ratio, tuple(costs.call_cost), costs.round_cost
  return Choice(rows, gamma, factors[gamma], interval, factors, *of_calls)


def report(measured: Calibration) -> list[Table | str]:
  """Reports whether speculation pays with each number of rows, and why.

  Returns:
    A sentence for each number of rows, a table with the costs and speed-ups of
    every gamma, and a sentence on the acceptance rate.
  """
  verdicts = [_verdict(measured, choice) for choice in measured.choices]
  columns: list[Column | str] = ['gamma']
  cells: list[Sequence[Any]] = [range(len(measured.choices[0].factors))]
  for choice in measured.choices:
    for name in ('v(gamma + 1)', 'speed-up'):
      columns.append(Column(f'{name}, {_rows(choice.rows)}', '.2f'))
    cells += [choice.call_cost, choice.factors]
  rows = [*zip(*cells, strict=True)]
  rate = measured.record['acceptance_rate']
  acceptance = (
    f'Acceptance {rate["alpha"]:.3f} ± {rate["standard_error"]:.3f} over'
    f' {rate["num_tokens"]} tokens at temperature {measured.temperature:g}'
  )
  if rate['proposes'] < 1:
    share = 1 - rate['proposes']
    acceptance += f', none where nothing is proposed ({share:.0%} of them)'
  table = Table('What gamma is worth here', columns, rows)
  return [*verdicts, table, f'{acceptance}.']


def _verdict(measured: Calibration, choice: Choice) -> str:
  """Says whether speculation pays with a number of rows, and why."""
  rows, low, high = _rows(choice.rows), *choice.interval
  if choice.gamma:
    verdict = (
      f'{rows}: speculation {"pays" if low >= 1 else "may pay"} here: gamma ='
      f' {choice.gamma}, expected speed-up {choice.expected_speed_up:.2f}'
      f' ({low:.2f} to {high:.2f}), for outputs of'
      f' {measured.least_length(choice.rows)} tokens or more.'
    )
  else:
    reason = 'no gamma is expected to be quicker than plain decoding'
    verdict = f'{rows}: speculation does not pay here: {reason}.'
  run = measured.record.get('run')
  if run and choice.rows == 1:
    verdict += (
      f' A run of {run["texts"]} of the texts with gamma {run["gamma"]} was'
      f' {run["speed_up"]:.2f} times as fast as plainly; by the costs'
      f' {run["predicted"]:.2f} times.'
    )
    apart = run['speed_up'] / run['predicted']
    if not 1 / _MOST_APART <= apart <= _MOST_APART:
      verdict += f' {_BUSY}'
  times = medians(measured.times_ms(choice.rows))
  return (
    f'{verdict} An input takes {times["encoder"]:.2f} ms, a call of the target'
    f' {times["call_1"]:.2f} ms, a proposal {choice.cost_ratio:.3f} calls (c),'
    f' a round besides {choice.round_cost:.3f}.'
  )


def _rows(count: int) -> str:
  return f'{count} row{"s" * (count > 1)}'


# `for_host` times these calls and rounds, which takes a second or two after
# compilation.
_HOST_SIZES = 1, 2, 5, 8  # numbers of tokens of the timed calls
_HOST_GAMMAS = 1, 7  # the gammas of the timed rounds
_HOST_TIMES = ['encoder', 'draft_encoder']
_HOST_TIMES += [f'round_{gamma}' for gamma in _HOST_GAMMAS]
_HOST_TIMES += [f'call_{size}' for size in _HOST_SIZES]


def for_host(
  engine: Engine,
  acceptance_file: str,
  rows: int,
  temperature: float,
  console: Console,
  when: When = 'unknown',
) -> Calibration | None:
  """Times calls of a pair here, unless that was done before, and chooses gamma.

  Args:
    engine: an engine with a drafter.
    acceptance_file: a record of acceptance rates, as `measure_alpha` writes it.
      The row of this pair whose temperature is nearest is used.
    rows: rows that are decoded together.
    temperature: temperature at which the run decodes.
    console: shows a sentence if the timings contradict each other.
    when: 'unknown' times calls unless this host has stored times of them,
      'never' takes only stored times, 'always' times calls in any case.

  Returns:
    The calibration. None if the times are unknown or contradict each other, or
    if the record has no row of this pair.

  Raises:
    ValueError: the file is not a record of acceptance rates.
  """
  pair = dict(engine.fingerprints)
  known = [
    row
    for row in record.load(shipped.find(acceptance_file), 'alpha')['rows']
    if row.get('fingerprints') == pair and row['lenience'] == 1
    if 'rounds' in row  # older records have none
  ]
  if not known:
    return None
  rate = min(known, key=lambda row: abs(row['temperature'] - temperature))
  key = {
    **backend.host(),
    'device': backend.device_name(),
    'layout': engine.kernel_layout,
    'fingerprints': pair,
    'rows': rows,
    'greedy': temperature == 0,
    'times': _HOST_TIMES,
  }
  times: dict[str, float] | None = None
  measure = functools.partial(host_times, engine, rows, temperature)
  try:
    if when == 'always':
      times = measure()
    else:
      make = measure if when == 'unknown' else None
      times = host_cache.measured('calls', key, make, _read_times)
  except CalibrationError as error:
    say(console, f'No gamma is chosen by timing. {error}')
  if jax.process_count() > 1:  # all use the times of the first process
    own_times = times or dict.fromkeys(_HOST_TIMES, math.nan)
    first = multihost_utils.broadcast_one_to_all([*own_times.values()])
    times = dict(zip(own_times, map(float, first), strict=True))
  if times is None or math.isnan(min(times.values())):
    return None
  summaries = {name: {'median': ms} for name, ms in times.items()}
  costs = [{'batch': rows, 'times_ms': summaries}]
  return _conclude(engine, temperature, rate, costs)


def _read_times(value: Mapping[str, Any]) -> dict[str, float]:
  """Returns the times in a value from the host's cache, after checks.

  Raises:
    ValueError, LookupError, TypeError: the value is not a result of
      `host_times`.
  """
  times = {name: float(value[name]) for name in _HOST_TIMES}
  for name, ms in times.items():
    if not 0 <= ms < math.inf or not (ms or name == 'draft_encoder'):
      raise unexpected(name, 'a number of milliseconds above 0', ms)
  if wrong := calibration.contradiction(times):
    raise ValueError(wrong)
  return times


def host_times(
  engine: Engine, rows: int, temperature: float
) -> dict[str, float]:
  """Returns the median milliseconds of encoders, rounds and calls of a pair.

  Raises:
    CalibrationError: the times contradict each other.
  """
  # With this length each call fits into a cache of 128 slots.
  sizes = {'decode_len': 112, 'calls_a_run': 10, 'repeats': 5}
  timing = Timing(temperature=temperature, **sizes)
  times = medians(_times(engine, timing, rows, _HOST_SIZES, _HOST_GAMMAS))
  return {name: times[name] for name in _HOST_TIMES}


def host_verdict(measured: Calibration) -> str:
  """Returns a sentence with the numbers by which `for_host` chose gamma."""
  (choice,) = measured.choices
  sizes = _HOST_SIZES[1:]
  costs = ', '.join(f'{choice.call_cost[size - 1]:.2f}' for size in sizes)
  call_ms = medians(measured.times_ms(choice.rows))['call_1']
  alpha = measured.record['acceptance_rate']['alpha']
  return (
    f'On this host a call of the target over one token takes {call_ms:.2f} ms,'
    f' one over {", ".join(map(str, sizes))} tokens {costs} times that, and a'
    f' proposal {choice.cost_ratio:.2f}; {alpha:.0%} of the proposals are'
    ' accepted.'
  )
