"""Splits a long text into sentences, and joins their outputs again.

A line break always ends a sentence. The package sentencex (extra `[split]`)
finds the other ends. Where sentencex errs, the rules of `_rules_of` replace
characters before sentencex reads them, or this module moves or drops the end
that was found. Marks of lists, headings, quotations and tables, links, code,
and parts without a letter stay as they are. A sentence that is too long for a
model is cut.
"""

import functools
import itertools
import pathlib
import re
import tomllib
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from specdec_jax.checks.fields import package

# Abbreviations and ordinals by language; NLLB's names of languages.
_TABLES = tomllib.loads(
  pathlib.Path(__file__).with_name('abbreviations.toml').read_text('utf-8')
)
# NLLB's name -> the two-letter name, of the languages that have rules.
_LANGUAGES: dict[str, str] = _TABLES['languages']
# Characters that sentencex gets at once: it takes quadratic time for texts
# without spaces, and for quotation marks that are not closed.
_BLOCK = 1 << 11
Count = Callable[[str], int]  # counts the tokens of a text
_MOST_CHARACTERS = 64  # per token; a longer text is too long without counting
_COUNTS = 1 << 12  # results of `count` that are cached, because words repeat
# Long sentences are cut after clauses, then after words.
_CUTS = (
  re.compile(r'.+?(?:[;:,–—]\s+|[，、；：،؛]+\s*|\Z)', re.DOTALL),
  re.compile(r'\s*\S+\s*'),
)
# Scripts that put no blanks between words, from Thai to Chinese.
_UNSPACED = re.compile(
  '[\u0e00-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\ufe30-\uffef'
  '\U00020000-\U0003ffff]'
)
_PLAIN = re.compile(r'[\w\s,]*')  # no sentence ends inside such a text
_LETTER = re.compile(r'[^\W\d_]')
# Parts inside a line that are not decoded. The text of a link lies between two.
_MARKUP = r"""
  [^\S\r\n]{3,} | \t
  | (?<!\S)\|+ | (?<!\|)\|+(?!\S)
  | \s\#+\s*$ | ^\s*(?:`{3}|~{3})[^`]*$
  | [(<"']{0,2} (?:https?://|ftp://|\bwww\.) [^\s\u2e80-\u9fff\uff00-\uffef]+
  | (?<!\S) [^\s@]* @ [^\s@]+ \. [^\s@]+
  | (?<!`) `(?![`\s]) [^`]* (?<!\s)` (?![`\w])
  | !?\[(?=[^][]*\]\() | \]\([^()\s]*\)
"""
_IN_LINE = re.compile(_MARKUP, re.VERBOSE)
# In rows of a table, which begin with |, every | counts as markup, too.
_IN_TABLE = re.compile(rf'\| | {_MARKUP}', re.VERBOSE)
_NUMERALS = '一二三四五六七八九十百'
# A mark at the beginning of a sentence, which is not decoded. A sentence may
# have several.
_MARK = re.compile(
  rf"""
  \s+ | (?:[^\w\s]|_)+(?=\s) | >+ | [—–―]+(?!\d)
  | \[[\sxX\d^.:]{{1,8}}\]:?(?=\s)
  | \d{{1,3}}(?:\.\d{{1,3}})+ (?:[.)](?=\s) | (?=\s+(?![a-z])[^\W\d_]))
  | (?P<number>\d{{1,3}}\.)(?=\s)
  | [(（[]? (?:\d{{1,3}}|[{_NUMERALS}]{{1,3}})
    (?:\.?[])](?=\s) | \.(?=\s) | [）．] | 、(?![\d{_NUMERALS}数]))
  | [([]? (?P<word>[^\W\d_]|[ivx]{{1,5}}|[IVXLC]{{1,6}})
    (?:\.?[])](?=\s) | \.(?=\s)(?!\s+(?:\d|[^\W\d_]\.)))
  """,
  re.VERBOSE,
)
_STOPS = '።፧।॥۔؟։'  # unlike '.', these need no blank after them
_OPENING = re.compile(r"""\s["'“”«„‘(\[]+\Z""")


