"""A token of each row in one kernel, with the output layer, for GPUs (Pallas).

Its first part is the last norm and the output layer. Of greedy rows each
program keeps the largest logit of its outputs and that one's id, so that no
logits are in memory; a second part takes the largest of these, the first id on
ties. Where tokens are sampled the second part adds up weights, and a third one
writes the distribution, which verification reads, while it draws. Last comes
what the next call needs: the token, its embedding, and the row's length.

`probs` says what is computed, of logits in float32: `forbid_early_stops`, then
`greedy_token`, or `standardise` (without top-k and top-p) and `inverse_cdf`.
`refusal` says which shapes are taken.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from specdec_jax.models import kernel_parts, product_kernel
from specdec_jax.models.base import Draws, Ends
from specdec_jax.models.kernel_parts import TURNS, Part, Refs
from specdec_jax.models.product_kernel import Given
from specdec_jax.probs import num_columns

_MOST_COPIED = 1024  # numbers of an embedding at once
_MOST_PIECES = 32  # of a row's weights


class Head(NamedTuple):
  """What turns a decoder's last activations into logits, and tokens into x.

  Attributes:
    norm: scale of the last norm, float32[M].
    kernel: [V, M]; None is an array of another layout.
    scale: float32[V], a factor of each output; None is none.
    embedding: [V, M].
  """

  norm: jax.Array
  kernel: jax.Array | None
  scale: jax.Array | None
  embedding: jax.Array


class Drafted(NamedTuple):
  """How far a draft is.

  Attributes:
    tokens: int32[B, G], proposals; the later ones are not there yet.
    length: int32[B], tokens that the cache holds.
    turns: see `kernel_parts.no_turns`.
    probs: float32[B, G, V], what they were drawn from; None of greedy rows.
  """

  tokens: jax.Array
  length: jax.Array
  turns: jax.Array
  probs: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class _Sizes:
  """Of a draw; for `probs.inverse_cdf` a row is a table of `columns` columns.

  Attributes:
    work: the output layer.
    batch: B.
    num_read: S.
    columns: of the table.
    at_once: rows of the table in a piece of it.
  """

  work: product_kernel.Work
  batch: int
  num_read: int
  columns: int
  at_once: int

  @property
  def vocab_size(self) -> int:
    """V."""
    return self.work.width

  @property
  def table_rows(self) -> int:
    """Rows of the table."""
    return pl.cdiv(self.vocab_size, self.columns)

  @property
  def pieces(self) -> int:
    """Pieces of the table."""
    return pl.cdiv(self.table_rows, self.at_once)


def refusal(head: Head, rows: int) -> str:
  """Why tokens are not drawn here; '' if they can be.

  Args:
    head: of the network.
    rows: B.
  """
  if head.kernel is None:
    return 'the output layer is not [out, in]'
  return product_kernel.refusal(head.kernel, rows)


def draw(
  head: Head,
  x: jax.Array,
  place: jax.Array,
  begin: jax.Array,
  drafted: Drafted,
  ends: Ends | None,
  draws: Draws | None,
  epsilon: float,
) -> tuple[jax.Array, Drafted]:
  """Draws the token behind one of the S that each row has read.

  Args:
    head: of the network.
    x: [B, S, M], of the decoder's last layer.
    place: int32[B], which of the S; those behind it are forgotten.
    begin: int32[B], `drafted.length` when all proposals are still to come.
    drafted: its `length` is before the S tokens.
    ends: where a row must not stop; None is nowhere.
    draws: how tokens are sampled; None takes the likeliest.
    epsilon: of the norm.

  Returns:
    Embeddings of the tokens, [B, 1, M]; and `drafted` with one token more, in
    place under jit.
  """
  batch, num_read, size = x.shape
  work = product_kernel.shared(head.kernel, batch, str(x.dtype), epsilon)
  columns = num_columns(work.width)
  at_once = pl.cdiv(pl.cdiv(work.width, columns), _MOST_PIECES)
  sizes = _Sizes(work, batch, num_read, columns, pl.next_power_of_2(at_once))
  given = {
    'head': head,
    'x': x.reshape(-1, size),
    'place': place,
    'begin': begin,
    'ends': ends,
    'draws': draws,
  }
  updated = {
    'tokens': drafted.tokens,
    'length': drafted.length,
    TURNS: drafted.turns,
  }
  shape = jax.ShapeDtypeStruct
  made = {
    'most': shape((work.count, batch), jnp.float32),
    'ids': shape((work.count, batch), jnp.int32),
    'embedded': shape((batch, size), x.dtype),
  }
  written = 2 * batch * jnp.dtype(jnp.int32).itemsize
  parts = _greedy(sizes)
  if draws is not None:
    assert drafted.probs is not None  # where the distributions go
    parts = _sampled(sizes)
    updated['probs'] = drafted.probs
    written += batch * work.width * drafted.probs.dtype.itemsize
    made |= {
      'logits': shape((batch, work.width), jnp.float32),
      'sums': shape((batch, sizes.pieces, columns), jnp.float32),
      'totals': shape((batch, sizes.pieces), jnp.float32),
      'column': shape((batch,), jnp.int32),
    }
  found = kernel_parts.run('draw', parts, given, updated, made, written)
  drafted = Drafted(
    found['tokens'], found['length'], found[TURNS], found.get('probs')
  )
  return found['embedded'].reshape(batch, 1, size), drafted


def _greedy(sizes: _Sizes) -> Sequence[Part]:
  def of_tile(piece, refs):
    _of_tile(sizes, piece, refs)

  def of_row(row, refs):
    _, token = _largest(sizes, row, refs)
    _drawn(sizes, row, token, _column(row, refs), refs)

  return [Part(sizes.work.count, of_tile), Part(sizes.batch, of_row)]


def _sampled(sizes: _Sizes) -> Sequence[Part]:
  def of_tile(piece, refs):
    row, ids, logits = _of_tile(sizes, piece, refs)
    refs['logits'][row[None, :], ids] = logits

  def weigh(piece, refs):
    row, turn = piece // sizes.pieces, piece % sizes.pieces
    ids = _ids(sizes, turn)
    weights = jnp.where(
      ids < sizes.vocab_size, _weights(sizes, row, ids, refs), 0.0
    )
    refs['sums'][row, turn, pl.ds(0, sizes.columns)] = jnp.sum(weights, 0)
    refs['totals'][row, turn] = jnp.sum(weights)
    refs['column'][row] = _column(row, refs)

  def write(piece, refs):
    row, turn = piece // sizes.pieces, piece % sizes.pieces
    pieces = jnp.arange(pl.next_power_of_2(sizes.pieces))
    totals = refs['totals'][row, jnp.minimum(pieces, sizes.pieces - 1)]
    total = jnp.sum(jnp.where(pieces < sizes.pieces, totals, 0.0))
    # Ids behind the last repeat it: what is written twice is the same.
    ids = jnp.minimum(_ids(sizes, turn), sizes.vocab_size - 1)
    share = _weights(sizes, row, ids, refs) / total
    refs['probs'][row, refs['column'][row], ids] = share

  def choose(row, refs):
    column = refs['column'][row]
    token = _chosen(sizes, row, column, refs)
    _drawn(sizes, row, token, column, refs)

  def last(piece, refs):
    @pl.when(piece < sizes.batch)
    def _():
      choose(piece, refs)

    @pl.when(piece >= sizes.batch)
    def _():
      write(piece - sizes.batch, refs)

  count = sizes.batch * sizes.pieces
  return [
    Part(sizes.work.count, of_tile),
    Part(count, weigh),
    Part(sizes.batch + count, last),
  ]


def _of_tile(sizes: _Sizes, piece: Any, refs: Refs):
  """Logits of some outputs, the largest of which is written.

  Returns:
    Which row each column of a tile is of, int32[N]; ids int32[tile, 1]; and
    logits float32[tile, N].
  """
  work = sizes.work
  head = refs['head']
  given = Given(head.kernel, refs['x'], head.norm, head.scale)
  read = work.read_rows * sizes.num_read + refs['place'][work.read_rows]
  logits = product_kernel.outputs(work, piece, given, read)
  row = work.rows_of_columns
  ids = product_kernel.outputs_of(work, piece)[:, None]
  ends = refs['ends']
  if ends is not None:
    produced = refs['length'][row] + refs['place'][row]
    is_early = produced < ends.min_length[row]
    is_end = _is_end(ids, ends.stop_ids, row)
    logits = jnp.where(is_end & is_early[None, :], -jnp.inf, logits)
  most = jnp.max(logits, axis=0)
  last = sizes.vocab_size - 1
  refs['most'][piece, row] = most
  refs['ids'][piece, row] = jnp.min(jnp.where(logits == most, ids, last), 0)
  return row, ids, logits


def _is_end(ids: jax.Array, stop_ids: Any, row: jax.Array) -> jax.Array:
  """Which ids [tile, 1] are among a row's stop ids, bool[tile, N]."""

  def one_more(k, found):
    stop = stop_ids[k] if len(stop_ids.shape) == 1 else stop_ids[row, k]
    return found | (ids == stop)

  nothing = jnp.zeros((len(ids), len(row)), bool)
  return lax.fori_loop(0, stop_ids.shape[-1], one_more, nothing)


