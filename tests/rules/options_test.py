"""Rules on tokens at every door: what they let through, errors, compilation.

Their laws are in tokens_test, what transformers does in parity/rules_test.
"""

import json
import re

import jax
import jsonschema
import numpy as np
import pytest

import small_vocabulary
import toy_models
from compilations import nothing_compiles
from specdec_jax.checkpoints import config_json
from specdec_jax.engine.options import options_of
from specdec_jax.rules import automata
from specdec_jax.rules.automata import FREE
from specdec_jax.text.tokenizer import Tokenizer

TEXTS = ['the red dog runs', 'a cat', 'the old house']
SCHEMA = {
  'type': 'object',
  'properties': {
    'name': {'type': 'string', 'maxLength': 3},
    'age': {'enum': [7, 80]},
  },
  'required': ['name', 'age'],
  'additionalProperties': False,
}
REGEXES = ['a|the (red )?dog', '[a-c]{3,5}', '(the|a) [a-z]+ runs']
REGEXES += ['x?y?z[0-9]{2}', '-?[0-9]{1,9}']
SCHEMAS = [
  SCHEMA,
  {'type': 'array', 'items': {'type': 'boolean'}, 'maxItems': 4},
  {'enum': ['red', 'blue', 3]},
  SCHEMA | {'properties': {'a': {'type': 'null'}}, 'required': ['a']},
  {'type': 'string', 'maxLength': 6},
]


@pytest.fixture(scope='module')
def engine(tokenizer):
  made = toy_models.chain_engine(tokenizer, max_decode_len=48, gamma=2)
  made.generate(TEXTS, regex='a', log_probs=False)
  return made


def test_other_schemas_compile_nothing(engine):
  options = {'log_probs': False, 'seed': 1}
  with nothing_compiles():
    for regex in REGEXES:
      for done in engine.generate(TEXTS, regex=regex, **options):
        complete = done.finish_reason == 'stop'
        assert not complete or re.fullmatch(regex, done.text), done
    schema = engine.generate(TEXTS, json_schema=SCHEMA, **options)
  # Each is as without a drafter; one that is asked for again is remembered.
  alone = {'speculative': False} | options
  assert [c.tokens for c in schema] == [
    c.tokens for c in engine.generate(TEXTS, json_schema=SCHEMA, **alone)
  ]
  rules = [
    engine.rule_book.rules_of(options_of({'json_schema': SCHEMA}), (1,))
    for _ in range(2)
  ]
  assert rules[0].automaton is rules[1].automaton


def test_neutral_values_are_no_rules(engine):
  """The request, and so the program, is that without any."""
  neutral = dict(repetition_penalty=1.0, no_repeat_ngram_size=0, bad_words=[])
  plain, ruled = engine.request(TEXTS), engine.request(TEXTS, **neutral)
  assert jax.tree.structure(plain) == jax.tree.structure(ruled)
  one = engine.request(TEXTS, repetition_penalty=1.1)
  assert jax.tree.structure(plain) != jax.tree.structure(one)
  other = engine.request(TEXTS, repetition_penalty=1.3)
  assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.slow
def test_ten_thousand_samples_are_all_taken(engine):
  """A thousand of each constraint; those that were cut off have no end."""
  options = {'num_samples': 1000, 'temperature': 1.0}
  constraints = [{'regex': one} for one in REGEXES]
  for asked in constraints + [{'json_schema': one} for one in SCHEMAS]:
    outputs = engine.generate(['the dog'], **options, **asked)
    reasons = {one.finish_reason for one in outputs}
    ended = [one.text for one in outputs if one.finish_reason == 'stop']
    assert reasons <= {'stop', 'length'} and len(ended) > 500, asked
    for text in ended:
      if 'regex' in asked:
        assert re.fullmatch(asked['regex'], text), text
      else:
        jsonschema.validate(json.loads(text), asked['json_schema'])


