"""A decoder's attention of some queries in one kernel, for GPUs (Pallas).

Of several queries XLA makes five kernels of self-attention and three of
cross-attention; of one query two, and one. Here each is one: a program holds
the queries of all heads that share keys as rows of a tile, walks over the slots
in blocks and keeps a running softmax (Milakov and Gimelshein, 2018).
Self-attention also writes the new keys and values into the cache, and reads no
slot that holds no token.

Few heads over many slots would leave most of a GPU idle. Then several programs
share the slots (Dao and others, flash-decoding, 2023), and XLA puts together
what they have found: one kernel more, so that each must save as much.

`layers.attend` says what is computed; `refusal` which shapes are taken.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specdec_jax.models import backend
from specdec_jax.models.layers import DTYPES, MASKED
from specdec_jax.models.tree import Tree

MOST_QUERIES = 128  # of a row; of more XLA's own products are large
_LEAST = 16  # rows, slots and numbers a head, for a tensor core
_MOST_SIZE = 256  # numbers a head
_ROWS = 64  # of a tile, at most
_TILE = 8192  # numbers of a tile, at most: registers hold it
_BLOCK_BYTES = 1 << 14  # of keys at once, at most
# Of keys and values, for a program that shares them. With two blocks of both
# on their way (64 KiB) in each microsecond that memory takes, it is 4 of them:
# more than the kernel that puts the parts together. T5 XXL has 64 heads of 128
# KiB over 512 slots, which are not shared.
_LEAST_BYTES = 1 << 18
_MOST_PARTS = 8
_WARPS = 4

_Running = tuple[jax.Array, jax.Array, jax.Array]


class Own(NamedTuple):
  """What self-attention reads; `step` has the shapes."""

  fresh: Any  # [B * S, (H + 2 * K) * D]: queries, keys and values
  joined: Any
  position_bias: Any
  length: Any
  tree: tuple[Any, ...] = ()  # as `Tree`
  beside: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Work:
  """How a call is shared among programs; three numbers say which one it is.

  Attributes:
    batch: B.
    heads: H.
    kept: K, heads of keys.
    num_queries: S.
    size: D.
    block: slots at once.
    parts: programs that share the slots.
    scale: see `layers.attend`.
    softcap: likewise.
  """

  batch: int
  heads: int
  kept: int
  num_queries: int
  size: int
  block: int
  parts: int
  scale: float
  softcap: float

  @property
  def group(self) -> int:
    """Heads of queries that share keys."""
    return self.heads // self.kept

  @property
  def rows(self) -> int:
    """Queries of a program, of all heads of a group."""
    return _rows(self.num_queries * self.group, self.size)

  @property
  def tiles(self) -> int:
    """Programs that share the queries of a group."""
    return pl.cdiv(self.num_queries * self.group, self.rows)

  @property
  def grid(self) -> tuple[int, int, int]:
    """Rows, heads of keys, and programs for these."""
    return self.batch, self.kept, self.tiles * self.parts

  def numbers(self, head: jax.Array) -> jax.Array:
    """Where heads int32[N] are in an array of all, int32[N, D]."""
    return head[:, None] * self.size + jnp.arange(self.size)[None, :]

  def queries_of(self, kept: jax.Array, tile: jax.Array):
    """The token and the head of each row of a tile, int32[rows] twice."""
    row = tile * self.rows + jnp.arange(self.rows)
    # Rows behind the last query repeat it: what is written twice is the same.
    row = jnp.minimum(row, self.num_queries * self.group - 1)
    return row // self.group, kept * self.group + row % self.group


def refusal(queries: Any, kept: int, slots: int) -> str:
  """Why attention is not computed here; '' if it can be.

  Args:
    queries: [B, S, H, D], or its shape and dtype; S at most `MOST_QUERIES`.
    kept: heads of keys and values.
    slots: T or E, the fewest where there are both.
  """
  heads, size = queries.shape[2:]
  if heads % kept:
    return f'{heads} heads cannot share the keys of {kept}'
  if not _LEAST <= size <= _MOST_SIZE or size & (size - 1):
    return (
      f'heads of {size} numbers: it must be a power of two from {_LEAST} to'
      f' {_MOST_SIZE}'
    )
  if slots < _LEAST:
    return f'{slots} slots are less than {_LEAST}'
  if str(queries.dtype) not in DTYPES:
    return f'it computes in {" or ".join(DTYPES)}, not {queries.dtype}'
  return ''


def step(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  joined: jax.Array,
  position_bias: jax.Array,
  length: jax.Array,
  tree: Tree | None = None,
  beside: Sequence[jax.Array] = (),
  scale: float = 1.0,
  softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Writes S tokens into the cache, and attends to them and all before.

  Args:
    queries: [B, S, H, D].
    keys: [B, S, K, D], of the same tokens; K divides H.
    values: likewise.
    joined: [2, B, K, T, D], keys and values of the tokens before.
    position_bias: float32[H or 1, 2 * T], as in `KVCache`.
    length: int32[B], tokens in the cache; length + S <= T.
    tree: how the tokens hang together; None is one after another.
    beside: of more slots, as `layers.attend` has them.
    scale: of scores; likewise.
    softcap: of scores; likewise.

  Returns:
    [B, S, H * D], and the cache with S tokens more: in place under jit.
  """
  # XLA sees that these were the parts of one product.
  flat = [x.reshape(*x.shape[:2], -1) for x in (queries, keys, values)]
  fresh = jnp.concatenate(flat, axis=-1)
  fresh = fresh.reshape(-1, fresh.shape[2])
  parts = () if tree is None else of_tree(tree)
  own = Own(fresh, joined, position_bias, length, parts, tuple(beside))
  slots = [joined.shape[3], *(x.shape[3] for x in beside[:1])]
  work = shared(queries, keys.shape[2], slots, scale, softcap)
  *found, joined = _call(
    step_part, work, own, queries, joined, keys.nbytes + values.nbytes
  )
  return _together(found, queries), joined


