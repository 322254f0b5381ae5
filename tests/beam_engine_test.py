"""Beam search through the engine, a run of lines, and a task: as people ask."""

import io
import json
import pathlib

import jax
import numpy as np
import pytest
import rich.console

import small_vocabulary
from specdec_jax import infer, probs
from specdec_jax.checks import memory
from specdec_jax.decoding.beams import Rule
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import Options, options_of
from specdec_jax.measure import calibration, environment
from specdec_jax.measure.beam_grid import BeamChoice
from specdec_jax.measure.calibration import CalibrationError
from specdec_jax.models.model import Model

TEXTS = ['the red dog runs', '', 'a cat', 'the old house sings here there']


@pytest.fixture(scope='module')
def models():
  found = []
  for seed, layers in ((0, 2), (1, 1)):
    network = small_vocabulary.network(layers)
    found.append(Model(network, network.init(jax.random.key(seed))))
  return found


@pytest.fixture(scope='module')
def engine(models, tokenizer):
  return Engine(
    *models, tokenizer=tokenizer, gamma=2, max_input_len=16, max_decode_len=8
  )


@pytest.fixture(scope='module')
def beams(engine):
  """All three beams of each text, by the plain search."""
  return engine.generate(TEXTS, num_beams=3, num_samples=3, speculative=False)


def outputs(completions):
  return [(one.tokens, one.finish_reason) for one in completions]


def test_beams_come_from_the_worst_to_the_best(engine, beams):
  assert len(beams) == 3 * len(TEXTS)
  assert [one.finish_reason for one in beams[3:6]] == ['empty'] * 3
  for at in (0, 6, 9):
    scores = [one.score for one in beams[at : at + 3]]
    assert scores == sorted(scores)
    found = {tuple(one.tokens) for one in beams[at : at + 3]}
    assert len(found) == 3
  for number in (1, 2):
    fewer = engine.generate(
      TEXTS, num_beams=3, num_samples=number, speculative=False
    )
    best = [beams[at + 3 - number + i] for at in (0, 3, 6, 9)
            for i in range(number)]  # fmt: skip
    assert outputs(fewer) == outputs(best)


def test_the_score_is_the_log_probability_with_the_penalty(engine, beams):
  """Of a finished beam; the engine's own `score` says what its tokens have."""
  options = {'num_beams': 3, 'num_samples': 3, 'speculative': False}
  texts = TEXTS  # the number for which there are programs
  for penalty, of in (
    ({'alpha': 0.0}, lambda n: 1.0),
    ({'alpha': 1.0}, lambda n: (5 + n) / 6),
    ({'length_penalty': 2.0}, lambda n: n**2.0),
  ):
    for one in engine.generate(texts, **options, **penalty)[:3]:
      (scored,) = engine.score(texts[:1], [one.tokens])
      np.testing.assert_allclose(one.log_probs, scored.log_probs, atol=1e-4)
      if 'alpha' in penalty and one.finish_reason != 'stop':
        continue  # T5X gives live beams their log-probability
      expected = sum(one.log_probs) / of(len(one.tokens))
      np.testing.assert_allclose(one.score, expected, atol=1e-4)


def test_speculation_finds_the_same_beams(engine, beams):
  for more in ({}, {'gamma': 1, 'draft_beams': 3}):
    found = engine.generate(
      TEXTS, num_beams=3, num_samples=3, speculative=True, **more
    )
    assert outputs(found) == outputs(beams)
    np.testing.assert_allclose(
      [one.score for one in found if one.score is not None],
      [one.score for one in beams if one.score is not None],
      atol=1e-4,
    )
  best = found[2]
  assert best.stats.num_tokens >= best.stats.num_target_calls > 0
  assert found[1].stats.num_target_calls == 0  # one search, counted once


def test_batches_do_not_change_beams(engine, beams):
  for rows in (1, 2):
    found = engine.generate(
      TEXTS, beam_size=3, num_samples=3, batch_size=rows, speculative=False
    )
    assert outputs(found) == outputs(beams)
  prompts = [[5], [], [6, 7, 8], [9]]
  options = {'num_beams': 2, 'speculative': False, 'prompts': prompts}
  whole = engine.generate(TEXTS, **options)
  parts = engine.generate(TEXTS, **options, batch_size=3)
  assert outputs(whole) == outputs(parts)
  # What is given for each text goes with it, also where nothing is compiled.
  options |= {'temperature': [0.0] * 4, 'example_ids': [7, 8, 9, 10]}
  engine.warmup(TEXTS, **options, batch_size=2)
  before = engine.num_programs
  assert outputs(engine.generate(TEXTS, **options, batch_size=2)) == outputs(
    whole
  )
  assert engine.num_programs == before


def test_warming_up_compiles_what_is_used(engine):
  engine.warmup(TEXTS[:1], num_beams=2, speculative=False)
  before = engine.num_programs
  engine.generate(TEXTS[:1], num_beams=2, alpha=0.1, speculative=False)
  assert engine.num_programs == before


