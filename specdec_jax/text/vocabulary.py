"""The files of a vocabulary, and what cuts a text into its pieces.

The packages tokenizers and sentencepiece are imported when a vocabulary is
opened, so that work on token arrays needs neither.
"""

import copy
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import unexpected
from specdec_jax.files.locations import open_location

# For comparison: the largest vocabulary in use, of 256,000 pieces, has 5 MiB.
MOST_BYTES = 256 << 20
SENTENCEPIECE = 'spiece.model'  # T5's
TOKENIZER = 'tokenizer.json'
VOCAB, MERGES = 'vocab.json', 'merges.txt'
PIECES = 'sentencepiece.bpe.model'  # M2M-100's, whose ids are in vocab.json
SETTINGS, ADDED = 'tokenizer_config.json', 'added_tokens.json'
_NAMES = 'special_tokens_map.json'  # of folders that transformers 4 wrote
_LISTS = ('additional_special_tokens', 'extra_special_tokens')
# Stands in the names that are no tokens; Unicode keeps it out of texts.
MARK = '\ufdd0'
SENTINEL = re.compile('\u2581?<extra_id_[0-9]+>')
_COPY = 'Copy it again from its source.'
END = '<|endoftext|>'  # GPT-2's, where a folder does not say
BLANK = '\u2581'  # sentencepiece's mark
_REST = '\0'
_FIELDS = {*'content single_word lstrip rstrip normalized special'.split()}
_MANY = 256  # texts for which sentencepiece may start its threads
_SENTINELS = 100  # of T5, in seqio and in transformers
_QWEN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_M2M = _BOS, _PAD, _EOS, _UNK = '<s>', '<pad>', '</s>', '<unk>'


def added_token(content: str, **fields: bool) -> Any:
  """An `AddedToken`, which texts are split at; a special one by default."""
  import tokenizers

  fields = {'special': True, 'normalized': False} | fields
  return tokenizers.AddedToken(content, **fields)


def splitter(tokens: Iterable[Any]) -> Any:
  """Finds added tokens in texts, as transformers does; the rest is id 0."""
  import tokenizers

  model = tokenizers.models.WordLevel({_REST: 0}, unk_token=_REST)
  made = tokenizers.Tokenizer(model)
  made.add_tokens([*tokens])
  return made


def is_vocabulary(folder: pathlib.Path) -> bool:
  """Whether a folder holds the files of a vocabulary."""
  kinds = ((TOKENIZER,), (SENTENCEPIECE,), (PIECES,), (VOCAB, MERGES))
  paths = [[folder / file for file in kind] for kind in kinds]
  return any(all(map(os.path.lexists, kind)) for kind in paths)


def settings(folder: pathlib.Path) -> dict[str, Any]:
  """What a folder's tokenizer_config.json says; {} without one."""
  return _object_of(folder / _NAMES) | _object_of(folder / SETTINGS)


def _object_of(file: pathlib.Path) -> dict[str, Any]:
  """The object of a JSON file; {} if there is no such file."""
  return files.read_json(file) if os.path.lexists(file) else {}


def content(token: Any) -> str:
  """The text of a token in tokenizer_config.json; '' if there is none."""
  if isinstance(token, dict):
    token = token.get('content')
  return token if isinstance(token, str) else ''


def named_tokens(config: Mapping[str, Any]) -> list[str]:
  """The special tokens that tokenizer_config.json names without their ids."""
  names = [value for key, value in config.items() if key.endswith('_token')]
  for key in _LISTS:
    value = config.get(key) or []
    names += value.values() if isinstance(value, dict) else value
  return [name for name in map(content, names) if name]


def added_tokens(folder: pathlib.Path, config: Mapping[str, Any]):
  """The added tokens whose ids the files beside a vocabulary say.

  Args:
    folder: with added_tokens.json, if there are such tokens.
    config: its tokenizer_config.json.

  Returns:
    id -> `AddedToken`, by ids.

  Raises:
    ValueError: an entry is not of the right form, or both files name one id.
  """
  tokens = {}
  for number, fields in (config.get('added_tokens_decoder') or {}).items():
    try:
      known = {name: fields[name] for name in _FIELDS & fields.keys()}
      tokens[int(number)] = added_token(**{'special': False} | known)
    except (AttributeError, TypeError, ValueError) as error:
      where = f'{os.fspath(folder / SETTINGS)!r}: added_tokens_decoder'
      expected = 'ids, each with the fields of a token'
      raise unexpected(where, expected, {number: fields}) from error
  special = {*named_tokens(config)}
  for name, number in _object_of(folder / ADDED).items():
    if not isinstance(number, int):
      where = f'{os.fspath(folder / ADDED)!r}: {name!r}'
      raise unexpected(where, 'the id of a token', number)
    other = tokens.setdefault(
      number, added_token(name, special=name in special)
    )
    if other.content != name:
      where = f'{os.fspath(folder)!r}: id {number} in {ADDED}'
      ours = f'{other.content!r} as in {SETTINGS}'
      raise unexpected(where, ours, name, _COPY)
  return dict(sorted(tokens.items()))


