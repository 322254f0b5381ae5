"""The memory that a network takes, computed from its configuration alone.

`jax.eval_shape` gives the same, and more, by tracing every layer. The functions
here are for checks that must refuse a configuration before it is used.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import flax.traverse_util
import jax.numpy as jnp

from specdec_jax.checks import memory
from specdec_jax.models import backend, integers
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.families import Config
from specdec_jax.models.m2m100 import M2M100Config
from specdec_jax.models.t5 import T5Config
from specdec_jax.models.t5gemma import T5GemmaConfig

_BUCKETS = 32  # buckets of T5's relative bias


def is_known(config: Any) -> TypeGuard[Config]:
  """Whether this module can count the network of a configuration."""
  return isinstance(config, Config)


def num_params(config: Config) -> int:
  """How many numbers the parameters of a network have."""
  if isinstance(config, CausalLMConfig):
    return _of_stack(config) + _of_vocabulary(config)
  if isinstance(config, T5GemmaConfig):
    return _of_t5gemma(config)
  width = config.emb_dim
  per_projection = width * config.num_heads * config.head_dim
  attention = 4 * per_projection
  mlp = (len(config.mlp_activations) + 1) * width * config.mlp_dim
  total = config.vocab_size * width
  if not config.logits_via_embedding:
    total += config.vocab_size * width
  bias = _BUCKETS * config.num_heads
  if isinstance(config, T5Config):
    encoder, decoder = config.num_encoder_layers, config.num_decoder_layers
    total += encoder * (attention + mlp + 2 * width)
    total += decoder * (2 * attention + mlp + 3 * width)
    # Cross-attention's keys and values may be of another width.
    more = config.encoded_dim - width
    total += decoder * 2 * more * config.num_heads * config.head_dim
    stacks = 2 if encoder else 1
    biases = encoder + decoder if config.bias_per_layer else stacks
    return total + stacks * width + biases * bias
  if isinstance(config, M2M100Config):
    encoder, decoder = config.num_encoder_layers, config.num_decoder_layers
    attention += 3 * config.num_heads * config.head_dim + width
    mlp += len(config.mlp_activations) * config.mlp_dim + width
    total += encoder * (attention + mlp + 4 * width)
    total += decoder * (2 * attention + mlp + 6 * width)
    return total + 4 * width
  norm = (2 if config.norm == 'layer' else 1) * width
  per_layer = attention + mlp + 2 * norm
  if config.use_bias:
    per_layer += 3 * config.num_heads * config.head_dim + width
    per_layer += len(config.mlp_activations) * config.mlp_dim + width
  total += config.num_layers * per_layer + norm
  return total + (config.num_positions * width or bias)


def _of_stack(config: CausalLMConfig) -> int:
  """Numbers of a stack, without embeddings and output layer."""
  width = config.emb_dim
  queries = config.num_heads * config.head_dim
  keys = config.num_kv_heads * config.head_dim
  per_layer = 2 * width * (queries + keys)
  per_layer += (len(config.mlp_activations) + 1) * width * config.mlp_dim
  per_layer += (4 if config.post_norms else 2) * width
  if config.qk_norm:
    per_layer += 2 * config.head_dim
  if config.qkv_bias:
    per_layer += queries + 2 * keys
  return config.num_layers * per_layer + width


def _of_vocabulary(config: CausalLMConfig) -> int:
  """Numbers of embeddings and output layer."""
  tables = 1 if config.logits_via_embedding else 2
  return tables * config.vocab_size * config.emb_dim


def _of_t5gemma(config: T5GemmaConfig) -> int:
  encoder, decoder = config.encoder, config.decoder
  total = _of_stack(encoder) + _of_stack(decoder) + _of_vocabulary(decoder)
  if config.image_end_id:
    total += config.emb_dim
  if config.merged_attention:
    return total
  queries = 2 * decoder.emb_dim * decoder.num_heads
  keys = 2 * config.encoded_dim * decoder.num_kv_heads
  norms = (2 if decoder.post_norms else 1) * decoder.emb_dim
  cross = (queries + keys) * decoder.head_dim + norms
  own_table = config.vocab_size * config.encoded_dim
  return total + decoder.num_layers * cross + own_table


def held_bytes(count: int, dtype: str) -> int:
  """Bytes of `count` parameters of a dtype as they lie on the device."""
  if integers.is_integers(dtype) and backend.ways().holds_floats:
    dtype = 'float32'
  return memory.array_bytes((count,), dtype)


def widened_bytes(network: LanguageModel, dtype: str) -> int:
  """Bytes of the float32 that a loop holds beside parameters of a dtype.

  An encoder's are not counted: a loop may be compiled without it.
  """
  if dtype != 'bfloat16' or not backend.ways().widens_bfloat16:
    return 0
  shapes = flax.traverse_util.flatten_dict(param_shapes(network), sep='/')
  return sum(
    4 * leaf.size
    for name, leaf in shapes.items()
    if not name.startswith('encoder/')
  )


def run_bytes(
  config: Config,
  batch: int,
  input_len: int,
  num_slots: int,
  num_tokens: int,
) -> int:
  """The least bytes that a run of a network holds beside its parameters.

  Counts keys and values, and the larger of three arrays: a call's logits, one
  encoder layer's scores over the input, and one decoder layer's over the slots.

  Args:
    config: configuration of the network.
    batch: B.
    input_len: E; ignored without an encoder.
    num_slots: T, of the caches.
    num_tokens: S, tokens that a call reads.
  """
  vocab_size = config.vocab_size
  layers, scores = 0, 0
  slots = num_slots
  if isinstance(config, T5GemmaConfig):
    scores = 4 * batch * config.encoder.num_heads * input_len**2
    slots += input_len
    config = config.decoder
  if isinstance(config, T5Config | M2M100Config):
    layers = config.num_decoder_layers
    if config.num_encoder_layers:
      scores = 4 * batch * config.num_heads * input_len**2
    slots += input_len
  else:
    layers = config.num_layers
  heads = config.num_heads
  if isinstance(config, CausalLMConfig):
    heads = config.num_kv_heads
  width = heads * config.head_dim
  per_slot = 2 * width * jnp.dtype(config.dtype).itemsize
  logits = 4 * batch * num_tokens * vocab_size
  own = 4 * batch * config.num_heads * num_tokens * num_slots
  return layers * batch * slots * per_slot + max(logits, scores, own)


def check_params(
  config: Any, bytes_each: int, free: Callable[[], int | None], what: str
) -> None:
  """Raises an error for a network whose parameters do not fit into memory.

  Args:
    config: configuration of the network; one that `is_known` does not know is
      not checked.
    bytes_each: bytes of one number.
    free: returns the bytes of the memory, None if unknown.
    what: the network, for the message.

  Raises:
    memory.DoesNotFitError: the parameters need more bytes than there are.
  """
  if not is_known(config):
    return
  count = num_params(config)
  memory.check_room(
    f'{what} has {count} parameters',
    count * bytes_each,
    free,
    'Take a smaller network; or are its sizes mistyped?',
  )
