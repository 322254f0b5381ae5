"""Any `LanguageModel` as a drafter, with caches of its own.

It reads the inputs by its own encoder, or, as a T5 without one, what the
target's encoder says of them: then the inputs are encoded once for both.

After a fully accepted draft the drafter has not read its own last proposal: its
cache lacks one token. Rather than pay a call for that token, every round starts
by feeding each row's last two committed tokens in one call; if no token is
missing, this writes the same values again. Inside another drafter a cache may
lack more tokens: its length says how many, and they are read first.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.checks.fields import unexpected
from specdec_jax.drafters import base
from specdec_jax.drafters import length as length_rules
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.models.model import Model
from specdec_jax.types import Draft

SMALL_MODEL = 'small_model'
_AT_ONCE = 32, 8  # tokens per call that catches up, after long rests and short


def small_model(model: Model | LanguageModel) -> Drafter:
  """Returns a drafter that samples its proposals from `model`, one by one.

  Made from a network instead of a `Model`, the drafter has no parameters:
  `init` and `propose` then get them from their caller, not from an engine.

  A round costs gamma calls of the model: one over two tokens, the others over
  one token. After rounds in which it was not asked, inside another drafter or
  after a rest, a round costs a few calls more, see `catch_up_calls`. Where the
  draft's length adapts, a round costs a call for each proposal that is looked
  at, of the row that looks at the most. The model
  may be of another kind than the target, as long as both have one vocabulary: a
  decoder-only drafter of an encoder-decoder target sees what the decoder has
  produced, and nothing of the input.

  Args:
    model: the model, as `load` gives it, or a network.

  Examples:
    >>> sd.Engine(target, sd.small_model(draft))  # as Engine(target, draft)
    Engine(target=..., draft=Model(...), gamma=4, ...)
  """
  if isinstance(model, Model):
    return small_model(model.network)._replace(params=model)

  def init(params, inputs, max_length, prompt, encoded):
    return read_prompt(
      model, params, inputs, max_length, prompt, encoded=encoded
    )[1]

  def propose(params, cache, context: Context):
    logits, cache = read_committed(model, params, cache, context)

    def read(cache, token):
      features, cache = model.extend(params, cache, token[:, None])
      return model.head(params, features)[:, 0], cache

    if context.request.drafting.adapts:
      return length_rules.draft(logits[:, 0], cache, context, read)
    uniforms = base.draft_uniforms(context)
    drawn = base.draw_next(logits[:, 0], context, 0, uniforms)

    def one_more(carry, index):
      cache, token, prefix = carry
      logits, cache = read(cache, token)
      now = dataclasses.replace(context, prefix=prefix)
      token, row = base.draw_next(logits, now, index, uniforms)
      return (cache, token, now.after(token)), (token, row)

    first: Any = cache, drawn[0], context.after(drawn[0])
    (cache, *_), more = lax.scan(one_more, first, jnp.arange(1, context.gamma))
    tokens, rows = jax.tree.map(
      lambda one, others: jnp.concatenate(
        [one[:, None], others.swapaxes(0, 1)], axis=1
      ),
      drawn,
      more,
    )
    length = jnp.full(tokens.shape[:1], context.gamma, jnp.int32)
    return Draft(tokens, rows, length), cache

  def commit(cache, length):
    # The last committed token has never been read yet; after a fully accepted
    # draft the one before it has not been read either.
    return model.rewind(cache, jnp.minimum(cache.length, length - 1))

  return Drafter(
    init,
    propose,
    commit,
    SMALL_MODEL,
    network=model,
    reads_encoder=model.reads_encoder,
    adapts=True,
    follows_rules=True,
  )


def as_drafter(given: Drafter | Model) -> Drafter:
  """Returns a drafter as it is, and a model as a `small_model` drafter.

  Raises:
    ValueError: it is neither a drafter nor a model.
  """
  if isinstance(given, Model):
    return small_model(given)
  if not isinstance(given, Drafter):
    raise unexpected('drafter', 'a Drafter or a Model', given)
  return given


def alone(drafter: Drafter) -> Model | None:
  """The model of a `small_model` drafter; None for any other drafter."""
  made = isinstance(drafter.params, Model) and drafter.name == SMALL_MODEL
  return drafter.params if made else None


def read_committed(model: LanguageModel, params, cache, context, behind=2):
  """Logits float32[B, 1, V] of the token after the committed ones; the cache.

  Arguments are those of `read_last`; first what the cache lacks is read.
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
    model: the model whose cache it is.
    params: its parameters.
    cache: a cache of committed tokens, which lacks at most the last `behind`.
    tokens: int32[B, N], committed tokens, and `more` proposed ones.
    length: int32[B], how many tokens are committed.
    more: static, proposed tokens that are read as well.
    behind: static, committed tokens that are read, 2 or more.

  Returns:
    Logits float32[B, more + 1, V] of the tokens that follow the last committed
    token and each of the proposed ones; the cache, of length `length` + more.
  """
  # A row that holds fewer, such as only its start token, is read from there on.
  # The tokens behind it are meaningless; the next call overwrites them.
  start = jnp.maximum(length - behind, 0)
  index = start[:, None] + jnp.arange(behind + more)
  fed = jnp.take_along_axis(tokens, index, axis=1)
  cache = model.rewind(cache, start)
  place = (length - 1 - start)[:, None] + jnp.arange(1 + more)
  features, cache = model.extend(params, cache, fed)
  # The output layer, often the largest product, is of the wanted tokens only.
  features = jnp.take_along_axis(features, place[..., None], axis=1)
  return model.head(params, features), model.rewind(cache, length + more)


def catch_up(model: LanguageModel, params, cache, tokens, length):
  """Reads the tokens that a cache lacks, except those that `read_last` reads.

  Calls the model as often as the row that lacks the most tokens needs, often
  not at all; see `catch_up_calls`.

  Args:
    model: the model whose cache it is.
    params: its parameters.
    cache: a cache of committed tokens, with N - 1 slots or more.
    tokens: int32[B, N], committed tokens.
    length: int32[B], how many tokens are committed.

  Returns:
    The cache, of length `length` - 2 or more.
  """
  for at_once, enough in zip(_AT_ONCE, (*_AT_ONCE[1:], 0), strict=True):
    size = min(at_once, tokens.shape[1] - 1)

    def lacks(cache, enough=enough):
      return jnp.any(cache.length + enough < length - 2)

    def read(cache, size=size):
      # Near the end some tokens are read again, with the same values, rather
      # than slots used past the last committed token.
      start = jnp.minimum(cache.length, jnp.maximum(length - size, 0))
      index = start[:, None] + jnp.arange(size)
      fed = jnp.take_along_axis(tokens, index, axis=1)
      _, cache = model.extend(params, model.rewind(cache, start), fed)
      return model.rewind(cache, jnp.minimum(start + size, length - 1))

    cache = lax.while_loop(lacks, read, cache)
  return cache


def catch_up_calls(missed: int) -> int:
  """Calls of the model that read what it missed, at most.

  Args:
    missed: rounds of a token each in which it was not asked.
  """
  calls = 0
  for at_once, enough in zip(_AT_ONCE, (*_AT_ONCE[1:], 0), strict=True):
    now = -(-max(missed - enough, 0) // at_once)
    calls, missed = calls + now, max(missed - now * at_once, 0)
  return calls
