"""A network with its parameters, and whether a target and its drafter fit."""

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import checkpoints, partitioning
from specdec_jax.checks import memory
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.ngram_table import NGramTable, check_vocabulary
from specdec_jax.models import sizes
from specdec_jax.models.base import START_ID, LanguageModel
from specdec_jax.text.tokenizer import Tokenizer

# 100 sentinels, and padding to a multiple of 1,024.
_MOST_MORE_IDS = 100 + 1023


@dataclasses.dataclass(frozen=True)
class Model:
  """A network and its parameters.

  Attributes:
    network: a `LanguageModel`, such as `T5(config)`; None for a drafter that
      is no network.
    params: its parameters, as a checkpoint has them or already placed.
    tokenizer: the model's own, to check a pair by; None takes it on trust.
    parts: of a drafter that is made of several, see `joined`.
  """

  network: Any
  params: Any
  tokenizer: Tokenizer | None = None
  parts: tuple['Model', ...] = ()


def load_model(
  network: LanguageModel,
  path: str | os.PathLike[str],
  tokenizer: Tokenizer | None = None,
  placement: partitioning.Placement | None = None,
) -> Model:
  """Loads a checkpoint and checks it against its network.

  Args:
    network: such as `T5(config)`.
    path: of a checkpoint, of any kind that `checkpoints.load` knows.
    tokenizer: the model's own, to check a pair by.
    placement: that the engine will have, and its dtype. Where it has several
      devices, each array goes straight to its shards; else `Engine` moves it.

  Raises:
    ValueError: the checkpoint is missing or broken, or an array is missing,
      unknown or of another shape, or cannot be split as the placement says.
  """
  checkpoints.check_network(network)
  how: dict[str, Any] = {}
  if placement is not None:
    sharding = placement.shardings_of(network)
    how = {'dtype': placement.dtype, 'sharding': sharding}
  return Model(network, checkpoints.load(path, network, **how), tokenizer)


def joined(models: Sequence[Model]) -> Model:
  """What a drafter that is made of several takes: the parameters of each.

  For `cascade` and `first_of`, whose own code says which network is whose.
  """
  params = tuple(model.params for model in models)
  return Model(None, params, parts=tuple(models))


class Room:
  """Whether what a pair holds in a run fits beside its parameters.

  Counts the least that is needed: what is refused could not have run, but what
  passes may still be too much for the device.
  """

  def __init__(
    self, models: Sequence[Model], param_dtype: str, there: int | None
  ):
    """
    Args:
      models: the target, and the drafter's if it has one.
      param_dtype: of the parameters on the devices.
      there: bytes of all devices that they are on; None is not known.
    """
    every = [*models]
    for model in every:
      every += model.parts
    found = [getattr(model.network, 'config', None) for model in every]
    self._configs = [config for config in found if sizes.is_known(config)]
    leaves = jax.tree.leaves([model.params for model in models])
    itemsize = jnp.dtype(param_dtype).itemsize
    self._params = sum(np.size(leaf) for leaf in leaves) * itemsize
    self._there = there

  def check(
    self, batch: int, input_len: int, num_slots: int, gamma: int
  ) -> None:
    """Checks a run before anything of it is made.

    Args:
      batch: B.
      input_len: E.
      num_slots: T, of the caches.
      gamma: proposals a round; 0 is plain.

    Raises:
      memory.DoesNotFitError: no memory could hold it; says what of.
    """
    needed = sum(
      sizes.run_bytes(config, batch, input_len, num_slots, gamma + 1)
      for config in self._configs
    )
    memory.check_room(
      f'{batch} rows of {num_slots} slots (prompt, output and draft) and inputs'
      f' of {input_len} tokens, beside {memory.gib(self._params)} of'
      ' parameters',
      needed + self._params,
      self._there,
      'Take a smaller batch, shorter inputs or outputs (max_decode_len; gin:'
      ' TASK_FEATURE_LENGTHS), or a smaller gamma.',
    )


