"""A product of a few rows with all that stands around it, for GPUs (Pallas).

XLA makes a product of several rows one kernel, and two more of the norm before
it and the gate behind; of one row with a kernel of integers it makes these too.
Here it is one: a program reads some rows of an [out, in] kernel once, from left
to right, and the few activations beside them, and adds up in float32. A norm's
scale is applied on the way. What a row is divided by is known at the end: it
follows there, as do factors of integers, biases, a residual and the gate, while
the sums are on the chip. Each program norms for itself: the activations are
small, and stay in the GPU's cache.

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
_LEAST_COLUMNS = 8  # of a tensor core's tile
_MOST_CORES = 0.9  # cores that have something to do fill a GPU
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
    chunk: numbers of a row at once, for one sum.
    num_sums: sums of each output. The products of a tensor core that are added
      to one sum wait for each other.
    dtype: of the operands.
    epsilon: of the norm, if there is one.
    activations: of the parts of a gate; () is no gate.
  """

  rows: int
  size: int
  width: int
  tile: int
  chunk: int
  num_sums: int
  dtype: str
  epsilon: float = 0.0
  activations: tuple[Activation, ...] = ()

  @property
  def columns(self) -> int:
    """Columns of a tile: the rows that are read, again and again."""
    return max(_LEAST_COLUMNS, self._num_read)

  @property
  def read_rows(self) -> jax.Array:
    """int32[N], the rows that are read; those behind the last repeat it."""
    return self._rows(self._num_read)

  @property
  def rows_of_columns(self) -> jax.Array:
    """int32[columns], whose columns they are.

    What is written twice is the same.
    """
    return self._rows(self.columns)

  @property
  def _num_read(self) -> int:
    rows = pl.next_power_of_2(self.rows)
    return max(rows, _least_rows(self.chunk, self.dtype))

  def _rows(self, count: int) -> jax.Array:
    return jnp.minimum(jnp.arange(count) % self._num_read, self.rows - 1)

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
  num_sums = max(1, min(_TILES[1] // (tile * parts), chunk // _LEAST))
  shape = rows, size, width, tile, chunk // num_sums, num_sums
  return Work(*shape, dtype, epsilon, tuple(activations))


def _tile(width: int, parts: int) -> int:
  """Outputs of a program: as many as leave one for most cores, if they can."""
  fitting = [tile for tile in _TILES if not width % tile] or _TILES[-1:]
  cores = _MOST_CORES * backend.gpu_cores()
  filling = [
    t for t in fitting if t * parts <= _TILES[0] and width // t >= cores
  ]
  return filling[0] if filling else fitting[-1]


def _least_rows(chunk: int, dtype: Any) -> int:
  """Rows of so many numbers that are copied while the program goes on.

  Less than 4 bytes for each thread are not: they would be waited for.
  """
  row = chunk * jnp.dtype(dtype).itemsize
  return int(pl.next_power_of_2(pl.cdiv(4 * 32 * WARPS, row)))


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
  found = outputs(work, number, given, work.read_rows)
  place = work.rows_of_columns[None, :], outputs_of(work, number)[:, None]
  result[place] = found.astype(result.dtype)


def outputs_of(work: Work, number: Any) -> jax.Array:
  """int32[tile], which outputs a program computes."""
  return work.first(number) + jnp.arange(work.tile)


def outputs(work: Work, number: Any, given: Given, read: Any) -> jax.Array:
  """What one program finds.

  Args:
    work: how the product is shared.
    number: which of `work.count` programs it is.
    given: references.
    read: int32[N], rows of `given.rows` in the place of `work.read_rows`.

  Returns:
    float32[tile, columns].
  """
  first = work.first(number)
  parts = range(max(1, len(work.activations)))

  def more(i, carry):
    squares, sums = carry
    added = []
    for k, of_parts in enumerate(sums):
      here = pl.ds((i * work.num_sums + k) * work.chunk, work.chunk)
      x = given.rows[read, here]
      if given.norm is not None:
        x = x.astype(jnp.float32)
        squares += lax.square(x)
        x *= _repeated(scale(here.start), len(read))
      x = _repeated(x.astype(work.dtype), work.columns)
      added.append(
        [total + one_dot(x, part, here) for part, total in enumerate(of_parts)]
      )
    return squares, added

  def scale(start):
    rows = min(len(read), _least_rows(work.chunk, given.norm.dtype))
    number = start + jnp.arange(work.chunk)[None, :]
    number += jnp.zeros((rows, 1), number.dtype)
    return given.norm[number].astype(jnp.float32)

  def one_dot(x, part, here):
    outputs = pl.ds(part * work.width + first, work.tile)
    return triton.dot(
      given.kernel[outputs, here].astype(work.dtype),
      x,
      trans_b=True,
      precision=backend.precision(work.dtype),
    )

  squares = jnp.zeros((len(read), work.chunk), jnp.float32)
  zeros = jnp.zeros((work.tile, work.columns), jnp.float32)
  sums = [[zeros for _ in parts] for _ in range(work.num_sums)]
  count = work.size // (work.chunk * work.num_sums)
  squares, sums = lax.fori_loop(0, count, more, (squares, sums))
  factor = None
  if given.norm is not None:
    # Behind the product, whose kernel is read from the first moment on.
    mean = jnp.sum(squares, axis=1) / work.size
    factor = _repeated(lax.rsqrt(mean + work.epsilon), work.columns)
  found = [
    _finished(work, given, sum(of_part), part * work.width + first, factor)
    for part, of_part in zip(parts, zip(*sums, strict=True), strict=True)
  ]
  if work.activations:
    found = [f(x) for f, x in zip(work.activations, found, strict=True)]
  return functools.reduce(operator.mul, found)


def _repeated(x: jax.Array, columns: int) -> jax.Array:
  """[N, ...] again and again: [columns, ...]."""
  times = columns // len(x)
  many = jnp.broadcast_to(x[None], (times, *x.shape))
  return many.reshape(columns, *x.shape[1:])


def _finished(work: Work, given: Given, total, first, factor):
  """Sums [tile, columns] with their factors, and with what is added."""
  here = pl.ds(first, work.tile)
  if factor is not None:
    total = total * factor[None, :]
  if given.scale is not None:
    total = total * given.scale[here].astype(jnp.float32)[:, None]
  for one in given.added:
    if len(one.shape) == 1:
      more = one[here][:, None]
    else:
      outputs = first + jnp.arange(work.tile)
      more = one[work.rows_of_columns[None, :], outputs[:, None]]
    total = total + more.astype(jnp.float32)
  return total
