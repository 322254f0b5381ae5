"""Distillation: a drafter learns to propose what its target would say.

The training sequences should be the target's own outputs
(`outputs.generate_outputs`), because a drafter in use continues such outputs.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.models.base import reads_encoder
from specdec_jax.text.tokenizer import PAD_ID
from specdec_jax.training import losses
from specdec_jax.training.losses import DistillationWeights


@flax.struct.dataclass
class Distillation:
  """Soft targets of another model over the same sequences; an `Objective`.

  The target's probabilities are computed on the fly, teacher forced, part by
  part: on a CPU the logits of both models stay in its cache.

  Attributes:
    draft: the model that learns; it may read the target's encoder.
    target: the model to follow, of the same vocabulary.
    target_params: the target's parameters, constant. They are part of the
      pytree, so that they are arguments of the compiled step and not literals
      in it.
    weights: weights of the terms of `losses.distillation`.
  """

  draft: Any = flax.struct.field(pytree_node=False)
  target: Any = flax.struct.field(pytree_node=False)
  target_params: Any
  weights: DistillationWeights = flax.struct.field(
    pytree_node=False, default=DistillationWeights()
  )

  def loss(self, params, batch, key):
    """The weighted loss; `alpha` is reported as well."""
    sums, _ = self._measured(params, batch, key)
    return sums['loss'], sums

  def evaluate(self, params, batch):
    """The loss; `alpha`, the expected acceptance rate at temperature 1; and
    `agreement`, how often the argmaxes are the same (temperature 0)."""
    sums, agrees = self._measured(params, batch, None)
    return sums | {'agreement': agrees}

  def _measured(self, params, batch, key):
    """Sums over the tokens that count, and how many argmaxes agree."""
    decoder_inputs = losses.shift_right(batch.targets, self.target)
    encoded = {}
    if reads_encoder(self.draft):
      found = self.target.encode(self.target_params, batch.inputs)
      encoded = {'encoded': jax.lax.stop_gradient(found)}
    draft = self.draft.logits(
      params, batch.inputs, decoder_inputs, dropout_key=key, **encoded
    ).astype(jnp.float32)
    target = self.target.logits(
      self.target_params, batch.inputs, decoder_inputs, **encoded
    )
    target = jax.lax.stop_gradient(target).astype(jnp.float32)
    mask = (batch.targets != PAD_ID).astype(jnp.float32)
    nats, alpha = losses.distillation(
      draft, target, batch.targets, self.weights
    )
    agrees = draft.argmax(axis=-1) == target.argmax(axis=-1)
    return {
      'loss': jnp.sum(nats * mask),
      'alpha': jnp.sum(alpha * mask),
      'tokens': mask.sum(),
    }, jnp.sum(agrees * mask)
