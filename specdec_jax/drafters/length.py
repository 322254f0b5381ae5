"""Drafts whose length is decided while they are made, in one device loop.

The top probability of the drafter's distribution tells how likely its next
proposal is accepted (`acceptance_of`). The drafter makes a proposal only if it
is worth its costs, and is asked for the next one only if that one is expected
to be worth its own. Each row stops by itself; the loop ends once all rows have
stopped.

**The output is lossless.** Whether x_i is proposed depends on x_1..x_{i-1} and
the distributions up to i. Whether the drafter is asked again depends on x_i
too, which stays in the draft. These are the conditions of `Draft`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context
from specdec_jax.rules.tokens import Prefix
from specdec_jax.types import Draft, LengthRule

# Guesses without a calibration, in units of a call of the target: a call of the
# drafter costs .2, one more token in the target's call .1, and the time of a
# call is worth 1.3 tokens. A draft has at most `MOST` proposals.
MOST = 5
_WORTH, _WORTH_ASKING = 1.3 * 0.1, 1.3 * (0.2 + 0.1)
_EXPECTED = 0.7  # acceptance probability of a proposal that is still to be made
_STEPS = 10  # confidence is rounded down to one of so many steps

# (cache, tokens int32[B]) -> (logits float[B, V] of the next tokens, cache)
Read = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@struct.dataclass
class _Progress:
  """The carry of the loop.

  Attributes:
    index: int32[], number of proposals that the drafter was asked for.
    asks: bool[B], rows that ask for another proposal.
    survival: float32[B], probability that all proposals so far are accepted.
    cache: the drafter's cache.
    tokens: int32[B, G], the proposals.
    rows: float32[B, G, V], their distributions; None when greedy.
    length: int32[B], number of proposals.
    prefix: the tokens before the next proposal, see `Context`.
  """

  index: jax.Array
  asks: jax.Array
  survival: jax.Array
  cache: Any
  tokens: jax.Array
  rows: jax.Array | None
  length: jax.Array
  prefix: Prefix | None


def plain_rule(
  worth: Sequence[float] = (_WORTH,) * MOST,
  worth_asking: Sequence[float] = (_WORTH_ASKING,) * MOST,
) -> LengthRule:
  """Returns a `LengthRule` of thresholds, by default of guessed costs."""
  return LengthRule(
    np.asarray(worth, np.float32), np.asarray(worth_asking, np.float32)
  )


def draft(
  logits: jax.Array, cache: Any, context: Context, read: Read
) -> tuple[Draft, Any]:
  """Proposes tokens until the request's `draft_rule` ends each row's draft.

  Args:
    logits: float[B, V], of the first proposal.
    cache: the drafter's cache, which holds all committed tokens.
    context: with a `draft_rule` and a `budget`.
    read: reads a proposal and returns the logits of the next one.

  Returns:
    The draft; and the cache, which may lack its last token.
  """
  rule, budget = context.request.drafting.draft_rule, context.budget
  assert rule is not None and budget is not None
  batch, vocab_size = logits.shape
  size = context.gamma
  uniforms = base.draft_uniforms(context)

  def propose(now: _Progress, logits: jax.Array) -> _Progress:
    index = now.index
    current = dataclasses.replace(context, prefix=now.prefix)
    logits = base.ruled(logits, current, index)
    survival = now.survival * acceptance_of(probs.top_prob(logits))
    makes = now.asks & (survival > rule.worth[index])
    uniform = None if uniforms is None else uniforms[index]
    token, row = base.draw(logits, context, uniform)
    rows = now.rows
    if rows is not None:
      rows = lax.dynamic_update_slice_in_dim(rows, row[:, None], index, 1)
    length = now.length + makes
    # A draft ends after a stop id.
    ended = jnp.any(token[:, None] == context.request.stop_ids, axis=1)
    expected = survival * _EXPECTED
    worth_asking = (
      expected > rule.worth_asking[jnp.minimum(index + 1, size - 1)]
    )
    return _Progress(
      index=index + 1,
      asks=makes & ~ended & (length < budget) & worth_asking,
      survival=survival,
      cache=now.cache,
      tokens=lax.dynamic_update_slice_in_dim(
        now.tokens, token[:, None], index, 1
      ),
      rows=rows,
      length=length,
      prefix=current.after(token),
    )

  def one_more(now: _Progress) -> _Progress:
    last = lax.dynamic_slice_in_dim(now.tokens, now.index - 1, 1, 1)[:, 0]
    logits, cache = read(now.cache, last)
    return propose(dataclasses.replace(now, cache=cache), logits)

  first = _Progress(
    index=jnp.int32(0),
    asks=budget > 0,
    survival=jnp.ones((batch,), jnp.float32),
    cache=cache,
    tokens=jnp.zeros((batch, size), jnp.int32),
    rows=None
    if context.request.greedy
    else jnp.zeros((batch, size, vocab_size), jnp.float32),
    length=jnp.zeros((batch,), jnp.int32),
    prefix=context.prefix,
  )
  last = lax.while_loop(
    lambda now: (now.index < size) & jnp.any(now.asks),
    one_more,
    propose(first, logits),
  )
  return Draft(last.tokens, last.rows, last.length), last.cache


def acceptance_of(confidence: jax.Array) -> jax.Array:
  """Estimates the acceptance probability, float32[B], from a top probability.

  The estimate is the root of the top probability, because drafters are right
  more often than they are sure. Confidence has steps of a tenth, because the
  estimate is rough.
  """
  step = jnp.minimum(jnp.floor(confidence * _STEPS), _STEPS - 1)
  return jnp.sqrt((step + 0.5) / _STEPS)
