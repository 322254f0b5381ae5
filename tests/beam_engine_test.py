"""Beam search through the engine, a run of lines, and a task: as people ask."""

import json

import jax
import numpy as np
import pytest
import rich.console

import calibration_test
import small_vocabulary
import toy_models
from small_vocabulary import VOCAB_SIZE
from specdec_jax import infer
from specdec_jax.checks import memory
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scheduler import Continuous
from specdec_jax.models.model import Model

TEXTS = ['the red dog runs', '', 'a cat', 'the old house sings here there']


LIMITS = {'gamma': 2, 'max_input_len': 16, 'max_decode_len': 8}


@pytest.fixture(scope='module')
def engine(tokenizer):
  return toy_models.chain_engine(tokenizer, **LIMITS)


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
    assert len({tuple(one.tokens) for one in beams[at : at + 3]}) == 3
  for number in (1, 2):
    fewer = engine.generate(
      TEXTS, num_beams=3, num_samples=number, speculative=False
    )
    best = [one for i, one in enumerate(beams) if i % 3 >= 3 - number]
    assert outputs(fewer) == outputs(best)


def test_the_score_is_the_log_probability_with_the_penalty(engine, beams):
  """Of a finished beam; the engine's own `score` says what its tokens have."""
  options = {'num_beams': 3, 'num_samples': 3, 'speculative': False}
  for penalty, of in (
    ({'alpha': 0.0}, lambda n: 1.0),
    ({'alpha': 1.0}, lambda n: (5 + n) / 6),
    ({'length_penalty': 2.0}, lambda n: n**2.0),
    ({'length_penalty': -1.0}, lambda n: n**-1.0),
  ):
    for one in engine.generate(TEXTS, **options, **penalty)[:3]:
      (scored,) = engine.score(TEXTS[:1], [one.tokens])
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
  found = engine.generate(
    TEXTS, beam_size=3, num_samples=3, batch_size=2, speculative=False
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


def test_what_knows_no_beams(engine, tokenizer):
  for ask in (
    lambda **beams: list(engine.stream(TEXTS[0], **beams)),
    lambda **beams: engine.trace(TEXTS[0], **beams),
    lambda **beams: Continuous(engine).generate(TEXTS, **beams),
  ):
    with pytest.raises(ValueError, match='num_beams'):
      ask(num_beams=2)
  model = toy_models.chain_model(VOCAB_SIZE)
  copies = Engine(model, prompt_lookup(), tokenizer=tokenizer, **LIMITS)
  with pytest.raises(ValueError, match='drafter'):
    copies.generate(TEXTS, num_beams=2, speculative=True)
  # On a CPU nobody asks the drafter unless told to.
  assert len(copies.generate(TEXTS, num_beams=2)) == len(TEXTS)


def decode_lines(engine, folder, **changes):
  """Decodes the texts as a task; returns the records."""
  lines, out = folder / 'in.txt', folder / 'out'
  lines.write_text('\n'.join(TEXTS) + '\n')
  options = {
    'mixture_or_task_name': str(lines),
    'output_dir': str(out),
    'mode': 'predict_with_aux',
    'batch_size': 4,
    'options': infer.Options(num_beams=3),
  }
  config = infer.DecodeConfig(
    lambda **_: engine,
    tokenizer=engine.tokenizer,
    task_feature_lengths={'inputs': 16, 'targets': 8},
    **(options | changes),
  )
  infer.decode(config, console=rich.console.Console(quiet=True))
  (path,) = out.glob('*.jsonl-*-of-*1')
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('samples', [1, 3])
def test_a_task(engine, beams, tmp_path, samples):
  options = infer.Options(num_beams=3, num_samples=samples)
  found = decode_lines(engine, tmp_path, decoding='plain', options=options)
  if samples == 1:
    assert found[0]['prediction_tokens'] == beams[2].tokens
    np.testing.assert_allclose(found[0]['score'], beams[2].score, atol=1e-4)
    return
  assert found[-1]['prediction_tokens'] == [one.tokens for one in beams[9:]]
  np.testing.assert_allclose(
    found[-1]['aux']['scores'], [one.score for one in beams[9:]], atol=1e-4
  )


def test_a_calibration_is_of_single_outputs(engine, tmp_path):
  path = str(tmp_path / 'calibration.json')
  calibration_test.make(fingerprints=engine.fingerprints).save(path)
  with pytest.raises(ValueError, match='calibration.*num_beams'):
    decode_lines(engine, tmp_path, calibration=path)


def test_what_does_not_go_together(tokenizer, tmp_path, monkeypatch):
  rests = toy_models.chain_engine(tokenizer, fallback=True, **LIMITS)
  with pytest.raises(ValueError, match='fallback'):
    decode_lines(rests, tmp_path)
  with pytest.raises(ValueError, match='batching'):
    decode_lines(rests, tmp_path, batching='continuous')
  with pytest.raises(ValueError, match='alpha'):
    infer.Options(alpha=4)
  # A width that no memory holds.
  free = [2**30]
  monkeypatch.setattr(memory, 'device_bytes', lambda *_: free[0])
  network = small_vocabulary.network(1)
  model = Model(network, network.init(jax.random.key(0)))
  small = Engine(model, tokenizer=tokenizer, max_decode_len=512)
  free[0] = 2**16
  with pytest.raises(memory.DoesNotFitError, match='or fewer beams'):
    small.generate(TEXTS[:1], num_beams=12, speculative=False)
  assert small.num_programs == 0
