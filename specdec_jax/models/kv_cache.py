"""A fixed-shape key/value cache: each row has a length, and can be rewound.

The shape stays the same from the first step to the last, so that nothing
recompiles. Each layer has its own array: XLA then updates it in place inside a
`while_loop`, while one stacked array would be sliced and copied.

Keys and values are stored (head, head_dim, slot). On a CPU the products of a
few queries with that layout cost a quarter of those with (head, slot,
head_dim), because the slots are the vector lanes; `specdec measure`
measures it.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax.models import backend, layers
from specdec_jax.tree_shape import Tree

Kept = tuple[jax.Array, jax.Array]  # keys and values that a layer attends to
Attend = Callable[..., jax.Array]  # as `layers.attend`
_AT_ONCE = 32  # rows that are written without a loop over them


@struct.dataclass
class KVCache:
  """Everything a decoder remembers of a batch.

  Attributes:
    keys: a tuple over layers of [B, H, D, T]. H is the number of heads of keys
      here, which heads of queries may share.
    values: a tuple over layers of [B, H, D, T].
    cross_keys: a tuple over layers of [B, H, D, E]; empty in a decoder-only
      model.
    cross_values: a tuple over layers of [B, H, D, E]; empty in a decoder-only
      model.
    cross_bias: float32[B, 1, 1, E], 0 at inputs and very negative at padding;
      None in a decoder-only model.
    position_bias: a tuple over layers, or of one array for all layers, of
      float32[H, 2 * T]: causal mask and relative bias added together. A query
      at position i adds T of these numbers, beginning with number T - 1 - i, to
      its scores over slots 0..T-1; they are very negative for slots after the
      query. The shape is [1, 2 * T] if it is the mask alone.
    length: int32[B], tokens held. Slots from `length` on are not in use: they
      are overwritten before any query can see them.
  """

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]
  cross_keys: tuple[jax.Array, ...]
  cross_values: tuple[jax.Array, ...]
  cross_bias: jax.Array | None
  position_bias: tuple[jax.Array, ...]
  length: jax.Array

  @property
  def num_slots(self) -> int:
    """T, the tokens a row can hold."""
    return self.position_bias[0].shape[-1] // 2

  def rewind(self, length: jax.Array) -> 'KVCache':
    """Returns the cache with only the first `length` (int32[B]) tokens."""
    return self.replace(length=length)

  def keep(self, length: jax.Array, slots: jax.Array) -> 'KVCache':
    """Moves the tokens in some slots together, behind the first ones.

    Args:
      length: int32[B], how many slots of each row stay as they are.
      slots: int32[B, N], >= length: what they hold is moved to slots
        length..length + N - 1.

    Returns:
      The cache with `length` + N tokens in every row.
    """

    def moved(buffer):
      held = jnp.take_along_axis(buffer, slots[:, None, None], axis=3)
      return write(buffer, held.transpose(0, 3, 1, 2), length)  # bhdn -> bnhd

    return self.replace(
      keys=tuple(map(moved, self.keys)),
      values=tuple(map(moved, self.values)),
      length=length + slots.shape[1],
    )

  def remember(self, layer: int) -> Callable[..., Kept]:
    """Maps a layer's new keys and values, [B, S, H, D], to all of them."""

    def written(keys, values):
      return (
        write(self.keys[layer], keys, self.length),
        write(self.values[layer], values, self.length),
      )

    return written

  def grown(self, kept: Sequence[Kept], num_tokens: int) -> 'KVCache':
    """The cache after `remember` in each layer: S tokens longer per row."""
    keys, values = zip(*kept, strict=True)
    length = self.length + num_tokens
    return self.replace(keys=keys, values=values, length=length)


