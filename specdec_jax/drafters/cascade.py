"""A drafter accelerated by a cheaper drafter (Section 6 of the paper).

This is speculation inside the drafter: the cheaper drafter proposes, the model
verifies in one call, and rounds go on until the model has gamma tokens. These
have exactly the distribution of tokens that the model draws by itself. So
`Draft.probs` are the model's own distributions, and the output keeps the
target's distribution whatever the cheaper drafter does. A cascade is worth its
costs if drafting itself takes time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax import probs
from specdec_jax.checks.fields import check_number, unexpected
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.small_model import (
  as_drafter,
  catch_up,
  network_of,
  read_last,
  small_model,
)
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.model import Model
from specdec_jax.request import Drafting
from specdec_jax.types import Draft
from specdec_jax.verify import verify_batch, verify_greedy_batch


def cascade(
  model: Model | LanguageModel, drafter: Drafter | Model, gamma: int = 2
) -> Drafter:
  """Returns a drafter that draws from `model`, helped by `drafter`.

  Its parameters and its state are pairs (the model's, the cheaper drafter's).
  The cheaper drafter commits tokens that the target may reject later. Its next
  `commit` then has fewer tokens, as `Request.catches_up` announces.

  Args:
    model: the model that the draft is sampled from.
    drafter: the cheaper drafter; `small_model` makes one of a model.
    gamma: proposals of the cheaper drafter per round.

  Raises:
    ValueError: gamma is below 1, or `drafter` reads the target's features or
      proposes a tree.

  Examples:
    >>> drafter = sd.cascade(draft, sd.prompt_lookup(), gamma=2)
    >>> drafter.name
    'cascade(prompt_lookup(4, 1), 2)'
    >>> sd.Engine(target, drafter).has_drafter
    True
  """
  check_number('gamma of a cascade', gamma, 1)
  strong, drafter = small_model(model), as_drafter(drafter)
  base.check_chain(drafter, 'cascade')
  if drafter.reads_features:
    expected = 'a drafter that does not read features of the target'
    advice = 'Give it to the engine alone or in with_fallback.'
    raise unexpected('drafter of a cascade', expected, drafter.name, advice)
  network = network_of(model)

  def init(params, inputs, max_length, prompt, encoded):
    # The last round of a draft may read past its end.
    args = inputs, max_length + gamma, prompt, encoded
    return strong.init(params[0], *args), drafter.init(params[1], *args)

  def propose(params, state, context: Context):
    size, tokens, length = context.gamma, context.tokens, context.length
    goal = jnp.where(context.running, size, 0)
    cache, cheaper = state
    if context.request.catches_up:
      cache = catch_up(network, params[0], cache, tokens, length)
    rows = None
    if not context.request.greedy:
      shape = length.size, size + gamma + 1, network.vocab_size
      rows = jnp.zeros(shape, jnp.float32)
    tokens = jnp.pad(tokens, ((0, 0), (0, gamma)))
    done = jnp.zeros_like(goal)
    one_round = functools.partial(
      _one_round, network, drafter, gamma, params, context, goal
    )
    _, tokens, rows, done, cache, cheaper = lax.while_loop(
      lambda carry: jnp.any(carry[3] < goal),
      one_round,
      (jnp.int32(0), tokens, rows, done, cache, cheaper),
    )
    index = length[:, None] + jnp.arange(size)
    tokens = jnp.take_along_axis(tokens, index, axis=1)
    draft = Draft(tokens, None if rows is None else rows[:, :size], goal)
    # Behind the draft's last token but one the cache holds rejected proposals.
    return draft, (network.rewind(cache, length + done - 1), cheaper)

  def commit(state, length: jax.Array):
    return strong.commit(state[0], length), drafter.commit(state[1], length)

  name = f'cascade({drafter.name}, {gamma})'
  made = Drafter(init, propose, commit, name, (strong.params, drafter.params))
  reads_encoder = strong.reads_encoder or drafter.reads_encoder
  return made._replace(reads_encoder=reads_encoder)


def _one_round(
  network: LanguageModel, drafter: Drafter, gamma, params, context, goal, carry
):
  """Runs one round of the model and its cheaper drafter, inside of a draft.

  Args:
    network: the model's network.
    drafter: the cheaper drafter.
    gamma: static, g, the most proposals of the cheaper drafter.
    params: the parameters of the model and of the cheaper drafter.
    context: the context of the whole draft.
    goal: int32[B], number of tokens that the whole draft will have.
    carry: the number of rounds so far, int32[]; the committed tokens, followed
      by those of the draft, int32[B, N]; the distributions of the draft's
      tokens, float32[B, G + g + 1, V], None when greedy; the number of the
      draft's tokens so far, int32[B]; the model's cache; and the state of the
      cheaper drafter.

  Returns:
    The carry after the round.
  """
  number, tokens, rows, done, cache, cheaper = carry
  length = context.length + done
  # The prefix of the context ends before the draft's tokens, so it is left out,
  # and drafts follow no token rules.
  keys = jax.vmap(probs.draft_key, in_axes=(0, None))(context.keys, number)
  inner = context.within(drafting=Drafting(gamma), skips_rounds=True)
  inner = dataclasses.replace(
    inner, tokens=tokens, length=length, keys=keys, prefix=None, budget=None
  )
  draft, cheaper = drafter.propose(params[1], cheaper, inner)
  left = jnp.maximum(goal - done - 1, 0)
  draft = dataclasses.replace(draft, length=jnp.minimum(draft.length, left))

  # Tokens past `count` are overwritten or cut off later.
  write = jax.vmap(lax.dynamic_update_slice)
  tokens = write(tokens, draft.tokens, (length,))
  logits, cache = read_last(network, params[0], cache, tokens, length, gamma)
  logits = base.forbid_early_stops(logits, inner)
  if context.request.greedy:
    verdict = verify_greedy_batch(draft, probs.greedy_token(logits))
  else:
    laws = probs.standardise_batch(logits, context.request.sampling)
    verdict = verify_batch(draft, laws, inner.keys, None)
    rows = write(rows, laws, (done, jnp.zeros_like(done)))
  accepted = verdict.num_accepted
  tokens = write(tokens, verdict.next_token[:, None], (length + accepted,))
  count = jnp.where(done < goal, accepted + 1, 0)
  cheaper = drafter.commit(cheaper, length + count)
  return number + 1, tokens, rows, done + count, cache, cheaper
