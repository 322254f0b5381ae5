"""The shape of a tree of proposals: who hangs on whom, known before tracing.

The root is the last committed token and has no number. The nodes below it are
numbered 0, 1, ...; a parent comes before its children, and the children of a
node are tried in the order of their numbers. A chain is the tree with one child
each: parents -1, 0, 1, ...
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

ROOT = -1
MAX_NODES = 256  # as many as the longest chain has


@dataclasses.dataclass(frozen=True)
class TreeShape:
  """A tree of N nodes and D levels; arrays are NumPy's, made once.

  Attributes:
    parents: of each node, the number of its parent; -1 is the root.

  Raises:
    ValueError: a parent does not come before its child, or there are no nodes
      or too many.
  """

  parents: tuple[int, ...]

  def __post_init__(self):
    parents = tuple(int(parent) for parent in self.parents)
    object.__setattr__(self, 'parents', parents)
    if not 1 <= len(parents) <= MAX_NODES:
      raise ValueError(
        f'A tree needs 1 to {MAX_NODES} nodes, got {len(parents)}: each takes a'
        " slot of every row's cache. Give it fewer branches or levels."
      )
    for child, parent in enumerate(parents):
      if not ROOT <= parent < child:
        raise ValueError(
          f'Node {child} of a tree has parent {parent}; expected the number of'
          ' an earlier node, or -1 for the last committed token.'
        )

  @property
  def num_nodes(self) -> int:
    """N."""
    return len(self.parents)

  @functools.cached_property
  def levels(self) -> np.ndarray:
    """int32[N], 1 for the root's children, 2 for theirs, and so on."""
    levels = np.zeros((self.num_nodes,), np.int32)
    for child, parent in enumerate(self.parents):
      levels[child] = 1 + (levels[parent] if parent != ROOT else 0)
    return levels

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

  @property
  def branches(self) -> bool:
    """Whether a node or the root has several children."""
    return bool(self.ranks.any())

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
    related = np.eye(self.num_nodes, dtype=bool)
    for child, parent in enumerate(self.parents):
      if parent != ROOT:
        related[child] |= related[parent]
    return related

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """int32[N, D]: the nodes from the root's child to each node, then 0s."""
    paths = np.zeros((self.num_nodes, self.depth), np.int32)
    for node, related in enumerate(self.related):
      path = np.flatnonzero(related)
      paths[node, : len(path)] = path
    return paths

  def check_by_level(self, what: str) -> None:
    """Raises ValueError unless a drafter can make the tree level by level."""
    if not np.all(np.diff(self.levels) >= 0):
      raise ValueError(
        f'{what} makes a tree level by level: expected parents in the order of'
        f' their levels, got {self.parents}. branching(...) makes such.'
      )

  def cut(self, depth: int) -> 'TreeShape':
    """The first `depth` levels; the nodes that are left keep their order."""
    return self if depth >= self.depth else _cut(self, depth)


@functools.lru_cache(maxsize=256)
def _cut(shape: TreeShape, depth: int) -> TreeShape:
  kept = np.flatnonzero(shape.levels <= depth)
  number = {ROOT: ROOT} | {int(old): new for new, old in enumerate(kept)}
  return TreeShape(tuple(number[shape.parents[node]] for node in kept))


def chain(depth: int) -> TreeShape:
  """One child each."""
  return TreeShape(tuple(range(-1, depth - 1)))


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
