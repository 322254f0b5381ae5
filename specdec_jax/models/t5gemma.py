"""T5Gemma 1 and 2: an encoder and a decoder, each a stack of Gemma's layers.

The stacks are those of `causal_lm`, with Gemma's embeddings, rotary positions,
norms, windows and caps. T5Gemma 1's decoder has T5's cross-attention as a block
of its own. T5Gemma 2's has none: its self-attention also sees what the encoder
says, under the same softmax and through the same projections; these keys have
no positions and no window.

There is no second path without a cache: teacher-forced logits are those of one
call over a cache that is as long as the text.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import check_choice
from specdec_jax.models import (
  backend,
  decoder_attention,
  kv_cache,
  layers,
  products,
)
from specdec_jax.models.base import Params
from specdec_jax.models.causal_lm import (
  CausalLMConfig,
  Layer,
  angles_of,
  attend_of,
  capped,
  causal_masks,
  embed,
  embedder,
  masks,
  norm,
  scores_of,
)
from specdec_jax.models.linen_model import LinenModel


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig:
  """Shape of a model.

  Attributes:
    encoder: shape of the encoder's stack. What a local layer of it sees is no
      matter of causality: in T5Gemma 1 `window` tokens to each side, in T5Gemma
      2 `window` tokens in all, its own included.
    decoder: shape of the decoder's stack.
    merged_attention: True in T5Gemma 2: one attention over the tokens so far
      and the encoder's output, and one table of embeddings for both stacks.
    start_id: id that the decoder begins with.
    image_end_id: of T5Gemma 2, an id with an embedding of its own beside the
      table, the end of an image; 0 is none.
    dtype: dtype of the computation, also of the stacks.

  Raises:
    ValueError: the stacks do not fit each other, or a value is unknown.
  """

  encoder: CausalLMConfig
  decoder: CausalLMConfig
  merged_attention: bool = False
  start_id: int = 2
  image_end_id: int = 0
  dtype: str = 'float32'

  def __post_init__(self):
    check_types(self)
    check_choice('T5GemmaConfig.dtype', self.dtype, layers.DTYPES)
    for name in ('encoder', 'decoder'):
      stack = dataclasses.replace(getattr(self, name), dtype=self.dtype)
      object.__setattr__(self, name, stack)
    names = ['vocab_size'] + ['emb_dim'] * self.merged_attention
    for name in names:
      values = [getattr(self.encoder, name), getattr(self.decoder, name)]
      if len({*values}) > 1:
        raise ValueError(
          f'T5GemmaConfig: expected one {name} of both stacks, got {values[0]}'
          f' of the encoder and {values[1]} of the decoder.'
        )
    for name in ('start_id', 'image_end_id'):
      if not 0 <= getattr(self, name) < self.vocab_size:
        raise ValueError(
          f'T5GemmaConfig.{name} must be an id below {self.vocab_size}, got'
          f' {getattr(self, name)}.'
        )

  @property
  def vocab_size(self) -> int:
    """V, rows of the embeddings."""
    return self.decoder.vocab_size

  @property
  def emb_dim(self) -> int:
    """M of the decoder."""
    return self.decoder.emb_dim

  @property
  def encoded_dim(self) -> int:
    """M of the encoder, the width of its output."""
    return self.encoder.emb_dim

  @property
  def num_heads(self) -> int:
    """The most heads of queries of a layer."""
    return max(self.encoder.num_heads, self.decoder.num_heads)

  @property
  def sides(self) -> tuple[int, int]:
    """Tokens that the encoder's local layers see before and after one."""
    window = self.encoder.window
    if self.merged_attention:
      return (window - 1) // 2, window // 2
    return window, window


class Encoder(nn.Module):
  """The encoder's stack; with embeddings of its own in T5Gemma 1."""

  config: T5GemmaConfig

  def setup(self):
    stack = self.config.encoder
    if not self.config.merged_attention:
      self.token_embedder = embedder(stack)
    self.layers = [Layer(stack) for _ in range(stack.num_layers)]
    self.encoder_norm = norm(stack)

  def __call__(self, x, padding_bias):
    """Maps embedded inputs [B, E, M] to [B, E, M]."""
    stack = self.config.encoder
    place = jnp.arange(x.shape[1])
    relative = place - place[:, None]  # key - query
    before, after = self.config.sides
    unseen = {
      'global': jnp.zeros_like(relative, bool),
      'local': (relative < -before) | (relative > after),
    }
    owns = [
      decoder_attention.in_turn(
        kv_cache.without_cache,
        kv_cache.reader(mask[None] + padding_bias, attend_of(stack)),
      )
      for mask in masks(stack, unseen)
    ]
    angles = angles_of(stack, place)
    for layer, kind in zip(self.layers, stack.kind_of, strict=True):
      x, _ = layer(x, angles[kind], owns[kind])
    return self.encoder_norm(x)


