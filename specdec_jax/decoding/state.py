"""Keeps the state of a loop from round to round; decides when rows end."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.decoding.resting import Rests
from specdec_jax.request import Request
from specdec_jax.rules.tokens import Prefix
from specdec_jax.types import (
  DecodeStats,
  Draft,
  FinishReason,
  Generation,
  Verdict,
)

NO_ROUND_LIMIT = jnp.iinfo(jnp.int32).max


class PairParams(NamedTuple):
  """The parameters of both models; the drafter's may be any pytree."""

  target: Any
  draft: Any


@struct.dataclass
class DecodeState:
  """The loop's carry; it is donated, so that it is updated in place.

  Attributes:
    tokens: int32[B, T + 1], committed tokens: the start token, the rest of the
      prompt, the output so far. Past `length` they mean nothing.
    length: int32[B], committed tokens, the prompt and its start token counted.
    log_probs: float32[B, T + 1], the target's log-probability of each token
      (see `Request.log_probs_as_drawn`); [B, 0] if they are not wanted.
    finish_reason: int32[B], a `FinishReason`.
    target_cache: the target's cache of all committed tokens but the last.
    drafter_state: the drafter's state.
    stats: the counts so far.
    features: [B, M], the target's features for a drafter that reads them, see
      `Context`; None for other drafters.
    rests: the accounts by which drafters rest; None if they never rest.
    automaton: int32[B], the state of each row's constraint; None if no row has
      one.
  """

  tokens: jax.Array
  length: jax.Array
  log_probs: jax.Array
  finish_reason: jax.Array
  target_cache: Any
  drafter_state: Any
  stats: DecodeStats
  features: jax.Array | None = None
  rests: Rests | None = None
  automaton: jax.Array | None = None

  @property
  def running(self) -> jax.Array:
    """bool[B], the rows that are not finished."""
    return self.finish_reason == FinishReason.RUNNING

  @property
  def visible_length(self) -> jax.Array:
    """int32[B], `length` in running rows, and 1 in finished rows.

    Finished rows go on computing with the batch. With length 1 they work on
    their own first slots, and do not lengthen the attention of other rows.
    """
    return jnp.where(self.running, self.length, 1)

  @property
  def last_token(self) -> jax.Array:
    """int32[B], the token that the target has not read yet."""
    index = self.visible_length[:, None] - 1
    return jnp.take_along_axis(self.tokens, index, axis=1)[:, 0]

  @property
  def prefix(self) -> Prefix:
    """The committed tokens as token rules read them."""
    return Prefix(self.tokens, self.visible_length, self.automaton)

  def with_reasons(self, reasons: np.ndarray) -> 'DecodeState':
    """Returns the state with the host's finish reasons, int32[B].

    They are placed on the devices of the old reasons, because otherwise the
    next run would be compiled again.
    """
    placed = jax.device_put(reasons, self.finish_reason.sharding)
    return self.replace(finish_reason=placed)


def start(
  request: Request, target_cache: Any, drafter_state: Any
) -> DecodeState:
  """Returns the state before the first round, which holds the prompts.

  Args:
    request: the batch.
    target_cache: the target's cache of inputs and prompts.
    drafter_state: the state that `Drafter.init` returned.
  """
  batch = request.inputs.shape[0]
  width = request.cache_slots + 1
  return DecodeState(
    tokens=first_tokens(request, width),
    # The sum is another array: a donated state shares none with the request.
    length=jnp.zeros((batch,), jnp.int32) + request.prompt_length,
    log_probs=jnp.zeros((batch, width if request.with_log_probs else 0)),
    finish_reason=jnp.where(
      request.max_length > 0, FinishReason.RUNNING, FinishReason.LENGTH
    ).astype(jnp.int32),
    target_cache=target_cache,
    drafter_state=drafter_state,
    stats=DecodeStats.none(batch, request.gamma),
    rests=None if request.drafting.rests is None else Rests.none(batch),
    automaton=first_states(request),
  )


def first_states(request: Request) -> jax.Array | None:
  """Returns int32[B], the first state of each row's constraint, or None."""
  if request.token_rules is None or request.token_rules.automaton is None:
    return None
  # The sum is another array: a donated state shares none with the request.
  return jnp.zeros((), jnp.int32) + request.token_rules.automaton


def first_tokens(request: Request, width: int) -> jax.Array:
  """Returns int32[B, width], the prompts followed by zeros."""
  tokens = jnp.zeros((request.inputs.shape[0], width), jnp.int32)
  return tokens.at[:, : request.prompt_width].set(request.prompt)


def _after_none(
  request: Request, state: DecodeState, logits: jax.Array
) -> jax.Array:
  """Returns bool[B, S], True from the first position that allows no token."""
  if request.forbids_stops:
    produced = _produced(request, state)
    logits = probs.forbid_early_stops(
      logits, request.stop_ids, produced, request.min_length
    )
  allows_none = jnp.max(logits, axis=-1) <= jnp.finfo(jnp.float32).min
  return jnp.cumsum(allows_none, axis=1) > 0


def remaining(request: Request, state: DecodeState) -> jax.Array:
  """Returns int32[B], the tokens that each row may still produce."""
  return request.max_length - _produced(request, state)