def test_rows_of_a_pool_and_samples(engine):
  """Continuous batching gives what each text gives alone; beams keep rules."""
  choices = ['red dog', 'red', 'the house', 'a cat']
  many = TEXTS * 3
  pooled = engine.generate(many, batch_size=2, choices=choices)
  assert [c.tokens for c in pooled[:3]] == [
    engine.generate([text], choices=choices)[0].tokens for text in TEXTS
  ]
  asked = {'num_samples': 8, 'temperature': 20.0, 'choices': choices}
  assert {c.text for c in engine.generate(TEXTS, **asked)} == {*choices}
  beams = engine.generate(TEXTS, num_beams=3, num_samples=3, choices=choices)
  assert {c.text for c in beams} <= {*choices}
  assert len({c.text for c in beams[:3]}) == 3


def test_words_and_penalties(engine):
  plain = engine.generate(TEXTS)
  word = plain[0].text.split()[1]
  outputs = engine.generate(TEXTS, bad_words=[word])
  assert word in plain[0].text and word not in outputs[0].text.split()
  token = plain[1].tokens[0]
  outputs = engine.generate(TEXTS, logit_bias={token: -100.0})
  assert all(token not in one.tokens for one in outputs)
  outputs = engine.generate(TEXTS, allowed_token_ids=[token])
  assert {*outputs[1].tokens} <= {token, engine.tokenizer.eos_id}
  for size in (1, 2):
    for one in engine.generate(TEXTS, no_repeat_ngram_size=size):
      grams = [*zip(*(one.tokens[i:] for i in range(size)), strict=False)]
      assert len({*grams}) == len(grams)


def test_min_p_keeps_what_is_likely(engine):
  """1 keeps the likeliest token alone; the law is that of standardise."""
  greedy = engine.generate(TEXTS)
  outputs = engine.generate(TEXTS, temperature=1.0, min_p=1.0)
  assert [c.tokens for c in outputs] == [c.tokens for c in greedy]


def test_labels_are_those_of_score(engine):
  labels = ['the red dog', 'the red cat', 'a', 'the']
  found = engine.classify(TEXTS, labels)
  np.testing.assert_allclose(found.sum(axis=1), 1)
  for text, row in zip(TEXTS, found, strict=True):
    scores = engine.score([text] * len(labels), labels)
    want = np.exp([score.total for score in scores])
    np.testing.assert_allclose(row, want / want.sum(), rtol=1e-4)


def test_a_tree_of_many_choices():
  """Each, and nothing else, is accepted; rows of ids are one automaton."""
  rng = np.random.default_rng(0)
  choices = [*{tuple(rng.integers(2, 60, 1 + i % 5)) for i in range(20_000)}]
  made = automata.of_choices(choices, [1], 64)
  joined, (start,) = automata.joined((made,), 64)
  tables, table = jax.device_put(joined), joined.by_id
  known = {(*map(int, one), 1) for one in choices}
  found, todo = set(), [(start - 1, ())]  # behind `FREE`
  for state, said in todo:  # the loop appends to the list
    for edge in range(table.first[state], table.first[state + 1]):
      longer = (*said, int(table.tokens[edge]))
      if longer[-1] == 1:
        found.add(longer)
      else:
        todo.append((table.targets[edge], longer))
  assert found == known
  step = jax.jit(jax.vmap(tables.next_state, in_axes=(None, 0)))
  begins = {one[0] for one in known}
  after = np.asarray(step(start, np.arange(64)))
  assert {*np.flatnonzero(after != FREE).tolist()} == begins
  allowed = np.asarray(tables.allowed(np.int32(start), 64))
  assert {*np.flatnonzero(allowed).tolist()} == begins


def test_log_probs_are_of_what_rules_leave(engine):
  """As decoding has them, as scores, and of the likeliest tokens."""
  for options in (
    {'choices': ['red dog', 'red', 'a cat']},
    {'regex': '[a-c]{3,5}', 'presence_penalty': 1.0},
    {'repetition_penalty': 1.7, 'no_repeat_ngram_size': 2},
    {'regex': 'a|the (red )?dog', 'num_beams': 2},
  ):
    plain = engine.generate(TEXTS, **options)
    top = engine.generate(TEXTS, top_log_probs=3, **options)
    for one, other in zip(plain, top, strict=True):
      assert one.tokens == other.tokens
      np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
      for token, value, likeliest in zip(
        other.tokens, other.log_probs, other.top_log_probs, strict=True
      ):
        assert dict(likeliest).get(token, value) == pytest.approx(value)
        if 'num_beams' not in options:
          assert sum(np.exp([v for _, v in likeliest])) < 1 + 1e-5


