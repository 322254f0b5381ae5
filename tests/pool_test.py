"""Slots: whoever shares a pool, and whenever a row comes, it stays itself.

Every drafter of the conformance suite decodes rows that come and go, and must
give token for token, and count for count, what it gives in one fixed batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_requests
from drafter_conformance_test import DRAFTERS, GAMMA, TARGET, VOCAB, request_of
from specdec_jax.decoding import pool as decode_pool
from specdec_jax.decoding.fallback import Fallback
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.pool import PoolPrograms
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.request import Drafting
from specdec_jax.engine.scheduler import Slots
from specdec_jax.probs import SamplingConfig

ROWS, SIZE, GROUP = 7, 3, 2
LENGTH = 12
# One-hot rows and drawn ones in one program.
SAMPLING = SamplingConfig([1.0, 0.0, 1.0, 0.7, 0.0, 1.0, 1.3])
GREEDY = {'sampling': SamplingConfig(0.0).params(ROWS), 'greedy': True}
BUDGETS = jnp.array([12, 1, 7, 12, 12, 2, 9])


def heard(params, seed=0):
  """The same chains, but now their inputs change what they say."""

  def is_chain(part):
    return isinstance(part, dict) and 'offset' in part

  def one(part):
    if not is_chain(part):
      return jnp.asarray(part)
    shape = np.shape(part['offset'])  # a drafter may have other ids
    noise = np.random.default_rng(seed).normal(size=shape)
    return part | {'offset': jnp.asarray(noise, jnp.float32)}

  return jax.tree.map(one, params, is_leaf=is_chain)


TARGET_PARAMS = heard(TARGET.params)


def request(gamma, **changes):
  made = request_of(ROWS, gamma, SAMPLING, LENGTH, max_length=BUDGETS)
  # Rows that differ in what they read.
  inputs = made.inputs.at[3:, 2].set(4).at[5:, 0].set(3)
  return made.replace(inputs=inputs, **changes)


def prompted(gamma):
  tokens = np.random.default_rng(3).integers(2, VOCAB, (ROWS, 4))
  tokens[:, 0] = 0
  lengths = jnp.array([4, 1, 2, 3, 4, 1, 2])
  return request(
    gamma, prompt=jnp.asarray(tokens, jnp.int32), prompt_length=lengths
  )


@functools.partial(toy_requests.quick_jit, static_argnums=0)
def _decode(loop, params, asked):
  return loop.decode(params, asked)


def fixed(loop, params, asked):
  """All rows in one batch."""
  return jax.device_get(_decode(loop, params, asked))


def slots_of(loop, params, asked):
  """`SIZE` free slots for rows of a request."""
  slots = Slots(
    lambda example: PoolPrograms(loop, params, example),
    asked,
    asked.cache_slots - asked.draft_slots,
    asked.gamma,
    GROUP,
  )
  slots.begin(SIZE, asked.inputs.shape[1])
  return slots


def admit(slots, asked, rows):
  """Reads rows together, filled up, and gives them free slots."""
  filled = np.array([*rows, *rows][:GROUP])
  slots.admit(decode_pool.take_rows(asked, filled), rows)


def decode(slots, asked, order, rounds):
  """Row -> (generation, slot) of its end; rows enter in this order."""
  drafting = Drafting(asked.gamma, asked.rule, asked.fallback)
  waiting, found = list(order), {}
  while waiting or slots.rows:
    while slots.free and waiting:
      count = min(GROUP, len(slots.free))
      admit(slots, asked, waiting[:count])
      waiting = waiting[count:]
    view = jax.device_get(slots.run(next(rounds), 1, drafting, False))
    for row, slot in slots.release(view):
      found[row] = view.generation, slot
  return found


def check(found, want):
  assert sorted(found) == list(range(ROWS))
  for row, (have, slot) in found.items():
    length = want.length[row]
    assert have.length[slot] == length
    assert have.finish_reason[slot] == want.finish_reason[row]
    np.testing.assert_array_equal(
      have.tokens[slot, :length], want.tokens[row, :length]
    )
    for one, other in zip(
      jax.tree.leaves(have.stats), jax.tree.leaves(want.stats), strict=True
    ):
      np.testing.assert_array_equal(one[slot], other[row])


def rounds_of(*numbers):
  while True:
    yield from numbers


# What these propose depends on the place in the batch, on purpose.
_BY_PLACE = ('short_drafts', 'with_fallback_of_models')


def loop_of(name):
  drafter, draft = DRAFTERS[name]
  return Loop(TARGET, drafter), PairParams(TARGET_PARAMS, heard(draft))


def come_and_go(name):
  loop, params = loop_of(name)
  asked = request(GAMMA, tree=loop.drafter.tree)
  slots = slots_of(loop, params, asked)
  found = decode(slots, asked, [5, 0, 6, 1, 4, 2, 3], rounds_of(1, 5, 2))
  want = fixed(loop, params, asked)
  check(found, want)
  assert len(set(want.length.tolist())) > 2, 'rows should end apart'


def with_prompts(name):
  loop, params = loop_of(name)
  asked = prompted(GAMMA)
  slots = slots_of(loop, params, asked)
  found = decode(slots, asked, [6, 5, 4, 3, 2, 1, 0], rounds_of(3))
  check(found, fixed(loop, params, asked))


def test_the_plain_loop():
  loop, params = Loop(TARGET), PairParams(TARGET_PARAMS, None)
  asked = request(0)
  slots = slots_of(loop, params, asked)
  found = decode(slots, asked, range(ROWS), rounds_of(4, 1))
  check(found, fixed(loop, params, asked))


def test_control_a_row_that_is_not_copied_whole():
  """The comparison sees a drafter's cache that stays behind."""
  loop, params = loop_of('small_model')
  asked = request(GAMMA)
  slots = slots_of(loop, params, asked)
  slots._make()
  state = slots._pool.state
  stale = jax.tree.map(jnp.ones_like, state.drafter_state)
  leaves = {id(leaf) for leaf in jax.tree.leaves(stale)}
  marked = slots._pool.replace(state=state.replace(drafter_state=stale))
  kept = [id(leaf) in leaves for leaf in jax.tree.leaves(marked)]
  assert any(kept)
  layout = slots._programs._layout
  layout.axes = [
    None if is_kept else axis
    for axis, is_kept in zip(layout.axes, kept, strict=True)
  ]
  found = decode(slots, asked, range(ROWS), rounds_of(2))
  with pytest.raises(AssertionError):
    check(found, fixed(loop, params, asked))


