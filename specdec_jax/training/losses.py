"""Losses over logits, summed over tokens that count."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.tokenizer import PAD_ID


def shift_right(targets: jax.Array) -> jax.Array:
  """Decoder inputs int32[B, S] for targets int32[B, S]: id 0 starts a row."""
  return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=PAD_ID)


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
  # Written out so that the gradient over [B, S, V] is one fused pass. The one
  # that autodiff finds scatters into a zero array of that size first.
  logits, targets, normaliser = saved
  probs = jnp.exp(logits - normaliser[..., None])
  scale = (1.0 + 2.0 * z_loss * normaliser)[..., None]
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  wanted = jnp.where(ids == targets[..., None], 1.0 - label_smoothing, 0.0)
  wanted += label_smoothing / logits.shape[-1]
  return (scale * probs - wanted) * cotangent[..., None], None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)
