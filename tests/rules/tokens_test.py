"""Rules on tokens are exact: laws of rows with a rule each, by enumeration.

All rows are of one batch, so that they have one program whatever their rules.
The law that they must have is that of logits adjusted here, by itself, token by
token, in float64.
"""

import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.probs import SamplingConfig
from specdec_jax.rules.options import RuleBook, RuleOptions, ruling_of
from specdec_jax.rules.tokens import Prefix, Ruling
from specdec_jax.tree_shape import branching
from toy_requests import quick_jit, request_of

VOCAB, LENGTH, STOP = 5, 4, 1
ROWS = 3000  # of each rule
INPUTS = (2, 3, 4)
SAMPLING = SamplingConfig(0.8)
TARGET = toy_models.noisy_chain(VOCAB)
DRAFT = toy_models.noisy_chain(VOCAB, 0.7)
INF = np.inf
CHOICES = [(3, 2), (2, 2, 4), (4,), (3, 4, 2)]
# Texts that match begin others that do.
SPELLED = {2: 'a', 3: 'b', 4: 'ab'}
REGEXES = {
  'regex': 'a|ab|b(ab)?',
  'longer regex': 'a+(b|bab)?|b*a?',
  'a regex and a penalty': '[ab]{1,3}|(ab){2,}',
}
RULES = {
  'none': {},
  'bias': {'logit_bias': {2: 1.5, 4: -1.0}, 'suppress_tokens': [3]},
  'sequence': {
    'sequence_bias': [((2, 3), 2.0), ((4,), -1.0)],
    'bad_words': [(2, 2, 2)],
  },
  'bad word': {'bad_words': [(3, 3), (3, 2, 4)]},
  'repetition': {'repetition_penalty': 1.7},
  'presence': {'presence_penalty': 0.9},
  'frequency': {'frequency_penalty': 0.7},
  'no ngram': {'no_repeat_ngram_size': 2},
  'no token': {'no_repeat_ngram_size': 1},
  'no ngram of the input': {'encoder_no_repeat_ngram_size': 2},
  'begin': {'begin_suppress_tokens': [2, STOP]},
  'end': {'forced_eos_token_id': 4},
  'forced begin': {'forced_bos_token_id': 3},
  'choices': {'choices': CHOICES},
  **{name: {'regex': one} for name, one in REGEXES.items()},
  'pair': {
    'frequency_penalty': -0.5,
    'repetition_penalty': 1.4,
    'logit_bias': {1: -2.0, 4: 0.5},
  },
  'another pair': {
    'no_repeat_ngram_size': 2,
    'presence_penalty': -0.4,
    'sequence_bias': [((3,), 0.6)],
  },
}
RULES['a regex and a penalty']['presence_penalty'] = 0.8


@functools.cache
def each_row():
  """The rules of a row, by their names."""
  words = {text.encode(): [token] for token, text in SPELLED.items()}
  tokenizer = types.SimpleNamespace(spellings=lambda size: (words, False))
  book = RuleBook(tokenizer, VOCAB)
  return {
    name: book.rules_of(RuleOptions(**one), (STOP,))
    for name, one in RULES.items()
  }


@functools.cache
def begins(pattern: str) -> set[str]:
  """What texts that match begin with."""
  texts = (
    ''.join(letters)
    for size in range(12)
    for letters in itertools.product('ab', repeat=size)
  )
  matching = [text for text in texts if re.fullmatch(pattern, text)]
  return {text[:size] for text in matching for size in range(len(text) + 1)}


def after(name: str, prefix: tuple[int, ...]) -> set[int]:
  """The tokens that may follow where an automaton is."""
  if name not in REGEXES:
    ends = [(*one, STOP) for one in CHOICES if one[: len(prefix)] == prefix]
    return {one[len(prefix)] for one in ends if one[: len(prefix)] == prefix}
  text = ''.join(SPELLED.get(token, '') for token in prefix)
  longer = {token: text + more for token, more in SPELLED.items()}
  allowed = {t for t, one in longer.items() if one in begins(REGEXES[name])}
  return allowed | {STOP} if re.fullmatch(REGEXES[name], text) else allowed


