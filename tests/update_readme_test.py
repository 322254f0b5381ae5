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


def test_a_benchmark(tmp_path):
  row = {'gamma': 3, 'cost_ratio': 0.125, 'acceptance_rate': 0.75}
  row |= {'measured_over_predicted': 1.04, 'expected_speed_up': 1.8}
  setting = {
    'batch': 1,
    'input_len': 32,
    'decode_len': 120,
    'temperature': 0.0,
    'times_ms': {'plain_loop': {'median': 20.814}},
    'bandwidth_fraction': 0.853,
    'compile_seconds': {'plain': 2.2},
    'call_cost': {'1': 1.0, '4': 1.18},
    'gammas': [row | {'speed_up': 1.7}],
  }
  record = {'kind': 'benchmark', 'name': 'base', 'weights': 'random'}
  record |= {'forced_acceptance': 0.75, 'settings': [setting]}
  text = fill(tmp_path, record | {'machine': MACHINE})
  assert 'base: random weights, acceptance forced to 0.75; batch 1' in text
  assert '| plain loop, ms per token | 20.81 |' in text
  assert '| v(4) | 1.18 |' in text and 'v(1)' not in text
  assert '| gamma 3: loop over its rounds, as measured apart | +4.0% |' in text
  assert '| gamma 3: speed-up | 1.70 |' in text


def test_a_calibration(tmp_path):
  record = {
    'acceptance_rate': {'alpha': 0.71, 'standard_error': 0.012},
    'costs': [
      {'call_cost': {'1': 1.0, '2': cost}, 'gammas': [{'cost_ratio': 0.1}]}
      for cost in (1.2, 1.9)
    ],
    'machine': MACHINE,
  }
  one = {'rows': 1, 'gamma': 1, 'expected_speed_up': 1.31}
  one |= {'interval': [1.2, 1.4], 'factors': [1.0, 1.31]}
  many = {'rows': 16, 'gamma': 0, 'expected_speed_up': 1.0}
  many |= {'interval': [1.0, 1.0], 'factors': [1.0, 0.93]}
  found = {'kind': 'calibration', 'choices': [one, many], 'record': record}
  text = fill(tmp_path, found)
  assert 'Acceptance 0.710 ± 0.012; ' in text
  assert '| 1 | 0.100 | 1 | 1.31 (1.20 to 1.40) |' in text
  assert '| 16 | 0.100 | 0 | 1.00 (1.00 to 1.00) |' in text
  assert '| 1 | 1.20 | 1.31 | 1.90 | 0.93 |' in text


def test_acceptance_rates(tmp_path):
  row = {'target': 'big', 'draft': 'small', 'temperature': 1.0, 'alpha': 0.7}
  row |= {'standard_error': 0.01, 'observed': 0.69, 'num_tokens': 12000}
  row |= {'observed_standard_error': 0.02}
  text = fill(tmp_path, {'kind': 'alpha', 'rows': [row], 'machine': MACHINE})
  assert '| big | small | 1 | 0.700 ± 0.010 | 0.690 ± 0.020 | 12,000 |' in text


def test_evaluations_beside_each_other(tmp_path):
  drafting = [
    {'temperature': 0.0, 'acceptance_rate': 0.75, 'per_call': 3.0},
    {'temperature': 1.0, 'acceptance_rate': None, 'per_call': None},
  ]
  files = []
  for name, changes in (('a', {}), ('b', {'bleu': {'score': 31.25}})):
    one = {'kind': 'quality', 'eval_file': 'x.tsv', 'sources': 3, 'gamma': 4}
    one |= {'bleu': {'score': 30.0}, 'drafting': drafting, 'machine': MACHINE}
    (tmp_path / name).mkdir()
    (tmp_path / name / 'summary.json').write_text(json.dumps(one | changes))
    files.append(f'{name}/summary.json')
  block = BLOCK.replace('r/{}', ','.join(files))
  text = update_readme.fill(block, tmp_path)
  assert '| a | 0.750 | 3.00 | - | - | 30.0 |' in text
  assert '| b | 0.750 | 3.00 | - | - | 31.2 |' in text
  (tmp_path / 'b' / 'summary.json').write_text(json.dumps(one | {'gamma': 5}))
  with pytest.raises(ValueError, match='the same sources, gamma and temp'):
    update_readme.fill(block, tmp_path)
  (tmp_path / 'b' / 'summary.json').unlink()
  assert 'Nothing has been measured' in update_readme.fill(block, tmp_path)


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
  paths = [path for block in blocks for path in block.split(',')]
  places = ('benchmarks/results/', 'demo/acceptance.json')  # that is shipped
  assert all(path.startswith(places) for path in paths)


def test_main(tmp_path, monkeypatch, capsys):
  """Each document is filled; --check only says which would be."""
  monkeypatch.setattr(update_readme, 'ROOT', tmp_path)
  for name in update_readme.DOCUMENTS:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(BLOCK.format('none.json'))
  assert update_readme.main(['--check']) == 1
  assert 'README.md, demo/README.md' in capsys.readouterr().err
  assert update_readme.main([]) == 0
  assert update_readme.main(['--check']) == 0
  assert update_readme.main(['--other']) == 2
