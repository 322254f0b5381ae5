"""A network with its parameters; engines are made from these."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specdec_jax.checks.fields import unexpected
from specdec_jax.models.base import LanguageModel, Params, param_shapes
from specdec_jax.models.other_ids import Fitted, cut, shortlisted, unfitted


class Model:
  """A network, its parameters, and what is known about its text.

  `specdec_jax.load` makes a `Model` from a checkpoint. The arrays are found and
  checked then, but read only when they are needed: an engine reads them
  straight to their places on the devices, and keeps no second copy.

  Attributes:
    network: a `LanguageModel`, such as `T5(config)`.
    tokenizer: the model's own tokenizer; None if it is unknown.
    name: where the model came from.
    dtype: dtype of the parameters on the device, if one was asked for; None
      leaves it to the engine's `Placement`.
    bos_id: id that texts that are read begin with; None is that of the family
      and the vocabulary, see `Engine`.
    stop_ids: ids that end an output, as the checkpoint says; () if it does not
      say.
    made_of: returns the `disk_arrays.fingerprint`s of the parameters before
      their kernels are rounded to eight bits, () if none is known; None if the
      parameters were given.
    made_for: of a drafter that reads the target's encoder, the fingerprint of
      the target that it was made for, as the checkpoint says; '' is unknown.
    unfollowed: a sentence on what the folder asks of transformers' `generate`
      and does not get here; '' for nothing.
  """

  def __init__(
    self,
    network: LanguageModel,
    params: Params | None = None,
    tokenizer: Any = None,
    *,
    name: str = '',
    dtype: str | None = None,
    bos_id: int | None = None,
    stop_ids: Sequence[int] = (),
    made_for: str = '',
    made_of: Callable[[], tuple[str, ...]] | None = None,
    unfollowed: str = '',
    reader: Callable[[Any, Any], Params] | None = None,
  ):
    """Stores its arguments, see the class; an engine checks them.

    `params` is a nested dict of arrays, as a checkpoint has them or placed; in
    its place `reader`, `(dtype, sharding) -> params`, reads them
    (`checkpoints.load`).
    """
    self.network = network
    self.tokenizer = tokenizer
    self.name = name
    self.dtype = dtype
    self.bos_id = bos_id
    self.stop_ids = tuple(stop_ids)
    self.made_for = made_for
    self.made_of = made_of
    self.unfollowed = unfollowed
    self._params = params
    self._reader = reader

  def __repr__(self) -> str:
    name = f', {self.name!r}' if self.name else ''
    return f'Model({type(self.network).__name__}{name})'

  @property
  def params(self) -> Params:
    """The parameters that were given; else they are read once, to the host.

    Raises:
      ValueError: as for `read`.
    """
    if self._params is None:
      self._params = self.read(self.dtype)
    return self._params

  def read(self, dtype: Any = None, sharding: Any = None) -> Params:
    """The parameters that are there; else reads them without keeping them.

    Args:
      dtype: dtype to read the parameters in; None keeps the checkpoint's.
      sharding: where to put the parameters that are read, see
        `checkpoints.load`.

    Raises:
      ValueError: there are no parameters, or the checkpoint is broken.
    """
    if self._params is not None:
      return self._params
    if self._reader is None:
      expected = 'Model(network, params), or a model from specdec_jax.load'
      raise unexpected('model with parameters', expected, self)
    return self._reader(dtype, sharding)

  @property
  def is_read(self) -> bool:
    """Whether the parameters are in memory."""
    return self._params is not None

  @property
  def num_params(self) -> int:
    """How many numbers the parameters have; reads nothing."""
    params = self._params
    if params is None:
      params = param_shapes(self.network)
    return sum(leaf.size for leaf in jax.tree.leaves(params))

  def without_params(self) -> 'Model':
    """The same model without its parameters, to remember what it was."""
    return self._with(self.network, None, None)

  def with_vocabulary(self, vocab_size: int) -> 'Model':
    """The same model for a target of `vocab_size` ids, see `models.other_ids`.

    For a drafter that shares the target's tokenizer but not its padding.
    """
    if vocab_size == self.network.vocab_size:
      return self
    fitted: Any = Fitted(unfitted(self.network), vocab_size)
    return self._with(fitted, self._params, self._reader)

  def with_shortlist(self, ids: Sequence[int]) -> 'Model':
    """The same model with an output layer of some ids, as a drafter.

    Others are never proposed, see `models.other_ids`; the output of a target
    that it drafts for has the same distribution all the same.

    Args:
      ids: ids to keep, in any order, such as those of texts like the outputs.

    Raises:
      ValueError: there is no id, or one that the model does not have; or its
        network is not of this library.
    """
    network: Any = unfitted(self.network)
    made: Any = shortlisted(network, ids)
    given, reader = self._params, self._reader

    def read(dtype: Any, sharding: Any) -> Params:
      assert reader is not None
      return cut(reader(dtype, sharding), ids, network.vocab_size)

    if given is not None:
      given = cut(given, ids, network.vocab_size)
    return self._with(made, given, reader and read)

  def _with(self, network: LanguageModel, params: Any, reader: Any) -> 'Model':
    made = copy.copy(self)
    made.network, made._params, made._reader = network, params, reader
    if reader is None:
      made.made_of = None
    return made