def test_names_of_others():
  assert options_of({'beam_size': 3}).num_beams == 3
  asked = options_of({'num_beams': 2, 'num_return_sequences': 2})
  assert asked.num_samples == 2
  settings = asked.beam_settings(1)
  assert settings.rule is Rule.T5X and settings.draft_width == 4
  np.testing.assert_allclose(settings.penalty, 0.6)
  assert settings.num_candidates == 4
  hf = Options(num_beams=2, length_penalty=1.0).beam_settings(2)
  assert hf.rule is Rule.TRANSFORMERS and hf.num_candidates == 6


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'num_beams': 0}, 'num_beams must be at least 1.*Leave it out'),
    ({'num_beams': 2.5}, 'num_beams: expected a whole number'),
    ({'num_beams': 4000}, 'a step looks at 8000 tokens'),
    ({'num_beams': 2, 'temperature': 1.0}, 'set the temperature to 0'),
    ({'num_beams': 2, 'lenience': 0.5}, 'set lenience to 1'),
    ({'num_beams': 2, 'num_samples': 3}, 'has 2 outputs at most'),
    ({'num_beams': 2, 'stop_strings': 'x'}, 'give stop_ids'),
    ({'num_beams': 2, 'draft_beams': 1}, 'draft_beams must be at least 2'),
    ({'num_beams': 2, 'draft_beams': 4000}, 'draft_beams = 4000: the drafter'),
    ({'num_beams': 2, 'alpha': -1.0}, 'alpha must be at least 0'),
    ({'num_beams': 2, 'alpha': '0.6'}, "alpha: expected .* got '0.6'"),
    (
      {'num_beams': 2, 'length_penalty': float('nan')},
      'length_penalty: expected .* got nan',
    ),
    ({'num_beams': 2, 'alpha': 1.0, 'length_penalty': 1.0}, 'are two rules'),
    ({'alpha': 1.0}, 'give num_beams too'),
    ({'num_beams': 2, 'early_stopping': True}, 'as T5X ends it'),
  ],
)
def test_what_is_refused(engine, options, said):
  before = engine.num_programs
  with pytest.raises(ValueError, match=said):
    engine.generate(TEXTS, **options)
  assert engine.num_programs == before


def test_what_knows_no_beams(engine, models, tokenizer):
  with pytest.raises(ValueError, match='no beam of a beam search is known'):
    list(engine.stream(TEXTS[0], num_beams=2))
  with pytest.raises(ValueError, match='a beam search has several'):
    engine.trace(TEXTS[0], num_beams=2)
  with pytest.raises(ValueError, match='take Engine.generate'):
    Continuous(engine).generate(TEXTS, num_beams=2)
  copies = Engine(
    models[0], prompt_lookup(), tokenizer=tokenizer,
    max_input_len=16, max_decode_len=8,
  )  # fmt: skip
  with pytest.raises(ValueError, match='knows one continuation'):
    copies.generate(TEXTS, num_beams=2, speculative=True)
  # On a CPU nobody asks the drafter unless told to.
  assert len(copies.generate(TEXTS, num_beams=2)) == len(TEXTS)


@pytest.fixture
def lines(tmp_path):
  path = tmp_path / 'in.txt'
  path.write_text('\n'.join(TEXTS) + '\n')
  return str(path)


def test_a_run_over_lines(engine, beams, lines, tmp_path):
  config = infer.DecodeConfig(
    engine=lambda **_: engine,
    input_file=lines,
    output_dir=str(tmp_path / 'out'),
    batch_size=4,
    num_samples=2,
    require_agreement=True,
    beams=infer.Beams('beam', num_beams=3),
  )
  console = rich.console.Console(file=io.StringIO())
  summary = infer.decode(config, console=console)
  assert summary['agreement']['disagreements'] == []
  assert summary['beams']['num_beams'] == 3
  text = (tmp_path / 'out/predictions.jsonl').read_text()
  records = [json.loads(line) for line in text.splitlines()]
  want = [beams[at + 1 : at + 3] for at in (0, 6, 9)]
  have = [records[i] for i in (0, 2, 3)]
  for record, own in zip(have, want, strict=True):
    assert record['prediction_tokens'] == [one.tokens for one in own]
    np.testing.assert_allclose(
      record['score'], [one.score for one in own], atol=1e-4
    )


