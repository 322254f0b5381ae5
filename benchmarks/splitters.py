"""Compares libraries that find the sentences of a text.

  pip install -e '.[split]' pysbd syntok nupunkt blingfire sentence-splitter
  python benchmarks/splitters.py en=FILE de=FILE... \
    --output benchmarks/results/splitters.json

FILE has sentences of the language before it, one a line, in the last column of
a `.tsv`, or in a `.conllu` of Universal Dependencies; `.gz` or not. Five are
joined by spaces, if the language writes them, and a library is to find where
they end: F1. Seconds, of the processor, are for one line of the first file's
sentences; with `--only` nothing is timed.
"""

import argparse
import importlib
import importlib.metadata
import itertools
import multiprocessing
import time

from common import report

from specdec_jax import files

PARAGRAPHS, EACH = 300, 5
CHARACTERS, PATIENCE = (100_000, 10_000_000), 60
ENDS = tuple('.!?"”)“»…。！？」』।॥؟۔։።')
UNSPACED = ('zh', 'ja')


def ends_of_split(sentences, language):
  return lambda text: sentences.ends(text, language)


def ends_of_sentencex(sentencex, language):
  return lambda text: [
    one['end_index']
    for one in sentencex.get_sentence_boundaries(language, text)
  ]


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
SPLIT = 'specdec_jax'  # what `--split` does: sentencex, corrected
LIBRARIES = {
  SPLIT: ('specdec_jax.text.sentences', ends_of_split),
  'sentencex': ('sentencex', ends_of_sentencex),
  'pysbd': ('pysbd', ends_of_pysbd),
  'syntok': ('syntok.segmenter', ends_of_syntok),
  'nupunkt': ('nupunkt', ends_of_nupunkt),
  'blingfire': ('blingfire', ends_of_blingfire),
  'sentence-splitter': ('sentence_splitter', ends_of_sentence_splitter),
}


def f1(ends, paragraphs, blank):
  """The harmonic mean of precision and recall of the ends."""
  right = wrong = 0
  for own in paragraphs:
    text, more = blank.join(own), len(blank)
    gold = {*itertools.accumulate(len(one) + more for one in own)}
    found = {len(text[:end].rstrip()) + more for end in ends(text)}
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
  list(ends('One. Two.'))
  begin = time.process_time()
  list(ends(text))
  return time.process_time() - begin


def lines_of(path):
  """The sentences of a file."""
  if path.endswith('.conllu'):
    of = '# text = '
    return [x.removeprefix(of) for x in files.text_lines(path) if of in x]
  return [line.split('\t')[-1] for line in files.text_lines(path)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('files', nargs='+', metavar='LANGUAGE=FILE')
  parser.add_argument('--only', nargs='+', choices=LIBRARIES)
  parser.add_argument('--output')
  flags = parser.parse_args()
  names = flags.only or LIBRARIES
  versions = {x: importlib.metadata.version(x) for x in names if x != SPLIT}
  columns = [f'{x} {versions.get(x, "")}'.strip() for x in names]
  rows, first = [], None
  for named in flags.files:
    language, path = named.split('=', 1)
    # Of five that are joined, a reader must see the ends too.
    whole = [x.strip() for x in lines_of(path) if x.strip()[-1:] in ENDS]
    begins = range(0, len(whole) - EACH + 1, EACH)[:PARAGRAPHS]
    paragraphs = [whole[i : i + EACH] for i in begins]
    first = first or (language, ' '.join(map(' '.join, paragraphs)))
    blank = '' if language in UNSPACED else ' '
    of = [f1(made(x, language), paragraphs, blank) for x in names]
    name = path.rsplit('/', 1)[-1].split('.')[0]
    rows.append([f'{name} ({language})', *(f'{x:.4f}' for x in of)])
    print(' | '.join(rows[-1]), flush=True)
  language, text = first
  for most in () if flags.only else CHARACTERS:
    long = (text * (most // len(text) + 1))[:most]
    times = [seconds(x, language, long) for x in names]
    rows.append([f's, {most / 1e6:g} MB', *times])
  title = f'Ends of sentences, F1; paragraphs of {EACH} sentences'
  report(title, ['text', *columns], rows, flags.output)


if __name__ == '__main__':
  main()
