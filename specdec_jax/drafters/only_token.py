"""A drafter that proposes tokens where a constraint allows only one."""

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.types import Draft


def only_token() -> Drafter:
  """Returns a drafter that proposes tokens for as long as only one may follow.

  The target accepts all of them. An engine asks it before drafters that do not
  follow token rules. Small models follow them, and guess past the next choice.
  """

  def propose(params, state, context: Context):
    del params
    automata, prefix = context.request.automata, context.prefix
    assert automata is not None and prefix is not None
    only_token = jax.vmap(automata.only_token)
    next_state = jax.vmap(automata.next_state)

    def one_more(carry, _):
      place, length, goes_on = carry
      is_only, token = only_token(place)
      goes_on &= is_only
      return (next_state(place, token), length + goes_on, goes_on), token

    assert prefix.state is not None
    first = prefix.state, jnp.zeros_like(prefix.state), context.running
    (_, length, _), tokens = lax.scan(one_more, first, length=context.gamma)
    return Draft(tokens.T, None, length), state

  return Drafter(propose=propose, name='only_token')
