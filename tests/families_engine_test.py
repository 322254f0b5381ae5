"""GPT, Llama, Qwen, Gemma and T5Gemma in the engine: one suite for all.

Greedy, sampled, beams, pools, scores; what a decoder's texts begin with.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_families
from small_vocabulary import VOCAB_SIZE
from specdec_jax import probs
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine import scoring
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scheduler import Continuous, PoolSettings
from specdec_jax.models.model import Model
from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig
from toy_families import DECODERS, GPT2, ONE, T5X, TWO
from toy_models import assert_chi_squared, count_ngrams
from toy_requests import quick_jit, request_of

FAMILIES = DECODERS | {
  'GPT-2': dataclasses.replace(GPT2, num_positions=128),
  'T5X': T5X,
  'T5Gemma': ONE,
  'T5Gemma 2': TWO,
}
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


def make(name, seed=0, **fields):
  config = with_fields(FAMILIES[name], **({'vocab_size': VOCAB_SIZE} | fields))
  network, params = toy_families.make(config, seed)
  if network.has_encoder:  # smaller: a drafter is to agree with its target
    params = jax.tree.map(lambda leaf: 0.75 * leaf, params)
  return network, params


def models(name, **fields):
  """A target and a drafter that often agree, but not always."""
  network, target = make(name, **fields)
  _, other = make(name, seed=1, **fields)
  near = 0.93 if network.has_encoder else 0.9
  draft = jax.tree.map(lambda a, b: near * a + (1 - near) * b, target, other)
  return Model(network, target, bos_id=BOS), Model(network, draft)


def make_engine(name, tokenizer, **changes):
  settings = {'gamma': 3, 'max_input_len': 24, 'max_decode_len': LENGTH}
  return Engine(*models(name), tokenizer=tokenizer, **settings | changes)


@pytest.fixture(scope='module')
def engine(request, tokenizer):
  """Of a family; made once for all tests of it, as its programs are."""
  return make_engine(request.param, tokenizer)


def in_families(*quick, slow=()):
  """A test of several families, of which the quick run has some."""
  return pytest.mark.parametrize(
    ('name', 'engine'),
    [
      *(pytest.param(name, name, id=name) for name in quick),
      *(
        pytest.param(name, name, id=name, marks=pytest.mark.slow)
        for name in slow
      ),
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
    begin = 0
  else:
    fed = np.zeros((rows, 32 + length), np.int32)
    fed[:, : len(read)] = read
    fed[:, len(read) : len(read) + length] = outputs
    inputs, begin = None, len(read) - 1
  logits = toy_families.logits_of(network, params, inputs, fed)
  return np.asarray(logits)[:, begin : begin + length]


@in_families(
  'GPT-2', 'Gemma 3', 'T5Gemma', slow=('T5X', 'Llama 3', 'T5Gemma 2')
)
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


@in_families('T5Gemma')
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


@in_families(slow=('T5Gemma 2',))
def test_beams(name, engine):
  have = engine.generate(TEXTS, num_beams=3, speculative=True)
  want = engine.generate(TEXTS, num_beams=3, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]


@in_families(slow=('Gemma 3',))
def test_rows_that_come_and_go(name, engine):
  sampling = [0.0, 1.0, 0.0, 1.0, 0.0]
  want = engine.generate(TEXTS, temperature=sampling)
  have = Continuous(engine, PoolSettings(rows=2)).generate(
    TEXTS, temperature=sampling
  )
  assert [c.tokens for c in have] == [c.tokens for c in want]


@in_families('T5Gemma')
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


@in_families('GPT-2')
def test_given_ids_begin_once(name, engine, tokenizer):
  ids = engine.input_ids('the red dog')
  assert ids[0] == BOS != ids[1]
  assert engine.input_ids(ids) == engine.input_ids(ids[1:]) == ids
  whole, bare = engine.generate([ids, ids[1:]])
  assert whole.tokens == bare.tokens
  # A begin alone is an empty text.
  assert engine.input_ids([BOS]) == [BOS]
  # A text begins with id 0 unless another is given.
  other = Engine(Model(*make('T5X')), tokenizer=tokenizer)
  assert (other.bos_id, other.num_input_tokens('')) == (0, 1)
  for bos_id in (-1, VOCAB_SIZE, 1.5, 'x', True):
    with pytest.raises(ValueError, match='bos_id'):
      make_engine(name, tokenizer, bos_id=bos_id)


def test_an_engine_beyond_the_positions(tokenizer):
  engine = make_engine('GPT-2', tokenizer, max_decode_len=128)
  with pytest.raises(ValueError, match='learned 128 positions.*lower'):
    engine.generate(['a'])
  assert engine.num_programs == 0
