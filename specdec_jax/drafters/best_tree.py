"""The tree that yields the most tokens a call, for a measured acceptance.

The child of rank r is accepted with probability a_r, whatever its parent: then
a node is reached with the product of the ranks along its path, and a call
yields 1 + the sum of these products over all nodes. The best tree of N nodes
has the N likeliest, which are a tree by themselves: a child is no likelier than
its parent, nor than its elder sibling.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from specdec_jax.checks.arguments import check_number
from specdec_jax.tree_shape import ROOT, TreeShape

_NOISE = 0.05
# a_0, a_1, ...; or a row of these for each level.
Rates = Sequence[float] | Sequence[Sequence[float]]


def expected_tokens(shape: TreeShape, rates: Rates) -> float:
  """Tokens that a call of the target yields, its own one counted.

  As if all places were alike and no output ended, see `tokens_per_call`.

  Args:
    shape: the tree.
    rates: acceptance by rank, the same on all levels, or a row for each; ranks
      and levels beyond are never accepted.

  Raises:
    ValueError: a rate is not a probability, or a row's sum is above 1.
  """
  table = _table(rates, shape.depth)
  return float(1 + _levels_reached(shape, table).sum())


def tokens_per_call(shape: TreeShape, places: Sequence[np.ndarray]) -> float:
  """Tokens a call over whole outputs, from the acceptance at each place.

  Hard places come together, and the call that ends an output yields fewer
  tokens: `expected_tokens` knows neither. At temperature 0 this is exact, above
  it is the mean over drafts.

  Args:
    shape: the tree.
    places: of each output float[L, C], the acceptance of each rank at each of
      its L tokens, as `measure.acceptance.of_ranks` gives it.

  Raises:
    ValueError: there is no token.
  """
  tokens = sum(len(rows) for rows in places)
  check_number('tokens of the outputs', tokens, 1)
  return tokens / sum(_calls(shape, np.asarray(rows)) for rows in places)


def _calls(shape: TreeShape, rows: np.ndarray) -> float:
  """Expected calls of the target for an output with these acceptances."""
  length, depth = len(rows), shape.depth
  rows = np.concatenate([rows, np.zeros((depth, rows.shape[1]))])
  begins = np.arange(length)[:, None] + np.arange(depth)
  reached = _levels_reached(shape, rows[begins])
  bounds = np.pad(reached, ((0, 0), (1, 1)))
  bounds[:, 0] = 1.0
  law = bounds[:, :-1] - bounds[:, 1:]
  calls = np.zeros((length + depth + 1,))
  for begin in reversed(range(length)):
    # After 0, 1, ..., D accepted levels and the target's own token.
    calls[begin] = 1 + law[begin] @ calls[begin + 1 : begin + depth + 2]
  return float(calls[0])


def _levels_reached(shape: TreeShape, table: np.ndarray) -> np.ndarray:
  """float64[..., D], the probability that each level has an accepted node.

  Args:
    shape: the tree.
    table: float[..., D, C], acceptance by level and rank.
  """
  ranks, levels = shape.ranks, shape.levels - 1
  known = ranks < table.shape[-1]
  own = np.where(known, table[..., levels, np.where(known, ranks, 0)], 0.0)
  reached = np.zeros(own.shape)
  for node, parent in enumerate(shape.parents):
    above = 1.0 if parent == ROOT else reached[..., parent]
    reached[..., node] = own[..., node] * above
  return reached @ np.eye(shape.depth)[levels]


def best_tree(rates: Rates, num_nodes: int, depth: int) -> TreeShape:
  """The tree with the most expected tokens.

  Args:
    rates: as of `expected_tokens`. A rank that was measured to be accepted more
      often than one before it counts as often as that one: it comes after it.
    num_nodes: the most nodes; fewer if no other node is ever accepted.
    depth: the most levels.

  Returns:
    The tree, level by level.

  Raises:
    ValueError: as `expected_tokens`, a number is below 1, or no first child is
      ever accepted.
  """
  check_number('num_nodes of a tree', num_nodes, 1)
  check_number('depth of a tree', depth, 1)
  table = np.minimum.accumulate(_table(rates, depth), axis=1)
  if table[0, 0] <= 0:
    raise ValueError(
      'best_tree: the first proposal is never accepted, so no tree pays.'
      f' Expected acceptance by rank above 0, got {rates!r}.'
    )
  # By what they are worth; of equals the shallower, elder one.
  waiting: list[tuple[float, tuple[int, ...]]] = [(-table[0, 0], (0,))]
  chosen: list[tuple[int, ...]] = []
  while waiting and len(chosen) < num_nodes:
    worth, path = heapq.heappop(waiting)
    chosen.append(path)
    level, rank = len(path) - 1, path[-1]
    if rank + 1 < table.shape[1]:
      sibling = worth * table[level, rank + 1] / table[level, rank]
      if sibling:
        heapq.heappush(waiting, (sibling, (*path[:-1], rank + 1)))
    if len(path) < depth and table[level + 1, 0]:
      heapq.heappush(waiting, (worth * table[level + 1, 0], (*path, 0)))
  chosen.sort(key=lambda path: (len(path), path))
  number: dict[tuple[int, ...], int] = {(): ROOT}
  number |= {path: i for i, path in enumerate(chosen)}
  return TreeShape(tuple(number[path[:-1]] for path in chosen))


def _table(rates: Rates, depth: int) -> np.ndarray:
  """float64[depth, C], acceptance by level and rank."""
  table = np.array(rates, np.float64)
  if table.ndim == 1:
    table = np.broadcast_to(table, (depth, table.size))
  if table.ndim != 2 or not table.size:
    raise ValueError(
      'Expected acceptance by rank, or a row of it for each level; got shape'
      f' {np.shape(rates)}.'
    )
  # Where children are drawn, what was measured may add up to a little more.
  if not (np.all(table >= 0) and np.all(table.sum(axis=1) <= 1 + _NOISE)):
    raise ValueError(
      'Expected probabilities by rank that sum to 1 at most: one child of a'
      f' node is accepted, or none; got {rates!r}.'
    )
  missing = max(0, depth - len(table))
  return np.pad(table, ((0, missing), (0, 0)))[:depth]
