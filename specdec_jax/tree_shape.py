"""Trees of tokens: their static shape, and their positions in a cache.

The root is the last committed token and has no number. The nodes below it are
numbered 0, 1, ...; a parent comes before its children, and the children of a
node are tried in the order of their numbers. A chain is a tree with one child
per node: parents -1, 0, 1, ...

Drafts may branch, and beam search reads all beams of a row in one call. Their
tokens share the row's cache: a token's slot does not tell its position in its
sequence, and a token sees only itself and its ancestors (`Tree`).
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
MAX_NODES = 256  # the most nodes of a tree, and the most proposals of a chain


@dataclasses.dataclass(frozen=True)
class TreeShape:
  """The shape of a tree of N nodes and D levels, with NumPy arrays about it.

  Attributes:
    parents: the number of each node's parent; -1 is the root. They do not
      decrease, so that nodes come level by level, as `branching` makes them.

  Raises:
    ValueError: a parent does not come before its child, parents decrease, or
      there are no nodes or too many.

  Examples:
    >>> shape = sd.TreeShape((-1, -1, 0, 0))  # the root's first child has two
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
    """N, the number of nodes."""
    return len(self.parents)

  @functools.cached_property
  def levels(self) -> np.ndarray:
    """int32[N], each node's level: 1 for the root's children, 2 for theirs."""
    return _relations(self.parents)[0]

  @property
  def depth(self) -> int:
    """D, the number of levels below the root."""
    return int(self.levels.max())

  @functools.cached_property
  def ranks(self) -> np.ndarray:
    """int32[N], the number of elder siblings of each node."""
    parents, count = self.parents, self.num_nodes
    ranks = [parents[:child].count(parents[child]) for child in range(count)]
    return np.array(ranks, np.int32)

  @functools.cached_property
  def children(self) -> np.ndarray:
    """int32[N + 1, C], children of the root and of each node, then -1s."""
    table = np.full((self.num_nodes + 1, self.ranks.max() + 1), -1, np.int32)
    for child, parent in enumerate(self.parents):
      table[parent + 1, self.ranks[child]] = child
    return table

  @functools.cached_property
  def related(self) -> np.ndarray:
    """bool[i, j], whether node j is node i or its ancestor; bool[N, N]."""
    return _relations(self.parents)[1]

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """int32[N, D], the nodes from the root's child to each node, then 0s."""
    paths = np.zeros((self.num_nodes, self.depth), np.int32)
    for node, related in enumerate(self.related):
      path = np.flatnonzero(related)
      paths[node, : len(path)] = path
    return paths

  def cut(self, depth: int) -> 'TreeShape':
    """Returns the tree of the first `depth` levels."""
    return TreeShape(self.parents[: np.sum(self.levels <= depth)])


def branching(*counts: int | Sequence[int]) -> TreeShape:
  """Makes a tree from the numbers of children, level by level.

  Args:
    *counts: for each level, the number of children of every node in the level
      above; or a sequence of such numbers, for nodes that are the first,
      second, ... child of their parent (past its end, 0). In
      `branching(3, (2, 1), 1)` the root has three children; the first of these
      has two children and the second has one; each of those has one child.

  Examples:
    >>> sd.branching(3, (2, 1), 1).parents
    (-1, -1, -1, 0, 0, 1, 3, 4, 5)
  """
  parents: list[int] = []
  above = [(ROOT, 0)]  # (node, rank) in the level above
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
  """The positions of S new tokens that form a tree, for `LanguageModel.extend`.

  The tokens are written to slots length..length + S - 1 of their row, as those
  of a chain are.

  Attributes:
    positions: int32[B, S], each token's position in its sequence, from 0.
    slot_positions: int32[B, T], the position in its sequence of the token in
      each slot; any number in slots that no token sees.
    visible: bool[B, S, T], the slots that each token sees: those of its
      ancestors and its own.
  """

  positions: jax.Array
  slot_positions: jax.Array
  visible: jax.Array


def static_tree(parents: Sequence[int], length: jax.Array, slots: int) -> Tree:
  """Makes the `Tree` of new tokens that follow those in each row's cache.

  The tree has the same, static shape in all rows.

  Args:
    parents: for each of the S tokens, the number of its parent among them,
      which comes before it; -1 is the last token in the cache.
    length: int32[B], number of tokens in each row's cache.
    slots: T, the number of slots of the cache.
  """
  levels, related = _relations(parents)
  depth, count = levels - 1, len(parents)
  slot = jnp.arange(slots)
  # The number of the new token in each slot, [B, T].
  place = slot - length[:, None]
  is_new = (place >= 0) & (place < count)
  index = jnp.clip(place, 0, count - 1)
  new = jnp.moveaxis(jnp.asarray(related)[:, index], 0, 1)  # [B, S, T]
  old = (place < 0)[:, None]
  places = jnp.where(is_new, length[:, None] + jnp.asarray(depth)[index], slot)
  visible = jnp.where(is_new[:, None], new, old)
  return Tree(length[:, None] + depth, places, visible)


def _relations(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """Returns `levels` and `related` of a `TreeShape` with these parents."""
  levels = np.ones((len(parents),), np.int32)
  related = np.eye(len(parents), dtype=bool)
  for child, parent in enumerate(parents):
    if parent != ROOT:
      levels[child] = levels[parent] + 1
      related[child] |= related[parent]
  return levels, related
