"""What training minimises: cross-entropy, distillation, heads.

An objective is a pytree with one method, see `Objective`. Parameters of a
frozen target are leaves of it, so that they are arguments of the compiled step
and not literals in it.
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
  """A loss, and what is measured on held-out data."""

  def sums(
    self, params: Params, batch: Batch, key: jax.Array | None = None
  ) -> Sums:
    """Sums over the tokens that count.

    Args:
      params: the parameters that learn.
      batch: one part of a batch, [B, L].
      key: of the dropout in training; None is an evaluation, which has no
        dropout and may measure more.

    Returns:
      'loss', what training minimises; 'tokens', the number of tokens; and
      others, which are reported divided by that number.
    """


def teacher_forced(
  targets: jax.Array, start_id: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What a decoder reads, what it is to say, and which places count.

  Args:
    targets: int32[B, S], `NO_TOKEN` past each row's end.
    start_id: the id that a decoder begins with. None: texts begin with nothing,
      so that the first token is only read.

  Returns:
    Decoder inputs int32[B, S], targets int32[B, S] and weights float32[B, S],
    0 past each row's end; S is one less if `start_id` is None.
  """
  ids = jnp.maximum(targets, 0)
  if start_id is None:
    fed, targets = ids[:, :-1], targets[:, 1:]
  else:
    first = ((0, 0), (1, 0))
    fed = jnp.pad(ids[:, :-1], first, constant_values=start_id)
  weights = (targets != NO_TOKEN).astype(jnp.float32)
  return fed, jnp.maximum(targets, 0), weights


def distillation(
  draft_logits: jax.Array, target_logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """How far the drafter's distribution is from the target's, at each token.

  The loss is Jeffreys' divergence, D(target || draft) + D(draft || target): the
  forward part alone is as good for greedy proposals, the reverse part gains for
  sampled ones (`benchmarks/divergences.py`), and is slower in the first
  thousand steps of random parameters. alpha is sum_x min(target(x), draft(x))
  (Leviathan et al. 2023, Corollary 3.6). Only the drafter's logits have a
  gradient, and only through the first result.

  Args:
    draft_logits: float32[B, S, V].
    target_logits: float32[B, S, V].

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
  """Maximum likelihood of the targets; an `Objective`.

  An evaluation has the plain likelihood, and 'accuracy'.

  Attributes:
    model: has `logits(params, inputs, decoder_inputs, dropout_key)`.
    start_id: see `teacher_forced`.
    z_loss: weight of the squared log normaliser, such as 1e-4 (Mesh TensorFlow,
      T5X); training only.
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
  """A drafter learns to propose what its target would say; an `Objective`.

  The training sequences should be the target's own outputs
  (`outputs.generate_outputs`), because a drafter in use continues such outputs.
  Reported are 'alpha', the expected acceptance rate at temperature 1, and in an
  evaluation 'agreement', how often the argmaxes are the same (temperature 0).

  Attributes:
    draft: the model that learns; it may read the target's encoder.
    target: the model to follow, of the same vocabulary.
    target_params: the target's parameters, constant.
    start_id: see `teacher_forced`.
  """

  draft: Any = flax.struct.field(pytree_node=False)
  target: Any = flax.struct.field(pytree_node=False)
  target_params: Any
  start_id: int | None = _static(default=0)

  def known(self, batch: Batch) -> dict[str, jax.Array]:
    """What does not change while the drafter learns, to be computed once.

    Returns:
      float16[B, S, M], the target's 'features' along the targets, and
      float16[B, E, M], its 'encoded' inputs for a drafter that reads them.
    """
    return jax.tree.map(lambda x: x.astype(jnp.float16), self._read(batch))

  def _read(self, batch):
    fed, _, _ = teacher_forced(batch.targets, self.start_id)
    known = {}
    if self.draft.reads_encoder:
      known['encoded'] = self.target.encode(self.target_params, batch.inputs)
    args = self.target_params, batch.inputs, fed
    return known | {'features': self.target.features(*args, **known)}

  def sums(self, params, batch, key=None):
    known = self._read(batch) if batch.known is None else batch.known
    known = jax.tree.map(lambda x: x.astype(jnp.float32), known)
    target = self.target.head(self.target_params, known.pop('features'))
    fed, _, mask = teacher_forced(batch.targets, self.start_id)
    draft = self.draft.logits(
      params, batch.inputs, fed, dropout_key=key, **known
    )
    compared = self._compared(draft, target, mask, key is None)
    return compared | {'tokens': mask.sum()}

  def _compared(self, draft, target, mask, evaluates) -> Sums:
    """Sums of loss, alpha and, in an evaluation, agreement."""
    draft, target = draft.astype(jnp.float32), target.astype(jnp.float32)
    nats, alpha = distillation(draft, target)
    sums = {'loss': jnp.sum(nats * mask), 'alpha': jnp.sum(alpha * mask)}
    if evaluates:
      agrees = draft.argmax(axis=-1) == target.argmax(axis=-1)
      sums['agreement'] = jnp.sum(agrees * mask)
    return sums


@flax.struct.dataclass
class HeadDistillation(Distillation):
  """Head i follows the target's distribution i places on; an `Objective`.

  All places of a sequence are taken at once, teacher forced: at the place of
  its token d_s, heads read the feature whose logits gave d_s (zeros for the
  start token) and the embeddings of d_s and of the tokens after it. 'alpha_i'
  and 'agreement_i' are those of head i, behind accepted proposals.

  Attributes:
    draft: a `drafters.heads.Heads`; the target is a network of this library.
    decay: weight of a head, divided by that of the head before it.
  """

  decay: float = _static(default=0.8)

  def sums(self, params, batch, key=None):
    fed, _, mask = teacher_forced(batch.targets, self.start_id)
    features = self.target.features(self.target_params, batch.inputs, fed)
    wanted = self.target.head(self.target_params, features)
    embedded = self.target.embed(self.target_params, fed)
    before = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    sums = {'loss': jnp.float32(0), 'tokens': mask.sum()}
    places = mask.shape[1]
    for i in range(min(self.draft.num_heads, places)):
      # Head i at place s is to say what the target says at place s + i.
      count = places - i
      read = jnp.stack(
        [embedded[:, j : j + count] for j in range(1 + i)],
        axis=2,
      )
      states = self.draft.apply(params, i, before[:, :count], read)
      logits = self.target.head(self.target_params, states)
      counted = mask[:, i:]
      head = self._compared(logits, wanted[:, i:], counted, key is None)
      sums['loss'] += self.decay**i * head.pop('loss')
      # Scaled, so that a division by all tokens gives the mean over the head's.
      scale = sums['tokens'] / jnp.maximum(counted.sum(), 1.0)
      sums |= {f'{name}_{i + 1}': x * scale for name, x in head.items()}
    return sums
