"""Llama, Qwen, Gemma and T5Gemma in the engine: one suite for all of them.

Greedy, sampled, trees, beams, pools, scores; gpt_engine_test has GPT-2's.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import causal_lm_test
import t5gemma_test
from causal_lm_test import FAMILIES as DECODERS
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
from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig
from specdec_jax.tree_shape import branching
from t5gemma_test import ONE, TWO
from toy_models import assert_chi_squared, count_ngrams
from toy_requests import quick_jit, request_of

FAMILIES = DECODERS | {'T5Gemma': ONE, 'T5Gemma 2': TWO}
ENCODED = ('T5Gemma', 'T5Gemma 2')
# Texts and ids of several lengths; nothing at all is a text as well.
TEXTS = ['the red dog runs', '', [5, 6, 7], 'a cat', 'the old house sings here']
LENGTH = 20  # more than twice Gemma's window
BOS = 2


def with_fields(config, **fields):
  """Of T5Gemma, fields of its decoder; its stacks share a vocabulary."""
  if not isinstance(config, T5GemmaConfig):
    return dataclasses.replace(config, **fields)
  shared = {k: v for k, v in fields.items() if k == 'vocab_size'}
  return dataclasses.replace(
    config,
    encoder=dataclasses.replace(config.encoder, **shared),
    decoder=dataclasses.replace(config.decoder, **fields),
    image_end_id=0,
  )


def suite_of(config):
  """The suite of its network, which makes parameters and has `logits_of`."""
  return t5gemma_test if isinstance(config, T5GemmaConfig) else causal_lm_test


def make(name, seed=0, **fields):
  config = with_fields(FAMILIES[name], **({'vocab_size': VOCAB_SIZE} | fields))
  return suite_of(config).make(config, seed)


def models(name, **fields):
  """A target and a drafter that often agree, but not always."""
  network, target = make(name, **fields)
  _, other = make(name, seed=1, **fields)
  near = 0.93 if network.has_encoder else 0.9
  draft = jax.tree.map(lambda a, b: near * a + (1 - near) * b, target, other)
  return Model(network, target, bos_id=BOS), Model(network, draft)


def make_engine(name, tokenizer, drafter=small_model):
  target, draft = models(name)
  return Engine(
    target, drafter(draft), tokenizer=tokenizer, gamma=3, max_input_len=24,
    max_decode_len=LENGTH,
  )  # fmt: skip


@pytest.fixture(scope='module')
def engine(request, tokenizer):
  """Of a family; made once for all tests of it, as its programs are."""
  return make_engine(request.param, tokenizer)


def in_families(*quick, of=FAMILIES):
  """A test of several families, of which the quick run has some."""
  return pytest.mark.parametrize(
    ('name', 'engine'),
    [
      pytest.param(
        name, name, id=name, marks=() if name in quick else pytest.mark.slow
      )
      for name in of
    ],
    indirect=['engine'],
  )


def logits_behind(network, params, read, outputs):
  """Logits float32[N, L, V] of outputs int[N, L] behind the ids of `read`.

  The encoder reads them, or the decoder begins with them; both in 32 places.
  """
  rows, length = outputs.shape
  inputs = np.zeros((rows, 32), np.int32)
  inputs[:, : len(read)] = read
  if network.has_encoder:
    first = np.full((rows, 1), network.start_id)
    fed = np.concatenate([first, outputs[:, :-1]], 1).astype(np.int32)
    logits_of, begin = t5gemma_test.logits_of, 0
  else:
    fed = np.zeros((rows, 32 + length), np.int32)
    fed[:, : len(read)] = read
    fed[:, len(read) : len(read) + length] = outputs
    logits_of, inputs, begin = causal_lm_test.logits_of, None, len(read) - 1
  logits = logits_of(network, params, inputs, fed)
  return np.asarray(logits)[:, begin : begin + length]


@in_families('Llama 3', 'Gemma 3', 'T5Gemma', 'T5Gemma 2')
def test_greedy_is_speculative_is_teacher_forced(name, engine, tokenizer):
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  accepted = sum(c.stats.num_accepted for c in have)
  assert 0 < accepted < sum(c.stats.num_tested for c in have)
  for item, completion in zip(TEXTS, have, strict=True):
    ids = tokenizer.encode(item) if isinstance(item, str) else item
    out = completion.tokens
    assert len(out) == LENGTH or out[-1] == tokenizer.eos_id
    padded = np.array([out + [0] * (LENGTH - len(out))])
    best = logits_behind(*make(name), [BOS, *ids], padded)[0].argmax(-1)
    assert out == best[: len(out)].tolist()


@in_families('T5Gemma', of=ENCODED)
def test_scores_are_those_of_decoding(name, engine):
  outputs = engine.generate(TEXTS)
  scores = engine.score(TEXTS, [c.tokens for c in outputs])
  for output, score in zip(outputs, scores, strict=True):
    np.testing.assert_allclose(
      score.log_probs, output.log_probs, rtol=1e-3, atol=1e-4
    )
  network, params = make(name)
  first = scoring.score(network, params, [[BOS, 5]], [[7]])[0].total
  logits = logits_behind(network, params, [BOS, 5], np.array([[7]]))[0, 0]
  assert first == pytest.approx(float(jax.nn.log_softmax(logits)[7]), abs=1e-4)


@in_families(of=('Gemma 3', *ENCODED))
def test_beams(name, engine):
  have = engine.generate(TEXTS, num_beams=3, speculative=True)
  want = engine.generate(TEXTS, num_beams=3, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]


@in_families(of=('Gemma 3', *ENCODED))
def test_rows_that_come_and_go(name, engine):
  sampling = [0.0, 1.0, 0.0, 1.0, 0.0]
  want = engine.generate(TEXTS, temperature=sampling)
  have = Continuous(engine, PoolSettings(rows=2)).generate(
    TEXTS, temperature=sampling
  )
  assert [c.tokens for c in have] == [c.tokens for c in want]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Gemma 3', *ENCODED])
def test_a_tree_of_proposals(name, tokenizer):
  def tree(draft):
    return small_model_tree(draft, branching(1, 2, 1))

  engine = make_engine(name, tokenizer, tree)
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  assert sum(c.stats.num_accepted for c in have) > 0


@in_families('T5Gemma', of=ENCODED[:1])
def test_another_start_id_is_another_output(name, engine, tokenizer):
  """The negative control: what the decoder begins with matters."""
  network, params = make(name)
  config = dataclasses.replace(network.config, start_id=0)
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


def test_a_text_may_not_begin_with_an_id_that_is_none(tokenizer):
  target, _ = models('T5Gemma')
  with pytest.raises(ValueError, match=f'below {VOCAB_SIZE}, got {VOCAB_SIZE}'):
    Engine(target, tokenizer=tokenizer, bos_id=VOCAB_SIZE)


@pytest.mark.parametrize('more', [-3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_drafter_with_other_padding(more, tokenizer):
  """Its ids past the vocabulary are no text; the target's may have mass."""
  target, draft = (
    Model(*make('Llama 3', vocab_size=VOCAB_SIZE + 3 + n)) for n in (0, more)
  )
  engine = Engine(
    target, draft, tokenizer=tokenizer, gamma=2, bos_id=BOS, max_input_len=16,
    max_decode_len=8,
  )  # fmt: skip
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  network = engine.drafter.network
  assert network.vocab_size == VOCAB_SIZE + 3
  tokens = np.full((1, 2), VOCAB_SIZE + 2, np.int32)

  @quick_jit
  def call(params):
    cache = network.prefill(params, tokens, 4)
    return network.extend(params, cache, tokens)[0]

  logits = call(engine.params.draft)
  assert logits.shape == (1, 2, VOCAB_SIZE + 3)
  assert np.isfinite(logits[..., :VOCAB_SIZE]).all()
  mass = jax.nn.softmax(logits)[..., VOCAB_SIZE:]
  assert (float(mass.sum()) > 0) == (more > 0)


