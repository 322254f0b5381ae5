"""Objectives of training: cross-entropy, distillation, distillation of heads.

An `Objective` is a pytree, whose leaves are the parameters of a frozen target.
The compiled step therefore gets these parameters as arguments and does not
contain them as constants.
"""

import functools
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specdec_jax.models.base import Params
from specdec_jax.training.data import NO_TOKEN, Batch

Sums = dict[str, jax.Array]


class Objective(Protocol):
  """Computes a loss to minimise, and measures that are reported with it."""

  def sums(
    self, params: Params, batch: Batch, key: jax.Array | None = None
  ) -> Sums:
    """Sums the loss and the measures over all tokens that are not padding.

    Args:
      params: the parameters that are trained.
      batch: one part of a `Batch`: inputs [B, L] and targets [B, S].
      key: PRNG key of the dropout in training; None evaluates, without dropout
        and perhaps with more measures.

    Returns:
      'loss', which training minimises; 'tokens', the number of tokens; and
      other sums, which are reported divided by that number.
    """


def teacher_forced(
  targets: jax.Array, start_id: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns a decoder's inputs, its targets, and the weights of the targets.

  Args:
    targets: int32[B, S], `NO_TOKEN` past each row's end.
    start_id: the id that a decoder begins with; None if it begins with a text's
      first token, which is then read but not predicted.

  Returns:
    Decoder inputs int32[B, S], targets int32[B, S] and weights float32[B, S],
    0 past each row's end; S is one less if `start_id` is None.
  """
  ids = jnp.maximum(targets, 0)
  if start_id is None:
    fed, targets = ids[:, :-1], targets[:, 1:]
  else:
    fed = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=start_id)
  weights = (targets != NO_TOKEN).astype(jnp.float32)
  return fed, jnp.maximum(targets, 0), weights


def distillation(
  draft_logits: jax.Array, target_logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Measures how far the drafter's distributions are from the target's.

  The loss is Jeffreys' divergence, D(target || draft) + D(draft || target). The
  first term alone is as good for greedy proposals. The second term helps
  sampled proposals (see `benchmarks/divergences.py`), but slows down the first
  thousand steps of a model with random parameters. alpha is sum_x
  min(target(x), draft(x)) (Leviathan et al. 2023, Corollary 3.6). Only the
  drafter's logits have a gradient, and only through the loss.

  Args:
    draft_logits: float32[B, S, V], the drafter's logits.
    target_logits: float32[B, S, V], the target's logits of the same tokens.

  Returns:
    The loss, float32[B, S], nats; and alpha, float32[B, S], the probability
    that a proposal is accepted at temperature 1.
  """
  draft = jax.nn.log_softmax(draft_logits)
  target = jax.lax.stop_gradient(jax.nn.log_softmax(target_logits))
  alpha = jnp.sum(jnp.exp(jnp.minimum(draft, target)), axis=-1)
  both_ways = (jnp.exp(target) - jnp.exp(draft)) * (target - draft)
  return jnp.sum(both_ways, axis=-1), jax.lax.stop_gradient(alpha)


_static = functools.partial(flax.struct.field, pytree_node=False)


@flax.struct.dataclass
class CrossEntropy:
  """The `Objective` of maximum likelihood: the targets' cross-entropy.

  An evaluation reports the cross-entropy without z_loss, and 'accuracy', the
  share of targets that have the largest logit.

  Attributes:
    model: the network, which has `logits(params, inputs, decoder_inputs,
      dropout_key)`.
    start_id: the id that the decoder begins with, or None; as for
      `teacher_forced`.
    z_loss: weight of the squared log normaliser, such as 1e-4 (Mesh TensorFlow,
      T5X); it is added in training only.
  """

  model: Any = _static()
  start_id: int | None = _static(default=0)
  z_loss: float = _static(default=0.0)

  def sums(self, params, batch, key=None):
    fed, targets, weights = teacher_forced(batch.targets, self.start_id)
    logits = self.model.logits(params, batch.inputs, fed, dropout_key=key)
    logits = logits.astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    sums = {'tokens': weights.sum()}
    if key is None:
      hits = logits.argmax(axis=-1) == targets
      sums['accuracy'] = jnp.sum(hits * weights)
    else:
      nats += self.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return sums | {'loss': jnp.sum(nats * weights)}


@flax.struct.dataclass
class Distillation:
  """The `Objective` of a drafter that learns to predict as its target does.

  The training sequences should be the target's own outputs
  (`outputs.generate_outputs`), because a drafter has to continue such outputs.
  The objective reports 'alpha', the expected acceptance rate at temperature 1,
  and in an evaluation 'agreement', the share of equal argmaxes (temperature 0).

  Attributes:
    draft: the network that learns; it may read the outputs of the target's
      encoder.
    target: the network to learn from, of the same vocabulary.
    target_params: the target's parameters, which stay constant.
    start_id: the id that decoders begin with, or None; as for `teacher_forced`.
  """

  draft: Any = flax.struct.field(pytree_node=False)
  target: Any = flax.struct.field(pytree_node=False)
  target_params: Any
  start_id: int | None = _static(default=0)

  def features(self, batch: Batch) -> dict[str, jax.Array]:
    """Computes the target's outputs, which do not change in training.

    They are in half precision, because they may be stored for all batches.

    Returns:
      A dict with 'features', float16[B, S, M], from which the target's head
      computes the logits of each target token; and, if the drafter reads the
      encoder, with 'encoded', float16[B, E, M], the encoder's outputs.
    """
    return jax.tree.map(lambda x: x.astype(jnp.float16), self._read(batch))

  def _read(self, batch):
    fed, _, _ = teacher_forced(batch.targets, self.start_id)
    arrays = {}
    if self.draft.reads_encoder:
      arrays['encoded'] = self.target.encode(self.target_params, batch.inputs)
    args = self.target_params, batch.inputs, fed
    return arrays | {'features': self.target.features(*args, **arrays)}

  def sums(self, params, batch, key=None):
    arrays = self._read(batch) if batch.features is None else batch.features
    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    target = self.target.head(self.target_params, arrays.pop('features'))
    fed, _, mask = teacher_forced(batch.targets, self.start_id)
    args = params, batch.inputs, fed
    draft = self.draft.logits(*args, dropout_key=key, **arrays)
    compared = self._compared(draft, target, mask, key is None)
    return compared | {'tokens': mask.sum()}

  def _compared(self, draft, target, mask, evaluates) -> Sums:
    """Sums the loss, alpha and, in an evaluation, the agreement."""
    draft, target = draft.astype(jnp.float32), target.astype(jnp.float32)
    nats, alpha = distillation(draft, target)
    sums = {'loss': jnp.sum(nats * mask), 'alpha': jnp.sum(alpha * mask)}
    if evaluates:
      agrees = draft.argmax(axis=-1) == target.argmax(axis=-1)
      sums['agreement'] = jnp.sum(agrees * mask)
    return sums


@flax.struct.dataclass
class HeadDistillation(Distillation):
  """The `Objective` of heads: head i learns to predict i positions further.

  All positions of a sequence are trained at once, with teacher forcing. At the
  position of token d_s, head i (from 0) reads the target's feature from which
  d_s was predicted (zeros for the start token) and the embeddings of d_s to
  d_(s + i). It learns the target's distribution of d_(s + i + 1). 'alpha_1' and
  'agreement_1' are those of head 0, and so on; each head is measured as if the
  proposals of the heads before it had been accepted.

  Attributes:
    draft: the heads, a `drafters.heads.Heads`. The target must be a network of
      this library.
    decay: weight of a head's loss relative to that of the head before it.
  """

  decay: float = _static(default=0.8)

  def sums(self, params, batch, key=None):
    fed, _, mask = teacher_forced(batch.targets, self.start_id)
    features = self.target.features(self.target_params, batch.inputs, fed)
    target = self.target.head(self.target_params, features)
    embedded = self.target.embed(self.target_params, fed)
    before = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    sums = {'loss': jnp.float32(0), 'tokens': mask.sum()}
    places = mask.shape[1]
    for i in range(min(self.draft.num_heads, places)):
      # Head i at position s learns the target's distribution at position s + i.
      count = places - i
      tokens = [embedded[:, j : j + count] for j in range(1 + i)]
      read = jnp.stack(tokens, axis=2)
      states = self.draft.apply(params, i, before[:, :count], read)
      logits = self.target.head(self.target_params, states)
      counted = mask[:, i:]
      head = self._compared(logits, target[:, i:], counted, key is None)
      sums['loss'] += self.decay**i * head.pop('loss')
      # The caller divides all sums by the number of all tokens. With this
      # scale the result is the mean over the tokens that count for this head.
      scale = sums['tokens'] / jnp.maximum(counted.sum(), 1.0)
      sums |= {f'{name}_{i + 1}': x * scale for name, x in head.items()}
    return sums
