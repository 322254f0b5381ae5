"""`specdec train` and `training.train`: from files of pairs to checkpoints."""

import collections
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import outputs_test
import small_vocabulary
from specdec_jax import checkpoints, training
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.cli import gin_flags
from specdec_jax.drafters import heads
from specdec_jax.drafters.heads import Heads
from specdec_jax.engine.engine import Engine
from specdec_jax.models import t5
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.model import Model
from specdec_jax.text.tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.training import data, outputs
from specdec_jax.training import run as training_run
from specdec_jax.training.losses import HeadDistillation
from specdec_jax.training.trainer import TrainConfig
from training_test import CONFIG, copy_pairs

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = dataclasses.replace(CONFIG, emb_dim=8, num_heads=1, mlp_dim=8)
MODEL = t5.T5(SMALL)
OTHER_IDS = t5.T5(dataclasses.replace(SMALL, vocab_size=8))


DATA = copy_pairs(80), copy_pairs(20)


def make_run(tmp_path, **changes):
  defaults = dict(
    model=MODEL,
    model_dir=str(tmp_path / 'model'),
    packing=data.PackingConfig((1.0,), (16,), 64),
    training=TrainConfig(steps=4, eval_every=4),
  )
  return training.TrainRun(**(defaults | changes))


def train(run, data=DATA):
  lines = []
  return training.train(run, data, log=lines.append), lines


def test_a_run_begins_with_a_checkpoint_and_goes_on(tmp_path):
  """In its folder; another configuration does not."""
  first = MODEL.init(jax.random.key(9))
  path = str(tmp_path / 'first.msgpack')
  checkpoints.save_t5x(path, first, step=0)
  short = TrainConfig(steps=4, log_every=2, eval_every=4, learning_rate=1e-9)
  run = make_run(tmp_path, init_checkpoint_path=path, training=short)
  params, lines = train(run)
  assert 'parameters after 4 steps' in lines[-1]
  close = functools.partial(np.testing.assert_allclose, atol=1e-6)
  jax.tree.map(close, params, first)
  quicker = dataclasses.replace(short, learning_rate=0.5)
  for changes, words in (
    (dict(packing=data.PackingConfig((1.0,), (8,), 64)), 'packing.buckets'),
    (dict(training=quicker), 'training.learning_rate was 1e-09, is 0.5'),
    (dict(z_loss=0.5), 'z_loss was 0.0, is 0.5'),
    (dict(init_checkpoint_path=None), 'init was'),
    (dict(model=OTHER_IDS), 'wrong shape: .*logits_dense'),
  ):
    with pytest.raises(ValueError, match=words):
      train(dataclasses.replace(run, **changes))
  with pytest.raises(ValueError, match='other settings.*train_data'):
    train(run, ([([3, 4], [5])] * 9, None))
  longer = dataclasses.replace(short, steps=6)
  _, lines = train(dataclasses.replace(run, training=longer))
  assert any(line.startswith('resumed at step 4') for line in lines)
  assert 'parameters after 6 steps' in lines[-1]


@pytest.mark.slow
def test_distillation_from_sources_and_references(tmp_path):
  """`specdec distil`, which distil_test.py tests, takes no references."""
  target, params = t5.T5(CONFIG), outputs_test.target_params()
  checkpoints.save_t5x(tmp_path / 'target.msgpack', params, step=0)
  learning = training.FromTarget(
    target,
    str(tmp_path / 'target.msgpack'),
    with_references=True,
    outputs=outputs.OutputsConfig(temperatures=(1.0,), batch_size=8),
  )
  model = t5.T5(dataclasses.replace(CONFIG, emb_dim=8))
  _, lines = train(make_run(tmp_path, model=model, learning=learning))
  made = len(outputs.read_outputs(tmp_path / 'model/outputs/train.jsonl'))
  assert 10 < made <= 80
  text = '\n'.join(lines)
  assert f'\n{made + 80} pairs' in text
  assert re.search(r'\neval step 4 agreement 0\.\d+ alpha 0\.', text), text


HEADS = Heads(2, 8, 8)
VOCABULARY = {'vocab_path': 'demo/vocab.model'}
TINY_LM = dict(emb_dim=16, num_heads=1, num_layers=1, head_dim=16, mlp_dim=16)
LM = GPT(GPTConfig(16, **TINY_LM))


