"""Recursive rejection over a tree, by exact enumeration, with controls.

Chosen children that are taken for drawn ones, drawn ones that are sorted, and a
residual that is forgotten must be found out.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import verify, verify_tree
from specdec_jax.tree_shape import TreeShape, branching
from specdec_jax.types import Draft
from verify_laws import (
  constant,
  independent,
  law_error,
  likeliest,
  pair,
  step_law,
  without_replacement,
)

_EXACT = 2e-6
_WRONG = 1e-3
_P, _Q = (0.1, 0.3, 0.6), (0.6, 0.3, 0.1)

SHAPES = {
  'chain': branching(1, 1),
  'two': branching(2),
  'three': branching(3),
  'two levels': branching(2, (1,)),
  # The younger child's subtree.
  'deep': TreeShape((-1, -1, 1, 2)),
}
ROWS = {
  'independent': independent,
  'without_replacement': without_replacement,
  'chosen': likeliest,
}
every_kind = pytest.mark.parametrize('kind', ROWS)
every_shape = pytest.mark.parametrize('shape', SHAPES)


def each(cases):
  """Each case, with the kinds of children in turn."""
  pairs = list(zip(cases, itertools.cycle(ROWS)))
  return pytest.mark.parametrize(('case', 'kind'), pairs)


@each(SHAPES)
def test_law_of_random_pairs(case, kind):
  for seed in (0, 2):
    target, draft = pair(seed, 3)
    error = law_error(target, draft, SHAPES[case], 3, rows=ROWS[kind])
    assert error < _EXACT


@every_kind
@pytest.mark.parametrize('length', [0, 1])
def test_law_of_fewer_levels_than_the_tree_has(kind, length):
  target, draft = pair(8, 3)
  shape = SHAPES['two levels']
  options = {'rows': ROWS[kind], 'length': length}
  assert law_error(target, draft, shape, 3, **options) < _EXACT


ADVERSARIAL = (
  ([0.2, 0.8, 0.0], [0.5, 0.0, 0.5]),
  ([0.6, 0.4, 0.0], [0.0, 0.0, 1.0]),
  ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
  ([0.2, 0.3, 0.5], [0.2, 0.29999998, 0.50000006]),
  ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
  ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
  ([1e-20, 1.0, 1e-20], [0.5, 0.25, 0.25]),
)


@each(range(len(ADVERSARIAL)))
def test_law_of_adversarial_pairs(case, kind):
  """Also where there are fewer tokens than children without replacement."""
  target, draft = ADVERSARIAL[case]
  laws = constant(target), constant(draft)
  for shape in (branching(3), branching(2, 1)):
    assert law_error(*laws, shape, 3, rows=ROWS[kind]) < _EXACT


# --- Negative controls: each of these must be found out -------------------


def test_control_chosen_children_taken_for_drawn_ones():
  laws, options = (constant(_P), constant(_Q)), {'rows': likeliest}
  right = step_law(*laws, branching(2), 3, **options)
  np.testing.assert_allclose(right.sum(axis=1), _P, atol=1e-6)
  options['report'] = lambda rows: [_Q, _Q]
  law = step_law(*laws, branching(2), 3, **options)
  np.testing.assert_allclose(law.sum(axis=1), (1 / 6, 0, 5 / 6), atol=1e-6)


def test_control_elder_siblings_left_in_the_row():
  """Drawn without replacement and reported as drawn independently."""
  options = {'rows': without_replacement, 'report': lambda rows: rows[:1] * 2}
  assert law_error(*pair(0, 3), branching(2), 3, **options) > _WRONG


@every_kind
def test_control_no_residual(monkeypatch, kind):
  monkeypatch.setattr(verify_tree, '_residual', lambda probs, row: probs)
  monkeypatch.setattr(
    verify_tree, 'walk', lambda *args, walk=verify_tree.walk: walk(*args)
  )  # another function: compiled with the patch
  target, draft = pair(0, 3)
  error = law_error(target, draft, branching(2), 3, rows=ROWS[kind])
  assert error > _WRONG


# --- A chain, argmaxes, one row -------------------------------------------


def _random_drafts(batch, shape, vocab_size, kind):
  """Drafts, the target's rows, and keys."""
  rng = np.random.default_rng(0)
  size, law = shape.num_nodes, np.ones(vocab_size)
  probs = rng.dirichlet(law, (batch, size))
  drafts = Draft(
    jnp.asarray(rng.integers(0, vocab_size, (batch, size)), jnp.int32),
    None if kind == 'chosen' else jnp.asarray(probs, jnp.float32),
    jnp.asarray(rng.integers(0, shape.depth + 1, batch), jnp.int32),
    shape,
  )
  rows = jnp.asarray(rng.dirichlet(law, (batch, size + 1)), jnp.float32)
  return drafts, rows, jax.random.split(jax.random.key(0), batch)