def of_tree(tree: Tree) -> tuple[jax.Array, ...]:
  """What `Own.tree` holds of a tree."""
  # In memory a bool is a byte, which is what a kernel reads.
  seen = tree.visible.astype(jnp.int8)
  return tree.positions, tree.slot_positions, seen


def cross(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  bias: jax.Array,
  scale: float = 1.0,
  softcap: float = 0.0,
) -> jax.Array:
  """`layers.attend` over an encoder's output: the bias is [B, 1, 1, E]."""
  slots = [keys.shape[3]]
  work = shared(queries, keys.shape[1], slots, scale, softcap)
  flat = queries.reshape(-1, work.heads * work.size)
  found = _call(cross_part, work, (flat, keys, values, bias), queries)
  return _together(found, queries)


def shared(
  queries: Any,
  kept: int,
  slots: Sequence[int],
  scale: float = 1.0,
  softcap: float = 0.0,
  most_parts: int = _MOST_PARTS,
) -> Work:
  """How a call is shared; `step` and `cross` have its arguments.

  Args:
    queries: [B, S, H, D], or its shape and dtype.
    kept: K.
    slots: T or E, or both.
    scale: of scores.
    softcap: of scores.
    most_parts: programs that share the slots of a head, at most.
  """
  batch, num_queries, heads, size = queries.shape
  block = _BLOCK_BYTES // (size * queries.dtype.itemsize)
  block = min(block, *(1 << (one.bit_length() - 1) for one in slots))
  shape = batch, heads, kept, num_queries, size
  work = Work(*shape, block, 1, float(scale), float(softcap))
  idle = backend.gpu_cores() // (batch * kept * work.tiles)
  read = 2 * sum(slots) * size * queries.dtype.itemsize
  parts = min(idle, read // _LEAST_BYTES, most_parts)
  return dataclasses.replace(work, parts=max(parts, 1))


def _rows(count: int, size: int) -> int:
  """Rows of a tile for so many queries: a power of two."""
  least = max(_LEAST, 1 << (count - 1).bit_length())
  return min(least, _ROWS, _TILE // size)


def _call(kernel: Callable, work: Work, args, queries, cache=None, updated=0):
  """Runs a kernel for each row and head of keys.

  Args:
    kernel: `step_part` or `cross_part`.
    work: how it is shared.
    args: arrays; the cache is the second, if there is one.
    queries: [B, S, H, D].
    cache: what the kernel changes where it is.
    updated: bytes that it writes there.

  Returns:
    What `_together` takes, and then the cache.
  """
  result = jax.ShapeDtypeStruct
  tokens, width = work.batch * work.num_queries, work.heads * work.size
  shapes = [result((tokens, width), queries.dtype)]
  if work.parts > 1:
    shapes = [result((work.parts, tokens, width), jnp.float32)]
    shapes += [result((work.parts, tokens, work.heads), jnp.float32)] * 2
  if cache is not None:
    shapes.append(result(cache.shape, cache.dtype))

  def of_all(*refs):
    place = tuple(pl.program_id(i) for i in range(3))
    kernel(work, place, refs[: len(args)], refs[len(args) :])

  return pl.pallas_call(
    of_all,
    grid=work.grid,
    out_shape=shapes,
    input_output_aliases={} if cache is None else {1: len(shapes) - 1},
    interpret=backend.interprets_kernels(),
    compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
    # For `measure.compiled`, which else would count the whole cache.
    metadata={'updated_bytes': json.dumps(updated)} if updated else None,
    name=kernel.__name__.removesuffix('_part'),
  )(*args)


def _together(found: Sequence[jax.Array], queries: jax.Array) -> jax.Array:
  """[B, S, H * D], from what `_call` returns for the queries."""
  mixed, *rest = found
  if rest:
    most, total = rest
    parts = range(len(mixed))
    # Written out, it is one kernel; reductions would be some.
    largest = functools.reduce(jnp.maximum, [most[i] for i in parts])
    shares = [jnp.exp(most[i] - largest) for i in parts]
    weights = [share * total[i] for i, share in enumerate(shares)]
    whole = functools.reduce(jnp.add, weights)
    mixed = mixed.reshape(*most.shape, -1)
    scaled = [share[..., None] * mixed[i] for i, share in enumerate(shares)]
    mixed = functools.reduce(jnp.add, scaled) / whole[..., None]
  return mixed.astype(queries.dtype).reshape(*queries.shape[:2], -1)


def step_part(work: Work, place: Sequence[Any], args, results) -> None:
  """What one program of `step` does.

  Args:
    work: how it is shared.
    place: which of `work.grid` it is.
    args: an `Own`, of what a kernel reads.
    results: [B * S, H * D], or parts of it, and the cache.
  """
  own = Own(*args)
  row, kept, turn = place
  first_token = row * work.num_queries
  tile, part = turn // work.parts, turn % work.parts
  slots = own.joined.shape[3]
  start = own.length[row]
  token, head = work.queries_of(kept, tile)
  queries = own.fresh[first_token + token[:, None], work.numbers(head)]
  bias_of = _bias_of(own, row, token, start, head)
  written = results[-1]

  def seen(scores, slot, is_seen):
    scores = _shaped(work, scores) + bias_of(slot)
    return jnp.where(is_seen[None, :], scores, -jnp.inf)

  def new(first, running):
    """The call's own tokens, which the cache does not hold yet."""
    number = first + jnp.arange(count)
    is_token = number < work.num_queries
    number = jnp.minimum(number, work.num_queries - 1)
    heads = work.heads + kept + jnp.zeros_like(number)
    keys, values = (
      own.fresh[
        first_token + number[:, None], work.numbers(heads + i * work.kept)
      ]
      for i in range(2)
    )

    @pl.when(turn == 0)
    def _():
      written[0, row, kept, start + number, :] = keys
      written[1, row, kept, start + number, :] = values

    scores = _product(queries, keys, trans_b=True)
    scores = seen(scores, start + number, is_token)
    return _more(running, scores, values, trans_b=False)

  def older(i, running):
    number = part + i * work.parts
    first, slot, is_new = _place(number, work.block, slots)
    is_used = is_new & (slot < start)
    here = row, kept, pl.ds(first, work.block), slice(None)
    keys, values = (
      # Interpreted, such a load takes no number that is known when traced.
      triton.load(
        own.joined.at[jnp.full((), i), *here], mask=is_used[:, None], other=0
      )
      for i in range(2)
    )
    scores = seen(_product(queries, keys, trans_b=True), slot, is_used)
    return _more(running, scores, values, trans_b=False)

  count = min(work.block, max(_LEAST, 1 << (work.num_queries - 1).bit_length()))

  def all_new(running):
    for first in range(0, work.num_queries, count):
      running = new(first, running)
    return running

  running = _nothing_yet(queries)
  if work.parts == 1:
    running = all_new(running)
  else:
    running = lax.cond(part == 0, all_new, lambda running: running, running)
  blocks = _blocks_of(work, part, pl.cdiv(start, work.block))
  running = lax.fori_loop(0, blocks, older, running)
  if own.beside:
    running = _encoded(work, own.beside, queries, row, kept, part, running)
  _give(work, results, (first_token + token, head), part, running)


def cross_part(work: Work, place: Sequence[Any], args, results) -> None:
  """What one program of `cross` does; see `step_part`."""
  row, kept, turn = place
  first_token = row * work.num_queries
  tile, part = turn // work.parts, turn % work.parts
  token, head = work.queries_of(kept, tile)
  rows, *encoded = args
  queries = rows[first_token + token[:, None], work.numbers(head)]
  running = _nothing_yet(queries)
  running = _encoded(work, encoded, queries, row, kept, part, running)
  _give(work, results, (first_token + token, head), part, running)


def _bias_of(own: Own, row, token, start, head) -> Callable[..., jax.Array]:
  """Maps slots int32[N] to the bias of the queries there, [rows, N]."""
  slots = own.joined.shape[3]
  bias_row = head if own.position_bias.shape[0] > 1 else jnp.zeros_like(head)

  def of_chain(slot):
    place = slots - 1 - (start + token)[:, None] + slot[None, :]
    return own.position_bias[bias_row[:, None], place]

  def of_tree(slot):
    positions, slot_positions, visible = own.tree
    behind = positions[row, token][:, None] - slot_positions[row, slot][None, :]
    place = slots - 1 - jnp.clip(behind, 0, slots - 1)
    bias = own.position_bias[bias_row[:, None], place]
    is_visible = visible[row, token[:, None], slot[None, :]] != 0
    return jnp.where(is_visible, bias, MASKED)

  return of_tree if own.tree else of_chain


def _encoded(work, encoded, queries, row, kept, part, running) -> _Running:
  """Attention to an encoder's output, [B, K, D, E] twice, and its bias."""
  keys, values, bias = encoded
  slots = keys.shape[3]

  def some(i, running):
    first, _, is_new = _place(part + i * work.parts, work.block, slots)
    here = pl.ds(first, work.block)
    scores = _shaped(work, _product(queries, keys[row, kept, :, here]))
    scores += bias[row, 0, 0, here][None, :]
    scores = jnp.where(is_new[None, :], scores, -jnp.inf)
    return _more(running, scores, values[row, kept, :, here], trans_b=True)

  blocks = _blocks_of(work, part, pl.cdiv(slots, work.block))
  return lax.fori_loop(0, blocks, some, running)


def _blocks_of(work: Work, part, count):
  """How many of `count` blocks a part has: every so many is its own."""
  return count if work.parts == 1 else pl.cdiv(count - part, work.parts)


def _place(number, block: int, slots: int):
  """Where a block begins, its slots, and which no block before has had.

  The last block ends at the last slot: it may begin in the one before.
  """
  first = jnp.minimum(number * block, slots - block)
  slot = first + jnp.arange(block)
  return first, slot, slot >= number * block


def _shaped(work: Work, scores):
  """Scores before their bias."""
  if work.scale != 1.0:
    scores = scores * work.scale
  if work.softcap:
    scores = work.softcap * jnp.tanh(scores / work.softcap)
  return scores


def _product(left, right, trans_b: bool = False):
  exact = backend.precision(str(left.dtype))
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


def _give(work: Work, results, place, part, running: _Running) -> None:
  """Writes what was found for the queries at a place."""
  most, total, mixed = running
  token, head = place
  whole = token[:, None], work.numbers(head)
  if work.parts == 1:
    (result, *_) = results
    result[whole] = (mixed / total[:, None]).astype(result.dtype)
    return
  results[0][(part, *whole)] = mixed
  for one, found in zip(results[1:3], (most, total), strict=True):
    one[part, token, head] = found
