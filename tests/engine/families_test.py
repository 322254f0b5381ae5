"""All families in the engine: the features that `support.toml` says they have.

Also scores, and what a decoder's texts begin with.
"""

import dataclasses

import jax
import numpy as np
import pytest

import specdec_jax as sd
import toy_families
from small_vocabulary import VOCAB_SIZE
from specdec_jax.engine.scheduler import PoolSettings
from toy_families import BARTS, DECODERS, GEMMA3, GPT2, ONE, SUPPORT
from toy_pools import Pooled

# A layer of each kind is enough, `models/conformance_test` has more.
_KINDS = {'num_layers': 2, 'layer_kinds': ('local', 'global')}
# The vocabulary's padding; its end begins an output.
_BARTS = {'num_encoder_layers': 2, 'num_decoder_layers': 2}
_BARTS |= {'pad_id': 0, 'start_id': 1}
changed = dataclasses.replace
FAMILIES = toy_families.ALL | {
  **{name: changed(it, num_layers=2) for name, it in DECODERS.items()},
  'Gemma 3': changed(GEMMA3, **_KINDS),
  'GPT-2': changed(GPT2, num_positions=128),
  'T5Gemma': changed(ONE, decoder=changed(ONE.decoder, **_KINDS)),
}
for name, config in BARTS.items():
  size = VOCAB_SIZE * bool(config.encoder_vocab_size)
  FAMILIES[name] = changed(config, encoder_vocab_size=size, **_BARTS)
# Texts and ids of several lengths; nothing at all is a text as well.
TEXTS = ['the red dog runs', '', [5, 6, 7], 'a cat', 'the old house sings here']
LENGTH = 20  # more than twice Gemma's window
BOS = 2
# A target's parameters are multiplied by the first number, and a drafter's are
# the target's by the second and others by the rest: it is to agree, not always.
_SCALES = {
  'BART': (0.3, 0.9),
  'Marian': (0.3, 0.9),
  'T5Gemma': (0.75, 0.93),
  'T5Gemma 2': (0.75, 0.93),
}


def make(name, seed=0):
  config, size = FAMILIES[name], {'vocab_size': VOCAB_SIZE}
  if isinstance(config, sd.T5GemmaConfig):  # its stacks share a vocabulary
    stacks = [changed(x, **size) for x in (config.encoder, config.decoder)]
    size = dict(zip(('encoder', 'decoder'), stacks, strict=True))
    size['image_end_id'] = 0
  network, params = toy_families.make(changed(config, **size), seed)
  scale, _ = _SCALES.get(name, (1.0, 0.0))
  return network, jax.tree.map(lambda leaf: scale * leaf, params)


def models(name):
  """A target and a drafter that often agree, but not always."""
  network, target = make(name)
  _, other = make(name, seed=1)
  _, near = _SCALES.get(name, (1.0, 0.9))
  draft = jax.tree.map(lambda a, b: near * a + (1 - near) * b, target, other)
  reads_bos = not (network.has_encoder and network.ends_inputs)
  bos_id = BOS if reads_bos else None
  return sd.Model(network, target, bos_id=bos_id), sd.Model(network, draft)


def make_engine(name, tokenizer, **changes):
  settings = {'gamma': 3, 'max_input_len': 24, 'max_decode_len': LENGTH}
  pair = dict(zip(('target', 'drafter'), models(name), strict=True))
  return sd.Engine(**pair | settings | changes, tokenizer=tokenizer)


@pytest.fixture(scope='module')
def engine(request, tokenizer):
  """Of a family; made once for all tests of it, as its programs are."""
  return make_engine(request.param, tokenizer)


