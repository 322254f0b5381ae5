"""Times the calls, rounds and loops of a pair, in turn.

A `Run` is a call over some tokens, some rounds out of the middle of a loop, or
a whole loop. `interleave` times runs in turn, so that noise affects all alike.
`benchmark` times all runs of a pair; `calibrate` times those that a gamma is
chosen from.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
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
from jax import lax
from rich.console import Console

from specdec_jax import analysis, partitioning, probs
from specdec_jax.checks.fields import Bound, Checked, unexpected
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import Judge, PairParams
from specdec_jax.drafters.base import check_chain
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.calibration import CalibrationError, contradiction
from specdec_jax.engine.completion import Completion, CompletionStats, total
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.pair import MemoryCheck, PlacedPair, placed_pair
from specdec_jax.measure import memory
from specdec_jax.models import backend, integers
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement
from specdec_jax.report import Column, Record, Table, bar, record
from specdec_jax.request import Request, example_keys, new_request
from specdec_jax.types import Amount, Positive

Name = TypeVar('Name', bound=Hashable)
Pair = Engine | PlacedPair
Advance = Callable[..., None]


class Run(NamedTuple):
  """A function to time.

  Attributes:
    prepare: makes new inputs for a run, such as a state that is donated, before
      the clock starts, and returns the function to time.
    steps: number of calls, rounds or tokens of a run; times are per step.
  """

  prepare: Callable[[], Callable[[], Any]]
  steps: int = 1


def interleave(
  runs: Mapping[Name, Run],
  repeats: int,
  advance: Advance = lambda: None,
  until: float = math.inf,
) -> dict[Name, list[float]]:
  """Times every run once per round, in `repeats` rounds, after a warm-up.

  The order is random, because each run finds in the processor's caches what
  the run before it has left there.

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


class Timed(NamedTuple):
  """The times and outputs of texts that one method decoded in timed rounds.

  Attributes:
    ms: float[R, N], milliseconds in each of R rounds for each of N parts of the
      texts.
    outputs: the completions of each part, first those of the call that
      compiled, then those of each round.
  """

  ms: np.ndarray
  outputs: Sequence[Sequence[Sequence[Completion]]]

  @property
  def stats(self) -> list[CompletionStats]:
    """The counts of each part, summed over all timed rounds."""
    timed = [itertools.chain(*part[1:]) for part in self.outputs]
    return [total(output.stats for output in part) for part in timed]

  @property
  def tokens(self) -> np.ndarray:
    """int[N], the number of tokens of each part in all timed rounds."""
    return np.array([part.num_tokens for part in self.stats])


def decode_in_turn(
  methods: Mapping[str, tuple[Engine, Mapping[str, Any]]],
  texts: Sequence[str],
  parts: Sequence[Sequence[int]],
  repeats: int,
  advance: Callable[[], None] = lambda: None,
  until: float = math.inf,
  **options: Any,
) -> dict[str, Timed]:
  """Times texts by several methods of decoding in turn, after compiling them.

  Args:
    methods: name -> engine, and further options of its `generate`.
    texts: the texts to decode.
    parts: indices of the texts that each timed call decodes.
    repeats: timed rounds; each has another seed, unless `options` have one.
    advance: called after each round, as for `interleave`.
    until: when timing is cut short, as for `interleave`.
    **options: options of `Engine.generate` for all methods.

  Returns:
    Name of the method -> its times and outputs.
  """
  outputs: dict[tuple[str, int], list[Any]] = {}

  def run(method: str, part: int) -> Run:
    engine, more = methods[method]
    done = outputs[method, part] = []
    inputs = [texts[index] for index in parts[part]]
    settings = {'example_ids': parts[part], 'log_probs': False, **options}

    def decode():
      seed = {'seed': len(done)}
      done.append(engine.generate(inputs, **(seed | settings | dict(more))))

    return Run(lambda: decode)

  numbers = range(len(parts))
  runs = {name: run(*name) for name in itertools.product(methods, numbers)}
  times = interleave(runs, repeats, advance, until)

  def timed(method: str) -> Timed:
    ms = np.array([times[method, part] for part in numbers]).T
    return Timed(ms, [outputs[method, part] for part in numbers])

  return {method: timed(method) for method in methods}


