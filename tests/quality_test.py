"""Grouping, BLEU and counts of `infer.quality`, with an engine of Python."""

import gzip
import io
import json
import sys

import pytest
import rich.console

from specdec_jax.engine.completion import (
  Completion,
  CompletionStats,
  passed_over,
)
from specdec_jax.infer import quality, results
from specdec_jax.infer.settings import Beams

pytest.importorskip('sacrebleu', reason='sacrebleu is in the extra [test]')

LINES = (
  'one two three four five\tEins zwei drei vier fünf.\n'
  'short\tDas ist ein kurzer Satz hier.\n'
  'one two three four five\tEr sagt es ganz anders heute.\n'
  'long\tEin Satz, der zu lang ist.\n'
  'short\tDas ist ein kurzer Satz hier.\n'
)
TRANSLATIONS = {
  'one two three four five': 'Er sagt es ganz anders heute.',
  'short': 'Das ist ein kurzer Satz hier.',
}


class Tokenizer:
  def encode(self, text):
    return text.split()


class Translator:
  """Knows two sentences; hotter, fewer proposals are accepted."""

  tokenizer = Tokenizer()
  gamma, max_decode_len, params = 3, 32, None

  def __init__(self):
    self.calls = []

  def generate(self, texts, *, temperature, example_ids, **options):
    assert options['on_too_long'] == 'report' and not options['log_probs']
    self.calls.append((temperature, texts, example_ids))
    return [self._complete(text, temperature == 0) for text in texts]

  def _complete(self, text, greedy):
    if text not in TRANSLATIONS:
      return passed_over('error', f'{text} is too long')
    stats = CompletionStats(10, 4, 8, 6 if greedy else 2, (1, 1, 1, 1))
    return Completion(TRANSLATIONS[text], [5] * 10, [], 'stop', stats)


class Searcher(Translator):
  """Its beams are two, the better one last; drafting changes one of `worse`."""

  def __init__(self, worse=5):
    super().__init__()
    self._worse = worse

  def generate(self, texts, *, temperature=0.0, num_samples=1, **options):
    found = super().generate(texts, temperature=temperature, **options)
    if num_samples == 1:
      return found
    assert options['num_beams'] == 2 == num_samples and options['alpha'] == 0.5
    drafted = [self._worse] if options['speculative'] else [5]
    other = Completion('Nein.', drafted, [], 'stop')
    return [one for best in found for one in (other, best)]


def run(tmp_path, engine, lines=LINES, **options):
  path = tmp_path / 'test.tsv.gz'
  path.write_bytes(gzip.compress(lines.encode()))
  console = rich.console.Console(file=io.StringIO(), width=100)
  options = {'output_dir': str(tmp_path / 'out'), 'batch_size': 2} | options
  config = quality.EvaluateConfig(lambda: engine, str(path), **options)
  return quality.evaluate(config, {'config.gin': lambda: 'A = 1'}, console)


def test_distinct_sources_with_all_their_references(tmp_path):
  engine = Translator()
  summary = run(tmp_path, engine)
  assert summary['sources'] == 3
  assert summary['references'] == 4, 'the same reference counts once'
  assert summary['sources_with_several'] == 1
  assert 'nrefs:var' in summary['bleu']['signature']
  assert 'nrefs:1' in summary['bleu_single']['signature']
  assert summary['bleu']['score'] > summary['bleu_single']['score'] > 0
  assert summary['errors'] == ['long is too long']
  cold, hot = summary['drafting']
  assert (cold['temperature'], hot['temperature']) == (0.0, 1.0)
  assert (cold['acceptance_rate'], hot['acceptance_rate']) == (0.75, 0.25)
  assert cold['tokens'] == 20 and cold['per_call'] == 2.5
  assert {len(texts) for _, texts, _ in engine.calls} == {2}
  written = json.loads((tmp_path / 'out' / results.SUMMARY).read_text())
  assert written == summary
  lines = (tmp_path / 'out' / results.PREDICTIONS).read_text('utf-8')
  records = [json.loads(line) for line in lines.splitlines()]
  assert [r['inputs'] for r in records] == [*TRANSLATIONS, 'long']
  assert len(records[0]['references']) == 2
  assert (tmp_path / 'out' / 'config.gin').read_text() == 'A = 1'
  with pytest.raises(ValueError, match='already holds finished results'):
    run(tmp_path, engine)
  assert run(tmp_path, engine, overwrite=True, max_sources=1)['sources'] == 1


def test_errors(tmp_path, monkeypatch):
  engine = Translator()
  with pytest.raises(ValueError, match='no line to evaluate'):
    run(tmp_path, engine, lines='')
  with pytest.raises(ValueError, match='line 1 has no reference'):
    run(tmp_path, engine, lines='only English\n')
  for options, name in (
    (dict(batch_size=0), 'batch_size'),
    (dict(max_sources=0), 'max_sources'),
    (dict(temperatures=(1.0,)), 'temperatures'),
  ):
    with pytest.raises(ValueError, match=name):
      run(tmp_path, engine, **options)
  monkeypatch.setitem(sys.modules, 'sacrebleu.metrics', None)
  with pytest.raises(ValueError, match='sacrebleu, which is not installed'):
    run(tmp_path, engine)
  assert engine.calls == [] and not (tmp_path / 'out').exists()


def test_beams_are_scored_beside_greedy_outputs(tmp_path):
  beams = Beams('beam', num_beams=2, alpha=0.5)
  summary = run(tmp_path, Searcher(), beams=beams)
  search = summary['beams']
  # The best beams are the greedy outputs here.
  assert search['bleu'] == summary['bleu'] and search['alpha'] == 0.5
  assert search['agree'] == summary['sources'] == 3
  shown = [row[0] for row in quality.table(summary).texts]
  assert 'BLEU, 2 beams, all references' in shown
  other = run(tmp_path, Searcher(worse=6), beams=beams, overwrite=True)
  assert other['beams']['agree'] == 0
