"""What calls cost: a pair, its calls and loops timed in turn, and predictions.

Functions that prepare a run (`Prepare`) are timed in turn by `interleave`, so
that noise affects all alike; a run is a call, a loop of calls or of rounds, or
a whole decoding loop. `benchmark` times all of a pair, and predicts the loops
from the calls.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax import lax

from specdec_jax import analysis, partitioning, probs
from specdec_jax.checks.fields import (
  check_all_at_least,
  check_at_least,
  check_number,
  check_types,
  unexpected,
)
from specdec_jax.checks.memory import device_bytes
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import (
  Judge,
  PairParams,
  context_of,
  features_at,
  judge,
  no_features,
)
from specdec_jax.decoding.state import Request, example_keys, new_request
from specdec_jax.drafters.base import Drafter, check_chain, encoded_for
from specdec_jax.drafters.length import unsure_below
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.pair import Room
from specdec_jax.measure import memory
from specdec_jax.measure.canvas import check_outputs
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table
from specdec_jax.measure.table import console as terminal
from specdec_jax.models import backend, integers, kv_cache, t5, transformer
from specdec_jax.models.base import (
  START_ID,
  LanguageModel,
  Params,
  read_prompt,
)
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement
from specdec_jax.probs import SamplingConfig

# () -> the run to time. It makes what each run needs afresh, such as a donated
# state, before the clock starts.
Prepare = Callable[[], Callable[[], Any]]


def interleave(
  functions: Mapping[str, Prepare],
  repeats: int,
  advance: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
  """Times each function once per round, in `repeats` rounds, after a warm-up.

  Args:
    functions: name -> function that prepares a run, untimed, and returns it.
    repeats: timed rounds.
    advance: called after each round, to move a progress bar.

  Returns:
    Name -> seconds of each round.
  """
  for prepare in functions.values():
    jax.block_until_ready(prepare()())
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for _ in range(repeats):
    for name, prepare in functions.items():
      run = prepare()
      begin = time.perf_counter()
      jax.block_until_ready(run())
      seconds[name].append(time.perf_counter() - begin)
    advance()
  return seconds


def summarise(seconds: list[float], scale: float = 1.0) -> dict[str, float]:
  """Median, minimum and maximum of measured times, multiplied by `scale`.

  `error` is the median's standard error, assuming normal noise. It is computed
  from the median absolute deviation, which a single disturbed round does not
  change.
  """
  median = statistics.median(seconds)
  deviation = statistics.median(abs(value - median) for value in seconds)
  # 1.4826 MAD estimates sigma; a median's error is sqrt(pi / 2) times a mean's.
  error = 1.2533 * 1.4826 * deviation / math.sqrt(len(seconds))
  return {
    'median': median * scale,
    'min': min(seconds) * scale,
    'max': max(seconds) * scale,
    'error': error * scale,
  }


def random_params(network: LanguageModel, seed: int, dtype: str) -> Params:
  """Draws parameters on the device, array by array, in their final dtype.

  So a T5-XXL in bfloat16 never exists in float32: besides the result, at most
  one more array is held.

  Args:
    network: the network; its `init` gives names and shapes.
    seed: seed of the draw.
    dtype: 'float32' or 'bfloat16'; of 'int8' and 'int4' the kernels are drawn
      in bfloat16 and rounded.

  Returns:
    A tree like that of `network.init`; matrices are normal with variance
    1 / rows, so that activations keep their size, and scales are 1.
  """
  if integers.is_integers(dtype):
    drawn = random_params(network, seed, 'bfloat16')
    return integers.rounded(drawn, dtype)
  shapes = jax.eval_shape(network.init, jax.random.key(0))
  leaves, tree = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return jax.tree.unflatten(
    tree,
    [
      _random(key, leaf.shape, dtype)
      for key, leaf in zip(keys, leaves, strict=True)
    ],
  )


def _random(key, shape, dtype):
  if len(shape) < 2:
    return jnp.ones(shape, dtype)
  return _normal(key, shape, dtype) / jnp.asarray(math.sqrt(shape[0]), dtype)


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


@dataclasses.dataclass(frozen=True)
class Pair:
  """A target, a drafter, and their parameters on the device."""

  target: LanguageModel
  drafter: Drafter | None
  params: PairParams

  def prefill(
    self,
    inputs: jax.Array,
    slots: int,
    prompt: jax.Array | None = None,
    encoded: jax.Array | None = None,
  ) -> Any:
    """Returns the target's cache, see `models.base.read_prompt`."""
    # Always called alike: JAX compiles again where an argument gets a name.
    return self._read_prompt(
      self.params.target, inputs, slots, prompt, None, encoded
    )

  @functools.cached_property
  def _read_prompt(self) -> Callable:
    reads = functools.partial(read_prompt, self.target)
    return jax.jit(reads, static_argnums=2)

  @functools.cached_property
  def init(self) -> Callable:
    """The drafter's `init`, jitted once for all measurements.

    Raises:
      ValueError: there is no drafter.
    """
    if self.drafter is None:
      raise unexpected('drafter', 'one to measure', None)
    return jax.jit(self.drafter.begin, static_argnums=2)

  def encoded(self, inputs: jax.Array) -> jax.Array | None:
    """What `init` takes last: see `drafters.base.encoded_for`."""
    return self._encode(self.params.target, inputs)

  @functools.cached_property
  def _encode(self) -> Callable:
    # Operation by operation an encoder takes as long to compile as a loop.
    return jax.jit(functools.partial(encoded_for, self.drafter, self.target))


