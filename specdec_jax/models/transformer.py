"""The Transformer of all families: stacks of one kind of layer.

Families differ in data: `layers.Stack` describes the layers of an encoder or
decoder, `Tokens` the embedding and the output layer, `Shape` the whole network.
A family (`t5`, `gpt`, `causal_lm`, `bart`, `t5gemma`) is a configuration that
has a `shape`. Parameters have T5X's names, or Flax's if T5X lacks them. Layers
are unrolled, because a scanned stack would copy its weights at each step. In
shapes, K is the number of heads of keys and values.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from specdec_jax.checks.fields import Checked, unexpected
from specdec_jax.models import kv_cache, layers, products
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.layers import Stack
from specdec_jax.models.rope import rotate
from specdec_jax.tree_shape import Tree

_SLOTS = 'slots of prompt, output and a draft (in multiples of 64)'
_LONGEST_WAVE = 10000.0  # wavelength / 2 pi of the slowest sinusoid


@dataclasses.dataclass(frozen=True)
class Tokens:
  """The embedding of ids, and the output layer.

  Attributes:
    vocab_size: V, number of ids.
    emb_dim: M, size of an embedding.
    logits_via_embedding: whether the output layer is the embedding.
    divides_logits: whether an output layer that is the embedding divides by
      sqrt(M), as in T5 1.0.
    scale_embeddings: whether embeddings are multiplied by sqrt(M).
    num_positions: number of learned positions, which are added to embeddings;
      0: no learned positions.
    sinusoid_steps: if sinusoids are added to embeddings, the number of steps
      from their shortest wavelength to the wavelength 2 pi * 10000; 0: no
      sinusoids.
    first_position: index of the first token's position.
    logits_bias: whether a bias is added to the logits.
    logit_softcap: logits become softcap * tanh(logit / softcap); 0: no cap.
    image_end_id: the id of the end of an image, whose embedding is a parameter
      of its own; 0: no such id.
    dtype: dtype of the computation.
  """

  vocab_size: int
  emb_dim: int
  logits_via_embedding: bool = False
  divides_logits: bool = True
  scale_embeddings: bool = False
  num_positions: int = 0
  sinusoid_steps: int = 0
  first_position: int = 0
  logits_bias: bool = False
  logit_softcap: float = 0.0
  image_end_id: int = 0
  dtype: str = 'float32'

  def embed(self, table: layers.Embed, ids: jax.Array) -> jax.Array:
    """Maps int32[...] to embeddings [..., M], without positions."""
    x = table(ids)
    if self.scale_embeddings:
      # The factor is rounded to the dtype, as it was in Gemma's training.
      x = x * jnp.asarray(np.sqrt(self.emb_dim), x.dtype)
    return x


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of a network: its stacks, embeddings and special ids.

  Attributes:
    decoder: the decoder's layers.
    tokens: the decoder's embedding and output layer.
    encoder: the encoder's layers; None without an encoder.
    encoder_tokens: the encoder's embedding; None shares the decoder's.
    encoded_dim: width of the encoder's output that the decoder reads; 0 if it
      reads none.
    pad_id: the id that inputs are padded with.
    start_id: the id that the decoder begins with.
  """

  decoder: Stack
  tokens: Tokens
  encoder: Stack | None = None
  encoder_tokens: Tokens | None = None
  encoded_dim: int = 0
  pad_id: int = 0
  start_id: int = 0


