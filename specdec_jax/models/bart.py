"""BART and its kin: mBART, Pegasus, Marian, M2M-100 and NLLB-200.

These networks have LayerNorms, biases in all projections, and positions that
are added to embeddings. Attention scores get a mask, but no other bias. The
families differ in fields of one configuration. The parameter tree has T5X's
names, or Flax's if T5X lacks them. As in T5, the 1/sqrt(D) of attention scores
is part of the query projection (`checkpoints/families.toml` moves it there).

The padding id need not be 0, and 0 may be an ordinary token.
"""

import dataclasses

from specdec_jax.checks.fields import unexpected
from specdec_jax.models import layers
from specdec_jax.models.layers import check_config, of_config, two_stacks
from specdec_jax.models.transformer import Shape, Tokens, Transformer

_FIRST_LEARNED = 2  # row of the first position; earlier rows are not used


@dataclasses.dataclass(frozen=True)
class BartConfig:
  """The sizes of a `Bart`; the defaults are those of BART.

  Attributes:
    vocab_size: V, rows of the decoder's embedding.
    emb_dim: M, an even number.
    num_heads: H, number of attention heads.
    num_encoder_layers: layers of the encoder; 0 makes a decoder without an
      encoder, which reads the output of its target's encoder.
    num_decoder_layers: layers of the decoder.
    head_dim: D, size of a head; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('exact_gelu',), ('relu',) or ('silu',).
    norms_after: whether norms follow the residual sums (BART, Marian);
      otherwise they precede the blocks, and one more norm ends each stack.
    embedding_norm: whether a norm precedes the first layer (BART, mBART).
    num_positions: number of learned positions, which limit the tokens of an
      input and of an output; 0: positions are sinusoids.
    from_padding: whether sinusoids begin at `pad_id` + 1, and reach the
      wavelength 2 pi * 10000 (M2M-100).
    scale_embeddings: whether embeddings are multiplied by sqrt(M).
    logits_via_embedding: whether the output layer is the decoder's embedding.
    logits_bias: whether a bias is added to the logits.
    encoder_vocab_size: rows of a separate embedding for the encoder; 0: the
      encoder shares the decoder's.
    pad_id: the id that inputs are padded with.
    start_id: the id that the decoder begins with.
    dropout_rate: rate of dropout in training.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.

  Raises:
    ValueError: a size is too small or odd, or an activation or dtype is
      unknown.

  Examples:
    >>> large = sd.BartConfig(  # bart-large-cnn
    ...   vocab_size=50264,
    ...   emb_dim=1024,
    ...   num_heads=16,
    ...   num_encoder_layers=12,
    ...   num_decoder_layers=12,
    ...   head_dim=64,
    ...   mlp_dim=4096,
    ... )
    >>> f'{sd.Model(sd.Bart(large)).num_params:,}'
    '406,340,696'
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_encoder_layers: int
  num_decoder_layers: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('exact_gelu',)
  norms_after: bool = True
  embedding_norm: bool = True
  num_positions: int = 1024
  from_padding: bool = False
  scale_embeddings: bool = False
  logits_via_embedding: bool = True
  logits_bias: bool = True
  encoder_vocab_size: int = 0
  pad_id: int = 1
  start_id: int = 2
  dropout_rate: float = 0.0
  dtype: str = 'float32'

  def __post_init__(self):
    none = 'num_encoder_layers num_positions encoder_vocab_size pad_id start_id'
    check_config(self, may_be_zero=none.split())
    if self.emb_dim % 2 or self.emb_dim < 4:
      expected = 'an even number from 4'
      raise unexpected('emb_dim', expected, self.emb_dim)

  @property
  def shape(self) -> Shape:
    """The shape of the network: two stacks, which may share an embedding."""
    epsilon = layers.LAYER_NORM_EPSILON
    decoder, encoder = two_stacks(
      self, norm='layer', norm_epsilon=epsilon, use_bias=True
    )
    places = {
      'first_position': self.from_padding * (self.pad_id + 1),
      'sinusoid_steps': self.emb_dim // 2 - self.from_padding,
    }
    if self.num_positions:
      rows = _FIRST_LEARNED + self.num_positions
      places = {'first_position': _FIRST_LEARNED, 'num_positions': rows}
    tokens = of_config(Tokens, self, divides_logits=False, **places)
    own = None
    if self.encoder_vocab_size:
      own = dataclasses.replace(tokens, vocab_size=self.encoder_vocab_size)
    ids = self.pad_id, self.start_id
    return Shape(decoder, tokens, encoder, own, self.emb_dim, *ids)


@dataclasses.dataclass(frozen=True)
class M2M100Config(BartConfig):
  """The sizes of an `M2M100`; its defaults fit all published models.

  The fields are those of `BartConfig`.

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

  mlp_activations: tuple[str, ...] = ('relu',)
  norms_after: bool = False
  embedding_norm: bool = False
  num_positions: int = 0
  from_padding: bool = True
  scale_embeddings: bool = True
  logits_bias: bool = False


@dataclasses.dataclass(frozen=True)
class Bart(Transformer):
  """The network of BART, mBART, Pegasus and Marian.

  Examples:
    >>> sizes = sd.BartConfig(100, 8, 2, 1, 1, 4, 16)
    >>> sd.Bart(sizes).has_encoder
    True
  """

  config: BartConfig


@dataclasses.dataclass(frozen=True)
class M2M100(Bart):
  """The network of M2M-100 and of NLLB-200 without experts.

  Examples:
    >>> sizes = sd.M2M100Config(100, 8, 2, 1, 1, 4, 16)
    >>> sd.M2M100(sizes).has_encoder
    True
  """

  config: M2M100Config
