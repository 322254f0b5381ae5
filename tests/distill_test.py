"""Distillation: its loss, a drafter that learns, a target's own outputs."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import partitioning
from specdec_jax.models import t5
from specdec_jax.training import data, distill, losses, outputs, trainer
from specdec_jax.training.losses import DistillationWeights
from specdec_jax.training.optimizer import OptimizerConfig
from specdec_jax.training.outputs import OutputsConfig
from specdec_jax.training.pairs import TokenPairs

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
CONFIG = OutputsConfig(batch_size=4, widths=(8,), chunk_batches=2)


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
  return outputs.Decoder(MODEL, config)


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


def reference(draft_logits, target_logits, tokens, weights):
  """The same in plain words, differentiated by JAX."""
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


class TestLoss:
  @pytest.mark.parametrize(
    'weights',
    [
      DistillationWeights(1.0, 0.0, 0.0),
      DistillationWeights(0.0, 1.0, 0.0),
      DistillationWeights(0.0, 0.0, 1.0),
      DistillationWeights(0.7, 0.2, 3.0),
    ],
  )
  def test_value_and_gradient_are_what_autodiff_finds(self, weights):
    keys = jax.random.split(jax.random.key(0), 4)
    draft = 3.0 * jax.random.normal(keys[0], (2, 3, 7))
    target = 3.0 * jax.random.normal(keys[1], (2, 3, 7))
    tokens = jax.random.randint(keys[2], (2, 3), 0, 7)
    mask = jax.random.uniform(keys[3], (2, 3))

    def total(function, draft):
      return jnp.sum(function(draft, target, tokens, weights) * mask)

    def ours(*args):
      return losses.distillation(*args)[0]

    def both(function):
      found = jax.value_and_grad(functools.partial(total, function))
      return jax.jit(found)(draft)

    value, gradient = both(ours)
    wanted, slope = both(reference)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-5)

  def test_alpha_is_the_acceptance_probability(self):
    # Of a proposal from (.5, .3, .2), .3 + .3 + .2 lies under (.3, .3, .4).
    draft = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    target = jnp.log(jnp.array([[[0.3, 0.3, 0.4]]]))
    tokens = jnp.zeros((1, 1), jnp.int32)
    _, alpha = losses.distillation(draft, target, tokens, DistillationWeights())
    np.testing.assert_allclose(alpha, [[0.8]], rtol=1e-6)

  def test_nothing_is_missing_of_the_target_itself(self):
    logits = jax.random.normal(jax.random.key(0), (1, 2, 7))
    tokens = jnp.zeros((1, 2), jnp.int32)
    weights = DistillationWeights(1.0, 0.0, 1.0)

    def total(draft):
      loss, alpha = losses.distillation(draft, logits, tokens, weights)
      return loss.sum(), alpha

    (loss, alpha), slope = jax.value_and_grad(total, has_aux=True)(logits)
    np.testing.assert_allclose(loss, 0.0, atol=1e-6)
    np.testing.assert_allclose(alpha, 1.0, rtol=1e-6)
    np.testing.assert_allclose(slope, 0.0, atol=1e-6)

  def test_weights_are_checked(self):
    with pytest.raises(ValueError, match='at least one of them > 0'):
      DistillationWeights(0.0, 0.0, 0.0)


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
    objective = distill.Distillation(
      MODEL, MODEL, target_params(), DistillationWeights(1.0, 0.1, 0.5)
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


class TestGenerateOutputs:
  def generate(self, path, config=CONFIG, params=None, log=print):
    return outputs.generate_outputs(
      MODEL, params or target_params(), make_sources(), path, config, log
    )

  def test_pairs_are_sources_with_outputs_that_ended(self, tmp_path):
    path = tmp_path / 'outputs.npz'
    pairs = self.generate(path)
    assert 5 < len(pairs) < 30
    sources = {tuple(make_sources()[i][0]) for i in range(30)}
    for i in range(len(pairs)):
      source, output = pairs[i]
      assert tuple(source) in sources
      assert 1 not in output
      assert teacher_forced(source, [*output, 1]) == [*output, 1]
    # A batch puts the end where the target did.
    batch = data.PackedBatches(
      pairs, data.PackingConfig((1.0,), (20,), 20)
    ).batch(0)
    row = batch.targets.reshape(-1).tolist()
    assert row.count(1) == 1 and not any(row[row.index(1) + 1 :])
    loaded = TokenPairs.load(path)
    np.testing.assert_array_equal(loaded.targets, pairs.targets)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
      'outputs.npz',
      'outputs.npz.settings.json',
    ]

  @pytest.mark.parametrize('temperatures', [(0.0,), (0.0, 1.0)])
  def test_a_killed_run_goes_on(self, temperatures, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, temperatures=temperatures)
    wanted = self.generate(tmp_path / 'whole.npz', config)
    calls = []

    class Killed(Exception):
      pass

    original = outputs.Decoder.__call__

    def counted(self, *args):
      if len(calls) == 5:
        raise Killed
      calls.append(args)
      return original(self, *args)

    path = tmp_path / 'outputs.npz'
    monkeypatch.setattr(outputs.Decoder, '__call__', counted)
    with pytest.raises(Killed):
      self.generate(path, config)
    calls.clear()
    with pytest.raises(ValueError, match='other settings: outputs.seed was'):
      self.generate(path, dataclasses.replace(config, seed=1))
    with pytest.raises(ValueError, match='other settings: params was'):
      self.generate(path, config, target_params(2))
    # Of 8 batches in chunks of 2, 2 chunks were whole.
    found = self.generate(path, config)
    assert len(calls) == 4
    np.testing.assert_array_equal(found.targets, wanted.targets)
    np.testing.assert_array_equal(found.inputs, wanted.inputs)
    calls.clear()
    self.generate(path, config)  # finished: only read
    assert not calls

  def test_what_is_broken_is_made_again(self, tmp_path, monkeypatch):
    """Chunks of a killed run, by number; later whole ones are kept."""
    wanted = self.generate(tmp_path / 'whole.npz')
    half = tmp_path / 'half'
    half.mkdir()
    original, calls, said = outputs.Decoder.__call__, [], []

    def counted(self, *args):
      if len(calls) == 6:
        raise InterruptedError
      calls.append(args)
      return original(self, *args)

    with monkeypatch.context() as patch:
      patch.setattr(outputs.Decoder, '__call__', counted)
      with pytest.raises(InterruptedError):
        self.generate(half / 'o.npz')
    for broken, name in enumerate(
      ['.parts/00000.npz'] * 6 + ['.settings.json'] * 3
    ):
      out = tmp_path / f'{broken}'
      shutil.copytree(half, out)
      path = out / f'o.npz{name}'
      data = path.read_bytes()
      at = len(data) // 2
      path.write_bytes(
        [
          data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
          data[:at],
          b'',
          data.partition(b'\n')[2],  # as an earlier version left it
          (out / 'o.npz.parts' / '00001.npz').read_bytes(),
          (tmp_path / 'whole.npz').read_bytes(),
          b'null',
          b'{}',
          data[:at],
        ][broken]
      )
      calls.clear()
      said.clear()
      with monkeypatch.context() as patch:
        patch.setattr(outputs.Decoder, '__call__', counted)
        found = self.generate(out / 'o.npz', log=said.append)
      # Of four chunks of two batches three were whole.
      assert len(calls) == (4 if broken < 6 else 2)
      assert str(path) in said[0] and str(path) not in ''.join(said[1:])
      np.testing.assert_array_equal(found.targets, wanted.targets)
      np.testing.assert_array_equal(found.inputs, wanted.inputs)

  def test_a_broken_result_is_an_error(self, tmp_path):
    path = tmp_path / 'o.npz'
    self.generate(path)
    settings = tmp_path / 'o.npz.settings.json'
    for broken in (settings, path):
      data = broken.read_bytes()
      for text in (b'', b'null', b'{}', data[: len(data) // 2]):
        broken.write_bytes(text)
        with pytest.raises(ValueError, match=broken.name):
          self.generate(path)
      broken.write_bytes(data)
    wanted, refused = TokenPairs.load(path), 0
    for at in range(0, len(data), len(data) // 40):
      path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
      try:
        found = TokenPairs.load(path)
      except ValueError as error:
        assert 'not a whole .npz file' in str(error)
        refused += 1
      else:  # a date, say
        np.testing.assert_array_equal(found.targets, wanted.targets)
        np.testing.assert_array_equal(found.inputs, wanted.inputs)
    assert refused > 20

  def test_time_ends_it(self, tmp_path):
    config = dataclasses.replace(CONFIG, max_minutes=1e-9)
    with pytest.raises(ValueError, match='None of 30 outputs ended'):
      self.generate(tmp_path / 'outputs.npz', config)

  def test_bad_sources(self, tmp_path):
    config = dataclasses.replace(CONFIG, widths=(2,))
    empty = TokenPairs.from_lists([[], [3, 4]], [[3], [3]])
    with pytest.raises(ValueError, match='None of the 2 sources'):
      outputs.generate_outputs(
        MODEL, target_params(), empty, tmp_path / 'x.npz', config
      )

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
