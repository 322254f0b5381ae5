"""T5 1.0 and 1.1: relative biases of scores, RMS norms, no biases.

The parameter tree is T5X's, so that a T5X checkpoint loads without renaming.
"""

import dataclasses

from specdec_jax.checks.fields import unexpected
from specdec_jax.models.layers import check_config, of_config, two_stacks
from specdec_jax.models.transformer import Shape, Tokens, Transformer


@dataclasses.dataclass(frozen=True)
class T5Config:
  """The sizes of a `T5`; the fields are those of T5X.

  Attributes:
    vocab_size: V, rows of the embedding, with padding (32128 in T5).
    emb_dim: M, size of an embedding.
    num_heads: H, number of attention heads.
    num_encoder_layers: layers of the encoder; 0 makes a decoder without an
      encoder, which reads the output of another T5's encoder, see
      `T5.reads_encoder`.
    num_decoder_layers: layers of the decoder.
    head_dim: D, size of a head; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('relu',) in T5 1.0, ('gelu', 'linear') in T5 1.1.
    dropout_rate: rate of dropout in training.
    logits_via_embedding: whether the output layer is the embedding, as in T5
      1.0.
    bias_per_layer: whether each layer has a relative bias of its own, as in
      T5X's `scalable_t5` and in UMT5; otherwise a stack's layers share one.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.
    encoder_dim: if there is no encoder, the width of the encoder output that
      the decoder reads; 0 means `emb_dim`.

  Raises:
    ValueError: a size is not positive, an activation or dtype is unknown, or
      `encoder_dim` is given although there is an encoder.

  Examples:
    >>> small = sd.T5Config(  # T5 1.1 small
    ...   vocab_size=32128,
    ...   emb_dim=512,
    ...   num_heads=6,
    ...   num_encoder_layers=8,
    ...   num_decoder_layers=8,
    ...   head_dim=64,
    ...   mlp_dim=1024,
    ... )
    >>> f'{sd.Model(sd.T5(small)).num_params:,}'
    '76,961,152'
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
    check_config(self, ('num_encoder_layers', 'encoder_dim'))
    if self.num_encoder_layers and self.encoder_dim:
      expected = '0 beside an encoder'
      raise unexpected('encoder_dim', expected, self.encoder_dim)

  @property
  def shape(self) -> Shape:
    """The shape of the network: two stacks with one table of embeddings."""
    bias = 'layer' if self.bias_per_layer else 'stack'
    decoder, encoder = two_stacks(self, relative_bias=bias)
    width = self.encoder_dim or self.emb_dim
    return Shape(decoder, of_config(Tokens, self), encoder, encoded_dim=width)


@dataclasses.dataclass(frozen=True)
class T5(Transformer):
  """The network of T5, Flan-T5, mT5, UMT5, MADLAD-400 and UL2.

  Examples:
    >>> sizes = sd.T5Config(8000, 256, 4, 3, 6, 64, 1664)
    >>> network = sd.T5(sizes)
    >>> network.vocab_size, network.has_encoder
    (8000, True)
  """

  config: T5Config
