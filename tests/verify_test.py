"""Verification by exact enumeration of drafts and uniforms; and its edges.

One table of rules (by token, as a block, along a tree, lenient) and drafters,
with negative controls: wrong residuals, draft probabilities that are not those
which were drawn from, and tokens that were drawn and dropped must be found out.
"""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
from specdec_jax import probs, verify, verify_tree
from specdec_jax.probs import SamplingConfig
from specdec_jax.tree_shape import TreeShape, branching
from specdec_jax.types import Draft
from verify_laws import (
  ADVERSARIAL,
  constant,
  law_error,
  length_while,
  likeliest,
  pair,
  step_outcomes,
  without_replacement,
)

# What float32 and uniforms of 23 bits leave of "exact": by token, and of more
# sums.
_BY_TOKEN, _EXACT = 1e-6, 2e-6
# A wrong rule must miss by more than rounding could.
_WRONG = 1e-3

# How drafts are made and judged. `Draft.probs` of chosen ones is None.
_CHOSEN = {'rows': likeliest, 'deterministic': True}
_BLOCK = {'as_block': True}
BY_TOKEN, AS_BLOCK = 'by token', 'as a block'
CHAINS = {
  BY_TOKEN: {},
  AS_BLOCK: _BLOCK,
  'chosen, by token': _CHOSEN,
  'chosen, as a block': _CHOSEN | _BLOCK,
}
TREES = {
  'independent': {},
  'without replacement': {'rows': without_replacement},
  'chosen': _CHOSEN,
}
TWO_LEVELS = branching(2, (1,))
YOUNGER = TreeShape((-1, -1, 1, 2))  # the younger child has a subtree
SHAPES = branching(1, 1), branching(2), branching(3), TWO_LEVELS, YOUNGER

pytestmark = pytest.mark.usefixtures('strict')
both_rules = pytest.mark.parametrize('rule', [BY_TOKEN, AS_BLOCK])


def error_of(rule, laws, shape, vocab_size, **options):
  options = (CHAINS | TREES)[rule] | options
  return law_error(*laws, shape, vocab_size, **options)


def is_exact(rule, *args, **options):
  exact = _BY_TOKEN if rule in (BY_TOKEN, 'chosen, by token') else _EXACT
  return error_of(rule, *args, **options) < exact


@pytest.mark.parametrize(
  ('rule', 'shape', 'vocab_size'),
  [
    *((BY_TOKEN, gamma, size) for gamma, size in ((2, 1), (1, 6), (3, 4))),
    *((AS_BLOCK, gamma, size) for gamma, size in ((2, 1), (1, 6), (3, 4))),
    *((rule, shape, 3) for shape, rule in zip(SHAPES, itertools.cycle(TREES))),
  ],
)
def test_law_of_random_pairs(rule, shape, vocab_size):
  for seed in (0, 2):  # elsewhere the size is 6, so that programs are shared
    assert is_exact(rule, pair(seed, vocab_size), shape, vocab_size)


@both_rules
@pytest.mark.parametrize(
  ('target', 'draft'),
  [
    (SamplingConfig(0.0), SamplingConfig(0.0)),
    # The drafter may be standardised otherwise, as long as it says so.
    (SamplingConfig(1.0), SamplingConfig(0.0)),
    (SamplingConfig(0.0), SamplingConfig(1.0)),
    (SamplingConfig(0.7, top_k=3), SamplingConfig(1.3, top_p=0.5)),
  ],
)
def test_law_of_standardised_pairs(target, draft, rule):
  assert is_exact(rule, pair(10, 6, draft, target), 2, 6)


def padded(case, size):
  """Tokens that neither side knows of fill the vocabulary up to a size."""
  rows = ADVERSARIAL[case]
  return [constant(np.pad(row, (0, size - len(row)))) for row in rows]


@pytest.mark.parametrize(
  ('case', 'tree'), list(zip(ADVERSARIAL, itertools.cycle(TREES)))
)
def test_law_of_adversarial_pairs(case, tree):
  """Also where there are fewer tokens than children without replacement."""
  for gamma, rule in itertools.product((1, 2), (BY_TOKEN, AS_BLOCK)):
    assert is_exact(rule, padded(case, 6), gamma, 6)
  for shape in (branching(3), branching(2, 1)):
    assert is_exact(tree, padded(case, 4), shape, 4)


@pytest.mark.parametrize('rule', [*CHAINS, *TREES])
def test_law_of_a_draft_shorter_than_its_shape(rule):
  shapes, size = ((0, 2), 6) if rule in CHAINS else ((TWO_LEVELS,), 3)
  for shape, length in itertools.product(shapes, (0, 1, None)):
    if shape or not length:
      assert is_exact(rule, pair(20, size), shape, size, length=length)


