"""A benchmark: times of calls and of both loops, and predictions from calls."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import analysis
from specdec_jax.checks.arguments import (
  check_all_at_least,
  check_at_least,
  check_number,
)
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.memory import device_bytes
from specdec_jax.decoding.beams import BeamSettings
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.state import Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.length import unsure_below
from specdec_jax.measure import calls, forced, memory, timing
from specdec_jax.measure.canvas import check_outputs
from specdec_jax.measure.measured_pair import Pair, make_pair
from specdec_jax.measure.record import Record
from specdec_jax.measure.t5x_style import T5XStyle
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.t5 import T5
from specdec_jax.partitioning import Placement
from specdec_jax.probs import SamplingConfig

LEAST_DECODE_LEN = 32  # in a shorter run, mostly its start would be timed


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
  """What to measure, with random input tokens; no run stops before its budget.

  Every combination of the sequences is one setting; everything timed for one
  setting is timed alternately.

  Attributes:
    target: the network to time.
    draft: a drafter's network; without `draft` and `drafter` only the target is
      timed.
    target_params: the target's parameters; None draws random ones on the
      device.
    draft_params: parameters of `draft`; None draws random ones on the device.
    weights: how results describe the parameters; None is 'random' if neither
      model's are given, else 'given'.
    placement: layout and dtype of both.
    gammas: proposals per round.
    round_gammas: more of them, of which single rounds alone are timed.
    batches: B.
    input_lens: E; without an encoder the prompt's tokens after the start token.
    decode_lens: tokens per run.
    temperatures: 0 is greedy.
    forced_acceptance: None accepts by Algorithm 1; otherwise each proposal is
      accepted with this probability, see `measure.forced`.
    times_adapting: whether the loop of a draft whose length adapts is timed as
      well, with a rule that ends no draft, if the drafter's can adapt.
    beam_widths: K of plain beam searches that are timed as well.
    t5x_style: whether a plain loop in T5X's style is timed as well, see
      `measure.t5x_style`; only for a target that is a `T5`.
    call_sizes: m, tokens per call, for v(m).
    calls_a_run: calls in one timed loop.
    repeats: timed rounds, interleaved.
    seed: seed of parameters, inputs and sampling.
    output_file: JSON; None writes nothing.
    name: name of the record.
    drafter: any drafter, with its parameters, instead of `draft`.

  Raises:
    ValueError: a number is out of its range, `draft_params` are given for a
      drafter that has its own parameters, or `t5x_style` is set and the target
      is not a `T5`.
  """

  target: LanguageModel
  draft: LanguageModel | None = None
  target_params: Params | None = None
  draft_params: Params | None = None
  weights: str | None = None
  placement: Placement = Placement()
  gammas: Sequence[int] = (4,)
  round_gammas: Sequence[int] = ()
  batches: Sequence[int] = (1,)
  input_lens: Sequence[int] = (32,)
  decode_lens: Sequence[int] = (120,)
  temperatures: Sequence[float] = (0.0,)
  forced_acceptance: float | None = None
  times_adapting: bool = False
  beam_widths: Sequence[int] = ()
  t5x_style: bool = False
  call_sizes: Sequence[int] = (1, 2, 4, 8)
  calls_a_run: int = 20
  repeats: int = 7
  seed: int = 0
  output_file: str | None = None
  name: str = 'benchmark'
  drafter: Drafter | None = None

  def __post_init__(self):
    check_types(self)
    if self.drafter is not None and self.draft_params is not None:
      raise ValueError(
        'BenchmarkConfig.draft_params are those of `draft`, but a drafter was'
        ' given, which has its own: leave one of them out.'
      )
    check_all_at_least(
      self, gammas=1, batches=1, input_lens=1, decode_lens=LEAST_DECODE_LEN
    )
    check_all_at_least(self, temperatures=0, call_sizes=1)
    for gamma in self.round_gammas:
      check_number('BenchmarkConfig.round_gammas', gamma, 1)
    for width in self.beam_widths:
      check_number('BenchmarkConfig.beam_widths', width, 1)
    check_at_least(self, calls_a_run=1, repeats=1)
    forced.check_rate(self.forced_acceptance)
    if self.t5x_style and not isinstance(self.target, T5):
      raise ValueError(
        'BenchmarkConfig.t5x_style is a way to decode with a T5; leave it out'
        f' for a target that is a {type(self.target).__name__}.'
      )
    if 1 not in self.call_sizes:
      raise ValueError(
        'BenchmarkConfig.call_sizes must hold 1, because the times of all'
        f' others are divided by its time, got {tuple(self.call_sizes)}.'
      )


class Setting(NamedTuple):
  """One combination of batch, lengths and temperature."""

  batch: int
  input_len: int
  decode_len: int
  temperature: float


def benchmark(
  config: BenchmarkConfig,
  advance: Callable[[], None] = lambda: None,
  say: Callable[[str], None] = lambda phase: None,
) -> Record:
  """Runs a benchmark and writes its JSON.

  Args:
    config: what to measure.
    advance: called after each of `num_steps(config)` rounds.
    say: gets a text that says what is going on, because the first round may
      come only a minute after the start.

  Returns:
    The record, with times in ms: median, min and max over interleaved rounds.

  Raises:
    DoesNotFitError: memory is too small; raised before anything is made.
  """
  check_outputs(config)
  check_memory(config)
  say('Placing the models')
  pair = make_pair(
    config.target,
    config.draft,
    config.target_params,
    config.draft_params,
    config.placement,
    config.seed,
    config.drafter,
  )
  measured = [
    _measure(config, pair, setting, advance, say) for setting in grid(config)
  ]
  record = Record('benchmark', {**described(config), 'settings': measured})
  if config.output_file:
    record.save(config.output_file)
  return record


def check_memory(config: BenchmarkConfig) -> None:
  """Raises DoesNotFitError if models that are drawn here do not fit.

  Models over several devices, and drafters of other kinds, are not counted.
  """
  given = (config.target_params, config.draft_params, config.drafter)
  if any(part is not None for part in given):
    return
  if not config.placement.on_one_device:
    return
  for setting in grid(config):
    plan = memory.Plan(
      config.target,
      config.draft,
      setting.batch,
      setting.input_len,
      setting.decode_len,
      max(config.gammas, default=0),
      setting.temperature == 0,
      config.placement.param_dtype,
    )
    memory.check_fits(plan, device_bytes())


def described(config: BenchmarkConfig) -> dict[str, Any]:
  """The settings that all points of a benchmark's grid share."""
  # Parameters of another kind of drafter are not weights of `draft`.
  own = None if config.drafter is not None else config.draft_params
  given = (config.target_params, own)
  any_given = any(params is not None for params in given)
  return {
    'name': config.name,
    'weights': config.weights or ('given' if any_given else 'random'),
    'forced_acceptance': config.forced_acceptance,
    'repeats': config.repeats,
    'calls_a_run': config.calls_a_run,
    'seed': config.seed,
    'target': repr(config.target),
    'draft': repr(config.draft),
    'placement': repr(config.placement),
  }


