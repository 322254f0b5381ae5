"""T5 1.0 and 1.1: sizes, network, and the `LanguageModel` made from them.

The parameter tree is T5X's, so that a T5X checkpoint loads without renaming.
Layers are unrolled: a scanned stack would copy its weights at each step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from specdec_jax.checks.fields import check_types
from specdec_jax.models import (
  backend,
  decoder_attention,
  kv_cache,
  layers,
  norms,
  products,
)
from specdec_jax.models.base import Drawn, Draws, Ends, Params
from specdec_jax.models.linen_model import EncodesInputs


@dataclasses.dataclass(frozen=True)
class T5Config:
  """Shape of a T5; the fields are T5X's.

  Attributes:
    vocab_size: V, rows of the embedding (T5's own are padded to 32128).
    emb_dim: M.
    num_heads: H.
    num_encoder_layers: layers of the encoder; 0 is a decoder alone, which reads
      what another T5's encoder says, see `T5.reads_encoder`.
    num_decoder_layers: layers of the decoder.
    head_dim: D; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('relu',) in T5 1.0, ('gelu', 'linear') in T5 1.1.
    dropout_rate: used in training only.
    logits_via_embedding: True in T5 1.0 (the output layer is the embedding).
    bias_per_layer: True if each layer has a relative bias of its own, as in
      T5X's `scalable_t5` and in UMT5; otherwise a stack's layers share one.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.
    encoder_dim: of a decoder alone, the width of the encoder's output that it
      reads; 0 is `emb_dim`, as with an encoder of its own.

  Raises:
    ValueError: a size is not positive, or a name is unknown; or `encoder_dim`
      is given beside an encoder.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_encoder_layers: int
  num_decoder_layers: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('gelu', 'linear')
  dropout_rate: float = 0.0
  logits_via_embedding: bool = False
  bias_per_layer: bool = False
  dtype: str = 'float32'
  encoder_dim: int = 0

  def __post_init__(self):
    check_types(self)
    object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))
    layers.check_config(self, ('num_encoder_layers', 'encoder_dim'))
    if self.num_encoder_layers and self.encoder_dim:
      raise ValueError(
        f'T5Config.encoder_dim is {self.encoder_dim} beside'
        f' {self.num_encoder_layers} encoder layers: it is of a decoder alone'
        ' (num_encoder_layers = 0). Leave it out.'
      )

  @property
  def encoded_dim(self) -> int:
    """The width of the encoder's output that cross-attention reads."""
    return self.encoder_dim or self.emb_dim


def _norm(config: T5Config, folds: bool = False) -> nn.Module:
  return norms.RMSNorm(config.dtype, folds=folds)


def _attention(config: T5Config) -> layers.Attention:
  return layers.Attention(
    config.num_heads, config.head_dim, config.emb_dim, config.dtype
  )


def _mlp(config: T5Config) -> layers.MLP:
  return layers.MLP(
    config.emb_dim,
    config.mlp_dim,
    config.mlp_activations,
    config.dropout_rate,
    config.dtype,
  )


def _relative_bias(config: T5Config, bidirectional: bool):
  return layers.RelativeBias(config.num_heads, bidirectional=bidirectional)


def _biases(stack, relative: np.ndarray, causal: bool) -> list[jax.Array]:
  """The bias that each layer of a stack adds to its scores, float32[H, ...].

  Args:
    stack: an encoder or decoder.
    relative: int[...], key - query position; if not causal int[2 * E - 1], all
      that there are, from the least on, and the result is [H, E, E].
    causal: whether keys after the query are masked.
  """

  def of(owner):
    if not causal:
      return _of_pairs(owner.relpos_bias(relative))
    bias = owner.relpos_bias(np.minimum(relative, 0))
    return jnp.where(relative > 0, layers.MASKED, bias)

  if stack.config.bias_per_layer:
    return [of(layer) for layer in stack.layers]
  return [of(stack)] * len(stack.layers)


def _of_pairs(of_distances: jax.Array) -> jax.Array:
  """The bias of each (query, key), [H, E, E], from that of each distance.

  The places are computed in the program. Buckets of all pairs, known at trace
  time, would be a constant of E * E numbers in it.
  """
  size = (of_distances.shape[1] + 1) // 2
  shape = (size, size)
  query, key = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
  return jnp.take(of_distances, key - query + size - 1, axis=1, mode='clip')


class EncoderLayer(nn.Module):
  """Self-attention and a feed-forward block, each with its residual."""

  config: T5Config

  def setup(self):
    if self.config.bias_per_layer:
      self.relpos_bias = _relative_bias(self.config, bidirectional=True)
    self.pre_attention_layer_norm = _norm(self.config, folds=True)
    self.attention = _attention(self.config)
    self.pre_mlp_layer_norm = _norm(self.config, folds=True)
    self.mlp = _mlp(self.config)
    self.dropout = layers.dropout(self.config.dropout_rate)

  def __call__(self, x, bias, deterministic):
    """Maps [B, E, M] to [B, E, M]; bias is [B, H, E, E]."""
    normed = self.pre_attention_layer_norm(x)
    queries, keys, values = self.attention.project_qkv(normed)
    keys, values = kv_cache.without_cache(keys, values)
    mixed = layers.attend(queries, keys, values, bias)
    mixed = self.attention.out(mixed)
    x = x + self.dropout(mixed, deterministic=deterministic)
    hidden = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
    return x + self.dropout(hidden, deterministic=deterministic)


