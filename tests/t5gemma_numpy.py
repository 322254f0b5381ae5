"""T5Gemma 1 and 2 once more, in plain NumPy, token by token.

Written from the papers and not from `models.t5gemma`: every position is
computed by itself, in float64, with loops over heads.
"""

import numpy as np

from causal_numpy import activated, capped, normed, turned


def heads(x, kernel, count):
  """x[S, M] projected to [S, count, D]."""
  return (x @ kernel).reshape(len(x), count, -1)


def mixed(stack, queries, sources):
  """Softmax over what each query sees: [S, H * D].

  Args:
    stack: the configuration.
    queries: [S, H, D].
    sources: (place of a query, head of keys) -> the keys [T, D] and values
      [T, D] that it sees.
  """
  out = np.zeros(queries.shape)
  group = stack.num_heads // stack.num_kv_heads
  scale = np.sqrt(stack.query_scalar or stack.head_dim)
  for place, head in np.ndindex(*queries.shape[:2]):
    keys, values = sources(place, head // group)
    scores = keys @ queries[place, head] / scale
    scores = capped(scores, stack.score_softcap)
    weights = np.exp(scores - scores.max())
    out[place, head] = weights @ values / weights.sum()
  return out.reshape(len(queries), -1)


def projected(stack, attention, x, rope):
  """Queries, keys and values of self-attention, each [S, heads, D]."""
  found = []
  for name, count in (
    ('query', stack.num_heads),
    ('key', stack.num_kv_heads),
    ('value', stack.num_kv_heads),
  ):
    made = heads(x, attention[name]['kernel'], count)
    if name != 'value':
      if stack.qk_norm:
        made = normed(made, attention[f'{name}_norm']['scale'], stack)
      if rope is not None:
        for place, head in np.ndindex(*made.shape[:2]):
          made[place, head] = turned(made[place, head], place, rope)
    found.append(made)
  return found


def kind_of(stack, number):
  """Whether a layer is local, and its rope."""
  is_local = stack.layer_kinds[number % len(stack.layer_kinds)] == 'local'
  return is_local, (stack.local_rope or stack.rope) if is_local else stack.rope


def fed_forward(stack, layer, x):
  mlp = layer['mlp']
  read = normed(x, layer['pre_mlp_layer_norm']['scale'], stack)
  hidden = activated(read @ mlp['wi_0']['kernel'], 'gelu')
  hidden = hidden * (read @ mlp['wi_1']['kernel']) @ mlp['wo']['kernel']
  return x + normed(hidden, layer['post_mlp_layer_norm']['scale'], stack)


def embedded(config, stack, table, params, tokens):
  x = table[tokens] * np.sqrt(stack.emb_dim)
  if config.image_end_id:
    x[tokens == config.image_end_id] = params['image_end_embedding']
  return x


def encoded(config, params, inputs):
  """[E, M] of inputs[E] without padding."""
  stack, encoder = config.encoder, params['encoder']
  owner = params if config.merged_attention else encoder
  table = np.asarray(owner['token_embedder']['embedding'], np.float64)
  x = embedded(config, stack, table, params, inputs)
  # In T5Gemma 2 the window is what is seen in all, else what is on each side.
  before = after = stack.window
  if config.merged_attention:
    before, after = (stack.window + 1) // 2 - 1, stack.window // 2
  for number in range(stack.num_layers):
    layer = encoder[f'layers_{number}']
    is_local, rope = kind_of(stack, number)
    attention = layer['self_attention']
    read = normed(x, layer['pre_self_attention_layer_norm']['scale'], stack)
    queries, keys, values = projected(stack, attention, read, rope)

    def seen(place, head, keys=keys, values=values, is_local=is_local):
      first, end = 0, len(keys)
      if is_local:
        first, end = max(0, place - before), place + after + 1
      return keys[first:end, head], values[first:end, head]

    out = mixed(stack, queries, seen) @ attention['out']['kernel']
    scale = layer['post_self_attention_layer_norm']['scale']
    x = fed_forward(stack, layer, x + normed(out, scale, stack))
  return normed(x, encoder['encoder_norm']['scale'], stack)


def logits(config, params, inputs, tokens):
  """Logits [S, V] of the tokens that follow each of tokens[S]."""
  stack, decoder = config.decoder, params['decoder']
  said = encoded(config, params, inputs)
  table = np.asarray(params['token_embedder']['embedding'], np.float64)
  x = embedded(config, stack, table, params, tokens)
  for number in range(stack.num_layers):
    layer = decoder[f'layers_{number}']
    is_local, rope = kind_of(stack, number)
    attention = layer['self_attention']
    read = normed(x, layer['pre_self_attention_layer_norm']['scale'], stack)
    queries, keys, values = projected(stack, attention, read, rope)
    other = None
    if config.merged_attention:
      _, *other = projected(stack, attention, said, None)

    def seen(place, head, keys=keys, values=values, other=other, far=is_local):
      first = max(0, place - stack.window + 1) if far else 0
      own = [one[first : place + 1, head] for one in (keys, values)]
      if other is None:
        return own
      pairs = zip(own, other, strict=True)
      return [np.concatenate([one, more[:, head]]) for one, more in pairs]

    out = mixed(stack, queries, seen) @ attention['out']['kernel']
    x = x + normed(out, layer['post_self_attention_layer_norm']['scale'], stack)
    if not config.merged_attention:
      attention = layer['encoder_decoder_attention']
      read = normed(x, layer['pre_cross_attention_layer_norm']['scale'], stack)
      queries = heads(read, attention['query']['kernel'], stack.num_heads)
      keys, values = (
        heads(said, attention[name]['kernel'], stack.num_kv_heads)
        for name in ('key', 'value')
      )

      def all_of(place, head, keys=keys, values=values):
        del place
        return keys[:, head], values[:, head]

      out = mixed(stack, queries, all_of) @ attention['out']['kernel']
      scale = layer['post_cross_attention_layer_norm']['scale']
      x = x + normed(out, scale, stack)
    x = fed_forward(stack, layer, x)
  x = normed(x, decoder['decoder_norm']['scale'], stack)
  return capped(x @ table.T, stack.logit_softcap)