def make_pair(config: 'BenchmarkConfig') -> Pair:
  """Places the models of a benchmark; draws the parameters of networks."""
  placement = config.placement

  def model(given: Model | LanguageModel, seed: int) -> Model:
    if isinstance(given, Model):
      return given
    return Model(given, random_params(given, seed, placement.param_dtype))

  def placed(part: Any) -> Any:
    partitioning.check_dtypes(part, placement)
    arrays = partitioning.read_parts(part, placement)
    return partitioning.place_parts(arrays, placement, part)

  drafter = config.drafter
  if drafter is not None and not isinstance(drafter, Drafter):
    drafter = small_model(model(drafter, config.seed + 1))
  draft_params = None
  if drafter is not None:
    draft_params = placed(drafter.params)
    drafter = drafter._replace(params=draft_params)
  target_params = placed(model(config.target, config.seed))
  params = PairParams(target_params, draft_params)
  return Pair(_network(config.target), drafter, params)


def _network(given: Any) -> Any:
  """The network of a model; a network, or None, as it is."""
  return given.network if isinstance(given, Model) else given


def forced_judge(acceptance_rate: jax.Array) -> Judge:
  """Returns a judge that does Algorithm 1's work, but accepts at random.

  It gives the walltime that a pair would have at an alpha, for models whose
  fine-tuned checkpoints are not available: models of the real size do all their
  work, and each proposal is accepted with a given probability, independently,
  as Section 3.1 of the paper models it. The output is meaningless.

  Args:
    acceptance_rate: float32[], alpha; a traced value does not recompile.
  """

  def by_lot(request, draft, logits, keys):
    # The token depends on the complete real verdict, so that the compiler
    # cannot leave out any part of that work.
    verdict = speculative.judge(request, draft, logits, keys)
    num_accepted = jax.vmap(_accepted, in_axes=(0, 0, None, None))(
      keys, draft.length, acceptance_rate, request.gamma
    )
    return verdict.replace(num_accepted=num_accepted)

  return by_lot


def _accepted(key, length, acceptance_rate, gamma):
  """Proposals of one row before the first that is rejected, int32[]."""
  # Needs another key, because the real verdict has consumed `accept_key`.
  own = jax.random.fold_in(probs.accept_key(key), 1)
  accepted = jax.random.uniform(own, (gamma,)) < acceptance_rate
  accepted &= jnp.arange(gamma) < length
  return jnp.argmin(jnp.append(accepted, False)).astype(jnp.int32)


_MATRIX = (6144, 8192)  # 192 MiB of float32: more than any cache


def matvec() -> tuple[Prepare, int]:
  """A matrix-vector product, and the bytes that it reads from memory."""
  matrix = jnp.ones(_MATRIX, jnp.float32)
  vector = jnp.ones((_MATRIX[1], 1), jnp.float32)
  product = jax.jit(jnp.matmul)
  run = functools.partial(product, matrix, vector)
  return lambda: run, matrix.nbytes


