"""Speculative decoding: Algorithm 1, batched, in one jitted `while_loop`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import probs
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.types import Draft, Verdict
from specdec_jax.verify import near_argmax, verify_batch, verify_greedy_batch


class PairParams(NamedTuple):
  """Parameters of both sides; the drafter's may be any pytree."""

  target: Any
  draft: Any


# (request, draft, logits float32[B, G + 1, V], keys [B]) -> the verdict.
Judge = Callable[[Request, Draft, jax.Array, jax.Array], Verdict]


def start(
  target: LanguageModel, drafter: Drafter, params: PairParams, request: Request
) -> DecodeState:
  """Both sides read the inputs; returns the state before the first round."""
  slots = request.cache_slots
  inputs, prompt = request.inputs, request.prompt
  cache = read_prompt(target, params.target, inputs, slots, prompt)
  drafter_state = drafter.init(params.draft, inputs, slots, prompt)
  return decode_state.start(request, cache, drafter_state)


def judge(
  request: Request, draft: Draft, logits: jax.Array, keys: jax.Array
) -> Verdict:
  """Number of accepted guesses n, and t drawn after them."""
  if request.greedy:
    return _judge_greedy(request, draft, logits)
  target_probs = probs.standardise_batch(logits, request.sampling)
  verdict = verify_batch(draft, target_probs, keys, request.lenience)
  if request.lenience is None:
    return verdict
  # At temperature 0 the target's rows are one-hot, which lenience cannot
  # change: these rows are judged by their logits.
  one_hot = functools.partial(jnp.where, request.sampling.temperature == 0)
  return jax.tree.map(one_hot, _judge_greedy(request, draft, logits), verdict)


def _judge_greedy(request: Request, draft: Draft, logits: jax.Array) -> Verdict:
  near = None
  if request.lenience is not None:
    near = near_argmax(draft.tokens, logits[:, :-1], request.lenience)
  return verify_greedy_batch(draft, probs.greedy_token(logits), near)


def step(
  target: LanguageModel,
  drafter: Drafter,
  params: PairParams,
  request: Request,
  state: DecodeState,
  judge: Judge = judge,
) -> DecodeState:
  """One round of Algorithm 1: 1 to gamma + 1 tokens in every running row."""
  keys = decode_state.round_keys(request, state)

  # Sample gamma guesses x_1..x_gamma from the drafter.
  draft, drafter_state = _propose(drafter, params, request, state, keys)

  # Run the target on all of them in parallel, from where it was kept.
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  fed = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
  logits, cache = target.extend(params.target, cache, fed)

  # Determine the number of accepted guesses n; draw t after them.
  adjusted = decode_state.forbid_early_stops(logits, request, state)
  verdict = judge(request, draft, adjusted, keys)

  # Append x_1..x_n, t; both sides forget what they read beyond these tokens.
  stats = _count(state, draft, verdict)
  tokens = _kept_tokens(draft, verdict)
  count = verdict.num_accepted + 1
  state = decode_state.append(request, state, tokens, count, logits)
  return state.replace(
    target_cache=cache,
    drafter_state=drafter.commit(drafter_state, state.visible_length),
    stats=stats,
  )


def context_of(
  request: Request, tokens: jax.Array, length: jax.Array, keys: jax.Array
) -> Context:
  """The `Context` that a drafter sees in this request; see there."""
  return Context(
    tokens=tokens,
    length=length,
    keys=keys,
    sampling=request.sampling,
    stop_ids=request.stop_ids,
    min_length=request.min_length + request.first_length - 1,
    gamma=request.gamma,
    greedy=request.greedy,
    forbids_stops=request.forbids_stops,
  )


def _propose(drafter, params, request, state, keys):
  """The drafter's proposal, cut to the tokens that could still be used."""
  if request.gamma == 0:
    batch = state.length.shape[0]
    empty = jnp.zeros((batch, 0), jnp.int32)
    return Draft(empty, None, state.length * 0), state.drafter_state
  context = context_of(request, state.tokens, state.visible_length, keys)
  draft, drafter_state = drafter.propose(
    params.draft, state.drafter_state, context
  )
  # No token follows a stop id, and one token of the remaining budget is the
  # target's own. Proposals beyond that are cut off, and not counted anywhere.
  stops = decode_state.is_stop(request, draft.tokens)
  until_stop = jnp.where(
    jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, request.gamma
  )
  budget = jnp.maximum(decode_state.remaining(request, state) - 1, 0)
  length = jnp.minimum(jnp.minimum(draft.length, until_stop), budget)
  return draft.replace(length=length.astype(jnp.int32)), drafter_state


def _kept_tokens(draft: Draft, verdict: Verdict) -> jax.Array:
  """x_1..x_n, t and then meaningless tokens, int32[B, G + 1]."""
  padded = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
  position = jnp.arange(padded.shape[1])
  at_end = position == verdict.num_accepted[:, None]
  return jnp.where(at_end, verdict.next_token[:, None], padded)


def _count(state: DecodeState, draft: Draft, verdict: Verdict):
  """`DecodeStats` after this round; a finished row counts nothing."""
  running = state.running.astype(jnp.int32)
  num_accepted = verdict.num_accepted
  tested = jnp.minimum(num_accepted + 1, draft.length)
  rounds = jax.nn.one_hot(
    num_accepted, state.stats.histogram.shape[1], dtype=jnp.int32
  )
  stats = state.stats
  return stats.replace(
    num_rounds=stats.num_rounds + running,
    num_tested=stats.num_tested + tested * running,
    num_accepted=stats.num_accepted + num_accepted * running,
    histogram=stats.histogram + rounds * running[:, None],
  )
