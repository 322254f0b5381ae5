"""Decoder-only pairs in the engine, and training on lines of text."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import rich.console

from gpt_test import GPT2, T5X, logits_of, make
from small_vocabulary import VOCAB_SIZE
from specdec_jax import infer, probs
from specdec_jax.engine.engine import Engine
from specdec_jax.infer import batches
from specdec_jax.models.gpt import GPT
from specdec_jax.models.model import Model
from specdec_jax.training import pairs as pairs_lib
from specdec_jax.training.data import PackingConfig
from specdec_jax.training.optimizer import OptimizerConfig
from specdec_jax.training.run import TrainRun, train
from specdec_jax.training.trainer import TrainConfig

FAMILIES = {
  'GPT-2': dataclasses.replace(GPT2, vocab_size=VOCAB_SIZE, num_positions=128),
  'T5X': dataclasses.replace(T5X, vocab_size=VOCAB_SIZE),
}
# Texts and ids of several lengths; nothing at all is a text as well.
TEXTS = ['the red dog runs', '', [5, 6, 7], 'a cat', 'the old house sings here']
LENGTH = 20
BOS = 0


def make_engine(config, tokenizer, **changes):
  """With two models that often agree, but not always."""
  network, target = make(config)
  _, other = make(config, seed=1)
  draft = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, target, other)
  settings = dict(gamma=3, max_input_len=24, max_decode_len=LENGTH, bos_id=BOS)
  return Engine(
    Model(network, target),
    Model(network, draft),
    tokenizer=tokenizer,
    **(settings | changes),
  )


@pytest.fixture(scope='module')
def engines(tokenizer):
  return {name: make_engine(FAMILIES[name], tokenizer) for name in FAMILIES}


@pytest.mark.parametrize('family', FAMILIES)
def test_greedy_is_speculative_is_teacher_forced(family, engines, tokenizer):
  engine = engines[family]
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
  assert len({tuple(c.tokens) for c in have}) == len(TEXTS)


def test_given_ids_begin_once(engines):
  engine = engines['GPT-2']
  ids = engine.input_ids('the red dog')
  assert ids[0] == BOS != ids[1]
  assert engine.input_ids(ids) == engine.input_ids(ids[1:]) == ids
  whole, bare = engine.generate([ids, ids[1:]])
  assert whole.tokens == bare.tokens
  # A begin alone is an empty text.
  assert engine.input_ids([BOS]) == [BOS]


def test_other_texts_do_not_recompile(engines):
  engine = engines['GPT-2']
  engine.generate(TEXTS)
  before = engine.num_programs
  engine.generate(TEXTS[::-1])
  engine.generate(['the', 'dog', '', 'a red cat runs', 'x'])
  assert engine.num_programs == before


def test_unconditional_samples_differ_by_their_ids(engines):
  engine = engines['GPT-2']
  sampling = dict(temperature=1.0, top_k=40)
  found = engine.generate([''] * 4, **sampling)
  assert len({tuple(c.tokens) for c in found}) == 4
  order = [3, 1, 0, 2]
  again = engine.generate([''] * 4, **sampling, example_ids=order)
  assert [c.tokens for c in again] == [found[i].tokens for i in order]


def test_an_engine_beyond_the_positions(tokenizer):
  engine = make_engine(FAMILIES['GPT-2'], tokenizer, max_decode_len=128)
  with pytest.raises(ValueError, match='learned 128 positions.*lower'):
    engine.generate(['a'])
  assert engine.num_programs == 0


def test_a_text_may_fill_the_positions_with_its_output(tokenizer):
  """Not a power of two, whose double the positions have not."""
  engine = make_engine(
    FAMILIES['GPT-2'], tokenizer, max_input_len=90, max_decode_len=LENGTH
  )
  texts = [[5 + i % 90 for i in range(89)], 'a cat']
  have = engine.generate(texts)
  want = engine.generate(texts, speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  with pytest.raises(ValueError, match='91 tokens .its start included'):
    engine.generate([[5] * 90])


@pytest.mark.parametrize('bos_id', [-1, VOCAB_SIZE, 1.5, 'x', True])
def test_a_begin_that_is_no_id(tokenizer, bos_id):
  with pytest.raises(ValueError, match='bos_id must be None or an id below'):
    make_engine(FAMILIES['GPT-2'], tokenizer, bos_id=bos_id)


def test_lines_of_a_decoder_go_on_from_nothing(engines, tokenizer, tmp_path):
  (tmp_path / 'lines.txt').write_text('the red dog\n\n')

  def records(engine):
    folder = str(tmp_path / str(engine.bos_id))
    infer.decode(
      infer.DecodeConfig(
        engine=lambda: engine,
        input_file=str(tmp_path / 'lines.txt'),
        output_dir=folder,
        mode='speculative',
      ),
      console=rich.console.Console(quiet=True),
    )
    with open(f'{folder}/predictions.jsonl', encoding='utf-8') as stream:
      return [json.loads(line) for line in stream]

  engine = engines['T5X']
  found = records(engine)
  want = engine.generate(['the red dog', ''])
  assert [r['prediction_tokens'] for r in found] == [c.tokens for c in want]
  assert found[1]['prediction_tokens'] and found[1]['error'] is None
  # A run with another beginning is another run.
  other = make_engine(FAMILIES['T5X'], tokenizer, bos_id=5)
  identity = batches.engine_identity
  assert identity(engine)['bos_id'] == 0 != identity(other)['bos_id']


def test_a_text_begins_with_id_0_unless_another_is_given(tokenizer):
  engine = make_engine(FAMILIES['T5X'], tokenizer, bos_id=None)
  assert engine.bos_id == BOS
  assert engine.num_input_tokens('a cat') == 1 + len(tokenizer.encode('a cat'))
  assert engine.num_input_tokens('') == 1


@pytest.mark.slow
def test_lines_train_a_decoder_only_model(tokenizer, tmp_path):
  path = tmp_path / 'lines.txt'
  path.write_text('the red dog runs\n\na blue cat sleeps here\n' * 40)
  lines = pairs_lib.read_lines(path)
  assert len(lines) == 80
  pairs = pairs_lib.tokenise_lines(lines, tokenizer)
  source, target = pairs[1]
  assert source.tolist() == [BOS]
  assert target.tolist() == tokenizer.encode('a blue cat sleeps here')
  model = GPT(dataclasses.replace(FAMILIES['GPT-2'], num_layers=1))
  adam = OptimizerConfig(name='adamw', learning_rate=0.03, warmup_steps=2)
  run = TrainRun(
    model=model,
    model_dir=str(tmp_path / 'model'),
    train_file=str(path),
    vocab_path=tokenizer.path,
    packing=PackingConfig((1.0,), buckets=(32,), tokens_per_batch=256),
    training=TrainConfig(steps=12, optimizer=adam),
  )
  params = train(run, log=lambda line: None)
  before = loss_of(model, model.init(jax.random.key(0)), target)
  after = loss_of(model, params, target)
  assert before > 4 and after < before / 2


def loss_of(model, params, target):
  """Nats a token of a text from its beginning on."""
  read = np.array([[BOS, *target[:-1]]], np.int32)
  logits = logits_of(model, params, None, read)
  return -float(np.mean(probs.log_prob_of(logits, target[None])))


def test_lines_that_are_none(tmp_path):
  (tmp_path / 'empty.txt').write_text('\n \n')
  with pytest.raises(ValueError, match='no line with text'):
    pairs_lib.read_lines(tmp_path / 'empty.txt')
  with pytest.raises(ValueError, match='missing.txt'):
    pairs_lib.read_lines(tmp_path / 'missing.txt')