def grid(config: BenchmarkConfig) -> Iterator[Setting]:
  """Yields the settings in the order in which they are measured."""
  for point in itertools.product(
    config.batches, config.input_lens, config.decode_lens, config.temperatures
  ):
    yield Setting(*point)


def num_steps(config: BenchmarkConfig) -> int:
  """Rounds of a whole benchmark, for a progress bar."""
  return config.repeats * sum(1 for _ in grid(config))


def _measure(
  config, pair: Pair, setting: Setting, advance, say
) -> dict[str, Any]:
  """Compiles and times everything of one setting."""
  request = functools.partial(
    calls.make_request,
    calls.random_inputs(
      config.target, setting.batch, setting.input_len, config.seed
    ),
    setting.decode_len,
    sampling=SamplingConfig(temperature=setting.temperature),
    seed=config.seed,
    has_encoder=config.target.has_encoder,
  )
  where = f'batch {setting.batch}'
  say(f'Compiling, {where}')
  matvec, matvec_bytes = calls.matvec()
  gammas = config.gammas if pair.drafter is not None else ()
  functions = {'matvec': matvec}
  facts = _prepare_calls(config, pair, request, gammas, functions)
  if pair.drafter is not None:
    for gamma in sorted({*config.round_gammas} - {*gammas}):
      functions[f'round_{gamma}'] = calls.pair_rounds(
        pair, request(gamma=gamma), config.calls_a_run
      )
  rows = [
    _prepare_gamma(config, pair, request(gamma=gamma), functions, facts)
    for gamma in gammas
  ]
  say(f'First calls, then measuring, {where}')
  seconds = timing.interleave(functions, config.repeats, advance)
  times = _in_ms(config, setting, seconds)
  median = {name: value['median'] for name, value in times.items()}
  bandwidth = matvec_bytes / median['matvec'] / 1e6
  reached = facts['bytes_per_call'] / median['plain_loop'] / 1e6
  return {
    **setting._asdict(),
    'times_ms': times,
    'matvec_gb_per_s': bandwidth,
    'plain_gb_per_s': reached,
    'bandwidth_fraction': reached / bandwidth,
    'call_cost': {
      name.removeprefix('call_'): time / median['call_1']
      for name, time in median.items()
      if name.startswith('call_')
    },
    **facts,
    'gammas': [_of_gamma(setting.decode_len, median, row) for row in rows],
  }


