"""Acceptance rates: the measured one is the one that the chain has."""

import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
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


def make_request(temperature, seed=0, rows=ROWS, stop_id=-1):
  """Of rows with a text each, which changes nothing: there is no offset."""
  request = toy_requests.request_of(
    rows,
    1,
    SamplingConfig(temperature=temperature),
    SLOTS,
    inputs=(1,) * 4,
    seed=seed,
    stop_ids=(stop_id,) * 4,
    with_log_probs=True,
  )
  texts = 1 + np.arange(rows)[:, None] // 5 ** np.arange(4) % 5
  return request.replace(inputs=jnp.asarray(texts, jnp.int32))


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


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_alpha_is_the_mean_overlap(temperature):
  """Within 4 standard errors; another drafter's must be outside of them."""
  rate = acceptance.of_outputs(
    TARGET,
    DRAFTER,
    PARAMS,
    iter([make_request(temperature)]),
    num_tokens=1,
  ).alpha
  assert rate.num_tokens == ROWS * SLOTS
  assert rate.num_outputs == ROWS
  expected = exact_alpha(DRAFT, temperature)
  assert abs(rate.mean - expected) < 4 * rate.standard_error
  assert rate.standard_error < 0.01
  assert abs(rate.mean - exact_alpha(OTHER, temperature)) > (
    4 * rate.standard_error
  )


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_lenient_alpha(temperature):
  """At 0 the share of choices near the best, else within 4 errors."""
  request = make_request(temperature).replace(lenience=jnp.float32(0.3))
  rate = acceptance.of_outputs(
    TARGET, DRAFTER, PARAMS, iter([request]), num_tokens=1
  ).alpha
  if temperature:
    expected = exact_alpha(DRAFT, temperature, 0.3)
    assert abs(rate.mean - expected) < 4 * rate.standard_error
    strict = exact_alpha(DRAFT, temperature)
    assert abs(rate.mean - strict) > 4 * rate.standard_error
    return
  token, near = 0, []
  for _ in range(SLOTS):
    weights = np.exp(TARGET.logits_after([token]))
    guess = np.argmax(DRAFT.logits_after([token]))
    near.append(weights[guess] >= 0.3 * weights.max())
    token = np.argmax(weights)
  assert rate.mean == pytest.approx(np.mean(near))


def prompted(request, prompt, length):
  """`request` whose rows begin with their first `length` ids of `prompt`."""
  return request.replace(
    prompt=jnp.asarray(prompt), prompt_length=jnp.asarray(length)
  )


def test_behind_a_prompt_only_what_is_produced_counts():
  """Rows of one, two and four tokens, each followed for all its slots."""
  prompt = np.array([[0, 5, 2, 3], [0, 4, 5, 5], [0, 2, 2, 2]])
  length = np.array([1, 2, 4])
  request = prompted(make_request(0.0, rows=3), prompt, length)
  request = request.replace(max_length=jnp.array([SLOTS, 9, SLOTS]))
  overlap = decode(TARGET, DRAFTER, PARAMS, request)
  for row, count in enumerate((SLOTS, 9, SLOTS)):
    token, expected = prompt[row, length[row] - 1], []
    for _ in range(count):
      choice = np.argmax(TARGET.logits_after([token]))
      guess = np.argmax(DRAFT.logits_after([token]))
      expected.append(float(choice == guess))
      token = choice
    np.testing.assert_array_equal(overlap.betas[row, :count], expected)
  rates = acceptance.of_outputs(
    TARGET, DRAFTER, PARAMS, iter([request]), num_tokens=1
  )
  assert rates.proposes.num_tokens == 2 * SLOTS + 9
  want = np.concatenate([overlap.betas[0], overlap.betas[1, :9]])
  total = want.sum() + overlap.betas[2].sum()
  assert rates.alpha.mean == pytest.approx(total / (2 * SLOTS + 9))


def every_other(model):
  """`small_model` that proposes only where the length so far is even."""
  drafter = small_model(model)

  def propose(params, state, context):
    draft, state = drafter.propose(params, state, context)
    return draft.replace(length=draft.length * (context.length % 2 == 0)), state

  return drafter._replace(propose=propose)


def test_what_was_not_proposed_counts_in_no_acceptance_rate():
  request = make_request(1.0, rows=64)

  def of(drafter):
    rates = acceptance.of_outputs(
      TARGET, drafter, PARAMS, iter([request]), num_tokens=1
    )
    return rates, decode(TARGET, drafter, PARAMS, request)

  (always, all_of), (halves, half) = (
    of(drafter) for drafter in (DRAFTER, every_other(DRAFT))
  )
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
  def silent(params, state, context):
    draft, state = DRAFTER.propose(params, state, context)
    return draft.replace(length=draft.length * 0), state

  rates = acceptance.of_outputs(
    TARGET,
    DRAFTER._replace(propose=silent),
    PARAMS,
    iter([make_request(1.0, rows=4)]),
    num_tokens=1,
  )
  assert rates.alpha is None
  assert (rates.proposes.mean, rates.overall.mean) == (0.0, 0.0)


def test_batches_end_when_enough_was_generated():
  counted = []
  rate = acceptance.of_outputs(
    TARGET,
    DRAFTER,
    PARAMS,
    (make_request(1.0, seed, rows=4) for seed in range(100)),
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


@pytest.mark.parametrize('prompted', [True, False])
def test_texts_are_told_by_what_is_read(prompted):
  """By inputs or prompts, with another padding in another batch."""

  def batches(ids):
    for seed, width in enumerate((3, 4, 3, 4)):
      read = np.zeros((4, width), np.int32)
      read[:, :2] = ids
      request = make_request(1.0, seed, rows=4)
      if prompted:
        length = np.full((4,), 2, np.int32)
        nothing = jnp.zeros((4, 1), jnp.int32)
        request = request.replace(
          inputs=nothing, prompt=read, prompt_length=length
        )
      else:
        request = request.replace(inputs=jnp.asarray(read))
      yield request

  def error(ids):
    return acceptance.of_outputs(
      TARGET, DRAFTER, PARAMS, batches(ids), 10_000
    ).overall.standard_error

  two, four = ([[2, 3], [3, 2]] * 2, [[2, 3], [3, 2], [3, 3], [2, 2]])
  assert error([[2, 3]] * 4) is None
  assert error(two) > 0 and error(four) > 0


def test_nothing_generated_is_an_error():
  with pytest.raises(ValueError, match='got 0 outputs of 0 tokens'):
    acceptance.of_outputs(TARGET, DRAFTER, PARAMS, iter(()), 10)
