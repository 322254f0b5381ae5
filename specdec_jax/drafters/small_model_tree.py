"""A small model whose proposals branch: several tokens for one place.

The tree has a fixed shape and is made level by level: one call reads all nodes
of a level that have children, behind an ancestor mask in the drafter's own
cache, so a tree costs as many calls as a chain of its levels. After a round the
nodes are forgotten, and the next one begins by reading what was committed of
them: in one call, as `small_model` reads its last two tokens. So the cache
follows the path that was kept whatever it is, and nothing is moved in it.
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import probs
from specdec_jax.drafters.base import Context, Drafter, forbid_early_stops
from specdec_jax.drafters.small_model import read_committed, small_model
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.models.model import Model
from specdec_jax.tree_shape import ROOT, TreeShape, static_tree
from specdec_jax.types import Draft


def small_model_tree(model: Model | LanguageModel, shape: TreeShape) -> Drafter:
  """Returns a drafter that proposes a tree of tokens from `model`.

  Made from a network instead of a `Model`, the drafter has no parameters, as
  `small_model`. A draft is the tree's first gamma levels. The children of a
  node are drawn from the model, each without its elder siblings; at temperature
  0 the child of rank r is the r-th likeliest token after its parent.

  The program grows with the number of levels, whose widths differ.

  Args:
    model: the model.
    shape: the tree.

  Examples:
    >>> drafter = sd.small_model_tree(draft, sd.branching(3, (2, 1), 1))
    >>> engine = sd.Engine(target, drafter, gamma=3)
    >>> engine.tree.num_nodes, engine.tree.depth
    (9, 3)
  """
  chain = small_model(model)
  network = cast(LanguageModel, chain.network)

  def init(params, inputs, max_length, prompt, encoded):
    # No sequence is as long as all nodes are.
    longest = max_length - shape.num_nodes + shape.depth
    return read_prompt(
      network, params, inputs, max_length, prompt, longest, encoded
    )[1]

  def propose(params, cache, context: Context):
    proposed = shape.cut(context.gamma)
    # All that a round may have committed.
    logits, cache = read_committed(
      network, params, cache, context, behind=proposed.depth + 1
    )
    uniforms = None
    if not context.request.greedy:
      over_rows = jax.vmap(probs.draft_uniforms, in_axes=(0, None))
      uniforms = over_rows(context.keys, proposed.num_nodes)  # [B, N, 2]
    inner, tree = _inner_nodes(proposed, context)
    above = np.array([ROOT])  # the nodes whose logits are known
    made, rows = [], []
    for level in range(1, proposed.depth + 1):
      nodes = np.flatnonzero(proposed.levels == level)
      logits = forbid_early_stops(
        logits, context, level - 1, places=np.zeros(len(above), np.int32)
      )
      column = np.searchsorted(above, np.array(proposed.parents)[nodes])
      ranks = proposed.ranks[nodes]
      if uniforms is None:
        _, likeliest, _ = probs.top_tokens(logits, int(ranks.max()) + 1)
        made.append(likeliest[:, column, ranks])
      else:
        laws = probs.standardise_batch(logits, context.request.sampling)
        drawn, drawn_from = _draw_children(
          laws, uniforms[:, nodes], column, ranks
        )
        made.append(drawn)
        rows.append(drawn_from)
      if tree is None or level == proposed.depth:
        break
      above = nodes[np.isin(nodes, inner)]
      now = np.searchsorted(inner, above)
      features, cache = network.extend(
        params,
        cache,
        made[-1][:, np.searchsorted(nodes, above)],
        dataclasses.replace(
          tree, positions=tree.positions[:, now], visible=tree.visible[:, now]
        ),
      )
      logits = network.head(params, features)
    draft = Draft(
      jnp.concatenate(made, axis=1),
      jnp.concatenate(rows, axis=1) if rows else None,
      jnp.full(context.length.shape, proposed.depth, jnp.int32),
      proposed,
    )
    return draft, network.rewind(cache, context.length)  # forgets the nodes

  return chain._replace(
    init=init,
    propose=propose,
    name=f'small_model_tree({shape.parents})',
    tree=shape,
    adapts=False,
  )


def _inner_nodes(shape: TreeShape, context: Context):
  """The nodes that have children, and their own `Tree`; None without any."""
  inner = np.flatnonzero(shape.children[1:, 0] >= 0)
  if not len(inner):
    return inner, None
  number = {ROOT: ROOT} | {int(node): i for i, node in enumerate(inner)}
  parents = [number[shape.parents[node]] for node in inner]
  return inner, static_tree(parents, context.length, context.num_slots)


def _draw_children(laws, uniforms, column, ranks):
  """Children of one level, int32[B, W], and the rows that they came from.

  Args:
    laws: float32[B, A, V], after each node above.
    uniforms: float32[B, W, 2], for each child.
    column: int[W], which node above is the parent.
    ranks: int[W].
  """
  ids = jax.lax.iota(jnp.int32, laws.shape[-1])
  drawn = []
  for rank in range(int(ranks.max()) + 1):
    places = np.flatnonzero(ranks == rank)
    rows = laws[:, column[places]]
    tokens = jax.vmap(jax.vmap(probs.inverse_cdf))(rows, uniforms[:, places])
    drawn.append((tokens, rows))
    # Without what was drawn; nothing but 0 where that was all.
    left = jnp.where(ids == tokens[..., None], 0.0, rows)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    left = left / jnp.where(mass > 0, mass, 1.0)
    laws = laws.at[:, column[places]].set(left)
  by_node = np.argsort(np.argsort(ranks, kind='stable'))
  return tuple(
    jnp.concatenate(parts, axis=1)[:, by_node]
    for parts in zip(*drawn, strict=True)
  )
