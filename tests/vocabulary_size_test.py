"""Which numbers of ids a network may have for a tokenizer's pieces."""

import types

import pytest

import small_vocabulary
import toy_models
from specdec_jax import notebook
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.pair import check_vocabulary_size
from specdec_jax.models.model import Model


def vocabulary(size):
  return types.SimpleNamespace(vocab_size=size)


@pytest.mark.parametrize(
  'pieces, ids',
  [
    (32_000, 32_128),  # T5
    (32_100, 32_128),
    (250_000, 250_112),  # mT5
    (250_100, 250_112),
    (256_000, 256_512),  # MADLAD-400
    (50_257, 50_257),  # GPT-2
    (50_257, 50_304),  # padded to a multiple of 128
    (50_257, 51_200),  # of 1,024
    (8_000, 8_000),
  ],
)
def test_models_and_their_own(pieces, ids):
  check_vocabulary_size('target', ids, vocabulary(pieces))


@pytest.mark.parametrize(
  'pieces, ids',
  [
    (32_000, 250_112),  # T5's with mT5
    (250_000, 256_512),  # mT5's with MADLAD-400
    (1_000, 8_000),
    (32_000, 50_257),  # T5's with GPT-2
    (50_257, 32_128),  # GPT-2's with T5
    (8_001, 8_000),
  ],
)
def test_those_of_others(pieces, ids):
  words = f'draft has a vocabulary of {ids}, the tokenizer one of {pieces};'
  with pytest.raises(ValueError, match=f'{words} .* take the vocabulary that'):
    check_vocabulary_size('draft', ids, vocabulary(pieces))


def test_nothing_is_compiled_or_read_for_a_foreign_one(tokenizer, tmp_path):
  size = small_vocabulary.VOCAB_SIZE + 2_000
  chain = toy_models.random_markov(0, size)
  with pytest.raises(ValueError, match=f'target has a vocabulary of {size}'):
    Engine(Model(chain, chain.params), tokenizer=tokenizer)
  (tmp_path / 'model').write_bytes(b'no checkpoint')
  network = small_vocabulary.network(1, size)
  with pytest.raises(ValueError, match=f'model has a vocabulary of {size}'):
    notebook.load(tmp_path / 'model', network=network, tokenizer=tokenizer)