class Encoder(nn.Module):
  """The encoder stack with its relative bias and final norm."""

  config: T5Config

  def setup(self):
    config = self.config
    if not config.bias_per_layer:
      self.relpos_bias = _relative_bias(config, bidirectional=True)
    self.layers = [
      EncoderLayer(config) for _ in range(config.num_encoder_layers)
    ]
    self.encoder_norm = _norm(config)
    self.dropout = layers.dropout(config.dropout_rate)

  def __call__(self, x, padding_bias, deterministic):
    """Maps embedded inputs [B, E, M] to [B, E, M]."""
    x = self.dropout(x, deterministic=deterministic)
    relative = np.arange(1 - x.shape[1], x.shape[1])
    biases = _biases(self, relative, causal=False)
    for layer, bias in zip(self.layers, biases, strict=True):
      x = layer(x, bias[None] + padding_bias, deterministic)
    return self.dropout(self.encoder_norm(x), deterministic=deterministic)


class DecoderLayer(nn.Module):
  """Self-attention, cross-attention and a feed-forward block."""

  config: T5Config

  def setup(self):
    if self.config.bias_per_layer:
      self.relpos_bias = _relative_bias(self.config, bidirectional=False)
    self.pre_self_attention_layer_norm = _norm(self.config, folds=True)
    self.self_attention = _attention(self.config)
    self.pre_cross_attention_layer_norm = _norm(self.config, folds=True)
    self.encoder_decoder_attention = _attention(self.config)
    self.pre_mlp_layer_norm = _norm(self.config, folds=True)
    self.mlp = _mlp(self.config)
    self.dropout = layers.dropout(self.config.dropout_rate)

  def __call__(self, x, own, cross, deterministic):
    """Maps [B, S, M] to [B, S, M], and says what was attended to.

    Args:
      x: [B, S, M].
      own: self-attention, a `decoder_attention.Own`.
      cross: attention to the encoder's output, a `decoder_attention.Cross`.
      deterministic: whether dropout is off.
    """
    attention = self.self_attention
    normed = self.pre_self_attention_layer_norm(x)
    mixed, kept = own(*attention.project_qkv(normed))
    after = functools.partial(
      layers.after, dropout=self.dropout, deterministic=deterministic
    )
    x = after(x, functools.partial(attention.out, mixed))
    normed = self.pre_cross_attention_layer_norm(x)
    attention = self.encoder_decoder_attention
    mixed = cross(attention.project_query(normed))
    x = after(x, functools.partial(attention.out, mixed))
    normed = self.pre_mlp_layer_norm(x)
    x = after(x, functools.partial(self.mlp, normed, deterministic))
    return x, kept


class Decoder(nn.Module):
  """The decoder stack, with or without a cache."""

  config: T5Config

  def setup(self):
    config = self.config
    if not config.bias_per_layer:
      self.relpos_bias = _relative_bias(config, bidirectional=False)
    self.layers = [
      DecoderLayer(config) for _ in range(config.num_decoder_layers)
    ]
    self.decoder_norm = _norm(config)
    self.dropout = layers.dropout(config.dropout_rate)
    if not config.logits_via_embedding:
      self.logits_dense = products.head(config.vocab_size, config.dtype)

  def position_bias(self, num_slots: int):
    """Returns `KVCache.position_bias`, each float32[H, 2 * num_slots]."""
    relative = np.arange(2 * num_slots) - (num_slots - 1)  # slot - query
    biases = _biases(self, relative, causal=True)
    return tuple(biases if self.config.bias_per_layer else biases[:1])

  def cross_kv(self, encoded):
    """Returns each layer's cross-attention keys and values, [B, H, D, E]."""
    pairs = []
    for layer in self.layers:
      pair = layer.encoder_decoder_attention.project_kv(encoded)
      if backend.ways().orders_layers:
        # Else XLA copies all layers' kernels into one array, for one product.
        encoded, pair = lax.optimization_barrier((encoded, pair))
      pairs.append(pair)
    keys = tuple(kv_cache.slots_last(pair[0]) for pair in pairs)
    values = tuple(kv_cache.slots_last(pair[1]) for pair in pairs)
    return keys, values

  def _last(self, x, deterministic):
    """What the output layer reads, [B, S, M]."""
    return self.dropout(self.decoder_norm(x), deterministic=deterministic)

  def head(self, features, embedder):
    """The output layer: maps [..., M] to logits [..., V]."""
    if self.config.logits_via_embedding:
      return embedder.attend(features)
    return self.logits_dense(features)

  def __call__(self, x, encoded, cross_bias, deterministic):
    """Teacher-forced features [B, S, M] of embedded tokens [B, S, M]."""
    position = np.arange(x.shape[1])
    relative = position[None, :] - position[:, None]
    biases = _biases(self, relative, causal=True)
    x = self.dropout(x, deterministic=deterministic)
    cross = self.cross_kv(encoded)
    for layer, bias, *kv in zip(self.layers, biases, *cross, strict=True):
      own = decoder_attention.in_turn(
        kv_cache.without_cache, kv_cache.reader(bias[None])
      )
      read = decoder_attention.across((*kv, cross_bias))
      x, _ = layer(x, own, read, deterministic)
    return self._last(x, deterministic)

  def extend(self, x, cache, write=kv_cache.write, tree=None):
    """Features [B, S, M] and the cache grown by S embedded tokens."""
    num_queries = x.shape[1]
    if write is kv_cache.write and _wants_kernels(x.shape[0] * num_queries):
      # Imported only where it is used: it takes a second.
      from specdec_jax.models import t5_kernels  # noqa: PLC0415

      call = self.config, self.variables['params'], x, cache, tree
      if t5_kernels.take_layers(*call):
        x, kept, _ = t5_kernels.layers(*call)
        return self._last(x, True), cache.grown(kept, num_queries)
    owns = decoder_attention.own_steps(cache, num_queries, tree, write)
    crosses = decoder_attention.cross_steps(cache, num_queries, write)
    kept = []
    for layer, own, cross in zip(self.layers, owns, crosses, strict=True):
      x, memory = layer(x, own, cross, True)
      kept.append(memory)
    cache = cache.grown(kept, num_queries)
    return self._last(x, True), cache


