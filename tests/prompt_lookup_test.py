"""Copying: which match is continued, and how far."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_requests
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.probs import SamplingConfig

INPUT_LEN, GAMMA = 14, 5


def propose(drafter, inputs, texts, gamma=GAMMA):
  """The drafts of a ragged batch: a list of ids for each text."""
  batch = len(texts)
  context = toy_requests.context_of(texts, gamma, SamplingConfig(1.0))
  padded = np.zeros((batch, INPUT_LEN), np.int32)
  for row, ids in enumerate(inputs):
    padded[row, : len(ids)] = ids
  state = drafter.init((), jnp.asarray(padded))
  draft, _ = jax.jit(drafter.propose)((), state, context)
  assert draft.probs is None and draft.tokens.shape == (batch, gamma)
  return [
    row[:length].tolist()
    for row, length in zip(
      np.asarray(draft.tokens), np.asarray(draft.length), strict=True
    )
  ]


def reference(inputs, text, gamma, max_match, min_match):
  """The rule, place by place."""
  best, own, found = 0, False, []
  after_one = set()
  for source in (inputs, text):
    for place in range(1, len(source)):
      match = 0
      for back in range(1, min(max_match, place, len(text)) + 1):
        if source[place - back] != text[-back]:
          break
        match = back
      if match == 1:
        after_one.add(source[place])
      # The first place of the input goes before all others; of the output a
      # later one replaces an earlier one that it found itself.
      better = match > best or (match == best and source is text and own)
      if match >= min_match and better:
        best, own = match, source is text
        found = [
          source[i] for i in range(place, min(place + gamma, len(source)))
        ]
        if source is text:
          period = text[place:]
          found = [period[i % len(period)] for i in range(gamma)]
  return [] if best == 1 and len(after_one) > 1 else found


@pytest.mark.parametrize(('max_match', 'min_match'), [(1, 1), (3, 1), (4, 2)])
def test_follows_the_rule(max_match, min_match):
  rng = np.random.default_rng(max_match)
  # Of few ids and of many: a token with several followers, and with one. Some
  # inputs are empty, as a decoder-only model's.
  limits = rng.integers(5, 20, 300)
  inputs = [rng.integers(2, n, rng.integers(0, INPUT_LEN + 1)) for n in limits]
  texts = [
    np.append(0, rng.integers(2, n, rng.integers(0, 30))) for n in limits
  ]
  found = propose(prompt_lookup(max_match, min_match), inputs, texts)
  sizes = set()
  for row, ids, text in zip(found, inputs, texts, strict=True):
    want = reference(ids.tolist(), text.tolist(), GAMMA, max_match, min_match)
    assert row == want
    sizes.add(len(row))
  assert sizes == set(range(GAMMA + 1)) and not all(map(len, inputs))
