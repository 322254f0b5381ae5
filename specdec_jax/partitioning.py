"""Placement: how parameters are laid out on the device that will use them.

Checkpoints, TPUs and GPUs keep T5X's layout, kernels of [in, out]. A CPU reads
them as [out, in] (see `layers.dense_out_in` for the reason). This module is
the one place that decides; `layers.Dense` takes whichever name it is given.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from specdec_jax.models.base import Params


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where and how a model's parameters live.

  Attributes:
    dtype: of the parameters on the device: 'float32' or 'bfloat16'.
    kernel_layout: 'in_out' as T5X stores kernels, 'out_in' transposed, 'auto'
      for out_in on a CPU and in_out elsewhere.
  """

  dtype: str = 'float32'
  kernel_layout: Literal['auto', 'in_out', 'out_in'] = 'auto'

  def __post_init__(self):
    if self.kernel_layout not in ('auto', 'in_out', 'out_in'):
      raise ValueError(
        "Placement.kernel_layout must be 'auto', 'in_out' or 'out_in', got"
        f' {self.kernel_layout!r}.'
      )

  @property
  def transposed(self) -> bool:
    """Whether kernels are stored [out, in]."""
    if self.kernel_layout == 'auto':
      return jax.default_backend() == 'cpu'
    return self.kernel_layout == 'out_in'


def place(params: Params, placement: Placement = Placement()) -> Params:
  """Returns the parameters on the device, in its dtype and layout.

  Args:
    params: a nested dict of arrays as a checkpoint has them. It may already
      be placed; then only the dtype changes.
    placement: the decision.

  Returns:
    The same tree, where each `kernel` [in, out] is a `kernel_out_in`
    [out, in] if the placement says so.
  """
  placed = {}
  for name, value in params.items():
    if isinstance(value, Mapping):
      placed[name] = place(value, placement)
    elif name == 'kernel' and placement.transposed:
      placed['kernel_out_in'] = jnp.asarray(value.T, placement.dtype)
    else:
      placed[name] = jnp.asarray(value, placement.dtype)
  return placed
