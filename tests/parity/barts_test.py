"""BART, mBART, Pegasus and Marian as their users run them: with beams.

Outputs of an engine, plain and speculative, are those of transformers, with
the settings that the folders of these models ask for.
"""

import functools

import jax
import numpy as np
import pytest

import parity
from specdec_jax.engine.engine import Engine
from specdec_jax.models.families import network_of
from specdec_jax.models.model import Model
from specdec_jax.text.tokenizer import Vocabulary
from toy_beams import near

pytestmark = parity.MARKS

LENGTH, BATCHES, ROWS = 14, 20, 4
NAMES = ['BART', 'mBART-50', 'Pegasus', 'Marian, own vocabularies']


class Ids(Vocabulary):
  """Only ids go in and out."""

  fingerprint = 'ids'

  def __init__(self, size, languages):
    self.vocab_size, self.languages, self.eos_id = size, languages, 2

  def decode(self, ids):
    return ' '.join(map(str, ids))


@functools.cache
def engine_of(name):
  model, config, params = parity.loaded(name)
  params = jax.device_get(params)
  network = network_of(config)
  languages = {'xx': parity.LANGUAGE} if name == 'mBART-50' else {}
  tokenizer = Ids(config.vocab_size, languages)
  target = Model(network, params, tokenizer, stop_ids=(2,))
  draft = Model(network, near(params, 0.05), tokenizer)
  options = {'max_input_len': 32, 'max_decode_len': LENGTH, 'batch_size': ROWS}
  options |= {'gamma': 2, 'target_lang': 'xx' if languages else None}
  return model, Engine(target, draft, **options)


def batch_of(engine, seed):
  network, begin = engine.target, [*engine.tokenizer.languages.values()]
  rng = np.random.default_rng(seed)
  ids = [i for i in range(3, 80) if i not in (network.pad_id, parity.LANGUAGE)]
  sizes = [*rng.integers(2, 24, ROWS - 1), 24]
  return [[*begin, *rng.choice(ids, size).tolist(), 2] for size in sizes]


def settings_of(name, seed, ends):
  """The n-th batch's settings: transformers' names, as ours."""
  draw = np.random.default_rng(seed)
  said = {
    'num_beams': 4 if seed % 4 else 8,
    'length_penalty': float(draw.choice([0.6, 0.8, 1.0, 2.0])),
    'early_stopping': [True, False, 'never'][seed % 3],
    'min_new_tokens': int(draw.integers(0, 6)),
    'no_repeat_ngram_size': 3,
    'forced_eos_token_id': ends,
  }
  if name == 'BART':
    said['forced_bos_token_id'] = 0
  if name.startswith('Marian'):
    said |= {'bad_words_ids': [[92]], 'no_repeat_ngram_size': 0}
  return said


def compare(name, seed, ends):
  model, engine = engine_of(name)
  said, rows = settings_of(name, seed, ends), batch_of(engine, seed)
  forced, more = [], 0
  given = dict(said)
  if name == 'mBART-50':
    # A language is no part of our output, and its tokens are not counted.
    forced, more = [parity.LANGUAGE], 1
    given['min_new_tokens'] = max(0, said['min_new_tokens'] - 1)
    said['forced_bos_token_id'] = parity.LANGUAGE
  options = said | {'max_new_tokens': LENGTH + more, 'eos_token_id': ends}
  width = options.pop('num_beams')
  texts = map(np.array, rows)
  want = parity.their_outputs(model, texts, (ends,), width, **options)
  lengths = set()
  for speculative in (False, True):
    given |= {'speculative': speculative, 'num_samples': width}
    done = engine.generate(rows, stop_ids=[ends], **given)
    have = [done[i : i + width] for i in range(0, len(done), width)]
    for ours, others in zip(have, want, strict=True):
      where = f'{name}, {said}, speculative={speculative}'
      tokens = [[*forced, *one.tokens] for one in ours]
      assert tokens == [ids for ids, _ in others], where
      scores = [one.score for one in ours], [score for _, score in others]
      np.testing.assert_allclose(*scores, rtol=2e-5, atol=1e-4, err_msg=where)
      lengths |= {len(ids) for ids in tokens}
    accepted = sum(one.stats.num_accepted for one in done)
    assert (accepted > 0) == speculative
  return lengths


def likely_end(name):
  """A token within many outputs: beams that end early are compared too."""
  model, engine = engine_of(name)
  rows = batch_of(engine, 0)
  done = engine.generate(rows, num_beams=4, num_samples=4, stop_ids=[1])
  inner = [token for one in done for token in one.tokens[3:-2]]
  ids, counts = np.unique(inner, return_counts=True)
  return int(ids[np.argmax(counts)])


@pytest.mark.parametrize(
  ('name', 'batches'),
  [
    ('BART', 4),
    *(pytest.param(name, BATCHES, marks=pytest.mark.slow) for name in NAMES),
  ],
)
def test_beams_are_those_of_transformers(name, batches):
  end, lengths = likely_end(name), set()
  for seed in range(batches):
    lengths |= compare(name, seed, end)
  assert len(lengths) > 2
