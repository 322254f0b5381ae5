"""Optimisers and the learning-rate curve.

The optimisers here have learning rate 1: the train step scales their update by
`learning_rate(config, step, progress)`, so that the curve can follow the wall
clock without recompiling.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specdec_jax.checks.fields import check_types

OPTIMIZERS = ('adamw', 'muon')
CURVES = ('cosine', 'linear', 'constant')

# Parameters that muon leaves to AdamW: its update is for matrices that map
# activations to activations.
_NOT_MUON = (
  'token_embedder',
  'position_embedder',
  'logits_dense',
  'relpos_bias',
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """How parameters follow gradients.

  Attributes:
    name: 'adamw', or 'muon' (orthogonalised momentum, Jordan et al. 2024) for
      kernels with AdamW for embeddings, logits and norms.
    learning_rate: peak, reached after `warmup_steps`.
    curve: 'cosine' or 'linear' goes from the peak to zero over the run;
      'constant' stays at the peak.
    weight_decay: decoupled, on matrices only.
    max_grad_norm: gradients are scaled down to this global norm; 0 is off.
  """

  name: str = 'adamw'
  learning_rate: float = 2e-3
  warmup_steps: int = 200
  curve: str = 'cosine'
  weight_decay: float = 0.01
  b1: float = 0.9
  b2: float = 0.98
  max_grad_norm: float = 1.0

  def __post_init__(self):
    check_types(self)
    for field, allowed in (('name', OPTIMIZERS), ('curve', CURVES)):
      if getattr(self, field) not in allowed:
        raise ValueError(
          f'OptimizerConfig.{field} is {getattr(self, field)!r}; expected one'
          f' of {", ".join(allowed)}.'
        )
    if self.learning_rate <= 0 or self.warmup_steps < 0:
      raise ValueError(
        f'OptimizerConfig.learning_rate is {self.learning_rate} and'
        f' warmup_steps {self.warmup_steps}; expected > 0 and >= 0.'
      )


def learning_rate(config: OptimizerConfig, step: int, progress: float) -> float:
  """The rate for `step` (from 0); `progress` in [0, 1] of the run is done."""
  warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
  progress = min(max(progress, 0.0), 1.0)
  if config.curve == 'cosine':
    curve = 0.5 * (1.0 + math.cos(math.pi * progress))
  elif config.curve == 'linear':
    curve = 1.0 - progress
  else:
    curve = 1.0
  return config.learning_rate * warm * curve


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """The update rule at learning rate 1."""
  if config.name == 'adamw':
    rule = optax.adamw(
      1.0,
      b1=config.b1,
      b2=config.b2,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
  else:
    rule = optax.contrib.muon(
      1.0,
      weight_decay=config.weight_decay,
      adam_b1=config.b1,
      adam_b2=config.b2,
      muon_weight_dimension_numbers=_muon_dimensions,
      # Makes the root mean square of updates 0.2, as AdamW's: one peak rate
      # then serves both kinds of parameters.
      consistent_rms=0.2,
    )
  if config.max_grad_norm > 0:
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)
  return rule


def _muon_dimensions(params: Any) -> Any:
  def dimensions(path, leaf):
    names = {getattr(key, 'key', None) for key in path}
    if jnp.ndim(leaf) != 2 or names & set(_NOT_MUON):
      return None
    return optax.contrib.MuonDimensionNumbers()

  return jax.tree_util.tree_map_with_path(dimensions, params)
