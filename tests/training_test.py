"""Data, losses, slices of a target, the loop and its resume."""

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
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from small_vocabulary import weights as random_weights
from specdec_jax.models import t5
from specdec_jax.training import data, losses, trainer
from specdec_jax.training.losses import DistillationWeights
from specdec_jax.training.pairs import TokenPairs, read_tsv
from specdec_jax.training.slicing import sliced
from specdec_jax.training.trainer import OptimizerConfig

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


def assert_same(tree, other):
  leaves, others = jax.tree.leaves(tree), jax.tree.leaves(other)
  assert len(leaves) == len(others) > 0
  for leaf, wanted in zip(leaves, others, strict=True):
    np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize(
  ('make', 'field'),
  [
    (lambda: packing(max_targets=1), 'PackingConfig.max_targets'),
    (lambda: packing(weights=(0.0,)), 'PackingConfig.weights'),
    (lambda: packing(buckets=(8, 8)), 'PackingConfig.buckets'),
    (lambda: packing(tokens_per_batch=11), 'PackingConfig.tokens_per_batch'),
    (lambda: DistillationWeights(0.0, 0.0, 0.0), 'DistillationWeights'),
    (lambda: OptimizerConfig(name='sgd'), 'OptimizerConfig.name'),
    (lambda: OptimizerConfig(learning_rate=0.0), 'learning_rate'),
    (lambda: TokenPairs.from_lists([[1]], []), 'TokenPairs.targets'),
    (lambda: data.PackedBatches(copy_pairs(), packing(buckets=(1,))), '400'),
  ],
)
def test_settings_that_cannot_be(make, field):
  with pytest.raises(ValueError, match=field):
    make()


class TestData:
  def test_npz(self, tmp_path):
    """A file comes back as it was; a broken one is named."""
    path = tmp_path / 'pairs.npz'
    with pytest.raises(ValueError, match='pairs.npz.*whole .npz'):
      TokenPairs.load(path)
    pairs = TokenPairs.from_lists([[3, 4], [], [5]], [[6], [7, 8], [9]])
    pairs.save(path)
    loaded = TokenPairs.load(path)
    assert [x.tolist() for x in loaded[1]] == [[], [7, 8]]
    assert len(list(loaded)) == len(loaded) == 3
    assert loaded.inputs.dtype == np.int32
    arrays = dataclasses.asdict(pairs)
    for change, words in (
      ({'targets': None}, 'Without targets'),
      ({'inputs_offsets': pairs.inputs_offsets + 1}, 'TokenPairs.inputs'),
      ({'targets_offsets': pairs.targets_offsets[:-1]}, 'TokenPairs.targets'),
    ):
      changed = {k: v for k, v in (arrays | change).items() if v is not None}
      np.savez(path, **changed)
      with pytest.raises(ValueError, match=f'pairs.npz.*{words}'):
        TokenPairs.load(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match='pairs.npz.*whole .npz'):
      TokenPairs.load(path)

  def test_tsv_line_without_two_columns_is_named(self, tmp_path):
    path = tmp_path / 'pairs.tsv'
    path.write_text('a\tb\nonly one\n', encoding='utf-8')
    with pytest.raises(ValueError, match='line 2.*1 columns'):
      read_tsv(path)

  def test_an_epoch_holds_each_pair_once(self):
    pairs = copy_pairs()
    batches = data.PackedBatches(pairs, packing(), keep_all=True)
    rows, shapes = [], set()
    for batch in batches.epoch(0):
      np.testing.assert_array_equal(batch.inputs, np.maximum(batch.targets, 0))
      rows += batch.inputs.reshape(-1, batch.inputs.shape[-1]).tolist()
      shapes.add(batch.inputs.shape)
    assert shapes == {shape.inputs for shape in batches.shapes()}
    texts = [[token for token in row if token > 1] for row in rows]
    assert sum(map(len, texts)) == len(pairs.inputs)
    # Weights (.5, .5): two examples for three pairs, within sampling noise.
    assert 0.60 < sum(row.count(1) for row in rows) / len(pairs) < 0.75
    examples = [source.tolist() for source, _ in batches.examples()]
    assert sorted(examples) == sorted(text for text in texts if text)

  def test_packing_weights(self):
    pairs = TokenPairs.from_lists([[3]] * 3000, [[4]] * 3000)
    config = packing(weights=(0.4, 0.3, 0.2, 0.1), buckets=(8,))
    batches = data.PackedBatches(pairs, config).epoch(0)
    rows = np.concatenate([batch.targets.reshape(-1, 8) for batch in batches])
    joined = (rows == 4).sum(axis=1)
    share = np.bincount(joined, minlength=5)[1:] / len(rows)
    np.testing.assert_allclose(share, config.weights, atol=0.05)
    assert np.all(rows[np.arange(len(rows)), joined] == 1)

  def test_batches_depend_on_seed_and_step_alone(self):
    pairs = copy_pairs()
    batches = data.PackedBatches(pairs, packing())
    late = data.PackedBatches(pairs, packing()).batch(40)
    for step in range(41):
      early = batches.batch(step)
    assert_same(early, late)
    assert batches.epochs_done(40) > 1
    changed = data.PackedBatches(pairs, packing(seed=1)).batch(40)
    assert changed.inputs.tolist() != late.inputs.tolist()

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
    # Whatever was joined has room for all of it and one end.
    kept = sorted(token for row in rows for token in row if token > 1)
    assert kept == [7, 7, 7, 8, 10, 10]
    assert sum(row.count(1) for row in rows) == sum(max(r) > 0 for r in rows)


