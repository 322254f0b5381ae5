"""gamma = 'adaptive', and fallback, as users ask an engine for them."""

import dataclasses

import numpy as np
import pytest
import rich.console

import specdec_jax as sd
import toy_calibration
import toy_models
from small_vocabulary import VOCAB_SIZE, WORDS
from specdec_jax import infer
from specdec_jax.drafters.small_model import MOST, plain_rule
from specdec_jax.engine.calibration import CalibrationError
from specdec_jax.engine.options import drafting_of
from specdec_jax.infer import run
from specdec_jax.infer.data import Example, Item
from specdec_jax.request import Drafting, RestPolicy

TEXTS = WORDS.split()[:7]
TARGET, DRAFT = (toy_models.chain_model(VOCAB_SIZE, n) for n in (0, 1))
SILENT = rich.console.Console(quiet=True)
NOISE = toy_models.random_markov(1, VOCAB_SIZE, scale=1.0)


def make(tokenizer, drafter=DRAFT, **options):
  options = {'gamma': 'adaptive', 'max_decode_len': 20} | options
  return sd.Engine(TARGET, drafter, tokenizer=tokenizer, **options)


def above(worth, most=MOST):
  """Proposals are made while their draft is as likely to be kept."""
  return plain_rule([worth] * most, [0.0] * most)


@pytest.fixture(scope='module')
def engine(tokenizer):
  return make(tokenizer)


def test_another_rule_is_the_same_program(engine):
  engine.generate(TEXTS[:2], gamma=above(0.6))
  programs = engine.num_programs
  for worth in (0.1, 0.9):
    engine.generate(TEXTS[2:4], gamma=above(worth))
  assert engine.num_programs == programs
  engine.generate(TEXTS[:2], gamma=MOST)
  assert engine.num_programs == programs + 1


def test_drafters_that_do_not_say_how_sure_they_are(tokenizer):
  engine = make(tokenizer, sd.with_fallback(sd.prompt_lookup(), DRAFT))
  with pytest.raises(ValueError, match='gamma: .*prompt_lookup'):
    engine.generate(TEXTS[:1])
  assert engine.num_programs == 0
  assert engine.generate(TEXTS[:1], gamma=2)[0].text


# With a calibration.

COSTS = {'call_cost': tuple(1 + 0.1 * i for i in range(9)), 'cost_ratio': 0.1}
COSTS |= {'expected_speed_up': 1.5}
CHOICE = dataclasses.replace(toy_calibration.choice(1, 3), **COSTS)


def calibration_of(engine, *choices):
  fields = {'choices': choices or (CHOICE,)}
  return toy_calibration.make(fingerprints=engine.fingerprints, **fields)


def config_of(tmp_path, engine, found, times=1, **changes):
  texts = tmp_path / 'input.txt'
  texts.write_text('\n'.join(TEXTS * times) + '\n')
  if found is not None:
    changes['calibration'] = path = str(tmp_path / 'calibration.json')
    found.save(path)
  changes['mode'] = 'speculative'
  return infer.DecodeConfig(lambda: engine, str(texts), **changes)


def test_a_rule_that_ends_no_draft_is_a_fixed_gamma(engine):
  assert drafting_of(plain_rule([0.0] * 3, [0.0] * 3)) == Drafting(3)
  # Controls: with a price.
  for rule in (calibration_of(engine).rule(1), above(0.5, 3)):
    assert drafting_of(rule) == Drafting(3, rule)


def test_the_rule_of_a_calibration_decides(tokenizer, tmp_path):
  engine = make(tokenizer, fallback=True)
  found = calibration_of(engine)
  summary = infer.decode(config_of(tmp_path, engine, found), console=SILENT)
  assert engine.gamma == summary['gamma'] == 3
  assert summary['rule'] == found.rule(1).to_json()
  assert summary['rule'] == engine.drafting.draft_rule.to_json()
  # The costs of the calls that it really makes.
  want = [1.1, 1.2, 1.5, 1.6]
  np.testing.assert_allclose(engine.fallback.costs, want, rtol=1e-6)
  assert summary['fallback'] == pytest.approx(want)
  identity = run.engine_identity(engine)
  assert identity['rule'] == summary['rule']
  assert identity['fallback'] == summary['fallback']
  # Of calls whose costs are not known there is no rule.
  bare = calibration_of(engine, dataclasses.replace(CHOICE, call_cost=()))
  with pytest.raises(CalibrationError, match='costs of calls'):
    infer.decode(config_of(tmp_path, engine, bare), console=SILENT)


def test_a_smaller_pool_has_costs_of_its_own(tokenizer, tmp_path):
  """Two rows cost nothing; one is dear, so that its drafter rests at once."""
  noise = sd.Model(NOISE, NOISE.params)
  engine = make(tokenizer, noise, gamma=2, fallback=True)
  dear = dataclasses.replace(CHOICE, gamma=2, call_cost=(1.0, 9.0, 9.0))
  free = {'rows': 2, 'call_cost': (1.0,) * 4, 'cost_ratio': 0.0, 'gamma': 3}
  measured = calibration_of(engine, dear, dataclasses.replace(dear, **free))
  fields = {'batching': 'continuous', 'batch_size': 2}
  config = config_of(tmp_path, engine, measured, **fields)
  plan = run.choose_gammas(measured, config, engine, SILENT)
  assert {rows: one.gamma for rows, one in plan.items()} == {2: 3, 1: 2}
  way = run.Decoder(engine, 'speculative', config, plan)
  items = [Item(i, i, Example(text, text)) for i, text in enumerate(TEXTS)]
  rested = [one.stats.fallback_rounds > 0 for _, one in way.run(items)]
  assert sum(rested) == len(TEXTS) % 2 == 1


@pytest.mark.parametrize('gamma, plain', [(None, True), (4, False)])
def test_a_file_is_not_slower_by_default(
  tokenizer, tmp_path, monkeypatch, gamma, plain
):
  toy_models.dear_batches(monkeypatch)
  engine, fields = make(tokenizer, gamma=gamma), {'batch_size': 32}
  fields |= {'output_dir': str(tmp_path / 'out'), 'times': 8}
  config = config_of(tmp_path, engine, None, **fields)
  summary = infer.decode(config, console=SILENT)
  assert (summary['gammas'] == {'32': 0}) == plain, summary


def test_costs_are_made_for_the_gamma_of_each_request(tokenizer):
  costs = RestPolicy(np.ones(3, np.float32), np.float32(2), np.int32(32))
  engine = make(tokenizer, gamma=2, fallback=costs)
  for gamma in (2, 4):  # a `Fallback` is of one gamma: others are guessed
    request = engine.request(TEXTS[:1], gamma=gamma)
    assert request.drafting.rests.costs.shape == (gamma + 1,)
    assert (request.drafting.rests is costs) == (gamma == 2)
  plain = engine.text_request(TEXTS[:1], speculative=False).terms.shared
  assert plain.drafting == Drafting()