def decoder_bytes(
  model: LanguageModel, params: Params, request: Request
) -> int:
  """The least bytes that one call of a decoder over one token must read.

  It is `memory.call_bytes` without the token's embedding, and without the bytes
  that are written.
  """
  counted = memory.call_bytes(model, params, request)
  return counted.weights + counted.self_attention + counted.cross_attention


def random_inputs(
  network: LanguageModel, batch: int, input_len: int, seed: int
) -> jax.Array:
  """Random ids int32[B, E] to time a model with, none of them special in T5."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(3, network.vocab_size, (batch, input_len))
  return jnp.asarray(ids, jnp.int32)


def make_request(
  inputs: jax.Array,
  slots: int,
  gamma: int,
  sampling: SamplingConfig,
  seed: int,
  has_encoder: bool = True,
) -> Request:
  """A request that never stops before `slots` tokens, for timing.

  Args:
    inputs: int32[B, E].
    slots: tokens per run.
    gamma: proposals per round.
    sampling: sampling of both models.
    seed: seed of the samples.
    has_encoder: whether the target has an encoder; without one the inputs are
      prompts, after the start token.
  """
  batch = inputs.shape[0]
  prompt = length = None
  if not has_encoder:
    prompt = jnp.pad(inputs, ((0, 0), (1, 0)), constant_values=START_ID)
    length = jnp.full((batch,), prompt.shape[1], jnp.int32)
    inputs = jnp.zeros((batch, 1), jnp.int32)
  request = new_request(
    inputs,
    example_keys(seed, np.arange(batch, dtype=np.uint32)),
    sampling,
    slots=slots,
    gamma=gamma,
    prompt=prompt,
    prompt_length=length,
  )
  return jax.device_put(request)  # so that runs need no time to move it


def loop(
  start: Callable, run: Callable, params: Any, request: Request
) -> tuple[Prepare, float]:
  """A whole decoding loop, without its prefill.

  Args:
    start: (params, request) -> state.
    run: (params, request, state, rounds) -> state.
    params: parameters of the loop.
    request: the request to decode.

  Returns:
    A function that prepares a run, and the seconds that compiling took.
  """
  limit = jnp.int32(decode_state.NO_ROUND_LIMIT)
  state = jax.block_until_ready(jax.jit(start)(params, request))
  begin = time.perf_counter()
  donating = jax.jit(run, donate_argnums=2)
  compiled = donating.lower(params, request, state, limit).compile()
  compile_seconds = time.perf_counter() - begin

  def prepare():
    fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    return functools.partial(compiled, params, request, fresh, limit)

  return prepare, compile_seconds


def target_calls(
  pair: Pair,
  request: Request,
  num_tokens: int,
  repeats: int,
  encoded: jax.Array | None = None,
) -> Prepare:
  """`repeats` calls over `num_tokens` tokens each, in one compiled loop.

  The cache is at half of the run's output, and is rewound after each call, as
  after a rejection; each call's tokens come from the call before. `encoded` is
  as of `models.base.read_prompt`. One call more comes before the clock starts:
  a model that fits into a processor's caches lies there in a run, and what is
  timed in between puts it out.
  """

  model, params = pair.target, pair.params.target

  def calls(params, cache, tokens, half, repeats):
    def body(_, carry):
      cache, _ = carry
      cache = model.rewind(cache, half)
      features, cache = model.extend(params, cache, carry[1])
      return cache, probs.greedy_token(model.head(params, features))

    return lax.fori_loop(0, repeats, body, (cache, tokens))[1]

  cache = pair.prefill(request.inputs, request.cache_slots, encoded=encoded)
  tokens = jnp.ones((request.inputs.shape[0], num_tokens), jnp.int32)
  half = _half(request, request.slots // 2)
  return _after_one(calls, (params, cache, tokens, half), repeats)


def _half(request: Request, produced: int) -> jax.Array:
  """Tokens of each row behind its prompt's and `produced` more, int32[B].

  It has to be an argument of a program. To one that knows it XLA adds copies of
  caches that no run makes.
  """
  length = request.prompt_width - 1 + produced
  return jnp.full(request.inputs.shape[:1], length, jnp.int32)


def _after_one(run: Callable, args: tuple[Any, ...], repeats: int) -> Prepare:
  """Prepares run(*args, repeats), compiled, by one of its repetitions."""
  compiled = jax.jit(run).lower(*args, jnp.int32(repeats)).compile()

  def prepare():
    jax.block_until_ready(compiled(*args, jnp.int32(1)))
    return functools.partial(compiled, *args, jnp.int32(repeats))

  return prepare


def encoder_call(pair: Pair, request: Request) -> Prepare:
  """Prepares the one call that reads the input.

  It runs the target's encoder, and makes the keys and values of its output;
  without an encoder it is one call of the decoder over the prompt.
  """
  run = functools.partial(
    pair.prefill, request.inputs, request.cache_slots, request.prompt
  )
  return lambda: run


def start_of_drafter(pair: Pair, request: Request) -> Prepare:
  """Prepares a drafter's `init`; a small model reads its input there."""
  run = functools.partial(
    pair.init,
    pair.params.draft,
    request.inputs,
    request.cache_slots,
    request.prompt,
    pair.encoded(request.inputs),
  )
  return lambda: run


