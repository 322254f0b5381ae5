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
from toy_requests import quick_jit

NETWORKS = {
  't5': T5(toy_families.T5_1_1),
  'gemma3': CausalLM(toy_families.GEMMA3),
}
# Two children of the last token of the cache, and what hangs on them.
#        0   1  2  3  4  5  6  7
PARENTS = (-1, -1, 0, 0, 1, 3, 3, 4)
CHAIN = (-1, 0, 1)
PATH = (0, 3, 6)
SLOTS = 140  # more than the first bucket of a CPU
HELD = (3, 7, 5)  # tokens of each row before the tree
TOLERANCE = dict(rtol=2e-5, atol=2e-5)
both_ways = pytest.mark.parametrize(
  ('name', 'kind'),
  [('t5', 'cpu'), ('gemma3', 'tpu')],
)


def path_to(parents, node):
  """The numbers of a node's ancestors and its own, from the first on."""
  return () if node < 0 else (*path_to(parents, parents[node]), node)


class Case:
  """A network that has read a prefix in ragged rows, and calls behind it."""

  def __init__(self, name, kind):
    network = NETWORKS[name]
    self.kind, self.network = kind, network
    with backend.compiled_for(kind):
      self.params = partitioning.place(weights(network, 0))
    batch = len(HELD)
    self.prefix = toy_families.tokens(1, batch, max(HELD))
    self.nodes = toy_families.tokens(2, batch, len(PARENTS))
    self.held = jnp.asarray(HELD, jnp.int32)
    self.cache = self.start()

  def jitted(self, function):
    """The function as a program for its kind of device."""
    program = quick_jit(function)

    def run(*args):
      with backend.compiled_for(self.kind):
        return program(*args)

    return run

  def start(self):
    inputs = toy_families.inputs_of(toy_families.T5_1_1)

    def read(params, inputs, prefix, held):
      cache = self.network.prefill(params, inputs, SLOTS)
      _, cache = self.network.extend(params, cache, prefix)
      return self.network.rewind(cache, held)

    read = self.jitted(read)
    return read(self.params, inputs, self.prefix, self.held)

  def extend(self, cache, tokens, made=None):
    return self.calls(self.params, cache, tokens, made)

  @functools.cached_property
  def calls(self):
    return self.jitted(functools.partial(toy_requests.read, self.network))

  @functools.cached_property
  def keep(self):
    return self.jitted(self.network.keep)

  def tree(self, parents=PARENTS):
    return tree_shape.static_tree(parents, self.held, SLOTS)

  @functools.cached_property
  def of_tree(self):
    """Logits of the tree's nodes, and the cache that has read them."""
    return self.extend(self.cache, self.nodes, self.tree())

  @functools.cached_property
  def of_paths(self):
    """Logits of each node at the end of a chain of its ancestors."""
    # All chains are equally long, so that there is one program: what follows a
    # node in its chain does not reach it.
    depth = max(len(path_to(PARENTS, n)) for n in range(len(PARENTS)))
    logits = []
    for node in range(len(PARENTS)):
      path = path_to(PARENTS, node)
      filled = path + (0,) * (depth - len(path))
      found, _ = self.extend(self.cache, self.nodes[:, filled])
      logits.append(found[:, len(path) - 1])
    return jnp.stack(logits, axis=1)


@functools.cache
def case(name, kind):
  return Case(name, kind)


@both_ways
def test_nodes_are_the_ends_of_their_chains(name, kind):
  one = case(name, kind)
  logits, cache = one.of_tree
  np.testing.assert_array_equal(cache.length, one.held + len(PARENTS))
  np.testing.assert_allclose(logits, one.of_paths, **TOLERANCE)
  np.testing.assert_array_equal(
    np.argmax(logits, axis=2), np.argmax(one.of_paths, axis=2)
  )


@both_ways
def test_a_kept_path_is_a_chain_from_then_on(name, kind):
  one = case(name, kind)
  _, cache = one.of_tree
  after = toy_families.tokens(3, len(HELD), len(CHAIN))
  # Also behind another path that is as long, which must show.
  made = {}
  for path in (PATH, (1, 4, 7)):
    slots = one.held[:, None] + jnp.asarray(path, jnp.int32)
    kept = one.keep(cache, one.held, slots)
    np.testing.assert_array_equal(kept.length, one.held + len(path))
    made[path], _ = one.extend(kept, after)
  _, chain = one.extend(one.cache, one.nodes[:, PATH])
  want, _ = one.extend(chain, after)
  np.testing.assert_allclose(made[PATH], want, **TOLERANCE)
  other = np.abs(made[1, 4, 7] - want).max(axis=(1, 2))
  assert np.all(other > 1e-2)


@both_ways
def test_controls_wrong_parents_and_places_show(name, kind):
  """Where the tree is another one, the logits of what it moves differ."""
  one = case(name, kind)
  logits, _ = one.of_tree
  # The last node hangs on node 2 instead of 4, which is as deep.
  moved, _ = one.extend(one.cache, one.nodes, one.tree((*PARENTS[:-1], 2)))
  changed = np.abs(moved - logits).max(axis=(0, 2))
  assert changed[-1] > 1e-2
  np.testing.assert_allclose(moved[:, :-1], logits[:, :-1], **TOLERANCE)
  right = one.tree()
  for wrong in (
    # A chain's places: nodes on one level have different ones.
    right.replace(positions=one.held[:, None] + jnp.arange(len(PARENTS))),
    # All of the past and of the call before it, as in a chain.
    right.replace(
      visible=jnp.arange(SLOTS)
      <= (one.held[:, None] + jnp.arange(len(PARENTS)))[..., None]
    ),
  ):
    found, _ = one.extend(one.cache, one.nodes, wrong)
    assert np.abs(found - logits).max() > 1e-2
