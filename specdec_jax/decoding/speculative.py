"""Speculative decoding: Algorithm 1, batched, in one jitted `while_loop`.

`step` is one round: it proposes, reads the draft, judges it and commits. The
functions below it hold the details: rests of the drafter and the usable part of
a draft (`propose`), token rules, trees and early stops (`read_draft`),
temperature, blocks and lenience (`judge`).

The target reads the last committed token and all nodes of a tree in one call
with an ancestor mask. The verdict is a path, which the round then treats as a
chain. The cache entries of the path are moved to the slots right after the
root's; they are at most as many as the tree has levels.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax import probs, verify, verify_tree
from specdec_jax.decoding import resting
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.state import DecodeState, PairParams
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.request import Request
from specdec_jax.tree_shape import ROOT, TreeShape, static_tree
from specdec_jax.types import Draft, Verdict

# (request, draft, logits float32[B, G + 1, V], keys [B]) -> the verdict. The
# logits of a tree are those after the committed tokens and after each node.
Judge = Callable[[Request, Draft, jax.Array, jax.Array], Verdict]


def judge(
  request: Request, draft: Draft, logits: jax.Array, keys: jax.Array
) -> Verdict:
  """Counts the accepted guesses, n, and draws the token t after them."""
  if request.greedy:
    return _judge_greedy(request, draft, logits)
  target_probs = probs.standardise_batch(logits, request.sampling)
  if draft.tree is not None:
    return verify_tree.verify_tree_batch(draft, target_probs, keys)
  if request.judges_blocks:
    return verify.verify_block_batch(draft, target_probs, keys)
  verdict = verify.verify_batch(draft, target_probs, keys, request.lenience)
  if request.lenience is None:
    return verdict
  # At temperature 0 the target's rows are one-hot, which lenience cannot
  # change: these rows are judged by their logits.
  one_hot = functools.partial(jnp.where, request.sampling.temperature == 0)
  return jax.tree.map(one_hot, _judge_greedy(request, draft, logits), verdict)


def _judge_greedy(request: Request, draft: Draft, logits: jax.Array) -> Verdict:
  if draft.tree is not None:
    tokens = probs.greedy_token(logits)
    return verify_tree.verify_tree_greedy_batch(draft, tokens)
  near = None
  if request.lenience is not None:
    near = verify.near_argmax(draft.tokens, logits[:, :-1], request.lenience)
  if logits.shape[1] == 1:
    # The plain loop takes rows [B, V]: XLA would share the maximum of [B, 1, V]
    # with the log-probabilities, and write the logits out once more.
    tokens = probs.greedy_token(logits[:, 0])[:, None]
  else:
    tokens = probs.greedy_token(logits)
  return verify.verify_greedy_batch(draft, tokens, near)


def step(
  target: LanguageModel,
  drafter: Drafter,
  params: PairParams,
  request: Request,
  state: DecodeState,
  judge: Judge = judge,
) -> tuple[DecodeState, Draft]:
  """Runs a round of Algorithm 1: 1 to gamma + 1 tokens in every running row.

  Returns:
    The state after it, and the draft that was judged, without probabilities.
  """
  context = context_of(target, params, request, state)
  # Sample gamma guesses x_1..x_gamma from the drafter.
  draft, drafter_state = propose(drafter, params.draft, state, context)

  def check(state: DecodeState, draft: Draft) -> DecodeState:
    # Run the target on all of them in parallel.
    features, logits, allowed, cache = read_draft(context, state, draft)
    # Determine the number of accepted guesses n; draw t after them.
    verdict = judge(request, draft, allowed, context.keys)
    if verdict.path is not None:  # the kept path of a tree becomes a chain
      length = state.visible_length
      cache = target.keep(cache, length, length[:, None] + verdict.path)
      draft, verdict, logits = as_chain(request, draft, verdict, logits)
    # Append x_1..x_n, t.
    state = decode_state.append(request, state, draft, verdict, logits)
    if drafter.reads_features:
      last = features_at(features, verdict.num_accepted)
      state = state.replace(features=last)
    return state.replace(target_cache=cache)

  state = in_narrowest_call(check, request, state, draft)
  # The drafter's cache goes back to the committed tokens; the target's goes
  # back when it reads the next draft.
  drafter_state = drafter.commit(drafter_state, state.visible_length)
  return state.replace(drafter_state=drafter_state), draft.replace(probs=None)


def propose(
  drafter: Drafter, params: Any, state: DecodeState, context: Context
) -> tuple[Draft, Any]:
  """Asks the drafter, unless all rows rest; cuts its draft to the usable part.

  Returns:
    The draft, and the drafter's state, which may have read the draft.
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
  length = draft.length
  if draft.tree is not None:  # a verdict tells where its path ends
    check_tree(request, draft.tree)
  else:  # what follows a stop id is cut off, and not counted anywhere
    length, _ = decode_state.up_to_stop(request, draft.tokens, length)
  length = jnp.minimum(length, _budget(request, state))
  return draft.replace(length=length.astype(jnp.int32)), drafter_state


