"""Numbers that users give, and how many: no field lets an absurd one through.

Each field is tried with each, whatever it is for: a new one is here by itself.
"""

import dataclasses
import json
import math
import tracemalloc
import typing

import jax
import numpy as np
import pytest

import toy_models
from specdec_jax.checks.fields import is_a
from specdec_jax.engine import compilation_cache
from specdec_jax.engine.options import Options
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.rules.options import RuleBook
from specdec_jax.serving import protocol
from specdec_jax.serving.run import ReplicaSettings
from specdec_jax.serving.settings import ServeSettings

TEXT = 'the red dog'
LIMITS = ServeSettings(beams=(2,))
NUMBERS = (
  *(10**9, 2**31 - 1, 2**31, 2**63, 10**18, 10**400, -(10**9), -1, 0, 1),
  *(1e9, 1e38, 1e308, 5e-324, math.nan, math.inf, -math.inf, True, '1'),
)
BEAMS = {'num_beams': 1}
BESIDE = {'alpha': BEAMS, 'length_penalty': BEAMS, 'draft_beams': BEAMS}
HASHED = ('seed', 'example_ids')  # of 64 bits, of which 32 are taken


@pytest.fixture(scope='module')
def engine(tokenizer):
  return toy_models.chain_engine(tokenizer, max_decode_len=24, gamma=2)


def numeric(kind):
  """Fields that may be a number, or several."""
  for name, hint in typing.get_type_hints(kind, include_extras=True).items():
    if any(is_a(some, hint) for some in (1, 1.0, [1], {1: 1})):
      yield kind, name, hint


FIELDS = [
  field
  for kind in (Options, ServeSettings, PoolSettings, ReplicaSettings)
  for field in numeric(kind)
]


@pytest.mark.parametrize(('kind', 'name', 'hint'), FIELDS)
def test_what_a_field_lets_through_fits_the_device(engine, kind, name, hint):
  """Or the vocabulary or the lengths say so before anything is compiled."""
  passed = []
  for number in NUMBERS:
    forms = number, [number], {number: 1}, {1: number}
    for value in (form for form in forms if is_a(form, hint)):
      try:
        made = kind(**BESIDE.get(name, {}), **{name: value})
        if kind is Options:
          engine.text_request([TEXT], **BESIDE.get(name, {}), **{name: value})
      except ValueError as error:
        assert name in str(error) or 'max_decode_len' in str(error), value
      else:
        passed.append(number)
        assert getattr(made, name) is not None
  for number in passed:
    assert (
      number is True
      or name in HASHED
      or -(2**31) <= number < 2**31
      or (name == 'temperature' and math.isfinite(np.float32(number)))
    ), number


def test_all_kinds_of_fields_are_tried():
  names = {name for _, name, _ in FIELDS}
  assert names >= {
    *('no_repeat_ngram_size', 'logit_bias', 'temperature', 'alpha', 'seed'),
    *('max_seconds', 'port', 'cpus', 'suppress_tokens', 'beams', 'refill'),
  }
  wrong = dataclasses.make_dataclass('Wrong', [('count', int)])
  (field,) = numeric(wrong)
  with pytest.raises(AssertionError):
    test_what_a_field_lets_through_fits_the_device(None, *field)


# Bodies of HTTP.

WRITTEN = [
  *('1000000000', '2147483648', '9223372036854775808', '1' + '0' * 18),
  *('1' + '0' * 400, '1' + '0' * 5000, '-1', '0', '1e308', '-1e308', '1e400'),
  *('NaN', 'Infinity', 'true', '"1"', '[1e18]', '[[1e18]]', '{"1": 1e18}'),
  '{"1000000000000": 1}',
]
NAMES = [*protocol._TYPES, 'unknown']


