"""The loss of heads on a frozen target's features; see `drafters.heads`."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.text.tokenizer import PAD_ID
from specdec_jax.training import losses
from specdec_jax.training.losses import DistillationWeights


@flax.struct.dataclass
class HeadDistillation:
  """Head i follows the target's distribution i places on; an `Objective`.

  All places of a sequence are taken at once, teacher forced: at the place of
  its token d_s, heads read the feature whose logits gave d_s (zeros for the
  start token) and the embedding of d_s, conditioned heads those of the tokens
  after it as well.

  Attributes:
    heads: a `drafters.heads.Heads`.
    target: the target, a `FeatureModel`.
    target_params: its parameters, constant; arguments of the compiled step.
    weights: weights of the terms of `losses.distillation`, of each head.
    decay: weight of a head, divided by that of the head before it.
  """

  heads: Any = flax.struct.field(pytree_node=False)
  target: Any = flax.struct.field(pytree_node=False)
  target_params: Any
  weights: DistillationWeights = flax.struct.field(
    pytree_node=False, default=DistillationWeights()
  )
  decay: float = flax.struct.field(pytree_node=False, default=0.8)

  def loss(self, params, batch, key):
    """The weighted loss; each head's alpha is reported as well."""
    del key  # there is no dropout
    sums, _ = self._measured(params, batch)
    return sums['loss'], sums

  def evaluate(self, params, batch):
    """The loss; of each head, `alpha_i`, the expected acceptance rate at
    temperature 1 behind accepted proposals, and `agreement_i`, how often the
    argmaxes are the same (temperature 0)."""
    sums, agreements = self._measured(params, batch)
    return sums | agreements

  def _measured(self, params, batch):
    """Sums over tokens; of head i they are scaled to its own tokens."""
    fed = losses.shift_right(batch.targets, self.target)
    features = self.target.features(self.target_params, batch.inputs, fed)
    wanted = self.target.head(self.target_params, features)
    embedded = self.target.embed(self.target_params, fed)
    features, wanted, embedded = jax.lax.stop_gradient(
      (features, wanted.astype(jnp.float32), embedded)
    )
    before = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    mask = (batch.targets != PAD_ID).astype(jnp.float32)
    tokens = mask.sum()
    sums, agreements = {'loss': jnp.float32(0), 'tokens': tokens}, {}
    places = batch.targets.shape[1]
    for i in range(min(self.heads.config.num_heads, places)):
      # Head i at place s is to say what the target says at place s + i.
      count = places - i
      read = jnp.stack(
        [embedded[:, j : j + count] for j in range(self.heads.num_read(i))],
        axis=2,
      )
      made = self.heads.apply(params, i, before[:, :count], read)
      logits = self.target.head(self.target_params, made).astype(jnp.float32)
      nats, alpha = losses.distillation(
        logits, wanted[:, i:], batch.targets[:, i:], self.weights
      )
      own = mask[:, i:]
      scale = tokens / jnp.maximum(own.sum(), 1.0)
      sums['loss'] += self.decay**i * jnp.sum(nats * own)
      sums[f'alpha_{i + 1}'] = jnp.sum(alpha * own) * scale
      agrees = logits.argmax(axis=-1) == wanted[:, i:].argmax(axis=-1)
      agreements[f'agreement_{i + 1}'] = jnp.sum(agrees * own) * scale
    return sums, agreements
