"""A network with its parameters; engines are made from these."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from specdec_jax.checks.fields import unexpected
from specdec_jax.models.base import (
  LanguageModel,
  NetworkWrapper,
  Params,
  param_shapes,
)
from specdec_jax.models.other_ids import Fitted, cut, shortlisted, unfitted


@dataclasses.dataclass(eq=False, repr=False)
class Model:
  """A network, its parameters, and facts about its texts.

  `specdec_jax.load` makes a `Model` from a checkpoint. It finds and checks the
  arrays. An engine reads them later, straight to the devices, and keeps no
  second copy.

  Attributes:
    network: a `LanguageModel`, such as `T5(config)`.
    given: parameters that are in memory already, a nested dict of arrays, laid
      out as in a checkpoint or by `partitioning.place`; None: they have not
      been read yet.
    tokenizer: the model's vocabulary; None if it is unknown.
    name: the path or id of the checkpoint.
    dtype: dtype of the parameters on the device; None leaves it to the engine's
      `Placement`.
    bos_id: id at the beginning of every text; None: the network's family and
      the vocabulary decide, see `Engine`.
    stop_ids: ids that end an output, as named in the checkpoint; may be ().
    made_for: for a drafter that reads its target's encoder, the fingerprint of
      that target, as stored in the checkpoint; '' if unknown.
    made_of: function that returns fingerprints of the parameters from before
      their kernels were rounded to eight bits (see `disk_arrays.fingerprint`),
      () if unknown; None if the parameters were given.
    rules: token rules in the folder's settings for transformers' `generate`;
      options of a call override them.
    unfollowed: a sentence on the other settings for `generate` in the folder,
      which are not followed; '' if there are none.
    reader: function `(dtype, sharding) -> params` that reads the parameters,
      see `checkpoints.load`; None if they were given.

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
  tokenizer: Any = None  # a `text.tokenizer.Vocabulary`
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

  def __post_init__(self):
    if not isinstance(self.network, LanguageModel | NetworkWrapper):
      expected = 'a LanguageModel, of which your own network is a subclass'
      raise unexpected('network', expected, self.network)

  def __repr__(self) -> str:
    name = f', {self.name!r}' if self.name else ''
    return f'Model({type(self.network).__name__}{name})'

  @property
  def params(self) -> Params:
    """The parameters; if they were not given, they are read once, on the host.

    Raises:
      ValueError: as for `read`.
    """
    if self.given is None:
      self.given = self.read(self.dtype)
    return self.given

  def read(self, dtype: Any = None, sharding: Any = None) -> Params:
    """Returns the parameters that were given, or reads them.

    Args:
      dtype: dtype of parameters that are read; None keeps the checkpoint's.
      sharding: devices of parameters that are read, see `checkpoints.load`.

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
    """Number of weights in all parameters, found without reading them."""
    given = self.given
    params = param_shapes(self.network) if given is None else given
    return sum(leaf.size for leaf in jax.tree.leaves(params))

  def without_params(self) -> 'Model':
    """Returns the model without its parameters."""
    return dataclasses.replace(self, given=None, reader=None, made_of=None)

  def with_vocabulary(self, vocab_size: int) -> 'Model':
    """Returns the model as a drafter for a target of `vocab_size` ids.

    Both models have the same tokenizer, but their output layers may be padded
    to different numbers of ids, see `models.other_ids`.
    """
    if vocab_size == self.network.vocab_size:
      return self
    network = Fitted(unfitted(self.network), vocab_size)
    return dataclasses.replace(self, network=network)

  def with_shortlist(self, ids: Sequence[int]) -> 'Model':
    """Returns the model as a drafter whose output layer has only some ids.

    The drafter never proposes other ids, see `models.other_ids`. The
    distribution of the target's outputs does not change.

    Args:
      ids: ids to keep, in any order, such as those in texts that are like the
        expected outputs.

    Raises:
      ValueError: `ids` is empty, or has an id that the model lacks; or the
        network is not a class of this library.
    """
    given, reader = self.given, self.reader
    network = shortlisted(unfitted(self.network), ids)

    def read(dtype: Any, sharding: Any) -> Params:
      assert reader is not None
      return cut(reader(dtype, sharding), ids, network.vocab_size)

    if given is not None:
      given = cut(given, ids, network.vocab_size)
    return dataclasses.replace(
      self, network=network, given=given, reader=reader and read
    )