def summarise(values: Sequence[float]) -> dict[str, float]:
  """Returns median, minimum, maximum and standard error of measured times.

  `error` is the standard error of the median under normal noise. It comes from
  the median absolute deviation, which a single disturbed round does not change.
  """
  median = statistics.median(values)
  deviation = statistics.median(abs(value - median) for value in values)
  # 1.4826 MAD estimates sigma; a median's error is sqrt(pi / 2) times a mean's.
  error = 1.2533 * 1.4826 * deviation / math.sqrt(len(values))
  return dict(median=median, min=min(values), max=max(values), error=error)


def medians(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
  """Returns name -> median, from name -> the result of `summarise`."""
  return {name: summary['median'] for name, summary in times.items()}


def random_params(network: LanguageModel, seed: int, dtype: str) -> Any:
  """Draws parameters on the device, array by array, in their final dtype.

  A T5-XXL in bfloat16 therefore never exists in float32: the memory holds the
  result and at most one more array.

  Args:
    network: the network; its `init` gives names and shapes.
    seed: seed of the random numbers.
    dtype: 'float32' or 'bfloat16'; for dtypes of integers, the parameters are
      drawn in bfloat16.

  Returns:
    A tree like that of `network.init`; matrices are normal with variance
    1 / rows, so that activations keep their size, and scales are 1.
  """
  dtype = 'bfloat16' if integers.is_integers(dtype) else dtype
  leaves, tree = jax.tree.flatten(param_shapes(network))
  keys = jax.random.split(jax.random.key(seed), len(leaves))

  def draw(key: jax.Array, leaf: Any) -> jax.Array:
    shape = leaf.shape
    if len(shape) < 2:
      return jnp.ones(shape, dtype)
    return _normal(key, shape, dtype) / jnp.asarray(shape[0] ** 0.5, dtype)

  return jax.tree.unflatten(tree, map(draw, keys, leaves))


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def forced_judge(acceptance_rate: float) -> Judge:
  """Returns a judge that does Algorithm 1's work, but accepts at random.

  With this judge a run takes as long as a pair with the given acceptance rate
  would, even if the fine-tuned checkpoints of that pair are not available.
  Models of the real size do all their work, but each proposal is accepted with
  the same probability, independently of others, as Section 3.1 of the paper
  assumes. The output is meaningless.
  """

  def judge(request, draft, logits, keys):
    # The token depends on the complete real verdict, so that the compiler
    # cannot leave out any part of that work.
    verdict = speculative.judge(request, draft, logits, keys)
    width = draft.tokens.shape[1]

    def accepted(key, length):
      """Counts the proposals of a row before its first rejection, int32[]."""
      # The real verdict has consumed `accept_key`: this draw needs another key.
      new_key = jax.random.fold_in(probs.accept_key(key), 1)
      passes = jax.random.uniform(new_key, (width,)) < acceptance_rate
      passes &= jnp.arange(width) < length
      return jnp.argmin(jnp.append(passes, False)).astype(jnp.int32)

    return verdict.replace(num_accepted=jax.vmap(accepted)(keys, draft.length))

  return judge


_MATRIX = (6144, 8192)  # a float32 matrix takes 192 MiB, more than any cache


def make_request(
  network: LanguageModel,
  batch: int,
  input_len: int,
  slots: int,
  temperature: float,
  seed: int,
  gamma: int,
) -> Request:
  """Makes a request of random ids that never stops before `slots` tokens.

  Args:
    network: the target; without an encoder the inputs are prompts, after the
      start token.
    batch: B, the number of rows.
    input_len: E, tokens of an input.
    slots: tokens of an output.
    temperature: temperature of both models.
    seed: seed of the ids, none of them special in T5, and of the samples.
    gamma: proposals per round.
  """
  rng = np.random.default_rng(seed)
  inputs = rng.integers(3, network.vocab_size, (batch, input_len), np.int32)
  prompt = np.full((batch, 1), network.start_id, np.int32)
  if not network.has_encoder:
    prompt = np.append(prompt, inputs, axis=1)
    inputs = np.zeros((batch, 1), np.int32)
  keys = example_keys(seed, np.arange(batch, dtype=np.uint32))
  request = new_request(
    inputs,
    keys,
    probs.SamplingConfig(temperature=temperature),
    slots=slots,
    gamma=gamma,
    prompt=prompt,
    prompt_length=prompt.shape[1],
  )
  # The request is on the device, so that runs spend no time on moving it.
  return jax.device_put(request)


def loop_run(
  loop: Loop,
  start: Callable[..., Any],
  params: PairParams,
  request: Request,
  rounds: int | None = None,
) -> Run:
  """Returns a decoding loop as a run; the start of the loop is not timed.

  Args:
    loop: the plain or speculative loop to time.
    start: the compiled function that makes the loop's first state.
    params: the parameters of the models.
    request: the request that the loop decodes.
    rounds: number of rounds to run, in the middle of the output; None runs the
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
    # In a real run a small model stays in the processor's caches, but here the
    # other runs evict it. A round before the clock starts brings it back.
    warm = jax.block_until_ready(run(_copy(state), jnp.int32(1)))
    return functools.partial(run, warm, jnp.int32(rounds))

  return Run(prepare, rounds)


def _copy(state: Any) -> Any:
  return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def call_run(
  pair: Pair, request: Request, cache: Any, num_tokens: int, calls: int
) -> Run:
  """Returns calls of the target over `num_tokens` tokens each, in one loop.

  The KV cache is filled up to half of the output, and is rewound to there
  before each call, as after a rejection. Each call reads the tokens that the
  call before it returned. As in `loop_run`, an additional call comes before the
  clock starts.
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
  # The length is an argument: if it were a constant, XLA would copy caches.
  length = request.prompt_width - 1 + request.slots // 2
  half = jnp.full((batch,), length, jnp.int32)
  args = pair.params.target, cache, tokens, half
  compiled = jax.jit(run).lower(*args, jnp.int32(calls)).compile()

  def prepare():
    jax.block_until_ready(compiled(*args, jnp.int32(1)))
    return functools.partial(compiled, *args, jnp.int32(calls))

  return Run(prepare, calls)


# Times that contradict each other are measured again, up to so often in all.
_ATTEMPTS = 5
MOST_LEN, _MOST_RUNS = 1 << 17, 10_000
LEAST_DECODE_LEN = 32  # a shorter run would mostly time its start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing(Checked):
  """Settings of timed calls, which read random tokens.

  Attributes:
    input_len: tokens of an input in timed calls; for a decoder-only model,
      tokens of a prompt after the start token.
    decode_len: tokens of an output in timed calls.
    temperature: temperature of both models; 0 is greedy.
    calls_a_run: number of calls in one timed loop.
    repeats: how often each call, round or loop is timed; they take turns, in
      random order.
    seed: seed of inputs and samples.

  Raises:
    ValueError: a number is out of its range.
  """

  input_len: Annotated[int, Bound(1, MOST_LEN)] = 32
  decode_len: Annotated[int, Bound(LEAST_DECODE_LEN, MOST_LEN)] = 120
  temperature: Amount = 0.0
  calls_a_run: Annotated[int, Bound(1, _MOST_RUNS)] = 20
  # The standard error of a time needs two rounds or more.
  repeats: Annotated[int, Bound(2, _MOST_RUNS)] = 7
  seed: int = 0

  def request(self, target: LanguageModel, batch: int, gamma: int) -> Request:
    """Makes a request of `batch` rows and `gamma` proposals per round."""
    shape = batch, self.input_len, self.decode_len
    return make_request(target, *shape, self.temperature, self.seed, gamma)

  def check_fits(
    self, check: MemoryCheck, target: LanguageModel, batch: int, gamma: int
  ) -> None:
    """Raises DoesNotFitError if a run of `request` does not fit into memory.

    Args:
      check: the check of the pair's memory.
      target: the target's network.
      batch: B, the number of rows.
      gamma: the largest gamma.
    """
    made = jax.eval_shape(lambda: self.request(target, batch, gamma))
    check.check(batch, self.input_len, made.cache_slots, made.call_tokens)


def call_runs(
  pair: Pair,
  timing: Timing,
  batch: int,
  sizes: Sequence[int],
  gammas: Sequence[int],
  until: float = math.inf,
) -> dict[str, Run]:
  """Prepares calls and rounds of a pair; compiles their programs in parallel.

  A round is timed inside the speculative loop. There it takes more time than
  its calls do when they are measured separately, because each model finds the
  processor's caches filled by the other model. No proposal is accepted.

  Args:
    pair: the pair whose calls are timed.
    timing: settings of the request, and the number of calls or rounds of a run.
    batch: B, the number of rows.
    sizes: the numbers m of tokens for which calls of the target are timed.
    gammas: the numbers g of proposals for which rounds are timed.
    until: no program is compiled after this time (`time.monotonic()`).

  Returns:
    Name -> run: 'encoder' is the target's call that reads the input, and
    'start' is the calls of both models that read it; 'call_m' is calls over m
    tokens, and 'round_g' is rounds with g proposals.

  Raises:
    CalibrationError: `until` has passed.
  """
  drafter = pair.drafter
  assert drafter is not None
  check_chain(drafter, 'The measurement of rounds')
  request = functools.partial(timing.request, pair.target, batch)
  count = timing.calls_a_run
  loop = Loop(pair.target, drafter, forced_judge(0.0))
  largest = request(max((*gammas, *(size - 1 for size in sizes))))
  start = jax.jit(loop.start)
  plain_start = jax.jit(Loop(pair.target).start)
  read = functools.partial(plain_start, pair.params, largest)
  read_both = functools.partial(start, pair.params, largest)
  cache = read().target_cache
  jax.block_until_ready(read_both())
  # The programs that take longest to compile come first.
  makers: dict[str, Callable[[], Run]] = {}
  for gamma in gammas:
    makers[f'round_{gamma}'] = functools.partial(
      loop_run, loop, start, pair.params, request(gamma), count
    )
  for size in sizes:
    makers[f'call_{size}'] = functools.partial(
      call_run, pair, largest, cache, size, count
    )

  def in_time(make: Callable[[], Run]) -> Run:
    if time.monotonic() > until:
      raise CalibrationError('The time is over: give more minutes.')
    return make()

  # XLA compiles without holding Python's lock, so each core compiles a program.
  with concurrent.futures.ThreadPoolExecutor(backend.num_cores()) as pool:
    runs = dict(zip(makers, pool.map(in_time, makers.values()), strict=True))
  return {'encoder': Run(lambda: read), 'start': Run(lambda: read_both)} | runs


def steady_ms(
  runs: Mapping[str, Run],
  repeats: int,
  advance: Callable[..., None] = lambda *_: None,
  until: float = math.inf,
) -> tuple[dict[str, dict[str, float]], str]:
  """Times runs in turn, and again where the times contradict each other.

  Args:
    runs: a result of `call_runs`, and further runs.
    repeats: timed rounds.
    advance: called after each round to move a progress bar, and with `-repeats`
      before a new attempt.
    until: no further attempt begins after this time (`time.monotonic()`).

  Returns:
    A pair. The first item is name -> the result of `summarise`, for each run
    and for 'draft_encoder', the time in which the drafter reads the input: that
    of 'start' less that of 'encoder'. The second item says how the times still
    contradict each other; it is '' if they do not.
  """
  times: dict[str, list[float]] = {name: [] for name in runs}
  for attempt in range(_ATTEMPTS):
    if attempt:
      if time.monotonic() > until:
        break
      advance(-repeats)
    for name, more in interleave(runs, repeats, advance, until).items():
      times[name] += more
    both = zip(times['encoder'], times['start'], strict=True)
    reading = [max(0.0, start - encoder) for encoder, start in both]
    values = times | {'draft_encoder': reading}
    summaries = {name: summarise(ms) for name, ms in values.items()}
    wrong = contradiction(medians(summaries))
    if not wrong:
      break
  return summaries, wrong


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig(Timing):
  """A benchmark of a pair; each output has `decode_len` tokens.

  Attributes:
    target: the model to time; a network without parameters gets random
      parameters, which are drawn on the device.
    drafter: the small model that drafts; a network gets random parameters too.
    placement: layout on the devices and dtype of both models.
    gammas: numbers of proposals per round to time.
    batch: number of rows that are decoded together.
    forced_acceptance: None accepts by Algorithm 1; otherwise each proposal is
      accepted with this probability, see `forced_judge`.
    call_sizes: numbers m of tokens for which v(m), the cost of a call, is
      timed.
    output_file: path of the record, JSON; None writes no file.
    name: name of the record.

  Raises:
    ValueError: a number is out of its range.
  """

  target: Model | LanguageModel
  drafter: Model | LanguageModel
  placement: Placement = Placement()
  gammas: Annotated[Sequence[Positive], Bound(1)] = (4,)
  batch: Positive = 1
  forced_acceptance: Annotated[float, Bound(0, 1)] | None = None
  call_sizes: Sequence[Positive] = (1, 2, 4, 8)
  output_file: str | None = None
  name: str = 'benchmark'

  def __post_init__(self):
    super().__post_init__()
    if 1 not in self.call_sizes:
      raise unexpected('call_sizes', '1 among them', self.call_sizes)

  @functools.cached_property
  def models(self) -> tuple[Model, Model]:
    """Target and drafter; a network without parameters becomes a model."""

    def made(model: Model | LanguageModel, seed: int) -> Model:
      if isinstance(model, Model):
        return model
      return Model(model, reader=lambda t, _: random_params(model, seed, t))

    return made(self.target, self.seed), made(self.drafter, self.seed + 1)

  @property
  def settings(self) -> dict[str, Any]:
    """The settings as JSON values."""
    names = [field.name for field in dataclasses.fields(self)]
    values = {x: getattr(self, x) for x in names if x != 'output_file'}
    values['target'], values['drafter'] = (m.network for m in self.models)
    return json.loads(json.dumps(values, default=repr))

  def check_memory(self) -> None:
    """Raises DoesNotFitError if the pair does not fit into memory."""
    target, draft = self.models
    check = MemoryCheck(target, small_model(draft), self.placement)
    self.check_fits(check, target.network, self.batch, max(self.gammas))

  def pair(self) -> PlacedPair:
    """Reads the models onto the devices."""
    for model in self.models:
      partitioning.check_dtypes(model, self.placement)
    target, draft = self.models
    placement = self.placement.for_model(target)
    return placed_pair(target, small_model(draft), placement)


def benchmark(
  config: BenchmarkConfig, console: Console | None = None
) -> Record:
  """Times the calls and loops of a pair; prints a table, writes the record.

  Returns:
    The record. It has the `settings`; `times_ms` of each run of `call_runs`, of
    'plain_loop' (per token) and of 'speculative_g' for each gamma g;
    `call_cost`, which is m -> v(m); `bandwidth_fraction`, the bytes per second
    that the plain loop reads, relative to a matrix-vector product;
    `contradiction`, which says how the times contradict each other, or is '';
    and `gammas`, a row for each gamma. A row has `cost_ratio`, which is c, the
    time of a proposal inside a round, in calls of the target over one token;
    `acceptance_rate` and `histogram` of the timed loop; `speed_up` over the
    plain loop; and `expected_speed_up`, which is
    E(gamma, alpha) / (v(gamma + 1) + gamma c) for independent acceptance, or
    None if the times contradict each other.

  Raises:
    DoesNotFitError: memory is too small; raised before arrays are made.
  """
  console = record.begin(console, config.output_file)
  config.check_memory()
  with bar(console, 'Compiling and timing', config.repeats) as advance:
    pair = config.pair()
    sizes = {*config.call_sizes, *(gamma + 1 for gamma in config.gammas)}
    runs = call_runs(pair, config, config.batch, sorted(sizes), config.gammas)
    loops, counts = _loop_runs(config, pair)
    matrix = jnp.ones(_MATRIX, jnp.float32)
    vector = jnp.ones((_MATRIX[1], 1), jnp.float32)
    product = functools.partial(jax.jit(jnp.matmul), matrix, vector)
    runs |= loops | {'matvec': Run(lambda: product)}
    times, wrong = steady_ms(runs, config.repeats, advance)
  median = medians(times)
  plain = config.request(pair.target, config.batch, 0)
  call_bytes = memory.call_bytes(pair.target, pair.params.target, plain)
  bandwidth = call_bytes / median['plain_loop']
  costs = {m: median[f'call_{m}'] / median['call_1'] for m in sorted(sizes)}
  gammas = [
    _of_gamma(config.decode_len, gamma, median, stats)
    for gamma, stats in counts.items()
  ]
  if wrong:
    gammas = [row | {'expected_speed_up': None} for row in gammas]
  values = {
    'settings': config.settings,
    'times_ms': times,
    'call_cost': {str(size): cost for size, cost in costs.items()},
    'bandwidth_fraction': bandwidth / (matrix.nbytes / median['matvec']),
    'contradiction': wrong,
    'gammas': gammas,
  }
  done = record.new('benchmark', values)
  # `specdec reproduce` explains benchmarks with forced acceptance below its own
  # tables.
  notes = _EXPLAINED if config.forced_acceptance is None else ()
  record.finish(config.output_file, console, done, table(done), *notes)
  return done


def _loop_runs(
  config: BenchmarkConfig, pair: Pair
) -> tuple[dict[str, Run], dict[int, Any]]:
  """Returns runs of whole loops, and gamma -> the statistics of its loop."""

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
) -> Record:
  """Returns a gamma's measurements, and a prediction from costs and alpha."""
  call, verify = median['call_1'], median[f'call_{gamma + 1}']
  # By noise, the measured cost of a small drafter may be negative.
  cost_ratio = max(median[f'round_{gamma}'] - verify, 0.0) / gamma / call
  alpha = float(stats.num_accepted.sum() / max(stats.num_tested.sum(), 1))
  factor = analysis.walltime_factor(alpha, gamma, cost_ratio, verify / call)
  plain = median['plain_loop'] * decode_len
  return {
    'gamma': gamma,
    'histogram': stats.histogram.sum(axis=0).tolist(),
    'acceptance_rate': alpha,
    'cost_ratio': cost_ratio,
    'expected_speed_up': float(factor),
    'speed_up': plain / median[f'speculative_{gamma}'],
  }


