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


def test_without_results_the_block_names_the_command(tmp_path):
  text = update_readme.fill(BLOCK.format('none.json'), tmp_path)
  assert 'Nothing has been measured yet' in text and '`make results`' in text
  assert 'old' not in text


def test_errors(tmp_path):
  with pytest.raises(ValueError, match='no line <!-- results'):
    update_readme.fill('nothing', tmp_path)
  with pytest.raises(ValueError, match="got 'other'"):
    fill(tmp_path, {'kind': 'other'})


def test_readme_of_the_repository_is_up_to_date():
  readme = update_readme.ROOT / 'README.md'
  assert update_readme.main(['--check']) == 0
  blocks = re.findall(r'<!-- results: (\S+) \|', readme.read_text('utf-8'))
  assert all(path.startswith('benchmarks/results/') for path in blocks)
