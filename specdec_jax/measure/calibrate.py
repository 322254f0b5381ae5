"""Calibration: costs and acceptance of a pair here, and the gamma they give.

`calibrate` measures both, in minutes. `for_host` takes the acceptance from a
record that is shipped with the drafter, since what the target accepts does not
depend on the processor, and times a few calls, once on each host.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from specdec_jax import analysis
from specdec_jax.checks.fields import Bound, unexpected
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import (
  Calibration,
  CalibrationError,
  Choice,
  contradiction,
)
from specdec_jax.engine.engine import Engine
from specdec_jax.files import host_cache, shipped
from specdec_jax.measure.acceptance import rates
from specdec_jax.measure.calls import (
  Run,
  Timing,
  call_runs,
  interleave,
  steady_ms,
)
from specdec_jax.models import backend
from specdec_jax.report import record
from specdec_jax.report.console import bar, say
from specdec_jax.report.table import Column, Table
from specdec_jax.text.tasks import read_prompts
from specdec_jax.types import Positive

# Rounds of these gammas say what a proposal takes, and what a round besides.
_ROUND_GAMMAS = 1, 4, 8
MOST_GAMMA = 64  # a program is compiled for each
# A prediction and a run of an idle machine differ by less, either way.
_MOST_APART = 1.25
_RUN_TEXTS, _RUN_REPEATS = 16, 3
_BUSY = 'Something keeps this machine busy: calibrate again when it is idle.'


@dataclasses.dataclass(frozen=True)
class CalibrateConfig(Timing):
  """A calibration.

  Attributes:
    engine: makes the engine, with a drafter.
    input_file: the user's own prompts, one a line.
    num_tokens: of the target's own, behind alpha.
    temperature: at which alpha and the costs are measured.
    batches: rows decoded together, in the costs; each has a gamma of its own.
    max_gamma: the largest gamma considered; v(m) is measured to one more.
    repeats: timed rounds, interleaved.
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
  repeats: Annotated[int, Bound(2, 10_000)] = dataclasses.field(
    default=9, kw_only=True
  )


# One entry per number of rows: 'batch', and 'times_ms', see `calls.in_ms`.
Costs = Sequence[Mapping[str, Any]]


def calibrate(
  config: CalibrateConfig,
  console: rich.console.Console | None = None,
  costs: Costs | None = None,
  until: float = math.inf,
) -> Calibration:
  """Measures costs and alpha, chooses gamma, says what it means.

  The gamma that is chosen for one row is also run, on some of the prompts, and
  is worth no more than in that run.

  Args:
    config: the calibration.
    console: where it is shown; None is stdout.
    costs: what `time_calls` returned, of a drafter of the same shape; None
      times the calls here.
    until: when measurements are cut short (`time.monotonic()`).

  Raises:
    ValueError: the pair does not fit, or no prompt can be decoded.
    CalibrationError: the timings contradict themselves.
  """
  console = record.begin(
    console, config.output_file, input_file=config.input_file
  )
  with bar(console, 'Loading the models'):
    engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )
  if len(set(texts)) < 2:
    # Of one there is no telling how sure its acceptance rate is.
    expected = 'two texts or more that can be decoded'
    raise unexpected('input_file', expected, config.input_file)
  if costs is None:  # in half of the time at most
    now = time.monotonic()
    costs = time_calls(config, engine, console, now + (until - now) / 2)
  with bar(console, 'Tokens', config.num_tokens) as advance:
    measured = rates(
      engine,
      texts,
      config.temperature,
      config.num_tokens,
      seed=config.seed,
      advance=advance,
      until=until,
    )
  # The closed forms know of no place without a proposal: there beta is 0.
  rate = measured.as_record(measured.overall)
  made = _concluded(engine, config.temperature, rate, costs)
  if made.choices[0].rows == 1 and made.choices[0].gamma:
    with bar(console, 'Running the pair'):
      made = _with_run(made, engine, texts, until)
  record.finish(config.output_file, console, made.to_json(), *report(made))
  return made