def _wants_kernels(num_tokens: int) -> bool:
  """Whether a call's layers are to be one kernel each, if they can be."""
  return backend.wants_layers() and num_tokens <= norms.MOST_FOLDED_ROWS


class EncoderDecoder(nn.Module):
  """The linen module behind `t5.T5`."""

  config: T5Config

  def setup(self):
    config = self.config
    self.token_embedder = layers.Embed(
      config.vocab_size, config.emb_dim, config.dtype
    )
    if config.num_encoder_layers:
      self.encoder = Encoder(config)
    self.decoder = Decoder(config)

  def _padding_bias(self, inputs):
    """The bias [B, 1, 1, E] that hides the padding of inputs [B, E]."""
    return layers.padding_bias(inputs)

  def encode(self, inputs, deterministic=True):
    embedded = self.token_embedder(inputs)
    return self.encoder(embedded, self._padding_bias(inputs), deterministic)

  def features(self, inputs, decoder_inputs, deterministic=True, encoded=None):
    if encoded is None:
      encoded = self.encode(inputs, deterministic)
    embedded = self.token_embedder(decoder_inputs)
    bias = self._padding_bias(inputs)
    return self.decoder(embedded, encoded, bias, deterministic)

  def __call__(self, inputs, decoder_inputs, deterministic=True, encoded=None):
    return self.head(
      self.features(inputs, decoder_inputs, deterministic, encoded)
    )

  def prefill(self, inputs, max_length, encoded=None):
    if encoded is None:
      encoded = self.encode(inputs)
    bias = self._padding_bias(inputs)
    cross_keys, cross_values = self.decoder.cross_kv(encoded)
    size = self.config.num_decoder_layers, inputs.shape[0], max_length
    return kv_cache.KVCache(
      **kv_cache.empty_slots(self.config, *size),
      cross_keys=cross_keys,
      cross_values=cross_values,
      cross_bias=bias,
      position_bias=self.decoder.position_bias(max_length),
      length=jnp.zeros(inputs.shape[:1], jnp.int32),
    )

  def extend_features(self, cache, tokens, tree=None):
    return self.decoder.extend(self.embed(tokens), cache, tree=tree)

  def embed(self, tokens):
    return self.token_embedder(tokens)

  def head(self, features):
    return self.decoder.head(features, self.token_embedder)


@dataclasses.dataclass(frozen=True)
class T5(EncodesInputs):
  """A T5 as a `LanguageModel`; see `models.base` for the contract."""

  config: T5Config

  def __post_init__(self):
    check_types(self)

  @property
  def _module(self) -> EncoderDecoder:
    return EncoderDecoder(self.config)

  def draft(
    self,
    params: Params,
    cache: kv_cache.KVCache,
    tokens: jax.Array,
    place: jax.Array,
    count: int,
    ends: Ends | None,
    draws: Draws | None,
  ) -> Drawn[kv_cache.KVCache] | None:
    """As `base.draft`, where hand-written kernels can do it."""
    if not _wants_kernels(tokens.size):
      return None
    # Imported only where it is used: it takes a second.
    from specdec_jax.models import t5_kernels  # noqa: PLC0415

    x = self.embed(params, tokens)
    how = place, count, ends, draws
    return t5_kernels.draft(self.config, params, cache, x, *how)
