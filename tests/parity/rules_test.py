"""Rules on tokens are transformers' own: greedy outputs and beams of models."""

import numpy as np
import pytest

import parity
from parity import pair_of
from specdec_jax.engine.padding import padded
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import BeamScoring, example_keys, new_request
from specdec_jax.rules.options import RuleBook, RuleOptions, ruling_of
from toy_beams import settings_of

pytestmark = parity.MARKS

SLOTS, WIDTH, GAMMA, END = 64, 3, 3, 1
# transformers' arguments, and our rules.
NUMBERS = [
  {'repetition_penalty': 1.4},
  {'no_repeat_ngram_size': 2},
  {'encoder_no_repeat_ngram_size': 2},
  {'repetition_penalty': 0.8, 'no_repeat_ngram_size': 3},
  {'repetition_penalty': 1.2, 'encoder_no_repeat_ngram_size': 3},
]


def cases(likely):
  """Of each case transformers' arguments and our rules; `likely` are tokens."""
  one, two, three, *_ = likely
  pairs = [((one,), -2.5), ((two, three), 4.0), ((one, two), -4.0)]
  words = [[two], [one, three]]
  yield from zip(NUMBERS, NUMBERS, strict=True)
  yield {'sequence_bias': dict(pairs)}, {'sequence_bias': pairs}
  yield {'bad_words_ids': words}, {'bad_words': words}
  begin = {'begin_suppress_tokens': [one, two], 'no_repeat_ngram_size': 2}
  for same in ({'suppress_tokens': [one, two]}, begin):
    yield same, same
  end = {'forced_eos_token_id': END}
  yield end | {'bad_words_ids': words}, end | {'bad_words': words}


def theirs(pair, rule, width):
  """Of each row the tokens of its outputs, the best last."""
  rule = rule | dict(eos_token_id=END, max_new_tokens=SLOTS, pad_token_id=0)
  found = parity.their_outputs(pair.theirs, pair.rows, (END,), width, **rule)
  return [[tokens for tokens, _ in row] for row in found]


def ours(pair, rows, rules, width, gamma):
  """As `theirs`, of rows with a rule each: all of one batch, one program."""
  count, width_of, network = len(rows), max(map(len, rows)), pair.network
  read = inputs = padded(rows, count, width_of, network.pad_id)[0]
  prompt, lengths = padded([[network.start_id]] * count, count, 1)
  if not network.has_encoder:
    prompt, lengths = padded(rows, count, width_of)
    read, inputs = prompt, np.zeros((count, 1), np.int32)
  book = RuleBook(None, network.vocab_size)
  made, automata = ruling_of(
    [book.rules_of(RuleOptions(**rule), (END,)) for rule in rules],
    lengths,
    lengths + SLOTS,
    np.where(read == network.pad_id, -1, read),
  )
  request = new_request(
    inputs,
    example_keys(0, np.arange(count, dtype=np.uint32)),
    SamplingConfig(0.0),
    slots=SLOTS,
    gamma=gamma,
    stop_ids=(END,),
    token_rules=made,
    automata=automata,
    beams=settings_of(width, width + 1, 1.0, scoring=BeamScoring.TRANSFORMERS)
    if width > 1
    else None,
    prompt=prompt,
    prompt_length=lengths,
    pad_id=network.pad_id,
  )
  outputs, _ = pair.outputs(request, gamma, width)
  return [[tokens for tokens, _ in row] for row in outputs]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['T5 1.1', 'GPT-2', 'T5Gemma'])
def test_outputs_are_those_of_transformers(name):
  for width in (1, WIDTH):
    check(pair_of(name), width)


def check(pair, width):
  plain = theirs(pair, {}, width)
  said = np.concatenate([tokens for row in plain for tokens in row])
  ids, counts = np.unique(said, return_counts=True)
  likely = ids[np.argsort(-counts, kind='stable')].tolist()
  likely = [token for token in likely if token != END]
  named, rules = zip(*cases(likely), strict=True)
  want = [theirs(pair, one, width) for one in named]
  assert sum(rows != plain for rows in want) > 5
  each = [rule for rule in rules for _ in pair.rows]
  for gamma in (0, GAMMA):
    have = ours(pair, [*pair.rows] * len(rules), each, width, gamma)
    for one, rows in zip(named, want, strict=True):
      some, have = have[: len(rows)], have[len(rows) :]
      assert some == rows, (one, gamma)
  # A batch of one row.
  alone = ours(pair, pair.rows[:1], rules[:1], width, GAMMA)
  assert alone == want[0][:1]
