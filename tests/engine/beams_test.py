"""Beam search through the engine, a run of lines, and a task: as people ask."""

import json

import numpy as np
import pytest
import rich.console

import small_vocabulary
import specdec_jax as sd
import toy_calibration
import toy_models
from small_vocabulary import VOCAB_SIZE
from specdec_jax import infer
from specdec_jax.checks import memory

TEXTS = ['the red dog runs', '', 'a cat', 'the old house sings here there']
LIMITS = {'gamma': 2, 'max_input_len': 16, 'max_decode_len': 8}
ALL_BEAMS = {'num_beams': 3, 'num_samples': 3}
PLAIN_BEAMS = ALL_BEAMS | {'speculative': False}


@pytest.fixture(scope='module')
def engine(tokenizer):
  return toy_models.chain_engine(tokenizer, **LIMITS)


@pytest.fixture(scope='module')
def beams(engine):
  """All three beams of each text, by the plain search."""
  return engine.generate(TEXTS, **PLAIN_BEAMS)


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
    fewer = engine.generate(TEXTS, **PLAIN_BEAMS | {'num_samples': number})
    best = [one for i, one in enumerate(beams) if i % 3 >= 3 - number]
    assert outputs(fewer) == outputs(best)


def test_the_score_is_the_log_probability_with_the_penalty(engine, beams):
  """Of a finished beam; the engine's own `score` says what its tokens have."""
  for penalty, of in (
    ({'alpha': 1.0}, lambda n: (5 + n) / 6),
    ({'length_penalty': 2.0}, lambda n: n**2.0),
  ):
    for one in engine.generate(TEXTS, **PLAIN_BEAMS, **penalty)[:3]:
      (scored,) = engine.score(TEXTS[:1], [one.tokens])
      np.testing.assert_allclose(one.log_probs, scored.log_probs, atol=1e-4)
      if 'alpha' in penalty and one.finish_reason != 'stop':
        continue  # T5X gives live beams their log-probability
      expected = sum(one.log_probs) / of(len(one.tokens))
      np.testing.assert_allclose(one.score, expected, atol=1e-4)


def test_speculation_finds_the_same_beams(engine, beams):
  for more in ({}, {'gamma': 1, 'draft_beams': 3}):
    found = engine.generate(TEXTS, **ALL_BEAMS, speculative=True, **more)
    assert outputs(found) == outputs(beams)
    have, want = ([x.score for x in made] for made in (found, beams))
    assert have[3:6] == want[3:6] == [None] * 3  # of the text without a word
    have[3:6] = want[3:6] = []
    np.testing.assert_allclose(have, want, atol=1e-4)
  best = found[2]
  assert best.stats.num_tokens >= best.stats.num_target_calls > 0
  assert found[1].stats.num_target_calls == 0  # one search, counted once


@pytest.mark.slow
def test_batches_do_not_change_beams(engine, beams):
  found = engine.generate(TEXTS, **PLAIN_BEAMS, batch_size=2)
  assert outputs(found) == outputs(beams)
  # What is given for each text goes with it, also where nothing is compiled.
  options = PLAIN_BEAMS | {'prompts': [[5], [], [6, 7, 8], [9]]}
  options |= {'temperature': [0.0] * 4, 'example_ids': [7, 8, 9, 10]}
  whole = engine.generate(TEXTS, **options)
  engine.warmup(TEXTS, **options, batch_size=2)
  before = engine.num_programs
  parts = engine.generate(TEXTS, **options, batch_size=2)
  assert outputs(parts) == outputs(whole) != outputs(beams)
  assert engine.num_programs == before


def test_what_knows_no_beams(engine, tokenizer):
  for ask in (engine.stream, engine.trace):
    with pytest.raises(ValueError, match='num_beams'):
      list(ask(TEXTS[0], num_beams=2))
  model = toy_models.chain_model(VOCAB_SIZE)
  copies = sd.Engine(model, sd.prompt_lookup(), tokenizer=tokenizer, **LIMITS)
  with pytest.raises(ValueError, match='drafter'):
    copies.generate(TEXTS, num_beams=2, speculative=True)
  # On a CPU nobody asks the drafter unless told to.
  assert len(copies.generate(TEXTS, num_beams=2)) == len(TEXTS)


def decode_lines(engine, folder, samples=1, **changes):
  """Decodes the texts as a task; returns the records."""
  lines, out = folder / 'in.txt', folder / 'out'
  lines.write_text('\n'.join(TEXTS) + '\n')
  fields = {'mixture_or_task_name': str(lines), 'output_dir': str(out)}
  fields |= {'task_feature_lengths': {'inputs': 16, 'targets': 8}}
  fields |= {'task_mode': 'predict_with_aux', 'batch_size': 4} | changes
  fields |= {'options': infer.Options(num_beams=3, num_samples=samples)}
  config = infer.DecodeConfig(
    lambda **_: engine, tokenizer=engine.tokenizer, **fields
  )
  infer.decode(config, console=rich.console.Console(quiet=True))
  (path,) = out.glob('*.jsonl-*-of-*1')
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('samples', [1, 3])
def test_a_task(engine, beams, tmp_path, samples):
  *_, found = decode_lines(engine, tmp_path, samples, mode='plain')
  tokens, scores = zip(*((x.tokens, x.score) for x in beams[9:]), strict=True)
  have = found['aux']['scores'] if samples > 1 else [found['score']]
  np.testing.assert_allclose(have, scores[-samples:], atol=1e-4)
  want = [*tokens] if samples > 1 else tokens[-1]
  assert found['prediction_tokens'] == want


def test_what_does_not_go_together(engine, tokenizer, tmp_path, monkeypatch):
  path = str(tmp_path / 'calibration.json')
  toy_calibration.make(fingerprints=engine.fingerprints).save(path)
  rests = toy_models.chain_engine(tokenizer, fallback=True, **LIMITS)
  for of, options, field in (
    (engine, {'calibration': path}, 'calibration.*num_beams'),
    (engine, {'batching': 'continuous'}, 'batching'),
    (rests, {}, 'fallback'),
  ):
    with pytest.raises(ValueError, match=field):
      decode_lines(of, tmp_path, **options)
  # A width that no memory holds.
  free = [2**30]
  monkeypatch.setattr(memory, 'device_bytes', lambda *_: free[0])
  network = small_vocabulary.network(1)
  model = sd.Model(network, small_vocabulary.weights(network, 0))
  small = sd.Engine(model, tokenizer=tokenizer, max_decode_len=512)
  free[0] = 2**16
  with pytest.raises(memory.DoesNotFitError, match='or fewer beams'):
    small.generate(TEXTS[:1], num_beams=12, speculative=False)
  assert small.num_programs == 0
