"""The suite that every drafter runs through: one list, the same demands.

A new drafter is a line in `toy_drafters.DRAFTERS`. Each must be lossless
(greedy equality, chi-squared on joint n-grams of sampled output, beside
negative controls that must fail), must not recompile, and must be right after
every acceptance count, alone and in a ragged batch.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_families
import toy_models
import toy_requests
from specdec_jax.decoding import speculative
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models.families import network_of
from specdec_jax.probs import SamplingConfig
from toy_drafters import (
  DRAFT,
  DRAFTERS,
  GAMMA,
  INPUTS,
  LENGTH,
  NARROW,
  STOP,
  TARGET,
  VOCAB,
  WIDE,
  request_of,
)

ROWS = 6_000  # samples a test
ALPHA = 1e-3  # of a false alarm, once and for all with the seed below


def _begin(drafter):
  """Reads the inputs, or what the target's encoder says of them."""

  def begin(params, inputs, slots, prompt):
    encoded = None
    if drafter.reads_encoder:
      encoded = TARGET.encode(TARGET.params, inputs)
    return drafter.init(params, inputs, slots, prompt, encoded)

  return toy_requests.quick_jit(begin, static_argnums=2)


def _drafters(but, slow=()):
  """All drafters but some, and some in the slow run."""
  names = [name for name in DRAFTERS if name not in but]
  names += [pytest.param(name, marks=pytest.mark.slow) for name in slow]
  return pytest.mark.parametrize('name', names)


every_drafter = _drafters({'more_ids'})
# What compiles longest. The quick run has their parts, and of themselves the
# state after every acceptance count and greedy equality in a ragged batch.
_LONG = """
  more_ids fewer_ids shortlist on_encoder with_fallback_on_encoder short_drafts
  cascade_of_models with_fallback_of_models adaptive
""".split()  # the law of the adaptive one is enumerated in `resting_test`
every_kind = _drafters(_LONG)
every_law = _drafters(_LONG, slow=_LONG)


def _judge(wrong, request, draft, logits, keys):
  """With `wrong`, each round keeps the proposal that it should reject."""
  verdict = speculative.judge(request, draft, logits, keys)
  if verdict.path is not None:
    return verdict  # `verify_test` has controls of its own
  more = jnp.minimum(verdict.num_accepted + wrong, draft.length)
  return verdict.replace(num_accepted=more)


@functools.partial(toy_requests.quick_jit, static_argnums=0)
def _decode(drafter, params, request, wrong):
  judge = functools.partial(_judge, wrong)
  request = request.replace(tree=drafter.tree)
  pair = PairParams(TARGET.params, params)
  return Loop(TARGET, drafter, judge).decode(pair, request)


def decode(name, request, wrong=False):
  return jax.device_get(_decode(*DRAFTERS[name], request, wrong))


@toy_requests.quick_jit
def _plain(request):
  return Loop(TARGET).decode(PairParams(TARGET.params, None), request)


SAMPLINGS = {
  't1': SamplingConfig(1.0),
  'all': SamplingConfig(0.8, top_k=4, top_p=0.9),
}
LEAST = {'t1': 2, 'all': 0}  # tokens before a stop id


def sampled(sampling):
  """A request whose output has a law that is known."""
  least = jnp.full((ROWS,), LEAST[sampling])
  options = {'min_length': least, 'forbids_stops': True}
  return request_of(ROWS, GAMMA, SAMPLINGS[sampling], **options)


@functools.cache
def law_of(sampling):
  """The joint law of 4 tokens, stop id and ends included."""
  law = TARGET.next_probs(SAMPLINGS[sampling], INPUTS)

  def next_probs(prefix):
    forbidden = (np.arange(VOCAB) == STOP) & (len(prefix) < LEAST[sampling])
    return np.where(forbidden, 0, law(prefix))

  return toy_models.joint_law(next_probs, LENGTH, VOCAB, (STOP,))


def p_value(result, sampling) -> float:
  """chi-squared of what was drawn."""
  counts = toy_models.count_ngrams(result.tokens, VOCAB)
  return toy_models.chi_squared_p_value(counts, law_of(sampling))


@every_law
def test_sampled_output_has_the_targets_law(name):
  for sampling in SAMPLINGS:
    result = decode(name, sampled(sampling))
    assert p_value(result, sampling) > ALPHA, sampling


