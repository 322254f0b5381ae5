"""README's result blocks come from files, and from nothing else."""

import json
import re

import pytest

import update_readme

BLOCK = (
  'before\n<!-- results: r/{} | make results -->\nold 9.99\n'
  '<!-- /results -->\nafter\n'
)
TABLE = {
  'kind': 'table',
  'title': 'Cost of a call',
  'columns': ['call', 'ms'],
  'rows': [['plain', '2.5']],
  'machine': {'device': 'X', 'cores': 2, 'jax': '1.0', 'python': '3.11'},
}


def test_a_block_is_filled_from_its_file(tmp_path):
  path, block = tmp_path / 'r' / 'base.json', BLOCK.format('base.json')
  path.parent.mkdir()
  with pytest.raises(ValueError, match='cannot be read'):
    update_readme.fill(block, tmp_path)
  path.write_text(json.dumps(TABLE))
  text = update_readme.fill(block, tmp_path)
  assert 'Cost of a call (X, 2 cores, JAX 1.0, Python 3.11)' in text
  assert '| call | ms |\n| :-- | --: |\n| plain | 2.5 |' in text
  assert text.startswith('before\n') and text.endswith('\nafter\n')
  assert 'old' not in text and update_readme.fill(text, tmp_path) == text
  path.write_text('{"kind": "other"}')
  for document, words in ('nothing', 'no line'), (block, "got 'other'"):
    with pytest.raises(ValueError, match=words):
      update_readme.fill(document, tmp_path)


@pytest.mark.parametrize('name', update_readme.DOCUMENTS)
def test_blocks_of_the_repository_are_up_to_date(name):
  text = (update_readme.ROOT / name).read_text('utf-8')
  assert update_readme.fill(text, update_readme.ROOT, name) == text
  paths = ','.join(re.findall(r'<!-- results: (\S+) \|', text)).split(',')
  places = ('benchmarks/results/', 'demo/acceptance.json')  # that is shipped
  places += ('tests/support.toml', 'docs/api/')
  assert all(path.startswith(places) for path in paths)


def test_main(tmp_path, monkeypatch, capsys):
  """Each document is filled; --check only says which would be."""
  monkeypatch.setattr(update_readme, 'ROOT', tmp_path)
  for name in update_readme.DOCUMENTS:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(BLOCK.format('table.json'))
  (tmp_path / 'r').mkdir()
  (tmp_path / 'r' / 'table.json').write_text(json.dumps(TABLE))
  assert update_readme.main(['--check']) == 1
  assert 'README.md, demo/README.md' in capsys.readouterr().err
  assert update_readme.main([]) == 0
  assert update_readme.main(['--check']) == 0
  assert update_readme.main(['--other']) == 2
