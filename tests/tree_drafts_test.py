"""Drafts that branch, through loops and engines: outputs are the target's.

`drafter_conformance_test` has their laws, on toys. Here are real networks:
relative bias by depth, learned positions, prompts, both kinds of caches; pools;
and what is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gpt_test
import models_test
import toy_requests
from small_vocabulary import VOCAB_SIZE, network, weights
from specdec_jax import partitioning
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.best_tree import tokens_per_call
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.ngram_fit import fit
from specdec_jax.drafters.ngram_tree import ngram_tree
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.prompt_lookup_tree import prompt_lookup_tree
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.measure import acceptance
from specdec_jax.models import backend
from specdec_jax.models.gpt import GPT
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.probs import SamplingConfig
from specdec_jax.tree_shape import TreeShape, branching, chain

SHAPE = branching(3, (2, 1), 1)  # 9 nodes
NETWORKS = {
  't5': T5(models_test.T5_1_1),
  'own_bias': T5(models_test.OWN_BIAS),
  'gpt2': GPT(gpt_test.GPT2),
  'gpt_t5x': GPT(gpt_test.T5X),
}
TEXTS = ['the red dog runs', 'a cat sleeps here', 'the old house', 'the the']


def near(params, size=0.1):
  """A drafter that is often right, and often second or third."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(3), len(leaves))
  return tree.unflatten(
    [
      leaf + size * jnp.std(leaf) * jax.random.normal(key, leaf.shape)
      for key, leaf in zip(keys, leaves, strict=True)
    ]
  )


# --- The loop ---------------------------------------------------------------


# In small: the conformance suite, and the engine's outputs below.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'kind'),
  [('gpt2', 'gpu'), ('t5', 'cpu'), ('own_bias', 'gpu'), ('gpt_t5x', 'cpu')],
)
def test_greedy_equality_in_a_ragged_batch(name, kind):
  """Prompts, budgets to the last slot, stop ids within and not yet allowed."""
  model = NETWORKS[name]
  first = weights(model, 0)
  with backend.compiled_for(kind):
    params = PairParams(
      partitioning.place(first), partitioning.place(near(first))
    )
    rng = np.random.default_rng(0)
    rows, slots, gamma = 5, 51, SHAPE.depth
    prompt = rng.integers(2, 60, (rows, 4))
    prompt[:, 0] = 0
    request = toy_requests.request_of(
      rows,
      gamma,
      SamplingConfig(0.0),
      slots,
      inputs=(5, 9, 3, 8, 0),
      seed=0,
      stop_ids=(*range(2, 60, 8),),
      prompt=jnp.asarray(prompt, jnp.int32),
      prompt_length=jnp.array([4, 1, 2, 3, 4]),
      max_length=jnp.array([slots, 1, 9, slots, 0]),
      min_length=jnp.array([0, 0, 5, slots, 0]),
      forbids_stops=True,
    )

    def decode(drafter, request):
      own = params if drafter else params._replace(draft=None)
      run = toy_requests.quick_jit(Loop(model, drafter).decode)
      return jax.device_get(run(own, request))

    want = decode(None, request.replace(gamma=0))
    tree = request.replace(tree=SHAPE)
    assert tree.cache_slots == 4 + slots + SHAPE.num_nodes == 64
    have = decode(small_model_tree(model, SHAPE), tree)
    as_chain = decode(small_model(model), request)
  np.testing.assert_array_equal(have.tokens, want.tokens)
  np.testing.assert_array_equal(have.finish_reason, want.finish_reason)
  np.testing.assert_allclose(have.log_probs, want.log_probs, atol=1e-4)
  # Not only first children were kept.
  assert have.stats.num_rounds.sum() < as_chain.stats.num_rounds.sum()
  # A call's tokens are counted by levels.
  levels = have.stats.histogram @ np.arange(gamma + 1)
  np.testing.assert_array_equal(levels, have.stats.num_accepted)
  assert np.all(have.stats.num_tested >= have.stats.num_accepted)
  assert have.stats.histogram[:, gamma].sum() > 0


