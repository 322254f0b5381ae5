"""From paths to a pair that can be asked."""

import dataclasses
import os
import pathlib
from typing import Any

from specdec_jax import checkpoints
from specdec_jax.bench import memory
from specdec_jax.checkpoints import gpt2_names, huggingface_names
from specdec_jax.checkpoints.huggingface import GENERATION, special_ids
from specdec_jax.checkpoints.huggingface_arrays import CONFIG, read_json
from specdec_jax.checkpoints.load import (
  is_huggingface,
  load_huggingface,
  locate,
)
from specdec_jax.checkpoints.locations import Location
from specdec_jax.engine import Engine, Model
from specdec_jax.interactive.model import Interactive, Side
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.partitioning import Placement
from specdec_jax.tokenizer import Tokenizer
from specdec_jax.tokenizer_bpe import BpeTokenizer

Path = str | os.PathLike[str]

_SENTENCEPIECE = 'spiece.model'  # in the folders of all T5s


def load(
  target: Path,
  draft: Path | None = None,
  *,
  network: LanguageModel | None = None,
  draft_network: LanguageModel | None = None,
  tokenizer: Tokenizer | Path | None = None,
  dtype: str | None = None,
  placement: Placement | None = None,
  gamma: int = 4,
  max_input_len: int = 128,
  max_decode_len: int = 128,
) -> Interactive:
  """Loads a target, and a drafter for it, ready to be asked.

  Hugging Face folders, or their ids on the hub, tell their sizes and hold
  their vocabulary; other checkpoints need both:

    load('t5x/checkpoint_1000000', network=T5(T5Config(...)),
         tokenizer='vocab.model')

  All that can be wrong but the arrays themselves is found before they are
  read.

  Args:
    target: a checkpoint of any kind that `checkpoints.load` knows.
    draft: that of a small model which proposes; None for plain decoding.
    network: the target's; needed unless its folder describes itself, and
      compared with the checkpoint.
    draft_network: the drafter's, likewise.
    tokenizer: of both, or the path of a sentencepiece model; None is the one
      in the target's folder.
    dtype: of parameters and computation, 'float32' or 'bfloat16'. None is
      that of `network`, and float32 without it.
    placement: of the target over several devices, such as
      `Placement(model=0)` for all there are; its own dtype is not looked at.
      The drafter is whole on each. None is one device, whose memory is held
      against what is needed.
    gamma: proposals a round at most.
    max_input_len: tokens of the longest input, its end included.
    max_decode_len: tokens of the longest output, its end included.

  Raises:
    ValueError: a checkpoint, its sizes or its vocabulary is missing or does
      not fit; the two have different vocabularies; or the device's memory is
      too small (`bench.memory.DoesNotFitError`).
  """
  if draft is None and draft_network is not None:
    raise ValueError('draft_network was given without draft, its checkpoint.')
  if dtype is None:
    dtype = getattr(getattr(network, 'config', None), 'dtype', 'float32')
  # Of the hub: the drafter is quickly there, and what is wrong with it known.
  small = None
  if draft is not None:
    small = _Source.find('draft', draft, draft_network, dtype)
  large = _Source.find('target', target, network, dtype)
  if tokenizer is None:
    tokenizer = large.tokenizer
  elif not isinstance(tokenizer, Tokenizer):
    tokenizer = Tokenizer(tokenizer)
  if tokenizer is None:
    raise ValueError(
      f'There is no vocabulary ({_SENTENCEPIECE}) beside {str(target)!r}; give'
      ' it: tokenizer=, the path of a sentencepiece model.'
    )
  _check_vocabularies(large, small, tokenizer)
  _check_end(large, tokenizer)
  placement = dataclasses.replace(placement or Placement(), dtype=dtype)
  if placement.on_one_device:
    _check_memory(large, small, dtype, gamma, max_input_len, max_decode_len)
  draft_model = None if small is None else small.load(placement.replicated())
  target_model = large.load(placement)
  engine = Engine(
    target_model,
    draft_model,
    tokenizer=tokenizer,
    gamma=gamma,
    max_input_len=max_input_len,
    max_decode_len=max_decode_len,
    bos_id=None if target_model.network.has_encoder else tokenizer.eos_id,
    placement=placement,
  )
  sides = {'target': Side(large.path, target_model.network)}
  if small is not None and draft_model is not None:
    sides['draft'] = Side(small.path, draft_model.network)
  # An end of sequence that is not the tokenizer's only one.
  return Interactive(engine, sides, large.ends if large.ends[1:] else None)


