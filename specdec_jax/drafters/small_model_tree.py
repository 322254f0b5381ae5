"""A small model whose proposals branch: several tokens for one place.

The tree has a fixed shape and is made level by level: one call reads all nodes
of a level that have children, behind an ancestor mask in the drafter's own
cache, so a tree costs as many calls as a chain of its levels. After a round the
nodes are forgotten, and the next one begins by reading what was committed of
them: in one call, as `small_model` reads its last two tokens. So the cache
follows the path that was kept whatever it is, and nothing is moved in it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specdec_jax import probs
from specdec_jax.checks.fields import check_choice
from specdec_jax.drafters.base import (
  Context,
  Drafter,
  DrafterState,
  forbid_early_stops,
  with_params,
)
from specdec_jax.drafters.small_model import (
  catch_up,
  read_last,
)
from specdec_jax.models.base import LanguageModel, read_prompt, reads_encoder
from specdec_jax.models.model import Model
from specdec_jax.tree_shape import ROOT, Tree, TreeShape, static_tree
from specdec_jax.types import Draft

CHILDREN = ('without_replacement', 'independent', 'chosen')


@struct.dataclass
class TreeState:
  """The state of a `small_model_tree`.

  Attributes:
    cache: the model's cache, of committed tokens.
    num_slots: static, T of the cache.
  """

  cache: DrafterState
  num_slots: int = struct.field(pytree_node=False)


def small_model_tree(
  model: Model | LanguageModel,
  shape: TreeShape,
  children: str = 'without_replacement',
) -> Drafter:
  """Returns a drafter that proposes a tree of tokens from `model`.

  Made from a network instead of a `Model`, the drafter has no parameters, as
  `small_model`. A draft is the tree's first gamma levels. At temperature 0 the
  child of rank r is the r-th likeliest token after its parent.

  The program grows with the number of levels, whose widths differ.

  Args:
    model: the model.
    shape: the tree, level by level (as `branching` makes it).
    children: what the children of a node are where tokens are sampled:
      'without_replacement', drawn from the model, each without its elder
      siblings; 'independent', drawn from the model, so that siblings may be
      equal; 'chosen', the likeliest tokens.

  Raises:
    ValueError: the nodes are not in the order of their levels, or `children` is
      not known.
  """
  check_choice('children of a tree', children, CHILDREN)
  shape.check_by_level('small_model_tree')
  if isinstance(model, Model):
    made = small_model_tree(model.network, shape, children)
    return with_params(made, model)

  def init(params, inputs, max_length, prompt=None, encoded=None):
    # No sequence is as long as all nodes are.
    longest = max_length - shape.num_nodes + shape.depth
    cache = read_prompt(
      model, params, inputs, max_length, prompt, longest, encoded
    )
    return TreeState(cache, max_length)

  def propose(params, state: TreeState, context: Context):
    proposed = shape.cut(context.gamma)
    cache, known, length = state.cache, context.tokens, context.length
    if context.skips_rounds:
      cache = catch_up(model, params, cache, known, length)
    # All that a round may have committed.
    logits, cache = read_last(
      model, params, cache, known, length, behind=proposed.depth + 1
    )

    def read(cache, made: jax.Array, tree: Tree):
      return model.extend(params, cache, made, tree)

    tokens, rows = _grow(
      proposed, children, context, logits, cache, state.num_slots, read
    )
    levels = jnp.full(length.shape, proposed.depth, jnp.int32)
    draft = Draft(tokens, rows, levels, proposed.parents)
    return draft, dataclasses.replace(state, cache=cache)

  def commit(state: TreeState, length: jax.Array):
    kept = jnp.minimum(state.cache.length, length - 1)
    return dataclasses.replace(state, cache=model.rewind(state.cache, kept))

  name = f'small_model_tree({shape.parents}, {children})'
  return Drafter(
    init,
    propose,
    commit,
    name,
    network=model,
    reads_encoder=reads_encoder(model),
    tree=shape,
  )


def _grow(
  shape: TreeShape,
  children: str,
  context: Context,
  logits: jax.Array,
  cache: DrafterState,
  num_slots: int,
  read: Callable,
) -> tuple[jax.Array, jax.Array | None]:
  """The nodes' tokens, int32[B, N], and their rows, float32[B, N, V] or None.

  Args:
    shape: the tree.
    children: as of `small_model_tree`.
    context: how to sample.
    logits: float32[B, 1, V], of the token after the last committed one.
    cache: the model's cache of all committed tokens.
    num_slots: T.
    read: (cache, tokens, tree) -> (logits, cache), the model.
  """
  levels, parents = shape.levels, np.array(shape.parents)
  inner = np.flatnonzero(shape.children[1:, 0] >= 0)  # nodes with children
  number = {ROOT: ROOT} | {int(node): i for i, node in enumerate(inner)}
  tree = None
  if len(inner):
    tree = static_tree(
      [number[parents[node]] for node in inner], context.length, num_slots
    )
  uniforms = None
  if not context.greedy and children != 'chosen':
    over_rows = jax.vmap(probs.draft_uniforms, in_axes=(0, None))
    uniforms = over_rows(context.keys, shape.num_nodes)  # [B, N, 2]
  above = np.array([ROOT])  # the nodes whose logits are known
  made, rows = [], []
  for level in range(1, shape.depth + 1):
    nodes = np.flatnonzero(levels == level)
    logits = forbid_early_stops(
      logits, context, level - 1, places=np.zeros(len(above), np.int32)
    )
    column = np.searchsorted(above, parents[nodes])
    ranks = shape.ranks[nodes]
    if uniforms is None:
      _, likeliest, _ = probs.top_tokens(logits, int(ranks.max()) + 1)
      made.append(likeliest[:, column, ranks])
    else:
      drawn, drawn_from = _drawn(
        logits, context, uniforms[:, nodes], column, ranks, children
      )
      made.append(drawn)
      rows.append(drawn_from)
    above = nodes[np.isin(nodes, inner)]
    if level < shape.depth:
      read_now = np.searchsorted(inner, above)
      assert tree is not None
      logits, cache = read(
        cache,
        made[-1][:, np.searchsorted(nodes, above)],
        dataclasses.replace(
          tree,
          positions=tree.positions[:, read_now],
          visible=tree.visible[:, read_now],
        ),
      )
  tokens = jnp.concatenate(made, axis=1)
  return tokens, jnp.concatenate(rows, axis=1) if rows else None


def _drawn(logits, context: Context, uniforms, column, ranks, children: str):
  """Children of one level, int32[B, W], and the rows that they came from.

  Args:
    logits: float32[B, A, V], after each node above.
    context: how to sample.
    uniforms: float32[B, W, 2], for each child.
    column: int[W], which node above is the parent.
    ranks: int[W].
    children: 'independent' or 'without_replacement'.
  """
  laws = probs.standardise_batch(logits, context.sampling)
  draw = jax.vmap(jax.vmap(probs.inverse_cdf))
  if children == 'independent':
    rows = laws[:, column]
    return draw(rows, uniforms), rows
  tokens: list[Any] = [None] * len(ranks)
  drawn_from: list[Any] = [None] * len(ranks)
  for rank in range(int(ranks.max()) + 1):
    places = np.flatnonzero(ranks == rank)
    now = laws[:, column[places]]
    drawn = draw(now, uniforms[:, places])
    for i, place in enumerate(places):
      tokens[place], drawn_from[place] = drawn[:, i], now[:, i]
    # Without what was drawn; nothing but 0 where that was all.
    ids = jax.lax.iota(jnp.int32, laws.shape[-1])
    left = jnp.where(ids == drawn[..., None], 0.0, now)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    left = left / jnp.where(mass > 0, mass, 1.0)
    laws = laws.at[:, column[places]].set(left)
  return jnp.stack(tokens, axis=1), jnp.stack(drawn_from, axis=1)
