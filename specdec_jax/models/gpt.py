"""Decoder-only models, GPT-2's and T5X's: a `LanguageModel`."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from specdec_jax.checks.fields import check_types
from specdec_jax.models.base import Params
from specdec_jax.models.gpt_network import Decoder, GPTConfig

__all__ = ['GPT', 'GPTConfig']


@dataclasses.dataclass(frozen=True)
class GPT:
  """A decoder-only model as a `LanguageModel`; see `models.base`.

  Parameters lie under 'decoder/', where T5X's decoder-only network has them.
  """

  config: GPTConfig

  def __post_init__(self):
    check_types(self)

  @property
  def vocab_size(self) -> int:
    """V, the width of the logits."""
    return self.config.vocab_size

  @property
  def has_encoder(self) -> bool:
    """False: what is to be continued is the prompt."""
    return False

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters, a nested dict with T5X's names."""
    token = jnp.ones((1, 1), jnp.int32)
    return {'decoder': Decoder(self.config).init(key, token)['params']}

  def logits(
    self,
    params: Params,
    inputs: Any,
    decoder_inputs: jax.Array,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Teacher-forced logits, as training and scoring need them.

    Args:
      params: the parameters.
      inputs: not looked at; here so that objectives need not ask.
      decoder_inputs: int32[B, S], the targets shifted right behind the token
        that texts begin with.
      dropout_key: turns dropout on; consumed.

    Returns:
      float32[B, S, V].

    Raises:
      ValueError: S is more than the learned positions.
    """
    del inputs
    self._check_length(decoder_inputs.shape[1])
    rngs = None if dropout_key is None else {'dropout': dropout_key}
    logits = self._apply(
      params, decoder_inputs, deterministic=dropout_key is None, rngs=rngs
    )
    return cast(jax.Array, logits)

  def prefill(self, params, inputs, max_length):
    """Returns an empty `KVCache` of inputs' B rows and `max_length` slots.

    Raises:
      ValueError: `max_length` is more than the learned positions.
    """
    self._check_length(max_length)
    return self._apply(
      params, inputs.shape[0], max_length, method='empty_cache'
    )

  def extend(self, params, cache, tokens):
    """Reads tokens int32[B, S]; returns float32[B, S, V] and the cache."""
    return self._apply(params, cache, tokens, method='extend')

  def rewind(self, cache, length):
    """Forgets all but the first `length` (int32[B]) tokens of each row."""
    return cache.rewind(length)

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    return Decoder(self.config).apply(
      {'params': params['decoder']}, *args, **kwargs
    )

  def _check_length(self, length: int) -> None:
    limit = self.config.num_positions
    if limit and length > limit:
      raise ValueError(
        f'{length} slots were asked for, but this model has learned'
        f' {limit} positions. Prompt, output and a whole draft must fit in'
        f' them (an engine rounds their sum up to a multiple of 64): lower'
        ' max_input_len, max_decode_len or gamma.'
      )
