"""Continuous batching against fixed batches: the same outputs, in order."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.monitoring
import numpy as np
import pytest

import small_vocabulary
from gpt_engine_test import BOS, FAMILIES, make_engine
from small_vocabulary import WORDS
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings, PoolStats, Queue
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


def make_t5(seed, layers=1):
  network = small_vocabulary.network(layers)
  return Model(network, network.init(jax.random.key(seed)))


def engine_of(target, draft, tokenizer, **changes):
  settings = {
    'gamma': GAMMA,
    'max_input_len': MAX_INPUT,
    'max_decode_len': MAX_OUTPUT,
  }
  return Engine(target, draft, tokenizer=tokenizer, **(settings | changes))


@pytest.fixture(scope='module')
def engine(tokenizer):
  return engine_of(make_t5(0), make_t5(1), tokenizer)


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


def test_samples_do_not_depend_on_slots_or_neighbours(engine, decoder):
  want = engine.generate(TEXTS, **SAMPLED)
  have = decoder.generate(TEXTS, **SAMPLED)
  same(have, want)
  assert len({len(one.tokens) for one in want}) > 3
  stats = decoder.stats
  assert stats.outputs == len(TEXTS)
  calls = sum(one.stats.num_target_calls for one in want)
  assert stats.live_rounds == calls
  assert stats.slot_rounds == 4 * stats.rounds[GAMMA]
  assert calls / stats.slot_rounds == stats.occupancy <= 1
  assert 0 < stats.host_fraction < 1
  # Looked at when rows had finished, not at every round.
  assert stats.looks <= stats.rounds[GAMMA]


def test_the_order_of_texts_changes_nothing(engine, decoder):
  """Neither is anything compiled anew."""
  want = decoder.generate(TEXTS, **SAMPLED)
  reverse = TEMPERATURES[::-1]
  with nothing_compiles():
    again = decoder.generate(
      TEXTS[::-1],
      **SAMPLED | {'temperature': reverse},
      example_ids=range(len(TEXTS))[::-1],
    )
  same(again[::-1], want)


def test_completions_come_when_they_are_finished(decoder):
  found = dict(decoder.run(TEXTS, **SAMPLED))
  assert list(found) != sorted(found) == list(range(len(TEXTS)))
  lengths = [len(TEXTS[index]) for index in found]
  half = len(lengths) // 2
  assert np.mean(lengths[:half]) < np.mean(lengths[half:])
  buffers = len(jax.live_arrays())
  for _ in decoder.run(TEXTS, **SAMPLED):
    pass
  assert len(jax.live_arrays()) == buffers


def test_bad_texts_are_reported_and_the_rest_goes_on(engine, decoder):
  bad = {2: 'the dog ' * 90, 5: '', 7: [3, 999]}
  texts = [bad.get(i, text) for i, text in enumerate(TEXTS)]
  have = decoder.generate(texts, **SAMPLED)
  want = engine.generate(TEXTS, **SAMPLED)
  rest = [i for i in range(len(TEXTS)) if i not in bad]
  same([have[i] for i in rest], [want[i] for i in rest])
  assert have[2].finish_reason == have[7].finish_reason == 'error'
  assert 'Text 2 has' in have[2].error and 'max_input_len' in have[2].error
  assert 'Text 7 holds 999' in have[7].error
  assert have[5].finish_reason == 'empty'
  assert decoder.generate(['', '']) == [have[5]] * 2
  assert decoder.generate([]) == []
  with pytest.raises(ValueError, match='Text 7 holds 999'):
    engine.generate(TEXTS[:7] + [bad[7]])


def test_invalid_logits_end_a_row_and_leave_its_slot_clean(tokenizer):
  target, clean = make_t5(0), make_t5(0)
  table = np.array(target.params['token_embedder']['embedding'])
  table[tokenizer.encode(POISON)[-1]] = np.nan
  target.params['token_embedder'] = {'embedding': table}
  poisoned = engine_of(target, clean, tokenizer)
  texts = [text for text in make_texts(9, 1) if len(text) < 60]
  ill = [f'{text} {POISON}' if i < 2 else text for i, text in enumerate(texts)]
  # Both slots are ill at first; everything else follows in them.
  small = Continuous(poisoned, PoolSettings(rows=2, order='given'))
  have = small.generate(ill, max_length=8)
  want = Continuous(
    engine_of(make_t5(0), clean, tokenizer), small.settings
  ).generate(texts, max_length=8)
  for one in have[:2]:
    assert one.finish_reason == 'error' and 'NaN' in one.error
  same(have[2:], want[2:])


@pytest.mark.slow
def test_the_plain_loop_as_given(engine):
  decoder = Continuous(
    engine, PoolSettings(rows=4, order='given', max_rounds=3)
  )
  want = engine.generate(TEXTS, speculative=False)
  same(decoder.generate(TEXTS, speculative=False), want)
  assert set(decoder.stats.rounds) == {0}


@pytest.mark.slow
def test_prompts_and_stop_strings(engine):
  texts = TEXTS[1:4]
  whole = engine.generate(texts, stop_ids=[])
  prompts = [whole[0].tokens[:2], [], whole[2].tokens[:5]]
  options = {'stop_ids': [], 'prompts': prompts, 'stop_strings': ['T', 'x']}
  want = engine.generate(texts, **options)
  decoder = Continuous(engine, PoolSettings(rows=2))
  have = decoder.generate(texts, **options)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  assert [one.text for one in have] == [one.text for one in want]
  assert 'stop_string' in {one.finish_reason for one in have}
  # Its slot is free then: these rounds would all be theirs otherwise.
  early = decoder.stats.live_rounds
  assert early == sum(one.stats.num_target_calls for one in have)
  del options['stop_strings']
  decoder.generate(texts, **options)
  assert early < decoder.stats.live_rounds


@pytest.mark.slow
@pytest.mark.parametrize('family', ['GPT-2', 'T5X'])
def test_decoder_only(family, tokenizer):
  engine = make_engine(FAMILIES[family], tokenizer)
  assert BOS == engine.bos_id
  texts = ['the red dog runs', '', [5, 6, 7], 'a cat', 'the old house', 'x']
  sampling = [0.0, 1.0] * 3
  want = engine.generate(texts, temperature=sampling)
  decoder = Continuous(engine, PoolSettings(rows=2))
  same(decoder.generate(texts, temperature=sampling), want)


@pytest.mark.slow
def test_gamma_by_the_rows_that_are_left(engine):
  """Plainly while many run, then with a drafter, at temperature 0."""
  decoder = Continuous(engine, PoolSettings(gammas={8: 0, 4: 2, 1: GAMMA}))
  want = engine.generate(TEXTS, speculative=False, stop_ids=STOPS)
  have = decoder.generate(TEXTS, stop_ids=STOPS)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  assert set(decoder.stats.rounds) == {0, 2, GAMMA}, 'the pool never shrank'
  for one in have:
    assert sum(one.stats.histogram) == one.stats.num_target_calls
  assert sum(one.stats.num_tested for one in have) > 0
  # Few texts begin in a smaller pool.
  same(decoder.generate(TEXTS[:1]), engine.generate(TEXTS[:1]))
  assert set(decoder.stats.rounds) == {GAMMA}


def test_gammas_and_samples(engine):
  decoder = Continuous(engine, PoolSettings(gammas={8: 0, 4: 2}))
  with pytest.raises(ValueError, match='changes with the number of running'):
    decoder.generate(TEXTS, **SAMPLED)
  # One gamma everywhere is as good as none.
  Continuous(engine, PoolSettings(gammas={8: 2, 4: 2})).generate(
    [''], **SAMPLED
  )
  free = PoolSettings(gammas={8: 0, 4: 2}, deterministic=False)
  Continuous(engine, free).generate([''], **SAMPLED)


_SEVERAL_DEVICES = """
import pathlib, sys
sys.path[:0] = ['.', 'tests', 'scripts']
import continuous_test as suite, small_vocabulary
from specdec_jax.partitioning import Placement

