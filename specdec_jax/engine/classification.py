"""Classification: the probability of each label, normalised over the labels.

Labels with the same first tokens share these: the target reads all labels as
one tree after an input, in one call. A label has the log-probability that
`scoring.score` gives it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax import partitioning, probs
from specdec_jax.checks.fields import unexpected
from specdec_jax.engine import padding
from specdec_jax.engine.compilation_cache import few_programs
from specdec_jax.models.base import LanguageModel, Params, read_prompt
from specdec_jax.tree_shape import ROOT, Tree, static_tree

MOST_NODES = 1024  # the most nodes of the tree of labels
# A call reads at most so many nodes over all rows, since each has V logits.
_NODES_AT_ONCE = 256


def classify(
  network: LanguageModel,
  params: Params,
  inputs: Sequence[Sequence[int]],
  prompts: Sequence[Sequence[int]],
  labels: Sequence[Sequence[int]],
) -> np.ndarray:
  """Returns the probabilities of labels, float64[B, L]; each row sums to 1.

  Args:
    network: such as `T5(config)`.
    params: its parameters, as a checkpoint has them or placed.
    inputs: ids that the encoder reads; empty ones without an encoder.
    prompts: ids that the decoder begins with, one or more each.
    labels: ids of each label, its end included.

  Raises:
    ValueError: there are no labels, one occurs twice, or there are too many.
  """
  if not labels or len({tuple(ids) for ids in labels}) < len(labels):
    raise unexpected('labels', 'one or more, each once', labels)
  trie = _trie(labels)
  number = len(trie.parents)
  step = max(1, _NODES_AT_ONCE // number)
  totals = list[np.ndarray]()
  for at in range(0, len(prompts), step):
    some = slice(at, at + step)
    rows = padding.padded_rows(len(prompts[some]))
    texts, _ = _padded(inputs[some], rows, network.pad_id)
    prompt, length = _padded(prompts[some], rows)
    slots = prompt.shape[1] + number
    tree = static_tree(trie.parents, jnp.asarray(length - 1), slots)
    with few_programs(_log_probs):
      log_probs = _log_probs(
        network, params, texts, prompt, length, tree, trie.tokens, trie.edges
      )
    edges = partitioning.on_host(log_probs)[: len(prompts[some])]
    step_of, label_of = trie.taken
    totals += [
      np.bincount(label_of, row[step_of], len(labels)) for row in edges
    ]
  logits = np.reshape(totals, (len(prompts), len(labels)))
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  return weights / weights.sum(axis=1, keepdims=True)


class _Trie(NamedTuple):
  """A trie of labels: N nodes, which are proper prefixes, and E edges.

  Attributes:
    parents: the parent of each node; node 0 is the root.
    tokens: int32[N], the last token of each node.
    edges: int32[2, E], the node and the token of each edge.
    taken: int[2, T], pairs of an edge and a label whose path has that edge.
  """

  parents: list[int]
  tokens: np.ndarray
  edges: np.ndarray
  taken: np.ndarray


def _trie(labels: Sequence[Sequence[int]]) -> _Trie:
  nodes, edges = {(ROOT, 0): 0}, dict[tuple[int, int], int]()
  taken: list[tuple[int, int]] = []
  for label, ids in enumerate(labels):
    node = 0
    for place, token in enumerate(ids):
      step = node, int(token)
      taken.append((edges.setdefault(step, len(edges)), label))
      if place + 1 < len(ids):
        node = nodes.setdefault(step, len(nodes))
    # A large tree is refused before arrays are made.
    if len(nodes) > MOST_NODES:
      advice = 'Give them as choices of generate.'
      expected = f'labels with at most {MOST_NODES} different beginnings'
      raise unexpected('labels', expected, f'{len(labels)} labels', advice)
  # Sizes are rounded up, so that other labels seldom need another program.
  size, steps = map(padding.next_power_of_two, (len(nodes), len(edges)))
  parents = [*nodes, *[(0, 0)] * (size - len(nodes))]
  pairs = [*edges, *[(0, 0)] * (steps - len(edges))]
  tokens = np.array([token for _, token in parents], np.int32)
  following: Any = np.array(pairs, np.int32).T
  return _Trie(
    [node for node, _ in parents], tokens, following, np.transpose(taken)
  )


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(
  network: LanguageModel,
  params: Params,
  inputs: jax.Array,
  prompt: jax.Array,
  length: jax.Array,
  tree: Tree,
  tokens: jax.Array,
  edges: jax.Array,
) -> jax.Array:
  """Returns each edge's log-probability, float32[B, E].

  It is NaN where the logits give no distribution.
  """
  slots = tree.slot_positions.shape[1]
  args = network, params, inputs, slots, prompt, slots
  cache = network.rewind(read_prompt(*args)[1], length - 1)
  last = jnp.take_along_axis(prompt, length[:, None] - 1, axis=1)
  below = jnp.broadcast_to(tokens[1:], (len(prompt), len(tokens) - 1))
  fed = jnp.append(last, below, axis=1)
  features, _ = network.extend(params, cache, fed, tree)
  size = min(features.shape[1], _NODES_AT_ONCE)

  def add_block(log_probs, block):
    """Fills in the edges that begin in one block of nodes, [B, `size`, M]."""
    number, features = block
    logits = network.head(params, features).astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    total = jnp.where(probs.valid_logits(logits), total, jnp.nan)
    is_here, node = edges[0] // size == number, edges[0] % size
    log_prob = logits[:, node, edges[1]] - total[:, node]
    return jnp.where(is_here, log_prob, log_probs), None

  blocks = features.reshape(len(prompt), -1, size, features.shape[-1])
  blocks = jnp.moveaxis(blocks, 1, 0)
  nothing = jnp.zeros((len(prompt), edges.shape[1]), jnp.float32)
  numbers = jnp.arange(len(blocks))
  return lax.scan(add_block, nothing, (numbers, blocks))[0]


def _padded(
  ids: Sequence[Sequence[int]], rows: int, pad: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  longest = max(padding.SMALLEST_PROMPT, *map(len, ids))
  return padding.padded(ids, rows, padding.next_power_of_two(longest), pad)