def comes_later(name):
  """Plainly for some rounds, then with a drafter: the same greedy tokens."""
  loop, params = loop_of(name)
  asked = request(GAMMA, skips_rounds=True, **GREEDY)
  slots = slots_of(loop, params, asked)
  admit(slots, asked, [0, 3])
  slots.run(3, SIZE, Drafting(), False)
  view = jax.device_get(slots.run(100, SIZE, Drafting(GAMMA), False))
  plain = PairParams(TARGET_PARAMS, None)
  want = fixed(Loop(TARGET), plain, request(0, **GREEDY))
  for row, slot in slots.release(view):
    length = want.length[row]
    assert view.generation.length[slot] == length
    np.testing.assert_array_equal(
      view.generation.tokens[slot, :length], want.tokens[row, :length]
    )
    rounds = view.generation.stats.num_rounds[slot]
    assert view.generation.stats.histogram[slot].sum() == rounds
  if name == 'small_model':
    assert view.num_rounds < LENGTH - 3, 'nothing was accepted'


@pytest.mark.parametrize('law', [come_and_go, with_prompts, comes_later])
def test_rows_are_themselves(law):
  law('small_model')


@pytest.mark.slow
def test_rows_of_every_drafter_come_and_go():
  for name in DRAFTERS.keys() - {*_BY_PLACE, 'small_model'}:
    come_and_go(name)
  for name in ('cascade_of_models', 'with_fallback'):
    with_prompts(name)
  for name in ('cascade_of_models', 'prompt_lookup', 'with_fallback'):
    comes_later(name)


def test_costs_of_another_gamma_are_refused():
  """An index past their end would be clamped in silence."""
  loop, params = loop_of('small_model')
  few = Fallback(np.ones(GAMMA, np.float32), np.float32(2), np.int32(32))
  asked = request(GAMMA, fallback=few)
  with pytest.raises(ValueError, match=f'gamma: .* at most {GAMMA - 1}'):
    decode(slots_of(loop, params, asked), asked, [0], rounds_of(1))