def in_families(*quick, feature=None):
  """A test of some families, and slowly of all that have the feature."""
  have = [
    row['network'] for row in SUPPORT.values() if feature in row['features']
  ]
  assert {*quick} <= {*have} or feature is None
  cases = [pytest.param(name, name, id=name) for name in quick]
  cases += [
    pytest.param(name, name, id=name, marks=pytest.mark.slow)
    for name in dict.fromkeys(have)
    if name not in quick
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
    fed, begin = np.roll(outputs, 1, 1).astype(np.int32), 0
    fed[:, 0] = network.start_id
  else:
    fed = np.zeros((rows, 32 + length), np.int32)
    fed[:, : len(read)] = read
    fed[:, len(read) : len(read) + length] = outputs
    inputs, begin = None, len(read) - 1
  logits = toy_families.logits_of(network, params, inputs, fed)
  return np.asarray(logits)[:, begin : begin + length]


@in_families('GPT-2', 'T5Gemma', feature='greedy')
def test_greedy_is_speculative_is_teacher_forced(name, engine, tokenizer):
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  accepted = sum(c.stats.num_accepted for c in have)
  assert 0 < accepted < sum(c.stats.num_tested for c in have)
  for item, completion in zip(TEXTS, have, strict=True):
    out, ids = completion.tokens, engine.codec.input_ids(item)
    if not out:  # nothing begins an empty text
      assert item == '' and engine.codec.bos_id is None
      continue
    assert len(out) == LENGTH or out[-1] == tokenizer.eos_id
    padded = np.array([out + [0] * (LENGTH - len(out))])
    best = logits_behind(*make(name), ids, padded)[0].argmax(-1)
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


@in_families('GPT-2', feature='trees')
def test_trees(name, engine, tokenizer):
  """More of a tree is kept than of a chain that is as deep."""
  _, draft = models(name)
  shape = sd.branching(3, 1, 1)
  tree = make_engine(name, tokenizer, drafter=sd.small_model_tree(draft, shape))
  have, chain = tree.generate(TEXTS), engine.generate(TEXTS)
  assert [c.tokens for c in have] == [c.tokens for c in chain]
  calls = [[c.stats.num_target_calls for c in made] for made in (have, chain)]
  assert sum(calls[0]) < sum(calls[1])


@in_families(feature='beams')
def test_beams(name, engine):
  have = engine.generate(TEXTS, num_beams=3, speculative=True)
  want = engine.generate(TEXTS, num_beams=3, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]


@in_families(feature='server')
def test_rows_that_come_and_go(name, engine):
  """Greedy ones and samples, as the server has them in its slots."""
  sampling = [0.0, 1.0, 0.0, 1.0, 0.0]
  want = engine.generate(TEXTS, temperature=sampling)
  pool = Pooled(engine, PoolSettings(rows=2))
  have = pool.generate(TEXTS, temperature=sampling)
  assert [c.tokens for c in have] == [c.tokens for c in want]


@in_families('GPT-2')
def test_given_ids_begin_once(name, engine, tokenizer):
  ids = engine.codec.input_ids('the red dog')
  assert ids[0] == BOS != ids[1]
  assert engine.codec.input_ids(ids) == engine.codec.input_ids(ids[1:]) == ids
  # A begin alone is an empty text.
  assert engine.codec.input_ids([BOS]) == [BOS]
  # A text begins with id 0 unless another is given.
  other = sd.Engine(sd.Model(*make('T5X')), tokenizer=tokenizer)
  assert (other.codec.bos_id, other.num_input_tokens('')) == (0, 1)
  for bos_id in (-1, VOCAB_SIZE, 1.5, 'x', True):
    with pytest.raises(ValueError, match='bos_id'):
      make_engine(name, tokenizer, bos_id=bos_id)


def test_an_engine_beyond_the_positions(tokenizer):
  engine = make_engine('GPT-2', tokenizer, max_decode_len=128)
  with pytest.raises(ValueError, match='learned 128 positions.*lower'):
    engine.generate(['a'])
  assert engine.num_programs == 0
  with pytest.raises(ValueError, match='max_input_len: expected at most 160'):
    make_engine('BART', tokenizer, max_input_len=161)
