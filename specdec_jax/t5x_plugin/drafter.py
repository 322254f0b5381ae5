"""A T5X module as a network of this library, and the drafter's parameters.

T5X gives its decoding functions the variables of a train state as arguments:
the parameters, and `flax_mutables`, any further collections. The drafter's
parameters are a collection of their own, `drafter`, with the logical axes of
their module: T5X's partitioner splits them as it splits the target's, and the
target's own tree, so its checkpoints, scores, losses and optimiser, does not
know of them. A tree of both under `params` would change all of these.

A target's checkpoint has no such collection. T5X lets a state be changed while
it is restored (`RestoreCheckpointConfig.state_transformation_fns`), and then
puts it in place: `restore_drafter` adds the drafter there. This is the only way
that T5X's `infer.py` offers without a change: its own second checkpoint is
`fallback_to_scratch`, which would also hide arrays that the target lacks.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import checkpoints
from specdec_jax.checks.fields import unexpected
from specdec_jax.models.base import param_shapes
from specdec_jax.models.t5 import T5, T5Config

COLLECTION = 'drafter'


def network_of(module: Any, what: str = 'module') -> T5:
  """The network of this library with the parameters of a T5X module.

  Args:
    module: `Transformer` of T5X's `examples/t5`, or anything whose `config` has
      its sizes and whose parameters have its names and shapes.
    what: what the module is, for messages.

  Raises:
    ValueError: it is another kind of module.
  """
  theirs = getattr(module, 'config', None)
  fields = dataclasses.fields(T5Config)
  sizes = {
    field.name: getattr(theirs, field.name)
    for field in fields
    if hasattr(theirs, field.name)
  }
  needed = {f.name for f in fields if f.default is dataclasses.MISSING}
  if not needed | {'dtype'} <= sizes.keys():
    expected = 'a t5x.examples.t5.network.Transformer, whose config has sizes'
    raise unexpected(what, expected, type(module).__name__)
  sizes['dtype'] = jnp.dtype(sizes['dtype']).name
  sizes['dropout_rate'] = 0.0
  network = T5(T5Config(**sizes))
  token = jax.ShapeDtypeStruct((1, 1), jnp.int32)

  def params(token):
    key = jax.random.PRNGKey(0)
    return module.init(key, token, token, token, enable_dropout=False)['params']

  shapes = jax.eval_shape(params, token)
  try:
    checkpoints.check_params(shapes, param_shapes(network), what)
  except ValueError as error:
    advice = "T5X's examples/t5 fits; examples/scalable_t5 has other shapes."
    raise ValueError(f'{error} {advice}') from error
  return network


def restore_drafter(
  state: Mapping[str, Any],
  wanted: Mapping[str, Any],
  *,
  checkpoint: str | os.PathLike[str],
  module: Any,
  dtype: Any = None,
  is_resuming: bool = False,
) -> dict[str, Any]:
  """Adds the drafter's parameters to a state that T5X restores.

  For `RestoreCheckpointConfig.state_transformation_fns`.

  Args:
    state: what the target's checkpoint has.
    wanted: the state that is restored; not looked at.
    checkpoint: the drafter's, of any kind that `specdec_jax.load` reads.
    module: the drafter's, as `EncoderDecoderModel.draft_module`.
    dtype: dtype of the parameters; None is the checkpoint's own.
    is_resuming: whether T5X continues a run; the same is done then.

  Raises:
    ValueError: as for `network_of` and `specdec_jax.checkpoints.load`.
  """
  del wanted, is_resuming
  network = network_of(module, 'draft_module')
  params = checkpoints.load(checkpoint, network, dtype=dtype)
  mutables = dict(state.get('flax_mutables', {}), **{COLLECTION: params})
  return dict(state, flax_mutables=mutables)
