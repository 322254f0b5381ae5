"""What a decoder layer attends with: plain code, or a kernel of our own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from specdec_jax.models import backend, kv_cache, layers
from specdec_jax.models.tree import Tree

# Queries, keys and values of a call, each [B, S, H, D], to [B, S, H * D] and
# what the layer has kept.
Own = Callable[
  [jax.Array, jax.Array, jax.Array], tuple[jax.Array, kv_cache.Kept]
]
Cross = Callable[[jax.Array], jax.Array]  # [B, S, H, D] -> [B, S, H * D]


def in_turn(
  remember: Callable[..., kv_cache.Kept], read: Callable[..., jax.Array]
) -> Own:
  """Self-attention that first keeps keys and values, and then reads all.

  Args:
    remember: maps this call's keys and values, each [B, S, H, D], to those
      that are attended to.
    read: attention over these, (queries, kept) -> [B, S, H * D].
  """

  def own(queries, keys, values):
    kept = remember(keys, values)
    return read(queries, kept), kept

  return own


def across(kept: Sequence[Any]) -> Cross:
  """Attention to an encoder's output: [B, H, D, E] twice, and its bias."""
  return lambda queries: layers.attend(queries, *kept)


def own_steps(
  cache: kv_cache.KVCache,
  num_queries: int,
  tree: Tree | None = None,
  write: kv_cache.Write = kv_cache.write,
) -> list[Own]:
  """Self-attention of each layer over a cache.

  Where `backend.kernels` wants it, it is one kernel (`attention_kernel`).

  Args:
    cache: the cache before this call's tokens.
    num_queries: S, tokens per row in this call.
    tree: how these hang together; None is one after another.
    write: of a cache whose keys and values are apart. What is not written as
      here is no business of a kernel.
  """
  reads = kv_cache.bucketed_reads(cache, num_queries, tree)
  plain = [
    in_turn(cache.remember(i, write), read) for i, read in enumerate(reads)
  ]
  if backend.kernel_setting() == 'off' or write is not kv_cache.write:
    return plain
  return [
    _own_kernel(cache, i, tree, instead) for i, instead in enumerate(plain)
  ]


def cross_steps(
  cache: kv_cache.KVCache, write: kv_cache.Write = kv_cache.write
) -> list[Cross]:
  """Cross-attention of each layer; likewise."""
  kept = [
    (keys, values, cache.cross_bias)
    for keys, values in zip(cache.cross_keys, cache.cross_values, strict=True)
  ]
  if backend.kernel_setting() == 'off' or write is not kv_cache.write:
    return [across(one) for one in kept]
  return [_cross_kernel(one, across(one)) for one in kept]


def _own_kernel(cache, layer, tree, plain) -> Own:
  # Imported only where it is used: it takes a second.
  from specdec_jax.models import attention_kernel  # noqa: PLC0415

  biases = cache.position_bias
  bias = biases[layer % len(biases)]

  def own(queries, keys, values):
    refusal = 'the tokens are a tree' if tree is not None else ''
    if not cache.joined:
      refusal = 'keys and values are in arrays of their own'
    refusal = refusal or attention_kernel.refusal(
      queries, keys.shape[2], cache.num_slots
    )
    if not backend.takes_kernel('self-attention', refusal):
      return plain(queries, keys, values)
    args = cache.joined[layer], bias, cache.length
    mixed, kept = attention_kernel.step(queries, keys, values, *args)
    return mixed, (kept,)

  return own


def _cross_kernel(kept, plain) -> Cross:
  from specdec_jax.models import attention_kernel  # noqa: PLC0415

  def cross(queries):
    heads, slots = kept[0].shape[1], kept[0].shape[3]
    refusal = attention_kernel.refusal(queries, heads, slots)
    if not backend.takes_kernel('cross-attention', refusal):
      return plain(queries)
    return attention_kernel.cross(queries, *kept)

  return cross
