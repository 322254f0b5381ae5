"""The cost of single calls: bytes that a call must read, and its time."""

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
from specdec_jax.decoding.speculative import context_of, judge
from specdec_jax.decoding.state import Request, example_keys, new_request
from specdec_jax.measure import memory
from specdec_jax.measure.measured_pair import Pair
from specdec_jax.measure.timing import Prepare
from specdec_jax.models.base import START_ID, LanguageModel, Params
from specdec_jax.probs import SamplingConfig

_MATRIX = (6144, 8192)  # 192 MiB of float32: no cache holds it


def matvec() -> tuple[Prepare, int]:
  """A plain matrix-vector product, and the bytes that it streams."""
  matrix = jnp.ones(_MATRIX, jnp.float32)
  vector = jnp.ones((_MATRIX[1], 1), jnp.float32)
  product = jax.jit(jnp.matmul)
  run = functools.partial(product, matrix, vector)
  return lambda: run, matrix.nbytes


def decoder_bytes(
  model: LanguageModel, params: Params, request: Request
) -> int:
  """Bytes that one call of a decoder over one token must read at least.

  `memory.call_bytes` without the embedding of the token, and without what is
  written.
  """
  counted = memory.call_bytes(model, params, request)
  return counted.weights + counted.self_attention + counted.cross_attention


def random_inputs(
  network: LanguageModel, batch: int, input_len: int, seed: int
) -> jax.Array:
  """Ids int32[B, E] to time a model with; none is special in the T5 family."""
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
    slots: tokens of a run.
    gamma: proposals a round.
    sampling: of both models.
    seed: of the samples.
    has_encoder: the target's; without one the inputs are prompts, behind the
      start token.
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
  return jax.device_put(request)  # no time of a run goes into moving it


def loop(
  start: Callable, run: Callable, params: Any, request: Request
) -> tuple[Prepare, float]:
  """A whole decoding loop, prefill apart.

  Args:
    start: (params, request) -> state.
    run: (params, request, state, rounds) -> state.
    params: of the loop.
    request: what to decode.

  Returns:
    what prepares a run, and the seconds that compiling it took.
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
  pair: Pair, request: Request, num_tokens: int, repeats: int
) -> Prepare:
  """`repeats` calls over `num_tokens` tokens each, in one compiled loop.

  The cache stands behind half of the run's output, and is rewound after each
  call as a rejection would do it; each call's tokens come from the one before.
  """

  model, params = pair.target, pair.params.target

  def calls(params, cache, tokens):
    produced = request.prompt_width - 1 + request.slots // 2
    half = jnp.full(tokens.shape[:1], produced, jnp.int32)

    def body(_, carry):
      cache, _ = carry
      logits, cache = model.extend(params, model.rewind(cache, half), carry[1])
      return cache, probs.greedy_token(logits)

    return lax.fori_loop(0, repeats, body, (cache, tokens))[1]

  cache = pair.prefill(params, request.inputs, request.cache_slots)
  tokens = jnp.ones((request.inputs.shape[0], num_tokens), jnp.int32)
  compiled = jax.jit(calls).lower(params, cache, tokens).compile()
  return lambda: functools.partial(compiled, params, cache, tokens)


def encoder_call(pair: Pair, request: Request) -> Prepare:
  """Prepares the call that reads the input, once.

  It is the target's encoder, and the keys and values made of it; without an
  encoder one call of the decoder over the prompt.
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
  )
  return lambda: run


def pair_rounds(
  pair: Pair, request: Request, repeats: int, with_target: bool = True
) -> Prepare:
  """`repeats` rounds in one compiled loop: gamma proposals, then the target.

  A round is what one costs inside the speculative loop, without the loop's own
  bookkeeping. It is more than the sum of its calls measured alone, since each
  model finds the caches of the processor filled by the other. All of a draft
  is made, whether or not the target's verdict looks at it.

  Args:
    pair: both models.
    request: gives gamma and the sampling.
    repeats: rounds.
    with_target: False leaves the target out.
  """
  drafter, target = pair.drafter, pair.target
  if drafter is None:
    raise ValueError('pair_rounds needs a pair with a drafter, got none.')
  batch = request.inputs.shape[0]
  produced = request.prompt_width - 1 + max(request.slots // 2, 2)
  half = jnp.full((batch,), produced, jnp.int32)

  def rounds(params, cache, state, tokens):
    def propose(round_number, state, tokens):
      # Keys of the round, as the loop has them: a draw that looks at nothing
      # else would be the same in every round, and be made once.
      keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(
        request.keys, round_number
      )
      context = context_of(request, tokens, half, keys)
      return keys, *drafter.propose(params.draft, state, context)

    def body(round_number, carry):
      cache, state, tokens, _ = carry
      keys, draft, state = propose(round_number, state, tokens)
      last = draft.tokens[:, :1]
      if with_target:
        cache = target.rewind(cache, half - 1)
        fed = jnp.concatenate(
          [tokens[:, half[0] - 1][:, None], draft.tokens], 1
        )
        logits, cache = target.extend(params.target, cache, fed)
        last = judge(request, draft, logits, keys).next_token[:, None]
      state = drafter.commit(state, half)
      # The next round reads what this one chose: none can be left out.
      tokens = lax.dynamic_update_slice(tokens, last, (0, half[0] - 1))
      # So is the draft: the compiler would drop proposals that nothing reads.
      return cache, state, tokens, draft

    _, shapes, _ = jax.eval_shape(propose, 0, state, tokens)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    carry = (cache, state, tokens, nothing)
    return lax.fori_loop(0, repeats, body, carry)[2:]

  slots = request.cache_slots
  cache = ()
  if with_target:
    cache = pair.prefill(pair.params.target, request.inputs, slots)
  state = pair.init(pair.params.draft, request.inputs, slots, request.prompt)
  tokens = jnp.ones((batch, slots + 1), jnp.int32)
  args = (pair.params, cache, state, tokens)
  compiled = jax.jit(rounds).lower(*args).compile()
  return lambda: functools.partial(compiled, *args)
