"""What an engine is given: numbers of texts, kinds of texts, gamma."""

import jax
import numpy as np
import pytest

import toy_models
from small_vocabulary import VOCAB_SIZE, WORDS
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import MAX_GAMMA
from specdec_jax.engine.padding import padded_rows
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.models.model import Model

TEXTS = WORDS.split()[:9]
SAMPLED = {'temperature': 1.0, 'speculative': False}


@pytest.fixture
def engine(tokenizer):
  chain = toy_models.random_markov(0, VOCAB_SIZE)
  model = Model(chain, chain.params)
  return Engine(model, model, tokenizer=tokenizer, max_decode_len=9, gamma=2)


def test_sizes_are_few_and_little_is_wasted():
  sizes = [padded_rows(number) for number in range(1, 65)]
  assert sorted(set(sizes)) == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64]
  assert all(size < 1.5 * n for n, size in enumerate(sizes, 1) if size > 2)


def test_programs_for_other_numbers_of_texts(engine, tokenizer):
  found, programs = {}, []
  for number in (8, 2, 3, 1):
    found[number] = engine.generate(TEXTS[:number], **SAMPLED)
    programs.append(engine.num_programs)
  # Three texts go through the program for eight, one through that for two.
  assert programs == [1, 2, 2, 2]
  for number in (1, 2, 3):
    tokens = [one.tokens for one in found[number]]
    assert tokens == [one.tokens for one in found[8][:number]]
  # What was there before does not change a sample.
  alone = Engine(
    *[Model(engine.target, engine.params.target)] * 2,
    tokenizer=tokenizer,
    max_decode_len=9,
  ).generate(TEXTS[:3], **SAMPLED)
  assert alone == found[3]


def test_rows_of_nine_texts_and_their_programs(engine):
  assert engine.request(TEXTS).inputs.shape[0] == 12
  for count, changes, programs in (
    (9, {}, 1),
    (5, {}, 1),
    (4, {}, 2),  # more than twice its rows would be too much
    (9, {'min_length': 2}, 3),  # another kind
  ):
    engine.generate(TEXTS[:count], **SAMPLED | changes)
    assert engine.num_programs == programs
  # Who measures gets the rows that were asked for.
  assert engine.warmup(TEXTS[:5], **SAMPLED) > 0
  assert engine.warmup(TEXTS[:5], **SAMPLED) == 0.0


def test_streams_take_programs_that_there_are(engine):
  options = SAMPLED | {'stop_strings': ['q']}
  done = engine.generate(TEXTS[:2], **options)
  count = engine.num_programs
  assert ''.join(engine.stream(TEXTS[0], **options)) == done[0].text
  assert engine.num_programs == count


@pytest.mark.parametrize(
  'texts, message',
  [
    ([5, 6, 7], r'text 0 is 5\. .* \[\[5, 6, 7\]\]'),
    (np.array([5, 6, 7]), 'text 0 is .*5'),
    (['a', None], 'text 1 is None'),
    (['a', b'cat'], "text 1 is b'cat'"),
    (b'the cat', 'got bytes'),
    (7, 'got int'),
    (None, 'got NoneType'),
    ((text for text in 'ab'), 'got generator'),
  ],
)
def test_what_are_no_texts(engine, texts, message):
  for ask in (engine.generate, engine.warmup, engine.request):
    with pytest.raises(ValueError, match=f'texts must be .*{message}'):
      ask(texts)
  assert engine.num_programs == 0


@pytest.mark.parametrize(
  'gamma, message',
  [
    (-1, 'gamma must be at least 0, got -1'),
    (1.5, 'gamma must be a whole number, got 1.5'),
    ('4', "gamma must be a whole number.*, got '4'"),
    (None, 'gamma must be a whole number, got None'),
    (True, 'gamma must be a whole number, got True'),
    (float('nan'), 'gamma must be a whole number, got nan'),
    (MAX_GAMMA + 1, 'gamma must be 256 at most, got 257'),
  ],
)
def test_gammas_that_are_none(engine, gamma, message):
  with pytest.raises(ValueError, match=message):
    engine.gamma = gamma
  assert engine.gamma == 2
  with pytest.raises(ValueError, match=message):
    PoolSettings(gammas={4: gamma})
  if gamma is None:  # a new engine's own choice, and a request's the engine's
    return
  with pytest.raises(ValueError, match=message):
    Engine(
      Model(engine.target, engine.params.target),
      tokenizer=engine.tokenizer,
      gamma=gamma,
    )
  with pytest.raises(ValueError, match=message):
    engine.request(TEXTS, gamma)


def test_gamma_may_be_set_between_calls(engine):
  engine.gamma = np.int64(3)
  assert jax.tree.structure(engine.request(TEXTS)) == jax.tree.structure(
    engine.request(TEXTS, 3)
  )
