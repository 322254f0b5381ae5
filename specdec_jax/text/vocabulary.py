"""The files of a vocabulary, and the backends that cut texts into pieces.

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

# The most bytes of a vocabulary's file. The largest known vocabulary, with
# 256,000 pieces, has 5 MiB.
MOST_BYTES = 256 << 20
SENTENCEPIECE = 'spiece.model'  # the vocabulary of T5
TOKENIZER = 'tokenizer.json'
VOCAB, MERGES = 'vocab.json', 'merges.txt'
# The pieces of M2M-100 and mBART.
PIECES = 'sentencepiece.bpe.model'
# Marian's two sentencepiece models; and the ids of the target's pieces, if
# vocab.json has only those of the source.
SOURCE, TARGET = 'source.spm', 'target.spm'
TARGET_VOCAB = 'target_vocab.json'
SETTINGS, ADDED = 'tokenizer_config.json', 'added_tokens.json'
_NAMES = 'special_tokens_map.json'  # transformers 4 wrote this file
_LISTS = ('additional_special_tokens', 'extra_special_tokens')
# In a user's text this is put behind each character of a special token's name,
# which is then read as text. Unicode reserves it, so that no text has it.
MARK = '\ufdd0'
SENTINEL = re.compile('\u2581?<extra_id_[0-9]+>')
_COPY = 'Copy it again from its source.'
END = '<|endoftext|>'  # GPT-2's end of sequence, the default of byte-level BPE
BLANK = '\u2581'  # a blank in the pieces of sentencepiece
_REST = '\0'
_FIELDS = {*'content single_word lstrip rstrip normalized special'.split()}
_MANY = 256  # the fewest texts for which sentencepiece may start threads
_SENTINELS = 100  # ids that seqio and transformers add to T5's pieces
_QWEN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_FAIRSEQ = _BOS, _PAD, _EOS, _UNK = '<s>', '<pad>', '</s>', '<unk>'
_MASK = '<mask>'
_CODE = re.compile('>>.*?<<', re.DOTALL)  # Marian's code of a language
_MOVED = 103  # number of Pegasus' special ids, which precede those of pieces
Settings = Mapping[str, Any]  # tokenizer_config.json
Added = Mapping[int, Any]  # id -> `AddedToken`


def added_token(content: str, **fields: bool) -> Any:
  """Makes an `AddedToken`, which texts are split at; special by default."""
  import tokenizers

  fields = {'special': True, 'normalized': False} | fields
  return tokenizers.AddedToken(content, **fields)


def splitter(tokens: Iterable[Any]) -> Any:
  """Makes a processor that finds added tokens; other text becomes id 0."""
  import tokenizers

  model = tokenizers.models.WordLevel({_REST: 0}, unk_token=_REST)
  processor = tokenizers.Tokenizer(model)
  processor.add_tokens([*tokens])
  return processor


def is_vocabulary(folder: pathlib.Path) -> bool:
  """Whether a folder holds the files of a vocabulary."""
  kinds = TOKENIZER, SENTENCEPIECE, PIECES, f'{VOCAB} {MERGES}', SOURCE, TARGET
  paths = [[folder / file for file in kind.split()] for kind in kinds]
  return any(all(map(os.path.lexists, kind)) for kind in paths)


def settings(folder: pathlib.Path) -> dict[str, Any]:
  """Reads a folder's tokenizer_config.json and special_tokens_map.json.

  A setting of the first overrides one of the second; missing files have none.
  """
  return _object_of(folder / _NAMES) | _object_of(folder / SETTINGS)


def _object_of(file: pathlib.Path) -> dict[str, Any]:
  """Reads the object in a JSON file; {} if there is no such file."""
  return files.read_json(file) if os.path.lexists(file) else {}


def content(token: Any) -> str:
  """Returns the text of a token in tokenizer_config.json; '' if missing."""
  if isinstance(token, dict):
    token = token.get('content')
  return token if isinstance(token, str) else ''


def named_tokens(config: Settings) -> list[str]:
  """Returns special tokens that tokenizer_config.json names without ids."""
  names = [value for key, value in config.items() if key.endswith('_token')]
  for key in _LISTS:
    value = config.get(key) or []
    names += value.values() if isinstance(value, dict) else value
  return [name for name in map(content, names) if name]


def added_tokens(folder: pathlib.Path, config: Settings) -> dict[int, Any]:
  """Reads the added tokens with ids in the files beside a vocabulary.

  Args:
    folder: the folder, which may have added_tokens.json.
    config: the settings in the folder's tokenizer_config.json.

  Returns:
    id -> `AddedToken`, in the order of ids.

  Raises:
    ValueError: an entry has a wrong form, or two files differ about an id.
  """
  tokens: dict[int, Any] = {}
  for number, fields in (config.get('added_tokens_decoder') or {}).items():
    try:
      attributes = {name: fields[name] for name in _FIELDS & fields.keys()}
      tokens[int(number)] = added_token(**{'special': False} | attributes)
    except (AttributeError, TypeError, ValueError) as error:
      where = f'{os.fspath(folder / SETTINGS)!r}: added_tokens_decoder'
      expected = 'ids, each with the fields of a token'
      raise unexpected(where, expected, {number: fields}) from error
  special = {*named_tokens(config)}
  for name, number in _object_of(folder / ADDED).items():
    if not isinstance(number, int):
      where = f'{os.fspath(folder / ADDED)!r}: {name!r}'
      raise unexpected(where, 'the id of a token', number)
    token = added_token(name, special=name in special)
    other = tokens.setdefault(number, token)
    if other.content != name:
      where = f'{os.fspath(folder)!r}: id {number} in {ADDED}'
      ours = f'{other.content!r} as in {SETTINGS}'
      raise unexpected(where, ours, name, _COPY)
  return dict(sorted(tokens.items()))


def _contradiction(file: Any, token: Any, number: int, got: Any) -> ValueError:
  """Makes the error for an added token that has another id in `file`."""
  expected = f'id {number} as {SETTINGS} or {ADDED} has it'
  where = f'{os.fspath(file)!r}: {token.content!r}'
  return unexpected(where, expected, got, _COPY)


class JsonBackend:
  """A vocabulary that the package tokenizers reads.

  Attributes:
    pieces: id -> text of each token.
    added: id -> `AddedToken`, the tokens that a text is split at.
    before: ids in front of each text.
    after: ids after each text.
    is_bpe: whether the vocabulary's model is BPE.
    is_byte_level: whether the pieces are made of bytes, as in GPT-2.
    sentinels: ids of T5's sentinels that no file names.
  """

  sentinels: set[int] = set()

  def __init__(self, place: pathlib.Path, config: Settings, added: Added):
    """Loads a vocabulary.

    Args:
      place: a tokenizer.json; or vocab.json, with merges.txt beside it.
      config: the tokenizer_config.json beside it.
      added: the result of `added_tokens` for the files beside it.

    Raises:
      ValueError: a file is missing, broken or of an unknown kind; or two files
        contradict each other.
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
        raise _contradiction(place, token, number, actual)
    tokens = processor.get_added_tokens_decoder().values()
    known = {token.content for token in tokens}
    names = [name for name in named_tokens(config) if name not in known]
    processor.add_special_tokens(names)
    self._processor = processor
    self.is_bpe = type(processor.model).__name__ == 'BPE'
    self.is_byte_level = 'ByteLevel' in repr(processor.decoder)
    self.added = processor.get_added_tokens_decoder()
    self.pieces = {i: piece for piece, i in processor.get_vocab().items()}
    marked = processor.encode('a', add_special_tokens=True)
    is_added = marked.special_tokens_mask
    self.before = marked.ids[: (*is_added, 0).index(0)]
    self.after = marked.ids[len(is_added) - (*is_added[::-1], 0).index(0) :]

  def encode(self, texts: Sequence[str], names: bool) -> list[list[int]]:
    """Returns the ids of texts.

    Args:
      texts: the texts.
      names: whether the name of a special token in a text is that token.
    """
    processor = self._processor if names else self._without_names
    encodings = processor.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]

  def _copy(self) -> Any:
    return type(self._processor).from_str(self._processor.to_str())

  @functools.cached_property
  def _without_names(self) -> Any:
    """A processor that reads names of special tokens as text."""
    processor = self._copy()
    processor.encode_special_tokens = True
    return processor

  def encode_marked(self, text: str) -> list[int]:
    """Returns the ids of a rendered chat.

    Names of special tokens become these tokens, unless `Tokenizer.hide_names`
    has marked them as text.
    """
    encoded = self._marked.encode(text, add_special_tokens=False)
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
      added = self.added.get(token)
      if added is None or not added.special:
        continue
      is_name = text[start:end].strip() == added.content.strip()
      if not is_name or text[end : end + 1] == MARK:
        why = f'The vocabulary reads {added.content!r} out of plain text.'
        raise ValueError(why)
    return encoded.ids

  @functools.cached_property
  def _marked(self) -> Any:
    """A processor that finds special tokens, and then leaves MARK out."""
    from tokenizers import normalizers

    processor = self._copy()
    parts = [normalizers.Replace(MARK, ''), processor.normalizer]
    processor.normalizer = normalizers.Sequence([*filter(None, parts)])
    return processor

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, special ones included."""
    return self._processor.decode(ids, skip_special_tokens=False)


def _of_json(tokenizers: Any, place: pathlib.Path) -> Any:
  """Makes the processor of a tokenizer.json."""
  data = read_bytes(place)
  try:
    return tokenizers.Tokenizer.from_str(data.decode())
  # The package raises `Exception` itself, not a subclass.
  except Exception as error:
    # The package names its own types, such as PreTokenizerWrapper.
    kind = re.search('enum (?:Py)?(.+)(?:Untagged|Wrapper)', str(error))
    field = re.sub('(?!^)([A-Z])', r'_\1', kind[1]).lower() if kind else ''
    why = f'it does not read the field {field!r}' if field else error
    whole = f'a vocabulary of the package tokenizers {tokenizers.__version__}'
    why = f'{os.fspath(place)!r}: expected {whole} ({why}). {_COPY}'
    raise ValueError(why) from error


def _of_vocab(tokenizers: Any, place: pathlib.Path, config: Settings) -> Any:
  """Makes the processor of vocab.json and merges.txt, given the settings."""
  paths = [os.fspath(place), os.fspath(place.with_name(MERGES))]
  for path in paths:
    read_bytes(path)
  try:
    processor = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*paths))
  except Exception as error:
    problem = f'with {MERGES} it is not a whole vocabulary of byte-level BPE'
    raise ValueError(f'{paths[0]!r}: {problem} ({error}). {_COPY}') from error
  parts = tokenizers.pre_tokenizers
  kind = content(config.get('tokenizer_class'))
  prefix = config.get('add_prefix_space') is True
  processor.pre_tokenizer = parts.ByteLevel(add_prefix_space=prefix)
  processor.decoder = tokenizers.decoders.ByteLevel()
  if kind.startswith('Qwen2'):
    processor.normalizer = tokenizers.normalizers.NFC()
    level = parts.ByteLevel(add_prefix_space=prefix, use_regex=False)
    split = parts.Split(tokenizers.Regex(_QWEN), 'isolated')
    processor.pre_tokenizer = parts.Sequence([split, level])
  bos = content(config.get('bos_token')) if config.get('add_bos_token') else ''
  eos = content(config.get('eos_token')) if config.get('add_eos_token') else ''
  # The tokenizers of CodeT5 and BART have this token.
  is_bart = processor.token_to_id(_MASK) is not None
  if is_bart:
    names = [*map(added_token, _FAIRSEQ), added_token(_MASK, lstrip=True)]
    processor.add_special_tokens(names)
  if is_bart or kind.startswith('Roberta') or config.get('cls_token'):
    bos = content(config.get('cls_token')) or _BOS
    eos = content(config.get('sep_token')) or _EOS
  elif processor.token_to_id(END) is not None and not config.get('eos_token'):
    processor.add_special_tokens([END])
  named = [name for name in (bos, eos) if name]
  processor.add_special_tokens(named)
  processor.post_processor = tokenizers.processors.TemplateProcessing(
    f'{bos} $A {eos}'.strip(),
    special_tokens=[(name, processor.token_to_id(name)) for name in named],
  )
  return processor


def read_bytes(path: str | os.PathLike[str]) -> bytes:
  """Reads a file of a vocabulary, on this machine or `gs://bucket/file`.

  Raises:
    ValueError: the file cannot be read.
  """
  path = os.fspath(path)
  try:
    return open_location(path).read_all(MOST_BYTES)
  except OSError as error:
    where = f'No vocabulary could be read at {path!r}'
    raise ValueError(f'{where}: {error.strerror}.') from error


class PiecesBackend:
  """A sentencepiece model, with the methods and attributes of `JsonBackend`.

  The name of a control token is text if the model is a single file, as in
  seqio; in a folder it is that token, as in transformers.

  Attributes:
    size: number of pieces of the model.
    control: id -> `AddedToken`, the tokens that have no text.
    unk_id: the id of text that no piece covers.
    eos_id: the id of the end of sequence.
    sentinels: the 100 ids after the pieces of T5's vocabulary, which seqio and
      transformers add.
    has_codes: whether a text may begin with a code such as `>>fra<<`.
  """

  has_codes = False
  before: list[int] = []
  is_bpe = is_byte_level = False

  def __init__(
    self,
    path: str | os.PathLike[str],
    config: Settings | None = None,
    added: Added | None = None,
    numbers: dict[str, int] | None = None,
  ):
    """Loads a model.

    Args:
      path: the model, on this machine or `gs://bucket/file`.
      config: the tokenizer_config.json of its folder; None without a folder.
      added: the result of `added_tokens` for its folder.
      numbers: piece -> id, if another file numbers the pieces.

    Raises:
      ValueError: a file is missing or broken, or two files contradict each
        other.
    """
    self._processor = model = _sentencepiece(path)
    ids_of = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    control = [i for i in ids_of.values() if model.is_control(i)]
    control.append(model.unk_id())
    self.unk_id, self.eos_id = model.unk_id(), model.eos_id()
    if numbers is not None:
      ids_of = numbers
      control = [numbers[name] for name in _FAIRSEQ if name in numbers]
      self.unk_id, self.eos_id = numbers[_UNK], numbers[_EOS]
    self.after = [self.eos_id]
    self.size, self._numbers = len(ids_of), numbers
    self.pieces = {i: piece for piece, i in ids_of.items()}
    self.control = {i: added_token(self.pieces[i]) for i in control}
    self.added = {} if config is None else dict(self.control)
    has_own = any(map(SENTINEL.fullmatch, self.pieces.values()))
    is_t5 = (self.eos_id, self.unk_id) == (1, 2) and not numbers
    count = (config or {}).get('extra_ids', _SENTINELS)
    count = count if is_t5 and not has_own and isinstance(count, int) else 0
    for i in range(count):
      self.added[self.size + count - 1 - i] = added_token(f'<extra_id_{i}>')
    self.sentinels: set[int] = set()
    if config is None or 'extra_ids' not in config:
      self.sentinels = {*self.added.keys() - self.pieces}
    ids = ids_of | {token.content: i for i, token in self.added.items()}
    for i, token in (added or {}).items():
      piece = self.added[i].content if i in self.added else self.pieces.get(i)
      if piece not in (None, token.content) or ids.get(token.content, i) != i:
        got = f'id {ids.get(token.content)}, and {piece!r} as id {i}'
        raise _contradiction(path, token, i, got)
      self.added[i] = token
      ids[token.content] = i
    added_names = {token.content for token in self.added.values()}
    for name in named_tokens(config or {}):
      if name not in added_names:
        ids.setdefault(name, 1 + max(ids.values()))
        self.added[ids[name]] = added_token(name)
    self.sentinels -= {*(added or {})}
    self.pieces |= {i: token.content for i, token in self.added.items()}
    self._splitters: dict[bool, tuple[re.Pattern[str], Any]] = {}

  def with_sentinels(self, exist: bool) -> 'PiecesBackend':
    """Returns a copy that has the tokens of `sentinels` if they `exist`."""
    backend = copy.copy(self)
    if not exist:
      others = (self.added.keys() | self.pieces) - self.sentinels
      backend.added = {i: x for i, x in self.added.items() if i in others}
      backend.pieces = {i: x for i, x in self.pieces.items() if i in others}
    backend.sentinels, backend._splitters = set(), {}
    return backend

  def encode(self, texts: Sequence[str], names: bool) -> list[list[int]]:
    """Returns the ids of texts, as `JsonBackend.encode` does."""
    if names not in self._splitters:
      tokens = [x for x in self.added.values() if names or not x.special]
      any_name = '|'.join(re.escape(token.content) for token in tokens)
      self._splitters[names] = re.compile(any_name or '(?!)'), splitter(tokens)
    name_in, split = self._splitters[names]
    if not any(map(name_in.search, texts)):
      texts = [text.replace(MARK, '') for text in texts]
      if len(texts) < _MANY or self._numbers:
        return [*map(self._encode, texts)]
      return self._processor.encode(texts)  # sentencepiece uses all cores
    parts = split.encode_batch(list(texts))
    ids = {token.content: i for i, token in self.added.items()}
    rows: list[list[int]] = [[] for _ in texts]
    for row, text, part in zip(rows, texts, parts, strict=True):
      each = zip(part.ids, part.tokens, part.offsets, strict=True)
      for i, name, span in each:
        rest = text[slice(*span)].replace(MARK, '')
        row += [ids[name]] if i else self._encode(rest)
    return rows

  def encode_marked(self, text: str) -> list[int]:
    """Returns the ids of a rendered chat.

    Names of special tokens become these tokens, unless `Tokenizer.hide_names`
    has marked them as text.
    """
    return self.encode([text], True)[0]

  def _encode(self, text: str) -> list[int]:
    if self._numbers is None:
      return self._processor.encode(text)
    code = _CODE.match(text) if self.has_codes else None
    codes, text = ([code[0]], text[code.end() :]) if code else ([], text)
    pieces = codes + self._processor.encode(text, out_type=str)
    return [self._numbers.get(piece, self.unk_id) for piece in pieces]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, special ones included."""
    text = ''
    marked = self.added | self.control
    for is_marked, run in itertools.groupby(ids, marked.__contains__):
      if is_marked:
        text += ''.join(marked[i].content for i in run)
        continue
      pieces = [self.pieces[i] for i in run]
      # sentencepiece drops all blanks at the beginning of a text, transformers
      # only the first.
      part = self._processor.decode(['a', *pieces])[1:]
      is_first = not text and pieces[0].startswith(BLANK)
      text += part[1:] if is_first else part
    return text


