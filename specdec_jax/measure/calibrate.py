"""Calibration: costs and acceptance of a pair here, and the gamma they give.

`calibrate` measures both, in minutes. `for_host` takes the acceptance from a
record that is shipped with the drafter, since what the target accepts does not
depend on the processor, and times a few calls, once on each host.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.console

from specdec_jax import analysis
from specdec_jax.checks.fields import (
  check_all_at_least,
  check_at_least,
  unexpected,
)
from specdec_jax.decoding import fallback
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import (
  Calibration,
  Choice,
  Confidence,
  Prices,
  rule_of,
)
from specdec_jax.engine.engine import Engine
from specdec_jax.files import host_cache, shipped
from specdec_jax.measure.acceptance import Output, Rates, rates
from specdec_jax.measure.calls import Timing, call_runs, in_ms, interleave
from specdec_jax.measure.record import describe
from specdec_jax.measure.record import load as load_record
from specdec_jax.measure.table import (
  Column,
  Table,
  bar,
  finish,
  started,
  status,
)
from specdec_jax.models import backend
from specdec_jax.text.local_tasks import read_prompts
from specdec_jax.types import LengthRule

# Rounds of these gammas say what a proposal takes, and what a round besides.
_MAIN_GAMMA, _ROUND_GAMMAS = 4, (1, 8)
# Of the rule of a draft whose length adapts.
_BINS = 10  # of confidence, with equally many tokens
_LONGEST = 15  # proposals at most
# What drafts that may end early must gain over those of a fixed gamma, because
# deciding takes time, and what was measured is not exact.
_LEAST_GAIN = 1.02
_TURNS = 4  # to find the rate that a rule itself reaches


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
    output_file: JSON for decode.py; None writes nothing.

  Raises:
    ValueError: a number is out of its range.
  """

  engine: Callable[[], Engine]
  input_file: str
  num_tokens: int = 2000
  batches: Sequence[int] = (1,)
  max_gamma: int = 16
  output_file: str | None = None
  repeats: int = dataclasses.field(default=9, kw_only=True)

  def __post_init__(self):
    super().__post_init__()
    check_at_least(self, num_tokens=1, max_gamma=1)
    check_all_at_least(self, batches=1)


def calibrate(
  config: CalibrateConfig, console: rich.console.Console | None = None
) -> Calibration:
  """Measures costs and alpha, chooses gamma, says what it means.

  Raises:
    ValueError: the pair does not fit, or no prompt can be decoded.
  """
  console = started(config, console)
  with status(console, 'Loading the models'):
    engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )
  if len(set(texts)) < 2:
    # Of one there is no telling how sure its acceptance rate is.
    raise unexpected(
      'input_file', 'two texts or more that can be decoded', config.input_file
    )
  batches = sorted(set(config.batches))
  for batch in batches[::-1]:
    config.check_room(engine.room, engine.target, batch, config.max_gamma)
  with bar(console, 'Costs', len(batches) * config.repeats) as advance:
    costs = [_costs(config, engine, batch, advance) for batch in batches]
  with bar(console, 'Tokens', config.num_tokens) as advance:
    measured = rates(
      engine,
      texts,
      config.temperature,
      config.num_tokens,
      seed=config.seed,
      advance=advance,
    )
  made = _conclude(config, engine, costs, measured)
  finish(config, console, made.to_json(), *report(made))
  return made


def _costs(
  config: CalibrateConfig,
  engine: Engine,
  batch: int,
  advance: Callable[[], None],
) -> dict[str, Any]:
  """Times the calls of one number of rows."""
  main = min(_MAIN_GAMMA, config.max_gamma)
  runs = call_runs(
    engine,
    config,
    batch,
    sizes=range(1, config.max_gamma + 2),
    gammas=[g for g in (main, *_ROUND_GAMMAS) if g <= config.max_gamma],
    adapting=(main,) if engine.drafter.adapts else (),
  )
  times = in_ms(interleave(runs, config.repeats, advance))
  return {'batch': batch, 'times_ms': times}


def _conclude(config, engine, costs, measured: Rates) -> Calibration:
  rate = measured.overall
  confidence = confidence_table(measured.outputs) if measured.outputs else None
  return Calibration(
    fingerprints=engine.fingerprints,
    device=calibration.device_name(),
    temperature=config.temperature,
    choices=tuple(_choice(config, one, measured, confidence) for one in costs),
    confidence=confidence,
    record={
      'acceptance_rate': {
        'alpha': rate.mean,
        'standard_error': rate.standard_error,
        'num_tokens': rate.num_tokens,
        'num_outputs': rate.num_outputs,
        'proposes': measured.proposes.mean,
      },
      'costs': costs,
      'machine': describe(),
    },
  )


