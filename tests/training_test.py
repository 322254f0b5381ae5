"""Data, losses, the loop and its resume."""

import copy
import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import subprocess
import sys
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specdec_jax.models import t5
from specdec_jax.training import data, losses, optimizer, trainer
from specdec_jax.training.pairs import TokenPairs, read_tsv

ROOT = pathlib.Path(__file__).resolve().parents[1]

CONFIG = t5.T5Config(
  vocab_size=16,
  emb_dim=16,
  num_heads=2,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=8,
  mlp_dim=32,
)
MODEL = t5.T5(CONFIG)


def copy_pairs(number=400, seed=0):
  """Targets repeat their sources: something to learn in seconds."""
  rng = np.random.default_rng(seed)
  rows = [
    rng.integers(3, 16, rng.integers(1, 6)).tolist() for _ in range(number)
  ]
  return TokenPairs.from_lists(rows, rows)


def packing(**changes):
  defaults = dict(buckets=(6, 12), tokens_per_batch=192, weights=(0.5, 0.5))
  return data.PackingConfig(**(defaults | changes))


OPTIMIZERS = {
  name: optimizer.OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=5)
  for name in optimizer.OPTIMIZERS
}


@functools.cache
def compiled_trainer(name):
  """One trainer for each optimiser: its programs are compiled once."""
  config = trainer.TrainConfig(ema_decay=0.9, optimizer=OPTIMIZERS[name])
  config_of_data = packing(buckets=(12,), tokens_per_part=96)
  batches = data.PackedBatches(copy_pairs(), config_of_data)
  held_out = data.PackedBatches(
    copy_pairs(50, 1), config_of_data, keep_all=True
  )
  objective = trainer.CrossEntropy(MODEL, z_loss=1e-4)
  return trainer.Trainer(objective, config, batches, held_out)


@functools.cache
def first_params():
  return MODEL.init(jax.random.key(0))


def make_trainer(name='adamw', **changes):
  """A trainer for a run of its own, its first parameters, and its lines."""
  loop = copy.copy(compiled_trainer(name))
  defaults = dict(steps=12, eval_every=6, log_every=4, checkpoint_minutes=0.0)
  loop.config = dataclasses.replace(loop.config, **(defaults | changes))
  lines = []
  loop._log = lines.append
  return loop, first_params(), lines


def assert_same(tree, other):
  leaves, others = jax.tree.leaves(tree), jax.tree.leaves(other)
  assert len(leaves) == len(others) > 0
  for leaf, wanted in zip(leaves, others, strict=True):
    np.testing.assert_array_equal(leaf, wanted)


