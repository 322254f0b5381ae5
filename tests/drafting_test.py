"""How a server drafts: by a calibration, with drafts that adapt, with rests."""

import dataclasses

import pytest

from continuous_test import make_texts, nothing_compiles
from scheduler_test import (
  KINDS,
  Heard,
  ask,
  model,
  same,
  started,
  traffic_of,
  wait_until,
)
from specdec_jax.decoding import fallback
from specdec_jax.drafters.length import unsure_below
from specdec_jax.engine.calibration import (
  Calibration,
  CalibrationError,
  Choice,
)
from specdec_jax.engine.completion import Completion, CompletionStats
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import record
from specdec_jax.serving import answer, worker
from specdec_jax.serving.settings import ServeSettings

WORDS = {word for text in make_texts(40) for word in text.split()}
TEXTS = sorted(WORDS)[:10]
MIXED = KINDS[0], KINDS[2]  # greedy, and drawn
CONFIDENCE = 0.3  # which the drafter has at some places
SHORT = 4  # tokens, from which on the calibration says that a draft pays


def made(tokenizer, noise=1, **options):
  sizes = {'max_input_len': 8, 'max_decode_len': 24}
  return Engine(model(0), model(noise), tokenizer=tokenizer, **sizes, **options)


@pytest.fixture(scope='module')
def engine(tokenizer):
  """Its drafts end early, and its drafter, which is mostly wrong, rests."""
  costs = fallback.of_round_costs([1.0, 1.5, 1.5], first_rest=3)
  ends = unsure_below(CONFIDENCE, 2)
  return made(tokenizer, noise=2, gamma=ends, fallback=costs)


@pytest.fixture(scope='module')
def traffic(engine):
  return traffic_of(engine, TEXTS, MIXED)


@pytest.mark.slow
def test_adaptive_drafts_and_rests_under_traffic(engine, traffic):
  """Rows of all kinds are what they are alone, samples too."""
  scheduler = started(engine, rows=2)
  try:
    heard = [
      Heard(scheduler, text, streams=i % 2 > 0, **asked)
      for i, (text, asked, _) in enumerate(traffic)
    ]
    with nothing_compiles():
      for at in range(0, len(heard), 3):
        scheduler.take([one.row for one in heard[at : at + 3]])
      ends = [one.last for one in heard]
  finally:
    scheduler.stop()
    scheduler.join()
  early = 0
  for end, (_, asked, want) in zip(ends, traffic, strict=True):
    same(end.completion, want)
    stats = end.completion.stats
    # As alone, to the round; the pool's histogram may be wider.
    alone = dataclasses.replace(
      want.stats, histogram=stats.histogram, num_passed=stats.num_passed
    )
    assert stats == alone, asked
    assert stats.num_tested <= end.num_drafted
    awake = stats.num_target_calls - stats.fallback_rounds
    assert end.num_drafted <= awake * engine.gamma
    early += awake * engine.gamma - end.num_drafted
  assert any(one.completion.stats.fallback_rounds for one in ends)
  # More than the three that the budget of an output cuts off at its end.
  assert early > 3 * len(ends), 'no draft ended early'


def calibration_of(engine, **changes):
  """At one row three proposals pay, at two none; the drafter's start costs."""
  times = {'call_1': {'median': 1.0}, 'draft_encoder': {'median': 2.0}}
  choices = [
    Choice(rows, gamma, speed_up, (1.0, 2.0), (1.0, speed_up))
    for rows, gamma, speed_up in ((1, 3, 2.0), (2, 0, 1.0))
  ]
  values = {
    'fingerprints': engine.fingerprints,
    'device': record.describe()['device'],
    'temperature': 0.0,
    'choices': tuple(choices),
    'record': {'costs': [{'times_ms': times}] * 2},
  }
  return Calibration(**(values | changes))


@pytest.fixture(scope='module')
def simple(tokenizer):
  return made(tokenizer, gamma=2)


