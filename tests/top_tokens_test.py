"""The likeliest tokens of a row, found without sorting it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import probs

STOPS = (1, 7)


def by_sorting(logits, count, forbidden):
  """The reference: values and ids, the first ids on ties."""
  rows = np.array(logits, np.float32)
  for row, no_stops in zip(rows, forbidden, strict=True):
    if no_stops:
      row[list(STOPS)] = -np.inf
  ids = np.argsort(-rows, axis=-1, kind='stable')[:, :count]
  return np.take_along_axis(rows, ids, axis=-1), ids


# Blocks of 64 and of 128, rows that are padded, and rows that are too short.
@pytest.mark.parametrize('size', [40, 12801])
@pytest.mark.parametrize('count', [1, 9])
def test_top_tokens_are_those_of_a_sort(size, count):
  key = jax.random.key(size)
  # Few different values: ties within blocks and between them.
  logits = jnp.round(jax.random.normal(key, (6, size)) * 2)
  # Stop ids before all others, and the only ones of their blocks.
  logits = logits.at[:3, jnp.array(STOPS)].set(50.0)
  forbidden = np.array([True, False, True, False, True, False])
  find = jax.jit(probs.top_tokens, static_argnums=1)
  stops = jnp.array([*STOPS, -1])
  values, ids, largest = find(logits, count, stops, forbidden)
  expected = by_sorting(logits, count, forbidden)
  np.testing.assert_array_equal(values, expected[0])
  np.testing.assert_array_equal(ids, expected[1])
  np.testing.assert_array_equal(largest, np.max(logits, axis=-1))


def test_a_forbidden_token_takes_no_place_in_any_block():
  """Control: as many blocks as tokens would miss some."""
  size, count = 32128, 4
  logits = np.full((1, size), -5.0, np.float32)
  stops = np.arange(8) * 128 + 3  # eight blocks, whose second is small
  logits[0, stops] = 10.0
  wanted = np.arange(20, 24) * 128
  logits[0, wanted] = np.arange(4)
  yes = np.array([True])
  _, ids, _ = probs.top_tokens(jnp.array(logits), count, jnp.array(stops), yes)
  assert ids.tolist() == [wanted[::-1].tolist()]
  _, ids, _ = probs.top_tokens(jnp.array(logits), count, jnp.array(stops), ~yes)
  assert ids.tolist() == [stops[:4].tolist()]
