"""Trees of tokens: their shape, known before tracing, and one in a cache.

The root is the last committed token and has no number. The nodes below it are
numbered 0, 1, ...; a parent comes before its children, and the children of a
node are tried in the order of their numbers. A chain is the tree with one child
each: parents -1, 0, 1, ...

Drafts may branch, and beam search feeds all beams of a row in one call. Their
tokens share the row's one cache: a token's slot says nothing of its place in
its sequence, and it sees only its ancestors (`Tree`).
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specdec_jax.checks.fields import unexpected

ROOT = -1
MAX_NODES = 256  # as many as the longest chain has


@dataclasses.dataclass(frozen=True)
class TreeShape:
  """A tree of N nodes and D levels; arrays are NumPy's, made once.

  Attributes:
    parents: of each node, the number of its parent; -1 is the root. They do not
      fall, so that nodes come level by level, as `branching` makes them.

  Raises:
    ValueError: a parent does not come before its child, or falls, or there are
      no nodes or too many.

  Examples:
    >>> shape = sd.TreeShape((-1, -1, 0, 0))  # two children; two of the first
    >>> shape.num_nodes, shape.depth
    (4, 2)
    >>> shape.cut(1)
    TreeShape(parents=(-1, -1))
  """

  parents: tuple[int, ...]

  def __post_init__(self):
    parents = tuple(int(parent) for parent in self.parents)
    object.__setattr__(self, 'parents', parents)
    if not 1 <= len(parents) <= MAX_NODES:
      raise unexpected('a tree', f'1 to {MAX_NODES} nodes', len(parents))
    for child, parent in enumerate(parents):
      least = parents[child - 1] if child else ROOT
      if not least <= parent < child:
        expected = f'the number of an earlier node, {least} or more'
        raise unexpected(f'parent of node {child} of a tree', expected, parent)

  @property
  def num_nodes(self) -> int:
    """N."""
    return len(self.parents)

  @functools.cached_property
  def levels(self) -> np.ndarray:
    """int32[N], 1 for the root's children, 2 for theirs, and so on."""
    return _relations(self.parents)[0]

  @property
  def depth(self) -> int:
    """D, levels below the root."""
    return int(self.levels.max())

  @functools.cached_property
  def ranks(self) -> np.ndarray:
    """int32[N], how many elder siblings each node has."""
    seen: dict[int, int] = {}
    ranks = np.zeros((self.num_nodes,), np.int32)
    for child, parent in enumerate(self.parents):
      ranks[child] = seen.get(parent, 0)
      seen[parent] = ranks[child] + 1
    return ranks

  @functools.cached_property
  def children(self) -> np.ndarray:
    """int32[N + 1, C]: the root's children, then each node's; -1 is none."""
    table = np.full((self.num_nodes + 1, self.ranks.max() + 1), -1, np.int32)
    for child, parent in enumerate(self.parents):
      table[parent + 1, self.ranks[child]] = child
    return table

  @functools.cached_property
  def related(self) -> np.ndarray:
    """bool[N, N]: whether the second is the first or an ancestor of it."""
    return _relations(self.parents)[1]

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """int32[N, D]: the nodes from the root's child to each node, then 0s."""
    paths = np.zeros((self.num_nodes, self.depth), np.int32)
    for node, related in enumerate(self.related):
      path = np.flatnonzero(related)
      paths[node, : len(path)] = path
    return paths

  def cut(self, depth: int) -> 'TreeShape':
    """The first `depth` levels."""
    return TreeShape(self.parents[: np.sum(self.levels <= depth)])


def branching(*counts: int | Sequence[int]) -> TreeShape:
  """The tree whose nodes have so many children, level by level.

  Args:
    *counts: of each level, the children of every node above it; or a sequence,
      the children of the first, second, ... child of a node (0 from its end
      on; in the first level, of the root alone, one number). `branching(3, (2,
      1), 1)`: three children of the root; two of the first of these and one of
      the second; one of each of those.

  Returns:
    The shape, level by level.

  Examples:
    >>> sd.branching(3, (2, 1), 1).parents
    (-1, -1, -1, 0, 0, 1, 3, 4, 5)
  """
  parents: list[int] = []
  above = [(ROOT, 0)]  # number and rank
  for count in counts:
    level = []
    for parent, rank in above:
      if isinstance(count, int):
        number = count
      else:
        number = count[rank] if rank < len(count) else 0
      for child_rank in range(number):
        level.append((len(parents), child_rank))
        parents.append(parent)
    above = level
  return TreeShape(tuple(parents))


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
  """A `Tree` of known shape, behind what each row's cache holds.

  Args:
    parents: of each of the S tokens, the number of its parent among them, which
      comes before it; -1 is the last token that the cache holds.
    length: int32[B], tokens that the cache holds of each row, one a slot.
    num_slots: T.
  """
  levels, related = _relations(parents)
  depth, count = levels - 1, len(parents)
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


def _relations(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """Levels int32[N], from 1, and bool[N, N]: itself or an ancestor of it."""
  levels = np.ones((len(parents),), np.int32)
  related = np.eye(len(parents), dtype=bool)
  for child, parent in enumerate(parents):
    if parent != ROOT:
      levels[child] = levels[parent] + 1
      related[child] |= related[parent]
  return levels, related