def read_draft(
  context: Context, state: DecodeState, draft: Draft
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
  """Calls the target on the last committed token and all N proposals.

  Returns:
    The hidden states [B, N + 1, M] that the logits come from; the logits
    float32[B, N + 1, V] after the last committed token and after each proposal,
    adjusted by the token rules; the same logits without stop ids before
    `min_length`; and the cache, which holds the committed tokens and the draft.
  """
  target, params = context.target, context.target_params
  assert target is not None  # `context_of` sets it
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  tokens = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
  tree = levels = None
  if draft.tree is not None:
    parents = (ROOT, *(parent + 1 for parent in draft.tree.parents))
    tree = static_tree(parents, cache.length, state.tokens.shape[1] - 1)
    levels = np.append(0, draft.tree.levels)
  features, cache = target.extend(params, cache, tokens, tree)
  logits = target.head(params, features)
  ruling = context.request.ruling
  if ruling is not None:  # each position has its own prefix
    logits = ruling.adjust(ruling.along(state.prefix, draft), logits)
  allowed = base.forbid_early_stops(logits, context, places=levels)
  return features, logits, allowed, cache


def context_of(
  target: LanguageModel,
  params: PairParams,
  request: Request,
  state: DecodeState,
) -> Context:
  """Returns the drafter's input of a round."""
  budget = None
  if request.drafting.adapts:
    budget = jnp.where(state.running, _budget(request, state), 0)
  return Context(
    request=request,
    tokens=state.tokens,
    length=state.visible_length,
    # Keys derive from seed, example and the row's own round.
    keys=jax.vmap(jax.random.fold_in)(request.keys, state.stats.num_rounds),
    running=state.running,
    budget=budget,
    prefix=None if request.ruling is None else state.prefix,
    features=state.features,
    target=target,
    target_params=params.target,
  )


def _budget(request: Request, state: DecodeState) -> jax.Array:
  """Returns int32[B], the most proposals of each row; 0 while it rests."""
  # The last token of the remaining budget is the target's.
  budget = jnp.maximum(decode_state.remaining(request, state) - 1, 0)
  if state.rests is None:
    return budget
  return jnp.where(state.rests.left > 0, 0, budget)


def check_tree(request: Request, shape: TreeShape) -> None:
  """Raises ValueError unless drafts of this shape fit a request."""
  if shape.depth > request.gamma or shape.num_nodes > request.draft_slots:
    raise ValueError(
      f'The drafter proposes {shape.num_nodes} nodes on {shape.depth} levels:'
      f' expected at most {request.draft_slots} on {request.gamma}, as'
      ' `Drafter.tree` has them.'
    )
  for name, fits, expected in (
    ('lenience', request.lenience is None, '1'),
    ('verification', not request.judges_blocks, "'token'"),
    ('gamma', not request.drafting.adapts, 'a number of levels'),
    ('fallback', request.drafting.rests is None, 'False'),
  ):
    if not fits:  # these options assume one proposal per position
      raise ValueError(f'{name}: expected {expected} with a tree of proposals.')


def as_chain(
  request: Request, draft: Draft, verdict: Verdict, logits: jax.Array
) -> tuple[Draft, Verdict, jax.Array]:
  """Makes a chain of the kept path, as if nothing else had been proposed.

  The draft ends where no child could be tried: below a leaf or a stop id.

  Returns:
    The draft of D tokens, its verdict, and the logits [B, D + 1, V] before each
    of these tokens and after the last.
  """
  shape, path = draft.tree, verdict.path
  assert shape is not None and path is not None
  tokens = jnp.take_along_axis(draft.tokens, path, axis=1)
  accepted, stopped = decode_state.up_to_stop(
    request, tokens, verdict.num_accepted
  )
  has_child = jnp.asarray(shape.children[:, 0] >= 0)
  last = jnp.take_along_axis(
    path, jnp.maximum(accepted - 1, 0)[:, None], axis=1
  )
  last = jnp.where(accepted > 0, last[:, 0], ROOT)
  below = has_child[last + 1] & ~stopped
  length = jnp.minimum(draft.length, accepted + below)
  places = jnp.pad(path + 1, ((0, 0), (1, 0)))[..., None]
  chain = Draft(tokens, None, length.astype(jnp.int32))
  verdict = verdict.replace(num_accepted=accepted.astype(jnp.int32))
  return chain, verdict, jnp.take_along_axis(logits, places, axis=1)


def in_narrowest_call(
  call_target: Callable[[DecodeState, Draft], DecodeState],
  request: Request,
  state: DecodeState,
  draft: Draft,
) -> DecodeState:
  """Calls the target with the narrowest draft that holds all proposals.

  If drafts end early and longer calls take longer, the call has the narrowest
  of `call_widths`. `verdict_uniforms` begin with the same numbers for any
  width, so that a sample depends neither on it nor on other rows.
  """
  widths = call_widths(request)
  if len(widths) == 1:
    return call_target(state, draft)
  longest = jnp.max(jnp.where(state.running, draft.length, 0))
  chosen = jnp.sum(longest >= jnp.array(widths))
  for index, width in enumerate(widths):
    # A loop of at most one turn updates the caches in place; a conditional
    # would copy them.
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
  """Lists the tokens per row of each call that a round may choose."""
  adapts, rests = request.drafting.adapts, request.drafting.rests is not None
  return tuple(sorted({*resting.widths(request.gamma, adapts, rests)}))


def start(
  target: LanguageModel, drafter: Drafter, params: PairParams, request: Request
) -> DecodeState:
  """Reads the inputs with both models; returns the first state."""
  slots, inputs, prompt = request.cache_slots, request.inputs, request.prompt
  longest = None if request.tree is None else request.longest
  encoded = features = None
  if drafter.reads_encoder:  # the encoder runs once for both
    encoded = target.encode(params.target, inputs)
  read, cache = read_prompt(
    target, params.target, inputs, slots, prompt, longest, encoded
  )
  if drafter.reads_features:
    base.check_chain(drafter, 'Drafters that read features of the target')
    token = jax.ShapeDtypeStruct((cache.length.shape[0], 1), jnp.int32)
    shape, _ = jax.eval_shape(target.extend, params.target, cache, token)
    features = jnp.zeros((shape.shape[0], shape.shape[2]), shape.dtype)
    if read is not None:
      # The last token is predicted from the feature of the token before it.
      place = request.prompt_length - 2
      of_prompt = features_at(read, jnp.maximum(place, 0))
      features = jnp.where(place[:, None] >= 0, of_prompt, features)
  drafter_state = drafter.init(params.draft, inputs, slots, prompt, encoded)
  state = decode_state.start(request, cache, drafter_state)
  return state.replace(features=features)


def features_at(features: jax.Array, place: jax.Array) -> jax.Array:
  """Selects the feature [B, M] at one position per row of [B, S, M]."""
  return jnp.take_along_axis(features, place[:, None, None], axis=1)[:, 0]
