"""`verify` as shipped: its law by statistics, its verdicts at the edges.

verify_law_test.py has the exact law.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import verify_controls as controls
from specdec_jax import probs
from specdec_jax import verify as shipped
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft
from toy_models import joint_law

_verify = jax.jit(shipped.verify)
_verify_batch = jax.jit(shipped.verify_batch)

pytestmark = pytest.mark.usefixtures('strict')


# --- The shipped `verify`, keys and sampler included, by statistics ---------
#
# 200,000 steps of one seed, joint law of three tokens over V = 5, gamma = 2,
# alpha 1e-3: a right `verify` fails one seed in a thousand, the controls below
# at p < 1e-9.

_SAMPLES, _ALPHA, _SIZE = 200_000, 1e-3, 5


def _tables(law):
  """Rows of a law after 0, 1 and 2 tokens: float32[V], [V, V], [V, V, V]."""
  shape = (_SIZE, _SIZE)
  return [
    np.reshape([law(t) for t in np.ndindex(shape[:i])], shape[:i] + (_SIZE,))
    for i in range(3)
  ]


def _trigram(key, target, drawn_from, reported, length):
  """The first three tokens that a speculative step begins; int32[3]."""
  key, rest = jax.random.split(key)
  first = probs.sample(drawn_from[0], probs.draft_key(key, 0))
  second = probs.sample(drawn_from[1][first], probs.draft_key(key, 1))
  proposals = Draft(
    tokens=jnp.stack([first, second]),
    probs=jnp.stack([reported[0], reported[1][first]]),
    length=length,
  )
  rows = jnp.stack([target[0], target[1][first], target[2][first, second]])
  kept, next_token = jax.tree.leaves(shipped.verify(proposals, rows, key))
  # What the step left open, the target continues alone.
  token_1 = jnp.where(kept > 0, first, next_token)
  drawn = probs.sample(target[1][token_1], probs.draft_key(rest, 0))
  token_2 = jnp.where(kept > 1, second, jnp.where(kept > 0, next_token, drawn))
  drawn = probs.sample(target[2][token_1, token_2], probs.draft_key(rest, 1))
  token_3 = jnp.where(kept > 1, next_token, drawn)
  return jnp.stack([token_1, token_2, token_3])


def _jit_trigrams():
  return jax.jit(jax.vmap(_trigram, in_axes=(0, None, None, None, None)))


_trigrams = _jit_trigrams()


def _count(target, draft, *, reported=None, length=2, trigrams=_trigrams):
  keys = _keys(0, _SAMPLES)
  laws = [_tables(law) for law in (target, draft, reported or draft)]
  return toy_models.count_ngrams(trigrams(keys, *laws, np.int32(length)), _SIZE)


def test_verify_chi_squared():
  target, draft = controls.pair(60, _SIZE)
  observed = _count(target, draft)
  toy_models.assert_chi_squared(observed, joint_law(target, 3, _SIZE), _ALPHA)


@pytest.mark.parametrize('wrong', ['plain target', 'short draft', 'reported'])
def test_verify_chi_squared_controls(monkeypatch, wrong):
  target, draft = controls.pair(60, _SIZE)
  options = {}
  if wrong == 'plain target':
    controls.patch_weights(monkeypatch, controls.plain_target_as_residual)
  elif wrong == 'short draft':
    controls.patch_weights(monkeypatch, controls.residual_after_short_draft)
    options['length'] = 1
  else:
    _, options['reported'] = controls.pair(60, _SIZE, SamplingConfig(1.4))
  observed = _count(target, draft, trigrams=_jit_trigrams(), **options)
  with pytest.raises(AssertionError, match='chi-squared'):
    toy_models.assert_chi_squared(observed, joint_law(target, 3, _SIZE), 1e-9)


# --- Verdicts ---------------------------------------------------------------

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


def _row(tree, index):
  return jax.tree.map(lambda x: x[index], tree)


@pytest.mark.parametrize('deterministic', [False, True])
def test_batch_is_each_row(deterministic):
  draft, target_probs = _random_draft(0, deterministic)
  keys = _keys(1)
  batch = _verify_batch(draft, target_probs, keys)
  for i in range(16):
    single = _verify(_row(draft, i), target_probs[i], keys[i])
    assert single.num_accepted == batch.num_accepted[i]
    assert single.next_token == batch.next_token[i]
    assert batch.num_accepted[i] <= draft.length[i]
  assert batch.num_accepted.dtype == batch.next_token.dtype == np.int32


def test_residual_without_mass_falls_back_to_the_target():
  # p = q is never rejected; the row is asked for all the same.
  draft, target_probs = _row(_random_draft(18), 0)
  draft = draft.replace(probs=target_probs[:_G], length=np.int32(_G))
  for kept in range(_G):
    weights = shipped.next_token_weights(
      draft, jnp.asarray(target_probs), jnp.int32(kept)
    )
    np.testing.assert_array_equal(weights, target_probs[kept])


@pytest.mark.parametrize('gamma', [0, _G])
def test_without_proposals_it_is_the_plain_sample_bit_for_bit(gamma):
  for deterministic in (False, True):
    draft, target_probs = _random_draft(9, deterministic, gamma)
    draft = draft.replace(length=np.zeros(_B, np.int32))
    keys = _keys(10)
    verdict = _verify_batch(draft, target_probs, keys)
    np.testing.assert_array_equal(
      verdict.next_token, _plain_tokens(target_probs[:, 0], keys)
    )
    np.testing.assert_array_equal(verdict.num_accepted, 0)


def test_what_lies_behind_length_is_not_looked_at():
  draft, target_probs = _random_draft(11)
  keys = _keys(12)
  verdict = _verify_batch(draft, target_probs, keys)
  behind = np.arange(_G) >= draft.length[:, None]
  garbage = Draft(
    tokens=np.where(behind, np.int32(-7), draft.tokens),
    probs=np.where(behind[..., None], np.float32(np.nan), draft.probs),
    length=draft.length,
  )
  rows = np.arange(_G + 1) > draft.length[:, None]
  garbled = np.where(rows[..., None], np.float32(np.nan), target_probs)
  again = _verify_batch(garbage, garbled, keys)
  jax.tree.map(np.testing.assert_array_equal, again, verdict)


@pytest.mark.parametrize('token', [-1, _V, 2**30])
def test_an_id_outside_the_vocabulary_is_never_accepted(token):
  draft, target_probs = _random_draft(13)
  keys = _keys(14)
  tokens = np.full((_B, _G), token, np.int32)
  for rows in (None, draft.probs):
    bad = Draft(tokens, rows, np.full(_B, _G, np.int32))
    verdict = _verify_batch(bad, target_probs, keys)
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
  jax.tree.map(
    np.testing.assert_array_equal,
    greedy,
    _verify_batch(draft, one_hots, keys),
  )
  # Whatever the drafter's distribution was.
  soft, _ = _random_draft(15)
  jax.tree.map(
    np.testing.assert_array_equal,
    greedy,
    _verify_batch(soft, one_hots, keys),
  )
  histogram = np.bincount(np.asarray(greedy.num_accepted), minlength=_G + 1)
  assert np.all(histogram > 0)


def test_wrong_shapes_are_named():
  draft, target_probs = _row(_random_draft(0), 0)
  verify = functools.partial(shipped.verify, key=jax.random.key(0))
  with pytest.raises(ValueError, match=r'target_probs: expected shape \(4, V'):
    verify(draft, target_probs[:_G])
  with pytest.raises(ValueError, match='draft.probs: expected shape'):
    verify(draft, target_probs[:, :5])
  with pytest.raises(ValueError, match='target_tokens: expected shape'):
    shipped.verify_greedy(draft, jnp.zeros(2, jnp.int32))