tokenizer = small_vocabulary.train(pathlib.Path(sys.argv[1]))
texts = [text for text in suite.TEXTS if len(text) < 60][:8]
options = {'seed': 5, 'stop_ids': suite.STOPS}

def engine(**devices):
  return suite.engine_of(
    suite.make_t5(0), suite.make_t5(1), tokenizer, max_input_len=32,
    placement=Placement(**devices), cache_folder=sys.argv[1] + '/xla')

want = [one.tokens for one in engine().generate(texts, **options)]
for devices in ({'model': 2}, {'data': 2}):
  decoder = suite.Continuous(engine(**devices), suite.PoolSettings(rows=4))
  have = decoder.generate(texts, **options)
  assert [one.tokens for one in have] == want, devices
  with suite.nothing_compiles():
    decoder.generate(texts[::-1], **options)
print('the same')
"""


@pytest.mark.slow
def test_slots_over_several_devices(tmp_path):
  """Weights or rows split over two devices; tokens as on one."""
  flags = ' '.join(
    (
      os.environ.get('XLA_FLAGS', ''),
      '--xla_force_host_platform_device_count=2',
      '--xla_backend_optimization_level=0',
    )
  )
  done = subprocess.run(
    [sys.executable, '-c', _SEVERAL_DEVICES, str(tmp_path)],
    cwd=pathlib.Path(__file__).resolve().parent.parent,
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().endswith('the same')


def test_control_the_counter_counts():
  with pytest.raises(AssertionError), nothing_compiles():
    jax.jit(lambda x: x * 3.14159)(1.0)


@pytest.mark.slow
@pytest.mark.parametrize('order', ['shortest', 'given'])
def test_warmup_compiles_for_smaller_pools(engine, order):
  """They are as wide as the last texts, and the first pool is narrow."""
  decoder = Continuous(
    engine, PoolSettings(gammas={6: 0, 2: GAMMA}, order=order)
  )
  assert decoder.warmup(TEXTS, stop_ids=STOPS) > 0
  with nothing_compiles():
    decoder.generate(TEXTS, stop_ids=STOPS)
  assert set(decoder.stats.rounds) == {0, GAMMA}


def test_warmup_compiles_what_is_needed(engine):
  decoder = Continuous(engine, PoolSettings(rows=2))
  texts = TEXTS[:6]
  assert decoder.warmup([]) == 0.0
  assert decoder.warmup(texts, max_length=4) > 0
  with nothing_compiles():
    decoder.generate(texts, max_length=4)
  assert decoder.warmup(texts[::-1], max_length=2) == 0.0


class FakeRequest:
  """Inputs of these lengths, in an array of 64."""

  prompt_width, first_length, pad_id = 1, 1, 0

  def __init__(self, *lengths):
    self.inputs = np.zeros((len(lengths), 64), np.int32)
    for row, length in enumerate(lengths):
      self.inputs[row, :length] = 3


def test_queue():
  request = FakeRequest(20, 40, 3, 33, 5, 32, 64)
  rows = range(7)
  queue = Queue(request, rows, PoolSettings(rows=4))
  # The shortest first; what is read together has one bucket.
  assert list(queue.groups) == [[2, 4], [0, 5], [3, 1], [6]]
  assert [queue.widths(group)[0] for group in queue.groups] == [16, 32, 64, 64]
  given = Queue(request, rows, PoolSettings(rows=4, order='given', read_rows=3))
  assert list(given.groups) == [[0, 1, 2], [3, 4, 5], [6]]
  assert [given.widths(group)[0] for group in given.groups] == [64] * 3


def test_stats_before_any_round():
  stats = PoolStats()
  assert (stats.occupancy, stats.host_fraction, stats.in_slot) == (
    1.0,
    0.0,
    0.0,
  )


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rows': 0}, 'rows must be at least 1, got 0'),
    ({'max_rounds': 0}, 'max_rounds must be at least 1'),
    ({'refill': 0}, 'refill must be at least 1'),
    ({'read_rows': 0}, 'read_rows must be at least 1'),
    ({'order': 'longest'}, "order is 'longest'"),
    ({'gammas': {}}, 'gammas must name a number of rows'),
    ({'gammas': {0: 1}}, 'rows of gammas must be at least 1'),
    ({'gammas': {4: -1}}, 'gamma must be at least 0'),
  ],
)
def test_bad_settings(changes, message):
  with pytest.raises(ValueError, match=message):
    PoolSettings(**changes)
