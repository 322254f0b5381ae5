"""A drafter of random tokens, the baseline of all other drafters."""

import jax
import jax.numpy as jnp

from specdec_jax import probs
from specdec_jax.checks.fields import check_number
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.types import Draft


def uniform(vocab_size: int) -> Drafter:
  """Returns a drafter of uniformly random tokens; its parameters are ().

  By Section 3.6 of the paper it gains a little with every target. The
  acceptance probability is 1 / V at temperature 0, and sum(min(target_probs,
  1 / V)) above it.

  Args:
    vocab_size: V, the width of the target's logits.

  Raises:
    ValueError: `vocab_size` is below 1.

  Examples:
    >>> sd.Engine(target, sd.uniform(vocab_size=8000))
    Engine(target=..., draft='uniform', gamma=4, ...)
  """
  check_number('vocab_size', vocab_size, 1)

  def propose(params, state, context: Context):
    del params

    def draw(key, index):
      key = probs.draft_key(key, index)
      return jax.random.randint(key, (), 0, vocab_size, jnp.int32)

    over_gamma = jax.vmap(draw, in_axes=(None, 0))
    steps = jnp.arange(context.gamma)
    tokens = jax.vmap(over_gamma, in_axes=(0, None))(context.keys, steps)
    rows = None
    if not context.request.greedy:
      rows = jnp.full((*tokens.shape, vocab_size), 1 / vocab_size, jnp.float32)
    length = jnp.full(tokens.shape[:1], context.gamma, jnp.int32)
    return Draft(tokens, rows, length), state

  return Drafter(propose=propose, name='uniform')
