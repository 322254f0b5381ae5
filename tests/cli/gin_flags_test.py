"""The command line of the scripts: gin files, bindings, errors."""

import re
import sys

import jax
import pytest

from specdec_jax.cli import Command, gin_flags, main
from toy_configs import Run, Size

HEADER = """
from __gin__ import dynamic_registration
import toy_configs as toy
"""
RUN = f"""{HEADER}
PATH = %gin.REQUIRED
DEPTH = 3
TARGET = @target/toy.Size()
target/toy.Size:
  width = 10
  depth = %DEPTH
draft/toy.Size.width = 5
toy.Run:
  target = %TARGET
  draft = @draft/toy.Size()
  path = %PATH
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """A working folder that holds run.gin."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'run.gin').write_text(RUN)
  return tmp_path


def load(*flags: str, gin_file: str = 'run.gin') -> Run:
  gin_flags.load([f'--gin_file={gin_file}', *flags])
  return gin_flags.build(Run)


@pytest.mark.parametrize(
  'text, value',
  [
    ('/tmp/x', '/tmp/x'),
    ('"/tmp/x"', '/tmp/x'),
    ("'a' 'b'", 'ab'),
    ('a\nimport os', 'a\nimport os'),
    ("it's", "it's"),
    ('3#4', '3#4'),
    ('', ''),
    ('-1.5e-3', -1.5e-3),
    ('True', True),
    ('None', None),
    ('[1, "a"]', [1, 'a']),
    ('{"a": 1}', {'a': 1}),
    ('%DEPTH', 3),
  ],
)
def test_values_with_and_without_quotes(text, value):
  assert load(f'--gin.PATH={text}').path == value
  assert load(f'--gin_bindings=PATH = {text}').path == value


def test_bindings_reach_scopes_and_later_ones_win(folder):
  (folder / 'more.gin').write_text("PATH = 'more'\nDEPTH = 8\n")
  run = load(
    '--gin_file=more.gin',
    '--gin.target/Size.width=7',
    '--gin.Size.depth=9',
    '--gin.Run.flag=True',
    '--gin.target/toy.Size.width=8',
  )
  assert run == Run(Size(8, 8), Size(5, 9), 'more', True)


def test_files_are_found_in_search_paths_and_repository(
  folder, monkeypatch, caplog
):
  for name in ('one', 'two', 'repository/gin'):
    (folder / name).mkdir(parents=True)
  (folder / 'one' / 'size.gin').write_text('DEPTH = 11\n')
  (folder / 'repository' / 'gin' / 'path.gin').write_text("PATH = 'r'\n")
  (folder / 'two' / 'all.gin').write_text(
    "include 'run.gin'\ninclude 'size.gin'\ninclude 'gin/path.gin'\n"
  )
  monkeypatch.setattr(gin_flags, 'ROOT', folder / 'repository')
  run = load('--gin_search_paths=one,two', gin_file='all.gin')
  assert (run.target.depth, run.path) == (11, 'r')
  # gin would log an error for each place where a file is not.
  assert not caplog.records