def reference(draft_logits, target_logits, tokens, weights):
  """Distillation in plain words, differentiated by JAX."""
  draft = jax.nn.softmax(draft_logits)
  target = jax.nn.softmax(target_logits)
  kl = jnp.sum(target * (jnp.log(target) - jnp.log(draft)), axis=-1)
  likelihood = jnp.take_along_axis(draft, tokens[..., None], axis=-1)[..., 0]
  distance = 0.5 * jnp.sum(jnp.abs(target - draft), axis=-1)
  return (
    weights.kl * kl
    - weights.cross_entropy * jnp.log(likelihood)
    + weights.total_variation * distance
  )


class TestLosses:
  def test_cross_entropy_with_smoothing_and_z_loss(self):
    logits = 3.0 * jax.random.normal(jax.random.key(0), (2, 3, 7))
    targets = jnp.array([[0, 6, 2], [3, 3, 5]])
    logs = jax.nn.log_softmax(logits)
    nats = -jnp.take_along_axis(logs, targets[..., None], -1)[..., 0]
    squared = 1e-2 * jax.nn.logsumexp(logits, axis=-1) ** 2
    for smoothing in (0.0, 0.1):
      have = losses.cross_entropy(logits, targets, smoothing, 1e-2)
      want = (1 - smoothing) * nats - smoothing * logs.mean(-1) + squared
      np.testing.assert_allclose(have, want, rtol=1e-5)

  def test_what_is_read_first_and_what_counts(self):
    targets = jnp.array([[5, 0, 7, 1, -1], [0, 1, -1, -1, -1]])
    fed, wanted, counts = losses.teacher_forced(targets, 9)
    assert fed.tolist() == [[9, 5, 0, 7, 1], [9, 0, 1, 0, 0]]
    assert wanted.tolist() == [[5, 0, 7, 1, 0], [0, 1, 0, 0, 0]]
    assert counts.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    # Where texts begin with nothing, the first token is only read.
    fed, wanted, counts = losses.teacher_forced(targets, None)
    assert fed.tolist() == [[5, 0, 7, 1], [0, 1, 0, 0]]
    assert wanted.tolist() == [[0, 7, 1, 0], [1, 0, 0, 0]]
    assert counts.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]

  @pytest.mark.parametrize(
    'weights', [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.7, 0.2, 3.0)]
  )
  def test_distillation_is_what_autodiff_finds(self, weights):
    weights = DistillationWeights(*weights)
    keys = jax.random.split(jax.random.key(0), 3)
    draft = 3.0 * jax.random.normal(keys[0], (2, 3, 7))
    target = 3.0 * jax.random.normal(keys[1], (2, 3, 7))
    tokens = jax.random.randint(keys[2], (2, 3), 0, 7)

    def both(function):
      def total(draft):
        return jnp.sum(function(draft, target, tokens, weights))

      return jax.jit(jax.value_and_grad(total))(draft)

    value, gradient = both(lambda *args: losses.distillation(*args)[0])
    wanted, slope = both(reference)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-5)

  def test_alpha_is_the_acceptance_probability(self):
    # Of a proposal from (.5, .3, .2), .3 + .3 + .2 lies under (.3, .3, .4).
    draft = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    target = jnp.log(jnp.array([[[0.3, 0.3, 0.4]]]))
    tokens = jnp.zeros((1, 1), jnp.int32)
    weights = DistillationWeights(1.0, 0.0, 1.0)
    _, alpha = losses.distillation(draft, target, tokens, weights)
    np.testing.assert_allclose(alpha, [[0.8]], rtol=1e-6)
    loss, alpha = losses.distillation(target, target, tokens, weights)
    np.testing.assert_allclose((loss[0, 0], alpha[0, 0]), (0, 1), atol=1e-6)


WIDE = t5.T5Config(
  vocab_size=40,
  emb_dim=24,
  num_heads=2,
  head_dim=8,
  num_encoder_layers=2,
  num_decoder_layers=3,
  mlp_dim=20,
)


