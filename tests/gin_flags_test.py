"""The command line of the scripts: gin files, bindings, errors."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from specdec_jax.cli import gin_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Size:
  """A frozen dataclass, as all of the library's configurations are."""

  width: int = 1
  depth: int = 1

  def __post_init__(self):
    if self.width < 0:
      raise ValueError(f'width: expected >= 0, got {self.width}')


@dataclasses.dataclass(frozen=True)
class Run:
  target: Size
  draft: Size
  path: object = 'none'
  flag: bool = False


class Unused:
  """Configured by no gin file."""


HEADER = """
from __gin__ import dynamic_registration
import gin_flags_test as toy
"""
RUN = (
  HEADER
  + """
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
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """A working folder that holds run.gin."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'run.gin').write_text(RUN)
  return tmp_path


def load(*flags: str, gin_file: str = 'run.gin') -> Run:
  gin_flags.load(gin_flags.parse_flags([f'--gin_file={gin_file}', *flags]))
  return gin_flags.build(Run)


def error(*flags: str, gin_file: str = 'run.gin') -> str:
  with pytest.raises(ValueError) as caught:
    load(*flags, gin_file=gin_file)
  return str(caught.value)


def test_frozen_dataclasses_are_built_by_scope():
  run = load('--gin.PATH=a.txt')
  assert run == Run(Size(10, 3), Size(5, 1), 'a.txt')
  assert type(run) is Run and type(run.target) is Size


@pytest.mark.parametrize(
  'text, value',
  [
    ('/tmp/x', '/tmp/x'),
    ('"/tmp/x"', '/tmp/x'),
    ('a = b', 'a = b'),
    ("it's", "it's"),
    ('back\\slash', 'back\\slash'),
    ('3#4', '3#4'),
    ('2024-01-01', '2024-01-01'),
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


def test_bindings_reach_scopes_and_later_ones_win():
  run = load(
    '--gin.PATH=x',
    '--gin.target/Size.width=7',
    '--gin.DEPTH=4',
    '--gin.Size.depth=9',
    '--gin.Run.flag=True',
    '--gin.target/toy.Size.width=8',
  )
  assert run == Run(Size(8, 4), Size(5, 9), 'x', True)


def test_later_files_override(folder):
  (folder / 'more.gin').write_text("PATH = 'more'\nDEPTH = 8\n")
  assert load('--gin_file=more.gin').target.depth == 8
  assert load('--gin_file', 'more.gin').path == 'more'


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


def test_operative_config_holds_defaults_and_can_be_read_back(folder):
  run = load('--gin.PATH=x')
  text = gin_flags.operative_config()
  assert 'toy.Run.flag = False' in text and 'draft/toy.Size.depth = 1' in text
  (folder / 'again.gin').write_text(text)
  assert load(gin_file='again.gin') == run


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--gin.PAHT=x'], 'PAHT.*Nearest known: PATH'),
    (['--gin.XXXXXXXX=1'], 'Known: DEPTH, PATH, TARGET'),
    (['--gin.PATH=x', '--gin.targt/Size.width=1'], 'Nearest known: target'),
    (['--gin.PATH=x', '--gin.Size.widht=1'], 'widht.*known: width'),
    (['--gin.PATH=x', '--gin.Sise.width=1'], 'Sise.*Size'),
    (['--gin.PATH=@Sizze()'], 'Sizze.*Size'),
    (['--gin.PATH=x', '--gin.Size.width=9'], 'draft/.*target/Size.width'),
    (['--gin.PATH'], '--gin.NAME=VALUE'),
    (['--gin.a b=x'], 'NAME=VALUE.*a b'),
    (['--gin.PATH=false'], 'False'),
    (['--gin.PATH=[1,'], 'not valid gin'),
    (['--gin_files=x'], '--gin_files.*Nearest known: --gin_file'),
    (['stray'], 'stray'),
    ([], 'not given: --gin.PATH=...'),
    (['--gin.PATH=x', '--gin.target/Size.width=-1'], 'got -1'),
  ],
)
def test_wrong_flags_say_what_is_known(flags, words):
  assert re.search(words, error(*flags))


@pytest.mark.parametrize(
  'body, words',
  [
    ('toy.Siz.width = 1', 'toy.Siz.*line 4.*Nearest known: Size'),
    ('toi.Size.width = 1', "'toi' was not provided by an import"),
    ('toy.Size.widht = 1', 'widht.*line 4.*Nearest known: width'),
    ('toy.Run.target = @toy.Sizze()', 'Nearest known: Size'),
    ('toy.Size.width = %WIDHT\nWIDTH = 3', '%WIDHT.*known: WIDTH'),
    ('toy.Size.width = %gin.REQUIRED', 'given: --gin.toy.Size.width=...'),
    (
      'targt/toy.Size.width = 3\ntoy.Run.target = @target/toy.Size()',
      'targt.*Nearest known: target',
    ),
    ('include "nope.gin"', 'nope.gin'),
    ('import toyy', "No module named 'toyy'"),
    ('toy.Size.width 3', 'not valid gin.*line 4'),
    ('toy.Size.width = nan', 'nan is no value.*line 4'),
    ('toy.Run.path = 1', "Run needs a value.*'target' and 'draft'"),
  ],
)
def test_wrong_files_say_what_is_known(folder, body, words):
  (folder / 'bad.gin').write_text(HEADER + body + '\n')
  message = error(gin_file='bad.gin')
  assert re.search(words, message) and '\n' not in message


def test_missing_files(folder):
  assert "'rum.gin'" in error(gin_file='rum.gin')
  shipped = ROOT / 'gin' / 'runs' / 'demo.gin'
  assert shipped.is_file()
  assert 'Nearest known: gin/runs/demo.gin' in error(
    gin_file='gin/runs/dmo.gin'
  )
  with pytest.raises(ValueError, match='No --gin_file was given'):
    gin_flags.parse_flags(['--gin.A=1'])


def test_a_run_file_of_another_script():
  load('--gin.PATH=x')
  with pytest.raises(ValueError, match='not gin_flags_test.Unused'):
    gin_flags.build(Unused)


def test_main_turns_bad_input_into_one_line(capsys):
  flags = ['--gin_file=run.gin', '--gin.PATH=x']

  def fail(exception):
    def function():
      raise exception

    return function

  assert gin_flags.main(lambda: None, flags) == 0
  assert gin_flags.main(lambda: 3, flags) == 3
  assert gin_flags.main(fail(KeyboardInterrupt()), flags) == 130
  capsys.readouterr()
  assert gin_flags.main(fail(ValueError('a\n  b')), flags) == 2
  assert gin_flags.main(fail(OSError(28, 'disk full')), flags) == 2
  assert gin_flags.main(lambda: None, ['--nonsense']) == 2
  lines = capsys.readouterr().err.splitlines()
  assert lines[:2] == ['error: a b', 'error: [Errno 28] disk full']
  assert len(lines) == 3 and lines[2].startswith("error: Unknown argument '--n")
  # What is no fault of the input, and no bug.
  assert gin_flags.main(fail(FloatingPointError('loss is nan')), flags) == 1
  assert gin_flags.main(fail(MemoryError()), flags) == 1
  no_memory = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 8 bytes\nMore')
  assert gin_flags.main(fail(no_memory), flags) == 1
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 3 and lines[0] == 'error: loss is nan'
  with pytest.raises(RuntimeError, match='a bug'):
    gin_flags.main(fail(RuntimeError('a bug')), flags)
  with pytest.raises(ValueError):
    gin_flags.main(fail(ValueError('x')), [*flags, '--traceback'])
  for bug in (TypeError('a bug'), AssertionError('a bug')):
    with pytest.raises(type(bug), match='a bug'):
      gin_flags.main(fail(bug), flags)


@pytest.mark.skipif(
  importlib.util.find_spec('jax_plugins') is not None,
  reason='the plug-in may be installed here',
)
def test_a_missing_plug_in_of_jax_is_one_line():
  done = subprocess.run(
    [sys.executable, '-m', 'specdec_jax', 'demo'],
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cuda'},
    timeout=60,
  )
  assert done.returncode == 1 and done.stderr.count('\n') == 1
  assert done.stderr.startswith("error: Unable to initialize backend 'cuda'")


def decode(*flags: str, stdin: bytes = b'') -> subprocess.CompletedProcess:
  """Runs scripts/decode.py; engines come from infer_test."""
  path = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
  return subprocess.run(
    [sys.executable, ROOT / 'scripts' / 'decode.py', *flags],
    input=stdin,
    capture_output=True,
    env=os.environ | {'PYTHONPATH': path},
    timeout=60,
  )


DECODE = """
from __gin__ import dynamic_registration
import infer_test
from specdec_jax import infer
OUT = None
infer.DecodeConfig:
  engine = @infer_test.ReversingEngine
  output_dir = %OUT
"""


def test_decode_script_end_to_end(folder):
  (folder / 'decode.gin').write_text(DECODE)
  flags = ['--gin_file=decode.gin', '--gin.OUT=results']
  done = decode(*flags, stdin=b'ab cd\n\n')
  assert done.returncode == 0, done.stderr.decode()
  assert b'\x1b' not in done.stdout + done.stderr
  assert b'speed-up' in done.stdout
  lines = (folder / 'results' / 'predictions.jsonl').read_text().splitlines()
  assert [json.loads(line)['prediction'] for line in lines] == ['dc ba', '']
  config = (folder / 'results' / 'operative_config.gin').read_text()
  assert "OUT = 'results'" in config and 'DecodeConfig.batch_size = 1' in config
  again = decode(*flags, stdin=b'x\n')
  assert again.returncode == 2 and again.stdout == b''
  assert again.stderr.startswith(b"error: 'results' holds finished results of")
  assert again.stderr.count(b'\n') == 1
