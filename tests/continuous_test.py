"""Continuous batching: outputs of fixed batches, in order, and its runs."""

import contextlib
import dataclasses
import json
import types

import jax
import jax.monitoring
import numpy as np
import pytest
import rich.console

import small_vocabulary
import toy_models
from small_vocabulary import WORDS
from specdec_jax import infer
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import Drafting
from specdec_jax.engine.scheduler import Continuous, DraftPolicy, PoolSettings
from specdec_jax.infer import resume
from specdec_jax.infer import run as run_lib
from specdec_jax.infer.data import PREDICTIONS
from specdec_jax.models.model import Model

MAX_INPUT, MAX_OUTPUT, GAMMA = 64, 16, 3
POISON = 'Q'


def make_texts(count, seed=0):
  """Ragged; one in four needs the wider of two input buckets."""
  rng = np.random.default_rng(seed)
  words = WORDS.split()
  sizes = rng.integers(1, 8, count)
  sizes[::4] += 20
  return [' '.join(rng.choice(words, size)) for size in sizes]


TEXTS = make_texts(20)
# Some rows take the argmax, some are drawn: one program for both.
TEMPERATURES = [float(i % 3 > 0) for i in range(len(TEXTS))]
# Random weights seldom end by themselves.
STOPS = list(range(3, small_vocabulary.VOCAB_SIZE, 8))
SAMPLED = {
  'temperature': TEMPERATURES,
  'seed': 5,
  'stop_ids': STOPS,
}


@pytest.fixture(scope='module')
def engine(tokenizer):
  """An input with `POISON` makes its target's logits NaN."""
  chain = toy_models.noisy_chain(small_vocabulary.VOCAB_SIZE)
  poison = tokenizer.encode(POISON)[-1]
  offset = chain.params['offset'].at[poison].set(np.nan)
  return Engine(
    Model(chain, chain.params | {'offset': offset}),
    toy_models.chain_model(small_vocabulary.VOCAB_SIZE, noise=1),
    tokenizer=tokenizer,
    gamma=GAMMA,
    max_input_len=MAX_INPUT,
    max_decode_len=MAX_OUTPUT,
  )


@pytest.fixture(scope='module')
def decoder(engine):
  return Continuous(engine, PoolSettings(rows=4))


@contextlib.contextmanager
def nothing_compiles():
  """Fails if anything is compiled inside."""
  compiled = []

  def listen(event, duration, **_):
    del duration
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert not compiled


def same(have, want):
  """All but log-probabilities exactly; those to rounding."""
  assert len(have) == len(want)
  for one, other in zip(have, want, strict=True):
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert dataclasses.replace(one, log_probs=[]) == dataclasses.replace(
      other, log_probs=[]
    )


@pytest.fixture(scope='module')
def want(engine):
  """What the engine gives for `SAMPLED`, all together."""
  return engine.generate(TEXTS, **SAMPLED)


def test_samples_do_not_depend_on_slots_or_neighbours(decoder, want):
  have = decoder.generate(TEXTS, **SAMPLED)
  same(have, want)
  assert len({len(one.tokens) for one in want}) > 3
  calls = sum(one.stats.num_target_calls for one in want)
  assert calls / 4 <= decoder.rounds[GAMMA] < calls


def test_completions_come_when_they_are_finished(decoder):
  found = dict(decoder.run(TEXTS, **SAMPLED))
  assert list(found) != sorted(found) == list(range(len(TEXTS)))
  lengths = [len(TEXTS[index]) for index in found]
  half = len(lengths) // 2
  assert np.mean(lengths[:half]) < np.mean(lengths[half:])
  buffers = len(jax.live_arrays())
  with nothing_compiles():  # whatever the order of the texts is
    for _ in decoder.run(
      TEXTS[::-1], **SAMPLED | {'temperature': TEMPERATURES[::-1]}
    ):
      pass
  assert len(jax.live_arrays()) == buffers


