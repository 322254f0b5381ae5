"""Today's decoder-only models: Llama, Qwen and Gemma.

All have rotary positions, RMS norms, gated feed-forward blocks, and heads of
queries that share keys. Fields of the configuration choose what differs: norms
of queries and keys, norms after the blocks, windows, caps of scores and logits.
The parameter tree has T5X's names; norm scales and kernels have the values of
Hugging Face's files.
"""

import dataclasses
import itertools
from typing import Literal

from specdec_jax.checks.fields import unexpected
from specdec_jax.models.layers import Kind, Stack, check_config, of_config
from specdec_jax.models.rope import Rope
from specdec_jax.models.transformer import Shape, Tokens, Transformer
from specdec_jax.types import Above0, Amount

LayerKind = Literal['local', 'global']


@dataclasses.dataclass(frozen=True)
class CausalLMConfig:
  """The sizes of a `CausalLM`; most models have the defaults.

  Attributes:
    vocab_size: V, rows of the embedding.
    emb_dim: M, size of an embedding.
    num_heads: H, heads of queries.
    num_kv_heads: K, heads of keys and values; K divides H, and H / K
      neighbouring heads of queries share one of them.
    num_layers: layers of the decoder.
    head_dim: D, size of a head; H * D need not be M.
    mlp_dim: width of the feed-forward block.
    mlp_activations: ('silu', 'linear'), or ('gelu', 'linear') in Gemma.
    rope: rotary position embedding of global layers.
    local_rope: rotary position embedding of local layers; None means `rope`.
    layer_kinds: kinds of the first layers, 'global' or 'local'; this sequence
      repeats until all layers have a kind.
    window: number of tokens that a token sees in a local layer, itself
      included; 0 without local layers.
    norm_epsilon: epsilon of all norms.
    norm_offset: number that is added to the scales of all norms; 1 in Gemma.
    qk_norm: whether each head's queries and keys are normed.
    post_norms: whether the output of each block is normed before it is added to
      the residual stream.
    qkv_bias: whether the projections of queries, keys and values have biases.
    query_scalar: attention scores are divided by the square root of this
      number; 0 means `head_dim`.
    score_softcap: scores become softcap * tanh(score / softcap); 0: no cap.
    logit_softcap: logits become softcap * tanh(logit / softcap); 0: no cap.
    scale_embeddings: whether embeddings are multiplied by sqrt(M).
    logits_via_embedding: whether the output layer is the embedding.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.

  Raises:
    ValueError: a size is too small or does not fit another, or an activation,
      kind or dtype is unknown.

  Examples:
    >>> scaled = sd.Rope(500_000.0, factor=32.0, original_length=8192)
    >>> llama = sd.CausalLMConfig(  # Llama 3.2 1B
    ...   vocab_size=128256,
    ...   emb_dim=2048,
    ...   num_heads=32,
    ...   num_kv_heads=8,
    ...   num_layers=16,
    ...   head_dim=64,
    ...   mlp_dim=8192,
    ...   rope=scaled,
    ...   logits_via_embedding=True,
    ... )
    >>> f'{sd.Model(sd.CausalLM(llama)).num_params:,}'
    '1,235,814,400'
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
  norm_epsilon: Above0 = 1e-6
  norm_offset: float = 0.0
  qk_norm: bool = False
  post_norms: bool = False
  qkv_bias: bool = False
  query_scalar: Amount = 0.0
  score_softcap: Amount = 0.0
  logit_softcap: Amount = 0.0
  scale_embeddings: bool = False
  logits_via_embedding: bool = False
  dtype: str = 'float32'

  def __post_init__(self):
    check_config(self, may_be_zero=('window',))
    if self.num_heads % self.num_kv_heads or self.head_dim % 2:
      expected = 'a multiple of num_kv_heads, and an even head_dim'
      sizes = self.num_heads, self.num_kv_heads, self.head_dim
      raise unexpected('num_heads, num_kv_heads, head_dim', expected, sizes)
    has_local = 'local' in self.layer_kinds
    if not self.layer_kinds or has_local != bool(self.window):
      expected = 'a window with local layers, and none without'
      got = self.layer_kinds, self.window
      raise unexpected('layer_kinds, window', expected, got)

  def stack(
    self, sides: tuple[int, int] | None = None, cross: str = 'none'
  ) -> Stack:
    """Returns the `Stack` that has this configuration's layers.

    Args:
      sides: numbers of tokens that an encoder's local layer sees before and
        after a token; None for a decoder, whose `window` ends with the token.
      cross: how a decoder attends to an encoder's output, see `Stack.cross`.
    """
    before, after = sides or (self.window - 1, None)
    local = Kind(self.local_rope or self.rope, before, after)
    kinds = {'global': Kind(self.rope), 'local': local}
    names = itertools.islice(itertools.cycle(self.layer_kinds), self.num_layers)
    more = {
      'layer_kinds': tuple(kinds[name] for name in names),
      'scale': (self.query_scalar or self.head_dim) ** -0.5,
      'softcap': self.score_softcap,
    }
    return of_config(Stack, self, cross=cross, **more)

  def tokens(self, image_end_id: int = 0) -> Tokens:
    """Returns the `Tokens`: the embedding and the output layer."""
    more = {'divides_logits': False, 'image_end_id': image_end_id}
    return of_config(Tokens, self, **more)

  @property
  def shape(self) -> Shape:
    """The shape of the network, one stack."""
    return Shape(self.stack(), self.tokens())


@dataclasses.dataclass(frozen=True)
class CausalLM(Transformer):
  """The network of Llama 3, Qwen 2 and 3, Gemma 2 and 3.

  Examples:
    >>> sizes = sd.CausalLMConfig(
    ...   vocab_size=100,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_kv_heads=1,
    ...   num_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ... )
    >>> sd.CausalLM(sizes).vocab_size
    100
  """

  config: CausalLMConfig
