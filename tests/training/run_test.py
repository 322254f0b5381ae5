"""`specdec train` and `training.train`: from files of pairs to checkpoints."""

import collections
import dataclasses
import functools
import itertools
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import small_vocabulary
from repository import ROOT
from specdec_jax import checkpoints, training
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.drafters import heads
from specdec_jax.drafters.heads import Heads
from specdec_jax.engine.engine import Engine
from specdec_jax.models import t5
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.model import Model
from specdec_jax.text.tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.training import data, trainer
from specdec_jax.training import run as training_run
from specdec_jax.training.losses import HeadDistillation
from specdec_jax.training.outputs import OutputsConfig, read_outputs
from specdec_jax.training.trainer import TrainConfig
from toy_training import CONFIG, copy_pairs

SMALL = dataclasses.replace(CONFIG, emb_dim=8, num_heads=1, mlp_dim=8)
MODEL = t5.T5(SMALL)
OTHER_IDS = t5.T5(dataclasses.replace(SMALL, vocab_size=8))


DATA = copy_pairs(80), copy_pairs(20)


def make_run(tmp_path, model=MODEL, **changes):
  packing = data.PackingConfig((1.0,), (16,), 64)
  changes = {'training': TrainConfig(steps=4, eval_every=4)} | changes
  model_dir = str(tmp_path / 'model')
  return training.TrainRun(model, model_dir, packing=packing, **changes)


@pytest.fixture
def quick(monkeypatch):
  """An optimiser that compiles quickly."""
  monkeypatch.setattr(trainer, 'make_optimizer', lambda _: optax.adam(1.0))


def train(run, data=DATA):
  lines = []
  return training.train(run, data, log=lines.append), lines


@pytest.mark.usefixtures('quick')
def test_a_run_begins_with_a_checkpoint_and_goes_on(tmp_path):
  """In its folder; another configuration does not."""
  first = small_vocabulary.weights(MODEL, 9)
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
    (dict(training=quicker), 'training.learning_rate was 1e-09, is 0.5'),
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


HEADS = Heads(2, 8, 8)
VOCABULARY = {'vocab_path': 'demo/vocab.model'}
TINY_LM = dict(emb_dim=16, num_heads=1, num_layers=1, head_dim=16, mlp_dim=16)
AFTER = training.FromTarget(MODEL, 'x')
LM = GPT(GPTConfig(16, **TINY_LM))


@pytest.mark.parametrize(
  ('changes', 'field'),
  [
    (dict(train_file='nowhere.tsv'), "train_file: there is no file 'nowhere"),
    (dict(), 'either a train_file or a task'),
    (dict(init_checkpoint_path='no'), "init_checkpoint_path: .* 'no'"),
    (dict(train_file=__file__), 'vocab_path: expected'),
    (dict(vocab_path='no.model'), 'vocab_path: .*no.model'),
    (dict(model=LM, train_file='demo/input.txt', **VOCABULARY), 'below 16'),
    (dict(model=OTHER_IDS, learning=AFTER), 'target: .* of 8.* got 16'),
    (dict(model=HEADS), '^learning: .*FromTarget'),
    (dict(model=Heads(2, 9), learning=AFTER), 'emb_dim: .*8, got 9'),
  ],
)
def test_bad_input_is_refused_before_it_writes(tmp_path, changes, field):
  with pytest.raises(ValueError, match=field):
    train(make_run(tmp_path, **changes), data=None)
  assert not (tmp_path / 'model').exists()


def test_texts_become_pairs(tmp_path, tokenizer):
  """JSONL with its own fields, cut; a file of lines of text, or of pairs."""
  network = small_vocabulary.network(1)
  lm = small_vocabulary.decoder_only()

  def pairs_of(text, network):
    (tmp_path / 'lines').write_text(text)
    files = {'train_file': f'{tmp_path}/lines', 'vocab_path': tokenizer.path}
    pairs, _ = training_run.pairs_of(training.TrainRun(network, 'x', **files))
    return [[list(ids) for ids in pair] for pair in pairs]

  ids = [tokenizer.encode(text) for text in ('the red dog', 'a cat')]
  assert pairs_of('the red dog\ta cat\n', network) == [ids]
  assert pairs_of('the red dog\n', lm) == [[[0], ids[0]]]
  with pytest.raises(ValueError, match='lines.*example 2.*a target'):
    pairs_of('the red dog\ta cat\nthe red dog\n', network)

  path = tmp_path / 'all.jsonl'
  path.write_text('{"long": "red dog runs here", "short": "a cat"}\n' * 3)
  paths = dict.fromkeys(['train', 'validation'], path)
  fields = dict(inputs_field='long', targets_field='short')
  task = LocalTask('cut', paths, tokenizer.path, prefix='the ', **fields)
  lengths = {'task_feature_lengths': {'inputs': 5}}
  run = training.TrainRun(network, 'x', task=task, **lengths)
  pairs, held_out = training_run.pairs_of(run)
  assert len(pairs) == len(held_out) == 3
  first = tokenizer.encode('the red dog runs here')
  assert len(first) > 4  # the end has the fifth place
  want = [first[:4], tokenizer.encode('a cat')]
  assert [x.tolist() for x in pairs[0]] == want
  no_training = dataclasses.replace(task, files={'test': path})
  for changes, words in (
    (dict(task_feature_lengths={'summary': 6}), "'inputs', 'targ.*'summary'"),
    (dict(task=no_training), "'cut' has no split 'train'"),
  ):
    with pytest.raises(ValueError, match=words):
      training_run.pairs_of(dataclasses.replace(run, **changes))


