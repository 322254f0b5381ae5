"""Lenience (Appendix A.5): its law by enumeration, its bound, the loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
import toy_models
import toy_requests
import verify_controls as controls
import verify_laws
from specdec_jax import analysis, verify
from specdec_jax.decoding import speculative
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import Options
from specdec_jax.engine.text_batch import Limits, TextBatch
from specdec_jax.models.model import Model
from specdec_jax.paper import simulation
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import Draft

LEVELS = (1.0, 0.5, 0.3, 0.1)
SIZE, GAMMA = 4, 2
# As in verify_law_test: float32 and uniforms of 23 bits; and a lot more.
EXACT, WRONG = 1e-6, 1e-3
GREEDY, SAMPLED = SamplingConfig(0.0), SamplingConfig(1.0)

_verify = jax.jit(verify.verify)


def lenient_law(target, draft, lenience):
  """Joint law of a lenient step and what the target adds, in float64.

  Written after the text of A.5, token by token: it knows no code of ours.
  """
  law = np.zeros((SIZE,) * (GAMMA + 1))
  for tokens in itertools.product(range(SIZE), repeat=GAMMA + 1):
    rows = [np.float64(target(tokens[:i])) for i in range(GAMMA + 1)]
    rows = [row / row.sum() for row in rows]
    # After a rejection and after a whole draft the target goes on alone.
    alone = np.array([rows[i][tokens[i]] for i in range(GAMMA + 1)])
    reached = 1.0
    for i in range(GAMMA):
      proposed = np.float64(draft(tokens[:i]))
      proposed /= proposed.sum()
      chance = np.minimum(1, rows[i] / (lenience * proposed))
      refused = 1 - np.sum(proposed * chance)
      residual = np.maximum(0, rows[i] - proposed)
      redrawn = residual[tokens[i]] / (residual.sum() or 1)
      law[tokens] += reached * refused * redrawn * np.prod(alone[i + 1 :])
      reached *= proposed[tokens[i]] * chance[tokens[i]]
    law[tokens] += reached * alone[GAMMA]
  return law


def shipped_law(target, draft, lenience, **options):
  """`step_law` of a lenient step."""
  return verify_laws.step_law(
    target, draft, GAMMA, SIZE, lenience=lenience, **options
  )


def worst_ratio(law, target):
  """The largest P(token | tokens before) / target probability of it."""
  found = 0.0
  for position in range(GAMMA + 1):
    marginal = law.sum(axis=tuple(range(position + 1, GAMMA + 1)))
    before = marginal.sum(axis=-1, keepdims=True)
    for prefix in itertools.product(range(SIZE), repeat=position):
      row = np.float64(target(prefix))
      found = max(
        found, np.max(marginal[prefix] / before[prefix] / row * row.sum())
      )
  return found


@pytest.mark.parametrize('lenience', LEVELS)
def test_law_by_enumeration(lenience):
  target, draft = controls.pair(2, SIZE)
  law = shipped_law(target, draft, lenience)
  want = lenient_law(target, draft, lenience)
  assert want.sum() == pytest.approx(1)
  np.testing.assert_allclose(law, want, atol=EXACT)
  # No token above its probability / lenience, wherever it stands.
  ratio = worst_ratio(law, target)
  assert ratio <= 1 / lenience + 1e-4
  lossless = toy_models.joint_law(target, GAMMA + 1, SIZE)
  error = np.abs(law - lossless).max()
  assert error < EXACT if lenience == 1 else error > WRONG
  if lenience == 0.1:
    # So the bound of less lenience would have been missed.
    assert ratio > 1 / 0.3
  # The first token alone: the closed form.
  closed = simulation.outcomes(target(()), draft(()), lenience)
  np.testing.assert_allclose(law.sum(axis=(1, 2)), closed.total, atol=EXACT)
  beta = analysis.lenient_acceptance_prob(target(()), draft(()), lenience)
  assert closed.acceptance_prob == pytest.approx(float(beta), abs=1e-6)


def test_law_of_one_hot_drafts():
  target, draft = controls.pair(2, SIZE, GREEDY)
  with np.errstate(divide='ignore'):
    want = lenient_law(target, draft, 0.3)
  np.testing.assert_allclose(shipped_law(target, draft, 0.3), want, atol=EXACT)


def test_a_draft_without_probabilities_is_a_one_hot():
  tokens = jnp.array([2, 0, SIZE])  # the last one is outside
  draft = Draft(tokens, None, jnp.int32(3))
  rows = jnp.eye(SIZE + 1)[tokens, :SIZE]
  target_probs = jnp.full((4, SIZE), 1 / SIZE)
  for key in jax.random.split(jax.random.key(0), 8):
    jax.tree.map(
      np.testing.assert_array_equal,
      _verify(draft, target_probs, key, jnp.float32(0.3)),
      _verify(
        Draft(tokens, rows, draft.length), target_probs, key, jnp.float32(0.3)
      ),
    )


def test_lenience_1_as_a_number_is_none_bit_for_bit():
  target, draft = controls.pair(2, SIZE)
  # The proposals that are the most likely to be refused.
  first = int(np.argmax(draft(()) / target(())))
  second = int(np.argmax(draft((first,)) / target((first,))))
  rows = jnp.asarray([draft(()), draft((first,))])
  proposals = Draft(jnp.array([first, second]), rows, jnp.int32(2))
  target_rows = jnp.asarray(
    [target(()), target((first,)), target((first, second))]
  )
  kept = []
  for key in jax.random.split(jax.random.key(1), 16):
    found = _verify(proposals, target_rows, key)
    again = _verify(proposals, target_rows, key, jnp.float32(1))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    kept.append(int(found.num_accepted))
  assert len(set(kept)) > 1


def test_control_residual_of_the_target_itself(monkeypatch):
  controls.patch_weights(monkeypatch, controls.plain_target_as_residual)
  target, draft = controls.pair(2, SIZE)
  law = shipped_law(target, draft, 0.5)
  assert np.abs(law - lenient_law(target, draft, 0.5)).max() > WRONG


# --- Temperature 0 ------------------------------------------------------------


@pytest.mark.parametrize('lenience', LEVELS)
def test_near_argmax_is_the_text_with_its_inequality_turned(lenience):
  logits = np.random.default_rng(0).normal(size=(50, 3, 7)).astype(np.float32)
  tokens = np.random.default_rng(1).integers(7, size=(50, 3), dtype=np.int32)
  near = verify.near_argmax(tokens, jnp.asarray(logits), lenience)
  rows = np.float64(jax.nn.softmax(logits))
  chosen = np.take_along_axis(rows, tokens[..., None], 2)[..., 0]
  np.testing.assert_array_equal(near, chosen >= lenience * rows.max(axis=2))
  best = jnp.argmax(logits, axis=2)
  assert np.all(verify.near_argmax(best, jnp.asarray(logits), lenience))
  if lenience < 1:
    assert 0.05 < np.mean(np.asarray(near)) < 0.95


def test_near_argmax_at_the_edges():
  row = jnp.array([[0.0, -jnp.inf, 0.0, jnp.log(0.5), -1.0]])

  def near(token, lenience, logits=row):
    found = verify.near_argmax(jnp.array([token]), logits, lenience)
    return bool(found[0])

  assert near(2, 1.0) and not near(3, 1.0), 'at 1 only ties'
  assert near(3, 0.49) and not near(3, 0.51)
  assert not near(1, 1e-30), 'what is masked is never near'
  for outside in (-1, 5, 2**30):
    assert not near(outside, 1e-30)
  for broken in (jnp.full((1, 5), jnp.nan), jnp.full((1, 5), -jnp.inf)):
    assert not near(0, 1e-30, broken)


def test_verify_greedy_takes_what_is_near():
  draft = Draft(jnp.array([4, 5, 6]), None, jnp.int32(2))
  target_tokens = jnp.array([4, 9, 8, 7])
  cases = [
    ([False, True, True], (2, 8)),  # length ends it
    ([True, False, True], (1, 9)),
    ([False, False, True], (1, 9)),
  ]
  for near, expected in cases:
    verdict = verify.verify_greedy(draft, target_tokens, jnp.array(near))
    assert (verdict.num_accepted, verdict.next_token) == expected


# --- The loop -----------------------------------------------------------------

VOCAB, ROWS = 6, 10_000


def request_of(sampling, lenience, *, batch=8, slots=12, gamma=3):
  return toy_requests.request_of(
    batch,
    gamma,
    sampling,
    slots,
    inputs=(1,),
    seed=5,
    lenience=None if lenience is None else jnp.float32(lenience),
  )


TARGET = toy_models.random_markov(0, VOCAB, scale=1.0)
DRAFT = toy_models.random_markov(1, VOCAB, scale=1.0)
PARAMS = PairParams(TARGET.params, DRAFT.params)
_decode = jax.jit(Loop(TARGET, small_model(DRAFT)).decode)


def decode(*args, **options):
  return jax.device_get(_decode(PARAMS, request_of(*args, **options)))


def greedy_by_hand(lenience, slots=12, gamma=3):
  """Rounds of A.5 at temperature 0, token by token in NumPy."""
  tokens = [0]
  while len(tokens) <= slots:
    room = min(gamma, slots - len(tokens))  # as the loop cuts a draft
    for _ in range(room):
      row = np.exp(np.float64(TARGET.logits_after(tokens[1:])))
      row /= row.sum()
      guess = int(np.argmax(DRAFT.logits_after(tokens[1:])))
      if not row[guess] >= lenience * row.max():
        break
      tokens.append(guess)
    tokens.append(int(np.argmax(TARGET.logits_after(tokens[1:]))))
  return tokens[1:]


def test_greedy_loop_by_hand():
  outputs, programs = [], set()
  for lenience in (0.7, 0.4, 0.1):
    found = decode(GREEDY, lenience)
    programs.add(_decode._cache_size())
    outputs.append(greedy_by_hand(lenience))
    np.testing.assert_array_equal(found.tokens, [outputs[-1]] * 8)
  assert len(programs) == 1, 'another number is the same program'
  strict = decode(GREEDY, None)
  np.testing.assert_array_equal(strict.tokens[0], greedy_by_hand(1.0))
  assert len({tuple(o) for o in (*outputs, strict.tokens[0].tolist())}) >= 3
  lenient = decode(GREEDY, 0.1)
  assert strict.stats.num_accepted[0] < lenient.stats.num_accepted[0]


def test_a_greedy_row_among_sampled_ones_is_the_same():
  mixed = SamplingConfig([0.0, 1.0] * 4)
  found = decode(mixed, 0.1).tokens
  np.testing.assert_array_equal(found[::2], [greedy_by_hand(0.1)] * 4)
  assert len(np.unique(found[1::2], axis=0)) > 1


def test_sampled_loop_has_the_closed_form():
  """First of two tokens: 10,000 rows, alpha 1e-3; the control's p < 1e-9."""
  target, draft = (m.next_probs(SAMPLED)(()) for m in (TARGET, DRAFT))
  lossy = simulation.outcomes(target, draft, 0.3).total
  counts = {
    lenience: np.bincount(
      decode(SAMPLED, lenience, batch=ROWS, slots=2, gamma=1).tokens[:, 0],
      minlength=VOCAB,
    )
    for lenience in (1.0, 0.3)
  }
  toy_models.assert_chi_squared(counts[0.3], lossy, 1e-3)
  toy_models.assert_chi_squared(counts[1.0], target, 1e-3)
  assert toy_models.chi_squared_p_value(counts[0.3], target) < 1e-9
  assert toy_models.chi_squared_p_value(counts[1.0], lossy) < 1e-9


