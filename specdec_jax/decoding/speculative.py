"""Speculative decoding: Algorithm 1, batched, in one jitted `while_loop`.

`step` is one round: it proposes, reads the draft, judges it and commits. The
functions below it know the details: when the drafter rests and what of a draft
is usable (`propose`), trees, rules on tokens and early stops (`read_draft`),
temperature, blocks and lenience (`judge`), paths and features (`commit`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax import probs
from specdec_jax.decoding import resting, tree_round
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.state import DecodeState, PairParams
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.request import Request
from specdec_jax.types import Draft, Verdict
from specdec_jax.verify import (
  near_argmax,
  verify_batch,
  verify_block_batch,
  verify_greedy_batch,
)
from specdec_jax.verify_tree import verify_tree_batch, verify_tree_greedy_batch

# (request, draft, logits float32[B, G + 1, V], keys [B]) -> the verdict. Of a
# tree the logits are those after the committed tokens and after each node.
Judge = Callable[[Request, Draft, jax.Array, jax.Array], Verdict]


def judge(
  request: Request, draft: Draft, logits: jax.Array, keys: jax.Array
) -> Verdict:
  """Number of accepted guesses n, and t drawn after them."""
  if request.greedy:
    return _judge_greedy(request, draft, logits)
  target_probs = probs.standardise_batch(logits, request.sampling)
  if draft.tree is not None:
    return verify_tree_batch(draft, target_probs, keys)
  if request.judges_blocks:
    return verify_block_batch(draft, target_probs, keys)
  verdict = verify_batch(draft, target_probs, keys, request.lenience)
  if request.lenience is None:
    return verdict
  # At temperature 0 the target's rows are one-hot, which lenience cannot
  # change: these rows are judged by their logits.
  one_hot = functools.partial(jnp.where, request.sampling.temperature == 0)
  return jax.tree.map(one_hot, _judge_greedy(request, draft, logits), verdict)


def _judge_greedy(request: Request, draft: Draft, logits: jax.Array) -> Verdict:
  if draft.tree is not None:
    return verify_tree_greedy_batch(draft, probs.greedy_token(logits))
  near = None
  if request.lenience is not None:
    near = near_argmax(draft.tokens, logits[:, :-1], request.lenience)
  if logits.shape[1] == 1:
    # Of the plain loop: as rows [B, V]. Else XLA shares their maximum with that
    # of the log-probabilities, and writes the logits out once more.
    tokens = probs.greedy_token(logits[:, 0])[:, None]
  else:
    tokens = probs.greedy_token(logits)
  return verify_greedy_batch(draft, tokens, near)


def step(
  target: LanguageModel,
  drafter: Drafter,
  params: PairParams,
  request: Request,
  state: DecodeState,
  judge: Judge = judge,
) -> tuple[DecodeState, Draft]:
  """One round of Algorithm 1: 1 to gamma + 1 tokens in every running row.

  Returns:
    The state after it, and the draft that was judged, without probabilities.
  """
  context = context_of(target, params, request, state)
  # Sample gamma guesses x_1..x_gamma from the drafter.
  draft, drafter_state = propose(drafter, params.draft, state, context)

  def check(state: DecodeState, draft: Draft) -> DecodeState:
    # Run the target on all of them in parallel.
    reading = read_draft(target, params.target, context, state, draft)
    # Determine the number of accepted guesses n; draw t after them.
    verdict = judge(request, draft, reading.allowed, context.keys)
    # Append x_1..x_n, t.
    return commit(target, drafter, request, state, draft, verdict, reading)

  state = in_narrowest_call(check, request, state, draft)
  # The drafter's cache goes back to the committed tokens; the target's goes
  # back when it reads the next draft.
  drafter_state = drafter.commit(drafter_state, state.visible_length)
  return state.replace(drafter_state=drafter_state), draft.replace(probs=None)


def propose(
  drafter: Drafter, params: Any, state: DecodeState, context: Context
) -> tuple[Draft, Any]:
  """Asks the drafter, unless all rows rest; cuts its draft to what is usable.

  Returns:
    The draft, and the drafter's state, which has read it.
  """
  request = context.request
  if request.gamma == 0:
    empty = jnp.zeros((state.length.shape[0], 0), jnp.int32)
    return Draft(empty, None, state.length * 0), state.drafter_state

  def ask(drafter_state):
    return drafter.propose(params, drafter_state, context)

  if state.rests is None:
    draft, drafter_state = ask(state.drafter_state)
  else:
    all_rest = ~jnp.any(state.running & (state.rests.left == 0))
    draft, drafter_state = base.ask_unless(all_rest, ask, state.drafter_state)
  usable = tree_round.usable_length(request, draft)
  length = jnp.minimum(usable, _budget(request, state))
  return draft.replace(length=length.astype(jnp.int32)), drafter_state


class Reading(NamedTuple):
  """The target's logits and features of a draft; of a chain, N is gamma.

  Attributes:
    cache: of the committed tokens and the draft.
    features: [B, N + 1, M], the hidden states whose logits these are.
    logits: float32[B, N + 1, V], after the last committed token and after each
      proposal, adjusted by the rules on tokens.
    allowed: the same, without stop ids before `min_length`.
  """

  cache: Any
  features: jax.Array
  logits: jax.Array
  allowed: jax.Array


def read_draft(
  target: LanguageModel,
  params: Any,
  context: Context,
  state: DecodeState,
  draft: Draft,
) -> Reading:
  """Calls the target on the last committed token and all proposals."""
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  tokens = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
  tree = tree_round.tree_of(state, draft, cache)
  features, cache = target.extend(params, cache, tokens, tree)
  logits = target.head(params, features)
  ruling = context.request.ruling
  if ruling is not None:  # each place has a prefix of its own
    logits = ruling.adjust(ruling.along(state.prefix, draft), logits)
  places = tree_round.places_of(draft)
  allowed = base.forbid_early_stops(logits, context, places=places)
  return Reading(cache, features, logits, allowed)


def commit(
  target: LanguageModel,
  drafter: Drafter,
  request: Request,
  state: DecodeState,
  draft: Draft,
  verdict: Verdict,
  reading: Reading,
) -> DecodeState:
  """Appends what the verdict keeps; the kept path of a tree becomes a chain."""
  draft, verdict, logits, cache = tree_round.keep_path(
    target, request, state, draft, verdict, reading.logits, reading.cache
  )
  state = decode_state.append(request, state, draft, verdict, logits)
  features = features_at(drafter, reading.features, verdict.num_accepted)
  return state.replace(target_cache=cache, features=features)


def context_of(
  target: LanguageModel,
  params: PairParams,
  request: Request,
  state: DecodeState,
) -> Context:
  """Returns what a drafter sees before a round."""
  budget = None
  if request.drafting.adapts:
    budget = jnp.where(state.running, _budget(request, state), 0)
  return Context(
    request=request,
    tokens=state.tokens,
    length=state.visible_length,
    # From seed, example and the row's own round.
    keys=jax.vmap(jax.random.fold_in)(request.keys, state.stats.num_rounds),
    running=state.running,
    budget=budget,
    prefix=None if request.ruling is None else state.prefix,
    features=state.features,
    target=target,
    target_params=params.target,
  )


def _budget(request: Request, state: DecodeState) -> jax.Array:
  """int32[B], proposals that a row may have: none while it rests."""
  # One token of the remaining budget is the target's own.
  budget = jnp.maximum(decode_state.remaining(request, state) - 1, 0)
  if state.rests is None:
    return budget
  return jnp.where(state.rests.left > 0, 0, budget)


def in_narrowest_call(
  call_target: Callable[[DecodeState, Draft], DecodeState],
  request: Request,
  state: DecodeState,
  draft: Draft,
) -> DecodeState:
  """`call_target` with no more proposals than the longest draft has.

  Where drafts end early and a call over more tokens takes longer, the call is
  the narrowest of `call_widths` that holds the draft. `verdict_uniforms` begin
  with the same numbers for any width: a sample does not depend on it, nor on
  other rows.
  """
  widths = call_widths(request)
  if len(widths) == 1:
    return call_target(state, draft)
  longest = jnp.max(jnp.where(state.running, draft.length, 0))
  chosen = jnp.sum(longest >= jnp.array(widths))
  for index, width in enumerate(widths):
    # Loops of one turn or none, because they update the caches in place; a
    # conditional would copy them.
    cut = Draft(
      draft.tokens[:, : width - 1],
      None if draft.probs is None else draft.probs[:, : width - 1],
      jnp.minimum(draft.length, width - 1),
    )

    def once(carry, cut=cut):
      return jnp.bool_(False), call_target(carry[1], cut)

    _, state = lax.while_loop(
      lambda carry: carry[0], once, (chosen == index, state)
    )
  return state


def call_widths(request: Request) -> tuple[int, ...]:
  """Tokens per row of the calls of the target, one of which a round makes."""
  drafting = request.drafting
  rests = drafting.rests is not None
  widths = resting.widths(drafting.gamma, drafting.adapts, rests)
  return tuple(sorted(set(widths)))


def start(
  target: LanguageModel, drafter: Drafter, params: PairParams, request: Request
) -> DecodeState:
  """Both sides read the inputs; returns the state before the first round."""
  slots, inputs, prompt = request.cache_slots, request.inputs, request.prompt
  longest = None if request.tree is None else request.longest
  encoded = None
  if drafter.reads_encoder:  # it runs once for both
    encoded = target.encode(params.target, inputs)
  read, cache = read_prompt(
    target, params.target, inputs, slots, prompt, longest, encoded
  )
  features = no_features(target, drafter, params.target, cache)
  if features is not None and read is not None:
    # The logits of its last token but one would give a prompt's last token.
    place = request.prompt_length - 2
    known: Any = features_at(drafter, read, jnp.maximum(place, 0))
    features = jnp.where(place[:, None] >= 0, known, features)
  drafter_state = drafter.init(params.draft, inputs, slots, prompt, encoded)
  state = decode_state.start(request, cache, drafter_state)
  return state.replace(features=features)


def no_features(
  target: LanguageModel, drafter: Drafter, params: Any, cache: Any
) -> jax.Array | None:
  """Zeros [B, M], of the features' dtype; None if the drafter reads none."""
  if not drafter.reads_features:
    return None
  base.check_chain(drafter, 'What reads features of the target')
  token = jax.ShapeDtypeStruct((cache.length.shape[0], 1), jnp.int32)
  shape, _ = jax.eval_shape(target.extend, params, cache, token)
  return jnp.zeros((shape.shape[0], shape.shape[2]), shape.dtype)


def features_at(
  drafter: Drafter, features: jax.Array, place: jax.Array
) -> jax.Array | None:
  """Selects each row's place, int32[B], of features [B, S, M]: [B, M].

  None if the drafter reads no features.
  """
  if not drafter.reads_features:
    return None
  return jnp.take_along_axis(features, place[:, None, None], axis=1)[:, 0]
