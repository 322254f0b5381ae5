"""Several continuations in one call: where their tokens hang, what each sees.

Beam search feeds all beams of a row in one call, and a drafter's proposals may
branch. Their tokens share the row's one cache: a token's slot says nothing of
its place in its sequence, and it sees only its ancestors.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Tree:
  """How S new tokens hang together, for `LanguageModel.extend`.

  The tokens are written to slots length..length + S - 1 of their row, as those
  of a chain are.

  Attributes:
    positions: int32[B, S], each token's place in its sequence, from 0.
    slot_positions: int32[B, T], the same of the token in each slot; what is in
      slots that no token sees does not matter.
    visible: bool[B, S, T], the slots that each token sees: those of its
      ancestors and its own.
  """

  positions: jax.Array
  slot_positions: jax.Array
  visible: jax.Array


def static_tree(
  parents: Sequence[int], length: jax.Array, num_slots: int
) -> Tree:
  """A tree whose shape is known, behind what each row's cache holds.

  A chain of S tokens is the tree with parents -1, 0, ..., S - 2.

  Args:
    parents: of each of the S tokens, the number of its parent among them, which
      comes before it; -1 is the last token that the cache holds.
    length: int32[B], tokens that the cache holds of each row, one a slot.
    num_slots: T.

  Raises:
    ValueError: a parent does not come before its child.
  """
  count = len(parents)
  depth = np.zeros((count,), np.int32)
  related = np.eye(count, dtype=bool)
  for child, parent in enumerate(parents):
    if not -1 <= parent < child:
      raise ValueError(
        f'Token {child} of a tree has parent {parent}; expected the number of'
        ' an earlier token, or -1 for the last token of the cache.'
      )
    if parent >= 0:
      depth[child] = depth[parent] + 1
      related[child] |= related[parent]
  slot = jnp.arange(num_slots)
  place = slot - length[:, None]  # [B, T], which of the new tokens is there
  is_new = (place >= 0) & (place < count)
  index = jnp.clip(place, 0, count - 1)
  new = jnp.moveaxis(jnp.asarray(related)[:, index], 0, 1)  # [B, S, T]
  old = (place < 0)[:, None]
  return Tree(
    positions=length[:, None] + depth,
    slot_positions=jnp.where(
      is_new, length[:, None] + jnp.asarray(depth)[index], slot
    ),
    visible=jnp.where(is_new[:, None], new, old),
  )
