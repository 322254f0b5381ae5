"""The cost of single calls: bytes that a call must read, and its time."""

import functools
import time
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax import probs
from specdec_jax.bench.models import Pair
from specdec_jax.bench.timing import Prepare
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import context_of, judge
from specdec_jax.decoding.state import Request
from specdec_jax.models import kv_cache
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.t5 import T5
from specdec_jax.probs import SamplingConfig

_MATRIX = (6144, 8192)  # 192 MiB of float32: no cache holds it


def matvec() -> tuple[Prepare, int]:
  """A plain matrix-vector product, and the bytes that it streams."""
  matrix = jnp.ones(_MATRIX, jnp.float32)
  vector = jnp.ones((_MATRIX[1], 1), jnp.float32)
  product = jax.jit(jnp.matmul)
  run = functools.partial(product, matrix, vector)
  return lambda: run, matrix.nbytes


def decoder_bytes(model: T5, params: Params, request: Request) -> int:
  """Bytes that one call of a T5's decoder must read at least.

  Every parameter of the decoder but those that cross-attention's keys and
  values were made with, the output layer, and the attended part of the caches
  over a run that fills its slots (the mean over its tokens).
  """
  flat = flax.traverse_util.flatten_dict(params['decoder'], sep='/')
  once = ('encoder_decoder_attention/key/', 'encoder_decoder_attention/value/')
  weights = sum(
    leaf.nbytes
    for name, leaf in flat.items()
    if not any(part in name for part in once)
  )
  config = model.config
  if config.logits_via_embedding:
    weights += params['token_embedder']['embedding'].nbytes
  batch, width = request.inputs.shape
  sizes = kv_cache.buckets(request.cache_slots)
  attended = [
    min(size for size in sizes if size > position)
    for position in range(request.slots)
  ]
  slots = sum(attended) / len(attended) + width
  head_width = config.num_heads * config.head_dim
  itemsize = jnp.dtype(config.dtype).itemsize
  per_slot = 2 * config.num_decoder_layers * head_width * itemsize
  return weights + int(batch * slots * per_slot)


def make_request(
  inputs: jax.Array, slots: int, gamma: int, sampling: SamplingConfig, seed: int
) -> Request:
  """A request that never stops before `slots` tokens, for timing."""
  batch = inputs.shape[0]
  key = jax.random.key(seed)
  return Request(
    inputs=inputs,
    keys=jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
      key, jnp.arange(batch)
    ),
    sampling=sampling.params(batch),
    stop_ids=jnp.full((4,), -1, jnp.int32),
    min_length=jnp.zeros((batch,), jnp.int32),
    max_length=jnp.full((batch,), slots, jnp.int32),
    slots=slots,
    gamma=gamma,
    greedy=sampling.greedy,
  )


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
  model: LanguageModel,
  params: Params,
  request: Request,
  num_tokens: int,
  repeats: int,
) -> Prepare:
  """`repeats` calls over `num_tokens` tokens each, in one compiled loop.

  The cache stands at half of the run's slots, and is rewound after each call
  as a rejection would do it; each call's tokens come from the one before.
  """

  def calls(params, cache, tokens):
    half = jnp.full(tokens.shape[:1], request.slots // 2, jnp.int32)

    def body(_, carry):
      cache, _ = carry
      logits, cache = model.extend(params, model.rewind(cache, half), carry[1])
      return cache, probs.greedy_token(logits)

    return lax.fori_loop(0, repeats, body, (cache, tokens))[1]

  prefill = jax.jit(model.prefill, static_argnums=2)
  cache = prefill(params, request.inputs, request.cache_slots)
  tokens = jnp.ones((request.inputs.shape[0], num_tokens), jnp.int32)
  compiled = jax.jit(calls).lower(params, cache, tokens).compile()
  return lambda: functools.partial(compiled, params, cache, tokens)


def encoder_call(
  model: LanguageModel, params: Params, request: Request
) -> Prepare:
  """One `prefill`: the encoder, and the keys and values made of it."""
  prefill = jax.jit(model.prefill, static_argnums=2)
  run = functools.partial(prefill, params, request.inputs, request.cache_slots)
  return lambda: run


def start_of_drafter(pair: Pair, request: Request) -> Prepare:
  """A drafter's `init`: of a small model, its `prefill`."""
  if pair.drafter is None:
    raise ValueError('start_of_drafter needs a pair with a drafter, got none.')
  init = jax.jit(pair.drafter.init, static_argnums=2)
  run = functools.partial(
    init, pair.params.draft, request.inputs, request.cache_slots
  )
  return lambda: run


def pair_rounds(
  pair: Pair, request: Request, repeats: int, with_target: bool = True
) -> Prepare:
  """`repeats` rounds in one compiled loop: gamma proposals, then the target.

  A round is what one costs inside the speculative loop, without the loop's own
  bookkeeping. It is more than the sum of its calls measured alone, since each
  model finds the caches of the processor filled by the other.

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
  half = jnp.full((batch,), max(request.slots // 2, 2), jnp.int32)

  def rounds(params, cache, state, tokens):
    def body(_, carry):
      cache, state, tokens = carry
      context = context_of(request, tokens, half, request.keys)
      draft, state = drafter.propose(params.draft, state, context)
      last = draft.tokens[:, :1]
      if with_target:
        cache = target.rewind(cache, half - 1)
        fed = jnp.concatenate(
          [tokens[:, half[0] - 1][:, None], draft.tokens], 1
        )
        logits, cache = target.extend(params.target, cache, fed)
        last = judge(request, draft, logits, request.keys).next_token[:, None]
      state = drafter.commit(state, half)
      # The next round reads what this one chose: none can be left out.
      tokens = lax.dynamic_update_slice(tokens, last, (0, half[0] - 1))
      return cache, state, tokens

    return lax.fori_loop(0, repeats, body, (cache, state, tokens))[2]

  slots = request.cache_slots
  cache = ()
  if with_target:
    prefill = jax.jit(target.prefill, static_argnums=2)
    cache = prefill(pair.params.target, request.inputs, slots)
  init = jax.jit(drafter.init, static_argnums=2)
  state = init(pair.params.draft, request.inputs, slots)
  tokens = jnp.ones((batch, slots + 1), jnp.int32)
  args = (pair.params, cache, state, tokens)
  compiled = jax.jit(rounds).lower(*args).compile()
  return lambda: functools.partial(compiled, *args)
