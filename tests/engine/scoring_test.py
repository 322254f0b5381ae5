"""Scores against decoding's log-probabilities, a closed form, and one call."""

import jax
import numpy as np
import pytest

import small_vocabulary
import toy_models
from specdec_jax import probs
from specdec_jax.engine import scoring

TEXTS = ['the red dog runs', 'a cat', 'the old house sings here there the dog']


NETWORK = small_vocabulary.network(2)
PARAMS = small_vocabulary.weights(NETWORK, 0)


@pytest.fixture(scope='module')
def engine(tokenizer):
  return toy_models.chain_engine(tokenizer, gamma=2, max_input_len=24)


def test_closed_form_of_a_markov_chain():
  model = toy_models.random_markov(seed=1, vocab_size=5, order=2)
  tokens = np.random.default_rng(0).integers(0, 5, 150).tolist()  # 3 blocks
  (one,) = scoring.score(model, model.params, [[2, 3]], [tokens])
  (more,) = scoring.score(model, model.params, [[2, 3]], [tokens], num_top=3)
  assert more.log_probs == one.log_probs
  next_probs = model.next_probs(probs.SamplingConfig(), inputs=[2, 3])
  for at, (top, token) in enumerate(zip(more.top, tokens, strict=True)):
    row = np.log(next_probs(tuple(tokens[:at])))
    np.testing.assert_allclose(one.log_probs[at], row[token], atol=1e-5)
    ids = [number for number, _ in top]
    assert ids == np.argsort(-row, kind='stable')[:3].tolist()
    np.testing.assert_allclose([x for _, x in top], row[ids], atol=1e-5)
    # The very number, so that a client finds out what is greedy.
    assert dict(top).get(token, more.log_probs[at]) == more.log_probs[at]


@pytest.mark.parametrize(
  'options',
  [
    {'num_samples': 2, 'temperature': 1.0, 'batch_size': 2},
    pytest.param({'num_beams': 2, 'num_samples': 2}, marks=pytest.mark.slow),
    {'prompts': [[7, 8], [], [9]], 'stop_strings': ['s']},
  ],
)
def test_the_likeliest_tokens_of_an_engines_outputs(engine, options):
  options = {'max_length': 6} | options
  texts = ['the dog', '', 'a cat'] if 'prompts' not in options else TEXTS
  done = engine.generate(texts, top_log_probs=3, **options)
  plain = engine.generate(texts, **options)
  assert [one.tokens for one in done] == [one.tokens for one in plain]
  for one, want in zip(done, plain, strict=True):
    np.testing.assert_allclose(one.log_probs, want.log_probs, atol=1e-4)
    assert len(one.top_log_probs) == len(one.tokens)
    columns = one.tokens, one.log_probs, one.top_log_probs
    for token, value, top in zip(*columns, strict=True):
      assert len(top) == 3 and value <= top[0][1]
      assert sorted(top, key=lambda pair: -pair[1]) == list(top)
      if not options.keys() & {'temperature', 'num_beams'}:
        assert top[0] == (token, value)
  assert plain[0].top_log_probs == ()


def test_lengths_share_programs():
  def score(*lengths):
    rows = [[5] * n for n in lengths]
    scoring.score(NETWORK, PARAMS, rows, rows)

  score(3, 9, 16)
  before = scoring._measured._cache_size()
  score(16, 2, 1, 4)
  assert scoring._measured._cache_size() == before
  score(17)
  assert scoring._measured._cache_size() == before + 1
  assert scoring.shapes(NETWORK, [[5] * 17], [[5]]) == (1, 32, 16)


def test_edges():
  assert scoring.score(NETWORK, PARAMS, [], []) == []
  assert scoring.score(NETWORK, PARAMS, [[5, 1]], [[]])[0].total == 0.0
  broken = jax.tree.map(lambda leaf: leaf * np.nan, PARAMS)
  (one,) = scoring.score(NETWORK, broken, [[5, 1]], [[7, 1]])
  assert np.isnan(one.total)
  size, decoder = NETWORK.vocab_size, small_vocabulary.decoder_only()
  for network, inputs, targets, words in (
    (NETWORK, [[5]], [[5], [6]], 'targets: expected 1'),
    (NETWORK, [[5], [5]], [[5], [6, size]], rf'targets\[1\]: .*{size}'),
    (decoder, [[]], [[5]], r'inputs\[0\]'),
  ):
    with pytest.raises(ValueError, match=words):
      scoring.score(network, PARAMS, inputs, targets)
