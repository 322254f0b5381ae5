"""Calibration: costs and acceptance of a pair here, and the gamma they give."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.console

from specdec_jax import analysis
from specdec_jax.checks.fields import (
  check_all_at_least,
  check_at_least,
  check_types,
  unexpected,
)
from specdec_jax.checks.memory import gib
from specdec_jax.decoding import fallback
from specdec_jax.drafters.length import unsure_below
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import (
  BeamChoice,
  Calibration,
  Choice,
  Confidence,
  Prices,
  rule_of,
)
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import compare
from specdec_jax.measure.acceptance import Output, batches, rates_of, ratio
from specdec_jax.measure.calls import (
  LEAST_DECODE_LEN,
  BenchmarkConfig,
  Pair,
  benchmark,
  num_steps,
)
from specdec_jax.measure.progress import bar, status
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.table import Column, Table, say, started
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import LengthRule

_ALPHA_BATCH = 8  # rows; the acceptance rate does not depend on it
_SHORT_OUTPUTS = 16, 64  # tokens; what a wrong drafter costs there is said
# Rounds of these gammas say what a proposal takes, and what a round besides.
_MAIN_GAMMA, _ROUND_GAMMAS = 4, (1, 8)
# Of a beam search: levels, the drafter's beams in widths, lines, repetitions.
_LEVELS = 1, 2, 3
_DRAFT_FACTORS = 1, 2
_BEAM_LINES = 16
_BEAM_REPEATS = 3
# Of the rule of a draft whose length adapts.
_BINS = 10  # of confidence, with equally many tokens
LEAST_GAMMA = 3  # that a calibration must have measured
_LONGEST = 15  # proposals at most
_TINY = 1e-9
# What drafts that may end early must gain over those of a fixed gamma, because
# deciding takes time, and what was measured is not exact.
_LEAST_GAIN = 1.02
_TURNS = 4  # to find the rate that a rule itself reaches
_DRAWS = 2000  # random draws for the interval of the speed-up
_INTERVAL = (2.5, 97.5)  # percent


@dataclasses.dataclass(frozen=True)
class Measured:
  """A value and its standard error."""

  value: float
  error: float


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
  """A calibration.

  Attributes:
    engine: makes the engine, with a drafter.
    input_file: the user's own prompts, one a line.
    num_tokens: of the target's own, behind alpha.
    temperature: at which alpha and the costs are measured.
    batches: rows decoded together, in the costs; each has a gamma of its own.
    input_len: E, tokens of an input, in the costs; without an encoder a
      prompt's, behind the start token.
    decode_len: tokens of an output, in the costs.
    max_gamma: the largest gamma considered; v(m) is measured to one more.
    repeats: timed rounds, interleaved.
    calls_a_run: calls in one timed loop.
    num_beams: width of a beam search that is timed as well, with several gammas
      and numbers of the drafter's beams; None is none. For drafters that are a
      small model.
    seed: of the samples.
    output_file: JSON for decode.py; None writes nothing.

  Raises:
    ValueError: a number is out of its range.
  """

  engine: Callable[[], Engine]
  input_file: str
  num_tokens: int = 2000
  temperature: float = 0.0
  batches: Sequence[int] = (1,)
  input_len: int = 32
  decode_len: int = 120
  max_gamma: int = 16
  repeats: int = 9
  calls_a_run: int = 20
  num_beams: int | None = None
  seed: int = 0
  output_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_at_least(self, num_tokens=1, temperature=0.0, input_len=1)
    check_all_at_least(self, batches=1)
    check_at_least(self, decode_len=LEAST_DECODE_LEN, max_gamma=1)
    if self.num_beams is not None:
      check_at_least(self, num_beams=1)
      if self.temperature:
        raise unexpected('temperature', '0 with num_beams', self.temperature)
    # One round has no spread, and so no error.
    check_at_least(self, repeats=2, calls_a_run=1)


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
  if config.num_beams is not None:  # what it refuses comes before the costs
    widest = max(_DRAFT_FACTORS) * config.num_beams
    beams = {'num_beams': config.num_beams, 'draft_beams': widest}
    _ = engine.text_batch(texts[:1], True, gamma=max(_LEVELS), **beams).request
  slots = config.decode_len + config.max_gamma + 1
  if not engine.target.has_encoder:
    slots += config.input_len
  most = max(config.batches)
  engine.room.check(most, config.input_len, slots, config.max_gamma + 1)
  costs = _costs(config, engine)
  with bar(console, 'Costs', num_steps(costs)) as advance:
    pair = Pair(engine.target, engine.drafter, engine.params)
    measured = benchmark(costs, advance, advance.say, pair)
  work = batches(
    engine,
    texts,
    SamplingConfig(temperature=config.temperature),
    _ALPHA_BATCH,
    config.seed,
  )
  with bar(console, 'Tokens', config.num_tokens) as advance:
    rates = rates_of(engine, work, config.num_tokens, advance)
  found = _conclude(config, engine, measured, rates)
  if config.num_beams is not None:
    found = _with_beams(config, engine, found, texts, console)
  try:
    if config.output_file:  # first: whoever reads stdout may leave early
      found.save(config.output_file)
  finally:
    _print(console, found)
  return found


def _costs(config: CalibrateConfig, engine: Engine) -> BenchmarkConfig:
  """The benchmark whose numbers a calibration is made of."""
  return BenchmarkConfig(
    engine.target,
    engine.drafter,
    gammas=(min(_MAIN_GAMMA, config.max_gamma),),
    round_gammas=tuple(g for g in _ROUND_GAMMAS if g <= config.max_gamma),
    times_adapting=True,
    batches=tuple(sorted(set(config.batches))),
    input_lens=(config.input_len,),
    decode_lens=(config.decode_len,),
    temperatures=(config.temperature,),
    call_sizes=tuple(range(1, config.max_gamma + 2)),
    calls_a_run=config.calls_a_run,
    repeats=config.repeats,
    seed=config.seed,
    name='calibration',
  )


def _conclude(config, engine, measured, rates) -> Calibration:
  rate = rates.overall
  assert rate.standard_error is not None  # of two texts or more
  confidence = confidence_table(rates.outputs) if rates.outputs else None
  if config.max_gamma < LEAST_GAMMA:
    confidence = None  # the calls of a draft that adapts were not measured
  return Calibration(
    fingerprints=engine.fingerprints,
    device=calibration.device_name(),
    temperature=config.temperature,
    choices=tuple(
      _choice(config, one, rates, confidence) for one in measured['settings']
    ),
    confidence=confidence,
    spread=rates.spread,
    record={
      'acceptance_rate': {
        'alpha': rate.mean,
        'standard_error': rate.standard_error,
        'num_tokens': rate.num_tokens,
        'num_outputs': rate.num_outputs,
        'proposes': rates.proposes.mean,
      },
      'costs': measured['settings'],
      'machine': measured['machine'],
    },
  )


def _with_beams(config, engine, found: Calibration, texts, console):
  """The calibration with the quickest beam search of its width."""
  width = config.num_beams
  options: dict[str, Any] = {'num_beams': width, 'num_samples': width}
  methods: dict[str, Any] = {
    compare.PLAIN: (engine, options | {'speculative': False})
  }
  settings = [
    (gamma, factor * width) for gamma in _LEVELS for factor in _DRAFT_FACTORS
  ]
  for gamma, draft_beams in settings:
    drafting = {'gamma': gamma, 'draft_beams': draft_beams}
    methods[f'{gamma} {draft_beams}'] = (
      engine,
      options | drafting | {'speculative': True},
    )
  lines = texts[:_BEAM_LINES]
  with bar(console, 'Beams', (_BEAM_REPEATS + 1) * len(lines)) as advance:
    timed = compare.interleaved(
      methods, lines, 0.0, _BEAM_REPEATS, advance, must_agree=False
    )
  plain = timed[compare.PLAIN]
  best = BeamChoice(width, 0, 0, 1.0)
  for gamma, draft_beams in settings:
    each = compare.speed_ups(timed[f'{gamma} {draft_beams}'], plain)
    speed_up = float(np.median(each))
    if speed_up > best.speed_up:
      best = BeamChoice(width, gamma, draft_beams, speed_up)
  return dataclasses.replace(found, beams=best)


def _choice(config, setting, rates, confidence) -> Choice:
  """The gamma, and the prices, that the costs of one number of rows give."""
  rate = rates.overall
  times = setting['times_ms']
  one = times['call_1']['median']

  def cost(size: int) -> Measured:
    time = times[f'call_{size}']
    return Measured(time['median'] / one, time['error'] / one)

  # The closed forms know of no place without a proposal: there beta is 0.
  costs = [cost(size) for size in range(1, config.max_gamma + 2)]
  cost_ratio, round_cost = _round_costs(times)
  choice = choose_gamma(
    Measured(rate.mean, rate.standard_error),
    cost_ratio,
    costs,
    round_cost,
    setting['batch'],
    config.seed,
  )
  alpha = rates.overall if rates.alpha is None else rates.alpha
  choice = dataclasses.replace(
    choice,
    acceptance=acceptance_at(choice.gamma, rates.outputs, alpha.mean),
  )
  if confidence is None:
    return choice
  prices = best_prices(
    confidence,
    rates.outputs,
    cost_ratio.value,
    [one.value for one in costs],
    round_cost,
    # Lost in noise it is nothing.
    max(0.0, setting['gammas'][0].get('adapting_cost', 0.0)),
  )
  return dataclasses.replace(choice, prices=prices)


def choose_gamma(
  acceptance_rate: Measured,
  cost_ratio: Measured,
  call_cost: Sequence[Measured],
  round_cost: float = 0.0,
  rows: int = 1,
  seed: int = 0,
) -> Choice:
  """The gamma with the largest E(gamma, alpha) / (v(gamma + 1) + gamma c + r).

  Args:
    acceptance_rate: alpha.
    cost_ratio: c.
    call_cost: v(1), v(2), ...; gamma is less than the number of these.
    round_cost: r, what a round takes besides its calls.
    rows: the number of rows that these costs were measured with.
    seed: seed of the draws for the interval, which assumes normal errors.
  """
  gammas = np.arange(len(call_cost))
  values = np.array([cost.value for cost in call_cost])
  factors = np.asarray(
    analysis.measured_walltime_factor(
      acceptance_rate.value,
      gammas,
      cost_ratio.value,
      values / values[0] + round_cost * (gammas > 0),
    )
  )
  # Gamma 0 is the plain loop: its factor is 1 by definition.
  gamma = int(np.argmax(factors))
  draws = np.random.default_rng(seed).standard_normal((3, _DRAWS))
  rates = acceptance_rate.value + acceptance_rate.error * draws[0]
  costs = cost_ratio.value + cost_ratio.error * draws[1]
  verify = call_cost[gamma].value + call_cost[gamma].error * draws[2]
  drawn = analysis.measured_walltime_factor(
    np.clip(rates, 0.0, 1.0),
    gamma,
    np.maximum(costs, 0.0),
    np.maximum(verify, 1e-3) / values[0] + round_cost,
  )
  low, high = np.percentile(drawn, _INTERVAL) if gamma else (1.0, 1.0)
  return Choice(
    rows=rows,
    gamma=gamma,
    expected_speed_up=float(factors[gamma]),
    interval=(float(low), float(high)),
    factors=tuple(float(factor) for factor in factors),
    cost_ratio=cost_ratio.value,
    call_cost=tuple((values / values[0]).tolist()),
    round_cost=round_cost,
  )


def _round_costs(times: Mapping[str, Any]) -> tuple[Measured, float]:
  """What a proposal takes, and a round besides, in calls over one token.

  The line through what rounds of several gammas take besides the target's call.
  Neither is below 0: a drafter whose cost is lost in noise costs nothing. With
  one gamma all of it counts as the proposals'.

  Args:
    times: as a benchmark's record has them.
  """
  one = times['call_1']['median']
  found = []
  for name, a_round in times.items():
    if name.startswith('round_'):
      gamma = int(name.removeprefix('round_'))
      call = times[f'call_{gamma + 1}']
      value = (a_round['median'] - call['median']) / one
      error = math.hypot(a_round['error'], call['error']) / one
      found.append((gamma, value, error))
  gammas, values, errors = np.array(found).T
  mean = gammas.mean()
  # Of a line through two points or more, else of one through nothing for none.
  weights = gammas - mean if len(gammas) > 1 else gammas
  slope = float(weights @ values / (weights @ weights))
  besides = float(values.mean() - slope * mean)
  if besides < 0:
    weights, besides = gammas, 0.0
    slope = float(weights @ values / (weights @ weights))
  if slope < 0:
    slope, besides = 0.0, max(0.0, float(values.mean()))
  wrong = float(np.linalg.norm(weights * errors) / (weights @ weights))
  return Measured(slope, wrong), besides


def _unproposed(share: float) -> str:
  if share == 1:
    return ''
  return f', none where nothing is proposed ({1 - share:.0%} of them)'


def tables(found: Mapping[str, Any]) -> list[Table]:
  """The gamma chosen for each number of rows, and the factor of every gamma.

  Args:
    found: a calibration, as its file has it.
  """
  chosen = []
  columns: list[Column | str] = ['gamma']
  by_gamma = [[gamma] for gamma in range(len(found['choices'][0]['factors']))]
  both = zip(found['choices'], found['record']['costs'], strict=True)
  for choice, costs in both:
    low, high = choice['interval']
    speed_up = f'{choice["expected_speed_up"]:.2f} ({low:.2f} to {high:.2f})'
    costs_of_one = [choice['cost_ratio'], choice['round_cost']]
    chosen.append([choice['rows'], *costs_of_one, choice['gamma'], speed_up])
    name = _rows(choice['rows'])
    columns += [
      Column(f'v(gamma + 1), {name}', '.2f'),
      Column(f'speed-up, {name}', '.2f'),
    ]
    for line, factor in zip(by_gamma, choice['factors'], strict=True):
      line += [costs['call_cost'][str(line[0] + 1)], factor]
  costs_of_one = [Column('c', '.3f'), Column('a round besides', '.3f')]
  header = ('rows at once', *costs_of_one, 'gamma', 'expected speed-up')
  made = [
    Table('Chosen here', header, chosen),
    Table('What gamma is worth here', columns, by_gamma),
  ]
  return [*made, *_confidence_table(found.get('confidence'))]


def _confidence_table(found: Mapping[str, Any] | None) -> list[Table]:
  if found is None:
    return []
  bounds = [0.0, *found['bounds'], 1.0]
  measured = zip(
    bounds[:-1],
    bounds[1:],
    found['acceptance'],
    found['errors'],
    found['tokens'],
    strict=True,
  )
  lines = [
    [f'{low:.3f} to {high:.3f}', rate, error, tokens]
    for low, high, rate, error, tokens in measured
  ]
  header = (
    'confidence of the drafter',
    Column('acceptance', '.3f'),
    Column('error', '.3f'),
    'tokens',
  )
  return [Table('How sure is sure enough', header, lines)]


def verdicts(found: Calibration) -> list[str]:
  """Whether speculation pays: a sentence for each number of rows, and beams."""
  record: Any = found.record
  said = []
  for choice, costs in zip(found.choices, record['costs'], strict=True):
    rows = f'{_rows(choice.rows)}: '
    if not choice.gamma:
      said.append(
        f'{rows}speculation does not pay here: no gamma is expected to be'
        ' quicker than plain decoding.'
      )
      continue
    low, high = choice.interval
    adapts = ''
    if choice.prices is not None:
      adapts = (
        " With gamma = 'adaptive' it is expected to be"
        f' {choice.prices.expected_speed_up:.2f}.'
      )
    pays = 'pays' if low >= 1.0 else 'may pay'
    length = calibration.least_length(
      costs['times_ms'], choice.expected_speed_up
    )
    said.append(
      f'{rows}speculation {pays} here: gamma = {choice.gamma}, expected'
      f' speed-up {choice.expected_speed_up:.2f} ({low:.2f} to {high:.2f}), for'
      f' outputs of {length} tokens or more.{adapts}'
      f'{_when_wrong(choice, costs["times_ms"])}'
    )
  if found.beams is not None:
    said.append(_beams_verdict(found.beams))
  return said


def _beams_verdict(best: BeamChoice) -> str:
  if not best.gamma:
    return f'{best.num_beams} beams: speculation does not pay here.'
  return (
    f'{best.num_beams} beams: speculation pays here: gamma = {best.gamma} with'
    f' {best.draft_beams} beams of the drafter, speed-up {best.speed_up:.2f}.'
  )


def _when_wrong(choice: Choice, times_ms: Mapping[str, Any]) -> str:
  """What a drafter costs that is always wrong, if it may rest."""
  made = choice.fallback(choice.gamma, adapts=False)
  if made is None:
    return ''
  lost = fallback.most_lost(made, choice.cost_ratio, fallback.LEAST_OUTPUT)
  lost += calibration.first_ms(times_ms) / times_ms['call_1']['median']
  shares = [
    f'{lost[tokens] / tokens:.0%} of {tokens} tokens'
    for tokens in (*_SHORT_OUTPUTS, fallback.LEAST_OUTPUT)
  ]
  return (
    ' A text that the drafter is always wrong for takes longer, if it may rest'
    f' (--fallback), by {", ".join(shares)}.'
  )


def _print(console: rich.console.Console, found: Calibration) -> None:
  record: Any = found.record
  rate = record['acceptance_rate']
  for verdict in verdicts(found):
    say(console, verdict)
  for table in tables(dataclasses.asdict(found)):
    console.print(table)
  for choice, costs in zip(found.choices, record['costs'], strict=True):
    times = costs['times_ms']
    console.print(
      f'{_rows(choice.rows)}: input {times["encoder"]["median"]:.2f} ms, a call'
      f' {times["call_1"]["median"]:.2f} ms of'
      f' {gib(costs["bytes_per_call"])} at'
      f' {costs["plain_gb_per_s"]:.1f} GB/s'
      f' ({100 * costs["bandwidth_fraction"]:.0f} % of a matrix-vector'
      " product's)"
    )
  console.print(
    f'acceptance {rate["alpha"]:.3f} ± {rate["standard_error"]:.3f} over'
    f' {rate["num_tokens"]} tokens at temperature {found.temperature:g}'
    + _unproposed(rate['proposes'])
  )


def _rows(count: int) -> str:
  return f'{count} row{"s" * (count > 1)}'


# The rule of a draft whose length adapts. A drafter's confidence says how
# likely its next proposal is accepted: a table of confidence bins. Costs say
# what a proposal must be worth. Both together are a `LengthRule`; what it
# should gain is computed over the outputs that were measured.


class Costs(NamedTuple):
  """Times in calls of the target over one token.

  Attributes:
    cost_ratio: c.
    calls: float[G + 1], of the round's call with 0..G proposals, and of what a
      round takes besides.
  """

  cost_ratio: float
  calls: np.ndarray


class Expected(NamedTuple):
  """Expected sums over rounds, from every place that a round may begin at."""

  tokens: float
  time: float
  tested: float
  accepted: float


def confidence_table(outputs: Sequence[Output]) -> Confidence:
  """The table of at least two outputs' tokens."""
  betas, sure, texts = _joined(outputs)
  inner = np.quantile(sure, np.arange(1, _BINS) / _BINS)
  bounds = np.unique(inner.astype(np.float32))
  bounds = bounds[bounds > sure.min()]  # no bin is empty
  chosen = np.searchsorted(bounds, sure, side='right')
  bins = range(len(bounds) + 1)
  rates = []
  for one in bins:
    inside = chosen == one
    number = int(texts.max()) + 1
    hits = np.bincount(texts[inside], betas[inside], number)
    tries = np.bincount(texts[inside], minlength=number)
    rates.append(ratio(list(hits), list(tries)))
  return Confidence(
    bounds=tuple(bounds.tolist()),
    acceptance=tuple(rate.mean for rate in rates),
    errors=tuple(rate.standard_error for rate in rates),
    tokens=tuple(rate.num_tokens for rate in rates),
    overall=float(betas.mean()),
  )


