"""Calibration: costs and acceptance of a pair here, and the gamma they give.

`calibrate` measures both, in minutes. `for_host` takes the acceptance from a
record that is shipped with the drafter, since what the target accepts does not
depend on the processor, and times a few calls, once on each host.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from specdec_jax import analysis
from specdec_jax.checks.fields import Bound, unexpected
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration, Choice
from specdec_jax.engine.engine import Engine
from specdec_jax.files import host_cache, shipped
from specdec_jax.measure.acceptance import rates
from specdec_jax.measure.calls import Timing, call_runs, in_ms, interleave
from specdec_jax.measure.record import describe
from specdec_jax.measure.record import load as load_record
from specdec_jax.measure.table import Column, Table, bar, finish, started
from specdec_jax.models import backend
from specdec_jax.text.tasks import read_prompts
from specdec_jax.types import Positive

# Rounds of these gammas say what a proposal takes, and what a round besides.
_ROUND_GAMMAS = 1, 4, 8


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
  max_gamma: Positive = 16
  output_file: str | None = None
  repeats: Annotated[int, Bound(2)] = dataclasses.field(default=9, kw_only=True)


def calibrate(
  config: CalibrateConfig, console: rich.console.Console | None = None
) -> Calibration:
  """Measures costs and alpha, chooses gamma, says what it means.

  Raises:
    ValueError: the pair does not fit, or no prompt can be decoded.
  """
  console = started(config, console)
  with bar(console, 'Loading the models'):
    engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )
  if len(set(texts)) < 2:
    # Of one there is no telling how sure its acceptance rate is.
    expected = 'two texts or more that can be decoded'
    raise unexpected('input_file', expected, config.input_file)
  batches = sorted(set(config.batches))
  for batch in batches[::-1]:
    config.check_room(engine.room, engine.target, batch, config.max_gamma)
  gammas = {min(gamma, config.max_gamma) for gamma in _ROUND_GAMMAS}
  sizes = range(1, config.max_gamma + 2)
  costs = []
  with bar(console, 'Costs', len(batches) * config.repeats) as advance:
    for batch in batches:
      runs = call_runs(engine, config, batch, sizes, sorted(gammas))
      times = in_ms(interleave(runs, config.repeats, advance))
      costs.append({'batch': batch, 'times_ms': times})
  with bar(console, 'Tokens', config.num_tokens) as advance:
    measured = rates(
      engine,
      texts,
      config.temperature,
      config.num_tokens,
      seed=config.seed,
      advance=advance,
    )
  # The closed forms know of no place without a proposal: there beta is 0.
  rate = measured.as_record(measured.overall)
  made = _concluded(engine, config.temperature, config.decode_len, rate, costs)
  finish(config, console, made.to_json(), *report(made))
  return made


def _concluded(
  engine: Engine,
  temperature: float,
  length: int,
  rate: Mapping[str, Any],
  costs: Sequence[Mapping[str, Any]],
) -> Calibration:
  """The gamma for each number of rows, by an acceptance rate and by costs."""
  choices = []
  for one in costs:
    times = {name: ms['median'] for name, ms in one['times_ms'].items()}
    alpha, error, rows = rate['alpha'], rate['standard_error'], one['batch']
    choices.append(choose_gamma(alpha, error, call_costs(times), length, rows))
  record = {'acceptance_rate': dict(rate), 'costs': costs}
  return Calibration(
    fingerprints=engine.fingerprints,
    device=calibration.device_name(),
    temperature=temperature,
    choices=tuple(choices),
    record=record | {'machine': describe()},
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

  A line is fitted to (round minus the target's call) over gamma: its slope is
  c, its value at gamma 0 is what a round takes besides. Neither is below 0: a
  drafter whose cost is lost in noise costs nothing. With one gamma all of it
  counts as the proposals'.
  """

  def numbers(kind: str) -> np.ndarray:
    names = [name for name in times if name.startswith(kind)]
    return np.array(sorted(int(name.removeprefix(kind)) for name in names))

  one, sizes, gammas = times['call_1'], numbers('call_'), numbers('round_')
  calls = [times[f'call_{size}'] / one for size in sizes]
  call_cost = np.interp(range(1, sizes[-1] + 1), sizes, calls)
  more = np.array([times[f'round_{g}'] / one - call_cost[g] for g in gammas])
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
  costs = (
    f' An input takes {times["encoder"]["median"]:.2f} ms, a call of the target'
    f' {times["call_1"]["median"]:.2f} ms, a proposal {choice.cost_ratio:.3f}'
    f' calls (c), a round besides {choice.round_cost:.3f}.'
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
  engine: Engine, acceptance_file: str, rows: int, temperature: float
) -> Calibration | None:
  """Times calls of a pair here, unless that was done before, and chooses gamma.

  Args:
    engine: an engine with a drafter.
    acceptance_file: a record of acceptance, see `acceptance`; its row of
      this pair and the nearest temperature counts.
    rows: that are decoded together.
    temperature: of the run.

  Returns:
    The calibration; None if the record has no row of this pair, whose
    acceptance is then not known.

  Raises:
    ValueError: the file is no such record.
  """
  pair = dict(engine.fingerprints)
  rows_of_pair = [
    row
    for row in load_record(shipped.find(acceptance_file), 'alpha')['rows']
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
  times = host_cache.kept(
    'calls',
    key,
    lambda: host_times(engine, rows, temperature),
    lambda value: {name: float(value[name]) for name in _HOST_TIMES},
  )
  if jax.process_count() > 1:  # all of them choose by the times of the first
    agreed = multihost_utils.broadcast_one_to_all([*times.values()])
    times = dict(zip(times, map(float, agreed), strict=True))
  # The closed forms know of no place without a proposal: there beta is 0.
  rate = rate | {'alpha': rate.get('proposes', 1.0) * (rate['alpha'] or 0.0)}
  medians = {name: {'median': ms} for name, ms in times.items()}
  length = round(rate['num_tokens'] / rate['num_outputs'])
  costs = [{'batch': rows, 'times_ms': medians}]
  return _concluded(engine, temperature, length, rate, costs)


def host_times(
  engine: Engine, rows: int, temperature: float
) -> dict[str, float]:
  """Milliseconds of each of `_HOST_TIMES`: medians of runs in turn."""
  timing = Timing(
    decode_len=112,  # 128 slots of a cache, with any of the calls
    temperature=temperature,
    calls_a_run=10,
    repeats=5,
  )
  runs = call_runs(engine, timing, rows, _HOST_SIZES, (_HOST_GAMMA,))
  times = in_ms(interleave(runs, timing.repeats))
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