def from_target(checkpoint_path='x', **changes):
  return training.FromTarget(MODEL, checkpoint_path, outputs=None, **changes)


@pytest.mark.parametrize(
  ('changes', 'field'),
  [
    (dict(train_file='nowhere.tsv'), "train_file: there is no file 'nowhere"),
    (dict(), 'either a train_file or a task'),
    (dict(init_checkpoint_path='no'), "init_checkpoint_path: .* 'no'"),
    (dict(train_file=__file__), 'vocab_path: expected'),
    (dict(vocab_path='no.model'), 'vocab_path: .*no.model'),
    (dict(model=LM, train_file='demo/input.txt', **VOCABULARY), 'below 16'),
    (dict(model=OTHER_IDS, learning=from_target()), 'target: .* of 8.* got 16'),
    (dict(model=HEADS), 'TrainRun.learning: .*FromTarget'),
    (dict(model=Heads(2, 9), learning=from_target()), 'emb_dim: .*8, got 9'),
  ],
)
def test_bad_input_is_refused_before_anything_is_written(
  tmp_path, changes, field
):
  with pytest.raises(ValueError, match=field):
    train(make_run(tmp_path, **changes), data=None)
  assert not (tmp_path / 'model').exists()


def test_texts_become_pairs(tmp_path, tokenizer):
  """JSONL with its own fields, cut; a file of lines of text, or of pairs."""
  network = small_vocabulary.network(1)
  lm = small_vocabulary.decoder_only(1)

  def run_of(text, network=network, vocab_path=tokenizer.path):
    (tmp_path / 'lines').write_text(text)
    return training.TrainRun(
      network, 'x', str(tmp_path / 'lines'), vocab_path=str(vocab_path)
    )

  many = ''.join(f'{text}\ta cat\n' for text in small_vocabulary.sentences())
  new = training_run.tokenizer_of(run_of(many, vocab_path=tmp_path / 'new'))
  assert new.vocab_size == small_vocabulary.VOCAB_SIZE
  ids = [tokenizer.encode(text) for text in ('the red dog', 'a cat')]
  for text, model, want in (
    ('the red dog\ta cat\n', network, ids),
    ('the red dog\n', lm, [[0], ids[0]]),
  ):
    pairs, _ = training_run.pairs_of(run_of(text, model))
    assert [[list(x) for x in pair] for pair in pairs] == [want]
  with pytest.raises(ValueError, match='lines.*example 2.*a target'):
    training_run.pairs_of(run_of('the red dog\ta cat\nthe red dog\n'))

  words = small_vocabulary.WORDS.split()
  texts = [(' '.join(words[i:]), words[i]) for i in range(len(words) - 2)]
  lines = [json.dumps({'long': text, 'short': word}) for text, word in texts]
  (tmp_path / 'all.jsonl').write_text('\n'.join(lines))
  paths = dict.fromkeys(['train', 'validation'], tmp_path / 'all.jsonl')
  fields = dict(inputs_field='long', targets_field='short')
  task = LocalTask('cut', paths, tokenizer.path, prefix='the ', **fields)
  lengths = {'task_feature_lengths': {'inputs': 6}}
  run = training.TrainRun(network, 'x', task=task, **lengths)
  pairs, held_out = training_run.pairs_of(run)
  first = tokenizer.encode('the ' + texts[0][0])[:5]
  assert len(first) == 5
  assert pairs[0][0].tolist() == first  # its end has the sixth place
  assert pairs[0][1].tolist() == tokenizer.encode(texts[0][1])
  assert len(held_out) == len(pairs) == len(texts)
  no_training = dataclasses.replace(task, files={'test': paths['train']})
  for changes, words in (
    (dict(task_feature_lengths={'summary': 6}), "'summary'.*'inputs', 'targ"),
    (dict(task=no_training), "'cut' has no split 'train'"),
  ):
    with pytest.raises(ValueError, match=words):
      training_run.pairs_of(dataclasses.replace(run, **changes))


