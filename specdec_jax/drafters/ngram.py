"""A drafter that looks up an n-gram table on the device, without a network.

It looks for the longest end of the text that is a context of the table
(`ngram_table`), and proposes a continuation of it: the most frequent one at
temperature 0, otherwise one drawn from the standardised frequencies.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.checks.fields import unexpected
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.types import Draft

_PIVOTS = 32  # each step of a search compares with so many children


def ngram(table: NGramTable, vocab_size: int | None = None) -> Drafter:
  """Returns a drafter that looks up an n-gram table of any order.

  It proposes gamma tokens; fewer only if a stop id is not allowed yet and the
  table has no other continuation.

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
    size = table.order - 1  # the number of tokens of the longest context
    count = table.max_continuations
    if context.request.greedy and not context.request.forbids_stops:
      count = 1  # the most frequent continuation comes first
    # The last token comes first, as in the table.
    index = context.length[:, None] - 1 - jnp.arange(size)
    recent = jnp.take_along_axis(context.tokens, jnp.maximum(index, 0), axis=1)

    def one_more(recent, place):
      index, uniforms = place
      node = longest_context(table, recent, context.length + index)
      ids, logits = continuations(table, node, count)
      logits = base.forbid_early_stops(
        logits[:, None], context, index, ids[:, None]
      )[:, 0]
      possible = jnp.max(logits, axis=1) > -jnp.inf
      # A row without a continuation proposes nothing; zeros only avoid NaN.
      logits = jnp.where(possible[:, None], logits, 0.0)
      choice, rows = base.draw(logits, context, uniforms)
      token = jnp.take_along_axis(ids, choice[:, None], axis=1)
      recent = jnp.concatenate([token, recent], axis=1)[:, :size]
      return recent, (token[:, 0], ids, rows, possible)

    steps = jnp.arange(context.gamma), base.draft_uniforms(context)
    _, (tokens, ids, rows, possible) = lax.scan(one_more, recent, steps)
    dense = None if rows is None else _dense(ids, rows, width)
    # The draft ends before its first impossible proposal.
    length = jnp.sum(jnp.cumprod(possible.astype(jnp.int32), axis=0), axis=0)
    return Draft(tokens.T, dense, length.astype(jnp.int32)), state

  return Drafter(propose=propose, name='ngram', params=table)


def longest_context(
  table: NGramTable, recent: jax.Array, length: jax.Array
) -> jax.Array:
  """Finds the longest context of the table that each row's text ends with.

  Args:
    table: a table of order n.
    recent: int32[B, n - 1], the last tokens, the last one first.
    length: int32[B], number of tokens of the text.

  Returns:
    int32[B], the indices of the contexts in the table; 0 is the empty context.
  """
  node = jnp.zeros(recent.shape[0], jnp.int32)
  going = node == 0
  for depth, fanout in enumerate(table.fanouts):
    child, exists = _child(table, node, recent[:, depth], fanout)
    going = going & exists & (depth < length)
    node = jnp.where(going, child, node)
  return node


def _child(table: NGramTable, node: jax.Array, token: jax.Array, fanout: int):
  """Finds the contexts that put one more token in front of other contexts.

  Each step of the search in sorted tokens narrows the range by a factor of
  `_PIVOTS`: 32,000 children of a root take three steps, where halving takes 15.

  Args:
    table: a table.
    node: int32[B], indices of contexts in the table.
    token: int32[B], the token to put in front of each context.
    fanout: static, the most longer contexts that one of these may have.

  Returns:
    int32[B], indices of the longer contexts; and bool[B], whether the table has
    them.
  """
  low, end = table.children[node], table.children[node + 1]
  while fanout > 1:
    stride = -(-fanout // _PIVOTS)
    index = low[:, None] + stride * jnp.arange(_PIVOTS)
    pivots = jnp.take(table.tokens, index, mode='clip')
    before = jnp.sum((index < end[:, None]) & (pivots <= token[:, None]), 1)
    low = low + stride * jnp.maximum(before - 1, 0)
    fanout = stride
  is_token = jnp.take(table.tokens, low, mode='clip') == token
  return low, is_token & (low < end)


def continuations(table: NGramTable, node: jax.Array, count: int):
  """Looks up the K most frequent ids after each context.

  Args:
    table: a table.
    node: int32[B], indices of contexts in the table.
    count: static, K.

  Returns:
    The ids int32[B, K], the most frequent first; and their log-probabilities
    float32[B, K], -inf past the last continuation of a context.
  """
  place = jnp.arange(count)
  index = table.starts[node][:, None] + place
  live = index < table.starts[node + 1][:, None]
  ids = jnp.take(table.ids, index, mode='clip')
  log_probs = jnp.take(table.log_probs, index, mode='clip')
  return ids, jnp.where(live, log_probs, -jnp.inf)


def _dense(ids: jax.Array, rows: jax.Array, vocab_size: int) -> jax.Array:
  """Spreads probabilities [G, B, K] of K ids over the vocabulary, [B, G, V]."""

  def spread(ids, row):
    # `add`, not `set`: a row's padding repeats an id with probability 0.
    return jnp.zeros((vocab_size,), row.dtype).at[ids].add(row)

  return jax.vmap(jax.vmap(spread), in_axes=1)(ids, rows)
