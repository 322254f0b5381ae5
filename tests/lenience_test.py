"""Lenience (Appendix A.5): at temperature 0, in the loops, in an engine.

verify_law_test.py has its law by enumeration, and its bound.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
import toy_models
import toy_requests
from specdec_jax import verify
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.probs import SamplingConfig

LEVELS = (1.0, 0.5, 0.3, 0.1)
GREEDY = SamplingConfig(0.0)


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


# --- The loop -----------------------------------------------------------------

VOCAB = 6
TARGET = toy_models.random_markov(0, VOCAB, scale=1.0)
DRAFT = toy_models.random_markov(1, VOCAB, scale=1.0)
PARAMS = PairParams(TARGET.params, DRAFT.params)
_decode = jax.jit(Loop(TARGET, small_model(DRAFT)).decode)


def decode(sampling, lenience):
  request = toy_requests.request_of(8, 3, sampling, 12, inputs=(1,), seed=5)
  if lenience is not None:
    request = request.replace(lenience=jnp.float32(lenience))
  return jax.device_get(_decode(PARAMS, request))


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
  # A greedy row among sampled ones is the same.
  found = decode(SamplingConfig([0.0, 1.0] * 4), 0.1).tokens
  np.testing.assert_array_equal(found[::2], [greedy_by_hand(0.1)] * 4)
  assert len(np.unique(found[1::2], axis=0)) > 1


# --- Options and the engine ---------------------------------------------------


def test_engine(tokenizer):
  size = small_vocabulary.VOCAB_SIZE
  target, draft = (
    Model(chain, chain.params)
    for chain in (toy_models.random_markov(seed, size) for seed in range(2))
  )
  engine = Engine(target, draft, tokenizer=tokenizer, max_decode_len=16)

  def request(gamma, **options):
    return engine.request(['a'], gamma, **options)

  assert request(3).lenience is request(3, lenience=1.0).lenience is None
  assert request(0, lenience=0.5).lenience is None, 'the plain loop has none'

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
