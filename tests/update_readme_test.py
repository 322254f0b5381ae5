"""README's result blocks come from files, and from nothing else."""

import json
import re

import pytest

import update_readme

BLOCK = (
  'before\n<!-- results: r/{} | make results -->\nold 9.99\n'
  '<!-- /results -->\nafter\n'
)
MACHINE = {'device': 'CPU X', 'cores': 2, 'jax': '1.0', 'python': '3.11'}
MODE = {
  'tokens': 1200,
  'target_calls': 400,
  'tokens_per_call': 3.0,
  'acceptance_rate': 0.75,
  'ms_per_token': 4.0,
  'ms_per_token_median': 3.5,
  'compile_seconds': 2.0,
}
DECODE = {
  'kind': 'decode',
  'input_file': 'in.txt',
  'lines': 2,
  'batch_size': 1,
  'gamma': 4,
  'sampling': {'temperature': 0.0},
  'plain': MODE | {'acceptance_rate': None},
  'speculative': MODE,
  'speed_up': 1.5,
  'speed_up_median': 1.75,
  'agreement': {'compared': 2, 'disagreements': [{}]},
  'machine': MACHINE,
}


def fill(tmp_path, result, name='summary.json'):
  (tmp_path / 'r').mkdir(exist_ok=True)
  (tmp_path / 'r' / name).write_text(json.dumps(result))
  return update_readme.fill(BLOCK.format(name), tmp_path)


def test_decode_summary_becomes_a_table(tmp_path):
  (tmp_path / 'r').mkdir()
  (tmp_path / 'r' / 'predictions.jsonl').write_text(
    '{"inputs": "", "prediction": ""}\n{"inputs": "a|b", "prediction": "c"}\n'
  )
  text = fill(tmp_path, DECODE)
  assert text.startswith('before\n') and text.endswith('\nafter\n')
  assert 'old' not in text
  assert '| tokens | 1,200 | 1,200 |' in text
  assert '| acceptance rate | - | 0.750 |' in text
  assert '| speed-up, median | 1.00 | 1.75 |' in text
  assert 'agree token for token: 1 of 2' in text
  assert 'CPU X, 2 cores, JAX 1.0, Python 3.11' in text
  assert r'| a\|b | c |' in text
  assert update_readme.fill(text, tmp_path) == text


def test_table_of_a_benchmark(tmp_path):
  table = {
    'kind': 'table',
    'title': 'Cost of a call',
    'columns': ['call', 'ms'],
    'rows': [['plain', '2.5']],
    'machine': MACHINE,
  }
  text = fill(tmp_path, table, 'base.json')
  assert 'Cost of a call (CPU X' in text
  assert '| call | ms |\n| :-- | --: |\n| plain | 2.5 |' in text


QUALITY = {
  'kind': 'quality',
  'eval_file': 'test.tsv',
  'sources': 1200,
  'references': 1300,
  'sources_with_several': 77,
  'errors': ['Text 3 is long'],
  'bleu': {'score': 21.25, 'signature': 'nrefs:var|tok:13a'},
  'bleu_single': {'score': 19.0, 'signature': 'nrefs:1|tok:13a'},
  'gamma': 4,
  'drafting': [
    {
      'temperature': 1.0,
      'acceptance_rate': 0.5,
      'per_call': 2.5,
      'tokens': 9000,
    }
  ],
  'machine': MACHINE,
}


def test_quality_becomes_a_table(tmp_path):
  text = fill(tmp_path, QUALITY)
  assert '1,200 distinct sources with 1,300 references (77 have' in text
  assert '| BLEU, all references of a source | 21.2 |' in text
  assert '| BLEU, the first reference only | 19.0 |' in text
  assert '| acceptance rate, temperature 1 | 0.500 |' in text
  assert '`nrefs:var|tok:13a`' in text and '`nrefs:1|tok:13a`' in text
  assert 'could not be decoded: 1' in text


def test_without_results_the_block_names_the_command(tmp_path):
  text = update_readme.fill(BLOCK.format('none.json'), tmp_path)
  assert 'Nothing has been measured yet' in text and '`make results`' in text
  assert 'old' not in text


def test_errors(tmp_path):
  with pytest.raises(ValueError, match='no line <!-- results'):
    update_readme.fill('nothing', tmp_path)
  with pytest.raises(ValueError, match="got 'other'"):
    fill(tmp_path, {'kind': 'other'})


@pytest.mark.parametrize('name', update_readme.DOCUMENTS)
def test_blocks_of_the_repository_are_up_to_date(name):
  text = (update_readme.ROOT / name).read_text('utf-8')
  assert update_readme.fill(text, update_readme.ROOT, name) == text
  blocks = re.findall(r'<!-- results: (\S+) \|', text)
  assert blocks
  assert all(path.startswith('benchmarks/results/') for path in blocks)


def test_main(tmp_path, monkeypatch, capsys):
  """Each document is filled; --check only says which would be."""
  monkeypatch.setattr(update_readme, 'ROOT', tmp_path)
  (tmp_path / 'demo').mkdir()
  for name in update_readme.DOCUMENTS:
    (tmp_path / name).write_text(BLOCK.format('none.json'))
  assert update_readme.main(['--check']) == 1
  assert 'README.md, demo/README.md' in capsys.readouterr().err
  assert update_readme.main([]) == 0
  assert update_readme.main(['--check']) == 0
  assert update_readme.main(['--other']) == 2
