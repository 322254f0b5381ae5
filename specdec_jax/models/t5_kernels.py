"""A T5's decoder by hand-written kernels: each layer is one, and each draw."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.models import (
  backend,
  integers,
  kernel_parts,
  kv_cache,
  layer_kernel,
  norms,
  products,
  token_kernel,
)
from specdec_jax.models.base import Drawn, Draws, Ends, Params
from specdec_jax.models.token_kernel import Drafted, Head
from specdec_jax.models.tree import Tree

_Params = Mapping[str, Any]  # of the decoder


def take_layers(
  config: Any,
  params: _Params,
  x: jax.Array,
  cache: kv_cache.KVCache,
  tree: Tree | None,
) -> bool:
  """Whether each layer of a call is one kernel.

  Args:
    config: of the network, a `T5Config`.
    params: of the decoder.
    x: [B, S, M], embedded tokens.
    cache: what it has read.
    tree: how the tokens hang together; None is one after another.

  Raises:
    ValueError: kernels are forced, and this one cannot be had.
  """
  refusal = 'keys and values are in arrays of their own'
  if cache.joined:
    refusal = layer_kernel.refusal(
      params['layers_0'], x, _seen(cache, 0, tree), _sizes(config)
    )
  return backend.takes_kernel('layers', refusal)


def layers(
  config: Any,
  params: _Params,
  x: jax.Array,
  cache: kv_cache.KVCache,
  tree: Tree | None = None,
  turns: jax.Array | None = None,
) -> tuple[jax.Array, list[kv_cache.Kept], jax.Array]:
  """All layers of a call; `take_layers` has the arguments.

  Args:
    turns: of the kernel before; None begins anew.

  Returns:
    [B, S, M], what each layer keeps, and `turns` for the next kernel.
  """
  turns = kernel_parts.no_turns() if turns is None else turns
  kept: list[kv_cache.Kept] = []
  for i in range(config.num_decoder_layers):
    name = f'layers_{i}'
    given = params[name], x, _seen(cache, i, tree), _sizes(config)
    with jax.named_scope(name):
      x, memory, turns = layer_kernel.layer(*given, turns)
    kept.append((memory,))
  return x, kept, turns


def draft(
  config: Any,
  params: Params,
  cache: kv_cache.KVCache,
  x: jax.Array,
  place: jax.Array,
  count: int,
  ends: Ends | None,
  draws: Draws | None,
) -> Drawn[kv_cache.KVCache] | None:
  """Draws tokens behind those of x, as `base.draft`.

  Args:
    config: of the network, a `T5Config`.
    params: of the network.
    cache: what it has read.
    x: [B, S, M], embedded tokens that it has not.
    place: int32[B], the last of the S that counts.
    count: static, tokens to draw.
    ends: where a row must not stop; None is nowhere.
    draws: how tokens are sampled; None takes the likeliest.

  Returns:
    The draft; None if shapes are not taken.
  """
  decoder = params['decoder']
  head = _head(config, decoder, params['token_embedder']['embedding'])
  if not take_layers(config, decoder, x, cache, None):
    return None
  if not backend.takes_kernel('tokens', token_kernel.refusal(head, len(x))):
    return None
  begin = cache.length + place + 1

  def draw(x, place, kept, drafted):
    how = ends, draws, norms.RMSNorm.epsilon
    x, drafted = token_kernel.draw(head, x, place, begin, drafted, *how)
    return x, kept, drafted

  def so_far(kept, drafted):
    return cache.grown(kept, 0).rewind(drafted.length)

  def one_more(_, carry):
    x, kept, drafted = carry
    has_read = so_far(kept, drafted)
    x, kept, turns = layers(config, decoder, x, has_read, turns=drafted.turns)
    drafted = drafted._replace(turns=turns)
    return draw(x, jnp.zeros_like(place), kept, drafted)

  x, kept, turns = layers(config, decoder, x, cache)
  tokens, probs = jnp.zeros((len(x), count), jnp.int32), None
  if draws is not None:
    if config.logits_via_embedding:
      # As if logits were divided by sqrt(M), see `layers.Embed.attend`.
      times = math.sqrt(config.emb_dim)
      draws = draws._replace(temperature=draws.temperature * times)
    probs = jnp.zeros((len(x), count, len(head.embedding)), jnp.float32)
  drafted = Drafted(tokens, cache.length, turns, probs)
  carry = draw(x, place, kept, drafted)
  _, kept, drafted = lax.fori_loop(1, count, one_more, carry)
  return Drawn(drafted.tokens, drafted.probs, so_far(kept, drafted))


def _head(config: Any, params: _Params, embedding: jax.Array) -> Head:
  norm = params['decoder_norm']['scale']
  if config.logits_via_embedding:
    return Head(norm, embedding, None, embedding)
  dense = params['logits_dense']
  scale = dense.get(integers.SCALE)
  return Head(norm, dense.get('kernel_out_in'), scale, embedding)


def _seen(cache, number: int, tree: Tree | None) -> layer_kernel.Seen:
  """What a layer attends to."""
  biases = cache.position_bias
  return layer_kernel.Seen(
    cache.joined[number],
    biases[number % len(biases)],
    cache.length,
    (cache.cross_keys[number], cache.cross_values[number], cache.cross_bias),
    tree,
  )


def _sizes(config: Any) -> layer_kernel.Sizes:
  """What each layer is."""
  return layer_kernel.Sizes(
    config.num_heads,
    config.head_dim,
    tuple(products.ACTIVATIONS[name] for name in config.mlp_activations),
    norms.RMSNorm.epsilon,
    config.dtype,
  )