def sinusoids(places: jax.Array, size: int, steps: int) -> jax.Array:
  """Maps positions int[...] to float32[..., size]: sines, then cosines.

  Wavelengths grow geometrically from 2 pi, and would reach 2 pi * 10000 after
  `steps` steps. In tensor2tensor the last sinusoid has that wavelength; in
  Marian the sinusoids end one step before it.
  """
  half = size // 2
  exponents = np.arange(half, dtype=np.float32) / steps
  rates = np.exp(exponents * -np.log(np.float32(_LONGEST_WAVE)))
  angles = places[..., None].astype(jnp.float32) * rates
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class Layer(nn.Module):
  """Attention and a feed-forward block, each with norms and a residual sum."""

  stack: Stack

  def setup(self):
    stack = self.stack
    if stack.relative_bias == 'layer':
      self.relpos_bias = _relative_bias(stack)
    setattr(self, stack.self_attention, layers.Attention(stack))
    self.mlp = layers.MLP(stack)
    blocks = [stack.self_attention, 'mlp']
    if stack.cross == 'apart':
      blocks.append('cross_attention')
      # Cross-attention has neither norms of queries and keys nor extra biases.
      # Its keys come from an encoder, which may have another width.
      plain = dataclasses.replace(stack, qk_norm=False, qkv_bias=False)
      self.encoder_decoder_attention = layers.Attention(plain)
    for block in blocks:
      if not stack.norms_after:
        setattr(self, f'pre_{block}_layer_norm', stack.make_norm())
      if stack.post_norms or stack.norms_after:
        setattr(self, f'post_{block}_layer_norm', stack.make_norm())
    self.dropout = layers.dropout(stack.dropout_rate)

  @property
  def own_attention(self) -> layers.Attention:
    """The module of the layer's self-attention."""
    return getattr(self, self.stack.self_attention)

  def __call__(self, x, angles, append_kv, attend, cross_kv, deterministic):
    """Applies the layer; also returns its keys and values.

    Args:
      x: hidden states, [B, S, M].
      angles: `Rope.angles` of the tokens' positions; None if the layer has no
        rope.
      append_kv: function from the call's keys and values, each [B, S, K, D], to
        the `KV` that queries attend to.
      attend: function from queries, that `KV` and `extra_kv`, if any, to the
        output [B, S, H * D].
      cross_kv: keys, values and bias of the encoder's output, as in the
        `extra_kv` of `layers.attend`; () without an encoder.
      deterministic: whether dropout is off.
    """
    normed = self._normed(self.stack.self_attention, x)
    queries, keys, values = self.own_attention.project_qkv(normed)
    if angles is not None:
      queries, keys = rotate(queries, angles), rotate(keys, angles)
    kv = append_kv(keys, values)
    extra_kv = cross_kv if self.stack.cross == 'merged' else ()
    output = self.own_attention.out(attend(queries, kv, *extra_kv))
    x = self._added(self.stack.self_attention, x, output, deterministic)
    if self.stack.cross == 'apart':
      attention = self.encoder_decoder_attention
      queries = attention.project_query(self._normed('cross_attention', x))
      output = attention.out(self.stack.attend(queries, *cross_kv))
      x = self._added('cross_attention', x, output, deterministic)
    output = self.mlp(self._normed('mlp', x), deterministic)
    return self._added('mlp', x, output, deterministic), kv

  def _normed(self, block, x):
    if self.stack.norms_after:
      return x
    return getattr(self, f'pre_{block}_layer_norm')(x)

  def _added(self, block, x, output, deterministic):
    """Adds a block's output to x, with the block's dropout and norms."""
    if self.stack.post_norms:
      output = getattr(self, f'post_{block}_layer_norm')(output)
    x = x + self.dropout(output, deterministic=deterministic)
    if self.stack.norms_after:
      x = getattr(self, f'post_{block}_layer_norm')(x)
    return x


def _relative_bias(stack: Stack) -> layers.RelativeBias:
  bidirectional = stack.self_attention == 'attention'  # T5's encoder
  return layers.RelativeBias(stack.num_heads, bidirectional)