class CrossLayer(Layer):
  """A `Layer` of T5Gemma 1's decoder: cross-attention between its halves."""

  def setup(self):
    super().setup()
    config = self.config
    self.pre_cross_attention_layer_norm = norm(config, folds=True)
    self.encoder_decoder_attention = layers.Attention(
      config.num_heads,
      config.head_dim,
      config.emb_dim,
      config.dtype,
      num_kv_heads=config.num_kv_heads,
    )
    if config.post_norms:
      self.post_cross_attention_layer_norm = norm(config)

  def __call__(self, x, angles, own, cross=None):
    """As `Layer`; `cross` is a `decoder_attention.Cross`."""
    x, kept = self.attended(x, angles, own)
    attention = self.encoder_decoder_attention
    queries = attention.project_query(self.pre_cross_attention_layer_norm(x))
    mixed = attention.out(cross(queries))
    if self.config.post_norms:
      mixed = self.post_cross_attention_layer_norm(mixed)
    return self.fed_forward(x + mixed), kept


class Decoder(nn.Module):
  """The decoder's stack, over a cache."""

  config: T5GemmaConfig

  def setup(self):
    stack = self.config.decoder
    layer = Layer if self.config.merged_attention else CrossLayer
    self.layers = [layer(stack) for _ in range(stack.num_layers)]
    self.decoder_norm = norm(stack)
    if not stack.logits_via_embedding:
      self.logits_dense = products.head(stack.vocab_size, stack.dtype)

  def cross_kv(self, encoded):
    """Each layer's keys and values of the encoder's output, [B, K, D, E]."""
    pairs = []
    for layer in self.layers:
      attention = (
        layer.self_attention
        if self.config.merged_attention
        else layer.encoder_decoder_attention
      )
      pair = attention.project_kv(encoded)
      if backend.ways().orders_layers:
        # Else XLA copies all layers' kernels into one array, for one product.
        encoded, pair = lax.optimization_barrier((encoded, pair))
      pairs.append(kv_cache.without_cache(*pair))
    return tuple(zip(*pairs, strict=True))

  def head(self, features, table):
    """The output layer: maps [..., M] to logits float32[..., V]."""
    stack = self.config.decoder
    if stack.logits_via_embedding:
      return capped(stack, table.attend(features))
    return capped(stack, self.logits_dense(features))

  def __call__(self, x, cache, tree=None):
    """Features [B, S, M] and the cache grown by S embedded tokens."""
    stack = self.config.decoder
    num_queries = x.shape[1]
    is_merged = self.config.merged_attention
    scores = scores_of(stack)
    owns = decoder_attention.own_steps(
      cache,
      num_queries,
      tree,
      bias_of=stack.kind_of,
      sees_encoder=is_merged,
      **scores,
    )
    # Behind the layer's own attention, unless that has seen the encoder.
    crosses = (
      [()] * len(owns)
      if is_merged
      else [
        (one,)
        for one in decoder_attention.cross_steps(cache, num_queries, **scores)
      ]
    )
    angles = angles_of(stack, kv_cache.positions(cache, num_queries, tree))
    kept = []
    for i, layer in enumerate(self.layers):
      x, memory = layer(x, angles[stack.kind_of[i]], owns[i], *crosses[i])
      kept.append(memory)
    return self.decoder_norm(x), cache.grown(kept, num_queries)


