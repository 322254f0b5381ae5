"""Two drafters as one: the second drafts where the first has no proposal.

For requests with constraints, an engine takes `only_token` as the first one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.small_model import as_drafter
from specdec_jax.models.model import Model
from specdec_jax.types import Draft
from specdec_jax.verify import draft_rows


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

  # The state has that of each drafter; int32[B], the number of committed tokens
  # at the last proposal; and bool[B], the rows whose last draft is by `first`.
  def init(params, *args):
    batch = args[0].shape[:1]
    states = first.init(params[0], *args), second.init(params[1], *args)
    return *states, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)

  def propose(params, state, context: Context):
    # The second drafter is not asked in every round, and a draft of the first
    # is not always the one that is verified.
    context = context.within(skips_rounds=True)
    draft, first_state = first.propose(params[0], state[0], context)
    has_draft = draft.length > 0
    other, second_state = base.ask_unless(
      jnp.all(has_draft | ~context.running),
      lambda second_state: second.propose(params[1], second_state, context),
      state[1],
    )
    state = first_state, second_state, context.length, has_draft
    return _choose(has_draft, draft, other), state

  def commit(state, length: jax.Array):
    # A drafter whose draft was not verified may have read it all the same. Its
    # state is then right only up to the last token before the round.
    first_state, second_state, last_length, by_first = state
    before = jnp.minimum(length, last_length + 1)
    first_state = first.commit(first_state, jnp.where(by_first, length, before))
    second_state = second.commit(
      second_state, jnp.where(by_first, before, length)
    )
    return first_state, second_state, last_length, by_first

  name = f'with_fallback({first.name}, {second.name})'
  made = Drafter(init, propose, commit, name, (first.params, second.params))
  return made._replace(
    reads_encoder=first.reads_encoder or second.reads_encoder,
    reads_features=first.reads_features or second.reads_features,
    made_for=(*first.made_for, *second.made_for),
  )


def _choose(has_draft: jax.Array, first: Draft, second: Draft) -> Draft:
  """Takes the rows of `first` where bool[B] is True, else of `second`."""
  drafts = first, second
  sizes = [draft.probs.shape[-1] for draft in drafts if draft.probs is not None]
  rows = None
  if sizes:
    left, right = (draft_rows(x, slice(None), sizes[0]) for x in drafts)
    rows = jnp.where(has_draft[:, None, None], left, right)
  tokens = jnp.where(has_draft[:, None], first.tokens, second.tokens)
  return Draft(tokens, rows, jnp.where(has_draft, first.length, second.length))


def only_token() -> Drafter:
  """Returns a drafter that proposes tokens for as long as only one may follow.

  The target accepts all of these tokens. An engine asks this drafter before one
  that does not follow token rules. Small models follow them by themselves, and
  also propose tokens where several may follow.
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
