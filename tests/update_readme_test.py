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


def fill(tmp_path, result, name='summary.json'):
  (tmp_path / 'r').mkdir(exist_ok=True)
  (tmp_path / 'r' / name).write_text(json.dumps(result))
  return update_readme.fill(BLOCK.format(name), tmp_path)


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
  assert text.startswith('before\n') and text.endswith('\nafter\n')
  assert 'old' not in text and update_readme.fill(text, tmp_path) == text


def test_a_file_that_is_missing_or_of_another_kind(tmp_path):
  text = update_readme.fill(BLOCK.format('none.json'), tmp_path)
  assert 'Nothing has been measured yet' in text and '`make results`' in text
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
