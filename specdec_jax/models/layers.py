"""Flax modules that form all networks; parameters have T5X's names.

The defaults are T5's: attention scores are not divided by sqrt(head_dim) (the
initial weights include this factor, and so do the weights of other families),
the norm is RMS without a bias, and no Dense has a bias.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from specdec_jax.checks.fields import (
  check_choice,
  check_number,
  check_types,
  unexpected,
)
from specdec_jax.models import backend, products
from specdec_jax.models.integers import INTEGERS
from specdec_jax.models.rope import Rope

T = TypeVar('T')
_BUCKETS, _MAX_DISTANCE = 32, 128  # number and reach of T5's buckets
LAYER_NORM_EPSILON = 1e-5  # GPT-2 and M2M-100 have this epsilon
MASKED = -1e10  # added to the scores of hidden slots, as in T5X
# No published model has a quarter as many layers. The limit catches mistyped
# numbers, which would take long to build.
MOST_LAYERS = 1024
MOST = 2**31 - 1  # ids, and positions in arrays, must fit into an int32
DTYPES = ('float32', 'bfloat16')  # dtypes of computations
PARAM_DTYPES = (*DTYPES, *INTEGERS)  # dtypes of parameters


class Embed(nn.Module):
  """A token embedding that may also serve as the output layer (T5 1.0).

  Attributes:
    vocab_size: V, number of ids.
    features: M, size of an embedding.
    dtype: dtype of the embeddings, and of the output layer's operands.
    divides_logits: whether the output layer divides by sqrt(M).
  """

  vocab_size: int
  features: int
  dtype: str = 'float32'
  divides_logits: bool = True

  def setup(self):
    shape, init = (self.vocab_size, self.features), nn.initializers.normal(1.0)
    self.embedding = self.param('embedding', init, shape, jnp.float32)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Maps int32[...] to [..., features] with a gather."""
    return jnp.take(self.embedding, tokens, axis=0).astype(self.dtype)

  def attend(self, x: jax.Array) -> jax.Array:
    """Maps [..., features] to logits float32[..., vocab_size].

    With `divides_logits` the logits are divided by sqrt(features), as in T5 1.0
    and T5X.
    """
    scale = np.sqrt(self.features) if self.divides_logits else 1.0
    # In bfloat16 the logits are divided instead of x, because x would be
    # rounded once more.
    scale_first = self.dtype == 'float32'
    x = x / scale if scale_first else x
    embedding = self.embedding.astype(self.dtype)
    logits = products.dense_out_in(embedding, x, 'float32')
    return logits if scale_first else logits / scale


def dropout(rate: float) -> nn.Dropout:
  """Makes T5X's dropout, which drops the same dimensions at all positions."""
  return nn.Dropout(rate, broadcast_dims=(-2,))