def _sentencepiece(path: str | os.PathLike[str]) -> Any:
  """Makes the processor of a sentencepiece model."""
  import sentencepiece

  proto = read_bytes(path)
  try:
    if not proto:
      raise RuntimeError('the file is empty')
    return sentencepiece.SentencePieceProcessor(model_proto=proto)
  except (RuntimeError, TypeError) as error:
    problem = f'{len(proto)} bytes are not a whole sentencepiece model'
    raise ValueError(f'{os.fspath(path)!r}: {problem}. {_COPY}') from error


def _numbered(path: pathlib.Path, config: Settings, kind: str) -> PiecesBackend:
  """Opens a sentencepiece model whose pieces have other ids than in the model.

  The ids are those in vocab.json (M2M-100, Marian), or follow those of the
  special tokens, which come first (mBART, Pegasus). Tokens of languages follow
  the pieces, in an order that no file of the folder has.
  """
  folder, family = path.parent, ''
  codes = content(config.get('language_codes'))
  if path.name in (SOURCE, TARGET):
    is_own = path.name == TARGET and config.get('separate_vocabs')
    numbers = _numbers_of(folder / (TARGET_VOCAB if is_own else VOCAB), ())
  elif path.name == PIECES and os.path.lexists(folder / VOCAB):
    numbers = _numbers_of(folder / VOCAB, _FAIRSEQ)
    family, codes = 'm2m100', codes or 'm2m100'
  else:
    first, skipped = [*_FAIRSEQ], 3
    if 'plbart' in kind:
      family, codes = 'plbart', codes or 'base'
    elif path.name == PIECES:
      is_50 = 'mbart50' in kind or 'af_ZA' in named_tokens(config)
      family, codes = 'mbart', 'mbart50' if is_50 else 'mbart'
    else:
      unused = (f'<unk_{i}>' for i in range(2, config.get('offset', _MOVED)))
      first, skipped = [_PAD, _EOS, '<mask_1>', '<mask_2>', *unused], 2
    model = _sentencepiece(path)
    pieces = map(model.id_to_piece, range(skipped, model.vocab_size()))
    numbers = {name: i for i, name in enumerate([*first, *pieces])}
    if _UNK not in numbers:
      where = f'{os.fspath(path)!r}: first pieces'
      expected = f'{_PAD}, {_EOS}, {_UNK}, as in Pegasus'
      raise unexpected(where, expected, [*map(model.id_to_piece, range(3))])
  added = {}
  if family:
    from specdec_jax.checkpoints.families import WORDS  # imports JAX

    known = WORDS['languages'][family]
    if codes not in known:
      where = f'{os.fspath(folder)!r}: language_codes'
      raise unexpected(where, f'one of {sorted(known)}', codes)
    named = '{}' if family == 'mbart' else '__{}__'
    names = [*map(named.format, known[codes].split())]
    added = {len(numbers) + i: added_token(x) for i, x in enumerate(names)}
    if family == 'mbart':
      added[len(numbers) + len(names)] = added_token(_MASK, lstrip=True)
  added |= added_tokens(folder, config)
  if path.name == SENTENCEPIECE:
    added |= {i: added_token(name) for i, name in enumerate(first)}
  backend = PiecesBackend(path, config, added, numbers)
  backend.has_codes = path.name in (SOURCE, TARGET)
  if family == 'plbart' or codes == 'mbart':
    # The second id is that of the first language, and stands for all.
    backend.after = [backend.eos_id, len(numbers)]
  return backend