def test_a_task(engine, beams, lines, tokenizer, tmp_path):
  def run(name, **more):
    config = infer.TaskConfig(
      lambda **_: engine,
      tokenizer,
      lines,
      str(tmp_path / name),
      task_feature_lengths={'inputs': 16, 'targets': 8},
      decoding='plain',
      mode='predict_with_aux',
      num_decodes=3,
      beams=infer.Beams('beam'),
      **more,
    )
    console = rich.console.Console(file=io.StringIO())
    infer.decode_task(config, console=console)
    (path,) = (tmp_path / name).glob('*.jsonl-*-of-*1')
    return [json.loads(line) for line in path.read_text().splitlines()]

  best, every = run('best'), run('all', return_all_decodes=True)
  assert best[0]['prediction_tokens'] == beams[2].tokens
  np.testing.assert_allclose(best[0]['score'], beams[2].score, atol=1e-4)
  assert every[-1]['prediction_tokens'] == [one.tokens for one in beams[9:]]
  np.testing.assert_allclose(
    every[-1]['aux']['scores'], [one.score for one in beams[9:]], atol=1e-4
  )


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'batching': 'continuous'}, "'fixed' with beams .*--batching fixed"),
    ({'lenience': 0.5}, '1.0 with beams.*gin: LENIENCE.*or no beams'),
    ({'sampling': probs.SamplingConfig(1.0)}, 'with beams.*--temperature 0'),
    ({'num_samples': 4}, 'at most 3, .*take a wider one: --num-beams'),
    ({'stop_strings': ('x',)}, 'none with beams.*leave --stop out'),
  ],
)
def test_what_a_run_refuses(engine, options, said):
  with pytest.raises(ValueError, match=said):
    infer.DecodeConfig(
      engine=lambda: engine, beams=infer.Beams('beam', num_beams=3), **options
    )
  with pytest.raises(ValueError, match='Beams.decoder'):
    infer.Beams('beams')


@pytest.mark.parametrize('name', ['alpha', 'length_penalty', 'draft_beams'])
def test_what_is_of_beams_needs_them(name):
  with pytest.raises(ValueError, match=f'{name} = 4 is of a .*--num-beams 4'):
    infer.Beams(**{name: 4})


def test_two_length_penalties_are_refused():
  with pytest.raises(ValueError, match='are two rules; give one'):
    infer.Beams('beam', alpha=0.6, length_penalty=1.0)
  assert infer.Beams('beam').identity['alpha'] == 0.6
  assert infer.Beams('beam', length_penalty=1.0).identity['alpha'] is None


def run_by(best, engine, lines, **options):
  """The summary of a run by a calibration with this beam search."""
  path = str(pathlib.Path(lines).parent / 'calibration.json')
  calibration.Calibration(
    engine.fingerprints,
    environment.describe()['device'],
    0.0,
    (calibration.Choice(1, 2, 1.5, (1.4, 1.6), (1.0, 1.2, 1.5)),),
    {},
    beams=best,
  ).save(path)
  config = infer.DecodeConfig(
    engine=lambda **_: engine,
    input_file=lines,
    batch_size=2,
    calibration=path,
    beams=infer.Beams('beam', num_beams=3, **options),
  )
  return infer.decode(config, console=rich.console.Console(file=io.StringIO()))


def test_a_calibration_chooses_gamma_and_the_drafters_beams(engine, lines):
  usual = engine.gamma
  summary = run_by(BeamChoice(3, 1, 4, 1.5), engine, lines)
  engine.gamma = usual
  assert summary['gammas'] == {'2': 1}
  assert summary['beams']['draft_beams'] == 4
  assert summary['agreement']['disagreements'] == []
  told = run_by(BeamChoice(3, 1, 4, 1.5), engine, lines, draft_beams=5)
  engine.gamma = usual
  assert told['beams']['draft_beams'] == 5


def test_beams_that_do_not_pay_are_searched_plainly(engine, lines):
  summary = run_by(BeamChoice(3, 0, 0, 1.0), engine, lines)
  assert 'plain' in summary and 'speculative' not in summary


@pytest.mark.parametrize(
  ('best', 'said'),
  [(None, 'no beams'), (BeamChoice(2, 1, 4, 1.5), 'a beam search of width 2')],
)
def test_beams_that_were_not_measured(engine, lines, best, said):
  with pytest.raises(CalibrationError, match=f'{said}.*--num-beams 3'):
    run_by(best, engine, lines)


def test_a_drafter_does_not_rest_in_a_beam_search(models, tokenizer, lines):
  rests = Engine(
    *models, tokenizer=tokenizer, fallback=True,
    max_input_len=16, max_decode_len=8,
  )  # fmt: skip
  config = infer.DecodeConfig(
    engine=lambda **_: rests, input_file=lines, beams=infer.Beams('beam')
  )
  with pytest.raises(ValueError, match='--fallback.*not in a beam search'):
    infer.decode(config, console=rich.console.Console(file=io.StringIO()))


def test_a_width_that_no_memory_holds(models, tokenizer, monkeypatch):
  monkeypatch.setattr(memory, 'device_bytes', lambda *_: 2**21)
  small = Engine(
    *models, tokenizer=tokenizer, max_input_len=16, max_decode_len=512
  )
  texts = TEXTS[:1]
  with pytest.raises(memory.DoesNotFitError, match='or fewer beams'):
    small.generate(texts, num_beams=12, speculative=False)
  assert small.num_programs == 0
  assert len(small.generate(texts, num_beams=1, max_length=8)) == 1
