"""Copying as a drafter: the text goes on as it did where it last read so.

The longest match of the last tokens is looked for in the encoder's input and
in what has been committed (a decoder-only model's prompt is part of it).
Section 3.6 of the paper proposes it for outputs that repeat their input.
"""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.types import Draft


def prompt_lookup(max_match: int = 4, min_match: int = 1) -> Drafter:
  """Returns a deterministic drafter that copies; its parameters are ().

  Of all places whose last tokens are the row's own last tokens the one with
  the longest match is continued. Among equals a place in the input goes before
  one in the output: a text that is made of another seldom repeats itself. Of
  places in the input the first is taken, where a text says what it is about
  and a summary takes its words from; of those in the output the last, since
  what was said just now is what goes on. (Others' prompt lookup
  searches the decoder's ids only and takes the first place.) A match of one
  token is continued only where all its places go on alike: a token that was
  followed by different ones says next to nothing, and a guess keeps
  `with_fallback` from asking its second drafter.

  A copy of the output that reaches its end goes on with what it has copied, as
  a repeating text does; one of the input proposes no more than is left of it.
  Without a match nothing is proposed. An end that is copied with the rest, such
  as that of an input, is accepted without saving a call.

  Args:
    max_match: tokens that are compared at most; matches of more are equal.
    min_match: tokens that must match. 1 finds most to copy; of 2 or more fewer
      proposals are made, and more of them accepted.

  Raises:
    ValueError: not 1 <= min_match <= max_match.
  """
  if not 1 <= min_match <= max_match:
    raise ValueError(
      'prompt_lookup needs 1 <= min_match <= max_match, got'
      f' min_match = {min_match}, max_match = {max_match}.'
    )

  def init(params, inputs, max_length, prompt):
    del params, max_length, prompt  # the prompt is in the context
    return inputs

  def propose(params, inputs, context: Context):
    del params
    one = functools.partial(_propose, max_match, min_match, context.gamma)
    tokens, length = jax.vmap(one)(inputs, context.tokens, context.length)
    return Draft(tokens, None, length), inputs

  name = f'prompt_lookup({max_match}, {min_match})'
  return Drafter(init, propose, lambda inputs, _: inputs, name)


def _propose(max_match, min_match, gamma, inputs, tokens, length):
  """int32[gamma] and int32[] of one row: inputs [E], tokens [N], length []."""
  back = length - 1 - jnp.arange(max_match)
  recent = jnp.where(back >= 0, tokens[jnp.maximum(back, 0)], -1)
  end = jnp.max(jnp.where(inputs != 0, jnp.arange(1, inputs.size + 1), 0))
  input_matches = _matches(inputs, end, recent)
  input_place = jnp.argmax(input_matches)  # the first among equals
  input_match = input_matches[input_place]
  matches = _matches(tokens, length, recent)
  place = tokens.size - 1 - jnp.argmax(matches[::-1])  # the last
  match = matches[place]

  steps = jnp.arange(gamma)
  from_input = inputs.at[input_place + steps].get(mode='clip')
  # An earlier place than the end, so the period is 1 at least.
  from_output = tokens[place + steps % jnp.maximum(length - place, 1)]
  use_input = input_match >= match
  proposed = jnp.where(use_input, from_input, from_output)
  room = jnp.where(use_input, jnp.minimum(end - input_place, gamma), gamma)
  longest = jnp.maximum(input_match, match)
  others = jnp.any((input_matches == longest) & (inputs != proposed[0]))
  others |= jnp.any((matches == longest) & (tokens != proposed[0]))
  found = (longest >= min_match) & ((longest > 1) | ~others)
  return proposed, jnp.where(found, room, 0).astype(jnp.int32)


def _matches(text: jax.Array, end: jax.Array, recent: jax.Array) -> jax.Array:
  """How many of `recent` stand in front of each place, int32[N].

  Args:
    text: int32[N].
    end: int32[], the tokens of it that mean anything; 0 from there on.
    recent: int32[M], the nearest token first; -1 where there is none.
  """
  place = jnp.arange(text.size)
  running = place < end
  matched = jnp.zeros(text.size, jnp.int32)
  for back in range(recent.size):
    # Of the token `back + 1` places earlier.
    same = jnp.roll(text, back + 1) == recent[back]
    running = running & same & (place > back)
    matched = matched + running
  return matched
