"""Scores against decoding's log-probabilities, a closed form, and one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
import toy_models
from specdec_jax import probs
from specdec_jax.engine import scoring
from specdec_jax.engine.engine import Engine
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.model import Model

TEXTS = ['the red dog runs', 'a cat', 'the old house sings here there the dog']


@pytest.fixture(scope='module')
def network():
  return small_vocabulary.network(2)


@pytest.fixture(scope='module')
def params(network):
  return network.init(jax.random.key(0))


@pytest.fixture(scope='module')
def engine(network, params, tokenizer):
  drafter = small_vocabulary.network(1)
  return Engine(
    Model(network, params),
    Model(drafter, drafter.init(jax.random.key(1))),
    tokenizer=tokenizer,
    gamma=2,
    max_input_len=24,
    max_decode_len=20,
  )


@pytest.mark.parametrize(
  'speculative', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_what_decoding_reports(engine, speculative):
  done = engine.generate(
    TEXTS,
    speculative=speculative,
    temperature=1.0,
    seed=3,
  )
  inputs = [[*engine.tokenizer.encode(t), 1] for t in TEXTS]
  outputs = [completion.tokens for completion in done]
  # As the engine has placed them: the same joined kernels.
  scores = scoring.score(engine.target, engine.params.target, inputs, outputs)
  assert {len(tokens) for tokens in outputs} != {0}
  for one, completion in zip(scores, done, strict=True):
    np.testing.assert_allclose(one.log_probs, completion.log_probs, atol=1e-4)
    assert one.total == pytest.approx(sum(completion.log_probs), abs=1e-3)
  # Another output has another score.
  size = engine.target.vocab_size
  outputs[0] = [*outputs[0][:-1], (outputs[0][-1] + 1) % size]
  other = scoring.score(engine.target, engine.params.target, inputs, outputs)
  assert abs(other[0].log_probs[-1] - done[0].log_probs[-1]) > 1e-3
  assert other[1] == scores[1]


def test_what_a_decoder_only_model_reports(tokenizer):
  network = GPT(
    GPTConfig(small_vocabulary.VOCAB_SIZE, 16, 2, 1, 8, 32, use_bias=False)
  )
  params = network.init(jax.random.key(0))
  engine = Engine(Model(network, params), tokenizer=tokenizer, bos_id=1)
  done = engine.generate(TEXTS, speculative=False, max_length=20)
  inputs = [[1, *tokenizer.encode(text)] for text in TEXTS]
  outputs = [completion.tokens for completion in done]
  scores = scoring.score(engine.target, engine.params.target, inputs, outputs)
  for one, completion in zip(scores, done, strict=True):
    np.testing.assert_allclose(one.log_probs, completion.log_probs, atol=1e-4)
  with pytest.raises(ValueError, match='needs a token to begin with'):
    scoring.score(network, params, [[]], [[5]])


def test_one_teacher_forced_call(network, params):
  """log softmax of the logits at each target: how others compute a score."""
  rng = np.random.default_rng(0)
  inputs = rng.integers(2, 200, (3, 7)).astype(np.int32)
  targets = rng.integers(2, 200, (3, 150)).astype(np.int32)  # three blocks
  shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]

  @jax.jit
  def expect(params, inputs, fed, targets):
    table = jax.nn.log_softmax(network.logits(params, inputs, fed))
    return jnp.take_along_axis(table, targets[..., None], -1)[..., 0]

  expected = expect(params, inputs, shifted, targets)
  scores = scoring.score(network, params, inputs.tolist(), targets.tolist())
  have = np.asarray([one.log_probs for one in scores])
  np.testing.assert_allclose(have, expected, atol=2e-4)


def test_closed_form_of_a_markov_chain():
  model = toy_models.random_markov(seed=1, vocab_size=5, order=2)
  tokens = [3, 1, 4, 4, 2]
  (one,) = scoring.score(model, model.params, [[2, 3]], [tokens])
  next_probs = model.next_probs(probs.SamplingConfig(), inputs=[2, 3])
  expected = [
    np.log(next_probs(tuple(tokens[:at]))[token])
    for at, token in enumerate(tokens)
  ]
  np.testing.assert_allclose(one.log_probs, expected, atol=1e-5)


def test_neighbours_and_padding_do_not_matter(network, params):
  inputs, targets = [[5, 6, 1], list(range(2, 30))], [[7, 1], [9] * 40]
  both = scoring.score(network, params, inputs, targets)
  alone = scoring.score(network, params, inputs[:1], targets[:1])
  np.testing.assert_allclose(both[0].log_probs, alone[0].log_probs, atol=1e-5)


def test_lengths_share_programs(network, params):
  def score(*lengths):
    rows = [[5] * n for n in lengths]
    scoring.score(network, params, rows, rows)

  score(3, 9, 16)
  before = scoring._measured._cache_size()
  score(16, 2, 1, 4)
  assert scoring._measured._cache_size() == before
  score(17)
  assert scoring._measured._cache_size() == before + 1
  assert scoring.shapes(network, [[5] * 17], [[5]]) == (1, 32, 16)


def test_edges(network, params):
  assert scoring.score(network, params, [], []) == []
  assert scoring.score(network, params, [[5, 1]], [[]])[0].total == 0.0
  broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
  (one,) = scoring.score(network, broken, [[5, 1]], [[7, 1]])
  assert np.isnan(one.total)


def test_errors(network, params):
  with pytest.raises(ValueError, match='got 1 inputs and 2 targets'):
    scoring.score(network, params, [[5]], [[5], [6]])
  size = network.vocab_size
  with pytest.raises(ValueError, match=rf'targets\[1\] holds {size}'):
    scoring.score(network, params, [[5], [5]], [[5], [6, size]])
