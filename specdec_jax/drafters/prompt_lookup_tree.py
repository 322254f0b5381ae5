"""Several copies: what followed the same words at different places."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.checks.arguments import check_number
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.prompt_lookup import (
  check_matches,
  copy_from,
  ends_of,
  match_lengths,
)
from specdec_jax.tree_shape import branching
from specdec_jax.types import Draft


def prompt_lookup_tree(
  copies: int = 3, depth: int = 4, max_match: int = 4, min_match: int = 1
) -> Drafter:
  """Returns a deterministic drafter that proposes several copies at once.

  The best place is that of `prompt_lookup`, the next is the best among those
  that are followed by another token, and so on: so words with several
  continuations, such as those that match one token only, are of use too. Where
  there are fewer places, the first stands for those that are missing. Without a
  match nothing is proposed.

  Args:
    copies: places that are copied from, each a chain of its own.
    depth: tokens of each copy; gamma, if it is less.
    max_match: as of `prompt_lookup`.
    min_match: as of `prompt_lookup`.

  Raises:
    ValueError: a number is below 1, or `min_match` above `max_match`.
  """
  check_number('copies', copies, 1)
  check_number('depth of prompt_lookup_tree', depth, 1)
  check_matches('prompt_lookup_tree', max_match, min_match)
  shape = branching(copies, *[1] * (depth - 1))

  def init(params, inputs, max_length, prompt):
    del params, max_length, prompt  # the prompt is in the context
    return inputs

  def propose(params, inputs, context: Context):
    del params
    levels = min(context.gamma, depth)
    one = functools.partial(_propose, copies, max_match, min_match, levels)
    tokens, length = jax.vmap(one)(
      inputs, ends_of(inputs, context), context.tokens, context.length
    )
    return Draft(tokens, None, length, shape.cut(levels).parents), inputs

  name = f'prompt_lookup_tree({copies}, {depth}, {max_match}, {min_match})'
  return Drafter(init, propose, lambda inputs, _: inputs, name, tree=shape)


def _propose(copies, max_match, min_match, levels, inputs, end, tokens, length):
  """Tokens int32[levels * copies] and length int32[] of one row's draft."""
  in_input, in_output = match_lengths(inputs, end, tokens, length, max_match)
  width = inputs.size + tokens.size
  # The first place in the input, else the last in the output.
  order = jnp.concatenate(
    [width + jnp.arange(inputs.size)[::-1], jnp.arange(tokens.size)]
  )
  match = jnp.concatenate([in_input, in_output])
  score = jnp.where(match >= min_match, match * 2 * width + order, -1)
  follows = jnp.concatenate([inputs, tokens])
  found: list[jax.Array] = []
  room: list[jax.Array] = []
  for _ in range(copies):
    best = jnp.argmax(score)
    is_there = score[best] >= 0
    copied, length_of = copy_from(
      inputs,
      tokens,
      end,
      length,
      best < inputs.size,
      jnp.where(best < inputs.size, best, best - inputs.size),
      levels,
    )
    first = found[0] if found else copied
    found.append(jnp.where(is_there, copied, first))
    room.append(jnp.where(is_there, length_of, 0))
    score = jnp.where(follows == follows[best], -1, score)
  # Level by level.
  drafted = jnp.stack(found, axis=1).reshape(-1)
  return drafted, jnp.max(jnp.stack(room)).astype(jnp.int32)
