"""Rotary position embeddings (RoPE): a token's place turns its numbers.

Dimensions i and i + D / 2 of a head are one plane; at position n it is turned
by n * frequency_i, with frequency_i = base^(-2 i / D). A score then depends on
the distance of query and key alone. Keys are turned before they are cached, so
that a cache is rewound by its length here as elsewhere.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checks.fields import check_types, unexpected
from specdec_jax.types import Count


@dataclasses.dataclass(frozen=True)
class Rope:
  """The rotary position embedding of one kind of layer.

  Attributes:
    base: the larger, the slower the slow planes turn.
    factor: slow planes turn slower by this factor; all of them, unless
      `original_length` is given.
    original_length: of Llama 3.1: planes with a wavelength above
      `original_length / low_freq_factor` are slowed, those below
      `original_length / high_freq_factor` are not, and those in between partly.
      0 is none of this.
    low_freq_factor: see `original_length`.
    high_freq_factor: see `original_length`.

  Raises:
    ValueError: a number is too small.

  Examples:
    >>> sd.Rope().frequencies(head_dim=4).tolist()
    [1.0, 0.009999999776482582]
  """

  base: float = 10_000.0
  factor: float = 1.0
  original_length: Count = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0

  def __post_init__(self):
    check_types(self)
    low, high = self.low_freq_factor, self.high_freq_factor
    if not (self.base > 1 <= self.factor and 0 < low < high):
      expected = 'base > 1, factor >= 1, 0 < low_freq_factor < high_freq_factor'
      raise unexpected('Rope', expected, self)

  def frequencies(self, head_dim: int) -> np.ndarray:
    """Radians per position of each plane, float32[D / 2]."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    found = self.base**-exponents
    slowed = found / self.factor
    if not self.original_length:
      return slowed.astype(np.float32)
    turns = self.original_length * found / (2 * np.pi)
    span = self.high_freq_factor - self.low_freq_factor
    share = np.clip((turns - self.low_freq_factor) / span, 0, 1)
    return (share * found + (1 - share) * slowed).astype(np.float32)

  def angles(
    self, positions: jax.Array, head_dim: int
  ) -> tuple[jax.Array, ...]:
    """Cosine and sine of each plane's angle, float32[..., D / 2] each.

    Args:
      positions: int32[...].
      head_dim: D.
    """
    turned = positions[..., None].astype(jnp.float32)
    turned = turned * self.frequencies(head_dim)
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x: jax.Array, angles: tuple[jax.Array, ...]) -> jax.Array:
  """Turns queries or keys; computed in float32.

  Args:
    x: [B, S, H, D].
    angles: of `Rope.angles`, [S, D / 2] or [B, S, D / 2] each.

  Returns:
    [B, S, H, D], of x's dtype.
  """
  cos, sin = (angle[..., None, :] for angle in angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)
