"""JSON schemas: the official suite, walks of what people write, refusals."""

import contextlib
import decimal
import json
import pathlib
import random
import time

import jsonschema
import numpy as np
import pytest

from specdec_jax.rules import languages, scalars
from specdec_jax.rules.schema import language_of

HERE = pathlib.Path(__file__).parent


def lines_of(name):
  return map(json.loads, (HERE / name).read_text().splitlines())


SCHEMAS = dict(lines_of('json_schemas.jsonl'))
# Its licence is beside it; made from the commit 44401e0 of the suite.
SUITE = list(lines_of('json_schema_suite.jsonl'))
# A schema, values that it has, and values that it does not have.
CASES = list(lines_of('json_schema_values.jsonl'))
OBJECT = {
  'type': 'object',
  'properties': {'name': {'type': 'string'}, 'age': {'type': 'integer'}},
  'required': ['name'],
  'additionalProperties': False,
}


def made(schema, blanks='one'):
  with languages.deadline(60):
    return language_of(schema, blanks)


def accepted(schema, values):
  """The values that are accepted, however `json.dumps` writes them."""
  language = made(schema)
  texts = [(json.dumps(x), json.dumps(x, ensure_ascii=False)) for x in values]
  return [
    value
    for value, pair in zip(values, texts, strict=True)
    if any(language.matches(text.encode()) for text in pair)
  ]


@pytest.mark.parametrize('schema, good, bad', CASES, ids=lambda x: None)
def test_values(schema, good, bad):
  assert accepted(schema, [*good, *bad]) == good


def written(language, texts):
  return [text for text in texts if language.matches(text.encode())]


def test_a_key_is_there_once_and_texts_are_those_of_json_dumps():
  good = '{"name": "\\u00e9é"}'
  bad = [
    '{"name": "", "name": ""}',
    '{"name":""}',
    ' {"name": ""}',
    '{"name": "\\u0041"}',
    '{"name": "\\/"}',
    '{"name": "\x01"}',
    '{"name": "", "age": 01}',
    '{"name": "", }',
  ]
  assert written(made(OBJECT), [good, *bad]) == [good]
  assert made({'type': 'number'}).matches('1E+5')


def test_blanks():
  texts = ['[1, {"a": 2}]', '[1,{"a":2}]', '[\n 1,\n\t{ "a" : 2 } ]', '[1 2]']
  for blanks, of in {'one': [0], 'none': [1], 'any': [0, 1, 2]}.items():
    language = made({'const': [1, {'a': 2}]}, blanks)
    assert written(language, texts) == [texts[i] for i in of]


def test_numbers_of_which_something_is_said_have_no_exponent():
  numbers = made({'exclusiveMinimum': 1e-7, 'maximum': 0.5, 'type': 'number'})
  good = ['0.0000002', '0.00000010000001', '0.5', '0.0001']
  bad = ['2e-07', '0.0000001', '0.50', '0.00000009', '-0.1', '0.0']
  assert written(numbers, good + bad) == good


def test_recursion_ends_in_json():
  leaf = {'v': 1}
  node = {
    'type': 'object',
    'properties': {'v': {'type': 'integer'}, 'next': {'$ref': '#'}},
    'required': ['v'],
    'additionalProperties': False,
  }
  values = [leaf]
  for _ in range(5):
    values.append({'v': 1, 'next': values[-1]})
  assert accepted(node, values) == values[:3]
  for text in walks(made(node), 200):
    json.loads(text)


def test_numbers_are_one_of_below_equal_and_above():
  texts = [*walks(scalars.NUMBER, 1000), '1' + '0' * 30, '-0.0', '0.0000001']
  for bound in (0, 1, -1, 99, 0.25, -12.5, 1e-7, 1e16, -1.5e30, 10**20):
    exact = decimal.Decimal(str(bound))
    above, equal = scalars.above(exact), scalars.equal_to([exact])
    for text in texts:
      number = decimal.Decimal(text)
      assert above.matches(text) == (number > exact), (text, bound)
      assert equal.matches(text) == (number == exact), (text, bound)


def wrong_of_suite(groups, language_of=made):
  """Instances that are accepted and not valid, or the reverse; refused ones."""
  wrong, refused = [], []
  for keyword, schema, instances in groups:
    try:
      language = language_of(schema)
    except ValueError as error:
      assert str(error).startswith('json_schema')
      if 'a schema that has a value' not in str(error):
        refused.append(keyword)
      elif any(is_valid for _, is_valid in instances):
        wrong.append((schema, str(error)))
      continue
    for value, is_valid in instances:
      if 'time' in keyword and ':60' in str(value):  # of UTC alone, as stated
        is_valid = is_valid and value.endswith(('Z', '+00:00'))
      for flag in (True, False):
        text = json.dumps(value, ensure_ascii=flag)
        if isinstance(value, float) and 'e' in text and 'type' in schema:
          is_valid = False  # an integer has no exponent, as stated
        if language.matches(text.encode()) != is_valid:
          wrong.append((keyword, schema, text))
  return wrong, refused


SLOW = [pytest.mark.slow, pytest.mark.parity]