def test_a_calibration_says_what_is_drafted_for(simple):
  measured = calibration_of(simple)
  assert measured.least_length(1) == SHORT and measured.least_length(2) == 0
  scheduler = started(simple, measured=measured, rows=2)
  greedy = {'log_probs': False, 'stop_ids': ()}
  long = greedy | {'max_length': 16}
  try:
    with nothing_compiles():
      short = Heard(scheduler, TEXTS[0], max_length=SHORT - 1, **greedy)
      scheduler.take([short.row])
      assert short.last.num_drafted == 0
      enough = Heard(scheduler, TEXTS[0], max_length=SHORT, **greedy)
      scheduler.take([enough.row])
      assert enough.last.num_drafted > 0
      # Two at a time are not drafted for; the one that is left is.
      both = [Heard(scheduler, text, **long) for text in TEXTS[:2]]
      longest = Heard(scheduler, TEXTS[2], **(greedy | {'max_length': 24}))
      scheduler.take([one.row for one in (*both, longest)])
      ends = [one.last for one in (*both, longest)]
      assert [one.num_drafted for one in ends[:2]] == [0, 0]
      # A sample beside it: all rounds have the engine's gamma.
      sampled = {'temperature': 1.0, 'stop_ids': (), 'seed': 5}
      pair = [
        Heard(scheduler, TEXTS[3], **sampled),
        Heard(scheduler, TEXTS[4], max_length=SHORT - 1, **greedy),
      ]
      scheduler.take([one.row for one in pair])
      sample, beside = [one.last for one in pair]
      assert sample.num_drafted == 2 * sample.completion.stats.num_target_calls
      assert beside.num_drafted > 0
      wait_until(lambda: not scheduler.num_rows)
    want = simple.generate(TEXTS[:3], max_length=16, **greedy)
    for heard, one in zip(both, want[:2], strict=True):
      same(heard.last.completion, one)
    assert ends[2].completion.tokens[:16] == want[2].tokens
    assert short.last.completion.tokens == want[0].tokens[: SHORT - 1]
    same(sample.completion, simple.generate([TEXTS[3]], **sampled)[0])
    assert ask(scheduler, TEXTS[0], max_length=1).tokens == want[0].tokens[:1]
  finally:
    scheduler.stop()
    scheduler.join()


def test_where_no_draft_pays_the_drafter_is_left_out(simple):
  measured = calibration_of(simple)
  never = dataclasses.replace(measured, choices=measured.choices[1:])
  made = worker.Worker(simple, ServeSettings(rows=2), never)
  assert not made.speculates and made.policy.room == 0
  assert made.policy.of(1, True, False)[0] == 0
  told = ServeSettings(rows=2, speculative=True)
  assert worker.Worker(simple, told, never).speculates


def test_calibrations_of_something_else_are_refused(simple, tokenizer):
  measured = calibration_of(simple)
  settings = ServeSettings(rows=2)
  other = calibration_of(simple, fingerprints={'target': 'a', 'draft': 'b'})
  with pytest.raises(CalibrationError, match='made for something else'):
    worker.Worker(simple, settings, other)
  given = dataclasses.replace(settings, gammas={2: 3})
  with pytest.raises(ValueError, match='gammas'):
    worker.Worker(simple, given, measured)
  alone = Engine(model(0), tokenizer=tokenizer)
  with pytest.raises(ValueError, match='drafter'):
    worker.Worker(alone, settings, measured)


def test_an_adaptive_engine_needs_what_a_calibration_knows(engine):
  with pytest.raises(
    CalibrationError, match='needs a calibration with a table'
  ):
    worker.Worker(engine, ServeSettings(), calibration_of(engine))
  with pytest.raises(ValueError, match='gammas: .* at most 2'):
    worker.Worker(engine, ServeSettings(gammas={16: 9}))


def test_rounds_of_rest_are_counted_by_themselves():
  stats = CompletionStats(9, 6, 4, 3, (4, 1, 1), fallback_rounds=2)
  done = Completion('', [1] * 9, [], 'stop', stats)
  found = answer.speculative_metrics([done], 5)
  assert (found['fallback_rounds'], found['num_draft_tokens']) == (2, 5)