class RMSNorm(nn.Module):
  """Root mean square norm with a scale (T5X calls it LayerNorm).

  Attributes:
    dtype: dtype of the result.
    epsilon: added to the mean square.
    offset: added to the scale; Gemma's scales are stored as differences from 1.
  """

  dtype: str = 'float32'
  epsilon: float = 1e-6
  offset: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises [..., M], computed in float32."""
    at_first = nn.initializers.constant(1.0 - self.offset)
    scale = self.param('scale', at_first, (x.shape[-1],))
    if self.offset:  # the sum is in float32, as bfloat16 is coarse near 1
      scale = scale.astype(jnp.float32) + self.offset
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    normed = x * lax.rsqrt(mean_square + self.epsilon)
    return (normed * scale).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Kind:
  """Attention pattern of a layer: window and rotary positions.

  Attributes:
    rope: the rotary position embedding; None: the layer has none.
    before: number of earlier tokens that a token sees; None: no limit.
    after: number of later tokens that a token sees, in an encoder; None: no
      limit.
  """

  rope: Rope | None = None
  before: int | None = None
  after: int | None = None

  def hides(self, relative: Any) -> Any:
    """Returns which keys are hidden from a query, or None if none are.

    Maps int[...], the position of a key minus that of the query, to bool[...],
    True if the key is hidden.
    """
    hidden = None if self.after is None else relative > self.after
    if self.before is not None:
      too_early = relative < -self.before
      hidden = too_early if hidden is None else hidden | too_early
    return hidden


@dataclasses.dataclass(frozen=True)
class Stack:
  """The layers of an encoder or decoder.

  Attributes:
    num_layers: number of layers.
    emb_dim: M, size of an embedding.
    num_heads: H, heads of queries.
    head_dim: D, size of a head.
    mlp_dim: width of the feed-forward block.
    mlp_activations: name of the activation, or two names for a gate.
    num_kv_heads: K, heads of keys and values; 0 means H.
    layer_kinds: the kind of each layer; () means `Kind()` for all layers.
    relative_bias: which layers have T5's relative bias of scores: all share one
      ('stack'), each has its own ('layer'), or there is none ('none').
    norm: 'rms', or 'layer' (LayerNorm with a bias).
    norm_epsilon: epsilon of all norms.
    norm_offset: number that is added to the scales of RMS norms.
    post_norms: whether the output of each block is normed before it is added to
      the residual stream.
    norms_after: whether norms follow each residual sum, instead of preceding
      the blocks and ending the stack.
    embedding_norm: whether a norm precedes the first layer.
    qk_norm: whether each head's queries and keys are normed.
    use_bias: whether all projections have biases.
    qkv_bias: whether the query, key and value projections have biases.
    scale: factor of attention scores.
    softcap: scores become softcap * tanh(score / softcap); 0: no cap.
    dropout_rate: rate of dropout in training.
    self_attention: name of the self-attention's parameters.
    cross: how a decoder attends to an encoder's output: in a separate block
      ('apart'), in the softmax and with the projections of its self-attention,
      without positions ('merged'), or not at all ('none').
    dtype: dtype of the computation.
  """

  num_layers: int
  emb_dim: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...]
  num_kv_heads: int = 0
  layer_kinds: tuple[Kind, ...] = ()
  relative_bias: Literal['none', 'stack', 'layer'] = 'none'
  norm: Literal['rms', 'layer'] = 'rms'
  norm_epsilon: float = 1e-6
  norm_offset: float = 0.0
  post_norms: bool = False
  norms_after: bool = False
  embedding_norm: bool = False
  qk_norm: bool = False
  use_bias: bool = False
  qkv_bias: bool = False
  scale: float = 1.0
  softcap: float = 0.0
  dropout_rate: float = 0.0
  self_attention: str = 'self_attention'
  cross: Literal['none', 'apart', 'merged'] = 'none'
  dtype: str = 'float32'

  @property
  def kinds(self) -> tuple[Kind, ...]:
    """The distinct kinds of layers, in the order of their first layers."""
    return tuple(dict.fromkeys(self.layer_kinds)) or (Kind(),)

  @property
  def numbers(self) -> tuple[int, ...]:
    """The index of each layer's kind in `kinds`."""
    indices = tuple(map(self.kinds.index, self.layer_kinds))
    return indices or (0,) * self.num_layers

  @property
  def bias_of(self) -> tuple[int, ...]:
    """For each layer, the index of its array of score biases.

    With a relative bias per layer each layer has an array; otherwise the layers
    of one kind share an array.
    """
    if self.relative_bias == 'layer':
      return tuple(range(self.num_layers))
    return self.numbers

  @property
  def attend(self) -> Callable[..., jax.Array]:
    """The function `attend` with the stack's scale and softcap."""
    return functools.partial(attend, scale=self.scale, softcap=self.softcap)

  def make_norm(self) -> nn.Module:
    """Makes a norm of the stack."""
    if self.norm == 'rms':
      return RMSNorm(self.dtype, self.norm_epsilon, self.norm_offset)
    # Flax's fast variance loses digits if the mean is large.
    return nn.LayerNorm(
      epsilon=self.norm_epsilon, dtype=self.dtype, use_fast_variance=False
    )

  def angles(self, places: jax.Array) -> list[tuple[jax.Array, ...] | None]:
    """Returns the `Rope.angles` of each kind, or None if it has no rope.

    The argument `places` has positions, int[S] or int[B, S].
    """
    return [
      None if kind.rope is None else kind.rope.angles(places, self.head_dim)
      for kind in self.kinds
    ]


class MLP(nn.Module):
  """Feed-forward block with an activation (`wi`) or gate (`wi_0`, `wi_1`)."""

  stack: Stack

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
    """Maps [..., M] to [..., M]."""
    stack, activations = self.stack, self.stack.mlp_activations
    count = len(activations)
    dense = functools.partial(
      products.Dense, dtype=stack.dtype, use_bias=stack.use_bias
    )
    if count == 1 or self.has_variable('params', 'wi_joined'):
      name = 'wi' if count == 1 else 'wi_joined'
      features = count * stack.mlp_dim
      hidden = dense(features, activations=activations, name=name)(x)
    else:
      factors = [dense(stack.mlp_dim, name=f'wi_{i}')(x) for i in range(count)]
      hidden = products.gated(factors, activations)
    hidden = dropout(stack.dropout_rate)(hidden, deterministic=deterministic)
    return dense(stack.emb_dim, name='wo')(hidden)


def padding_bias(inputs: jax.Array, pad_id: int = 0) -> jax.Array:
  """Returns the bias [B, 1, 1, E] that hides the padding of inputs [B, E]."""
  return jnp.where(inputs != pad_id, 0.0, MASKED)[:, None, None, :]


