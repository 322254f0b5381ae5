"""Parity with transformers' beam search: tokens, scores, all beams of a row."""

import numpy as np
import pytest

import parity
from parity import pair_of
from specdec_jax.engine.padding import padded
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import BeamScoring, example_keys, new_request
from toy_beams import settings_of

pytestmark = parity.MARKS

SLOTS = 20
PENALTIES = (0.0, 1.0, 2.0, -1.5)


def their_beams(pair, width, penalty, ends, length, least):
  options = {'length_penalty': penalty, 'early_stopping': False}
  options |= {'max_new_tokens': length, 'min_new_tokens': least}
  options |= {'eos_token_id': list(ends), 'pad_token_id': 0}
  return parity.their_outputs(pair.theirs, pair.rows, ends, width, **options)


def our_beams(pair, width, penalty, ends, length, least, gamma):
  count = len(pair.rows)
  filled, lengths = padded(pair.rows, count, max(map(len, pair.rows)))
  prompts = dict(prompt=filled, prompt_length=lengths)
  has_encoder = pair.network.has_encoder
  law = {'num_ends': len(ends), 'scoring': BeamScoring.TRANSFORMERS}
  request = new_request(
    filled if has_encoder else np.zeros((count, 1), np.int32),
    example_keys(0, np.arange(count, dtype=np.uint32)),
    SamplingConfig(0.0),
    slots=SLOTS,
    gamma=gamma,
    stop_ids=ends,
    max_length=length,
    min_length=least,
    forbids_stops=True,
    beams=settings_of(width, width + 1, penalty, **law),
    **({} if has_encoder else prompts),
  )
  return pair.outputs(request, gamma, width)


def likely_ends(rows):
  """Tokens that beams have, neither the first nor the last: they end early."""
  inner = [t for row in rows for tokens, _ in row for t in tokens[3:-3]]
  ids, counts = np.unique(inner, return_counts=True)
  return ids[np.argsort(-counts, kind='stable')].tolist()


@pytest.mark.parametrize(
  ('name', 'width', 'gamma', 'num_ends'),
  [('T5 1.0', 2, 0, 1), ('T5 1.1', 4, 2, 1), ('GPT-2', 4, 2, 2)],
)
def test_beams_are_those_of_transformers(name, width, gamma, num_ends):
  pair = pair_of(name)

  def compare(penalty, ends, length=SLOTS, least=0):
    case = width, penalty, ends, length, least
    want = their_beams(pair, *case)
    have, accepted = our_beams(pair, *case, gamma)
    for row, (ours, theirs) in enumerate(zip(have, want, strict=True)):
      where = f'{case}, row {row}: {ours}, there {theirs}'
      assert [t for t, _ in ours] == [t for t, _ in theirs], where
      scores = [[score for _, score in beams] for beams in (ours, theirs)]
      # By a penalty below 0 scores are 20 ** 1.5 times as large.
      np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-4, err_msg=where)
    assert np.any(accepted) == (gamma > 0)
    return want

  # Ends that hardly come: beams of all lengths are those that are cut off.
  rare = tuple(range(1, 1 + num_ends))
  whole = compare(1.0, rare)
  likely = likely_ends(whole)
  lengths = set()
  cases = [dict(penalty=penalty) for penalty in PENALTIES]
  cases += [dict(penalty=1.0, length=7), dict(penalty=0.0, length=12, least=9)]
  for i, case in enumerate(cases):
    ends = tuple(likely[i % 2 : i % 2 + num_ends])
    for row in compare(ends=ends, **case):
      lengths |= {len(tokens) for tokens, _ in row}
  assert len(lengths) > 4 and min(lengths) < SLOTS
