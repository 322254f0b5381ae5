"""Measures a translation memory on a file that was translated in part.

  python benchmarks/memory.py PAIRS.tsv \
    --output benchmarks/results/memory_demo.json

PAIRS is a file of English<TAB>German lines that the demo pair has not seen. Its
first 150 sentences are decoded greedily, one at a time, with memories in turns:
of every third sentence and the target's own output; of every third sentence and
its translation by people; and of the sentences behind the 150, which are of no
use. Outputs must be those without a memory. FILE is a record that
`scripts/update_readme.py` shows.
"""

import argparse
import itertools
import pathlib
import statistics
import tempfile
import time

from common import demo_pair, report

from specdec_jax import Engine
from specdec_jax.text.tasks import read_pairs

TEXTS, TURNS, GAMMAS = 150, 5, (4, 7)
COLUMNS = ['memory', 'pairs', 'gamma', 'tokens a call', 'ms a token', 'speed']


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('pairs')
  parser.add_argument('--output')
  flags = parser.parse_args()
  target, draft = demo_pair()
  by_people = dict(reversed([*read_pairs(flags.pairs)]))
  sources = [*reversed(by_people)]
  texts, others = sources[:TEXTS], sources[TEXTS:]

  def engine(memory=None):
    return Engine(target, draft, memory=memory)

  def decode(made, gamma):
    options = {'gamma': gamma, 'log_probs': False}
    begin = time.perf_counter()
    done = [made.generate([text], **options)[0] for text in texts]
    return done, time.perf_counter() - begin

  plain = engine()
  own = dict(zip(texts, (x.text for x in decode(plain, 4)[0]), strict=True))
  memories = {
    'own outputs of a third': {text: own[text] for text in texts[::3]},
    'a third by people': {text: by_people[text] for text in texts[::3]},
    'of other texts': {text: by_people[text] for text in others},
  }
  ways = {'none': (0, plain)}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'pairs.tsv')
    for name, pairs in memories.items():
      lines = [f'{source}\t{target}\n' for source, target in pairs.items()]
      path.write_text(''.join(lines), 'utf-8')
      ways[name] = len(pairs), engine(str(path))
  cases = [*itertools.product(ways, GAMMAS)]
  times = {case: [] for case in cases}
  rates = {}
  for turn in range(TURNS + 1):
    for name, gamma in cases:
      done, seconds = decode(ways[name][1], gamma)
      if [one.text for one in done] != [*own.values()]:
        raise SystemExit(f'{name}, gamma {gamma}: outputs differ')
      tokens = sum(one.stats.num_tokens for one in done)
      calls = sum(one.stats.num_target_calls for one in done)
      rates[name, gamma] = tokens / calls
      if turn:  # the first one compiles
        times[name, gamma].append(1e3 * seconds / tokens)
  medians = {case: statistics.median(spent) for case, spent in times.items()}
  rows = [
    [
      name,
      str(ways[name][0]),
      str(gamma),
      f'{rates[name, gamma]:.2f}',
      f'{medians[name, gamma]:.2f}',
      f'{medians["none", gamma] / medians[name, gamma]:.2f}',
    ]
    for name, gamma in cases
  ]
  title = f'Translation memories, demo pair, {len(texts)} sentences'
  report(title, COLUMNS, rows, flags.output)


if __name__ == '__main__':
  main()