def _produced(request: Request, state: DecodeState) -> jax.Array:
  return state.length - request.prompt_length


def is_stop(request: Request, tokens: jax.Array) -> jax.Array:
  """Returns bool[...], whether each of the tokens int32[...] is a stop id.

  The tokens are int32[B, S] if each row has its own stop ids.
  """
  stop_ids = request.stop_ids
  if stop_ids.ndim > 1:
    stop_ids = stop_ids[:, None]
  return probs.is_one_of(tokens, stop_ids)


def up_to_stop(
  request: Request, tokens: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Finds where each row's tokens end, at the first stop id or at `count`.

  Args:
    request: has the stop ids.
    tokens: int32[B, S].
    count: int32[B], number of tokens to consider; the rest is ignored.

  Returns:
    int32[B], the tokens up to and including the first stop id, or `count`; and
    bool[B], whether there is a stop id.
  """
  stops, past_all = is_stop(request, tokens), tokens.shape[1] + 1
  until = jnp.argmax(stops, axis=1) + 1
  until = jnp.where(jnp.any(stops, axis=1), until, past_all)
  return jnp.minimum(until, count), until <= count


def append(
  request: Request,
  state: DecodeState,
  draft: Draft,
  verdict: Verdict,
  logits: jax.Array,
) -> DecodeState:
  """Commits x_1..x_n, t in each running row, counts the round, and stops rows.

  A row ends after its first stop id, at `max_length`, where its rules leave no
  token, or if the logits of a token do not give a distribution.

  Args:
    request: has limits, stop ids and token rules.
    state: the state before the round.
    draft: the proposals, a chain.
    verdict: n and t.
    logits: float32[B, G + 1, V], the target's logits before each proposal, and
      after the last.

  Returns:
    The state after the round; its caches and features are those before.
  """
  stats = state.stats.after_round(state.running, draft.length, verdict)
  rests, policy = state.rests, request.drafting.rests
  if rests is not None and policy is not None:
    rested = stats.fallback_rounds + (state.running & (rests.left > 0))
    stats = stats.replace(fallback_rounds=rested)
    rests = rests.after_round(policy, draft, verdict)
  count = verdict.num_accepted + 1
  padded = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
  position = jnp.arange(padded.shape[1])
  at_end = position == verdict.num_accepted[:, None]
  tokens = jnp.where(at_end, verdict.next_token[:, None], padded)
  count, stopped = up_to_stop(request, tokens, count)
  left = remaining(request, state)
  stopped = stopped & (count <= left)
  count = jnp.where(state.running, jnp.minimum(count, left), 0)
  used = position < count[:, None]
  if request.token_rules is not None:
    used &= ~_after_none(request, state, logits)
    is_cut = jnp.sum(used, axis=1) < count
    count = jnp.sum(used, axis=1)
  invalid = jnp.any(used & ~probs.valid_logits(logits), axis=1)
  reason = jnp.where(count == left, FinishReason.LENGTH, state.finish_reason)
  reason = jnp.where(stopped, FinishReason.STOP, reason)
  reason = jnp.where(invalid, FinishReason.INVALID, reason)
  if request.token_rules is not None:
    reason = jnp.where(is_cut, FinishReason.RULES, reason)
  automaton, ruling = state.automaton, request.ruling
  if automaton is not None and ruling is not None:

    def read(place, before):
      after = ruling.next_state(before, tokens[:, place])
      return jnp.where(place < count, after, before)

    automaton = lax.fori_loop(0, tokens.shape[1], read, automaton)
  log_probs = state.log_probs
  if request.with_log_probs:
    if request.log_probs_as_drawn:
      drawn_from = probs.standardise_batch(logits, request.sampling)
      index = tokens[..., None]
      new = jnp.log(jnp.take_along_axis(drawn_from, index, axis=-1)[..., 0])
    else:
      new = probs.log_prob_of(logits, tokens)
    log_probs = _write_rows(log_probs, new, state.length)
  return state.replace(
    # The next round overwrites tokens that are written past `count`.
    tokens=_write_rows(state.tokens, tokens, state.length),
    log_probs=log_probs,
    length=state.length + count,
    finish_reason=jnp.where(state.running, reason, state.finish_reason),
    rests=rests,
    stats=stats,
    automaton=automaton,
  )


def _write_rows(buffer, new, first):
  return jax.vmap(lax.dynamic_update_slice)(buffer, new, (first,))


def generation(request: Request, state: DecodeState) -> Generation:
  """Returns the outputs without their prompts, and zeros past each end."""
  length = _produced(request, state)
  live = jnp.arange(request.slots) < length[:, None]
  # The indices of the tokens that follow each prompt.
  index = request.prompt_length[:, None] + jnp.arange(request.slots)
  tokens = jnp.take_along_axis(state.tokens, index, axis=1)
  log_probs = state.log_probs
  if request.with_log_probs:
    log_probs = jnp.take_along_axis(log_probs, index, axis=1)
    log_probs = jnp.where(live, log_probs, 0.0)
  return Generation(
    tokens=jnp.where(live, tokens, 0),
    length=length,
    log_probs=log_probs,
    finish_reason=state.finish_reason,
    stats=state.stats,
  )
