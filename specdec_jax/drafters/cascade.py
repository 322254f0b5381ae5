"""A drafter accelerated by a cheaper drafter (Section 6 of the paper).

This is speculation inside the drafter: the cheaper drafter proposes, the model
verifies in one call, and rounds go on until the model has gamma tokens. These
have exactly the distribution of tokens that the model draws alone. So
`Draft.probs` are the model's own distributions, and the output keeps the
target's distribution whatever the cheaper drafter does. A cascade is worth its
costs if drafting itself takes time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.checks.fields import check_number, unexpected
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter, DrafterState
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


@struct.dataclass
class _Rounds:
  """The carry of the inner rounds that make one draft.

  Attributes:
    number: int32[], rounds so far.
    tokens: int32[B, N], committed tokens, followed by those of the draft.
    rows: float32[B, G + g + 1, V], distributions of the draft's tokens; None
      when greedy.
    done: int32[B], tokens of the draft so far.
    cache: the model's cache.
    cheaper: the state of the cheaper drafter.
  """

  number: jax.Array
  tokens: jax.Array
  rows: jax.Array | None
  done: jax.Array
  cache: Any
  cheaper: DrafterState


def cascade(
  model: Model | LanguageModel, drafter: Drafter | Model, gamma: int = 2
) -> Drafter:
  """Returns a drafter that draws from `model`, helped by `drafter`.

  Its parameters and its state are pairs (the model's, the cheaper drafter's).
  The cheaper drafter commits tokens that the target may reject later. It then
  gets a `commit` of fewer tokens, for which `Request.catches_up` prepares it.

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
  parts = _Cascade(network_of(model), strong, drafter, gamma)
  return Drafter(
    parts.init,
    parts.propose,
    parts.commit,
    f'cascade({drafter.name}, {gamma})',
    (strong.params, drafter.params),
    reads_encoder=strong.reads_encoder or drafter.reads_encoder,
  )


@dataclasses.dataclass(frozen=True, eq=False)
class _Cascade:
  """The functions of the drafter.

  Attributes:
    network: the model's network.
    strong: the model as a drafter.
    cheaper: the cheaper drafter.
    gamma: its proposals per inner round.
  """

  network: LanguageModel
  strong: Drafter
  cheaper: Drafter
  gamma: int

  def init(self, params, inputs, max_length, prompt, encoded):
    # The last round of a draft may read past its end.
    args = inputs, max_length + self.gamma, prompt, encoded
    cache = self.strong.init(params[0], *args)
    return cache, self.cheaper.init(params[1], *args)

  def propose(self, params, state, context: Context):
    batch, size = context.length.size, context.gamma
    tokens, length = context.tokens, context.length
    goal = jnp.where(context.running, size, 0)
    cache, cheaper = state
    if context.request.catches_up:
      cache = catch_up(self.network, params[0], cache, tokens, length)
    rows = None
    if not context.request.greedy:
      width = size + self.gamma + 1
      rows = jnp.zeros((batch, width, self.network.vocab_size), jnp.float32)
    first = _Rounds(
      number=jnp.int32(0),
      tokens=jnp.pad(tokens, ((0, 0), (0, self.gamma))),
      rows=rows,
      done=jnp.zeros_like(goal),
      cache=cache,
      cheaper=cheaper,
    )
    last = lax.while_loop(
      lambda now: jnp.any(now.done < goal),
      lambda now: self._one_round(params, context, goal, now),
      first,
    )
    index = length[:, None] + jnp.arange(size)
    draft = Draft(
      jnp.take_along_axis(last.tokens, index, axis=1),
      None if last.rows is None else last.rows[:, :size],
      goal,
    )
    # Past the draft's last token but one the cache holds rejected guesses.
    cache = self.network.rewind(last.cache, length + last.done - 1)
    return draft, (cache, last.cheaper)

  def _one_round(
    self, params, context: Context, goal: jax.Array, now: _Rounds
  ) -> _Rounds:
    keys_of_rows = jax.vmap(probs.draft_key, in_axes=(0, None))
    length = context.length + now.done
    # The prefix ends where the round began, so it is left out, and no token
    # rules apply.
    inner = dataclasses.replace(
      context.within(drafting=Drafting(self.gamma), skips_rounds=True),
      tokens=now.tokens,
      length=length,
      keys=keys_of_rows(context.keys, now.number),
      prefix=None,
      budget=None,
    )
    draft, cheaper = self.cheaper.propose(params[1], now.cheaper, inner)
    left = jnp.maximum(goal - now.done - 1, 0)
    draft = dataclasses.replace(draft, length=jnp.minimum(draft.length, left))

    # Tokens past `count` are overwritten or cut off later.
    write = jax.vmap(lax.dynamic_update_slice)
    tokens = write(now.tokens, draft.tokens, (length,))
    logits, cache = read_last(
      self.network, params[0], now.cache, tokens, length, self.gamma
    )
    verdict, rows = _judge(draft, base.forbid_early_stops(logits, inner), inner)
    accepted = verdict.num_accepted
    tokens = write(tokens, verdict.next_token[:, None], (length + accepted,))
    count = jnp.where(now.done < goal, accepted + 1, 0)
    if now.rows is not None and rows is not None:
      rows = write(now.rows, rows, (now.done, jnp.zeros_like(now.done)))
    return _Rounds(
      number=now.number + 1,
      tokens=tokens,
      rows=rows,
      done=now.done + count,
      cache=cache,
      cheaper=self.cheaper.commit(cheaper, length + count),
    )

  def commit(self, state, length: jax.Array):
    cache, cheaper = state
    cache = self.strong.commit(cache, length)
    return cache, self.cheaper.commit(cheaper, length)


def _judge(draft: Draft, logits: jax.Array, context: Context):
  """Returns the verdict, and the distributions float32[B, g + 1, V] or None."""
  if context.request.greedy:
    return verify_greedy_batch(draft, probs.greedy_token(logits)), None
  rows = probs.standardise_batch(logits, context.request.sampling)
  return verify_batch(draft, rows, context.keys, None), rows
