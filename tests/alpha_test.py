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
from specdec_jax.measure.acceptance import decode as decode_with_betas
from specdec_jax.probs import SamplingConfig

VOCAB, SLOTS, ROWS = 6, 24, 512
TARGET = toy_models.random_markov(1, VOCAB, scale=1.0)
DRAFT = toy_models.random_markov(2, VOCAB, scale=1.0)
OTHER = toy_models.random_markov(3, VOCAB, scale=1.0)
PARAMS = PairParams(TARGET.params, DRAFT.params)
DRAFTER = small_model(DRAFT)
decode = toy_requests.quick_jit(decode_with_betas, static_argnums=(0, 1))


def make_request(temperature, seed=0, rows=ROWS):
  return toy_requests.request_of(
    rows,
    1,
    SamplingConfig(temperature=temperature),
    SLOTS,
    inputs=(1,),
    seed=seed,
    stop_ids=(-1,) * 4,
    with_log_probs=True,
  )


def rates_of(*requests, drafter=DRAFTER, num_tokens=1, **options):
  """Rates over requests, each of whose rows is a text of its own."""
  batches = [
    ([(number, row) for row in range(len(request.inputs))], request)
    for number, request in enumerate(requests)
  ]
  pair = PlacedPair(TARGET, drafter, PARAMS, {})
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


@pytest.mark.parametrize(
  'temperature, lenience', [(1.0, None), (0.6, None), (1.0, 0.3)]
)
def test_alpha_is_the_mean_overlap(temperature, lenience):
  """Within 4 standard errors; another drafter's must be outside of them."""
  request = make_request(temperature)
  if lenience is not None:
    request = request.replace(lenience=jnp.float32(lenience))
  rate = rates_of(request).alpha
  assert (rate.num_tokens, rate.num_outputs) == (ROWS * SLOTS, ROWS)
  within = 4 * rate.standard_error
  assert within < 0.04
  expected = exact_alpha(DRAFT, temperature, lenience or 1.0)
  assert abs(rate.mean - expected) < within
  assert abs(rate.mean - exact_alpha(OTHER, temperature)) > within


def greedy(token, count, lenience=1.0):
  """Whether each of the drafter's greedy choices is near the target's."""
  near = []
  for _ in range(count):
    weights = np.exp(TARGET.logits_after([token]))
    guess = np.argmax(DRAFT.logits_after([token]))
    near.append(float(weights[guess] >= lenience * weights.max()))
    token = np.argmax(weights)
  return near


def test_lenient_alpha_of_greedy_outputs():
  """The share of choices near the best."""
  request = make_request(0.0, rows=4).replace(lenience=jnp.float32(0.3))
  want = np.mean(greedy(0, SLOTS, 0.3))
  assert rates_of(request).alpha.mean == pytest.approx(want)


def test_behind_a_prompt_only_what_is_produced_counts():
  """Rows of one, two and four tokens, each followed for all its slots."""
  request = make_request(0.0, rows=3).replace(
    prompt=jnp.array([[0, 5, 2, 3], [0, 4, 5, 5], [0, 2, 2, 2]]),
    prompt_length=jnp.array([1, 2, 4]),
    max_length=jnp.array([SLOTS, 9, SLOTS]),
  )
  overlap = decode(TARGET, DRAFTER, PARAMS, request)
  want = [greedy(0, SLOTS), greedy(4, 9), greedy(2, SLOTS)]
  for row, betas in enumerate(want):
    np.testing.assert_array_equal(overlap.betas[row, : len(betas)], betas)
  alpha = rates_of(request).alpha
  assert alpha.num_tokens == 2 * SLOTS + 9
  assert alpha.mean == pytest.approx(np.mean(np.concatenate(want)))


def proposing_where(is_place):
  """The drafter, which proposes only behind lengths of which that is true."""

  def propose(params, state, context):
    draft, state = DRAFTER.propose(params, state, context)
    length = draft.length * is_place(context.length)
    return draft.replace(length=length), state

  return DRAFTER._replace(propose=propose)


def test_what_was_not_proposed_counts_in_no_acceptance_rate():
  request = make_request(1.0, rows=64)

  def of(drafter):
    rates = rates_of(request, drafter=drafter)
    return rates, decode(TARGET, drafter, PARAMS, request)

  every_other = proposing_where(lambda length: length % 2 == 0)
  (always, all_of), (halves, half) = map(of, (DRAFTER, every_other))
  assert always.proposes.mean == 1 and always.overall == always.alpha
  # The first token follows the start token alone: length 1.
  np.testing.assert_array_equal(half.proposed[0], [False, True] * (SLOTS // 2))
  assert halves.proposes.mean == 0.5
  betas = np.asarray(all_of.betas)[:, 1::2]
  assert halves.alpha.num_tokens == betas.size
  assert halves.alpha.mean == pytest.approx(betas.mean(), rel=1e-5)
  assert halves.overall.mean == pytest.approx(betas.mean() / 2, rel=1e-5)
  assert halves.overall.num_tokens == 2 * betas.size


def test_a_drafter_that_never_proposes_has_no_alpha():
  silent = proposing_where(lambda length: length < 0)
  rates = rates_of(make_request(1.0, rows=4), drafter=silent)
  assert rates.alpha is None
  assert (rates.proposes.mean, rates.overall.mean) == (0.0, 0.0)
  with pytest.raises(ValueError, match='got 0 outputs of 0 tokens'):
    rates_of()


def test_batches_end_when_enough_was_generated():
  counted = []
  rate = rates_of(
    *(make_request(1.0, seed, rows=4) for seed in range(9)),
    num_tokens=3 * 4 * SLOTS - 1,
    advance=counted.append,
  ).alpha
  assert rate.num_tokens == 3 * 4 * SLOTS
  assert counted == [4 * SLOTS] * 3


def test_samples_of_one_text_are_one_observation():
  hits, tries = [8.0, 4.0] * 50, [10, 10] * 50
  assert acceptance.ratio(hits, tries).standard_error < 0.03  # the control
  by_text = acceptance.ratio(hits, tries, [0, 1] * 50)
  assert by_text.standard_error == pytest.approx(0.2)
  assert by_text.num_outputs == 100
  assert acceptance.ratio(hits, tries, ['a'] * 100).standard_error is None
