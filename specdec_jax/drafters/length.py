"""A draft whose length is decided while it is made, in one device loop.

How sure the drafter is, the top probability of its distribution, says how
likely its next proposal is accepted (`acceptance_of`). A proposal is made only
while it is worth its costs, and the drafter is asked for another one only while
that one is expected to be worth its own. Each row stops for itself; the loop
ends once all have stopped.

**Nothing is lost.** Whether x_i is proposed depends on x_1..x_{i-1} and the
distributions up to i; whether the drafter is asked again depends on x_i too,
which stays in the draft. This is the rule of `Draft`.
"""

import dataclasses
from collections.abc import Callable
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

# Without a calibration, guesses in units of a call of the target: a call of the
# drafter costs .2, one token more in the target's call .1, and the time of a
# call is worth 1.3 tokens. A draft has at most `MOST` proposals.
MOST = 5
_WORTH, _WORTH_ASKING = 1.3 * 0.1, 1.3 * (0.2 + 0.1)
_EXPECTED = 0.7  # acceptance probability of a proposal that is not made yet
_STEPS = 10  # of confidence

# (cache, the tokens int32[B] to read) -> logits float[B, V] of what follows
# them, the cache
Read = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@struct.dataclass
class _Progress:
  """The carry of the loop.

  Attributes:
    index: int32[], proposals that the drafter was asked for.
    asks: bool[B], rows that ask for another one.
    survival: float32[B], probability that all proposals so far are accepted.
    cache: the drafter's.
    tokens: int32[B, G].
    rows: float32[B, G, V]; None when greedy.
    length: int32[B], proposals that were made.
    prefix: of the next one, see `Context`.
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
  worth: Any = (_WORTH,) * MOST, worth_asking: Any = (_WORTH_ASKING,) * MOST
) -> LengthRule:
  """The rule of some costs, by default those above; see `LengthRule`."""
  return LengthRule(
    np.asarray(worth, np.float32), np.asarray(worth_asking, np.float32)
  )


def draft(
  logits: jax.Array, cache: Any, context: Context, read: Read
) -> tuple[Draft, Any]:
  """Proposes tokens for as long as the draft rule says.

  Args:
    logits: float[B, V] of the first proposal.
    cache: of the drafter, which has read all committed tokens.
    context: with a `draft_rule` and a `budget`.
    read: reads a proposal; returns the logits of the next one.

  Returns:
    The draft; the cache, which has read all of it but perhaps the last token.
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
    own = None if uniforms is None else uniforms[index]
    token, row = base.draw(logits, context, own)
    rows = now.rows
    if rows is not None:
      rows = lax.dynamic_update_slice_in_dim(rows, row[:, None], index, 1)
    length = now.length + makes
    # Nothing follows a stop id.
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
  """The acceptance probability, float32[B], by the drafter's top probability.

  The root of it: drafters are right more often than they are sure. In steps of
  a tenth, as it is known no better.
  """
  step = jnp.minimum(jnp.floor(confidence * _STEPS), _STEPS - 1)
  return jnp.sqrt((step + 0.5) / _STEPS)
