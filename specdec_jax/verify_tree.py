"""Verification of proposals that branch: Algorithm 1 along a tree.

Functions are of one sequence, and have vmapped forms. A walk begins at the last
committed token. It tries the children of a node in turn and goes on at the
first that is accepted; if none is, the target draws the next token. With one
child per node this is Algorithm 1, with the same random numbers.

**Guarantee.** Each node x comes with the distribution q that it was drawn from,
*given its ancestors and its elder siblings*. At a node, p begins as the
target's distribution. A child is accepted with probability min(1, p(x) / q(x));
on rejection p becomes norm(max(0, p - q)), and the next child is tried. At
every step the emitted token has the distribution p, whatever q is. So at the
end it has the target's distribution. This covers three kinds of children:

- drawn independently (as in SpecInfer): q is the drafter's distribution for
  each child;
- drawn without replacement: q is the drafter's distribution without the elder
  siblings, normalised again;
- chosen, by rank or by a table (`Draft.probs` None): q is one-hot, the child is
  accepted with p(x), and on rejection x is taken out of p.

Children are tried in the order in which they were drawn: once they are sorted
by score, the first one no longer comes from its q. For p = (.1, .3, .6) and
q = (.6, .3, .1) two children drawn without replacement and sorted give (.154,
.076, .770); two chosen children that are treated as drawn give (.167, 0, .833).

As in `verify`, a child of draft probability 0 counts as not proposed: it is
skipped, and p stays as it is. p also stays if p - q rounds to 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.checks.fields import unexpected
from specdec_jax.probs import inverse_cdf, verdict_uniforms
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Draft, Verdict
from specdec_jax.verify import draft_rows, value_of


def verify_tree(draft: Draft, target_probs: jax.Array, key: jax.Array):
  """Decides which path of a tree is kept and draws the token after it.

  Args:
    draft: draft of one sequence, with a `tree`: tokens int32[N], probs
      float32[N, V], or None if the children were chosen without randomness;
      length int32[], the number of proposed levels.
    target_probs: float32[N + 1, V]; row 0 follows the committed tokens, and
      each other row follows these and the path to one node.
    key: PRNG key of this row and round, consumed by `verdict_uniforms`.

  Returns:
    Verdict with `path`.

  Raises:
    ValueError: the shapes do not fit, at trace time.
  """
  shape = shape_of(draft, target_probs.shape[0])
  uniforms, of_next = verdict_uniforms(key, len(trials(shape)))
  last, weights = walk(draft, target_probs, uniforms)
  return verdict(shape, last, inverse_cdf(weights, of_next))


def trials(shape: TreeShape) -> np.ndarray:
  """Lists level and rank of each child that a walk may try, int32[K, 2].

  The rank is the number of elder siblings. Of the children with one level and
  rank, which share an entry, a walk tries at most one.
  """
  return np.unique(np.stack([shape.levels, shape.ranks], axis=1), axis=0)


def walk(
  draft: Draft, target_probs: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Walks down the tree as far as children are accepted.

  Args:
    draft: draft of one sequence, with a `tree`, as for `verify_tree`.
    target_probs: float32[N + 1, V], as for `verify_tree`.
    uniforms: float32[K], one for each of `trials`.

  Returns:
    int32[], the last accepted node, -1 if there is none; and float32[V], p at
    the end of the walk, not normalised, from which the next token is drawn.
  """
  shape = shape_of(draft, target_probs.shape[0])
  children = jnp.asarray(shape.children)
  # The root's level comes first.
  levels = jnp.asarray(np.append(0, shape.levels))
  size = target_probs.shape[1]

  def attempt(carry, trial):
    node, probs = carry
    level, rank, uniform = trial
    child = children[node + 1, rank]
    offered = (levels[node + 1] == level - 1) & (level <= draft.length)
    offered &= child >= 0
    token, draft_row = draft.tokens[child], draft_rows(draft, child, size)
    draft_prob = value_of(draft_row, token, 0.0)
    offered &= draft_prob > 0
    # The comparison is strict, as in `verify`, because a uniform may be 0.
    target_prob = value_of(probs, token, 0.0)
    accepted = offered & (uniform * draft_prob < target_prob)
    left = jnp.where(offered, _residual(probs, draft_row), probs)
    probs = jnp.where(accepted, target_probs[child + 1], left)
    return (jnp.where(accepted, child, node), probs), None

  places = jnp.asarray(trials(shape))
  first = jnp.int32(-1), target_probs[0]
  (last, probs), _ = lax.scan(
    attempt, first, (places[:, 0], places[:, 1], uniforms)
  )
  return last, probs


def verify_tree_greedy(draft: Draft, target_tokens: jax.Array) -> Verdict:
  """Verifies a tree for a target that takes the argmax.

  Args:
    draft: draft of one sequence: tokens int32[N], length int32[]; probs is
      unused.
    target_tokens: int32[N + 1], the target's argmax after the committed tokens,
      and after each node.

  Returns:
    Verdict with `path`, the longest path that consists of argmaxes.

  Raises:
    ValueError: the shapes do not fit, at trace time.
  """
  shape = shape_of(draft, target_tokens.shape[0])
  levels = jnp.asarray(shape.levels)
  before = target_tokens[np.array(shape.parents) + 1]
  fails = (draft.tokens != before) | (levels > draft.length)
  reached = ~jnp.any(jnp.asarray(shape.related) & fails[None, :], axis=1)
  depth = jnp.where(reached, levels, 0)
  node = jnp.argmax(depth).astype(jnp.int32)
  last = jnp.where(depth[node] > 0, node, -1)
  return verdict(shape, last, target_tokens[last + 1])


# For B sequences: each argument has a leading axis B.
verify_tree_batch = jax.vmap(verify_tree)
verify_tree_greedy_batch = jax.vmap(verify_tree_greedy)


def shape_of(draft: Draft, num_rows: int) -> TreeShape:
  """Returns the tree of a draft of one sequence.

  Raises:
    ValueError: the draft does not have one token per node of the tree, or the
      target does not have one row more.
  """
  shape = draft.tree
  assert shape is not None
  count, got = shape.num_nodes, (draft.tokens.shape, num_rows)
  if got != ((count,), count + 1):
    expected = f'a draft of {count} tokens, {count + 1} rows of the target'
    raise unexpected('tree', expected, got)
  return shape


def verdict(shape: TreeShape, last: jax.Array, next_token: jax.Array):
  """Returns the verdict of a walk that ended at `last`; -1 is the root."""
  node = jnp.maximum(last, 0)
  levels, paths = jnp.asarray(shape.levels), jnp.asarray(shape.paths)
  number = jnp.where(last < 0, 0, levels[node])
  return Verdict(number, next_token, path=paths[node])


def _residual(probs: jax.Array, row: jax.Array) -> jax.Array:
  """Returns norm(max(0, p - q)), or p if the maximum rounds to 0."""
  residual = jnp.maximum(probs - row, 0.0)
  mass = jnp.sum(residual)
  return jnp.where(mass > 0, residual / jnp.where(mass > 0, mass, 1.0), probs)
