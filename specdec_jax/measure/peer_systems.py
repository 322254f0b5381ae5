"""The systems that `scripts/peers.py` compares.

Each entry of `SYSTEMS` has a function of a `Pair`. It loads what it needs,
untimed, and returns a function that maps one text to an `Output`. All systems
read the same weights: transformers from a folder that this project saves,
CTranslate2 from that folder through its converter. All use the same tokenizer,
for ids and for text, and its time is measured too, because `Engine` includes
it.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sentencepiece

from specdec_jax.checkpoints import huggingface
from specdec_jax.engine.completion import decode
from specdec_jax.engine.engine import Engine
from specdec_jax.models.base import reads_encoder
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.text.tokenizer import Tokenizer


class Output(NamedTuple):
  """A system's output for one text.

  Attributes:
    tokens: the produced ids, the end of sequence included.
    target_calls: calls of the target's decoder; None if they are not counted.
  """

  tokens: list[int]
  target_calls: int | None


Generate = Callable[[str], Output]


class System(NamedTuple):
  """One system.

  Attributes:
    packages: packages that it needs beyond this project's own requirements.
    load: Pair -> function that decodes one text.
  """

  packages: tuple[str, ...]
  load: Callable[['Pair'], Generate]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairConfig:
  """Two models, and how every system decodes with them.

  Attributes:
    target: a T5 with its parameters as the checkpoint has them.
    draft: a smaller T5 with the same vocabulary, and its parameters.
    tokenizer: the tokenizer of both.
    gamma: proposals per round of this project's speculative loop.
    assistant_tokens: proposals per round of transformers' assistant; None
      leaves its default.
    lookup_tokens: proposals per round of transformers' prompt lookup.
    max_input_len: tokens of an input, its end included; longer inputs are cut.
    max_decode_len: tokens of an output, its end included.
  """

  target: Model
  draft: Model
  tokenizer: Tokenizer
  gamma: int = 4
  assistant_tokens: int | None = None
  lookup_tokens: int = 3
  max_input_len: int = 128
  max_decode_len: int = 128


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two models, and everything that is made from them once for all systems.

  Attributes:
    config: the models, and how they decode.
    threads: threads of torch and CTranslate2.
    folder: folder for converted models.
  """

  config: PairConfig
  threads: int
  folder: pathlib.Path

  @functools.cached_property
  def engine(self) -> Engine:
    """This project's engine, for both of its loops."""
    config = self.config
    return Engine(
      config.target,
      config.draft,
      tokenizer=config.tokenizer,
      gamma=config.gamma,
      max_input_len=config.max_input_len,
      max_decode_len=config.max_decode_len,
    )

  @functools.cached_property
  def target_folder(self) -> pathlib.Path:
    """The target as a Hugging Face folder."""
    return self._export(self.config.target, 'target')

  @functools.cached_property
  def draft_folder(self) -> pathlib.Path:
    """The draft as a Hugging Face folder."""
    return self._export(self.config.draft, 'draft')

  def _export(self, model: Model, name: str) -> pathlib.Path:
    if not isinstance(model.network, T5):
      raise ValueError(
        f'The {name} is a {type(model.network).__name__}, expected a T5.'
      )
    folder = self.folder / name
    huggingface.save_huggingface(folder, model.network.config, model.params)
    return folder

  @functools.cached_property
  def ctranslate2_folder(self) -> pathlib.Path:
    """The target in CTranslate2's format, in float32."""
    folder = self.folder / 'ctranslate2'
    _convert(self.target_folder, folder, self.config.tokenizer)
    return folder

  def encode(self, text: str) -> list[int]:
    """Ids of an input, cut and ended as `Engine` does it."""
    tokenizer = self.config.tokenizer
    ids = tokenizer.encode(text)[: self.config.max_input_len - 1]
    return [*ids, tokenizer.eos_id]

  def decode(self, tokens: Sequence[int]) -> str:
    """Text of ids, without ids that only pad the model's vocabulary."""
    return decode(self.config.tokenizer, tokens)


def _own(pair: Pair, speculative: bool) -> Generate:
  engine = pair.engine

  def generate(text: str) -> Output:
    (done,) = engine.generate(
      [text], speculative=speculative, on_too_long='truncate'
    )
    if done.error:
      raise ValueError(done.error)
    return Output(done.tokens, done.stats.num_target_calls)

  return generate


