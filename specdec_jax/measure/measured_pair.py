"""The pair to be measured, with given parameters or random ones."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import partitioning
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter, encoded_for
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models import integers
from specdec_jax.models.base import LanguageModel, Params, read_prompt
from specdec_jax.partitioning import Placement


def random_params(network: LanguageModel, seed: int, dtype: str) -> Params:
  """Draws parameters on the device, array by array, in their final dtype.

  So a T5-XXL in bfloat16 never exists in float32: besides the result, at most
  one more array is held.

  Args:
    network: the network; its `init` gives names and shapes.
    seed: seed of the draw.
    dtype: 'float32' or 'bfloat16'; of 'int8' and 'int4' the kernels are drawn
      in bfloat16 and rounded.

  Returns:
    A tree like that of `network.init`; matrices are normal with variance
    1 / rows, so that activations keep their size, and scales are 1.
  """
  if integers.is_integers(dtype):
    drawn = random_params(network, seed, 'bfloat16')
    return integers.rounded(drawn, dtype)
  shapes = jax.eval_shape(network.init, jax.random.key(0))
  leaves, tree = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return jax.tree.unflatten(
    tree,
    [
      _draw(key, leaf.shape, dtype)
      for key, leaf in zip(keys, leaves, strict=True)
    ],
  )


def _draw(key, shape, dtype):
  if len(shape) < 2:
    return jnp.ones(shape, dtype)
  return _normal(key, shape, dtype) / jnp.asarray(math.sqrt(shape[0]), dtype)


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


@dataclasses.dataclass(frozen=True)
class Pair:
  """A target, a drafter, and their parameters on the device."""

  target: LanguageModel
  drafter: Drafter | None
  params: PairParams

  @functools.cached_property
  def prefill(self) -> Callable:
    """The target's `read_prompt`, jitted once for all measurements.

    Slots are static; without a prompt it is the target's `prefill`.
    """
    reads = functools.partial(read_prompt, self.target)
    return jax.jit(reads, static_argnums=2)

  @functools.cached_property
  def init(self) -> Callable:
    """The drafter's `init`, jitted once for all measurements.

    Raises:
      ValueError: there is no drafter.
    """
    if self.drafter is None:
      raise ValueError(
        'This pair has no drafter: give BenchmarkConfig a draft or a drafter.'
      )
    return jax.jit(self.drafter.begin, static_argnums=2)

  def encoded(self, inputs: jax.Array) -> jax.Array | None:
    """What `init` takes last: see `drafters.base.encoded_for`."""
    return encoded_for(self.drafter, self.target, self.params.target, inputs)


def make_pair(
  target: LanguageModel,
  draft: LanguageModel | None,
  target_params: Params | None,
  draft_params: Params | None,
  placement: Placement,
  seed: int,
  drafter: Drafter | None = None,
) -> Pair:
  """Places the given parameters, and draws those that are not given.

  Args:
    target: the target's network.
    draft: a drafter's network; ignored if `drafter` is given.
    target_params: parameters of `target`; None draws them.
    draft_params: parameters of `draft`; None draws them.
    placement: placement of both.
    seed: seed of the parameters that are drawn.
    drafter: any drafter, with its parameters; None is `small_model` of `draft`,
      if there is one.
  """

  def placed(network, params, seed) -> Any:
    if params is None:
      params = random_params(network, seed, placement.param_dtype)
    return partitioning.place(params, placement)

  if drafter is not None:
    partitioning.check_dtypes(drafter.params, placement)
    draft_params = partitioning.read_parts(drafter.params, placement)
    draft_params = partitioning.place_parts(
      draft_params, placement, drafter.params
    )
  elif draft is not None:
    drafter = small_model(draft)
    draft_params = placed(draft, draft_params, seed + 1)
  else:
    draft_params = None
  own = placed(target, target_params, seed)
  return Pair(target, drafter, PairParams(own, draft_params))