def test_rows_come_while_others_run_and_are_cancelled(engine, decoder, want):
  """Waiting or running, those that nobody wants give nothing; others theirs."""
  batch = engine.text_batch(TEXTS, True, **SAMPLED)
  rows = decoder._rows(batch)
  scheduler = decoder._scheduler(batch, rows)
  updates = []
  for at in range(0, len(rows), 3):
    scheduler.submit(rows[at : at + 3])
    scheduler.cancel(rows[at : at + 1])
    updates += scheduler.step()
    if at == 9:
      scheduler.cancel(row for row in rows[:9] if row in scheduler._slots.rows)
  updates += scheduler.drain()
  done = {row.index: update.completion for row, update in updates}
  assert set(done) == {row.index for row in rows if not row.is_cancelled}
  assert len(done) < 2 * len(rows) / 3 + 1
  same([done[i] for i in sorted(done)], [want[i] for i in sorted(done)])
  assert not scheduler.has_work


def test_bad_texts_are_reported_and_the_rest_goes_on(engine, decoder, want):
  bad = {2: 'the dog ' * 90, 5: '', 7: [3, 999]}
  texts = [bad.get(i, text) for i, text in enumerate(TEXTS)]
  have = decoder.generate(texts, **SAMPLED)
  rest = [i for i in range(len(TEXTS)) if i not in bad]
  same([have[i] for i in rest], [want[i] for i in rest])
  assert have[2].finish_reason == have[7].finish_reason == 'error'
  assert 'Text 2: ' in have[2].error and 'max_input_len' in have[2].error
  assert 'Text 7: ' in have[7].error and '999' in have[7].error
  assert have[5].finish_reason == 'empty'
  assert decoder.generate(['', '']) == [have[5]] * 2
  assert decoder.generate([]) == []
  with pytest.raises(ValueError, match='Text 7: .*999'):
    engine.generate(TEXTS[:7] + [bad[7]])


@pytest.mark.slow
def test_gamma_by_the_rows_that_are_left(engine):
  """Plainly while many run, then with a drafter, at temperature 0."""
  plan = {8: Drafting(), 4: Drafting(2), 1: Drafting(GAMMA)}
  decoder = Continuous(engine, PoolSettings(gammas=plan))
  want = engine.generate(TEXTS, speculative=False, stop_ids=STOPS)
  # A pool is as wide as the last texts, and the first pool is narrow.
  assert decoder.warmup(TEXTS, stop_ids=STOPS) > 0
  with nothing_compiles():
    have = decoder.generate(TEXTS, stop_ids=STOPS)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  assert set(decoder.rounds) == {0, 2, GAMMA}, 'the pool never shrank'
  for one in have:
    assert sum(one.stats.histogram) == one.stats.num_target_calls
  assert sum(one.stats.num_tested for one in have) > 0
  # Few texts begin in a smaller pool.
  same(decoder.generate(TEXTS[:1]), engine.generate(TEXTS[:1]))
  assert set(decoder.rounds) == {GAMMA}


def test_warmup_compiles_what_is_needed(engine):
  decoder = Continuous(engine, PoolSettings(rows=2))
  texts = TEXTS[:6]
  assert decoder.warmup([]) == 0.0
  assert decoder.warmup(texts, max_length=4) > 0
  with nothing_compiles():
    decoder.generate(texts, max_length=4)
  assert decoder.warmup(texts[::-1], max_length=2) == 0.0


def test_bad_settings():
  for name, value in (
    ('rows', 0),
    ('refill', 0),
    ('gammas', {}),
    ('gammas', {0: 1}),
  ):
    with pytest.raises(ValueError, match=name):
      PoolSettings(**{name: value})


def test_prompts_and_stop_strings(engine):
  texts = TEXTS[1:4]
  whole = engine.generate(texts, stop_ids=[])
  prompts = [whole[0].tokens[:2], [], whole[2].tokens[:5]]
  letter = next(char for char in whole[1].text if char.isalpha())
  options = {'stop_ids': [], 'prompts': prompts, 'stop_strings': [letter]}
  decoder = Continuous(engine, PoolSettings(rows=2))
  have = decoder.generate(texts, **options)
  same(have, engine.generate(texts, **options))
  assert 'stop_string' in {one.finish_reason for one in have}
  # Its slot is free then.
  without = decoder.generate(texts, **options | {'stop_strings': ()})
  calls, more = (
    sum(one.stats.num_target_calls for one in done) for done in (have, without)
  )
  assert calls < more


