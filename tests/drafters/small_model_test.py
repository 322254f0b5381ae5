"""What is particular to small, combined and cascaded models, and to copies.

What all drafters have in common is in conformance_test.py.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.translation_memory import remember, translation_memory
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft
from toy_models import cycle

VOCAB = 12
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


request_of = functools.partial(toy_requests.request_of, inputs=(2, 3), seed=7)


extend_draft = toy_requests.quick_jit(DRAFT.extend)
propose_small = toy_requests.quick_jit(small_model(DRAFT).propose)


@functools.partial(toy_requests.quick_jit, static_argnums=0)
def _decode(drafter, params, request):
  pair = PairParams(TARGET.params, params)
  return Loop(TARGET, drafter).decode(pair, request)


def decode(drafter, params, request):
  CALLS.clear()
  result = jax.device_get(_decode(drafter, params, request))
  jax.effects_barrier()
  return result


def never(params, state, context):
  """Proposes nothing."""
  nothing = jnp.zeros_like(context.length)
  tokens = jnp.tile(nothing[:, None], (1, context.gamma))
  return Draft(tokens, None, nothing), state


def test_no_call_is_wasted_after_a_draft_that_was_accepted():
  """Ten rounds of three proposals, all accepted: 30 calls of the model."""
  twin = Counted(1, 'draft')
  twin_drafter = small_model(twin)
  request = request_of(1, 3, SamplingConfig(0.0), 40)
  for drafter, params in (
    (twin_drafter, twin.params),
    (with_fallback(Drafter(propose=never), twin_drafter), ((), twin.params)),
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


def test_with_fallback_skips_the_model_where_all_rows_copy():
  """Once the text is in its cycle, the model is not called any more."""
  target = cycle(4)  # it goes through its inputs again and again
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


@pytest.mark.parametrize('held', [0, 28, 53])
def test_a_model_reads_what_it_missed(held):
  """Ragged debts of 0 to 53 tokens; then it is as one that missed nothing."""
  rows, length = 3, jnp.array([55, 2, 11])
  tokens = jnp.asarray(np.random.default_rng(0).integers(2, VOCAB, (rows, 65)))
  request = request_of(rows, 3, SamplingConfig(1.0), 55)
  empty = DRAFT.prefill(DRAFT.params, request.inputs, 59)
  _, full = extend_draft(DRAFT.params, empty, tokens[:, :57])
  context = toy_requests.context_in(request, tokens, length)
  want, _ = propose_small(DRAFT.params, DRAFT.rewind(full, length - 1), context)
  behind = DRAFT.rewind(full, jnp.minimum(held, length - 1))
  context = context.within(skips_rounds=True)
  have, reached = propose_small(DRAFT.params, behind, context)
  np.testing.assert_array_equal(have.tokens, want.tokens)
  assert np.isfinite(have.probs).all()
  for row, end in enumerate(length):
    np.testing.assert_array_equal(reached.tokens[row, :end], tokens[row, :end])


# --- Copying: which match is continued, and how far -------------------------

INPUT_LEN, GAMMA = 14, 5


def propose_copies(drafter, inputs, texts):
  """The drafts of a ragged batch: a list of ids for each text."""
  context = toy_requests.context_of(texts, GAMMA, SamplingConfig(1.0))
  padded = np.zeros((len(texts), INPUT_LEN), np.int32)
  for row, ids in enumerate(inputs):
    padded[row, : len(ids)] = ids
  start = jnp.zeros((len(texts), 4), jnp.int32)  # a prompt's room counts not
  state = drafter.init((), jnp.asarray(padded), None, start, None)
  propose = jax.jit(drafter.propose)
  draft = jax.device_get(propose(drafter.params, state, context)[0])
  assert draft.probs is None and draft.tokens.shape == (len(texts), GAMMA)
  return [
    row[:length].tolist()
    for row, length in zip(draft.tokens, draft.length, strict=True)
  ]


def match(source, place, said, most):
  """How many tokens before a place are the last ones of what was said."""
  agrees = 0
  while agrees < min(most, place, len(said)):
    if source[place - agrees - 1] != said[-agrees - 1]:
      break
    agrees += 1
  return agrees


def reference(inputs, text, max_match, min_match):
  """The rule, place by place."""
  best, own, found = 0, False, []
  after_one = set()
  for source in (inputs, text):
    for place in range(1, len(source)):
      size = match(source, place, text, max_match)
      if size == 1:
        after_one.add(source[place])
      # The first place of the input goes before all others; of the output a
      # later one replaces an earlier one that it found itself.
      better = size > best or (size == best and source is text and own)
      if size >= min_match and better:
        best, own = size, source is text
        found = source[place : place + GAMMA]
        if own:
          found = (text[place:] * GAMMA)[:GAMMA]
  return [] if best == 1 and len(after_one) > 1 else found


@pytest.mark.parametrize(('max_match', 'min_match'), [(1, 1), (3, 1), (4, 2)])
def test_copies_follow_the_rule(max_match, min_match):
  rng = np.random.default_rng(max_match)
  # Of few ids and of many: a token with several followers, and with one. Some
  # inputs are empty, as a decoder-only model's.
  limits = rng.integers(5, 20, 300)
  inputs = [rng.integers(2, n, rng.integers(0, INPUT_LEN + 1)) for n in limits]
  texts = [np.append(0, rng.integers(2, n, rng.integers(30))) for n in limits]
  found = propose_copies(prompt_lookup(max_match, min_match), inputs, texts)
  for row, ids, text in zip(found, inputs, texts, strict=True):
    assert row == reference(ids.tolist(), text.tolist(), max_match, min_match)
  assert {*map(len, found)} == {*range(GAMMA + 1)} and not all(map(len, inputs))


# --- A translation memory -----------------------------------------------------


@pytest.mark.parametrize(('max_match', 'min_match'), [(2, 1), (8, 2), (16, 5)])
def test_a_memory_goes_on_from_the_longest_match(max_match, min_match):
  """Beside a search of all places, token by token."""
  rng = np.random.default_rng(max_match)
  # A row's text is often a text of the memory, or the end of one.
  texts = [rng.integers(1, 6, rng.integers(2, 12)) for _ in range(60)]
  inputs = [rng.permutation(texts[i])[: rng.integers(0, 9)] for i in range(60)]
  inputs[::2] = [text[: rng.integers(1, len(text))] for text in texts[::2]]
  outputs = [np.append(0, text[: len(text) // 2]) for text in texts[:60]]
  memory = remember(texts, max_match)
  drafter = translation_memory(memory, min_match)
  found = propose_copies(drafter, inputs, outputs)

  number = memory.tokens.size
  seen = set()
  for row, ids, text in zip(found, inputs, outputs, strict=True):
    said = [*ids, *text[len(ids) > 0 :]]
    matches = [
      match(memory.tokens, place, said, max_match) for place in range(number)
    ]
    best = max(matches)
    at_best = [place for place in range(number) if matches[place] == best]
    if best == max_match:  # the newest of equals
      at_best = at_best[-1:]
    following = [memory.tokens[i : i + GAMMA].tolist() for i in at_best]
    assert row in (following if best >= min_match else [[]])
    seen.add(len(row) > 0)
  assert seen == {True, False} or min_match == 1


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: remember([]), 'translation memory.*two tokens or more.* 0'),
    (lambda: remember([[4]]), 'two tokens or more.* 1'),
    (lambda: remember([[4, 5]], 0), 'max_match'),
    (lambda: translation_memory(remember([[4, 5]], 4), 5), 'min_match.*1 to 4'),
  ],
)
def test_a_memory_that_is_none(make, message):
  with pytest.raises(ValueError, match=message):
    make()