def _prepare_calls(
  config: BenchmarkConfig,
  pair: Pair,
  request: Callable[..., Request],
  gammas: Sequence[int],
  functions: dict[str, timing.Prepare],
) -> dict[str, Any]:
  """Adds the plain loop and the single calls to `functions`.

  Returns their compile times, and the bytes of a call.
  """
  params, plain = pair.params, request(gamma=0)

  def loop(model, asked=plain):
    one = Loop(model)
    return calls.loop(one.start, one.run, params._replace(draft=None), asked)

  functions['encoder'] = calls.encoder_call(pair, plain)
  functions['plain_loop'], compile_seconds = loop(pair.target)
  for width in config.beam_widths:
    settings = BeamSettings(jnp.float32(0.6), width, draft_width=width)
    asked = dataclasses.replace(plain, beams=settings)
    functions[f'beams_{width}_loop'], _ = loop(pair.target, asked)
  all_gammas = (*gammas, *config.round_gammas)
  sizes = {*config.call_sizes, *(gamma + 1 for gamma in all_gammas)}
  for size in sorted(sizes):
    functions[f'call_{size}'] = calls.target_calls(
      pair, request(gamma=size), size, config.calls_a_run
    )
  if config.t5x_style and isinstance(config.target, T5):
    functions['t5x_style_loop'], _ = loop(T5XStyle(config.target.config))
  if pair.drafter is not None:
    functions['draft_encoder'] = calls.start_of_drafter(pair, plain)
  return {
    'compile_seconds': {'plain': compile_seconds},
    'bytes_per_call': calls.decoder_bytes(config.target, params.target, plain),
  }


def _prepare_gamma(config, pair, request, functions, facts) -> dict[str, Any]:
  """Adds one gamma's rounds and loop to `functions`; returns loop counts."""
  gamma, rate = request.gamma, config.forced_acceptance
  repeats = config.calls_a_run
  functions[f'draft_{gamma}'] = calls.pair_rounds(
    pair, request, repeats, with_target=False
  )
  functions[f'round_{gamma}'] = calls.pair_rounds(pair, request, repeats)

  own = Loop(pair.target, pair.drafter)

  def start(params, request):
    return own.start(params[0], request)

  def run(params, request, state, rounds):
    loop = own if rate is None else own._replace(judge=forced.judge(params[1]))
    return loop.run(params[0], request, state, rounds)

  params = (pair.params, jnp.float32(0.0 if rate is None else rate))

  def added(name: str, request: Request) -> Any:
    """Adds a loop to `functions`; returns what it counted."""
    prepare, compile_seconds = calls.loop(start, run, params, request)
    functions[f'{name}_{gamma}'] = prepare
    facts['compile_seconds'][f'{name}_{gamma}'] = compile_seconds
    return jax.device_get(prepare()()).stats

  stats = added('speculative', request)
  tested = int(stats.num_tested.sum())
  adapting = {}
  if config.times_adapting and own.drafter and own.drafter.adapts:
    whole = request.replace(rule=unsure_below(0.0, gamma))
    rounds = added('speculative_adapting', whole).num_rounds.max()
    adapting['adapting_rounds'] = int(rounds)
  return {
    **adapting,
    'gamma': gamma,
    'rounds': int(stats.num_rounds.max()),
    'histogram': stats.histogram.sum(axis=0).tolist(),
    'acceptance_rate': int(stats.num_accepted.sum()) / max(tested, 1),
  }


