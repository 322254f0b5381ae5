"""Drafts that branch: what is refused.

`drafter_conformance_test` has their laws, `engine_drafters_test` real networks.
"""

import pytest

from small_vocabulary import network, weights
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.tree_shape import branching

SHAPE = branching(3, (2, 1), 1)  # 9 nodes
TEXTS = ['the red dog runs', 'a cat sleeps here']


@pytest.fixture(scope='module')
def parts():
  """A target, and the model of its drafter."""
  target = network(2)
  return Model(target, weights(target, 0)), Model(target, weights(target, 1))


def engine_of(parts, tokenizer, drafter, **changes):
  options = {'gamma': 3, 'max_input_len': 32, 'max_decode_len': 24}
  return Engine(parts[0], drafter, tokenizer=tokenizer, **(options | changes))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'lenience': 0.5}, 'lenience'),
    ({'temperature': 1.0, 'verification': 'block'}, 'verification'),
    ({'gamma': 'adaptive'}, 'gamma'),
    ({'num_beams': 2, 'speculative': True}, 'drafter'),
  ],
)
def test_what_is_for_chains_is_refused(parts, tokenizer, options, message):
  made = engine_of(parts, tokenizer, small_model_tree(parts[1], SHAPE))
  with pytest.raises(ValueError, match=message):
    made.generate(TEXTS, **options)
  with pytest.raises(ValueError, match='trace: .*without a tree'):
    made.trace(TEXTS[0])
  assert made.num_programs == 0


def test_a_tree_that_its_drafter_does_not_announce(parts, tokenizer):
  """There are no slots for its nodes."""
  drafter = small_model_tree(parts[1], SHAPE)._replace(tree=None)
  made = engine_of(parts, tokenizer, drafter)
  with pytest.raises(ValueError, match='9 nodes on 3 levels'):
    made.generate(TEXTS)


def test_drafters_of_drafters_take_chains(parts):
  tree = small_model_tree(parts[1], SHAPE)
  with pytest.raises(ValueError, match='cascade: .*without a tree'):
    cascade(parts[1], tree)
  for both in ((tree, parts[1]), (prompt_lookup(), tree)):
    with pytest.raises(ValueError, match='with_fallback: .*without a tree'):
      with_fallback(*both)
