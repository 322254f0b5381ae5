"""Several continuations in one call: each token sees its ancestors alone."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import toy_families
import toy_requests
from small_vocabulary import weights
from specdec_jax import partitioning, tree_shape
from specdec_jax.models import backend
from specdec_jax.models.causal_lm import CausalLM
from specdec_jax.models.t5 import T5

# Two children of the last token of the cache, and what hangs on them.
#        0   1  2  3  4  5  6  7
PARENTS = (-1, -1, 0, 0, 1, 3, 3, 4)
PATH = (0, 3, 6)
PATHS = [(0,), (1,), (0, 2), (0, 3), (1, 4), (0, 3, 5), PATH, (1, 4, 7)]
SLOTS = 140  # more than the first bucket of a CPU
HELD = jnp.array([3, 7, 5])  # tokens of each row before the tree
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


class Case:
  """A network that has read a prefix in ragged rows, and calls behind it."""

  def __init__(self, network, kind):
    self.kind = kind
    with backend.compiled_for(kind):
      self.params = partitioning.place(weights(network, 0))

    def start(params, inputs, prefix):
      cache = network.prefill(params, inputs, SLOTS)
      _, cache = network.extend(params, cache, prefix)
      return network.rewind(cache, HELD)

    inputs = toy_families.inputs_of(toy_families.T5_1_1)
    prefix = toy_families.tokens(1, len(HELD), max(HELD))
    self.cache = self.jitted(start)(self.params, inputs, prefix)
    self.nodes = toy_families.tokens(2, len(HELD), len(PARENTS))
    self.calls = self.jitted(functools.partial(toy_requests.read, network))
    self.keep = self.jitted(network.keep)
    self.logits, self.read = self.extend(self.cache, self.nodes, self.tree())

  def jitted(self, function):
    """The function as a program for its kind of device."""
    program = toy_requests.quick_jit(function)

    def run(*args):
      with backend.compiled_for(self.kind):
        return program(*args)

    return run

  def extend(self, cache, tokens, tree=None):
    return self.calls(self.params, cache, tokens, tree)

  def tree(self, parents=PARENTS):
    return tree_shape.static_tree(parents, HELD, SLOTS)


@pytest.fixture(scope='module', params=['t5', 'gemma3'])
def case(request):
  if request.param == 't5':
    return Case(T5(toy_families.T5_1_1), 'cpu')
  return Case(CausalLM(toy_families.GEMMA3), 'tpu')


def test_nodes_are_the_ends_of_their_chains(case):
  np.testing.assert_array_equal(case.read.length, HELD + len(PARENTS))
  for node, path in enumerate(PATHS):
    # All chains are equally long, so that there is one program: what follows a
    # node in its chain does not reach it.
    filled = path + (0,) * (3 - len(path))
    chain, _ = case.extend(case.cache, case.nodes[:, filled])
    want, have = chain[:, len(path) - 1], case.logits[:, node]
    np.testing.assert_allclose(have, want, **TOLERANCE)
    np.testing.assert_array_equal(np.argmax(have, 1), np.argmax(want, 1))


def test_a_kept_path_is_a_chain_from_then_on(case):
  after = toy_families.tokens(3, len(HELD), 3)
  # Also behind another path that is as long, which must show.
  made = []
  for path in (PATH, (1, 4, 7)):
    slots = HELD[:, None] + jnp.asarray(path, jnp.int32)
    kept = case.keep(case.read, HELD, slots)
    np.testing.assert_array_equal(kept.length, HELD + len(path))
    made.append(case.extend(kept, after)[0])
  _, chain = case.extend(case.cache, case.nodes[:, PATH])
  want, _ = case.extend(chain, after)
  np.testing.assert_allclose(made[0], want, **TOLERANCE)
  assert np.all(np.abs(made[1] - want).max(axis=(1, 2)) > 1e-2)


def test_controls_wrong_parents_and_places_show(case):
  """Where the tree is another one, the logits of what it moves differ."""
  # The last node hangs on node 2 instead of 4, which is as deep.
  other = case.tree((*PARENTS[:-1], 2))
  moved, _ = case.extend(case.cache, case.nodes, other)
  assert np.abs(moved - case.logits)[:, -1].max() > 1e-2
  np.testing.assert_allclose(moved[:, :-1], case.logits[:, :-1], **TOLERANCE)
  right, places = case.tree(), HELD[:, None] + jnp.arange(len(PARENTS))
  for wrong in (
    # A chain's places: nodes on one level have different ones.
    right.replace(positions=places),
    # All of the past and of the call before it, as in a chain.
    right.replace(visible=jnp.arange(SLOTS) <= places[..., None]),
  ):
    found, _ = case.extend(case.cache, case.nodes, wrong)
    assert np.abs(found - case.logits).max() > 1e-2
