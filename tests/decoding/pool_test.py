"""Slots: whoever shares a pool, and whenever a row comes, it stays itself.

Every drafter of the conformance suite decodes rows that come and go, and must
give token for token, and count for count, what it gives in one fixed batch.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_requests
from specdec_jax.decoding import pool as decode_pool
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.pool import PoolPrograms
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.slots import Slots
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import Drafting, RestPolicy
from toy_drafters import DRAFTERS, GAMMA, TARGET, VOCAB, request_of

ROWS, SIZE, GROUP = 7, 3, 2
LENGTH = 12
# One-hot rows and drawn ones in one program.
SAMPLING = SamplingConfig([1.0, 0.0, 1.0, 0.7, 0.0, 1.0, 1.3])
GREEDY = {'sampling': SamplingConfig(0.0).params(ROWS), 'greedy': True}
BUDGETS = jnp.array([12, 1, 7, 12, 12, 2, 9])
# So that rows end apart, whatever is drawn.
APART = {'min_length': jnp.array([3, 0, 6, 2, 4, 1, 5]), 'forbids_stops': True}


def request(gamma, **changes):
  """Rows that differ in all that they read."""
  made = request_of(ROWS, gamma, SAMPLING, LENGTH, max_length=BUDGETS)
  tokens = np.random.default_rng(3).integers(2, VOCAB, (ROWS, 4))
  tokens[:, 0] = 0
  return made.replace(
    inputs=made.inputs.at[3:, 2].set(4).at[5:, 0].set(3),
    prompt=jnp.asarray(tokens, jnp.int32),
    prompt_length=jnp.array([4, 1, 2, 3, 4, 1, 2]),
    **changes,
  )


@functools.partial(toy_requests.quick_jit, static_argnums=0)
def _decode(loop, params, asked):
  return loop.decode(params, asked)


def fixed(loop, params, asked):
  """All rows in one batch."""
  return jax.device_get(_decode(loop, params, asked))


def slots_of(loop, params, asked):
  """`SIZE` free slots for rows of a request."""
  programs = functools.partial(PoolPrograms, loop, params)
  tokens = asked.cache_slots - asked.draft_slots
  slots = Slots(programs, asked, tokens, asked.gamma, GROUP)
  slots.begin(SIZE, asked.inputs.shape[1])
  return slots


def admit(slots, asked, rows):
  """Reads rows together, filled up, and gives them free slots."""
  filled = np.array([*rows, *rows][:GROUP])
  slots.admit(decode_pool.take_rows(asked, filled), rows)


def decode(slots, asked, order, rounds):
  """Row -> (generation, slot) of its end; rows enter in this order."""
  drafting = asked.drafting
  waiting, found = list(order), {}
  while waiting or slots.taken:
    while slots.free and waiting:
      count = min(GROUP, len(slots.free))
      admit(slots, asked, waiting[:count])
      waiting = waiting[count:]
    view = jax.device_get(slots.run(next(rounds), 1, drafting, False))
    for row, slot in slots.release(view):
      found[row] = view.generation, slot
  return found


def check(found, want, with_stats=True):
  for row, (have, slot) in found.items():
    length = want.length[row]
    assert have.length[slot] == length
    assert have.finish_reason[slot] == want.finish_reason[row]
    np.testing.assert_array_equal(
      have.tokens[slot, :length], want.tokens[row, :length]
    )
    for name, counts in vars(want.stats).items() if with_stats else ():
      np.testing.assert_array_equal(
        getattr(have.stats, name)[slot], counts[row]
      )


# What these propose depends on the place in the batch, on purpose.
_BY_PLACE = ('short_drafts', 'with_fallback_of_models')
PLAIN = Loop(TARGET), PairParams(TARGET.params, None)


def loop_of(name):
  drafter, draft = DRAFTERS[name]
  draft = jax.tree.map(jnp.asarray, draft)
  return Loop(TARGET, drafter), PairParams(TARGET.params, draft)


def come_and_go(loop, params, gamma=GAMMA):
  tree = loop.drafter and loop.drafter.tree
  asked = request(gamma, tree=tree, **APART)
  slots = slots_of(loop, params, asked)
  order, rounds = [5, 0, 6, 1, 4, 2, 3], itertools.cycle((1, 5, 2))
  found = decode(slots, asked, order, rounds)
  want = fixed(loop, params, asked)
  assert sorted(found) == list(range(ROWS))
  check(found, want)
  return found


def test_rows_come_and_go():
  come_and_go(*PLAIN, gamma=0)
  loop, params = loop_of('small_model')
  found = come_and_go(loop, params)

  # Control: the comparison sees a drafter that has not read its inputs.
  draft = params.draft | {'offset': 0 * params.draft['offset']}
  with pytest.raises(AssertionError):
    other = params._replace(draft=draft)
    check(found, fixed(loop, other, request(GAMMA, **APART)))


def comes_later(name):
  """Plainly for some rounds, then with a drafter: the same greedy tokens."""
  loop, params = loop_of(name)
  asked = request(GAMMA, skips_rounds=True, **GREEDY)
  slots = slots_of(loop, params, asked)
  admit(slots, asked, [0, 3])
  slots.run(3, SIZE, Drafting(), False)
  view = jax.device_get(slots.run(100, SIZE, Drafting(GAMMA), False))
  found = {row: (view.generation, slot) for row, slot in slots.release(view)}
  check(found, fixed(*PLAIN, request(0, **GREEDY)), with_stats=False)
  for _, slot in found.values():
    rounds = view.generation.stats.num_rounds[slot]
    assert view.generation.stats.histogram[slot].sum() == rounds
  return view.num_rounds


def test_a_drafter_comes_later():
  # What it missed it reads: all of its proposals are accepted.
  assert comes_later('small_model_is_target') == (LENGTH - 3 + GAMMA) // 4


@pytest.mark.slow
def test_rows_of_every_drafter_come_and_go():
  for name in DRAFTERS.keys() - {*_BY_PLACE, 'small_model'}:
    come_and_go(*loop_of(name))
  for name in ('cascade_of_models', 'prompt_lookup', 'with_fallback'):
    comes_later(name)


def test_costs_of_another_gamma_are_refused():
  """An index past their end would be clamped in silence."""
  few = RestPolicy(np.ones(GAMMA, np.float32), np.float32(2), np.int32(32))
  asked = request(GAMMA).with_drafting(rests=few)
  with pytest.raises(ValueError, match=f'gamma: .* at most {GAMMA - 1}'):
    slots = slots_of(*loop_of('small_model'), asked)
    decode(slots, asked, [0], itertools.cycle((1,)))
