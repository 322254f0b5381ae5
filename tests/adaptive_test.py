"""A draft whose length adapts: its law, its rows, its programs, what it costs.

`drafter_conformance_test` runs it through the demands on every drafter.
"""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import toy_models
import toy_requests
from drafter_conformance_test import adaptive_rule
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.pool import take_rows
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters import length
from specdec_jax.drafters.small_model import small_model
from specdec_jax.probs import SamplingConfig
from verify_laws import pair, step_law

VOCAB, GAMMA, ROWS = 5, 3, 6
TARGET = toy_models.random_markov(1, VOCAB, order=2, scale=1.2, input_scale=1)
_NOISE = toy_models.random_markov(2, VOCAB, order=2, scale=0.6).params['table']
DRAFT = toy_models.MarkovModel(
  TARGET.params['table'] + _NOISE, TARGET.params['offset']
)
PAIR = PairParams(TARGET.params, DRAFT.params)
DRAFTER = small_model(DRAFT)
INPUTS = np.random.default_rng(0).integers(1, VOCAB, (ROWS, 4))


# Exact enumeration.


def _lengths(draft, gamma, vocab_size, rule):
  """How much of each of V^gamma drafts the shipped loop proposes.

  Row by row it is made to draw the tokens of one of them.
  """
  proposals = list(itertools.product(range(vocab_size), repeat=gamma))
  tokens = jnp.array(proposals)
  logits = jnp.array(
    [[np.log(draft(t[:i])) for i in range(gamma)] for t in proposals]
  )
  batch = len(proposals)
  context = toy_requests.context_of(
    [(0,)] * batch,
    gamma,
    SamplingConfig(1.0),
    rule=jax.tree.map(jnp.asarray, rule),
    room=jnp.full((batch,), gamma),
  )

  def draw(logits, context, place):
    drawn = jnp.take_along_axis(tokens, place[:, None], axis=1)[:, 0]
    return drawn, jax.nn.softmax(logits)

  def read(index, token):
    del token
    return logits[:, index + 1], index + 1

  # In place of random numbers, where they would be used.
  places = jnp.tile(jnp.arange(gamma)[:, None], (1, batch))
  with mock.patch.multiple(
    length, draft_uniforms=lambda context: places, draw=draw
  ):
    made = toy_requests.quick_jit(
      lambda context: length.draft(logits[:, 0], 0, context, read)[0]
    )(context)
  np.testing.assert_array_equal(made.tokens[:, 0], tokens[:, 0])
  found = np.asarray(made.length)
  return dict(zip(proposals, found.tolist(), strict=True))


def test_law_of_a_draft_that_ends_early():
  """The joint law of gamma + 1 tokens, over all drafts and random numbers."""
  vocab_size, gamma = 6, 2
  target, draft = pair(20, vocab_size)
  law = toy_models.joint_law(target, gamma + 1, vocab_size)
  seen = set()
  for rule in (adaptive_rule(gamma), length.unsure_below(0.4, gamma)):
    lengths = _lengths(draft, gamma, vocab_size, rule)
    seen |= set(lengths.values())
    found = step_law(target, draft, gamma, vocab_size, length=lengths.get)
    assert np.abs(found - law).max() < 1e-6
  assert len(seen) > 1  # or no draft ended early


# The loops.


def _request(rows, sampling, rule, slots=40, **changes):
  request = toy_requests.request_of(
    ROWS, rule.most, sampling, slots, inputs=(0,), seed=3, **changes
  )
  request = request.replace(inputs=jnp.asarray(INPUTS), rule=rule)
  return take_rows(request, np.array(rows))


@toy_requests.quick_jit
def _decode(request):
  return Loop(TARGET, DRAFTER).decode(PAIR, request)


ALL = list(range(ROWS))
RULE = adaptive_rule(GAMMA)


def test_a_row_does_not_depend_on_its_neighbours():
  """Alone it makes narrower calls, and its loop ends earlier."""
  sampling = SamplingConfig(0.0)
  together = _decode(_request(ALL, sampling, RULE))
  alone = [_decode(_request([row], sampling, RULE)) for row in ALL]
  np.testing.assert_array_equal(
    together.tokens, np.concatenate([one.tokens for one in alone])
  )
  for name in ('num_rounds', 'num_tested', 'num_accepted'):
    np.testing.assert_array_equal(
      getattr(together.stats, name),
      np.concatenate([getattr(one.stats, name) for one in alone]),
    )


def test_each_price_ends_a_draft():
  """What is worth less than it costs is not proposed, or not asked for."""
  request = _request(ALL, SamplingConfig(0.0), RULE)

  def accepted(**changes):
    found = _decode(request.replace(rule=RULE.replace(**changes)))
    return np.asarray(found.stats.num_tested)

  never, always = jnp.ones((GAMMA,)), jnp.full((GAMMA,), -1.0)
  assert not accepted(worth=never).any()
  first = accepted(worth=always, worth_asking=never)
  every = accepted(worth=always, worth_asking=always)
  assert np.all(first > 0) and np.all(every >= first) and np.any(every > first)
