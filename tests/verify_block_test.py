"""Block verification by exact enumeration, with its negative controls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import verify_controls as controls
from specdec_jax import verify, verify_block
from specdec_jax.engine.options import Options
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft
from toy_models import joint_law
from toy_requests import quick_jit
from verify_laws import (
  ADVERSARIAL,
  constant,
  law_error,
  length_while,
  step_outcomes,
)

# What float32 and uniforms of 23 bits leave of "exact".
_EXACT = 2e-6
# A wrong rule must miss by more than rounding could.
_WRONG = 1e-3

pytestmark = pytest.mark.usefixtures('strict')

_error = functools.partial(law_error, as_block=True)


@pytest.mark.parametrize(
  'vocab_size, gamma',
  [
    (6, 1),
    (4, 3),
    *(
      pytest.param(*other, marks=pytest.mark.slow) for other in ((1, 2), (6, 2))
    ),
  ],
)
def test_law_and_length_of_random_pairs(vocab_size, gamma):
  for seed in range(0, 4, 2):
    target, draft = controls.pair(seed, vocab_size)
    assert _error(target, draft, gamma, vocab_size) < _EXACT
    blocks = step_outcomes(target, draft, gamma, vocab_size, as_block=True)[1]
    tokens = step_outcomes(target, draft, gamma, vocab_size)[1]
    assert blocks > tokens - _EXACT
    if gamma > 1 and vocab_size > 1:
      assert blocks > tokens + _WRONG


def test_the_pair_of_two_tokens():
  # 10/9 of two proposals by tokens, 11/9 as a block.
  target, draft = constant([1 / 3, 2 / 3]), constant([2 / 3, 1 / 3])
  assert _error(target, draft, 2, 2) < _EXACT
  tokens = step_outcomes(target, draft, 2, 2)[1]
  assert tokens == pytest.approx(10 / 9, abs=1e-5)
  blocks = step_outcomes(target, draft, 2, 2, as_block=True)[1]
  assert blocks == pytest.approx(11 / 9, abs=1e-5)


@pytest.mark.parametrize(
  'target_config, draft_config',
  [
    (SamplingConfig(0.7), SamplingConfig(0.7)),
    (SamplingConfig(top_p=0.6), SamplingConfig(top_p=0.6)),
    (SamplingConfig(1.0), SamplingConfig(0.0)),
    (SamplingConfig(0.0), SamplingConfig(1.0)),
    (SamplingConfig(0.7, top_k=3), SamplingConfig(1.3, top_p=0.5)),
  ],
)
def test_law_of_standardised_pairs(target_config, draft_config):
  target, draft = controls.pair(10, 6, draft_config, target_config)
  assert _error(target, draft, 2, 6) < _EXACT


@pytest.mark.parametrize('case', ADVERSARIAL)
def test_law_of_adversarial_pairs(case):
  target, draft = (
    constant(np.pad(row, (0, 6 - len(row)))) for row in ADVERSARIAL[case]
  )
  assert _error(target, draft, 2, 6) < _EXACT
  blocks = step_outcomes(target, draft, 2, 6, as_block=True)[1]
  assert blocks > step_outcomes(target, draft, 2, 6)[1] - _EXACT


@pytest.mark.parametrize('length', [0, 1, 2])
@pytest.mark.parametrize('deterministic', [False, True])
def test_law_of_a_draft_shorter_than_gamma(length, deterministic):
  config = SamplingConfig(0.0) if deterministic else SamplingConfig()
  target, draft = controls.pair(20, 4, config)
  error = _error(
    target, draft, 3, 4, length=length, deterministic=deterministic
  )
  assert error < _EXACT


def test_law_of_a_drafter_that_decides_before_it_draws():
  target, draft = controls.pair(20, 4)
  for rule in (
    lambda before: draft(before).max() > 0.5,
    lambda before: 1 not in before,
  ):
    length = length_while(rule)
    drafts = itertools.product(range(4), repeat=2)
    assert len({length(tokens) for tokens in drafts}) > 1
    assert _error(target, draft, 2, 4, length=length) < _EXACT


def test_law_of_a_drafter_that_denies_its_own_token():
  target, _ = controls.pair(50, 6)
  reported = constant([0.5, 0.3, 0.2, 0, 0, 0])
  drawn = constant([0.25, 0.15, 0.1, 0.5, 0, 0])
  assert _error(target, reported, 2, 6, drawn_from=drawn) < _EXACT
  broken = constant([np.nan] * 6)
  assert _error(target, broken, 2, 6, drawn_from=drawn) < _EXACT


def test_law_without_proposals():
  target, draft = controls.pair(40, 6)
  assert _error(target, draft, 0, 6) < _EXACT


@pytest.mark.slow
def test_equal_probabilities_are_all_accepted():
  rows = jnp.array([[0.1, 0.9], [0.7, 0.3], [0.2, 0.8]])
  draft = Draft(jnp.array([0, 1]), rows[:2], jnp.int32(2))
  for seed in range(20):
    verdict = verify_block.verify_block(draft, rows, jax.random.key(seed))
    assert verdict.num_accepted == 2
    assert verdict.num_passed == 2


def test_what_algorithm_1_would_keep_is_counted_beside():
  target, draft = controls.pair(3, 6)
  tokens = jnp.array([0, 1, 2])
  rows = jnp.stack([jnp.asarray(draft(())) for _ in range(3)])
  target_rows = jnp.stack([jnp.asarray(target(())) for _ in range(4)])
  given = Draft(tokens, rows, jnp.int32(3))
  keys = jax.random.split(jax.random.key(0), 1_000)
  as_block, by_token = (
    quick_jit(jax.vmap(judge, in_axes=(None, None, 0)))(
      given, target_rows, keys
    )
    for judge in (verify_block.verify_block, verify.verify)
  )
  np.testing.assert_array_equal(as_block.num_passed, by_token.num_accepted)
  assert np.any(as_block.num_accepted != by_token.num_accepted)


# --- Negative controls: each of these must be found out -------------------


def test_control_residual_of_single_tokens(monkeypatch):
  def wrong(draft, target_probs, kept, num_accepted):
    return verify.next_token_weights(draft, target_probs, num_accepted)

  monkeypatch.setattr(verify_block, 'next_token_weights', wrong)
  target, draft = controls.pair(0, 6)
  assert _error(target, draft, 2, 6) > _WRONG


def test_control_an_end_at_the_first_failure(monkeypatch):
  right = verify_block.count_accepted

  def wrong(draft, target_probs, kept, uniforms):
    gamma = draft.tokens.shape[0]
    alone = [
      right(draft, target_probs, kept, jnp.ones(gamma).at[i].set(uniforms[i]))
      for i in range(gamma)
    ]
    holds = jnp.stack(alone) > jnp.arange(gamma)
    return verify.first_false(holds)

  monkeypatch.setattr(verify_block, 'count_accepted', wrong)
  target, draft = controls.pair(0, 6)
  # The law of the tests is another one too: each is asked by itself.
  drafts = list(itertools.product(range(6), repeat=2))
  keys = jax.random.split(jax.random.key(0), 20_000)
  chosen = jax.random.choice(
    jax.random.key(1),
    len(drafts),
    (len(keys),),
    p=jnp.array([draft(())[a] * draft((a,))[b] for a, b in drafts]),
  )
  tokens = jnp.array(drafts)[chosen]
  rows = jnp.array([[draft(()), draft((a,))] for a, _ in drafts])[chosen]
  target_rows = jnp.array(
    [[target(()), target((a,)), target((a, b))] for a, b in drafts]
  )[chosen]
  length = jnp.full(len(keys), 2, jnp.int32)
  law = joint_law(target, 1, 6)

  def distance():
    # Another object each time: compiled with the patch, and without.
    judge = quick_jit(jax.vmap(lambda *args: verify_block.verify_block(*args)))
    verdict = judge(Draft(tokens, rows, length), target_rows, keys)
    first = jnp.where(
      verdict.num_accepted > 0, tokens[:, 0], verdict.next_token
    )
    found = np.bincount(np.asarray(first), minlength=6) / len(keys)
    return np.abs(found - law).max()

  assert distance() > 0.02
  monkeypatch.setattr(verify_block, 'count_accepted', right)
  assert distance() < 0.012


def test_control_a_drafter_that_drops_what_it_drew():
  target, draft = controls.pair(20, 4)
  drops = length_while(
    lambda tokens: draft(tokens[:-1])[tokens[-1]] > 0.3, see=1
  )
  assert _error(target, draft, 2, 4, length=drops) > _WRONG


# --- The engine's option ---------------------------------------------------


def test_options():
  options = Options
  assert options().judges_blocks
  assert options(verification='block').judges_blocks
  assert not options(verification='token').judges_blocks
  assert not options(lenience=0.5).judges_blocks
  with pytest.raises(ValueError, match='lenience is a rule for single tokens'):
    options(verification='block', lenience=0.5)
  with pytest.raises(ValueError, match="expected one of .'block', 'token'"):
    options(verification='blocks')
