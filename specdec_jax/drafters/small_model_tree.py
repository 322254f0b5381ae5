"""A small model whose proposals branch: several tokens for one position.

The tree has a fixed shape and grows level by level. One call reads all nodes of
a level that have children, with an ancestor mask in the drafter's own cache, so
a tree costs as many calls as a chain of as many levels. After a round the cache
forgets the nodes, and the next round begins with one call over the tokens that
the last round committed. So the cache gets whichever path was kept, and none of
its slots is moved.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import probs
from specdec_jax.drafters.base import Context, Drafter, forbid_early_stops
from specdec_jax.drafters.small_model import (
  network_of,
  read_committed,
  small_model,
)
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.models.model import Model
from specdec_jax.tree_shape import ROOT, Tree, TreeShape, static_tree
from specdec_jax.types import Draft


def small_model_tree(model: Model | LanguageModel, shape: TreeShape) -> Drafter:
  """Returns a drafter that proposes a tree of tokens from `model`.

  If `model` is a network instead of a `Model`, the drafter has no parameters:
  the caller gives them to `init` and `propose`. A draft is the tree's first
  gamma levels. The children of a node are drawn from the model, each without
  its elder siblings; at temperature 0 they are the likeliest tokens after the
  node, in this order.

  The compiled program grows with the number of levels, because each level has
  another width and code of its own.

  Args:
    model: the model, as `load` gives it, or a network.
    shape: the shape of the tree.

  Examples:
    >>> drafter = sd.small_model_tree(draft, sd.branching(3, (2, 1), 1))
    >>> engine = sd.Engine(target, drafter, gamma=3)
    >>> engine.tree.num_nodes, engine.tree.depth
    (9, 3)
  """
  network = network_of(model)

  def init(params, inputs, max_length, prompt, encoded):
    # The slots hold all nodes, but a sequence has only one node of each level.
    longest = max_length - shape.num_nodes + shape.depth
    return read_prompt(
      network, params, inputs, max_length, prompt, longest, encoded
    )[1]

  propose = functools.partial(_propose, network, shape)
  name = f'small_model_tree({shape.parents})'
  return small_model(model)._replace(
    init=init, propose=propose, name=name, tree=shape, adapts=False
  )


def _propose(
  network: LanguageModel, shape: TreeShape, params, cache, context: Context
):
  """Proposes the first gamma levels of `shape`; it is a `ProposeFn`."""
  shape = shape.cut(context.gamma)
  # The last round committed at most `depth` + 1 tokens.
  logits, cache = read_committed(
    network, params, cache, context, behind=shape.depth + 1
  )
  uniforms = None
  if not context.request.greedy:
    over_rows = jax.vmap(probs.draft_uniforms, in_axes=(0, None))
    uniforms = over_rows(context.keys, shape.num_nodes)  # uniforms [B, N, 2]
  # `inner` are the nodes with children; `tree` is None if there are none.
  inner, tree = np.flatnonzero(shape.children[1:, 0] >= 0), None
  if len(inner):
    number = {ROOT: ROOT} | {int(node): i for i, node in enumerate(inner)}
    above = [number[shape.parents[node]] for node in inner]
    tree = static_tree(above, context.length, context.num_slots)
  parents = np.array([ROOT])  # the nodes after which `logits` come
  levels = []
  for level in range(1, shape.depth + 1):
    nodes = np.flatnonzero(shape.levels == level)
    logits = forbid_early_stops(
      logits, context, level - 1, places=np.zeros(len(parents), np.int32)
    )
    tokens, rows = _children(shape, nodes, parents, logits, uniforms, context)
    levels.append((tokens, rows))
    if tree is None or level == shape.depth:
      break
    parents = nodes[np.isin(nodes, inner)]
    now = np.searchsorted(inner, parents)
    positions, visible = tree.positions[:, now], tree.visible[:, now]
    level_tree = Tree(positions, tree.slot_positions, visible)
    fed = tokens[:, np.searchsorted(nodes, parents)]
    features, cache = network.extend(params, cache, fed, level_tree)
    logits = network.head(params, features)
  tokens, rows = jax.tree.map(
    lambda *parts: jnp.concatenate(parts, axis=1), *levels
  )
  length = jnp.full(context.length.shape, shape.depth, jnp.int32)
  # The cache forgets the nodes of the draft.
  cache = network.rewind(cache, context.length)
  return Draft(tokens, rows, length, shape), cache


def _children(shape, nodes, parents, logits, uniforms, context):
  """Chooses or draws the W nodes of one level.

  Args:
    shape: the shape of the tree.
    nodes: int[W], the numbers of the level's nodes in the tree.
    parents: int[A], the numbers of the nodes above that have children.
    logits: float32[B, A, V], the logits after each of these parents.
    uniforms: float32[B, N, 2] for all nodes of the tree; None when greedy.
    context: holds the sampling settings.

  Returns:
    Tokens int32[B, W], and the distributions float32[B, W, V] that they were
    drawn from; None when greedy.
  """
  column = np.searchsorted(parents, np.array(shape.parents)[nodes])
  ranks = shape.ranks[nodes]
  if uniforms is None:
    _, likeliest, _ = probs.top_tokens(logits, int(ranks.max()) + 1)
    return likeliest[:, column, ranks], None
  laws = probs.standardise_batch(logits, context.request.sampling)
  uniforms = uniforms[:, nodes]
  ids = jax.lax.iota(jnp.int32, laws.shape[-1])
  drawn = []
  for rank in range(int(ranks.max()) + 1):
    places = np.flatnonzero(ranks == rank)
    rows = laws[:, column[places]]
    tokens = jax.vmap(jax.vmap(probs.inverse_cdf))(rows, uniforms[:, places])
    drawn.append((tokens, rows))
    # The next sibling is drawn from the rest, which is 0 if no token is left.
    rest = jnp.where(ids == tokens[..., None], 0.0, rows)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    rest = rest / jnp.where(mass > 0, mass, 1.0)
    laws = laws.at[:, column[places]].set(rest)
  by_node = np.argsort(np.argsort(ranks, kind='stable'))
  return tuple(
    jnp.concatenate(parts, axis=1)[:, by_node]
    for parts in zip(*drawn, strict=True)
  )
