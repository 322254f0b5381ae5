"""The demo pair's beams: speculative ones are the plain ones, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import demo_test
from specdec_jax import partitioning
from specdec_jax.decoding import beams
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import example_keys, new_request
from specdec_jax.drafters.small_model import small_model
from specdec_jax.probs import SamplingConfig

pytestmark = [demo_test.pytestmark, pytest.mark.slow]

# Fixtures of that module.
models, sources = demo_test.models, demo_test.sources

EOS = 1
INPUT_WIDTH, MAX_LENGTH = 32, 40
ALPHA = 0.6


class Pair:
  """Both models, and what they read."""

  def __init__(self, models, sources):
    target, draft, tokenizer = models
    self.target, self.draft = target.network, draft.network
    self.params = PairParams(
      *(partitioning.place(model.params) for model in (target, draft))
    )
    encoded = ((*tokenizer.encode(text), EOS) for text in sources)
    rows = [row for row in encoded if len(row) <= INPUT_WIDTH]
    # Where the test split is not there the shipped sentences are repeated.
    rows = [rows[i % len(rows)] for i in range(1000)]
    self.inputs = np.zeros((len(rows), INPUT_WIDTH), np.int32)
    for row, ids in zip(self.inputs, rows, strict=True):
      row[: len(ids)] = ids

  def run(self, width, batch, count, gamma):
    """Tokens, scores and counts of the first `count` rows."""
    loop = Loop(self.target, small_model(self.draft) if gamma else None)
    decode = jax.jit(loop.decode)
    settings = beams.BeamSettings(
      penalty=jnp.float32(ALPHA),
      width=width,
      draft_width=width + 2 * (gamma % 2),
    )
    found = []
    for at in range(0, count, batch):
      part = self.inputs[at : min(at + batch, count)]
      filled = np.zeros((batch, INPUT_WIDTH), np.int32)
      filled[: len(part)] = part
      is_row = np.arange(batch) < len(part)
      request = new_request(
        filled,
        example_keys(0, np.arange(batch, dtype=np.uint32)),
        SamplingConfig(0.0),
        slots=MAX_LENGTH,
        gamma=gamma,
        stop_ids=[EOS],
        max_length=np.where(is_row, MAX_LENGTH, 0),
        beams=settings,
      )
      done = jax.device_get(decode(self.params, request))
      found.append(
        (
          done.tokens.reshape(batch, width, -1)[: len(part)],
          done.scores.reshape(batch, width)[: len(part)],
          done.stats.num_rounds.reshape(batch, width)[: len(part), -1],
          done.stats.num_accepted.reshape(batch, width)[: len(part), -1],
        )
      )
    return tuple(map(np.concatenate, zip(*found, strict=True)))


@pytest.fixture(scope='module')
def pair(models, sources):
  return Pair(models, sources)


def test_beams_equal_plain_on_a_thousand(pair):
  """All beams of all rows agree, token for token, their scores to 1e-4."""
  batch, width, gamma, count = demo_test.RAGGED, 4, 3, len(pair.inputs)
  want, want_scores, want_rounds, _ = pair.run(width, batch, count, gamma=0)
  have, have_scores, rounds, accepted = pair.run(width, batch, count, gamma)
  differing = np.nonzero(np.any(have != want, axis=(1, 2)))[0]
  shown = [
    (int(row), have_scores[row].tolist(), want_scores[row].tolist())
    for row in differing
  ]
  levels = (accepted.sum() + rounds.sum()) / rounds.sum()
  print(
    f'width {width}, gamma {gamma}, batch {batch}: {count} rows,'
    f' {len(shown)} differ {shown[:5]}; largest difference of scores'
    f' {np.abs(have_scores - want_scores).max():.2g};'
    f' {levels:.3f} levels a call, {want_rounds.sum()} plain calls,'
    f' {rounds.sum()} speculative',
    flush=True,
  )
  assert not shown
  np.testing.assert_allclose(have_scores, want_scores, atol=1e-4)
  assert rounds.sum() < want_rounds.sum()