class EncoderDecoder(nn.Module):
  """The linen module behind `T5Gemma`."""

  config: T5GemmaConfig

  def setup(self):
    config = self.config
    self.token_embedder = embedder(config.decoder)
    if config.image_end_id:
      self.image_end_embedding = self.param(
        'image_end_embedding', nn.initializers.zeros, (config.emb_dim,)
      )
    self.encoder = Encoder(config)
    self.decoder = Decoder(config)

  def embed(self, tokens):
    """Maps int32[...] to what the decoder's first layer reads, [..., M]."""
    config = self.config
    x = embed(config.decoder, self.token_embedder, tokens)
    if not config.image_end_id:
      return x
    is_end = (tokens == config.image_end_id)[..., None]
    return jnp.where(is_end, self.image_end_embedding.astype(x.dtype), x)

  def encode(self, inputs):
    """The encoder's output [B, E, M] for inputs int32[B, E]."""
    if self.config.merged_attention:
      x = self.embed(inputs)
    else:
      x = embed(self.config.encoder, self.encoder.token_embedder, inputs)
    return self.encoder(x, layers.padding_bias(inputs))

  def prefill(self, inputs, max_length, encoded=None):
    """A `KVCache` that has read the inputs, and no token."""
    if encoded is None:
      encoded = self.encode(inputs)
    cross_keys, cross_values = self.decoder.cross_kv(encoded)
    stack, batch = self.config.decoder, inputs.shape[0]
    size = stack.num_layers, batch, max_length, stack.num_kv_heads
    relative = np.arange(2 * max_length) - (max_length - 1)  # slot - query
    return kv_cache.KVCache(
      **kv_cache.empty_slots(stack, *size),
      cross_keys=cross_keys,
      cross_values=cross_values,
      cross_bias=layers.padding_bias(inputs),
      position_bias=tuple(causal_masks(stack, relative)),
      length=jnp.zeros((batch,), jnp.int32),
    )

  def extend_features(self, cache, tokens, tree=None):
    """Features [B, S, M] and the grown cache."""
    return self.decoder(self.embed(tokens), cache, tree)

  def features(self, inputs, decoder_inputs):
    """Teacher-forced features [B, S, M]."""
    cache = self.prefill(inputs, decoder_inputs.shape[1])
    with backend.kernels('off'):  # they have no gradient
      return self.decoder(self.embed(decoder_inputs), cache)[0]

  def __call__(self, inputs, decoder_inputs):
    """Teacher-forced logits float32[B, S, V]."""
    return self.head(self.features(inputs, decoder_inputs))

  def head(self, features):
    """The output layer: maps [..., M] to logits float32[..., V]."""
    return self.decoder.head(features, self.token_embedder)


@dataclasses.dataclass(frozen=True)
class T5Gemma(LinenModel):
  """A T5Gemma as a `LanguageModel`; see `models.base` for the contract."""

  config: T5GemmaConfig

  def __post_init__(self):
    check_types(self)

  @property
  def has_encoder(self) -> bool:
    """True: an encoder reads the inputs."""
    return True

  @property
  def start_id(self) -> int:
    """The id that the decoder begins with."""
    return self.config.start_id

  @property
  def ends_inputs(self) -> bool:
    """False: texts begin with an id (`Engine.bos_id`), and have no end."""
    return False

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters, a nested dict with T5X's names."""
    token = jnp.ones((1, 1), jnp.int32)
    made = EncoderDecoder(self.config).init(key, token, token)
    return cast(Params, made['params'])

  def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
    """The encoder's output for inputs int32[B, E]: float[B, E, M]."""
    return cast(jax.Array, self._apply(params, inputs, method='encode'))

  def logits(
    self,
    params: Params,
    inputs: jax.Array,
    decoder_inputs: jax.Array,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Teacher-forced logits, as training and scoring need them.

    Args:
      params: the parameters.
      inputs: int32[B, E], 0 is padding.
      decoder_inputs: int32[B, S], the targets shifted right, `start_id` first.
      dropout_key: ignored: these models have no dropout.

    Returns:
      float32[B, S, V].
    """
    del dropout_key
    return cast(jax.Array, self._apply(params, inputs, decoder_inputs))

  def features(
    self, params: Params, inputs: jax.Array, decoder_inputs: jax.Array
  ) -> jax.Array:
    """Teacher-forced features [B, S, M]: what `head` makes `logits` of."""
    features = self._apply(params, inputs, decoder_inputs, method='features')
    return cast(jax.Array, features)

  def prefill(self, params, inputs, max_length, longest=None, encoded=None):
    """Runs the encoder once, unless `encoded` is what it has said.

    Returns:
      A `KVCache` with `length` 0.
    """
    del longest  # rotary positions have no end
    return self._apply(params, inputs, max_length, encoded, method='prefill')

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    return EncoderDecoder(self.config).apply(
      {'params': params}, *args, **kwargs
    )
