"""Today's decoder-only models: Llama, Qwen and Gemma.

One stack serves all of them: rotary positions, RMS norms, gated feed-forward
blocks, and heads of queries that share keys. Fields of the configuration choose
what they do not share: norms of queries and keys, norms behind the blocks,
windows, caps of scores and logits. The parameter tree has T5X's names; scales
and kernels are those of Hugging Face's files, no factor is moved into them.
"""

import dataclasses
import functools
from collections.abc import Mapping
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
from specdec_jax.models.rope import Rope, rotate

LayerKind = Literal['local', 'global']


@dataclasses.dataclass(frozen=True)
class CausalLMConfig:
  """Shape of a model; the defaults are what most of these models have.

  Attributes:
    vocab_size: V, rows of the embedding.
    emb_dim: M.
    num_heads: H, heads of queries.
    num_kv_heads: K, heads of keys and values; it divides H, and H / K heads
      that stand next to each other share one.
    num_layers: layers of the decoder.
    head_dim: D; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('silu', 'linear'), or ('gelu', 'linear') in Gemma.
    rope: positions in global layers.
    local_rope: positions in local layers; None is `rope`.
    layer_kinds: kinds of layers, 'global' and 'local', in their order and over
      and over again.
    window: tokens that a local layer sees, the current one included.
    norm_epsilon: of all norms.
    norm_offset: added to the scales of all norms; 1 in Gemma.
    qk_norm: whether each head's queries and keys are normed.
    post_norms: whether a norm follows each block, before its residual.
    qkv_bias: whether the projections of queries, keys and values have biases.
    query_scalar: scores are divided by its square root; 0 is `head_dim`.
    score_softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
    logit_softcap: the same for logits.
    scale_embeddings: whether embeddings are multiplied by sqrt(M).
    logits_via_embedding: whether the output layer is the embedding.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.

  Raises:
    ValueError: a size is too small or does not fit another, or a name is
      unknown.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_kv_heads: int
  num_layers: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('silu', 'linear')
  rope: Rope = Rope()
  local_rope: Rope | None = None
  layer_kinds: tuple[LayerKind, ...] = ('global',)
  window: int = 0
  norm_epsilon: float = 1e-6
  norm_offset: float = 0.0
  qk_norm: bool = False
  post_norms: bool = False
  qkv_bias: bool = False
  query_scalar: float = 0.0
  score_softcap: float = 0.0
  logit_softcap: float = 0.0
  scale_embeddings: bool = False
  logits_via_embedding: bool = False
  dtype: str = 'float32'

  def __post_init__(self):
    check_types(self)
    for name in ('mlp_activations', 'layer_kinds'):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    layers.check_config(self, may_be_zero=('window',))
    if self.num_heads % self.num_kv_heads or self.head_dim % 2:
      raise ValueError(
        'CausalLMConfig: expected num_heads to be a multiple of num_kv_heads,'
        f' and an even head_dim, got {self.num_heads}, {self.num_kv_heads} and'
        f' {self.head_dim}.'
      )
    if not self.layer_kinds or ('local' in self.layer_kinds) != bool(
      self.window
    ):
      raise ValueError(
        'CausalLMConfig: local layers need a window of at least 1 token, and a'
        f' window needs local layers; got layer_kinds {self.layer_kinds} and'
        f' window {self.window}.'
      )
    for name in ('query_scalar', 'score_softcap', 'logit_softcap'):
      if getattr(self, name) < 0:
        raise ValueError(
          f'CausalLMConfig.{name} must be above 0, or 0 for none, got'
          f' {getattr(self, name)}.'
        )
    if self.norm_epsilon <= 0:
      raise ValueError(
        f'CausalLMConfig.norm_epsilon must be above 0, got {self.norm_epsilon}.'
      )

  @property
  def kinds(self) -> tuple[LayerKind, ...]:
    """The kinds of layers that there are."""
    return tuple(dict.fromkeys(self.layer_kinds[: self.num_layers]))

  @property
  def kind_of(self) -> tuple[int, ...]:
    """For each layer, the number of its kind among `kinds`."""
    repeated = (
      self.layer_kinds[i % len(self.layer_kinds)]
      for i in range(self.num_layers)
    )
    return tuple(map(self.kinds.index, repeated))


def norm(config: CausalLMConfig, folds: bool = False) -> norms.RMSNorm:
  """A norm of a stack."""
  return norms.RMSNorm(
    config.dtype, config.norm_epsilon, config.norm_offset, folds
  )


def embedder(config: CausalLMConfig) -> layers.Embed:
  """The table of a stack's embeddings."""
  return layers.Embed(
    config.vocab_size, config.emb_dim, config.dtype, divides_logits=False
  )