def test_a_decoder_only_model_begins_as_it_is_read(tmp_path):
  """Of a BPE vocabulary by its end of sequence, not by id 0."""
  special = '<x>', small_vocabulary.END
  folder, _ = small_vocabulary.byte_level(tmp_path, special=special)
  tokenizer = Tokenizer(folder)
  assert tokenizer.eos_id == 1
  network = GPT(GPTConfig(tokenizer.vocab_size, **TINY_LM))
  lines = tmp_path / 'lines.txt'
  lines.write_text('the red dog\n' * 40)
  run = training.TrainRun(
    network,
    str(tmp_path / 'model'),
    str(lines),
    vocab_path=str(folder),
    packing=data.PackingConfig((1.0,), (16,), 256),
    training=TrainConfig(steps=40, learning_rate=0.03, warmup_steps=2),
  )
  params, _ = train(run, data=None)
  lengths = {'max_input_len': 16, 'max_decode_len': 8}
  engine = Engine(Model(network, params), tokenizer=tokenizer, **lengths)
  assert engine.bos_id == training_run.first_token(network, tokenizer) == 1
  (done,) = engine.generate([''])
  assert (done.text, done.finish_reason) == ('the red dog', 'stop')


def test_gin_files(tmp_path):
  path = tmp_path / 'pairs.tsv'
  path.touch()
  macros = ('MODEL_DIR', 'TRAIN_FILE', 'VOCAB_PATH', 'EVAL_FILE')
  given = [f'--gin.{macro}={path}' for macro in (*macros, 'CHECKPOINT_PATH')]
  for name in ('train', 'distill', 'train_lm', 'finetune', 'train_heads'):
    gin_flags.load([f'--gin_file=gin/runs/{name}.gin', *given])
    run = gin_flags.build(training.TrainRun)
    gin.clear_config()
    assert run.model_dir == str(path)
    assert run.network.vocab_size == 8000


@pytest.mark.slow
def test_script_goes_on_after_a_kill(tmp_path):
  """From text, with a vocabulary of its own, through a SIGKILL, to a file."""
  pairs, vocab = tmp_path / 'pairs.tsv', tmp_path / 'vocab' / 'vocab.model'
  lines = [f'{text}\t{text}\n' for text in small_vocabulary.sentences()]
  pairs.write_text(''.join(lines))
  model_dir, model = tmp_path / 'model', small_vocabulary.network(1)
  sizes = dataclasses.asdict(model.config)
  macros = {f'demo_target/t5.T5Config.{name}': x for name, x in sizes.items()}
  macros |= {'MODEL_DIR': model_dir, 'VOCAB_PATH': vocab, 'MINUTES': 0}
  macros |= {'TRAIN_FILE': pairs, 'EVAL_FILE': pairs, 'EVAL_EVERY': 30}
  macros |= {'BUCKETS': (64,), 'WEIGHTS': (1.0,), 'TOKENS_PER_BATCH': 256}
  command = [sys.executable, ROOT / 'scripts' / 'train.py']
  command += ['--gin_file=gin/runs/train.gin', '--steps=60', '--log-every=20']
  command += [f'--gin.{name}={value}' for name, value in macros.items()]
  command.append('--checkpoint-minutes=0')
  environment = os.environ | {
    'PYTHONPATH': str(ROOT),
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  }
  states = model_dir / 'train_states'
  with subprocess.Popen(
    command, env=environment, stderr=subprocess.DEVNULL
  ) as first:
    while not (states / '10').exists():
      assert first.poll() is None
      time.sleep(0.01)
    first.kill()
  assert not (model_dir / 'model.msgpack').exists()
  before = vocab.read_bytes()
  second = subprocess.run(
    command, env=environment, capture_output=True, text=True, timeout=300
  )
  assert second.returncode == 0, second.stderr
  assert 'resumed at step ' in second.stderr
  assert 'eval step 60 ' in second.stderr
  assert vocab.read_bytes() == before
  assert 'steps = 60' in (model_dir / 'operative_config.gin').read_text()
  checkpoints.load(model_dir / 'model.msgpack', model)


# --- Heads ---------------------------------------------------------------


@functools.cache
def target_params():
  """A target that is surer of itself than a random one."""
  params = MODEL.init(jax.random.key(1))
  params['decoder']['logits_dense']['kernel'] *= 4
  return params


