"""Bytes that a call must move, counted from shapes: no array is made.

What a run holds is `engine.pair.Room`'s subject.
"""

from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp

from specdec_jax import partitioning
from specdec_jax.checks.memory import array_bytes
from specdec_jax.decoding.state import Request, new_request
from specdec_jax.models import kv_cache
from specdec_jax.models.base import (
  LanguageModel,
  Params,
  read_prompt,
  reads_encoder,
)
from specdec_jax.probs import SamplingConfig

# Kernels of cross-attention's keys and values, which only `prefill` reads.
_ONCE = ('encoder_decoder_attention/key/', 'encoder_decoder_attention/value/')
_ENCODER = 'encoder/'
_TABLE = 'embedder/embedding'  # tokens or positions; a call reads some rows


def tree_bytes(tree: Any) -> int:
  """Bytes of all leaves, arrays or `ShapeDtypeStruct`s, except PRNG keys."""
  return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _leaf_bytes(leaf: Any) -> int:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return 0
  return array_bytes(leaf.shape, leaf.dtype)


def param_shapes(
  network: LanguageModel, placement: partitioning.Placement
) -> Params:
  """`ShapeDtypeStruct`s of a model's parameters, laid out by `placement`."""

  def init():
    return partitioning.place(network.init(jax.random.key(0)), placement)

  return jax.eval_shape(init)


def request_shapes(
  batch: int,
  input_len: int,
  decode_len: int,
  gamma: int,
  greedy: bool,
  has_encoder: bool = True,
) -> Request:
  """A `Request` whose arrays are `ShapeDtypeStruct`s.

  Args:
    batch: B.
    input_len: E.
    decode_len: the most tokens of a run.
    gamma: proposals per round; 0 for the plain loop.
    greedy: whether the temperature is 0.
    has_encoder: whether the target has an encoder; without one the E tokens of
      the input are a prompt, after the start token.
  """

  def make():
    prompts: dict[str, Any] = {}
    if not has_encoder:
      prompts['prompt'] = jnp.zeros((batch, 1 + input_len), jnp.int32)
      prompts['prompt_length'] = jnp.zeros((batch,), jnp.int32)
    return new_request(
      jnp.zeros((batch, input_len if has_encoder else 1), jnp.int32),
      jax.random.split(jax.random.key(0), batch),
      SamplingConfig(temperature=0.0 if greedy else 1.0),
      slots=decode_len,
      gamma=gamma,
      **prompts,
    )

  return jax.eval_shape(make)


class CallBytes(NamedTuple):
  """The least bytes that one call of a decoder must move.

  Attributes:
    weights: the output layer, and every parameter of the decoder except the
      kernels of cross-attention's keys and values.
    embeddings: the rows of the call's tokens, and of their positions if these
      are learned.
    self_attention: keys and values of the bucket that is attended to, as a mean
      over a run that fills its slots.
    cross_attention: keys and values of the input; 0 without an encoder.
    written: keys and values of the call's tokens.
  """

  weights: int
  embeddings: int
  self_attention: int
  cross_attention: int
  written: int

  @property
  def total(self) -> int:
    """The sum of all of these."""
    return sum(self)


def call_bytes(
  network: LanguageModel, params: Params, request: Request, num_tokens: int = 1
) -> CallBytes:
  """Counts what one call of a decoder must move.

  Args:
    network: the model, whose cache is a `KVCache`.
    params: its parameters as placed, arrays or `ShapeDtypeStruct`s.
    request: batch, input or prompt, and slots of the run.
    num_tokens: m, tokens per row that the call reads.
  """
  tables = [
    leaf
    for name, leaf in _flat(params).items()
    if _TABLE in name and not name.startswith(_ENCODER)
  ]
  encoded = None
  if reads_encoder(network):
    alone: Any = network
    width = alone.config.encoded_dim
    encoded = jax.ShapeDtypeStruct((*request.inputs.shape, width), jnp.float32)
  cache: kv_cache.KVCache = jax.eval_shape(
    lambda params, inputs, encoded: read_prompt(
      network,
      params,
      inputs,
      request.cache_slots,
      longest=request.longest,
      encoded=encoded,
    ),
    params,
    request.inputs,
    encoded,
  )
  sizes = kv_cache.buckets(request.cache_slots)
  first = request.prompt_width - 1
  attended = [
    min(size for size in sizes if size >= position + num_tokens)
    for position in range(first, first + request.slots)
  ]
  slots = (cache.keys, cache.values, cache.joined)
  per_slot = tree_bytes(slots) // cache.num_slots
  rows = sum(_leaf_bytes(table) // table.shape[0] for table in tables)
  return CallBytes(
    weights=tree_bytes(decoder_weights(params)),
    embeddings=request.inputs.shape[0] * num_tokens * rows,
    self_attention=per_slot * sum(attended) // len(attended),
    cross_attention=tree_bytes((cache.cross_keys, cache.cross_values)),
    written=per_slot * num_tokens,
  )


def decoder_weights(params: Params) -> list[Any]:
  """The parameters that each call of a decoder reads completely.

  That excludes the encoder and the kernels of cross-attention's keys and
  values, and a table of embeddings unless it is also the output layer.
  """
  flat = _flat(params)
  weights = [
    leaf
    for name, leaf in flat.items()
    if not name.startswith(_ENCODER)
    and _TABLE not in name
    and not any(part in name for part in _ONCE)
  ]
  if not any('logits_dense/' in name for name in flat):
    weights.append(_token_table(flat))
  return weights


def _flat(params: Params) -> dict[str, Any]:
  """Names such as 'decoder/layers_0/mlp/wo/kernel' -> leaf."""
  return flax.traverse_util.flatten_dict(params, sep='/')


def _token_table(flat: dict[str, Any]) -> Any:
  """The decoder's table [V, M] of token embeddings, wherever it is kept."""
  (table,) = (
    leaf
    for name, leaf in flat.items()
    if f'token_{_TABLE}' in name and not name.startswith(_ENCODER)
  )
  return table


def draft_round_bytes(
  network: LanguageModel, params: Params, request: Request
) -> int:
  """Bytes that gamma proposals of a small model move.

  That is one call over the last two committed tokens and gamma - 1 calls over
  one token; see `drafters.small_model`.
  """
  first, other = (
    call_bytes(network, params, request, size).total for size in (2, 1)
  )
  return first + (request.gamma - 1) * other
