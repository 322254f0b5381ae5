"""Continuous batching: outputs of fixed batches, in order, and its runs."""

import dataclasses
import gc
import threading
import weakref
from unittest import mock

import jax
import jax.monitoring
import numpy as np
import pytest

import small_vocabulary
import specdec_jax as sd
import toy_models
from compilations import nothing_compiles
from small_vocabulary import make_texts
from specdec_jax.engine import scheduler
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.infer import resume
from specdec_jax.infer import run as run_lib
from specdec_jax.models import backend
from specdec_jax.request import Drafting
from toy_pools import Pooled
from toy_runs import run

GAMMA = 3
POISON = 'Q'
TEXTS = make_texts(20)
# Some rows take the argmax, some are drawn: one program for both.
TEMPERATURES = [float(i % 3 > 0) for i in range(len(TEXTS))]
# Random weights seldom end by themselves.
STOPS = list(range(3, small_vocabulary.VOCAB_SIZE, 8))
SAMPLED = {'temperature': TEMPERATURES, 'seed': 5, 'stop_ids': STOPS}


@pytest.fixture(scope='module')
def engine(tokenizer):
  """An input with `POISON` makes its target's logits NaN."""
  chain = toy_models.noisy_chain(small_vocabulary.VOCAB_SIZE)
  poison = tokenizer.encode(POISON)[-1]
  offset = chain.params['offset'].at[poison].set(np.nan)
  target = sd.Model(chain, chain.params | {'offset': offset})
  draft = toy_models.chain_model(small_vocabulary.VOCAB_SIZE, noise=1)
  limits = {'gamma': GAMMA, 'max_input_len': 64, 'max_decode_len': 16}
  return sd.Engine(target, draft, tokenizer=tokenizer, **limits)


@pytest.fixture(scope='module')
def decoder(engine):
  return Pooled(engine, PoolSettings(rows=4))


def same(have, want):
  """All but log-probabilities exactly; those to rounding."""
  assert len(have) == len(want)
  for one, other in zip(have, want, strict=True):
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert dataclasses.replace(one, log_probs=other.log_probs) == other


@pytest.fixture(scope='module')
def want(engine):
  """What the engine gives for `SAMPLED`, all together."""
  return engine.generate(TEXTS, **SAMPLED)


@pytest.mark.slow
def test_samples_do_not_depend_on_slots_or_neighbours(decoder, want):
  """They come when they are finished."""
  found = dict(decoder.run(TEXTS, **SAMPLED))
  assert list(found) != sorted(found)
  same([found[i] for i in sorted(found)], want)
  assert len({len(one.tokens) for one in want}) > 3
  calls = sum(one.stats.num_target_calls for one in want)
  assert calls / 4 <= decoder.rounds[GAMMA] < calls
  buffers = len(jax.live_arrays())
  turned = SAMPLED | {'temperature': TEMPERATURES[::-1]}
  with nothing_compiles():  # whatever the order of the texts is
    dict(decoder.run(TEXTS[::-1], **turned))
  assert len(jax.live_arrays()) == buffers


def test_bad_texts_are_reported_and_the_rest_goes_on(engine, decoder, want):
  bad = {2: 'the dog ' * 90, 5: '', 7: [3, 999], 9: f'a {POISON}'}
  texts = [bad.get(i, text) for i, text in enumerate(TEXTS)]
  have = decoder.generate(texts, **SAMPLED)
  rest = [i for i in range(len(TEXTS)) if i not in bad]
  same([have[i] for i in rest], [want[i] for i in rest])
  for i, why in ((2, 'max_input_len'), (7, '999'), (9, 'NaN')):
    assert have[i].finish_reason == 'error' and why in have[i].error
  assert have[5].finish_reason == 'empty'
  assert decoder.generate(['', '']) == [have[5]] * 2
  assert decoder.generate([]) == []
  with pytest.raises(ValueError, match='Text 7: .*999'):
    engine.generate(TEXTS[:7] + [bad[7]])


@pytest.mark.slow
def test_gamma_by_the_rows_that_are_left(engine):
  """Plainly while many run, then with a drafter, at temperature 0."""
  plan = {8: Drafting(), 4: Drafting(2), 1: Drafting(GAMMA)}
  decoder = Pooled(engine, PoolSettings(gammas=plan))
  want = engine.generate(TEXTS, speculative=False, stop_ids=STOPS)
  # A pool is as wide as the last texts, and the first pool is narrow.
  assert decoder.warmup(TEXTS, stop_ids=STOPS) > 0
  with nothing_compiles():
    have = decoder.generate(TEXTS, stop_ids=STOPS)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  assert set(decoder.rounds) == {0, 2, GAMMA}, 'the pool never shrank'
  assert sum(one.stats.num_tested for one in have) > 0
  # Few texts begin in a smaller pool.
  same(decoder.generate(TEXTS[:1]), engine.generate(TEXTS[:1]))
  assert set(decoder.rounds) == {GAMMA}


