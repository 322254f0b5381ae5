"""Tiny networks of all families, with parameters that hide nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import toy_requests
from repository import ROOT
from specdec_jax import (
  BartConfig,
  CausalLMConfig,
  GPTConfig,
  M2M100Config,
  Rope,
  T5Config,
  T5GemmaConfig,
)
from specdec_jax.checkpoints import families
from specdec_jax.models.families import network_of

# What docs/models.md says of each family.
SUPPORT = families.read_tables(ROOT / 'tests/support.toml')
# heads * head_dim is not emb_dim
_T5 = dict(vocab_size=60, emb_dim=32, num_heads=3, head_dim=12, mlp_dim=48)
T5_1_1 = T5Config(**_T5, num_encoder_layers=2, num_decoder_layers=2)
T5_1_0 = dataclasses.replace(
  T5_1_1, mlp_activations=('relu',), logits_via_embedding=True
)
OWN_BIAS = dataclasses.replace(T5_1_1, bias_per_layer=True)
# Of checkpoints that are only written and read.
_TINY = dict(vocab_size=24, emb_dim=8, num_heads=2, head_dim=5, mlp_dim=12)
TINY = T5Config(**_TINY, num_encoder_layers=3, num_decoder_layers=2)
_SIZES = dict(vocab_size=60, emb_dim=24, mlp_dim=40)
_HEADS = dict(num_heads=3, head_dim=10)
_GATED = dict(mlp_activations=('gelu', 'linear'))
GPT2 = GPTConfig(
  **_SIZES, num_heads=3, num_layers=2, head_dim=8, num_positions=160
)
T5X = dataclasses.replace(
  GPT2, head_dim=12, num_positions=0, norm='rms', use_bias=False, **_GATED
)
UNTIED = dataclasses.replace(GPT2, logits_via_embedding=False)
LLAMA = CausalLMConfig(
  **_SIZES,
  num_heads=6,
  num_kv_heads=2,
  num_layers=3,
  head_dim=10,
  rope=Rope(5e5, factor=8.0, original_length=24),
  norm_epsilon=1e-5,
)
QWEN2 = dataclasses.replace(
  LLAMA, qkv_bias=True, rope=Rope(1e6), num_kv_heads=6
)
QWEN3 = dataclasses.replace(
  LLAMA, qk_norm=True, rope=Rope(1e6), logits_via_embedding=True
)
_GEMMA = dict(norm_offset=1.0, post_norms=True, query_scalar=7.0, window=9)
_GEMMA |= dict(scale_embeddings=True, logits_via_embedding=True, **_GATED)
_SOFTCAPS = dict(score_softcap=5.0, logit_softcap=3.0)
GEMMA2 = dataclasses.replace(
  LLAMA, rope=Rope(), layer_kinds=('local', 'global'), **_GEMMA, **_SOFTCAPS
)
GEMMA3 = dataclasses.replace(
  GEMMA2,
  num_kv_heads=1,
  rope=Rope(1e6, factor=8.0),
  local_rope=Rope(),
  layer_kinds=('local', 'local', 'global'),
  num_layers=4,
  qk_norm=True,
  **dict.fromkeys(_SOFTCAPS, 0.0),
)
NLLB = M2M100Config(
  **_SIZES, **_HEADS, num_encoder_layers=2, num_decoder_layers=3
)
BART = BartConfig(
  **_SIZES,
  **_HEADS,
  num_encoder_layers=3,
  num_decoder_layers=2,
  num_positions=160,
)
MBART = dataclasses.replace(BART, norms_after=False)
MARIAN = dataclasses.replace(
  BART,
  embedding_norm=False,
  num_positions=0,
  mlp_activations=('silu',),
  scale_embeddings=True,
  encoder_vocab_size=64,
  pad_id=3,
  start_id=3,
)
_PEGASUS = dict(encoder_vocab_size=60, pad_id=0, start_id=0, norms_after=False)
_PEGASUS |= dict(mlp_activations=('relu',), logits_via_embedding=False)
PEGASUS = dataclasses.replace(MARIAN, **_PEGASUS)
# The encoder is wider than the decoder and has other heads, as in 9B-2B.
ONE = T5GemmaConfig(
  dataclasses.replace(
    GEMMA2, emb_dim=20, num_heads=4, num_layers=2, logit_softcap=0.0
  ),
  GEMMA2,
)
_TWO = dataclasses.replace(GEMMA3, num_kv_heads=2, num_layers=3)
TWO = T5GemmaConfig(_TWO, _TWO, merged_attention=True, image_end_id=7)

DECODERS = {
  'Llama 3': LLAMA,
  'Qwen 2': QWEN2,
  'Qwen 3': QWEN3,
  'Gemma 2': GEMMA2,
  'Gemma 3': GEMMA3,
}
BARTS = {
  'NLLB': NLLB,
  'BART': BART,
  'mBART': MBART,
  'Pegasus': PEGASUS,
  'Marian': MARIAN,
}
ALL = {
  'T5 1.1': T5_1_1,
  'T5 1.0': T5_1_0,
  'own bias': OWN_BIAS,
  'GPT-2': GPT2,
  'untied': UNTIED,
  'T5X': T5X,
  **DECODERS,
  **BARTS,
  'T5Gemma': ONE,
  'T5Gemma 2': TWO,
}


@functools.cache
def shapes(config):
  """Names and shapes of the parameters."""
  return jax.eval_shape(network_of(config).init, jax.random.key(0))


@functools.cache
def make(config, seed=0):
  """A network whose biases are not 0 and whose scales are not 1."""
  rng = np.random.default_rng(seed)
  stack = getattr(config, 'decoder', config)
  scale = 1.0 - getattr(stack, 'norm_offset', 0.0)

  def draw(path, leaf):
    noise = rng.standard_normal(leaf.shape).astype(np.float32)
    return (path[-1].key == 'scale') * scale + noise / 3

  return network_of(config), jax.tree_util.tree_map_with_path(
    draw, shapes(config)
  )


def assert_same(have, want, dtype=None):
  """The same names, values and dtypes; or those of `want` in another dtype."""
  assert jax.tree.structure(have) == jax.tree.structure(want)

  def compare(leaf, other):
    assert leaf.dtype == (dtype or other.dtype)
    np.testing.assert_array_equal(leaf, other.astype(leaf.dtype))

  jax.tree.map(compare, have, want)


def tokens(seed, *shape):
  """Random ids; drawn by NumPy, which compiles nothing for each shape."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(2, 60, shape).astype(np.int32))


def inputs_of(config, lengths=(20, 1, 9)):
  """Inputs of several lengths; 0 is a token where it is no padding."""
  pad_id = getattr(config, 'pad_id', 0)
  inputs = np.array(tokens(5, len(lengths), 24))
  inputs[0, 3] = pad_id + 7
  for row, length in zip(inputs, lengths, strict=True):
    row[length:] = pad_id
  if pad_id:
    inputs[0, 3] = 0
  return jnp.asarray(inputs)


# Compiled once a network and shape, not dispatched operation by operation.
logits_of = jax.jit(
  lambda network, *args: network.logits(*args), static_argnums=0
)
extend = jax.jit(toy_requests.read, static_argnums=0)

prefill = jax.jit(
  lambda network, *args: network.prefill(*args), static_argnums=(0, 3)
)
