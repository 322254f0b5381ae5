"""Products of activations with kernels: the most of a network's time.

A kernel is [in, out], as T5X stores it, or as `partitioning.place` lays it out,
[out, in] or in blocks of outputs; `backend.Ways` says what is quick on a GPU or
TPU, and `cpu_layout` measures it on a CPU.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from specdec_jax.models import backend, cpu_layout, integers
from specdec_jax.models.norms import Unnormed

KERNEL_INIT = nn.initializers.variance_scaling(
  1.0, 'fan_in', 'truncated_normal'
)


# Of so few rows, or numbers in all, a product with blocks has a copy for each
# block. Otherwise it takes the blocks one after another.
MOST_COPIED_ROWS, _MOST_COPIED = 32, 1 << 20

# T5X's `gelu` is the tanh form.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'relu': jax.nn.relu,
  'gelu': functools.partial(jax.nn.gelu, approximate=True),
  'silu': jax.nn.silu,
  'linear': lambda x: x,
}


def gated(
  factors: Sequence[jax.Array], activations: Sequence[str]
) -> jax.Array:
  """The product of what activations make of as many factors, [...] each."""
  shaped = [
    ACTIVATIONS[name](one)
    for name, one in zip(activations, factors, strict=True)
  ]
  return functools.reduce(jnp.multiply, shaped)


def dense_out_in(
  kernel: jax.Array,
  x: jax.Array,
  result_dtype: str | None = None,
  scale: jax.Array | None = None,
  added: Sequence[jax.Array] = (),
) -> jax.Array:
  """Returns x @ kernel.T; on a CPU as `cpu_layout.product_out_in`.

  Args:
    kernel: [out, in], such as an embedding that is the output layer, too.
    x: [..., in].
    result_dtype: dtype of the result; None is x's.
    scale: float32[out], a factor of each output; None is none.
    added: [out] or [..., out] each, added to the product.

  Returns:
    [..., out].
  """
  result_dtype = result_dtype or str(x.dtype)
  is_sum = x.size == x.shape[-1] and backend.ways().sums_row
  if added and not is_sum:
    return _plus(dense_out_in(kernel, x, result_dtype, scale), added)
  rows = x.reshape(-1, x.shape[-1])
  count = rows.shape[0]
  if is_sum:
    # One kernel. XLA makes two of a product: the second adds partial sums.
    terms = kernel.astype(jnp.float32) * rows.astype(jnp.float32)
    if scale is not None:  # of the terms: XLA would not fuse it behind the sum
      terms *= scale[:, None]
    if added:  # to one of the terms, for the same reason
      more = functools.reduce(
        jnp.add, [one.astype(jnp.float32) for one in added]
      )
      # A constant: what is computed would be a kernel of its own.
      is_first = np.arange(terms.shape[1]) == 0
      terms += jnp.where(is_first, more.reshape(-1, 1), 0)
    product = jnp.sum(terms, 1)
    return product.astype(result_dtype).reshape(*x.shape[:-1], kernel.shape[0])
  if scale is not None:
    product = dense_out_in(kernel, x, 'float32')
    return (product * scale).astype(result_dtype)
  if not backend.ways().turns_operands:
    exact = backend.precision(str(x.dtype))
    return jnp.einsum(
      '...i,oi->...o',
      x,
      kernel,
      precision=exact,
      preferred_element_type=result_dtype,
    )
  if 1 < count <= max(cpu_layout.WIDTHS):
    rows = jnp.pad(rows, ((0, cpu_layout.width(count) - count), (0, 0)))
  product = cpu_layout.product_out_in(kernel, rows, result_dtype)
  return product[:count].reshape(*x.shape[:-1], kernel.shape[0])


def _plus(product: jax.Array, added: Sequence[jax.Array]) -> jax.Array:
  for one in added:
    product = one.astype(product.dtype) + product
  return product


def dense_in_out(
  kernel: jax.Array,
  x: jax.Array,
  result_dtype: str | None = None,
  scale: jax.Array | None = None,
  added: Sequence[jax.Array] = (),
) -> jax.Array:
  """Returns x @ kernel.

  Args:
    kernel: [in, out].
    x: [..., in].
    result_dtype: of the result; None is that of the operands.
    scale: float32[out], a factor of each output; None is none.
    added: [out] or [..., out] each, added to the product.

  Returns:
    [..., out].
  """
  if added:
    return _plus(dense_in_out(kernel, x, result_dtype, scale), added)
  if scale is not None:
    product = dense_in_out(kernel, x, 'float32')
    return (product * scale).astype(result_dtype or x.dtype)
  matmul = functools.partial(
    jnp.matmul,
    precision=backend.precision(str(x.dtype)),
    preferred_element_type=result_dtype,
  )
  least = backend.ways().least_rows
  if least == 1 or x.size != x.shape[-1]:
    return matmul(x, kernel)
  rows = jnp.pad(x.reshape(1, -1), ((0, least - 1), (0, 0)))
  # Else XLA sees that the other rows are not needed.
  product = matmul(lax.optimization_barrier(rows), kernel)
  return product[:1].reshape(*x.shape[:-1], kernel.shape[1])


def dense_blocks(
  kernel: jax.Array,
  x: jax.Array,
  result_dtype: str | None = None,
  scale: jax.Array | None = None,
  added: Sequence[jax.Array] = (),
) -> jax.Array:
  """Returns the product of x with a kernel that is cut into blocks of outputs.

  Each block lies in one piece of memory, which is read from its first number to
  its last. Out of a whole kernel the library that XLA has for a CPU takes such
  blocks as strips, a line of the cache at a time, and a product of a few rows
  takes up to twice the time of one row; benchmarks/README.md has both.

  Args:
    kernel: [N, in, `blocks.WIDTH`], see `blocks.in_blocks`.
    x: [..., in].
    result_dtype: of the result; None is that of the operands.
    scale: float32[out], a factor of each output; None is none.
    added: [out] or [..., out] each, added to the product.

  Returns:
    [..., out], of N times as many numbers as a block has outputs.
  """
  if added:
    return _plus(dense_blocks(kernel, x, result_dtype, scale), added)
  if scale is not None:
    product = dense_blocks(kernel, x, 'float32')
    return (product * scale).astype(result_dtype or x.dtype)
  rows = x.reshape(-1, x.shape[-1])
  matmul = functools.partial(
    jnp.matmul,
    precision=backend.precision(str(x.dtype)),
    preferred_element_type=result_dtype,
  )
  is_few = len(rows) <= MOST_COPIED_ROWS
  if is_few or len(kernel) * rows.size <= _MOST_COPIED:
    parts = cpu_layout.product_of_blocks(kernel, rows, matmul)
  else:
    parts = lax.map(functools.partial(matmul, rows), kernel)
  return parts.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


class Dense(nn.Module):
  """The one matrix product of the library; without a bias in the T5 family.

  The parameters are `kernel`, [in, out], as T5X stores it, or, if
  `partitioning.place` has laid it out for one device, `kernel_out_in`,
  [out, in], or `kernel_blocks`, [N, in, out / N]; with `use_bias`
  also `bias`, [out]; and of a kernel of integers `kernel_scale`, [out], see
  `integers`.

  Attributes:
    features: out.
    dtype: dtype of the operands.
    kernel_init: initialises the kernel.
    use_bias: whether there is a bias.
    result_dtype: dtype of the result; None is `dtype`.
    activations: names of those of a gate: the features are split in as many
      parts, which are multiplied; () is no gate.
  """

  features: int
  dtype: str = 'float32'
  kernel_init: nn.initializers.Initializer = KERNEL_INIT
  use_bias: bool = False
  result_dtype: str | None = None
  activations: Sequence[str] = ()

  @nn.compact
  def __call__(
    self, x: jax.Array | Unnormed, residual: jax.Array | None = None
  ) -> jax.Array:
    """Maps [..., in] to [..., features], to which `residual` is added.

    With a gate the result is [..., features / len(activations)].
    """
    rows = x.x if isinstance(x, Unnormed) else x
    scale: jax.Array | None = None
    if self.has_variable('params', integers.SCALE):
      scale = self.get_variable('params', integers.SCALE)
    if self.has_variable('params', 'kernel_out_in'):
      kernel: jax.Array = self.get_variable('params', 'kernel_out_in')
      dense = dense_out_in
    elif self.has_variable('params', 'kernel_blocks'):
      kernel = self.get_variable('params', 'kernel_blocks')
      dense = dense_blocks
    else:
      shape = (rows.shape[-1], self.features)
      kernel = self.param('kernel', self.kernel_init, shape, jnp.float32)
      dense = dense_in_out
    added = []
    if self.use_bias:
      zeros = nn.initializers.zeros
      bias = self.param('bias', zeros, (self.features,), jnp.float32)
      added.append(bias.astype(self.dtype))
    if residual is not None:
      added.append(residual)
    if self._takes_kernel(kernel, x, scale, added):
      return self._by_kernel(kernel, x, scale, added)
    x = x.applied() if isinstance(x, Unnormed) else x
    x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
    found = dense(kernel, x, self.result_dtype, scale, added)
    if not self.activations:
      return found
    parts = jnp.split(found, len(self.activations), -1)
    return gated(parts, self.activations)

  def _takes_kernel(self, kernel, x, scale, added) -> bool:
    """Whether it is one hand-written kernel where XLA would make several."""
    if backend.kernel_setting() == 'off' or self.is_initializing():
      return False
    has_norm = isinstance(x, Unnormed)
    shape = (x.x if has_norm else x).shape
    count = math.prod(shape[:-1])
    # A product alone is left to XLA, which makes one kernel of it as well.
    if not (has_norm or self.activations or added or scale is not None):
      return False
    # Imported only where it is used: it takes a second.
    from specdec_jax.models import product_kernel  # noqa: PLC0415

    if count > product_kernel.MOST_ROWS:  # a prompt, or many rows
      return False
    parts = max(1, len(self.activations))
    refusal = product_kernel.refusal(kernel, count, parts)
    if not self.has_variable('params', 'kernel_out_in'):
      refusal = 'kernels are [in, out]'
    return backend.takes_kernel('products', refusal)

  def _by_kernel(self, kernel, x, scale, added) -> jax.Array:
    from specdec_jax.models import product_kernel  # noqa: PLC0415

    if not isinstance(x, Unnormed):
      x = x.astype(self.dtype)
    if not integers.is_integers(kernel.dtype):
      kernel = kernel.astype(self.dtype)
    return product_kernel.product(
      kernel,
      x,
      self.result_dtype or self.dtype,
      scale,
      added,
      [ACTIVATIONS[name] for name in self.activations],
    )


def head(vocab_size: int, dtype: str) -> Dense:
  """The output layer: operands of `dtype`, logits in float32, as T5X's.

  Logits rounded to bfloat16 would have ties that the model does not have.
  """
  return Dense(vocab_size, dtype, result_dtype='float32')