@every_kind
def test_control_every_drafter_is_rejected_often_enough(name):
  """The test above would see too kind a verdict, whatever the drafter."""
  result = decode(name, sampled('t1'), wrong=True)
  # Of these nothing is rejected, or nothing was changed.
  is_right = name in ('small_model_is_target', 'tree')
  assert (p_value(result, 't1') > ALPHA) == is_right


@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_plain_output_has_the_targets_law(sampling):
  """The oracle of the other tests is itself held against the closed form."""
  result = _plain(sampled(sampling).with_drafting(gamma=0))
  assert p_value(result, sampling) > ALPHA


# A draft that ends behind a draw is wrong, and the test above must see it.


def test_control_a_drafter_that_drops_what_it_has_drawn():
  """One program for both, whose parameters say which of them it is."""
  model = small_model(DRAFT)

  def init(params, *rest):
    return model.init(params[1], *rest)

  def propose(params, state, context):
    draft, state = model.propose(params[1], state, context)
    # Its distribution is flat, which is known before the draw; or the token
    # that was drawn turned out to be unlikely.
    drawn = jnp.take_along_axis(draft.probs, draft.tokens[..., None], axis=-1)
    unsure, unlikely = draft.probs.max(axis=-1) < 0.5, drawn[..., 0] < 0.3
    fails = jnp.where(params[0], unsure, unlikely)
    ends = jnp.pad(fails, ((0, 0), (0, 1)), constant_values=True)
    length = jnp.minimum(draft.length, jnp.argmax(ends, axis=1))
    return draft.replace(length=length.astype(jnp.int32)), state

  drafter, asked = model._replace(init=init, propose=propose), sampled('t1')
  for is_known in (True, False):
    params = np.array(is_known), DRAFT.params
    result = jax.device_get(_decode(drafter, params, asked, False))
    assert (p_value(result, 't1') > ALPHA) == is_known


def _path(draft, count) -> list[int]:
  """The first `count` proposals; of a tree, the last path of so many."""
  if draft.tree is None or not count:
    return list(range(count))
  last = np.flatnonzero(draft.tree.levels == count)[-1]
  return draft.tree.paths[last][:count].tolist()


@every_drafter
def test_greedy_equality_in_a_ragged_batch(name):
  """Prompts, budgets from 0 to the last slot, stop ids inside of drafts."""
  rows = 7
  rng = np.random.default_rng(3)
  prompt = np.append(np.zeros((rows, 1)), rng.integers(2, VOCAB, (rows, 3)), 1)
  ragged = {
    'prompt': jnp.asarray(prompt, jnp.int32),
    'prompt_length': jnp.array([4, 1, 2, 3, 4, 1, 2]),
    'max_length': jnp.array([52, 0, 1, 2, 9, 52, 51]),
    'min_length': jnp.array([52, 0, 0, 2, 3, 0, 20]),
    'forbids_stops': True,
  }
  request = request_of(rows, 8, SamplingConfig(0.0), 52, **ragged)
  # The prompt, the output and a whole draft fill the cache to its last slot.
  assert 4 + 52 + 8 == request.cache_slots
  want = jax.device_get(_plain(request.with_drafting(gamma=0)))
  have = decode(name, request)
  np.testing.assert_array_equal(have.tokens, want.tokens)
  np.testing.assert_array_equal(have.finish_reason, want.finish_reason)
  # A drafter that never proposed would pass everything else.
  assert have.stats.num_tested.sum() > 0