def test_without_lenience_nothing_is_computed_for_it():
  request = request_of(GREEDY, None)
  logits = jnp.zeros((8, 4, VOCAB))
  draft = Draft(jnp.zeros((8, 3), jnp.int32), None, jnp.full((8,), 3))

  def program(request):
    return str(
      jax.make_jaxpr(speculative.judge)(request, draft, logits, request.keys)
    )

  assert ' exp ' not in program(request), 'greedy decoding has no softmax'
  lenient = program(request_of(GREEDY, 0.5))
  # The quotient of two probabilities: no exponential over the vocabulary.
  (line,) = [line for line in lenient.splitlines() if '= exp ' in line]
  assert 'f32[8,3] = exp' in line


# --- Options and the engine ---------------------------------------------------


@pytest.mark.parametrize('lenience', [0, -0.1, 1.5, float('nan'), 1e-60, True])
def test_lenience_out_of_range(lenience):
  with pytest.raises(ValueError, match=r'lenience must be in \(0, 1\]'):
    Options(lenience=lenience)


def test_lenience_that_is_no_number():
  with pytest.raises(ValueError, match="must be in .* got '0.5'"):
    Options(lenience='0.5')


def test_job_makes_one_program_of_all_lenience(tokenizer):
  def request(gamma, **options):
    limits = Limits(24, 16, small_vocabulary.VOCAB_SIZE)
    asked = Options(**options)
    return TextBatch(tokenizer, limits, ['a'], asked, gamma).request

  assert request(3).lenience is request(3, lenience=1.0).lenience is None
  assert request(0, lenience=0.5).lenience is None, 'the plain loop has none'
  some = request(3, lenience=0.5), request(3, lenience=0.3)
  assert [np.float32(level) for level in (0.5, 0.3)] == [
    one.lenience for one in some
  ]
  assert jax.tree.structure(some[0]) == jax.tree.structure(some[1])
  assert jax.tree.structure(some[0]) != jax.tree.structure(request(3))


def test_engine(tokenizer):
  size = small_vocabulary.VOCAB_SIZE
  target, draft = (
    Model(chain, chain.params)
    for chain in (toy_models.random_markov(seed, size) for seed in range(2))
  )
  engine = Engine(target, draft, tokenizer=tokenizer, max_decode_len=16)

  def generate(**more):
    (one,) = engine.generate(['a'], stop_ids=[], log_probs=False, **more)
    return one

  plain = generate(speculative=False)
  assert generate(speculative=False, lenience=0.5) == plain
  strict = generate()
  assert generate(lenience=1.0) == strict
  assert strict.tokens == plain.tokens
  assert engine.num_programs == 2
  lenient = [generate(lenience=value) for value in (0.9, 0.1, 1e-6)]
  assert engine.num_programs == 3, 'another number is the same program'
  rates = [one.stats.acceptance_rate for one in (strict, *lenient)]
  assert rates == sorted(rates) and rates[0] < rates[-1] == 1
  assert lenient[-1].tokens != plain.tokens
  assert strict.lossless and not any(one.lossless for one in lenient)
