"""Requests that come at any time; whoever shares the slots, a row is itself."""

import dataclasses
import functools
import gc
import math
import threading
import time

import jax
import numpy as np
import pytest

import small_vocabulary
import toy_models
from compilations import compiling_threads, nothing_compiles
from specdec_jax.engine import scheduler
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scheduler import Scheduler, SlotPool
from specdec_jax.serving import worker
from specdec_jax.serving.protocol import ApiError
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.serving.worker import Worker
from toy_calibration import choice, make
from toy_workers import POOLS, TEXTS, Heard, started, wait_until

STOPS = tuple(range(3, small_vocabulary.VOCAB_SIZE, 36))
SHORT_TEXTS = sorted(small_vocabulary.WORDS.split())[:6]


@pytest.fixture(scope='module')
def simple(tokenizer):
  limits = {'max_input_len': 8, 'max_decode_len': 24}
  return toy_models.chain_engine(tokenizer, gamma=2, **limits)


def taken(scheduler, texts, **options):
  """What rows that are taken together are told."""
  heard = [Heard(scheduler, text, **options) for text in texts]
  scheduler.take([one.row for one in heard])
  return heard


def ask(scheduler, text, **options):
  """A completion, alone."""
  (heard,) = taken(scheduler, [text], **options)
  (done,) = heard.last.outputs
  return done


KINDS = (
  {'stop_ids': STOPS, 'log_probs': False},
  {'temperature': 1.0, 'stop_ids': STOPS},
  {'temperature': 0.7, 'top_k': 9, 'min_length': 5, 'stop_ids': STOPS},
  {'temperature': 1.3, 'top_p': 0.5, 'stop_strings': ['a', 'e']},
  {'max_length': 7, 'stop_ids': ()},
  {'temperature': 1.0, 'max_length': 11, 'stop_ids': STOPS},
)


def traffic_of(engine, every, kinds=KINDS):
  """(text, options, what the engine gives) of all kinds in turn."""
  found = {}
  for kind, options in enumerate(kinds):
    places = range(kind, len(every), len(kinds))
    asked = options | {'seed': kind}
    texts = [every[i] for i in places]
    want = engine.generate(texts, example_ids=[*places], **asked)
    for i, one in zip(places, want, strict=True):
      found[i] = every[i], asked | {'example_ids': [i]}, one
  return [found[i] for i in sorted(found)]


def same(have, want):
  shared = {'log_probs': [], 'stats': want.stats}
  replaced = [dataclasses.replace(one, **shared) for one in (have, want)]
  assert replaced[0] == replaced[1]


@pytest.mark.slow
def test_alone_and_under_traffic_and_as_the_engine(engine):
  """Greedy, drawn, short, long, with stops of their own, in one pool."""
  traffic = traffic_of(engine, TEXTS)
  reasons = {one.finish_reason for _, _, one in traffic}
  assert reasons >= {'stop', 'length', 'stop_string'}
  with started(engine, **POOLS) as scheduler, nothing_compiles():
    for text, asked, want in traffic[:6]:
      same(ask(scheduler, text, **asked), want)
    heard = [
      Heard(scheduler, text, streams=i % 2 > 0, **asked)
      for i, (text, asked, _) in enumerate(traffic)
    ]
    # In parts, while others run.
    for at in range(0, len(heard), 3):
      scheduler.take([one.row for one in heard[at : at + 3]])
      time.sleep(0.005)
    for one in heard:
      assert one.last.outputs
    assert ask(scheduler, '').finish_reason == 'empty'
  for one, (_, asked, want) in zip(heard, traffic, strict=True):
    same(one.last.outputs[0], want)
    assert ''.join(news.text for news in one.news) == want.text
    assert sum((news.tokens for news in one.news), []) == want.tokens
    if asked.get('log_probs', True):
      have = [x for news in one.news for x in news.log_probs]
      np.testing.assert_allclose(have, want.log_probs, atol=1e-4)
  assert max(len(one.news) for one in heard) > 2, 'nothing was streamed'