class TestData:
  def test_npz_round_trip(self, tmp_path):
    pairs = TokenPairs.from_lists([[3, 4], [], [5]], [[6], [7, 8], [9]])
    pairs.save(tmp_path / 'pairs.npz')
    loaded = TokenPairs.load(tmp_path / 'pairs.npz')
    assert len(loaded) == 3
    assert [x.tolist() for x in loaded[1]] == [[], [7, 8]]
    assert [x.tolist() for x in loaded[2]] == [[5], [9]]
    assert loaded.inputs.dtype == np.int32

  def test_broken_npz_is_named(self, tmp_path):
    path = tmp_path / 'pairs.npz'
    with pytest.raises(ValueError, match='No token arrays'):
      TokenPairs.load(path)
    copy_pairs().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match='not a whole .npz'):
      TokenPairs.load(path)
    np.savez(path, inputs=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match='lacks the arrays'):
      TokenPairs.load(path)
    good = copy_pairs()
    np.savez(
      path,
      inputs=good.inputs,
      inputs_offsets=good.inputs_offsets + 1,
      targets=good.targets,
      targets_offsets=good.targets_offsets,
    )
    with pytest.raises(ValueError, match='inputs_offsets must rise'):
      TokenPairs.load(path)

  def test_tsv_line_without_two_columns_is_named(self, tmp_path):
    path = tmp_path / 'pairs.tsv'
    path.write_text('a\tb\nonly one\n', encoding='utf-8')
    with pytest.raises(ValueError, match='line 2 has 1 columns'):
      read_tsv(path)

  def test_an_epoch_holds_each_pair_once(self):
    pairs = copy_pairs()
    batches = data.PackedBatches(pairs, packing(), keep_all=True)
    sources, ends = 0, 0
    for batch in batches.epoch(0):
      np.testing.assert_array_equal(batch.inputs, batch.targets)
      sources += int((batch.inputs > 1).sum())
      ends += int((batch.inputs == 1).sum())
    assert sources == len(pairs.inputs)
    # Weights (.5, .5): two examples for three pairs, within sampling noise.
    assert 0.60 < ends / len(pairs) < 0.75

  def test_examples_are_those_of_the_batches(self):
    pairs = copy_pairs()
    batches = data.PackedBatches(pairs, packing(), keep_all=True)
    joined = batches.examples()
    assert len(joined.inputs) == len(pairs.inputs)
    wanted = [x.tolist() for x, _ in (joined[i] for i in range(len(joined)))]
    rows = [
      [token for token in row.tolist() if token > 1]
      for batch in batches.epoch(0)
      for row in batch.inputs.reshape(-1, batch.inputs.shape[-1])
    ]
    assert sorted(wanted) == sorted(row for row in rows if row)
    shapes = {batch.inputs.shape for batch in batches.epoch(0)}
    assert shapes == {shape.inputs for shape in batches.shapes()}

  def test_packing_weights(self):
    pairs = TokenPairs.from_lists([[3]] * 3000, [[4]] * 3000)
    config = packing(weights=(0.4, 0.3, 0.2, 0.1), buckets=(8,))
    rows = np.concatenate(
      [
        batch.targets.reshape(-1, 8)
        for batch in data.PackedBatches(pairs, config).epoch(0)
      ]
    )
    joined = (rows == 4).sum(axis=1)
    share = np.bincount(joined, minlength=5)[1:] / len(rows)
    np.testing.assert_allclose(share, config.weights, atol=0.05)
    assert np.all(rows[np.arange(len(rows)), joined] == 1)

  def test_batches_depend_on_seed_and_step_alone(self):
    pairs = copy_pairs()
    one = data.PackedBatches(pairs, packing())
    other = data.PackedBatches(pairs, packing())
    late = other.batch(40)
    for step in range(41):
      early = one.batch(step)
    assert_same(early, late)
    assert one.epochs_done(40) > 1
    changed = data.PackedBatches(pairs, packing(seed=1)).batch(40)
    assert changed.inputs.shape != late.inputs.shape or np.any(
      changed.inputs != late.inputs
    )

  def test_too_long_pairs_are_dropped_or_refused(self):
    pairs = TokenPairs.from_lists([[3] * 12, [3]], [[4], [4]])
    assert data.PackedBatches(pairs, packing()).num_dropped == 1
    with pytest.raises(ValueError, match='None of the 2 pairs'):
      data.PackedBatches(pairs, packing(buckets=(1,)))

  def test_targets_have_their_own_number_of_places(self):
    sources = [[3] * 10, [4] * 5, [5] * 9, [6] * 2]
    targets = [[7] * 3, [8], [9] * 4, [10] * 2]
    config = packing(max_targets=4, weights=(0.0, 1.0))
    batches = data.PackedBatches(
      TokenPairs.from_lists(sources, targets), config, keep_all=True
    )
    assert batches.num_dropped == 1  # four tokens and their end are five
    rows = []
    for batch in batches.epoch(0):
      *_, length = batch.inputs.shape
      assert batch.targets.shape == (*batch.inputs.shape[:2], min(length, 4))
      rows += batch.targets.reshape(-1, batch.targets.shape[-1]).tolist()
    assert {batch.inputs.shape for batch in batches.epoch(0)} <= {
      shape.inputs for shape in batches.shapes()
    }
    # Whatever was joined has room for all of it and one end.
    kept = sorted(token for row in rows for token in row if token > 1)
    assert kept == [7, 7, 7, 8, 10, 10]
    assert sum(row.count(1) for row in rows) == sum(map(any, rows))
    with pytest.raises(ValueError, match=r'max_targets is 1; expected 0, or'):
      packing(max_targets=1)

  def test_training_needs_no_text_package(self, tmp_path):
    """With sentencepiece, seqio, TensorFlow and gin out of reach."""
    copy_pairs().save(tmp_path / 'pairs.npz')
    script = textwrap.dedent(
      """
      import sys
      for name in ('sentencepiece', 'seqio', 'tensorflow', 'gin'):
        sys.modules[name] = None
      import jax
      from specdec_jax import training
      from specdec_jax.models import t5
      from specdec_jax.training import data, trainer
      size = dict(vocab_size=16, emb_dim=8, num_heads=1, head_dim=8, mlp_dim=8)
      training.train(training.TrainRun(
        model=t5.T5(t5.T5Config(
          num_encoder_layers=1, num_decoder_layers=1, **size)),
        model_dir=sys.argv[2],
        train_file=sys.argv[1],
        packing=data.PackingConfig(buckets=(16,), tokens_per_batch=64),
        training=trainer.TrainConfig(steps=1, log_every=1),
      ))
      """
    )
    model_dir = tmp_path / 'model'
    done = subprocess.run(
      [sys.executable, '-c', script, tmp_path / 'pairs.npz', model_dir],
      cwd=ROOT,
      env=os.environ | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'xla')},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'step 1/1 loss ' in done.stderr
    assert (model_dir / 'model.msgpack').exists()


