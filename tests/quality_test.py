"""BLEU, counts, beams, and a target beside another, by `infer.evaluate`."""

import dataclasses
import gzip
import io
import json
import math
import sys

import pytest
import rich.console

from small_vocabulary import network, weights
from specdec_jax import infer
from specdec_jax.engine.completion import (
  Completion,
  CompletionStats,
  passed_over,
)
from specdec_jax.engine.engine import Engine
from specdec_jax.infer import quality
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5

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


class Translator:
  """Knows two sentences; hotter, fewer proposals are accepted.

  Its beams are two, the better one last; drafting changes one of `worse`.
  """

  gamma, max_decode_len, params = 3, 32, None

  def __init__(self, worse=5):
    self.tokenizer, self.calls, self._worse = self, [], worse

  def encode(self, text):
    return text.split()

  def warmup(self, texts, **options):
    return 0.0

  def generate(self, texts, *, example_ids, temperature=0.0, **options):
    assert options['on_too_long'] == 'report' and not options['log_probs']
    self.calls.append((temperature, texts, example_ids))
    found = [self._complete(text, temperature == 0) for text in texts]
    if 'num_beams' not in options:
      return found
    assert options['num_beams'] == 2 and options['alpha'] == 0.5
    drafted = [self._worse] if options['speculative'] else [5]
    other = Completion('Nein.', drafted, [], 'stop')
    return [one for best in found for one in (other, best)]

  def _complete(self, text, greedy):
    if text not in TRANSLATIONS:
      return passed_over('error', f'{text} is too long')
    stats = CompletionStats(10, 4, 8, 6 if greedy else 2, (1, 1, 1, 1))
    return Completion(TRANSLATIONS[text], [5] * 10, [], 'stop', stats)


def run(tmp_path, engine, lines=LINES, **options):
  path = tmp_path / 'test.tsv.gz'
  path.write_bytes(gzip.compress(lines.encode()))
  console = rich.console.Console(file=io.StringIO(), width=100)
  options = {'output_dir': str(tmp_path / 'out'), 'batch_size': 2} | options
  config = infer.EvaluateConfig(lambda: engine, str(path), **options)
  return infer.evaluate(config, {'config.gin': lambda: 'A = 1'}, console)


def test_distinct_sources_with_all_their_references(tmp_path):
  engine = Translator()
  summary = run(tmp_path, engine)
  assert summary['sources'] == 3
  assert summary['references'] == 4  # the same reference counts once
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
  assert {i for *_, ids in engine.calls for i in ids} == {0, 1, 2}
  out = tmp_path / 'out'
  assert json.loads((out / 'summary.json').read_text()) == summary
  lines = (out / 'predictions.jsonl').read_text('utf-8').splitlines()
  records = [json.loads(line) for line in lines]
  assert [r['inputs'] for r in records] == [*TRANSLATIONS, 'long']
  assert len(records[0]['references']) == 2
  assert (out / 'config.gin').read_text() == 'A = 1'
  with pytest.raises(ValueError, match='already holds finished results'):
    run(tmp_path, engine)
  assert run(tmp_path, engine, overwrite=True)['sources'] == 3


def test_errors(tmp_path, monkeypatch):
  engine = Translator()
  for changes, message in (
    ({'lines': ''}, 'no line to evaluate'),
    ({'lines': 'only English\n'}, 'line 1 has no reference'),
    ({'batch_size': 0}, 'batch_size'),
    ({'temperatures': (1,)}, r'temperatures.*got \(1,\)'),
  ):
    with pytest.raises(ValueError, match=message):
      run(tmp_path, engine, **changes)
  monkeypatch.setitem(sys.modules, 'sacrebleu.metrics', None)
  with pytest.raises(ValueError, match='sacrebleu, which is not installed'):
    run(tmp_path, engine)
  assert engine.calls == [] and not (tmp_path / 'out').exists()


def test_nothing_came(tmp_path):
  with pytest.raises(infer.AllFailedError, match='long is too long'):
    run(tmp_path, Translator(), 'long\tx\n', temperatures=(0.0,))
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {'predictions.jsonl', 'summary.json', 'config.gin'}


def test_beams_are_scored_beside_greedy_outputs(tmp_path):
  options = infer.Options(num_beams=2, alpha=0.5)
  summary = run(tmp_path, Translator(), options=options)
  search = summary['beams']
  # The best beams are the greedy outputs here.
  assert search['bleu'] == summary['bleu'] and search['alpha'] == 0.5
  assert search['agree'] == summary['sources'] == 3
  shown = [row[0] for row in quality.table(summary).texts]
  assert 'BLEU, 2 beams, all references' in shown
  other = run(tmp_path, Translator(6), options=options, overwrite=True)
  assert other['beams']['agree'] == 0


NET = network(2)
PAIRS = [
  ('the red dog runs', 'a cat'),
  ('a cat', 'the old house sings'),
  ('the red dog runs', 'blue tree runs here'),
  ('cat cat', 'red'),
]


def test_a_target_beside_itself_in_eight_bits_and_another(tokenizer, tmp_path):
  path = tmp_path / 'pairs.tsv'
  path.write_text(''.join(f'{a}\t{b}\n' for a, b in PAIRS))
  draft = T5(dataclasses.replace(NET.config, num_decoder_layers=1))
  drafter = Model(draft, weights(draft, 2))
  limits = dict(tokenizer=tokenizer, max_input_len=16, max_decode_len=8)
  plain = Engine(Model(NET, weights(NET, 0)), **limits)

  def summary_of(seed, dtype):
    target = Model(NET, weights(NET, seed), dtype=dtype)
    config = infer.EvaluateConfig(
      lambda: Engine(target, drafter, gamma=2, **limits),
      str(path),
      batch_size=2,
      temperatures=(0.0,),
      compared=lambda: plain,
    )
    console = rich.console.Console(file=io.StringIO())
    return infer.evaluate(config, console=console)

  scores = plain.score(*zip(*PAIRS, strict=True))
  count = sum(len(one.log_probs) for one in scores)
  perplexity = math.exp(-sum(one.total for one in scores) / count)
  summaries = [summary_of(*x) for x in ((0, 'float32'), (0, 'int8'))]
  summaries.append(summary_of(1, 'float32'))
  found = [one['compared'] for one in summaries]
  for one in found:
    assert one['sources'] == 3 and one['tokens'] == count
    assert one['other_perplexity'] == pytest.approx(perplexity, rel=1e-4)
  itself, rounded, another = found
  assert itself['equal'] == 3 and itself['logits_error'] == 0
  assert itself['largest_difference'] == itself['mean_difference'] == 0
  assert itself['perplexity'] == itself['other_perplexity']
  assert itself['bleu'] == summaries[0]['bleu']
  assert 0 < rounded['logits_error'] < 0.1
  assert 0 < rounded['mean_difference'] < rounded['largest_difference']
  # Control: another model is another one.
  assert another['equal'] == 0 and another['logits_error'] > 0.5
  assert another['mean_difference'] > 10 * rounded['mean_difference']
  rows = dict(quality.table(summaries[1]).texts)
  assert rows['their perplexity by the other target'] == f'{perplexity:.3f}'