def _largest(sizes: _Sizes, row: Any, refs: Refs) -> tuple[Any, Any]:
  """A row's largest logit, and the first id that has it."""
  # Tiles behind the last repeat it.
  tiles = jnp.arange(pl.next_power_of_2(sizes.work.count))
  tiles = jnp.minimum(tiles, sizes.work.count - 1)
  most, ids = (refs[name][tiles, row] for name in ('most', 'ids'))
  largest = jnp.max(most)
  # Of logits that are no numbers it is some id.
  last = sizes.vocab_size - 1
  return largest, jnp.min(jnp.where(most == largest, ids, last))


def _column(row: Any, refs: Refs) -> Any:
  """The number of the proposal, before the row's length has grown."""
  return refs['length'][row] + refs['place'][row] + 1 - refs['begin'][row]


def _drawn(
  sizes: _Sizes, row: Any, token: Any, column: Any, refs: Refs
) -> None:
  """Writes down what the next call needs."""
  refs['tokens'][row, column] = token
  refs['length'][row] = refs['begin'][row] + column
  size = sizes.work.size
  chunk = min(size & -size, _MOST_COPIED)

  def copy(i, nothing):
    here = pl.ds(i * chunk, chunk)
    embedded = refs['head'].embedding[token, here]
    refs['embedded'][row, here] = embedded.astype(refs['embedded'].dtype)
    return nothing

  lax.fori_loop(0, size // chunk, copy, None)


def _ids(sizes: _Sizes, turn: Any) -> jax.Array:
  """Ids of a piece of the table, int32[at_once, columns]."""
  number = turn * sizes.at_once + jnp.arange(sizes.at_once)
  return number[:, None] * sizes.columns + jnp.arange(sizes.columns)[None, :]


def _weights(sizes: _Sizes, row: Any, ids: jax.Array, refs: Refs) -> jax.Array:
  """Of ids int32[...], float32[...], as `probs.standardise` has them."""
  largest, token = _largest(sizes, row, refs)
  ids = jnp.minimum(ids, sizes.vocab_size - 1)
  temperature = refs['draws'].temperature[row]
  is_greedy = temperature == 0
  divisor = jnp.where(is_greedy, 1.0, temperature)
  scaled = (refs['logits'][row, ids] - largest) / divisor
  is_it = (ids == token).astype(jnp.float32)
  return jnp.where(is_greedy, is_it, jnp.exp(scaled))


def _chosen(sizes: _Sizes, row: Any, column: Any, refs: Refs) -> Any:
  """The token at a row's uniforms, as `probs.inverse_cdf` finds it."""
  uniforms = refs['draws'].uniforms
  pieces = jnp.arange(pl.next_power_of_2(sizes.pieces))
  here = pl.ds(0, sizes.columns)
  sums = refs['sums'][row, jnp.minimum(pieces, sizes.pieces - 1), here]
  sums = jnp.sum(jnp.where(pieces[:, None] < sizes.pieces, sums, 0.0), 0)
  of_column = _first_above(sums, uniforms[column, row, 0])
  numbers = jnp.arange(pl.next_power_of_2(sizes.table_rows))
  ids = numbers * sizes.columns + of_column
  weights = _weights(sizes, row, ids, refs)
  weights = jnp.where(ids < sizes.vocab_size, weights, 0.0)
  of_row = _first_above(weights, uniforms[column, row, 1])
  return jnp.minimum(of_row * sizes.columns + of_column, sizes.vocab_size - 1)


def _first_above(weights: jax.Array, uniform: Any) -> Any:
  """As `probs` has it where sums need not be monotone; int32[]."""
  cumulative = jnp.where(weights > 0, jnp.cumsum(weights), 0.0)
  bound = uniform * jnp.max(cumulative)
  places = jnp.arange(len(weights))
  return jnp.min(jnp.where(cumulative > bound, places, len(weights) - 1))
