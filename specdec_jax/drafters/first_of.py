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
  is_finished,
)
from specdec_jax.types import Draft


@struct.dataclass
class FirstOfState:
  """What `first_of` keeps.

  Attributes:
    first: the first drafter's own.
    second: the second one's.
    length: int32[B], committed tokens when they were asked.
    by_first: bool[B], whose draft was the first one's.
    finished: bool[B], rows that need no draft any more.
  """

  first: DrafterState
  second: DrafterState
  length: jax.Array
  by_first: jax.Array
  finished: jax.Array


def first_of(first: Drafter, second: Drafter) -> Drafter:
  """Returns a drafter that asks `second` only where `first` has nothing.

  Where every unfinished row of a batch has a draft of the first, such as
  `copy`, the second is not run at all. Its parameters are the pair (of the
  first, of the second).
  """

  def init(params, inputs, max_length, prompt):
    batch = inputs.shape[:1]
    return FirstOfState(
      first=first.init(params[0], inputs, max_length, prompt),
      second=second.init(params[1], inputs, max_length, prompt),
      length=jnp.zeros(batch, jnp.int32),
      by_first=jnp.zeros(batch, bool),
      finished=jnp.zeros(batch, bool),
    )

  def propose(params, state: FirstOfState, context: Context):
    # The second is not asked every round, and of the first's the draft is not
    # always the one that is verified.
    context = dataclasses.replace(context, skips_rounds=True)
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
    state = FirstOfState(
      first=first_state,
      second=second_state,
      length=context.length,
      by_first=has_draft,
      finished=state.finished,
    )
    return _choose(has_draft, draft, other), state

  def commit(state: FirstOfState, length: jax.Array):
    # Where the draft was the other's, a drafter may have read one of its own
    # instead: it is right up to the token that was the last before.
    known = jnp.minimum(length, state.length + 1)
    return dataclasses.replace(
      state,
      first=first.commit(state.first, jnp.where(state.by_first, length, known)),
      second=second.commit(
        state.second, jnp.where(state.by_first, known, length)
      ),
      finished=is_finished(length),
    )

  name = f'first_of({first.name}, {second.name})'
  return Drafter(init, propose, commit, name)


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
