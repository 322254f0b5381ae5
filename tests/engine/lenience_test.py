"""Lenience (Appendix A.5) in an engine: by hand, in one program, never silent.

verify_test.py has its law by enumeration, and its bound.
"""

import numpy as np

import specdec_jax as sd
import toy_models
from small_vocabulary import VOCAB_SIZE

TARGET, DRAFT = (toy_models.random_markov(seed, VOCAB_SIZE) for seed in (0, 1))
SLOTS, GAMMA = 16, 3


def greedy_by_hand(lenience):
  """Rounds of A.5 at temperature 0, token by token in NumPy."""
  tokens = [0]
  while len(tokens) <= SLOTS:
    room = min(GAMMA, SLOTS - len(tokens))  # as the loop cuts a draft
    for _ in range(room):
      row = np.exp(np.float64(TARGET.logits_after(tokens[1:])))
      guess = int(np.argmax(DRAFT.logits_after(tokens[1:])))
      if not row[guess] >= lenience * row.max():
        break
      tokens.append(guess)
    tokens.append(int(np.argmax(TARGET.logits_after(tokens[1:]))))
  return tokens[1:]


def test_greedy_by_hand(tokenizer):
  models = (sd.Model(chain, chain.params) for chain in (TARGET, DRAFT))
  limits = {'gamma': GAMMA, 'max_decode_len': SLOTS}
  engine = sd.Engine(*models, tokenizer=tokenizer, **limits)

  for gamma, lenience in ((3, 1.0), (0, 0.5)):  # the plain loop has none
    assert engine.request(['a'], gamma, lenience=lenience).lenience is None

  def generate(texts='a', **more):
    return engine.generate([*texts], stop_ids=[], log_probs=False, **more)

  plain = generate(speculative=False)
  assert generate(speculative=False, lenience=0.5) == plain
  (strict,) = generate()
  assert [strict] == generate(lenience=1.0)
  assert strict.tokens == plain[0].tokens == greedy_by_hand(1.0)
  assert engine.num_programs == 2
  values = 0.3, 0.1, 0.01, 1e-6
  lenient = [generate(lenience=value)[0] for value in values]
  assert engine.num_programs == 3, 'another number is the same program'
  for value, one in zip(values, lenient, strict=True):
    assert one.tokens == greedy_by_hand(value)
  assert len({tuple(one.tokens) for one in (strict, *lenient)}) > 3
  rates = [one.stats.acceptance_rate for one in (strict, *lenient)]
  assert rates == sorted(rates) and rates[0] < rates[-1] == 1
  assert strict.lossless and not any(one.lossless for one in lenient)
  # A greedy row among sampled ones is the same.
  mixed = generate('aaa', lenience=0.1, temperature=[0.0, 1.0, 1.0])
  assert mixed[0].tokens == greedy_by_hand(0.1)
  assert mixed[1].tokens != mixed[2].tokens
