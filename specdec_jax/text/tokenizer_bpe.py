"""BPE, as in GPT-2, Llama, Qwen, Gemma and NLLB: text to ids and back.

The package tokenizers, which comes with the extra `[bpe]`, is imported when a
tokenizer is made.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.checks.packages import package
from specdec_jax.text.tokenizer import MOST_BYTES, Tokenizer

TOKENIZER = 'tokenizer.json'
SETTINGS = 'tokenizer_config.json'
END = '<|endoftext|>'  # GPT-2's, where a folder does not say
VOCAB, MERGES = 'vocab.json', 'merges.txt'
# Tokens of languages: NLLB's, such as eng_Latn, and M2M-100's, such as __en__.
_LANGUAGE = re.compile(r'[a-z]{3}_[A-Z][a-z]{3}|__([a-z]{2,3})__')


class BpeTokenizer(Tokenizer):
  """A vocabulary of the package tokenizers, with the methods of `Tokenizer`.

  There is no padding id of its own: `pad_id` is the end of sequence, which has
  no text. If a text contains the name of a special token, it is read as text.

  Attributes:
    vocab_size: V, the largest id plus one.
    least_size: the least V of a network of this vocabulary: special tokens past
      it are none that a text can have (Gemma's place of an image).
    pad_id, eos_id, unk_id: the id of the end of sequence. GPT-2's texts begin
      with it as well, so `Engine.bos_id` should be this id.
    bos_id: the id that the vocabulary itself puts in front of a text; None is
      none, as in GPT-2 and Qwen.
    languages: name -> id of the token of each language, of the vocabularies of
      translation models: 'eng_Latn' in NLLB-200's, 'en' in M2M-100's.
    fingerprint: sha256 (hex) of everything that decides the ids of a text. It
      is the same for files of other kinds or formatting that give the same ids.
  """

  def __init__(
    self, path: str | os.PathLike[str], eos_token: str | None = None
  ):
    """Loads a vocabulary.

    Args:
      path: a tokenizer.json, or a folder with tokenizer.json or else with
        vocab.json and merges.txt.
      eos_token: the token that ends a sequence; None is what the folder's
        tokenizer_config.json says, or else GPT-2's.

    Raises:
      ValueError: the package tokenizers is not installed, a file is missing or
        broken, or there is no such token.
    """
    tokenizers = package('Byte-level BPE', 'tokenizers', 'bpe')
    self.path = os.fspath(path)
    contents = _read(pathlib.Path(path))
    said = settings(pathlib.Path(path))
    eos_token = eos_token or content(said.get('eos_token')) or END
    try:
      processor = _make(tokenizers, contents, eos_token)
    # The package raises plain Exceptions.
    except Exception as error:
      raise ValueError(
        f'{self.path!r} is not a whole vocabulary of byte-level BPE ({error});'
        ' copy it again from its source.'
      ) from error
    eos_id = processor.token_to_id(eos_token)
    if eos_id is None:
      raise ValueError(
        f'{self.path!r} has no token {eos_token!r}; give the token that ends a'
        ' sequence as eos_token.'
      )
    processor.no_padding()
    processor.no_truncation()
    processor.encode_special_tokens = True
    self._processor = processor
    self._marked: Any = None  # of `encode_marked`
    self.bos_id = _first_id(processor, said)
    self.vocab_size = 1 + max(processor.get_vocab().values())
    special = {
      one: token.content
      for one, token in processor.get_added_tokens_decoder().items()
      if token.special
    }
    self.languages = {
      found[1] or content: one
      for one, content in sorted(special.items())
      if (found := _LANGUAGE.fullmatch(content))
    }
    if self.bos_id in self.languages.values():
      self.bos_id = None  # a language of many, which the caller chooses
    not_text = special.keys() - {eos_id, self.bos_id}
    self.least_size = 1 + max(set(processor.get_vocab().values()) - not_text)
    self.eos_id = self.pad_id = self.unk_id = eos_id
    self.fingerprint = _fingerprint(json.loads(processor.to_str()))

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, without an end-of-sequence id."""
    return self._processor.encode(text, add_special_tokens=False).ids

  def encode_marked(self, text: str) -> list[int]:
    """`encode`, but names of special tokens are those tokens, for a chat."""
    if self._marked is None:
      tokenizers = package('Byte-level BPE', 'tokenizers', 'bpe')
      self._marked = tokenizers.Tokenizer.from_str(self._processor.to_str())
    return self._marked.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Applies `encode` to each text, with several threads."""
    found = self._processor.encode_batch(list(texts), add_special_tokens=False)
    return [one.ids for one in found]


def settings(path: pathlib.Path) -> dict[str, Any]:
  """What a folder's tokenizer_config.json says; {} without one."""
  file = path / SETTINGS
  if not file.exists():
    return {}
  try:
    said = files.read_json(file)
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{os.fspath(file)!r} cannot be read ({error}); copy it again from its'
      ' source, or remove it.'
    ) from error
  return said if isinstance(said, dict) else {}


def content(token: Any) -> str:
  """The text of a token in tokenizer_config.json; '' if there is none."""
  if isinstance(token, dict):
    token = token.get('content')
  return token if isinstance(token, str) else ''


def _first_id(processor: Any, said: dict[str, Any]) -> int | None:
  """The id in front of a text: as the folder says, or as the file adds it."""
  says = said.get('add_bos_token')
  if says is not None:
    token = content(said.get('bos_token'))
    return processor.token_to_id(token) if says and token else None
  found = processor.encode('a', add_special_tokens=True)
  return found.ids[0] if found.special_tokens_mask[:1] == [1] else None


def _read(path: pathlib.Path) -> dict[str, bytes]:
  """The files of a vocabulary by their usual names."""
  paths = {TOKENIZER: path}
  if path.is_dir():
    names = [TOKENIZER] if (path / TOKENIZER).exists() else [VOCAB, MERGES]
    paths = {name: path / name for name in names}
  try:
    return {
      name: files.read_small(file, MOST_BYTES) for name, file in paths.items()
    }
  except OSError as error:
    raise ValueError(
      f'No vocabulary could be read at {os.fspath(path)!r}:'
      f' {error.filename}: {error.strerror}. Expected {TOKENIZER}, or a folder'
      f' with it or with {VOCAB} and {MERGES}.'
    ) from error


def _make(tokenizers: Any, contents: dict[str, bytes], eos_token: str) -> Any:
  if TOKENIZER in contents:
    return tokenizers.Tokenizer.from_str(contents[TOKENIZER].decode())
  vocab = json.loads(contents[VOCAB])
  lines = contents[MERGES].decode().splitlines()
  merges = [
    tuple(line.split(' '))
    for line in lines
    if line and not line.startswith('#version')
  ]
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  if eos_token in vocab:
    made.add_special_tokens([eos_token])
  return made


def _fingerprint(said: dict[str, Any]) -> str:
  """Hashes the parts of a tokenizer.json that decide ids.

  Left out are the decoder, the post-processor and how special tokens are found
  in a text, because this class does not look for them.
  """
  # Some files have '' where others have no entry.
  model = {name: value for name, value in said['model'].items() if value}
  model['merges'] = [
    merge.split(' ') if isinstance(merge, str) else merge
    for merge in model.get('merges', [])
  ]
  added = [
    {'id': one['id'], 'content': one['content']} if one['special'] else one
    for one in said['added_tokens']
  ]
  decides = {
    'model': model,
    'added_tokens': sorted(added, key=lambda one: one['id']),
    'normalizer': said['normalizer'],
    'pre_tokenizer': said['pre_tokenizer'],
  }
  text = json.dumps(decides, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()
