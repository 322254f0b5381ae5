"""What travels with the library: found from any folder, and in the wheel."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from repository import ROOT
from specdec_jax import files
from specdec_jax.files import shipped
from specdec_jax.files.locations import open_location
from specdec_jax.text.tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer


def test_shipped_files_are_found_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  inputs = ROOT / 'demo' / 'input.txt'
  assert shipped.find('demo/input.txt') == str(inputs)
  first = next(files.text_lines('demo/input.txt'))
  assert first == inputs.read_text('utf-8').splitlines()[0]
  assert open_location('demo/vocab.model').exists()
  assert Tokenizer('demo/vocab.model').vocab_size == 8000
  task = LocalTask('x', {'test': 'demo/sample.tsv'}, 'demo/vocab.model')
  assert all(example['targets'] for example in task.texts('test'))
  for path in ('demo/none.txt', 'other/input.txt', '/demo/input.txt', '-', ''):
    assert shipped.find(path) == path
  assert shipped.find('demo/../setup.py') == 'demo/../setup.py'
  assert shipped.find('gs://demo/input.txt') == 'gs://demo/input.txt'


def test_the_working_folder_goes_first(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'demo').mkdir()
  (tmp_path / 'demo' / 'input.txt').write_text('mine\n')
  assert list(files.text_lines('demo/input.txt')) == ['mine']
  (tmp_path / 'demo' / 'input.txt').unlink()
  (tmp_path / 'demo' / 'input.txt').symlink_to('gone')  # theirs, and broken
  assert shipped.find('demo/input.txt') == 'demo/input.txt'


LOADED = """
from specdec_jax.cli import gin_flags, main
from specdec_jax.files import shipped
assert gin_flags.ROOT.name == 'shipped', gin_flags.ROOT
gin_flags.load(['--gin_file=gin/runs/demo.gin'])
found = shipped.find('demo/vocab.model')
assert found == str(shipped.ROOT / 'demo' / 'vocab.model')
import specdec_jax
from specdec_jax.checkpoints.load import locate
assert all(locate(x).size() > 1e6 for x in ('demo', 'demo-draft'))
target, draft = specdec_jax.load('demo'), specdec_jax.load('demo-draft')
assert target.tokenizer.vocab_size == draft.network.vocab_size == 8000
assert specdec_jax.Engine(target, draft).has_drafter
"""


@pytest.mark.skipif(
  importlib.util.find_spec('setuptools') is None, reason='needs setuptools'
)
def test_the_package_holds_what_a_checkout_has(tmp_path):
  """What setup.py puts into a wheel, used from an empty folder."""
  tree = tmp_path / 'tree'
  tree.mkdir()
  for name in ('setup.py', 'README.md', 'LICENSE', 'pyproject.toml'):
    shutil.copy(ROOT / name, tree)
  ignored = shutil.ignore_patterns('__pycache__')
  for name in ('specdec_jax', 'gin', 'demo'):
    shutil.copytree(ROOT / name, tree / name, ignore=ignored)
  built = tmp_path / 'built'
  command = [sys.executable, 'setup.py', '-q', 'build_py']
  subprocess.run([*command, f'--build-lib={built}'], cwd=tree, check=True)
  assert [path.name for path in built.iterdir()] == ['specdec_jax']  # no `gin`
  assert (built / 'specdec_jax' / 'py.typed').exists()
  for name in ('gin', 'demo'):
    for path in (tree / name).rglob('*'):
      copy = built / 'specdec_jax' / 'shipped' / path.relative_to(tree)
      assert path.is_dir() or copy.read_bytes() == path.read_bytes()
  for table in (tree / 'specdec_jax').rglob('*.toml'):
    assert (built / table.relative_to(tree)).exists()
  empty = tmp_path / 'empty'
  empty.mkdir()
  command = [sys.executable, '-c', LOADED]
  environment = os.environ | {'PYTHONPATH': str(built)}
  subprocess.run(command, cwd=empty, env=environment, check=True)
