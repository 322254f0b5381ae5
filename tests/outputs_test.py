"""A target's own outputs, and a drafter that learns from them."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from specdec_jax import partitioning
from specdec_jax.models import t5
from specdec_jax.training import data, losses, outputs, trainer
from specdec_jax.training.losses import DistillationWeights
from specdec_jax.training.outputs import OutputsConfig
from specdec_jax.training.pairs import TokenPairs
from specdec_jax.training.trainer import OptimizerConfig

VOCAB = 16
MODEL = t5.T5(
  t5.T5Config(
    vocab_size=VOCAB,
    emb_dim=16,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=8,
    mlp_dim=16,
  )
)
CONFIG = OutputsConfig(batch_size=4, widths=(8,))


@functools.cache
def target_params(seed=1):
  """A random target that is sure of itself, and ends after some tokens."""
  params = MODEL.init(jax.random.key(seed))
  kernel = 6.0 * params['decoder']['logits_dense']['kernel']
  # About as often the likeliest as any other id.
  params['decoder']['logits_dense']['kernel'] = kernel.at[:, 1].mul(1.5)
  return params


@functools.cache
def decoder(config=CONFIG):
  return outputs.Decoder(MODEL, config, None)


@jax.jit
def argmaxes(params, inputs, fed):
  return MODEL.logits(params, inputs, fed).argmax(axis=-1)


def teacher_forced(source, tokens):
  """What the target says after each of the tokens before, greedily."""
  inputs, fed = np.zeros((1, 8), np.int32), np.zeros((1, 24), np.int32)
  inputs[0, : len(source) + 1] = [*source, 1]
  fed[0, 1 : len(tokens)] = tokens[:-1]
  return argmaxes(target_params(), inputs, fed)[0, : len(tokens)].tolist()


def make_sources(number=30, seed=0):
  rng = np.random.default_rng(seed)
  rows = [rng.integers(3, VOCAB, rng.integers(1, 8)) for _ in range(number)]
  return TokenPairs.from_lists(rows, [[3]] * number)


class TestObjective:
  def test_alpha_rises_and_another_target_does_not_recompile(self, tmp_path):
    pairs = outputs.generate_outputs(
      MODEL,
      target_params(),
      make_sources(60),
      tmp_path / 'outputs.npz',
      CONFIG,
      log=lambda line: None,
    )
    packing = data.PackingConfig((1.0,), (20,), 320, 160)
    batches = data.PackedBatches(pairs, packing)
    config = trainer.TrainConfig(
      steps=120,
      checkpoint_minutes=0.0,
      eval_every=1000,
      optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
    )
    objective = losses.Distillation(
      MODEL, MODEL, target_params(), 0, DistillationWeights(1.0, 0.1, 0.5)
    )
    loop = trainer.Trainer(objective, config, batches, batches, [].append)
    params = MODEL.init(jax.random.key(5))
    before = loop.evaluate(params)
    after = loop.evaluate(loop.train(params).params)
    assert after['alpha'] > before['alpha'] + 0.2
    assert after['agreement'] > before['agreement'] + 0.2
    assert after['loss'] < 0.7 * before['loss']
    # The target itself, as a drafter.
    best = loop.evaluate(target_params())
    assert best['alpha'] == pytest.approx(1.0, abs=1e-5)
    assert best['agreement'] == 1.0
    # Its parameters are arguments of the program, not a part of it.
    compiled = loop._evaluate._cache_size()
    loop._objective = objective.replace(target_params=target_params(2))
    assert loop.evaluate(target_params())['agreement'] < 0.9
    assert loop._evaluate._cache_size() == compiled


class TestDecoder:
  def decode(self, sources, ids, **options):
    placed = partitioning.place(target_params(), outputs.PLACEMENT)
    return decoder()(placed, sources, ids, **options)

  def test_greedy_outputs_are_the_argmax_of_teacher_forced_logits(self):
    pairs = make_sources()
    ended = 0
    for first in range(0, 28, 4):
      sources = [pairs[i][0] for i in range(first, first + 4)]
      found = self.decode(sources, range(4))
      for source, output in zip(sources, found, strict=True):
        tokens = output.tokens.tolist() + [1] * output.ended
        assert teacher_forced(source, tokens) == tokens
        assert len(tokens) <= CONFIG.limit(len(source))
        ended += output.ended
    assert 8 < ended < 28  # both kinds were looked at

  def test_a_sample_depends_on_its_number_not_on_its_neighbours(self):
    sources = [make_sources()[i][0] for i in range(4)]
    found = self.decode(sources, [5, 6, 7, 8], temperature=1.0)
    other = self.decode(sources[::-1], [8, 7, 6, 5], temperature=1.0)
    for one, same in zip(found, other[::-1], strict=True):
      np.testing.assert_array_equal(one.tokens, same.tokens)
    renamed = self.decode(sources, [15, 16, 17, 18], temperature=1.0)
    assert any(
      one.tokens.tolist() != another.tokens.tolist()
      for one, another in zip(found, renamed, strict=True)
    )

  def test_a_batch_ends_with_few_rows_unfinished(self):
    sources = [make_sources()[i][0] for i in range(4)]
    whole = self.decode(sources, range(4))
    config = dataclasses.replace(CONFIG, max_unfinished=0.99)
    placed = partitioning.place(target_params(), outputs.PLACEMENT)
    cut = decoder(config)(placed, sources, range(4))
    assert sum(o.ended for o in cut) <= sum(o.ended for o in whole)
    for one, another in zip(cut, whole, strict=True):
      size = len(one.tokens)
      np.testing.assert_array_equal(one.tokens, another.tokens[:size])


class Killed(Exception):
  pass


class TestGenerateOutputs:
  def generate(self, path, config=CONFIG, params=None):
    return outputs.generate_outputs(
      MODEL, params or target_params(), make_sources(), path, config
    )

  @pytest.fixture
  def batches(self, monkeypatch):
    """How many batches were decoded, and after how many a run is killed."""
    decode = outputs.Decoder.__call__
    batches = types.SimpleNamespace(count=0, most=99)

    def counted(self, *args):
      if batches.count == batches.most:
        raise Killed
      batches.count += 1
      return decode(self, *args)

    monkeypatch.setattr(outputs.Decoder, '__call__', counted)
    return batches

  def test_pairs_are_sources_with_outputs_that_ended(self, tmp_path):
    path = tmp_path / 'outputs.npz'
    pairs = self.generate(path)
    assert 5 < len(pairs) < 30
    sources = {tuple(source) for source, _ in make_sources()}
    for source, output in pairs:
      assert tuple(source) in sources
      assert 1 not in output
      assert teacher_forced(source, [*output, 1]) == [*output, 1]
    # A batch puts the end where the target did.
    packing = data.PackingConfig((1.0,), (20,), 20)
    row = data.PackedBatches(pairs, packing).batch(0).targets.reshape(-1)
    row = row.tolist()
    assert row.count(1) == 1 and set(row[row.index(1) + 1 :]) <= {-1}
    assert [file.name for file in tmp_path.iterdir()] == ['outputs.npz']

  def test_a_killed_run_goes_on(self, tmp_path, batches):
    """From its whole lines, whatever a kill has left behind them."""
    config = dataclasses.replace(CONFIG, temperatures=(0.0, 1.0))
    wanted = self.generate(tmp_path / 'whole.npz', config)
    path = tmp_path / 'outputs.npz'
    batches.most = batches.count + 5
    with pytest.raises(Killed):
      self.generate(path, config)
    batches.most = 99
    unfinished = tmp_path / 'outputs.npz.unfinished'
    with pytest.raises(ValueError, match='other settings: outputs.seed was'):
      self.generate(path, dataclasses.replace(config, seed=1))
    with pytest.raises(ValueError, match='other settings: params was'):
      self.generate(path, config, target_params(2))
    made = unfinished.read_bytes()
    for part, rest in (
      (1.0, b''),
      (1.0, b'\n\xff\n'),
      (0.7, b'{"'),
      (0.01, b''),
    ):
      unfinished.write_bytes(made[: int(part * len(made))] + rest)
      before = batches.count
      found = self.generate(path, config)
      again = batches.count - before  # of 8 batches, 5 were made before
      assert again == 3 if part == 1 else 3 < again <= 8
      np.testing.assert_array_equal(found.targets, wanted.targets)
      np.testing.assert_array_equal(found.inputs, wanted.inputs)
      assert not unfinished.exists()
      path.unlink()

  def test_a_result_is_read_or_refused(self, tmp_path, batches):
    path = tmp_path / 'o.npz'
    pairs = self.generate(path)
    batches.most = batches.count  # it is only read
    assert self.generate(path).targets.tolist() == pairs.targets.tolist()
    whole = path.read_bytes()
    for text in (b'', b'null', whole[: len(whole) // 2]):
      path.write_bytes(text)
      with pytest.raises(ValueError, match='o.npz.*whole .npz file'):
        self.generate(path)
    make_sources().save(path)  # it does not say whose it is
    with pytest.raises(ValueError, match='o.npz.*other settings'):
      self.generate(path)

  def test_no_outputs(self, tmp_path):
    config = dataclasses.replace(CONFIG, max_minutes=1e-9)
    with pytest.raises(ValueError, match='None of 30 outputs ended'):
      self.generate(tmp_path / 'outputs.npz', config)
    empty = TokenPairs.from_lists([[], []], [[3], [3]])
    with pytest.raises(ValueError, match='None of the 2 sources'):
      outputs.generate_outputs(MODEL, target_params(), empty, tmp_path / 'x')

  @pytest.mark.parametrize(
    'change',
    [
      dict(batch_size=0),
      dict(temperatures=()),
      dict(temperatures=(-1.0,)),
      dict(widths=(8, 8)),
      dict(max_unfinished=1.0),
    ],
  )
  def test_config_is_checked(self, change):
    with pytest.raises(ValueError, match=f'OutputsConfig.{next(iter(change))}'):
      OutputsConfig(**change)