class _Layers(nn.Module):
  """The layers of a stack, and its final norm."""

  stack: Stack
  tokens: Tokens
  has_table: bool  # whether this module has the embeddings

  final_norm: ClassVar[str]  # T5X's name of the final norm

  def setup(self):
    if self.has_table:
      _add_table(self, self.tokens)
    if self.tokens.num_positions:
      self.position_embedder = layers.Embed(
        self.tokens.num_positions, self.tokens.emb_dim, self.tokens.dtype
      )
    if self.stack.embedding_norm:
      self.embedding_norm = self.stack.make_norm()
    if self.stack.relative_bias == 'stack':
      self.relpos_bias = _relative_bias(self.stack)
    self.layers = [Layer(self.stack) for _ in range(self.stack.num_layers)]
    if not self.stack.norms_after:
      setattr(self, self.final_norm, self.stack.make_norm())
    self.dropout = layers.dropout(self.stack.dropout_rate)

  def place(self, x, positions):
    """Adds embeddings of positions, int32[...], to x, [..., M]."""
    tokens = self.tokens
    positions = positions + tokens.first_position
    if tokens.num_positions:
      x = x + self.position_embedder(positions)
    if tokens.sinusoid_steps:
      waves = sinusoids(positions, tokens.emb_dim, tokens.sinusoid_steps)
      x = x + waves.astype(x.dtype)
    return self.embedding_norm(x) if self.stack.embedding_norm else x

  def relative_biases(self, relative: np.ndarray):
    """Returns each table's bias, float32[H, ...], for relative positions.

    These are int[...], the position of a key minus that of the query.
    """
    if self.stack.relative_bias == 'none':
      return ()
    owners = self.layers if self.stack.relative_bias == 'layer' else [self]
    return [owner.relpos_bias(relative) for owner in owners]

  def run(self, x, positions, append_kv, attend, cross, deterministic):
    """Runs the layers on [B, S, M]; also returns each layer's keys and values.

    Args:
      x: hidden states, [B, S, M].
      positions: int[S] or int[B, S], the tokens' positions.
      append_kv: the `append_kv` of each layer, see `Layer`.
      attend: the `attend` for each index in `Stack.bias_of`, see `Layer`.
      cross: keys and values of the encoder's output by layer, and their bias;
        not used without an encoder.
      deterministic: whether dropout is off.
    """
    stack = self.stack
    kv, angles = [], stack.angles(positions)
    for i, layer in enumerate(self.layers):
      is_alone = stack.cross == 'none'
      cross_kv = () if is_alone else (cross[0][i], cross[1][i], cross[2])
      functions = append_kv[i], attend[stack.bias_of[i]]
      turns = angles[stack.numbers[i]]
      x, layer_kv = layer(x, turns, *functions, cross_kv, deterministic)
      kv.append(layer_kv)
    return x, kv

  def end(self, x):
    """Applies the final norm, if there is one."""
    return x if self.stack.norms_after else getattr(self, self.final_norm)(x)

  def run_whole(self, x, biases, cross, deterministic):
    """Runs all layers and the final norm on whole sequences x, [B, S, M]."""
    attend = [kv_cache.reader(bias, self.stack.attend) for bias in biases]
    x, positions = self.dropout(x, deterministic), jnp.arange(x.shape[1])
    alone = [kv_cache.without_cache] * self.stack.num_layers
    x, _ = self.run(x, positions, alone, attend, cross, deterministic)
    return self.dropout(self.end(x), deterministic=deterministic)


class Encoder(_Layers):
  """The encoder's layers and its final norm."""

  final_norm = 'encoder_norm'

  def __call__(self, x, padding_bias, deterministic):
    """Maps embedded inputs [B, E, M] to [B, E, M]."""
    size, kinds = x.shape[1], self.stack.kinds
    places = jnp.arange(size)
    biases = [
      _of_pairs(bias)[None]
      for bias in self.relative_biases(np.arange(1 - size, size))
    ] or [_mask(kind.hides(places - places[:, None])) for kind in kinds]
    biases = [bias + padding_bias for bias in biases]
    return self.run_whole(x, biases, (), deterministic)


def _mask(unseen: Any) -> Any:
  """Returns float32[1, ...], very negative where `unseen` is True, else 0."""
  if unseen is None:
    return np.float32(0)
  return jnp.where(unseen[None], np.float32(layers.MASKED), np.float32(0))


def _of_pairs(of_distances: jax.Array) -> jax.Array:
  """Spreads the bias of each distance to all pairs (query, key), [H, E, E].

  The program computes the distance of each pair: distances that are known at
  trace time would be a constant of E * E numbers in the program.
  """
  size = (of_distances.shape[1] + 1) // 2
  shape = (size, size)
  query, key = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
  return jnp.take(of_distances, key - query + size - 1, axis=1, mode='clip')


