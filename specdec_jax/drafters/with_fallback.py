"""Two drafters as one: the first if it has a proposal, else its fallback."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter, DrafterState
from specdec_jax.drafters.small_model import as_drafter
from specdec_jax.models.model import Model
from specdec_jax.types import Draft
from specdec_jax.verify import draft_rows


@struct.dataclass
class FallbackState:
  """The state of a `with_fallback` drafter.

  Attributes:
    first: the first drafter's state.
    second: the second drafter's state.
    length: int32[B], committed tokens when the drafters were last asked.
    by_first: bool[B], rows whose last draft came from the first drafter.
  """

  first: DrafterState
  second: DrafterState
  length: jax.Array
  by_first: jax.Array


def with_fallback(first: Drafter, second: Drafter | Model) -> Drafter:
  """Returns a drafter that asks `second` only where `first` proposes nothing.

  If every unfinished row of a batch has a draft from the first drafter, such as
  `prompt_lookup`, the second is not run at all. The parameters are the pair
  (the first drafter's, the second's).

  Args:
    first: the drafter that is always asked.
    second: its fallback; `small_model` makes a drafter of a model.

  Raises:
    ValueError: one of them proposes a tree.

  Examples:
    >>> drafter = sd.with_fallback(sd.prompt_lookup(), draft)
    >>> drafter.name
    'with_fallback(prompt_lookup(4, 1), small_model)'
    >>> sd.Engine(target, drafter).has_drafter
    True
  """
  second = as_drafter(second)
  for drafter in (first, second):
    base.check_chain(drafter, 'with_fallback')

  def init(params, *args):
    batch = args[0].shape[:1]
    return FallbackState(
      first=first.init(params[0], *args),
      second=second.init(params[1], *args),
      length=jnp.zeros(batch, jnp.int32),
      by_first=jnp.zeros(batch, bool),
    )

  def propose(params, state: FallbackState, context: Context):
    # The second drafter is not asked every round, and the first one's draft is
    # not always the one that is verified.
    context = context.within(skips_rounds=True)
    draft, first_state = first.propose(params[0], state.first, context)
    has_draft = draft.length > 0
    other, second_state = base.ask_unless(
      jnp.all(has_draft | ~context.running),
      lambda second_state: second.propose(params[1], second_state, context),
      state.second,
    )
    length = context.length
    state = FallbackState(first_state, second_state, length, has_draft)
    return _choose(has_draft, draft, other), state

  def commit(state: FallbackState, length: jax.Array):
    # If a row's draft came from the other drafter, this drafter may have read a
    # draft of its own. Its state is then right only up to the token that was
    # the last one before the round.
    known = jnp.minimum(length, state.length + 1)
    of_first = jnp.where(state.by_first, length, known)
    of_second = jnp.where(state.by_first, known, length)
    return dataclasses.replace(
      state,
      first=first.commit(state.first, of_first),
      second=second.commit(state.second, of_second),
    )

  name = f'with_fallback({first.name}, {second.name})'
  return Drafter(
    init,
    propose,
    commit,
    name,
    params=(first.params, second.params),
    reads_encoder=first.reads_encoder or second.reads_encoder,
    reads_features=first.reads_features or second.reads_features,
    made_for=(*first.made_for, *second.made_for),
  )


def _choose(where: jax.Array, one: Draft, other: Draft) -> Draft:
  """Rows of `one` where bool[B] is True, else of `other`."""
  known = [d.probs for d in (one, other) if d.probs is not None]
  rows = None
  if known:
    size = known[0].shape[-1]
    left, right = (draft_rows(d, slice(None), size) for d in (one, other))
    rows = jnp.where(where[:, None, None], left, right)
  return Draft(
    jnp.where(where[:, None], one.tokens, other.tokens),
    rows,
    jnp.where(where, one.length, other.length),
  )
