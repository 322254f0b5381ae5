"""Several continuations of an n-gram table: the likeliest tokens per place."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.drafters.base import Context, Drafter, forbid_early_stops
from specdec_jax.drafters.ngram import check_width, continuations, longest_known
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Draft


def ngram_tree(
  table: NGramTable, shape: TreeShape, vocab_size: int | None = None
) -> Drafter:
  """Returns a drafter that proposes a tree out of an n-gram table.

  The child of rank r is the r-th most frequent continuation of the longest end
  of its path that the table knows, at every temperature. Where the table knows
  fewer, the first stands for those that are missing: nothing is accepted twice.

  Args:
    table: the drafter's parameters.
    shape: the tree, level by level; a draft is its first gamma levels.
    vocab_size: as of `ngram`.

  Raises:
    ValueError: the table's vocabulary is larger than `vocab_size`, or the nodes
      are not in the order of their levels.
  """
  check_width(table, vocab_size)
  shape.check_by_level('ngram_tree')

  def children(table, recent, known, level, most, context: Context):
    """Ids int32[B, A, most] that follow recent int32[B, A, n - 1]."""
    batch, above, size = recent.shape
    known = jnp.repeat(known, above)
    node = longest_known(table, recent.reshape(-1, size), known)
    count = most
    if context.forbids_stops:
      count = table.max_continuations
    count = min(count, table.max_continuations)
    ids, logits = continuations(table, node, count)
    ids, logits = (x.reshape(batch, above, count) for x in (ids, logits))
    places = np.zeros(above, np.int32)
    logits = forbid_early_stops(logits, context, level - 1, ids, places)
    values, order = lax.top_k(logits, min(most, count))
    order = jnp.where(values > -jnp.inf, order, order[..., :1])
    found = jnp.take_along_axis(ids, order, axis=2)
    more = most - found.shape[2]
    return jnp.pad(found, ((0, 0), (0, 0), (0, more)), mode='edge')

  def propose(table: NGramTable, state, context: Context):
    proposed = shape.cut(context.gamma)
    parents, ranks = np.array(proposed.parents), proposed.ranks
    size = table.order - 1  # of a context
    index = context.length[:, None] - 1 - jnp.arange(size)
    recent = jnp.take_along_axis(context.tokens, jnp.maximum(index, 0), axis=1)
    recent, above = recent[:, None], np.array([-1])
    made: list[jax.Array] = []
    for level in range(1, proposed.depth + 1):
      nodes = np.flatnonzero(proposed.levels == level)
      column, rank = np.searchsorted(above, parents[nodes]), ranks[nodes]
      known = context.length + level - 1
      ids = children(table, recent, known, level, int(rank.max()) + 1, context)
      made.append(ids[:, column, rank])
      recent = jnp.concatenate([made[-1][..., None], recent[:, column]], axis=2)
      recent, above = recent[..., :size], nodes
    levels = jnp.full(context.length.shape, proposed.depth, jnp.int32)
    tokens = jnp.concatenate(made, axis=1)
    return Draft(tokens, None, levels, proposed.parents), state

  name = f'ngram_tree({shape.parents})'
  return Drafter(
    lambda *_: (), propose, lambda state, _: state, name, table, tree=shape
  )