# What follows a value is not run as gin's statements.
STATEMENTS = 'from __gin__ import dynamic_registration\nimport tabnanny'
HOSTILE = [
  f"'a'\n{STATEMENTS}",
  f'%DEPTH\n{STATEMENTS}',
  "'a'\ninclude 'other.gin'",
  "'a' 3",
  '[' * 100_000 + ']' * 100_000,
]
LONG = '\n'.join(f'A{i} = %A{i + 1}' for i in range(2000)) + '\nA2000 = 1\n'
BAD_FLAGS = [  # and words of the error
  ('--gin.PAHT=x', 'PAHT.*Nearest known: PATH'),
  ('--gin.PATH=x --gin.targt/Size.width=1', 'Nearest known: target'),
  ('--gin.PATH=x --gin.Size.widht=1', 'widht'),
  ('--gin.PATH=x --gin.Size.width=9', 'give draft/Size.width, target/Size.wi'),
  ('--gin.PATH=@Sizze()', 'Sizze'),
  ('--gin.PATH', '--gin.NAME=VALUE'),
  ('--gin.a+b=x', 'NAME=VALUE.*a.b'),
  ('--gin.PATH=false', 'False'),
  ('--gin.PATH=[1,', 'not valid gin'),
  ('--gin.PATH=[{1:abc}]', "expected a literal.* token 'abc'"),
  ("--gin.PATH='a", 'not valid gin: unterminated'),
  ('--gin_files=x', '--gin_files.*Nearest known: --gin_file'),
  ('', 'not given: --gin.PATH=...'),
  ('--gin.PATH=x --gin.target/Size.width=-1', 'got -1'),
  ('--gin_file=rum.gin', 'rum.gin'),
]
BAD_FILES = [  # in place of run.gin, behind its header
  ('toi.Size.width = 1', "'toi' was not provided by an import"),
  ('toy.Size.widht = 1', 'widht.*line 4'),
  ('toy.Size.width = %WIDHT\nWIDTH = 3', '%WIDHT.*known: WIDTH'),
  ('toy.Size.width = %gin.REQUIRED', 'given: --gin.toy.Size.width='),
  ('import toyy', "No module named 'toyy'"),
  ('toy.Size.width 3', 'not valid gin.*line 4'),
  ('toy.Run.path = 1', "Run needs a value.*'target' and 'draft'"),
  ('A = ' + '[' * 9999, 'nested'),
]
WRONG = [  # files, flags, words
  *(({}, flags.split(), words) for flags, words in BAD_FLAGS),
  *(({'run': HEADER + text}, [], words) for text, words in BAD_FILES),
  ({'run': "include 'b.gin'", 'b': "include 'run.gin'"}, [], 'circle'),
  ({'run': f'{RUN}PATH = %A\nA = [1, %B]\nB = {{2: %A}}'}, [], 'circle'),
  ({'run': f'{RUN}PATH = @toy.Run()'}, [], 'circle'),
  ({'run': f'{RUN}{LONG}PATH = %A0'}, [], 'too long a chain'),
  *(({'other': STATEMENTS}, [f'--gin.PATH={x}'], 'PATH') for x in HOSTILE),
]


@pytest.mark.parametrize(
  ('files', 'flags', 'words'), WRONG, ids=range(len(WRONG))
)
def test_what_is_wrong_is_said_in_a_line(folder, capsys, files, flags, words):
  """Names that nothing knows come with those that are known."""
  for name, text in files.items():
    (folder / f'{name}.gin').write_text(text + '\n')
  command = Command(lambda: load(*flags) and None)
  assert main.run(command, ['--gin_file=run.gin', *flags]) == 2
  shown = capsys.readouterr().err
  assert re.search(words, shown) and shown.count('\n') == 1
  assert len(shown) < 1000 and 'object at 0x' not in shown
  assert 'tabnanny' not in sys.modules


FULL = 'RESOURCE_EXHAUSTED: 8 bytes'


@pytest.mark.parametrize(
  ('error', 'status', 'line'),
  [
    (None, 0, ''),
    (KeyboardInterrupt(), 130, 'interrupted\n'),
    (ValueError('a\n  b'), 2, 'error: a b\n'),
    (OSError(28, 'full'), 2, 'error: [Errno 28] full\n'),
    # What is no fault of the input, and no bug.
    (FloatingPointError('loss is nan'), 1, 'error: loss is nan\n'),
    (MemoryError(), 1, 'error: MemoryError\n'),
    (jax.errors.JaxRuntimeError(FULL), 1, f'error: {FULL}\n'),
    (RuntimeError('a bug'), None, ''),
    (AssertionError('a bug'), None, ''),
  ],
)
def test_an_error_is_a_line_and_a_status(capsys, error, status, line):
  def function():
    if error is not None:
      raise error

  flags = ['--gin_file=run.gin', '--gin.PATH=x']
  if status is None:
    with pytest.raises(type(error)):
      main.run(Command(function), flags)
    return
  assert main.run(Command(function), flags) == status
  assert capsys.readouterr().err == line
  if isinstance(error, Exception):
    with pytest.raises(type(error)):
      main.run(Command(function), [*flags, '--traceback'])