class TestSlices:
  """A drafter cut out of its target: exact where nothing is left out."""

  def params(self, config):
    """Parameters whose norm scales are not all 1, so that folding matters."""
    rng = np.random.default_rng(0)

    def other_scale(path, leaf):
      if path[-1].key != 'scale':
        return leaf
      return jnp.asarray(rng.uniform(0.5, 2.0, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(
      other_scale, random_weights(t5.T5(config), 0)
    )

  def assert_same_logits(self, config, params, other_config, other):
    rng = np.random.default_rng(1)
    inputs, targets = rng.integers(1, 40, (2, 7)), rng.integers(1, 40, (2, 5))
    have, want = (
      jax.jit(t5.T5(config).logits)(params, inputs, targets)
      for config, params in ((config, params), (other_config, other))
    )
    np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-3)

  def test_a_slice_of_everything_is_the_target(self):
    params = self.params(WIDE)
    self.assert_same_logits(WIDE, sliced(params, WIDE, WIDE), WIDE, params)

  def test_a_stream_of_few_directions_loses_nothing(self):
    """A target that uses only 10 of its 24 directions fits into 10."""
    narrow = dataclasses.replace(WIDE, emb_dim=10)
    # The same network in 24 dimensions: a random 10-dimensional subspace.
    basis, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(24, 10)))
    folded = sliced(self.params(narrow), narrow, narrow)

    def lift(path, leaf):
      name = path[-1].key
      if name == 'embedding':
        return leaf @ basis.T
      if name == 'scale':
        # 10 squares spread over 24 places: the norm divides by less.
        return jnp.full((24,), np.sqrt(10 / 24), jnp.float32)
      if name == 'kernel':
        writes = path[-2].key in ('out', 'wo')
        return leaf @ basis.T if writes else basis @ leaf
      return leaf

    wide = jax.tree_util.tree_map_with_path(lift, folded)
    self.assert_same_logits(narrow, sliced(wide, WIDE, narrow), WIDE, wide)

  @pytest.mark.parametrize('tied', [False, True], ids=['1.1', '1.0'])
  def test_names_and_shapes_are_the_drafters(self, tied):
    config = WIDE
    if tied:
      config = dataclasses.replace(
        WIDE, mlp_activations=('relu',), logits_via_embedding=True
      )
    draft = dataclasses.replace(
      config, emb_dim=12, num_encoder_layers=1, num_decoder_layers=2
    )
    have = sliced(self.params(config), config, draft)
    want = jax.eval_shape(t5.T5(draft).init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, have) == jax.tree.map(jnp.shape, want)

  @pytest.mark.parametrize(
    ('field', 'value', 'words'),
    [
      ('num_heads', 4, 'num_heads.* expected 2,.* got 4'),
      ('emb_dim', 32, 'emb_dim.* expected at most 24,.* got 32'),
    ],
  )
  def test_sizes_that_cannot_be_cut(self, field, value, words):
    draft = dataclasses.replace(WIDE, **{field: value})
    with pytest.raises(ValueError, match=words):
      sliced(self.params(WIDE), WIDE, draft)


@functools.cache
def compiled_trainer(name):
  """One trainer for each optimiser: its programs are compiled once."""
  config = trainer.TrainConfig(
    optimizer=OptimizerConfig(name, learning_rate=1e-2, warmup_steps=5),
  )
  config_of_data = packing(buckets=(12,), tokens_per_part=96)
  batches = data.PackedBatches(copy_pairs(), config_of_data)
  held_out = data.PackedBatches(
    copy_pairs(50, 1), config_of_data, keep_all=True
  )
  objective = losses.CrossEntropy(MODEL, z_loss=1e-4)
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


class TestTrainer:
  def test_learning_rate(self):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3)
    rates = [trainer.learning_rate(config, i, 0.0) for i in range(5)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1.0, 1.0])
    assert trainer.learning_rate(config, 9, 0.5) == pytest.approx(0.5)
    assert trainer.learning_rate(config, 9, 1.0) == pytest.approx(0.0)

  def test_loss_falls(self):
    loop, params, lines = make_trainer(steps=150, eval_every=150)
    before = loop.evaluate(params)
    state = loop.train(params)
    after = loop.evaluate(state.params)
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
      functools.partial(trainer._update, loop._optimizer),
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
    (parts, sums), (gradient, wanted) = (
      loop._gradient(loop._objective, params, rows, jax.random.key(0))
      for rows in (batch, whole)
    )
    np.testing.assert_allclose(sums['loss'], wanted['loss'], rtol=1e-5)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-5), parts, gradient
    )

  @pytest.mark.parametrize('name', trainer.OPTIMIZERS)
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
    other = next(n for n in trainer.OPTIMIZERS if n != name)
    loop, params, _ = make_trainer(other)
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

  def test_a_loss_that_is_not_finite_stops_the_run(self):
    loop, params, _ = make_trainer()
    params = jax.tree.map(lambda x: x * np.nan, params)
    with pytest.raises(FloatingPointError, match='loss at step 0 is nan'):
      loop.train(params)


def test_training_needs_no_text_package(tmp_path):
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