class Sentences(NamedTuple):
  """A text and the positions of its sentences.

  Attributes:
    text: the whole text.
    spans: begin and end of each sentence, or of each part of a sentence that
      was cut, without the whitespace and the marks around it.
    num_cut: number of sentences that were cut.
  """

  text: str
  spans: Sequence[tuple[int, int]]
  num_cut: int

  @property
  def parts(self) -> list[str]:
    """The texts of `spans`."""
    return [self.text[begin:end] for begin, end in self.spans]

  def joined(self, outputs: Sequence[str]) -> str:
    """Replaces each part by its output.

    A line break within an output becomes a space, so the number of lines stays.
    There is no space between Chinese sentences; between their outputs one is
    added, unless these are Chinese too.
    """
    pieces, at = [''], 0
    for (begin, end), output in zip(self.spans, outputs, strict=True):
      output = ' '.join(output.strip().splitlines())
      gap, ends = self.text[at:begin], pieces[-1][-1:] + output[:1]
      is_new = len(ends) == 2 and ends != self.text[at - 1 : at + 1]
      if not gap and is_new and _goes_without_blank(self.text, at):
        gap = '' if _UNSPACED.search(ends) else ' '
      pieces += gap, output
      at = end
    return ''.join(pieces) + self.text[at:]


def language_of(name: str | None) -> str:
  """Returns the language whose rules split a text; warns if there are none.

  Args:
    name: such as 'de', 'de_DE' or NLLB's 'deu_Latn'; None means English.
  """
  first = re.split('[-_]', (name or 'en').lower())[0]
  language = _LANGUAGES.get(first, first)
  if language not in _LANGUAGES.values():
    text = f'split_lang: there are no rules of its own for {first!r}. Sentences'
    text += ' are split by those of a related language or of English.'
    warnings.warn(text, stacklevel=2)
  return language


def split(text: str, language: str, count: Count, limit: int) -> Sentences:
  """Splits a text into sentences that a model can read.

  Example: `split('Hi! Bye.', 'en', len, 9).parts` is `['Hi!', 'Bye.']`.

  Args:
    text: lines, paragraphs or a whole document.
    language: a result of `language_of`.
    count: counts the tokens of a text.
    limit: the most tokens of a sentence. A longer one is cut after clauses,
      else after words, else between any two characters.

  Raises:
    ValueError: sentencex is not installed.
  """
  count = functools.lru_cache(_COUNTS)(count)
  spans, num_cut, at = list[tuple[int, int]](), 0, 0
  for line in text.splitlines(keepends=True):
    for begin, end in _sentences(line, language):
      pieces, begin = _cut(line[begin:end], count, limit), at + begin
      num_cut += len(pieces) > 1
      for piece in pieces:
        if core := piece.strip():
          first = begin + piece.find(core)
          spans.append((first, first + len(core)))
        begin += len(piece)
    at += len(line)
  return Sentences(text, spans, num_cut)


def _sentences(line: str, language: str) -> Iterator[tuple[int, int]]:
  """Yields begin and end of each sentence of a line, without its marks."""
  if not _LETTER.search(line):
    return
  markup = _IN_TABLE if line.lstrip().startswith('|') else _IN_LINE
  abbreviations, _ = _rules_of(language)

  def after_marks(begin: int, end: int) -> int:
    while mark := _MARK.match(line, begin, end):
      if mark['word'] in abbreviations:
        break
      behind = line[mark.end() : mark.end() + 2].strip()
      is_list = not mark['number'] or not behind.islower()
      if not is_list and _LETTER.search(line, 0, begin):
        break  # the number is an ordinal: 'Geldi. 19. yüzyılda oldu.'
      begin = mark.end()
    return begin

  begin = 0
  for match in itertools.chain(markup.finditer(line), [None]):
    end = match.start() if match else len(line)
    first = begin = after_marks(begin, end)
    for size in ends(line[first:end], language):
      begin = after_marks(begin, first + size)
      if _LETTER.search(line, begin, first + size):
        yield begin, first + size
      begin = first + size
    begin = match.end() if match else end


