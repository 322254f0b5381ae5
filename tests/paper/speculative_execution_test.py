"""Speculative execution of two functions: law, threads, order of events.

And the simulation of one proposal, which has its rule.
"""

import concurrent.futures
import dataclasses
import doctest
import functools
import threading

import jax
import numpy as np
import pytest

import toy_models
from specdec_jax.paper import simulation
from specdec_jax.paper import speculative_execution as module
from specdec_jax.paper.speculative_execution import speculate_in_threads

TARGET = np.array([0.5, 0.3, 0.2], np.float32)
DRAFT = np.array([0.2, 0.3, 0.5], np.float32)
NEVER, ALWAYS = np.eye(2, dtype=np.float32)  # a refused pair
_PATIENCE = 30  # seconds after which a test that hangs fails


def constant(law):
  return lambda x: law


def test_the_example_runs():
  failed, tried = doctest.testmod(module)
  assert failed == 0 and tried > 5


# As one program.


@jax.jit
@functools.partial(jax.vmap, in_axes=(None, None, 0))
def outcomes(target, draft, key):
  pair = target, draft
  return module.speculate(
    lambda x: x[0], lambda x: x[1], lambda s: s**2, pair, key
  )


def test_sample_and_value():
  keys = jax.random.split(jax.random.key(0), 100_000)
  found = jax.device_get(outcomes(TARGET, DRAFT, keys))
  counts = np.bincount(found.sample, minlength=3)
  assert toy_models.chi_squared_p_value(counts, TARGET) > 1e-3
  # Control: the law of the guesses.
  assert toy_models.chi_squared_p_value(counts, DRAFT) < 1e-9
  np.testing.assert_array_equal(found.value, found.sample**2)


def test_g_runs_again_only_after_a_refusal():
  """`cond` is in the program where nothing is mapped over it."""
  calls = []

  def g(sample):
    jax.debug.callback(lambda s: calls.append(int(s)), sample)
    return sample

  run = jax.jit(
    lambda x, key: module.speculate(lambda x: x[0], lambda x: x[1], g, x, key)
  )
  for target, want in ((ALWAYS, [1]), (NEVER, [0, 1])):
    calls.clear()
    jax.block_until_ready(run((target, ALWAYS), jax.random.key(0)))
    jax.effects_barrier()
    assert sorted(calls) == want


# In threads.


def test_threads_give_what_the_program_gives():
  keys = jax.random.split(jax.random.key(3), 8)
  want = jax.device_get(outcomes(TARGET, DRAFT, keys))
  for i, key in enumerate(keys):
    found = speculate_in_threads(
      constant(TARGET), constant(DRAFT), lambda s: s**2, None, key
    )
    values = found.sample, found.accepted, found.value
    assert values == (want.sample[i], want.accepted[i], want.value[i])
  assert 0 < want.accepted.sum() < 8, 'both ways should be seen'


def run_waiting(law, executor=None):
  """An f that ends only once g has begun: the outcome, and events in order."""
  begun, events = threading.Event(), []

  def f(x):
    events.append('f begins')
    if not begun.wait(0 if executor else _PATIENCE):
      raise TimeoutError('g did not begin while f ran')
    events.append('f ends')
    return law

  def g(sample):
    events.append(f'g({sample}) begins')
    begun.set()
    return sample * 10

  key = jax.random.key(0)
  made = speculate_in_threads(f, constant(ALWAYS), g, None, key, executor)
  return made, events


@pytest.mark.parametrize(
  'law, sample, more', [(ALWAYS, 1, []), (NEVER, 0, ['g(0) begins'])]
)
def test_g_begins_before_f_ends(law, sample, more):
  """A saving without a clock: in any other order this pair never ends."""
  made, events = run_waiting(law)
  assert (made.value, made.sample) == (10 * sample, sample)
  assert made.accepted == bool(sample)
  assert events == ['f begins', 'g(1) begins', 'f ends', *more]


def test_control_one_after_the_other_does_not_pass():
  with (
    concurrent.futures.ThreadPoolExecutor(1) as alone,
    pytest.raises(TimeoutError, match='g did not begin while f ran'),
  ):
    run_waiting(ALWAYS, alone)


def test_errors_of_a_refused_start_are_dropped():
  def g(sample):
    return 1 // (1 - sample)  # an error for the sample 1 alone

  def broken(x):
    return 1 // 0

  run = functools.partial(speculate_in_threads, x=None, key=jax.random.key(0))
  never, always = constant(NEVER), constant(ALWAYS)
  assert run(never, always, g).value == 1
  for pair in (always, always), (broken, always), (always, broken):
    with pytest.raises(ZeroDivisionError):
      run(*pair, g)


def test_what_is_no_distribution_is_named():
  functions = constant(0.9 * TARGET), constant(DRAFT), lambda s: s
  with pytest.raises(ValueError, match='f gives target_probs'):
    speculate_in_threads(*functions, None, jax.random.key(0))
  functions = constant(TARGET), constant(NEVER), lambda s: s
  with pytest.raises(ValueError, match=r'f and f_approx.*\(3,\), \(2,\)'):
    module.speculate(*functions, None, jax.random.key(0))


# The experiment of Appendix A.1: exact law, Monte Carlo, a wrong law.


@pytest.mark.parametrize('lenience', [1.0, 0.1])
def test_verify_agrees(lenience):
  """50,000 proposals: the exact law of `verify`, its keys and its sampler."""
  shown = simulation.simulate(TARGET, DRAFT, 50_000, lenience)
  assert shown.p_value > 1e-3 and shown.agrees
  assert shown.counts.sum() == 50_000
  text = str(shown)
  assert ('Lossy' in text) == (lenience != 1) and 'WRONG' not in text
  # Control: the law of another lenience.
  law = simulation.outcomes(TARGET, DRAFT, 0.7)
  wrong = dataclasses.replace(shown, law=law)
  assert wrong.p_value < 1e-9 and 'WRONG' in str(wrong)


def test_pairs_that_are_equal_or_have_nothing_in_common():
  for pair in (TARGET, TARGET), ((1, 0), (0, 1)), ((0, 1), (0, 1)):
    assert simulation.simulate(*pair, 1000).agrees


def test_bad_input():
  for row, options, words in (
    (np.ones((1, 1)), {}, r'target_probs.*\(1, 1\)'),
    ((1,), {'lenience': 2.0}, 'lenience.*2.0'),
    ((1,), {'num_samples': 0}, 'num_samples.*0'),
  ):
    with pytest.raises(ValueError, match=words):
      simulation.simulate(row, row, **options)
