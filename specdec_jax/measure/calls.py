"""What calls cost: calls, rounds and loops of a pair, timed in turn.

A `Run` is a call over some tokens, some rounds out of the middle of a loop, or
a whole loop. `interleave` times runs in turn, so that noise affects all alike.
`benchmark` times all of a pair; `calibrate` times what a gamma is chosen from.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax import lax

from specdec_jax import analysis, partitioning, probs
from specdec_jax.checks.fields import Bound, Checked, unexpected
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import Judge, PairParams
from specdec_jax.drafters.base import check_chain
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.calibration import CalibrationError, contradiction
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.pair import MemoryCheck, PlacedPair, placed_pair
from specdec_jax.measure import memory
from specdec_jax.measure.record import Record
from specdec_jax.measure.record import new as new_record
from specdec_jax.measure.table import Column, Table, bar, finish, started
from specdec_jax.models import backend, integers
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import Request, example_keys, new_request
from specdec_jax.types import Amount, Positive

Name = TypeVar('Name', bound=Hashable)
Pair = Engine | PlacedPair  # what is timed: target, drafter, params


class Run(NamedTuple):
  """Something to time.

  Attributes:
    prepare: makes what a run needs afresh, such as a donated state, before the
      clock starts, and returns the run.
    steps: calls, rounds or tokens of a run; times are for one of them.
  """

  prepare: Callable[[], Callable[[], Any]]
  steps: int = 1


def interleave(
  runs: Mapping[Name, Run],
  repeats: int,
  advance: Callable[[], None] = lambda: None,
  until: float = math.inf,
) -> dict[Name, list[float]]:
  """Times every run once per round, in `repeats` rounds, after a warm-up.

  The order is random: what comes before a run leaves other things in the
  processor's caches.

  Args:
    runs: name -> run.
    repeats: timed rounds.
    advance: called after each round, to move a progress bar.
    until: no third round, or a later one, begins after this time
      (`time.monotonic()`).

  Returns:
    Name -> milliseconds in each round.
  """
  for run in runs.values():
    jax.block_until_ready(run.prepare()())
  times: dict[Name, list[float]] = {name: [] for name in runs}
  order, rng = list(runs.items()), random.Random(0)
  for number in range(repeats):
    if number > 1 and time.monotonic() > until:
      break
    rng.shuffle(order)
    for name, run in order:
      prepared = run.prepare()
      begin = time.perf_counter()
      jax.block_until_ready(prepared())
      seconds = time.perf_counter() - begin
      times[name].append(1e3 * seconds / run.steps)
    advance()
  return times


def summarise(values: Sequence[float]) -> dict[str, float]:
  """Median, minimum and maximum of measured times.

  `error` is the median's standard error, assuming normal noise. It is computed
  from the median absolute deviation, which a single disturbed round does not
  change.
  """
  median = statistics.median(values)
  deviation = statistics.median(abs(value - median) for value in values)
  # 1.4826 MAD estimates sigma; a median's error is sqrt(pi / 2) times a mean's.
  error = 1.2533 * 1.4826 * deviation / math.sqrt(len(values))
  return dict(median=median, min=min(values), max=max(values), error=error)


def random_model(network: LanguageModel, seed: int) -> Model:
  """A model whose parameters are drawn when they are read.

  Args:
    network: the network; its `init` gives names and shapes.
    seed: seed of the draw.
  """

  return Model(
    network, reader=lambda dtype, _: random_params(network, seed, dtype)
  )


def random_params(network: LanguageModel, seed: int, dtype: str) -> Any:
  """Draws parameters on the device, array by array, in their final dtype.

  So a T5-XXL in bfloat16 never exists in float32: besides the result, at most
  one more array is held.

  Args:
    network: the network; its `init` gives names and shapes.
    seed: seed of the draw.
    dtype: 'float32' or 'bfloat16', in which integers are drawn too.

  Returns:
    A tree like that of `network.init`; matrices are normal with variance
    1 / rows, so that activations keep their size, and scales are 1.
  """
  dtype = 'bfloat16' if integers.is_integers(dtype) else dtype
  leaves, tree = jax.tree.flatten(param_shapes(network))
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  pairs = zip(keys, leaves, strict=True)
  arrays = [_random(key, leaf.shape, dtype) for key, leaf in pairs]
  return jax.tree.unflatten(tree, arrays)


def _random(key, shape, dtype):
  if len(shape) < 2:
    return jnp.ones(shape, dtype)
  return _normal(key, shape, dtype) / jnp.asarray(math.sqrt(shape[0]), dtype)


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def forced_judge(acceptance_rate: float) -> Judge:
  """Returns a judge that does Algorithm 1's work, but accepts at random.

  It gives the walltime that a pair would have at an alpha, for models whose
  fine-tuned checkpoints are not available: models of the real size do all their
  work, and each proposal is accepted with a given probability, independently,
  as Section 3.1 of the paper models it. The output is meaningless.
  """

  def by_lot(request, draft, logits, keys):
    # The token depends on the complete real verdict, so that the compiler
    # cannot leave out any part of that work.
    verdict = speculative.judge(request, draft, logits, keys)
    num_accepted = jax.vmap(_accepted, in_axes=(0, 0, None, None))(
      keys, draft.length, acceptance_rate, draft.tokens.shape[1]
    )
    return verdict.replace(num_accepted=num_accepted)

  return by_lot


def _accepted(key, length, acceptance_rate, width):
  """Proposals of one row before the first that is rejected, int32[]."""
  # Needs another key, because the real verdict has consumed `accept_key`.
  own = jax.random.fold_in(probs.accept_key(key), 1)
  accepted = jax.random.uniform(own, (width,)) < acceptance_rate
  accepted &= jnp.arange(width) < length
  return jnp.argmin(jnp.append(accepted, False)).astype(jnp.int32)


_MATRIX = (6144, 8192)  # 192 MiB of float32: more than any cache


def matvec() -> tuple[Run, int]:
  """A matrix-vector product, and the bytes that it reads from memory."""
  matrix = jnp.ones(_MATRIX, jnp.float32)
  vector = jnp.ones((_MATRIX[1], 1), jnp.float32)
  product = functools.partial(jax.jit(jnp.matmul), matrix, vector)
  return Run(lambda: product), matrix.nbytes


def make_request(
  network: LanguageModel,
  batch: int,
  input_len: int,
  slots: int,
  temperature: float,
  seed: int,
  gamma: int,
) -> Request:
  """A request of random ids that never stops before `slots` tokens.

  Args:
    network: the target; without an encoder the inputs are prompts, after the
      start token.
    batch: B.
    input_len: E.
    slots: tokens per run.
    temperature: of both models.
    seed: seed of the ids, none of them special in T5, and of the samples.
    gamma: proposals per round.
  """
  rng = np.random.default_rng(seed)
  inputs = rng.integers(3, network.vocab_size, (batch, input_len), np.int32)
  prompt = np.full((batch, 1), network.start_id, np.int32)
  if not network.has_encoder:
    prompt = np.append(prompt, inputs, axis=1)
    inputs = np.zeros((batch, 1), np.int32)
  request = new_request(
    inputs,
    example_keys(seed, np.arange(batch, dtype=np.uint32)),
    SamplingConfig(temperature=temperature),
    slots=slots,
    gamma=gamma,
    prompt=prompt,
    prompt_length=prompt.shape[1],
  )
  return jax.device_put(request)  # so that runs need no time to move it


def loop_run(
  loop: Loop,
  start: Callable[..., Any],
  params: PairParams,
  request: Request,
  rounds: int | None = None,
) -> Run:
  """A decoding loop, without its start.

  Args:
    loop: the loop.
    start: its compiled start.
    params: its parameters.
    request: what it decodes.
    rounds: how many rounds are run, in the middle of the output; None runs the
      whole loop.
  """
  state = start(params, request)
  limit = jnp.int32(decode_state.NO_ROUND_LIMIT)
  donating = jax.jit(loop.run, donate_argnums=2)
  compiled = donating.lower(params, request, state, limit).compile()
  run = functools.partial(compiled, params, request)
  if rounds is None:
    return Run(lambda: functools.partial(run, _copy(state), limit))
  rounds = min(rounds, request.slots - 2)
  before = min(request.slots // 2, request.slots - rounds - 2)
  state = run(state, jnp.int32(before))

  def prepare():
    # A model that fits into a processor's caches lies there in a run, and what
    # is timed in between puts it out: one round comes before the clock starts.
    warm = jax.block_until_ready(run(_copy(state), jnp.int32(1)))
    return functools.partial(run, warm, jnp.int32(rounds))

  return Run(prepare, rounds)


def _copy(state: Any) -> Any:
  return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def call_run(
  pair: Pair, request: Request, cache: Any, num_tokens: int, calls: int
) -> Run:
  """Calls of the target over `num_tokens` tokens each, in one compiled loop.

  The cache is at half of the run's output, and is rewound after each call, as
  after a rejection; each call's tokens come from the call before. As in
  `loop_run`, one call more comes before the clock starts.
  """
  target = pair.target

  def run(params, cache, tokens, half, calls):
    def body(_, carry):
      cache = target.rewind(carry[0], half)
      features, cache = target.extend(params, cache, carry[1])
      return cache, probs.greedy_token(target.head(params, features))

    return lax.fori_loop(0, calls, body, (cache, tokens))[1]

  batch = request.inputs.shape[0]
  tokens = jnp.ones((batch, num_tokens), jnp.int32)
  # An argument: to a program that knows it XLA adds copies of caches.
  length = request.prompt_width - 1 + request.slots // 2
  half = jnp.full((batch,), length, jnp.int32)
  args = pair.params.target, cache, tokens, half
  compiled = jax.jit(run).lower(*args, jnp.int32(calls)).compile()

  def prepare():
    jax.block_until_ready(compiled(*args, jnp.int32(1)))
    return functools.partial(compiled, *args, jnp.int32(calls))

  return Run(prepare, calls)


_ATTEMPTS = 5  # at times that do not contradict themselves
MOST_LEN, _MOST_RUNS = 1 << 17, 10_000
LEAST_DECODE_LEN = 32  # in a shorter run, mostly its start would be timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing(Checked):
  """How calls are timed: over random tokens, in runs that take turns.

  Attributes:
    input_len: E, tokens of an input, in the costs; without an encoder those of
      a prompt, behind the start token.
    decode_len: tokens of an output, in the costs.
    temperature: 0 is greedy.
    calls_a_run: calls in one timed loop.
    repeats: timed rounds, interleaved.
    seed: seed of inputs and samples.

  Raises:
    ValueError: a number is out of its range.
  """

  input_len: Annotated[int, Bound(1, MOST_LEN)] = 32
  decode_len: Annotated[int, Bound(LEAST_DECODE_LEN, MOST_LEN)] = 120
  temperature: Amount = 0.0
  calls_a_run: Annotated[int, Bound(1, _MOST_RUNS)] = 20
  # One round has no spread, and so no error.
  repeats: Annotated[int, Bound(2, _MOST_RUNS)] = 7
  seed: int = 0

  def request(self, target: LanguageModel, batch: int, gamma: int) -> Request:
    """What is decoded, with a number of rows and of proposals per round."""
    shape = batch, self.input_len, self.decode_len
    return make_request(target, *shape, self.temperature, self.seed, gamma)

  def check_room(
    self, room: MemoryCheck, target: LanguageModel, batch: int, gamma: int
  ) -> None:
    """Raises DoesNotFitError if a run of `request` does not fit.

    Args:
      room: checks the memory.
      target: the target.
      batch: B.
      gamma: the largest gamma.
    """
    request = jax.eval_shape(lambda: self.request(target, batch, gamma))
    slots, tokens = request.cache_slots, request.call_tokens
    room.check(batch, self.input_len, slots, tokens)


def call_runs(
  pair: Pair,
  timing: Timing,
  batch: int,
  sizes: Sequence[int],
  gammas: Sequence[int],
  until: float = math.inf,
) -> dict[str, Run]:
  """Prepares the calls and rounds of a pair, programs compiled side by side.

  A round costs what it costs inside the speculative loop. That is more than the
  sum of its calls measured alone, since each model finds the processor's caches
  filled by the other model. Nothing is accepted in it.

  Args:
    pair: the pair.
    timing: what is decoded, and how many calls, or rounds, a run has.
    batch: B.
    sizes: m, tokens of a call.
    gammas: proposals of a round.
    until: no program is compiled after this time (`time.monotonic()`).

  Returns:
    'encoder', the call that reads the input; 'start', the same of both models;
    'call_m' for each size, 'round_g' for each gamma.

  Raises:
    CalibrationError: the time is over.
  """
  drafter: Any = pair.drafter
  check_chain(drafter, 'The measurement of rounds')
  request = functools.partial(timing.request, pair.target, batch)
  count = timing.calls_a_run
  plain = Loop(pair.target)
  loop = Loop(pair.target, drafter, forced_judge(0.0))
  largest = request(max((*gammas, *(size - 1 for size in sizes))))
  start = jax.jit(loop.start)
  read = functools.partial(jax.jit(plain.start), pair.params, largest)
  read_both = functools.partial(start, pair.params, largest)
  runs = {'encoder': Run(lambda: read), 'start': Run(lambda: read_both)}
  cache = read().target_cache
  jax.block_until_ready(read_both())

  def made_in_time(make: Callable[..., Run], *args: Any) -> Run:
    if time.monotonic() > until:
      raise CalibrationError('The time is over.')
    return make(*args)

  # XLA compiles without Python's lock, a program on each core.
  with concurrent.futures.ThreadPoolExecutor(backend.num_cores()) as pool:
    made = {  # rounds first: they are the longest to compile
      f'round_{gamma}': pool.submit(
        made_in_time, loop_run, loop, start, pair.params, request(gamma), count
      )
      for gamma in gammas
    }
    for size in sizes:
      args = pair, largest, cache, size, count
      made[f'call_{size}'] = pool.submit(made_in_time, call_run, *args)
  return runs | {name: future.result() for name, future in made.items()}


def in_ms(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
  """Summaries of the times of `call_runs` and of others beside them.

  'draft_encoder', what the drafter takes to read the input, is what a start of
  both models takes more than one of the target.
  """
  summaries = {name: summarise(values) for name, values in times.items()}
  both = zip(times['encoder'], times['start'], strict=True)
  first = [max(0.0, start - encoder) for encoder, start in both]
  return summaries | {'draft_encoder': summarise(first)}


def steady_ms(
  runs: Mapping[str, Run],
  repeats: int,
  advance: Callable[[], None] = lambda: None,
  until: float = math.inf,
) -> tuple[dict[str, dict[str, float]], str]:
  """Times runs in turn, and again where the times contradict themselves.

  Args:
    runs: those of `call_runs`, and others.
    repeats, advance, until: as of `interleave`.

  Returns:
    What `in_ms` makes of all rounds, and what is still wrong with it, see
    `calibration.contradiction`; '' for nothing.
  """
  times: dict[str, list[float]] = {name: [] for name in runs}
  for attempt in range(_ATTEMPTS):
    if attempt and time.monotonic() > until:
      break
    for name, more in interleave(runs, repeats, advance, until).items():
      times[name] += more
    advance = lambda: None  # noqa: E731  the bar has reached its end
    summaries = in_ms(times)
    wrong = contradiction({name: x['median'] for name, x in summaries.items()})
    if not wrong:
      break
  return summaries, wrong


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig(Timing):
  """What to measure; no run stops before its budget.

  Attributes:
    target: the model to time; of a network alone random parameters are drawn
      on the device.
    drafter: the small model that drafts, as for `target`.
    placement: layout and dtype of both.
    gammas: proposals per round.
    batch: B.
    forced_acceptance: None accepts by Algorithm 1; otherwise each proposal is
      accepted with this probability, see `forced_judge`.
    call_sizes: m, tokens per call, for v(m).
    output_file: JSON; None writes nothing.
    name: name of the record.

  Raises:
    ValueError: a number is out of its range.
  """

  target: Model | LanguageModel
  drafter: Model | LanguageModel
  placement: Placement = Placement()
  gammas: Annotated[Sequence[Positive], Bound(1)] = (4,)
  batch: Positive = 1
  forced_acceptance: float | None = None
  call_sizes: Sequence[Positive] = (1, 2, 4, 8)
  output_file: str | None = None
  name: str = 'benchmark'

  def __post_init__(self):
    super().__post_init__()
    rate = self.forced_acceptance
    if rate is not None and not 0.0 <= rate <= 1.0:
      raise unexpected('forced_acceptance', 'None or 0 to 1', rate)
    if 1 not in self.call_sizes:
      raise unexpected('call_sizes', '1 among them', self.call_sizes)

  @functools.cached_property
  def models(self) -> tuple[Model, Model]:
    """Target and drafter."""
    target, drafter = (
      part
      if isinstance(part, Model)
      else random_model(part, self.seed + number)
      for number, part in enumerate((self.target, self.drafter))
    )
    return target, drafter

  @property
  def settings(self) -> dict[str, Any]:
    """The settings as a record has them."""
    names = [field.name for field in dataclasses.fields(self)]
    values = {name: getattr(self, name) for name in names}
    del values['output_file']
    values['target'], values['drafter'] = (m.network for m in self.models)
    return json.loads(json.dumps(values, default=repr))

  def check_memory(self) -> None:
    """Raises DoesNotFitError if the pair does not fit."""
    target, draft = self.models
    room = MemoryCheck(target, small_model(draft), self.placement)
    self.check_room(room, target.network, self.batch, max(self.gammas))

  def pair(self) -> PlacedPair:
    """Places the models."""
    for model in self.models:
      partitioning.check_dtypes(model, self.placement)
    target, draft = self.models
    placement = self.placement.for_model(target)
    return placed_pair(target, small_model(draft), placement)


def benchmark(
  config: BenchmarkConfig, console: rich.console.Console | None = None
) -> Record:
  """Times the calls and loops of a pair; prints a table, writes the record.

  Returns:
    The record: the settings, and `times_ms` of each run, see `call_runs`, of
    'plain_loop' (per token) and of 'speculative_g'; `call_cost`, v(m);
    `bandwidth_fraction`, what the plain loop reads in a second, of what a
    matrix-vector product reads; and a row for each of `gammas`: cost_ratio,
    which is c, the cost of one proposal inside a round, in calls of the target
    over one token; acceptance_rate and histogram of the timed loop; speed_up
    against the plain loop; and expected_speed_up by
    E(gamma, alpha) / (v(gamma + 1) + gamma c), for independent acceptance. It
    is None if the times contradict themselves: `contradiction` says how.

  Raises:
    DoesNotFitError: memory is too small; raised before anything is made.
  """
  console = started(config, console)
  config.check_memory()
  with bar(console, 'Compiling and timing', config.repeats) as advance:
    pair = config.pair()
    sizes = {*config.call_sizes, *(gamma + 1 for gamma in config.gammas)}
    batch = config.batch
    runs = call_runs(pair, config, batch, sorted(sizes), config.gammas)
    loops, counts = _loop_runs(config, pair)
    matrix, matrix_bytes = matvec()
    runs |= loops | {'matvec': matrix}
    times, wrong = steady_ms(runs, config.repeats, advance)
  median = {name: value['median'] for name, value in times.items()}
  plain = config.request(pair.target, batch, 0)
  call_bytes = memory.call_bytes(pair.target, pair.params.target, plain)
  reached = call_bytes / median['plain_loop']
  values = {
    'settings': config.settings,
    'times_ms': times,
    'call_cost': {
      name.removeprefix('call_'): value / median['call_1']
      for name, value in median.items()
      if name.startswith('call_')
    },
    'bandwidth_fraction': reached / (matrix_bytes / median['matvec']),
    'contradiction': wrong,
    'gammas': [
      _of_gamma(config.decode_len, gamma, median, stats)
      | ({'expected_speed_up': None} if wrong else {})
      for gamma, stats in counts.items()
    ],
  }
  record = new_record('benchmark', values)
  # Of a forced acceptance there is a suite, whose tables have their own words.
  words = _EXPLAINED if config.forced_acceptance is None else ()
  finish(config, console, record, table(record), *words)
  return record


def _loop_runs(
  config: BenchmarkConfig, pair: Pair
) -> tuple[dict[str, Run], dict[int, Any]]:
  """The whole loops of a benchmark; gamma -> what its loop counted."""

  def whole(loop: Loop, gamma: int) -> Run:
    request = config.request(pair.target, config.batch, gamma)
    return loop_run(loop, jax.jit(loop.start), pair.params, request)

  plain = whole(Loop(pair.target), 0)
  runs = {'plain_loop': plain._replace(steps=config.decode_len)}
  judge: Judge = speculative.judge
  if config.forced_acceptance is not None:
    judge = forced_judge(config.forced_acceptance)
  counts = {}
  for gamma in config.gammas:
    run = whole(Loop(pair.target, pair.drafter, judge), gamma)
    runs[f'speculative_{gamma}'] = run
    counts[gamma] = jax.device_get(run.prepare()().stats)
  return runs, counts


def _of_gamma(
  decode_len: int, gamma: int, median: Mapping[str, float], stats: Any
) -> dict[str, Any]:
  """One gamma: what was measured, and a prediction from calls and alpha."""
  one, verify = median['call_1'], median[f'call_{gamma + 1}']
  # A drafter whose cost is lost in the target's noise counts as 0, not less.
  cost_ratio = max(median[f'round_{gamma}'] - verify, 0.0) / gamma / one
  acceptance = stats.num_accepted.sum() / max(stats.num_tested.sum(), 1)
  factor = analysis.walltime_factor(
    float(acceptance), gamma, cost_ratio, verify / one
  )
  plain = median['plain_loop'] * decode_len
  return {
    'gamma': gamma,
    'histogram': stats.histogram.sum(axis=0).tolist(),
    'acceptance_rate': float(acceptance),
    'cost_ratio': cost_ratio,
    'expected_speed_up': float(factor),
    'speed_up': plain / median[f'speculative_{gamma}'],
  }


def table(record: Mapping[str, Any]) -> Table:
  """A row for each gamma, with notes on what is common to them."""
  settings, call_cost = record['settings'], record['call_cost']
  forced = settings['forced_acceptance']
  note = '' if forced is None else f', acceptance forced to {forced}'
  title = (
    f'{settings["name"]}{note}; batch {settings["batch"]}, input'
    f' {settings["input_len"]}, output {settings["decode_len"]} tokens,'
    f' temperature {settings["temperature"]:g}'
  )
  plain = record['times_ms']['plain_loop']['median']
  costs = (f'v({m}) {v:.2f}' for m, v in call_cost.items() if m != '1')
  notes = [
    f'Plain loop: {plain:.2f} ms per token, at'
    f" {record['bandwidth_fraction']:.0%} of a matrix-vector product's"
    f' bandwidth. Calls: {", ".join(costs)}.',
  ]
  if wrong := record.get('contradiction'):
    notes.insert(0, f'No speed-up is predicted: {wrong}.')
  return Table.of(
    title,
    {
      'gamma': 'gamma',
      Column('v(gamma + 1)', '.2f'): lambda row: call_cost[
        str(row['gamma'] + 1)
      ],
      Column('c inside a round', '.3f'): 'cost_ratio',
      Column('acceptance of the run', '.3f'): 'acceptance_rate',
      Column('expected speed-up', '.2f'): 'expected_speed_up',
      Column('speed-up', '.2f'): 'speed_up',
    },
    record['gammas'],
    notes,
  )


# Sentences under tables.
COSTS_EXPLAINED = (
  'v(m): time of a call of the target over m tokens, in calls over one token.'
  ' c: time of a proposal, in the same unit, inside a round, where each model'
  " finds the other's weights in the caches."
)
_EXPLAINED = (
  COSTS_EXPLAINED,
  'Bandwidth: bytes of weights and caches that a token needs, by time. More'
  ' than 100 % means that they stayed in the caches of the processor.',
  'The inputs are random ids, of which a drafter guesses fewer tokens than of'
  ' texts: the speed-up on texts is another, see `specdec calibrate`.',
)