def time_calls(
  config: CalibrateConfig,
  engine: Engine,
  console: rich.console.Console,
  until: float = math.inf,
) -> Costs:
  """Times the calls and rounds of a pair; the drafter's values do not matter.

  Args:
    config: the calibration.
    engine: the engine to time.
    console: where progress is shown.
    until: when timing is cut short (`time.monotonic()`).

  Raises:
    ValueError: the pair does not fit.
    CalibrationError: the timings contradict themselves, or the time is over.
  """
  batches = sorted(set(config.batches))
  for batch in batches[::-1]:
    config.check_room(engine.room, engine.target, batch, config.max_gamma)
  gammas = {min(gamma, config.max_gamma) for gamma in _ROUND_GAMMAS}
  sizes = range(1, config.max_gamma + 2)
  costs = []
  with bar(console, 'Costs', len(batches) * config.repeats) as advance:
    for batch in batches:
      runs = call_runs(engine, config, batch, sizes, sorted(gammas), until)
      times, wrong = steady_ms(runs, config.repeats, advance, until)
      if wrong:
        raise _contradictory(wrong)
      costs.append({'batch': batch, 'times_ms': times})
  return costs


def _contradictory(wrong: str) -> CalibrationError:
  return CalibrationError(
    f'The timings contradict themselves: {wrong}. {_BUSY}'
  )


