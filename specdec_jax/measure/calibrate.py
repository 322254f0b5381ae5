"""Calibrates a pair here: measures costs and acceptance, and chooses gamma.

`calibrate` measures both, which takes minutes. `for_host` takes the acceptance
from a record that is shipped with the drafter, because acceptance does not
depend on the processor, and times a few calls, once on each host.
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

# The timed rounds have these gammas; they give the time of a proposal, and that
# of a round without its calls.
_ROUND_GAMMAS = 1, 4, 8
MOST_GAMMA = 64  # a program is compiled for each gamma
# On an idle machine, prediction and run differ by a smaller factor.
_MOST_APART = 1.25
_RUN_TEXTS, _RUN_REPEATS = 16, 3
# Options of `generate` that decode until the first token.
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
    max_gamma: the largest gamma considered; calls are timed over up to one more
      token.
    repeats: timed rounds; each round has all runs, in random order.
    minutes: when measurements are cut short; 0: no limit.
    output_file: JSON for `specdec decode`; None writes nothing.

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


# A dict for each number of rows, with 'batch' and with 'times_ms', which is a
# result of `calls.steady_ms`.
Costs = Sequence[Mapping[str, Any]]


def calibrate(
  config: CalibrateConfig,
  console: Console | None = None,
  costs: Costs | None = None,
  until: float = math.inf,
) -> Calibration:
  """Measures costs and alpha, chooses gamma, and prints the reasons.

  Some prompts are also decoded with the gamma that is chosen for one row; its
  speed-up is the lower one of that run and of the prediction.

  Args:
    config: the calibration.
    console: shows the results; None uses stdout.
    costs: result of `time_calls` for a drafter of the same shape; None times
      the calls here.
    until: when measurements are cut short (`time.monotonic()`).

  Raises:
    ValueError: the pair does not fit, or no prompt can be decoded.
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
    # The error of an acceptance rate comes from differences between texts.
    expected = 'two texts or more that can be decoded'
    raise unexpected('input_file', expected, config.input_file)
  if costs is None:  # timing takes at most half of the time that is left
    now = time.monotonic()
    costs = time_calls(config, engine, console, now + (until - now) / 2)
  with bar(console, 'Tokens', config.num_tokens) as advance:
    args = engine, texts, config.temperature, config.num_tokens, advance, until
    options: Record = {'most_gamma': config.max_gamma, 'seed': config.seed}
    measured = rates(*args, **options)
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
  """Times the calls and rounds of a pair; the drafter's values do not matter.

  Args:
    config: the calibration.
    engine: the engine to time.
    console: shows the progress.
    until: when timing is cut short (`time.monotonic()`).

  Raises:
    ValueError: the pair does not fit.
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
      args = engine, config, batch, range(1, most + 2), gammas
      times = _times(*args, advance, until)
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
  """Lowers the predicted speed-up for one row to a measured one, if smaller.

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
  args = methods, part, parts, _RUN_REPEATS
  options: Record = {'temperature': predicted.temperature, 'seed': 0}
  timed = calls.decode_in_turn(*args, until=until, **options)
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

  A call's time and what an output takes besides its calls, such as that of the
  encoder, the tokenizer and the transfers, are those of the run itself, for the
  machine may have been quicker or slower when calls were timed. The rest is
  ratios of these timings.

  Args:
    measured: the calibration.
    gamma: proposals per round.
    plain: texts that were decoded plainly.
    start: the same, until each has its first token, see `START`.
    mean: np.mean or np.median, over the repetitions.
  """
  costs = call_costs(medians(measured.times_ms(1)))
  # Older calibrations have no rounds.
  rounds = measured.record['acceptance_rate'].get('rounds', ())
  length = (plain.tokens // len(plain.ms)).mean().item()
  plain_ms, start_ms = (mean(x.ms, axis=0).mean() for x in (plain, start))
  call_ms = (plain_ms - start_ms) / max(length - 1, 1)
  if gamma >= min(len(rounds), len(costs.call_cost)):
    return None
  # A disturbed run may have been quicker than its start.
  if call_ms > 0:
    costs = costs._replace(start=max(costs.start, start_ms / call_ms - 1))
  return float(costs.speed_up(length, length * rounds[gamma], gamma))


def _conclude(
  engine: Engine, temperature: float, rate: Record, costs: Costs
) -> Calibration:
  """Chooses a gamma for each number of rows, by measured acceptance and costs.

  It assumes that outputs are as long as those that acceptance was measured on.
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
    call_cost: v(1), v(2), ....
    cost_ratio: c, the cost of a proposal.
    round_cost: cost of a round besides its calls.
    start: cost of the call that reads the input.
    draft_start: cost of the drafter's call that reads the input.
  """

  call_cost: Sequence[float]
  cost_ratio: float
  round_cost: float = 0.0
  start: float = 0.0
  draft_start: float = 0.0

  def speed_up(self, length: float, rounds: float, gamma: int) -> float:
    """Returns the expected speed-up of outputs that are decoded one at a time.

    Unlike the factor per token it counts the calls that read the input.

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
  """Returns the costs that follow from times, see `calls.steady_ms`.

  Costs of calls are interpolated between the sizes that were timed, and a call
  over more tokens costs at least as much as one over fewer. A line is fitted to
  (round minus the target's call) over gamma: its slope is c, its value at gamma
  0 is the cost of a round besides its calls. Neither is below 0, because the
  cost of a small drafter can be lost in noise. With a single gamma the whole
  difference is the cost of proposals.
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
    costs: the costs; the largest gamma is one less than the sizes of calls.
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
    A sentence for each number of rows, the costs and factors of every gamma,
    and a sentence on the acceptance rate.
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


# `for_host` times these, which takes a second or two after compilation.
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
    acceptance_file: a record of acceptance, see `acceptance`; its row of
      this pair and the nearest temperature counts.
    rows: rows that are decoded together.
    temperature: temperature of the run.
    console: shows a sentence if the timings contradict each other.
    when: when calls are timed: if that was not done before, never, or always.

  Returns:
    The calibration. None if the times are unknown or contradict each other, or
    if the record has no row of this pair, whose acceptance is then unknown.

  Raises:
    ValueError: the file is no such record.
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
  """Checks times from the cache of a host.

  Raises:
    ValueError, LookupError, TypeError: they are not a result of `host_times`.
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
  """Returns milliseconds of the encoders, a round, and calls: medians.

  Raises:
    CalibrationError: they contradict each other.
  """
  # Each call then fits into a cache of 128 slots.
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
