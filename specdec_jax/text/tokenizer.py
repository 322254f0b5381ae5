"""Turns text into token ids and back, with sentencepiece.

Ids follow T5's convention: 0 pads, 1 ends a sequence, 2 is unknown, there is
no begin-of-sequence. Other vocabularies may have another end and a padding id
of their own (MADLAD-400: 0 is unknown, 1 pads, 2 ends). Rows are padded with 0
nevertheless, and encoders ignore id 0, as in T5X: so id 0 must not be text.
sentencepiece is imported only when a tokenizer is made, so that work on
pre-tokenised arrays does not need it.
"""

import hashlib
import io
import os
from collections.abc import Container, Iterable, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.files.locations import open_location

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
# For comparison: the largest vocabulary in use, of 256,000 pieces, has 5 MiB.
MOST_BYTES = 256 << 20


class Tokenizer:
  """A sentencepiece model whose id 0 is not text.

  Attributes:
    vocab_size: number of pieces, V.
    least_size: the least V of a network of this vocabulary.
    pad_id, eos_id, unk_id: special ids. `pad_id` is 0, with which rows are
      padded, whatever the vocabulary's own padding id is.
    languages: name -> id of the token of each language that texts are marked
      with; empty here.
    fingerprint: sha256 (hex) of the model file's bytes. It is the same for two
      models that share a vocabulary.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Loads a model file, on this machine or `gs://bucket/file`.

    Raises:
      ValueError: the file is missing, unreadable, not a regular file, larger
        than MOST_BYTES or not a sentencepiece model; or its id 0 is text, or it
        has no end-of-sequence piece.
    """
    self.path = os.fspath(path)
    self._processor, proto = read_model(path)
    self.vocab_size: int = self._processor.vocab_size()
    self.least_size: int = self.vocab_size
    self.pad_id: int = PAD_ID
    self.eos_id: int = self._processor.eos_id()
    self.unk_id: int = self._processor.unk_id()
    self.languages: dict[str, int] = {}
    self.fingerprint = hashlib.sha256(proto).hexdigest()
    no_text = self._processor.is_control(0) or self._processor.is_unknown(0)
    if not no_text or self.eos_id < 0:
      raise ValueError(
        f'{self.path!r} has the piece {self._processor.id_to_piece(0)!r} as id'
        f' 0 and end-of-sequence id {self.eos_id}; expected padding or the'
        ' unknown piece as id 0, and an end of sequence (train it with'
        ' pad_id=0, eos_id=1, unk_id=2).'
      )

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, without an end-of-sequence id."""
    return self._processor.encode(text)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Applies `encode` to each text, with several threads."""
    return self._processor.encode(list(texts))

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`; padding and end-of-sequence give no text.

    Raises:
      ValueError: an id is outside [0, vocab_size).
    """
    return self._processor.decode(
      self._with_text(ids, (self.pad_id, self.eos_id))
    )

  def _with_text(
    self, ids: Iterable[int], no_text: Container[int]
  ) -> list[int]:
    """The ids that have a text, all of them checked."""
    kept = []
    for token in map(int, ids):
      if not 0 <= token < self.vocab_size:
        raise ValueError(
          f'Token id {token} is outside the vocabulary of {self.vocab_size}.'
        )
      if token not in no_text:
        kept.append(token)
    return kept


def read_model(path: str | os.PathLike[str]) -> tuple[Any, bytes]:
  """A sentencepiece processor, and the bytes of its file.

  Raises:
    ValueError: as for `Tokenizer`, but of what the ids mean.
  """
  sentencepiece = _import_sentencepiece()
  path = os.fspath(path)
  try:
    proto = open_location(path).read_all(MOST_BYTES)
  except OSError as error:
    raise ValueError(
      f'No tokenizer model could be read at {path!r}: {error.strerror}.'
      ' Expected the path of a sentencepiece .model file.'
    ) from error
  try:
    if not proto:
      raise RuntimeError('the file is empty')
    return sentencepiece.SentencePieceProcessor(model_proto=proto), proto
  except (RuntimeError, TypeError) as error:
    raise ValueError(
      f'{path!r} ({len(proto)} bytes) is not a whole sentencepiece'
      ' model; copy it again from its source.'
    ) from error


def train_tokenizer(
  sentences: Iterable[str],
  path: str | os.PathLike[str],
  vocab_size: int = 8000,
) -> Tokenizer:
  """Trains a unigram vocabulary with byte fallback and writes it to `path`.

  The same sentences in the same order give the same file.

  Args:
    sentences: text, one sentence each.
    path: where the `.model` file goes; replaced whole or not at all.
    vocab_size: number of pieces, the 256 byte pieces and 3 special ones
      included.

  Raises:
    ValueError: there is too little text for that many pieces.
  """
  sentencepiece = _import_sentencepiece()
  proto = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(sentences),
      model_writer=proto,
      model_type='unigram',
      vocab_size=vocab_size,
      character_coverage=0.9999,
      byte_fallback=True,
      pad_id=PAD_ID,
      eos_id=EOS_ID,
      unk_id=UNK_ID,
      bos_id=-1,
      # The number of threads decides the order in which expected counts are
      # summed, and so their rounding. A fixed number gives the same file on
      # every machine.
      num_threads=4,
      minloglevel=2,
    )
  except (RuntimeError, ValueError) as error:
    raise ValueError(
      f'No vocabulary of {vocab_size} pieces could be trained: {error}'
    ) from error
  files.write_atomically(path, proto.getvalue())
  return Tokenizer(path)


def _import_sentencepiece() -> Any:
  try:
    import sentencepiece
  except ImportError as error:
    raise ValueError(
      'Text needs the package sentencepiece, which is not installed. Install'
      ' it, or work from token arrays.'
    ) from error
  return sentencepiece