def _with_run(
  made: Calibration, engine: Engine, texts: Sequence[str], until: float
) -> Calibration:
  """The calibration, whose gamma for one row is worth no more than in a run."""
  choice = made.choices[0]
  # Of like lengths, so that few programs are compiled.
  by_length = sorted(dict.fromkeys(texts), key=engine.num_input_tokens)
  first = max(0, (len(by_length) - _RUN_TEXTS) // 2)
  part = by_length[first : first + _RUN_TEXTS]
  options = {'temperature': made.temperature, 'log_probs': False}
  ms, lengths = _run_ms(engine, part, choice.gamma, options, until)
  run = float(ms['plain'].sum() / ms['speculative'].sum())
  predicted = predicted_speed_up(made, choice.gamma, lengths, ms['plain'])
  assert predicted is not None  # the gamma was chosen by its costs
  worth = min(run, predicted)
  low, high = (x * worth / choice.expected_speed_up for x in choice.interval)
  ran = {'texts': len(part), 'gamma': choice.gamma, 'speed_up': run}
  choice = dataclasses.replace(
    choice,
    gamma=choice.gamma if worth > 1 else 0,
    expected_speed_up=max(worth, 1.0),
    interval=(low, high) if worth > 1 else (1.0, 1.0),
  )
  content = {**made.record, 'run': ran | {'predicted': predicted}}
  choices = (choice, *made.choices[1:])
  return dataclasses.replace(made, choices=choices, record=content)


def _run_ms(
  engine: Engine,
  texts: Sequence[str],
  gamma: int,
  options: Mapping[str, Any],
  until: float,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Decodes texts one by one, in both ways in turn.

  Returns:
    'plain' and 'speculative' -> milliseconds of each text; tokens of each.
  """
  ways: dict[str, Mapping[str, Any]] = {
    'plain': {'speculative': False},
    'speculative': {'gamma': gamma},
  }
  lengths = np.zeros(len(texts), int)

  def decode(way: str, number: int) -> None:
    (done,) = engine.generate([texts[number]], **options, **ways[way])
    lengths[number] = done.stats.num_tokens

  places = [(way, number) for way in ways for number in range(len(texts))]
  runs = {
    place: Run(functools.partial(functools.partial, decode, *place))
    for place in places
  }
  times = interleave(runs, _RUN_REPEATS, until=until)
  medians = {place: float(np.median(ms)) for place, ms in times.items()}
  numbers = range(len(texts))
  return {
    way: np.array([medians[way, number] for number in numbers]) for way in ways
  }, lengths


def predicted_speed_up(
  chosen: Calibration, gamma: int, lengths: np.ndarray, plain_ms: np.ndarray
) -> float | None:
  """The speed-up of outputs by a calibration; None if it does not say.

  Whatever plain decoding takes besides its calls, such as the encoder, the
  tokenizer and the way to the device, speculation is taken to need as well.

  Args:
    chosen: the calibration.
    gamma: proposals per round.
    lengths: tokens of each output.
    plain_ms: what plain decoding took for each.
  """
  times = {name: ms['median'] for name, ms in chosen.times_ms(1).items()}
  costs = call_costs(times)
  if gamma + 1 > len(costs.call_cost):
    return None
  besides = (plain_ms / times['call_1'] - lengths).mean().item()
  costs = costs._replace(start=max(costs.start, besides))
  alpha = chosen.record['acceptance_rate']['alpha']
  return costs.speed_up(lengths.tolist(), alpha, gamma)


def _concluded(
  engine: Engine, temperature: float, rate: Mapping[str, Any], costs: Costs
) -> Calibration:
  """The gamma for each number of rows, by an acceptance rate and by costs.

  It is that of outputs as long as those behind the acceptance rate.
  """
  choices = []
  length = max(1, round(rate['num_tokens'] / rate['num_outputs']))
  for one in costs:
    times = {name: ms['median'] for name, ms in one['times_ms'].items()}
    alpha, error, rows = rate['alpha'], rate['standard_error'], one['batch']
    choices.append(choose_gamma(alpha, error, call_costs(times), length, rows))
  content = {'acceptance_rate': dict(rate), 'costs': costs}
  return Calibration(
    fingerprints=engine.fingerprints,
    device=calibration.device_name(),
    temperature=temperature,
    choices=tuple(choices),
    record=content | {'machine': record.describe()},
  )


class CallCosts(NamedTuple):
  """What calls cost, in calls of the target over one token.

  Attributes:
    call_cost: v(1), v(2), ....
    cost_ratio: c, of a proposal.
    round_cost: what a round takes besides its calls.
    start: the call that reads the input.
    draft_start: what the drafter takes to read it.
  """

  call_cost: Sequence[float]
  cost_ratio: float
  round_cost: float = 0.0
  start: float = 0.0
  draft_start: float = 0.0

  def speed_up(
    self, lengths: Sequence[int], acceptance_rate: float, gamma: int
  ) -> float:
    """The expected speed-up of whole outputs, one at a time.

    Unlike the factor of a token it counts what both loops begin with, and the
    tokens of the last round that lie behind an output's end.

    Args:
      lengths: tokens of each output, its end included.
      acceptance_rate: alpha, of independent proposals.
      gamma: proposals per round; 0 is the plain loop.
    """
    if not gamma:
      return 1.0
    alpha = min(1.0, max(0.0, acceptance_rate))
    a_round = self.call_cost[gamma] + gamma * self.cost_ratio + self.round_cost
    plain = sum(self.start + length for length in lengths)
    starts = self.start + self.draft_start
    speculative = sum(
      starts + a_round * analysis.expected_rounds(alpha, gamma, length)
      for length in lengths
    )
    return plain / speculative


def call_costs(times: Mapping[str, float]) -> CallCosts:
  """Costs from times, see `calls.in_ms`; sizes of calls are interpolated.

  A call over more tokens is taken to cost no less than one over fewer. A line
  is fitted to (round minus the target's call) over gamma: its slope is c, its
  value at gamma 0 is what a round takes besides. Neither is below 0: a drafter
  whose cost is lost in noise costs nothing. With one gamma all of it counts as
  the proposals'.
  """

  one = times['call_1']
  sizes, calls = calibration.numbered(times, 'call_')
  # A token more costs nothing where kernels of one row are slower by noise.
  calls = np.maximum(calibration.rising(calls) / one, 1.0)
  call_cost = np.interp(range(1, sizes[-1] + 1), sizes, calls)
  gammas, rounds = calibration.numbered(times, 'round_')
  more = rounds / one - call_cost[gammas]
  slope, besides = 0.0, -1.0
  if len(gammas) > 1:
    slope, besides = np.polyfit(gammas, more, 1)
  if besides < 0:  # a line through nothing for none
    slope, besides = gammas @ more / (gammas @ gammas), 0.0
  if slope < 0:
    slope, besides = 0.0, max(0.0, more.mean())
  return CallCosts(
    tuple(call_cost.tolist()),
    float(slope),
    float(besides),
    times['encoder'] / one,
    times['draft_encoder'] / one,
  )


def choose_gamma(
  acceptance_rate: float, error: float, costs: CallCosts, length: int, rows: int
) -> Choice:
  """The gamma with the largest speed-up, see `CallCosts.speed_up`.

  Args:
    acceptance_rate: alpha.
    error: its standard error, which the interval follows.
    costs: the costs; gamma is less than the number of calls.
    length: tokens of an output.
    rows: the number of rows that these costs were measured with.
  """

  def speed_up(gamma: int, errors: float = 0.0) -> float:
    return costs.speed_up([length], acceptance_rate + errors * error, gamma)

  factors = tuple(map(speed_up, range(len(costs.call_cost))))
  gamma = int(np.argmax(factors))
  return Choice(
    rows=rows,
    gamma=gamma,
    expected_speed_up=factors[gamma],
    interval=(speed_up(gamma, -1.96), speed_up(gamma, 1.96)),
    factors=factors,
    cost_ratio=costs.cost_ratio,
    call_cost=tuple(costs.call_cost),
    round_cost=costs.round_cost,
  )


def report(made: Calibration) -> list[Table | str]:
  """Whether speculation pays with each number of rows, and what that rests on.

  Returns:
    A sentence for each number of rows, the costs and factors of every gamma,
    and a sentence on the acceptance rate.
  """
  verdicts = [_verdict(made, choice) for choice in made.choices]
  columns: list[Column | str] = ['gamma']
  cells: list[Sequence[Any]] = [range(len(made.choices[0].factors))]
  for choice in made.choices:
    for name in ('v(gamma + 1)', 'speed-up'):
      columns.append(Column(f'{name}, {_rows(choice.rows)}', '.2f'))
    cells += [choice.call_cost, choice.factors]
  rows = [list(row) for row in zip(*cells, strict=True)]
  rate = made.record['acceptance_rate']
  acceptance = (
    f'Acceptance {rate["alpha"]:.3f} ± {rate["standard_error"]:.3f} over'
    f' {rate["num_tokens"]} tokens at temperature {made.temperature:g}'
  )
  if rate['proposes'] < 1:
    share = 1 - rate['proposes']
    acceptance += f', none where nothing is proposed ({share:.0%} of them)'
  table = Table('What gamma is worth here', columns, rows)
  return [*verdicts, table, f'{acceptance}.']


def _verdict(made: Calibration, choice: Choice) -> str:
  """Whether speculation pays with so many rows, and what calls cost."""
  times = made.times_ms(choice.rows)
  ran, run = made.record.get('run', {}), ''
  if ran and choice.rows == 1:
    run = (
      f' A run of {ran["texts"]} of the texts with gamma {ran["gamma"]} was'
      f' {ran["speed_up"]:.2f} times as fast as plainly; by the costs'
      f' {ran["predicted"]:.2f} times.'
    )
    apart = ran['speed_up'] / ran['predicted']
    if not 1 / _MOST_APART <= apart <= _MOST_APART:
      run += f' {_BUSY}'
  costs = (
    f'{run} An input takes {times["encoder"]["median"]:.2f} ms, a call of the'
    f' target {times["call_1"]["median"]:.2f} ms, a proposal'
    f' {choice.cost_ratio:.3f} calls (c), a round besides'
    f' {choice.round_cost:.3f}.'
  )
  if not choice.gamma:
    return (
      f'{_rows(choice.rows)}: speculation does not pay here: no gamma is'
      f' expected to be quicker than plain decoding.{costs}'
    )
  low, high = choice.interval
  return (
    f'{_rows(choice.rows)}: speculation {"pays" if low >= 1 else "may pay"}'
    f' here: gamma = {choice.gamma}, expected speed-up'
    f' {choice.expected_speed_up:.2f} ({low:.2f} to {high:.2f}), for outputs of'
    f' {made.least_length(choice.rows)} tokens or more.{costs}'
  )


def _rows(count: int) -> str:
  return f'{count} row{"s" * (count > 1)}'


# What `for_host` times: a second or two besides compilation.
_HOST_SIZES = 1, 2, 4, 5, 8  # of calls; those between are interpolated
_HOST_GAMMA = 7  # of the rounds
_HOST_TIMES = (
  'encoder',
  'draft_encoder',
  f'round_{_HOST_GAMMA}',
  *(f'call_{size}' for size in _HOST_SIZES),
)


def for_host(
  engine: Engine,
  acceptance_file: str,
  rows: int,
  temperature: float,
  console: rich.console.Console,
) -> Calibration | None:
  """Times calls of a pair here, unless that was done before, and chooses gamma.

  Args:
    engine: an engine with a drafter.
    acceptance_file: a record of acceptance, see `acceptance`; its row of
      this pair and the nearest temperature counts.
    rows: that are decoded together.
    temperature: of the run.
    console: where it is said that the timings contradict themselves.

  Returns:
    The calibration; None if they do, or if the record has no row of this pair,
    whose acceptance is then not known.

  Raises:
    ValueError: the file is no such record.
  """
  pair = dict(engine.fingerprints)
  rows_of_pair = [
    row
    for row in record.load(shipped.find(acceptance_file), 'alpha')['rows']
    if row.get('fingerprints') == pair and row['lenience'] == 1
  ]
  if not rows_of_pair:
    return None
  rate = min(
    rows_of_pair, key=lambda row: abs(row['temperature'] - temperature)
  )
  key = {
    **backend.host(),
    'device': calibration.device_name(),
    'layout': engine.kernel_layout,
    'fingerprints': pair,
    'rows': rows,
    'greedy': temperature == 0,
    'times': list(_HOST_TIMES),
  }
  times: dict[str, float] | None = None
  try:
    times = host_cache.kept(
      'calls', key, lambda: host_times(engine, rows, temperature), _read_times
    )
  except CalibrationError as error:
    say(console, f'No gamma is chosen by timing. {error}')
  if jax.process_count() > 1:  # all of them choose by the times of the first
    mine = times or dict.fromkeys(_HOST_TIMES, math.nan)
    numbers = [mine[name] for name in _HOST_TIMES]
    agreed = map(float, multihost_utils.broadcast_one_to_all(numbers))
    times = dict(zip(_HOST_TIMES, agreed, strict=True))
  if times is None or math.isnan(min(times.values())):
    return None
  # The closed forms know of no place without a proposal: there beta is 0.
  rate = rate | {'alpha': rate.get('proposes', 1.0) * (rate['alpha'] or 0.0)}
  medians = {name: {'median': ms} for name, ms in times.items()}
  costs = [{'batch': rows, 'times_ms': medians}]
  return _concluded(engine, temperature, rate, costs)


def _read_times(value: Mapping[str, Any]) -> dict[str, float]:
  """The times of a host that were kept.

  Raises:
    ValueError, LookupError, TypeError: they are not what `host_times` returns.
  """
  times = {name: float(value[name]) for name in _HOST_TIMES}
  for name, ms in times.items():
    if not 0 <= ms < math.inf or not (ms or name == 'draft_encoder'):
      raise unexpected(name, 'a number of milliseconds above 0', ms)
  if wrong := contradiction(times):
    raise ValueError(wrong)
  return times


def host_times(
  engine: Engine, rows: int, temperature: float
) -> dict[str, float]:
  """Milliseconds of each of `_HOST_TIMES`: medians of runs in turn.

  Raises:
    CalibrationError: they contradict themselves.
  """
  timing = Timing(
    decode_len=112,  # 128 slots of a cache, with any of the calls
    temperature=temperature,
    calls_a_run=10,
    repeats=5,
  )
  runs = call_runs(engine, timing, rows, _HOST_SIZES, (_HOST_GAMMA,))
  times, wrong = steady_ms(runs, timing.repeats)
  if wrong:
    raise _contradictory(wrong)
  return {name: times[name]['median'] for name in _HOST_TIMES}


def host_verdict(made: Calibration) -> str:
  """A line with the numbers that decided in `for_host`."""
  (choice,) = made.choices
  sizes = _HOST_SIZES[1:]
  costs = ', '.join(f'{choice.call_cost[size - 1]:.2f}' for size in sizes)
  return (
    'On this host a call of the target over one token takes'
    f' {made.times_ms(choice.rows)["call_1"]["median"]:.2f} ms, one over'
    f' {", ".join(map(str, sizes))} tokens {costs} times that, and a proposal'
    f' {choice.cost_ratio:.2f};'
    f' {made.record["acceptance_rate"]["alpha"]:.0%} of the proposals are'
    ' accepted.'
  )
