"""Regexes as automata: those of `re.fullmatch`, as texts and through tokens."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import re
import resource
import tomllib

import numpy as np
import pytest

from repository import ROOT
from specdec_jax.rules import languages
from specdec_jax.rules.automata import SECONDS, Vocabulary
from specdec_jax.text.tokenizer import Tokenizer

LONGEST = 6
# Alphabets, and regexes that are tried on all texts of them.
REGEXES = tomllib.loads(
  pathlib.Path(__file__).with_name('regexes.toml').read_text('utf-8')
)
PAIRS = [(alphabet, one) for alphabet, each in REGEXES.items() for one in each]
T5 = ROOT / 'shared/data/vocab/t5.spiece.model'
VOCABULARIES = {'demo': 'demo/vocab.model', 't5': T5}


def accepted(language, alphabet):
  """Of all texts in the order of `itertools.product`, whether it has them."""
  dfa, found = language.dfa, []
  places = np.searchsorted(dfa.cuts, [*map(ord, alphabet)], 'right') - 1
  states = np.array([dfa.start])
  for _ in range(LONGEST + 1):
    found.append(dfa.accepting[states])
    states = dfa.step[states[:, None], dfa.classes[places]].reshape(-1)
  return np.concatenate(found)


@functools.cache
def texts_of(alphabet):
  return [
    ''.join(text)
    for size in range(LONGEST + 1)
    for text in itertools.product(alphabet, repeat=size)
  ]


def matched(pattern, alphabet, search=False):
  compiled = re.compile(pattern, re.ASCII if search else 0)
  matches = compiled.search if search else compiled.fullmatch
  return np.array([matches(text) is not None for text in texts_of(alphabet)])


@pytest.mark.parametrize('alphabet', REGEXES)
def test_texts_are_those_of_fullmatch(alphabet):
  for pattern in REGEXES[alphabet]:
    want = matched(pattern, alphabet)
    language = languages.regex(pattern)
    have = accepted(language, alphabet)
    np.testing.assert_array_equal(have, want, err_msg=pattern)
    # Negative control: one text less is seen.
    if want.any():
      text = texts_of(alphabet)[np.flatnonzero(want)[-1]]
      less = accepted(language - languages.literal(text), alphabet)
      assert np.count_nonzero(less != want) == 1, pattern


def test_a_search_is_that_of_ecma():
  for alphabet in ('ab\n', 'a -', '1.eé٣', '\0\1a'):
    for pattern in REGEXES[alphabet]:
      if '(?' in pattern and not pattern.startswith(('^(?', '\\A(?')):
        continue
      have = accepted(languages.regex(pattern, search=True), alphabet)
      want = matched(pattern.replace('$', '\\Z'), alphabet, search=True)
      np.testing.assert_array_equal(have, want, err_msg=pattern)


GROUPS = '( (?: (?i: (?-i: (?s: (?m: (?a:'.split()
ATOMS = r'. \d \w \s \D \W \S'.split()
ANCHORS = r'^ $ \b \B \A \Z'.split()
BEGINS = '(?i) (?m) (?s) (?a) (?=a) (?!a)'.split() + [''] * 6
REPEATS = '* + ? {2} {0,2} {1,} *? {,2}?'.split() + [''] * 6


def random_regex(chance, alphabet, depth=2):
  def atom():
    if depth and chance.random() < 0.25:
      inside = random_regex(chance, alphabet, depth - 1)
      return f'{chance.choice(GROUPS)}{inside})'
    if chance.random() < 0.2:
      first, last = map(re.escape, sorted(chance.choices(alphabet, k=2)))
      more = chance.choice(['', *ATOMS[1:]])
      return f'{chance.choice(["[", "[^"])}{more}{first}-{last}]'
    return chance.choice([*ATOMS, *map(re.escape, alphabet)])

  def part():
    if chance.random() < 0.15:
      return chance.choice(ANCHORS)
    return atom() + chance.choice(REPEATS)

  sizes = chance.choices([1, 2, 3], k=chance.choice([1, 1, 2, 3]))
  return '|'.join(''.join(part() for _ in range(size)) for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
  'alphabet', ['ab\n', 'a1é', 'ſsK', 'aıI', '-]^', '\0a_']
)
def test_random_regexes_are_those_of_re(alphabet):
  chance, number = random.Random(alphabet), 0
  refusals = languages.NotFollowed, languages.TooLarge
  for _ in range(300):
    pattern = chance.choice(BEGINS) + random_regex(chance, alphabet)
    with languages.deadline(10), contextlib.suppress(*refusals):
      have = accepted(languages.regex(pattern), alphabet)
      want = matched(pattern, alphabet)
      np.testing.assert_array_equal(have, want, err_msg=pattern)
      number += 1
  assert number > 150


def test_strings_of_json():
  strings = languages.json_string(languages.regex('[^a]{0,2}|aé|\U0001f600'))
  for value in ('', 'b"', '\\\n', '\x00\x7f', 'aé', '\U0001f600', 'é\u2028'):
    for ensure_ascii in (True, False):
      text = json.dumps(value, ensure_ascii=ensure_ascii)
      assert strings.matches(text.encode()), text
  for text in ('"a"', 'bb', '"b', '"\n"', '"\\x"', '"\\ud83d"', '"bbb"', '"""'):
    assert not strings.matches(text.encode()), text


