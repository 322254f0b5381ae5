"""A network with its parameters, and whether a target and its drafter fit."""

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any

from specdec_jax import checkpoints, partitioning
from specdec_jax.models.base import LanguageModel
from specdec_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
  """A network and its parameters.

  Attributes:
    network: a `LanguageModel`, such as `T5(config)`; None for a drafter that
      is none.
    params: its parameters, as a checkpoint has them or already placed.
    tokenizer: the model's own, to check a pair by; None takes it on trust.
  """

  network: Any
  params: Any
  tokenizer: Tokenizer | None = None


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
    placement: that the engine will have. Where it has several devices, each
      array goes straight to its shards; else `Engine` moves it.

  Raises:
    ValueError: the checkpoint is missing or broken, or an array is missing,
      unknown or of another shape, or cannot be split as the placement says.
  """
  partition = None if placement is None else placement.partition()
  if placement is None or partition is None:
    return Model(network, checkpoints.load(path, network), tokenizer)
  partition.check(network)
  params = checkpoints.load(
    path, network, dtype=placement.dtype, sharding=partition.parameter
  )
  return Model(network, params, tokenizer)


def joined(models: Sequence[Model]) -> Model:
  """What a drafter that is made of several takes: the parameters of each.

  For `cascade` and `first_of`, whose own code says which network is whose.
  """
  return Model(None, tuple(model.params for model in models))


def check_pair(
  target: Model, draft: Model | None, tokenizer: Tokenizer
) -> None:
  """Raises ValueError unless both models speak the tokenizer's ids.

  Warns of a drafter that does not see what the target reads.
  """
  sides = (
    {'target': target} if draft is None else {'target': target, 'draft': draft}
  )
  for name, side in sides.items():
    if side.network is None:
      continue  # a drafter that is no language model
    if side.network.vocab_size < tokenizer.vocab_size:
      raise ValueError(
        f'The {name} has a vocabulary of {side.network.vocab_size}, the'
        f' tokenizer one of {tokenizer.vocab_size}; they do not belong'
        ' together.'
      )
    own = side.tokenizer
    if own is not None and own.fingerprint != tokenizer.fingerprint:
      raise ValueError(
        f"The {name}'s tokenizer {own.path!r} differs from {tokenizer.path!r}"
        ' (sha256 of the model files). Drafter and target must share one: an'
        ' id has to mean the same token to both.'
      )
  if draft is None or draft.network is None:
    return
  if draft.network.vocab_size != target.network.vocab_size:
    raise ValueError(
      f"The draft's vocabulary is {draft.network.vocab_size} and the target's"
      f' {target.network.vocab_size}. Both must be the same; pad the smaller'
      " embedding to the larger one's rows."
    )
  if target.network.has_encoder and not draft.network.has_encoder:
    warnings.warn(
      'The draft is decoder-only and the target has an encoder: the drafter'
      ' sees the output so far and nothing of the input. Outputs are right all'
      ' the same.',
      stacklevel=3,
    )
