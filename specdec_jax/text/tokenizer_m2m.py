"""M2M-100's own vocabulary: sentencepiece, whose pieces another file numbers.

Its folders have sentencepiece.bpe.model, which cuts a text into pieces, and
vocab.json, which has the ids of the pieces; the languages' tokens follow, in an
order that is in no file of the folder but that of Hugging Face's
`M2M100Tokenizer` and fairseq. Folders of NLLB-200 have a tokenizer.json
instead.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

from specdec_jax import files
from specdec_jax.text.tokenizer import Tokenizer, read_model
from specdec_jax.text.tokenizer_bpe import VOCAB, content, settings

PIECES = 'sentencepiece.bpe.model'
_BOS, _PAD, _EOS, _UNK = '<s>', '<pad>', '</s>', '<unk>'
# By the folder's `language_codes`.
_LANGUAGES = {
  'm2m100': (
    'af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi'
    ' fr fy ga gd gl gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn'
    ' ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt'
    ' ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh'
    ' yi yo zh zu'
  ),
  'wmt21': 'en ha is ja cs ru zh de',
}


class M2MTokenizer(Tokenizer):
  """The vocabulary of a folder of M2M-100, with the methods of `Tokenizer`.

  Attributes:
    vocab_size, least_size: ids, the languages' included.
    pad_id, eos_id, unk_id: special ids; `pad_id` is the end of sequence, which
      has no text. The network says what its inputs are padded with.
    languages: name, such as 'en', -> id of its token.
    fingerprint: sha256 (hex) of the pieces, their ids and the languages.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Loads a vocabulary.

    Raises:
      ValueError: a file is missing or broken, or it names languages that are
        not known.
    """
    self.path = os.fspath(folder)
    place = pathlib.Path(folder)
    self._processor, proto = read_model(place / PIECES)
    ids = _ids_of(place / VOCAB)
    said = settings(place)
    codes = content(said.get('language_codes')) or 'm2m100'
    if codes not in _LANGUAGES:
      raise ValueError(
        f'{self.path!r} says language_codes = {codes!r}; expected one of'
        f' {sorted(_LANGUAGES)}, whose languages are known.'
      )
    names = _LANGUAGES[codes].split()
    self.languages = {name: len(ids) + i for i, name in enumerate(names)}
    self.vocab_size = self.least_size = len(ids) + len(names)
    self.eos_id = self.pad_id = ids[_EOS]
    self.unk_id = ids[_UNK]
    self._ids = ids
    self._pieces = {number: piece for piece, number in ids.items()}
    special = (ids[name] for name in (_BOS, _PAD, _EOS, _UNK))
    self._no_text = {*special, *self.languages.values()}
    decides = json.dumps([sorted(ids.items()), names])
    self.fingerprint = hashlib.sha256(proto + decides.encode()).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, without a language and an end-of-sequence id."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Applies `encode` to each text, with several threads."""
    found = self._processor.encode(list(texts), out_type=str)
    return [[self._ids.get(one, self.unk_id) for one in text] for text in found]

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`; special tokens and languages give no text.

    Raises:
      ValueError: an id is outside [0, vocab_size).
    """
    kept = self._with_text(ids, self._no_text)
    return self._processor.decode([self._pieces[token] for token in kept])


def _ids_of(path: pathlib.Path) -> dict[str, int]:
  """Piece -> id, of a vocab.json that numbers its pieces from 0."""
  try:
    found = files.read_json(path)
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{os.fspath(path)!r} cannot be read ({error}); copy it again from its'
      ' source.'
    ) from error
  special = {_BOS, _PAD, _EOS, _UNK}
  if not isinstance(found, dict) or not special <= found.keys():
    raise ValueError(
      f'{os.fspath(path)!r} is no vocabulary of M2M-100: expected an object of'
      f' pieces and ids with {sorted(special)}. Copy it again from its source.'
    )
  if sorted(found.values(), key=str) != sorted(range(len(found)), key=str):
    raise ValueError(
      f'{os.fspath(path)!r} does not number its {len(found)} pieces from 0 to'
      f' {len(found) - 1}: it is not whole, and the languages, which follow,'
      ' would have other ids. Copy it again from its source.'
    )
  return found