def best_prices(
  found: Confidence,
  outputs: Sequence[Output],
  cost_ratio: float,
  call_cost: Sequence[float],
  round_cost: float = 0.0,
  adapting_cost: float = 0.0,
) -> Prices:
  """The prices that gain most over the outputs.

  A proposal is worth its costs if they would not buy as many tokens elsewhere:
  at the rate, in tokens a unit of time, that the rule itself reaches. Of what a
  call with a draft takes more than one without, each proposal pays its share,
  or those behind the first one pay nothing. Prices of 0 are those of a fixed
  gamma, whose loop has less to do: they are taken unless others gain more.

  Args:
    found: the table.
    outputs: what it was made of.
    cost_ratio: c.
    call_cost: v(1), v(2), ..., at least v(4).
    round_cost: what a round takes besides its calls.
    adapting_cost: what one whose drafts adapt takes more than that.
  """
  if len(call_cost) <= LEAST_GAMMA:
    raise unexpected(
      'call_cost', f'v(1) to v({LEAST_GAMMA + 1}) or more', call_cost
    )
  tried, fixed = [], []
  for most in range(1, min(_LONGEST, len(call_cost) - 1) + 1):
    calls = costs_of_calls(call_cost, most) + round_cost
    costs = Costs(cost_ratio, calls + adapting_cost)
    shared = np.diff(_convex(calls))
    behind = np.append(shared[:1], np.diff(_convex(calls[1:])))
    for more in (shared, behind):
      rate = 1.0
      for _ in range(_TURNS):
        prices = _valued(found, _prices(costs, more, rate), outputs, costs)
        rate = prices.expected_speed_up
      tried.append(prices)
    nothing = (0.0,) * most
    free = Prices(nothing, nothing, 0.0, 0.0)
    costs = Costs(cost_ratio, calls)
    fixed.append(_valued(found, free, outputs, costs))
  best, best_fixed = (
    max(these, key=lambda prices: prices.expected_speed_up)
    for these in (tried, fixed)
  )
  least = _LEAST_GAIN * best_fixed.expected_speed_up
  return best if best.expected_speed_up > least else best_fixed


