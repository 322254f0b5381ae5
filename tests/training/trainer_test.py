"""Data, losses, slices of a target, the loop and its resume."""

import copy
import dataclasses
import functools
import itertools
import logging
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import small_vocabulary
from specdec_jax.models import t5
from specdec_jax.training import data, losses, trainer
from specdec_jax.training.outputs import OutputsConfig
from specdec_jax.training.own_drafter import decoder_layers
from specdec_jax.training.trainer import TrainConfig
from toy_training import CONFIG, MODEL, Killed, copy_pairs, packing

LOGITS = 3.0 * np.random.default_rng(0).normal(size=(2, 2, 3, 7))


def test_settings_that_cannot_be():
  for make, field in (
    (lambda: packing(max_targets=1), 'max_targets: '),
    (lambda: packing(weights=(0.0,)), 'weights: '),
    (lambda: packing(tokens_per_batch=11), 'tokens_per_batch: '),
    (lambda: TrainConfig(learning_rate=0.0), 'learning_rate: '),
    (lambda: TrainConfig(steps=0), 'steps: '),
    (lambda: OutputsConfig(temperatures=(-1.0,)), 'temperatures: '),
    (lambda: OutputsConfig(max_extra=0), 'max_extra: '),
    (lambda: data.PackedBatches(copy_pairs(), packing(buckets=(1,))), '400'),
  ):
    with pytest.raises(ValueError, match=field):
      make()


def test_an_epoch_holds_each_pair_once():
  pairs = copy_pairs()
  batches = data.PackedBatches(pairs, packing())
  rows, shapes = [], set()
  for batch in batches.epoch(0):
    np.testing.assert_array_equal(batch.inputs, np.maximum(batch.targets, 0))
    rows += batch.inputs.reshape(-1, batch.inputs.shape[-1]).tolist()
    shapes.add(batch.inputs.shape)
  assert shapes == {batch.inputs.shape for batch in batches.empty_batches()}
  texts = [[token for token in row if token > 1] for row in rows]
  assert sum(map(len, texts)) == sum(len(row) for row, _ in pairs)
  # Weights (.5, .5): two examples for three pairs, within sampling noise.
  assert 0.60 < sum(row.count(1) for row in rows) / len(pairs) < 0.75
  examples = [source for source, _ in batches.examples()]
  assert sorted(examples) == sorted(text for text in texts if text)


def test_cross_entropy_and_z_loss():
  """The latter is added in training alone."""
  logits = LOGITS[0]
  targets = jnp.array([[0, 6, 2], [3, 3, 5]])
  model = types.SimpleNamespace(logits=lambda *args, **kwargs: logits)
  objective = losses.CrossEntropy(model, z_loss=1e-2)
  logs = jax.nn.log_softmax(logits)
  nats = -jnp.take_along_axis(logs, targets[..., None], -1).sum()
  squared = 1e-2 * jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2)
  batch = data.Batch(targets, targets)
  for key, want in ((None, nats), (0, nats + squared)):
    have = objective.sums({}, batch, key)['loss']
    np.testing.assert_allclose(have, want, rtol=1e-5)


def test_what_is_read_first_and_what_counts():
  targets = jnp.array([[5, 0, 7, 1, -1], [0, 1, -1, -1, -1]])
  fed, wanted, counts = losses.teacher_forced(targets, 9)
  assert fed.tolist() == [[9, 5, 0, 7, 1], [9, 0, 1, 0, 0]]
  assert wanted.tolist() == [[5, 0, 7, 1, 0], [0, 1, 0, 0, 0]]
  assert counts.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
  # Where texts begin with nothing, the first token is only read.
  later = losses.teacher_forced(targets, None)
  for have, want in zip(later, (fed, wanted, counts), strict=True):
    assert have.tolist() == want[:, 1:].tolist()


def test_distillation_is_the_divergence_both_ways():
  have, alpha = losses.distillation(*LOGITS)
  draft, target = jax.nn.softmax(LOGITS)
  forward = jnp.sum(target * jnp.log(target / draft), axis=-1)
  reverse = jnp.sum(draft * jnp.log(draft / target), axis=-1)
  distance = 0.5 * jnp.sum(jnp.abs(target - draft), axis=-1)
  np.testing.assert_allclose(have, forward + reverse, rtol=1e-4)
  np.testing.assert_allclose(alpha, 1 - distance, rtol=1e-4)


def test_layers_of_a_decoder():
  """All of them, beside the target's encoder, are the target."""
  config = dataclasses.replace(CONFIG, num_decoder_layers=3)
  alone = dataclasses.replace(config, num_encoder_layers=0)
  target, draft = t5.T5(config), t5.T5(alone)
  params = small_vocabulary.weights(target, 0)
  ids = jnp.array([[3, 4, 1], [5, 1, 0]])
  encoded = target.encode(params, ids)
  have = draft.logits(decoder_layers(params, 3), ids, ids, encoded=encoded)
  want = target.logits(params, ids, ids)
  np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
  ends = decoder_layers(params, 2)['decoder']
  assert ends['layers_1'] is params['decoder']['layers_2']


@functools.cache
def compiled_trainer():
  """A trainer whose programs are compiled once."""
  config = TrainConfig(learning_rate=1e-2, warmup_steps=5)
  config_of_data = packing(buckets=(12,), tokens_per_part=96)
  batches = data.PackedBatches(copy_pairs(), config_of_data)
  held_out = data.PackedBatches(copy_pairs(50, 1), config_of_data)
  objective = losses.CrossEntropy(MODEL, z_loss=1e-4)
  return trainer.Trainer(objective, config, batches, held_out)