def vocabulary_of(name):
  """A `Vocabulary`, and an id that ends outputs."""
  if name == 'bytes':
    return Vocabulary({bytes([b]): [b + 3] for b in range(256)}, False, 259), 1
  path = VOCABULARIES[name]
  if not os.path.exists(path):
    pytest.skip(f'there is no {path}')
  tokenizer = Tokenizer(path)
  size = tokenizer.vocab_size
  return Vocabulary(*tokenizer.spellings(size), size), tokenizer.eos_id


def next_states(made):
  """int[T, V]: the state behind each state and token, byte by byte."""
  starts, ends = made.tables.spans[:-1], made.tables.spans[1:]
  states = np.tile(np.arange(len(made.tables.step))[:, None], len(starts))
  for place in range(int((ends - starts).max())):
    at = np.minimum(starts + place, ends[-1] - 1)
    longer = made.tables.step[states, made.tables.spelled[at]]
    states = np.where(starts + place < ends, longer, states)
  return states, ends > starts


SLOW = [pytest.mark.slow, pytest.mark.system]


@pytest.mark.parametrize(
  ('name', 'every'),
  [
    ('bytes', 1),
    ('demo', 8),
    *(pytest.param(name, 1, marks=SLOW) for name in VOCABULARIES),
  ],
)
def test_tokens_are_those_that_texts_need(name, every):
  """All states: a token is allowed if some tokens behind it end a text."""
  vocabulary, stop = vocabulary_of(name)
  for alphabet, pattern in PAIRS[::every]:
    want = matched(pattern, alphabet)
    if not want.any():
      continue
    try:
      with languages.deadline(60):
        language = languages.in_bytes(languages.regex(pattern))
        made = vocabulary.automaton('regex', language, [stop])
    except ValueError as error:
      assert name == 't5' and 'token for' in str(error), pattern
      continue
    bits = made.bits.view(np.uint8)
    allowed = np.unpackbits(bits, axis=1, bitorder='little')[made.bits_of]
    allowed = allowed[1:, : len(made.tables.spans) - 1] > 0
    following, is_text = next_states(made)
    ends, alive = allowed[:, stop], np.zeros((len(made.tables.step),), bool)
    alive[1:] = ends
    for _ in made.tables.step:
      alive |= (alive[following] & is_text).any(axis=1) & (following[:, 0] > 0)
    want_allowed = (alive[following] & is_text)[1:]
    want_allowed[:, stop] = ends
    np.testing.assert_array_equal(allowed, want_allowed, err_msg=pattern)
    begin = b' ' if vocabulary.begins_blank else b''
    for text, is_match in [*zip(texts_of(alphabet), want, strict=True)][:400]:
      state = made.start
      for byte in begin + text.encode():
        state = made.tables.step[state, byte]
      assert bool(state and ends[state - 1]) == is_match, (pattern, text)


REFUSED = [
  ('a(?=b)', 'lookarounds'),
  ('(?<!a)b', 'lookarounds'),
  ('(?!a)b|c', 'lookarounds'),
  ('(a)\\1', 'backreferences'),
  ('(a)?(?(1)b|c)', 'conditions'),
  ('a++', 'possessive'),
  ('(?>a|ab)c', 'atomic'),
  ('[', 'no regex'),
  ('(' * 5000 + ')' * 5000, 'no regex'),
  ('((((a{1,99}){1,99}){1,99}){1,99})', 'positions'),
  ('(a?){60000}', 'positions'),
  ('|'.join(map(str, range(10**6))), 'characters'),
  ('(a|b)*a(a|b){30}', 'states'),
  ('(.{0,200}a){0,200}', None),
]


@pytest.mark.parametrize(('pattern', 'why'), REFUSED)
def test_what_is_refused_is_refused_soon(pattern, why):
  """And the memory that was ever taken grows by less than a gigabyte."""
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with languages.deadline(SECONDS), pytest.raises(ValueError, match=why):
    assert languages.in_bytes(languages.regex(pattern)).dfa
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert after - before < 1 << 20  # KiB
