"""Drafters through the engine: greedy outputs are the target's own.

In small in the conformance suite; here the models are real ones.
"""

import dataclasses

import jax
import numpy as np
import pytest

from small_vocabulary import VOCAB_SIZE, decoder_only, network, weights
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.heads import Heads, heads
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_table import fit
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.training.own_drafter import decoder_layers
from specdec_jax.tree_shape import branching

LIMITS = {'max_input_len': 32, 'max_decode_len': 24}
TEXTS = ['the red dog runs', 'a cat sleeps here', 'the old house', 'the the']
# Its head is padded to more ids than the vocabulary has.
TARGET = network(2, VOCAB_SIZE + 8)


@pytest.fixture(scope='module')
def target():
  """It likes an id that only padding has."""
  params = weights(TARGET, 0)
  params['decoder']['logits_dense']['kernel'][:, -1] *= 3
  return Model(TARGET, params)


@pytest.fixture(scope='module')
def plain(target, tokenizer):
  """The target's own outputs."""
  made = Engine(target, tokenizer=tokenizer, **LIMITS).generate(TEXTS)
  assert any(VOCAB_SIZE + 7 in one.tokens for one in made)
  return [one.tokens for one in made]


def random_model(net):
  return Model(net, weights(net, 1))


def on_encoder(target):
  """It has no encoder of its own, and reads what the target's says."""
  config = dataclasses.replace(
    TARGET.config, num_encoder_layers=0, num_decoder_layers=1
  )
  return Model(T5(config), decoder_layers(target.params, 1))


def tree(target):
  """Often right, and often second or third."""
  rng = np.random.default_rng(3)
  params = jax.tree.map(
    lambda leaf: leaf + 0.1 * np.std(leaf) * rng.normal(size=leaf.shape),
    target.params,
  )
  return small_model_tree(Model(TARGET, params), branching(3, (2, 1), 1))


def random_heads(target):
  made = Heads(2, TARGET.config.emb_dim, 4)
  params = made.init(jax.random.key(3))
  for i, head in enumerate(params.values()):
    shape = head['wo']['kernel'].shape
    head['wo']['kernel'] = 0.1 * jax.random.normal(jax.random.key(i), shape)
  return heads(made, params)


# What a drafter is -> how it is made for a target.
KINDS = {
  # Of an encoder-decoder target it sees the output alone.
  'decoder only': lambda _: random_model(decoder_only(1)),
  'shortlist': lambda _: random_model(network(1)).with_shortlist(range(5, 280)),
  'on encoder': on_encoder,
  'tree': tree,
  'heads': random_heads,
}


@pytest.mark.filterwarnings('ignore:The draft is decoder-only')
@pytest.mark.parametrize('kind', KINDS)
def test_greedy_outputs_are_the_targets_own(target, plain, tokenizer, kind):
  drafter = KINDS[kind](target)
  engine = Engine(target, drafter, tokenizer=tokenizer, gamma=3, **LIMITS)
  found = engine.generate(TEXTS)
  assert [one.tokens for one in found] == plain
  assert sum(one.stats.num_tested for one in found) > 0


@pytest.fixture(scope='module')
def parts(tokenizer):
  texts = [[0, *tokenizer.encode(text), 1] for text in TEXTS]
  return {
    'target': random_model(network(2)),
    'draft': random_model(network(1)),
    'decoder only': random_model(decoder_only(1)),
    'bigram': fit(texts, 2, VOCAB_SIZE),
  }


def test_what_does_not_fit(parts, tokenizer):
  """A drafter is checked as what it is made of."""

  def make(drafter, target='target'):
    return Engine(parts[target], drafter, tokenizer=tokenizer)

  with pytest.warns(UserWarning, match='The draft is decoder-only'):
    make(with_fallback(prompt_lookup(), parts['decoder only']))
  make(with_fallback(prompt_lookup(), parts['draft']))  # the controls
  make(ngram(parts['bigram']))
  network_of = decoder_only(1)
  config = dataclasses.replace(network_of.config, vocab_size=VOCAB_SIZE + 2000)
  wider = Model(network(1, VOCAB_SIZE + 1), {})
  other = fit([[0, 5, 6, 1]], 2, VOCAB_SIZE, fingerprint='another')
  table = 'vocabulary of table of the draft'
  for drafter, said in (
    (Model(type(network_of)(config), {}), 'got 2288'),
    (with_fallback(prompt_lookup(), wider), 'got 289'),
    (ngram(other), table),
    (cascade(parts['draft'], ngram(other)), table),
  ):
    with pytest.raises(ValueError, match=said):
      make(drafter)
  with pytest.raises(ValueError, match='draft: expected a decoder-only'):
    make(parts['draft'], 'decoder only')


def test_a_small_model_is_itself_however_it_is_given(parts, tokenizer):
  """Its calibrations and runs are one drafter's; another's are not."""
  prints = [
    Engine(parts['target'], given, tokenizer=tokenizer).fingerprints['draft']
    for given in (
      parts['draft'],
      small_model(parts['draft']),
      with_fallback(prompt_lookup(), parts['draft']),
    )
  ]
  assert prints[0] == prints[1] != prints[2]
