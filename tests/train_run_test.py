"""`specdec train` and `training.train`: from files of pairs to checkpoints."""

import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import gin
import jax
import numpy as np
import pytest

import small_vocabulary
import tokenizer_bpe_test
from specdec_jax import checkpoints, training
from specdec_jax.cli import gin_flags
from specdec_jax.engine.engine import Engine
from specdec_jax.models import t5
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.model import Model
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.training import data, outputs, trainer
from specdec_jax.training import run as training_run
from specdec_jax.training.pairs import TokenPairs, read_lines
from specdec_jax.training.trainer import OptimizerConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZE = dict(
  emb_dim=8,
  num_heads=1,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=8,
  mlp_dim=8,
)
MODEL = t5.T5(t5.T5Config(vocab_size=16, **SIZE))


@pytest.fixture
def arrays(tmp_path):
  """A file of token pairs whose targets repeat their sources."""
  rng = np.random.default_rng(0)
  rows = [rng.integers(3, 16, rng.integers(1, 6)).tolist() for _ in range(80)]
  path = tmp_path / 'pairs.npz'
  TokenPairs.from_lists(rows, rows).save(path)
  return str(path)


def make_run(tmp_path, arrays, **changes):
  defaults = dict(
    model=MODEL,
    model_dir=str(tmp_path / 'model'),
    train_file=arrays,
    eval_file=arrays,
    packing=data.PackingConfig((1.0,), (16,), 64),
    training=trainer.TrainConfig(steps=4, log_every=2, eval_every=4),
  )
  return training.TrainRun(**(defaults | changes))


def train(run):
  lines = []
  return training.train(run, log=lines.append), lines


def test_another_configuration_does_not_go_on_in_the_folder(tmp_path, arrays):
  run = make_run(tmp_path, arrays)
  _, lines = train(run)
  assert 'parameters after 4 steps' in lines[-1]
  other = str(tmp_path / 'other.npz')
  TokenPairs.from_lists([[3, 4]] * 9, [[5]] * 9).save(other)
  adamw = OptimizerConfig(learning_rate=0.5)
  for changes, name in (
    (dict(train_file=other), 'train_data'),
    (dict(packing=data.PackingConfig((1.0,), (8,), 64)), 'packing.buckets'),
    (
      dict(training=dataclasses.replace(run.training, optimizer=adamw)),
      'optimizer.learning_rate was 0.002, is 0.5',
    ),
    (dict(learning=training.Likelihood(z_loss=0.5)), 'learning.z_loss'),
  ):
    with pytest.raises(ValueError, match=f'other settings.*{name}'):
      train(dataclasses.replace(run, **changes))
  # A longer run is the same run.
  longer = dataclasses.replace(run.training, steps=6)
  _, lines = train(dataclasses.replace(run, training=longer))
  assert any(line.startswith('resumed at step 4') for line in lines)
  assert 'parameters after 6 steps' in lines[-1]


def test_a_run_begins_with_a_checkpoint(tmp_path, arrays):
  params = MODEL.init(jax.random.key(9))
  path = str(tmp_path / 'first.msgpack')
  checkpoints.save_t5x(path, params, step=0)
  slow = OptimizerConfig(learning_rate=1e-9)
  run = make_run(
    tmp_path,
    arrays,
    init_checkpoint_path=path,
    training=trainer.TrainConfig(steps=1, optimizer=slow),
  )
  found, _ = train(run)
  for leaf, wanted in zip(
    jax.tree.leaves(found), jax.tree.leaves(params), strict=True
  ):
    np.testing.assert_allclose(leaf, wanted, atol=1e-6)
  wider = t5.T5(t5.T5Config(vocab_size=32, **SIZE))
  with pytest.raises(ValueError, match='wrong shape: .*logits_dense'):
    train(dataclasses.replace(run, model=wider))


@pytest.mark.slow
def test_distillation_from_sources_to_a_drafter(tmp_path, arrays):
  target = t5.T5(t5.T5Config(vocab_size=16, **(SIZE | {'emb_dim': 16})))
  params = target.init(jax.random.key(1))
  kernel = params['decoder']['logits_dense']['kernel']
  params['decoder']['logits_dense']['kernel'] = 4.0 * kernel.at[:, 1].mul(1.5)
  path = str(tmp_path / 'target.msgpack')
  checkpoints.save_t5x(path, params, step=0)
  learning = training.FromTarget(
    target,
    path,
    slice_target=True,
    with_references=True,
    outputs=outputs.OutputsConfig(
      temperatures=(1.0,), batch_size=8, widths=(16,)
    ),
    num_eval_outputs=16,
    only_outputs=True,
  )
  run = make_run(tmp_path, arrays, learning=learning)
  nothing, _ = train(run)
  assert nothing is None
  made = TokenPairs.load(tmp_path / 'model/outputs/train.npz')
  assert 10 < len(made) <= 80
  learning = dataclasses.replace(learning, only_outputs=False)
  _, lines = train(dataclasses.replace(run, learning=learning))
  assert not any('ended by' in line for line in lines)  # outputs were there
  line = next(line for line in lines if line.startswith('eval step 4 '))
  assert ' alpha 0.' in line and ' agreement 0.' in line
  small = t5.T5(t5.T5Config(vocab_size=8, **SIZE))
  with pytest.raises(ValueError, match='FromTarget.target: .* of 8.* got 16'):
    dataclasses.replace(run, model=small)