def head_params():
  params = HEADS.init(jax.random.key(2))
  for i, head in enumerate(params.values()):
    head['wo']['kernel'] = 0.3 * jax.random.normal(jax.random.key(i), (8, 8))
  return params


def as_drafted(inputs, targets, late):
  """(alpha, agreement) of each head, place by place, as in decoding.

  The feature comes from the target's cache, one token after another; `late`
  takes that of an earlier token, which is wrong.
  """
  params, target = head_params(), target_params()
  found = collections.defaultdict(list)
  for row, tokens in zip(inputs, targets, strict=True):
    tokens = jnp.array([[0, *tokens[tokens >= 0]]])
    cache = MODEL.prefill(target, row[None], 16)
    wanted, features = [], jnp.zeros((1, 1, 8))
    for token in tokens[0, :-1]:
      feature, cache = MODEL.extend(target, cache, token[None, None])
      wanted.append(jax.nn.softmax(MODEL.head(target, feature)[0, 0]))
      features = jnp.append(features, feature, axis=1)
    for place, i in itertools.product(range(len(wanted)), range(2)):
      if place + i < len(wanted):
        # Head i has read the tokens up to place + i, of which none is its own.
        known = MODEL.embed(target, tokens[:, place : place + i + 1])
        feature = features[:, max(place - late, 0)]
        made = HEADS.apply(params, i, feature, known)
        law, want = (
          jax.nn.softmax(MODEL.head(target, made)[0]),
          wanted[place + i],
        )
        found[f'alpha_{i + 1}'].append(jnp.minimum(law, want).sum())
        found[f'agreement_{i + 1}'].append(law.argmax() == want.argmax())
  return {name: np.mean(values) for name, values in found.items()}


@pytest.mark.slow
def test_the_loss_sees_what_the_drafter_will_see():
  inputs = np.array([[3, 4, 1, 0, 0], [9, 1, 0, 0, 0]])
  targets = np.array([[5, 6, 7, 8, 1], [7, 3, 1, -1, -1]])
  objective = HeadDistillation(HEADS, MODEL, target_params())
  batch = data.Batch(jnp.array(inputs), jnp.array(targets))
  sums = jax.jit(objective.sums)(head_params(), batch)
  want, wrong = (as_drafted(inputs, targets, late) for late in (0, 1))
  found = {name: float(sums[name] / sums['tokens']) for name in want}
  assert found == pytest.approx(want, abs=1e-4)
  assert found['alpha_1'] != pytest.approx(wrong['alpha_1'], abs=1e-2)
  # Later heads weigh less.
  first, half, whole = (
    float(objective.replace(decay=decay).sums(head_params(), batch)['loss'])
    for decay in (0.0, 0.5, 1.0)
  )
  assert first < half == pytest.approx((first + whole) / 2)


def test_heads_are_trained_from_a_target(tmp_path):
  """Over sequences that count up; their file names its target."""
  rows = [range(n, n + size) for n in range(3, 10) for size in range(2, 6)]
  pairs = [(row, row) for row in rows] * 2
  target = str(tmp_path / 'target.msgpack')
  checkpoints.save_t5x(target, target_params(), 1)
  settings: dict = dict(learning_rate=0.05, warmup_steps=5)
  settings |= dict(eval_every=40, log_every=1)
  run = make_run(
    tmp_path,
    model=HEADS,
    packing=data.PackingConfig((1.0,), (8,), 64),
    training=TrainConfig(40, **settings),
    learning=from_target(checkpoint_path=target),
  )
  params, lines = train(run, (pairs, pairs))
  drafter = heads.load(tmp_path / 'model' / 'model.msgpack')
  assert drafter.made_for == (fingerprint(target_params()),)
  jax.tree.map(np.testing.assert_array_equal, drafter.params, params)
  found = re.findall(r'\n(?:step 1/|eval).* alpha_2 (\S+)', '\n'.join(lines))
  first, last = map(float, found)
  assert last > first + 0.05
  other = from_target(checkpoint_path=target, with_references=True)
  with pytest.raises(ValueError, match='learning.with_references'):
    train(dataclasses.replace(run, learning=other))