def _choice(config, costs, measured: Rates, confidence) -> Choice:
  """The gamma, and the prices, that the costs of one number of rows give."""
  times = {name: ms['median'] for name, ms in costs['times_ms'].items()}
  calls = call_costs(times)
  # The closed forms know of no place without a proposal: there beta is 0.
  rate = measured.overall
  assert rate.standard_error is not None  # of two texts or more
  choice = choose_gamma(
    rate.mean, rate.standard_error, calls, config.decode_len, costs['batch']
  )
  prices = None
  if confidence is not None:
    main = min(_MAIN_GAMMA, config.max_gamma)
    more = times[f'adapting_{main}'] - times[f'round_{main}']
    more = max(0.0, more / times['call_1'])  # lost in noise it is nothing
    prices = best_prices(confidence, measured.outputs, calls, more)
  return dataclasses.replace(choice, prices=prices)


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
      gamma: proposals per round.
    """
    alpha = min(1.0, max(0.0, acceptance_rate))
    a_round = self.call_cost[gamma] + gamma * self.cost_ratio + self.round_cost
    plain = sum(self.start + length for length in lengths)
    speculative = sum(
      self.start
      + self.draft_start
      + a_round * analysis.expected_rounds(alpha, gamma, length)
      for length in lengths
    )
    return plain / speculative


def call_costs(times: Mapping[str, float]) -> CallCosts:
  """Costs from times, see `calls.in_ms`; sizes of calls are interpolated.

  What rounds of several gammas take besides the target's call lies about on a
  line: its slope is c, and what is left for gamma 0 a round takes besides.
  Neither is below 0: a drafter whose cost is lost in noise costs nothing. With
  one gamma all of it counts as the proposals'.
  """
  one = times['call_1']
  sizes = [int(n.removeprefix('call_')) for n in times if n.startswith('call')]
  sizes.sort()
  call_cost = np.interp(
    range(1, sizes[-1] + 1), sizes, [times[f'call_{m}'] / one for m in sizes]
  )
  gammas = np.array(
    [int(n.removeprefix('round_')) for n in times if n.startswith('round_')]
  )
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
  factors = [1.0]  # of gamma 0, the plain loop
  for gamma in range(1, len(costs.call_cost)):
    factors.append(costs.speed_up([length], acceptance_rate, gamma))
  gamma = int(np.argmax(factors))
  interval = 1.0, 1.0
  if gamma:
    low, high = (acceptance_rate + sign * 1.96 * error for sign in (-1, 1))
    interval = (
      costs.speed_up([length], low, gamma),
      costs.speed_up([length], high, gamma),
    )
  return Choice(
    rows=rows,
    gamma=gamma,
    expected_speed_up=factors[gamma],
    interval=interval,
    factors=tuple(factors),
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
    for name, values in (
      ('v(gamma + 1)', choice.call_cost),
      ('speed-up', choice.factors),
    ):
      columns.append(Column(f'{name}, {_rows(choice.rows)}', '.2f'))
      cells.append(values)
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
  adapts = ''
  if choice.prices is not None:
    factor = choice.prices.expected_speed_up
    adapts = f" With gamma = 'adaptive' it is expected to be {factor:.2f}."
  low, high = choice.interval
  return (
    f'{_rows(choice.rows)}: speculation {"pays" if low >= 1 else "may pay"}'
    f' here: gamma = {choice.gamma}, expected speed-up'
    f' {choice.expected_speed_up:.2f} ({low:.2f} to {high:.2f}), for outputs of'
    f' {made.least_length(choice.rows)} tokens or more.{adapts}{costs}'
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
  choice = choose_gamma(
    rate['alpha'],
    rate['standard_error'],
    call_costs(times),
    round(rate['num_tokens'] / rate['num_outputs']),
    rows,
  )
  return Calibration(
    fingerprints=engine.fingerprints,
    device=calibration.device_name(),
    temperature=temperature,
    choices=(choice,),
    record={  # as that of `calibrate`
      'acceptance_rate': dict(rate),
      'costs': [
        {'times_ms': {name: {'median': ms} for name, ms in times.items()}}
      ],
    },
  )


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


# The rule of a draft whose length adapts. A drafter's confidence says how
# likely its next proposal is accepted: a table of confidence bins. Costs say
# what a proposal must be worth. Both together are a `LengthRule`; what it
# should gain is computed over the outputs that were measured.


def confidence_table(outputs: Sequence[Output]) -> Confidence:
  """The table of the outputs' tokens."""
  betas = np.concatenate([one.betas for one in outputs])
  sure = np.concatenate([one.confidences for one in outputs])
  inner = np.quantile(sure, np.arange(1, _BINS) / _BINS)
  bounds = np.unique(inner.astype(np.float32))
  bounds = bounds[bounds > sure.min()]  # no bin is empty
  bins = np.searchsorted(bounds, sure, side='right')
  acceptance = np.bincount(bins, betas) / np.bincount(bins)
  return Confidence(
    bounds=tuple(bounds.tolist()),
    acceptance=tuple(acceptance.tolist()),
    overall=float(betas.mean()),
  )


