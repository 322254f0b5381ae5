"""Which numbers of ids a network may have for a tokenizer's pieces."""

import contextlib
import types

import pytest

import small_vocabulary
import toy_models
from specdec_jax import notebook
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.pair import check_vocabulary_size
from specdec_jax.models.model import Model


@pytest.mark.parametrize(
  ('pieces', 'ids', 'fits'),
  [
    (32_000, 32_128, True),  # T5
    (250_000, 250_112, True),  # mT5
    (256_000, 256_512, True),  # MADLAD-400
    (50_257, 50_257, True),  # GPT-2
    (50_257, 51_200, True),  # padded to a multiple of 1,024
    (32_000, 250_112, False),  # T5's with mT5
    (250_000, 256_512, False),  # mT5's with MADLAD-400
    (32_000, 50_257, False),  # T5's with GPT-2
    (50_257, 32_128, False),  # GPT-2's with T5
    (8_001, 8_000, False),
  ],
)
def test_models_and_vocabularies(pieces, ids, fits):
  words = f"draft's vocabulary: .*'s {pieces} ids.* got {ids}"
  with contextlib.ExitStack() as stack:
    if not fits:
      stack.enter_context(pytest.raises(ValueError, match=words))
    check_vocabulary_size(
      'draft', ids, types.SimpleNamespace(vocab_size=pieces)
    )


def test_nothing_is_compiled_or_read_for_a_foreign_one(tokenizer, tmp_path):
  size = small_vocabulary.VOCAB_SIZE + 2_000
  chain = toy_models.random_markov(0, size)
  with pytest.raises(ValueError, match=f"target's vocabulary: .* {size}"):
    Engine(Model(chain, chain.params), tokenizer=tokenizer)
  (tmp_path / 'model').write_bytes(b'no checkpoint')
  network = small_vocabulary.network(1, size)
  with pytest.raises(ValueError, match=f"model's vocabulary: .* {size}"):
    notebook.load(tmp_path / 'model', network=network, tokenizer=tokenizer)