class Decoder(_Layers):
  """The decoder's layers, its final norm and its output layer."""

  final_norm = 'decoder_norm'

  def setup(self):
    super().setup()
    tokens = self.tokens
    if not tokens.logits_via_embedding:
      # The logits are in float32, as in T5X, because rounding to bfloat16 would
      # make some of them equal.
      self.logits_dense = products.Dense(
        tokens.vocab_size, tokens.dtype, result_dtype='float32'
      )

  def biases(self, relative: np.ndarray) -> list[jax.Array]:
    """Returns causal masks with relative biases, if any, added to them.

    Args:
      relative: int[...], the position of a key minus that of the query.

    Returns:
      float32[H or 1, ...] for each index in `Stack.bias_of`.
    """
    tables = self.relative_biases(np.minimum(relative, 0))
    return [
      jnp.where(relative > 0, layers.MASKED, bias) for bias in tables
    ] or [
      _mask(dataclasses.replace(kind, after=0).hides(relative))
      for kind in self.stack.kinds
    ]

  def cross_kv(self, encoded) -> tuple[tuple[jax.Array, ...], ...]:
    """Returns each layer's keys and values [B, K, D, E] of encoded inputs."""
    pairs = []
    for layer in self.layers:
      attention = layer.own_attention
      if self.stack.cross == 'apart':
        attention = layer.encoder_decoder_attention
      pairs.append(kv_cache.without_cache(*attention.project_kv(encoded)))
    keys, values = zip(*pairs, strict=True)
    return keys, values

  def empty_cache(self, batch, num_slots, keys=(), values=(), bias=None):
    """Makes a `KVCache` of `batch` rows without tokens."""
    stack = self.stack
    # The slot of a key minus that of the query.
    relative = np.arange(2 * num_slots) - (num_slots - 1)
    heads = stack.num_kv_heads or stack.num_heads
    shape = batch, heads, stack.head_dim, num_slots

    def empty():
      return tuple(jnp.zeros(shape, stack.dtype) for _ in self.layers)

    held = empty(), empty(), keys, values, bias, tuple(self.biases(relative))
    return kv_cache.KVCache(*held, jnp.zeros((batch,), jnp.int32))

  def teacher_forced(self, x, cross, deterministic):
    """Maps embedded tokens [B, S, M] to features, without a cache."""
    position = np.arange(x.shape[1])
    biases = self.biases(position[None, :] - position[:, None])
    biases = [bias[None] for bias in biases]
    return self.run_whole(x, biases, cross, deterministic)

  def extend(self, x, positions, cache, tree):
    """Reads S embedded tokens; returns features [B, S, M] and the cache."""
    num_queries = x.shape[1]
    attend = kv_cache.bucketed_reads(
      cache, num_queries, tree, self.stack.attend
    )
    cross = cache.cross_keys, cache.cross_values, cache.cross_bias
    append_kv = [*map(cache.append_kv, range(self.stack.num_layers))]
    x, kv = self.run(x, positions, append_kv, attend, cross, True)
    return self.end(x), cache.grown(kv, num_queries)


class Network(nn.Module):
  """The module of all networks, from ids to features and logits.

  Without an encoder all parameters lie in the decoder, as in T5X.
  """

  shape: Shape

  def setup(self):
    shape = self.shape
    has_inputs = shape.decoder.cross != 'none'
    if has_inputs:
      _add_table(self, shape.tokens)
    if shape.encoder is not None:
      own = shape.encoder_tokens
      self.encoder = Encoder(shape.encoder, own or shape.tokens, bool(own))
    self.decoder = Decoder(shape.decoder, shape.tokens, not has_inputs)
    if shape.tokens.logits_bias:  # [1, V], as in transformers
      row = 1, shape.tokens.vocab_size
      self.logits_bias = self.param('logits_bias', nn.initializers.zeros, row)

  @property
  def _owner(self):
    """The module that has the embeddings."""
    return self.decoder if self.shape.decoder.cross == 'none' else self

  def __call__(self, inputs, decoder_inputs, encoded=None):
    """Returns teacher-forced logits float32[B, S, V]."""
    return self.head(self.features(inputs, decoder_inputs, encoded=encoded))

  def extend(self, cache, tokens, tree=None):
    """Returns features [B, S, M] and the grown cache."""
    positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
    if tree is not None:
      positions = tree.positions
    x = self.decoder.place(self.embed(tokens), positions)
    return self.decoder.extend(x, positions, cache, tree)

  def embed(self, tokens):
    """Maps int32[...] to embeddings [..., M], without positions."""
    x = self.shape.tokens.embed(self._owner.token_embedder, tokens)
    if not self.shape.tokens.image_end_id:
      return x
    is_end = (tokens == self.shape.tokens.image_end_id)[..., None]
    return jnp.where(is_end, self._owner.image_end_embedding.astype(x.dtype), x)

  def head(self, features):
    """Applies the output layer: [..., M] to logits float32[..., V]."""
    tokens = self.shape.tokens
    if tokens.logits_via_embedding:
      logits = self._owner.token_embedder.attend(features)
    else:
      logits = self.decoder.logits_dense(features)
    if tokens.logits_bias:
      logits = logits + self.logits_bias[0]
    cap = tokens.logit_softcap
    return cap * jnp.tanh(logits / cap) if cap else logits

  def encode(self, inputs, deterministic=True):
    """Maps inputs int32[B, E] to the encoder's output [B, E, M]."""
    tokens = self.shape.encoder_tokens
    if tokens is not None:
      x = tokens.embed(self.encoder.token_embedder, inputs)
    else:
      x = self.embed(inputs)
    # Padding, which is masked, may have any position.
    positions = jnp.cumsum(inputs != self.shape.pad_id, axis=1) - 1
    x = self.encoder.place(x, positions)
    bias = layers.padding_bias(inputs, self.shape.pad_id)
    return self.encoder(x, bias, deterministic)

  def _cross(self, inputs, encoded, deterministic=True):
    """Returns keys and values of the inputs by layer, and their bias.

    The result is () without an encoder.
    """
    if self.shape.decoder.cross == 'none':
      return ()
    if encoded is None:
      encoded = self.encode(inputs, deterministic)
    bias = layers.padding_bias(inputs, self.shape.pad_id)
    return *self.decoder.cross_kv(encoded), bias

  def features(self, inputs, decoder_inputs, deterministic=True, encoded=None):
    """Returns teacher-forced features [B, S, M]."""
    cross = self._cross(inputs, encoded, deterministic)
    positions = jnp.arange(decoder_inputs.shape[1])
    x = self.decoder.place(self.embed(decoder_inputs), positions)
    return self.decoder.teacher_forced(x, cross, deterministic)

  def prefill(self, inputs, max_length, encoded=None):
    """Returns a `KVCache` with keys of the inputs, and without tokens."""
    cross = self._cross(inputs, encoded)
    return self.decoder.empty_cache(inputs.shape[0], max_length, *cross)


