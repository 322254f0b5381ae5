"""A decoder's attention of a few queries in one kernel, for GPUs (Pallas).

Of several queries XLA makes five kernels of self-attention and three of
cross-attention; of one query two, and one. Here each is one: a program for each
row and head, which holds its queries as a tile of 16 rows, the least of a
tensor core, walks over the slots in blocks and keeps a running softmax (Milakov
and Gimelshein, 2018). Self-attention also writes the new keys and values into
the cache, and reads no slot that holds no token.

`layers.attend` says what is computed; `refusal` which shapes are taken.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specdec_jax.models import backend
from specdec_jax.models.layers import precision

MOST_QUERIES = 16  # rows of the tile
_LEAST = 16  # of slots and of numbers a head, for a tensor core
_BLOCK = {'bfloat16': 128, 'float32': 64}  # slots at once, at most
_WARPS = 4

_Running = tuple[jax.Array, jax.Array, jax.Array]


def refusal(queries: jax.Array, kept: int, slots: int) -> str:
  """Why attention is not computed here; '' if it can be.

  Args:
    queries: [B, S, H, D].
    kept: heads of keys and values.
    slots: T or E.
  """
  num_queries, heads, size = queries.shape[1:]
  if num_queries > MOST_QUERIES:
    return f'{num_queries} queries are more than {MOST_QUERIES}'
  if kept != heads:
    return f'{heads} heads share the keys of {kept}'
  if size < _LEAST or size & (size - 1):
    return f'heads of {size} numbers: it must be a power of two from {_LEAST}'
  if slots < _LEAST:
    return f'{slots} slots are less than {_LEAST}'
  if str(queries.dtype) not in _BLOCK:
    return f'it computes in {" or ".join(_BLOCK)}, not {queries.dtype}'
  return ''


def step(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  joined: jax.Array,
  position_bias: jax.Array,
  length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Writes S tokens into the cache, and attends to them and all before.

  Args:
    queries: [B, S, H, D].
    keys: likewise, of the same tokens.
    values: likewise.
    joined: [2, B, H, T, D], keys and values of the tokens before.
    position_bias: float32[H or 1, 2 * T], as in `KVCache`.
    length: int32[B], tokens in the cache; length + S <= T.

  Returns:
    [B, S, H * D], and the cache with S tokens more: in place under jit.
  """
  batch, num_queries, heads, size = queries.shape
  # XLA sees that these were the parts of one product.
  flat = [x.reshape(batch, num_queries, -1) for x in (queries, keys, values)]
  fresh = jnp.concatenate(flat, axis=-1)
  fresh = fresh.reshape(batch, num_queries, 3, heads, size)
  mixed, joined = _call(
    functools.partial(_step, block=_block(joined.shape[3], queries.dtype)),
    (fresh, position_bias, length, joined),
    [jax.ShapeDtypeStruct(queries.shape, queries.dtype), joined],
    aliases={3: 1},
    updated=keys.nbytes + values.nbytes,
  )
  return mixed.reshape(batch, num_queries, -1), joined


