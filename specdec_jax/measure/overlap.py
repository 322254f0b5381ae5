"""What a drafter's proposals are worth at each token of a plain decode.

The target decodes; at each step the drafter proposes one token for the same
place, and the overlap of both distributions, sum of min, is the probability
that it would have been accepted (beta). No proposal is ever used, so that all
drafters are measured over exactly the same prefixes.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax import analysis, probs
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.base import LanguageModel
from specdec_jax.probs import SamplingConfig
from specdec_jax.verify import near_argmax
from specdec_jax.verify_tree import acceptance_by_rank


@struct.dataclass
class Overlap:
  """A plain decode, and beta of its drafter at each token.

  Attributes:
    state: the state of the decode.
    betas: float32[B, L], acceptance probability at each produced token;
      meaningless past a row's end and where nothing was proposed. Of a drafter
      that proposes a tree [B, L, C], of each child of the root.
    proposed: bool[B, L], whether there was a proposal.
    confidences: float32[B, L], the drafter's top probability at temperature 1,
      see `drafters.length`; 0 for a drafter that does not adapt.
  """

  state: DecodeState
  betas: jax.Array
  proposed: jax.Array
  confidences: jax.Array


def decode(
  target: LanguageModel, drafter: Drafter, params: PairParams, request: Request
) -> Overlap:
  """Decodes plainly and records beta at every token.

  Args:
    target: the model that decodes.
    drafter: any drafter; it is asked for one token per step.
    params: the parameters of both.
    request: a request with gamma 1.
  """
  state = speculative.start(target, drafter, params, request)
  shape = request.inputs.shape[0], request.slots
  zeros = jnp.zeros(shape)
  ranks = () if drafter.tree is None else (drafter.tree.cut(1).num_nodes,)
  betas = jnp.zeros((*shape, *ranks))
  first = Overlap(state, betas, jnp.zeros(shape, bool), zeros)

  def body(carry):
    return _step(target, drafter, params, request, carry)

  return lax.while_loop(lambda carry: jnp.any(carry.state.running), body, first)


def _step(target, drafter, params, request, carry: Overlap) -> Overlap:
  state = carry.state
  keys = decode_state.round_keys(request, state)
  context = speculative.context_of(
    request, state.tokens, state.visible_length, keys
  )
  before = state.drafter_state
  context = speculative.with_features(
    context, target, drafter, params.target, state.features
  )
  draft, drafter_state = drafter.propose(params.draft, before, context)
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  logits, features, cache = speculative.read(
    target, drafter, params.target, cache, state.last_token[:, None]
  )
  adjusted = decode_state.forbid_early_stops(logits, request, state)
  target_probs = probs.standardise_batch(adjusted, request.sampling)[:, 0]
  beta = _beta(request, draft, adjusted, target_probs)

  tokens = jax.vmap(probs.sample)(
    target_probs, jax.vmap(probs.resample_key)(keys)
  )
  # One round per token, so the round's number is the token's place, whatever
  # the prompt is. A finished row writes past its end, or past the array.
  place = jnp.arange(beta.shape[0]), state.stats.num_rounds
  confidences = carry.confidences
  if drafter.adapts:
    sure = _confidence(drafter, params, before, context)
    confidences = confidences.at[place].set(sure, mode='drop')
  one = jnp.ones_like(tokens)
  running = state.running.astype(jnp.int32)
  after = decode_state.append(request, state, tokens[:, None], one, logits)
  stats = state.stats
  after = after.replace(
    target_cache=cache,
    drafter_state=drafter.commit(drafter_state, after.visible_length),
    stats=stats.replace(num_rounds=stats.num_rounds + running),
    features=speculative.features_at(features, jnp.zeros_like(running)),
  )
  return Overlap(
    after,
    carry.betas.at[place].set(beta, mode='drop'),
    carry.proposed.at[place].set(draft.length > 0, mode='drop'),
    confidences,
  )


def _confidence(drafter, params, drafter_state, context):
  """How sure the drafter is of its first proposal, whatever the sampling."""
  batch = context.length.shape[0]
  plainly = SamplingConfig(1.0).params(batch)
  context = context.replace(sampling=plainly, greedy=False)
  draft, _ = drafter.propose(params.draft, drafter_state, context)
  return jnp.max(draft.probs[:, 0], axis=-1)


def _beta(request, draft, logits, target_probs):
  """Acceptance probability of each row's first proposal, float32[B]."""
  if draft.parents is not None:
    return jax.vmap(acceptance_by_rank)(draft, target_probs)
  proposed = draft.tokens[:, :1]
  lenience = 1.0 if request.lenience is None else request.lenience
  if draft.probs is None:
    beta = jnp.take_along_axis(target_probs, proposed, axis=1)[:, 0]
    beta = jnp.minimum(beta / lenience, 1.0)
  else:
    rows = draft.probs[:, 0]
    beta = analysis.lenient_acceptance_prob(target_probs, rows, lenience)
  if request.lenience is None:
    return beta
  near = near_argmax(proposed, logits, request.lenience)[:, 0]
  return jnp.where(request.sampling.temperature == 0, near, beta)