def _valued(
  found: Confidence, prices: Prices, outputs: Sequence[Output], costs: Costs
) -> Prices:
  """The prices, with what their rule should gain over the outputs."""
  sums = expected(rule_of(found, prices), outputs, costs)
  return dataclasses.replace(
    prices,
    expected_speed_up=sums.tokens / sums.time,
    acceptance=sums.accepted / max(sums.tested, _TINY),
  )


def costs_of_calls(call_cost: Sequence[float], most: int) -> np.ndarray:
  """float[most + 1], the round's call with 0..most proposals, on this device.

  Args:
    call_cost: v(1), v(2), ..., at least v(most + 1).
    most: proposals at most, of a draft that may end early.
  """
  sizes = fallback.widths(most, adapts=True, rests=False)
  return np.asarray([call_cost[size - 1] for size in sizes], np.float64)


def _prices(costs: Costs, more: np.ndarray, rate: float) -> Prices:
  """What a unit of time is worth, times what each proposal takes.

  Args:
    costs: of a round.
    more: float[G], what each proposal adds to its call.
    rate: tokens a unit of time.
  """
  asking = costs.cost_ratio + more
  return Prices(
    tuple((rate * more).tolist()), tuple((rate * asking).tolist()), rate, 0.0
  )


def _convex(values: np.ndarray) -> np.ndarray:
  """The largest convex sequence below `values`, without a fall.

  A call costs the same for all lengths up to its width: a draft must not end
  before a step for what is cheap behind it.
  """
  values = np.maximum.accumulate(values)
  hull = values.copy()
  place = 0
  while place < len(values) - 1:
    slopes = (values[place + 1 :] - values[place]) / np.arange(
      1, len(values) - place
    )
    step = int(np.argmin(slopes)) + 1
    line = values[place] + slopes[step - 1] * np.arange(step + 1)
    hull[place : place + step + 1] = line
    place += step
  return hull