def adjusted(name, prefix, logits) -> np.ndarray:
  """The weights of the next token, from the target's logits."""
  rules = RULES[name]
  said, logits = (0, *prefix), np.float64(logits)
  for token, bias in rules.get('logit_bias', {}).items():
    logits[token] += bias
  logits[rules.get('suppress_tokens', [])] = -INF
  words = [(word, -INF) for word in rules.get('bad_words', ())]
  for (*before, last), bias in [*words, *rules.get('sequence_bias', ())]:
    if not before or said[-len(before) :] == tuple(before):
      logits[last] += bias
  penalty = rules.get('repetition_penalty', 1)
  for token in {*said}:
    logits[token] *= penalty if logits[token] < 0 else 1 / penalty
  for token in {*prefix}:
    logits[token] -= rules.get('presence_penalty', 0)
    logits[token] -= rules.get('frequency_penalty', 0) * prefix.count(token)
  for rule, source in {
    'no_repeat_ngram_size': said,
    'encoder_no_repeat_ngram_size': INPUTS,
  }.items():
    size = rules.get(rule, 0)
    for at in range(len(source) - size + 1) if size else ():
      *first, last = source[at : at + size]
      if size == 1 or said[1 - size :] == tuple(first):
        logits[last] = -INF
  if not prefix:
    logits[rules.get('begin_suppress_tokens', [])] = -INF
  end = {'forced_bos_token_id': 0, 'forced_eos_token_id': LENGTH - 1}
  for rule in rules.keys() & end.keys():
    if len(prefix) == end[rule]:
      logits = np.where(np.arange(VOCAB) == rules[rule], 0.0, -INF)
  if {*rules} & {'choices', 'regex'}:
    allowed = after(name, prefix)
    logits[[token for token in range(VOCAB) if token not in allowed]] = -INF
  return np.exp(logits / SAMPLING.temperature)


@functools.cache
def law_of(name: str) -> np.ndarray:
  def next_probs(prefix):
    logits = TARGET.logits_after((0, *prefix), INPUTS)
    return adjusted(name, prefix, logits)

  return toy_models.joint_law(next_probs, LENGTH, VOCAB, (STOP,))


def ignorant(model):
  """A drafter that does not know the rules."""
  knows = small_model(model)

  def propose(params, state, context):
    return knows.propose(params, state, context.within(token_rules=None))

  return knows._replace(propose=propose)


def chain(drafter=None, **changes):
  return Loop(TARGET, drafter), 2 if drafter else 0, changes


WAYS = {
  'plain': chain(),
  'token': chain(small_model(DRAFT)),
  'block': chain(small_model(DRAFT), verification='block'),
  'ignorant': chain(ignorant(DRAFT)),
  'tree': chain(small_model_tree(DRAFT, branching(2, 2)), tree=branching(2, 2)),
}


def p_values(loop, gamma, changes, names=tuple(RULES)) -> dict[str, float]:
  """Of each rule's rows, whether they have its law."""
  rows = len(names) * ROWS
  request = request_of(
    rows, gamma, SAMPLING, LENGTH, inputs=INPUTS, seed=3, stop_ids=(STOP,)
  )
  begin = np.ones(len(names), np.int32)
  inputs = np.tile(INPUTS, (len(names), 1))
  rules, tables = ruling_of(
    [each_row()[name] for name in names], begin, begin + LENGTH, inputs
  )
  rules = jax.tree.map(lambda leaf: np.repeat(leaf, ROWS, axis=0), rules)
  request = request.replace(token_rules=rules, automata=tables, **changes)
  params = PairParams(TARGET.params, DRAFT.params)
  tokens = quick_jit(loop.decode)(params, request).tokens
  tokens = np.asarray(tokens).reshape(len(names), ROWS, LENGTH)
  return {
    name: toy_models.chi_squared_p_value(
      toy_models.count_ngrams(some, VOCAB), law_of(name)
    )
    for name, some in zip(names, tokens, strict=True)
  }


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize('way', [x if x == 'block' else slow(x) for x in WAYS])
def test_each_rule_has_its_law(way):
  found = p_values(*WAYS[way])
  assert min(found.values()) > 1e-5, found


def start_of_round(ruling, prefix, draft):
  """Wrong: all places have the prefix that the round began with."""
  return jax.tree.map(
    lambda leaf: jnp.repeat(leaf[:, None], draft.tokens.shape[1] + 1, axis=1),
    prefix,
  )


def with_rejected(state):
  """Wrong: what was written behind the last committed token counts too."""
  length = state.visible_length
  return Prefix(state.tokens, length + (length > 1), state.automaton)


@pytest.mark.parametrize(
  ('where', 'name', 'wrong'),
  [
    (Ruling, 'along', start_of_round),
    slow(DecodeState, 'prefix', property(with_rejected)),
  ],
)
def test_what_goes_wrong_elsewhere_is_seen(monkeypatch, where, name, wrong):
  """Negative controls: the counts of a round's start; of rejected tokens."""
  monkeypatch.setattr(where, name, wrong)
  names = 'none', 'bad word', 'repetition', 'no token'
  found = p_values(*WAYS['ignorant'], names)
  assert found['none'] > 1e-5
  for name in names[1:]:
    assert found[name] < 1e-9, found
