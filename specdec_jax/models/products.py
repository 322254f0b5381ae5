"""Products of activations with kernels, which take most of a network's time.

A kernel is [in, out], as in T5X; `partitioning.place` may lay it out as
[out, in], or in blocks of outputs, if `cpu_layout` has measured that this is
quicker on the CPU.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from specdec_jax.models import backend, cpu_layout, integers

KERNEL_INIT = nn.initializers.variance_scaling(
  1.0, 'fan_in', 'truncated_normal'
)


# A product with a kernel in blocks copies its rows for each block if there are
# at most this many rows, or this many elements in all copies. Otherwise it
# loops over the blocks.
MOST_COPIED_ROWS, _MOST_COPIED = 32, 1 << 20

# T5X's `gelu` is the tanh approximation, PyTorch's is exact.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'relu': jax.nn.relu,
  'gelu': functools.partial(jax.nn.gelu, approximate=True),
  'exact_gelu': functools.partial(jax.nn.gelu, approximate=False),
  'silu': jax.nn.silu,
  'linear': lambda x: x,
}


def gated(parts: Sequence[jax.Array], activations: Sequence[str]) -> jax.Array:
  """Applies to each part its own activation, and multiplies the results."""
  pairs = zip(activations, parts, strict=True)
  results = [ACTIVATIONS[name](part) for name, part in pairs]
  return functools.reduce(jnp.multiply, results)


def dense_out_in(
  kernel: jax.Array, x: jax.Array, result_dtype: str | None = None
) -> jax.Array:
  """Returns x @ kernel.T; a CPU uses `cpu_layout.product_out_in`.

  Args:
    kernel: [out, in], such as an embedding that is also the output layer.
    x: [..., in].
    result_dtype: dtype of the result; None: the dtype of x.

  Returns:
    [..., out].
  """
  result_dtype = result_dtype or str(x.dtype)
  if not backend.is_whole_on('cpu'):
    product = _in_precision(jnp.einsum, x, result_dtype)
    return product('...i,oi->...o', x, kernel)
  rows = x.reshape(-1, x.shape[-1])
  count = rows.shape[0]
  if 1 < count <= max(cpu_layout.WIDTHS):
    rows = jnp.pad(rows, ((0, cpu_layout.width(count) - count), (0, 0)))
  result = cpu_layout.product_out_in(kernel, rows, result_dtype)
  return result[:count].reshape(*x.shape[:-1], kernel.shape[0])


def _in_precision(
  product: Callable[..., jax.Array], x: jax.Array, result_dtype: str | None
) -> Callable[..., jax.Array]:
  """Returns `product`, such as `jnp.matmul`, in the precision of x's dtype."""
  exact = backend.precision(str(x.dtype))
  return functools.partial(
    product, precision=exact, preferred_element_type=result_dtype
  )


def dense_in_out(
  kernel: jax.Array, x: jax.Array, result_dtype: str | None = None
) -> jax.Array:
  """Returns x @ kernel.

  Args:
    kernel: [in, out].
    x: [..., in].
    result_dtype: dtype of the result; None: the dtype of the operands.

  Returns:
    [..., out].
  """
  return _in_precision(jnp.matmul, x, result_dtype)(x, kernel)


def dense_blocks(
  kernel: jax.Array, x: jax.Array, result_dtype: str | None = None
) -> jax.Array:
  """Returns the product of x with a kernel that is cut into blocks of outputs.

  Each block lies in one piece of memory, which is read from start to end. If a
  kernel is not cut, XLA's CPU library reads such blocks as strips, one cache
  line at a time; then a product of a few rows takes up to twice as long as that
  of one row. benchmarks/README.md has the times of both.

  Args:
    kernel: [N, in, `cpu_layout.BLOCK`], see `cpu_layout.in_blocks`.
    x: [..., in].
    result_dtype: dtype of the result; None: the dtype of the operands.

  Returns:
    [..., out], where out is N times the outputs of a block.
  """
  rows = x.reshape(-1, x.shape[-1])
  matmul = _in_precision(jnp.matmul, x, result_dtype)
  is_few = len(rows) <= MOST_COPIED_ROWS
  if is_few or len(kernel) * rows.size <= _MOST_COPIED:
    parts = cpu_layout.product_of_blocks(kernel, rows, matmul)
  else:
    parts = lax.map(functools.partial(matmul, rows), kernel)
  return parts.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


