"""Which numbers of ids a network may have for a tokenizer's pieces."""

import contextlib
import types

import pytest

from specdec_jax.engine.pair import check_vocabulary_size


@pytest.mark.parametrize(
  ('pieces', 'ids', 'fits'),
  [
    (32_000, 32_128, True),  # T5
    (256_000, 256_512, True),  # MADLAD-400
    (50_257, 51_200, True),  # padded to a multiple of 1,024
    (32_000, 250_112, False),  # T5's with mT5
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
