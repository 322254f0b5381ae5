"""A T5 that decodes as T5X does, for comparison only.

At every step T5X multiplies a one-hot row by the whole embedding table, writes
the cache by rewriting all of it with a one-hot mask, and attends over all of
it. The logits are the same as here; the time is not. A speed-up against T5X's
style includes the cost of these, besides the gain from speculation.
"""

import jax
import jax.numpy as jnp

from specdec_jax.models import backend, kv_cache, t5


def one_hot_write(
  buffer: jax.Array, new: jax.Array, start: jax.Array
) -> jax.Array:
  """`kv_cache.write`, done by rewriting the whole buffer."""
  slots = buffer.shape[-1]
  places = start[:, None] + jnp.arange(new.shape[1])
  chosen = jax.nn.one_hot(places, slots, dtype=buffer.dtype)  # [B, S, T]
  spread = jnp.einsum('bshd,bst->bhdt', new.astype(buffer.dtype), chosen)
  written = jnp.any(chosen > 0, axis=1)[:, None, None, :]
  return jnp.where(written, spread, buffer)


class _Module(t5.EncoderDecoder):
  """The network with T5X's way of embedding tokens and writing the cache."""

  def prefill(self, inputs, max_length, encoded=None):
    return kv_cache.apart(super().prefill(inputs, max_length, encoded))

  def extend_features(self, cache, tokens, tree=None):
    table = self.token_embedder.embedding.astype(self.config.dtype)
    rows = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype)
    exact = backend.precision(self.config.dtype)
    embedded = jnp.matmul(rows, table, precision=exact)
    return self.decoder.extend(embedded, cache, one_hot_write, tree)


class T5XStyle(t5.T5):
  """A slower `T5` with the same parameters."""

  @property
  def _module(self) -> _Module:
    return _Module(self.config)
