"""Slots: whoever shares a pool, and whenever a row comes, it stays itself.

Every drafter of the conformance suite decodes rows that come and go, and must
give token for token, and count for count, what it gives in one fixed batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
import toy_requests
from drafter_conformance_test import (
  DRAFT,
  DRAFTERS,
  GAMMA,
  TARGET,
  request_of,
)
from specdec_jax.decoding import fallback
from specdec_jax.decoding import pool as decode_pool
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.pool import RowLayout
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
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


def empty(asked):
  """Rows without text, as wide as those that `asked` is of."""
  row = decode_pool.take_rows(asked, np.zeros((GROUP,), np.int32))
  return row.replace(
    inputs=row.inputs * 0,
    max_length=row.max_length * 0,
    prompt=None,
    prompt_length=None,
    slots=asked.cache_slots - asked.draft_slots - 1,
  )


@functools.cache
def sampled():
  """The pair, and what its rows are when all are in one batch."""
  loop = Loop(TARGET, small_model(DRAFT))
  params = PairParams(TARGET_PARAMS, heard(DRAFT.params))
  return loop, params, fixed(loop, params, request(GAMMA))


def fixed(loop, params, asked):
  """All rows in one batch."""
  decode = toy_requests.quick_jit(functools.partial(loop.decode, params))
  return jax.device_get(decode(asked))


class Pooled:
  """A pool of `SIZE` slots and its programs."""

  def __init__(self, loop, params, asked):
    self.asked = asked.replace(
      slots=asked.cache_slots - asked.draft_slots - asked.prompt_width
    )
    example = empty(asked)
    layout = RowLayout(loop, params, example, asked.prompt is not None)
    self.layout = layout
    rows = toy_requests.quick_jit(functools.partial(decode_pool.read, loop))(
      params, example
    )
    self.row = layout.only(rows, np.zeros((1,), np.int32))
    self.pool = layout.repeated(self.row, SIZE)
    self._read = toy_requests.quick_jit(
      lambda rows: layout.staged(decode_pool.read(loop, params, rows), self.row)
    )
    self._admit = toy_requests.quick_jit(layout.admit, donate_argnums=0)
    self.run = toy_requests.quick_jit(
      functools.partial(decode_pool.run, loop, params),
      static_argnums=3,
      donate_argnums=0,
    )

  def admit(self, rows, free):
    """Reads rows together, filled up, and gives them these slots."""
    staged = self._read(
      decode_pool.take_rows(self.asked, np.array([*rows, *rows][:GROUP]))
    )
    places = np.zeros((SIZE,), np.int32)
    places[: len(free)] = free
    self.pool = self._admit(self.pool, staged, self.row, places, len(free))

  def decode(self, order, gamma, rounds):
    """Row -> (generation, slot) of its end; rows enter in this order."""
    waiting, owners, found = list(order), [None] * SIZE, {}
    while True:
      free = [slot for slot, row in enumerate(owners) if row is None]
      while free and waiting:
        count = min(GROUP, len(free), len(waiting))
        rows, waiting = waiting[:count], waiting[count:]
        slots, free = free[-count:], free[:-count]
        self.admit(rows, slots)
        for slot, row in zip(slots, rows, strict=True):
          owners[slot] = row
      if not any(row is not None for row in owners):
        return found
      self.pool, view = self.run(self.pool, next(rounds), 1, gamma)
      view = jax.device_get(view)
      assert view.live_rounds <= view.num_rounds * SIZE
      for slot, row in enumerate(owners):
        if row is not None and view.is_free[slot]:
          found[row] = view.generation, slot
          owners[slot] = None


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


def test_the_plain_loop():
  loop, params = Loop(TARGET), PairParams(TARGET_PARAMS, None)
  asked = request(0)
  found = Pooled(loop, params, asked).decode(
    list(range(ROWS)), 0, rounds_of(4, 1)
  )
  check(found, fixed(loop, params, asked))


def test_control_a_row_that_is_not_copied_whole():
  """The comparison sees a drafter's cache that stays behind."""
  loop, params, want = sampled()
  asked = request(GAMMA)
  pooled = Pooled(loop, params, asked)
  stale = jax.tree.map(jnp.ones_like, pooled.pool.state.drafter_state)
  leaves = {id(leaf) for leaf in jax.tree.leaves(stale)}
  marked = pooled.pool.replace(
    state=pooled.pool.state.replace(drafter_state=stale)
  )
  kept = [id(leaf) in leaves for leaf in jax.tree.leaves(marked)]
  assert any(kept)
  pooled.layout.axes = [
    None if is_kept else axis
    for axis, is_kept in zip(pooled.layout.axes, kept, strict=True)
  ]
  found = pooled.decode(list(range(ROWS)), GAMMA, rounds_of(2))
  with pytest.raises(AssertionError):
    check(found, want)


def come_and_go(name):
  drafter, draft = DRAFTERS[name]
  loop, params = Loop(TARGET, drafter), PairParams(TARGET_PARAMS, heard(draft))
  asked = request(GAMMA, tree=drafter.tree)
  pooled = Pooled(loop, params, asked)
  # Rows of the target's cache hold nothing yet; what the drafter keeps may.
  assert any(pooled.layout.empty)
  found = pooled.decode([5, 0, 6, 1, 4, 2, 3], GAMMA, rounds_of(1, 5, 2))
  want = fixed(loop, params, asked)
  check(found, want)
  assert len(set(want.length.tolist())) > 2, 'rows should end apart'


def test_rows_that_come_and_go_are_themselves():
  come_and_go('small_model')


@pytest.mark.slow
def test_rows_of_every_drafter_come_and_go():
  for name in DRAFTERS.keys() - {'small_model', *_BY_PLACE}:
    come_and_go(name)


def test_layout_of_a_network():
  """A T5's position bias belongs to no row; its cross-attention is wide."""
  network = small_vocabulary.network(1)
  target = jax.eval_shape(network.init, jax.random.key(0))
  loop, params = Loop(network), PairParams(target, None)
  asked = request(0)
  layout = RowLayout(loop, params, empty(asked), prompted=False)
  row = jax.eval_shape(
    functools.partial(decode_pool.read, loop), params, empty(asked)
  )
  named = {
    jax.tree_util.keystr(path): layout.axes[i]
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(row))
  }
  shared = {name for name, axis in named.items() if axis is None}
  assert shared == {
    '.request.sampling.top_k',
    '.request.sampling.top_p',
    '.request.stop_ids',
    '.state.target_cache.position_bias[0]',
  }
  assert set(named.values()) == {0, None}
  cache = row.state.target_cache
  assert sum(layout.empty) == len(cache.keys) + len(cache.values)


def test_costs_of_another_gamma_are_refused():
  """An index past their end would be clamped in silence."""
  loop, params, _ = sampled()
  few = fallback.of_round_costs(np.ones(GAMMA))
  pooled = Pooled(loop, params, request(GAMMA, fallback=few))
  with pytest.raises(ValueError, match=f'gamma: .* at most {GAMMA - 1}'):
    pooled.run(pooled.pool, 1, 1, GAMMA)
