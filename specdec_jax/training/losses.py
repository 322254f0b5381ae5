"""Losses over logits, for each token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.checks.fields import check_types
from specdec_jax.models.base import start_id


def shift_right(targets: jax.Array, model: Any) -> jax.Array:
  """Decoder inputs int32[B, S] from targets int32[B, S].

  Rows begin with the `start_id` of the model.
  """
  first = start_id(model)
  return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=first)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(
  logits: jax.Array,
  targets: jax.Array,
  label_smoothing: float,
  z_loss: float,
) -> jax.Array:
  """Cross-entropy of each token, with label smoothing and z-loss.

  With s = label_smoothing, the target distribution is (1 - s) on the target
  plus s / V on every id (Szegedy et al. 2016), and z_loss * logsumexp^2 is
  added (Mesh TensorFlow, T5X).

  Args:
    logits: float32[B, S, V].
    targets: int32[B, S].
    label_smoothing: s in [0, 1).
    z_loss: weight of the squared log normaliser, e.g. 1e-4.

  Returns:
    float32[B, S], nats.
  """
  return _cross_entropy_fwd(logits, targets, label_smoothing, z_loss)[0]


def _cross_entropy_fwd(logits, targets, label_smoothing, z_loss):
  normaliser = jax.nn.logsumexp(logits, axis=-1)
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  loss = normaliser - (1.0 - label_smoothing) * picked
  if label_smoothing:
    loss -= label_smoothing * logits.mean(axis=-1)
  loss += z_loss * normaliser**2
  return loss, (logits, targets, normaliser)


def _cross_entropy_bwd(label_smoothing, z_loss, saved, cotangent):
  # Written out so that the gradient over [B, S, V] is one fused pass. The
  # gradient from autodiff first scatters into a zero array of that size.
  logits, targets, normaliser = saved
  probs = jnp.exp(logits - normaliser[..., None])
  scale = (1.0 + 2.0 * z_loss * normaliser)[..., None]
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  wanted = jnp.where(ids == targets[..., None], 1.0 - label_smoothing, 0.0)
  wanted += label_smoothing / logits.shape[-1]
  return (scale * probs - wanted) * cotangent[..., None], None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


@dataclasses.dataclass(frozen=True)
class DistillationWeights:
  """The weights of the terms of a drafter's loss; see `distillation`.

  Attributes:
    kl: weight of the forward divergence D(target || draft).
    cross_entropy: weight of the negative log-likelihood of the sequence.
    total_variation: weight of 1 - alpha, the rejection rate.
  """

  kl: float = 1.0
  cross_entropy: float = 0.0
  total_variation: float = 0.0

  def __post_init__(self):
    check_types(self)
    values = (self.kl, self.cross_entropy, self.total_variation)
    if min(values) < 0 or sum(values) <= 0:
      raise ValueError(
        f'DistillationWeights is {values}; expected weights >= 0, at least one'
        ' of them > 0.'
      )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def distillation(
  draft_logits: jax.Array,
  target_logits: jax.Array,
  tokens: jax.Array,
  weights: DistillationWeights,
) -> tuple[jax.Array, jax.Array]:
  """How far the drafter's distribution is from the target's, at each token.

  The total variation is 1 - sum_x min(target(x), draft(x)), the probability
  that a proposal is rejected (Leviathan et al. 2023, Corollary 3.6). Only the
  drafter's logits have a gradient, and only through the first result.

  Args:
    draft_logits: float32[B, S, V].
    target_logits: float32[B, S, V].
    tokens: int32[B, S], the sequence itself.
    weights: weights of the three terms.

  Returns:
    The weighted sum, float32[B, S], nats; and alpha, float32[B, S], the
    probability that a proposal is accepted at temperature 1.
  """
  return _distillation_fwd(draft_logits, target_logits, tokens, weights)[0]


def _distillation_fwd(draft_logits, target_logits, tokens, weights):
  draft_norm = jax.nn.logsumexp(draft_logits, axis=-1)
  target_norm = jax.nn.logsumexp(target_logits, axis=-1)
  draft = draft_logits - draft_norm[..., None]
  target = target_logits - target_norm[..., None]
  # Three sums in one pass over [B, S, V].
  overlap = jnp.exp(jnp.minimum(draft, target))
  alpha = jnp.sum(overlap, axis=-1)
  behind = jnp.sum(jnp.where(draft < target, overlap, 0.0), axis=-1)
  loss = weights.total_variation * (1.0 - alpha)
  if weights.kl:
    loss += weights.kl * jnp.sum(jnp.exp(target) * (target - draft), axis=-1)
  if weights.cross_entropy:
    picked = jnp.take_along_axis(draft_logits, tokens[..., None], axis=-1)
    loss += weights.cross_entropy * (draft_norm - picked[..., 0])
  saved = draft_logits, target_logits, tokens, draft_norm, target_norm, behind
  return (loss, alpha), saved


def _distillation_bwd(weights, saved, cotangents):
  # With d = draft, t = target, over the drafter's logits:
  #   D(t || d)          d - t
  #   cross-entropy      d - onehot
  #   1 - sum min(t, d)  d * (sum_x [d < t] d(x) - [d < t])
  # One fused pass over [B, S, V], as for `cross_entropy`.
  draft_logits, target_logits, tokens, draft_norm, target_norm, behind = saved
  draft = draft_logits - draft_norm[..., None]
  target = target_logits - target_norm[..., None]
  draft_probs = jnp.exp(draft)
  pull = weights.kl + weights.cross_entropy
  pull += weights.total_variation * (behind[..., None] - (draft < target))
  gradient = pull * draft_probs - weights.kl * jnp.exp(target)
  if weights.cross_entropy:
    ids = jax.lax.broadcasted_iota(tokens.dtype, draft_logits.shape, 2)
    gradient -= jnp.where(ids == tokens[..., None], weights.cross_entropy, 0.0)
  return gradient * cotangents[0][..., None], None, None


distillation.defvjp(_distillation_fwd, _distillation_bwd)
