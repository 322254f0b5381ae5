"""A drafter of heads on the target's last hidden state, without a network.

Heads follow blockwise parallel decoding (Stern et al. 2018), Medusa (Cai et al.
2024) and Hydra (Ankner et al. 2024). Head i predicts the token i places after
the last committed one, from the hidden state that gave that token, from the
token itself, and, as in Hydra, from the proposals of the heads before it.

Head i is a residual block, h = f + wo(silu(wi([f, e(t), ...]))), of that hidden
state f and the embeddings e of these tokens t, ..., followed by the target's
output layer. That layer and the embeddings e are read from the target's
parameters and not copied. With a hidden width of M, head i (from 0) adds
(3 + i) M^2 + M parameters; an output matrix for each head would add M V.
At T5-XXL's size the first head has 50 million parameters, and an output matrix
would have 132 million. A round reads the output layer once for each head, as a
small model of that width would.
"""

import dataclasses
import os
from typing import cast

import flax.traverse_util
import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec_jax.checkpoints import t5x
from specdec_jax.checkpoints.load import TARGET, open_checkpoint
from specdec_jax.checks.fields import Checked, unexpected
from specdec_jax.drafters import base
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.models import products
from specdec_jax.models.base import Params
from specdec_jax.types import Draft, Positive

KIND = 'heads'
_MADE_BY = '`specdec train --gin_file=gin/runs/train_heads.gin`'


class _Head(nn.Module):
  """The residual block of one head."""

  emb_dim: int
  hidden_dim: int

  @nn.compact
  def __call__(self, features: jax.Array, embedded: jax.Array) -> jax.Array:
    """Maps features [..., M] and embeddings [..., n * M] to [..., M]."""
    dtype = str(features.dtype)
    read = jnp.concatenate([features, embedded.astype(dtype)], axis=-1)
    wi = products.Dense(self.hidden_dim, dtype, use_bias=True, name='wi')
    # A new head is the identity, and predicts as the target does.
    wo = products.Dense(self.emb_dim, dtype, nn.initializers.zeros, name='wo')
    return features + wo(nn.silu(wi(read)))


@dataclasses.dataclass(frozen=True)
class Heads(Checked):
  """The sizes of a drafter's heads; their parameters are a nested dict.

  Attributes:
    num_heads: number of heads, and the most proposals of a round.
    emb_dim: M, width of the target's features.
    hidden_dim: H, width inside a head.

  Raises:
    ValueError: a number is below 1.
  """

  num_heads: Positive = 4
  emb_dim: Positive = 512
  hidden_dim: Positive = 512
  reads_encoder = False  # heads read the target's features

  @property
  def _head(self) -> _Head:
    return _Head(self.emb_dim, self.hidden_dim)

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters {'heads_0': ..., 'heads_1': ...}."""
    heads = {}
    for i in range(self.num_heads):
      width = self.emb_dim
      read = jnp.zeros((1, width)), jnp.zeros((1, (1 + i) * width))
      variables = self._head.init(jax.random.fold_in(key, i), *read)
      heads[f'heads_{i}'] = variables['params']
    return heads

  def apply(
    self, params: Params, index: int, features: jax.Array, embedded: jax.Array
  ) -> jax.Array:
    """Maps the target's features to those that one head predicts from.

    Args:
      params: the parameters, see `init`.
      index: static, number of the head, from 0.
      features: [..., M].
      embedded: [..., 1 + index, M], embeddings of the last committed token and
        of the proposals so far.

    Returns:
      [..., M], the input of the target's output layer.
    """
    read = embedded.reshape(*features.shape[:-1], -1)
    variables = {'params': params[f'heads_{index}']}
    return cast(jax.Array, self._head.apply(variables, features, read))


def heads(
  network: Heads, params: Params, made_for: tuple[str, ...] = ()
) -> Drafter:
  """Returns a drafter of heads on the target's features.

  A round costs no call of a network, only the heads' own products and the
  target's output layer. At temperature 0 each head proposes its likeliest
  token, otherwise a token drawn from its distribution. In the first round after
  a start token alone there is no feature: the heads then read zeros, as in
  training, and propose frequent first tokens.

  Args:
    network: the sizes of the heads.
    params: their parameters.
    made_for: fingerprint of the target that they were trained for; () accepts
      any target.
  """

  def propose(params, state, context: Context):
    features, target = context.features, context.target
    if features is None or target is None:
      raise unexpected('heads', 'features of the target', None)
    if network.emb_dim != features.shape[-1]:
      expected = f'emb_dim {features.shape[-1]}, as the target'
      advice = f'Train heads for it, with {_MADE_BY}.'
      raise unexpected('heads', expected, network.emb_dim, advice)
    count = min(network.num_heads, context.gamma)
    uniforms = base.draft_uniforms(context)

    place = context.length[:, None] - 1
    token = jnp.take_along_axis(context.tokens, place, axis=1)
    embedded = target.embed(context.target_params, token)
    drawn: list[tuple[jax.Array, jax.Array | None]] = []
    for i in range(count):
      hidden = network.apply(params, i, features, embedded)
      logits = target.head(context.target_params, hidden[:, None])[:, 0]
      drawn.append(base.draw_next(logits, context, i, uniforms))
      token = drawn[-1][0][:, None]
      embedded = jnp.concatenate(
        [embedded, target.embed(context.target_params, token)], axis=1
      )

    def padded(*parts):  # positions that no head predicts mean nothing
      stacked = jnp.stack(parts, axis=1)
      more = [(0, 0)] * stacked.ndim
      more[1] = 0, context.gamma - count
      return jnp.pad(stacked, more)

    tokens, rows = jax.tree.map(padded, *drawn)
    length = jnp.full(tokens.shape[:1], count, jnp.int32)
    return Draft(tokens, rows, length), state

  return Drafter(
    propose=propose,
    name=f'heads({network.num_heads})',
    params=params,
    reads_features=True,
    made_for=made_for,
  )


def load(path: str | os.PathLike[str]) -> Drafter:
  """Reads heads, and their sizes, from a file that `specdec train` wrote.

  An engine refuses heads with any target but the one that they were made for.

  Args:
    path: the file.

  Raises:
    ValueError: the file is missing, broken, or holds something else.

  Examples:
    >>> import jax
    >>> from specdec_jax.checkpoints.t5x import save_t5x
    >>> from specdec_jax.drafters.heads import KIND, Heads
    >>> params = Heads(num_heads=3, emb_dim=256).init(jax.random.key(0))
    >>> about = {'kind': KIND, 'target': engine.fingerprints['target']}
    >>> save_t5x('heads.msgpack', params, step=0, about=about)  # untrained
    >>> sd.Engine(target, sd.load_heads('heads.msgpack'), gamma=3)
    Engine(target=..., draft='heads(...)', gamma=3, ...)
  """
  opened, source = open_checkpoint(path), os.fspath(path)
  if opened.about.get('kind') != KIND or TARGET not in opened.about:
    expected = f'a file of heads that {_MADE_BY} wrote'
    advice = 'A model, or a folder, is read by specdec_jax.load.'
    raise unexpected('heads', expected, source, advice)
  params = opened.read()
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  try:
    hidden, width = flat['heads_0/wo/kernel'].shape
  except (KeyError, ValueError) as error:
    expected = 'heads_0/wo/kernel [H, M] and so on'
    raise unexpected(f'heads of {source!r}', expected, sorted(flat)) from error
  network = Heads(len(params), width, hidden)
  shapes = jax.eval_shape(network.init, jax.random.key(0))
  t5x.check_params(params, shapes, repr(source))
  return heads(network, params, (opened.about[TARGET],))
