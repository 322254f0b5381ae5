"""GPT, Llama, Qwen, Gemma and T5Gemma in the engine: one suite for all.

Greedy, beams, pools, scores; what a decoder's texts begin with.
"""

import dataclasses

import jax
import numpy as np
import pytest

import toy_families
from small_vocabulary import VOCAB_SIZE
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scheduler import Continuous, PoolSettings
from specdec_jax.models.model import Model
from specdec_jax.models.t5gemma import T5GemmaConfig
from toy_families import DECODERS, GEMMA3, GPT2, ONE, T5X, TWO

# A layer of each kind is enough, `model_conformance_test` has more.
_KINDS = {'num_layers': 2, 'layer_kinds': ('local', 'global')}
FAMILIES = DECODERS | {
  'Gemma 3': dataclasses.replace(GEMMA3, **_KINDS),
  'GPT-2': dataclasses.replace(GPT2, num_positions=128),
  'T5X': T5X,
  'T5Gemma': dataclasses.replace(
    ONE, decoder=dataclasses.replace(ONE.decoder, **_KINDS)
  ),
  'T5Gemma 2': TWO,
}
# Texts and ids of several lengths; nothing at all is a text as well.
TEXTS = ['the red dog runs', '', [5, 6, 7], 'a cat', 'the old house sings here']
LENGTH = 20  # more than twice Gemma's window
BOS = 2


def make(name, seed=0):
  config, size = FAMILIES[name], {'vocab_size': VOCAB_SIZE}
  if isinstance(config, T5GemmaConfig):  # its stacks share a vocabulary
    stacks = {
      stack: dataclasses.replace(getattr(config, stack), **size)
      for stack in ('encoder', 'decoder')
    }
    config = dataclasses.replace(config, image_end_id=0, **stacks)
  else:
    config = dataclasses.replace(config, **size)
  network, params = toy_families.make(config, seed)
  if network.has_encoder:  # smaller: a drafter is to agree with its target
    params = jax.tree.map(lambda leaf: 0.75 * leaf, params)
  return network, params


def models(name):
  """A target and a drafter that often agree, but not always."""
  network, target = make(name)
  _, other = make(name, seed=1)
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
  cases = [pytest.param(name, name, id=name) for name in quick]
  cases += [
    pytest.param(name, name, id=name, marks=pytest.mark.slow) for name in slow
  ]
  return pytest.mark.parametrize(('name', 'engine'), cases, indirect=['engine'])


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
  'GPT-2', 'T5Gemma', slow=('T5X', 'Llama 3', 'Gemma 3', 'T5Gemma 2')
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


@in_families('GPT-2', 'T5Gemma')
def test_scores_are_those_of_decoding(name, engine):
  done = engine.generate(TEXTS)
  outputs = [one.tokens for one in done]
  for one, score in zip(done, engine.score(TEXTS, outputs), strict=True):
    close = {'rtol': 1e-3, 'atol': 1e-4}
    np.testing.assert_allclose(score.log_probs, one.log_probs, **close)
    assert score.total == pytest.approx(sum(one.log_probs), abs=1e-3)
  # Another output has another score.
  outputs[0][-1] = (outputs[0][-1] + 1) % VOCAB_SIZE
  other = engine.score(TEXTS, outputs)[0]
  assert abs(other.log_probs[-1] - done[0].log_probs[-1]) > 1e-3


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


@in_families('GPT-2')
def test_given_ids_begin_once(name, engine, tokenizer):
  ids = engine.input_ids('the red dog')
  assert ids[0] == BOS != ids[1]
  assert engine.input_ids(ids) == engine.input_ids(ids[1:]) == ids
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