@pytest.mark.parametrize(
  ('changes', 'field'),
  [
    (dict(train_file='nowhere.tsv'), "train_file: there is no file 'nowhere"),
    (dict(train_file=None), 'either a train_file or a task'),
    (dict(task='t'), 'either a train_file or a task'),
    (dict(init_checkpoint_path='no'), "init_checkpoint_path: .* 'no'"),
    (dict(train_file=__file__), 'vocab_path: expected'),
    (dict(export_dtype='int8'), "export_dtype is 'int8'"),
    (dict(model_dir=''), 'model_dir: expected a folder'),
    (dict(vocab_path='no.model'), 'vocab_path: .*no.model'),
    (dict(model=t5.T5(t5.T5Config(vocab_size=8, **SIZE))), 'below 8.* 3 to 15'),
  ],
)
def test_bad_input_is_refused_before_anything_is_written(
  tmp_path, arrays, changes, field
):
  with pytest.raises(ValueError, match=field):
    train(make_run(tmp_path, arrays, **changes))
  assert not (tmp_path / 'model').exists()


def test_a_local_task_is_trained_on(tmp_path):
  """JSONL with its own fields, cut, and with fewer places for targets."""
  tokenizer = small_vocabulary.train(tmp_path)
  words = small_vocabulary.WORDS.split()
  texts = [(' '.join(words[i:]), words[i]) for i in range(len(words) - 2)] * 4
  lines = [json.dumps({'long': text, 'short': word}) for text, word in texts]
  (tmp_path / 'all.jsonl').write_text('\n'.join(lines))
  paths = dict.fromkeys(['train', 'validation'], tmp_path / 'all.jsonl')
  fields = dict(inputs_field='long', targets_field='short')
  task = LocalTask('cut', paths, tokenizer.path, prefix='the ', **fields)
  run = training.TrainRun(
    model=small_vocabulary.network(1),
    model_dir=str(tmp_path / 'model'),
    task=task,
    task_feature_lengths={'inputs': 6},
    packing=data.PackingConfig(
      weights=(1.0,), buckets=(6,), max_targets=4, tokens_per_batch=96
    ),
    training=trainer.TrainConfig(
      steps=40,
      eval_every=40,
      log_every=20,
      optimizer=OptimizerConfig(learning_rate=0.03, warmup_steps=4),
    ),
  )
  pairs, held_out = training_run.pairs_of(run, None)
  first = tokenizer.encode('the ' + texts[0][0])[:5]
  assert len(first) == 5
  assert pairs[0][0].tolist() == first  # its end has the sixth place
  assert pairs[0][1].tolist() == tokenizer.encode(texts[0][1])
  assert len(held_out) == len(pairs) == len(texts)
  _, said = train(run)
  losses = re.findall(r'loss ([0-9.]+) lr', '\n'.join(said))
  assert float(losses[-1]) < 0.7 * np.log(small_vocabulary.VOCAB_SIZE)
  with pytest.raises(ValueError, match="'summary'.*Known: inputs, targets"):
    bad = dataclasses.replace(run, task_feature_lengths={'summary': 6})
    training_run.pairs_of(bad, None)
  no_training = dataclasses.replace(task, files={'test': paths['train']})
  with pytest.raises(ValueError, match="'cut' has no split 'train'"):
    training_run.pairs_of(dataclasses.replace(run, task=no_training), None)


def test_a_decoder_only_model_begins_as_it_is_read(tmp_path):
  """Of a BPE vocabulary by its end of sequence, not by id 0."""
  folder, _ = tokenizer_bpe_test.train(
    tmp_path, special=('<x>', '<|endoftext|>')
  )
  tokenizer = Tokenizer(folder)
  assert tokenizer.eos_id == 1
  size = dict(emb_dim=16, num_heads=1, num_layers=1, head_dim=16, mlp_dim=16)
  network = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **size))
  lines = tmp_path / 'lines.txt'
  lines.write_text('the red dog\n' * 40)
  run = training.TrainRun(
    network,
    str(tmp_path / 'model'),
    str(lines),
    vocab_path=str(folder),
    packing=data.PackingConfig((1.0,), (16,), 256),
    training=trainer.TrainConfig(
      steps=40, optimizer=OptimizerConfig(learning_rate=0.03, warmup_steps=2)
    ),
  )
  params, _ = train(run)
  engine = Engine(
    Model(network, params),
    tokenizer=tokenizer,
    max_input_len=16,
    max_decode_len=8,
  )
  assert engine.bos_id == training_run.first_token(network, tokenizer) == 1
  (done,) = engine.generate([''])
  assert (done.text, done.finish_reason) == ('the red dog', 'stop')


