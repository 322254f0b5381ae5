"""Root mean square norms, and what is left of one to the product behind it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from specdec_jax.models import backend

MOST_FOLDED_ROWS = 16  # of more, a norm is little beside its product


class Unnormed(NamedTuple):
  """What a norm has still to be applied to, for a product that does it.

  Attributes:
    x: [..., M].
    scale: float32[M].
    epsilon: added to the mean square.
    dtype: of the result.
  """

  x: jax.Array
  scale: jax.Array
  epsilon: float
  dtype: str

  def applied(self) -> jax.Array:
    """The norm's result, [..., M], computed in float32."""
    x = self.x.astype(jnp.float32)
    if backend.ways().doubles_norm and x.size == x.shape[-1]:
      # Once and twice the row: of two equal ones XLA would make one again.
      factors = 1 + lax.broadcasted_iota(jnp.float32, (2, x.size), 0)
      return self._of(x.reshape(1, -1) * factors)[0].reshape(x.shape)
    return self._of(x)

  def _of(self, x: jax.Array) -> jax.Array:
    mean_square = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    normed = x * lax.rsqrt(mean_square + self.epsilon)
    return (normed * self.scale).astype(self.dtype)


class RMSNorm(nn.Module):
  """Root mean square norm with a scale (T5X calls it LayerNorm).

  Attributes:
    dtype: dtype of the result.
    epsilon: added to the mean square.
    offset: added to the scale; Gemma's scales are stored as differences from 1.
    folds: whether only `products.Dense` reads the result. Where products are
      hand-written kernels the norm of a few rows is then left to them.
  """

  dtype: str = 'float32'
  epsilon: float = 1e-6
  offset: float = 0.0
  folds: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> Any:
    """Normalises [..., M]: an array, or an `Unnormed` for `products.Dense`."""
    at_first = nn.initializers.constant(1.0 - self.offset)
    scale = self.param('scale', at_first, (x.shape[-1],))
    if self.offset:  # in float32: a bfloat16 near 1 is coarser than near 0
      scale = scale.astype(jnp.float32) + self.offset
    unnormed = Unnormed(x, scale, self.epsilon, self.dtype)
    rows = x.size // x.shape[-1]
    is_left = self.folds and rows <= MOST_FOLDED_ROWS
    if is_left and backend.kernel_setting() != 'off':
      return unnormed
    return unnormed.applied()
