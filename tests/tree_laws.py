"""The exact law of one step over a tree of proposals, by enumeration.

As `verify_laws` does it for chains: all drafts of a few tokens are enumerated,
and the shipped `verify_tree.walk` is measured over its uniforms; nothing here
knows by which rule a child is accepted.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import verify_tree
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Draft
from toy_models import NextProbs
from verify_laws import enumerated

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
    # Also without a mass: all drafts of a shape are one program.
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
    jnp.asarray(np.stack([r for _, r in changed]), jnp.float32),
    jnp.full((count,), depth if length is None else length, jnp.int32),
    shape.parents,
  )
  rows = [[target(()), *map(target, path)] for path in paths]
  return enumerated(
    target,
    Walk(verify_tree.walk),
    drafts,
    jnp.asarray(np.array(rows), jnp.float32),
    [[(), *path] for path in paths],
    masses,
  )[0]


class Walk(NamedTuple):
  """What `verify_tree` decides by its uniforms; see `verify_laws.Chain`."""

  walk: Callable

  def num_trials(self, draft: Draft) -> int:
    return len(verify_tree.trials(TreeShape(draft.parents)))

  def __call__(self, draft: Draft, rows, uniforms, lenience):
    """The node that is reached, from 1; what follows it; the trials held."""
    del lenience
    shape = TreeShape(draft.parents)
    last, weights = self.walk(draft, rows, uniforms)
    level, rank = verify_tree.trials(shape).T
    reached = jnp.append(0, shape.levels)[last + 1] >= level
    node = jnp.asarray(shape.paths)[last, level - 1]
    return last + 1, weights, reached & (jnp.asarray(shape.ranks)[node] == rank)
