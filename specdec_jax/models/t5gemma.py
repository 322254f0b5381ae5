"""T5Gemma 1 and 2: an encoder and a decoder, each a stack of Gemma's layers.

The stacks are those of `causal_lm`, with Gemma's embeddings, rotary positions,
norms, windows and caps. T5Gemma 1's decoder has T5's cross-attention in a
separate block. In T5Gemma 2's decoder the self-attention also sees the
encoder's output, in the same softmax and through the same projections; the
encoder's keys have no positions and no window.
"""

import dataclasses

from specdec_jax.checks.fields import check_choice, check_types, unexpected
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.layers import DTYPES
from specdec_jax.models.transformer import Shape, Transformer


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig:
  """The sizes of a `T5Gemma`.

  Attributes:
    encoder: shape of the encoder's stack. A token in a local layer sees
      `window` tokens to each side in T5Gemma 1; in T5Gemma 2 it sees `window`
      tokens in all, itself included.
    decoder: shape of the decoder's stack.
    merged_attention: whether one attention reads the tokens so far and the
      encoder's output, and both stacks share their embeddings, as in T5Gemma 2.
    start_id: id that the decoder begins with.
    image_end_id: in T5Gemma 2, the id of the end of an image, whose embedding
      is a parameter of its own; 0: no such id.
    dtype: dtype of the computation, which replaces the dtypes of the stacks.

  Raises:
    ValueError: the stacks differ in a size that they must share, an id is not
      in the vocabulary, or the dtype is unknown.

  Examples:
    >>> stack = sd.CausalLMConfig(
    ...   vocab_size=100,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_kv_heads=1,
    ...   num_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ...   norm_offset=1.0,
    ...   post_norms=True,
    ... )
    >>> sizes = sd.T5GemmaConfig(encoder=stack, decoder=stack)
    >>> sizes.vocab_size
    100
  """

  encoder: CausalLMConfig
  decoder: CausalLMConfig
  merged_attention: bool = False
  start_id: int = 2
  image_end_id: int = 0
  dtype: str = 'float32'

  def __post_init__(self):
    check_types(self)
    check_choice('dtype', self.dtype, DTYPES)
    for name in ('encoder', 'decoder'):
      stack = dataclasses.replace(getattr(self, name), dtype=self.dtype)
      object.__setattr__(self, name, stack)
    names = ['vocab_size'] + ['emb_dim'] * self.merged_attention
    for name in names:
      values = [getattr(self.encoder, name), getattr(self.decoder, name)]
      if len({*values}) > 1:
        expected = 'the same in encoder and decoder'
        raise unexpected(f'T5GemmaConfig: {name}', expected, values)
    for name in ('start_id', 'image_end_id'):
      if not 0 <= getattr(self, name) < self.vocab_size:
        expected = f'an id below {self.vocab_size}'
        raise unexpected(name, expected, getattr(self, name))

  @property
  def vocab_size(self) -> int:
    """V, rows of the embeddings."""
    return self.decoder.vocab_size

  @property
  def sides(self) -> tuple[int, int]:
    """Numbers of earlier and of later tokens that local encoder layers see."""
    window = self.encoder.window
    if self.merged_attention:
      return (window - 1) // 2, window // 2
    return window, window

  @property
  def shape(self) -> Shape:
    """The shape of the network; T5Gemma 1's stacks have separate embeddings."""
    merged, width = self.merged_attention, self.encoder.emb_dim
    decoder = self.decoder.stack(cross='merged' if merged else 'apart')
    tokens = self.decoder.tokens(self.image_end_id)
    own = None if merged else self.encoder.tokens()
    stacks = decoder, tokens, self.encoder.stack(self.sides), own
    return Shape(*stacks, width, start_id=self.start_id)


@dataclasses.dataclass(frozen=True)
class T5Gemma(Transformer):
  """The network of T5Gemma and of the text model of T5Gemma 2.

  Examples:
    >>> stack = sd.CausalLMConfig(
    ...   vocab_size=100,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_kv_heads=1,
    ...   num_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ...   norm_offset=1.0,
    ...   post_norms=True,
    ... )
    >>> network = sd.T5Gemma(sd.T5GemmaConfig(encoder=stack, decoder=stack))
    >>> network.has_encoder
    True
  """

  config: T5GemmaConfig
  # An input begins with `Codec.bos_id` and has no end of sequence.
  ends_inputs = False
