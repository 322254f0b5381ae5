"""A drafter's network that has its target's ids.

Heads of one tokenizer are padded differently: T5's checkpoints have 32,128 rows
and some that were trained further 32,100, Gemma 3 has 262,144 or 262,208. The
target is never cut: its padded ids carry probability, and its distribution is
what comes out. So the drafter gives way. An id that the target lacks is not
proposed; one that the drafter lacks has probability 0, and comes from the
residual distribution.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specdec_jax.models.base import Around


def unfitted(network: Any) -> Any:
  """A network with its own ids."""
  return network.network if isinstance(network, Fitted) else network


def own_vocab_size(network: Any) -> int:
  """Ids that a network has by itself."""
  size: int = unfitted(network).vocab_size
  return size


@dataclasses.dataclass(frozen=True)
class Fitted(Around):
  """A `LanguageModel`, see `models.base`, whose logits are of other ids.

  Attributes:
    network: the network as it is, of V ids.
    vocab_size: W, ids of the logits: the first V of them are the network's, the
      others are masked with -inf.
  """

  vocab_size: int

  @property
  def config(self) -> Any:
    return getattr(self.network, 'config', None)

  def prefill(self, params, inputs, max_length, longest=None, **encoded):
    inputs = self._known(inputs)
    return self.network.prefill(params, inputs, max_length, longest, **encoded)

  def extend(self, params, cache, tokens, tree=None):
    tokens = self._known(tokens)
    logits, cache = self.network.extend(params, cache, tokens, tree)
    return self._fitted(logits), cache

  def extend_features(self, params, cache, tokens, tree=None):
    tokens = self._known(tokens)
    return self.network.extend_features(params, cache, tokens, tree)

  def embed(self, params, tokens):
    return self.network.embed(params, self._known(tokens))

  def head(self, params, features):
    return self._fitted(self.network.head(params, features))

  def rewind(self, cache, length):
    return self.network.rewind(cache, length)

  def keep(self, cache, length, slots):
    return self.network.keep(cache, length, slots)

  def _fitted(self, logits):
    more = max(0, self.vocab_size - self.network.vocab_size)
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, more)]
    padded = jnp.pad(logits, widths, constant_values=-jnp.inf)
    return padded[..., : self.vocab_size]

  def _known(self, tokens):
    # Any id will do for one that it has no embedding of; without one, the
    # embedding and all that follows would be NaN.
    return jnp.minimum(tokens, self.network.vocab_size - 1)