def cross(
  queries: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array
) -> jax.Array:
  """`layers.attend` over an encoder's output: the bias is [B, 1, 1, E]."""
  (mixed,) = _call(
    functools.partial(_cross, block=_block(keys.shape[3], queries.dtype)),
    (queries, keys, values, bias),
    [jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
  )
  return mixed.reshape(*queries.shape[:2], -1)


def _block(slots: int, dtype: Any) -> int:
  """Slots at once: a power of two."""
  return min(_BLOCK[str(dtype)], 1 << (slots.bit_length() - 1))


def _call(kernel: Callable, args, results, aliases=None, updated=0):
  """Runs a kernel for each row and head of args[0], [B, S, ..., H, D]."""
  return pl.pallas_call(
    kernel,
    grid=(args[0].shape[0], args[0].shape[-2]),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
    input_output_aliases=aliases or {},
    interpret=backend.kernel_setting() == 'interpreted',
    compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
    # For `measure.compiled`, which else would count the whole cache.
    metadata={'updated_bytes': json.dumps(updated)} if updated else None,
  )(*args)


def _step(fresh, position_bias, length, joined, mixed, written, *, block):
  """One row and head of `step`; fresh is [B, S, 3, H, D]."""
  row, head = pl.program_id(0), pl.program_id(1)
  num_queries, slots = fresh.shape[1], joined.shape[3]
  bias_row = 0 if position_bias.shape[0] == 1 else head
  start = length[row]
  tile = jnp.arange(MOST_QUERIES)
  # Rows behind the last query repeat it: what is written twice is the same.
  token = jnp.minimum(tile, num_queries - 1)
  queries, keys, values = (fresh[row, token, i, head, :] for i in range(3))
  written[0, row, head, start + token, :] = keys
  written[1, row, head, start + token, :] = values

  def scores_of(keys, slot, is_seen):
    place = slots - 1 - (start + token)[:, None] + slot[None, :]
    scores = _product(queries, keys, trans_b=True)
    scores += position_bias[bias_row, place]
    return jnp.where(is_seen[None, :], scores, -jnp.inf)

  running = _nothing_yet(queries)
  scores = scores_of(keys, start + tile, tile < num_queries)
  running = _more(running, scores, values, trans_b=False)

  def older(number, running):
    first, slot, is_new = _place(number, block, slots)
    is_used = is_new & (slot < start)
    here = row, head, pl.ds(first, block), slice(None)
    keys, values = (
      # Interpreted, such a load takes no number that is known when traced.
      triton.load(
        joined.at[jnp.full((), i), *here], mask=is_used[:, None], other=0
      )
      for i in range(2)
    )
    scores = scores_of(keys, slot, is_used)
    return _more(running, scores, values, trans_b=False)

  running = lax.fori_loop(0, pl.cdiv(start, block), older, running)
  mixed[row, token, head, :] = _result(running, mixed.dtype)


def _cross(queries, keys, values, bias, mixed, *, block):
  """One row and head of `cross`."""
  row, head = pl.program_id(0), pl.program_id(1)
  slots = keys.shape[3]
  token = jnp.minimum(jnp.arange(MOST_QUERIES), queries.shape[1] - 1)
  rows = queries[row, token, head, :]

  def part(number, running):
    first, _, is_new = _place(number, block, slots)
    here = pl.ds(first, block)
    scores = _product(rows, keys[row, head, :, here])
    scores += bias[row, 0, 0, here][None, :]
    scores = jnp.where(is_new[None, :], scores, -jnp.inf)
    return _more(running, scores, values[row, head, :, here], trans_b=True)

  running = lax.fori_loop(0, pl.cdiv(slots, block), part, _nothing_yet(rows))
  mixed[row, token, head, :] = _result(running, mixed.dtype)


def _place(number, block: int, slots: int):
  """Where a block begins, its slots, and which no block before has had.

  The last block ends at the last slot: it may begin in the one before.
  """
  first = jnp.minimum(number * block, slots - block)
  slot = first + jnp.arange(block)
  return first, slot, slot >= number * block


def _product(left, right, trans_b: bool = False):
  exact = precision(str(left.dtype))
  return triton.dot(left, right, trans_b=trans_b, precision=exact)


def _nothing_yet(queries) -> _Running:
  """Largest score, sum of the weights, and their sum of values, of a query."""
  rows, size = queries.shape
  most = jnp.full((rows,), -jnp.inf, jnp.float32)
  zeros = jnp.zeros((rows, size), jnp.float32)
  return most, jnp.zeros((rows,), jnp.float32), zeros


def _more(running: _Running, scores, values, trans_b: bool) -> _Running:
  """The same over more slots; their values are [slots, D], or turned."""
  most, total, mixed = running
  new_most = jnp.maximum(most, jnp.max(scores, axis=1))
  weights = jnp.exp(scores - new_most[:, None])
  shrunk = jnp.exp(most - new_most)
  total = total * shrunk + jnp.sum(weights, axis=1)
  more = _product(weights.astype(values.dtype), values, trans_b)
  return new_most, total, mixed * shrunk[:, None] + more


def _result(running: _Running, dtype: Any):
  _, total, mixed = running
  return (mixed / total[:, None]).astype(dtype)
