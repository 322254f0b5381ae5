"""Rotary position embeddings (RoPE), which rotate queries and keys.

Dimensions i and i + D / 2 of a head form a plane, which at position n is
rotated by n * frequency_i, with frequency_i = base^(-2 i / D). A score then
depends only on the distance of query and key. Keys are rotated before they are
cached, so a cache can be rewound by its length.
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
    base: base of the frequencies; a larger base lowers all but the first.
    factor: divides the frequencies of all planes, or of those that
      `original_length` selects.
    original_length: length of the sequences in Llama 3.1's first training.
      Planes with a wavelength above `original_length / low_freq_factor` are
      slowed, those below `original_length / high_freq_factor` are not, and
      those in between partly. 0 slows all planes.
    low_freq_factor: bound of the slow planes, see `original_length`.
    high_freq_factor: bound of the fast planes, see `original_length`.

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
    """Returns each plane's radians per position, float32[D / 2]."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    plain = self.base**-exponents
    slowed = plain / self.factor
    if not self.original_length:
      return slowed.astype(np.float32)
    turns = self.original_length * plain / (2 * np.pi)
    span = self.high_freq_factor - self.low_freq_factor
    share = np.clip((turns - self.low_freq_factor) / span, 0, 1)
    return (share * plain + (1 - share) * slowed).astype(np.float32)

  def angles(self, places: jax.Array, head_dim: int) -> tuple[jax.Array, ...]:
    """Returns cosine and sine of each plane's angle, float32[..., D / 2] each.

    Args:
      places: positions, int32[...].
      head_dim: D.
    """
    turned = places[..., None].astype(jnp.float32)
    turned = turned * self.frequencies(head_dim)
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x: jax.Array, angles: tuple[jax.Array, ...]) -> jax.Array:
  """Rotates queries or keys, in float32.

  Args:
    x: queries or keys, [B, S, H, D].
    angles: a result of `Rope.angles`, [S, D / 2] or [B, S, D / 2] each.

  Returns:
    [B, S, H, D], in the dtype of x.
  """
  cos, sin = (angle[..., None, :] for angle in angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)
