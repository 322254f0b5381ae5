"""A drafter that copies from earlier texts, such as translated pairs.

The texts are one array of ids. Its positions are sorted by the tokens before
them, compared from the last one backwards (a suffix array of the texts read
backwards). So one binary search on the device finds the position before which
the most tokens match the end of the row's input and output.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax.checks.fields import check_number, unexpected
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.prompt_lookup import ends_of
from specdec_jax.types import Array, Draft

_MOST_RANK = 1 << 31  # an int64 holds the product of two ranks up to this one


@struct.dataclass
class Memory:
  """The parameters of a `translation_memory`.

  Attributes:
    tokens: int32[N], the texts one after another.
    order: int32[N], the positions in `tokens`, sorted by the `max_match` tokens
      before them, compared from the last one backwards; of equal positions that
      in the newest text comes last.
    max_match: static, the number of tokens before a position that are compared.

  Examples:
    >>> memory = sd.remember([[5, 6, 1, 8, 9, 1]], max_match=4)
    >>> memory.order.shape, memory.max_match
    ((6,), 4)
  """

  tokens: Array
  order: Array
  max_match: int = struct.field(pytree_node=False)


def remember(texts: Iterable[Sequence[int]], max_match: int = 32) -> Memory:
  """Makes a memory of texts; this takes about 40 bytes of memory per token.

  Args:
    texts: ids of each text, the newest text last. A pair is one text: the ids
      of its source and then of its target, each with its end of sequence.
    max_match: the most tokens that are compared, rounded up to a power of two;
      longer matches count as equal.

  Raises:
    ValueError: the texts have fewer than two tokens, or `max_match` is below 1.

  Examples:
    >>> memory = sd.remember([[5, 6, 1, 8, 9, 1]])
    >>> memory.tokens.tolist()
    [5, 6, 1, 8, 9, 1]
  """
  check_number('max_match', max_match, 1)
  tokens = np.fromiter(itertools.chain.from_iterable(texts), np.int32)
  if tokens.size < 2:
    expected = 'texts of two tokens or more'
    raise unexpected('translation memory', expected, tokens.size)
  # Positions are ranked by the last token before them, then by the last two, by
  # four, ...
  rank, reach = np.append(0, tokens[:-1].astype(np.int64) + 1), 1
  while reach < max_match:
    if (num_ranks := int(rank.max()) + 1) > _MOST_RANK:
      order = np.argsort(rank)
      rank = rank[order]
      rank[order] = np.cumsum(np.append(True, rank[1:] != rank[:-1]))
      num_ranks = tokens.size + 1
    further = np.zeros_like(rank)
    further[reach:] = rank[:-reach]
    rank = rank * num_ranks + further
    reach *= 2
  order = np.argsort(rank, kind='stable')
  return Memory(tokens, order.astype(np.int32), reach)


def translation_memory(memory: Memory, min_match: int = 8) -> Drafter:
  """Returns a deterministic drafter that copies from the texts of a memory.

  A row's text is its encoder's input followed by its output. The drafter looks
  for the position in the memory before which the most tokens equal the end of
  that text, and proposes the tokens from there on. If fewer than `min_match`
  tokens are equal, it proposes nothing; in `with_fallback` a model then drafts.
  A text that is in the memory costs one call of the target for gamma + 1
  tokens, and no call of that model.

  Args:
    memory: from `remember`; `Engine(memory=...)` makes one from a file.
    min_match: tokens that must be equal. A source of at least so many tokens is
      recognised from the output's first token on; a lower number also proposes
      after phrases that are in the memory.

  Raises:
    ValueError: not 1 <= min_match <= memory.max_match.

  Examples:
    >>> whole = target.tokenizer.whole  # ids of a text, with its end
    >>> pair = whole('Good morning!') + whole('Guten Morgen!')
    >>> memory = sd.translation_memory(sd.remember([pair]), min_match=4)
    >>> engine = sd.Engine(target, sd.with_fallback(memory, draft))
    >>> engine.drafter.name
    'with_fallback(translation_memory(4), small_model)'
  """
  if not 1 <= min_match <= memory.max_match:
    expected = f'1 to {memory.max_match}, the tokens that are compared'
    raise unexpected('translation_memory: min_match', expected, min_match)

  def init(params, inputs, max_length, prompt, encoded):
    # No text holds the tokens that a decoder with an encoder begins with: the
    # start token and the rest of the prompt, up to its padding.
    places = jnp.arange(1, prompt.shape[1] + 1)
    return inputs, jnp.max(jnp.where(prompt != 0, places, 1), axis=1)

  def propose(memory: Memory, state, context: Context):
    inputs, skip = state
    ends = ends_of(inputs, context)
    recent = jax.vmap(functools.partial(_recent, memory.max_match))(
      inputs, ends, context.tokens, context.length, jnp.where(ends, skip, 0)
    )
    place, match = jax.vmap(functools.partial(_longest, memory))(recent)
    steps = place[:, None] + jnp.arange(context.gamma)
    tokens = jnp.take(memory.tokens, steps, mode='clip')
    left = jnp.minimum(memory.tokens.size - place, context.gamma)
    length = jnp.where(match >= min_match, left, 0)
    return Draft(tokens, None, length.astype(jnp.int32)), state

  name = f'translation_memory({min_match})'
  return Drafter(init, propose, name=name, params=memory)


def _recent(size, inputs, end, tokens, length, skip):
  """Lists the last tokens of a row's text, the last one first.

  Args:
    size: static, number of tokens to list.
    inputs: int32[E], the row's input.
    end: int32[], length of the input.
    tokens: int32[N], committed tokens.
    length: int32[], number of committed tokens.
    skip: int32[], number of first committed tokens, which are not in the text.

  Returns:
    int32[size], padded with -1.
  """
  back = jnp.arange(size)
  place = length - 1 - back
  # The position of the token in the input, if it is there.
  before = end - 1 - (back - (length - skip))
  from_input = jnp.where(before >= 0, inputs[jnp.maximum(before, 0)], -1)
  return jnp.where(place >= skip, tokens[jnp.maximum(place, 0)], from_input)


def _longest(memory: Memory, recent: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Finds the position int32[] of the longest match, and its length int32[].

  If matches have all `max_match` tokens, the one in the newest text wins.

  Args:
    memory: the memory.
    recent: int32[max_match], the last tokens of a row's text, the last one
      first.
  """
  size = memory.order.size

  def past(rank):
    """Lists the tokens before a position in memory, the last one first."""
    before = memory.order[rank] - 1 - jnp.arange(memory.max_match)
    return jnp.where(before >= 0, memory.tokens[jnp.maximum(before, 0)], -1)

  def halve(_, bracket):
    low, high = bracket
    middle = (low + high) // 2
    tokens = past(jnp.minimum(middle, size - 1))
    first = jnp.argmax(tokens != recent)
    is_after = (tokens[first] > recent[first]) | (middle >= size)
    high = jnp.where(is_after, middle, high)
    return jnp.where(is_after, low, middle + 1), high

  # The search finds the first position that is sorted after the row's tokens.
  bracket = jnp.int32(0), jnp.int32(size)
  low, _ = lax.fori_loop(0, size.bit_length(), halve, bracket)
  ranks = jnp.clip(jnp.stack([low - 1, low]), 0, size - 1)
  agrees = jax.vmap(past)(ranks) == recent
  # -1, before the beginning of all texts, agrees with nothing.
  matches = jnp.sum(jnp.cumprod(agrees & (recent >= 0), axis=1), axis=1)
  # If both matches are equally long, argmax takes the first position. It is the
  # last of all equal positions, so it is in the newest text.
  best = jnp.argmax(matches)
  return memory.order[ranks[best]], matches[best]
