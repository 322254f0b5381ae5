"""gamma = 'adaptive', and fallback, as users ask an engine for them."""

import dataclasses

import numpy as np
import pytest
import rich.console

import calibration_test
import toy_models
from small_vocabulary import VOCAB_SIZE, WORDS
from specdec_jax import infer
from specdec_jax.decoding.fallback import Fallback
from specdec_jax.drafters.length import MOST, plain_rule
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine.calibration import CalibrationError
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import as_gamma
from specdec_jax.engine.scheduler import DraftPolicy, PoolSettings
from specdec_jax.infer import run
from specdec_jax.infer.data import Example, Item
from specdec_jax.models.model import Model

TEXTS = WORDS.split()[:7]
TARGET, DRAFT = (toy_models.chain_model(VOCAB_SIZE, n) for n in (0, 1))
NOISE = toy_models.random_markov(1, VOCAB_SIZE, scale=1.0)


def make(tokenizer, drafter=DRAFT, **options):
  options = {'gamma': 'adaptive', 'max_decode_len': 20} | options
  return Engine(TARGET, drafter, tokenizer=tokenizer, **options)


def above(worth, most=MOST):
  """Proposals are made while their draft is as likely to be kept."""
  return plain_rule([worth] * most, [0.0] * most)


@pytest.fixture(scope='module')
def engine(tokenizer):
  return make(tokenizer)


@pytest.mark.slow
def test_samples_do_not_depend_on_who_is_decoded_beside_them(tokenizer):
  """Alone, together, and in a pool that others enter and leave."""
  engine = make(tokenizer, gamma=above(0.6, 3), fallback=True)
  options = {'temperature': 1.0, 'seed': 3, 'min_length': 12}
  together = engine.generate(TEXTS, **options)
  pooled = engine.generate(TEXTS, batch_size=2, **options)
  (alone,) = engine.generate(
    TEXTS[5:6], example_ids=[5], batch_size=1, **options
  )
  for one in (together[5], pooled[5]):
    assert (one.tokens, one.stats) == (alone.tokens, alone.stats)
  assert [one.tokens for one in together] == [one.tokens for one in pooled]
  assert any(one.stats.fallback_rounds for one in together)


def test_another_rule_is_the_same_program(engine):
  engine.generate(TEXTS[:2], gamma=above(0.6))
  programs = engine.num_programs
  for worth in (0.1, 0.9):
    engine.generate(TEXTS[2:4], gamma=above(worth))
  assert engine.num_programs == programs
  engine.generate(TEXTS[:2], gamma=MOST)
  assert engine.num_programs == programs + 1


@pytest.mark.parametrize(
  'drafter', [prompt_lookup(), with_fallback(prompt_lookup(), DRAFT)]
)
def test_drafters_that_do_not_say_how_sure_they_are(tokenizer, drafter):
  engine = make(tokenizer, drafter)
  with pytest.raises(ValueError, match='gamma: .*prompt_lookup'):
    engine.generate(TEXTS[:1])
  assert engine.num_programs == 0
  assert engine.generate(TEXTS[:1], gamma=2)[0].text


# With a calibration.


CHOICE = dataclasses.replace(
  calibration_test.choice(1, 3),
  expected_speed_up=1.5,
  cost_ratio=0.1,
  call_cost=tuple(1 + 0.1 * i for i in range(9)),
)


def calibration_of(engine, *choices, **changes):
  changes |= {'choices': choices or (CHOICE,)}
  return calibration_test.make(fingerprints=engine.fingerprints, **changes)


def config_of(tmp_path, engine, found, **changes):
  path, texts = tmp_path / 'calibration.json', tmp_path / 'input.txt'
  found.save(str(path))
  texts.write_text('\n'.join(TEXTS) + '\n')
  return infer.DecodeConfig(
    lambda: engine,
    str(texts),
    decoding='speculative',
    calibration=str(path),
    **changes,
  )


def silent():
  return rich.console.Console(record=True, width=200)


def test_a_rule_that_ends_no_draft_is_a_fixed_gamma(engine):
  assert as_gamma(plain_rule([0.0] * 3, [0.0] * 3)) == (3, None)
  # Controls: with a price.
  for rule in (calibration_of(engine).rule(1), above(0.5, 3)):
    assert as_gamma(rule) == (3, rule)


