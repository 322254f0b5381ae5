"""The demo pair's beams: speculative ones are the plain ones, in float32."""

import numpy as np
import pytest

import demo_test
from specdec_jax import Engine

pytestmark = [demo_test.pytestmark, pytest.mark.slow]

# Fixtures of that module.
models, sources = demo_test.models, demo_test.sources

WIDTH = 4


def test_beams_equal_plain_on_a_thousand(models, sources):
  """All beams of all texts agree, token for token, their scores to 1e-4."""
  target, draft, tokenizer = models
  engine = Engine(
    target,
    draft,
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=64,
    max_decode_len=40,
    batch_size=demo_test.RAGGED,
  )
  # Where the test split is not there the shipped sentences are repeated.
  texts = [sources[i % len(sources)] for i in range(1000)]
  have, want = (
    engine.generate(
      texts, num_beams=WIDTH, num_samples=WIDTH, speculative=speculative
    )
    for speculative in (True, False)
  )
  differing = [
    (one.tokens, other.tokens)
    for one, other in zip(have, want, strict=True)
    if one.tokens != other.tokens
  ]
  assert not differing, differing[:5]
  np.testing.assert_allclose(
    [one.score for one in have], [one.score for one in want], atol=1e-4
  )
  calls, plain = (
    sum(one.stats.num_target_calls for one in done) for done in (have, want)
  )
  assert calls < plain
