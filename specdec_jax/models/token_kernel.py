"""The likeliest token of each row in one kernel, for GPUs (Pallas).

Its first part is the last norm and the output layer: each program keeps the
largest logit of its outputs and that one's id, so that no logits are in memory.
The second part takes the largest of these, the first id on ties, and writes
down what the next call needs: the token, its embedding, and the row's length.

`probs.forbid_early_stops` and `probs.greedy_token` say what is computed, of
logits in float32; `refusal` which shapes are taken.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from specdec_jax.models import kernel_parts, product_kernel
from specdec_jax.models.base import Ends
from specdec_jax.models.kernel_parts import TURNS, Part
from specdec_jax.models.product_kernel import Given

_MOST_COPIED = 1024  # numbers of an embedding at once


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
  """

  tokens: jax.Array
  length: jax.Array
  turns: jax.Array


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
  epsilon: float,
) -> tuple[jax.Array, Drafted]:
  """Draws the likeliest token behind one of the S that each row has read.

  Args:
    head: of the network.
    x: [B, S, M], of the decoder's last layer.
    place: int32[B], which of the S; those behind it are forgotten.
    begin: int32[B], `drafted.length` when all proposals are still to come.
    drafted: its `length` is before the S tokens.
    ends: where a row must not stop; None is nowhere.
    epsilon: of the norm.

  Returns:
    Embeddings of the tokens, [B, 1, M]; and `drafted` with one token more, in
    place under jit.
  """
  batch, num_read, size = x.shape
  work = product_kernel.shared(head.kernel, batch, str(x.dtype), epsilon)
  last = work.width - 1

  def of_tile(piece, refs):
    row = product_kernel.rows_of_tile(batch)
    behind = refs['place'][row]
    given = Given(
      refs['head'].kernel, refs['x'], refs['head'].norm, refs['head'].scale
    )
    read = row * num_read + behind
    logits = product_kernel.outputs(work, piece, given, read)
    ids = product_kernel.outputs_of(work, piece)[:, None]
    if ends is not None:
      is_early = refs['length'][row] + behind < refs['ends'].min_length[row]
      is_end = _is_end(ids, refs['ends'].stop_ids, row)
      logits = jnp.where(is_end & is_early[None, :], -jnp.inf, logits)
    most = jnp.max(logits, axis=0)
    refs['most'][piece, row] = most
    refs['ids'][piece, row] = jnp.min(jnp.where(logits == most, ids, last), 0)

  def of_row(row, refs):
    # Tiles behind the last repeat it.
    tiles = jnp.arange(pl.next_power_of_2(work.count))
    tiles = jnp.minimum(tiles, work.count - 1)
    most, ids = (refs[name][tiles, row] for name in ('most', 'ids'))
    # Of logits that are no numbers it is some id.
    token = jnp.min(jnp.where(most == jnp.max(most), ids, last))
    length = refs['length'][row] + refs['place'][row] + 1
    refs['tokens'][row, length - refs['begin'][row]] = token
    refs['length'][row] = length
    chunk = min(size & -size, _MOST_COPIED)

    def copy(i, nothing):
      here = pl.ds(i * chunk, chunk)
      embedded = refs['head'].embedding[token, here]
      refs['embedded'][row, here] = embedded.astype(x.dtype)
      return nothing

    lax.fori_loop(0, size // chunk, copy, None)

  found = kernel_parts.run(
    'draw',
    [Part(work.count, of_tile), Part(batch, of_row)],
    {
      'head': head,
      'x': x.reshape(-1, size),
      'place': place,
      'begin': begin,
      'ends': ends,
    },
    {'tokens': drafted.tokens, 'length': drafted.length, TURNS: drafted.turns},
    {
      'most': jax.ShapeDtypeStruct((work.count, batch), jnp.float32),
      'ids': jax.ShapeDtypeStruct((work.count, batch), jnp.int32),
      'embedded': jax.ShapeDtypeStruct((batch, size), x.dtype),
    },
    written=2 * batch * jnp.dtype(jnp.int32).itemsize,
  )
  drafted = Drafted(found['tokens'], found['length'], found[TURNS])
  return found['embedded'].reshape(batch, 1, size), drafted


def _is_end(ids: jax.Array, stop_ids: Any, row: jax.Array) -> jax.Array:
  """Which ids [N, 1] are among a row's stop ids, bool[N, `MOST_ROWS`]."""

  def one_more(k, found):
    stop = stop_ids[k] if len(stop_ids.shape) == 1 else stop_ids[row, k]
    return found | (ids == stop)

  nothing = jnp.zeros((len(ids), len(row)), bool)
  return lax.fori_loop(0, stop_ids.shape[-1], one_more, nothing)
