"""What a constraint leaves no choice about: a draft that costs nothing."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.types import Draft


def only_token() -> Drafter:
  """Returns a drafter that proposes tokens for as long as only one may follow.

  Such proposals are accepted. It stands in front of drafters that do not follow
  rules; small models do, and guess further than the next choice.
  """

  def propose(params, state, context: Context):
    del params
    automata: Any = context.request.ruling and context.request.ruling.automata
    assert automata is not None and context.prefix is not None
    look = jax.vmap(automata.only_token)
    step = jax.vmap(automata.next_state)

    def one(carry, _):
      at, length, is_run = carry
      is_only, token = look(at)
      is_run &= is_only
      return (step(at, token), length + is_run, is_run), token

    at: Any = context.prefix.state
    first = at, jnp.zeros_like(at), context.running
    (_, length, _), tokens = lax.scan(one, first, length=context.gamma)
    return Draft(tokens.T, None, length), state

  return Drafter(
    lambda params, inputs, *_: (),
    propose,
    lambda state, length: state,
    'only_token',
  )