@pytest.mark.parametrize('name', NAMES)
def test_bodies_that_pass_can_be_decoded(engine, name):
  """Of each field: it is refused by name, or its request can be made."""
  refused = []
  beside = {'prompt': TEXT, 'temperature': 0} | {
    'top_logprobs': {'logprobs': 1},
    'best_of': {'n': 2},
    'n': {'use_beam_search': True},
  }.get(name, {})
  beside.pop(name, None)
  for written in WRITTEN:
    data = f'{{{json.dumps(beside)[1:-1]}, "{name}": {written}}}'.encode()
    try:
      asked = protocol.Parser(engine, LIMITS, 'toy').completion(data)
      with protocol.naming_the_field(constraint=asked.constraint[0]):
        options = asked.options().items()
        options = {k: v for k, v in options if k[:5] != 'split'}
        assert engine.text_request(asked.prompts, **options).rows
    except protocol.ApiError as error:
      assert error.status in (400, 404)
      refused.append(error.body['error']['param'])
  assert len(refused) > len(WRITTEN) // 2
  # A body that is no JSON names no field.
  assert {*refused} <= {name, None, *(['model'] if name == 'model' else [])}


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('stop', ['x'] * 17),
    ('bad_words', ['x'] * 4097),
    ('logit_bias', dict.fromkeys(map(str, range(20_000)), 1)),
    ('allowed_token_ids', [3] * 20_000),
    ('prompt', ['x'] * 65),
    ('labels', [f'a{i}' for i in range(50_000)]),
    ('labels', []),
    ('labels', [10**400]),
    ('input', ['a'] * 65),
    ('input', []),
    ('unknown', 1),  # of labels
  ],
)
def test_there_are_not_too_many(engine, name, value):
  """In bodies of completions, and in those of labels."""
  parser = protocol.Parser(engine, LIMITS, 'toy')
  of_labels = name in ('labels', 'input', 'unknown')
  body = {'input': 'a', 'labels': ['a', 'b']} if of_labels else {'prompt': TEXT}
  data = json.dumps(body | {name: value}).encode()
  with pytest.raises(protocol.ApiError) as caught:
    if of_labels:
      parser.labels(data)
    else:
      asked = parser.completion(data)
      with protocol.naming_the_field():
        engine.text_request(asked.prompts, **asked.options())
  if of_labels:
    assert name in str(caught.value)
  else:
    assert caught.value.body['error']['param'] == name


def test_words_are_not_too_long(engine):
  book = RuleBook(engine.tokenizer, engine.target.vocab_size)
  for words in ([[3] * (1 << 17)], [[3] * 99] * 4000):
    with pytest.raises(ValueError, match='bad_words'):
      book.rules_of(Options(bad_words=words), [1])


def test_labels_cost_no_more_than_their_tokens(engine, monkeypatch):
  """A thousand labels that begin alike once took their square in memory."""
  labels = [[3, *divmod(i, 30)] for i in range(60, 700)]
  largest, zeros = [], np.zeros
  monkeypatch.setattr(
    np, 'zeros', lambda *a, **k: largest.append(made := zeros(*a, **k)) or made
  )
  found = engine.classify([TEXT], labels)
  assert max((made.size for made in largest), default=0) < 10 * len(labels)
  np.testing.assert_allclose(found.sum(axis=1), 1)
  some, end = [0, 333, 639], engine.codec.output_ids('')[-1]  # several blocks
  scored = [[*labels[i], end] for i in some]
  want = np.exp([x.total for x in engine.score([TEXT] * 3, scored)])
  have = found[0, some]
  np.testing.assert_allclose(have / have.sum(), want / want.sum(), rtol=1e-4)
  with pytest.raises(ValueError, match='beginnings'):
    engine.classify([TEXT], [[3 + i // 30, i % 30] * 9 for i in range(900)])


def test_programs_of_many_shapes_are_forgotten(monkeypatch):
  monkeypatch.setattr(compilation_cache, '_MOST_PROGRAMS', 3)
  twice, sizes = jax.jit(lambda x: 2 * x), []
  for number in range(1, 8):
    with compilation_cache.few_programs(twice):
      twice(np.zeros(number))
    sizes.append(twice._cache_size())
  assert sizes == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(
  'number', [20_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_memory_grows_with_the_pool(engine, number):
  """Not with the texts: only their ids are there before they are read."""
  rules = {'suppress_tokens': [5], 'bad_words': ['cat']}
  few = engine.scheduler(4).run(engine.text_request([TEXT] * 5, **rules))
  assert next(few)  # compiled
  peaks = []
  for count in (1_000, number):
    tracemalloc.start()
    request = engine.text_request([TEXT] * count, **rules)
    assert next(engine.scheduler(4).run(request))
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
  assert peaks[1] - peaks[0] < number << 10  # 1 KiB a text
  # Control: an array of rows that do not share their rules.
  tracemalloc.start()
  _ = [np.zeros(engine.target.vocab_size, np.float32) for _ in range(number)]
  assert tracemalloc.get_traced_memory()[1] > number << 10
  tracemalloc.stop()