def _transformers(
  pair: Pair,
  assisted: bool = False,
  with_mask: bool = False,
  lookup: bool = False,
) -> Generate:
  import torch

  torch.set_num_threads(pair.threads)
  target = _load_transformers(pair.target_folder)
  options: dict[str, Any] = {}
  if assisted:
    assistant = _load_transformers(pair.draft_folder)
    if reads_encoder(pair.config.draft.network):
      # It has none of its own; `generate` asks it for what the target's says.
      assistant.encoder = target.encoder
    if pair.config.assistant_tokens is not None:
      assistant.generation_config.num_assistant_tokens = (
        pair.config.assistant_tokens
      )
    options['assistant_model'] = assistant
  if with_mask:
    # A mask of the start token. Without it version 5.23 feeds the whole prefix
    # to the assistant again in each round, although its cache holds it already.
    options['decoder_attention_mask'] = torch.ones((1, 1), dtype=torch.long)
  if lookup:
    options['prompt_lookup_num_tokens'] = pair.config.lookup_tokens
  calls = [0]

  def count(*_):
    calls[0] += 1

  target.decoder.register_forward_pre_hook(count)

  def generate(text: str) -> Output:
    inputs = torch.tensor([pair.encode(text)])
    before = calls[0]
    sequence = target.generate(
      input_ids=inputs,
      attention_mask=torch.ones_like(inputs),
      do_sample=False,
      num_beams=1,
      max_new_tokens=pair.config.max_decode_len,
      **options,
    )
    tokens = sequence[0, 1:].tolist()  # without the start token
    pair.decode(tokens)
    return Output(tokens, calls[0] - before)

  return generate


def _load_transformers(folder: pathlib.Path) -> Any:
  import torch
  import transformers

  _quiet(transformers)
  model = transformers.T5ForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32
  ).eval()
  # `generate` of version 5.23 takes the size of the decoder's cache from the
  # encoder's layers, and fails if the decoder has more. The stacks hold copies
  # of the configuration, so nothing else changes.
  model.config.num_layers = model.config.num_decoder_layers
  return model


def _quiet(transformers: Any) -> None:
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()


def _ctranslate2(pair: Pair, compute_type: str) -> Generate:
  import ctranslate2

  translator = ctranslate2.Translator(
    os.fspath(pair.ctranslate2_folder),
    device='cpu',
    compute_type=compute_type,
    inter_threads=1,
    intra_threads=pair.threads,
  )
  pieces = _Vocabulary(pair.config.tokenizer)

  def generate(text: str) -> Output:
    (done,) = translator.translate_batch(
      [[pieces.of_id(token) for token in pair.encode(text)]],
      beam_size=1,
      max_input_length=0,  # the input was cut already
      max_decoding_length=pair.config.max_decode_len,
      min_decoding_length=0,
      return_end_token=True,
    )
    tokens = [pieces.id_of(piece) for piece in done.hypotheses[0]]
    pair.decode(tokens)
    return Output(tokens, None)

  return generate


def _convert(
  source: pathlib.Path, folder: pathlib.Path, tokenizer: Tokenizer
) -> None:
  """Converts a Hugging Face folder with CTranslate2's own converter."""
  import transformers
  from ctranslate2 import converters

  _quiet(transformers)

  class Converter(converters.TransformersConverter):
    """Takes the vocabulary from the .model file, not from the folder."""

    def load_tokenizer(self, *_, **__):
      return _Vocabulary(tokenizer)

  # The converter rescales the input of every output layer, because transformers
  # 5 calls every T5 tied. That multiplies all logits by one positive factor, so
  # greedy tokens stay the same.
  Converter(os.fspath(source)).convert(os.fspath(folder), force=True)


class _Vocabulary:
  """The part of a transformers tokenizer that CTranslate2's converter needs."""

  def __init__(self, tokenizer: Tokenizer):
    processor = sentencepiece.SentencePieceProcessor(model_file=tokenizer.path)
    self._pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    self._ids = {piece: i for i, piece in enumerate(self._pieces)}
    self.pad_token = self._pieces[tokenizer.pad_id]
    self.eos_token = self._pieces[tokenizer.eos_id]
    self.unk_token = self._pieces[tokenizer.unk_id]

  def get_vocab(self) -> dict[str, int]:
    """Piece -> id; the converter names the ids that pad the vocabulary."""
    return self._ids

  def convert_ids_to_tokens(self, token: int) -> str:
    """The piece of an id."""
    return self._pieces[token]

  of_id = convert_ids_to_tokens

  def id_of(self, piece: str) -> int:
    """The id of a piece, or of the converter's name for a padding row."""
    if piece in self._ids:
      return self._ids[piece]
    number = piece.removeprefix('<extra_id_').removesuffix('>')
    return len(self._pieces) + int(number)


# `assistant` is `generate(assistant_model=...)`, `+ mask` the same call with a
# `decoder_attention_mask`, `prompt lookup` is `prompt_lookup_num_tokens`.
_TORCH = ('transformers', 'torch', 'safetensors')
PLAIN = 'specdec_jax plain'
SYSTEMS = {
  PLAIN: System((), functools.partial(_own, speculative=False)),
  'specdec_jax speculative': System(
    (), functools.partial(_own, speculative=True)
  ),
  'transformers plain': System(_TORCH, _transformers),
  'transformers assistant': System(
    _TORCH, functools.partial(_transformers, assisted=True)
  ),
  'transformers assistant + mask': System(
    _TORCH, functools.partial(_transformers, assisted=True, with_mask=True)
  ),
  'transformers prompt lookup': System(
    _TORCH, functools.partial(_transformers, lookup=True)
  ),
  'CTranslate2 float32': System(
    (*_TORCH, 'ctranslate2'),
    functools.partial(_ctranslate2, compute_type='float32'),
  ),
  'CTranslate2 int8': System(
    (*_TORCH, 'ctranslate2'),
    functools.partial(_ctranslate2, compute_type='int8_float32'),
  ),
}