def _numbers_of(path: pathlib.Path, special: Iterable[str]) -> dict[str, int]:
  """Reads piece -> id from a JSON file; checks that no piece is missing.

  Tokens of languages are numbered after the pieces, so that a missing piece
  would give them wrong ids.

  Args:
    path: the file.
    special: special tokens that the file must have.
  """
  numbers = _object_of(path)
  is_whole = {*map(repr, numbers.values())} == {*map(repr, range(len(numbers)))}
  if not is_whole or not {_EOS, _UNK, *special} <= numbers.keys():
    expected = f'pieces with {[*special] or [_EOS, _UNK]}, numbered from 0'
    raise unexpected(repr(os.fspath(path)), expected, numbers, _COPY)
  return numbers


def is_marian(folder: pathlib.Path) -> bool:
  """Whether a folder has the vocabularies of a Marian model, or one of them."""
  return any(os.path.lexists(folder / name) for name in (SOURCE, TARGET))


Backend = JsonBackend | PiecesBackend


def open_backend(path: str) -> tuple[Backend, dict[str, Any]]:
  """Returns a vocabulary's backend, and the tokenizer_config.json beside it."""
  place, is_remote = pathlib.Path(path), '://' in path
  is_folder = not is_remote and place.is_dir()
  folder = place if is_folder else place.parent
  if is_folder:
    names = (TOKENIZER, SENTENCEPIECE, PIECES, VOCAB)
    places = [folder / x for x in names if os.path.lexists(folder / x)]
    if is_marian(folder):
      places = [folder / TARGET]
    if not places:
      expected = f'{TOKENIZER}, {SENTENCEPIECE} or {VOCAB} in it'
      raise unexpected(f'vocabulary {path!r}', expected, 'a folder without')
    place = places[0]
  elif place.name not in (TOKENIZER, SENTENCEPIECE, SOURCE) or not any(
    os.path.lexists(folder / name) for name in (SETTINGS, ADDED, VOCAB)
  ):
    is_json = place.suffix == '.json' and not is_remote
    return JsonBackend(place, {}, {}) if is_json else PiecesBackend(path), {}
  config, described = settings(folder), _object_of(folder / 'config.json')
  kinds = config.get('tokenizer_class'), described.get('model_type')
  kind = ' '.join(map(content, kinds)).lower()
  is_moved = 'pegasus' in kind
  models = (PIECES, SOURCE, TARGET, *[SENTENCEPIECE] * is_moved)
  if place.name in models:
    return _numbered(place, config, kind), config
  added = added_tokens(folder, config)
  if place.name == SENTENCEPIECE:
    return PiecesBackend(place, config, added), config
  backend = JsonBackend(place, config, added)
  spiece = folder / SENTENCEPIECE
  both = is_folder and place.name == TOKENIZER and os.path.lexists(spiece)
  pieces = PiecesBackend(spiece).pieces if both and not is_moved else {}
  for i, piece in pieces.items():
    other = backend.pieces.get(i, piece)
    if other != piece and not SENTINEL.fullmatch(other):
      where = f'{os.fspath(folder)!r} has two vocabularies: id {i}'
      advice = f'Remove it or {SENTENCEPIECE}, whichever is not of the weights.'
      raise unexpected(where, f'{other!r} as in {TOKENIZER}', piece, advice)
  return backend, config
