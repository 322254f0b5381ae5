"""What a round of the loop does otherwise where the proposals branch.

The target reads the last committed token and all nodes in one call, behind an
ancestor mask. Its verdict is a path; from there on the path is a chain, and the
round goes on as with any other. The path's slots are moved together: at most as
many as the tree has levels, the root's being in place.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import probs
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.tree import static_tree
from specdec_jax.tree_shape import ROOT, TreeShape
from specdec_jax.types import Draft, Verdict
from specdec_jax.verify_tree import (
  verify_tree_batch,
  verify_tree_greedy_batch,
)


def check(request: Request, shape: TreeShape) -> None:
  """Raises ValueError unless a request can be answered with such drafts."""
  if shape.depth > request.gamma or shape.num_nodes > request.draft_slots:
    raise ValueError(
      f'The drafter proposes a tree of {shape.num_nodes} nodes on'
      f' {shape.depth} levels, but the request has {request.draft_slots} slots'
      f' for a draft and gamma = {request.gamma} levels. Expected a draft of'
      " `Context.gamma` levels at most, whose whole tree is the drafter's"
      ' `Drafter.tree`.'
    )
  if request.lenience is not None:
    raise ValueError(
      'lenience below 1 is for one proposal a place, and this drafter proposes'
      ' several: no token coming more than 1 / lenience times as often as it'
      ' should is not shown for more than one. Leave lenience at 1, or take a'
      ' drafter without a tree.'
    )
  if request.judges_blocks:
    raise ValueError(
      "verification = 'block' is for chains, and this drafter proposes a tree:"
      ' a block is accepted by one product along one path. Take verification ='
      " 'token' (which is recursive rejection here), or a drafter without a"
      ' tree.'
    )
  if request.rule is not None:
    raise ValueError(
      "gamma = 'adaptive' is for chains, and this drafter proposes a tree,"
      ' whose shape is fixed. Take a number of levels.'
    )
  if request.fallback is not None:
    raise ValueError(
      'fallback knows the costs of chains by their proposals, and this drafter'
      ' proposes a tree. Leave fallback out, or take a drafter without a tree.'
    )


def read(target: LanguageModel, params, cache, fed, num_slots: int, parents):
  """The target's logits after the root and each node, and its cache.

  Args:
    target: the target.
    params: its parameters.
    cache: a cache of all committed tokens but the last.
    fed: int32[B, N + 1], the last committed token and the nodes.
    num_slots: T of the cache.
    parents: of the nodes, as `Draft.parents`.
  """
  parents = (ROOT, *(parent + 1 for parent in parents))
  tree = static_tree(parents, cache.length, num_slots)
  return target.extend(params, cache, fed, tree)


def forbid_early_stops(
  logits: jax.Array, request: Request, state: DecodeState, draft: Draft
) -> jax.Array:
  """As of a chain; a node's place is its level's."""
  places = np.append(0, _shape(draft).levels)
  return decode_state.forbid_early_stops(logits, request, state, places)


def judge(
  request: Request, draft: Draft, logits: jax.Array, keys: jax.Array
) -> Verdict:
  """The path that is kept, and t drawn after it."""
  if request.greedy:
    return verify_tree_greedy_batch(draft, probs.greedy_token(logits))
  target_probs = probs.standardise_batch(logits, request.sampling)
  return verify_tree_batch(draft, target_probs, keys)


def as_chain(
  request: Request, draft: Draft, verdict: Verdict, logits: jax.Array
) -> tuple[Draft, Verdict, jax.Array]:
  """The kept path as if nothing but it had been proposed.

  Its draft ends where a path had no child that could be tried: below a leaf and
  below a stop id.

  Returns:
    The draft of D tokens, its verdict, and the logits [B, D + 1, V] before each
    of these and behind the last.
  """
  shape, path = _shape(draft), verdict.path
  assert path is not None  # it is the verdict of a tree
  tokens = jnp.take_along_axis(draft.tokens, path, axis=1)
  accepted = verdict.num_accepted
  stops = decode_state.is_stop(request, tokens)
  stops &= np.arange(shape.depth) < accepted[:, None]
  stopped = jnp.any(stops, axis=1)
  accepted = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, accepted)
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


def _shape(draft: Draft) -> TreeShape:
  return TreeShape(draft.parents or ())
