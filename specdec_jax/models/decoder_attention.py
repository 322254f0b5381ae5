"""What a decoder layer attends with: plain code, or a kernel of our own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specdec_jax.models import backend, kv_cache, layers
from specdec_jax.models.tree import Tree

# Queries [B, S, H, D], keys and values [B, S, K, D] of a call, to [B, S, H * D]
# and what the layer has kept.
Own = Callable[
  [jax.Array, jax.Array, jax.Array], tuple[jax.Array, kv_cache.Kept]
]
Cross = Callable[[jax.Array], jax.Array]  # [B, S, H, D] -> [B, S, H * D]


def in_turn(
  remember: Callable[..., kv_cache.Kept],
  read: Callable[..., jax.Array],
  beside: Sequence[Any] = (),
) -> Own:
  """Self-attention that first keeps keys and values, and then reads all.

  Args:
    remember: maps this call's keys and values, each [B, S, K, D], to those
      that are attended to.
    read: attention over these, (queries, kept, *beside) -> [B, S, H * D].
    beside: of more slots, as `layers.attend` has them.
  """

  def own(queries, keys, values):
    kept = remember(keys, values)
    return read(queries, kept, *beside), kept

  return own


def across(kept: Sequence[Any], **scores: Any) -> Cross:
  """Attention to an encoder's output: [B, K, D, E] twice, and its bias."""
  return lambda queries: layers.attend(queries, *kept, **scores)


def own_steps(
  cache: kv_cache.KVCache,
  num_queries: int,
  tree: Tree | None = None,
  write: kv_cache.Write = kv_cache.write,
  bias_of: Sequence[int] = (),
  sees_encoder: bool = False,
  **scores: Any,
) -> list[Own]:
  """Self-attention of each layer over a cache.

  Where `backend.kernels` wants it, it is one kernel (`attention_kernel`); a
  call of more tokens than that is for, a prompt, is no step.

  Args:
    cache: the cache before this call's tokens.
    num_queries: S, tokens per row in this call.
    tree: how these hang together; None is one after another.
    write: of a cache whose keys and values are apart. What is not written as
      here is no business of a kernel.
    bias_of: for each layer, the number of its array in `cache.position_bias`;
      () is an array for each layer, or one for all.
    sees_encoder: whether what the encoder says is under the same softmax.
    **scores: `scale` and `softcap` of `layers.attend`.
  """
  attend = functools.partial(layers.attend, **scores)
  reads = kv_cache.bucketed_reads(cache, num_queries, tree, attend, bias_of)
  seen = _encoded(cache) if sees_encoder else [()] * cache.num_layers
  plain = [
    in_turn(cache.remember(i, write), *both)
    for i, both in enumerate(zip(reads, seen, strict=True))
  ]
  if not _wants_kernels(num_queries, write):
    return plain
  biases = cache.position_bias
  numbers = bias_of or [i % len(biases) for i in range(cache.num_layers)]
  return [
    _own_kernel(cache, i, biases[number], tree, seen[i], scores, plain[i])
    for i, number in enumerate(numbers)
  ]


def cross_steps(
  cache: kv_cache.KVCache,
  num_queries: int,
  write: kv_cache.Write = kv_cache.write,
  **scores: Any,
) -> list[Cross]:
  """Cross-attention of each layer; likewise."""
  kept = _encoded(cache)
  plain = [across(one, **scores) for one in kept]
  if not _wants_kernels(num_queries, write):
    return plain
  return [
    _cross_kernel(one, scores, instead)
    for one, instead in zip(kept, plain, strict=True)
  ]


def _encoded(cache: kv_cache.KVCache) -> list[tuple[Any, ...]]:
  """What each layer sees of the encoder's output."""
  return [
    (keys, values, cache.cross_bias)
    for keys, values in zip(cache.cross_keys, cache.cross_values, strict=True)
  ]


def _wants_kernels(num_queries: int, write: kv_cache.Write) -> bool:
  if backend.kernel_setting() == 'off' or write is not kv_cache.write:
    return False
  # Imported only where it is used: it takes a second.
  from specdec_jax.models import attention_kernel  # noqa: PLC0415

  return num_queries <= attention_kernel.MOST_QUERIES


def _own_kernel(cache, layer, bias, tree, beside, scores, plain) -> Own:
  from specdec_jax.models import attention_kernel  # noqa: PLC0415

  def own(queries, keys, values):
    slots = min([cache.num_slots, *(one.shape[3] for one in beside[:1])])
    refusal = attention_kernel.refusal(queries, keys.shape[2], slots)
    if not cache.joined:
      refusal = 'keys and values are in arrays of their own'
    if not backend.takes_kernel('self-attention', refusal):
      return plain(queries, keys, values)
    args = cache.joined[layer], bias, cache.length, tree, beside
    mixed, kept = attention_kernel.step(queries, keys, values, *args, **scores)
    return mixed, (kept,)

  return own


def _cross_kernel(kept, scores, plain) -> Cross:
  from specdec_jax.models import attention_kernel  # noqa: PLC0415

  def cross(queries):
    heads, slots = kept[0].shape[1], kept[0].shape[3]
    refusal = attention_kernel.refusal(queries, heads, slots)
    if not backend.takes_kernel('cross-attention', refusal):
      return plain(queries)
    return attention_kernel.cross(queries, *kept, **scores)

  return cross
