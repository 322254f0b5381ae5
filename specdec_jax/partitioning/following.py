"""A language model whose caches and logits are split like its parameters."""

import dataclasses
from typing import Any

import jax
from jax import lax

from specdec_jax.models import backend
from specdec_jax.models.base import Around
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.partitioning.axes import CACHE
from specdec_jax.partitioning.partition import Partition, described


def follow(network: Any, partition: Partition | None) -> Any:
  """Returns the network with its caches split like its parameters.

  Args:
    network: a `LanguageModel`.
    partition: the partition; None is one device, and returns the network
      itself.

  Raises:
    ValueError: the network cannot be split in this way.
  """
  if partition is None:
    return network
  partition.check(network)
  return Following(network, partition)


@dataclasses.dataclass(frozen=True)
class Following(Around):
  """A `LanguageModel`, see `models.base`, that tells XLA where its arrays are.

  XLA would find most of these places by itself, but might choose others when
  the code around a call changes. Here caches are always split by heads and
  rows, so that a round never moves them, and logits are gathered whole on each
  device, in one exchange per call. Each device then verifies and samples by
  itself. Over a split vocabulary each reduction of verification and sampling
  would be an exchange, and sums would round differently.
  """

  partition: Partition

  @property
  def vocab_size(self) -> int:
    return self.network.vocab_size

  @property
  def config(self) -> Any:
    return self.network.config

  def logits(self, *args, **options):
    return self.network.logits(*args, **options)

  def encode(self, params, inputs):
    return self.network.encode(params, inputs)

  def prefill(self, params, inputs, max_length, longest=None, encoded=None):
    more = {} if encoded is None else {'encoded': encoded}
    cache = self.network.prefill(params, inputs, max_length, longest, **more)
    return self._held(cache)

  def extend(self, params, cache, tokens, tree=None):
    with backend.split():
      logits, cache = self.network.extend(params, cache, tokens, tree)
    return self._gathered(logits), self._held(cache)

  def extend_features(self, params, cache, tokens, tree=None):
    with backend.split():
      features, cache = self.network.extend_features(
        params, cache, tokens, tree
      )
    return self._at(features, ('batch', None, 'embed')), self._held(cache)

  def features(self, *args):
    return self.network.features(*args)

  def embed(self, params, tokens):
    with backend.split():
      return self.network.embed(params, tokens)

  def head(self, params, features):
    with backend.split():
      return self._gathered(self.network.head(params, features))

  def rewind(self, cache, length):
    return self.network.rewind(cache, length)

  def keep(self, cache, length, slots):
    with backend.split():
      cache = self.network.keep(cache, length, slots)
    return self._held(cache)

  def cache_shapes(self, cache: Any) -> Any:
    """`ShapeDtypeStruct`s of a cache (or of its shapes), with shardings."""
    return self._with_fields(cache, described)

  def _gathered(self, logits):
    # First split, and only then whole: if it were asked for whole rows at once,
    # XLA would gather the output layer's kernel instead.
    logits = self._at(logits, ('batch', None, 'vocab'))
    return self._at(logits, ('batch', None, None))

  def _held(self, cache):
    if not isinstance(cache, KVCache):
      return cache
    return self._with_fields(cache, lax.with_sharding_constraint)

  def _at(self, array, axes):
    return lax.with_sharding_constraint(array, self._sharding(array, axes))

  def _sharding(self, array, axes):
    # A mask without relative bias is one row for all heads.
    one_row = axes[0] == 'heads' and array.shape[0] == 1
    return self.partition.sharding(*(() if one_row else axes))

  def _with_fields(self, cache, function):
    """Applies a function to each array and its sharding; keeps the tree."""
    fields = {
      name: jax.tree.map(
        lambda x, axes=axes: function(x, self._sharding(x, axes)),
        getattr(cache, name),
      )
      for name, axes in CACHE.items()
    }
    return dataclasses.replace(cache, **fields)