@pytest.mark.parametrize(
  ('name', 'macros', 'vocab_size'),
  [
    ('train', ['VOCAB_PATH'], 8000),
    ('distill', ['VOCAB_PATH', 'CHECKPOINT_PATH'], 8000),
    ('train_lm', ['VOCAB_PATH'], 8000),
    (
      'train_lm --gin.LEARNING=%FROM_TARGET --gin.MODEL=%GPT_600K',
      ['VOCAB_PATH', 'CHECKPOINT_PATH'],
      8000,
    ),
    ('finetune', ['EVAL_FILE', 'VOCAB_PATH'], 8000),
    (
      'finetune --gin.LEARNING=%FROM_TARGET --gin.MODEL=%DEMO_DRAFT',
      ['VOCAB_PATH', 'EVAL_FILE', 'CHECKPOINT_PATH'],
      8000,
    ),
    (
      'distill --gin.TARGET=%T5_1_1_BASE --gin.DRAFT=%T5_1_1_SMALL',
      ['VOCAB_PATH', 'CHECKPOINT_PATH'],
      32128,
    ),
  ],
)
def test_gin_files(name, macros, vocab_size, tmp_path):
  path = tmp_path / 'pairs.tsv'
  path.write_text('a\tb\n')
  given = ['MODEL_DIR', 'TRAIN_FILE', *macros]
  name, *sizes = name.split()
  flags = [f'--gin_file=gin/runs/{name}.gin', *sizes]
  with pytest.raises(ValueError, match='Required and not given: .*--model-dir'):
    gin_flags.load(flags)
  flags += [f'--gin.{macro}={path}' for macro in given]
  try:
    gin_flags.load(flags)
    run = gin_flags.build(training.TrainRun)
  finally:
    gin.clear_config()
  assert run.model.vocab_size == vocab_size
  read_from = run.task.files['train'] if run.task else run.train_file
  assert read_from == run.model_dir == str(path)
  if isinstance(run.learning, training.FromTarget):
    assert run.learning.target.vocab_size == vocab_size
    assert num_params(run.model) < num_params(run.learning.target)


def num_params(model):
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


TINY = """
from __gin__ import dynamic_registration
from specdec_jax.models import t5
from specdec_jax.training import data
from specdec_jax.training import trainer
include 'gin/runs/train.gin'
demo_target/t5.T5Config:
  vocab_size = 400
  emb_dim = 8
  num_heads = 1
  head_dim = 8
  num_encoder_layers = 1
  num_decoder_layers = 1
  mlp_dim = 8
data.PackingConfig:
  buckets = (64,)
  weights = (1.0,)
  tokens_per_batch = 256
trainer.TrainConfig:
  eval_every = 30
  log_every = 20
  checkpoint_steps = 10
  steps = 60
MINUTES = 0
"""


@pytest.mark.slow
def test_script_goes_on_after_a_kill(tmp_path):
  """From text, with a vocabulary of its own, through a SIGKILL, to a file."""
  rng = random.Random(0)
  words = [
    ''.join(rng.choices('abcdefgh', k=rng.randint(3, 7))) for _ in range(300)
  ]
  lines = [' '.join(rng.choices(words, k=4)) for _ in range(300)]
  pairs = tmp_path / 'pairs.tsv'
  pairs.write_text(''.join(f'{x}\t{x.upper()}\n' for x in lines))
  (tmp_path / 'tiny.gin').write_text(TINY)
  model_dir, vocab = tmp_path / 'model', tmp_path / 'vocab' / 'vocab.model'
  command = [
    sys.executable,
    ROOT / 'scripts' / 'train.py',
    f'--gin_file={tmp_path}/tiny.gin',
    f'--gin.MODEL_DIR={model_dir}',
    f'--gin.TRAIN_FILE={pairs}',
    f'--gin.EVAL_FILE={pairs}',
    f'--gin.VOCAB_PATH={vocab}',
  ]
  environment = os.environ | {
    'PYTHONPATH': str(ROOT),
    'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'xla'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  }
  states = model_dir / 'train_states'
  with subprocess.Popen(
    command, env=environment, stderr=subprocess.DEVNULL
  ) as first:
    deadline = time.monotonic() + 300
    while not (states / '10').exists() and time.monotonic() < deadline:
      assert first.poll() is None
      time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
  assert first.returncode == -signal.SIGKILL
  assert not (model_dir / 'model.msgpack').exists()
  kept = vocab.read_bytes()

  second = subprocess.run(
    command, env=environment, capture_output=True, text=True, timeout=300
  )
  assert second.returncode == 0, second.stderr
  assert 'resumed at step ' in second.stderr
  assert 'eval step 60 ' in second.stderr
  assert vocab.read_bytes() == kept
  assert 'steps = 60' in (model_dir / 'operative_config.gin').read_text()
  params = checkpoints.load(model_dir / 'model.msgpack')
  model = t5.T5(t5.T5Config(vocab_size=400, **SIZE))
  checkpoints.check_params(
    params, jax.eval_shape(model.init, jax.random.key(0))
  )


def test_lines_without_text(tmp_path):
  (tmp_path / 'empty.txt').write_text('\n \n')
  with pytest.raises(ValueError, match='no line with text'):
    read_lines(tmp_path / 'empty.txt')