def test_rows_are_themselves_whatever_is_compiled(simple, monkeypatch):
  """From the first program on, and they compile nothing."""
  turns = threading.Semaphore(0), threading.Semaphore(0)
  runs, all_runs = Worker._rehearsals, []

  def one_by_one(*args):
    def used(run):
      turns[0].acquire()
      run()
      turns[1].release()

    all_runs.extend(runs(*args))
    return [(name, functools.partial(used, run)) for name, run in all_runs]

  monkeypatch.setattr(Worker, '_rehearsals', one_by_one)
  made = Worker(simple, ServeSettings(rows=2))
  made.start()
  traffic = traffic_of(simple, SHORT_TEXTS[:6], KINDS[:2])
  wait_until(lambda: all_runs)
  early = Heard(made, SHORT_TEXTS[0])
  with pytest.raises(ApiError, match='not ready'):
    made.take([early.row])
  for _ in all_runs:
    turns[0].release()
    turns[1].acquire()
    wait_until(lambda: made.takes_rows)
    with nothing_compiles():
      heard = [Heard(made, text, **options) for text, options, _ in traffic]
      made.take([one.row for one in heard])
      for one, (_, _, want) in zip(heard, traffic, strict=True):
        same(one.last.outputs[0], want)
  made.stop()
  made.join()


def test_a_failure_ends_all_rows(engine, monkeypatch):
  def fail(*_):
    raise RuntimeError('no device')

  with started(engine, whole=False, rows=1) as made:
    monkeypatch.setattr(made.ordinary, 'step', fail)
    heard = taken(made, TEXTS[:3])
    assert [one.last.error for one in heard] == ['failed'] * 3
    made.join()
    assert 'no device' in made.failure and not made.is_compiled
    with pytest.raises(ApiError, match='failed'):
      made.take([heard[0].row])


# Kinds of rows that need programs of their own.


RULED = {'no_repeat_ngram_size': 2, 'seed': 1}
LANES = (RULED, {'temperature': 1.0, 'min_p': 0.3}, {'num_beams': 2})


def test_a_new_kind_waits_alone_for_its_programs(simple, monkeypatch):
  """Late rows and those that are cancelled, too; then it is there."""
  may_compile, rehearse = threading.Event(), Scheduler._rehearse

  def held(*args):
    assert may_compile.wait(60)
    return rehearse(*args)

  monkeypatch.setattr(Scheduler, '_rehearse', held)
  plain = simple.generate(SHORT_TEXTS[1:2])[0]
  with started(simple, rows=2) as made, compiling_threads() as threads:
    for options in LANES:
      want = simple.generate(SHORT_TEXTS[:1], **options)[-1]
      ruled = [Heard(made, SHORT_TEXTS[0], **options) for _ in range(3)]
      ruled[2].row.deadline = time.monotonic() + 0.05
      made.take([one.row for one in ruled])
      same(ask(made, SHORT_TEXTS[1]), plain)
      assert ruled[2].last.error == 'deadline'
      made.cancel([ruled[1].row])
      (name,) = made.compiling
      assert any(word in name for word in (*options, 'search of 2 beams'))
      # A row is told of its end before it leaves the queue.
      wait_until(lambda: made.num_rows == made.scheduler.num_waiting == 1)
      assert not ruled[0].news
      may_compile.set()
      same(ruled[0].last.outputs[-1], want)
      may_compile.clear()
      wait_until(lambda: not made.num_rows)
      with nothing_compiles():  # the second one of a kind
        same(ask(made, SHORT_TEXTS[0], **options), want)
      assert not made.compiling and not ruled[1].news
  assert made._compiler in threads and made._thread not in threads


def test_a_kind_that_fails_ends_alone(simple, monkeypatch):
  real = Scheduler._pool_of
  with started(simple, rows=2) as made:
    for _ in ('when it is compiled', 'when it is decoded'):
      monkeypatch.setattr(Scheduler, '_pool_of', lambda *_: 1 / 0)
      (ruled,) = taken(made, SHORT_TEXTS[:1], **RULED)
      assert ruled.last.error == 'failed alone'
      assert ask(made, SHORT_TEXTS[1]).tokens and not made.num_rows
      monkeypatch.setattr(Scheduler, '_pool_of', real)
      assert ask(made, SHORT_TEXTS[0], **RULED).tokens
    assert made.failure is None


