"""The costs of single calls: the bytes that a call must read, and its time."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax import probs
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import (
  context_of,
  features_at,
  judge,
  no_features,
  read,
  with_features,
)
from specdec_jax.decoding.state import Request, example_keys, new_request
from specdec_jax.drafters.base import check_chain
from specdec_jax.measure import memory
from specdec_jax.measure.measured_pair import Pair
from specdec_jax.measure.timing import Prepare
from specdec_jax.models.base import START_ID, LanguageModel, Params
from specdec_jax.probs import SamplingConfig

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
      logits, cache = model.extend(params, model.rewind(cache, half), carry[1])
      return cache, probs.greedy_token(logits)

    return lax.fori_loop(0, repeats, body, (cache, tokens))[1]

  cache = pair.prefill(
    params, request.inputs, request.cache_slots, encoded=encoded
  )
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
    pair.prefill,
    pair.params.target,
    request.inputs,
    request.cache_slots,
    request.prompt,
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
    raise ValueError('pair_rounds needs a pair with a drafter, got none.')
  check_chain(drafter, 'The measurement of rounds')
  batch = request.inputs.shape[0]

  def rounds(params, cache, state, tokens, half, repeats):
    def propose(round_number, state, tokens, features):
      # Each round has its own keys, as in the loop: a draw that depends on
      # nothing else would otherwise be made only once for all rounds.
      keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(
        request.keys, round_number
      )
      context = with_features(
        context_of(request, tokens, half, keys),
        target,
        drafter,
        params.target,
        features,
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
        logits, features, cache = read(
          target, drafter, params.target, cache, fed
        )
        features = features_at(features, jnp.zeros_like(half))
        last = judge(request, draft, logits, keys).next_token[:, None]
      state = drafter.commit(state, half)
      # The next round reads this round's token, so that the compiler cannot
      # leave out a round.
      tokens = lax.dynamic_update_slice(tokens, last, (0, half[0] - 1))
      # The draft is returned, or the compiler would drop unused proposals.
      return cache, state, tokens, features, draft

    features = None
    if drafter.reads_features:
      features = no_features(target, params.target, cache)
    _, shapes, _ = jax.eval_shape(propose, 0, state, tokens, features)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    carry = (cache, state, tokens, features, nothing)
    _, _, *made = lax.fori_loop(0, repeats, body, carry)
    return made

  slots = request.cache_slots
  cache = ()
  if with_target or drafter.reads_features:
    cache = pair.prefill(pair.params.target, request.inputs, slots)
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
