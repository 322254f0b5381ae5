"""Algorithm 1 by exact enumeration: drafts, uniforms and outcomes.

With negative controls: a deliberately wrong residual, draft probabilities that
are not those which were drawn from, and tokens that were drawn and dropped must
be found out.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import verify_controls as controls
from specdec_jax import verify
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft
from verify_laws import ADVERSARIAL, constant, law_error, length_while, step_law

# What float32 and uniforms of 23 bits leave of "exact".
_EXACT = 1e-6
# A wrong residual must miss by more than rounding could.
_WRONG = 1e-3

pytestmark = pytest.mark.usefixtures('strict')


@pytest.mark.parametrize('vocab_size, gamma', [(1, 2), (6, 1), (6, 2)])
def test_law_of_random_pairs(vocab_size, gamma):
  for seed in range(0, 4, 2):
    target, draft = controls.pair(seed, vocab_size)
    assert law_error(target, draft, gamma, vocab_size) < _EXACT


@pytest.mark.parametrize(
  'target_config, draft_config',
  [
    (SamplingConfig(0.7), SamplingConfig(0.7)),
    (SamplingConfig(top_k=2), SamplingConfig(top_k=2)),
    (SamplingConfig(top_p=0.6), SamplingConfig(top_p=0.6)),
    (SamplingConfig(0.0), SamplingConfig(0.0)),
    # The drafter may be standardised otherwise, as long as it says so.
    (SamplingConfig(1.0), SamplingConfig(0.0)),
    (SamplingConfig(0.0), SamplingConfig(1.0)),
    (SamplingConfig(0.7, top_k=3), SamplingConfig(1.3, top_p=0.5)),
  ],
)
def test_law_of_standardised_pairs(target_config, draft_config):
  target, draft = controls.pair(10, 6, draft_config, target_config)
  assert law_error(target, draft, 2, 6) < _EXACT


@pytest.mark.parametrize('gamma', [1, 2])
@pytest.mark.parametrize('case', ADVERSARIAL)
def test_law_of_adversarial_pairs(case, gamma):
  # Tokens that neither side knows of fill the vocabulary up to V = 6.
  target, draft = (
    constant(np.pad(row, (0, 6 - len(row)))) for row in ADVERSARIAL[case]
  )
  assert law_error(target, draft, gamma, 6) < _EXACT


@pytest.mark.parametrize('length', [0, 1])
@pytest.mark.parametrize('deterministic', [False, True])
def test_law_of_a_draft_shorter_than_gamma(length, deterministic):
  config = SamplingConfig(0.0) if deterministic else SamplingConfig()
  target, draft = controls.pair(20, 6, config)
  error = law_error(
    target, draft, 2, 6, length=length, deterministic=deterministic
  )
  assert error < _EXACT


@pytest.mark.parametrize('gamma', [1, 2])
def test_law_of_a_drafter_that_decides_before_it_draws(gamma):
  vocab_size = 4
  target, draft = controls.pair(20, vocab_size)
  for rule in (
    # It stops where it is unsure, before it draws.
    lambda before: draft(before).max() > 0.5,
    # It stops behind a stop id, and keeps it.
    lambda before: 1 not in before,
  ):
    length = length_while(rule)
    drafts = itertools.product(range(vocab_size), repeat=gamma)
    assert gamma == 1 or len({length(tokens) for tokens in drafts}) > 1
    error = law_error(target, draft, gamma, vocab_size, length=length)
    assert error < _EXACT


def test_law_of_deterministic_drafts():
  # One-hot probabilities and None are the same draft.
  target, draft = controls.pair(30, 6, SamplingConfig(0.0))
  assert law_error(target, draft, 2, 6, deterministic=True) < _EXACT
  np.testing.assert_allclose(
    step_law(target, draft, 2, 6, deterministic=True),
    step_law(target, draft, 2, 6),
    atol=1e-9,
  )


def test_law_of_gamma_zero():
  target, draft = controls.pair(40, 6)
  for deterministic in (False, True):
    error = law_error(target, draft, 0, 6, deterministic=deterministic)
    assert error < _EXACT


# Reported, and drawn from: token 3 is half of what is proposed.
_DENIES = (
  constant([0.5, 0.3, 0.2, 0, 0, 0]),
  constant([0.25, 0.15, 0.1, 0.5, 0, 0]),
)


def test_law_of_a_drafter_that_denies_its_own_token():
  # Always: it reports one-hot of token 0 and proposes something else.
  target, _ = controls.pair(50, 6)
  reported, drawn = constant(np.eye(6)[0]), constant([0, 0.5, 0.5, 0, 0, 0])
  assert law_error(target, reported, 2, 6, drawn_from=drawn) < _EXACT
  # Sometimes: half of its proposals are token 3, which it reports as 0; the
  # other half come from the law it reports.
  reported, drawn = _DENIES
  assert law_error(target, reported, 2, 6, drawn_from=drawn) < _EXACT
  # And where it reports NaN, as if its model had broken.
  broken = constant([np.nan] * 6)
  assert law_error(target, broken, 2, 6, drawn_from=drawn) < _EXACT


def test_a_token_of_target_probability_zero_is_never_accepted():
  # Not even by a uniform of exactly 0.
  draft = Draft(
    tokens=jnp.array([1]), probs=jnp.array([[0.5, 0.5]]), length=jnp.int32(1)
  )
  for draft_row in ([0.5, 0.5], [1.0, 0.0], [0.0, 1.0]):
    draft = draft.replace(probs=jnp.array([draft_row]))
    accepted = verify.count_accepted(
      draft, jnp.array([[1.0, 0.0]] * 2), jnp.zeros(1)
    )
    assert accepted == 0


def test_equal_probabilities_are_always_accepted():
  # Also by the largest uniform, at every magnitude that float32 has.
  magnitudes = np.float32(2.0) ** -np.arange(0, 126, dtype=np.float32)
  rows = np.stack([magnitudes, magnitudes * np.float32(0.9)], axis=1)
  draft = Draft(
    tokens=jnp.ones(len(rows), jnp.int32),
    probs=jnp.asarray(rows),
    length=jnp.int32(len(rows)),
  )
  target_probs = jnp.asarray(np.concatenate([rows, rows[:1]]))
  for largest in (1 - 2.0**-23, 1 - 2.0**-24):
    uniforms = jnp.full(len(rows), largest, jnp.float32)
    accepted = verify.count_accepted(draft, target_probs, uniforms)
    assert accepted == len(rows)


# --- Negative controls: each of these must be found out -------------------


def test_control_plain_target_as_residual(monkeypatch):
  controls.patch_weights(monkeypatch, controls.plain_target_as_residual)
  target, draft = controls.pair(0, 6)
  assert law_error(target, draft, 2, 6) > _WRONG


@pytest.mark.parametrize('deterministic', [False, True])
def test_control_residual_after_short_draft(monkeypatch, deterministic):
  controls.patch_weights(monkeypatch, controls.residual_after_short_draft)
  target, draft = controls.pair(
    20, 6, SamplingConfig(0.0 if deterministic else 1.0)
  )
  error = law_error(target, draft, 2, 6, length=1, deterministic=deterministic)
  assert error > _WRONG


def test_control_draft_reported_otherwise_than_drawn():
  target, reported = controls.pair(0, 6)
  _, drawn = controls.pair(0, 6, SamplingConfig(0.7))
  assert law_error(target, reported, 2, 6, drawn_from=drawn) > _WRONG


def test_control_a_drafter_that_drops_what_it_drew():
  # Of (.9, .1) and (.5, .5): each 1 that is drawn is dropped. Token 0 is then
  # accepted in one half, and drawn by the target with .9 in the other.
  target, draft = constant([0.9, 0.1]), constant([0.5, 0.5])
  drops = length_while(lambda tokens: tokens[-1] == 0, see=1)
  law = step_law(target, draft, 1, 2, length=drops)
  np.testing.assert_allclose(law.sum(axis=1), [0.95, 0.05], atol=1e-6)
  # The same drafts, none dropped.
  law = step_law(target, draft, 1, 2)
  np.testing.assert_allclose(law.sum(axis=1), [0.9, 0.1], atol=1e-6)


@pytest.mark.parametrize('gamma', [1, 2])
def test_control_a_drafter_that_drops_unlikely_tokens(gamma):
  target, draft = controls.pair(20, 4)
  drops = length_while(
    lambda tokens: draft(tokens[:-1])[tokens[-1]] > 0.3, see=1
  )
  assert law_error(target, draft, gamma, 4, length=drops) > _WRONG


def test_control_a_stop_id_that_is_cut_off_its_draft():
  target, draft = controls.pair(20, 4)
  cut_off = length_while(lambda tokens: 1 not in tokens, see=1)
  assert law_error(target, draft, 2, 4, length=cut_off) > _WRONG


def test_control_denied_tokens_accepted_or_resampled(monkeypatch):
  # What the draft's own zero would do without its special case.
  target, _ = controls.pair(50, 6)
  reported, drawn = _DENIES

  def accept(draft, target_probs, uniforms):
    draft_prob = jnp.take_along_axis(draft.probs, draft.tokens[:, None], 1)
    chosen = jnp.take_along_axis(
      target_probs[:-1], draft.tokens[:, None], axis=1
    )
    accepted = uniforms * draft_prob[:, 0] < chosen[:, 0]
    return jnp.argmin(jnp.append(accepted, False))

  monkeypatch.setattr(verify, 'count_accepted', accept)
  error = law_error(target, reported, 2, 6, drawn_from=drawn)
  assert error > _WRONG
