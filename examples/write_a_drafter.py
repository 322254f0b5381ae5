"""A drafter of your own: phrases that are said again and again.

A drafter is three pure functions. This one looks for the last two tokens in a
list of phrases and proposes the tokens behind them. Whatever it proposes, the
output is the target's; a good phrase saves calls.

  python examples/write_a_drafter.py
"""

import jax.numpy as jnp

import specdec_jax as sd

PHRASES = ['Wo kann ich eine Fahrkarte kaufen?', 'Es tut mir leid.']


def phrases(texts: list[str], tokenizer: sd.Tokenizer) -> sd.Drafter:
  """Proposes the rest of a phrase whose beginning was said."""
  ids = [[0, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
  known = jnp.asarray([token for row in ids for token in row])

  def init(params, inputs, max_length, prompt, encoded):
    return ()  # no state

  def propose(params, state, context):
    back = jnp.maximum(context.length[:, None] - jnp.array([2, 1]), 0)
    last = jnp.take_along_axis(context.tokens, back, axis=1)  # [B, 2]
    pairs = jnp.stack([known[:-1], known[1:]], axis=-1)  # [N - 1, 2]
    same = jnp.all(last[:, None] == pairs, axis=-1)  # [B, N - 1]
    begin = jnp.argmax(same, axis=1) + 2
    places = begin[:, None] + jnp.arange(context.gamma)
    tokens = known.at[places].get(mode='clip')
    length = jnp.minimum(context.gamma, len(known) - begin)
    # None: it draws nothing, each proposal is certain.
    return sd.Draft(tokens, None, jnp.where(same.any(axis=1), length, 0)), state

  def commit(state, length):
    return state

  return sd.Drafter(init, propose, commit, name='phrases')


target = sd.load('demo')
engine = sd.Engine(target, phrases(PHRASES, target.tokenizer))
for text in ('Where can I buy a ticket?', 'My sister is tired.'):
  [done] = engine.generate([text])
  calls = done.stats.num_target_calls
  print(f'{done.text}  {done.stats.num_tokens} tokens, {calls} calls')
