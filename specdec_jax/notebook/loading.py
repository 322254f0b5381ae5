"""From paths to a pair that can be asked."""

import dataclasses
import os
import pathlib
from typing import Any

from specdec_jax.checkpoints.huggingface import (
  GENERATION,
  load_huggingface,
  read_config,
  special_ids,
)
from specdec_jax.checkpoints.huggingface_arrays import CONFIG, read_json
from specdec_jax.checkpoints.load import is_huggingface, locate
from specdec_jax.checks.memory import device_bytes
from specdec_jax.engine.engine import Engine, Model
from specdec_jax.engine.padding import SMALLEST_PROMPT
from specdec_jax.engine.pair import check_vocabulary_size, load_model
from specdec_jax.files.locations import Location
from specdec_jax.measure import memory
from specdec_jax.models.base import START_ID, LanguageModel
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.notebook.model import Interactive, Side
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.tokenizer_bpe import (
  SENTENCEPIECE,
  TOKENIZER,
  VOCAB,
  BpeTokenizer,
  open_vocabulary,
)

Path = str | os.PathLike[str]


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
  read. Texts of a decoder-only target begin with the id that its folder names
  (bos_token_id); else with the vocabulary's end of sequence if that is GPT-2's,
  and with id 0, as models trained here and T5X's do, if it is sentencepiece's.

  Args:
    target: a checkpoint of any kind that `checkpoints.load` knows.
    draft: that of a small model which proposes; None for plain decoding.
    network: the target's; needed unless its folder describes itself, and
      compared with the checkpoint.
    draft_network: the drafter's, likewise.
    tokenizer: of both, or a path for `tokenizer_bpe.open_vocabulary`; None is
      the one in the target's folder.
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
      too small (`checks.memory.DoesNotFitError`).
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
    tokenizer = open_vocabulary(tokenizer)
  if tokenizer is None:
    raise ValueError(
      f'There is no vocabulary ({SENTENCEPIECE}, or {TOKENIZER} of GPT-2)'
      f' beside {str(target)!r}; give it: tokenizer=, the path of a'
      " sentencepiece model or of a folder with GPT-2's."
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
    bos_id=_first_id(large, tokenizer),
    placement=placement,
  )
  sides = {'target': Side(large.path, target_model.network)}
  if small is not None and draft_model is not None:
    sides['draft'] = Side(small.path, draft_model.network)
  # Where an output ends otherwise than by the tokenizer's end of sequence.
  others = set(large.ends) - {tokenizer.eos_id}
  return Interactive(engine, sides, large.ends if others else None)


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
      config = read_config(described, os.fspath(folder / CONFIG))
      chosen = chosen or _network(config)
      tokenizer = _own_tokenizer(folder, config)
      ends = _ends(folder, described, config)
    if chosen is None:
      argument = 'network' if side == 'target' else 'draft_network'
      raise ValueError(
        f'{name!r} does not say which sizes its model has: give'
        f' {argument}=T5(T5Config(...)) or GPT(GPTConfig(...)). gin/models has'
        ' the published ones.'
      )
    chosen = _in_dtype(chosen, dtype)
    return cls(name, location, chosen, network, tokenizer, described, ends)

  def load(self, placement: Placement) -> Model:
    """Reads the arrays: to their shards, or to the host for one device."""
    network, dtype = self.network, placement.dtype
    if not is_huggingface(self.location):
      path = self.location.path
      return load_model(network, path, self.tokenizer, placement)
    config, params = load_huggingface(
      self.location.path,
      dtype,
      placement.shardings_of(network),
      self.given,
      self.described,
    )
    if self.given is None:
      network = _in_dtype(_network(config), dtype)
    return Model(network, params, self.tokenizer)


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
  files = [SENTENCEPIECE]
  if isinstance(config, GPTConfig):  # T5's tokenizer.json is no BPE
    files += [TOKENIZER, VOCAB]
  if any((folder / name).exists() for name in files):
    return open_vocabulary(folder)
  return None


def _ends(
  folder: pathlib.Path, described: dict[str, Any], config: T5Config | GPTConfig
) -> tuple[int, ...]:
  """Ids that end an output; of GPT-2 none where its folder names none."""
  if isinstance(config, T5Config):
    return special_ids(folder, described).eos
  said = {name: value for name, value in described.items() if value is not None}
  # What has no encoder has no start of its own.
  said = {'eos_token_id': []} | said | {'decoder_start_token_id': START_ID}
  found = special_ids(folder, said).eos
  # transformers writes GPT-2's own for any size of vocabulary.
  return tuple(token for token in found if token < config.vocab_size)


def _first_id(target: _Source, tokenizer: Tokenizer) -> int | None:
  """What a decoder-only target's texts begin with."""
  if target.network.has_encoder:
    return None
  said = (target.described or {}).get('bos_token_id')
  if type(said) is int and 0 <= said < target.network.vocab_size:
    return said
  return tokenizer.eos_id if isinstance(tokenizer, BpeTokenizer) else START_ID


def _check_vocabularies(
  target: _Source, draft: _Source | None, tokenizer: Tokenizer
) -> None:
  """The engine's check of a pair, before gigabytes are read for it."""
  check_vocabulary_size('target', target.network.vocab_size, tokenizer)
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
  # A decoder-only model may have learned to end by any id: that is a stop id.
  if not target.network.has_encoder:
    return
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
  """Raises DoesNotFitError where one text would be too much.

  And ValueError where a model has too few positions for the shortest one.
  """
  large, small = target.network, None if draft is None else draft.network
  if not isinstance(large, T5 | GPT) or not isinstance(small, T5 | GPT | None):
    return  # a network of the caller's own
  if not large.has_encoder:
    longest = input_len - 1  # behind the first token
    for network in (large, small):
      # Where positions are few, the longest text that they leave room for.
      if isinstance(network, GPT) and network.config.num_positions:
        room = network.config.num_positions // 64 * 64 - 1 - decode_len
        longest = min(longest, room - (gamma if small else 0))
    input_len = max(1, longest, min(SMALLEST_PROMPT, input_len - 1))
  plan = memory.Plan(
    large,
    small,
    input_len=input_len,
    decode_len=decode_len,
    gamma=gamma,
    param_dtype=dtype,
  )
  memory.check_fits(plan, device_bytes())