def dense_int8(kernel: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
  """Returns x @ kernel.T * scale; each row of x is rounded to eight bits.

  A CPU multiplies integers of eight bits in a fraction of the time that floats
  take, and reads a quarter of the bytes. Sums of integers are exact, so the
  product of a row does not depend on the other rows.

  Args:
    kernel: int8[out, in].
    scale: float32[out], the scale of each output of the kernel.
    x: [..., in].

  Returns:
    float32[..., out].
  """
  rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
  count = len(rows)
  if count == 1:  # XLA has no fast product of one row of integers
    rows = jnp.pad(rows, ((0, 1), (0, 0)))
  largest = jnp.max(jnp.abs(rows), -1, keepdims=True)
  factors = jnp.where(largest == 0, 1.0, largest / integers.MOST_INT8)
  sums = lax.dot_general(
    jnp.rint(rows / factors).astype(jnp.int8),
    kernel,
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.int32,
  )
  product = sums.astype(jnp.float32) * factors * scale
  return product[:count].reshape(*x.shape[:-1], len(kernel))


class Dense(nn.Module):
  """The linear layer of all networks; the T5 family has no biases.

  The kernel is the parameter `kernel`, [in, out], as in T5X. If
  `partitioning.place` has laid it out for one device, it is `kernel_out_in`,
  [out, in], or `kernel_blocks`, [N, in, out / N]. With `use_bias` there is also
  `bias`, [out], and for a kernel of integers `kernel_scale`, [out], see
  `integers`.

  Attributes:
    features: out, the number of outputs.
    dtype: dtype of the operands.
    kernel_init: makes the values of a new kernel.
    use_bias: whether there is a bias.
    result_dtype: dtype of the result; None means `dtype`.
    activations: names of a gate's activations; () means no gate. The features
      are split into one part per activation, and the activated parts are
      multiplied.
  """

  features: int
  dtype: str = 'float32'
  kernel_init: nn.initializers.Initializer = KERNEL_INIT
  use_bias: bool = False
  result_dtype: str | None = None
  activations: Sequence[str] = ()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., in] to [..., features].

    With a gate the result is [..., features / len(activations)].
    """
    if self.has_variable('params', 'kernel_out_in'):
      kernel: jax.Array = self.get_variable('params', 'kernel_out_in')
      dense = dense_out_in
    elif self.has_variable('params', 'kernel_blocks'):
      kernel = self.get_variable('params', 'kernel_blocks')
      dense = dense_blocks
    else:
      shape = (x.shape[-1], self.features)
      kernel = self.param('kernel', self.kernel_init, shape, jnp.float32)
      dense = dense_in_out
    x = x.astype(self.dtype)
    if self.has_variable('params', integers.SCALE):
      scale: jax.Array = self.get_variable('params', integers.SCALE)
      if kernel.dtype == jnp.int8 and backend.is_whole_on('cpu'):
        scaled = dense_int8(kernel, scale, x)
      else:
        scaled = dense(kernel.astype(self.dtype), x, 'float32') * scale
      product = scaled.astype(self.result_dtype or self.dtype)
    else:
      product = dense(kernel.astype(self.dtype), x, self.result_dtype)
    if self.use_bias:
      zeros = nn.initializers.zeros
      bias = self.param('bias', zeros, (self.features,), jnp.float32)
      product = bias.astype(self.dtype).astype(product.dtype) + product
    if not self.activations:
      return product
    parts = jnp.split(product, len(self.activations), -1)
    return gated(parts, self.activations)
