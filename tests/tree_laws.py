"""The exact law of one step over a tree of proposals, by enumeration.

As `verify_laws` does it for chains: all drafts of a few tokens are enumerated,
and the shipped `verify_tree.walk` is measured over its uniforms; nothing here
knows by which rule a child is accepted.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import verify_tree
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Draft
from toy_models import NextProbs, joint_law
from toy_requests import quick_jit
from verify_laws import UNIFORM_GRID, grid_count, grid_value, sampler_law

# (law of the next token float[V], elder siblings) -> what a child is drawn from
Rows = Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


def independent(law: np.ndarray, elder: tuple[int, ...]) -> np.ndarray:
  """SpecInfer's."""
  del elder
  return law


def without_replacement(law: np.ndarray, elder: tuple[int, ...]) -> np.ndarray:
  """Without the elder siblings; nothing where nothing is left."""
  left = np.array(law, np.float64)
  left[list(elder)] = 0
  return left / left.sum() if left.sum() else left


def likeliest(law: np.ndarray, elder: tuple[int, ...]) -> np.ndarray:
  """One-hot, by rank."""
  order = np.argsort(-np.asarray(law), kind='stable')
  return np.eye(len(law))[order[len(elder)]]


def drafts_of(shape: TreeShape, draft: NextProbs, rows: Rows, vocab_size: int):
  """All drafts that can be drawn: tokens, their rows, and their masses."""
  found = []
  for tokens in itertools.product(range(vocab_size), repeat=shape.num_nodes):
    mass, made = 1.0, []
    for node, token in enumerate(tokens):
      path = np.flatnonzero(shape.related[node])[:-1]
      before = tuple(tokens[i] for i in path)
      elder = tuple(
        tokens[i]
        for i in range(node)
        if shape.parents[i] == shape.parents[node]
      )
      row = np.asarray(rows(np.asarray(draft(before)), elder), np.float64)
      # Where nothing is left to draw, one token stands for all.
      empty = row.sum() == 0
      mass *= float(token == 0) if empty else row[token] / row.sum()
      made.append(row)
    if mass:
      found.append((tokens, np.stack(made), mass))
  return found


def step_law(
  target: NextProbs,
  draft: NextProbs,
  shape: TreeShape,
  vocab_size: int,
  rows: Rows,
  *,
  length: int | None = None,
  reported: bool = True,
  change=lambda tokens, rows: (tokens, rows),
) -> np.ndarray:
  """Joint law of D + 1 tokens of which one step made the first.

  Args:
    target: the target's law of the next token.
    draft: the drafter's.
    shape: the tree.
    vocab_size: V.
    rows: what each child is drawn from.
    length: levels that are proposed; None is all.
    reported: False reports no rows, as of chosen children.
    change: what becomes of a draft that was drawn, tokens and rows; for
      controls.
  """
  depth = shape.depth
  proposals = drafts_of(shape, draft, rows, vocab_size)
  masses = [mass for _, _, mass in proposals]
  changed = [change(tokens, made) for tokens, made, _ in proposals]
  made = [list(tokens) for tokens, _ in changed]
  paths = [
    [tuple(tokens[i] for i in np.flatnonzero(line)) for line in shape.related]
    for tokens in made
  ]
  count = len(made)
  drafts = Draft(
    jnp.asarray(made, jnp.int32),
    jnp.asarray(np.stack([r for _, r in changed]), jnp.float32)
    if reported
    else None,
    jnp.full((count,), depth if length is None else length, jnp.int32),
    shape.parents,
  )
  target_rows = [[target(()), *map(target, path)] for path in paths]
  chances, ends, laws = jax.device_get(
    _pieces(
      drafts,
      jnp.asarray(np.array(target_rows), jnp.float32),
      walk=verify_tree.walk,
    )
  )

  @functools.cache
  def rest_law(prefix):
    rest = depth + 1 - len(prefix)
    return joint_law(lambda later: target(prefix + later), rest, vocab_size)

  law = np.zeros((vocab_size,) * (depth + 1))
  for row in range(count):
    for chance, end, next_law in zip(
      chances[row], ends[row], laws[row], strict=True
    ):
      if chance:
        before = () if end < 0 else paths[row][end]
        for token in range(vocab_size):
          prefix = (*before, token)
          mass = masses[row] * chance * next_law[token]
          if mass:
            law[prefix] += mass * rest_law(prefix)
  return law


@functools.partial(quick_jit, static_argnames='walk')
def _pieces(drafts, target_probs, *, walk):
  """Of each draft and each way through its trials: how likely, and its end.

  Returns:
    Probabilities float32[M, 2^K], last nodes int32[M, 2^K], and the laws of the
    next token float32[M, 2^K, V].
  """
  shape = TreeShape(drafts.parents)
  trials = verify_tree.trials(shape)
  ways = jnp.asarray(list(itertools.product((True, False), repeat=len(trials))))
  paths, ranks = jnp.asarray(shape.paths), jnp.asarray(shape.ranks)
  levels = jnp.asarray(shape.levels)
  largest = grid_value(jnp.float32(UNIFORM_GRID - 1))

  def one(draft, rows):
    def accepts(uniforms, trial):
      last, _ = walk(draft, rows, uniforms)
      level, rank = trial
      node = paths[last, level - 1]
      return (
        (last >= 0)
        & (levels[jnp.maximum(last, 0)] >= level)
        & (ranks[node] == rank)
      )

    def one_way(way):
      uniforms = jnp.where(way, 0.0, largest)
      chance = jnp.float32(1)
      for k, trial in enumerate(trials):

        def holds(uniform, k=k, trial=trial):
          return accepts(uniforms.at[k].set(uniform), trial)

        share = grid_count(holds) / UNIFORM_GRID
        chance *= jnp.where(way[k], share, 1 - share)
      last, weights = walk(draft, rows, uniforms)
      return chance, last, sampler_law(weights)

    return jax.vmap(one_way)(ways)

  return jax.vmap(one)(drafts, target_probs)
