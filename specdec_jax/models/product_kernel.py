"""A product of a few rows with all that stands around it, for GPUs (Pallas).

XLA makes a product of several rows one kernel, and two more of the norm before
it and the gate behind; of one row with a kernel of integers it makes these too.
Here it is one: a program reads some rows of an [out, in] kernel once, from left
to right, norms the few activations beside them, and adds up in float32; factors
of integers, biases, a residual and the gate follow while the sums are on the
chip. Each program norms for itself: the activations are small, and stay in the
GPU's cache.

`products.Dense` says what is computed; `refusal` which shapes are taken.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specdec_jax.models import backend, integers
from specdec_jax.models.norms import MOST_FOLDED_ROWS, Unnormed

MOST_ROWS = MOST_FOLDED_ROWS  # those of a tensor core's tile
_TILES = (64, 32, 16)  # outputs of a program; 16 are a tensor core's least
_CHUNK_BYTES = 1 << 14  # of the kernel at once, at most
_LEAST = 16  # numbers of a row at once
WARPS, STAGES = 4, 4

Activation = Callable[[jax.Array], jax.Array]


class Given(NamedTuple):
  """What a product reads, or a kernel's references to it.

  Attributes:
    kernel: [out, in].
    rows: [R, in].
    norm: scale of a norm of the rows, float32[in]; None is no norm.
    scale: float32[out], a factor of each output; None is none.
    added: [out] or [R, out] each.
  """

  kernel: Any
  rows: Any
  norm: Any = None
  scale: Any = None
  added: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Work:
  """How a product is shared among programs.

  Attributes:
    rows: R.
    size: numbers of a row, in.
    width: outputs, of each part of a gate.
    tile: outputs of a program.
    chunk: numbers of a row at once.
    dtype: of the operands.
    epsilon: of the norm, if there is one.
    activations: of the parts of a gate; () is no gate.
  """

  rows: int
  size: int
  width: int
  tile: int
  chunk: int
  dtype: str
  epsilon: float = 0.0
  activations: tuple[Activation, ...] = ()

  @property
  def count(self) -> int:
    """Programs."""
    return pl.cdiv(self.width, self.tile)

  def first(self, number: Any) -> Any:
    """The first of a program's outputs, of each part of a gate.

    The last program has some of the one before it, too, if tiles do not divide
    the outputs: what is computed twice is the same.
    """
    first = number * self.tile
    if self.width % self.tile:
      first = jnp.minimum(first, self.width - self.tile)
    return first


def refusal(kernel: jax.Array, rows: int, parts: int = 1) -> str:
  """Why a product is not computed here; '' if it can be.

  Args:
    kernel: [out, in].
    rows: of the activations.
    parts: of a gate, which share the outputs.
  """
  outputs, size = kernel.shape
  if str(kernel.dtype) == integers.INT4:
    return 'kernels are of four bits'
  if rows > MOST_ROWS:
    return f'{rows} rows are more than {MOST_ROWS}'
  if outputs < parts * _TILES[-1]:
    return f'{outputs} outputs are less than {parts * _TILES[-1]}'
  if size % _LEAST:
    return f'rows of {size} numbers: it must be a multiple of {_LEAST}'
  return ''


def product(
  kernel: jax.Array,
  x: jax.Array | Unnormed,
  result_dtype: str,
  scale: jax.Array | None = None,
  added: Sequence[jax.Array] = (),
  activations: Sequence[Activation] = (),
) -> jax.Array:
  """Returns x @ kernel.T, and what belongs to it.

  Args:
    kernel: [out, in], of x's dtype or of integers.
    x: [..., in], or what a norm has still to be applied to.
    result_dtype: dtype of the result; sums are float32 up to there.
    scale: float32[out], a factor of each output; None is none.
    added: [out] or [..., out] each, added to the product.
    activations: of as many equal parts of the outputs, which are then
      multiplied; () leaves the outputs as they are.

  Returns:
    [..., out / max(1, len(activations))].
  """
  norm, rows = (x, x.x) if isinstance(x, Unnormed) else (None, x)
  outputs, size = kernel.shape
  flat = rows.reshape(-1, size)
  given = Given(
    kernel,
    flat,
    norm and norm.scale,
    scale,
    tuple(one.reshape(-1, outputs) if one.ndim > 1 else one for one in added),
  )
  work = shared(
    kernel,
    len(flat),
    norm.dtype if norm else str(rows.dtype),
    norm.epsilon if norm else 0.0,
    activations,
  )

  def program(*refs):
    product_part(work, pl.program_id(0), Given(*refs[:-1]), refs[-1])

  found = pl.pallas_call(
    program,
    grid=(work.count,),
    out_shape=jax.ShapeDtypeStruct((work.rows, work.width), result_dtype),
    interpret=backend.interprets_kernels(),
    compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    name='product',
  )(*given)
  return found.reshape(*rows.shape[:-1], work.width)


def shared(
  kernel: Any,
  rows: int,
  dtype: str,
  epsilon: float = 0.0,
  activations: Sequence[Activation] = (),
) -> Work:
  """How a product is shared; `product` has its arguments.

  Args:
    kernel: [out, in], or its shape and dtype.
    rows: of the activations.
    dtype: of the operands.
    epsilon: of the norm, if there is one.
    activations: of a gate.
  """
  outputs, size = kernel.shape
  parts = max(1, len(activations))
  width = outputs // parts
  tile = _tile(width, parts)
  chunk = _chunk(size, tile * parts * kernel.dtype.itemsize)
  shape = rows, size, width, tile, chunk
  return Work(*shape, dtype, epsilon, tuple(activations))


def _tile(width: int, parts: int) -> int:
  """Outputs of a program: as many as leave one for each core, if they can."""
  fitting = [tile for tile in _TILES if not width % tile] or _TILES[-1:]
  cores = backend.gpu_cores()
  filling = [t for t in fitting if t * parts <= 64 and width // t >= cores]
  return filling[0] if filling else fitting[-1]


def _chunk(size: int, bytes_each: int) -> int:
  """Numbers of a row at once: a power of two that divides it."""
  most = _CHUNK_BYTES // bytes_each
  return min(size & -size, 1 << (most.bit_length() - 1))


def product_part(work: Work, number: Any, given: Given, result: Any) -> None:
  """What one program does: some outputs of all rows.

  Args:
    work: how the product is shared.
    number: which of `work.count` programs it is.
    given: references.
    result: likewise, [R, width].
  """
  row = rows_of_tile(work.rows)
  output = outputs_of(work, number)
  result[row[None, :], output[:, None]] = outputs(
    work, number, given, row
  ).astype(result.dtype)


def rows_of_tile(rows: int) -> jax.Array:
  """int32[`MOST_ROWS`], the row that each of a tile is of.

  Those behind the last repeat it: what is written twice is the same.
  """
  return jnp.minimum(jnp.arange(MOST_ROWS), rows - 1)


def outputs_of(work: Work, number: Any) -> jax.Array:
  """int32[tile], which outputs a program computes."""
  return work.first(number) + jnp.arange(work.tile)


def outputs(work: Work, number: Any, given: Given, row: Any) -> jax.Array:
  """What one program finds.

  Args:
    work: how the product is shared.
    number: which of `work.count` programs it is.
    given: references.
    row: int32[`MOST_ROWS`], rows of `given.rows`.

  Returns:
    float32[tile, `MOST_ROWS`].
  """
  first = work.first(number)
  parts = range(max(1, len(work.activations)))
  chunks = work.size // work.chunk

  def activations(i):
    return given.rows[row, pl.ds(i * work.chunk, work.chunk)]

  def squared(i, total):
    return total + jnp.sum(lax.square(activations(i).astype(jnp.float32)), 1)

  if given.norm is not None:
    total = jnp.zeros((MOST_ROWS,), jnp.float32)
    total = lax.fori_loop(0, chunks, squared, total)
    factor = lax.rsqrt(total / work.size + work.epsilon)

  def operand(i):
    x = activations(i)
    if given.norm is None:
      return x.astype(work.dtype)
    x = x.astype(jnp.float32) * factor[:, None]
    here = given.norm[pl.ds(i * work.chunk, work.chunk)].astype(jnp.float32)
    return (x * here[None, :]).astype(work.dtype)

  def more(i, sums):
    x = operand(i)
    here = pl.ds(i * work.chunk, work.chunk)
    return tuple(
      total
      + triton.dot(
        given.kernel[pl.ds(part * work.width + first, work.tile), here].astype(
          work.dtype
        ),
        x,
        trans_b=True,
        precision=backend.precision(work.dtype),
      )
      for part, total in zip(parts, sums, strict=True)
    )

  zeros = jnp.zeros((work.tile, MOST_ROWS), jnp.float32)
  sums = lax.fori_loop(0, chunks, more, tuple(zeros for _ in parts))
  found = [
    _finished(work, given, total, part * work.width + first, row)
    for part, total in zip(parts, sums, strict=True)
  ]
  if work.activations:
    found = [f(x) for f, x in zip(work.activations, found, strict=True)]
  return functools.reduce(operator.mul, found)


def _finished(work: Work, given: Given, total, first, row):
  """Sums [tile, rows] with their factors, and with what is added."""
  here = pl.ds(first, work.tile)
  if given.scale is not None:
    total = total * given.scale[here].astype(jnp.float32)[:, None]
  for one in given.added:
    if len(one.shape) == 1:
      more = one[here][:, None]
    else:
      more = one[row[None, :], (first + jnp.arange(work.tile))[:, None]]
    total = total + more.astype(jnp.float32)
  return total
