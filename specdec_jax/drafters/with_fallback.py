"""Two drafters as one: the second drafts where the first has no proposal."""

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
    length: int32[B], committed tokens at the last proposal.
    by_first: bool[B], rows whose last draft came from the first drafter.
  """

  first: DrafterState
  second: DrafterState
  length: jax.Array
  by_first: jax.Array


def with_fallback(first: Drafter, second: Drafter | Model) -> Drafter:
  """Returns a drafter that asks `second` only where `first` proposes nothing.

  If every unfinished row of a batch has a draft from the first drafter, such as
  `prompt_lookup`, the second does not run at all. The parameters are the pair
  (the first drafter's, the second's).

  Args:
    first: the drafter that is always asked.
    second: the other drafter; a model becomes a `small_model`.

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
    # The second drafter is not asked in every round, and the first drafter's
    # draft is not always the one that is verified.
    context = context.within(skips_rounds=True)
    draft, first_state = first.propose(params[0], state.first, context)
    has_draft = draft.length > 0
    other, second_state = base.ask_unless(
      jnp.all(has_draft | ~context.running),
      lambda second_state: second.propose(params[1], second_state, context),
      state.second,
    )
    state = FallbackState(first_state, second_state, context.length, has_draft)
    return _choose(has_draft, draft, other), state

  def commit(state: FallbackState, length: jax.Array):
    # A drafter whose draft was not verified may have read it all the same. Its
    # state is then right only up to the last token before the round.
    before = jnp.minimum(length, state.length + 1)
    of_first = jnp.where(state.by_first, length, before)
    of_second = jnp.where(state.by_first, before, length)
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


def _choose(has_draft: jax.Array, first: Draft, second: Draft) -> Draft:
  """Takes the rows of `first` where bool[B] is True, else of `second`."""
  sizes = [d.probs.shape[-1] for d in (first, second) if d.probs is not None]
  rows = None
  if sizes:
    left, right = (
      draft_rows(d, slice(None), sizes[0]) for d in (first, second)
    )
    rows = jnp.where(has_draft[:, None, None], left, right)
  return Draft(
    jnp.where(has_draft[:, None], first.tokens, second.tokens),
    rows,
    jnp.where(has_draft, first.length, second.length),
  )
