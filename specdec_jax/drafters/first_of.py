"""Two drafters as one: the first where it has a proposal, else the second."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax.drafters.base import (
  Context,
  Drafter,
  DrafterState,
  check_may_wait,
)
from specdec_jax.drafters.late_model import is_finished
from specdec_jax.types import Draft


@struct.dataclass
class FirstOfState:
  """What `first_of` keeps.

  Attributes:
    first: the first drafter's own.
    second: the second one's.
    usable: int32[B], what the second may be told of as committed at most: a
      draft of another than its own did not go through it.
    finished: bool[B], rows that need no draft any more.
  """

  first: DrafterState
  second: DrafterState
  usable: jax.Array
  finished: jax.Array


def first_of(first: Drafter, second: Drafter) -> Drafter:
  """Returns a drafter that asks `second` only where `first` has nothing.

  Where every unfinished row of a batch has a draft of the first, such as
  `copy`, the second is not run at all. It must therefore be able to sit rounds
  out: a model by `late_model`, not by `small_model`. Its parameters are the
  pair (of the first, of the second).

  Raises:
    ValueError: the second one must be asked every round.
  """
  check_may_wait('first_of', second)

  def init(params, inputs, max_length, prompt):
    batch = inputs.shape[0]
    return FirstOfState(
      first=first.init(params[0], inputs, max_length, prompt),
      second=second.init(params[1], inputs, max_length, prompt),
      usable=jnp.zeros((batch,), jnp.int32),
      finished=jnp.zeros((batch,), bool),
    )

  def propose(params, state: FirstOfState, context: Context):
    draft, first_state = first.propose(params[0], state.first, context)
    has_draft = draft.length > 0
    shapes, _ = jax.eval_shape(second.propose, params[1], state.second, context)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def ask(carry):
      _, _, second_state = carry
      return True, *second.propose(params[1], second_state, context)

    # A loop of one turn or none, for the cache's sake: it is updated in place,
    # where a conditional would copy it.
    enough = jnp.all(has_draft | state.finished)
    _, other, second_state = lax.while_loop(
      lambda carry: ~carry[0], ask, (enough, nothing, state.second)
    )
    # Of a row with a draft of the first, the second has read its own instead;
    # up to the last committed token it is right.
    ahead = jnp.where(has_draft, 1, context.gamma + 1)
    state = FirstOfState(
      first=first_state,
      second=second_state,
      usable=context.length + ahead,
      finished=state.finished,
    )
    return _choose(has_draft, draft, other), state

  def commit(state: FirstOfState, length: jax.Array):
    return dataclasses.replace(
      state,
      first=first.commit(state.first, length),
      second=second.commit(state.second, jnp.minimum(length, state.usable)),
      finished=is_finished(length),
    )

  name = f'first_of({first.name}, {second.name})'
  return Drafter(init, propose, commit, name, first.every_round)


def _choose(where: jax.Array, one: Draft, other: Draft) -> Draft:
  """Rows of `one` where bool[B] is set, else of `other`."""
  known = [d.probs for d in (one, other) if d.probs is not None]
  rows = None
  if known:
    size = known[0].shape[-1]
    rows = jnp.where(
      where[:, None, None], _dense(one, size), _dense(other, size)
    )
  return Draft(
    jnp.where(where[:, None], one.tokens, other.tokens),
    rows,
    jnp.where(where, one.length, other.length),
  )


def _dense(draft: Draft, vocab_size: int) -> jax.Array:
  """float32[B, G, V]; one-hot of a deterministic drafter."""
  if draft.probs is not None:
    return draft.probs
  return jax.nn.one_hot(draft.tokens, vocab_size, dtype=jnp.float32)