def _add_table(module: Any, tokens: Tokens) -> None:
  """Adds the embeddings of ids to a module, in its `setup`."""
  module.token_embedder = layers.Embed(
    tokens.vocab_size, tokens.emb_dim, tokens.dtype, tokens.divides_logits
  )
  if tokens.image_end_id:
    module.image_end_embedding = module.param(
      'image_end_embedding', nn.initializers.zeros, (tokens.emb_dim,)
    )


@dataclasses.dataclass(frozen=True)
class Transformer(Checked, LanguageModel):
  """A `LanguageModel`, see `models.base`; families add their configuration.

  Attributes:
    config: the family's configuration, which has a `shape`.
  """

  config: Any

  # The shape is cached, because each request reads it a dozen times.
  @functools.cached_property
  def shape(self) -> Shape:
    """The shape of the network."""
    return self.config.shape

  @property
  def module(self) -> Network:
    """The Flax module; methods of the same names here call its methods."""
    return Network(self.shape)

  @property
  def vocab_size(self) -> int:
    """V, the width of the logits."""
    return self.shape.tokens.vocab_size

  @property
  def input_vocab_size(self) -> int:
    """The number of ids that inputs may have."""
    return (self.shape.encoder_tokens or self.shape.tokens).vocab_size

  @property
  def has_encoder(self) -> bool:
    """Whether the network's encoder, or its target's, reads the inputs."""
    return self.shape.decoder.cross != 'none'

  @property
  def reads_encoder(self) -> bool:
    """Whether the network is a decoder that reads its target's encoder."""
    return self.has_encoder and self.shape.encoder is None

  @property
  def start_id(self) -> int:
    """The id that the decoder begins with."""
    return self.shape.start_id

  @property
  def pad_id(self) -> int:
    """The id that inputs are padded with."""
    return self.shape.pad_id

  @property
  def encoded_dim(self) -> int:
    """Width of the encoder's output; 0 without one."""
    return self.shape.encoded_dim

  @property
  def most_positions(self) -> int:
    """The most tokens of a sequence, if positions are learned; 0: no limit."""
    tokens = self.shape.tokens
    return max(0, tokens.num_positions - tokens.first_position)

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters, a nested dict with T5X's names."""
    return _init(self.shape, key)

  def param_shapes(self) -> Params:
    """Returns the shapes of `init`, from a trace of one layer of each stack."""
    shape = self.shape
    stacks = {'decoder': shape.decoder}
    if shape.encoder is not None:
      stacks['encoder'] = shape.encoder
    single: dict[str, Any] = {
      name: dataclasses.replace(stack, num_layers=1, layer_kinds=())
      for name, stack in stacks.items()
    }
    small = dataclasses.replace(shape, **single)
    shapes = jax.eval_shape(lambda key: _init(small, key), jax.random.key(0))
    for name, stack in stacks.items():
      for i in range(1, stack.num_layers):
        shapes[name][f'layers_{i}'] = shapes[name]['layers_0']
    return shapes

  def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
    """Runs the encoder: maps int32[B, E] to float[B, E, M]."""
    self._check_inputs(inputs, None)
    return self._apply(params, inputs, method='encode')

  def logits(
    self,
    params: Params,
    inputs: jax.Array,
    decoder_inputs: jax.Array,
    dropout_key: jax.Array | None = None,
    encoded: jax.Array | None = None,
  ) -> jax.Array:
    """Returns teacher-forced logits, for training and scoring.

    Args:
      params: the parameters.
      inputs: int32[B, E], `pad_id` past each row's end; ignored without an
        encoder.
      decoder_inputs: int32[B, S], the targets shifted right, after the token
        that the decoder begins with.
      dropout_key: key for dropout, which is consumed; None turns dropout off.
      encoded: float[B, E, M], an encoder's output for the inputs; None runs the
        network's encoder.

    Returns:
      float32[B, S, V].

    Raises:
      ValueError: S exceeds the number of learned positions, or `encoded` does
        not fit.
    """
    args = inputs, decoder_inputs, dropout_key, encoded
    return self.head(params, self.features(params, *args))

  def features(
    self,
    params: Params,
    inputs: jax.Array,
    decoder_inputs: jax.Array,
    dropout_key: jax.Array | None = None,
    encoded: jax.Array | None = None,
  ) -> jax.Array:
    """Returns teacher-forced features [B, S, M]; see `logits`."""
    self._check_inputs(inputs, encoded)
    self._check_length(decoder_inputs.shape[1])
    args = inputs, decoder_inputs, dropout_key is None, encoded
    rngs = None if dropout_key is None else {'dropout': dropout_key}
    return self._apply(params, *args, rngs=rngs, method='features')

  def prefill(self, params, inputs, max_length, longest=None, encoded=None):
    """Runs the encoder unless `encoded` is given.

    Returns:
      A `KVCache` of `max_length` slots with `length` 0.

    Raises:
      ValueError: a sequence would exceed the number of learned positions, or
        `encoded` does not fit.
    """
    self._check_inputs(inputs, encoded)
    self._check_length(longest or max_length)
    return self._apply(params, inputs, max_length, encoded, method='prefill')

  def extend(self, params, cache, tokens, tree: Tree | None = None):
    """Reads tokens int32[B, S]; returns features [B, S, M] and the cache."""
    return self._apply(params, cache, tokens, tree, method='extend')

  def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Maps int32[...] to embeddings [..., M], without positions."""
    return self._apply(params, tokens, method='embed')

  def head(self, params: Params, features: jax.Array) -> jax.Array:
    """Applies the output layer: [..., M] to logits float32[..., V]."""
    return self._apply(params, features, method='head')

  def rewind(self, cache, length):
    """Forgets all but the first `length` (int32[B]) tokens of each row."""
    return cache.rewind(length)

  def keep(self, cache, length, slots):
    """Keeps the first `length` slots and `slots`, int32[B, N], of each row."""
    return cache.keep(length, slots)

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    return self.module.apply({'params': params}, *args, **kwargs)

  def _check_inputs(self, inputs: jax.Array, encoded: jax.Array | None) -> None:
    if self.shape.encoder is not None:
      self._check_length(inputs.shape[1], 'ids of an input')
    width = self.shape.encoded_dim
    got = None if encoded is None else encoded.shape[-1]
    if self.reads_encoder and got != width:
      advice = (
        'This network has no encoder (num_encoder_layers is 0), and can only'
        ' draft for the target that it was made for.'
      )
      raise unexpected("encoder's output", f'a width of {width}', got, advice)

  def _check_length(self, length: int, field: str = _SLOTS) -> None:
    limit = self.most_positions
    if limit and length > limit:
      expected = f'at most the learned {limit} positions'
      advice = 'They must fit: lower max_input_len, max_decode_len or gamma.'
      raise unexpected(field, expected, length, advice)


def _init(shape: Shape, key: jax.Array) -> Params:
  token, encoded = jnp.ones((1, 1), jnp.int32), None
  if shape.decoder.cross != 'none' and shape.encoder is None:
    encoded = jnp.ones((1, 1, shape.encoded_dim), jnp.float32)
  return Network(shape).init(key, token, token, encoded)['params']