def pair_rounds(
  pair: Pair, request: Request, repeats: int, with_target: bool = True
) -> Prepare:
  """`repeats` rounds in one compiled loop: gamma proposals, then the target.

  A round costs what it costs inside the speculative loop, without the loop's
  own bookkeeping. That is more than the sum of its calls measured alone, since
  each model finds the processor's caches filled by the other model. The whole
  draft is made, even if the target's verdict does not need all of it. As with
  `target_calls`, one round more comes before the clock starts.

  Args:
    pair: both models.
    request: gives gamma and the sampling.
    repeats: number of rounds.
    with_target: False leaves the target out.
  """
  drafter, target = pair.drafter, pair.target
  if drafter is None:
    raise unexpected('drafter', 'one to measure', None)
  check_chain(drafter, 'The measurement of rounds')
  batch = request.inputs.shape[0]

  def rounds(params, cache, state, tokens, half, repeats):
    def propose(round_number, state, tokens, features):
      # Each round has its own keys, as in the loop: a draw that depends on
      # nothing else would otherwise be made only once for all rounds.
      keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(
        request.keys, round_number
      )
      context = context_of(
        request,
        tokens,
        half,
        keys,
        features=features,
        target=target,
        target_params=params.target,
      )
      return keys, *drafter.propose(params.draft, state, context)

    def body(round_number, carry):
      cache, state, tokens, features, _ = carry
      keys, draft, state = propose(round_number, state, tokens, features)
      last = draft.tokens[:, :1]
      if with_target:
        cache = target.rewind(cache, half - 1)
        fed = jnp.concatenate(
          [tokens[:, half[0] - 1][:, None], draft.tokens], 1
        )
        features, cache = target.extend(params.target, cache, fed)
        logits = target.head(params.target, features)
        features = features_at(drafter, features, jnp.zeros_like(half))
        last = judge(request, draft, logits, keys).next_token[:, None]
      state = drafter.commit(state, half)
      # The next round reads this round's token, so that the compiler cannot
      # leave out a round.
      tokens = lax.dynamic_update_slice(tokens, last, (0, half[0] - 1))
      # The draft is returned, or the compiler would drop unused proposals.
      return cache, state, tokens, features, draft

    features = no_features(target, drafter, params.target, cache)
    _, shapes, _ = jax.eval_shape(propose, 0, state, tokens, features)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    carry = (cache, state, tokens, features, nothing)
    _, _, *made = lax.fori_loop(0, repeats, body, carry)
    return made

  slots = request.cache_slots
  cache = ()
  if with_target or drafter.reads_features:
    cache = pair.prefill(request.inputs, slots)
  state = pair.init(
    pair.params.draft,
    request.inputs,
    slots,
    request.prompt,
    pair.encoded(request.inputs),
  )
  tokens = jnp.ones((batch, slots + 1), jnp.int32)
  half = _half(request, max(request.slots // 2, 2))
  return _after_one(rounds, (pair.params, cache, state, tokens, half), repeats)


LEAST_DECODE_LEN = 32  # in a shorter run, mostly its start would be timed


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
  """What to measure, with random input tokens; no run stops before its budget.

  Every combination of the sequences is one setting; everything timed for one
  setting is timed alternately.

  Attributes:
    target: the model to time; of a network alone random parameters are drawn
      on the device.
    drafter: any drafter, or a model as for `target`; None times the target
      only.
    weights: how results describe the parameters; None is 'given' if there is a
      `Model`, else 'random'.
    placement: layout and dtype of both.
    gammas: proposals per round.
    round_gammas: more of them, of which single rounds alone are timed.
    batches: B.
    input_lens: E; without an encoder the prompt's tokens after the start token.
    decode_lens: tokens per run.
    temperatures: 0 is greedy.
    forced_acceptance: None accepts by Algorithm 1; otherwise each proposal is
      accepted with this probability, see `forced_judge`.
    times_adapting: whether the loop of a draft whose length adapts is timed as
      well, with a rule that ends no draft, if the drafter's can adapt.
    t5x_style: whether a plain loop in T5X's style is timed as well, see
      `T5XStyle`; only for a target that is a `T5`.
    call_sizes: m, tokens per call, for v(m).
    calls_a_run: calls in one timed loop.
    repeats: timed rounds, interleaved.
    seed: seed of parameters, inputs and sampling.
    output_file: JSON; None writes nothing.
    name: name of the record.

  Raises:
    ValueError: a number is out of its range, or `t5x_style` is set and the
      target is not a `T5`.
  """

  target: Model | LanguageModel
  drafter: Drafter | Model | LanguageModel | None = None
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
  t5x_style: bool = False
  call_sizes: Sequence[int] = (1, 2, 4, 8)
  calls_a_run: int = 20
  repeats: int = 7
  seed: int = 0
  output_file: str | None = None
  name: str = 'benchmark'

  def __post_init__(self):
    check_types(self)
    check_all_at_least(
      self, gammas=1, batches=1, input_lens=1, decode_lens=LEAST_DECODE_LEN
    )
    check_all_at_least(self, temperatures=0, call_sizes=1)
    for gamma in self.round_gammas:
      check_number('BenchmarkConfig.round_gammas', gamma, 1)
    check_at_least(self, calls_a_run=1, repeats=1)
    rate = self.forced_acceptance
    if rate is not None and not 0.0 <= rate <= 1.0:
      raise unexpected('forced_acceptance', 'None or 0 to 1', rate)
    if self.t5x_style and not isinstance(_network(self.target), t5.T5):
      raise unexpected('target', 'a T5, because of t5x_style', self.target)
    if 1 not in self.call_sizes:
      raise unexpected('call_sizes', '1 among them', self.call_sizes)


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
  pair: Pair | None = None,
) -> Record:
  """Runs a benchmark and writes its JSON.

  Args:
    config: what to measure.
    advance: called after each of `num_steps(config)` rounds.
    say: gets a text that says what is going on, because the first round may
      come only a minute after the start.
    pair: the models of `config` where they are placed; None places them.

  Returns:
    The record, with times in ms: median, min and max over interleaved rounds.

  Raises:
    DoesNotFitError: memory is too small; raised before anything is made.
  """
  check_outputs(config)
  if pair is None:
    check_memory(config)
    say('Placing the models')
    pair = make_pair(config)
  measured = [
    _measure(config, pair, setting, advance, say) for setting in grid(config)
  ]
  record = Record('benchmark', {**described(config), 'settings': measured})
  if config.output_file:
    record.save(config.output_file)
  return record


def check_memory(config: BenchmarkConfig) -> None:
  """Raises DoesNotFitError if models that are drawn here do not fit.

  Models that have parameters, or lie on several devices, are not counted.
  """
  network = config.drafter
  if isinstance(config.target, Model) or isinstance(network, Model | Drafter):
    return
  if not config.placement.on_one_device:
    return
  target, draft = Model(config.target), None
  if network is not None:
    draft = small_model(Model(network))
  room = Room(target, draft, (config.placement.param_dtype,) * 2, device_bytes)
  most = max(config.gammas, default=0) if draft else 0
  for setting in grid(config):
    slots = setting.decode_len + most + 1
    if not target.network.has_encoder:
      slots += setting.input_len
    slots = decode_state.whole_buckets(slots)
    room.check(setting.batch, setting.input_len, slots, most + 1)


def described(config: BenchmarkConfig) -> dict[str, Any]:
  """The settings that all points of a benchmark's grid share."""
  models = config.target, config.drafter
  given = any(isinstance(one, Model) for one in models)
  draft = None if isinstance(config.drafter, Drafter) else config.drafter
  return {
    'name': config.name,
    'weights': config.weights or ('given' if given else 'random'),
    'forced_acceptance': config.forced_acceptance,
    'repeats': config.repeats,
    'calls_a_run': config.calls_a_run,
    'seed': config.seed,
    'target': repr(_network(config.target)),
    'draft': repr(_network(draft)),
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
    make_request,
    random_inputs(pair.target, setting.batch, setting.input_len, config.seed),
    setting.decode_len,
    sampling=SamplingConfig(temperature=setting.temperature),
    seed=config.seed,
    has_encoder=pair.target.has_encoder,
  )
  where = f'batch {setting.batch}'
  say(f'Compiling, {where}')
  product, matvec_bytes = matvec()
  gammas = config.gammas if pair.drafter is not None else ()
  functions = {'matvec': product}
  facts = _prepare_calls(config, pair, request, gammas, functions)
  if pair.drafter is not None:
    for gamma in sorted({*config.round_gammas} - {*gammas}):
      functions[f'round_{gamma}'] = pair_rounds(
        pair, request(gamma=gamma), config.calls_a_run
      )
  rows = [
    _prepare_gamma(config, pair, request(gamma=gamma), functions, facts)
    for gamma in gammas
  ]
  say(f'First calls, then measuring, {where}')
  seconds = interleave(functions, config.repeats, advance)
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
  functions: dict[str, Prepare],
) -> dict[str, Any]:
  """Adds the plain loop and the single calls to `functions`.

  Returns their compile times, and the bytes of a call.
  """
  params, plain = pair.params, request(gamma=0)

  def plain_loop(model):
    one = Loop(model)
    return loop(one.start, one.run, params._replace(draft=None), plain)

  functions['encoder'] = encoder_call(pair, plain)
  functions['plain_loop'], compile_seconds = plain_loop(pair.target)
  all_gammas = (*gammas, *config.round_gammas)
  sizes = {*config.call_sizes, *(gamma + 1 for gamma in all_gammas)}
  for size in sorted(sizes):
    functions[f'call_{size}'] = target_calls(
      pair, request(gamma=size), size, config.calls_a_run
    )
  if config.t5x_style:
    target: Any = pair.target
    functions['t5x_style_loop'], _ = plain_loop(T5XStyle(target.config))
  if pair.drafter is not None:
    functions['draft_encoder'] = start_of_drafter(pair, plain)
  return {
    'compile_seconds': {'plain': compile_seconds},
    'bytes_per_call': decoder_bytes(pair.target, params.target, plain),
  }


