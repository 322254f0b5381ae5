"""A translation memory as a drafter: proposes what stood in texts of before.

The texts, such as pairs of an earlier translation, are one array of ids. Its
places are sorted by the tokens before them, the nearest first (a suffix array
of the texts read backwards). So one binary search, on the device, finds a place
whose past agrees longest with what the row has read and said.
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

_MOST_RANK = 1 << 31  # of which two fit in an int64


@struct.dataclass
class Memory:
  """The parameters of a `translation_memory`.

  Attributes:
    tokens: int32[N], the texts one behind the other.
    order: int32[N], the places of `tokens`, sorted by the `max_match` tokens
      before them, the nearest first; among equals the older text comes first.
    max_match: static, tokens before a place that are compared.

  Examples:
    >>> memory = sd.remember([[5, 6, 1, 8, 9, 1]], max_match=4)
    >>> memory.order.shape, memory.max_match
    ((6,), 4)
  """

  tokens: Array
  order: Array
  max_match: int = struct.field(pytree_node=False)


def remember(texts: Iterable[Sequence[int]], max_match: int = 32) -> Memory:
  """Sorts texts, on the host; takes about 40 bytes of memory for a token.

  Args:
    texts: ids of each text, the newest last. A pair is one text: the ids of its
      source, with the end of sequence, and of its target, with its end.
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
  # Ranks by the tokens before a place: by one, by two, by four, ...
  rank, reach = np.append(0, tokens[:-1].astype(np.int64) + 1), 1
  while reach < max_match:
    if (most := int(rank.max()) + 1) > _MOST_RANK:
      order = np.argsort(rank)
      rank = rank[order]
      rank[order] = np.cumsum(np.append(True, rank[1:] != rank[:-1]))
      most = tokens.size + 1
    further = np.zeros_like(rank)
    further[reach:] = rank[:-reach]
    rank = rank * most + further
    reach *= 2
  order = np.argsort(rank, kind='stable')
  return Memory(tokens, order.astype(np.int32), reach)


def translation_memory(memory: Memory, min_match: int = 8) -> Drafter:
  """Returns a deterministic drafter that goes on as the texts of a memory do.

  A row's own text is its encoder's input followed by its output. The drafter
  looks for the place of the memory before which the same tokens stand, as many
  as can be, and proposes the tokens that follow that place. If fewer than
  `min_match` tokens agree, it proposes nothing: put it in front of a model by
  `with_fallback`. What was translated before then costs a call for gamma + 1
  tokens, and no call of the model.

  Args:
    memory: from `remember`; `Engine(memory=...)` makes one of a file.
    min_match: tokens that must agree. A source of so many tokens that was seen
      agrees from the output's first token on; a lower number also proposes
      after phrases that are known.

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
    # What a decoder behind an encoder is given to begin with is in no text: the
    # start token, and tokens behind which is padding.
    places = jnp.arange(1, prompt.shape[1] + 1)
    return inputs, jnp.max(jnp.where(prompt != 0, places, 1), axis=1)

  def propose(memory: Memory, state, context: Context):
    inputs, given = state
    ends = ends_of(inputs, context)
    recent = jax.vmap(functools.partial(_recent, memory.max_match))(
      inputs, ends, context.tokens, context.length, jnp.where(ends, given, 0)
    )
    place, match = jax.vmap(functools.partial(_longest, memory))(recent)
    steps = place[:, None] + jnp.arange(context.gamma)
    tokens = jnp.take(memory.tokens, steps, mode='clip')
    room = jnp.minimum(memory.tokens.size - place, context.gamma)
    length = jnp.where(match >= min_match, room, 0)
    return Draft(tokens, None, length.astype(jnp.int32)), state

  name = f'translation_memory({min_match})'
  return Drafter(init, propose, lambda state, _: state, name, memory)


def _recent(size, inputs, end, tokens, length, given):
  """The last tokens int32[size] of a row, the nearest first; -1 before it.

  The row has inputs int32[E] that end at int32[], and tokens int32[N] of length
  int32[], of which the first int32[] were given.
  """
  back = jnp.arange(size)
  said = length - 1 - back
  read = end - 1 - (back - (length - given))
  from_input = jnp.where(read >= 0, inputs[jnp.maximum(read, 0)], -1)
  return jnp.where(said >= given, tokens[jnp.maximum(said, 0)], from_input)


def _longest(memory: Memory, recent: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The place int32[] with the longest match, and how many tokens match.

  Of equal matches with `max_match` tokens the newest text's is taken.
  """
  size = memory.order.size

  def past(rank):
    """The tokens before a place, the nearest first."""
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

  # The first place that is sorted behind the row's own past.
  bracket = jnp.int32(0), jnp.int32(size)
  low, _ = lax.fori_loop(0, size.bit_length(), halve, bracket)
  ranks = jnp.clip(jnp.stack([low - 1, low]), 0, size - 1)
  agrees = jax.vmap(past)(ranks) == recent
  # Before the beginning of all texts nothing agrees.
  matches = jnp.sum(jnp.cumprod(agrees & (recent >= 0), axis=1), axis=1)
  best = jnp.argmax(matches)  # of equals the first: `low - 1` is the newer text
  return memory.order[ranks[best]], matches[best]