@functools.lru_cache(256)  # clients may send any code
def _rules_of(language: str) -> tuple[frozenset[str], list[Any]]:
  """Returns the rules of a language.

  Returns:
    Words whose full stop ends no sentence; and patterns with their replacements
    of the same length, for the text that sentencex reads. For example, `_`
    replaces a full stop that ends no sentence.
  """
  words = frozenset(_TABLES['abbreviations'].get(language, '').split())
  has_ordinals = language in _TABLES['ordinals'].split()
  ordinals = {r'(?<![\w.,:%–-])(\d{1,2}|[IVX]+)\.(?= )': r'\1_'}

  def stop_if(holds: Callable[[re.Match], object]) -> Callable[..., str]:
    return lambda match: match[1] + '_' if holds(match) else match[0]

  changes: dict[str, Any] = {
    r'\s': ' ',  # sentencex 1.0.32 panics at wide blanks after an initial
    '[។៕།༎]': '。',  # the full stops of Khmer and Tibetan
    r'(?<![^\s(["“„«])([^\s(["“„«]{1,10})\.(?= )': stop_if(
      lambda match: words & {match[1], match[1].lower()}
    ),
    r'(?:^|(?<=[.!?] ))([^\W\d_]+ \d{1,3})\.(?= )': r'\1_',  # such as 'Step 1.'
    **(ordinals if has_ordinals else {}),
    r'([\dIVX]|(?<=\d )[^\W\d_]{1,5})\.(?= \W*(\w))': stop_if(
      lambda match: match[2].islower()
    ),
    # sentencex knows only initials from A to Z.
    r'(?<!\w)([^\W\d_A-Z])\.(?= )': stop_if(lambda match: match[1].isupper()),
    r'(?<=[A-Z]\.-)([A-Z])\.(?= )': r'\1_',
    r'(?<= al)\.(?= [(\[])': '_',  # such as 'et al. [2004]'
    # sentencex begins no sentence with a digit.
    r'(?<=[^\W\d_]{4}\. )\d': 'X',
    rf'(?<=[。！？])[\da-zA-Z]|(?<={_UNSPACED.pattern}[!?])[\da-zA-Z]': '一',
  }
  return words, [(re.compile(x), to) for x, to in changes.items()]


def ends(text: str, language: str) -> Iterator[int]:
  """Yields the position after each sentence and the blanks that follow it."""
  if _PLAIN.fullmatch(text):
    yield len(text)
    return
  sentencex = package('Splitting texts into sentences', 'sentencex', 'split')
  plain, at, last = text, 0, 0
  for pattern, to in _rules_of(language)[1]:
    plain = pattern.sub(to, plain)
  while True:
    block = plain[at : at + _BLOCK]
    sentences = sentencex.get_sentence_boundaries(language, block)
    # The last sentence of a block may continue after it.
    places = [at + sentence['end_index'] for sentence in sentences[:-1]]
    for place in places:
      is_blank = ' ' in plain[place - 1 : place + 1]
      if not is_blank and not _goes_without_blank(plain, place):
        # No sentence ends inside a word, but one may end before a quotation.
        opening = _OPENING.search(plain, max(last, place - 4), place)
        if not opening:
          continue
        place = opening.start() + 1
      yield place
      last = place
    if at + _BLOCK >= len(text):
      yield len(text)
      return
    at = max(places, default=at + (block.rfind(' ') + 1 or len(block)))


def _goes_without_blank(text: str, at: int) -> bool:
  """Whether a sentence may end at the position `at` without a blank."""
  return text[at - 1] in _STOPS or bool(_UNSPACED.search(text, at - 2, at + 2))


def _cut(
  text: str, count: Count, limit: int, cuts: Sequence[re.Pattern] = _CUTS
) -> list[str]:
  """Cuts a text into pieces of at most `limit` tokens."""

  def size(piece: str) -> int:
    too_long = len(piece) > limit * _MOST_CHARACTERS
    return limit + 1 if too_long else count(piece)

  if len(text) == 1 or size(text.strip()) <= limit:
    return [text]
  if not cuts:
    middle = len(text) // 2
    near = range(middle, min(middle + 16, len(text)))
    half = next((i for i in near if not _joins(text[i - 1 : i + 1])), middle)
    halves = text[:half], text[half:]
    return [x for piece in halves for x in _cut(piece, count, limit, ())]
  groups, left = list[list[str]](), -1
  for piece in cuts[0].findall(text):
    left -= (tokens := size(piece))
    if left < 0:
      groups.append([])
      left = limit - tokens
    groups[-1].append(piece)
  wholes = map(''.join, groups)
  return [x for whole in wholes for x in _cut(whole, count, limit, cuts[1:])]


def _joins(pair: str) -> bool:
  """Whether two characters are shown as one, as with accents and emoji."""
  return '\u200d' in pair or unicodedata.category(pair[-1])[0] == 'M'
