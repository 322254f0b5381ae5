"""A network with its parameters; engines are made from these."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from specdec_jax.checks.fields import unexpected
from specdec_jax.models.base import LanguageModel, Params, param_shapes
from specdec_jax.models.other_ids import Fitted, cut, shortlisted, unfitted


@dataclasses.dataclass(eq=False, repr=False)
class Model:
  """A network, its parameters, and what is known about its text.

  `specdec_jax.load` makes a `Model` from a checkpoint. The arrays are found and
  checked then, but read only when they are needed: an engine reads them
  straight to their places on the devices, and keeps no second copy.

  Attributes:
    network: a `LanguageModel`, such as `T5(config)`.
    given: the parameters in memory, a nested dict of arrays, as a checkpoint
      has them or placed; None: they are still to be read.
    tokenizer: the model's own tokenizer; None if it is unknown.
    name: where the model came from.
    dtype: dtype of the parameters on the device, if one was asked for; None
      leaves it to the engine's `Placement`.
    bos_id: id that texts that are read begin with; None is that of the family
      and the vocabulary, see `Engine`.
    stop_ids: ids that end an output, as the checkpoint says; () if it does not
      say.
    made_for: of a drafter that reads the target's encoder, the fingerprint of
      the target that it was made for, as the checkpoint says; '' is unknown.
    made_of: returns the `disk_arrays.fingerprint`s of the parameters before
      their kernels are rounded to eight bits, () if none is known; None if the
      parameters were given.
    rules: on tokens, as the folder asks transformers' `generate` for: options
      of an engine's calls unless they give others.
    unfollowed: a sentence on what the folder asks of transformers' `generate`
      and does not get here; '' for nothing.
    reader: reads the parameters, `(dtype, sharding) -> params`, see
      `checkpoints.load`; None if they were given.

  Examples:
    >>> import jax
    >>> sizes = sd.GPTConfig(
    ...   vocab_size=100,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ... )
    >>> network = sd.GPT(sizes)
    >>> sd.Model(network, network.init(jax.random.key(0)), name='a toy')
    Model(GPT, 'a toy')
    >>> sd.Model(network).num_params
    9608
  """

  network: LanguageModel
  given: Params | None = None
  tokenizer: Any = None
  _: dataclasses.KW_ONLY
  name: str = ''
  dtype: str | None = None
  bos_id: int | None = None
  stop_ids: tuple[int, ...] = ()
  made_for: str = ''
  made_of: Callable[[], tuple[str, ...]] | None = None
  rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  unfollowed: str = ''
  reader: Callable[[Any, Any], Params] | None = None

  def __repr__(self) -> str:
    name = f', {self.name!r}' if self.name else ''
    return f'Model({type(self.network).__name__}{name})'

  @property
  def params(self) -> Params:
    """The parameters that were given; else they are read once, to the host.

    Raises:
      ValueError: as for `read`.
    """
    if self.given is None:
      self.given = self.read(self.dtype)
    return self.given

  def read(self, dtype: Any = None, sharding: Any = None) -> Params:
    """The parameters that are there; else reads them without keeping them.

    Args:
      dtype: dtype to read the parameters in; None keeps the checkpoint's.
      sharding: where to put the parameters that are read, see
        `checkpoints.load`.

    Raises:
      ValueError: there are no parameters, or the checkpoint is broken.
    """
    if self.given is not None:
      return self.given
    if self.reader is None:
      expected = 'Model(network, params), or a model from specdec_jax.load'
      raise unexpected('model with parameters', expected, self)
    return self.reader(dtype, sharding)

  @property
  def num_params(self) -> int:
    """How many numbers the parameters have; reads nothing."""
    params = self.given
    if params is None:
      params = param_shapes(self.network)
    return sum(leaf.size for leaf in jax.tree.leaves(params))

  def without_params(self) -> 'Model':
    """The same model without its parameters, to remember what it was."""
    return dataclasses.replace(self, given=None, reader=None, made_of=None)

  def with_vocabulary(self, vocab_size: int) -> 'Model':
    """The same model for a target of `vocab_size` ids, see `models.other_ids`.

    For a drafter that shares the target's tokenizer but not its padding.
    """
    if vocab_size == self.network.vocab_size:
      return self
    fitted: Any = Fitted(unfitted(self.network), vocab_size)
    return dataclasses.replace(self, network=fitted)

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
    given, reader = self.given, self.reader

    def read(dtype: Any, sharding: Any) -> Params:
      assert reader is not None
      return cut(reader(dtype, sharding), ids, network.vocab_size)

    if given is not None:
      given = cut(given, ids, network.vocab_size)
    return dataclasses.replace(
      self, network=made, given=given, reader=reader and read
    )