# --- The engine -------------------------------------------------------------


@pytest.fixture(scope='module')
def parts(tokenizer):
  """A target, a model near it, and a table."""
  target = network(2)
  params = target.init(jax.random.key(0))
  return (
    Model(target, params),
    Model(target, near(params)),
    fit([[0, *tokenizer.encode(t), 1] for t in TEXTS], 2, VOCAB_SIZE),
  )


def engine_of(parts, tokenizer, drafter, **changes):
  options = {'gamma': 3, 'max_input_len': 32, 'max_decode_len': 24}
  return Engine(parts[0], drafter, tokenizer=tokenizer, **(options | changes))


DRAFTERS = {
  'small_model_tree': lambda parts: small_model_tree(parts[1], SHAPE),
  'ngram_tree': lambda parts: ngram_tree(parts[2], SHAPE),
  'prompt_lookup_tree': lambda parts: prompt_lookup_tree(2, 3),
}


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(
      name, marks=() if name == 'small_model_tree' else pytest.mark.slow
    )
    for name in DRAFTERS
  ],
)
def test_greedy_outputs_are_the_targets_own(parts, tokenizer, name):
  made = engine_of(parts, tokenizer, DRAFTERS[name](parts))
  found = made.generate(TEXTS)
  plain = made.generate(TEXTS, speculative=False)
  assert [one.tokens for one in found] == [one.tokens for one in plain]
  assert sum(one.stats.num_tested for one in found) > 0
  # The drafter's name tells trees apart, as calibrations do.
  assert str(made.drafter.tree.parents) in made.fingerprints['draft'] or (
    'prompt_lookup_tree(2, 3' in made.fingerprints['draft']
  )


@pytest.mark.slow
def test_a_pool_gives_the_same(parts, tokenizer):
  """Greedy and sampled rows that come and go, with the drafter's own cache."""
  made = engine_of(parts, tokenizer, small_model_tree(parts[1], SHAPE))
  texts = TEXTS * 2
  options = {
    'temperature': [0.0, 1.0] * 4,
    'seed': 4,
    'stop_ids': [*range(3, VOCAB_SIZE, 8)],
  }
  whole = made.generate(texts, batch_size=8, **options)
  pool = Continuous(made, PoolSettings(rows=3, max_rounds=2))
  found = pool.generate(texts, **options)
  assert [one.tokens for one in found] == [one.tokens for one in whole]
  assert sum(one.stats.num_accepted for one in found) > 0


@pytest.mark.slow
def test_a_chain_shape_is_small_model(parts, tokenizer):
  """The same samples from the same random numbers; gamma cuts the tree."""
  tree = engine_of(parts, tokenizer, small_model_tree(parts[1], chain(5)))
  plain = engine_of(parts, tokenizer, small_model(parts[1]))
  options = {'temperature': 1.0, 'seed': 1, 'gamma': 3}
  options['verification'] = 'token'
  have, want = (one.generate(TEXTS, **options) for one in (tree, plain))
  assert [one.tokens for one in have] == [one.tokens for one in want]
  assert [one.stats for one in have] == [one.stats for one in want]
  nothing = tree.generate(TEXTS, gamma=0)
  assert sum(one.stats.num_tested for one in nothing) == 0


