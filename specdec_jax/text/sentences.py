"""A long text as sentences, and back, with all whitespace where it was.

sentencex finds the sentences; it comes with the extra `[split]`. A line break
always ends one. A sentence that is too long for a model is cut.
"""

import functools
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specdec_jax.checks.fields import package

# Languages that sentencex has rules for: the names that NLLB begins with, and
# its own.
_LANGUAGES = dict(
  pair.split('=')
  for pair in """
    amh=am arb=ar bul=bg ben=bn cat=ca dan=da deu=de ell=el eng=en spa=es fin=fi
    fra=fr guj=gu hin=hi hye=hy ita=it jpn=ja kaz=kk kan=kn mal=ml mar=mr mya=my
    nld=nl pan=pa pol=pl por=pt rus=ru slk=sk tam=ta tel=te ukr=uk""".split()
)
_OTHERWISE = 'en'
# Characters that sentencex is given at once: texts without spaces, and
# quotation marks that are not closed, take it quadratic time.
_BLOCK = 1 << 11
_MOST_CHARACTERS = 64  # a token; longer texts are too long without counting
_COUNTS = 1 << 12  # texts whose counts are kept: the same words come again
# Where a sentence that is too long is cut: behind clauses, then behind words.
_CUTS = (
  re.compile(r'.+?(?:[;:,–—]\s+|[，、；：،؛]+\s*|\Z)', re.DOTALL),
  re.compile(r'\s*\S+\s*'),
)
# Writing without blanks between words, from Thai to Chinese.
_UNSPACED = re.compile(
  '[\u0e00-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\ufe30-\uffef'
  '\U00020000-\U0003ffff]'
)


class Sentences(NamedTuple):
  """A text, and where its sentences are.

  Attributes:
    text: the whole text.
    spans: begin and end of each sentence, or of each part of one that was cut,
      without the whitespace around it.
    num_cut: sentences that were cut.
  """

  text: str
  spans: Sequence[tuple[int, int]]
  num_cut: int

  @property
  def parts(self) -> list[str]:
    """The sentences, or parts of them, in order."""
    return [self.text[begin:end] for begin, end in self.spans]

  def joined(self, outputs: Sequence[str]) -> str:
    """Puts an output in the place of each part.

    A line break within an output becomes a space: lines stay as many. Where
    nothing stands between two parts, as in Chinese, their outputs get a space,
    unless they are written without.
    """
    pieces, at = [''], 0
    for (begin, end), output in zip(self.spans, outputs, strict=True):
      output = ' '.join(output.strip().splitlines())
      gap, ends = self.text[at:begin], pieces[-1][-1:] + output[:1]
      if not gap and len(ends) == 2 and not _UNSPACED.search(ends):
        gap = ' '
      pieces += gap, output
      at = end
    return ''.join(pieces) + self.text[at:]


def language_of(name: str | None) -> str:
  """The language whose rules split a text; warns where it has none.

  Args:
    name: such as 'de', 'de_DE' or NLLB's 'deu_Latn'; None is English.
  """
  first = re.split('[-_]', (name or _OTHERWISE).lower())[0]
  language = _LANGUAGES.get(first, first)
  if language not in _LANGUAGES.values():
    warnings.warn(
      f'split_lang: sentencex has no rules of its own for {name!r}. Sentences'
      ' are split by those of a related language or of English.',
      stacklevel=2,
    )
  return language


def split(
  text: str, language: str, count: Callable[[str], int], most: int
) -> Sentences:
  """Splits a text into sentences that a model can read.

  Example: `split('Hi! Bye.', 'en', len, 9).parts` is `['Hi!', 'Bye.']`.

  Args:
    text: lines, paragraphs or a whole document.
    language: from `language_of`.
    count: the number of tokens of a text.
    most: tokens of a sentence at most. A longer one is cut behind clauses, else
      behind words, else anywhere between two characters.

  Raises:
    ValueError: sentencex is not installed.
  """
  count = functools.lru_cache(_COUNTS)(count)
  spans, num_cut, at = list[tuple[int, int]](), 0, 0
  for line in text.splitlines(keepends=True):
    for sentence in _sentences(line, language):
      pieces = _cut(sentence, count, most)
      num_cut += len(pieces) > 1
      for piece in pieces:
        if core := piece.strip():
          begin = at + piece.find(core)
          spans.append((begin, begin + len(core)))
        at += len(piece)
  return Sentences(text, spans, num_cut)


def _sentences(line: str, language: str) -> Iterator[str]:
  """Yields the sentences of a line; joined they are the line."""
  if not line.strip():
    yield line
    return
  what = 'Splitting texts into sentences'
  sentencex = package(what, 'sentencex', 'split')
  at, held = 0, list[str]()  # blocks that are the begin of a sentence
  while at < len(line):
    block = line[at : at + _BLOCK]
    # sentencex 1.0.32 panics at wide blanks behind an initial.
    plain = re.sub(r'\s', ' ', block)
    found = sentencex.get_sentence_boundaries(language, plain)
    # The last sentence of a block may go on behind it.
    ends, begin = [sentence['end_index'] for sentence in found[:-1]], 0
    if at + _BLOCK >= len(line):
      ends.append(len(block))
    for end in ends:
      yield ''.join((*held, block[begin:end]))
      begin, held = end, []
    if not ends:
      begin = block.rfind(' ') + 1 or len(block)
      held.append(block[:begin])
    at += begin


def _cut(
  text: str,
  count: Callable[[str], int],
  most: int,
  cuts: Sequence[re.Pattern] = _CUTS,
) -> list[str]:
  """Cuts a text into pieces of at most `most` tokens; one, if it fits."""

  def size(piece: str) -> int:
    too_long = len(piece) > most * _MOST_CHARACTERS
    return most + 1 if too_long else count(piece)

  if len(text) == 1 or size(text.strip()) <= most:
    return [text]
  if not cuts:
    middle = len(text) // 2
    near = range(middle, min(middle + 16, len(text)))
    half = next((i for i in near if not _joins(text[i - 1 : i + 1])), middle)
    halves = text[:half], text[half:]
    return [x for piece in halves for x in _cut(piece, count, most, ())]
  groups, room = list[list[str]](), -1
  for piece in cuts[0].findall(text):
    room -= (tokens := size(piece))
    if room < 0:
      groups.append([])
      room = most - tokens
    groups[-1].append(piece)
  wholes = map(''.join, groups)
  return [x for whole in wholes for x in _cut(whole, count, most, cuts[1:])]


def _joins(pair: str) -> bool:
  """Whether two characters are parts of one: accents, families of emoji."""
  return '\u200d' in pair or unicodedata.category(pair[-1])[0] == 'M'
