"""What is particular to uniform, combined and cascaded drafters.

And to a small model, which inside of others is not asked every round.

What all drafters have in common is in drafter_conformance_test.py.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax.decoding import speculative
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_fit import fit
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import catch_up, small_model
from specdec_jax.drafters.uniform import uniform
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft

VOCAB = 6
CALLS = collections.Counter()  # of `Counted` models, at run time


class Counted(toy_models.MarkovModel):
  """Counts its calls when they happen, not when they are traced."""

  def __init__(self, seed, name):
    super().__init__(toy_models.random_markov(seed, VOCAB, 2).params['table'])
    self.name = name

  def extend(self, params, cache, tokens, tree=None):
    jax.debug.callback(lambda: CALLS.update([self.name]))
    return super().extend(params, cache, tokens, tree)


TARGET, DRAFT = Counted(1, 'target'), Counted(2, 'draft')
TABLE = fit(
  [[0, *np.random.default_rng(i).integers(0, VOCAB, 20)] for i in range(9)],
  2,
  VOCAB,
)


def request_of(rows, gamma, sampling, slots, inputs=(2, 3), **changes):
  return toy_requests.request_of(
    rows, gamma, sampling, slots, inputs=inputs, seed=7, **changes
  )


@functools.partial(toy_requests.quick_jit, static_argnums=(0, 3))
def init_of(drafter, params, inputs, slots):
  return drafter.init(params, inputs, slots, None)


@functools.partial(toy_requests.quick_jit, static_argnums=0)
def propose_of(drafter, params, state, context):
  return drafter.propose(params, state, context)


context_of = toy_requests.quick_jit(speculative.context_of)
extend_draft = toy_requests.quick_jit(DRAFT.extend)
rewind_draft = toy_requests.quick_jit(DRAFT.rewind)
propose_small = toy_requests.quick_jit(small_model(DRAFT).propose)
catch_up_draft = toy_requests.quick_jit(functools.partial(catch_up, DRAFT))


@functools.partial(toy_requests.quick_jit, static_argnums=0)
def _decode(drafter, params, request):
  pair = PairParams(TARGET.params, params)
  return Loop(TARGET, drafter).decode(pair, request)


def decode(drafter, params, request):
  CALLS.clear()
  result = jax.device_get(_decode(drafter, params, request))
  jax.effects_barrier()
  return result


MIXED = SamplingConfig([0.0, 0.6, 1.0, 1.7], top_k=4)


@pytest.mark.parametrize(
  ('cheaper', 'params'),
  [
    pytest.param(ngram(TABLE), TABLE, id='bigram', marks=pytest.mark.slow),
    pytest.param(small_model(DRAFT), DRAFT.params, id='model'),
  ],
)
def test_cascade_of_the_target_itself_is_always_accepted(cheaper, params):
  """Draft.probs are the model's own rows, at every temperature."""
  drafter = cascade(TARGET, cheaper)
  request = request_of(4, 5, MIXED, 40, max_length=jnp.array([40, 39, 11, 40]))
  stats = decode(drafter, (TARGET.params, params), request).stats
  np.testing.assert_array_equal(stats.num_accepted, stats.num_tested)
  assert (stats.num_tested >= 9).all()


def test_cascade_calls_its_model_less_often():
  """Helped by one that knows all, four tokens cost one call instead of 4."""
  request = request_of(1, 4, SamplingConfig(0.0), 40)
  plain = decode(small_model(DRAFT), DRAFT.params, request)
  assert CALLS['draft'] == 4 * CALLS['target']
  helper = Counted(2, 'helper')
  drafter = cascade(DRAFT, small_model(helper), gamma=3)
  found = decode(drafter, (DRAFT.params, helper.params), request)
  np.testing.assert_array_equal(found.tokens, plain.tokens)
  np.testing.assert_array_equal(found.stats.histogram, plain.stats.histogram)
  assert CALLS['draft'] == CALLS['target']
  assert 3 * CALLS['target'] <= CALLS['helper']


def test_finished_rows_do_not_keep_a_cascade_busy():
  """As many calls beside rows that only fill up the batch as beside equals."""
  drafter, params = cascade(DRAFT, uniform(VOCAB)), (DRAFT.params, ())
  request = request_of(3, 4, SamplingConfig(0.0), 40)
  request = request.replace(keys=request.keys[jnp.zeros(3, jnp.int32)])
  calls = []
  for limits in ([40, 40, 40], [40, 0, 0]):
    changed = request.replace(max_length=jnp.array(limits))
    decode(drafter, params, changed)
    calls.append(CALLS['draft'])
  # The loop learns only by the first verdict that a row was never to run.
  assert calls[0] <= calls[1] <= calls[0] + 4