def write(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Writes S slots per row, each row at its own place; in place under jit.

  Args:
    buffer: [B, H, D, T].
    new: [B, S, H, D].
    start: int32[B]; the caller keeps `start + S <= T`, since
      `dynamic_update_slice` would clamp and overwrite live slots.

  Returns:
    The buffer, [B, H, D, T], with slots start..start+S-1 replaced.
  """
  zero = jnp.zeros((), start.dtype)

  def one_row(row, slots, first):
    return lax.dynamic_update_slice(row, slots, (zero, zero, first))

  # bshd -> bhds: the slot axis is last in the buffer.
  slots = new.transpose(0, 2, 3, 1).astype(buffer.dtype)

  def next_row(row, buffer):
    one = lax.dynamic_slice_in_dim(slots, row, 1)
    place = (row, zero, zero, start[row])
    return lax.dynamic_update_slice(buffer, one, place)

  # All rows at once are a scatter: on a TPU a loop with ten operations a row,
  # and slots in lanes, where a write touches every tile.
  if backend.is_whole_on('tpu'):
    return lax.fori_loop(0, len(slots), next_row, buffer, unroll=_AT_ONCE)
  # What is in a branch is done once; outside XLA would write for the attention
  # and again for the cache, each time into a copy.
  if backend.is_whole_on('cpu') and len(slots) == 1:
    is_written = start[0] >= 0  # always
    first_row = functools.partial(next_row, 0)
    return lax.cond(is_written, first_row, lambda buffer: buffer, buffer)
  return jax.vmap(one_row)(buffer, slots, start)


def read_position_bias(
  position_bias: jax.Array, length: jax.Array, num_queries: int
) -> jax.Array:
  """Returns the score bias of the next `num_queries` tokens of each row.

  Args:
    position_bias: float32[H or 1, 2 * T], one array of
      `KVCache.position_bias`.
    length: int32[B], tokens that each row already holds.
    num_queries: S.

  Returns:
    float32[B, H or 1, S, T].
  """
  num_slots = position_bias.shape[-1] // 2

  def one_query(position):
    return lax.dynamic_slice_in_dim(
      position_bias, num_slots - 1 - position, num_slots, axis=1
    )

  positions = length[:, None] + jnp.arange(num_queries)
  return jax.vmap(jax.vmap(one_query, out_axes=1))(positions)


def read_tree_bias(position_bias: jax.Array, tree: Tree) -> jax.Array:
  """`read_position_bias` of tokens that see only their ancestors.

  Args:
    position_bias: float32[H or 1, 2 * T].
    tree: how the S tokens hang together.

  Returns:
    float32[B, H or 1, S, T].
  """
  num_slots = position_bias.shape[-1] // 2
  behind = tree.positions[:, :, None] - tree.slot_positions[:, None, :]
  place = num_slots - 1 - jnp.clip(behind, 0, num_slots - 1)
  bias = jnp.moveaxis(jnp.take(position_bias, place, axis=1), 0, 1)
  return jnp.where(tree.visible[:, None], bias, layers.MASKED)


def positions(
  cache: KVCache, num_queries: int, tree: Tree | None = None
) -> jax.Array:
  """Places in their sequences, int32[B, S], of the tokens of a call."""
  if tree is not None:
    return tree.positions
  return cache.length[:, None] + jnp.arange(num_queries)


def buckets(num_slots: int) -> tuple[int, ...]:
  """Returns the prefixes of the cache that attention may be restricted to.

  Their sizes double, so that a step pays for at most twice the slots in use.
  They begin at 128: cutting out a shorter prefix costs more than attending over
  all of it. On an accelerator there is one: a conditional costs more there.
  """
  if backend.kind() != 'cpu':
    return (num_slots,)
  doubled = (128 << i for i in range(num_slots.bit_length()))
  return (*(size for size in doubled if size < num_slots), num_slots)


def bucketed_reads(
  cache: KVCache, num_queries: int, tree: Tree | None, attend: Attend
) -> list[Callable[..., jax.Array]]:
  """Attention over the shortest bucket with all slots in use.

  Only the read is inside the switch: with the write inside too, the switch
  would copy the cache. The loops rewind a finished row to length 0, so the
  bucket depends on the longest unfinished row.

  Args:
    cache: the cache before this call's tokens.
    num_queries: S, tokens per row in this call.
    tree: how these hang together; None is one after another.
    attend: `layers.attend` with the scale and softcap of the layers.

  Returns:
    For each array of `cache.position_bias` a function (queries [B, S, H, D],
    what the layer has `kept`) -> [B, S, H * D], which also takes what `attend`
    has `beside`.
  """
  sizes = buckets(cache.num_slots)
  needed = jnp.max(cache.length) + num_queries
  index = jnp.sum(jnp.asarray(sizes) < needed)

  def attend_prefix(size, queries, keys, values, bias, *beside):
    keys, values, bias = (part[..., :size] for part in (keys, values, bias))
    return attend(queries, keys, values, bias, beside=beside)

  branches = [functools.partial(attend_prefix, size) for size in sizes]

  def of_bias(position_bias):
    if tree is None:
      bias = read_position_bias(position_bias, cache.length, num_queries)
    else:
      bias = read_tree_bias(position_bias, tree)
    if len(branches) == 1:
      return reader(bias, attend)
    return lambda queries, kept, *beside: lax.switch(
      index, branches, queries, *kept, bias, *beside
    )

  return [of_bias(position_bias) for position_bias in cache.position_bias]


def reader(bias: jax.Array, attend: Attend) -> Callable[..., jax.Array]:
  """Attention over the keys and values that a layer has kept."""
  return lambda queries, kept, *beside: attend(
    queries, *kept, bias, beside=beside
  )


def without_cache(keys: jax.Array, values: jax.Array) -> Kept:
  """`KVCache.remember` without a cache: only this call's keys and values."""
  return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 3, 1)
