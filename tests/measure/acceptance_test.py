"""Acceptance rates: the measured one is the one that the chain has."""

import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.pair import PlacedPair
from specdec_jax.measure import acceptance
from specdec_jax.probs import SamplingConfig

VOCAB, SLOTS, ROWS = 6, 24, 512
TARGET, DRAFT, OTHER = (toy_models.random_markov(i, VOCAB) for i in (1, 2, 3))
PARAMS = PairParams(TARGET.params, DRAFT.params)
PAIR = PlacedPair(TARGET, small_model(DRAFT), PARAMS, {})


def make_request(temperature, lenience=None, seed=0, rows=ROWS):
  lenience = None if lenience is None else jnp.float32(lenience)
  args = rows, 1, SamplingConfig(temperature), SLOTS
  options = {'inputs': (1,), 'seed': seed, 'lenience': lenience}
  return toy_requests.request_of(*args, **options)


def rates_of(*requests, pair=PAIR, num_tokens=1, **options):
  """Rates over requests, each of whose rows is a text of its own."""
  batches = [
    ([(number, row) for row in range(len(request.inputs))], request)
    for number, request in enumerate(requests)
  ]
  return acceptance.of_outputs(pair, batches, num_tokens, **options)


def rows_of(model, temperature):
  """softmax(logits / T) after each token, float[V, V]."""
  logits = np.stack([model.logits_after([token]) for token in range(VOCAB)])
  scaled = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature)
  return scaled / scaled.sum(axis=1, keepdims=True)


def exact_alpha(draft, temperature, lenience=1.0):
  """The mean overlap over a run's states, from the start token 0."""
  ours, theirs = rows_of(TARGET, temperature), rows_of(draft, temperature)
  overlap = np.minimum(ours / lenience, theirs).sum(axis=1)
  at, betas = np.eye(VOCAB)[0], []
  for _ in range(SLOTS):
    betas.append(at @ overlap)
    at = at @ ours
  return np.mean(betas)


@pytest.mark.parametrize('settings', [(1.0, None), (0.6, None), (1.0, 0.3)])
def test_alpha_is_the_mean_overlap(settings):
  """Within 4 standard errors; another drafter's must be outside of them."""
  temperature, lenience = settings
  rates = rates_of(make_request(*settings))
  rate = rates.alpha
  assert rates.proposes.mean == 1 and rates.overall == rate
  assert (rate.num_tokens, rate.num_outputs) == (ROWS * SLOTS, ROWS)
  assert (within := 4 * rate.standard_error) < 0.04
  expected = exact_alpha(DRAFT, temperature, lenience or 1.0)
  assert abs(rate.mean - expected) < within
  assert abs(rate.mean - exact_alpha(OTHER, temperature)) > within


def greedy(token, count, lenience):
  """Whether each of the drafter's greedy choices is near the target's."""
  near = []
  for _ in range(count):
    weights = np.exp(TARGET.logits_after([token]))
    guess = np.argmax(DRAFT.logits_after([token]))
    near.append(float(weights[guess] >= lenience * weights.max()))
    token = np.argmax(weights)
  return near


@pytest.mark.parametrize('lenience', [None, 0.3])
def test_behind_a_prompt_only_what_is_produced_counts(lenience):
  """Greedy rows of one, two and four tokens, each followed for all its slots.

  Their alpha is the share of choices that are, or are near, the best.
  """
  request = make_request(0.0, lenience, rows=3).replace(
    prompt=jnp.array([[0, 5, 2, 3], [0, 4, 5, 5], [0, 2, 2, 2]]),
    prompt_length=jnp.array([1, 2, 4]),
    max_length=jnp.array([SLOTS, 9, SLOTS]),
  )
  starts = (0, SLOTS), (4, 9), (2, SLOTS)
  want = sum((greedy(*start, lenience or 1.0) for start in starts), [])
  alpha = rates_of(request).alpha
  assert alpha.num_tokens == len(want) == 2 * SLOTS + 9
  assert alpha.mean == pytest.approx(np.mean(want))


def test_what_was_not_proposed_counts_in_no_acceptance_rate():
  """A drafter that proposes for the first token alone, or for none."""

  def init(params, *rest):
    return PAIR.drafter.init(params[1], *rest)

  def propose(params, state, context):
    draft, state = PAIR.drafter.propose(params[1], state, context)
    proposes = context.length == params[0]
    return draft.replace(length=draft.length * proposes), state

  drafter = PAIR.drafter._replace(init=init, propose=propose)

  def rates_at(length):
    params = PairParams(TARGET.params, (jnp.int32(length), DRAFT.params))
    pair = PAIR._replace(drafter=drafter, params=params)
    return rates_of(make_request(1.0), pair=pair)

  # The first token follows the start token alone: length 1.
  first, none = rates_at(1), rates_at(0)
  betas = np.minimum(rows_of(TARGET, 1.0), rows_of(DRAFT, 1.0)).sum(axis=1)
  assert first.alpha.mean == pytest.approx(betas[0])
  assert first.alpha.num_tokens == ROWS
  assert first.proposes.mean == pytest.approx(1 / SLOTS)
  assert first.overall.mean == pytest.approx(betas[0] / SLOTS)
  assert first.overall.num_tokens == ROWS * SLOTS
  assert none.alpha is None
  assert (none.proposes.mean, none.overall.mean) == (0.0, 0.0)


def test_batches_end_when_enough_was_generated():
  counted = []
  requests = [make_request(1.0, seed=seed, rows=4) for seed in range(9)]
  options = {'num_tokens': 3 * 4 * SLOTS - 1, 'advance': counted.append}
  assert rates_of(*requests, **options).alpha.num_tokens == 3 * 4 * SLOTS
  assert counted == [4 * SLOTS] * 3
  with pytest.raises(ValueError, match='0 outputs'):
    rates_of()


def test_samples_of_one_text_are_one_observation():
  hits, tries = [8.0, 4.0] * 50, [10, 10] * 50
  assert acceptance.ratio(hits, tries).standard_error < 0.03  # the control
  by_text = acceptance.ratio(hits, tries, [0, 1] * 50)
  assert by_text.standard_error == pytest.approx(0.2)
  assert by_text.num_outputs == 100
  assert acceptance.ratio(hits, tries, ['a'] * 100).standard_error is None
