"""T5 1.0 and 1.1: an encoder-decoder behind the `LanguageModel` contract."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from specdec_jax.checks.fields import check_types
from specdec_jax.models.base import Params
from specdec_jax.models.t5_network import EncoderDecoder, T5Config

__all__ = ['T5', 'T5Config']


@dataclasses.dataclass(frozen=True)
class T5:
  """A T5 as a `LanguageModel`; see `models.base` for the contract."""

  config: T5Config

  def __post_init__(self):
    check_types(self)

  @property
  def _module(self) -> EncoderDecoder:
    return EncoderDecoder(self.config)

  @property
  def vocab_size(self) -> int:
    """V, the width of the logits."""
    return self.config.vocab_size

  @property
  def has_encoder(self) -> bool:
    """True: an encoder reads the inputs."""
    return True

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters, a nested dict with T5X's names."""
    token = jnp.ones((1, 1), jnp.int32)
    return self._module.init(key, token, token)['params']

  def logits(
    self,
    params: Params,
    inputs: jax.Array,
    decoder_inputs: jax.Array,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Teacher-forced logits, as training and scoring need them.

    Args:
      params: the parameters.
      inputs: int32[B, E], 0 is padding.
      decoder_inputs: int32[B, S], the targets shifted right, 0 first.
      dropout_key: turns dropout on; consumed.

    Returns:
      float32[B, S, V].
    """
    rngs = None if dropout_key is None else {'dropout': dropout_key}
    logits = self._module.apply(
      {'params': params},
      inputs,
      decoder_inputs,
      deterministic=dropout_key is None,
      rngs=rngs,
    )
    return cast(jax.Array, logits)

  def prefill(self, params, inputs, max_length):
    """Runs the encoder once; returns a `KVCache` with `length` 0."""
    return self._module.apply(
      {'params': params}, inputs, max_length, method='prefill'
    )

  def extend(self, params, cache, tokens):
    """Reads tokens int32[B, S]; returns float32[B, S, V] and the cache."""
    return self._module.apply(
      {'params': params}, cache, tokens, method='extend'
    )

  def rewind(self, cache, length):
    """Forgets all but the first `length` (int32[B]) tokens of each row."""
    return cache.rewind(length)