def table(benchmarked: Record) -> Table:
  """Returns a table with a row for each gamma, and notes on the plain loop."""
  settings, call_cost = benchmarked['settings'], benchmarked['call_cost']
  forced = settings['forced_acceptance']
  note = '' if forced is None else f', acceptance forced to {forced}'
  title = (
    f'{settings["name"]}{note}; batch {settings["batch"]}, input'
    f' {settings["input_len"]}, output {settings["decode_len"]} tokens,'
    f' temperature {settings["temperature"]:g}'
  )
  plain = benchmarked['times_ms']['plain_loop']['median']
  costs = (f'v({m}) {v:.2f}' for m, v in call_cost.items() if m != '1')
  notes = [
    f'Plain loop: {plain:.2f} ms per token, at'
    f" {benchmarked['bandwidth_fraction']:.0%} of a matrix-vector product's"
    f' bandwidth. Calls: {", ".join(costs)}.'
  ]
  if wrong := benchmarked.get('contradiction'):
    notes.insert(0, f'No speed-up is predicted: {wrong}.')
  columns: dict[Column | str, Any] = {
    'gamma': 'gamma',
    Column('v(gamma + 1)', '.2f'): lambda row: call_cost[str(row['gamma'] + 1)],
    Column('c inside a round', '.3f'): 'cost_ratio',
    Column('acceptance of the run', '.3f'): 'acceptance_rate',
    Column('expected speed-up', '.2f'): 'expected_speed_up',
    Column('speed-up', '.2f'): 'speed_up',
  }
  return Table.from_records(title, columns, benchmarked['gammas'], notes)


# These sentences are printed below tables.
COSTS_NOTE = (
  'v(m): time of a call of the target over m tokens, in calls over one token.'
  ' c: time of a proposal, in the same unit, inside a round, where each model'
  " finds the other's weights in the caches."
)
_EXPLAINED = (
  COSTS_NOTE,
  'Bandwidth: bytes of weights and caches that a token needs, by time. More'
  ' than 100 % means that they stayed in the caches of the processor.',
  'The inputs are random ids, of which a drafter guesses fewer tokens than of'
  ' texts: the speed-up on texts is another, see `specdec calibrate`.',
)
