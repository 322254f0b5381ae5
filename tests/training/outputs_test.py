"""A target's own outputs, and a drafter that learns from them."""

import dataclasses
import functools
import types
from unittest import mock

import jax
import numpy as np
import optax
import pytest

from specdec_jax import partitioning
from specdec_jax.training import data, losses, outputs, trainer
from specdec_jax.training.outputs import OutputsConfig
from toy_training import MODEL, Killed

RNG = np.random.default_rng(0)
SOURCES = [RNG.integers(3, 16, n).tolist() for n in RNG.integers(1, 8, 30)]
CONFIG = OutputsConfig(batch_size=4)  # 8 batches of 30 sources


@functools.cache
def target_params(seed=1):
  """A random target that is sure of itself, and ends after some tokens."""
  params = MODEL.init(jax.random.key(seed))
  kernel = 6.0 * params['decoder']['logits_dense']['kernel']
  # About as often the likeliest as any other id.
  params['decoder']['logits_dense']['kernel'] = kernel.at[:, 1].mul(1.5)
  return params


def test_another_target_does_not_recompile():
  """Its parameters are arguments of the program, not a part of it."""
  packing = data.PackingConfig((1.0,), (20,), 320, 160)
  batches = data.PackedBatches([(range(3, 9), range(3, 9))] * 60, packing)
  objective = losses.Distillation(MODEL, MODEL, target_params())
  loop = trainer.Trainer(objective, trainer.TrainConfig(), batches, batches)
  best = loop.evaluate(target_params())  # the target itself, as a drafter
  assert best['alpha'] == pytest.approx(1.0, abs=1e-5)
  assert best['agreement'] == 1.0
  compiled = loop._evaluate._cache_size()
  loop._objective = objective.replace(target_params=target_params(2))
  assert loop.evaluate(target_params())['agreement'] < 0.9
  assert loop._evaluate._cache_size() == compiled


def test_what_the_target_says_is_computed_once(tmp_path, monkeypatch):
  """Every epoch has the batches of the first one, in another order."""
  monkeypatch.setattr(trainer, 'make_optimizer', optax.sgd)  # compiles quickly
  pairs = [(x, x) for x in (RNG.integers(3, 16, n) for n in [6, 12] * 40)]
  # Batches of both lengths have as many ids.
  packing = data.PackingConfig((1.0,), (10, 20), 320, 160)

  def ids(batches, number):
    return [batch.targets.tobytes() for batch in batches.epoch(number)]

  anew, same = (data.PackedBatches(pairs, packing) for _ in range(2))
  same.regroups = False
  assert ids(same, 0) == ids(anew, 0) and len(ids(same, 0)) == 4
  assert {*ids(same, 0)} == {*ids(same, 1)} and ids(same, 0) != ids(same, 1)
  assert {*ids(anew, 0)} != {*ids(anew, 1)}
  objective = losses.Distillation(MODEL, MODEL, target_params())
  config = trainer.TrainConfig(steps=9)
  loop = trainer.Trainer(objective, config, same, log=str, stores_features=True)
  with mock.patch.object(loop, '_features', wraps=loop._features) as features:
    loop.train(target_params(2), tmp_path)
  assert features.call_count == 4 + 2  # two empty ones, which are compiled for
  for batch in same.epoch():
    kept, read = (
      trainer._host(loop._evaluate(objective, target_params(2), one))
      for one in (loop._with_features(batch), batch)
    )
    assert kept == pytest.approx(read, rel=1e-2)


def test_a_sample_depends_on_its_number_not_on_its_neighbours():
  params = partitioning.place(target_params(), outputs.PLACEMENT)
  decode = functools.partial(outputs.decode, MODEL, params, CONFIG)
  sources, numbers = SOURCES[:4], [5, 6, 7, 8]
  made = decode(sources, numbers, 8, 1.0)
  assert made == decode(sources[::-1], numbers[::-1], 8, 1.0)[::-1]
  assert made != decode(sources, [15, 16, 17, 18], 8, 1.0)


def generate(path, config=CONFIG, seed=1):
  params = target_params(seed)
  return outputs.generate_outputs(MODEL, params, SOURCES, path, config)


@pytest.fixture
def batches(monkeypatch):
  """How many batches were decoded, and after how many a run is killed."""
  state = types.SimpleNamespace(count=0, most=99)

  def decode(model, params, config, sources, ids, width, temperature, *_):
    """Says each source again, or nothing for short ones."""
    if state.count == state.most:
      raise Killed
    state.count += 1
    return [[int(temperature), *x] if len(x) > 2 else None for x in sources]

  monkeypatch.setattr(outputs, 'decode', decode)
  return state


def test_pairs_are_sources_with_greedy_outputs_that_ended(tmp_path):
  """Each token is the argmax of teacher-forced logits."""
  path = tmp_path / 'outputs.jsonl'
  pairs = generate(path)
  assert 8 < len(pairs) < 30  # both kinds are there
  inputs, fed = (np.zeros((len(pairs), n), np.int32) for n in (8, 24))
  for row, (source, output) in enumerate(pairs):
    assert source in SOURCES and len(output) < CONFIG.limit(len(source))
    inputs[row, : len(source) + 1] = [*source, 1]
    fed[row, 1 : len(output) + 1] = output
  best = jax.jit(MODEL.logits)(target_params(), inputs, fed).argmax(axis=-1)
  for row, (_, output) in enumerate(pairs):
    assert best[row, : len(output) + 1].tolist() == [*output, 1]
  assert [file.name for file in tmp_path.iterdir()] == ['outputs.jsonl']


def test_a_killed_run_goes_on(tmp_path, batches):
  config = dataclasses.replace(CONFIG, temperatures=(0.0, 1.0))
  wanted = generate(tmp_path / 'whole.jsonl', config)
  assert batches.count == 8 and {output[0] for _, output in wanted} == {0, 1}
  path = tmp_path / 'outputs.jsonl'
  batches.most = batches.count + 5
  with pytest.raises(Killed):
    generate(path, config)
  with pytest.raises(ValueError, match='other settings: outputs.seed'):
    generate(path, dataclasses.replace(config, seed=1))
  with pytest.raises(ValueError, match='other settings: par'):
    generate(path, config, seed=2)
  batches.most = batches.count + 3  # of 8 batches, 5 were made before
  with path.open('a') as stream:
    stream.write('[[[3, 4], [5')  # what a kill has cut
  assert generate(path, config) == wanted
  batches.most = batches.count  # now it is only read, or refused
  assert generate(path, config) == outputs.read_outputs(path) == wanted
  for text, words in (
    ('', 'outputs.jsonl.*the first one with settings'),
    ('null\n', 'outputs.jsonl.*other settings'),
    ('[[1]\n', 'outputs.jsonl.*lines of JSON'),
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
      generate(path, config)


def test_sources_without_an_output(tmp_path, batches):
  config = dataclasses.replace(CONFIG, max_minutes=1e-9)
  with pytest.raises(ValueError, match='None of 30 outputs ended'):
    generate(tmp_path / 'outputs.jsonl', config)
  with pytest.raises(ValueError, match='2 empty'):
    outputs.generate_outputs(MODEL, target_params(), [[], []], tmp_path / 'x')
