"""Networks of drafters whose logits are of other ids than their own.

**Padding.** Heads of one tokenizer are padded differently: T5's checkpoints
have 32,128 rows and some that were trained further 32,100, Gemma 3 has 262,144
or 262,208. The target is never cut: its padded ids carry probability, and its
distribution is what comes out. So the drafter gives way (`Fitted`). An id that
the target lacks is not proposed; one that the drafter lacks has probability 0,
and comes from the residual distribution.

**A shortlist.** The output layer is the largest product of a small network,
43 % of the weights that a T5 1.1 small reads for a token and 85 % of an mT5
small's, and nearly all tokens of one language and kind of text are of a few
thousand ids. A drafter may leave out the others (`Shortlisted`): they are never
proposed. Zhao et al., FR-Spec, 2025, do so with the most frequent ids; in
machine translation such a list is a shortlist.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from specdec_jax.checks.fields import check_type, unexpected
from specdec_jax.models import integers, layers
from specdec_jax.models.base import NetworkWrapper, Params
from specdec_jax.models.transformer import Network, Transformer

# Parts of the parameters; the network's own lie under 'network'.
_HEAD = 'head'  # the modules that the output layer reads, cut
_PLACE = 'place'  # int32[V], where the cut layer has an id; K if it has not


def unfitted(network: Any) -> Any:
  """A network with its own ids."""
  return network.network if isinstance(network, Fitted) else network


def own_vocab_size(network: Any) -> int:
  """Ids that a network has by itself."""
  return int(unfitted(network).vocab_size)


@dataclasses.dataclass(frozen=True)
class Fitted(NetworkWrapper):
  """A `LanguageModel`, see `models.base`, whose logits are of other ids.

  Attributes:
    network: the network as it is, of V ids.
    vocab_size: W, ids of the logits: the first V of them are the network's, the
      others are masked with -inf.
  """

  vocab_size: int

  def prefill(self, params, inputs, max_length, longest=None, **encoded):
    inputs = self._known(inputs)
    return self.network.prefill(params, inputs, max_length, longest, **encoded)

  def extend(self, params, cache, tokens, tree=None):
    return self.network.extend(params, cache, self._known(tokens), tree)

  def embed(self, params, tokens):
    return self.network.embed(params, self._known(tokens))

  def head(self, params, features):
    logits = self.network.head(params, features)
    more = max(0, self.vocab_size - self.network.vocab_size)
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, more)]
    padded = jnp.pad(logits, widths, constant_values=-jnp.inf)
    return padded[..., : self.vocab_size]

  def _known(self, tokens):
    # Any id will do for one that it has no embedding of; without one, the
    # embedding and all that follows would be NaN.
    return jnp.minimum(tokens, self.network.vocab_size - 1)


@dataclasses.dataclass(frozen=True)
class Shortlisted(NetworkWrapper):
  """A `LanguageModel`, see `models.base`, that gives logits of some ids.

  Attributes:
    network: the network as it is, of V ids, one of this library's.
    num_ids: K, ids that its output layer keeps. The logits are of all V; those
      of the others are `layers.MASKED`.
  """

  network: Transformer
  num_ids: int

  @property
  def vocab_size(self) -> int:
    return self.network.vocab_size

  def init(self, key: jax.Array) -> Params:
    """Random parameters that keep the first K ids."""
    return cut(self.network.init(key), np.arange(self.num_ids), self.vocab_size)

  def param_shapes(self) -> Params:
    """As `models.base.param_shapes`."""
    return jax.eval_shape(self.init, jax.random.key(0))

  def prefill(self, params, inputs, max_length, longest=None, **encoded):
    own = params['network']
    return self.network.prefill(own, inputs, max_length, longest, **encoded)

  def extend(self, params, cache, tokens, tree=None):
    return self.network.extend(params['network'], cache, tokens, tree)

  def embed(self, params, tokens):
    return self.network.embed(params['network'], tokens)

  def head(self, params, features):
    shape = self.network.shape
    tokens = dataclasses.replace(shape.tokens, vocab_size=self.num_ids)
    small: Any = Network(dataclasses.replace(shape, tokens=tokens))
    logits = small.apply({'params': params[_HEAD]}, features, method='head')
    # Finite, but of probability 0: where nothing else is allowed, as where all
    # of its ids are ends that come too early, there still is a distribution.
    none = [(0, 0)] * (logits.ndim - 1) + [(0, 1)]
    logits = jnp.pad(logits, none, constant_values=layers.MASKED)
    wide = jnp.take(logits, params[_PLACE], axis=-1, mode='clip')
    # Else XLA looks each of the V up anew for whatever reads it, one by one.
    return lax.optimization_barrier(wide)


def shortlisted(network: Any, ids: Sequence[int]) -> Shortlisted:
  """The network with these ids alone; see `cut` for its parameters.

  Args:
    network: one of this library's.
    ids: ids to keep, in any order.

  Raises:
    ValueError: the network is another one, or there is no id, or one is not
      below V.
  """
  if not isinstance(network, Transformer):
    expected = 'one of this library, whose output layer is known'
    raise unexpected('network of a shortlist', expected, type(network).__name__)
  check_type('shortlist', ids, Sequence[int])
  known = sorted({int(one) for one in ids})
  if not known or known[0] < 0 or known[-1] >= network.vocab_size:
    expected = f'one or more ids below {network.vocab_size}'
    raise unexpected('shortlist', expected, known)
  return Shortlisted(network, len(known))


def cut(params: Params, ids: Any, vocab_size: int) -> Params:
  """The parameters of a `Shortlisted`, from those of its network.

  Args:
    params: as a checkpoint has them.
    ids: int[K], the ids to keep, in any order.
    vocab_size: V.
  """
  ids = np.unique(np.asarray(ids))
  flat = flatten_dict(params)
  head = _decoders(flat, 'logits_dense')
  rest = {path: array for path, array in flat.items() if path not in head}
  # Else the output layer is the embedding, which stays whole beside it.
  head = head or _decoders(flat, 'token_embedder')
  # A kernel is [M, V]; an embedding, and factors of integers, begin with V.
  kept = {
    path: array[:, ids] if path[-1] == integers.KERNEL else array[ids]
    for path, array in head.items()
  }
  place = np.full(vocab_size, len(ids), np.int32)
  place[ids] = np.arange(len(ids))
  parts = {'network': unflatten_dict(rest), _HEAD: unflatten_dict(kept)}
  return parts | {_PLACE: place}


def _decoders(flat: Mapping[tuple[str, ...], Any], module: str) -> Any:
  """The arrays of a module, which are not those of an encoder's."""
  return {
    path: array
    for path, array in flat.items()
    if module in path and path[0] != 'encoder'
  }