@pytest.mark.parametrize('every', [11, pytest.param(1, marks=SLOW)])
def test_the_official_suite(every):
  groups = SUITE[::every]
  wrong, refused = wrong_of_suite(groups)
  assert wrong == []
  # More than a half of it is followed (two thirds of the whole suite).
  assert len(refused) < len(groups) / (3 if every == 1 else 2)
  # Control: an automaton of any value is wrong.
  anything = made({})
  assert len(wrong_of_suite(groups, lambda _: anything)[0]) > 50


def walks(language, count, seed=0):
  """Random texts: any byte that may follow, then the nearest end."""
  dfa, rng = language.dfa, random.Random(seed)
  following, symbols = dfa.step, dfa.intervals()
  far = np.where(dfa.accepting, 0, len(following))
  for _ in following:
    steps = np.where(following > 0, far[following], len(following))
    if (far == (far := np.minimum(far, 1 + steps.min(1)))).all():
      break
  for _ in range(count):
    state, text, most = dfa.start, b'', rng.choice([0, 10, 40, 150])
    while len(text) < most or not dfa.accepting[state]:
      kinds = np.flatnonzero(following[state])
      if not kinds.size or dfa.accepting[state] and rng.random() < 0.2:
        break
      near = kinds[np.argmin(far[following[state, kinds]])]
      kind = rng.choice(kinds.tolist()) if len(text) < most else near
      text += bytes([rng.randint(*rng.choice(symbols[kind]))])
      state = following[state, kind]
    yield text.decode()


def number_of(text):
  with contextlib.suppress(decimal.InvalidOperation):
    return decimal.Decimal(text)
  return 1.5  # no number of this size is whole, or bounded


def errors_of(schema, texts):
  """Texts that the package jsonschema does not take, with exact decimals."""

  def is_whole(_, value):
    if isinstance(value, decimal.Decimal) and abs(value.adjusted()) < 400:
      return value == value.to_integral_value()
    is_large = isinstance(value, decimal.Decimal) and value.adjusted() > 0
    return is_large or isinstance(value, int) and not isinstance(value, bool)

  draft = jsonschema.Draft202012Validator
  checker = draft.TYPE_CHECKER.redefine('integer', is_whole)
  exact = jsonschema.validators.extend(draft, type_checker=checker)
  parsed = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
  validator = exact(parsed, format_checker=draft.FORMAT_CHECKER)
  context = decimal.Context(1000, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
  with decimal.localcontext(context):
    return [
      text
      for text in texts
      if not validator.is_valid(json.loads(text, parse_float=number_of))
    ]


def test_some_walks_validate():
  for name in [*SCHEMAS][::9]:
    assert errors_of(SCHEMAS[name], walks(made(SCHEMAS[name]), 20)) == [], name
  # Control: walks of a schema that says less.
  less = OBJECT | {'required': []}
  assert errors_of(OBJECT, walks(made(less), 50))


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize('name', SCHEMAS)
def test_walks_validate(name):
  assert errors_of(SCHEMAS[name], walks(made(SCHEMAS[name]), 1000)) == []


def test_a_difference_without_texts_is_empty():
  rest = languages.literal('foo') - languages.regex('oo', search=True)
  assert rest.is_empty and rest.shortest() is None


def nested(depth, keyword):
  return f'{{"{keyword}":' * depth + '{}' + '}' * depth


REFUSED = [  # a schema, and what the message has
  *lines_of('json_schema_refusals.jsonl'),
  ({'const': float('nan')}, ['NaN']),
  ({'const': object()}, ['object']),
  ({'enum': [f'word {i}' for i in range(10**5)]}, ['positions']),
  ({'anyOf': [{'type': 'string'}] * 20_000}, ['10000 subschemas']),
  (nested(65, 'items'), ['more than 64 levels of nesting']),
  (nested(20_000, 'items'), ['nesting']),
]


@pytest.mark.parametrize('schema, named', REFUSED, ids=lambda x: None)
def test_refusals(schema, named):
  with languages.deadline(5), pytest.raises(ValueError) as error:
    language_of(schema)
  assert all(name in str(error.value) for name in named), error.value


def test_a_text_without_an_end_is_read_once():
  began = time.process_time()
  with pytest.raises(ValueError, match='expected JSON'):
    language_of('"' + r'\"' * 20_000)
  assert time.process_time() - began < 2  # from each of its quotes: 15


PAIRS = [
  {'anyOf': [{'required': [x + str(i)]} for x in 'ab']} for i in range(30)
]
LONG = {
  'alternatives': {
    'anyOf': [{'type': 'string', 'minLength': i} for i in range(900)]
  },
  'product': {'allOf': PAIRS},
  'pairs': {'oneOf': [{'const': i} for i in range(3000)]},
  'wide': {'properties': {f'a{i}': {} for i in range(3000)}},
}


@pytest.mark.parametrize('schema', LONG.values(), ids=LONG)
def test_what_takes_long_ends(schema):
  began = time.process_time()
  with languages.deadline(0.5), pytest.raises(languages.TooLarge):
    language_of(schema)
  assert time.process_time() - began < 2