@both_rules
@pytest.mark.parametrize('gamma', [1, 2])
def test_law_of_a_drafter_that_decides_before_it_draws(gamma, rule):
  target, draft = pair(20, 6)
  for goes_on in (
    # It stops where it is sure, before it draws.
    lambda before: draft(before).max() < 0.5,
    # It stops behind a stop id, and keeps it.
    lambda before: 1 not in before,
  ):
    length = length_while(goes_on)
    drafts = itertools.product(range(6), repeat=gamma)
    assert gamma == 1 or len({length(tokens) for tokens in drafts}) > 1
    assert is_exact(rule, (target, draft), gamma, 6, length=length)


# Reported, and drawn from: token 3 is half of what is proposed.
_REPORTED = constant([0.5, 0.3, 0.2, 0, 0, 0])
_DRAWN = constant([0.25, 0.15, 0.1, 0.5, 0, 0])


@both_rules
def test_law_of_a_drafter_that_denies_its_own_token(rule):
  target, _ = pair(50, 6)
  for reported, drawn in (
    # Always: it reports one-hot of token 0 and proposes something else.
    (constant(np.eye(6)[0]), constant([0, 0.5, 0.5, 0, 0, 0])),
    # Sometimes: half of its proposals are token 3, which it reports as 0; the
    # other half come from the law it reports.
    (_REPORTED, _DRAWN),
    # And where it reports NaN, as if its model had broken.
    (constant([np.nan] * 6), _DRAWN),
  ):
    assert is_exact(rule, (target, reported), 2, 6, drawn_from=drawn)


def test_a_token_of_target_probability_zero_is_never_accepted():
  # Not even by a uniform of exactly 0.
  target_rows = jnp.array([[1.0, 0.0]] * 2)
  zero = jnp.zeros(1)
  for draft_row in ([0.5, 0.5], [1.0, 0.0], [0.0, 1.0]):
    draft = Draft(jnp.array([1]), jnp.array([draft_row]), jnp.int32(1))
    assert verify.count_accepted(draft, target_rows, zero) == 0
    shares = verify.kept_shares(draft, target_rows)
    assert not verify.count_accepted_block(draft, target_rows, shares, zero)


def test_equal_probabilities_are_always_accepted():
  # Also by the largest uniform, at every magnitude that float32 has.
  magnitudes = np.float32(2.0) ** -np.arange(0, 126, dtype=np.float32)
  rows = jnp.stack([magnitudes, magnitudes * np.float32(0.9)], axis=1)
  count = len(rows)
  draft = Draft(jnp.ones(count, jnp.int32), rows, jnp.int32(count))
  target_probs = jnp.append(rows, rows[:1], axis=0)
  for largest in (1 - 2.0**-23, 1 - 2.0**-24):
    uniforms = jnp.full(count, largest, jnp.float32)
    assert verify.count_accepted(draft, target_probs, uniforms) == count


def _kept(laws, gamma, vocab_size):
  """Proposals kept in the mean: by token, and as a block."""
  target, draft = laws
  return [
    step_outcomes(target, draft, gamma, vocab_size, as_block=as_block)[1]
    for as_block in (False, True)
  ]


def test_a_block_keeps_no_fewer_tokens():
  # 10/9 of two proposals by tokens, 11/9 as a block.
  rows = [1 / 3, 2 / 3, 0, 0, 0, 0], [2 / 3, 1 / 3, 0, 0, 0, 0]
  want = pytest.approx([10 / 9, 11 / 9], abs=1e-5)
  assert _kept(map(constant, rows), 2, 6) == want
  by_token, as_block = _kept(pair(0, 4), 3, 4)
  assert as_block > by_token + _WRONG
  for case in ADVERSARIAL:
    by_token, as_block = _kept(padded(case, 6), 2, 6)
    assert as_block > by_token - _EXACT


# --- Lenience: another law, with a bound -------------------------------------

_SIZE, _GAMMA = 6, 2


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


@pytest.mark.parametrize('lenience', [1.0, 0.5, 0.1])
def test_law_of_lenience(lenience):
  target, draft = pair(2, _SIZE)
  law, _ = step_outcomes(target, draft, _GAMMA, _SIZE, lenience=lenience)
  want = lenient_law(target, draft, lenience)
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


# --- Negative controls: each of these must be found out -------------------

_right_weights, _right_walk = verify.next_token_weights, verify_tree.walk


def target_as_residual(draft, target_probs, num_accepted):
  """Resamples from the target itself after a rejection."""
  return target_probs[num_accepted]


def residual_of_single_tokens(draft, target_probs, num_accepted, share):
  """The residual of Algorithm 1 after a draft that was judged as a whole."""
  return _right_weights(draft, target_probs, num_accepted)


