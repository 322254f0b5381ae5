"""M2M-100 and NLLB-200: T5's stacks with other parts.

Blocks and residuals stand as in T5; what differs is said here: LayerNorms and
products with biases, ReLU, sinusoidal positions that are added to scaled
embeddings, and no bias of scores but the mask. The parameter tree has T5X's
names. As in T5, the 1/sqrt(D) of attention scores is part of the query
projection (`checkpoints.m2m100_names` moves it there).

Padding is id 1, and 0 is a token; the decoder begins with the end of sequence.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specdec_jax.checks.fields import check_types
from specdec_jax.models import kv_cache, layers, t5
from specdec_jax.models.linen_model import EncodesInputs

LAYER_NORM_EPSILON = 1e-5
_LONGEST_WAVE = 10000.0


@dataclasses.dataclass(frozen=True)
class M2M100Config:
  """Shape of a model; the defaults are what all published ones have.

  Attributes:
    vocab_size: V, rows of the embedding.
    emb_dim: M, an even number.
    num_heads: H.
    num_encoder_layers: layers of the encoder.
    num_decoder_layers: layers of the decoder.
    head_dim: D; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('relu',).
    scale_embeddings: whether embeddings are multiplied by sqrt(M).
    pad_id: the id that inputs are padded with; a row's first position is
      `pad_id` + 1.
    start_id: the id that the decoder begins with.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.

  Raises:
    ValueError: a size is too small or odd, or a name is unknown.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_encoder_layers: int
  num_decoder_layers: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('relu',)
  scale_embeddings: bool = True
  pad_id: int = 1
  start_id: int = 2
  dtype: str = 'float32'
  # What T5's stacks read, and is the same in all of these models.
  bias_per_layer: ClassVar[bool] = False
  logits_via_embedding: ClassVar[bool] = True

  def __post_init__(self):
    check_types(self)
    object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))
    layers.check_config(self, may_be_zero=('pad_id', 'start_id'))
    if self.emb_dim % 2 or self.emb_dim < 4:
      raise ValueError(
        'M2M100Config.emb_dim: half of a position is sines and half cosines;'
        f' expected an even number of at least 4, got {self.emb_dim}.'
      )


def _norm(config: M2M100Config) -> nn.Module:
  # Flax's fast variance loses digits if the mean is large.
  return nn.LayerNorm(
    epsilon=LAYER_NORM_EPSILON, dtype=config.dtype, use_fast_variance=False
  )


def _attention(config: M2M100Config) -> layers.Attention:
  return layers.Attention(
    config.num_heads, config.head_dim, config.emb_dim, config.dtype, True
  )


def _mlp(config: M2M100Config) -> layers.MLP:
  return layers.MLP(
    config.emb_dim,
    config.mlp_dim,
    config.mlp_activations,
    0.0,
    config.dtype,
    use_bias=True,
  )


def sinusoids(positions: jax.Array, size: int) -> jax.Array:
  """Maps positions int[...] to float32[..., size]: sines, then cosines.

  As in tensor2tensor, wavelengths grow from 2 pi to 2 pi * 10000, both
  included.
  """
  half = size // 2
  exponents = np.arange(half, dtype=np.float32) / (half - 1)
  rates = np.exp(exponents * -np.log(np.float32(_LONGEST_WAVE)))
  angles = positions[..., None].astype(jnp.float32) * rates
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class EncoderLayer(t5.EncoderLayer):
  """T5's, with biases."""

  config: Any

  def setup(self):
    self.pre_attention_layer_norm = _norm(self.config)
    self.attention = _attention(self.config)
    self.pre_mlp_layer_norm = _norm(self.config)
    self.mlp = _mlp(self.config)
    self.dropout = layers.dropout(0.0)


class Encoder(t5.Encoder):
  """The encoder stack and its final norm."""

  config: Any

  def setup(self):
    count = self.config.num_encoder_layers
    self.layers = [EncoderLayer(self.config) for _ in range(count)]
    self.encoder_norm = _norm(self.config)

  def __call__(self, x, padding_bias, deterministic):
    """Maps embedded inputs [B, E, M] to [B, E, M]."""
    for layer in self.layers:
      x = layer(x, padding_bias, deterministic)
    return self.encoder_norm(x)


class DecoderLayer(t5.DecoderLayer):
  """T5's, with biases."""

  config: Any

  def setup(self):
    self.pre_self_attention_layer_norm = _norm(self.config)
    self.self_attention = _attention(self.config)
    self.pre_cross_attention_layer_norm = _norm(self.config)
    self.encoder_decoder_attention = _attention(self.config)
    self.pre_mlp_layer_norm = _norm(self.config)
    self.mlp = _mlp(self.config)
    self.dropout = layers.dropout(0.0)


class Decoder(t5.Decoder):
  """T5's, of these layers and without a relative bias."""

  config: Any

  def setup(self):
    config = self.config
    self.layers = [
      DecoderLayer(config) for _ in range(config.num_decoder_layers)
    ]
    self.decoder_norm = _norm(config)
    self.dropout = layers.dropout(0.0)

  def relpos_bias(self, relative: np.ndarray) -> np.ndarray:
    """Zeros, float32[1, ...]: the bias of scores is the mask alone."""
    return np.zeros((1, *relative.shape), np.float32)


class EncoderDecoder(t5.EncoderDecoder):
  """The linen module behind `M2M100`."""

  config: Any

  def setup(self):
    config = self.config
    self.token_embedder = layers.Embed(
      config.vocab_size, config.emb_dim, config.dtype, divides_logits=False
    )
    self.encoder = Encoder(config)
    self.decoder = Decoder(config)

  def _padding_bias(self, inputs):
    return layers.padding_bias(inputs, self.config.pad_id)

  def encode(self, inputs, deterministic=True):
    is_token = inputs != self.config.pad_id
    # Padding, which is masked, may have any position.
    embedded = self._at(inputs, jnp.cumsum(is_token, axis=1) - 1)
    return self.encoder(embedded, self._padding_bias(inputs), deterministic)

  def features(self, inputs, decoder_inputs, deterministic=True, encoded=None):
    if encoded is None:
      encoded = self.encode(inputs)
    embedded = self._at(decoder_inputs, jnp.arange(decoder_inputs.shape[1]))
    bias = self._padding_bias(inputs)
    return self.decoder(embedded, encoded, bias, deterministic)

  def extend_features(self, cache, tokens, tree=None):
    place = kv_cache.positions(cache, tokens.shape[1], tree)
    return self.decoder.extend(self._at(tokens, place), cache, tree=tree)

  def embed(self, tokens):
    x = self.token_embedder(tokens)
    if self.config.scale_embeddings:
      x = x * jnp.asarray(np.sqrt(self.config.emb_dim), x.dtype)
    return x

  def _at(self, tokens, place):
    """Embeds tokens [B, S] that stand at places int[S] or int[B, S] of a row.

    Places count from 0.
    """
    first = self.config.pad_id + 1
    position = sinusoids(place + first, self.config.emb_dim)
    return self.embed(tokens) + position.astype(self.config.dtype)


@dataclasses.dataclass(frozen=True)
class M2M100(EncodesInputs):
  """A model as a `LanguageModel`; see `models.base` for the contract."""

  config: M2M100Config

  def __post_init__(self):
    check_types(self)

  @property
  def start_id(self) -> int:
    """The id that the decoder begins with; a language's token follows it."""
    return self.config.start_id

  @property
  def pad_id(self) -> int:
    """The id that inputs are padded with."""
    return self.config.pad_id

  @property
  def _module(self) -> EncoderDecoder:
    return EncoderDecoder(self.config)