def expected(
  rule: LengthRule, outputs: Sequence[Output], costs: Costs
) -> Expected:
  """What a rule should gain over outputs whose tokens were measured.

  Rounds begin where the rounds before them end, each place by its probability:
  a round with n accepted proposals at place t ends at t + n + 1. The proposals
  are taken to be those tokens, as in Corollary 3.6.
  """
  total = np.zeros(4)
  for output in outputs:
    total += _of_output(rule, output.betas, output.confidences, costs)
  return Expected(*total.tolist())


def acceptance_at(
  gamma: int, outputs: Sequence[Output], otherwise: float
) -> float:
  """Accepted / judged proposals of rounds of a fixed gamma.

  Behind a rejection nothing is judged, so that this is not alpha where tokens
  that are hard to guess follow one another.

  Args:
    gamma: proposals per round.
    outputs: what was measured; may be empty.
    otherwise: what it is if nothing would be judged.
  """
  costs = Costs(0.0, np.ones(gamma + 1))
  found = expected(unsure_below(0.0, gamma), outputs, costs)
  return found.accepted / found.tested if found.tested else otherwise


def _of_output(rule, betas, sure, costs: Costs) -> np.ndarray:
  count, most = len(betas), rule.most
  believed = np.asarray(rule.acceptance)[
    np.searchsorted(np.asarray(rule.confidences), sure, side='right')
  ]
  starts = np.arange(count)
  room = np.minimum(most, count - starts - 1)  # the last is the target's own
  asks = room > 0
  survival, true = np.ones(count), np.ones(count)
  length, asked = np.zeros(count, int), np.ones(count)
  tested, accepted = np.zeros(count), np.zeros(count)
  ends = np.zeros((count, most + 1))  # probability of n accepted proposals
  for index in range(most):
    place = np.minimum(starts + index, count - 1)
    survival = survival * believed[place]
    makes = asks & (survival > rule.worth[index])
    tested += makes * true
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
  time = costs.cost_ratio * asked + costs.calls[length]
  sums = np.stack([accepted + 1, time, tested, accepted])
  return sums @ visits[:count]


def _joined(
  outputs: Sequence[Output],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Betas, confidences and numbers of texts of all tokens."""
  numbers: dict[Any, int] = {}
  texts = [
    np.full(len(one.betas), numbers.setdefault(one.text, len(numbers)))
    for one in outputs
  ]
  return (
    np.concatenate([one.betas for one in outputs]),
    np.concatenate([one.confidences for one in outputs]),
    np.concatenate(texts),
  )