def residual_after_short_draft(draft, target_probs, num_accepted):
  """Forgets that `length` may be below G, and takes the end for a rejection."""
  gamma = jnp.int32(draft.tokens.shape[0])
  return _right_weights(draft.replace(length=gamma), target_probs, num_accepted)


def accepts_what_is_denied(draft, target_probs, uniforms):
  """What the draft's own zero would do without its special case."""
  place = draft.tokens[:, None]
  draft_prob = jnp.take_along_axis(draft.probs, place, 1)[:, 0]
  chosen = jnp.take_along_axis(target_probs[:-1], place, 1)[:, 0]
  return jnp.argmin(jnp.append(uniforms * draft_prob < chosen, False))


def no_residual_in_a_tree(*args):
  """A tried child is left in the target's row."""
  with mock.patch.object(verify_tree, '_residual', lambda probs, row: probs):
    return _right_walk(*args)


# Rule, and the function that takes the place of one of its own.
@pytest.mark.parametrize(
  ('rule', 'wrong', 'options'),
  [
    (BY_TOKEN, {'next_token_weights': target_as_residual}, {}),
    (AS_BLOCK, {'next_token_weights': residual_of_single_tokens}, {}),
    *(
      (rule, {'next_token_weights': residual_after_short_draft}, {'length': 1})
      for rule in (BY_TOKEN, 'chosen, by token')
    ),
    (
      BY_TOKEN,
      {'count_accepted': accepts_what_is_denied},
      {'draft': _REPORTED, 'drawn_from': _DRAWN},
    ),
    *((rule, {'walk': no_residual_in_a_tree}, {}) for rule in TREES),
  ],
)
def test_control_a_wrong_rule(rule, wrong, options, monkeypatch):
  for name, function in wrong.items():
    module = verify_tree if rule in TREES else verify
    monkeypatch.setattr(module, name, function)
  target, draft = pair(0, 6)
  laws = target, options.pop('draft', draft)
  shape = branching(2) if rule in TREES else 2
  assert error_of(rule, laws, shape, 6, **options) > _WRONG


@both_rules
def test_control_a_drafter_that_breaks_the_rule(rule):
  """Drawn otherwise than reported; unlikely tokens or stop ids dropped."""
  target, draft = laws = pair(20, 6)
  _, drawn = pair(20, 6, SamplingConfig(0.7))
  assert error_of(rule, laws, 2, 6, drawn_from=drawn) > _WRONG
  for goes_on in (
    lambda tokens: draft(tokens[:-1])[tokens[-1]] > 0.3,
    lambda tokens: 1 not in tokens,
  ):
    length = length_while(goes_on, see=1)
    assert error_of(rule, laws, 2, 6, length=length) > _WRONG


def test_control_children_reported_otherwise_than_drawn():
  """Chosen as if drawn; without replacement as if independently."""
  for rule, report in (
    # Each child is reported as one that was drawn from the drafter's law.
    ('chosen', lambda rows: [pair(0, 3)[1](())] * 2),
    ('without replacement', lambda rows: rows[:1] * 2),
  ):
    options = {'report': report, 'deterministic': False}
    assert error_of(rule, pair(0, 3), branching(2), 3, **options) > _WRONG


# --- Edges, along chains and trees: one shape, so that programs are shared ----

_verify_batch = jax.jit(verify.verify_batch)
_tree_batch = jax.jit(verify_tree.verify_tree_batch)

# One shape for all of them, so that `verify` is compiled twice and no more.
_B, _G, _V = 64, 3, 6
_KEYS = jax.random.split(jax.random.key(10), _B)


def _random_draft(chosen=False, shape=None):
  """A draft of ragged lengths and unrelated target rows."""
  rng = np.random.default_rng(9)
  size, depth = (shape.num_nodes, shape.depth) if shape else (_G, _G)
  tokens = rng.integers(_V, size=(_B, size), dtype=np.int32)
  laws = None if chosen else _random_laws(rng, size)
  length = rng.integers(depth + 1, size=_B, dtype=np.int32)
  return Draft(tokens, laws, length, shape), _random_laws(rng, size + 1)


def _random_laws(rng, rows):
  return rng.dirichlet(np.ones(_V), size=(_B, rows)).astype(np.float32)


@jax.jit
@jax.vmap
def _plain_tokens(row, key):
  """What the plain loop draws."""
  return probs.sample(row, probs.resample_key(key))


