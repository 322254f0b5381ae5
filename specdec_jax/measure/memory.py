"""Bytes that a call must read, counted from shapes without making arrays.

`engine.pair.MemoryCheck` counts the bytes that a run keeps in memory.
"""

from typing import Any

import flax.traverse_util
import jax

from specdec_jax.checks.memory import array_bytes
from specdec_jax.models import kv_cache
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.partitioning import Placement, place
from specdec_jax.request import Request

# Kernels of cross-attention's keys and values: only `prefill` reads them.
_ONCE = ('encoder_decoder_attention/key/', 'encoder_decoder_attention/value/')
_ENCODER = 'encoder/'
_TABLE = 'embedder/embedding'  # a call reads only a few of its rows


def tree_bytes(tree: Any) -> int:
  """Returns the bytes of all leaves, arrays or `ShapeDtypeStruct`s."""
  return sum(array_bytes(x.shape, x.dtype) for x in jax.tree.leaves(tree))


def param_shapes(network: LanguageModel, placement: Placement) -> Params:
  """Returns the shapes and dtypes of parameters laid out by `placement`."""

  key = jax.random.key(0)
  return jax.eval_shape(lambda: place(network.init(key), placement))


def call_bytes(network: LanguageModel, params: Params, request: Request) -> int:
  """Returns the least bytes that one call of a decoder must read.

  They are the bytes of the parameters, of the keys and values of the encoder's
  output, and of the keys and values that self-attention reads from the cache.
  It reads a bucket, which is the first slots of the cache; the mean over a run
  that fills all slots is counted.
  The rows of embeddings that a call reads, and the values that it writes, are
  too few to count.

  Args:
    network: the model, whose cache is a `KVCache`.
    params: its parameters as placed, arrays or `ShapeDtypeStruct`s.
    request: the request of the run, with arrays or `ShapeDtypeStruct`s.
  """

  def prefill(params, inputs) -> kv_cache.KVCache:
    slots, longest = request.cache_slots, request.longest
    return network.prefill(params, inputs, slots, longest)

  cache = jax.eval_shape(prefill, params, request.inputs)
  sizes = kv_cache.buckets(request.cache_slots)
  first = request.prompt_width - 1
  places = range(first, first + request.slots)
  attended = [min(size for size in sizes if size > x) for x in places]
  slots = tree_bytes((cache.keys, cache.values))
  attention = slots * sum(attended) // (cache.num_slots * len(attended))
  cross_attention = tree_bytes((cache.cross_keys, cache.cross_values))
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  is_tied = not any('logits_dense/' in name for name in flat)

  def is_read(name: str) -> bool:
    """Whether each call reads all of an array of parameters."""
    if name.startswith(_ENCODER) or any(part in name for part in _ONCE):
      return False
    # All of a table of embeddings is read only if it is also the output layer.
    return _TABLE not in name or (is_tied and f'token_{_TABLE}' in name)

  weights = tree_bytes([leaf for name, leaf in flat.items() if is_read(name)])
  return weights + attention + cross_attention