def embed(
  config: CausalLMConfig, table: layers.Embed, tokens: jax.Array
) -> jax.Array:
  """Maps int32[...] to what the first layer reads, [..., M]."""
  x = table(tokens)
  if config.scale_embeddings:
    # Rounded to the dtype, as Gemma was trained.
    x = x * jnp.asarray(np.sqrt(config.emb_dim), x.dtype)
  return x


def capped(config: CausalLMConfig, logits: jax.Array) -> jax.Array:
  """Logits float32[..., V] with the configuration's softcap."""
  cap = config.logit_softcap
  return cap * jnp.tanh(logits / cap) if cap else logits


def scores_of(config: CausalLMConfig) -> dict[str, Any]:
  """The configuration's `scale` and `softcap` of `layers.attend`."""
  return {
    'scale': (config.query_scalar or config.head_dim) ** -0.5,
    'softcap': config.score_softcap,
  }


def attend_of(config: CausalLMConfig) -> kv_cache.Attend:
  """`layers.attend` with them."""
  return functools.partial(layers.attend, **scores_of(config))


def angles_of(
  config: CausalLMConfig, positions: jax.Array
) -> list[tuple[jax.Array, ...]]:
  """Each kind's `Rope.angles`."""
  ropes = {'global': config.rope, 'local': config.local_rope or config.rope}
  return [
    ropes[kind].angles(positions, config.head_dim) for kind in config.kinds
  ]


def masks(config: CausalLMConfig, unseen: Mapping[str, Any]) -> list[jax.Array]:
  """Each kind's mask, float32[1, ...], very negative at what is not seen.

  Args:
    config: the configuration.
    unseen: kind -> bool[...].
  """
  return [
    jnp.where(unseen[kind][None], np.float32(layers.MASKED), np.float32(0))
    for kind in config.kinds
  ]


def causal_masks(
  config: CausalLMConfig, relative: np.ndarray
) -> list[jax.Array]:
  """`masks` of a decoder, from int[...], slot - query position."""
  after = relative > 0
  local = after | (relative <= -config.window)
  return masks(config, {'global': after, 'local': local})


class Layer(nn.Module):
  """Self-attention and a feed-forward block, each with its residual."""

  config: CausalLMConfig

  def setup(self):
    config = self.config
    self.pre_self_attention_layer_norm = norm(config, folds=True)
    self.self_attention = layers.Attention(
      config.num_heads,
      config.head_dim,
      config.emb_dim,
      config.dtype,
      num_kv_heads=config.num_kv_heads,
      qkv_bias=config.qkv_bias,
      norm=functools.partial(norm, config) if config.qk_norm else None,
    )
    self.pre_mlp_layer_norm = norm(config, folds=True)
    self.mlp = layers.MLP(
      config.emb_dim, config.mlp_dim, config.mlp_activations, 0.0, config.dtype
    )
    if config.post_norms:
      self.post_self_attention_layer_norm = norm(config)
      self.post_mlp_layer_norm = norm(config)

  def __call__(self, x, angles, own):
    """Maps [B, S, M] to [B, S, M], and says what was attended to.

    Args:
      x: [B, S, M].
      angles: of this call's positions, see `Rope.angles`.
      own: self-attention, a `decoder_attention.Own`.

    Returns:
      [B, S, M], and what was attended to.
    """
    x, kept = self.attended(x, angles, own)
    return self.fed_forward(x), kept

  def attended(self, x, angles, own):
    """The first half of a call."""
    attention = self.self_attention
    normed = self.pre_self_attention_layer_norm(x)
    queries, keys, values = attention.project_qkv(normed)
    turned = [rotate(one, angles) for one in (queries, keys)]
    mixed, kept = own(*turned, values)
    if not self.config.post_norms:
      return attention.out(mixed, x), kept
    return x + self.post_self_attention_layer_norm(attention.out(mixed)), kept

  def fed_forward(self, x):
    """The second half of a call."""
    normed = self.pre_mlp_layer_norm(x)
    if not self.config.post_norms:
      return self.mlp(normed, True, x)
    return x + self.post_mlp_layer_norm(self.mlp(normed, True))


