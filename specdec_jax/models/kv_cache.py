"""A fixed-shape key/value cache: each row has a length, and can be rewound.

The shape stays the same from the first step to the last, so that nothing
recompiles. Each layer has its own array: XLA then updates it in place inside a
`while_loop`, while one stacked array would be sliced and copied.

Keys and values are stored (head, head_dim, slot). On a CPU the products of a
few queries with that layout cost a quarter of those with (head, slot,
head_dim), because vector instructions then process neighbouring slots together.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax.models import backend, layers
from specdec_jax.tree_shape import Tree

KV = tuple[jax.Array, jax.Array]  # keys and values, each [B, K, D, T]
Attend = Callable[..., jax.Array]  # a function such as `layers.attend`
_AT_ONCE = 32  # the loop over rows is unrolled for up to this many rows


@struct.dataclass
class KVCache:
  """The keys and values that a decoder has computed for a batch.

  Attributes:
    keys: a tuple over layers of [B, K, D, T], for K heads of keys, each of
      which several heads of queries may share.
    values: a tuple over layers of [B, K, D, T].
    cross_keys: a tuple over layers of [B, K, D, E]; empty in a decoder-only
      model.
    cross_values: a tuple over layers of [B, K, D, E]; empty in a decoder-only
      model.
    cross_bias: float32[B, 1, 1, E], 0 at inputs and very negative at padding;
      None in a decoder-only model.
    position_bias: a tuple of float32[H, 2 * T], which are causal masks with
      relative biases added; an array is for one layer or for several, see
      `Stack.bias_of`. A query at position i adds T numbers of an array, from
      index T - 1 - i on, to its scores over slots 0..T-1; the numbers are very
      negative for slots after the query. The shape is [1, 2 * T] without
      relative biases.
    length: int32[B], number of tokens. Slots from `length` on are unused: they
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
    """T, the number of tokens that a row can hold."""
    return self.position_bias[0].shape[-1] // 2

  def rewind(self, length: jax.Array) -> 'KVCache':
    """Returns the cache with only the first `length` (int32[B]) tokens."""
    return self.replace(length=length)

  def keep(self, length: jax.Array, slots: jax.Array) -> 'KVCache':
    """Moves the tokens of some slots to the end of the first `length` tokens.

    Args:
      length: int32[B], the number of slots per row that stay as they are.
      slots: int32[B, N], >= length: their tokens are moved to slots
        length..length + N - 1.

    Returns:
      The cache with `length` + N tokens in every row.
    """

    def moved(buffer):
      held = jnp.take_along_axis(buffer, slots[:, None, None], axis=3)
      return write(buffer, held.transpose(0, 3, 1, 2), length)  # [B, N, K, D]

    keys, values = tuple(map(moved, self.keys)), tuple(map(moved, self.values))
    length = length + slots.shape[1]
    return self.replace(keys=keys, values=values, length=length)

  def append_kv(self, layer: int) -> Callable[..., KV]:
    """Returns a function that appends a layer's keys and values.

    It maps new ones, each [B, S, K, D], to the layer's arrays with these added.
    """

    def written(keys, values):
      return (
        write(self.keys[layer], keys, self.length),
        write(self.values[layer], values, self.length),
      )

    return written

  def grown(self, kv: Sequence[KV], num_tokens: int) -> 'KVCache':
    """Returns the cache with the results of `append_kv`, S tokens longer."""
    keys, values = zip(*kv, strict=True)
    length = self.length + num_tokens
    return self.replace(keys=keys, values=values, length=length)