class JsonBackend:
  """A vocabulary of the package tokenizers.

  Attributes:
    pieces: id -> text of each token.
    added: id -> `AddedToken`, the tokens that a text is split at.
    before: ids that the vocabulary puts in front of a text.
    after: ids that it puts behind one.
    is_bpe: whether its model is BPE.
    is_byte_level: whether its pieces are of bytes, as GPT-2's.
    sentinels: ids of T5's sentinels that no file names.
  """

  sentinels: set[int] = set()

  def __init__(
    self,
    place: pathlib.Path,
    config: Mapping[str, Any],
    added: Mapping[int, Any],
  ):
    """Loads a vocabulary.

    Args:
      place: a tokenizer.json; or vocab.json, with merges.txt beside it.
      config: the tokenizer_config.json beside it.
      added: the tokens that the files beside it add to it.

    Raises:
      ValueError: a file is missing or broken, or of a kind that is not known;
        or two files contradict each other.
    """
    import tokenizers

    if place.name == VOCAB:
      processor = _of_vocab(tokenizers, place, config)
    else:
      processor = _of_json(tokenizers, place)
    processor.no_padding()
    processor.no_truncation()
    for number, token in added.items():
      if processor.token_to_id(token.content) is None:
        processor.add_tokens([token])
      actual = processor.token_to_id(token.content)
      if actual != number:
        where = f'{os.fspath(place)!r}: {token.content!r}'
        ours = f'id {number} as {SETTINGS} or {ADDED} has it'
        raise unexpected(where, ours, actual, _COPY)
    named = {
      token.content for token in processor.get_added_tokens_decoder().values()
    }
    processor.add_special_tokens(
      [name for name in named_tokens(config) if name not in named]
    )
    self._processor = processor
    self._plain: Any = None
    self.is_bpe = type(processor.model).__name__ == 'BPE'
    self.is_byte_level = 'ByteLevel' in repr(processor.decoder)
    self.added = processor.get_added_tokens_decoder()
    self.pieces = {i: piece for piece, i in processor.get_vocab().items()}
    marked = processor.encode('a', add_special_tokens=True)
    is_added = marked.special_tokens_mask
    self.before = marked.ids[: (*is_added, 0).index(0)]
    self.after = marked.ids[len(is_added) - (*is_added[::-1], 0).index(0) :]

  def encode(self, texts: Sequence[str], names: bool) -> list[list[int]]:
    """Ids of texts; `names` says whether names of special tokens are ids."""
    processor = self._processor
    if not names:
      if self._plain is None:
        self._plain = type(processor).from_str(processor.to_str())
        self._plain.encode_special_tokens = True
      processor = self._plain
    encodings = processor.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]

  def encode_marked(self, text: str) -> list[int]:
    """Ids of a text in whose names MARK may stand, see `Tokenizer`."""
    encoded = self._marked.encode(text, add_special_tokens=False)
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
      added = self.added.get(token)
      if added is None or not added.special:
        continue
      is_name = text[start:end].strip() == added.content.strip()
      if not is_name or text[end : end + 1] == MARK:
        raise ValueError(
          f'The vocabulary reads {added.content!r} out of plain text.'
        )
    return encoded.ids

  @functools.cached_property
  def _marked(self) -> Any:
    """A processor that finds special tokens, and then leaves MARK out."""
    import tokenizers

    made = tokenizers.Tokenizer.from_str(self._processor.to_str())
    parts = [tokenizers.normalizers.Replace(MARK, ''), made.normalizer]
    made.normalizer = tokenizers.normalizers.Sequence([*filter(None, parts)])
    return made

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids, special ones included."""
    return self._processor.decode(ids, skip_special_tokens=False)


def _of_json(tokenizers: Any, place: pathlib.Path) -> Any:
  """A processor of a tokenizer.json."""
  data = read_bytes(place)
  try:
    return tokenizers.Tokenizer.from_str(data.decode())
  # The package raises plain Exceptions.
  except Exception as error:
    # The package names its own types, such as PreTokenizerWrapper.
    kind = re.search('enum (?:Py)?(.+)(?:Untagged|Wrapper)', str(error))
    field = re.sub('(?!^)([A-Z])', r'_\1', kind[1]).lower() if kind else ''
    why = f'it does not read the field {field!r}' if field else error
    whole = f'a vocabulary of the package tokenizers {tokenizers.__version__}'
    raise ValueError(
      f'{os.fspath(place)!r}: expected {whole} ({why}). {_COPY}'
    ) from error


def _of_vocab(
  tokenizers: Any, place: pathlib.Path, config: Mapping[str, Any]
) -> Any:
  """A processor of vocab.json and merges.txt, as their tokenizer_class says."""
  paths = [os.fspath(place), os.fspath(place.with_name(MERGES))]
  for path in paths:
    read_bytes(path)
  try:
    made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*paths))
  except Exception as error:
    what = f'with {MERGES} it is not a whole vocabulary of byte-level BPE'
    raise ValueError(f'{paths[0]!r}: {what} ({error}). {_COPY}') from error
  parts = tokenizers.pre_tokenizers
  kind = content(config.get('tokenizer_class'))
  prefix = config.get('add_prefix_space') is True
  made.pre_tokenizer = parts.ByteLevel(add_prefix_space=prefix)
  made.decoder = tokenizers.decoders.ByteLevel()
  if kind.startswith('Qwen2'):
    made.normalizer = tokenizers.normalizers.NFC()
    level = parts.ByteLevel(add_prefix_space=prefix, use_regex=False)
    split = parts.Split(tokenizers.Regex(_QWEN), 'isolated')
    made.pre_tokenizer = parts.Sequence([split, level])
  ends = [
    content(config.get(name)) if config.get(f'add_{name}') else ''
    for name in ('bos_token', 'eos_token')
  ]
  if kind.startswith('Roberta') or config.get('cls_token'):  # CodeT5's
    names = (('cls_token', _BOS), ('sep_token', _EOS))
    ends = [content(config.get(name)) or usual for name, usual in names]
  elif made.token_to_id(END) is not None and not config.get('eos_token'):
    made.add_special_tokens([END])
  first, last = ends
  named = [name for name in ends if name]
  made.add_special_tokens(named)
  made.post_processor = tokenizers.processors.TemplateProcessing(
    f'{first} $A {last}'.strip(),
    special_tokens=[(name, made.token_to_id(name)) for name in named],
  )
  return made


def read_bytes(path: str | os.PathLike[str]) -> bytes:
  """A file of a vocabulary, on this machine or `gs://bucket/file`.

  Raises:
    ValueError: it cannot be read.
  """
  path = os.fspath(path)
  try:
    return open_location(path).read_all(MOST_BYTES)
  except OSError as error:
    where = f'No vocabulary could be read at {path!r}'
    raise ValueError(f'{where}: {error.strerror}.') from error


class PiecesBackend:
  """A sentencepiece model, with the methods and attributes of `JsonBackend`.

  Names of the model's own control tokens are text if the model is a file of no
  folder, as in seqio; in a folder they are those tokens, as in transformers.

  Attributes:
    size: pieces of the model.
    control: id -> `AddedToken`, the tokens without a text of their own.
    unk_id, eos_id: ids of what is in no piece and of the end of sequence.
    sentinels: T5's vocabulary has 100 of them behind its pieces, in seqio and
      in transformers.
  """

  before: list[int] = []
  is_bpe = is_byte_level = False

  def __init__(
    self,
    path: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
    added: Mapping[int, Any] | None = None,
    numbers: dict[str, int] | None = None,
  ):
    """Loads a model.

    Args:
      path: the model, on this machine or `gs://bucket/file`.
      config: the tokenizer_config.json of its folder; None if it is of none.
      added: the tokens that the files beside it add to it.
      numbers: piece -> id, where these are not the model's own.

    Raises:
      ValueError: as of `JsonBackend`.
    """
    self._processor = model = _sentencepiece(path)
    ids_of = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    control = [i for i in ids_of.values() if model.is_control(i)]
    control.append(model.unk_id())
    self.unk_id, self.eos_id = model.unk_id(), model.eos_id()
    if numbers is not None:
      ids_of, control = numbers, [numbers[name] for name in _M2M]
      self.unk_id, self.eos_id = numbers[_UNK], numbers[_EOS]
    self.after = [self.eos_id]
    self.size, self._numbers = len(ids_of), numbers
    self.pieces = {i: piece for piece, i in ids_of.items()}
    self.control = {i: added_token(self.pieces[i]) for i in control}
    self.added = {} if config is None else dict(self.control)
    count = self._num_sentinels(config or {})
    for i in range(count):
      self.added[self.size + count - 1 - i] = added_token(f'<extra_id_{i}>')
    self.sentinels: set[int] = set()
    if config is None or 'extra_ids' not in config:
      self.sentinels = {*self.added.keys() - self.pieces}
    ids = ids_of | {token.content: i for i, token in self.added.items()}
    for i, token in (added or {}).items():
      piece = self.added[i].content if i in self.added else self.pieces.get(i)
      if piece not in (None, token.content) or ids.get(token.content, i) != i:
        raise unexpected(
          f'{os.fspath(path)!r}: {token.content!r}',
          f'id {i} as {SETTINGS} or {ADDED} has it',
          f'id {ids.get(token.content)}, and {piece!r} as id {i}',
          _COPY,
        )
      self.added[i] = token
      ids[token.content] = i
    known = {token.content for token in self.added.values()}
    for name in named_tokens(config or {}):
      if name not in known:
        ids.setdefault(name, 1 + max(ids.values()))
        self.added[ids[name]] = added_token(name)
    self.sentinels -= {*(added or {})}
    self.pieces |= {i: token.content for i, token in self.added.items()}
    self._splitters: dict[bool, tuple[re.Pattern[str], Any]] = {}

  def _num_sentinels(self, config: Mapping[str, Any]) -> int:
    has_own = any(map(SENTINEL.fullmatch, self.pieces.values()))
    if has_own or self._numbers or (self.eos_id, self.unk_id) != (1, 2):
      return 0
    count = config.get('extra_ids', _SENTINELS)
    return count if isinstance(count, int) else 0

  def with_sentinels(self, exist: bool) -> 'PiecesBackend':
    """A copy that names the `sentinels`, or has none."""
    made = copy.copy(self)
    gone = set() if exist else self.sentinels
    made.added = {i: token for i, token in self.added.items() if i not in gone}
    made.pieces = {
      i: token for i, token in self.pieces.items() if i not in gone
    }
    made.sentinels, made._splitters = set(), {}
    return made

  def encode(self, texts: Sequence[str], names: bool) -> list[list[int]]:
    """As of `JsonBackend`."""
    if names not in self._splitters:
      tokens = [x for x in self.added.values() if names or not x.special]
      any_name = '|'.join(re.escape(token.content) for token in tokens)
      self._splitters[names] = re.compile(any_name or '(?!)'), splitter(tokens)
    name_in, split = self._splitters[names]
    if not any(map(name_in.search, texts)):
      texts = [text.replace(MARK, '') for text in texts]
      if len(texts) < _MANY or self._numbers:
        return [*map(self._encode, texts)]
      return self._processor.encode(texts)  # by all cores
    parts = split.encode_batch(list(texts))
    ids = {token.content: i for i, token in self.added.items()}
    rows: list[list[int]] = [[] for _ in texts]
    for row, text, part in zip(rows, texts, parts, strict=True):
      for i, name, span in zip(
        part.ids, part.tokens, part.offsets, strict=True
      ):
        rest = text[slice(*span)].replace(MARK, '')
        row += [ids[name]] if i else self._encode(rest)
    return rows

  def encode_marked(self, text: str) -> list[int]:
    """As of `JsonBackend`."""
    return self.encode([text], True)[0]

  def _encode(self, text: str) -> list[int]:
    if self._numbers is None:
      return self._processor.encode(text)
    pieces = self._processor.encode(text, out_type=str)
    return [self._numbers.get(piece, self.unk_id) for piece in pieces]

  def decode(self, ids: Sequence[int]) -> str:
    """As of `JsonBackend`."""
    text = ''
    marked = self.added | self.control
    for is_marked, run in itertools.groupby(ids, marked.__contains__):
      if is_marked:
        text += ''.join(marked[i].content for i in run)
        continue
      pieces = [self.pieces[i] for i in run]
      # The package takes all blanks that a text begins with for its own, and
      # transformers the first one.
      part = self._processor.decode(['a', *pieces])[1:]
      is_first = not text and pieces[0].startswith(BLANK)
      text += part[1:] if is_first else part
    return text


def _sentencepiece(path: str | os.PathLike[str]) -> Any:
  """A processor of a sentencepiece model."""
  import sentencepiece

  proto = read_bytes(path)
  try:
    if not proto:
      raise RuntimeError('the file is empty')
    return sentencepiece.SentencePieceProcessor(model_proto=proto)
  except (RuntimeError, TypeError) as error:
    what = f'{len(proto)} bytes are not a whole sentencepiece model'
    raise ValueError(f'{os.fspath(path)!r}: {what}. {_COPY}') from error


def _m2m_backend(folder: pathlib.Path, config: dict[str, Any]) -> PiecesBackend:
  """M2M-100's: a sentencepiece model whose pieces vocab.json numbers.

  The languages' tokens follow, in an order that is in no file of the folder.
  """
  path = folder / VOCAB
  numbers = _object_of(path)
  # The languages follow, so that a part of it would give them other ids.
  is_whole = sorted(numbers.values(), key=str) == sorted(
    range(len(numbers)), key=str
  )
  if not is_whole or not {*_M2M} <= numbers.keys():
    what = f'pieces of M2M-100 with {[*_M2M]}, numbered from 0'
    raise unexpected(repr(os.fspath(path)), what, numbers, _COPY)
  from specdec_jax.checkpoints.families import WORDS  # brings JAX

  codes = content(config.get('language_codes')) or 'm2m100'
  languages = WORDS['languages']
  if codes not in languages:
    where = f'{os.fspath(folder)!r}: language_codes'
    raise unexpected(where, f'one of {sorted(languages)}', codes)
  names = [f'__{name}__' for name in languages[codes].split()]
  added = {len(numbers) + i: added_token(name) for i, name in enumerate(names)}
  added |= added_tokens(folder, config)
  return PiecesBackend(folder / PIECES, config, added, numbers)


def open_backend(
  path: str,
) -> tuple[JsonBackend | PiecesBackend, dict[str, Any]]:
  """A vocabulary's backend, and the tokenizer_config.json beside it."""
  place = pathlib.Path(path)
  is_folder = '://' not in path and place.is_dir()
  folder = place if is_folder else place.parent
  names = (TOKENIZER, SENTENCEPIECE, PIECES, VOCAB)
  if is_folder:
    name = next((name for name in names if os.path.lexists(folder / name)), '')
  else:
    beside = any(os.path.lexists(folder / name) for name in (SETTINGS, ADDED))
    name = place.name if place.name in names[:2] and beside else ''
  if name:
    config = settings(folder)
    if name == PIECES:
      return _m2m_backend(folder, config), config
    added = added_tokens(folder, config)
    if name == SENTENCEPIECE:
      return PiecesBackend(folder / name, config, added), config
    backend = JsonBackend(folder / name, config, added)
    if is_folder and name == TOKENIZER:
      _check_same(folder, backend)
    return backend, config
  if is_folder:
    expected = f'{TOKENIZER}, {SENTENCEPIECE} or {VOCAB} in it'
    raise unexpected(f'vocabulary {path!r}', expected, 'a folder without')
  if place.suffix == '.json' and '://' not in path:
    return JsonBackend(place, {}, {}), {}
  return PiecesBackend(path), {}


def _check_same(folder: pathlib.Path, backend: JsonBackend) -> None:
  """Raises ValueError if spiece.model has other pieces than tokenizer.json."""
  if not os.path.lexists(folder / SENTENCEPIECE):
    return
  pieces = PiecesBackend(folder / SENTENCEPIECE).pieces
  for i, piece in pieces.items():
    other = backend.pieces.get(i, piece)
    if other != piece and not SENTINEL.fullmatch(other):
      raise unexpected(
        f'{os.fspath(folder)!r} has two vocabularies: id {i}',
        f'{other!r} as in {TOKENIZER}',
        piece,
        f'Remove it, or {SENTENCEPIECE}: what the weights do not belong to.',
      )
