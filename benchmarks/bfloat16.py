"""Counts how many outputs of the demo pair bfloat16 and speculation change.

  python benchmarks/bfloat16.py TEXTS --output FILE

TEXTS is a file of English sentences that the pair has not seen, one a line, or
English<TAB>German. The first 1,000 that differ are decoded greedily, plainly
and by speculation, in float32 and in bfloat16. A token agrees if it and all
before it are those of the other output. FILE is a record that
`scripts/update_readme.py` shows.
"""

import argparse
import os

from common import report

from specdec_jax import Engine, load
from specdec_jax.report.console import bar, console
from specdec_jax.text.tasks import read_prompts

TEXTS = 1000
COLUMNS = ['outputs', 'beside', 'equal texts', 'tokens that agree']


def agreement(outputs, others) -> list[str]:
  """Returns the shares of equal texts, and of tokens that agree."""
  pairs = list(zip(outputs, others, strict=True))
  equal = sum(tokens == other for tokens, other in pairs)
  agree = sum(len(os.path.commonprefix(pair)) for pair in pairs)
  return [f'{equal / len(pairs):.1%}', f'{agree / sum(map(len, others)):.1%}']


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('texts')
  parser.add_argument('--output')
  flags = parser.parse_args()
  outputs = {}
  for dtype in ('float32', 'bfloat16'):
    pair = (load(name, dtype=dtype) for name in ('demo', 'demo-draft'))
    engine = Engine(*pair)
    texts = read_prompts(flags.texts, engine.num_input_tokens)
    texts = list(dict.fromkeys(texts))[:TEXTS]
    for way, speculative in (('plain', False), ('speculative', True)):
      with bar(console(), f'{dtype}, {way}'):
        done = engine.generate(texts, speculative=speculative, log_probs=False)
      outputs[f'{way}, {dtype}'] = [one.tokens for one in done]
  plain, speculative, rounded, both = outputs
  rows = [
    [name, other, *agreement(outputs[name], outputs[other])]
    for name, other in (
      (speculative, plain),
      (rounded, plain),
      (both, plain),
      (both, rounded),
    )
  ]
  title = f'Greedy outputs of the demo pair, {len(texts)} unseen sentences'
  report(title, COLUMNS, rows, flags.output)


if __name__ == '__main__':
  main()
