"""A vocabulary of any kind, from its path."""

import os
import pathlib

from specdec_jax.files.locations import check_path
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.tokenizer_bpe import TOKENIZER, VOCAB, BpeTokenizer
from specdec_jax.text.tokenizer_m2m import PIECES, M2MTokenizer

SENTENCEPIECE = 'spiece.model'  # in the folders of all T5s


def open_vocabulary(path: str | os.PathLike[str]) -> Tokenizer:
  """Loads a sentencepiece or a BPE vocabulary.

  Args:
    path: a sentencepiece model, also `gs://bucket/file`; or a .json file of the
      package tokenizers; or a folder with spiece.model, or tokenizer.json, or
      vocab.json with sentencepiece.bpe.model (M2M-100) or with merges.txt
      (GPT-2); the first that exists is taken.

  Raises:
    ValueError: the folder has none of these files; or as for `Tokenizer`,
      `BpeTokenizer` or `M2MTokenizer`.
  """
  check_path(path)
  place = pathlib.Path(path)
  if not place.is_dir():
    return BpeTokenizer(path) if place.suffix == '.json' else Tokenizer(path)
  if (place / SENTENCEPIECE).exists():
    return Tokenizer(place / SENTENCEPIECE)
  if not (place / TOKENIZER).exists() and (place / PIECES).exists():
    return M2MTokenizer(path)
  if (place / TOKENIZER).exists() or (place / VOCAB).exists():
    return BpeTokenizer(path)
  raise ValueError(
    f'No vocabulary could be read at {os.fspath(path)!r}: the folder has no'
    f' {SENTENCEPIECE}, {TOKENIZER} or {VOCAB}. Give the path of a'
    ' sentencepiece model, or a folder with one of these.'
  )
