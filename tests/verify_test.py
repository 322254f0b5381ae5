"""Verdicts at the edges; verify_law_test.py has the exact law."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import probs
from specdec_jax import verify as shipped
from specdec_jax.types import Draft

_verify = jax.jit(shipped.verify)
_verify_batch = jax.jit(shipped.verify_batch)

pytestmark = pytest.mark.usefixtures('strict')


# One shape for all of them, so that `verify` is compiled twice and no more.
_B, _G, _V = 64, 3, 6


def _random_draft(seed, deterministic=False, gamma=_G):
  """A draft of ragged lengths and unrelated target rows."""
  rng = np.random.default_rng(seed)
  draft = Draft(
    tokens=rng.integers(_V, size=(_B, gamma), dtype=np.int32),
    probs=_random_laws(rng, gamma),
    length=rng.integers(gamma + 1, size=_B, dtype=np.int32),
  )
  target_probs = _random_laws(rng, gamma + 1)
  return draft.replace(probs=None) if deterministic else draft, target_probs


def _random_laws(rng, rows):
  return rng.dirichlet(np.ones(_V), size=(_B, rows)).astype(np.float32)


def _keys(seed, batch=_B):
  return jax.random.split(jax.random.key(seed), batch)


@jax.jit
@jax.vmap
def _plain_tokens(row, key):
  """What the plain loop draws."""
  return probs.sample(row, probs.resample_key(key))


@pytest.mark.parametrize('gamma', [0, _G])
def test_without_proposals_it_is_the_plain_sample_bit_for_bit(gamma):
  for deterministic in (False, True):
    draft, target_probs = _random_draft(9, deterministic, gamma)
    draft = draft.replace(length=np.zeros(_B, np.int32))
    keys = _keys(10)
    verdict = _verify_batch(draft, target_probs, keys, None)
    np.testing.assert_array_equal(
      verdict.next_token, _plain_tokens(target_probs[:, 0], keys)
    )
    np.testing.assert_array_equal(verdict.num_accepted, 0)


def test_what_lies_behind_length_is_not_looked_at():
  draft, target_probs = _random_draft(11)
  keys = _keys(12)
  verdict = _verify_batch(draft, target_probs, keys, None)
  behind = np.arange(_G) >= draft.length[:, None]
  garbage = Draft(
    tokens=np.where(behind, np.int32(-7), draft.tokens),
    probs=np.where(behind[..., None], np.float32(np.nan), draft.probs),
    length=draft.length,
  )
  rows = np.arange(_G + 1) > draft.length[:, None]
  garbled = np.where(rows[..., None], np.float32(np.nan), target_probs)
  again = _verify_batch(garbage, garbled, keys, None)
  jax.tree.map(np.testing.assert_array_equal, again, verdict)


@pytest.mark.parametrize('token', [-1, _V, 2**30])
def test_an_id_outside_the_vocabulary_is_never_accepted(token):
  draft, target_probs = _random_draft(13)
  keys = _keys(14)
  tokens = np.full((_B, _G), token, np.int32)
  for rows in (None, draft.probs):
    bad = Draft(tokens, rows, np.full(_B, _G, np.int32))
    verdict = _verify_batch(bad, target_probs, keys, None)
    np.testing.assert_array_equal(verdict.num_accepted, 0)
    np.testing.assert_array_equal(
      verdict.next_token, _plain_tokens(target_probs[:, 0], keys)
    )


def test_greedy_is_verify_with_one_hots():
  draft, _ = _random_draft(15, deterministic=True)
  rng = np.random.default_rng(16)
  target = rng.integers(_V, size=(_B, _G + 1), dtype=np.int32)
  right = rng.random((_B, _G)) < 0.7
  target[:, :_G][right] = draft.tokens[right]
  one_hots = np.eye(_V, dtype=np.float32)[target]
  keys = _keys(17)
  greedy = jax.jit(shipped.verify_greedy_batch)(draft, target)
  # Whatever the drafter's distribution was.
  for either in (draft, _random_draft(15)[0]):
    verdict = _verify_batch(either, one_hots, keys, None)
    jax.tree.map(np.testing.assert_array_equal, greedy, verdict)
  histogram = np.bincount(np.asarray(greedy.num_accepted), minlength=_G + 1)
  assert np.all(histogram > 0)


def test_wrong_shapes_are_named():
  draft, target_probs = jax.tree.map(lambda x: x[0], _random_draft(0))
  verify = functools.partial(shipped.verify, key=jax.random.key(0))
  with pytest.raises(ValueError, match=r'target_probs: expected shape \(4, V'):
    verify(draft, target_probs[:_G])
  with pytest.raises(ValueError, match='draft.probs: expected shape'):
    verify(draft, target_probs[:, :5])
  with pytest.raises(ValueError, match='target_tokens: expected shape'):
    shipped.verify_greedy(draft, jnp.zeros(2, jnp.int32))