@functools.cache
def first_params():
  return MODEL.init(jax.random.key(0))


def train(folder, loop=None, params=None, die_at=0, until=math.inf, **changes):
  """The last state and the lines of a run, perhaps one that dies at a step."""
  loop = copy.copy(loop or compiled_trainer())
  defaults = dict(steps=12, eval_every=6, log_every=1, checkpoint_minutes=60.0)
  loop.config = dataclasses.replace(loop.config, **(defaults | changes))
  lines = []

  def log(line):
    lines.append(line)
    if line.startswith(f'step {die_at}/'):
      raise Killed

  loop._log = log
  return loop.train(params or first_params(), folder, until), lines


def test_matrices_between_activations_get_muon():
  """Their update is nearly orthogonal; AdamW's first is of one size."""
  kernel = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  others = 'token_embedder', 'position_embedder', 'logits_dense', 'relpos_bias'
  params = {name: {'kernel': kernel} for name in ('wi', *others)}
  params['norm'] = {'scale': kernel[0]}
  optimizer = trainer.make_optimizer(0.0)
  updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
  values = np.linalg.svd(updates.pop('wi')['kernel'], compute_uv=False)
  assert values.max() < 2 * values.min()
  values = np.linalg.svd(kernel, compute_uv=False)
  assert values.max() > 2 * values.min()  # the control
  for update in jax.tree.leaves(updates):
    np.testing.assert_allclose(abs(update), abs(update).max(), rtol=1e-3)


def test_learning_rate():
  config = TrainConfig(learning_rate=1.0, warmup_steps=3)
  steps = ((0, 0.0), (1, 0.0), (3, 0.0), (9, 0.5), (9, 1.0))
  rates = [trainer.learning_rate(config, *step) for step in steps]
  np.testing.assert_allclose(rates, [0.25, 0.5, 1.0, 0.5, 0.0], atol=1e-9)


def test_all_is_compiled_before_the_clock_starts(caplog, monkeypatch, tmp_path):
  loop = copy.copy(compiled_trainer())
  loop._optimizer = optax.sgd(1.0)
  update = functools.partial(trainer._update, loop._optimizer)
  loop._update = jax.jit(update, donate_argnums=0)
  before, compile_all = [], trainer.Trainer.compile

  def compiled(self, state):
    compile_all(self, state)
    before.append(caplog.text)
    caplog.clear()

  monkeypatch.setattr(trainer.Trainer, 'compile', compiled)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    with pytest.raises(Killed):
      train(tmp_path, loop, die_at=7, checkpoint_minutes=0.0)
    assert 'compilation of jit(_update)' in before[0]
    assert 'compilation of jit(_' not in caplog.text
    # Neither before nor after: a restored state needs no other programs.
    train(tmp_path, loop)
  assert 'compilation of jit(_' not in before[1] + caplog.text


def test_parts_give_the_gradient_of_the_whole():
  loop = compiled_trainer()
  batch = next(loop._train_data.epoch())
  assert batch.targets.shape[0] > 1
  whole = data.Batch(*(x.reshape(1, -1, x.shape[-1]) for x in batch[:2]))
  (parts, sums), (gradient, wanted) = (
    loop._gradient(loop._objective, first_params(), rows, jax.random.key(0))
    for rows in (batch, whole)
  )
  np.testing.assert_allclose(sums['loss'], wanted['loss'], rtol=1e-5)
  close = functools.partial(np.testing.assert_allclose, atol=1e-5)
  jax.tree.map(close, parts, gradient)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
  wanted, _ = train(tmp_path / 'whole')
  folder = tmp_path / 'killed'
  with pytest.raises(Killed):
    train(folder, die_at=7, checkpoint_minutes=0.0)
  state, lines = train(folder)
  assert lines[0].startswith('resumed at step 6')
  assert int(state.step) == 12
  state = state.replace(elapsed_s=wanted.elapsed_s)
  jax.tree.map(np.testing.assert_array_equal, state, wanted)
  loop = copy.copy(compiled_trainer())
  loop._optimizer = optax.sgd(1.0, momentum=0.9)
  with pytest.raises(ValueError, match='belongs to another model or optim'):
    train(folder, loop)


@pytest.mark.parametrize('limit', [{'max_minutes': 0.03}, {'until': 1.8}])
def test_a_time_budget_ends_the_run_and_its_curve(monkeypatch, tmp_path, limit):
  # Each look at this clock takes 0.1 s, whatever else the machine does.
  ticks = itertools.count()
  clock = types.SimpleNamespace(monotonic=lambda: 0.1 * next(ticks))
  monkeypatch.setattr(trainer, 'time', clock)
  never = dict.fromkeys(('steps', 'eval_every'), 10**9)
  state, lines = train(tmp_path, **limit, **never)
  assert 0 < int(state.step) <= 18  # 1.8 s, a look or more a step
  rates = [*map(float, re.findall(r' lr (\S+)', '\n'.join(lines)))]
  assert rates[-1] < 0.3 * max(rates)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
  params = jax.tree.map(lambda x: x * np.nan, first_params())
  with pytest.raises(FloatingPointError, match='loss at step 0 is nan'):
    train(tmp_path, params=params)
