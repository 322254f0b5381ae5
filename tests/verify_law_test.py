"""Verification of chains by exact enumeration: drafts, uniforms and outcomes.

One table of rules (by token, as a block, lenient) and drafters, with negative
controls: wrong residuals, draft probabilities that are not those which were
drawn from, and tokens that were drawn and dropped must be found out.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
from specdec_jax import analysis, verify
from specdec_jax.paper import simulation
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft
from verify_laws import (
  ADVERSARIAL,
  constant,
  law_error,
  length_while,
  pair,
  step_law,
  step_outcomes,
)

# What float32 and uniforms of 23 bits leave of "exact", by token, as a block.
_EXACT = {False: 1e-6, True: 2e-6}
# A wrong rule must miss by more than rounding could.
_WRONG = 1e-3

pytestmark = pytest.mark.usefixtures('strict')
both_rules = pytest.mark.parametrize('as_block', [False, True])


def is_exact(target, draft, gamma, vocab_size, as_block, **options):
  options['as_block'] = as_block
  error = law_error(target, draft, gamma, vocab_size, **options)
  return error < _EXACT[as_block]


@both_rules
@pytest.mark.parametrize('vocab_size, gamma', [(1, 2), (6, 1), (4, 3)])
def test_law_of_random_pairs(vocab_size, gamma, as_block):
  for seed in range(0, 4, 2):
    target, draft = pair(seed, vocab_size)
    assert is_exact(target, draft, gamma, vocab_size, as_block)


@both_rules
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
def test_law_of_standardised_pairs(target_config, draft_config, as_block):
  target, draft = pair(10, 6, draft_config, target_config)
  assert is_exact(target, draft, 2, 6, as_block)


@both_rules
@pytest.mark.parametrize('case', ADVERSARIAL)
def test_law_of_adversarial_pairs(case, as_block):
  # Tokens that neither side knows of fill the vocabulary up to V = 6.
  target, draft = (
    constant(np.pad(row, (0, 6 - len(row)))) for row in ADVERSARIAL[case]
  )
  for gamma in (1, 2):
    assert is_exact(target, draft, gamma, 6, as_block)


@both_rules
@pytest.mark.parametrize('deterministic', [False, True])
def test_law_of_a_draft_shorter_than_gamma(deterministic, as_block):
  """0 tokens of 2 or fewer; None and one-hot probabilities are one draft."""
  config = SamplingConfig(0.0) if deterministic else SamplingConfig()
  target, draft = pair(20, 4, config)
  for gamma, length in ((0, None), (2, 0), (2, 1), (2, None)):
    options = {'length': length, 'deterministic': deterministic}
    assert is_exact(target, draft, gamma, 4, as_block, **options)


@both_rules
@pytest.mark.parametrize('gamma', [1, 2])
def test_law_of_a_drafter_that_decides_before_it_draws(gamma, as_block):
  target, draft = pair(20, 4)
  for rule in (
    # It stops where it is unsure, before it draws.
    lambda before: draft(before).max() > 0.5,
    # It stops behind a stop id, and keeps it.
    lambda before: 1 not in before,
  ):
    length = length_while(rule)
    drafts = itertools.product(range(4), repeat=gamma)
    assert gamma == 1 or len({length(tokens) for tokens in drafts}) > 1
    assert is_exact(target, draft, gamma, 4, as_block, length=length)


# Reported, and drawn from: token 3 is half of what is proposed.
_DENIES = (
  constant([0.5, 0.3, 0.2, 0, 0, 0]),
  constant([0.25, 0.15, 0.1, 0.5, 0, 0]),
)


@both_rules
def test_law_of_a_drafter_that_denies_its_own_token(as_block):
  target, _ = pair(50, 6)
  for reported, drawn in (
    # Always: it reports one-hot of token 0 and proposes something else.
    (constant(np.eye(6)[0]), constant([0, 0.5, 0.5, 0, 0, 0])),
    # Sometimes: half of its proposals are token 3, which it reports as 0; the
    # other half come from the law it reports.
    _DENIES,
    # And where it reports NaN, as if its model had broken.
    (constant([np.nan] * 6), _DENIES[1]),
  ):
    assert is_exact(target, reported, 2, 6, as_block, drawn_from=drawn)


def test_a_token_of_target_probability_zero_is_never_accepted():
  # Not even by a uniform of exactly 0.
  target_rows = jnp.array([[1.0, 0.0]] * 2)
  for draft_row in ([0.5, 0.5], [1.0, 0.0], [0.0, 1.0]):
    draft = Draft(jnp.array([1]), jnp.array([draft_row]), jnp.int32(1))
    assert verify.count_accepted(draft, target_rows, jnp.zeros(1)) == 0
    shares = verify.kept_shares(draft, target_rows)
    assert not verify.count_accepted_block(
      draft, target_rows, shares, jnp.zeros(1)
    )


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


# --- A block keeps more ------------------------------------------------------


def _kept(target, draft, gamma, vocab_size):
  """Proposals kept in the mean: by token, and as a block."""
  return [
    step_outcomes(target, draft, gamma, vocab_size, as_block=as_block)[1]
    for as_block in (False, True)
  ]


def test_a_block_keeps_no_fewer_tokens():
  # 10/9 of two proposals by tokens, 11/9 as a block.
  laws = constant([1 / 3, 2 / 3]), constant([2 / 3, 1 / 3])
  assert _kept(*laws, 2, 2) == pytest.approx([10 / 9, 11 / 9], abs=1e-5)
  by_token, as_block = _kept(*pair(0, 4), 3, 4)
  assert as_block > by_token + _WRONG
  for case in ADVERSARIAL:
    laws = (
      constant(np.pad(row, (0, 6 - len(row)))) for row in ADVERSARIAL[case]
    )
    by_token, as_block = _kept(*laws, 2, 6)
    assert as_block > by_token - _EXACT[True]


# --- Lenience: another law, with a bound -------------------------------------

_SIZE, _GAMMA = 4, 2


def lenient_law(target, draft, lenience):
  """Joint law of a lenient step and what the target adds, in float64.

  Written after the text of A.5, token by token: it knows no code of ours.
  """
  law = np.zeros((_SIZE,) * (_GAMMA + 1))
  for tokens in itertools.product(range(_SIZE), repeat=_GAMMA + 1):
    rows = [np.float64(target(tokens[:i])) for i in range(_GAMMA + 1)]
    rows = [row / row.sum() for row in rows]
    # After a rejection and after a whole draft the target goes on alone.
    alone = np.array([rows[i][tokens[i]] for i in range(_GAMMA + 1)])
    reached = 1.0
    for i in range(_GAMMA):
      proposed = np.float64(draft(tokens[:i]))
      proposed /= proposed.sum()
      chance = np.minimum(1, rows[i] / (lenience * proposed))
      refused = 1 - np.sum(proposed * chance)
      residual = np.maximum(0, rows[i] - proposed)
      redrawn = residual[tokens[i]] / (residual.sum() or 1)
      law[tokens] += reached * refused * redrawn * np.prod(alone[i + 1 :])
      reached *= proposed[tokens[i]] * chance[tokens[i]]
    law[tokens] += reached * alone[_GAMMA]
  return law


def conditional(law, place):
  """P(token | tokens before), of the token at a place."""
  known = law.sum(axis=tuple(range(place + 1, law.ndim)))
  return known / known.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize('lenience', [1.0, 0.5, 0.3, 0.1])
def test_law_of_lenience(lenience):
  target, draft = pair(2, _SIZE)
  law = step_law(target, draft, _GAMMA, _SIZE, lenience=lenience)
  want = lenient_law(target, draft, lenience)
  assert want.sum() == pytest.approx(1)
  np.testing.assert_allclose(law, want, atol=1e-6)
  # No token above its probability / lenience, wherever it stands.
  lossless = toy_models.joint_law(target, _GAMMA + 1, _SIZE)
  ratio = max(
    np.max(conditional(law, i) / conditional(lossless, i))
    for i in range(_GAMMA + 1)
  )
  assert ratio <= 1 / lenience + 1e-4
  error = np.abs(law - lossless).max()
  assert error < 1e-6 if lenience == 1 else error > _WRONG
  if lenience == 0.1:
    # So the bound of less lenience would have been missed.
    assert ratio > 1 / 0.3
  # The first token alone: the closed form.
  closed = simulation.outcomes(target(()), draft(()), lenience)
  np.testing.assert_allclose(law.sum(axis=(1, 2)), closed.total, atol=1e-6)
  beta = analysis.acceptance_prob(target(()), draft(()), lenience)
  assert closed.acceptance_prob == pytest.approx(float(beta), abs=1e-6)


# --- Negative controls: each of these must be found out -------------------

_right_weights = verify.next_token_weights


def plain_target_as_residual(draft, target_probs, num_accepted):
  """Resamples from the target itself after a rejection."""
  return target_probs[num_accepted]


def residual_of_single_tokens(draft, target_probs, num_accepted, share):
  """The residual of Algorithm 1 after a draft that was judged as a whole."""
  return _right_weights(draft, target_probs, num_accepted)


def residual_after_short_draft(draft, target_probs, num_accepted):
  """Forgets that `length` may be below G, and takes the end for a rejection."""
  gamma = jnp.int32(draft.tokens.shape[0])
  return _right_weights(draft.replace(length=gamma), target_probs, num_accepted)


def test_control_plain_target_as_residual(monkeypatch):
  monkeypatch.setattr(verify, 'next_token_weights', plain_target_as_residual)
  target, draft = pair(0, 6)
  assert law_error(target, draft, 2, 6) > _WRONG
  target, draft = pair(2, _SIZE)
  law = step_law(target, draft, _GAMMA, _SIZE, lenience=0.5)
  assert np.abs(law - lenient_law(target, draft, 0.5)).max() > _WRONG


@pytest.mark.parametrize('deterministic', [False, True])
def test_control_residual_after_short_draft(monkeypatch, deterministic):
  monkeypatch.setattr(verify, 'next_token_weights', residual_after_short_draft)
  config = SamplingConfig(0.0 if deterministic else 1.0)
  target, draft = pair(20, 6, config)
  error = law_error(target, draft, 2, 6, length=1, deterministic=deterministic)
  assert error > _WRONG


def test_control_residual_of_single_tokens_in_a_block(monkeypatch):
  monkeypatch.setattr(verify, 'next_token_weights', residual_of_single_tokens)
  target, draft = pair(0, 6)
  assert law_error(target, draft, 2, 6, as_block=True) > _WRONG


@both_rules
def test_control_draft_reported_otherwise_than_drawn(as_block):
  target, reported = pair(0, 6)
  _, drawn = pair(0, 6, SamplingConfig(0.7))
  options = {'drawn_from': drawn, 'as_block': as_block}
  assert law_error(target, reported, 2, 6, **options) > _WRONG


@both_rules
def test_control_a_drafter_that_drops_unlikely_tokens_or_stop_ids(as_block):
  target, draft = pair(20, 4)
  for rule in (
    lambda tokens: draft(tokens[:-1])[tokens[-1]] > 0.3,
    lambda tokens: 1 not in tokens,
  ):
    options = {'length': length_while(rule, see=1), 'as_block': as_block}
    assert law_error(target, draft, 2, 4, **options) > _WRONG


def test_control_denied_tokens_accepted_or_resampled(monkeypatch):
  # What the draft's own zero would do without its special case.
  target, _ = pair(50, 6)
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