def test_warmup_compiles_what_is_needed(engine):
  decoder = Pooled(engine, PoolSettings(rows=2))
  texts = TEXTS[:6]
  assert decoder.warmup(texts, max_length=4) > 0
  with nothing_compiles():
    decoder.generate(texts, max_length=4)
  assert decoder.warmup(texts[::-1], max_length=2) == 0.0
  # Programs that are forgotten are freed.
  programs, ruled = engine.programs, {'no_repeat_ngram_size': 2}
  assert decoder.warmup(texts[:1], **ruled) > 0
  assert decoder.warmup(texts[:1], **ruled) == 0.0
  last = weakref.ref([*programs._pools.values()][-1])
  programs.forget(last())
  gc.collect()
  assert last() is None


def test_a_lane_has_the_programs_that_were_compiled_for_it(engine):
  """Whether they are compiled now or have been; so none is compiled later."""
  ordinary = mock.Mock(lock=threading.Condition())
  settings = PoolSettings(rows=4)
  lanes = scheduler.Scheduler(engine.programs, settings, ordinary=ordinary)
  (row,) = engine.text_request(['a'], no_repeat_ngram_size=2).rows
  compiles, runs = lanes._pool_of([row]), lanes._pool_of([row], set())
  assert compiles.programs is runs.programs


def test_bad_settings():
  wrong = ('rows', 0), ('refill', 0), ('gammas', {}), ('gammas', {0: 1})
  for name, value in wrong:
    with pytest.raises(ValueError, match=name):
      PoolSettings(**{name: value})


def test_short_inputs_are_read_together():
  for rows, refill, width, want in (
    *((8, None, 16, 4), (8, None, 32, 2), (8, None, 512, 1), (32, None, 16, 4)),
    *((64, None, 512, 8), (2, None, 1, 1), (1, None, 16, 1), (8, 1, 16, 1)),
  ):
    plan = PoolSettings(refill=refill, gammas={rows: Drafting(2)})
    for settings in (PoolSettings(rows=rows, refill=refill), plan):
      assert settings.refill_of(width) == want, (rows, refill, width)


def test_pools_are_multiples_of_the_devices():
  for devices, rows, gammas, sizes in (
    *((1, 3, (4, 1), [1, 4]), (2, 3, (4, 1), [2, 4])),
    *((2, 2, (2, 1, 3), [2, 4]), (8, 9, (), [16])),
  ):
    plan = dict.fromkeys(gammas, Drafting(2)) or None
    settings = PoolSettings(rows=rows, gammas=plan)
    assert settings.pool_sizes(devices) == sizes, (devices, gammas)


def test_a_pool_keeps_what_is_finished_while_it_runs(
  engine, tmp_path, monkeypatch
):
  """By the clock; only the rest is decoded when it is started again."""
  lines = [text for text in make_texts(16, 2) if len(text) < 60]
  data = '\n'.join(lines).encode()
  options = {'mode': 'speculative', 'temperature': 1.0, 'batch_size': 4}
  options |= {'batching': 'continuous', 'checkpoint_period': 100}
  options |= {'stop_ids': STOPS}  # the programs of the tests above
  monkeypatch.setattr(run_lib, '_KEEP_SECONDS', 0.0)
  append, kept, most = resume.Folder.append, [], [3]

  def counted(folder, work):
    if most and len(kept) >= most[0]:
      raise KeyboardInterrupt
    append(folder, work)
    kept.extend(work['speculative']['completions'])

  monkeypatch.setattr(resume.Folder, 'append', counted)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, data, engine, **options)
  assert most.pop() <= len(kept) < len(lines)
  _, records, _ = run(tmp_path, data, engine, **options)
  assert len(kept) == len(lines)
  # Another way of batching is another configuration.
  with pytest.raises(ValueError, match='batching'):
    run(tmp_path, data, engine, **options | {'batching': 'fixed'})
  assert run(tmp_path, data, engine, overwrite=True, **options)[1] == records


@pytest.fixture
def cores(monkeypatch):
  """Two pools of two rows share a pool of four; says which threads step."""
  monkeypatch.setattr(scheduler, '_LEAST_ROWS', 2)
  monkeypatch.setattr(backend, 'num_cores', lambda: 2)
  threads, step = set(), scheduler.SlotPool.step

  def noted(pool):
    threads.add(threading.current_thread())
    return step(pool)

  monkeypatch.setattr(scheduler.SlotPool, 'step', noted)
  return threads


def test_pools_side_by_side_give_the_same(decoder, want, cores):
  same(decoder.generate(TEXTS, **SAMPLED), want)
  assert len(cores) == 2 and threading.current_thread() not in cores
  cores.clear()
  few = SAMPLED | {'temperature': TEMPERATURES[:3]}  # too few for two pools
  same(decoder.generate(TEXTS[:3], **few), want[:3])
  assert cores == {threading.current_thread()}


def test_pools_side_by_side_end_with_their_caller(decoder, cores, monkeypatch):
  def all_end():
    for thread in cores:
      thread.join(20)
      assert not thread.is_alive()

  outputs = decoder.run(TEXTS * 20, **SAMPLED | {'temperature': 1.0})
  next(outputs)
  outputs.close()
  all_end()
  advance = scheduler.SlotPool._advance

  def failing(pool):
    if pool._slots.owners[0].index % 2:
      raise ZeroDivisionError
    advance(pool)

  monkeypatch.setattr(scheduler.SlotPool, '_advance', failing)
  with pytest.raises(ZeroDivisionError):
    decoder.generate(TEXTS, **SAMPLED)
  all_end()
