"""Any `LanguageModel` as a drafter, with caches of its own.

The model reads the inputs with its own encoder. A T5 without an encoder reads
the output of the target's encoder, which then runs once for both.

After a fully accepted draft the drafter's cache lacks its last proposal. Every
round therefore begins with one call over each row's last two committed tokens,
instead of a call of its own for that token; if no token is missing, the call
writes the same values again. Inside another drafter a cache may lack more
tokens. The cache's length tells how many, and they are read first.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax import probs
from specdec_jax.checks.fields import unexpected
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.models.model import Model
from specdec_jax.types import Draft, LengthRule

SMALL_MODEL = 'small_model'
# Pairs (size, limit): calls that catch up read `size` tokens as long as more
# than `limit` tokens are missing.
_CATCH_UP = (32, 8), (8, 0)


def small_model(model: Model | LanguageModel) -> Drafter:
  """Returns a drafter that samples its proposals from `model`, one by one.

  If `model` is a network instead of a `Model`, the drafter has no parameters:
  the caller gives them to `init` and `propose`.

  A round costs gamma calls of the model: one over two tokens, the others over
  one token. After rounds without a draft, inside another drafter or after a
  rest, a round costs a few calls more, see `catch_up_calls`. If drafts end
  early, a round costs a call for each proposal of the row with the most. The
  model may be of another kind than the target, as long as both have one
  vocabulary: a decoder-only drafter of an encoder-decoder target sees the
  decoder's tokens, and nothing of the input.

  Args:
    model: the model, as `load` gives it, or a network.

  Examples:
    >>> sd.Engine(target, sd.small_model(draft))  # as Engine(target, draft)
    Engine(target=..., draft=Model(...), gamma=4, ...)
  """
  network = network_of(model)

  def init(params, inputs, max_length, prompt, encoded):
    return read_prompt(
      network, params, inputs, max_length, prompt, encoded=encoded
    )[1]

  def propose(params, cache, context: Context):
    logits, cache = read_committed(network, params, cache, context)

    def read(cache, token):
      features, cache = network.extend(params, cache, token[:, None])
      return network.head(params, features)[:, 0], cache

    if context.request.drafting.adapts:
      return adaptive_draft(logits[:, 0], cache, context, read)
    uniforms = base.draft_uniforms(context)
    drawn = base.draw_next(logits[:, 0], context, 0, uniforms)

    def one_more(carry, index):
      cache, token, prefix = carry
      logits, cache = read(cache, token)
      now = dataclasses.replace(context, prefix=prefix)
      token, row = base.draw_next(logits, now, index, uniforms)
      return (cache, token, now.after(token)), (token, row)

    first = cache, drawn[0], context.after(drawn[0])
    (cache, _, _), more = lax.scan(
      one_more, first, jnp.arange(1, context.gamma)
    )

    def joined(first, others):
      return jnp.concatenate([first[:, None], others.swapaxes(0, 1)], axis=1)

    tokens, rows = jax.tree.map(joined, drawn, more)
    length = jnp.full(tokens.shape[:1], context.gamma, jnp.int32)
    return Draft(tokens, rows, length), cache

  def commit(cache, length):
    # The last committed token has not been read yet; after a fully accepted
    # draft the token before it has not been read either.
    return network.rewind(cache, jnp.minimum(cache.length, length - 1))

  params = model if isinstance(model, Model) else ()
  drafter = Drafter(init, propose, commit, SMALL_MODEL, params, network)
  return drafter._replace(
    reads_encoder=network.reads_encoder, adapts=True, follows_rules=True
  )


def network_of(model: Model | LanguageModel) -> LanguageModel:
  """Returns the network of a model; a network is returned as it is."""
  return model.network if isinstance(model, Model) else model


def as_drafter(drafter: Drafter | Model) -> Drafter:
  """Returns a drafter as it is; makes a `small_model` drafter of a model.

  Raises:
    ValueError: the argument is neither a drafter nor a model.
  """
  if isinstance(drafter, Model):
    return small_model(drafter)
  if not isinstance(drafter, Drafter):
    raise unexpected('drafter', 'a Drafter or a Model', drafter)
  return drafter


def alone(drafter: Drafter) -> Model | None:
  """Returns the model of a `small_model` drafter; None for other drafters."""
  is_model = isinstance(drafter.params, Model) and drafter.name == SMALL_MODEL
  return drafter.params if is_model else None


def read_committed(model: LanguageModel, params, cache, context, behind=2):
  """Reads all committed tokens that a drafter's cache lacks.

  Args:
    model: the model.
    params: its parameters.
    cache: its cache of committed tokens.
    context: has the committed tokens.
    behind: static, number of last tokens that one call reads, 2 or more. The
      cache may lack more only if `Request.catches_up`.

  Returns:
    Logits float32[B, 1, V] of the token after the committed ones; the cache.
  """
  tokens, length = context.tokens, context.length
  if context.request.catches_up:
    cache = catch_up(model, params, cache, tokens, length)
  return read_last(model, params, cache, tokens, length, behind=behind)


def read_last(
  model: LanguageModel, params, cache, tokens, length, more=0, behind=2
):
  """Reads each row's last committed tokens, and `more`, in one call.

  Args:
    model: the model.
    params: its parameters.
    cache: its cache of committed tokens, which lacks at most the last `behind`.
    tokens: int32[B, N], committed tokens, then `more` proposed ones.
    length: int32[B], number of committed tokens.
    more: static, number of proposed tokens that are read too.
    behind: static, number of last committed tokens that are read, 2 or more.

  Returns:
    Logits float32[B, more + 1, V] of the tokens that follow the last committed
    token and each of the proposed ones; the cache, of length `length` + more.
  """
  # A row with fewer tokens, such as only its start token, is read from its
  # beginning. The tokens past its end mean nothing, and are overwritten later.
  start = jnp.maximum(length - behind, 0)
  index = start[:, None] + jnp.arange(behind + more)
  fed = jnp.take_along_axis(tokens, index, axis=1)
  cache = model.rewind(cache, start)
  place = (length - 1 - start)[:, None] + jnp.arange(1 + more)
  features, cache = model.extend(params, cache, fed)
  # The output layer, often the largest product, runs only for these tokens.
  features = jnp.take_along_axis(features, place[..., None], axis=1)
  return model.head(params, features), model.rewind(cache, length + more)


def catch_up(model: LanguageModel, params, cache, tokens, length):
  """Reads the tokens that a cache lacks, except those that `read_last` reads.

  The row that lacks the most tokens decides how many calls of the model this
  takes, often none; see `catch_up_calls`.

  Args:
    model: the model.
    params: its parameters.
    cache: its cache of committed tokens, with N - 1 slots or more.
    tokens: int32[B, N], committed tokens.
    length: int32[B], number of committed tokens.

  Returns:
    The cache, of length `length` - 2 or more.
  """
  for at_once, enough in _CATCH_UP:
    size = min(at_once, tokens.shape[1] - 1)

    def lacks(cache, enough=enough):
      return jnp.any(cache.length + enough < length - 2)

    def read(cache, size=size):
      # Near the end some tokens are read again, with the same values, so that
      # no slot past the last committed token is used.
      start = jnp.minimum(cache.length, jnp.maximum(length - size, 0))
      index = start[:, None] + jnp.arange(size)
      fed = jnp.take_along_axis(tokens, index, axis=1)
      _, cache = model.extend(params, model.rewind(cache, start), fed)
      return model.rewind(cache, jnp.minimum(start + size, length - 1))

    cache = lax.while_loop(lacks, read, cache)
  return cache


def catch_up_calls(missed: int) -> int:
  """Returns the most calls that `catch_up` makes.

  Args:
    missed: number of rounds that passed without a draft, with one token each.
  """
  calls = 0
  for at_once, enough in _CATCH_UP:
    now = -(-max(missed - enough, 0) // at_once)
    calls, missed = calls + now, max(missed - now * at_once, 0)
  return calls


# These functions make drafts that adapt their length.

# Costs are guessed without a calibration: a call of the drafter takes .2 of a
# call of the target, one more token in the target's call takes .1, and the time
# of a call of the target is worth 1.3 tokens. `MOST` is the most proposals.
MOST = 5
_WORTH, _WORTH_ASKING = 1.3 * 0.1, 1.3 * (0.2 + 0.1)
_EXPECTED = 0.7  # acceptance probability of a proposal that is still to be made
_STEPS = 10  # confidence is rounded down to one of so many steps


def plain_rule(
  worth: Sequence[float] = (_WORTH,) * MOST,
  worth_asking: Sequence[float] = (_WORTH_ASKING,) * MOST,
) -> LengthRule:
  """Returns a `LengthRule` with the given thresholds of probabilities.

  The default thresholds follow from guessed costs of calls.
  """
  return LengthRule(
    np.asarray(worth, np.float32), np.asarray(worth_asking, np.float32)
  )


def adaptive_draft(
  logits: jax.Array, cache: Any, context: Context, read: Callable[..., Any]
) -> tuple[Draft, Any]:
  """Proposes tokens until the request's `draft_rule` ends each row's draft.

  The draft's length is decided while it is made, in one device loop. The top
  probability of the drafter's distribution tells how likely its next proposal
  is accepted (`acceptance_of`). The drafter makes a proposal only if it is
  worth its cost, and is asked for the next one only if that one is expected to
  be worth its cost. Each row stops by itself; the loop ends once all rows have
  stopped.

  **The output is lossless.** Whether x_i is proposed depends on x_1..x_{i-1}
  and the distributions up to i. Whether the drafter is asked again depends on
  x_i too, which stays in the draft. These are the conditions of `Draft`.

  Args:
    logits: float[B, V], logits of the first proposal.
    cache: the drafter's cache, which holds all committed tokens.
    context: the context of the round, with a `draft_rule` and a `budget`.
    read: reads a proposal and returns the logits of the next one:
      (cache, tokens int32[B]) -> (float[B, V], cache).

  Returns:
    The draft; and the cache, which may lack the draft's last token.
  """
  rule, budget = context.request.drafting.draft_rule, context.budget
  assert rule is not None and budget is not None
  (batch, vocab_size), size = logits.shape, context.gamma
  uniforms = base.draft_uniforms(context)

  # The carry has the number of proposals so far, int32[]; the rows that ask for
  # another one, bool[B]; the probability that all so far are accepted,
  # float32[B]; the cache; the prefix of the next proposal; and the draft.
  def propose(carry, logits):
    index, asks, survival, cache, prefix, made = carry
    current = dataclasses.replace(context, prefix=prefix)
    logits = base.ruled(logits, current, index)
    survival = survival * acceptance_of(probs.top_prob(logits))
    makes = asks & (survival > rule.worth[index])
    uniform = None if uniforms is None else uniforms[index]
    token, row = base.draw(logits, context, uniform)
    update = lax.dynamic_update_slice_in_dim
    rows = made.probs
    if rows is not None:
      rows = update(rows, row[:, None], index, 1)
    tokens = update(made.tokens, token[:, None], index, 1)
    length = made.length + makes
    # A draft ends after a stop id.
    ended = jnp.any(token[:, None] == context.request.stop_ids, axis=1)
    least = rule.worth_asking[jnp.minimum(index + 1, size - 1)]
    asks = makes & ~ended & (length < budget) & (survival * _EXPECTED > least)
    made = Draft(tokens, rows, length)
    return index + 1, asks, survival, cache, current.after(token), made

  def one_more(carry):
    index, asks, survival, cache, prefix, made = carry
    last = lax.dynamic_slice_in_dim(made.tokens, index - 1, 1, 1)[:, 0]
    logits, cache = read(cache, last)
    return propose((index, asks, survival, cache, prefix, made), logits)

  rows = None
  if not context.request.greedy:
    rows = jnp.zeros((batch, size, vocab_size), jnp.float32)
  tokens = jnp.zeros((batch, size), jnp.int32)
  empty = Draft(tokens, rows, jnp.zeros((batch,), jnp.int32))
  survival = jnp.ones((batch,), jnp.float32)
  first = jnp.int32(0), budget > 0, survival, cache, context.prefix, empty
  *_, cache, _, made = lax.while_loop(
    lambda carry: (carry[0] < size) & jnp.any(carry[1]),
    one_more,
    propose(first, logits),
  )
  return made, cache


def acceptance_of(confidence: jax.Array) -> jax.Array:
  """Estimates the acceptance probability, float32[B], from a top probability.

  The estimate is the root of the top probability, because drafters are right
  more often than they are sure. Confidence has steps of a tenth, because the
  estimate is rough.
  """
  step = jnp.minimum(jnp.floor(confidence * _STEPS), _STEPS - 1)
  return jnp.sqrt((step + 0.5) / _STEPS)
