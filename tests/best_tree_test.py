"""The best tree, against all trees; its expected tokens, against a loop."""

import itertools

import numpy as np
import pytest

from specdec_jax import analysis
from specdec_jax.drafters.best_tree import (
  best_tree,
  expected_tokens,
  tokens_per_call,
)
from specdec_jax.tree_shape import TreeShape, branching, chain


def every_tree(num_nodes, depth):
  """All shapes of so many nodes, some of them several times."""
  choices = [range(-1, node) for node in range(num_nodes)]
  for parents in itertools.product(*choices):
    shape = TreeShape(parents)
    if shape.depth <= depth:
      yield shape


RATES = {
  'falling': (0.6, 0.2, 0.1),
  'flat': (0.3, 0.3, 0.3),
  'sure': (0.9, 0.05),
  'by level': ((0.5, 0.3, 0.1), (0.8, 0.1, 0.05), (0.2, 0.2, 0.2)),
}


@pytest.mark.parametrize('rates', RATES)
@pytest.mark.parametrize('depth', [1, 2, 3])
@pytest.mark.parametrize('num_nodes', [1, 3, 5])
def test_no_tree_is_better(rates, num_nodes, depth):
  rates = RATES[rates]
  found = best_tree(rates, num_nodes, depth)
  found.check_by_level('a drafter')
  assert found.num_nodes <= num_nodes and found.depth <= depth
  most = max(
    expected_tokens(shape, rates) for shape in every_tree(num_nodes, depth)
  )
  assert expected_tokens(found, rates) == pytest.approx(most)
  # The trees differ, so that a wrong one would show.
  if num_nodes == 5:
    least = min(expected_tokens(shape, rates) for shape in every_tree(5, depth))
    assert depth == 1 or least < most


def test_expected_tokens_of_a_chain_are_equation_1():
  for alpha, gamma in ((0.3, 2), (0.8, 5)):
    found = expected_tokens(chain(gamma), (alpha,))
    want = analysis.expected_tokens(alpha, gamma)
    assert found == pytest.approx(float(want))


def test_expected_tokens_are_those_of_walks():
  """Draws the rank that is accepted at each level, and walks."""
  rates = (0.5, 0.2, 0.1)
  shape = branching(3, (2, 1), 1)
  rng = np.random.default_rng(0)
  ranks = rng.choice(4, p=[*rates, 0.2], size=(20_000, shape.depth))
  tokens = []
  for row in ranks:
    node, count = -1, 1
    for rank in row:
      children = shape.children[node + 1]
      node = children[rank] if rank < len(children) else -1
      if node < 0:
        break
      count += 1
    tokens.append(count)
  have, error = np.mean(tokens), np.std(tokens) / len(tokens) ** 0.5
  assert abs(have - expected_tokens(shape, rates)) < 4 * error
  assert abs(have - expected_tokens(chain(3), rates)) > 4 * error


def test_tokens_per_call_of_whole_outputs():
  """By walks from the first token of an output to its last."""
  rates, shape, rng = (0.6, 0.2), branching(2, 1, 1), np.random.default_rng(1)

  def alike(*lengths):
    return [np.tile(rates, (length, 1)) for length in lengths]

  # By hand: of 1 token 1 call, of 2 tokens 1 with .8 and 2 with .2.
  assert tokens_per_call(shape, alike(1)) == 1
  assert tokens_per_call(shape, alike(2)) == pytest.approx(2 / 1.2)
  lengths = [3, 7, 2]
  law = -np.diff([1, 0.8, 0.8 * 0.6, 0.8 * 0.36, 0])
  calls = 0
  for length in lengths * 3_000:
    while length > 0:
      length -= 1 + rng.choice(4, p=law)
      calls += 1
  have = tokens_per_call(shape, alike(*lengths))
  assert have == pytest.approx(sum(lengths) * 3_000 / calls, rel=0.02)
  # Longer outputs come near to the tokens of a call that nothing cuts.
  within = expected_tokens(shape, rates)
  assert have < 0.9 * within
  assert tokens_per_call(shape, alike(900)) == pytest.approx(within, rel=0.01)
  with pytest.raises(ValueError, match='tokens of the outputs'):
    tokens_per_call(shape, [])


def test_hard_places_count_where_they_are():
  """Of one acceptance on the whole, the calls differ with the order."""
  sure, hard = [[[1.0]]], [[[0.0]]]
  apart = np.array((sure + hard) * 6)
  together = np.array(sure * 6 + hard * 6)
  # Apart: each call takes a sure one and is the target's at the hard one.
  assert tokens_per_call(chain(2), [apart[:, 0]]) == 2
  # Together: two calls of three, and then one of each.
  assert tokens_per_call(chain(2), [together[:, 0]]) == 12 / 8


def test_a_later_rank_does_not_count_more():
  """Noise in what was measured leaves no gap among the ranks."""
  shape = best_tree((0.5, 0.1, 0.2), 4, 1)
  assert shape.parents == (-1, -1, -1)


@pytest.mark.parametrize(
  ('rates', 'message'),
  [
    ((), 'got shape'),
    ((0.7, 0.6), 'sum to 1 at most'),
    ((-0.1,), 'sum to 1 at most'),
    ((0.0, 0.0), 'never accepted'),
    (((0.5,), (0.9, 0.1)), 'inhomogeneous|got shape'),
  ],
)
def test_rates_that_are_none(rates, message):
  with pytest.raises(ValueError, match=message):
    best_tree(rates, 3, 2)
