"""M2M-100 once more, in plain NumPy, token by token, in float64.

Written from the paper and its parameters' meaning, not from `models.m2m100`.
The parameters are ours: 1/sqrt(D) is part of the queries' projections.
"""

import numpy as np


def normed(x, norm):
  centred = x - x.mean(-1, keepdims=True)
  deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
  return centred / deviation * norm['scale'] + norm['bias']


def projected(x, module):
  return x @ module['kernel'] + module['bias']


def position(number, size):
  """Sines and cosines of a position; 1 turn in 2 pi to 20000 pi positions."""
  found = np.zeros(size)
  half = size // 2
  for i in range(half):
    rate = 10000.0 ** (-i / (half - 1))
    found[i], found[i + half] = np.sin(number * rate), np.cos(number * rate)
  return found


def embedded(config, params, ids):
  """[S, M] of a row's tokens, none of which is padding."""
  table = params['token_embedder']['embedding']
  scale = np.sqrt(config.emb_dim) if config.scale_embeddings else 1.0
  return np.stack(
    [
      table[token] * scale + position(config.pad_id + 1 + i, config.emb_dim)
      for i, token in enumerate(ids)
    ]
  )


def attended(config, attention, x, y, is_causal):
  """Attention of x[S, M] over y[T, M]: [S, M]."""
  split = {
    name: projected(of, attention[name]).reshape(
      len(of), config.num_heads, config.head_dim
    )
    for name, of in (('query', x), ('key', y), ('value', y))
  }
  out = np.zeros_like(split['query'])
  for place, head in np.ndindex(len(x), config.num_heads):
    end = place + 1 if is_causal else len(y)
    scores = split['key'][:end, head] @ split['query'][place, head]
    weights = np.exp(scores - scores.max())
    out[place, head] = weights / weights.sum() @ split['value'][:end, head]
  return projected(out.reshape(len(x), -1), attention['out'])


def mlp(x, module):
  return projected(np.maximum(projected(x, module['wi']), 0), module['wo'])


def logits(config, params, inputs, read):
  """float64[S, V] of one row: inputs without padding, and what is read."""
  x = embedded(config, params, inputs)
  encoder, decoder = params['encoder'], params['decoder']
  for number in range(config.num_encoder_layers):
    layer = encoder[f'layers_{number}']
    h = normed(x, layer['pre_attention_layer_norm'])
    x = x + attended(config, layer['attention'], h, h, False)
    x = x + mlp(normed(x, layer['pre_mlp_layer_norm']), layer['mlp'])
  encoded = normed(x, encoder['encoder_norm'])
  x = embedded(config, params, read)
  for number in range(config.num_decoder_layers):
    layer = decoder[f'layers_{number}']
    h = normed(x, layer['pre_self_attention_layer_norm'])
    x = x + attended(config, layer['self_attention'], h, h, True)
    h = normed(x, layer['pre_cross_attention_layer_norm'])
    cross = layer['encoder_decoder_attention']
    x = x + attended(config, cross, h, encoded, False)
    x = x + mlp(normed(x, layer['pre_mlp_layer_norm']), layer['mlp'])
  x = normed(x, decoder['decoder_norm'])
  return x @ params['token_embedder']['embedding'].T