def best_prices(
  confidence: Confidence,
  outputs: Sequence[Output],
  costs: CallCosts,
  adapting_cost: float = 0.0,
) -> Prices:
  """The prices that gain most over the outputs.

  A proposal is worth its costs if they would not buy as many tokens elsewhere:
  at the rate, in tokens a unit of time, that the rule itself reaches. The first
  proposal pays what a call over two tokens takes more than one; of what the
  longest call takes more than that, the others pay the same share each. Prices
  of 0 are those of a fixed gamma, whose loop has less to do: they are taken
  unless others gain more.

  Args:
    confidence: the table.
    outputs: what it was made of.
    costs: of calls over up to gamma + 1 tokens.
    adapting_cost: what a round whose drafts adapt takes more than another.
  """

  def valued(calls, worth, asking) -> Prices:
    """The prices, with what their rule should gain over the outputs."""
    prices = Prices(tuple(worth.tolist()), tuple(asking.tolist()), 0.0)
    rule = rule_of(confidence, prices)
    gain = expected_speed_up(rule, outputs, costs.cost_ratio, calls)
    return dataclasses.replace(prices, expected_speed_up=gain)

  adapting, fixed = [], []
  for most in range(1, min(_LONGEST, len(costs.call_cost) - 1) + 1):
    calls = costs_of_calls(costs.call_cost, most) + costs.round_cost
    fixed.append(valued(calls, np.zeros(most), np.zeros(most)))
    more = np.full(most, calls[1] - calls[0])
    more[1:] = (calls[-1] - calls[1]) / max(1, most - 1)
    more = np.maximum(more, 0.0)
    rate = 1.0
    for _ in range(_TURNS):
      asking = rate * (costs.cost_ratio + more)
      prices = valued(calls + adapting_cost, rate * more, asking)
      rate = prices.expected_speed_up
    adapting.append(prices)
  best, best_fixed = (
    max(these, key=lambda prices: prices.expected_speed_up)
    for these in (adapting, fixed)
  )
  least = _LEAST_GAIN * best_fixed.expected_speed_up
  return best if best.expected_speed_up > least else best_fixed


def costs_of_calls(call_cost: Sequence[float], most: int) -> np.ndarray:
  """float[most + 1], the round's call with 0..most proposals, on this device.

  Args:
    call_cost: v(1), v(2), ..., at least v(most + 1).
    most: proposals at most, of a draft that may end early.
  """
  sizes = fallback.widths(most, adapts=True, rests=False)
  return np.asarray([call_cost[size - 1] for size in sizes], np.float64)


def expected_speed_up(
  rule: LengthRule,
  outputs: Sequence[Output],
  cost_ratio: float,
  calls: np.ndarray,
) -> float:
  """What a rule should gain over outputs whose tokens were measured.

  Rounds begin where the rounds before them end, each place by its probability:
  a round with n accepted proposals at place t ends at t + n + 1. The proposals
  are taken to be those tokens, as in Corollary 3.6.

  Args:
    rule: when a draft ends.
    outputs: what was measured.
    cost_ratio: c.
    calls: float[G + 1], what the round's call with 0..G proposals takes, with
      what a round takes besides, in calls of the target over one token.
  """
  tokens = time = 0.0
  for output in outputs:
    more_tokens, more_time = _of_output(
      rule, output.betas, output.confidences, cost_ratio, calls
    )
    tokens, time = tokens + more_tokens, time + more_time
  return tokens / time


def _of_output(rule, betas, sure, cost_ratio, calls) -> np.ndarray:
  """Expected tokens and time of an output's rounds, float[2]."""
  count, most = len(betas), rule.most
  believed = np.asarray(rule.acceptance)[
    np.searchsorted(np.asarray(rule.confidences), sure, side='right')
  ]
  starts = np.arange(count)
  room = np.minimum(most, count - starts - 1)  # the last is the target's own
  asks = room > 0
  survival, true = np.ones(count), np.ones(count)
  length, asked = np.zeros(count, int), np.ones(count)
  accepted = np.zeros(count)
  ends = np.zeros((count, most + 1))  # probability of n accepted proposals
  for index in range(most):
    place = np.minimum(starts + index, count - 1)
    survival = survival * believed[place]
    makes = asks & (survival > rule.worth[index])
    ends[:, index] = np.where(makes, true * (1 - betas[place]), 0.0)
    true = np.where(makes, true * betas[place], true)
    accepted += makes * true
    length += makes
    after = min(index + 1, most - 1)
    asks = makes & (index + 1 < room)
    asks &= survival * float(rule.expected) > rule.worth_asking[after]
    asked += asks
  ends[starts, length] += true
  visits = np.zeros(count + most + 1)
  visits[0] = 1.0
  for start in range(count):
    visits[start + 1 : start + most + 2] += visits[start] * ends[start]
  time = cost_ratio * asked + calls[length]
  return np.stack([accepted + 1, time]) @ visits[:count]
