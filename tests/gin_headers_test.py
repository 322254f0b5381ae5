"""What each gin file says of itself, and how deep they include each other."""

import pathlib
import re

import pytest

from specdec_jax.cli import gin_flags

RUNS = sorted((gin_flags.ROOT / 'gin' / 'runs').glob('*.gin'))
FILES = sorted((gin_flags.ROOT / 'gin').glob('**/*.gin'))


def name_of(path: pathlib.Path) -> str:
  return path.relative_to(gin_flags.ROOT).as_posix()


def header_of(path: pathlib.Path) -> str:
  return path.read_text().partition('from __gin__')[0]


@pytest.mark.parametrize('path', RUNS, ids=lambda path: path.stem)
def test_a_run_says_what_it_is_needs_and_costs_and_its_command(path):
  header = header_of(path)
  assert all(line.startswith('# ') for line in header.splitlines())
  assert header.startswith('# Purpose: ')
  for part in ('# Required: ', '# Expected time: '):
    assert part.strip() in header
  command = header[header.index('# Command') :]
  assert f'--gin_file={name_of(path)}' in command
  needed = header[header.index('# Required:') : -len(command)]
  required = re.findall(r'^(\w+) = %gin\.REQUIRED$', path.read_text(), re.M)
  assert all(re.search(rf'\b{macro}\b', needed) for macro in required)


@pytest.mark.parametrize('path', FILES, ids=name_of)
def test_a_file_names_files_that_are_there(path):
  """In commands, in comments and in includes."""
  for name in re.findall(r'gin/(?:\w+/)*\w+\.gin', path.read_text()):
    assert (gin_flags.ROOT / name).is_file(), name


def test_documents_and_scripts_name_files_that_are_there():
  named = set()
  for pattern in ('*.md', 'docs/*.md', '*/README.md', 'scripts/*.py'):
    for path in gin_flags.ROOT.glob(pattern):
      if path.name != 'CHANGELOG.md':
        text = path.read_text('utf-8')
        named |= set(re.findall(r'gin/(?:\w+/)*\w+\.gin', text))
  missing = {name for name in named if not (gin_flags.ROOT / name).is_file()}
  assert not missing and len(named) >= 15