def attend(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  bias: jax.Array,
  scale: float = 1.0,
  softcap: float = 0.0,
  extra_kv: Sequence[jax.Array] = (),
) -> jax.Array:
  """Attention of S queries over T slots; the softmax is in float32.

  Args:
    queries: [B, S, H, D].
    keys: [B, K, D, T] for K heads of keys; K divides H, and neighbouring heads
      of queries share keys.
    values: [B, K, D, T].
    bias: float32, broadcastable to [B, H, S, T], is added to the scores.
    scale: factor of the scores.
    softcap: scores become softcap * tanh(score / softcap); 0: no cap.
    extra_kv: keys [B, K, D, E], values [B, K, D, E] and bias [B, 1, 1, E] of
      more slots in the same softmax; may be ().

  Returns:
    [B, S, H * D].
  """
  batch, num_queries, heads, head_dim = queries.shape
  kv_heads, exact = keys.shape[1], backend.precision(str(queries.dtype))
  # Queries of heads that share keys are treated as queries of one head.
  group = heads // kv_heads
  apart = (batch, num_queries, kv_heads, group, head_dim)
  queries = queries.reshape(apart).swapaxes(2, 3)
  queries = queries.reshape(batch, -1, kv_heads, head_dim)

  def scores_of(keys, bias):
    scores = jnp.einsum('bshd,bhdt->bhst', queries, keys, precision=exact)
    scores = scores.astype(jnp.float32)
    if scale != 1.0:
      scores = scores * scale
    if softcap:
      scores = softcap * jnp.tanh(scores / softcap)
    if bias.shape[1:3] == (1, 1):  # all heads and queries share the bias
      return scores + bias
    bias = jnp.broadcast_to(bias, (len(bias), heads, *bias.shape[2:]))
    bias = bias.reshape(len(bias), kv_heads, group, *bias.shape[2:])
    bias = bias.swapaxes(2, 3)
    return scores + bias.reshape(len(bias), kv_heads, -1, bias.shape[-1])

  def mixed_of(weights, values):
    return jnp.einsum('bhst,bhdt->bshd', weights, values, precision=exact)

  scores = scores_of(keys, bias)
  if extra_kv:
    # Scores are concatenated, not keys, which would be copied in each call.
    extra_keys, extra_values, extra_bias = extra_kv
    more = scores_of(extra_keys, extra_bias)
    scores = jnp.concatenate([scores, more], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  count = keys.shape[-1]
  mixed = mixed_of(weights[..., :count], values)
  if extra_kv:
    mixed = mixed + mixed_of(weights[..., count:], extra_values)
  mixed = mixed.reshape(batch, num_queries, group, kv_heads, head_dim)
  return mixed.swapaxes(2, 3).reshape(batch, num_queries, -1)


class Attention(nn.Module):
  """Multi-head attention; the caller stores the keys and values."""

  stack: Stack

  def setup(self):
    stack = self.stack
    width = stack.num_heads * stack.head_dim
    kv_width = (stack.num_kv_heads or stack.num_heads) * stack.head_dim
    use_bias = stack.use_bias or stack.qkv_bias
    dense = functools.partial(
      products.Dense, dtype=stack.dtype, use_bias=use_bias
    )

    # The initial kernel includes the factor 1/sqrt(head_dim), because T5's
    # scores are not divided by sqrt(head_dim).
    def query_init(*args):
      return products.KERNEL_INIT(*args) / np.sqrt(stack.head_dim)

    self.query = dense(width, kernel_init=query_init)
    self.key = dense(kv_width)
    self.value = dense(kv_width)
    self.qkv = dense(width + 2 * kv_width)
    self.out = products.Dense(
      stack.emb_dim, stack.dtype, use_bias=stack.use_bias
    )
    if stack.qk_norm:
      self.query_norm = stack.make_norm()
      self.key_norm = stack.make_norm()

  def _heads(self, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, self.stack.head_dim)

  def project_kv(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maps [B, S, M] to keys and values of K heads, each [B, S, K, D]."""
    if self.has_variable('params', 'qkv'):
      _, keys, values = self.project_qkv(x)
      return keys, values
    keys, values = self._heads(self.key(x)), self._heads(self.value(x))
    return self.key_norm(keys) if self.stack.qk_norm else keys, values

  def project_query(self, x: jax.Array) -> jax.Array:
    """Maps [B, S, M] to queries [B, S, H, D]."""
    queries = self.query(x)
    # Without the barrier a TPU's compiler would copy the kernel, to lay it out
    # by heads, in each run.
    if backend.kind() == 'tpu':
      queries = lax.optimization_barrier(queries)
    queries = self._heads(queries)
    return self.query_norm(queries) if self.stack.qk_norm else queries

  def project_qkv(self, x: jax.Array) -> tuple[jax.Array, ...]:
    """Maps x to queries [B, S, H, D], and to keys and values [B, S, K, D].

    The input is [B, S, M]. There is only one product if `partitioning.place`
    has concatenated the three kernels.
    """
    if not self.has_variable('params', 'qkv'):
      return self.project_query(x), *self.project_kv(x)
    joined = self.qkv(x)
    width = self.stack.num_heads * self.stack.head_dim
    kv_width = (joined.shape[-1] - width) // 2
    parts = jnp.split(joined, [width, width + kv_width], -1)
    queries, keys, values = map(self._heads, parts)
    if self.stack.qk_norm:
      queries, keys = self.query_norm(queries), self.key_norm(keys)
    return queries, keys, values


def relative_position_bucket(
  relative_position: np.ndarray, bidirectional: bool
) -> np.ndarray:
  """Returns T5's bucket of each (key position - query position).

  Half of the buckets hold one distance each; the others hold ranges, which grow
  exponentially up to a distance of 128. A bidirectional stack has half of all
  buckets for each sign. NumPy computes the buckets at trace time, since
  positions are static.
  """
  num_buckets, offset = _BUCKETS, np.zeros_like(relative_position)
  distance = -relative_position
  if bidirectional:
    num_buckets //= 2
    offset += (distance < 0) * num_buckets
    distance = np.abs(distance)
  else:
    distance = np.maximum(distance, 0)
  max_exact = num_buckets // 2
  # The logarithm has T5X's dtype and epsilon, to round as T5X does. Distance 0
  # takes the exact branch, so its logarithm does not matter.
  ratio = np.maximum(distance, 1).astype(np.float32) / max_exact
  ratio += np.finfo(np.float32).eps
  scale = (num_buckets - max_exact) / np.log(_MAX_DISTANCE / max_exact)
  large = max_exact + (np.log(ratio) * scale).astype(np.int32)
  large = np.minimum(large, num_buckets - 1)
  return offset + np.where(distance < max_exact, distance, large)


class RelativeBias(nn.Module):
  """A table of relative position biases, for one layer or a whole stack."""

  num_heads: int
  bidirectional: bool

  @nn.compact
  def __call__(self, relative_position: np.ndarray) -> jax.Array:
    """Maps int[...] (key - query position) to float32[H, ...]."""
    init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
    table = self.param('rel_embedding', init, (self.num_heads, _BUCKETS))
    bucket = relative_position_bucket(relative_position, self.bidirectional)
    return jnp.take(table, bucket, axis=1).astype(jnp.float32)


# These functions check the configurations of families, and use their fields.


def check_config(config: Any, may_be_zero: Sequence[str] = ()) -> None:
  """Checks the fields of a configuration, and turns lists into tuples.

  Args:
    config: a dataclass with `mlp_activations` and `dtype`.
    may_be_zero: names of integer fields that may be 0; all others must be at
      least 1.

  Raises:
    ValueError: a size is too small or too large, or an activation or dtype is
      unknown.
  """
  check_types(config)
  for field in dataclasses.fields(config):
    name, value = field.name, getattr(config, field.name)
    if isinstance(value, list):
      object.__setattr__(config, field.name, tuple(value))
    if field.type in (int, 'int'):
      most = MOST_LAYERS if field.name.endswith('_layers') else MOST
      check_number(name, value, 0 if field.name in may_be_zero else 1)
      if value > most:
        raise unexpected(name, f'at most {most}', value)
  check_choice('dtype', config.dtype, DTYPES)
  unknown = set(config.mlp_activations) - set(products.ACTIVATIONS)
  if unknown or not config.mlp_activations:
    names = f'one or more of {sorted(products.ACTIVATIONS)}'
    raise unexpected('mlp_activations', names, config.mlp_activations)


def of_config(kind: type[T], config: Any, **more: Any) -> T:
  """Makes a dataclass from a configuration's fields of the same names.

  Args:
    kind: the dataclass, such as `Stack`.
    config: a family's configuration.
    **more: the fields that the configuration lacks, or that differ.
  """
  names = {field.name for field in dataclasses.fields(cast(Any, kind))}
  same = {name: value for name, value in vars(config).items() if name in names}
  return kind(**same | more)


def two_stacks(config: Any, **more: Any) -> tuple[Stack, Stack | None]:
  """Makes a decoder with cross-attention, and an encoder of the same sizes.

  Args:
    config: a family's configuration; with 0 encoder layers the encoder is None.
    **more: fields of both stacks that the configuration lacks.
  """
  sizes = config.num_encoder_layers, config.num_decoder_layers
  encoder = of_config(
    Stack, config, num_layers=sizes[0], self_attention='attention', **more
  )
  decoder = of_config(Stack, config, num_layers=sizes[1], cross='apart', **more)
  return decoder, encoder if sizes[0] else None