def test_rules_that_leave_no_token_end_an_output(engine):
  for options in (
    {'choices': ['red'], 'min_length': 9},
    {'regex': 'a', 'suppress_tokens': [1]},
  ):
    for width in (None, 2):
      for done in engine.generate(TEXTS, num_beams=width, **options):
        assert done.finish_reason == 'rules' and done.error is None
        assert done.text in ('', *options.get('choices', 'a'))


BAD = [
  ({'choices': ['red'], 'bad_words': ['red']}, 'choices.*bad_words'),
  ({'choices': ['red red'], 'no_repeat_ngram_size': 1}, 'choices.*ngram'),
  ({'allowed_token_ids': [5], 'suppress_tokens': [1, 5]}, 'suppress_tokens'),
  ({'regex': 'b(?=a)'}, 'regex.*lookarounds'),
  ({'regex': '((((a{1,99}){1,99}){1,99}){1,99})'}, 'regex.*positions'),
  ({'repetition_penalty': 0}, 'repetition_penalty'),
  ({'repetition_penalty': np.nan}, 'repetition_penalty'),
  ({'json_schema': {'type': 'nothing'}}, 'json_schema'),
  ({'json_schema': '{'}, 'json_schema'),
  ({'regex': '['}, 'regex'),
  ({'regex': '[^\\s\\S]'}, 'regex'),
  ({'choices': ['a', '']}, 'choices'),
  ({'choices': ['a', 'a']}, 'choices'),
  ({'choices': []}, 'choices'),
  ({'choices': ['a'] * 100_001}, 'choices: .*100000'),
  ({'choices': [[5, 1, 5]]}, 'choices'),
  ({'choices': ['a'], 'regex': 'a'}, 'regex'),
  ({'bad_words': ['']}, 'bad_words'),
  ({'suppress_tokens': [99999]}, 'suppress_tokens'),
  ({'logit_bias': {5: 101.0}}, 'logit_bias'),
  ({'logit_bias': {99999: 1.0}}, 'logit_bias'),
  ({'min_p': 1.5}, 'min_p'),
  ({'regex': 'a', 'stop_ids': ()}, 'stop_ids'),
]


@pytest.mark.parametrize(('options', 'name'), BAD)
def test_bad_input_compiles_nothing(engine, options, name):
  with nothing_compiles(), pytest.raises(ValueError, match=name):
    engine.generate(TEXTS, **options)


def test_labels_that_are_none(engine):
  for labels in ([], ['a', 'a'], [[99999]]):
    with pytest.raises(ValueError, match='labels'):
      engine.classify(TEXTS, labels)


def test_texts_with_characters_that_a_vocabulary_lacks(tmp_path):
  """As T5's, which has no braces: `<unk>` is not taken for the text."""
  path = tmp_path / 'a.model'
  special = {'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1}
  small_vocabulary.sentencepiece_of(path, vocab_size=30, **special)
  engine = toy_models.chain_engine(Tokenizer(path))
  for decode, name in {'generate': 'choices', 'classify': 'labels'}.items():
    message = f"{name}.*token for {{ }}, got 'a {{a}}'"
    with pytest.raises(ValueError, match=message):
      getattr(engine, decode)(TEXTS, **{name: ['a', 'a {a}']})
  texts = engine.generate(TEXTS, choices=['the  dog', 'a cat'])
  assert {one.text for one in texts} <= {'the dog', 'a cat'}


def test_rules_of_a_folder(tokenizer):
  """They are followed, unless a call says otherwise."""
  followed = {'no_repeat_ngram_size': 2}
  settings = followed | {'num_beams': 4, 'repetition_penalty': 1.0}
  rules, rest = config_json.read_settings(settings, 'x.json')
  assert rules == followed and 'repeat' not in rest and 'num_beams=4' in rest
  made = toy_models.chain_engine(tokenizer)
  made.models['target'].rules = rules
  sizes = made.request(TEXTS).token_rules.no_repeat_ngram_size
  assert sizes[:3].tolist() == [2, 2, 2]
  assert made.request(TEXTS, no_repeat_ngram_size=0).token_rules is None
