"""Turns text into token ids and back, for every kind of vocabulary.

An encoder ignores its network's `pad_id` (0, as in T5X; 1 in M2M-100), so that
id must not be text.
"""

import copy
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import unexpected
from specdec_jax.files import shipped
from specdec_jax.files.locations import check_path
from specdec_jax.text import vocabulary
from specdec_jax.text.vocabulary import JsonBackend, PiecesBackend, content

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
# Names of the end of sequence that are tried if no file names it.
_ENDS = (vocabulary.END, '</s>')
_BYTE = re.compile('<0x([0-9A-F]{2})>')
# The characters of byte-level vocabularies: visible ones of Latin-1 stand for
# themselves, characters from U+0100 on for the other bytes, in their order.
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTES = {chr(byte): bytes([byte]) for byte in _VISIBLE}
_BYTES |= {chr(256 + i): bytes([byte]) for i, byte in enumerate(_HIDDEN)}
# The language tokens of NLLB, such as eng_Latn; of mBART, such as en_XX; and of
# M2M-100 and PLBART, such as __en__.
_LANGUAGE = re.compile(
  r'[a-z]{3}_[A-Z][a-z]{3}|([a-z]{2}_[A-Z]{2})|__([a-z]+|en_XX)__'
)


class Vocabulary:
  """The interface of a tokenizer.

  `Tokenizer` reads files. A tokenizer of your own is a subclass that has
  `vocab_size`, `eos_id`, `fingerprint`, `encode` and `decode`; all else has
  defaults.

  Attributes:
    vocab_size: V, the largest id plus one.
    eos_id: the id of the end of sequence.
    path: the path of the vocabulary's files, for messages.
    before: ids in front of every text, such as `<s>` in CodeT5, without those
      of languages.
    bos_id: the first id in `before`; None in T5, GPT-2 and Qwen.
    says_ends: whether the vocabulary's own files decide `before` and `after`.
    start_id: the first id of a decoder-only model's texts where no file names
      one: the end of sequence for BPE, as in GPT-2, or 0, as in models that
      were trained here and in T5X's.
    languages: name -> id of each language's token in the vocabularies of
      translation models: 'eng_Latn' in NLLB-200's, 'en' in M2M-100's, 'en_XX'
      in mBART's.
    language_last: whether the token of the language follows a text, and begins
      an output in place of a start token, as in mBART-25.
    pieces: id -> its text in the vocabulary's file.
    split_special_tokens: whether names of special tokens in a text are text.
    skip_special_tokens: whether special tokens have no text in an output; None:
      only sentinels, such as `<extra_id_0>`, have a text.
  """

  vocab_size: int
  eos_id: int
  path: str = ''
  before: Sequence[int] = ()
  bos_id: int | None = None
  says_ends: bool = False
  start_id: int = 0
  languages: Mapping[str, int] = types.MappingProxyType({})
  language_last: bool = False
  pieces: Mapping[int, str] = types.MappingProxyType({})
  split_special_tokens: bool = False
  skip_special_tokens: bool | None = None

  @property
  def inputs(self) -> 'Vocabulary':
    """The vocabulary of inputs: this one, or another (Marian's source)."""
    return self

  @functools.cached_property
  def fingerprint(self) -> str:
    """A text that is different for each vocabulary."""
    raise NotImplementedError

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without those in `before` and `after`."""
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`."""
    raise NotImplementedError

  @functools.cached_property
  def after(self) -> Sequence[int]:
    """Ids after every text, such as `</s>`, without those of languages."""
    return [self.eos_id]

  @functools.cached_property
  def least_size(self) -> int:
    """The smallest number of ids that a network for this vocabulary may have.

    Special tokens that no text needs, such as Gemma's placeholder of an image,
    may have larger ids.
    """
    return self.vocab_size

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Applies `encode` to each text."""
    return [self.encode(text) for text in texts]

  def whole(self, text: str, limit: int | None = None) -> list[int]:
    """Returns the ids of a whole text, between those that frame it.

    These are `before` and `after`. If `after` is empty, only the end of
    sequence is added.

    Args:
      text: the text.
      limit: the most ids in all, to which the text is cut; None: no limit.
    """
    first, last = self.before, self.after
    if not last:
      first, last = [], [self.eos_id]
    ids = self.encode(text)
    if limit is not None:
      ids = ids[: max(0, limit - len(first) - len(last))]
    return [*first, *ids, *last]

  def is_text(self, token: int) -> bool:
    """Whether an id is known to be a piece of text."""
    return False

  def bytes_of(self, token: int) -> bytes:
    """Returns the bytes of a piece, which may be a part of a character."""
    return b''

  def for_network(
    self,
    size: int,
    split_special_tokens: bool | None = None,
    skip_special_tokens: bool | None = None,
  ) -> 'Vocabulary':
    """Returns this vocabulary, adapted to a network that has `size` ids."""
    return self


class Tokenizer(Vocabulary):
  """The vocabulary in a file or folder.

  A text is split at the added tokens that it names, such as `<extra_id_0>` of
  T5; the rest is cut into pieces.

  Attributes:
    pad_id: the id of padding; without one, that of the end of sequence.
    unk_id: the id of the unknown token; without one, that of the end of
      sequence.
    split_special_tokens: whether names of special tokens in a text are text.
    skip_special_tokens: whether special tokens have no text in an output; None:
      only sentinels have a text.

  Examples:
    >>> tokenizer = sd.Tokenizer('demo/vocab.model')
    >>> tokenizer.encode('Good morning!')
    [5382, 902, 303]
    >>> tokenizer.decode(tokenizer.encode('Good morning!'))
    'Good morning!'
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    eos_token: str | None = None,
    *,
    split_special_tokens: bool = False,
    skip_special_tokens: bool | None = None,
  ):
    """Loads a vocabulary.

    Args:
      path: a sentencepiece model, also `gs://bucket/file`; a tokenizer.json; or
        a folder with source.spm, target.spm and vocab.json (Marian: this is the
        vocabulary of outputs, and `inputs` that of inputs), with
        tokenizer.json, spiece.model, sentencepiece.bpe.model (mBART; M2M-100,
        with vocab.json), or vocab.json with merges.txt (GPT-2, BART); the first
        of these that exists is used.
      eos_token: the token that ends a sequence; None: the one that the folder
        names.
      split_special_tokens: whether the name of a special token in a text, such
        as `</s>` or `<extra_id_0>`, is text. Otherwise it is that token. Added
        tokens that are not special are tokens in any case. Control tokens of a
        single sentencepiece file are always text.
      skip_special_tokens: whether special tokens have no text in an output.
        None: only sentinels have a text.

    Raises:
      ValueError: a file is missing, broken or of an unknown kind, two files
        contradict each other, id 0 of a sentencepiece model is text, or there
        is no such token.
    """
    check_path(path)
    self.path = os.fspath(path)
    self.split_special_tokens = split_special_tokens
    self.skip_special_tokens = skip_special_tokens
    found = shipped.find(self.path)
    self._inputs: Tokenizer | None = None
    if vocabulary.is_marian(pathlib.Path(found)):
      source = os.path.join(found, vocabulary.SOURCE)
      self._inputs = Tokenizer(
        source,
        split_special_tokens=split_special_tokens,
        skip_special_tokens=skip_special_tokens,
      )
    self._backend, config = vocabulary.open_backend(found)
    backend = self._backend
    ids = {piece: i for i, piece in backend.pieces.items()}
    self.eos_id = eos_id = self._end(ids, config, eos_token)

    pad = content(config.get('pad_token')) or '<pad>'
    self.pad_id = ids.get(pad, eos_id)
    self.unk_id = ids.get(content(config.get('unk_token')), eos_id)
    self._special = {i for i, token in backend.added.items() if token.special}
    if isinstance(backend, PiecesBackend):
      self.unk_id = backend.unk_id
      if 'pad_token' not in config:
        self.pad_id = PAD_ID
      self._special |= {*backend.control}
      if backend.eos_id < 0 or 0 not in self._special:
        where = f'{self.path!r}: id 0 and the end of sequence'
        expected = 'padding or the unknown piece, and an id'
        got = [backend.pieces[0], backend.eos_id]
        advice = 'Train it with pad_id=0, eos_id=1, unk_id=2.'
        raise unexpected(where, expected, got, advice)
    names = {i: backend.pieces[i] for i in sorted(self._special)}
    tried = {i: _LANGUAGE.fullmatch(name) for i, name in names.items()}
    matches = {i: match for i, match in tried.items() if match}
    self.languages = {m[2] or m[0]: i for i, m in matches.items()}
    languages = {*self.languages.values()}
    behind = languages.intersection(backend.after)
    # NLLB's names of languages match no group, and do not count: old folders of
    # NLLB-200 put the language behind a text, but the network was not trained
    # so.
    self.language_last = any(matches[i].lastindex for i in behind)
    self.says_ends = isinstance(backend, JsonBackend)
    after = backend.after if self.says_ends else [eos_id]
    self.before = [i for i in backend.before if i not in languages]
    self.after = [i for i in after if i not in languages]
    self.bos_id = self.before[0] if self.before else None
    self.start_id = eos_id if backend.is_bpe else PAD_ID
    self._set_sizes()

  @property
  def inputs(self) -> 'Tokenizer':
    return self._inputs or self

  def _end(
    self, ids: dict[str, int], config: dict[str, Any], eos_token: str | None
  ) -> int:
    """Finds the id of the end of sequence."""
    if eos_token is not None and eos_token not in ids:
      where = f'eos_token for {self.path!r}'
      raise unexpected(where, 'a token of this vocabulary', eos_token)
    eos_token = eos_token or content(config.get('eos_token'))
    candidates = [ids.get(eos_token), *self._backend.after[:1]]
    for token in candidates + [ids.get(name) for name in _ENDS]:
      if token is not None:
        return token
    where, expected = f'{self.path!r}: eos_token', f'one of {[*_ENDS]}'
    raise unexpected(where, expected, eos_token, 'Give it as eos_token.')

  def _set_sizes(self) -> None:
    backend = self._backend
    self.pieces = backend.pieces
    self.vocab_size = 1 + max(backend.pieces.keys() - backend.sentinels)
    text = backend.pieces.keys() - self._special
    ends = {self.eos_id, *self.before, *self.languages.values()}
    self.least_size = 1 + max(text | ends)
    special = self._special & backend.pieces.keys()
    is_sentinel = vocabulary.SENTINEL.fullmatch
    default = {i for i in special if not is_sentinel(backend.pieces[i])}
    hidden = {True: special, False: set(), None: default}
    self._hidden = hidden[self.skip_special_tokens]

  def is_text(self, token: int) -> bool:
    """Whether an id is a piece of text, not padding or an added token."""
    is_marked = token in self._special or token in self._backend.added
    has_role = token in (self.pad_id, self.unk_id, self.eos_id)
    return token in self.pieces and not is_marked and not has_role

  def bytes_of(self, token: int) -> bytes:
    """Returns the bytes of a piece, which may be a part of a character."""
    piece = self.pieces.get(token, '')
    if match := _BYTE.fullmatch(piece):
      return bytes([int(match[1], 16)])
    if self._backend.is_byte_level:
      return b''.join(_BYTES.get(char, char.encode()) for char in piece)
    return piece.replace(vocabulary.BLANK, ' ').encode()

  def spellings(self, size: int) -> tuple[dict[bytes, list[int]], bool]:
    """Groups the pieces of text among the first `size` ids by their bytes.

    Returns:
      Bytes -> ids; and whether decoding drops the blank that an output begins
      with, as in sentencepiece's vocabularies.
    """
    ids: dict[bytes, list[int]] = {}
    for token in range(min(size, self.vocab_size)):
      if self.is_text(token) and token not in self._hidden:
        ids.setdefault(self.bytes_of(token), []).append(token)
    ids.pop(b'', None)
    blanks = [x for spelling, x in ids.items() if spelling.startswith(b' ')]
    texts = {i: self.decode([i]) for tokens in blanks for i in tokens}
    shows_blank = {i: text.startswith(' ') for i, text in texts.items()}
    drops_blank = not all(shows_blank.values())
    if drops_blank:  # pieces whose blank is shown never begin an output
      ids[b' '] = [x for x in ids.get(b' ', ()) if not shows_blank[x]]
    return ids, drops_blank

  def for_network(
    self,
    size: int,
    split_special_tokens: bool | None = None,
    skip_special_tokens: bool | None = None,
  ) -> 'Tokenizer':
    """Returns this vocabulary for a network of `size` ids.

    A single sentencepiece file does not say whether T5's sentinels follow its
    pieces. If the network lacks the ids of sentinels, their names are text.

    Args:
      size: the network's number of ids.
      split_special_tokens: replaces the attribute; None changes nothing.
      skip_special_tokens: replaces the attribute; None changes nothing.
    """
    result, backend = copy.copy(self), self._backend
    if self._inputs:
      result._inputs = self._inputs.for_network(
        size, split_special_tokens, skip_special_tokens
      )
    if split_special_tokens is not None:
      result.split_special_tokens = split_special_tokens
    if skip_special_tokens is not None:
      result.skip_special_tokens = skip_special_tokens
    if isinstance(backend, PiecesBackend) and backend.sentinels:
      result._backend = backend.with_sentinels(size > max(backend.sentinels))
    result._set_sizes()
    return result

  @functools.cached_property
  def fingerprint(self) -> str:
    """sha256 (hex) of the pieces, without added tokens, and of languages.

    The fingerprint of a vocabulary is the same for all kinds of its files.
    """
    added = self._special | self._backend.added.keys()
    is_sentinel = vocabulary.SENTINEL.fullmatch
    pieces = [(i, x) for i, x in self.pieces.items() if not is_sentinel(x)]
    pieces = sorted(pair for pair in pieces if pair[0] not in added)
    text = json.dumps([pieces, sorted(self.languages.items())])
    return hashlib.sha256(text.encode()).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without those in `before` and `after`."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Applies `encode` to each text."""
    return self._backend.encode(list(texts), not self.split_special_tokens)

  def encode_marked(self, text: str) -> list[int]:
    """Returns the ids of a rendered chat.

    Names of special tokens become those tokens, unless `hide_names` has marked
    them as a user's words.

    Raises:
      ValueError: the vocabulary reads a special token out of other letters than
        its name, or out of a marked name.
    """
    return self._backend.encode_marked(text)

  def hide_names(self, text: str) -> str:
    """Marks the names of special tokens in a user's words.

    `encode_marked` reads marked names as text.
    """
    text = text.replace(vocabulary.MARK, '')
    encoded = self._names.encode(text)
    marked = ''
    for i, span in zip(encoded.ids, encoded.offsets, strict=True):
      part = text[slice(*span)]
      marked += vocabulary.MARK.join([*part, '']) if i else part
    return marked

  @functools.cached_property
  def _names(self) -> Any:
    """A processor that finds the names of special tokens in a text."""
    names = [self.pieces[i] for i in self._special & self.pieces.keys()]
    return vocabulary.splitter(map(vocabulary.added_token, names))

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`; see `skip_special_tokens`.

    That attribute says which ids have no text.

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    visible = []
    for token in map(int, ids):
      has_piece = token in self.pieces
      if not has_piece and not 0 <= token < self.vocab_size:
        where = f'outside the vocabulary of {self.vocab_size}'
        raise ValueError(f'Token id {token} is {where}.')
      if has_piece and token not in self._hidden:
        visible.append(token)
    return self._backend.decode(visible)


def contradiction(first: Vocabulary, second: Vocabulary) -> str:
  """Describes an id whose token two vocabularies differ in; '' if none does.

  One vocabulary may have more tokens, such as those that a fine-tune added.
  Vocabularies without `pieces` are compared by their fingerprints.
  """
  ours, theirs = first.pieces, second.pieces
  if not (ours and theirs):
    same = first.fingerprint == second.fingerprint
    return '' if same else 'their fingerprints do'
  if ours is not theirs:
    for i in sorted(ours.keys() & theirs.keys()):
      if ours[i] != theirs[i]:
        return f'id {i} is {ours[i]!r} and {theirs[i]!r}'
  return ''


def train_tokenizer(
  sentences: Iterable[str], path: str | os.PathLike[str], vocab_size: int = 8000
) -> Tokenizer:
  """Trains a unigram vocabulary with byte fallback and writes it to `path`.

  The same sentences in the same order give the same file.

  Args:
    sentences: text, one sentence each.
    path: the `.model` file to write; it is replaced whole or not at all.
    vocab_size: number of pieces, the 256 byte pieces and 3 special ones
      included.

  Raises:
    ValueError: there is too little text for that many pieces.
  """
  import sentencepiece

  ids: dict[str, Any] = {'pad_id': PAD_ID, 'eos_id': EOS_ID, 'unk_id': UNK_ID}
  proto = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(sentences),
      model_writer=proto,
      model_type='unigram',
      vocab_size=vocab_size,
      character_coverage=0.9999,
      byte_fallback=True,
      **ids,
      bos_id=-1,
      # The number of threads decides the order in which expected counts are
      # summed, and so their rounding. A fixed number gives the same file on
      # every machine.
      num_threads=4,
      minloglevel=2,
    )
  except (RuntimeError, ValueError) as error:
    why = f'No vocabulary of {vocab_size} pieces could be trained: {error}'
    raise ValueError(why) from error
  files.write_atomically(path, proto.getvalue())
  return Tokenizer(path)
