"""What the networks made of linen modules share: one call, one method."""

from typing import Any

import jax

from specdec_jax.models.base import Params


class LinenModel:
  """Most of a `FeatureModel`, by methods of the same names of a linen module.

  Heirs add what differs: `init`, `prefill`, teacher-forced calls, and `_apply`.

  Attributes:
    config: the shape of the network.
  """

  config: Any

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    """Calls the linen module, with those of `params` that are its own."""
    raise NotImplementedError

  @property
  def vocab_size(self) -> int:
    """V, the width of the logits."""
    return self.config.vocab_size

  def extend(self, params, cache, tokens, tree=None):
    """Reads tokens int32[B, S]; returns float32[B, S, V] and the cache."""
    logits, _, cache = self.extend_with_features(params, cache, tokens, tree)
    return logits, cache

  def extend_with_features(self, params, cache, tokens, tree=None):
    """As `extend`; returns [B, S, M] after the logits."""
    return self._apply(
      params, cache, tokens, tree, method='extend_with_features'
    )

  def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Maps int32[...] to the decoder's embeddings [..., M], no positions."""
    return self._apply(params, tokens, method='embed')

  def head(self, params: Params, features: jax.Array) -> jax.Array:
    """The output layer: maps [..., M] to logits float32[..., V]."""
    return self._apply(params, features, method='head')

  def rewind(self, cache, length):
    """Forgets all but the first `length` (int32[B]) tokens of each row."""
    return cache.rewind(length)

  def keep(self, cache, length, slots):
    """Keeps the first `length` slots and those in `slots`, int32[B, N]."""
    return cache.keep(length, slots)
