"""A network with its parameters: what an engine is made of."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from specdec_jax.models.base import LanguageModel, Params, param_shapes


class Model:
  """A network, its parameters, and what is known of its text.

  `specdec_jax.load` makes one of a checkpoint. Its arrays are found and checked
  then, and read when somebody needs them: an engine reads them straight to
  where they shall lie, and keeps no second copy.

  Attributes:
    network: a `LanguageModel`, such as `T5(config)`.
    tokenizer: the model's own; None where nothing is known of it.
    name: where it came from.
    dtype: of parameters on the device, where one was asked for; None leaves it
      to the engine's `Placement`.
    bos_id: what texts of a decoder-only model begin with; None is nothing.
    stop_ids: ids that end an output, as the checkpoint says; () where it does
      not.
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
    reader: Callable[[Any, Any], Params] | None = None,
  ):
    """Keeps what it is given; an engine checks it.

    Args:
      network: as of the class, and so the others.
      params: a nested dict of arrays, as a checkpoint has them or placed.
      tokenizer: see the class.
      name: see the class.
      dtype: see the class.
      bos_id: see the class.
      stop_ids: see the class.
      reader: `(dtype, sharding) -> params`, in the place of `params`: reads
        them, see `checkpoints.load`.
    """
    self.network = network
    self.tokenizer = tokenizer
    self.name = name
    self.dtype = dtype
    self.bos_id = bos_id
    self.stop_ids = tuple(stop_ids)
    self._params = params
    self._reader = reader

  def __repr__(self) -> str:
    name = f', {self.name!r}' if self.name else ''
    return f'Model({type(self.network).__name__}{name})'

  @property
  def params(self) -> Params:
    """The parameters on the host, read once; or those that were given.

    Raises:
      ValueError: as `read`.
    """
    if self._params is None:
      self._params = self.read(self.dtype)
    return self._params

  def read(self, dtype: Any = None, sharding: Any = None) -> Params:
    """The parameters that are there, or as they are read now; not kept.

    Args:
      dtype: of what is read; None keeps the checkpoint's.
      sharding: where what is read shall lie, see `checkpoints.load`.

    Raises:
      ValueError: there are none, or the checkpoint is broken.
    """
    if self._params is not None:
      return self._params
    if self._reader is None:
      raise ValueError(
        f'{self!r} has no parameters. Expected Model(network, params), or what'
        ' specdec_jax.load gives.'
      )
    return self._reader(dtype, sharding)

  @property
  def num_params(self) -> int:
    """How many numbers the parameters are; nothing is read."""
    params = self._params
    if params is None:
      params = param_shapes(self.network)
    return sum(leaf.size for leaf in jax.tree.leaves(params))

  def without_params(self) -> 'Model':
    """The same to remember it by, without its parameters."""
    return Model(
      self.network,
      None,
      self.tokenizer,
      name=self.name,
      dtype=self.dtype,
      bos_id=self.bos_id,
      stop_ids=self.stop_ids,
    )
