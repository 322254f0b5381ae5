"""Every command and every example is run, or says what it needs.

A block of bash or Python stands under one of these lines:

  <!-- command: NAME -->  .ci/run runs it, in a new environment
  <!-- run -->            .ci/run runs it: the slow tests of this file named
                          'quick'
  <!-- run: slow -->      the slow suite runs it, for it takes minutes
  <!-- needs: WHAT -->    not run: it needs what is not everywhere

The gin files and macros of all commands are looked up, whatever is marked, and
also those inside of a sentence. Each public name is on a page of docs/api and
has an example in its docstring. Examples of the demo pair, and the files of
examples/, are in the slow suite; .ci/run runs those named 'quick'.
"""

import ast
import contextlib
import doctest
import inspect
import os
import pathlib
import re
import shlex
import subprocess
import sys

import gin
import pytest

import specdec_jax
from repository import ROOT
from specdec_jax.cli import commands, gin_flags

DOCUMENTS = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
REFERENCE = ROOT / 'docs' / 'api' / 'README.md'
FILES = sorted((ROOT / 'examples').glob('*.py'))
# Examples that need more than the extras of the tests.
MORE = ('ray_data', 'parameters_of_your_own')
QUICK_FILES = (
  *('constrain_an_output', 'table_1', 'translate_a_document'),
  'write_a_drafter',
)
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
_OF_FILE = re.compile('^  (specdec .+)$', re.MULTILINE)
for _path in FILES:
  _TEXTS += _OF_FILE.findall(_path.read_text())
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
  for name in ('demo', 'gin', 'benchmarks', 'scripts', 'examples'):
    (folder / name).symlink_to(ROOT / name)
  (folder / 'bin').mkdir()
  command = folder / 'bin' / 'specdec'
  command.write_text(f'#!/bin/sh\nexec {sys.executable} -m specdec_jax "$@"\n')
  command.chmod(0o755)
  return folder


def run(words, place):
  """What a command printed, in the folder of a reader."""
  path = f'{place / "bin"}{os.pathsep}{os.environ["PATH"]}'
  done = subprocess.run(
    words,
    cwd=place,
    env=os.environ | {'PATH': path, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
  'block',
  [block for block in BLOCKS if block[0] in ('run', 'run: slow')],
  ids=lambda b: f'{"quick" if b[0] == "run" else "minutes"}, {b[3]}',
)
def test_a_block_runs(block, place):
  """In the order of a document, in one folder: one may need another's files."""
  _, kind, text, _ = block
  by = [sys.executable] if kind == 'python' else ['bash', '-euo', 'pipefail']
  run([*by, '-c', text], place)


@pytest.mark.slow
@pytest.mark.parametrize(
  'path',
  [path for path in FILES if path.stem not in MORE],
  ids=lambda path: (
    f'{"quick" if path.stem in QUICK_FILES else "minutes"}, {path.stem}'
  ),
)
def test_a_file_of_examples_runs(path, place):
  assert run([sys.executable, '-W', 'error', f'examples/{path.name}'], place)


@pytest.mark.slow
def test_parameters_of_a_stranger(place):
  pytest.importorskip('annalog', reason='needs pip install annalog')
  pytest.importorskip('torch', reason='needs pip install torch')
  argv = [sys.executable, 'examples/parameters_of_your_own.py']
  assert run(argv, place) == 'CC(=O)Oc1ccccc1C(=O)O\n'


@pytest.mark.slow
def test_a_file_goes_through_two_engines_of_ray_and_goes_on(place):
  """What the first run did, another one that has more lines does not."""
  pytest.importorskip('pyarrow', reason='needs the extra [ray]')
  pytest.importorskip('ray', reason='needs the extra [ray]')
  lines = (ROOT / 'demo' / 'input.txt').read_text().splitlines()[:12]
  for some in (lines[:8], [*lines, '', lines[0]]):
    (place / 'some.txt').write_text(''.join(f'{line}\n' for line in some))
    argv = [sys.executable, 'examples/ray_data.py', 'some.txt', 'out']
    said = subprocess.check_output(
      argv,
      cwd=place,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      stderr=subprocess.STDOUT,
      text=True,
    )
    assert 'Actors: 2' in said, said
    parts = [path.read_text() for path in place.glob('out/parts/*.json')]
    assert ''.join(parts).count('\n') == len({*some} - {''})
  german = (place / 'out' / 'german.txt').read_text()
  assert german == run(['specdec', 'demo', 'some.txt'], place)


def test_files_of_examples_are_short_and_listed():
  listed = (ROOT / 'docs' / 'examples.md').read_text()
  names = re.findall(r'\(\.\./examples/(\w+\.py)\)', listed)
  assert sorted(names) == [path.name for path in FILES] and len(FILES) <= 10
  for path in FILES:
    assert len(path.read_text().splitlines()) <= 60, path


def of_docstrings():
  """Name -> examples: each public name, and methods that have some."""
  parser = doctest.DocTestParser()
  for name in specdec_jax.__all__:
    value = getattr(specdec_jax, name)
    yield name, parser.get_examples(inspect.getdoc(value) or '')
    for member, method in vars(value).items() if inspect.isclass(value) else ():
      if not member.startswith('_') and inspect.isfunction(method):
        if found := parser.get_examples(inspect.getdoc(method) or ''):
          yield f'{name}.{member}', found


DOCSTRINGS = dict(of_docstrings())


def needs_pair(examples):
  """Whether names are used that the page before the reference makes."""
  code = ast.parse(''.join(example.source for example in examples))
  names = [node for node in ast.walk(code) if isinstance(node, ast.Name)]
  used = {'target', 'draft', 'engine'} & {name.id for name in names}
  return bool(used - {n.id for n in names if isinstance(n.ctx, ast.Store)})


def check(name, names):
  """Runs the examples of a docstring, with these names at hand."""
  test = doctest.DocTest(
    DOCSTRINGS[name], {'sd': specdec_jax} | names, name, None, None, None
  )
  said = []
  flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
  result = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
  assert result.attempted and not result.failed, ''.join(said)


def test_pages_and_docstrings_have_all_public_names():
  assert specdec_jax.__all__ == sorted(
    name
    for page in REFERENCE.parent.glob('*.md')
    for name in re.findall(r'^::: specdec_jax\.(\w+)$', page.read_text(), re.M)
  )
  assert not [name for name, examples in DOCSTRINGS.items() if not examples]


@pytest.mark.parametrize(
  'name', [name for name, found in DOCSTRINGS.items() if not needs_pair(found)]
)
def test_an_example_runs(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  check(name, {})


@pytest.fixture(scope='module')
def pair(place):
  """The names of the demo pair, made as the reference says."""
  (text,) = [text for _, _, text in _BLOCK.findall(REFERENCE.read_text())]
  names = {}
  gin.clear_config()
  with contextlib.chdir(place):
    exec(text, names)
  yield names
  gin.clear_config()


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [name for name, found in DOCSTRINGS.items() if needs_pair(found)],
  ids='quick, {}'.format,
)
def test_an_example_of_the_pair_runs(name, pair, place, monkeypatch):
  monkeypatch.chdir(place)
  check(name, dict(pair))


def test_control_a_wrong_example_is_seen(monkeypatch):
  wrong = doctest.DocTestParser().get_examples('>>> 1 + 1\n3\n')
  monkeypatch.setitem(DOCSTRINGS, 'wrong', wrong)
  with pytest.raises(AssertionError, match='Expected'):
    check('wrong', {})