@dataclasses.dataclass(frozen=True)
class _Source:
  """A checkpoint before it is read.

  Attributes:
    path: as it was given.
    location: where it is; local if it came from the hub.
    network: of what is there; a folder that describes itself does not say
      whether its output layer is the embedding, its arrays do.
    given: the network that was given, to compare with.
    tokenizer: that of its folder, if there is one.
    described: config.json of its folder, if there is one.
    ends: ids that end an output, as its folder says; none if it does not.
  """

  path: str
  location: Location
  network: LanguageModel
  given: LanguageModel | None
  tokenizer: Tokenizer | None
  described: dict[str, Any] | None = None
  ends: tuple[int, ...] = ()

  @classmethod
  def find(
    cls, side: str, path: Path, network: LanguageModel | None, dtype: str
  ) -> '_Source':
    name = os.fspath(path)
    location = locate(path)
    tokenizer: Tokenizer | None = None
    chosen = network
    described: dict[str, Any] | None = None
    ends: tuple[int, ...] = ()
    if is_huggingface(location) and os.path.isdir(location.path):
      folder = pathlib.Path(location.path)
      described = read_json(folder / CONFIG)
      config = _config(described, os.fspath(folder / CONFIG))
      chosen = chosen or _network(config)
      tokenizer = _own_tokenizer(folder, config)
      if isinstance(config, T5Config):
        ends = special_ids(folder, described).eos
    if chosen is None:
      argument = 'network' if side == 'target' else 'draft_network'
      raise ValueError(
        f'{name!r} does not say which sizes its model has: give'
        f' {argument}=T5(T5Config(...)). gin/models has the published ones.'
      )
    chosen = _in_dtype(chosen, dtype)
    return cls(name, location, chosen, network, tokenizer, described, ends)

  def load(self, placement: Placement) -> Model:
    """Reads the arrays: to their shards, or to the host for one device."""
    network, dtype = self.network, placement.dtype
    partition = placement.partition()
    sharding = None
    if partition is not None:
      partition.check(network)
      sharding = partition.parameter
    if is_huggingface(self.location):
      config, params = load_huggingface(
        self.location, self.given, dtype, sharding, self.described
      )
      if self.given is None:
        network = _in_dtype(_network(config), dtype)
    else:
      params = checkpoints.load(
        self.location.path, network, dtype=dtype, sharding=sharding
      )
    return Model(network, params, self.tokenizer)


def _config(described: dict[str, Any], where: str) -> T5Config | GPTConfig:
  if described.get('model_type') == gpt2_names.MODEL_TYPE:
    return gpt2_names.read_config(described, True, where)
  return huggingface_names.read_config(described, False, where)


def _network(config: T5Config | GPTConfig) -> T5 | GPT:
  return T5(config) if isinstance(config, T5Config) else GPT(config)


def _in_dtype(network: LanguageModel, dtype: str) -> LanguageModel:
  """The network with its computation in `dtype`."""
  if not isinstance(network, T5 | GPT):
    return network
  return _network(dataclasses.replace(network.config, dtype=dtype))


def _own_tokenizer(
  folder: pathlib.Path, config: T5Config | GPTConfig
) -> Tokenizer | None:
  if isinstance(config, GPTConfig):
    return BpeTokenizer(folder)
  path = folder / _SENTENCEPIECE
  return Tokenizer(path) if path.exists() else None


def _check_vocabularies(
  target: _Source, draft: _Source | None, tokenizer: Tokenizer
) -> None:
  """The engine's check of a pair, before gigabytes are read for it."""
  if draft is None:
    return
  sizes = target.network.vocab_size, draft.network.vocab_size
  own = draft.tokenizer
  if sizes[0] != sizes[1] or (
    own is not None and own.fingerprint != tokenizer.fingerprint
  ):
    raise ValueError(
      f'{draft.path!r} has another vocabulary than {target.path!r}: the draft'
      f' has {sizes[1]} ids, the target {sizes[0]}'
      + (f'; {own.path!r} and {tokenizer.path!r} differ' if own else '')
      + '. An id has to mean the same token to both: take a drafter of the'
      " target's family."
    )


def _check_end(target: _Source, tokenizer: Tokenizer) -> None:
  if target.ends and tokenizer.eos_id not in target.ends:
    raise ValueError(
      f'{tokenizer.path!r} ends a sequence with id {tokenizer.eos_id},'
      f' {target.path!r} with {", ".join(map(str, target.ends))}'
      f' (eos_token_id in its {CONFIG} or {GENERATION}): it is the vocabulary'
      ' of another model.'
    )


def _check_memory(
  target: _Source,
  draft: _Source | None,
  dtype: str,
  gamma: int,
  input_len: int,
  decode_len: int,
) -> None:
  """Raises DoesNotFitError where one text would be too much."""
  small = None if draft is None else draft.network
  if isinstance(target.network, T5) and isinstance(small, T5 | None):
    plan = memory.Plan(
      target.network,
      small,
      input_len=input_len,
      decode_len=decode_len,
      gamma=gamma,
      param_dtype=dtype,
    )
    memory.check_fits(plan, memory.device_bytes())
