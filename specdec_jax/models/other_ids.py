"""Drafters whose logits are adapted to a target's ids, or to a shortlist.

**Padding.** Checkpoints of one tokenizer have output layers with different
padding: T5's have 32,128 rows, some fine-tunes 32,100; Gemma 3 has 262,144 or
262,208. The target is never cut: its padded ids carry probability, and outputs
must have its distribution. So the drafter adapts (`Fitted`). It never proposes
an id that the target lacks. An id that the drafter lacks has probability 0 in
its distribution, and can only come from the residual distribution.

**A shortlist.** The output layer is the largest product of a small network: it
has 43 % of the weights that a T5 1.1 small reads for a token, and 85 % of an
mT5 small's. But nearly all tokens of texts of one language and kind are among a
few thousand ids. A drafter may leave out all others (`Shortlisted`), which it
then never proposes. Zhao et al., FR-Spec, 2025, do so with the most frequent
ids; in machine translation such a list is called a shortlist.
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

# Keys in the parameters of a `Shortlisted`; those of the wrapped network are
# under 'network'.
_HEAD = 'head'  # the modules of the shortened output layer
_PLACE = 'place'  # int32[V], row of each id in `_HEAD`; K if it has none


def unfitted(network: Any) -> Any:
  """Returns the network without a `Fitted` around it."""
  return network.network if isinstance(network, Fitted) else network


@dataclasses.dataclass(frozen=True)
class Fitted(NetworkWrapper):
  """A `LanguageModel` with another number of logits than the wrapped network.

  Attributes:
    network: the wrapped network, of V ids.
    vocab_size: W, number of logits. If W > V, the logits after the network's V
      are -inf; if W < V, the network's last logits are dropped.
  """

  vocab_size: int

  def head(self, params, features):
    logits = self.network.head(params, features)
    more = max(0, self.vocab_size - self.network.vocab_size)
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, more)]
    padded = jnp.pad(logits, widths, constant_values=-jnp.inf)
    return padded[..., : self.vocab_size]

  def _tokens(self, tokens):
    # An id without an embedding would become NaN. A drafter may read another id
    # in its place, which only affects what it proposes.
    return jnp.minimum(tokens, self.network.vocab_size - 1)


@dataclasses.dataclass(frozen=True)
class Shortlisted(NetworkWrapper):
  """A `LanguageModel` whose output layer has only the ids of a shortlist.

  Attributes:
    network: the wrapped network of this library, of V ids.
    num_ids: K, number of ids in the shortlist. There are V logits; those of
      other ids are `layers.MASKED`.
  """

  network: Transformer
  num_ids: int

  @property
  def vocab_size(self) -> int:
    return self.network.vocab_size

  def init(self, key: jax.Array) -> Params:
    """Returns random parameters with a shortlist of the first K ids."""
    return cut(self.network.init(key), np.arange(self.num_ids), self.vocab_size)

  def param_shapes(self) -> Params:
    """Returns names, shapes and dtypes of the parameters that `init` makes."""
    return jax.eval_shape(self.init, jax.random.key(0))

  def _params(self, params):
    return params['network']

  def head(self, params, features):
    shape = self.network.shape
    tokens = dataclasses.replace(shape.tokens, vocab_size=self.num_ids)
    small: Any = Network(dataclasses.replace(shape, tokens=tokens))
    logits = small.apply({'params': params[_HEAD]}, features, method='head')
    # MASKED gives probability 0 but is finite. So a distribution remains even
    # if rules forbid all ids of the shortlist, such as ends of sequence before
    # a minimal length.
    one_more = [(0, 0)] * (logits.ndim - 1) + [(0, 1)]
    logits = jnp.pad(logits, one_more, constant_values=layers.MASKED)
    wide = jnp.take(logits, params[_PLACE], axis=-1, mode='clip')
    # Without the barrier XLA would repeat the look-up of V logits for each use
    # of them.
    return lax.optimization_barrier(wide)


def shortlisted(network: Any, ids: Sequence[int]) -> Shortlisted:
  """Wraps a network with a shortlist; `cut` makes its parameters.

  Args:
    network: a network of this library.
    ids: the ids of the shortlist, in any order.

  Raises:
    ValueError: the network is not one of this library, or `ids` is empty or has
      an id that is not below V.
  """
  if not isinstance(network, Transformer):
    expected = 'one of this library, whose output layer is known'
    raise unexpected('network of a shortlist', expected, type(network).__name__)
  check_type('shortlist', ids, Sequence[int])
  distinct = sorted({int(token) for token in ids})
  if not distinct or distinct[0] < 0 or distinct[-1] >= network.vocab_size:
    expected = f'one or more ids below {network.vocab_size}'
    raise unexpected('shortlist', expected, distinct)
  return Shortlisted(network, len(distinct))


def cut(params: Params, ids: Any, vocab_size: int) -> Params:
  """Makes the parameters of a `Shortlisted` from those of its network.

  Args:
    params: the network's parameters as in a checkpoint.
    ids: int[K], the ids of the shortlist, in any order.
    vocab_size: V, number of the network's ids.
  """
  ids = np.unique(np.asarray(ids))
  flat = flatten_dict(params)
  head = _decoders(flat, 'logits_dense')
  rest = {path: array for path, array in flat.items() if path not in head}
  # Otherwise the output layer is the embedding, of which the network keeps a
  # whole copy to read tokens.
  head = head or _decoders(flat, 'token_embedder')
  head = head | _decoders(flat, 'logits_bias')
  # V is the last axis of kernels and biases, and the first of embeddings and of
  # the scales of integer kernels.
  last = (integers.KERNEL, 'logits_bias')
  shortened = {
    path: array[:, ids] if path[-1] in last else array[ids]
    for path, array in head.items()
  }
  place = np.full(vocab_size, len(ids), np.int32)
  place[ids] = np.arange(len(ids))
  parts = {'network': unflatten_dict(rest), _HEAD: unflatten_dict(shortened)}
  return parts | {_PLACE: place}


def _decoders(flat: Mapping[tuple[str, ...], Any], module: str) -> Any:
  """Returns the arrays of the modules of this name outside the encoder."""
  return {
    path: array
    for path, array in flat.items()
    if module in path and path[0] != 'encoder'
  }
