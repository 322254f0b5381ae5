"""The parts of a round that differ if the proposals branch.

The target reads the last committed token and all nodes in one call with an
ancestor mask. The verdict is a path, which the round then treats as a chain.
The slots of the path are moved together; the root's is in place already, so
these are at most as many as the tree has levels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.state import DecodeState
from specdec_jax.models.base import LanguageModel
from specdec_jax.request import TOKEN, Request
from specdec_jax.tree_shape import ROOT, Tree, TreeShape, static_tree
from specdec_jax.types import Draft, Verdict


def check(request: Request, shape: TreeShape) -> None:
  """Raises ValueError unless drafts of this shape fit a request."""
  if shape.depth > request.gamma or shape.num_nodes > request.draft_slots:
    raise ValueError(
      f'The drafter proposes {shape.num_nodes} nodes on {shape.depth} levels:'
      f' expected at most {request.draft_slots} on {request.gamma}, as'
      ' `Drafter.tree` has them.'
    )
  for name, fits, expected in (
    ('lenience', request.lenience is None, '1'),
    ('verification', not request.judges_blocks, repr(TOKEN)),
    ('gamma', not request.drafting.adapts, 'a number of levels'),
    ('fallback', request.drafting.rests is None, 'False'),
  ):
    if not fits:  # these options assume one proposal per place
      raise ValueError(f'{name}: expected {expected} with a tree of proposals.')


def usable_length(request: Request, draft: Draft) -> jax.Array:
  """Returns int32[B], the proposals up to and including a stop id.

  Later proposals are cut off, and not counted anywhere. All levels of a tree
  are usable: its verdict tells where a path ends.
  """
  if draft.tree is not None:
    check(request, draft.tree)
    return draft.length
  return decode_state.up_to_stop(request, draft.tokens, draft.length)[0]


def tree_of(state: DecodeState, draft: Draft, cache: Any) -> Tree | None:
  """Makes the tree of the last committed token and the proposals.

  Args:
    state: tells the number of slots.
    draft: the proposals.
    cache: the target's cache of all committed tokens but the last.

  Returns:
    The tree, for `LanguageModel.extend`; None if the draft is a chain.
  """
  if draft.tree is None:
    return None
  parents = (ROOT, *(parent + 1 for parent in draft.tree.parents))
  return static_tree(parents, cache.length, state.tokens.shape[1] - 1)


def places_of(draft: Draft) -> np.ndarray | None:
  """Returns int[N + 1], the levels of root and nodes; None for a chain."""
  if draft.tree is None:
    return None
  return np.append(0, draft.tree.levels)


def keep_path(
  target: LanguageModel,
  request: Request,
  state: DecodeState,
  draft: Draft,
  verdict: Verdict,
  logits: jax.Array,
  cache: Any,
) -> tuple[Draft, Verdict, jax.Array, Any]:
  """Turns the path that a verdict keeps into a chain; chains stay as they are.

  Returns:
    The chain, its verdict, its logits, and the target's cache, in which the
    slots of the path follow the committed tokens.
  """
  if verdict.path is None:
    return draft, verdict, logits, cache
  length = state.visible_length
  cache = target.keep(cache, length, length[:, None] + verdict.path)
  return *_as_chain(request, draft, verdict, logits), cache


def _as_chain(
  request: Request, draft: Draft, verdict: Verdict, logits: jax.Array
) -> tuple[Draft, Verdict, jax.Array]:
  """Makes a draft of the kept path, as if nothing else had been proposed.

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
