"""A small model as a drafter that may sit rounds out.

`small_model` is asked every round and then owes its cache one token at most.
Inside other drafters a model is not asked every round, or what it proposed is
not what was committed: then it owes more. Its cache's own length says how much.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models.base import LanguageModel

_AT_ONCE = 8  # tokens a call that catches up


def late_model(model: LanguageModel) -> Drafter:
  """Returns `small_model` of `model`, which reads first what it missed."""
  drafter = small_model(model)

  def propose(params, cache, context: Context):
    cache = catch_up(model, params, cache, context.tokens, context.length)
    return drafter.propose(params, cache, context)

  return drafter._replace(propose=propose, name='late_model', every_round=False)


def catch_up(model: LanguageModel, params, cache, tokens, length):
  """Reads what a cache lacks of all committed tokens but the last.

  As many calls of the model as the row that lacks most needs, often none.

  Args:
    model: whose cache it is.
    params: its parameters.
    cache: what it holds is right; of at least `_AT_ONCE` slots.
    tokens: int32[B, N], committed tokens.
    length: int32[B], how many there are.

  Returns:
    The cache, of length `length` - 1 or more.
  """

  def lacks(cache):
    return jnp.any(cache.length < length - 1)

  def read(cache):
    # Near the end some are read again, with the same values, rather than
    # slots used behind the last committed token.
    start = jnp.minimum(cache.length, jnp.maximum(length - _AT_ONCE, 0))
    index = start[:, None] + jnp.arange(_AT_ONCE)
    fed = jnp.take_along_axis(tokens, index, axis=1)
    _, cache = model.extend(params, model.rewind(cache, start), fed)
    return model.rewind(cache, jnp.minimum(start + _AT_ONCE, length - 1))

  return lax.while_loop(lacks, read, cache)


def is_finished(length: jax.Array) -> jax.Array:
  """bool[B], of the `length` that a `commit` is told.

  A finished row shows 1. After a round a running one shows 2 at least.
  """
  return length <= 1