def _in_ms(config, setting, seconds) -> dict[str, dict[str, float]]:
  """Times in ms, as `timing.summarise` gives them.

  They are per call, per round, per token (plain loops; of a beam search per
  level) or per run (speculative loops).
  """
  scales = {'matvec': 1.0, 'encoder': 1.0, 'draft_encoder': 1.0}
  for name in seconds:
    if name.endswith('_loop'):
      scales[name] = 1 / setting.decode_len
  scales |= {n: 1.0 for n in seconds if n.startswith('speculative_')}
  return {
    name: timing.summarise(
      values, 1e3 * scales.get(name, 1 / config.calls_a_run)
    )
    for name, values in seconds.items()
  }


def _of_gamma(
  decode_len: int, median: dict[str, float], counted: dict[str, Any]
) -> dict[str, Any]:
  """One gamma: what was measured, and predictions from calls and from alpha.

  Args:
    decode_len: tokens per run.
    median: times in ms: call_1, call_{gamma + 1}, draft_{gamma}, round_{gamma},
      speculative_{gamma}, and plain_loop, which is per token.
    counted: gamma, rounds, histogram, acceptance_rate of the timed run.

  Returns:
    `counted` and: cost_ratio, which is c, the cost of one proposal inside a
    round, in calls of the target over one token; cost_ratio_alone, the same if
    only the drafter runs; speculative_ms, measured, and predicted_ms, the
    number of rounds times the cost of a round; expected_speed_up by
    E(gamma, alpha) / (v(gamma + 1) + gamma c), for independent acceptance;
    speed_up, measured, against the plain loop; t5x_style_speed_up, against the
    loop in T5X's style, None if it was not timed; and where the loop whose
    drafts adapt was timed, adapting_cost, what its rounds take more, in calls.
  """
  gamma = counted['gamma']
  one, verify = median['call_1'], median[f'call_{gamma + 1}']
  a_round = median[f'round_{gamma}']
  # A drafter whose cost is lost in the target's noise counts as 0, not less.
  cost_ratio = max(a_round - verify, 0.0) / gamma / one
  measured = median[f'speculative_{gamma}']
  predicted = counted['rounds'] * a_round
  stock = median.get('t5x_style_loop')
  # v is in calls; a token of the plain loop also costs bookkeeping.
  factor = analysis.measured_walltime_factor(
    counted['acceptance_rate'], gamma, cost_ratio, verify / one
  )
  adapting = {}
  if 'adapting_rounds' in counted:
    took = median[f'speculative_adapting_{gamma}'] / counted['adapting_rounds']
    adapting['adapting_cost'] = (took - measured / counted['rounds']) / one
  return {
    **counted,
    **adapting,
    'cost_ratio': cost_ratio,
    'cost_ratio_alone': median[f'draft_{gamma}'] / gamma / one,
    'speculative_ms': measured,
    'predicted_ms': predicted,
    'measured_over_predicted': measured / predicted,
    'expected_speed_up': float(factor),
    'speed_up': median['plain_loop'] * decode_len / measured,
    't5x_style_speed_up': stock and stock * decode_len / measured,
  }
