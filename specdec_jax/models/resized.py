"""A network whose logits have another width, to draft for another model.

Models of one vocabulary may differ in how their output layers are padded: Gemma
3 270M has 262144 ids and 27B has 262208. The target is never cut, because its
padding may have mass. A drafter has probability 0 for ids that it lacks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.models import layers
from specdec_jax.models.base import Params, reads_encoder


@dataclasses.dataclass(frozen=True)
class Resized:
  """A `LanguageModel`, see `models.base`, with logits of another width.

  Attributes:
    network: the network.
    vocab_size: V, the width of the logits: those of ids that the network lacks
      are very negative, and those of ids past V are left out.
  """

  network: Any
  vocab_size: int

  @property
  def has_encoder(self) -> bool:
    return self.network.has_encoder

  @property
  def reads_encoder(self) -> bool:
    return reads_encoder(self.network)

  @property
  def config(self) -> Any:
    return getattr(self.network, 'config', None)

  def init(self, key: jax.Array) -> Params:
    return self.network.init(key)

  def prefill(self, *args, **options):
    return self.network.prefill(*args, **options)

  def extend(self, params, cache, tokens, tree=None):
    # An id that the network lacks reads as its last one.
    tokens = jnp.minimum(tokens, self.network.vocab_size - 1)
    logits, cache = self.network.extend(params, cache, tokens, tree)
    more = max(0, self.vocab_size - self.network.vocab_size)
    logits = jnp.pad(
      logits[..., : self.vocab_size],
      ((0, 0), (0, 0), (0, more)),
      constant_values=layers.MASKED,
    )
    return logits, cache

  def rewind(self, cache, length):
    return self.network.rewind(cache, length)

  def keep(self, cache, length, slots):
    return self.network.keep(cache, length, slots)
