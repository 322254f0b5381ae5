"""Verdicts at the edges, along chains and trees.

verify_law_test.py has the exact laws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import probs, verify_tree
from specdec_jax import verify as shipped
from specdec_jax.tree_shape import TreeShape, branching
from specdec_jax.types import Draft

_verify_batch = jax.jit(shipped.verify_batch)
_tree_batch = jax.jit(verify_tree.verify_tree_batch)

pytestmark = pytest.mark.usefixtures('strict')


# One shape for all of them, so that `verify` is compiled twice and no more.
_B, _G, _V = 64, 3, 6
_KEYS = jax.random.split(jax.random.key(10), _B)


def _random_draft(chosen=False, shape=None):
  """A draft of ragged lengths and unrelated target rows."""
  rng = np.random.default_rng(9)
  size, depth = (shape.num_nodes, shape.depth) if shape else (_G, _G)
  draft = Draft(
    tokens=rng.integers(_V, size=(_B, size), dtype=np.int32),
    probs=None if chosen else _random_laws(rng, size),
    length=rng.integers(depth + 1, size=_B, dtype=np.int32),
    tree=shape,
  )
  return draft, _random_laws(rng, size + 1)


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
  garbage = Draft(
    tokens=np.where(behind, np.int32(-7), draft.tokens),
    probs=np.where(behind[..., None], np.float32(np.nan), draft.probs),
    length=draft.length,
  )
  rows = np.arange(_G + 1) > draft.length[:, None]
  garbled = np.where(rows[..., None], np.float32(np.nan), target_probs)
  again = _verify_batch(garbage, garbled, _KEYS, None)
  jax.tree.map(np.testing.assert_array_equal, again, verdict)


def _check_same(rows, have, want):
  """Checks that the verdicts of these rows are the same."""
  have, want = jax.device_get((have, want))
  for name in ('num_accepted', 'next_token'):
    np.testing.assert_array_equal(
      getattr(have, name)[rows], getattr(want, name)[rows]
    )
  if have.path is not None:
    kept = np.arange(have.path.shape[1]) < have.num_accepted[:, None]
    paths = [np.where(kept, one.path, 0)[rows] for one in (have, want)]
    np.testing.assert_array_equal(*paths)


@pytest.mark.parametrize(
  'shape', [None, branching(3), branching(2, (1,)), TreeShape((-1, -1, 1, 2))]
)
def test_argmaxes_are_the_rows_at_temperature_0(shape):
  """The greedy walk is recursive rejection of one-hot rows."""
  draft, rows = _random_draft(True, shape)
  best = np.argmax(rows, axis=2).astype(np.int32)
  if shape:
    before = best[:, np.array(shape.parents) + 1]
    greedy, usual, more = verify_tree.verify_tree_greedy_batch, _tree_batch, ()
  else:
    before = best[:, :-1]
    greedy, usual, more = shipped.verify_greedy_batch, _verify_batch, (None,)
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
  verify = functools.partial(shipped.verify, key=jax.random.key(0))
  for field, call in (
    ('target_probs', lambda: verify(draft, target_probs[:_G])),
    ('draft.probs', lambda: verify(draft, target_probs[:, :5])),
    (
      'target_tokens',
      lambda: shipped.verify_greedy(draft, jnp.zeros(2, jnp.int32)),
    ),
    ('parent of node 1', lambda: TreeShape((-1, -2))),
    ('parent of node 2', lambda: TreeShape((-1, 0, -1))),
    ('1 to 256 nodes', lambda: TreeShape(())),
  ):
    with pytest.raises(ValueError, match=field):
      call()


def test_a_shape_knows_its_nodes():
  shape = branching(3, (2, 1), 1)
  assert shape.parents == (-1, -1, -1, 0, 0, 1, 3, 4, 5)
  assert shape.paths[7].tolist() == [0, 4, 7]
  assert shape.cut(2).parents == (-1, -1, -1, 0, 0, 1)
  assert shape.cut(3) == shape