@pytest.mark.usefixtures('quick')
def test_a_decoder_only_model_begins_as_it_is_read(tmp_path):
  """Of a BPE vocabulary by its end of sequence, not by id 0."""
  special = '<x>', small_vocabulary.END
  folder, _ = small_vocabulary.byte_level(tmp_path, special=special)
  tokenizer = Tokenizer(folder)
  assert tokenizer.eos_id == 1
  network = GPT(GPTConfig(tokenizer.vocab_size, **TINY_LM))
  lines = tmp_path / 'lines.txt'
  lines.write_text('the red dog\n' * 40)
  settings = TrainConfig(steps=40, learning_rate=0.03, warmup_steps=2)
  files = {'train_file': str(lines), 'vocab_path': str(folder)}
  run = make_run(tmp_path, model=network, training=settings, **files)
  params, _ = train(run, data=None)
  engine = Engine(Model(network, params), tokenizer=tokenizer, max_decode_len=8)
  begin = training_run.first_token(network, tokenizer)
  assert engine.codec.bos_id == begin == 1
  (done,) = engine.generate([''])
  assert (done.text, done.finish_reason) == ('the red dog', 'stop')


@pytest.mark.slow
def test_script_goes_on_after_a_kill(tmp_path, monkeypatch):
  """From text, with a vocabulary of its own, through a SIGKILL, to a file."""
  pairs, vocab = tmp_path / 'pairs.tsv', tmp_path / 'vocab' / 'vocab.model'
  texts = small_vocabulary.sentences()
  pairs.write_text(''.join(f'{text}\t{text}\n' for text in texts))
  model_dir, model = tmp_path / 'model', small_vocabulary.network(1)
  sizes = dataclasses.asdict(model.config)
  macros = {f'demo_target/t5.T5Config.{name}': x for name, x in sizes.items()}
  macros |= {'MODEL_DIR': model_dir, 'VOCAB_PATH': vocab, 'MINUTES': 0}
  macros |= {'TRAIN_FILE': pairs, 'EVAL_FILE': pairs, 'EVAL_EVERY': 30}
  macros |= {'BUCKETS': (64,), 'WEIGHTS': (1.0,), 'TOKENS_PER_BATCH': 256}
  command = [sys.executable, ROOT / 'scripts' / 'train.py', '--steps=60']
  command += ['--gin_file=gin/runs/train.gin', '--checkpoint-minutes=0']
  command += [f'--gin.{name}={value}' for name, value in macros.items()]
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
  with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
    while not (model_dir / 'train_states' / '10').exists():
      assert first.poll() is None
      time.sleep(0.01)
    first.kill()
  assert not (model_dir / 'model.msgpack').exists()
  before = vocab.read_bytes()
  second = subprocess.run(command, stderr=subprocess.PIPE, text=True)
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

  The feature comes from the target's cache; `late` takes that of an earlier
  token, which is wrong.
  """
  params, target = head_params(), target_params()
  found = collections.defaultdict(list)
  for row, tokens in zip(inputs, targets, strict=True):
    tokens = jnp.array([[0, *tokens[tokens >= 0]]])
    cache = MODEL.prefill(target, row[None], 16)
    features, _ = MODEL.extend(target, cache, tokens[:, :-1])
    wanted = jax.nn.softmax(MODEL.head(target, features)[0])
    features = jnp.pad(features, ((0, 0), (1, 0), (0, 0)))
    for place, i in itertools.product(range(len(wanted)), range(2)):
      # Head i has read the tokens up to place + i, of which none is its own.
      known = MODEL.embed(target, tokens[:, place : place + i + 1])
      feature = features[:, max(place - late, 0)]
      made = HEADS.apply(params, i, feature, known)
      law = jax.nn.softmax(MODEL.head(target, made)[0])
      for want in wanted[place + i : place + i + 1]:  # none past the end
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


@pytest.mark.slow
def test_heads_are_trained_from_a_target(tmp_path):
  """By its outputs, and by what the data say; their file names its target."""
  rows = [range(n, n + size) for n in range(3, 10) for size in range(2, 6)]
  pairs = [(row, row) for row in rows] * 2
  target = str(tmp_path / 'target.msgpack')
  checkpoints.save_t5x(target, target_params(), 1)
  rates = {'learning_rate': 0.05, 'warmup_steps': 5}
  settings = TrainConfig(40, eval_every=40, log_every=1, **rates)
  both = {'outputs': OutputsConfig(batch_size=8, temperatures=(1.0,))}
  learning = training.FromTarget(MODEL, target, with_references=True, **both)
  run = make_run(tmp_path, model=HEADS, training=settings, learning=learning)
  params, lines = train(run, (pairs, pairs))
  text = '\n'.join(lines)
  made = read_outputs(tmp_path / 'model' / 'outputs' / 'train.jsonl')
  assert len(made) > 20 and f'\n{len(made) + len(pairs)} pairs' in text
  drafter = heads.load(tmp_path / 'model' / 'model.msgpack')
  assert drafter.made_for == (fingerprint(target_params()),)
  jax.tree.map(np.testing.assert_array_equal, drafter.params, params)
  found = re.findall(r'\n(?:step 1/|eval).* alpha_2 (\S+)', text)
  first, last = map(float, found)
  assert last > first + 0.05
