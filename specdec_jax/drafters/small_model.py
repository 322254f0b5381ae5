"""Any `LanguageModel` as a drafter, with its own encoder and caches.

After a fully accepted draft the drafter has not read its own last proposal:
it owes its cache one token. Rather than pay a call for it, every round starts
by feeding each row's last two committed tokens at once; where nothing was owed
this writes the same values again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax import probs
from specdec_jax.drafters.base import Context, Drafter, last_tokens
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.types import Draft


def small_model(model: LanguageModel) -> Drafter:
  """Returns a drafter that samples its proposals from `model`, one by one.

  A round costs gamma calls of the model: one over two tokens, the others over
  one. The model may be of another kind than the target, as long as both have
  one vocabulary: a decoder-only one beside an encoder-decoder sees what the
  decoder has produced, and nothing of the input.
  """

  def propose(params, cache, context):
    tokens, start = last_tokens(context, 2)
    cache = model.rewind(cache, start)
    logits, cache = model.extend(params, cache, tokens)
    # The proposal follows the last committed token: the second of the two,
    # but the first in a row that holds only its start token. There the second
    # was noise, and is overwritten by the next call.
    last = context.length - 1 - start
    logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
    cache = model.rewind(cache, context.length)
    token, row = _draw(logits, context, 0)

    def one_more(carry, index):
      cache, token = carry
      logits, cache = model.extend(params, cache, token[:, None])
      token, row = _draw(logits[:, 0], context, index)
      return (cache, token), (token, row)

    (cache, _), (more_tokens, more_rows) = lax.scan(
      one_more, (cache, token), jnp.arange(1, context.gamma)
    )
    tokens = jnp.concatenate([token[:, None], more_tokens.T], axis=1)
    rows = None
    if not context.greedy:
      rows = jnp.concatenate([row[:, None], more_rows.swapaxes(0, 1)], axis=1)
    length = jnp.full(tokens.shape[:1], context.gamma, jnp.int32)
    return Draft(tokens, rows, length), cache

  def commit(cache, length):
    # The last committed token is never read yet; of a fully accepted draft
    # the one before it is not either.
    return model.rewind(cache, jnp.minimum(cache.length, length - 1))

  init = functools.partial(read_prompt, model)
  return Drafter(init, propose, commit, 'small_model', every_round=True)


def _draw(logits: jax.Array, context: Context, index: jax.Array | int):
  """Draws proposal `index` of each row from logits [B, V].

  Returns:
    int32[B] and the distributions float32[B, V], None when greedy.
  """
  if context.forbids_stops:
    produced = context.length - 1 + index
    early = produced < context.min_length
    logits = probs.forbid(logits, context.stop_ids, early)
  if context.greedy:
    return probs.greedy_token(logits), None
  rows = probs.standardise_batch(logits[:, None], context.sampling)[:, 0]
  keys = jax.vmap(probs.draft_key, in_axes=(0, None))(context.keys, index)
  return jax.vmap(probs.sample)(rows, keys), rows
