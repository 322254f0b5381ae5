"""M2M-100 and NLLB-200.

They have LayerNorms and products with biases, ReLU, sinusoidal positions that
are added to scaled embeddings, and no bias of scores but the mask. The
parameter tree has T5X's names. As in T5, the 1/sqrt(D) of attention scores is
part of the query projection (`checkpoints/families.toml` moves it there).

Padding is id 1, and 0 is a token; the decoder begins with the end of sequence.
"""

import dataclasses
from typing import ClassVar

from specdec_jax.checks.fields import unexpected
from specdec_jax.models import layers
from specdec_jax.models.config import check_config, of_config
from specdec_jax.models.layers import Stack
from specdec_jax.models.transformer import Shape, Tokens, Transformer


@dataclasses.dataclass(frozen=True)
class M2M100Config:
  """The sizes of an `M2M100`; all published ones have the defaults.

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
    pad_id: the id that inputs are padded with; the first position of a row is
      `pad_id` + 1.
    start_id: the id that the decoder begins with.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.

  Raises:
    ValueError: a size is too small or odd, or a name is unknown.

  Examples:
    >>> small = sd.M2M100Config(  # M2M-100 418M
    ...   vocab_size=128112,
    ...   emb_dim=1024,
    ...   num_heads=16,
    ...   num_encoder_layers=12,
    ...   num_decoder_layers=12,
    ...   head_dim=64,
    ...   mlp_dim=4096,
    ... )
    >>> f'{sd.Model(sd.M2M100(small)).num_params:,}'
    '483,905,536'
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
  # In all of these models the output layer is the embedding.
  logits_via_embedding: ClassVar[bool] = True

  def __post_init__(self):
    check_config(self, may_be_zero=('pad_id', 'start_id'))
    if self.emb_dim % 2 or self.emb_dim < 4:
      expected = 'an even number from 4'
      raise unexpected('emb_dim', expected, self.emb_dim)

  @property
  def shape(self) -> Shape:
    """The shape of the network: two stacks with one table of embeddings."""
    encoder = of_config(
      Stack,
      self,
      num_layers=self.num_encoder_layers,
      norm='layer',
      norm_epsilon=layers.LAYER_NORM_EPSILON,
      use_bias=True,
      self_attention='attention',
    )
    first = self.pad_id + 1
    return Shape(
      encoder.as_decoder(self.num_decoder_layers),
      of_config(Tokens, self, divides_logits=False, first_sinusoid=first),
      encoder,
      encoded_dim=self.emb_dim,
      pad_id=self.pad_id,
      start_id=self.start_id,
    )


@dataclasses.dataclass(frozen=True)
class M2M100(Transformer):
  """The network of M2M-100 and of NLLB-200 without experts.

  Examples:
    >>> sizes = sd.M2M100Config(
    ...   vocab_size=100,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_encoder_layers=1,
    ...   num_decoder_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ... )
    >>> sd.M2M100(sizes).has_encoder
    True
  """

  config: M2M100Config
