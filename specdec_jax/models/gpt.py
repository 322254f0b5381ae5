"""Decoder-only models of GPT-2 and T5X.

Fields of the configuration choose between GPT-2 (learned positions, LayerNorm,
biases) and T5X's decoder-only network (relative bias, RMS norm, no biases). The
parameters have T5X's names, or Flax's if T5X lacks them. Both families scale as
T5X does: the 1/sqrt(D) of attention scores is part of the query projection, and
an output layer that is the embedding gets x / sqrt(M). If a checkpoint follows
another convention, these factors are moved into its weights
(`checkpoints/families.toml`).
"""

import dataclasses
from typing import Literal

from specdec_jax.models import layers
from specdec_jax.models.layers import Stack, check_config, of_config
from specdec_jax.models.transformer import Shape, Tokens, Transformer


@dataclasses.dataclass(frozen=True)
class GPTConfig:
  """The sizes of a `GPT`; the defaults are those of GPT-2.

  Attributes:
    vocab_size: V, rows of the embedding.
    emb_dim: M, size of an embedding.
    num_heads: H, number of attention heads.
    num_layers: layers of the decoder.
    head_dim: D, size of a head; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('gelu',), the tanh form, in GPT-2; ('gelu', 'linear') is
      a gated gelu.
    num_positions: rows of learned position embeddings, which limit the tokens
      of a sequence; 0 uses T5's relative bias, without a limit.
    norm: 'layer' (LayerNorm with a bias, epsilon 1e-5) or 'rms' (T5's norm).
    use_bias: whether projections have biases; the output layer has none.
    logits_via_embedding: whether the output layer is the embedding.
    dropout_rate: rate of dropout in training.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.

  Raises:
    ValueError: a size is too small, or an activation, norm or dtype is unknown.

  Examples:
    >>> small = sd.GPTConfig(  # GPT-2 small
    ...   vocab_size=50257,
    ...   emb_dim=768,
    ...   num_heads=12,
    ...   num_layers=12,
    ...   head_dim=64,
    ...   mlp_dim=3072,
    ... )
    >>> f'{sd.Model(sd.GPT(small)).num_params:,}'
    '124,439,808'
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
    check_config(self, may_be_zero=('num_positions',))

  @property
  def shape(self) -> Shape:
    """The shape of the network, one stack."""
    bias = 'none' if self.num_positions else 'stack'
    epsilon = layers.LAYER_NORM_EPSILON if self.norm == 'layer' else 1e-6
    stack = of_config(Stack, self, relative_bias=bias, norm_epsilon=epsilon)
    return Shape(stack, of_config(Tokens, self))


@dataclasses.dataclass(frozen=True)
class GPT(Transformer):
  """The network of GPT-2, and of T5X's decoder-only models (LaMDA's shapes).

  Examples:
    >>> sizes = sd.GPTConfig(
    ...   vocab_size=100,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ... )
    >>> sd.GPT(sizes).has_encoder
    False
  """

  config: GPTConfig
