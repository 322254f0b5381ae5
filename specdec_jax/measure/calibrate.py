"""Calibration: costs and acceptance of a pair here, and the gamma they give."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.memory import device_bytes, gib
from specdec_jax.decoding import fallback
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import (
  acceptance,
  beam_grid,
  calibration,
  lengths,
  memory,
  trees,
)
from specdec_jax.measure.benchmark import (
  LEAST_DECODE_LEN,
  BenchmarkConfig,
  benchmark,
  num_steps,
)
from specdec_jax.measure.calibration import Calibration, Choice, Measured
from specdec_jax.measure.environment import describe
from specdec_jax.measure.progress import bar, status
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.table import Column, Table, say, started
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement
from specdec_jax.probs import SamplingConfig

_ALPHA_BATCH = 8  # rows; the acceptance rate does not depend on it
_SHORT_OUTPUTS = 16, 64  # tokens; what a wrong drafter costs there is said
# Rounds of these gammas say what a proposal takes, and what a round besides.
_MAIN_GAMMA, _ROUND_GAMMAS = 4, (1, 8)
# Of a beam search: levels, the drafter's beams in widths, lines, repetitions.
_LEVELS = 1, 2, 3
_DRAFT_FACTORS = 1, 2
_BEAM_LINES = 16
_BEAM_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
  """A calibration.

  Attributes:
    engine: makes the engine, with a drafter; called after the memory it needs
      was held against what the device has.
    target: the target's network, of which the memory is planned; of a `Model`
      its network is taken.
    draft: the drafter's, likewise; None where it has none.
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
    placement: as the engine's.
    tree_nodes: of trees of proposals that are timed, the most nodes of each;
      empty measures no trees. For drafters that are a small model.
    num_beams: width of a beam search that is timed as well, with several gammas
      and numbers of the drafter's beams; None is none. For drafters that are a
      small model.
    seed: of the samples.
    output_file: JSON for decode.py; None writes nothing.

  Raises:
    ValueError: a number is out of its range.
  """

  engine: Callable[[], Engine]
  target: LanguageModel
  draft: LanguageModel | None
  input_file: str
  num_tokens: int = 2000
  temperature: float = 0.0
  batches: Sequence[int] = (1,)
  input_len: int = 32
  decode_len: int = 120
  max_gamma: int = 16
  repeats: int = 9
  calls_a_run: int = 20
  tree_nodes: Sequence[int] = ()
  placement: Placement = Placement()
  num_beams: int | None = None
  seed: int = 0
  output_file: str | None = None

  def __post_init__(self):
    check_types(self)
    for name in ('target', 'draft'):
      value = getattr(self, name)
      if isinstance(value, Model):
        object.__setattr__(self, name, value.network)
    check_at_least(self, num_tokens=1, temperature=0.0, input_len=1)
    check_all_at_least(self, batches=1)
    if self.tree_nodes:
      check_all_at_least(self, tree_nodes=1)
    check_at_least(self, decode_len=LEAST_DECODE_LEN, max_gamma=1)
    if self.num_beams is not None:
      check_at_least(self, num_beams=1)
      if self.temperature:
        raise ValueError(
          f'temperature = {self.temperature!r}: a beam search (num_beams ='
          f' {self.num_beams}) draws nothing; calibrate at temperature 0, or'
          ' without num_beams.'
        )
    # One round has no spread, and so no error.
    check_at_least(self, repeats=2, calls_a_run=1)


def calibrate(
  config: CalibrateConfig, console: rich.console.Console | None = None
) -> Calibration:
  """Plans memory, measures costs and alpha, chooses gamma, says what it means.

  Raises:
    ValueError: the pair does not fit, or no prompt can be decoded.
  """
  console = started(config, console)
  parts = memory.check_fits(_plan(config), device_bytes())
  with status(console, 'Loading the models'):
    engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )
  if len(set(texts)) < 2:
    raise ValueError(
      f'{config.input_file!r} has one text that can be decoded; expected two or'
      ' more: of one there is no telling how sure its acceptance rate is.'
    )
  if config.num_beams is not None:  # what it refuses comes before the costs
    widest = max(_DRAFT_FACTORS) * config.num_beams
    beams = {'num_beams': config.num_beams, 'draft_beams': widest}
    _ = engine.text_batch(texts[:1], True, gamma=max(_LEVELS), **beams).request
  costs = _costs(config, engine)
  with bar(console, 'Costs', num_steps(costs)) as advance:
    measured = benchmark(costs, advance, advance.say)
  work = acceptance.Workload(
    engine,
    texts,
    SamplingConfig(temperature=config.temperature),
    config.num_tokens,
    _ALPHA_BATCH,
    config.seed,
  )
  with bar(console, 'Tokens', config.num_tokens) as advance:
    rates = work.rates(advance)
  found = _conclude(config, engine, measured, rates, parts)
  if config.tree_nodes:
    with bar(console, 'Trees', config.num_tokens) as advance:
      found = _with_trees(config, work, found, advance)
  if config.num_beams is not None:
    found = _with_beams(config, engine, found, console)
  try:
    if config.output_file:  # first: whoever reads stdout may leave early
      found.save(config.output_file)
  finally:
    _print(console, found)
  return found


def _plan(config: CalibrateConfig) -> memory.Plan:
  return memory.Plan(
    config.target,
    config.draft,
    batch=max(config.batches),
    input_len=config.input_len,
    decode_len=config.decode_len,
    gamma=config.max_gamma,
    greedy=config.temperature == 0,
    param_dtype=config.placement.param_dtype,
  )


def _costs(config: CalibrateConfig, engine: Engine) -> BenchmarkConfig:
  """The benchmark whose numbers a calibration is made of."""
  return BenchmarkConfig(
    config.target,
    drafter=engine.drafter,
    target_params=engine.params.target,
    placement=config.placement,
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


def _conclude(config, engine, measured, rates, parts) -> Calibration:
  rate = rates.overall
  assert rate.standard_error is not None  # of two texts or more
  confidence = lengths.table(rates.outputs) if rates.outputs else None
  if config.max_gamma < lengths.LEAST_GAMMA:
    confidence = None  # the calls of a draft that adapts were not measured
  return Calibration(
    fingerprints=engine.fingerprints,
    device=describe()['device'],
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
      'memory_bytes': parts,
      'costs': measured['settings'],
      'machine': measured['machine'],
    },
  )


def _with_trees(config, work, found: Calibration, advance) -> Calibration:
  """The calibration with acceptance by rank, and the trees that pay best."""
  by_rank = work.rates_by_rank(advance, trees.RANKS)
  choices = []
  for choice in found.choices:
    costs = choice.cost_ratio, choice.call_cost
    best = trees.choose(
      work.engine, by_rank, config.tree_nodes, choice.rows, costs, config
    )
    choices.append(dataclasses.replace(choice, tree=best))
  ranks = tuple(
    Measured(rate.mean, rate.standard_error) for rate in by_rank.ranks
  )
  return dataclasses.replace(found, choices=tuple(choices), ranks=ranks)


def _with_beams(config, engine, found: Calibration, console) -> Calibration:
  """The calibration with the quickest beam search; prints its times."""
  grid = beam_grid.BeamGridConfig(
    lambda: engine,
    config.input_file,
    widths=(config.num_beams,),
    gammas=_LEVELS,
    draft_factors=_DRAFT_FACTORS,
    num_lines=_BEAM_LINES,
    repeats=_BEAM_REPEATS,
  )
  record = beam_grid.beam_grid(grid, console)
  choice = beam_grid.BeamChoice.of(record, config.num_beams)
  return dataclasses.replace(found, beams=choice)


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
  choice = calibration.choose_gamma(
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
    acceptance=lengths.acceptance_at(choice.gamma, rates.outputs, alpha.mean),
  )
  if confidence is None:
    return choice
  prices = lengths.best_prices(
    confidence,
    rates.outputs,
    cost_ratio.value,
    [one.value for one in costs],
    round_cost,
    # Lost in noise it is nothing.
    max(0.0, setting['gammas'][0].get('adapting_cost', 0.0)),
  )
  return dataclasses.replace(choice, prices=prices)


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
    (row,) = costs['gammas']
    speed_up = f'{choice["expected_speed_up"]:.2f} ({low:.2f} to {high:.2f})'
    costs_of_one = [row['cost_ratio']]
    if 'round_cost' in choice:  # else of an earlier version, and in c
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
  if 'round_cost' not in found['choices'][0]:
    costs_of_one = costs_of_one[:1]
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
    if choice.tree is not None:
      tree = choice.tree
      adapts += (
        f' The best tree has {len(tree.parents)} nodes:'
        f' {tree.tokens_per_call:.2f} tokens a call, expected speed-up'
        f' {tree.expected_speed_up:.2f}.'
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


def _beams_verdict(best: beam_grid.BeamChoice) -> str:
  if not best.gamma:
    return f'{best.num_beams} beams: speculation does not pay here.'
  return (
    f'{best.num_beams} beams: speculation pays here: gamma = {best.gamma} with'
    f' {best.draft_beams} beams of the drafter, speed-up {best.speed_up:.2f}.'
  )


def _when_wrong(choice: Choice, times_ms: Mapping[str, Any]) -> str:
  """What a drafter costs that is always wrong, if it may rest."""
  made = choice.fallback(choice.gamma, adapts=False)
  if made is None or choice.cost_ratio is None:
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
  needed = sum(record['memory_bytes'].values())
  console.print(f'{gib(needed)} of memory in all')
  console.print(
    f'acceptance {rate["alpha"]:.3f} ± {rate["standard_error"]:.3f} over'
    f' {rate["num_tokens"]} tokens at temperature {found.temperature:g}'
    + _unproposed(rate['proposes'])
  )


def _rows(count: int) -> str:
  return f'{count} row{"s" * (count > 1)}'
