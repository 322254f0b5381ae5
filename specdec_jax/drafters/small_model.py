"""Any `LanguageModel` as a drafter, with its own encoder and caches.

After a fully accepted draft the drafter has not read its own last proposal: its
cache lacks one token. Rather than pay a call for that token, every round starts
by feeding each row's last two committed tokens in one call; if no token is
missing, this writes the same values again. Inside another drafter a cache may
lack more tokens: its length says how many, and they are read first.
"""

import functools

import jax.numpy as jnp
from jax import lax

from specdec_jax.drafters.base import (
  Context,
  Drafter,
  draft_uniforms,
  draw,
  forbid_early_stops,
)
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.models.model import Model
from specdec_jax.types import Draft

_NAME = 'small_model'
_AT_ONCE = 8  # tokens per call that catches up


def small_model(model: Model | LanguageModel) -> Drafter:
  """Returns a drafter that samples its proposals from `model`, one by one.

  Made from a network instead of a `Model`, the drafter has no parameters:
  `init` and `propose` then get them from their caller, not from an engine.

  A round costs gamma calls of the model: one over two tokens, the others over
  one token. After rounds in which it was not asked, inside another drafter, a
  round costs one call more for each `_AT_ONCE` tokens that it missed. The model
  may be of another kind than the target, as long as both have one vocabulary: a
  decoder-only drafter of an encoder-decoder target sees what the decoder has
  produced, and nothing of the input.
  """

  if isinstance(model, Model):
    made = small_model(model.network)
    return made._replace(params=model, models=(model.without_params(),))

  def draw_next(logits, context, index, uniforms):
    logits = forbid_early_stops(logits, context, index)
    return draw(logits[:, 0], context, uniforms)

  def propose(params, cache, context: Context):
    if context.skips_rounds:
      cache = catch_up(model, params, cache, context.tokens, context.length)
    logits, cache = read_last(
      model, params, cache, context.tokens, context.length
    )
    uniforms = draft_uniforms(context)
    own, others = None, None
    if uniforms is not None:
      own, others = uniforms[0], uniforms[1:]
    token, row = draw_next(logits, context, 0, own)

    def one_more(carry, place):
      index, own = place
      cache, token = carry
      logits, cache = model.extend(params, cache, token[:, None])
      token, row = draw_next(logits, context, index, own)
      return (cache, token), (token, row)

    (cache, _), (more_tokens, more_rows) = lax.scan(
      one_more, (cache, token), (jnp.arange(1, context.gamma), others)
    )
    tokens = jnp.concatenate([token[:, None], more_tokens.T], axis=1)
    rows = None
    if not context.greedy:
      rows = jnp.concatenate([row[:, None], more_rows.swapaxes(0, 1)], axis=1)
    length = jnp.full(tokens.shape[:1], context.gamma, jnp.int32)
    return Draft(tokens, rows, length), cache

  def commit(cache, length):
    # The last committed token has never been read yet; after a fully accepted
    # draft the one before it has not been read either.
    return model.rewind(cache, jnp.minimum(cache.length, length - 1))

  init = functools.partial(read_prompt, model)
  return Drafter(init, propose, commit, _NAME, network=model)


def as_drafter(given: Drafter | Model) -> Drafter:
  """Returns a drafter as it is, and a model as a `small_model` drafter.

  Raises:
    ValueError: it is neither a drafter nor a model.
  """
  if isinstance(given, Model):
    return small_model(given)
  if not isinstance(given, Drafter):
    raise ValueError(
      'Expected a drafter, such as prompt_lookup(), or a small Model, such as'
      f' specdec_jax.load returns; got {given!r}.'
    )
  return given


def alone(drafter: Drafter) -> Model | None:
  """The model of a `small_model` drafter; None for any other drafter."""
  made = isinstance(drafter.params, Model) and drafter.name == _NAME
  return drafter.params if made else None


def read_last(model: LanguageModel, params, cache, tokens, length, more=0):
  """Reads each row's last two committed tokens, and `more`, in one call.

  Args:
    model: the model whose cache it is.
    params: its parameters.
    cache: a cache of committed tokens, which lacks at most the last two.
    tokens: int32[B, N], committed tokens, and `more` proposed ones.
    length: int32[B], how many tokens are committed.
    more: static, proposed tokens that are read as well.

  Returns:
    Logits float32[B, more + 1, V] of the tokens that follow the last committed
    token and each of the proposed ones; the cache, of length `length` + more.
  """
  start = jnp.maximum(length - 2, 0)
  index = start[:, None] + jnp.arange(2 + more)
  fed = jnp.take_along_axis(tokens, index, axis=1)
  logits, cache = model.extend(params, model.rewind(cache, start), fed)
  # The last committed token is the second of the tokens read here, but the
  # first in a row that holds only its start token. In such a row the last token
  # read is meaningless, and the next call overwrites it.
  place = (length - 1 - start)[:, None] + jnp.arange(1 + more)
  logits = jnp.take_along_axis(logits, place[..., None], axis=1)
  return logits, model.rewind(cache, length + more)


def catch_up(model: LanguageModel, params, cache, tokens, length):
  """Reads the tokens that a cache lacks, except those that `read_last` reads.

  Calls the model as often as the row that lacks the most tokens needs, often
  not at all.

  Args:
    model: the model whose cache it is.
    params: its parameters.
    cache: a cache of committed tokens, with at least `_AT_ONCE` slots.
    tokens: int32[B, N], committed tokens.
    length: int32[B], how many tokens are committed.

  Returns:
    The cache, of length `length` - 2 or more.
  """

  def lacks(cache):
    return jnp.any(cache.length < length - 2)

  def read(cache):
    # Near the end some tokens are read again, with the same values, rather than
    # slots used past the last committed token.
    start = jnp.minimum(cache.length, jnp.maximum(length - _AT_ONCE, 0))
    index = start[:, None] + jnp.arange(_AT_ONCE)
    fed = jnp.take_along_axis(tokens, index, axis=1)
    _, cache = model.extend(params, model.rewind(cache, start), fed)
    return model.rewind(cache, jnp.minimum(start + _AT_ONCE, length - 1))

  return lax.while_loop(lacks, read, cache)