class Decoder(nn.Module):
  """Embeddings, the stack and the output layer, with or without a cache."""

  config: CausalLMConfig

  def setup(self):
    config = self.config
    self.token_embedder = embedder(config)
    self.layers = [Layer(config) for _ in range(config.num_layers)]
    self.decoder_norm = norm(config)
    if not config.logits_via_embedding:
      self.logits_dense = products.head(config.vocab_size, config.dtype)

  def __call__(self, tokens):
    """Teacher-forced logits float32[B, S, V] of tokens int32[B, S]."""
    return self.head(self.features(tokens))

  def features(self, tokens):
    """Teacher-forced features [B, S, M]: what the output layer reads."""
    position = np.arange(tokens.shape[1])
    relative = position[None, :] - position[:, None]
    owns = [
      decoder_attention.in_turn(
        kv_cache.without_cache,
        kv_cache.reader(mask[None], attend_of(self.config)),
      )
      for mask in causal_masks(self.config, relative)
    ]
    angles = angles_of(self.config, jnp.arange(tokens.shape[1]))
    x = self.embed(tokens)
    for layer, kind in zip(self.layers, self.config.kind_of, strict=True):
      x, _ = layer(x, angles[kind], owns[kind])
    return self.decoder_norm(x)

  def empty_cache(self, batch: int, num_slots: int) -> kv_cache.KVCache:
    """A `KVCache` of `batch` rows that have read nothing."""
    config = self.config
    size = config.num_layers, batch, num_slots, config.num_kv_heads
    relative = np.arange(2 * num_slots) - (num_slots - 1)  # slot - query
    return kv_cache.KVCache(
      **kv_cache.empty_slots(config, *size),
      cross_keys=(),
      cross_values=(),
      cross_bias=None,
      position_bias=tuple(causal_masks(config, relative)),
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
    kinds = self.config.kind_of
    owns = decoder_attention.own_steps(
      cache, num_queries, tree, bias_of=kinds, **scores_of(self.config)
    )
    positions = kv_cache.positions(cache, num_queries, tree)
    angles = angles_of(self.config, positions)
    x = self.embed(tokens)
    kept = []
    for layer, kind, own in zip(self.layers, kinds, owns, strict=True):
      x, memory = layer(x, angles[kind], own)
      kept.append(memory)
    cache = cache.grown(kept, num_queries)
    return self.decoder_norm(x), cache

  def embed(self, tokens):
    """Maps int32[...] to the embeddings of tokens, [..., M]."""
    return embed(self.config, self.token_embedder, tokens)

  def head(self, features):
    """The output layer: maps [..., M] to logits float32[..., V]."""
    if self.config.logits_via_embedding:
      logits = self.token_embedder.attend(features)
    else:
      logits = self.logits_dense(features)
    return capped(self.config, logits)


@dataclasses.dataclass(frozen=True)
class CausalLM(DecoderOnly):
  """A decoder-only model as a `LanguageModel`; see `models.base`."""

  config: CausalLMConfig

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
      dropout_key: ignored: these models have no dropout.

    Returns:
      float32[B, S, V].
    """
    del inputs, dropout_key
    return cast(jax.Array, self._apply(params, decoder_inputs))

  def features(
    self, params: Params, inputs: Any, decoder_inputs: jax.Array
  ) -> jax.Array:
    """Teacher-forced features [B, S, M]: what `head` makes `logits` of."""
    del inputs
    features = self._apply(params, decoder_inputs, method='features')
    return cast(jax.Array, features)

  def prefill(self, params, inputs, max_length, longest=None):
    """Returns an empty `KVCache` of inputs' B rows and `max_length` slots."""
    del longest
    return self._apply(
      params, inputs.shape[0], max_length, method='empty_cache'
    )