class TestLosses:
  @pytest.mark.parametrize('smoothing', [0.0, 0.1])
  def test_cross_entropy_is_what_optax_and_autodiff_find(self, smoothing):
    key = jax.random.key(0)
    logits = 3.0 * jax.random.normal(key, (2, 3, 7))
    targets = jnp.array([[0, 6, 2], [3, 3, 5]])
    weights = jnp.array([[1.0, 0.0, 2.0], [0.5, 1.0, 1.0]])

    def ours(logits):
      nats = losses.cross_entropy(logits, targets, smoothing, 1e-2)
      return jnp.sum(nats * weights)

    def theirs(logits):
      labels = optax.smooth_labels(jax.nn.one_hot(targets, 7), smoothing)
      nats = optax.softmax_cross_entropy(logits, labels)
      nats += 1e-2 * jax.nn.logsumexp(logits, axis=-1) ** 2
      return jnp.sum(nats * weights)

    value, gradient = jax.jit(jax.value_and_grad(ours))(logits)
    wanted, wanted_gradient = jax.jit(jax.value_and_grad(theirs))(logits)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-5)


class TestOptimizer:
  def test_curve(self):
    config = optimizer.OptimizerConfig(learning_rate=1.0, warmup_steps=3)
    rates = [optimizer.learning_rate(config, i, 0.0) for i in range(5)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1.0, 1.0])
    assert optimizer.learning_rate(config, 9, 0.5) == pytest.approx(0.5)
    assert optimizer.learning_rate(config, 9, 1.0) == pytest.approx(0.0)

  def test_unknown_name_is_refused(self):
    with pytest.raises(ValueError, match="'sgd'; expected one of adamw, muon"):
      optimizer.OptimizerConfig(name='sgd')


