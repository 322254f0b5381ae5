"""The settings of an engine, as Python, gin and flags give them."""

import dataclasses
import os
from typing import Annotated

from specdec_jax import partitioning
from specdec_jax.checks.fields import Bound, check_types
from specdec_jax.engine.options import drafting_of
from specdec_jax.request import RestPolicy
from specdec_jax.text.tokenizer import Vocabulary
from specdec_jax.types import LengthRule, Positive


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """The settings of an engine.

  Attributes:
    tokenizer: the tokenizer of both models, or its path, see `Tokenizer`; None
      is the target's own.
    gamma: tokens that the drafter proposes per round; 'adaptive' ends a draft
      where the drafter is not sure enough. A calibration's rule, too, see
      `drafters.small_model`. None is 4, or what a run chooses.
    max_input_len: tokens of the longest input, its end included.
    max_decode_len: tokens of the longest output, its end included.
    batch_size: the most texts that are decoded together. If there are more,
      each finished text makes room for the next.
    bos_id: id put in front of each text of a target whose texts begin with one
      (all but T5), which can then also decode an empty text. None is the
      target's own (bos_token_id of its folder; what the vocabulary of Llama,
      Qwen, Gemma or T5Gemma says, Qwen's none); else the end of sequence of a
      BPE vocabulary, as in GPT-2, or id 0, as in models trained here and T5X's.
    placement: dtype and layout of the target's parameters, and the devices that
      they and the rows of a batch are split over. Its dtype is that which the
      target was loaded with, if it was; another is refused. Each device holds
      the whole drafter, in the dtype that it was loaded with, or else the
      target's.
    cache_folder: folder of compiled programs; None is the user's cache folder.
    fallback: whether the drafter rests where a text's acceptance makes it
      slower than plain decoding, see `decoding.resting`. True goes by guessed
      costs, a `RestPolicy` (of `Choice.rests`) by measured ones.
    source_lang: language of the texts, such as 'eng_Latn', of a model that
      translates between many, unless a call gives another.
    target_lang: language of the outputs, such as 'deu_Latn'.
    split_special_tokens: whether names of special tokens in a text are text;
      see `Tokenizer`, whose own setting is taken if it is None.
    skip_special_tokens: whether special tokens have no text in an output; None
      takes the tokenizer's own setting.
    memory: file of texts of before, which propose first, see
      `translation_memory`: pairs (.tsv), records of `specdec decode`
      (predictions.jsonl) or of a task (.jsonl), or lines of outputs.

  Examples:
    >>> config = sd.EngineConfig(gamma=5, max_input_len=64)
    >>> config.max_input_len, config.max_decode_len
    (64, 120)

  Raises:
    ValueError: a value is of another type, too small, or too large for any
      memory.
  """

  tokenizer: Vocabulary | str | os.PathLike[str] | None = None
  gamma: int | str | LengthRule | None = None
  max_input_len: Annotated[int, Bound(2)] = 128
  # An output and a round take 128 slots of a cache.
  max_decode_len: Positive = 120
  batch_size: Positive = 32
  bos_id: int | None = None
  placement: partitioning.Placement | None = None
  cache_folder: str | os.PathLike[str] | None = None
  fallback: bool | RestPolicy = False
  source_lang: str | None = None
  target_lang: str | None = None
  split_special_tokens: bool | None = None
  skip_special_tokens: bool | None = None
  memory: str | os.PathLike[str] | None = None

  def __post_init__(self):
    check_types(self)
    if self.gamma is not None:
      drafting_of(self.gamma)