@every_kind
def test_does_not_recompile(name):
  """Other temperatures, filters, budgets: the program of the law's tests."""
  request = sampled('t1')
  decode(name, request)
  size = _decode._cache_size()
  changed = SamplingConfig([0.5, 2.0, 0.0, 1.0] * (ROWS // 4), 2, 0.7)
  limits = {'max_length': request.max_length // 2}
  decode(name, request.replace(sampling=changed.params(ROWS), **limits))
  assert _decode._cache_size() == size


@every_drafter
def test_state_after_every_acceptance_count(name):
  """A fresh drafter given the same tokens proposes what the used one does.

  The verdict is forced to each count 0..gamma, four rounds in a row, in two
  rows that have nothing in common.
  """
  drafter, params = DRAFTERS[name]
  slots = 24
  request = request_of(2, GAMMA, SamplingConfig(0.0), slots)
  inputs = request.inputs.at[1].set(0)
  rng = np.random.default_rng(0)
  init = _begin(drafter)
  propose = toy_requests.quick_jit(drafter.propose)
  commit = toy_requests.quick_jit(drafter.commit)

  def fresh(row, tokens, length):
    """One that saw only this row, and of it only committed tokens."""
    tokens = np.tile(tokens[row], (2, 1))
    state = init(params, jnp.tile(inputs[row], (2, 1)), slots, request.prompt)
    for seen in range(1, length):
      context = _context(request, tokens, [seen] * 2)
      _, state = propose(params, state, context)
      state = commit(state, jnp.array([seen + 1] * 2))
    return propose(params, state, _context(request, tokens, [length] * 2))[0]

  for count in range(GAMMA + 1):
    tokens = np.zeros((2, slots + 1), np.int32)
    lengths, used = [1, 1], init(params, inputs, slots, request.prompt)
    for _ in range(4):
      context = _context(request, tokens, lengths)
      draft, used = propose(params, used, context)
      for row, length in enumerate(lengths):
        again = fresh(row, tokens, length)
        levels = int(draft.length[row])
        assert levels == int(again.length[row]) <= GAMMA
        proposed = levels
        if draft.tree is not None:
          proposed = np.sum(draft.tree.levels <= levels)
        have = np.asarray(draft.tokens)[row, :proposed]
        want = np.asarray(again.tokens)[row, :proposed]
        np.testing.assert_array_equal(have, want)
        path = _path(draft, min(count, levels))
        kept = [*have[path], rng.integers(2, VOCAB)]
        tokens[row, length : length + len(kept)] = kept
        lengths[row] += len(kept)
      used = commit(used, jnp.array(lengths))
      # An id that the drafter lacks was read as its last one.
      most = (NARROW if name == 'fewer_ids' else WIDE).vocab_size - 1
      _check_caches(used, np.minimum(tokens, most))


def _check_caches(state, tokens):
  """What a model's cache holds, inside of any drafter, was committed.

  The chains look at two tokens only, and would not tell an older one.
  """

  def is_cache(part):
    return isinstance(part, toy_models.MarkovCache)

  for cache in filter(is_cache, jax.tree.leaves(state, is_leaf=is_cache)):
    for row, length in enumerate(np.asarray(cache.length)):
      held = np.asarray(cache.tokens)[row, :length]
      np.testing.assert_array_equal(held, tokens[row, :length])


def _context(request, tokens, lengths):
  # The feature that heads read is, here, the last token but one.
  place = np.maximum(np.asarray(lengths) - 2, 0)
  last = np.asarray(tokens)[np.arange(len(place)), place]
  of_heads = {'target': TARGET, 'target_params': TARGET.params}
  of_heads['features'] = jax.nn.one_hot(last, VOCAB)
  return toy_requests.context_in(request, tokens, lengths, **of_heads)


# A network in place of the chain: its caches, positions and both embeddings.


@pytest.mark.parametrize(
  'name', ['BART', pytest.param('Marian', marks=pytest.mark.slow)]
)
def test_samples_of_a_network_have_its_law(name):
  """Three tokens of a small one, drafted for by another of other weights."""
  config, length = toy_families.ALL[name], 3
  config = dataclasses.replace(config, vocab_size=VOCAB, pad_id=0, start_id=0)
  network = network_of(config)
  # Weights by which no token is certain.
  params, other = (
    jax.tree.map(lambda x: x / 4, toy_families.make(config, seed)[1])
    for seed in (0, 1)
  )
  inputs, drafter = [4, 2, 3], small_model(network)
  prefixes = np.array([*itertools.product(range(VOCAB), repeat=length - 1)])
  fed = np.pad(prefixes, ((0, 0), (1, 0)))  # behind the start token
  inputs_of_all = np.tile(np.array(inputs, np.int32), (len(fed), 1))
  logits = toy_families.logits_of(network, params, inputs_of_all, fed)
  exponents = np.exp(np.asarray(logits, np.float64))
  assert 1e-3 < exponents[0, 0].min() / exponents[0, 0].sum() < 0.2

  def next_probs(prefix):
    row = (prefixes[:, : len(prefix)] == prefix).all(axis=1).argmax()
    return exponents[row, len(prefix)]

  law = toy_models.joint_law(next_probs, length, VOCAB)
  request = toy_requests.request_of(
    ROWS, 2, SamplingConfig(1.0), length, inputs=inputs, seed=7
  )
  for wrong in (False, True):
    loop = Loop(network, drafter, functools.partial(_judge, wrong))
    decode = toy_requests.quick_jit(loop.decode)
    result = jax.device_get(decode(PairParams(params, other), request))
    counts = toy_models.count_ngrams(result.tokens, VOCAB)
    p_value = toy_models.chi_squared_p_value(counts, law)
    assert (p_value > ALPHA) == (not wrong)