class TestTrainer:
  @pytest.mark.parametrize(
    'name',
    [
      pytest.param(name, marks=[] if name == 'adamw' else pytest.mark.slow)
      for name in optimizer.OPTIMIZERS
    ],
  )
  def test_loss_falls(self, name):
    loop, params, lines = make_trainer(name, steps=150, eval_every=150)
    before = loop.evaluate(params)
    state = loop.train(params)
    after = loop.evaluate(loop.export_params(state))
    assert before['loss'] > 2.5
    assert after['loss'] < 0.7 * before['loss']
    assert after['accuracy'] > before['accuracy'] + 0.2
    assert any(line.startswith('eval step 150 ') for line in lines)

  def test_all_is_compiled_before_the_clock_starts(
    self, caplog, monkeypatch, tmp_path
  ):
    loop, params, _ = make_trainer(checkpoint_steps=6)
    loop._optimizer = optax.sgd(1.0)
    loop._update = jax.jit(
      functools.partial(trainer._update, loop._optimizer, 0.9),
      donate_argnums=0,
    )
    before = []

    class Clock(trainer._Clock):
      def __init__(self, already_s):
        before.append(caplog.text)
        caplog.clear()
        super().__init__(already_s)

    monkeypatch.setattr(trainer, '_Clock', Clock)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
      loop.train(params, tmp_path, stop_after=7)
      assert 'compilation of jit(_update)' in before[0]
      assert 'compilation of jit(_' not in caplog.text
      # Neither before nor after: a restored state needs no other programs.
      loop.train(params, tmp_path)
    assert 'compilation of jit(_' not in before[1] + caplog.text

  def test_parts_give_the_gradient_of_the_whole(self):
    loop, params, _ = make_trainer()
    batch = loop._train_data.batch(0)
    assert batch.targets.shape[0] > 1
    whole = data.Batch(*(x.reshape(1, -1, x.shape[-1]) for x in batch))
    key = jax.random.key(0)
    parts, sums = loop._gradient(loop._objective, params, batch, key)
    one, one_sums = loop._gradient(loop._objective, params, whole, key)
    np.testing.assert_allclose(sums['loss'], one_sums['loss'], rtol=1e-5)
    for part, leaf in zip(
      jax.tree.leaves(parts), jax.tree.leaves(one), strict=True
    ):
      np.testing.assert_allclose(part, leaf, atol=1e-5)

  @pytest.mark.parametrize('name', optimizer.OPTIMIZERS)
  def test_resumed_run_equals_an_uninterrupted_one(self, name, tmp_path):
    loop, params, _ = make_trainer(name)
    wanted = loop.train(params)
    loop, params, _ = make_trainer(name, checkpoint_steps=5)
    killed = loop.train(params, tmp_path, stop_after=7)
    assert int(killed.step) == 7
    loop, params, lines = make_trainer(name)
    state = loop.train(params, tmp_path)
    assert lines[0].startswith('resumed at step 5')
    assert int(state.step) == 12
    assert_same(state, wanted)

  def test_a_state_of_another_optimizer_is_refused(self, tmp_path):
    loop, params, _ = make_trainer(steps=1)
    loop.train(params, tmp_path)
    loop, params, _ = make_trainer('muon')
    with pytest.raises(ValueError, match='belongs to another model or optim'):
      loop.train(params, tmp_path)

  def test_a_time_budget_ends_the_run_and_its_curve(self, monkeypatch):
    # Each look at this clock takes 0.1 s, whatever else the machine does.
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: 0.1 * next(ticks))
    monkeypatch.setattr(trainer, 'time', clock)
    loop, params, lines = make_trainer(
      steps=10**9, max_minutes=0.03, log_every=1, eval_every=10**9
    )
    state = loop.train(params)
    assert 0 < int(state.step) <= 18  # 1.8 s, a look or more a step
    rates = [
      float(line.split(' lr ')[1].split()[0])
      for line in lines
      if ' lr ' in line
    ]
    assert rates[-1] < 0.2 * max(rates)

  def test_a_measurement_is_reported_and_takes_no_training_time(self):
    clock = trainer._Clock(0.0)
    with clock.paused():
      time.sleep(0.05)
    assert clock.elapsed_s < 0.05
    loop, params, lines = make_trainer(steps=1)
    loop._measure = lambda params: {'leaves': len(jax.tree.leaves(params))}
    loop.train(params)
    number = len(jax.tree.leaves(params))
    assert f' leaves {number}.0000' in next(x for x in lines if 'eval' in x)

  def test_a_loss_that_is_not_finite_stops_the_run(self):
    loop, params, _ = make_trainer()
    params = jax.tree.map(lambda x: x * np.nan, params)
    with pytest.raises(FloatingPointError, match='loss at step 0 is nan'):
      loop.train(params)