@pytest.mark.slow
def test_acceptance_by_rank(parts, tokenizer):
  """At temperature 0: how often the target takes each of the likeliest."""
  made = engine_of(parts, tokenizer, small_model_tree(parts[1], branching(4)))

  def measured(engine):
    return acceptance.Workload(
      engine, TEXTS, SamplingConfig(0.0), 10**6, len(TEXTS), 0
    )

  ranks, places = measured(made).rates_by_rank(lambda count: None)
  one = measured(engine_of(parts, tokenizer, parts[1]))
  alpha = one.rates(lambda count: None).alpha
  assert ranks[0].mean == pytest.approx(alpha.mean)
  means = [rate.mean for rate in ranks]
  assert 0 < means[1] < means[0] and sum(means) <= 1 + 1e-6
  # What a tree yields is known from the places of its ranks.
  found = engine_of(
    parts, tokenizer, small_model_tree(parts[1], SHAPE)
  ).generate(TEXTS)
  tokens, calls = (
    sum(getattr(one.stats, name) for one in found)
    for name in ('num_tokens', 'num_target_calls')
  )
  assert tokens_per_call(SHAPE, places) == pytest.approx(tokens / calls)
  assert tokens_per_call(chain(3), places) < tokens / calls
  with pytest.raises(ValueError, match='proposes a chain'):
    one.rates_by_rank(lambda count: None)
  with pytest.raises(ValueError, match='alpha .* takes drafters of chains'):
    measured(made).rates(lambda count: None)


# --- What is refused --------------------------------------------------------


def test_lenience_is_refused(parts, tokenizer):
  made = engine_of(parts, tokenizer, small_model_tree(parts[1], SHAPE))
  with pytest.raises(ValueError, match='lenience below 1 is for one proposal'):
    made.generate(TEXTS, lenience=0.5)
  assert made.num_programs == 0


def test_what_is_for_chains_is_refused(parts, tokenizer):
  made = engine_of(parts, tokenizer, small_model_tree(parts[1], SHAPE))
  with pytest.raises(ValueError, match="verification = 'block' is for chains"):
    made.generate(TEXTS, temperature=1.0, verification='block')
  with pytest.raises(ValueError, match='adapt'):
    made.generate(TEXTS, gamma='adaptive')
  assert made.num_programs == 0
  rests = engine_of(
    parts, tokenizer, small_model_tree(parts[1], SHAPE), fallback=True
  )
  with pytest.raises(ValueError, match='fallback knows the costs of chains'):
    rests.generate(TEXTS)


def test_beams_are_refused(parts, tokenizer):
  made = engine_of(parts, tokenizer, small_model_tree(parts[1], SHAPE))
  with pytest.raises(ValueError, match='a beam search has a tree of its own'):
    made.generate(TEXTS, num_beams=2, speculative=True)
  assert made.num_programs == 0


def test_a_trace_is_refused(parts, tokenizer):
  made = engine_of(parts, tokenizer, small_model_tree(parts[1], SHAPE))
  with pytest.raises(ValueError, match='trace takes drafters of chains'):
    made.trace(TEXTS[0])


def test_a_tree_that_its_drafter_does_not_announce(parts, tokenizer):
  """There are no slots for its nodes."""
  drafter = small_model_tree(parts[1], SHAPE)._replace(tree=None)
  made = engine_of(parts, tokenizer, drafter)
  with pytest.raises(ValueError, match='9 nodes on 3 levels, but the request'):
    made.generate(TEXTS)


def test_drafters_of_drafters_take_chains(parts):
  tree = small_model_tree(parts[1], SHAPE)
  with pytest.raises(ValueError, match='cascade takes drafters of chains'):
    cascade(parts[1], tree)
  for both in ((tree, parts[1]), (prompt_lookup(), tree)):
    with pytest.raises(ValueError, match='with_fallback takes drafters of'):
      with_fallback(*both)


def test_shapes_that_no_drafter_makes(parts):
  backwards = TreeShape((-1, 0, -1))
  for make in (
    lambda: small_model_tree(parts[1], backwards),
    lambda: ngram_tree(parts[2], backwards),
  ):
    with pytest.raises(ValueError, match='makes a tree level by level'):
      make()
  with pytest.raises(ValueError, match="children of a tree is 'sorted'"):
    small_model_tree(parts[1], SHAPE, 'sorted')
  with pytest.raises(ValueError, match='1 <= min_match <= max_match'):
    prompt_lookup_tree(2, 3, 1, 2)
  with pytest.raises(ValueError, match='a larger vocabulary|vocabulary of'):
    ngram_tree(parts[2], SHAPE, VOCAB_SIZE - 1)