def test_lanes_are_forgotten(simple, monkeypatch):
  """The one that was used first, with its programs; not one in use."""
  monkeypatch.setattr(scheduler, 'IDLE_LANES', 2)
  monkeypatch.setattr(scheduler, '_PAUSE_SECONDS', 0.0)
  # On a busy machine the others may take a minute to compile.
  monkeypatch.setattr(worker, '_KEEP_SECONDS', 600.0)
  made_of = simple.programs
  before = len(made_of._pools), made_of.count
  with started(simple, rows=2) as made:
    kinds = (*LANES, {'presence_penalty': 1.0})
    for options in kinds:
      ask(made, SHORT_TEXTS[0], **options)
    lanes, last = made.scheduler.lanes.values(), 'presence_penalty'
    assert [lane.name for lane in lanes] == ['a search of 2 beams', last]
    wait_until(lambda: not any(lane.pools for lane in lanes))
    pools, programs = len(made_of._pools), made_of.count
    assert pools <= before[0] + 2 and programs <= before[1] + 2
    heard = [Heard(made, SHORT_TEXTS[0], **one) for one in kinds]
    made.take([one.row for one in heard])  # all in use at once
    assert all(one.last.error is None for one in heard)


def test_lanes_of_busy_clients_are_kept(simple, monkeypatch):
  """Between two requests a lane has no rows, and is not idle."""
  monkeypatch.setattr(scheduler, '_PAUSE_SECONDS', 600.0)
  compiled, compile_lane = [], Scheduler.compile

  def noted(self, lane):
    compiled.append(lane.name)
    return compile_lane(self, lane)

  monkeypatch.setattr(Scheduler, 'compile', noted)
  kinds = *LANES, {'presence_penalty': 1.0}
  assert len(kinds) > scheduler.IDLE_LANES
  with started(simple, rows=2) as made:
    for options in kinds * 2:
      ask(made, SHORT_TEXTS[0], **options)
  assert len(compiled) == len({*compiled}) == len(kinds)


@pytest.mark.parametrize('fails', [False, True])
def test_no_row_is_lost_while_it_is_read(simple, monkeypatch, fails):
  """Its lane is not idle, and it is told if reading it fails."""
  read, left = SlotPool._read, []

  def read_late(pool, rows):
    while not made.scheduler.forget_idle(math.inf):
      pass
    left.extend(made.scheduler.lanes.values())
    if fails:
      raise MemoryError
    read(pool, rows)

  with started(simple, rows=2) as made:
    assert ask(made, SHORT_TEXTS[0], **RULED).tokens
    monkeypatch.setattr(SlotPool, '_read', read_late)
    (heard,) = taken(made, SHORT_TEXTS[:1], **RULED)
    wait_until(lambda: left)
    assert len(left) == 1
    assert heard.last.error == ('failed alone' if fails else None)


def test_no_kind_keeps_all_pools(simple, monkeypatch):
  """Rows of one kind come without a pause; other kinds get through."""
  monkeypatch.setattr(scheduler, '_MOST_POOLS', 1)
  with started(simple, rows=2) as made:

    def come_again(_, update):
      if update.is_last and not is_over.is_set():
        made.take(made.rows(SHORT_TEXTS[:1], come_again, **RULED))

    is_over = threading.Event()
    for _ in range(3):
      made.take(made.rows(SHORT_TEXTS[:1], come_again, **RULED))
    for options in LANES[1:] * 2:
      ask(made, SHORT_TEXTS[1], **options)
    is_over.set()
    wait_until(lambda: not made.num_rows)


def test_a_row_that_waits_for_a_pool_holds_back_one_kind(simple, monkeypatch):
  """The pool with the fewest rows closes; rows enter the others as before."""
  monkeypatch.setattr(scheduler, '_MOST_POOLS', 2)
  made = Worker(simple, ServeSettings(rows=4))
  made.ordinary.compiled = None  # it compiles what it needs
  lanes, rows = made.scheduler, []

  def come(**options):
    (row,) = simple.text_request(SHORT_TEXTS[:1], **options).rows
    row.deadline = float(len(rows))
    rows.append(row)
    for lane in lanes.submit([row]):
      assert lanes.compile(lane)
    lanes.step()
    return row

  with monkeypatch.context() as patch:
    patch.setattr(Scheduler, '_step', lambda *_: [])  # no pool decodes
    for penalty in (0.5, 0.5):
      come(presence_penalty=penalty)
    come(frequency_penalty=0.5)
    waits = come(repetition_penalty=1.5)
    come(presence_penalty=0.5)
    held = come(frequency_penalty=0.5)
    outside = [row for lane in lanes.lanes.values() for row in lane.waiting]
    assert outside == [waits, held]
  ended = [row for row, update in lanes.drain() if update.is_last]
  assert {*ended} == {*rows} and ended.index(waits) < ended.index(held)