def test_cascade_needs_a_gamma():
  with pytest.raises(ValueError, match='at least 1, got 0'):
    cascade(DRAFT, uniform(VOCAB), gamma=0)


def repeating():
  """A target that goes through its inputs again and again: all is copied."""
  table = np.full((VOCAB,) * 2, -30.0)
  cycle = [0, 2, 3, 4, 5]
  for here, after in zip(cycle, [*cycle[1:], 2], strict=True):
    table[here, after] = 30.0
  return toy_models.MarkovModel(table)


def silent() -> Drafter:
  """Never proposes anything."""

  def propose(params, state, context):
    batch = context.length.shape[0]
    tokens = jnp.zeros((batch, context.gamma), jnp.int32)
    return Draft(tokens, None, jnp.zeros((batch,), jnp.int32)), state

  return Drafter(lambda *_: (), propose, lambda state, _: state, 'silent')


def test_no_call_is_wasted_after_a_draft_that_was_accepted():
  """Ten rounds of three proposals, all accepted: 30 calls of the model."""
  twin = Counted(1, 'draft')
  request = request_of(1, 3, SamplingConfig(0.0), 40)
  for drafter, params in (
    (small_model(twin), twin.params),
    (with_fallback(silent(), small_model(twin)), ((), twin.params)),
  ):
    stats = decode(drafter, params, request).stats
    assert stats.histogram.tolist() == [[0, 0, 0, 10]]
    assert CALLS['draft'] == 30, drafter.name


def test_no_call_of_a_cascade_is_wasted_either():
  """A call verifies three: two rounds for a draft of five, always accepted."""
  model, helper = Counted(1, 'draft'), Counted(1, 'helper')
  drafter = cascade(model, small_model(helper))
  request = request_of(1, 5, SamplingConfig(0.0), 60)
  stats = decode(drafter, (model.params, helper.params), request).stats
  assert stats.histogram.tolist() == [[0] * 5 + [10]]
  assert CALLS['draft'] == 20
  # What the target added behind a draft may be a token too much to owe.
  assert 40 <= CALLS['helper'] <= 50


def test_who_is_told_that_rounds_may_be_skipped():
  """A model at the top pays nothing for what happens only inside of others."""
  told = {}

  def spy(name):
    inner = small_model(DRAFT)

    def propose(params, state, context):
      told[name] = context.skips_rounds
      return inner.propose(params, state, context)

    return inner._replace(propose=propose)

  request = request_of(2, 3, SamplingConfig(0.0), 8)
  both = (DRAFT.params, DRAFT.params)
  for drafter, params in (
    (spy('alone'), DRAFT.params),
    (with_fallback(spy('first'), spy('second')), both),
    (cascade(DRAFT, spy('cheaper')), both),
    (
      with_fallback(prompt_lookup(), with_fallback(silent(), spy('nested'))),
      ((), ((), DRAFT.params)),
    ),
  ):
    pair = PairParams(TARGET.params, params)
    jax.eval_shape(
      Loop(TARGET, drafter).decode, pair, request
    )  # it is known when traced
  assert told.pop('alone') is False
  assert told == dict.fromkeys(['first', 'second', 'cheaper', 'nested'], True)


def test_with_fallback_skips_the_model_where_all_rows_copy():
  """Once the text is in its cycle, the model is not called any more."""
  target = repeating()
  drafter = with_fallback(prompt_lookup(), small_model(DRAFT))
  params = PairParams(target.params, ((), DRAFT.params))
  request = request_of(2, 3, SamplingConfig(0.0), 56, inputs=(2, 3, 4, 5))
  run = toy_requests.quick_jit(Loop(target, drafter).decode)
  CALLS.clear()
  result = jax.device_get(run(params, request))
  jax.effects_barrier()
  assert result.tokens[0, :6].tolist() == [2, 3, 4, 5, 2, 3]
  # The start token is in no input: the model is asked once, for three tokens.
  assert CALLS['draft'] == 3
  assert result.stats.num_rounds[0] < 20


