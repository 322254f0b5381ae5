"""Measures what rules on tokens cost: automata, and rounds of the demo pair.

  python benchmarks/rules.py --output-dir benchmarks/results

rules_automata.json: seconds until the automaton of a regex or a JSON schema is
made, or refused, and by how much the memory grew; each in a process of its own,
with a vocabulary of random words. rules_demo.json: ways to decode the first
lines of demo/input.txt at batch 1, in turns; `of none` is the median of a round
relative to rounds without rules at the same temperature.
"""

import argparse
import pathlib
import statistics
import time

import numpy as np
from common import alone, demo_pair, peak, report

from specdec_jax import Engine
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import as_drafter
from specdec_jax.rules import automata, languages
from specdec_jax.rules.schema import language_of

SCHEMA = {
  'type': 'object',
  'properties': {
    'name': {'type': 'string', 'maxLength': 24},
    'age': {'type': 'integer', 'minimum': 0, 'maximum': 120},
    'adult': {'type': 'boolean'},
  },
  'required': ['name', 'age', 'adult'],
}
MANY = [
  {'anyOf': [{'required': [x + str(i)]} for x in 'ab']} for i in range(30)
]
AUTOMATA = [  # a name, a regex or a schema, and the number of ids
  ('json_object', {'type': 'object'}, 32_000),
  ('json_object', {'type': 'object'}, 256_000),
  ('maxLength 500', {'type': 'string', 'maxLength': 500}, 32_000),
  ('maxLength 500', {'type': 'string', 'maxLength': 500}, 256_000),
  ('nested repetitions', '((((a{1,99}){1,99}){1,99}){1,99})', 32_000),
  ('exponential', '(a|b)*a(a|b){30}', 32_000),
  ('60,000 optional', '(a?){60000}', 32_000),
  ('quadratic', '(.{0,200}a){0,200}', 32_000),
  ('10^6 alternatives', '|'.join(map(str, range(10**6))), 32_000),
  ('enum of 10^5', {'enum': [f'word {i}' for i in range(10**5)]}, 32_000),
  ('2^30 branches', {'allOf': MANY}, 32_000),
  ('3,000 keys', {'properties': {f'a{i}': {} for i in range(3000)}}, 32_000),
]
TOKENS, TURNS = 52, 15
NO_END = {'stop_ids': (), 'max_length': TOKENS}
PENALTIES = {'repetition_penalty': 1.2, 'no_repeat_ngram_size': 3}
JSON = {'json_schema': SCHEMA}
# As many tokens as without rules, so that reading the input weighs the same.
REGEX = {'regex': '[A-Za-z ,.]{300,}', 'max_length': TOKENS}
TEXT = {'type': 'string', 'minLength': 300}
LONG = {'json_schema': {'items': TEXT, 'minItems': 1, 'type': 'array'}}
LONG |= {'max_length': TOKENS}


def automaton(case) -> list[str]:
  """A row: what was made, its ids, seconds of the thread, memory, outcome."""
  name, rule, size = case
  rng = np.random.default_rng(0)
  words = {bytes([byte]): [byte + 3] for byte in range(256)}
  for token in range(259, size):
    word = rng.choice(list(b' etaoinshrdlu",:{}'), rng.integers(2, 9))
    words.setdefault(bytes(word.tolist()), []).append(token)
  vocabulary = automata.Vocabulary(words, False, size)
  begin, before, outcome = time.thread_time(), peak(), ''
  try:
    with languages.deadline(automata.SECONDS):
      if isinstance(rule, str):
        language = languages.in_bytes(languages.regex(rule))
      else:
        language = language_of(rule)
      made = vocabulary.automaton('rule', language, [1])
      outcome = f'{len(made.bits_of)} states'
  except languages.TooLarge as error:
    outcome = f'refused: {error}'
  spent = time.thread_time() - begin
  return [name, str(size), f'{spent:.2f}', f'{peak() - before:.0f}', outcome]


def ignorant(draft):
  """The demo's drafter, which here does not know the rules."""
  knows = as_drafter(draft)

  def propose(params, state, context):
    return knows.propose(params, state, context.within(token_rules=None))

  return knows._replace(propose=propose, name='ignorant', follows_rules=False)


def rounds() -> list[list[str]]:
  """A row of each way to decode."""
  target, draft = demo_pair()
  lines = pathlib.Path('demo/input.txt').read_text('utf-8').splitlines()
  texts = list(filter(None, lines))[:8]
  knows, not_knows, copies = (
    Engine(target, drafter, gamma=4)
    for drafter in (draft, ignorant(draft), prompt_lookup())
  )
  ways = [
    ('none', 'small model', knows, 0.0, NO_END),
    ('none', 'small model', knows, 1.0, NO_END),
    ('penalties', 'small model', knows, 0.0, NO_END | PENALTIES),
    ('regex', 'small model', knows, 0.0, REGEX),
    ('regex', 'small model', knows, 1.0, REGEX),
    ('long JSON', 'small model', knows, 0.0, LONG),
    ('long JSON', 'small model', knows, 1.0, LONG),
    ('JSON', 'small model', knows, 0.0, JSON),
    ('JSON', 'small model that does not know', not_knows, 0.0, JSON),
    ('JSON', 'prompt lookup', copies, 0.0, JSON),
  ]
  times: list[list[float]] = [[] for _ in ways]
  rates = []
  for turn in range(TURNS + 1):
    for spent, (*_, engine, temperature, options) in zip(
      times, ways, strict=True
    ):
      options = {'temperature': temperature, 'log_probs': False} | options
      begin = time.perf_counter()
      done = [engine.generate([text], **options)[0] for text in texts]
      seconds = time.perf_counter() - begin
      calls = sum(one.stats.num_target_calls for one in done)
      if turn:  # the first one compiles
        spent.append(1e3 * seconds / calls)
      else:
        rates.append(sum(one.stats.num_tokens for one in done) / calls)
  medians = [statistics.median(spent) for spent in times]
  none = dict(zip((0.0, 1.0), medians, strict=False))
  return [
    [
      *way[:2],
      *(f'{way[3]:g}', f'{rate:.2f}', f'{median:.2f}'),
      f'{median / none[way[3]]:.2f}',
    ]
    for way, rate, median in zip(ways, rates, medians, strict=True)
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--output-dir', type=pathlib.Path, required=True)
  folder = parser.parse_args().output_dir
  rows = [alone(case[0], automaton, case) for case in AUTOMATA]
  columns = ['automaton', 'ids', 's', 'MB', 'outcome']
  title = 'Automata of constraints'
  report(title, columns, rows, folder / 'rules_automata.json')
  columns = ['rules', 'drafter', 'T', 'tokens a call', 'ms a round', 'of none']
  title = 'Rules on tokens, demo pair, gamma 4, 8 texts'
  report(title, columns, rounds(), folder / 'rules_demo.json')


if __name__ == '__main__':
  main()
