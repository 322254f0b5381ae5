"""Drafters of other kinds in an engine; their outputs are tested elsewhere."""

import dataclasses

import jax
import pytest

from small_vocabulary import VOCAB_SIZE, decoder_only, network
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_table import fit
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model

TEXTS = ['the red dog runs', 'a cat sleeps here', 'the old house', 'the the']

TARGET = network(2)
DRAFT = network(1)
# It has no encoder: of an encoder-decoder target it sees the output alone.
DECODER_ONLY = decoder_only(1)


@pytest.fixture(scope='module')
def parts(tokenizer):
  """The target; what makes an engine of it with a drafter."""
  seeds = iter(range(9))

  def model(net):
    return Model(net, net.init(jax.random.key(next(seeds))))

  return {
    'target': model(TARGET),
    'draft': model(DRAFT),
    'decoder only': model(DECODER_ONLY),
    'bigram': fit(
      [[0, *tokenizer.encode(text), 1] for text in TEXTS], 2, VOCAB_SIZE
    ),
  }


def test_what_does_not_fit(parts, tokenizer):
  """A drafter is checked as what it is made of."""

  def make(drafter, target='target'):
    return Engine(parts[target], drafter, tokenizer=tokenizer)

  with pytest.warns(UserWarning, match='The draft is decoder-only'):
    make(with_fallback(prompt_lookup(), parts['decoder only']))
  make(with_fallback(prompt_lookup(), parts['draft']))  # the controls
  make(ngram(parts['bigram']))
  config = dataclasses.replace(
    DECODER_ONLY.config, vocab_size=VOCAB_SIZE + 2000
  )
  wider = Model(network(1, VOCAB_SIZE + 1), {})
  other = fit([[0, 5, 6, 1]], 2, VOCAB_SIZE, fingerprint='another')
  table = 'vocabulary of table of the draft'
  for drafter, said in (
    (Model(type(DECODER_ONLY)(config), {}), 'got 2288'),
    (with_fallback(prompt_lookup(), wider), 'got 289'),
    (ngram(other), table),
    (cascade(parts['draft'], ngram(other)), table),
  ):
    with pytest.raises(ValueError, match=said):
      make(drafter)
  with pytest.raises(ValueError, match='draft: expected a decoder-only'):
    make(parts['draft'], 'decoder only')


def test_heads_that_are_padded_differently(tokenizer):
  """Target of 296 ids, drafter of 288; the target's outputs."""
  made = network(1, VOCAB_SIZE + 8), network(1, VOCAB_SIZE)
  target, draft = (
    Model(net, net.init(jax.random.key(i))) for i, net in enumerate(made)
  )
  # The target likes an id that only padding has.
  head = target.params['decoder']['logits_dense']['kernel']
  target.params['decoder']['logits_dense']['kernel'] = head.at[:, -1].mul(3)
  limits = dict(tokenizer=tokenizer, max_input_len=32, max_decode_len=24)
  engine = Engine(target, draft, gamma=3, **limits)
  plain = engine.generate(TEXTS, speculative=False)
  assert any(VOCAB_SIZE + 7 in one.tokens for one in plain)
  found = engine.generate(TEXTS)
  assert [one.tokens for one in found] == [one.tokens for one in plain]
  assert sum(one.stats.num_tested for one in found) > 0


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
