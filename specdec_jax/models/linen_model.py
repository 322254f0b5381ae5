"""What the networks made of linen modules share: one call, one method."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

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


class DecoderOnly(LinenModel):
  """A `LinenModel` without an encoder.

  Parameters lie under 'decoder/', where T5X's decoder-only network has them.
  Heirs add `_decoder`, `prefill` and teacher-forced calls.
  """

  @property
  def _decoder(self) -> nn.Module:
    """The linen module."""
    raise NotImplementedError

  @property
  def has_encoder(self) -> bool:
    """False: the model continues its prompt."""
    return False

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters, a nested dict with T5X's names."""
    token = jnp.ones((1, 1), jnp.int32)
    return {'decoder': self._decoder.init(key, token)['params']}

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    return self._decoder.apply({'params': params['decoder']}, *args, **kwargs)
