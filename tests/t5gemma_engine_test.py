"""T5Gemma in the engine: greedy, sampled, trees, beams, pools, scores."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from small_vocabulary import VOCAB_SIZE
from specdec_jax import probs
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.engine import scoring
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.models.model import Model
from specdec_jax.models.t5gemma import T5Gemma
from specdec_jax.tree_shape import branching
from t5gemma_test import ONE, TWO, logits_of, make
from toy_models import assert_chi_squared, count_ngrams
from toy_requests import quick_jit, request_of


def with_vocabulary(config, size):
  stacks = {
    name: dataclasses.replace(getattr(config, name), vocab_size=size)
    for name in ('encoder', 'decoder')
  }
  return dataclasses.replace(config, **stacks, image_end_id=0)


FAMILIES = {
  name: with_vocabulary(config, VOCAB_SIZE)
  for name, config in {'T5Gemma': ONE, 'T5Gemma 2': TWO}.items()
}
# Texts and ids of several lengths; nothing at all is a text as well.
TEXTS = ['the red dog runs', '', [5, 6, 7], 'a cat', 'the old house sings here']
LENGTH = 20  # more than twice the window
BOS = 2


def models(config):
  """A target and a drafter that often agree, but not always."""
  network, target = make(config)
  _, other = make(config, seed=1)
  draft = jax.tree.map(lambda a, b: 0.93 * a + 0.07 * b, target, other)
  return Model(network, target, bos_id=BOS), Model(network, draft)


def make_engine(name, tokenizer, drafter=small_model, **changes):
  target, draft = models(FAMILIES[name])
  settings = dict(gamma=3, max_input_len=24, max_decode_len=LENGTH)
  return Engine(
    target, drafter(draft), tokenizer=tokenizer, **(settings | changes)
  )


def read_by(tokenizer, item):
  return [BOS, *(tokenizer.encode(item) if isinstance(item, str) else item)]


families = pytest.mark.parametrize('name', FAMILIES)


@pytest.fixture(scope='module')
def engines(tokenizer):
  """Each made once: its programs are the dear part."""
  return {name: make_engine(name, tokenizer) for name in FAMILIES}


@families
def test_greedy_is_speculative_is_teacher_forced(name, engines, tokenizer):
  engine = engines[name]
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  accepted = sum(c.stats.num_accepted for c in have)
  assert 0 < accepted < sum(c.stats.num_tested for c in have)
  network, params = make(FAMILIES[name])
  for item, completion in zip(TEXTS, have, strict=True):
    ids, out = read_by(tokenizer, item), completion.tokens
    assert len(out) == LENGTH or out[-1] == tokenizer.eos_id
    inputs = np.zeros((1, 32), np.int32)
    inputs[0, : len(ids)] = ids
    fed = np.zeros((1, 1 + LENGTH), np.int32)
    fed[0, : 1 + len(out)] = [network.start_id, *out]
    best = np.asarray(logits_of(network, params, inputs, fed))[0].argmax(-1)
    assert out == best[: len(out)].tolist()


def test_another_start_id_is_another_output(engines, tokenizer):
  """The negative control: what the decoder begins with matters."""
  engine = engines['T5Gemma']
  config = dataclasses.replace(FAMILIES['T5Gemma'], start_id=0)
  _, params = make(FAMILIES['T5Gemma'])
  other = Engine(
    Model(T5Gemma(config), params, bos_id=BOS), tokenizer=tokenizer,
    max_input_len=24, max_decode_len=LENGTH,
  )  # fmt: skip
  have, want = (
    [c.tokens for c in one.generate(TEXTS, speculative=False)]
    for one in (other, engine)
  )
  assert have != want
  # A prompt goes on behind the start id, whichever it is.
  prompts = [tokens[:4] for tokens in want]
  rest = engine.generate(TEXTS, prompts=prompts, max_length=6)
  assert [c.tokens for c in rest] == [tokens[4:10] for tokens in want]


@pytest.mark.parametrize(
  'name', [pytest.param('T5Gemma', marks=pytest.mark.slow), 'T5Gemma 2']
)
def test_scores_are_those_of_decoding(name, engines):
  engine = engines[name]
  outputs = engine.generate(TEXTS, log_probs=True)
  scores = engine.score(TEXTS, [c.tokens for c in outputs])
  for output, score in zip(outputs, scores, strict=True):
    np.testing.assert_allclose(
      score.log_probs, output.log_probs, rtol=1e-3, atol=1e-4
    )
  network, params = make(FAMILIES[name])
  first = scoring.score(network, params, [[BOS, 5]], [[7]])[0].total
  fed = np.array([[network.start_id]], np.int32)
  inputs = np.array([[BOS, 5] + [0] * 14], np.int32)
  logits = logits_of(network, params, inputs, fed)[0, 0]
  assert first == pytest.approx(float(jax.nn.log_softmax(logits)[7]), abs=1e-4)


def test_a_text_may_not_begin_with_an_id_that_is_none(tokenizer):
  target, _ = models(FAMILIES['T5Gemma'])
  with pytest.raises(ValueError, match=f'below {VOCAB_SIZE}, got {VOCAB_SIZE}'):
    Engine(target, tokenizer=tokenizer, bos_id=VOCAB_SIZE)


@pytest.mark.slow
@families
def test_a_tree_of_proposals(name, tokenizer):
  def tree(draft):
    return small_model_tree(draft, branching(1, 2, 1))

  engine = make_engine(name, tokenizer, tree)
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  assert sum(c.stats.num_accepted for c in have) > 0


@pytest.mark.slow
@families
def test_beams(name, engines):
  engine = engines[name]
  have = engine.generate(TEXTS, num_beams=3, speculative=True)
  want = engine.generate(TEXTS, num_beams=3, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]


@pytest.mark.slow
@families
def test_rows_that_come_and_go(name, engines):
  engine = engines[name]
  sampling = [0.0, 1.0, 0.0, 1.0, 0.0]
  want = engine.generate(TEXTS, temperature=sampling)
  have = Continuous(engine, PoolSettings(rows=2)).generate(
    TEXTS, temperature=sampling
  )
  assert [c.tokens for c in have] == [c.tokens for c in want]


SIZE, GAMMA, TOKENS, SAMPLES = 4, 2, 3, 2048


def sampled(target, draft, params):
  """Counts of the first tokens of many rows, all of one input."""
  request = request_of(
    SAMPLES,
    GAMMA,
    probs.SamplingConfig(1.0),
    TOKENS,
    inputs=[2, 1, 3],
    seed=3,
  )
  loop = Loop(target, small_model(draft))
  found = quick_jit(loop.decode)(params, request)
  assert 0 < found.stats.num_accepted.sum() < found.stats.num_tested.sum()
  return count_ngrams(found.tokens[:, :TOKENS], SIZE)


def law(network, params):
  """The target's law of the first tokens, from teacher-forced logits."""
  rows = np.array(list(itertools.product(range(SIZE), repeat=TOKENS)))
  first = np.full((len(rows), 1), network.start_id)
  fed = np.concatenate([first, rows[:, :-1]], 1).astype(np.int32)
  inputs = np.tile(np.array([2, 1, 3], np.int32), (len(rows), 1))
  logits = logits_of(network, params, inputs, fed)
  each = np.asarray(jax.nn.softmax(logits, -1), np.float64)
  drawn = np.take_along_axis(each, rows[..., None], -1)[..., 0]
  return drawn.prod(1).reshape((SIZE,) * TOKENS)


# In small: the law of Llama in causal_engine_test, by the same loop.
@pytest.mark.slow
@families
def test_samples_have_the_targets_law(name):
  config = with_vocabulary(FAMILIES[name], SIZE)
  decoder = dataclasses.replace(config.decoder, logit_softcap=2.0)
  config = dataclasses.replace(config, decoder=decoder)
  target, draft = models(config)
  _, draft_params = make(config, seed=1)
  params = PairParams(target.params, draft_params)
  observed = sampled(target.network, draft.network, params)
  assert_chi_squared(observed, law(target.network, target.params), alpha=1e-3)
  # Negative control: it is not the drafter's.
  with pytest.raises(AssertionError):
    assert_chi_squared(observed, law(T5Gemma(config), draft_params), alpha=1e-3)