def test_with_fallback_takes_what_each_row_has():
  """One row copies, the other has nothing to copy: the model's tokens."""
  inputs = jnp.array([[2, 3, 4, 5], [0, 0, 0, 0]])
  request = request_of(2, 3, SamplingConfig(1.0), 20, inputs=inputs[0])
  request = request.replace(inputs=inputs)
  tokens = jnp.zeros((2, 65), jnp.int32).at[:, 1].set(3)
  context = context_of(request, tokens, jnp.array([2, 2]), request.keys)
  both = with_fallback(prompt_lookup(), small_model(DRAFT))
  params = ((), DRAFT.params)
  state = init_of(both, params, inputs, 64)
  draft, _ = propose_of(both, params, state, context)
  alone = small_model(DRAFT)
  cache = init_of(alone, DRAFT.params, inputs, 64)
  context = context.replace(skips_rounds=True)
  other, _ = propose_small(DRAFT.params, cache, context)
  assert draft.length.tolist() == [2, 3]
  assert draft.tokens[0, :2].tolist() == [4, 5]
  np.testing.assert_array_equal(
    draft.probs[0, :2], jax.nn.one_hot(jnp.array([4, 5]), VOCAB)
  )
  np.testing.assert_array_equal(draft.tokens[1], other.tokens[1])
  np.testing.assert_array_equal(draft.probs[1], other.probs[1])


def test_with_fallback_two_deterministic_drafters_states_no_probabilities():
  both = with_fallback(prompt_lookup(min_match=2), prompt_lookup())
  request = request_of(1, 2, SamplingConfig(1.0), 20, inputs=(4, 5, 1))
  tokens = jnp.zeros((1, 65), jnp.int32).at[:, 1].set(4)
  context = context_of(request, tokens, jnp.array([2]), request.keys)
  params = ((), ())
  state = init_of(both, params, request.inputs, 64)
  draft, _ = propose_of(both, params, state, context)
  assert draft.probs is None
  assert draft.tokens.tolist() == [[5, 1]] and draft.length.tolist() == [2]


@pytest.mark.parametrize('held', [0, 1, 5, 28, 36, 53])
def test_a_model_reads_what_it_missed(held):
  """Ragged debts of 0 to 53 tokens; then it is as one that missed nothing."""
  rows, length = 3, jnp.array([55, 2, 11])
  tokens = jnp.asarray(np.random.default_rng(0).integers(2, VOCAB, (rows, 65)))
  request = request_of(rows, 3, SamplingConfig(1.0), 55)
  empty = DRAFT.prefill(DRAFT.params, request.inputs, 59)
  _, full = extend_draft(DRAFT.params, empty, tokens[:, :57])
  late = rewind_draft(full, jnp.minimum(held, length - 1))
  reached = catch_up_draft(DRAFT.params, late, tokens, length)
  assert (length - 2 <= reached.length).all()
  np.testing.assert_array_equal(
    reached.tokens, rewind_draft(full, reached.length).tokens
  )
  context = context_of(request, tokens, length, request.keys)
  missed_nothing = rewind_draft(full, length - 1)
  want, _ = propose_small(DRAFT.params, missed_nothing, context)
  context = context.replace(skips_rounds=True)
  have, _ = propose_small(DRAFT.params, late, context)
  np.testing.assert_array_equal(have.tokens, want.tokens)
  assert np.isfinite(have.probs).all()


def test_uniform_draws_every_id_alike():
  rows = 3000
  request = request_of(rows, 2, SamplingConfig(0.3), 20)
  tokens = jnp.zeros((rows, 65), jnp.int32)
  length = jnp.ones((rows,), jnp.int32)
  context = context_of(request, tokens, length, request.keys)
  drafter = uniform(VOCAB)
  draft, _ = jax.jit(drafter.propose)((), (), context)
  np.testing.assert_allclose(draft.probs, 1 / VOCAB)
  counts = toy_models.count_ngrams(draft.tokens, VOCAB)
  toy_models.assert_chi_squared(counts, np.full((VOCAB,) * 2, VOCAB**-2), 1e-3)
  one_more = uniform(VOCAB + 1)  # the control
  more, _ = jax.jit(one_more.propose)((), (), context)
  kept = np.minimum(more.tokens, VOCAB - 1)
  counts = toy_models.count_ngrams(kept, VOCAB)
  law = np.full((VOCAB,) * 2, VOCAB**-2)
  assert toy_models.chi_squared_p_value(counts, law) < 1e-3


def test_uniform_needs_a_vocabulary():
  with pytest.raises(ValueError, match='at least 1, got 0'):
    uniform(0)
