"""Llama, Qwen and Gemma once more, in plain NumPy, token by token.

Written from the models' papers and not from `models.causal_lm`: every position
is computed by itself, in float64, with loops over heads.
"""

import numpy as np


def normed(x, scale, config):
  mean_square = np.mean(x**2, axis=-1, keepdims=True)
  scale = scale + config.norm_offset
  return x / np.sqrt(mean_square + config.norm_epsilon) * scale


def turned(x, position, rope):
  """A head's numbers x[D] at a position: planes (i, i + D / 2) are turned."""
  half = len(x) // 2
  out = np.empty_like(x)
  for i in range(half):
    frequency = rope.base ** (-2 * i / len(x))
    slow = frequency / rope.factor
    if rope.original_length:
      wavelength = 2 * np.pi / frequency
      low = rope.original_length / rope.low_freq_factor
      high = rope.original_length / rope.high_freq_factor
      if wavelength < high:
        slow = frequency
      elif wavelength <= low:
        smooth = rope.original_length / wavelength - rope.low_freq_factor
        smooth /= rope.high_freq_factor - rope.low_freq_factor
        slow = (1 - smooth) * slow + smooth * frequency
    angle = position * slow
    pair = x[i], x[i + half]
    out[i] = pair[0] * np.cos(angle) - pair[1] * np.sin(angle)
    out[i + half] = pair[1] * np.cos(angle) + pair[0] * np.sin(angle)
  return out


def capped(x, cap):
  return cap * np.tanh(x / cap) if cap else x


def activated(x, name):
  if name == 'silu':
    return x / (1 + np.exp(-x))
  inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
  return 0.5 * x * (1 + np.tanh(inner))


def attended(config, attention, x, is_local):
  """Self-attention of x[S, M], before the output's projection: [S, H * D]."""
  rope = (config.local_rope or config.rope) if is_local else config.rope
  heads = {'query': config.num_heads, 'key': config.num_kv_heads}
  heads['value'] = heads['key']
  found = {}
  for name, count in heads.items():
    projected = x @ attention[name]['kernel']
    if config.qkv_bias:
      projected = projected + attention[name]['bias']
    projected = projected.reshape(len(x), count, config.head_dim)
    if config.qk_norm and name != 'value':
      projected = normed(projected, attention[f'{name}_norm']['scale'], config)
    if name != 'value':
      for place, head in np.ndindex(len(x), count):
        projected[place, head] = turned(projected[place, head], place, rope)
    found[name] = projected
  out = np.zeros((len(x), config.num_heads, config.head_dim))
  group = config.num_heads // config.num_kv_heads
  scale = np.sqrt(config.query_scalar or config.head_dim)
  for place, head in np.ndindex(len(x), config.num_heads):
    first = max(0, place - config.window + 1) if is_local else 0
    keys = found['key'][first : place + 1, head // group]
    scores = capped(
      keys @ found['query'][place, head] / scale, config.score_softcap
    )
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    values = found['value'][first : place + 1, head // group]
    out[place, head] = weights @ values
  return out.reshape(len(x), -1)


def logits(config, params, tokens):
  """Logits [S, V] of the tokens that follow each of tokens[S]."""
  decoder = params['decoder']
  embedding = np.asarray(decoder['token_embedder']['embedding'], np.float64)
  x = embedding[tokens]
  if config.scale_embeddings:
    x = x * np.sqrt(config.emb_dim)
  for i in range(config.num_layers):
    layer = decoder[f'layers_{i}']
    kind = config.layer_kinds[i % len(config.layer_kinds)]

    def norm(x, name, layer=layer):
      return normed(x, layer[f'{name}_layer_norm']['scale'], config)

    mixed = attended(
      config,
      layer['self_attention'],
      norm(x, 'pre_self_attention'),
      kind == 'local',
    )
    mixed = mixed @ layer['self_attention']['out']['kernel']
    x = x + (norm(mixed, 'post_self_attention') if config.post_norms else mixed)
    read, mlp = norm(x, 'pre_mlp'), layer['mlp']
    hidden = activated(read @ mlp['wi_0']['kernel'], config.mlp_activations[0])
    hidden = hidden * (read @ mlp['wi_1']['kernel']) @ mlp['wo']['kernel']
    x = x + (norm(hidden, 'post_mlp') if config.post_norms else hidden)
  x = normed(x, decoder['decoder_norm']['scale'], config)
  if config.logits_via_embedding:
    out = x @ embedding.T
  else:
    out = x @ decoder['logits_dense']['kernel']
  return capped(out, config.logit_softcap)
