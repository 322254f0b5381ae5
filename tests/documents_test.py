"""Every command in README and docs/ is run, or says what it needs.

A block of bash or Python stands under one of these lines:

  <!-- command: NAME -->  .ci/run runs it, in a new environment
  <!-- run -->            .ci/run runs it: the slow tests of this file named
                          'quick'
  <!-- run: slow -->      the slow suite runs it, for it takes minutes
  <!-- needs: WHAT -->    not run: it needs what is not everywhere

The gin files and macros of all commands are looked up, whatever is marked, and
also those inside of a sentence.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import gin
import pytest

from specdec_jax.cli import commands, gin_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
_BLOCK = re.compile(
  r'(?:<!-- ([^>]*?) -->\n)?```(bash|python)\n(.*?)```',
  re.DOTALL,
)
_INLINE = re.compile(r'(?<!`)`((?:specdec|python scripts/)[^`]+)`(?!`)')
MARKS = r'(command: \w+|run|run: slow|needs: .+)'


# What a result block is made by: it writes numbers, and is not run again.
_MADE_BY = re.compile(r'<!-- results:.*?<!-- /results -->', re.DOTALL)

BLOCKS = [  # mark, kind, text, and the document
  (*block, path.stem)
  for path in DOCUMENTS
  for block in _BLOCK.findall(path.read_text())
]


def commands_of(text: str) -> list[list[str]]:
  """The command lines of this project in a text of a shell."""
  joined = re.sub(r'\\\n\s*|\n  +', ' ', text)
  found = []
  for line in joined.splitlines():
    for part in re.split(r'\||&&', line):
      # What a shell would put in: words of these names.
      part = re.sub(r'\$\w+', 'x', part)
      if part.count("'") % 2:  # a command inside of another's quotes
        part = part.replace("'", '')
      words = shlex.split(part, comments=True)
      while words and words[0] in ('.venv/bin/python', 'python', 'python3'):
        words = words[1:]
      if words and words[0].removeprefix('.venv/bin/') == 'specdec':
        found.append(['specdec', *words[1:]])
      elif words and re.fullmatch(r'scripts/\w+\.py', words[0]):
        found.append(words)
  return found


_TEXTS = [text for _, kind, text, _ in BLOCKS if kind == 'bash']
for _path in DOCUMENTS:
  for _text in _INLINE.findall(_MADE_BY.sub('', _path.read_text())):
    _TEXTS.append(re.sub(r'\s+', ' ', _text))
ALL_COMMANDS = [words for text in _TEXTS for words in commands_of(text)]


def test_there_are_documents():
  assert len(DOCUMENTS) >= 9 and len(BLOCKS) >= 12 and len(ALL_COMMANDS) >= 20
  for path in DOCUMENTS:
    for link in re.findall(r'\]\(((?!http)[^)#]+)\)', path.read_text()):
      assert (path.parent / link).exists(), f'{path.name} links to {link}'


def test_blocks_say_whether_they_run():
  for block in BLOCKS:
    assert re.fullmatch(MARKS, block[0]), block


@pytest.mark.parametrize('words', ALL_COMMANDS, ids=lambda x: ' '.join(x)[:70])
def test_a_command_is_known(words, tmp_path, monkeypatch, capsys):
  """Its name, its run file, its flags and its macros."""
  program, *flags = words
  if '...' in flags:
    flags = flags[: flags.index('...')]
  if '--coordinator_address=HOST_OF_0:1234' in flags:
    flags = [flag.replace('=I', '=0') for flag in flags]
  if program == 'specdec':
    name, *flags = flags
    if name == '--help':
      return
    command = commands.COMMANDS[name]
  else:
    name = pathlib.Path(program).stem
    assert (ROOT / program).is_file()
    command = commands.SCRIPTS[name]
  if not flags or '--help' in flags:
    return
  monkeypatch.chdir(tmp_path)
  try:
    gin_flags.load(flags, command, name)
  except ValueError as error:  # where a sentence gives but a part of it
    assert str(error).startswith('Required and not given'), error
  finally:
    gin.clear_config()


@pytest.mark.parametrize(
  'wrong', ['measure --gin_file=gin/runs/nothing.gin', 'demo --gama=4']
)
def test_control_a_command_that_is_wrong_is_seen(wrong, tmp_path, monkeypatch):
  with pytest.raises(AssertionError, match='nothing.gin|gama'):
    test_a_command_is_known(
      ['specdec', *wrong.split()], tmp_path, monkeypatch, None
    )


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """A folder with what a reader has: the repository's, and the command."""
  folder = tmp_path_factory.mktemp('reader')
  for name in ('demo', 'gin', 'benchmarks', 'scripts'):
    (folder / name).symlink_to(ROOT / name)
  (folder / 'bin').mkdir()
  command = folder / 'bin' / 'specdec'
  command.write_text(f'#!/bin/sh\nexec {sys.executable} -m specdec_jax "$@"\n')
  command.chmod(0o755)
  return folder


@pytest.mark.slow
@pytest.mark.parametrize(
  'block',
  [block for block in BLOCKS if block[0] in ('run', 'run: slow')],
  ids=lambda b: f'{"quick" if b[0] == "run" else "minutes"}, {b[3]}',
)
def test_a_block_runs(block, place):
  """In the order of a document, in one folder: one may need another's files."""
  path = f'{place / "bin"}{os.pathsep}{os.environ["PATH"]}'
  _, kind, text, _ = block
  by = [sys.executable] if kind == 'python' else ['bash', '-euo', 'pipefail']
  done = subprocess.run(
    [*by, '-c', text],
    cwd=place,
    env=os.environ | {'PATH': path, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
  )
  assert done.returncode == 0, done.stderr
