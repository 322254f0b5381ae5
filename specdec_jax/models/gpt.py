"""Decoder-only models, GPT-2's and T5X's: sizes, network, `LanguageModel`.

One stack serves two families. Fields of the configuration choose between what
GPT-2 has (learned positions, LayerNorm, biases) and what T5X's decoder-only
network has (relative bias, RMS norm, no biases). The parameter tree is T5X's;
parameters that T5X has no name for have Flax's names. Two factors are applied
as in T5X, in both families: the 1/sqrt(D) of attention scores is part of the
query projection, and a shared embedding reads x / sqrt(M). For checkpoints of
another convention the factors are moved into the weights
(`checkpoints.gpt2_names`).
"""

import dataclasses
import functools
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specdec_jax.checks.fields import check_types
from specdec_jax.models import (
  decoder_attention,
  kv_cache,
  layers,
  norms,
  products,
)
from specdec_jax.models.base import Params
from specdec_jax.models.linen_model import DecoderOnly

LAYER_NORM_EPSILON = 1e-5  # GPT-2's


@dataclasses.dataclass(frozen=True)
class GPTConfig:
  """Shape of a decoder-only model; the defaults are GPT-2's.

  Attributes:
    vocab_size: V, rows of the embedding.
    emb_dim: M.
    num_heads: H.
    num_layers: layers of the decoder.
    head_dim: D; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('gelu',), the tanh form, in GPT-2; ('gelu', 'linear') is
      a gated gelu.
    num_positions: rows of learned position embeddings, which is also the most
      tokens that a sequence can have; 0 is T5's relative bias instead, which
      allows any number of tokens.
    norm: 'layer' (LayerNorm with a bias, epsilon 1e-5) or 'rms' (T5's).
    use_bias: whether projections have biases; the output layer has none.
    logits_via_embedding: whether the output layer is the embedding.
    dropout_rate: used in training only.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.

  Raises:
    ValueError: a size is too small, or a name is unknown.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_layers: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('gelu',)
  num_positions: int = 1024
  norm: Literal['layer', 'rms'] = 'layer'
  use_bias: bool = True
  logits_via_embedding: bool = True
  dropout_rate: float = 0.0
  dtype: str = 'float32'

  def __post_init__(self):
    check_types(self)
    object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))
    layers.check_config(self, may_be_zero=('num_positions',))


def _norm(config: GPTConfig) -> nn.Module:
  if config.norm == 'rms':
    return norms.RMSNorm(config.dtype)
  # Flax's fast variance loses digits if the mean is large.
  return nn.LayerNorm(
    epsilon=LAYER_NORM_EPSILON, dtype=config.dtype, use_fast_variance=False
  )


class Layer(nn.Module):
  """Self-attention and a feed-forward block, each with its residual."""

  config: GPTConfig

  def setup(self):
    config = self.config
    self.pre_self_attention_layer_norm = _norm(config)
    self.self_attention = layers.Attention(
      config.num_heads,
      config.head_dim,
      config.emb_dim,
      config.dtype,
      config.use_bias,
    )
    self.pre_mlp_layer_norm = _norm(config)
    self.mlp = layers.MLP(
      config.emb_dim,
      config.mlp_dim,
      config.mlp_activations,
      config.dropout_rate,
      config.dtype,
      config.use_bias,
    )
    self.dropout = layers.dropout(config.dropout_rate)

  def __call__(self, x, own, deterministic):
    """Maps [B, S, M] to [B, S, M], and says what was attended to.

    Args:
      x: [B, S, M].
      own: self-attention, a `decoder_attention.Own`.
      deterministic: whether dropout is off.

    Returns:
      [B, S, M], and what was attended to.
    """
    attention = self.self_attention
    normed = self.pre_self_attention_layer_norm(x)
    mixed, kept = own(*attention.project_qkv(normed))
    after = functools.partial(
      layers.after, dropout=self.dropout, deterministic=deterministic
    )
    x = after(x, functools.partial(attention.out, mixed))
    normed = self.pre_mlp_layer_norm(x)
    x = after(x, functools.partial(self.mlp, normed, deterministic))
    return x, kept


class Decoder(nn.Module):
  """Embeddings, the stack and the output layer, with or without a cache."""

  config: GPTConfig

  def setup(self):
    config = self.config
    self.token_embedder = layers.Embed(
      config.vocab_size, config.emb_dim, config.dtype
    )
    if config.num_positions:
      self.position_embedder = layers.Embed(
        config.num_positions, config.emb_dim, config.dtype
      )
    else:
      self.relpos_bias = layers.RelativeBias(
        config.num_heads, bidirectional=False
      )
    self.layers = [Layer(config) for _ in range(config.num_layers)]
    self.decoder_norm = _norm(config)
    self.dropout = layers.dropout(config.dropout_rate)
    if not config.logits_via_embedding:
      self.logits_dense = products.head(config.vocab_size, config.dtype)

  def __call__(self, tokens, deterministic=True):
    """Teacher-forced logits float32[B, S, V] of tokens int32[B, S]."""
    return self.head(self.features(tokens, deterministic))

  def features(self, tokens, deterministic=True):
    """Teacher-forced features [B, S, M]: what the output layer reads."""
    position = np.arange(tokens.shape[1])
    bias = self._score_bias(position[None, :] - position[:, None])
    own = decoder_attention.in_turn(
      kv_cache.without_cache, kv_cache.reader(bias[None])
    )
    x = self._embed(tokens, position)
    x = self.dropout(x, deterministic=deterministic)
    for layer in self.layers:
      x, _ = layer(x, own, deterministic)
    return self._last(x, deterministic)

  def empty_cache(self, batch: int, num_slots: int) -> kv_cache.KVCache:
    """A `KVCache` of `batch` rows that have read nothing."""
    size = self.config.num_layers, batch, num_slots
    relative = np.arange(2 * num_slots) - (num_slots - 1)  # slot - query
    return kv_cache.KVCache(
      **kv_cache.empty_slots(self.config, *size),
      cross_keys=(),
      cross_values=(),
      cross_bias=None,
      position_bias=(self._score_bias(relative),),
      length=jnp.zeros((batch,), jnp.int32),
    )

  def extend_features(self, cache, tokens, tree=None):
    """Features [B, S, M] and the grown cache.

    Args:
      cache: a `KVCache`.
      tokens: int32[B, S].
      tree: how they hang together; None is one after another.
    """
    num_queries = tokens.shape[1]
    steps = decoder_attention.own_steps(cache, num_queries, tree)
    positions = kv_cache.positions(cache, num_queries, tree)
    x = self._embed(tokens, positions)
    kept = []
    for layer, own in zip(self.layers, steps, strict=True):
      x, memory = layer(x, own, True)
      kept.append(memory)
    cache = cache.grown(kept, num_queries)
    return self._last(x, True), cache

  def embed(self, tokens):
    """Maps int32[...] to the embeddings of tokens alone, [..., M]."""
    return self.token_embedder(tokens)

  def _embed(self, tokens: jax.Array, positions: Any) -> jax.Array:
    """[B, S, M] of tokens at positions int[S] or int[B, S]."""
    x = self.embed(tokens)
    if self.config.num_positions:
      x = x + self.position_embedder(positions)
    return x

  def _score_bias(self, relative: np.ndarray) -> jax.Array:
    """Causal mask and relative bias added together, float32[H or 1, ...].

    Args:
      relative: int[...], slot - query position.
    """
    bias: Any = np.zeros((1, *relative.shape), np.float32)
    if not self.config.num_positions:
      bias = self.relpos_bias(np.minimum(relative, 0))
    return jnp.where(relative > 0, layers.MASKED, bias)

  def _last(self, x, deterministic):
    return self.dropout(self.decoder_norm(x), deterministic=deterministic)

  def head(self, features):
    """The output layer: maps [..., M] to logits float32[..., V]."""
    if self.config.logits_via_embedding:
      return self.token_embedder.attend(features)
    return self.logits_dense(features)


@dataclasses.dataclass(frozen=True)
class GPT(DecoderOnly):
  """A decoder-only model as a `LanguageModel`; see `models.base`."""

  config: GPTConfig

  def __post_init__(self):
    check_types(self)

  @property
  def _decoder(self) -> Decoder:
    return Decoder(self.config)

  def logits(
    self,
    params: Params,
    inputs: Any,
    decoder_inputs: jax.Array,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Teacher-forced logits, as training and scoring need them.

    Args:
      params: the parameters.
      inputs: ignored; accepted so that training objectives can treat all models
        alike.
      decoder_inputs: int32[B, S], the targets shifted right, after the token
        that texts begin with.
      dropout_key: turns dropout on; consumed.

    Returns:
      float32[B, S, V].

    Raises:
      ValueError: S exceeds the number of learned positions.
    """
    del inputs
    self._check_length(decoder_inputs.shape[1])
    rngs = None if dropout_key is None else {'dropout': dropout_key}
    logits = self._apply(
      params, decoder_inputs, deterministic=dropout_key is None, rngs=rngs
    )
    return cast(jax.Array, logits)

  def features(
    self, params: Params, inputs: Any, decoder_inputs: jax.Array
  ) -> jax.Array:
    """Teacher-forced features [B, S, M]: what `head` makes `logits` of.

    Raises:
      ValueError: S exceeds the number of learned positions.
    """
    del inputs
    self._check_length(decoder_inputs.shape[1])
    features = self._apply(params, decoder_inputs, method='features')
    return cast(jax.Array, features)

  def prefill(self, params, inputs, max_length, longest=None):
    """Returns an empty `KVCache` of inputs' B rows and `max_length` slots.

    Raises:
      ValueError: a sequence would exceed the number of learned positions.
    """
    self._check_length(longest or max_length)
    return self._apply(
      params, inputs.shape[0], max_length, method='empty_cache'
    )

  def _check_length(self, length: int) -> None:
    limit = self.config.num_positions
    if limit and length > limit:
      raise ValueError(
        f'{length} slots were asked for, but this model has learned'
        f' {limit} positions. Prompt, output and a whole draft must fit in'
        f' them (an engine rounds their sum up to a multiple of 64): lower'
        ' max_input_len, max_decode_len or gamma.'
      )
