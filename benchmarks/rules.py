"""Measures what rules on tokens cost with the demo pair, and what they keep.

  python benchmarks/rules.py --output benchmarks/results/rules_demo.json

Rows are ways to decode the first lines of demo/input.txt at batch 1, in turns:
without rules, with penalties, and JSON of a schema; JSON with drafters that do
not follow rules, too, with and without forced tokens in front. FILE is a record
that `scripts/update_readme.py` shows.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time

from common import demo_pair, report

from specdec_jax import Engine
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import as_drafter

SCHEMA = {
  'type': 'object',
  'properties': {
    'name': {'type': 'string', 'maxLength': 24},
    'age': {'type': 'integer', 'minimum': 0, 'maximum': 120},
    'adult': {'type': 'boolean'},
  },
  'required': ['name', 'age', 'adult'],
}
TOKENS, TURNS = 52, 15
NO_END = {'stop_ids': (), 'max_length': TOKENS}
PENALTIES = {'repetition_penalty': 1.2, 'no_repeat_ngram_size': 3}
JSON = {'json_schema': SCHEMA}
COLUMNS = ['rules', 'drafter', 'T', 'tokens a call', 'ms a round', 'of none']


def ignorant(draft):
  """The demo's drafter, which here does not know the rules."""
  knows = as_drafter(draft)

  def propose(params, state, context):
    context = dataclasses.replace(context, ruling=None, prefix=None)
    return knows.propose(params, state, context)

  return knows._replace(propose=propose, name='ignorant', follows_rules=False)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--output')
  flags = parser.parse_args()
  target, draft = demo_pair()
  lines = pathlib.Path('demo/input.txt').read_text('utf-8').splitlines()
  texts = list(filter(None, lines))[:8]

  def engine(drafter):
    return Engine(target, drafter, gamma=4)

  knows, not_knows, copies = map(
    engine, (draft, ignorant(draft), prompt_lookup())
  )
  ways = [
    ('none', 'small model', knows, 0.0, NO_END),
    ('penalties', 'small model', knows, 0.0, NO_END | PENALTIES),
    ('JSON', 'small model', knows, 0.0, JSON),
    ('JSON', 'small model', knows, 1.0, JSON),
    ('JSON', 'small model that does not know', not_knows, 0.0, JSON),
    ('JSON', 'prompt lookup', copies, 0.0, JSON),
  ]
  times: list[list[float]] = [[] for _ in ways]
  rates = []
  for turn in range(TURNS + 1):
    for spent, (*_, made, temperature, options) in zip(
      times, ways, strict=True
    ):
      options = {'temperature': temperature, 'log_probs': False} | options
      begin = time.perf_counter()
      done = [made.generate([text], **options)[0] for text in texts]
      seconds = time.perf_counter() - begin
      calls = sum(one.stats.num_target_calls for one in done)
      if turn:  # the first one compiles
        spent.append(1e3 * seconds / calls)
      else:
        rates.append(sum(one.stats.num_tokens for one in done) / calls)
  medians = [statistics.median(spent) for spent in times]
  rows = [
    [
      *way[:2],
      f'{way[3]:g}',
      f'{rate:.2f}',
      f'{median:.2f}',
      f'{median / medians[0]:.2f}',
    ]
    for way, rate, median in zip(ways, rates, medians, strict=True)
  ]
  title = f'Rules on tokens, demo pair, gamma 4, {len(texts)} texts'
  report(title, COLUMNS, rows, flags.output)


if __name__ == '__main__':
  main()
