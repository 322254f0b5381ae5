"""Compares libraries that find the sentences of a text.

  pip install -e '.[split]' pysbd syntok nupunkt blingfire sentence-splitter
  python benchmarks/splitters.py en=FILE de=FILE... \
    --output benchmarks/results/splitters.json

FILE has sentences of the language before it, one a line, or in the last column
of a `.tsv`; `.gz` or not. Five are joined by spaces, and a library is to find
where they end: F1. Seconds are for one line of the first file's sentences.
sentencex is called by `text.sentences`, as `--split` does.
"""

import argparse
import importlib
import importlib.metadata
import itertools
import multiprocessing
import time

from common import report

from specdec_jax import files
from specdec_jax.text import sentences

PARAGRAPHS, EACH = 300, 5
CHARACTERS, PATIENCE = (100_000, 10_000_000), 60


def ends_of_sentencex(_, language):
  def ends(text):
    spans = sentences.split(text, language, len, 1 << 30).spans
    return [end for _, end in spans]

  return ends


def ends_of_pysbd(pysbd, language):
  splitter = pysbd.Segmenter(language=language, clean=False, char_span=True)
  return lambda text: [span.end for span in splitter.segment(text)]


def ends_of_syntok(segmenter, _):
  def ends(text):
    found = itertools.chain(*segmenter.process(text))
    lasts = [words[-1] for words in found]
    return [last.offset + len(last.value) for last in lasts]

  return ends


def ends_of_nupunkt(nupunkt, _):
  return lambda text: [span[-1] for span in nupunkt.sent_spans(text)]


def ends_of_blingfire(blingfire, _):
  # It counts characters, too.
  return lambda text: [
    end for _, end in blingfire.text_to_sentences_and_offsets(text)[1]
  ]


def ends_of_sentence_splitter(module, language):
  splitter = module.SentenceSplitter(language=language)

  def ends(text):
    at, found = 0, []
    for sentence in splitter.split(text):
      at = text.index(sentence, at) + len(sentence)
      found.append(at)
    return found

  return ends


# Name of a package -> its module, and what makes of it the ends of sentences.
LIBRARIES = {
  'sentencex': ('sentencex', ends_of_sentencex),
  'pysbd': ('pysbd', ends_of_pysbd),
  'syntok': ('syntok.segmenter', ends_of_syntok),
  'nupunkt': ('nupunkt', ends_of_nupunkt),
  'blingfire': ('blingfire', ends_of_blingfire),
  'sentence-splitter': ('sentence_splitter', ends_of_sentence_splitter),
}


def f1(ends, paragraphs):
  """The harmonic mean of precision and recall of the ends."""
  right = wrong = 0
  for own in paragraphs:
    text = ' '.join(own)
    gold = {*itertools.accumulate(len(one) + 1 for one in own)}
    found = {len(text[:end].rstrip()) + 1 for end in ends(text)}
    right += len(gold & found)
    wrong += len(gold ^ found)
  return 2 * right / (2 * right + wrong)


def seconds(name, language, text):
  """The time for a text in a process of its own, as a cell of the table."""
  with multiprocessing.get_context('spawn').Pool(1) as pool:
    try:
      spent = pool.apply_async(timed, (name, language, text)).get(2 * PATIENCE)
    except multiprocessing.TimeoutError:
      return f'over {PATIENCE}'
  return f'{spent:.1f}' if spent <= PATIENCE else f'over {PATIENCE}'


def made(name, language):
  module, make = LIBRARIES[name]
  return make(importlib.import_module(module), language)


def timed(name, language, text):
  ends = made(name, language)
  ends('One. Two.')
  begin = time.perf_counter()
  ends(text)
  return time.perf_counter() - begin


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('files', nargs='+', metavar='LANGUAGE=FILE')
  parser.add_argument('--output')
  flags = parser.parse_args()
  sets = {}
  for named in flags.files:
    language, path = named.split('=', 1)
    lines = [line.split('\t')[-1].strip() for line in files.text_lines(path)]
    # Of five that are joined, a reader must see the ends too.
    whole = [line for line in lines if line and line[-1] in '.!?"”)']
    begins = range(0, len(whole) - EACH + 1, EACH)[:PARAGRAPHS]
    name = path.rsplit('/', 1)[-1].split('.')[0]
    sets[name] = language, [whole[i : i + EACH] for i in begins]
  language, paragraphs = next(iter(sets.values()))
  every = ' '.join(map(' '.join, paragraphs))
  rows = []
  for name in LIBRARIES:
    version = importlib.metadata.version(name)
    found = [f1(made(name, of), texts) for of, texts in sets.values()]
    times = [
      seconds(name, language, (every * (most // len(every) + 1))[:most])
      for most in CHARACTERS
    ]
    rows.append([f'{name} {version}', *(f'{x:.3f}' for x in found), *times])
    print(' | '.join(rows[-1]), flush=True)
  columns = [f'{name} ({of})' for name, (of, _) in sets.items()]
  sizes = [f's, {most / 1e6:g} MB' for most in CHARACTERS]
  title = f'Ends of sentences, F1; paragraphs of {EACH} sentences'
  report(title, ['library', *columns, *sizes], rows, flags.output)


if __name__ == '__main__':
  main()
