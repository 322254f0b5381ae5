"""Llama, Qwen and Gemma in the engine: greedy, sampled, trees, beams, pools."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from causal_lm_test import GEMMA2, GEMMA3, LLAMA, QWEN2, QWEN3, logits_of, make
from small_vocabulary import VOCAB_SIZE
from specdec_jax import probs
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.models.causal_lm import CausalLM
from specdec_jax.models.model import Model
from specdec_jax.tree_shape import branching
from toy_models import assert_chi_squared, count_ngrams
from toy_requests import quick_jit, request_of

FAMILIES = {
  name: dataclasses.replace(config, vocab_size=VOCAB_SIZE)
  for name, config in {
    'Llama 3': LLAMA,
    'Qwen 2': QWEN2,
    'Qwen 3': QWEN3,
    'Gemma 2': GEMMA2,
    'Gemma 3': GEMMA3,
  }.items()
}
# Texts and ids of several lengths; nothing at all is a text as well.
TEXTS = ['the red dog runs', '', [5, 6, 7], 'a cat', 'the old house sings here']
LENGTH = 20  # more than twice Gemma's window
BOS = 2


def models(config):
  """A target and a drafter that often agree, but not always."""
  network, target = make(config)
  _, other = make(config, seed=1)
  draft = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, target, other)
  return Model(network, target), Model(network, draft)


def make_engine(config, tokenizer, drafter=small_model, **changes):
  target, draft = models(config)
  settings = dict(gamma=3, max_input_len=24, max_decode_len=LENGTH, bos_id=BOS)
  return Engine(
    target, drafter(draft), tokenizer=tokenizer, **(settings | changes)
  )


@pytest.mark.parametrize(
  'family',
  [
    'Llama 3',
    'Gemma 3',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('Qwen 2', 'Qwen 3', 'Gemma 2')
    ),
  ],
)
def test_greedy_is_speculative_is_teacher_forced(family, tokenizer):
  engine = make_engine(FAMILIES[family], tokenizer)
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  accepted = sum(c.stats.num_accepted for c in have)
  assert 0 < accepted < sum(c.stats.num_tested for c in have)
  network, params = make(FAMILIES[family])
  for item, completion in zip(TEXTS, have, strict=True):
    ids = tokenizer.encode(item) if isinstance(item, str) else item
    prompt, out = [BOS, *ids], completion.tokens
    assert len(out) == LENGTH or out[-1] == tokenizer.eos_id
    read = np.zeros((1, 64), np.int32)
    read[0, : len(prompt) + len(out)] = [*prompt, *out]
    logits = np.asarray(logits_of(network, params, None, read))[0]
    best = logits.argmax(-1)[len(prompt) - 1 :]
    assert out == best[: len(out)].tolist()


@pytest.mark.slow
def test_a_tree_of_proposals(tokenizer):
  def tree(draft):
    return small_model_tree(draft, branching(1, 2, 1))

  engine = make_engine(FAMILIES['Gemma 3'], tokenizer, tree)
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  assert sum(c.stats.num_accepted for c in have) > 0


@pytest.mark.parametrize('more', [-3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_drafter_with_other_padding(more, tokenizer):
  """Its ids past the vocabulary are no text; the target's may have mass."""
  config = FAMILIES['Llama 3']
  wide = dataclasses.replace(config, vocab_size=VOCAB_SIZE + 3)
  other = dataclasses.replace(config, vocab_size=VOCAB_SIZE + 3 + more)
  draft = Model(*make(other))
  engine = Engine(
    Model(*make(wide)), draft, tokenizer=tokenizer, gamma=2, bos_id=BOS,
    max_input_len=16, max_decode_len=8,
  )  # fmt: skip
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  params = engine.params.draft
  network = engine.drafter.network
  assert network.vocab_size == VOCAB_SIZE + 3
  tokens = np.full((1, 2), VOCAB_SIZE + 2, np.int32)

  @quick_jit
  def call(params):
    cache = network.prefill(params, tokens, 4)
    return network.extend(params, cache, tokens)[0]

  logits = call(params)
  assert logits.shape == (1, 2, VOCAB_SIZE + 3)
  assert np.isfinite(logits[..., :VOCAB_SIZE]).all()
  mass = jax.nn.softmax(logits)[..., VOCAB_SIZE:]
  assert (float(mass.sum()) > 0) == (more > 0)


@pytest.mark.slow
def test_beams(tokenizer):
  engine = make_engine(FAMILIES['Gemma 3'], tokenizer)
  have = engine.generate(TEXTS, num_beams=3, speculative=True)
  want = engine.generate(TEXTS, num_beams=3, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]


@pytest.mark.slow
def test_rows_that_come_and_go(tokenizer):
  engine = make_engine(FAMILIES['Gemma 3'], tokenizer)
  sampling = [0.0, 1.0, 0.0, 1.0, 0.0]
  want = engine.generate(TEXTS, temperature=sampling)
  have = Continuous(engine, PoolSettings(rows=2)).generate(
    TEXTS, temperature=sampling
  )
  assert [c.tokens for c in have] == [c.tokens for c in want]


SIZE, GAMMA, TOKENS, SAMPLES = 4, 2, 3, 4096


def sampled(target, draft, params):
  """Counts of the first tokens of many rows, all of one prompt."""
  prompt = np.full((SAMPLES, 1), 1, np.int32)
  request = request_of(
    SAMPLES,
    GAMMA,
    probs.SamplingConfig(1.0),
    TOKENS,
    inputs=[0],
    seed=3,
    prompt=jnp.asarray(prompt),
    prompt_length=jnp.ones((SAMPLES,), jnp.int32),
  )
  loop = Loop(target, small_model(draft))
  found = quick_jit(loop.decode)(params, request)
  assert 0 < found.stats.num_accepted.sum() < found.stats.num_tested.sum()
  return count_ngrams(found.tokens[:, :TOKENS], SIZE)


def law(network, params):
  """The target's law of the first tokens, from teacher-forced logits."""
  rows = np.array(list(itertools.product(range(SIZE), repeat=TOKENS)))
  read = np.concatenate([np.ones((len(rows), 1), np.int64), rows[:, :-1]], 1)
  logits = logits_of(network, params, None, read.astype(np.int32))
  each = np.asarray(jax.nn.softmax(logits, -1), np.float64)
  drawn = np.take_along_axis(each, rows[..., None], -1)[..., 0]
  return drawn.prod(1).reshape((SIZE,) * TOKENS)


@pytest.mark.parametrize(
  'family', ['Llama 3', pytest.param('Gemma 3', marks=pytest.mark.slow)]
)
def test_samples_have_the_targets_law(family):
  config = dataclasses.replace(
    FAMILIES[family], vocab_size=SIZE, logit_softcap=2.0
  )
  target, draft = models(config)
  _, draft_params = make(config, seed=1)
  params = PairParams(target.params, draft_params)
  observed = sampled(target.network, draft.network, params)
  assert_chi_squared(observed, law(target.network, target.params), alpha=1e-3)
  # Negative control: it is not the drafter's.
  with pytest.raises(AssertionError):
    assert_chi_squared(
      observed, law(CausalLM(config), draft_params), alpha=1e-3
    )