def _check_same(rows, have, want):
  """Checks that the verdicts of these rows are the same."""
  kept = np.arange(have.path.shape[1]) < have.num_accepted[:, None]
  np.testing.assert_array_equal(
    have.num_accepted[rows], want.num_accepted[rows]
  )
  np.testing.assert_array_equal(have.next_token[rows], want.next_token[rows])
  np.testing.assert_array_equal(
    np.where(kept, have.path, 0)[rows], np.where(kept, want.path, 0)[rows]
  )


@pytest.mark.parametrize('kind', ['drawn', 'chosen'])
def test_a_chain_is_algorithm_1(kind):
  """Bit for bit, from the same random numbers."""
  drafts, rows, keys = _random_drafts(200, branching(1, 1, 1, 1), 3, kind)
  have = jax.jit(verify_tree.verify_tree_batch)(drafts, rows, keys)
  chains = drafts.replace(tree=None)
  want = jax.jit(verify.verify_batch)(chains, rows, keys, None)
  _check_same(slice(None), have, want.replace(path=np.arange(4)[None]))
  assert {*have.num_accepted.tolist()} >= {0, 1, 2}


@every_shape
def test_argmaxes_are_the_rows_at_temperature_0(shape):
  """The greedy walk is recursive rejection of one-hot rows."""
  shape = SHAPES[shape]
  drafts, rows, keys = _random_drafts(60, shape, 2, 'chosen')
  best = jnp.argmax(rows, axis=2)
  walk = jax.jit(verify_tree.verify_tree_batch)
  want = walk(drafts, jax.nn.one_hot(best, 2), keys)
  have = jax.jit(verify_tree.verify_tree_greedy_batch)(drafts, best)
  # Of equal siblings the greedy walk takes the one with the longer path.
  assert np.all(have.num_accepted >= want.num_accepted)
  _check_same(have.num_accepted == want.num_accepted, have, want)
  assert {*have.num_accepted.tolist()} == set(range(shape.depth + 1))


# --- The shape ------------------------------------------------------------


def test_a_shape_knows_its_nodes():
  shape = branching(3, (2, 1), 1)
  assert shape.parents == (-1, -1, -1, 0, 0, 1, 3, 4, 5)
  assert shape.levels.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
  assert shape.ranks.tolist() == [0, 1, 2, 0, 1, 0, 0, 0, 0]
  assert shape.paths[7].tolist() == [0, 4, 7]
  assert shape.children[:3].tolist() == [[0, 1, 2], [3, 4, -1], [5, -1, -1]]
  assert shape.depth == 3
  assert shape.cut(2).parents == (-1, -1, -1, 0, 0, 1)
  assert shape.cut(3) == shape
  assert branching(1, 1, 1).parents == (-1, 0, 1)


@pytest.mark.parametrize(
  ('parents', 'message'),
  [
    ((), '1 to 256 nodes, got 0'),
    ((-1, -2), 'parent of node 1 .* got -2'),
    ((-1, 0, -1), 'parent of node 2 .* 0 or more, got -1'),
  ],
)
def test_what_is_no_shape(parents, message):
  with pytest.raises(ValueError, match=message):
    TreeShape(parents)