@pytest.mark.parametrize('token', [None, -1, _V, 2**30])
@pytest.mark.parametrize('chosen', [False, True])
def test_without_proposals_it_is_the_plain_sample_bit_for_bit(chosen, token):
  """None are proposed, or ids outside the vocabulary, which none accepts."""
  draft, target_probs = _random_draft(chosen)
  if token is None:
    draft = draft.replace(length=np.zeros(_B, np.int32))
  else:
    draft = draft.replace(tokens=np.full((_B, _G), token, np.int32))
  verdict = _verify_batch(draft, target_probs, _KEYS, None)
  want = _plain_tokens(target_probs[:, 0], _KEYS)
  np.testing.assert_array_equal(verdict.next_token, want)
  np.testing.assert_array_equal(verdict.num_accepted, 0)


def test_what_lies_behind_length_is_not_looked_at():
  draft, target_probs = _random_draft()
  verdict = _verify_batch(draft, target_probs, _KEYS, None)
  behind = np.arange(_G) >= draft.length[:, None]
  tokens = np.where(behind, np.int32(-7), draft.tokens)
  laws = np.where(behind[..., None], np.float32(np.nan), draft.probs)
  garbage = Draft(tokens, laws, draft.length)
  rows = np.arange(_G + 1) > draft.length[:, None]
  garbled = np.where(rows[..., None], np.float32(np.nan), target_probs)
  again = _verify_batch(garbage, garbled, _KEYS, None)
  jax.tree.map(np.testing.assert_array_equal, again, verdict)


def _check_same(rows, have, want):
  """Checks that the verdicts of these rows are the same."""
  have, want = jax.device_get((have, want))
  for name in ('num_accepted', 'next_token'):
    both = (getattr(verdict, name)[rows] for verdict in (have, want))
    np.testing.assert_array_equal(*both)
  if have.path is not None:
    kept = np.arange(have.path.shape[1]) < have.num_accepted[:, None]
    paths = [np.where(kept, one.path, 0)[rows] for one in (have, want)]
    np.testing.assert_array_equal(*paths)


@pytest.mark.parametrize('shape', [None, branching(3), TWO_LEVELS, YOUNGER])
def test_argmaxes_are_the_rows_at_temperature_0(shape):
  """The greedy walk is recursive rejection of one-hot rows."""
  draft, rows = _random_draft(True, shape)
  best = np.argmax(rows, axis=2).astype(np.int32)
  if shape:
    before = best[:, np.array(shape.parents) + 1]
    greedy, usual, more = verify_tree.verify_tree_greedy_batch, _tree_batch, ()
  else:
    before = best[:, :-1]
    greedy, usual, more = verify.verify_greedy_batch, _verify_batch, (None,)
  right = np.random.default_rng(0).random(before.shape) < 0.6
  draft = draft.replace(tokens=np.where(right, before, draft.tokens))
  have = jax.jit(greedy)(draft, best)
  want = usual(draft, np.eye(_V, dtype=np.float32)[best], _KEYS, *more)
  # Of equal siblings the greedy walk takes the one with the longer path.
  assert np.all(have.num_accepted >= want.num_accepted)
  same = have.num_accepted == want.num_accepted
  assert shape or np.all(same)
  _check_same(same, have, want)
  depth = shape.depth if shape else _G
  assert {*have.num_accepted.tolist()} == set(range(depth + 1))


@pytest.mark.parametrize('chosen', [False, True])
def test_a_tree_of_one_branch_is_algorithm_1(chosen):
  """Bit for bit, from the same random numbers."""
  draft, rows = _random_draft(chosen, branching(1, 1, 1))
  have = _tree_batch(draft, rows, _KEYS)
  want = _verify_batch(draft.replace(tree=None), rows, _KEYS, None)
  _check_same(slice(None), have, want.replace(path=np.arange(_G)[None]))
  assert {*have.num_accepted.tolist()} >= {0, 1}


def test_wrong_shapes_are_named():
  draft, target_probs = jax.tree.map(lambda x: x[0], _random_draft())
  judge = functools.partial(verify.verify, key=jax.random.key(0))
  for field, call in (
    ('target_probs', lambda: judge(draft, target_probs[:_G])),
    ('draft.probs', lambda: judge(draft, target_probs[:, :5])),
    ('target_tokens', lambda: verify.verify_greedy(draft, np.zeros(2, int))),
    ('parent of node 1', lambda: TreeShape((-1, -2))),
    ('parent of node 2', lambda: TreeShape((-1, 0, -1))),
    ('1 to 256 nodes', lambda: TreeShape(())),
  ):
    with pytest.raises(ValueError, match=field):
      call()


def test_a_shape_knows_its_nodes():
  shape = branching(3, (2, 1), 1)
  assert shape.paths[7].tolist() == [0, 4, 7]
  assert shape.cut(2).parents == (-1, -1, -1, 0, 0, 1)
  assert shape.cut(3) == shape
