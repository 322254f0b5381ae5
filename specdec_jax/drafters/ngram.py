"""Unigram, bigram and longer n-grams as drafters: a table, no network.

Looks for the longest end of the text that the table knows, and proposes a
continuation of it: at temperature 0 the most frequent one, otherwise one drawn
from the standardised frequencies. The table (`ngram_table`) is looked up on the
device.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.checks.fields import unexpected
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.types import Draft

_PIVOTS = 32  # children of a node that one step of a search looks at


def ngram(table: NGramTable, vocab_size: int | None = None) -> Drafter:
  """Returns a drafter that looks in an n-gram table of any order.

  It proposes gamma tokens; fewer only if a stop id is not allowed yet and
  nothing else is known to follow.

  Args:
    table: the drafter's parameters.
    vocab_size: V, the width of the target's logits; it may be larger than the
      table's vocabulary if the embedding is padded. None is the table's.

  Raises:
    ValueError: the table's vocabulary is larger than `vocab_size`.

  Examples:
    >>> texts = ['Guten Morgen!', 'Guten Abend!']
    >>> rows = [[0, *ids] for ids in target.tokenizer.encode_batch(texts)]
    >>> table = sd.fit_ngram_table(rows, order=2, vocab_size=8000)
    >>> sd.Engine(target, sd.ngram(table))
    Engine(target=..., draft='ngram', gamma=4, ...)
  """
  width = table.vocab_size if vocab_size is None else vocab_size
  if table.vocab_size > width:
    expected = f'at most the {width} ids of the target'
    raise unexpected("n-gram table's vocabulary", expected, table.vocab_size)

  def propose(table: NGramTable, state, context: Context):
    size = table.order - 1  # of a context
    most = table.max_continuations
    if context.request.greedy and not context.request.forbids_stops:
      most = 1  # they are sorted
    # Nearest token first, as the table is read.
    index = context.length[:, None] - 1 - jnp.arange(size)
    recent = jnp.take_along_axis(context.tokens, jnp.maximum(index, 0), axis=1)

    def one(recent, place):
      index, uniforms = place
      known = context.length + index
      node = longest_known(table, recent, known)
      ids, logits = continuations(table, node, most)
      logits = base.forbid_early_stops(
        logits[:, None], context, index, ids[:, None]
      )[:, 0]
      possible = jnp.max(logits, axis=1) > -jnp.inf
      # A row without any entry proposes nothing; this only avoids NaN there.
      logits = jnp.where(possible[:, None], logits, 0.0)
      choice, rows = base.draw(logits, context, uniforms)
      token = jnp.take_along_axis(ids, choice[:, None], axis=1)
      recent = jnp.concatenate([token, recent], axis=1)[:, :size]
      return recent, (token[:, 0], ids, rows, possible)

    steps = jnp.arange(context.gamma), base.draft_uniforms(context)
    _, (tokens, ids, rows, possible) = lax.scan(one, recent, steps)
    dense = None if rows is None else _dense(ids, rows, width)
    # The draft ends before its first impossible proposal.
    length = jnp.sum(jnp.cumprod(possible.astype(jnp.int32), axis=0), axis=0)
    return Draft(tokens.T, dense, length.astype(jnp.int32)), state

  return Drafter(lambda *_: (), propose, lambda state, _: state, 'ngram', table)


def longest_known(
  table: NGramTable, recent: jax.Array, known: jax.Array
) -> jax.Array:
  """The longest context of the table that the text of each row ends with.

  Args:
    table: a table of order n.
    recent: int32[B, n - 1], the last tokens, the nearest first.
    known: int32[B], how many of them are tokens.

  Returns:
    int32[B], numbers of contexts; 0 is the empty context.
  """
  node = jnp.zeros(recent.shape[0], jnp.int32)
  going = node == 0
  for depth, fanout in enumerate(table.fanouts):
    child, found = _child(table, node, recent[:, depth], fanout)
    going = going & found & (depth < known)
    node = jnp.where(going, child, node)
  return node


def _child(table: NGramTable, node: jax.Array, token: jax.Array, fanout: int):
  """The child of `node` for `token`, both int32[B], and whether there is one.

  Searches sorted tokens; each step narrows the range by a factor of `_PIVOTS`:
  three steps for the 32,000 children of a root, where halving takes fifteen.
  """
  low, end = table.children[node], table.children[node + 1]
  while fanout > 1:
    stride = -(-fanout // _PIVOTS)
    index = low[:, None] + stride * jnp.arange(_PIVOTS)
    pivots = jnp.take(table.tokens, index, mode='clip')
    before = jnp.sum((index < end[:, None]) & (pivots <= token[:, None]), 1)
    low = low + stride * jnp.maximum(before - 1, 0)
    fanout = stride
  found = jnp.take(table.tokens, low, mode='clip') == token
  return low, found & (low < end)


def continuations(table: NGramTable, node: jax.Array, most: int):
  """The most frequent ids that follow, and their logits.

  Args:
    table: a table.
    node: int32[B], numbers of contexts.
    most: static, K.

  Returns:
    int32[B, K] and float32[B, K], sorted; -inf past the last one.
  """
  place = jnp.arange(most)
  index = table.starts[node][:, None] + place
  live = index < table.starts[node + 1][:, None]
  ids = jnp.take(table.ids, index, mode='clip')
  log_probs = jnp.take(table.log_probs, index, mode='clip')
  return ids, jnp.where(live, log_probs, -jnp.inf)


def _dense(ids: jax.Array, rows: jax.Array, vocab_size: int) -> jax.Array:
  """Rows float32[B, G, V] from ids int32[G, B, K] and float32[G, B, K]."""

  def one(ids, row):
    # Added, not set: the padding of a row repeats an id, with probability 0.
    return jnp.zeros((vocab_size,), row.dtype).at[ids].add(row)

  return jax.vmap(jax.vmap(one), in_axes=1)(ids, rows)