SIZE, GAMMA, TOKENS, SAMPLES = 4, 2, 3, 4096


def sampled(target, draft, params, read):
  """Counts of the first tokens of many rows, which all read the same."""
  prompt = {}
  if not target.has_encoder:
    prompt = {
      'prompt': jnp.asarray(np.tile(np.array(read, np.int32), (SAMPLES, 1))),
      'prompt_length': jnp.full((SAMPLES,), len(read), jnp.int32),
    }
  request = request_of(
    SAMPLES,
    GAMMA,
    probs.SamplingConfig(1.0),
    TOKENS,
    inputs=read if target.has_encoder else [0],
    seed=3,
    **prompt,
  )
  loop = Loop(target, small_model(draft))
  found = quick_jit(loop.decode)(params, request)
  assert 0 < found.stats.num_accepted.sum() < found.stats.num_tested.sum()
  return count_ngrams(found.tokens[:, :TOKENS], SIZE)


def law(network, params, read):
  """The target's law of the first tokens, from teacher-forced logits."""
  rows = np.array(list(itertools.product(range(SIZE), repeat=TOKENS)))
  logits = logits_behind(network, params, read, rows)
  each = np.asarray(jax.nn.softmax(logits, -1), np.float64)
  drawn = np.take_along_axis(each, rows[..., None], -1)[..., 0]
  return drawn.prod(1).reshape((SIZE,) * TOKENS)


@pytest.mark.parametrize(
  'name',
  [
    'Llama 3',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('Gemma 3', *ENCODED)
    ),
  ],
)
def test_samples_have_the_targets_law(name):
  fields = {'vocab_size': SIZE, 'logit_softcap': 2.0}
  target, draft = models(name, **fields)
  network, other = make(name, seed=1, **fields)
  read = [2, 1, 3] if network.has_encoder else [1]
  params = PairParams(target.params, other)
  observed = sampled(network, draft.network, params, read)
  assert_chi_squared(observed, law(network, target.params, read), alpha=1e-3)
  # Negative control: it is not the drafter's.
  with pytest.raises(AssertionError):
    assert_chi_squared(observed, law(network, other, read), alpha=1e-3)
