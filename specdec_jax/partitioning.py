"""Placement: how parameters are laid out on the device that will use them.

Checkpoints keep T5X's layout: kernels of [in, out], one for each projection.
Two things are decided here, and only here; `models.layers` takes whichever
names it is given:

- A model that is larger than the CPU's caches is read as [out, in] there, so
  that XLA does not pack its weights at each call (`layers.dense_out_in`). One
  that the caches hold is quicker as it is: to pack it costs less than what the
  small products of the other way cost each.
- Projections that read the same input are joined to one product, everywhere:
  a call of a small model is made of the starting of its products.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specdec_jax.models.base import Params

# Last-level caches of today's CPUs hold 16 to 64 MiB of a model.
_CACHED_BYTES = 64 << 20

# Module: what joins its kernels, in order.
_JOINED = {
  'attention': ('qkv', ('query', 'key', 'value')),
  'self_attention': ('qkv', ('query', 'key', 'value')),
  'mlp': ('wi_joined', ('wi_0', 'wi_1')),
}


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where and how a model's parameters live.

  Attributes:
    dtype: of the parameters on the device: 'float32' or 'bfloat16'.
    kernel_layout: 'in_out' as T5X stores kernels, 'out_in' transposed, 'auto'
      for out_in on a CPU whose caches cannot hold the model, else in_out.
    join_projections: whether query, key and value of self-attention, and both
      input layers of a gated MLP, become one product each.
  """

  dtype: str = 'float32'
  kernel_layout: Literal['auto', 'in_out', 'out_in'] = 'auto'
  join_projections: bool = True

  def __post_init__(self):
    if self.kernel_layout not in ('auto', 'in_out', 'out_in'):
      raise ValueError(
        "Placement.kernel_layout must be 'auto', 'in_out' or 'out_in', got"
        f' {self.kernel_layout!r}.'
      )

  def transposes(self, params: Params) -> bool:
    """Returns whether the kernels of this model are stored [out, in]."""
    if self.kernel_layout != 'auto':
      return self.kernel_layout == 'out_in'
    if jax.default_backend() != 'cpu':
      return False
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    return sum(sizes) * jnp.dtype(self.dtype).itemsize > _CACHED_BYTES


def place(params: Params, placement: Placement = Placement()) -> Params:
  """Returns the parameters on the device, in its dtype and layout.

  Args:
    params: a nested dict of arrays as a checkpoint has them. It may already
      be placed; then only the dtype changes.
    placement: the decision.

  Returns:
    The same tree, but for kernels: `kernel` [in, out] is `kernel_out_in`
    [out, in] if the placement says so, and joined projections have one kernel
    under the name of `layers` for it.
  """
  return _place(params, placement, placement.transposes(params), '')


def place_parts(params: Any, placement: Placement = Placement()) -> Any:
  """`place` of each model in a pytree; other arrays keep their dtype.

  Args:
    params: of a drafter: a model's parameters, a table, or a tuple of these.
    placement: of the models.
  """

  def is_model(value):
    return isinstance(value, Mapping)

  def part(value):
    return place(value, placement) if is_model(value) else jnp.asarray(value)

  return jax.tree.map(part, params, is_leaf=is_model)


def _place(
  params: Mapping[str, Any], placement: Placement, transposed: bool, module: str
) -> Params:
  joined, parts = _JOINED.get(module, ('', ()))
  if not placement.join_projections or not all(p in params for p in parts):
    parts = ()
  placed = {}
  for name, value in params.items():
    if isinstance(value, Mapping):
      if name not in parts:
        placed[name] = _place(value, placement, transposed, name)
    elif name == 'kernel' and transposed:
      placed['kernel_out_in'] = jnp.asarray(value.T, placement.dtype)
    else:
      placed[name] = jnp.asarray(value, placement.dtype)
  if parts:
    kernels = [_place(params[p], placement, transposed, p) for p in parts]
    placed[joined] = {
      name: jnp.concatenate([k[name] for k in kernels], _OUT_AXIS[name])
      for name in kernels[0]
    }
  return placed


_OUT_AXIS = {'kernel': 1, 'kernel_out_in': 0, 'bias': 0}