def check_drafter(draft: Model | None, drafter: Drafter | None) -> None:
  """Raises ValueError unless a drafter and its parameters come together."""
  if draft is None and drafter is not None:
    raise ValueError(
      f'The drafter {drafter.name!r} came without `draft`, which holds its'
      ' parameters. One that has none, such as copy, takes'
      ' draft=Model(None, ()).'
    )
  if draft is not None and draft.network is None and drafter is None:
    raise ValueError(
      '`draft` has no network, so `drafter` must say what proposes, such as'
      ' copy() or ngram(vocab_size).'
    )


def check_pair(
  target: Model, draft: Model | None, tokenizer: Tokenizer
) -> None:
  """Raises ValueError unless both models speak the tokenizer's ids.

  Warns of a drafter that does not see what the target reads.
  """
  for part in () if draft is None else draft.parts:
    check_pair(target, part, tokenizer)
  proposes = None if draft is None else draft.network
  if proposes is not None and proposes.vocab_size != target.network.vocab_size:
    raise ValueError(
      f"The draft's vocabulary is {proposes.vocab_size} and the target's"
      f' {target.network.vocab_size}. Both must be the same; pad the smaller'
      " embedding to the larger one's rows."
    )
  sides = (
    {'target': target} if draft is None else {'target': target, 'draft': draft}
  )
  for name, side in sides.items():
    if isinstance(side.params, NGramTable):
      check_vocabulary(f'of the {name}', side.params, tokenizer)
    own = side.tokenizer
    if own is not None and own.fingerprint != tokenizer.fingerprint:
      raise ValueError(
        f"The {name}'s tokenizer {own.path!r} differs from {tokenizer.path!r}"
        ' (their fingerprints do). Drafter and target must share one: an'
        ' id has to mean the same token to both.'
      )
    if side.network is None:
      continue  # a drafter that is no language model
    check_vocabulary_size(name, side.network.vocab_size, tokenizer)
  if proposes is None:
    return
  if proposes.has_encoder and not target.network.has_encoder:
    raise ValueError(
      'The draft has an encoder and the target has none: there is no input that'
      ' it could read. Take a decoder-only drafter.'
    )
  if target.network.has_encoder and not proposes.has_encoder:
    warnings.warn(
      'The draft is decoder-only and the target has an encoder: the drafter'
      ' sees the output so far and nothing of the input. Outputs are right all'
      ' the same.',
      stacklevel=3,
    )


def check_vocabulary_size(name: str, size: int, tokenizer: Tokenizer) -> None:
  """Raises ValueError unless a network's ids can be those of a tokenizer.

  A network may have some more: T5 has 128 (100 sentinels, and padding), mT5
  112, MADLAD-400 512; others are padded to a multiple of up to 1,024.

  Args:
    name: of the network, for the message.
    size: ids that it has.
    tokenizer: its own, or that of another model.
  """
  more = size - tokenizer.vocab_size
  if 0 <= more <= _MOST_MORE_IDS:
    return
  raise ValueError(
    f'The {name} has a vocabulary of {size}, the tokenizer one of'
    f' {tokenizer.vocab_size}; they do not belong together. Expected are as'
    f' many ids as pieces, or up to {_MOST_MORE_IDS} more (sentinels, padding):'
    f' take the vocabulary that the {name} was trained with, or give the'
    ' network the sizes of its checkpoint.'
  )


def check_bos(bos_id: int | None, network: LanguageModel) -> None:
  """Raises ValueError where texts cannot begin with an id."""
  if bos_id is None:
    return
  if network.has_encoder:
    raise ValueError(
      f'bos_id is {bos_id!r}, but a target with an encoder begins with id'
      f' {START_ID} by itself; leave it out.'
    )
  if type(bos_id) is not int or not 0 <= bos_id < network.vocab_size:
    raise ValueError(
      f'bos_id must be None or an id below {network.vocab_size}, got'
      f' {bos_id!r}.'
    )
