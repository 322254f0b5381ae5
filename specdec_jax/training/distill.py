"""Distillation: a drafter that proposes what its target would say.

The sequences should be the target's own outputs (`outputs.generate_outputs`):
these are what a drafter continues when it is used.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models.base import Params
from specdec_jax.tokenizer import PAD_ID
from specdec_jax.training import losses
from specdec_jax.training.losses import DistillationWeights


@flax.struct.dataclass
class Distillation:
  """Soft targets of another model over the same sequences; an `Objective`.

  The target's probabilities are computed on the fly, teacher forced, part by
  part: on a CPU the logits of both models stay in its cache.

  Attributes:
    draft: the model that learns.
    target: the model to follow, of the same vocabulary.
    target_params: its parameters, constant; a part of the pytree, so that they
      are arguments of the compiled step and not literals in it.
    weights: of the terms of `losses.distillation`.
  """

  draft: Any = flax.struct.field(pytree_node=False)
  target: Any = flax.struct.field(pytree_node=False)
  target_params: Any
  weights: DistillationWeights = flax.struct.field(
    pytree_node=False, default=DistillationWeights()
  )

  def loss(self, params, batch, key):
    """The weighted loss; `alpha` is reported beside it."""
    draft_logits, target_logits, mask = self._logits(params, batch, key)
    nats, alpha = losses.distillation(
      draft_logits, target_logits, batch.targets, self.weights
    )
    total = jnp.sum(nats * mask)
    return total, {
      'loss': total,
      'alpha': jnp.sum(alpha * mask),
      'tokens': mask.sum(),
    }

  def evaluate(self, params, batch):
    """The loss; `alpha`, the expected acceptance at temperature 1; and
    `agreement`, how often the argmaxes are the same (temperature 0)."""
    draft_logits, target_logits, mask = self._logits(params, batch, None)
    nats, alpha = losses.distillation(
      draft_logits, target_logits, batch.targets, self.weights
    )
    agrees = draft_logits.argmax(axis=-1) == target_logits.argmax(axis=-1)
    return {
      'loss': jnp.sum(nats * mask),
      'alpha': jnp.sum(alpha * mask),
      'agreement': jnp.sum(agrees * mask),
      'tokens': mask.sum(),
    }

  def _logits(self, params, batch, key):
    decoder_inputs = losses.shift_right(batch.targets)
    draft = self.draft.logits(
      params, batch.inputs, decoder_inputs, dropout_key=key
    )
    target = self.target.logits(
      self.target_params, batch.inputs, decoder_inputs
    )
    target = jax.lax.stop_gradient(target)
    mask = (batch.targets != PAD_ID).astype(jnp.float32)
    return draft.astype(jnp.float32), target.astype(jnp.float32), mask


def inherit_tables(draft_params: Params, target_params: Params) -> Params:
  """The drafter's first parameters with the target's tables, made narrower.

  What each token is near to is most of what a small drafter has to learn. The
  embedding [V, M] and, of an untied model, the logits' kernel [M, V] keep the
  directions in which the target's vary most (a truncated singular value
  decomposition); the embedding also keeps its own scale. Directions that the
  target does not have stay random.

  Args:
    draft_params: of a T5, random; not changed.
    target_params: of a T5 of the same vocabulary.

  Returns:
    The drafter's parameters.
  """
  params = jax.tree.map(lambda leaf: leaf, draft_params)
  ours, theirs = params['token_embedder'], target_params['token_embedder']
  table = _narrowed(theirs['embedding'], ours['embedding'])
  scale = np.std(ours['embedding']) / np.std(table)
  ours['embedding'] = jnp.asarray(scale * table, jnp.float32)
  ours, theirs = params['decoder'], target_params['decoder']
  if 'logits_dense' in ours and 'logits_dense' in theirs:
    kernel = _narrowed(
      theirs['logits_dense']['kernel'].T, ours['logits_dense']['kernel'].T
    )
    ours['logits_dense']['kernel'] = jnp.asarray(kernel.T, jnp.float32)
  return params


def _narrowed(wide: jax.Array, narrow: jax.Array) -> np.ndarray:
  """The leading directions of `wide` [V, M] in the shape of `narrow`."""
  left, values, _ = np.linalg.svd(np.asarray(wide), full_matrices=False)
  size = min(narrow.shape[1], len(values))
  table = np.array(narrow)
  table[:, :size] = left[:, :size] * values[:size]
  return table