def test_nothing_keeps_the_programs_of_forgotten_lanes(simple):
  """No thread, cache or key; also none of a beam search."""
  client = jax.devices()[0].client

  def count():
    gc.collect()
    return len(client.live_executables())

  with started(simple, rows=2) as made:
    counts = []
    for _ in range(2):  # other tests may have left some programs
      for options in LANES:
        ask(made, SHORT_TEXTS[0], **options)
      counts.append(count())
      while not made.scheduler.forget_idle(math.inf):
        pass
      assert not made.scheduler.lanes
      counts.append(count())
  _, before, most, after = counts
  assert after == before < most


# By a calibration, with drafts that adapt, with rests.

SHORT = 4  # tokens, from which on the calibration says that a draft pays


def calibration_of(engine):
  """At one row three proposals pay, at two none; the drafter's start costs."""
  times = {'call_1': {'median': 1.0}, 'draft_encoder': {'median': 2.0}}
  pays = dataclasses.replace(choice(1, 3), expected_speed_up=2.0)
  return make(
    fingerprints=engine.fingerprints,
    choices=(pays, choice(2, 0)),
    record={'costs': [{'times_ms': times}] * 2},
  )


@pytest.mark.slow
def test_a_calibration_says_what_is_drafted_for(simple):
  measured = calibration_of(simple)
  assert measured.least_length(1) == SHORT and measured.least_length(2) == 0
  greedy = {'log_probs': False, 'stop_ids': ()}
  with started(simple, measured, rows=2) as scheduler, nothing_compiles():
    asked = functools.partial(ask, scheduler, SHORT_TEXTS[0], **greedy)
    short, enough = (asked(max_length=most) for most in (SHORT - 1, SHORT))
    assert short.stats.num_drafted == 0 < enough.stats.num_drafted
    # Two at a time are not drafted for; the one that is left is.
    heard = [
      Heard(scheduler, text, max_length=most, **greedy)
      for text, most in zip(SHORT_TEXTS, (16, 16, 24), strict=False)
    ]
    scheduler.take([one.row for one in heard])
    *both, longest = (one.last.outputs[0] for one in heard)
    assert [one.stats.num_drafted for one in both] == [0, 0]
    # A sample has the engine's gamma.
    sampled = ask(scheduler, SHORT_TEXTS[3], temperature=1.0, stop_ids=())
    assert sampled.stats.num_drafted > sampled.stats.num_target_calls
    # Of the largest gamma of all pools.
    assert len(sampled.stats.histogram) == 4
  want = simple.generate(SHORT_TEXTS[:3], max_length=16, **greedy)
  for have, one in zip(both, want, strict=False):
    same(have, one)
  assert longest.tokens[:16] == want[2].tokens
  assert short.tokens == want[0].tokens[: SHORT - 1]


def test_where_no_draft_pays_the_drafter_is_left_out(simple):
  measured = calibration_of(simple)
  never = dataclasses.replace(measured, choices=measured.choices[1:])
  made = Worker(simple, ServeSettings(rows=2), never)
  policy = made.ordinary.policy
  assert not made.speculates and policy.longest == 0
  assert policy.drafting(1, True, False).gamma == 0
  told = ServeSettings(rows=2, speculative=True)
  assert Worker(simple, told, never).speculates


def test_what_no_worker_can_do_is_refused(simple, tokenizer, monkeypatch):
  model = toy_models.chain_model(small_vocabulary.VOCAB_SIZE)
  alone, settings = Engine(model, tokenizer=tokenizer), ServeSettings(rows=2)
  for engine, calibration, message in (
    (simple, make(), 'made for something else'),
    (alone, calibration_of(simple), 'drafter'),
  ):
    with pytest.raises(ValueError, match=message):
      Worker(engine, settings, calibration)
  monkeypatch.setattr(simple.programs, 'row_multiple', 2)
  with pytest.raises(ValueError, match='Placement'):
    Worker(simple, settings)


def test_pools_of_many_rows_are_plain_by_default(tokenizer, monkeypatch):
  toy_models.dear_batches(monkeypatch)
  limits = {'max_input_len': 8, 'max_decode_len': 24}
  engine = toy_models.chain_engine(tokenizer, gamma=None, **limits)
  gammas = Worker(engine, ServeSettings(rows=32)).ordinary.policy.gammas
  assert gammas == {1: 4, 4: 4, 16: 0, 32: 0}
  asked = ServeSettings(rows=32, speculative=True)
  assert Worker(engine, asked).ordinary.policy.gammas == {32: 4}
