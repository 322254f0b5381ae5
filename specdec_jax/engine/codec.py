"""Encodes texts as a target reads them, and outputs as a target produces them.

`Codec` has a vocabulary and adds the special tokens that a target expects
around a text. `Languages` has the language tokens of multilingual models.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.checks.fields import check_type, is_a, nearest, unexpected
from specdec_jax.engine.padding import Ids
from specdec_jax.models.base import LanguageModel
from specdec_jax.text.chat import RenderedIds
from specdec_jax.text.tokenizer import Vocabulary

Text = str | Ids  # a text, or its ids
_SHOWN = 3  # the most languages that an error message lists


class Languages(NamedTuple):
  """The tokens of the source and target languages of a call.

  A multilingual vocabulary has a token for each language. The token of the
  source language comes before the text that the encoder reads; in mBART-25 it
  comes after the text. The token of the target language follows the decoder's
  start token or replaces it, and is not part of the output.

  Attributes:
    known: name -> token of each language; empty if the model has no languages.
    source: token of the texts' language; None if none was given.
    target: token of the outputs' language; None if none was given.
  """

  known: Mapping[str, int]
  source: int | None
  target: int | None

  def before(self, ids: Ids, side: str) -> list[int]:
    """Returns the language token to put before ids; [] if none is needed.

    Args:
      ids: the ids of a text, or of the prompt of an output.
      side: 'source' or 'target'.

    Raises:
      ValueError: the language of this side is missing, and the ids do not begin
        with a language.
    """
    if not self.known or (len(ids) and ids[0] in self.known.values()):
      return []
    token = self.source if side == 'source' else self.target
    if token is None:
      some = ', '.join(map(repr, list(self.known)[:_SHOWN]))
      whose = 'texts' if side == 'source' else 'outputs'
      expected = f'the language of the {whose}, such as {some}'
      raise unexpected(f'{side}_lang', expected, None)
    return [token]


class Codec:
  """Turns texts into the ids that a target reads, and outputs into ids.

  Attributes:
    tokenizer: the vocabulary of target and drafter.
    network: the target's network.
    bos_id: the beginning-of-sequence id that texts start with; None: texts
      start without one.
    stop_ids: ids that end an output unless a call gives others.
    source_lang: language of the texts unless a call gives another; None if the
      model has no languages, or if each call gives the language.
    target_lang: language of the outputs; otherwise like `source_lang`.
    target_id: the first token that the checkpoint forces on outputs, or the
      decoder's start token. If it is the token of a language, outputs are in
      that language where no other is given.
  """

  def __init__(
    self,
    tokenizer: Vocabulary,
    network: LanguageModel,
    bos_id: int | None,
    stop_ids: Ids,
    source_lang: str | None = None,
    target_lang: str | None = None,
    target_id: int | None = None,
  ):
    """Stores the arguments as attributes, and checks the languages.

    Raises:
      ValueError: a language is unknown, or is given although the target has no
        languages.
    """
    self.tokenizer, self.network = tokenizer, network
    self.bos_id = bos_id
    self.stop_ids = stop_ids or (tokenizer.eos_id,)
    self.source_lang, self.target_lang = source_lang, target_lang
    self.target_id = network.start_id if target_id is None else target_id
    self.languages()

  def languages(
    self, source_lang: str | None = None, target_lang: str | None = None
  ) -> Languages:
    """Returns the tokens of two languages; None: the codec's default language.

    Raises:
      ValueError: a language is unknown, or is given although the target has no
        languages.
    """
    # A model without an encoder has no use for languages.
    has_encoder = self.network.has_encoder
    known = self.tokenizer.languages if has_encoder else {}
    names = source_lang or self.source_lang, target_lang or self.target_lang
    sides = 'source_lang', 'target_lang'
    for name, language in zip(sides, names, strict=True):
      check_type(name, language, str | None)
      if language is not None and not known:
        expected = 'None, for this model has no tokens of languages'
        raise unexpected(name, expected, language)
      if language is not None and language not in known:
        near = nearest(language, known, or_all=False).strip()
        advice = near or f'One is {next(iter(known))!r}.'
        path = self.tokenizer.path
        expected = f'one of the {len(known)} languages of {path!r}'
        raise unexpected(name, expected, language, advice)
    source, target = (known.get(name or '') for name in names)
    if target is None and self.target_id in known.values():
      target = self.target_id
    return Languages(known, source, target)

  def ids_around(self, text: Text = '') -> tuple[list[int], list[int]]:
    """Returns the ids before and after a text as the target reads it.

    A text for an encoder ends with the end of sequence in most model families.
    A text for a decoder-only model does not, because the decoder continues it.
    A rendered chat has its special tokens already, so nothing is added.
    """
    if isinstance(text, RenderedIds):
      return [], []
    if self.network.has_encoder and self.network.ends_inputs:
      tokenizer = self.tokenizer.inputs
      return [*tokenizer.before], [*tokenizer.after]
    return [] if self.bos_id is None else [self.bos_id], []

  def around(
    self, text: Text, ids: Ids, languages: Languages
  ) -> tuple[list[int], list[int]]:
    """Returns `ids_around` with the token of the text's language.

    If the source language is given, a word such as 'deu_Latn' in a text is
    ordinary text, as in transformers. Ids may begin with a language token; then
    no other language token is added.

    Args:
      text: the text, or its ids if the caller gave ids.
      ids: the ids of the text.
      languages: the languages of the call.

    Raises:
      ValueError: the language of the text is missing.
    """
    first, last = self.ids_around(text)
    is_named = isinstance(text, str) and languages.source is not None
    language = languages.before(() if is_named else ids, 'source')
    if self.tokenizer.language_last:
      return first, [*last, *language]
    return [*first, *language], last

  def begin(self, languages: Languages, ids: Ids = ()) -> tuple[int, ...]:
    """Returns all ids that a decoder begins with.

    Args:
      languages: the languages of the call.
      ids: the ids of a prompt that follows the start token.

    Raises:
      ValueError: the language of the outputs is missing.
    """
    start = () if self.tokenizer.language_last else (self.network.start_id,)
    return *start, *languages.before(ids, 'target'), *ids

  def bare_ids(self, text: Text) -> list[int]:
    """Returns the ids of a text without the special tokens around it.

    If the caller gave ids that have these tokens, they are removed.
    """
    ids = encoded(self.tokenizer.inputs, text)
    if isinstance(text, str | RenderedIds):
      return ids
    first, last = self.ids_around()
    last = last or [self.tokenizer.eos_id]
    if self.tokenizer.language_last and ids:
      ids = ids[: len(ids) - (ids[-1] in self.tokenizer.languages.values())]
    if ids[-len(last) :] == last:
      del ids[-len(last) :]
    return ids[len(first) :] if ids[: len(first)] == first else ids

  def input_ids(self, text: Text, source_lang: str | None = None) -> list[int]:
    """Returns the ids of a text as the target reads them.

    The text may also be given as ids, with or without the id that texts begin
    with, their end of sequence, and the token of their language.

    Raises:
      ValueError: the language of the text is unknown or missing.
    """
    ids = self.bare_ids(text)
    first, last = self.around(text, ids, self.languages(source_lang))
    return [*first, *ids, *last]

  def num_input_tokens(self, text: Text) -> int:
    """Counts the tokens of a text as the target reads it.

    An empty text counts as 0, unless the target reads an id before each text,
    such as `bos_id`.
    """
    first, _ = self.ids_around(text)
    return len(self.input_ids(text)) if first or self.bare_ids(text) else 0

  def output_ids(self, text: Text = '') -> list[int]:
    """Returns the ids of a text as the target would produce it, EOS included.

    If ids are given in place of a text, only the EOS is added.
    """
    end = self.tokenizer.eos_id
    end = end if end in self.stop_ids else self.stop_ids[0]
    if not isinstance(text, str):
      return [*map(int, text), end]
    ids = [*encoded(self.tokenizer, text), end]
    begins = self.network.has_encoder and self.network.ends_inputs
    return [*self.ids_around()[0], *ids] if begins else ids


def encoded(tokenizer: Vocabulary, text: Text) -> list[int]:
  """Returns the ids of a text, or those that were given in its place.

  Raises:
    ValueError: `text` is neither text nor ids, or has a lone surrogate.
  """
  check_texts([text])
  if not isinstance(text, str):
    return [int(token) for token in text]
  check_unicode(text)
  return tokenizer.encode(text)


def encoded_texts(
  tokenizer: Vocabulary, texts: Sequence[str]
) -> list[list[int]]:
  """Returns the ids of many texts, faster than encoding them one by one."""
  for text in texts:
    check_unicode(text)
  return tokenizer.encode_batch(texts)


def check_unicode(text: str) -> None:
  """Raises ValueError for a text with a lone surrogate, half a character."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    expected = f'no lone surrogate (it has one at place {error.start})'
    raise unexpected('text', expected, text, 'Read it as UTF-8.') from error


def check_texts(texts: Any, name: str = 'texts') -> None:
  """Raises ValueError unless texts are a sequence of strings or id lists."""
  expected = 'a sequence of strings or of lists of ids'
  if isinstance(texts, str) or not is_a(texts, Sequence):
    raise unexpected(name, expected, texts)
  for index, text in enumerate(texts):
    if not isinstance(text, str) and not is_a(text, Sequence[int]):
      advice = 'One text of ids is a list such as [[5, 6, 7]].'
      expected = 'a string or a list of ids'
      raise unexpected(f'{name[:-1]} {index}', expected, text, advice)
