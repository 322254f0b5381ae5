"""Training of heads: what the loss looks at, and a run from end to end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import training
from specdec_jax.checkpoints import t5x
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.drafters import heads
from specdec_jax.drafters.heads import Heads
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.training import data, trainer
from specdec_jax.training.losses import HeadDistillation
from specdec_jax.training.pairs import TokenPairs
from specdec_jax.training.trainer import OptimizerConfig

TARGET = T5(
  T5Config(
    vocab_size=16,
    emb_dim=8,
    num_heads=1,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=8,
    mlp_dim=8,
  )
)
HEADS = Heads(2, 8, 8)


@functools.cache
def target_params():
  """A target that is surer of itself than a random one."""
  params = TARGET.init(jax.random.key(1))
  params['decoder']['logits_dense']['kernel'] *= 4
  return params


def head_params():
  params = HEADS.init(jax.random.key(2))
  for i, head in enumerate(params.values()):
    head['wo']['kernel'] = 0.3 * jax.random.normal(jax.random.key(i), (8, 8))
  return params


def as_drafted(inputs, targets, late=0):
  """(alpha, agreement) of each head, place by place, as in decoding.

  The feature comes from the target's cache, one token after another; `late`
  takes that of an earlier token, which is wrong.
  """
  params, target = head_params(), target_params()
  found: dict = {(i, j): [] for i in range(2) for j in range(2)}
  for row, tokens in zip(inputs, targets, strict=True):
    tokens = [0, *tokens[tokens >= 0]]
    cache = TARGET.prefill(target, row[None], 16)
    features, wanted = [np.zeros((1, 8), np.float32)], []
    for token in tokens[:-1]:
      feature, cache = TARGET.extend(target, cache, jnp.array([[token]]))
      logits = TARGET.head(target, feature)
      features.append(feature[0])
      wanted.append(np.asarray(jax.nn.softmax(logits[0, 0])))
    for place in range(len(wanted)):
      for i in range(min(2, len(wanted) - place)):
        # Head i has read the tokens up to place + i, of which none is its own.
        known = jnp.array([tokens[place : place + i + 1]])
        made = HEADS.apply(
          params,
          i,
          jnp.asarray(features[max(place - late, 0)]),
          TARGET.embed(target, known),
        )
        row_of = np.asarray(jax.nn.softmax(TARGET.head(target, made)[0]))
        found[0, i].append(np.minimum(row_of, wanted[place + i]).sum())
        found[1, i].append(row_of.argmax() == wanted[place + i].argmax())
  return {
    f'{name}_{i + 1}': np.mean(found[kind, i])
    for kind, name in enumerate(('alpha', 'agreement'))
    for i in range(2)
  }


@pytest.mark.slow
def test_the_loss_sees_what_the_drafter_will_see():
  inputs = jnp.array([[3, 4, 1, 0, 0], [9, 1, 0, 0, 0]])
  targets = jnp.array([[5, 6, 7, 8, 1], [7, 3, 1, -1, -1]])
  objective = HeadDistillation(HEADS, TARGET, target_params())
  batch = data.Batch(inputs, targets)
  sums = jax.jit(objective.sums)(head_params(), batch)
  found = {
    name: float(value / sums['tokens'])
    for name, value in sums.items()
    if name[:5] in ('alpha', 'agree')
  }
  want = as_drafted(np.asarray(inputs), np.asarray(targets))
  assert found == pytest.approx(want, abs=1e-4)
  wrong = as_drafted(np.asarray(inputs), np.asarray(targets), late=1)
  assert found['alpha_1'] != pytest.approx(wrong['alpha_1'], abs=1e-2)
  # Later heads weigh less.
  first, half, whole = (
    float(objective.replace(decay=decay).sums(head_params(), batch)['loss'])
    for decay in (0.0, 0.5, 1.0)
  )
  assert first < half == pytest.approx((first + whole) / 2)


@pytest.fixture
def run(tmp_path):
  """Makes a `TrainRun` of heads, over sequences that count up."""
  rng = np.random.default_rng(0)
  rows = [
    np.arange(n, n + rng.integers(2, 6)).tolist()
    for n in rng.integers(3, 10, 60)
  ]
  arrays = str(tmp_path / 'pairs.npz')
  TokenPairs.from_lists(rows, rows).save(arrays)
  checkpoint = str(tmp_path / 'target.msgpack')
  t5x.save_t5x(checkpoint, target_params(), 1)

  def make(**changes):
    learning = {'outputs': None} | changes.pop('learning', {})
    defaults = dict(
      model=HEADS,
      model_dir=str(tmp_path / 'heads'),
      train_file=arrays,
      eval_file=arrays,
      packing=data.PackingConfig((1.0,), (8,), 64),
      training=trainer.TrainConfig(
        steps=40,
        eval_every=39,
        log_every=10,
        checkpoint_steps=10,
        optimizer=OptimizerConfig('muon', 0.05, warmup_steps=5),
      ),
      learning=training.FromTarget(TARGET, checkpoint, **learning),
    )
    return training.TrainRun(**(defaults | changes))

  return make


def test_a_run_from_target_to_drafter(run, tmp_path):
  """It learns, its file names its target, and it is resumed where it ended."""
  made = run()
  lines: list[str] = []
  params = training.train(made, log=lines.append)
  drafter = heads.load(tmp_path / 'heads' / 'model.msgpack')
  assert drafter.made_for == (fingerprint(target_params()),)
  jax.tree.map(np.testing.assert_array_equal, drafter.params, params)
  pairs = data.PackedBatches(TokenPairs.load(made.train_file), made.packing)
  loop = trainer.Trainer(
    HeadDistillation(HEADS, TARGET, target_params()),
    made.training,
    pairs,
    pairs,
  )
  before, after = map(loop.evaluate, (HEADS.init(jax.random.key(0)), params))
  for i in (1, 2):
    assert after[f'alpha_{i}'] > before[f'alpha_{i}'] + 0.05
  again: list[str] = []
  training.train(made, log=again.append)
  assert any('resumed at step 40' in line for line in again)
  with pytest.raises(ValueError, match='head_decay'):
    training.train(run(learning={'head_decay': 0.5}))


def test_what_heads_cannot_be_trained_on(run):
  with pytest.raises(ValueError, match='TrainRun.learning: .*FromTarget'):
    training.TrainRun(HEADS, 'x', train_file=run().train_file)
  with pytest.raises(ValueError, match='emb_dim: expected .*8, got 9'):
    run(model=Heads(2, 9, 8))
  with pytest.raises(ValueError, match='slice_target'):
    run(learning={'slice_target': True})