def test_the_rule_of_a_calibration_decides(tokenizer, tmp_path):
  engine = make(tokenizer, fallback=True)
  found, console = calibration_of(engine), silent()
  config = config_of(tmp_path, engine, found)
  summary = infer.decode(config, console=console)
  assert engine.gamma == summary['gamma'] == 3
  assert summary['rule'] == found.rule(1).to_json() == engine.rule.to_json()
  # The costs of the calls that it really makes.
  want = [1.1, 1.2, 1.5, 1.6]
  np.testing.assert_allclose(engine.fallback.costs, want, rtol=1e-6)
  assert summary['fallback'] == pytest.approx(want)
  said = console.export_text()
  assert 'gamma = 3, expected speed-up 1.50' in said
  identity = run.engine_identity(engine)
  assert identity['rule'] == summary['rule']
  assert identity['fallback'] == summary['fallback']
  two = dataclasses.replace(CHOICE, rows=2, gamma=4)
  plan = calibration_of(engine, CHOICE, two).plan(2, engine)
  assert {rows: one.rule.most for rows, one in plan.items()} == {1: 3, 2: 4}


def test_what_a_run_with_a_calibration_does(tokenizer, tmp_path):
  def run_by(engine, found):
    infer.decode(config_of(tmp_path, engine, found), console=silent())

  engine = make(tokenizer, gamma=5)  # a number: the best one
  run_by(engine, calibration_of(engine))
  assert engine.gamma == 3 and engine.rule is None
  engine = make(tokenizer)
  bare = dataclasses.replace(CHOICE, call_cost=())
  for found, message in (
    (calibration_of(engine, device='abacus'), "device was 'abacus'"),
    (calibration_of(engine, bare), 'costs of calls'),
  ):
    with pytest.raises(CalibrationError, match=message):
      run_by(engine, found)
  assert engine.num_programs == 0


# Pools that become smaller, each with a gamma of its own.


def test_a_smaller_pool_has_costs_of_its_own(tokenizer, tmp_path):
  """Two rows cost nothing; one is dear, so that its drafter rests at once."""
  engine = make(tokenizer, Model(NOISE, NOISE.params), gamma=2, fallback=True)
  dear = dataclasses.replace(CHOICE, gamma=2, call_cost=(1.0, 9.0, 9.0))
  free = dataclasses.replace(
    dear, rows=2, call_cost=(1.0,) * 4, cost_ratio=0.0, gamma=3
  )
  measured = calibration_of(engine, dear, free)
  config = config_of(
    tmp_path, engine, measured, batching='continuous', batch_size=2
  )
  plan = run.choose_gammas(measured, config, engine, silent())
  assert {rows: drafting.gamma for rows, drafting in plan.items()} == {
    2: 3,
    1: 2,
  }
  way = run.Way(engine, 'speculative', config, plan)
  items = [Item(i, i, Example(text, text)) for i, text in enumerate(TEXTS)]
  rested = [one.stats.fallback_rounds > 0 for _, one in way.run(items)]
  assert sum(rested) == len(TEXTS) % 2 == 1


def test_costs_are_made_for_the_gamma_of_each_pool(tokenizer):
  costs = Fallback(np.ones(3, np.float32), np.float32(2), np.int32(32))
  engine = make(tokenizer, gamma=2, fallback=costs)
  for gamma in (2, 4):  # a `Fallback` is of one gamma: others are guessed
    request = engine.request(TEXTS[:1], gamma=gamma)
    assert request.fallback.costs.shape == (gamma + 1,)
    assert (request.fallback is costs) == (gamma == 2)
  plain = engine.text_batch(TEXTS[:1], speculative=False).request
  assert plain.fallback is None and plain.rule is None
  plan = {2: engine.drafting_of(5, None), 1: engine.drafting_of(2, None)}
  settings = PoolSettings(gammas=plan)
  policy = DraftPolicy(settings, engine.request(TEXTS[:2]), 1)
  large, small = (policy.of(rows, True, False) for rows in (2, 1))
  assert (large.gamma, len(large.fallback.costs)) == (5, 6)
  assert (small.gamma, small.fallback) == (2, costs)