def _prepare_gamma(config, pair, request, functions, facts) -> dict[str, Any]:
  """Adds one gamma's rounds and loop to `functions`; returns loop counts."""
  gamma, rate = request.gamma, config.forced_acceptance
  repeats = config.calls_a_run
  functions[f'draft_{gamma}'] = pair_rounds(
    pair, request, repeats, with_target=False
  )
  functions[f'round_{gamma}'] = pair_rounds(pair, request, repeats)

  own = Loop(pair.target, pair.drafter)

  def start(params, request):
    return own.start(params[0], request)

  def run(params, request, state, rounds):
    loop = own if rate is None else own._replace(judge=forced_judge(params[1]))
    return loop.run(params[0], request, state, rounds)

  params = (pair.params, jnp.float32(0.0 if rate is None else rate))

  def added(name: str, request: Request) -> Any:
    """Adds a loop to `functions`; returns what it counted."""
    prepare, compile_seconds = loop(start, run, params, request)
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
  """Times in ms, as `summarise` gives them.

  They are per call, per round, per token (plain loops) or per run (speculative
  loops).
  """
  scales = {'matvec': 1.0, 'encoder': 1.0, 'draft_encoder': 1.0}
  for name in seconds:
    if name.endswith('_loop'):
      scales[name] = 1 / setting.decode_len
  scales |= {n: 1.0 for n in seconds if n.startswith('speculative_')}
  return {
    name: summarise(values, 1e3 * scales.get(name, 1 / config.calls_a_run))
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


def show(
  config: BenchmarkConfig, console: rich.console.Console | None = None
) -> Mapping[str, Any]:
  """Runs a benchmark with a progress bar, prints tables; returns its record."""
  console = console or terminal()
  with bar(console, 'Measuring', num_steps(config)) as advance:
    record = benchmark(config, advance, advance.say)
  for setting in record['settings']:
    console.print(times(record, setting))
    console.print(summary(record, setting))
  return record


def forced_note(record: Mapping[str, Any]) -> str:
  """The remark on forced acceptance in a title; '' if acceptance was real."""
  rate = record['forced_acceptance']
  if rate is None:
    return ''
  return f', acceptance forced to {rate}'


def title(record: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
  """The title of one setting's tables."""
  name, weights = record['name'], f'{record["weights"]} weights'
  if weights not in name:
    name = f'{name}: {weights}'
  return (
    f'{name}{forced_note(record)}; batch {setting["batch"]}, input'
    f' {setting["input_len"]}, output {setting["decode_len"]} tokens,'
    f' temperature {setting["temperature"]:g}'
  )


def times(record: Mapping[str, Any], setting: Mapping[str, Any]) -> Table:
  """All times of one setting."""
  columns: list[Column | str] = [
    'what',
    *(Column(name, '.3f') for name in ('median ms', 'min', 'max')),
    Column('against one token', '.2f'),
  ]
  rows = [
    [
      name,
      *(found[key] for key in ('median', 'min', 'max')),
      setting['call_cost'].get(name.removeprefix('call_')),
    ]
    for name, found in setting['times_ms'].items()
  ]
  note = (
    f'plain loop {setting["plain_gb_per_s"]:.1f} GB/s of'
    f' {setting["matvec_gb_per_s"]:.1f} GB/s'
  )
  return Table(title(record, setting), columns, rows, [note])


def summary(record: Mapping[str, Any], setting: Mapping[str, Any]) -> Table:
  """The costs in one setting, and the speed-up for each gamma."""
  plain = setting['times_ms']['plain_loop']['median']
  rows = [
    ['plain loop, ms per token', f'{plain:.2f}'],
    [
      "of a matrix-vector product's bandwidth",
      f'{setting["bandwidth_fraction"]:.0%}',
    ],
    ['compile, plain loop, s', f'{setting["compile_seconds"]["plain"]:.1f}'],
  ]
  rows += [
    [f'v({size})', f'{cost:.2f}']
    for size, cost in setting['call_cost'].items()
    if size != '1'
  ]
  for row in setting['gammas']:
    name = f'gamma {row["gamma"]}: '
    excess = row['measured_over_predicted'] - 1
    rows += [
      [f'{name}c inside a round', f'{row["cost_ratio"]:.3f}'],
      [f'{name}acceptance of the run', f'{row["acceptance_rate"]:.3f}'],
      [f'{name}loop over its rounds, as measured apart', f'{excess:+.1%}'],
      [f'{name}expected speed-up', f'{row["expected_speed_up"]:.2f}'],
      [f'{name}speed-up', f'{row["speed_up"]:.2f}'],
    ]
  return Table(title(record, setting), ['', 'measured'], rows)


# T5X decodes so, for comparison only: at every step it multiplies a one-hot row
# by the whole embedding table, writes the cache by rewriting all of it with a
# one-hot mask, and attends over all of it. The logits are the same as here; the
# time is not. A speed-up against it includes the cost of these.


def one_hot_write(
  buffer: jax.Array, new: jax.Array, start: jax.Array
) -> jax.Array:
  """`kv_cache.write`, done by rewriting the whole buffer."""
  slots = buffer.shape[-1]
  places = start[:, None] + jnp.arange(new.shape[1])
  chosen = jax.nn.one_hot(places, slots, dtype=buffer.dtype)  # [B, S, T]
  spread = jnp.einsum('bshd,bst->bhdt', new.astype(buffer.dtype), chosen)
  written = jnp.any(chosen > 0, axis=1)[:, None, None, :]
  return jnp.where(written, spread, buffer)


class _Module(transformer.Network):
  """The network with T5X's way of embedding tokens and writing the cache."""

  def prefill(self, inputs, max_length, encoded=None):
    return kv_cache.apart(super().prefill(inputs, max_length, encoded))

  def extend(self, cache, tokens, tree=None):
    table = self.token_embedder.embedding.astype(self.shape.tokens.dtype)
    rows = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype)
    exact = backend.precision(self.shape.tokens.dtype)
    embedded = jnp.matmul(rows, table, precision=exact)
    return self.decoder.extend(embedded, cache, tree, one_hot_write)


class T5XStyle(t5.T5):
  """A slower `T5` with the same parameters."""

  @property
  def module(self) -> _Module:
    return _Module(self.shape)
