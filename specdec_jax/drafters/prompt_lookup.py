"""A drafter that copies the tokens that followed the same tokens before.

It looks for the longest match of the last tokens in the encoder's input and in
the committed tokens (which include a decoder-only model's prompt). Section 3.6
of the paper proposes it for outputs that repeat their input.
"""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.checks.fields import unexpected
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.types import Draft


def prompt_lookup(max_match: int = 4, min_match: int = 1) -> Drafter:
  """Returns a deterministic drafter that copies; its parameters are ().

  It compares the row's last tokens with the tokens before every position, and
  copies from the position with the longest match. If matches are equally long,
  a position in the input beats one in the output, because a text that is made
  from another text seldom repeats itself. Among positions in the input the
  first one wins, because summaries take most words from the beginning of a
  text; among positions in the output the last one wins, because a text
  continues its latest subject. (Other libraries' prompt lookup searches only
  the decoder's ids and takes the first match.) A match of one token counts only
  if the same token follows all its occurrences. Otherwise it is a weak guess,
  which would keep `with_fallback` from asking its second drafter.

  A copy from the output that reaches the output's end goes on with what it has
  copied so far; a copy from the input ends with the input. Without a match
  there is no proposal. To copy an end of sequence saves no call, even if it is
  accepted.

  Args:
    max_match: the most tokens that are compared; longer matches count as equal.
    min_match: tokens that must match. 1 copies most often; 2 or more makes
      fewer proposals, a larger part of which is accepted.

  Raises:
    ValueError: not 1 <= min_match <= max_match.

  Examples:
    >>> sd.Engine(target, sd.prompt_lookup(max_match=3))
    Engine(target=..., draft='prompt_lookup(3, 1)', gamma=4, ...)
  """
  if not 1 <= min_match <= max_match:
    expected = '1 <= min_match <= max_match'
    raise unexpected('prompt_lookup', expected, (min_match, max_match))

  def propose(params, inputs, context: Context):
    of_row = functools.partial(_propose, max_match, min_match, context.gamma)
    tokens, length = jax.vmap(of_row)(
      inputs, ends_of(inputs, context), context.tokens, context.length
    )
    return Draft(tokens, None, length), inputs

  name = f'prompt_lookup({max_match}, {min_match})'
  # The state has only the encoder's inputs. The decoder's prompt is among the
  # tokens of the context.
  return Drafter(lambda params, inputs, *_: inputs, propose, name=name)


def ends_of(inputs: jax.Array, context: Context) -> jax.Array:
  """Returns the length of each row's input without padding, int32[B]."""
  places = jnp.arange(1, inputs.shape[1] + 1)
  return jnp.max(jnp.where(inputs != context.request.pad_id, places, 0), axis=1)


def _propose(max_match, min_match, gamma, inputs, end, tokens, length):
  """Drafts for one row.

  Args:
    max_match, min_match: static, as for `prompt_lookup`.
    gamma: static, the most proposals.
    inputs: int32[E], the row's input.
    end: int32[], length of the input.
    tokens: int32[N], committed tokens.
    length: int32[], number of committed tokens.

  Returns:
    Tokens int32[gamma] and length int32[] of the draft.
  """
  back = length - 1 - jnp.arange(max_match)
  recent = jnp.where(back >= 0, tokens[jnp.maximum(back, 0)], -1)
  input_matches = _matches(inputs, end, recent)
  matches = _matches(tokens, length, recent)
  input_place = jnp.argmax(input_matches)  # the first of equally long matches
  input_match = input_matches[input_place]
  # The last of equally long matches wins.
  place = tokens.size - 1 - jnp.argmax(matches[::-1])
  match = matches[place]

  use_input = input_match >= match
  place = jnp.where(use_input, input_place, place)
  steps = jnp.arange(gamma)
  from_input = inputs.at[place + steps].get(mode='clip')
  # A copied position is before the end, so the period is at least 1.
  period = jnp.maximum(length - place, 1)
  from_output = tokens.at[place + steps % period].get(mode='clip')
  left = jnp.where(use_input, jnp.minimum(end - place, gamma), gamma)
  proposed = jnp.where(use_input, from_input, from_output)
  longest = jnp.maximum(input_match, match)
  others = jnp.any((input_matches == longest) & (inputs != proposed[0]))
  others |= jnp.any((matches == longest) & (tokens != proposed[0]))
  matched = (longest >= min_match) & ((longest > 1) | ~others)
  return proposed, jnp.where(matched, left, 0).astype(jnp.int32)


def _matches(text: jax.Array, end: jax.Array, recent: jax.Array) -> jax.Array:
  """Counts the recent tokens that match those before each position, int32[N].

  Args:
    text: int32[N], the text with the positions.
    end: int32[], number of tokens in `text`; positions from there on get 0.
    recent: int32[M], the row's last tokens, the last one first, padded with -1.
  """
  place = jnp.arange(text.size)
  running = place < end
  matched = jnp.zeros(text.size, jnp.int32)
  for back in range(recent.size):
    # The token `back + 1` positions earlier is compared.
    same = jnp.roll(text, back + 1) == recent[back]
    running = running & same & (place > back)
    matched = matched + running
  return matched