@pytest.mark.parametrize(
  'devices, rows, gammas, sizes, become',
  [
    (1, 3, {4: 2, 1: 3}, [1, 4], {4: 2, 1: 3}),
    (2, 3, {4: 2, 1: 3}, [2, 4], {2: 3, 4: 2}),
    # Of pools that become one it is the larger one's gamma.
    (2, 2, {2: 3, 1: 5, 3: 1}, [2, 4], {2: 3, 4: 1}),
    (8, 9, None, [16], {9: 2}),
  ],
)
def test_pools_are_multiples_of_the_devices(
  devices, rows, gammas, sizes, become
):
  plan = gammas and {n: Drafting(gamma) for n, gamma in gammas.items()}
  settings = PoolSettings(rows=rows, gammas=plan)
  assert settings.pool_sizes(devices) == sizes
  request = types.SimpleNamespace(gamma=2, rule=None, fallback=None)
  policy = DraftPolicy(settings, request, devices)
  assert policy.gammas == become
  # A sample has the engine's gamma, whatever greedy rows of its pool have.
  for size in sizes:
    gammas = [policy.of(size, varies, False).gamma for varies in (True, False)]
    assert gammas == [become.get(size, 2), 2]


# A data set: bad lines, and going on after a kill.

LINES = [text for text in make_texts(16, 2) if len(text) < 60]
TOO_LONG, EMPTY, INVALID = 3, 5, 7


def run(engine, folder, **changes):
  """The summary and the records."""
  lines = list(LINES)
  lines[TOO_LONG], lines[INVALID] = 'the dog ' * 40, f'a {POISON}'
  lines[EMPTY] = ''
  folder.mkdir(exist_ok=True)
  (folder / 'lines.txt').write_text('\n'.join(lines))
  settings = {
    'input_file': str(folder / 'lines.txt'),
    'output_dir': str(folder / 'out'),
    'decoding': 'speculative',
    'options': infer.Options(temperature=1.0),
    'batch_size': 2,
    'checkpoint_period': 2,
    'batching': 'continuous',
  }
  config = infer.DecodeConfig(lambda: engine, **(settings | changes))
  summary = infer.decode(config, console=rich.console.Console(quiet=True))
  text = (folder / 'out' / PREDICTIONS).read_text('utf-8')
  records = [json.loads(line) for line in text.splitlines()]
  return summary, records


@pytest.fixture(scope='module')
def whole(engine, folder):
  """The folder, the summary and the records of a run."""
  return folder / 'whole', *run(engine, folder / 'whole')


def test_bad_lines(engine, whole):
  folder, summary, records = whole
  assert len(records) == len(LINES)
  errors = {i: x['error'] for i, x in enumerate(records) if 'error' in x}
  assert set(errors) == {TOO_LONG, INVALID}
  for i, error in zip(sorted(errors), summary['errors'], strict=True):
    assert error.startswith(f'line {i + 1}: ')
  assert 'NaN' in errors[INVALID]
  assert records[EMPTY]['aux']['finish_reason'] == 'empty'
  good = set(range(len(LINES))) - {TOO_LONG, INVALID, EMPTY}
  assert all(records[i]['prediction_tokens'] for i in good)
  # Another way of batching is another configuration.
  with pytest.raises(ValueError, match='finished results'):
    run(engine, folder, batching='fixed')


def test_a_pool_keeps_what_is_finished_while_it_runs(
  engine, whole, tmp_path, monkeypatch
):
  """By the clock; only the rest is decoded when it is started again."""
  monkeypatch.setattr(run_lib, '_KEEP_SECONDS', 0.0)
  append, kept = resume.Folder.append, []

  def dies(folder, work):
    if len(kept) == 3:
      raise KeyboardInterrupt
    append(folder, work)
    kept.extend(work['speculative']['completions'])

  with monkeypatch.context() as patch:
    patch.setattr(resume.Folder, 'append', dies)
    with pytest.raises(KeyboardInterrupt):
      run(engine, tmp_path / 'killed', checkpoint_period=100)
  assert len(kept) == 3
  given, real = [], Continuous.run

  def counted(pool, texts, **options):
    given.extend(texts)
    return real(pool, texts, **options)

  monkeypatch.setattr(Continuous, 'run', counted)
  _, records = run(engine, tmp_path / 'killed')
  assert records == whole[2] and len(given) == len(LINES) - 2 - len(kept)