def write(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Writes S slots per row from `start` on; in place under jit.

  Args:
    buffer: [B, K, D, T].
    new: [B, S, K, D].
    start: int32[B]; the caller keeps `start + S <= T`, since
      `dynamic_update_slice` would clamp and overwrite live slots.

  Returns:
    The buffer, [B, K, D, T], with slots start..start+S-1 replaced.
  """
  zero = jnp.zeros((), start.dtype)

  def one_row(row, slots, first):
    return lax.dynamic_update_slice(row, slots, (zero, zero, first))

  # bshd -> bhds: the slot axis is last in the buffer.
  slots = new.transpose(0, 2, 3, 1).astype(buffer.dtype)

  def next_row(row, buffer):
    new_slots = lax.dynamic_slice_in_dim(slots, row, 1)
    place = (row, zero, zero, start[row])
    return lax.dynamic_update_slice(buffer, new_slots, place)

  # Writing all rows at once is a scatter, which a TPU runs as a loop with ten
  # operations per row. Slots lie in the vector lanes, so each write touches
  # every tile.
  if backend.is_whole_on('tpu'):
    return lax.fori_loop(0, len(slots), next_row, buffer, unroll=_AT_ONCE)
  # In a branch of a conditional XLA writes once. Outside of a conditional it
  # would write twice, for the attention and for the cache, each time into a
  # copy.
  if backend.is_whole_on('cpu') and len(slots) == 1:
    is_written = start[0] >= 0  # this is always true, which XLA does not know
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
    num_queries: S, number of tokens per row.

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
  """Returns the score bias of S tokens that see only their ancestors.

  Args:
    position_bias: as for `read_position_bias`.
    tree: the tree of the S tokens.

  Returns:
    float32[B, H or 1, S, T].
  """
  num_slots = position_bias.shape[-1] // 2
  distance = tree.positions[:, :, None] - tree.slot_positions[:, None, :]
  place = num_slots - 1 - jnp.clip(distance, 0, num_slots - 1)
  bias = jnp.moveaxis(jnp.take(position_bias, place, axis=1), 0, 1)
  return jnp.where(tree.visible[:, None], bias, layers.MASKED)


def buckets(num_slots: int) -> tuple[int, ...]:
  """Returns the sizes of cache prefixes that attention may be restricted to.

  Sizes double, so that a step reads at most twice the slots that hold tokens.
  They begin at 128, because cutting out a shorter prefix costs more than
  attending over 128 slots. On an accelerator there is one size, because a
  conditional costs more there.
  """
  if backend.kind() != 'cpu':
    return (num_slots,)
  doubled = (128 << i for i in range(num_slots.bit_length()))
  return (*(size for size in doubled if size < num_slots), num_slots)


def bucketed_reads(
  cache: KVCache, num_queries: int, tree: Tree | None, attend: Attend
) -> list[Callable[..., jax.Array]]:
  """Makes functions that attend over the shortest bucket with all tokens.

  A switch selects the bucket. Only reads of the cache are inside the switch,
  which would copy the cache if writes were inside, too. The loops rewind a
  finished row to length 0, so the bucket depends on the longest unfinished row.

  Args:
    cache: the cache before this call's tokens.
    num_queries: S, tokens per row in this call.
    tree: the tree of these tokens; None: each token follows the one before.
    attend: `layers.attend` with the scale and softcap of the layers.

  Returns:
    A function for each array of `cache.position_bias`. It maps queries
    [B, S, H, D], a layer's `KV` and the `extra_kv` of `attend`, if any, to
    [B, S, H * D].
  """
  sizes = buckets(cache.num_slots)
  needed = jnp.max(cache.length) + num_queries
  index = jnp.sum(jnp.asarray(sizes) < needed)

  def attend_prefix(size, queries, keys, values, bias, *extra_kv):
    keys, values, bias = (part[..., :size] for part in (keys, values, bias))
    return attend(queries, keys, values, bias, extra_kv=extra_kv)

  branches = [functools.partial(attend_prefix, size) for size in sizes]

  def of_bias(position_bias):
    if tree is None:
      bias = read_position_bias(position_bias, cache.length, num_queries)
    else:
      bias = read_tree_bias(position_bias, tree)
    if len(branches) == 1:
      return reader(bias, attend)
    return lambda queries, kv, *extra_kv: lax.switch(
      index, branches, queries, *kv, bias, *extra_kv
    )

  return [of_bias(position_bias) for position_bias in cache.position_bias]


def reader(bias: jax.Array, attend: Attend) -> Callable[..., jax.Array]:
  """Makes a function like those of `bucketed_reads`, but over all slots.

  The bias, float32[B or 1, H or 1, S, T], is added to the scores.
  """
  return lambda queries, kv, *extra_kv: attend(
    queries, *kv, bias, extra_kv=extra_kv
  )


def without_cache(keys: jax.Array, values: jax.Array) -> KV:
  """Turns keys and values, [B, S, K, D], into a `KV` of these tokens alone."""
  return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 3, 1)
