"""The command `specdec`: its names, its flags, and what they bind."""

import argparse
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys

import gin
import pytest

from repository import ROOT
from specdec_jax.cli import commands, gin_flags, main
from toy_processes import output_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """A working folder of its own, and gin as it was."""
  monkeypatch.chdir(tmp_path)
  yield tmp_path
  gin.clear_config()


def run(capsys, *argv: str) -> tuple[int, str, str]:
  """The exit status, stdout and stderr of a command line."""
  try:
    status = main.main(argv)
  except SystemExit as ended:  # argparse, behind --help
    status = int(ended.code or 0)
  shown = capsys.readouterr()
  return status, shown.out, shown.err


def test_help_names_each_command_on_a_line(capsys):
  status, out, err = run(capsys, '--help')
  assert (status, err) == (0, '')
  for name in commands.COMMANDS:
    assert re.search(rf'^  {name} +[A-Z]', out, re.M), name
  assert max(map(len, out.splitlines())) <= 80
  assert run(capsys)[0] == 2  # nothing was asked


@pytest.mark.parametrize(
  'line, status, words',
  [
    ('specdec --help >&-', 2, 'stdout is closed'),
    ('specdec decod 2>&-', 2, ''),  # and not on stdout in its place
    ('python scripts/decode.py >&-', 2, 'stdout is closed'),
    ('mkdir a && cd a && rmdir ../a && specdec demo', 2, 'working folder'),
    # Unless JAX's plug-in for it is installed here.
    *[('JAX_PLATFORMS=cuda specdec demo', 1, 'error: Unable to initialize')]
    * (importlib.util.find_spec('jax_plugins') is None),
  ],
)
def test_what_a_shell_may_take_away(folder, line, status, words):
  """A closed stream, the working folder, a plug-in: a line at most."""
  line = line.replace('specdec ', f'{sys.executable} -m specdec_jax ')
  line = line.replace('python s', f'{sys.executable} {ROOT}/s')
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  how = {'cwd': folder, 'env': env, 'timeout': 60}
  done = subprocess.run(['sh', '-c', line], capture_output=True, **how)
  err = done.stderr.decode()
  assert (done.returncode, done.stdout) == (status, b''), err
  assert words in err and err.count('\n') == bool(words)


# Hashes in C code that looks for no signal, as a compilation does; argv: where.
BUSY = """
import hashlib, signal, sys, threading, time
from specdec_jax.cli import main, resumable
# A script's background jobs ignore SIGINT, and these tests may be such a job.
signal.signal(signal.SIGINT, signal.default_int_handler)

def busy():
  print('busy\\n', end='', flush=True)  # at once: two threads say it
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

def function():
  with resumable('my out'):
    threading.Thread(target=busy).start()
    if sys.argv[1] == 'here':
      busy()
    time.sleep(600)

sys.exit(main._as_process(function))
"""


@pytest.mark.parametrize('where', ['here', 'in a thread'])
def test_an_interrupt_ends_what_is_busy_and_says_how_to_go_on(where, tmp_path):
  """Neither a thread nor a program that is being compiled is waited for."""
  (tmp_path / 'busy.py').write_text(BUSY)
  argv = [sys.executable, 'busy.py', where]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  pipes |= {'cwd': tmp_path, 'env': os.environ | {'PYTHONPATH': str(ROOT)}}
  with subprocess.Popen(argv, **pipes) as process:
    try:
      assert process.stdout.readline() == 'busy\n'
      process.send_signal(signal.SIGINT)
      assert process.wait(20) == 130
      err = process.stderr.read()
    finally:
      process.kill()
  assert err.startswith("interrupted. 'my out' has what was finished; to go on")
  assert err.endswith(f':\n  {shlex.join(argv)}\n')


@pytest.mark.parametrize(
  'version, given, want',
  [((3, 11), None, '3'), ((3, 11), '0', '0'), ((3, 12), None, None)],
)
def test_hints_are_not_logged_as_errors(monkeypatch, version, given, want):
  name = 'TF_CPP_MIN_LOG_LEVEL'
  monkeypatch.setenv(name, given or '')
  if given is None:
    monkeypatch.delenv(name)
  monkeypatch.setattr(sys, 'version_info', version)
  main._hide_hints()
  assert os.environ.get(name) == want


def test_output_is_utf_8_whatever_the_locale_is(monkeypatch):
  code = "from specdec_jax.cli import main; main._guarded(lambda: print('ä'))"
  monkeypatch.setenv('LC_ALL', 'C')
  monkeypatch.setenv('PYTHONUTF8', '0')
  assert output_of(code.replace('ä', '\\xe4')) == 'ä\n'


@pytest.mark.parametrize('name', commands.COMMANDS)
def test_help_describes_every_flag_and_each_can_be_given(capsys, name):
  status, out, _ = run(capsys, name, '--help')
  assert status == 0 and 'default: None' not in out and 'REQUIRED' not in out
  examples = re.findall(rf'^  (?:echo .* \| )?specdec {name}\b', out, re.M)
  assert len(examples) >= 2
  assert max(map(len, out.splitlines())) <= 80
  command, argv = commands.COMMANDS[name], []
  parser = argparse.ArgumentParser(add_help=False)
  gin_flags.add_flags(parser, command.places)
  for flag in parser._actions:
    assert len(flag.help) > 5, flag
    assert all(option in out for option in flag.option_strings)
    value = [] if flag.nargs == 0 else ['x' if flag.metavar == 'TEXT' else '1']
    argv += [*flag.option_strings[:1], *value] if flag.option_strings else []
  if command.run_file:  # all together
    gin_flags.load(argv, command, name)
  if name == 'decode':  # a number, a word, and no default
    out = ' '.join(out.split())
    assert '(default: 120)' in out and '(default: speculative)' in out
    assert re.search(r'--num-beams N [^-(]* --alpha', out), out


@pytest.mark.parametrize(
  'argv, words',
  [
    (['decod'], "no command 'decod'.*Nearest known: decode"),
    (['--target', 'x'], 'A command comes first'),
    (['decode', '--tempertaure=1'], 'Nearest known: --temperature'),
    (['decode', '--top-k', 'x'], "--top-k: expected a whole number, got 'x'"),
    (['calibrate', '--batch-sizes', '1,x'], 'whole number, with commas'),
    (['distil', '--minutes', '1e999'], "--minutes: expected .* '1e999'"),
    (['decode', 'a.txt', 'b.txt'], "Unknown argument 'b.txt'"),
    (['decode', '--input', 'b.txt', 'a.txt'], "--input: .*'b.txt'.*'a.txt'"),
    (['decode'], 'Required and not given: .*--target'),
    (['measure'], 'No --gin_file was given'),
    (['measure', '--gin_file=gin/runs/demo.gin'], 'needs one of MeasureAlpha'),
    (['demo', '--alpha', '0.6'], 'alpha.*num_beams'),
    # A field is named as it was written: a flag, one of another program, gin.
    (['demo', '--shard-id', '3'], '^error: --shard-id: expected less than 1 '),
    (['demo', '--batch_size=0'], '^error: --batch_size: expected a whole num'),
    (['demo', '--max-new-tokens=0'], '^error: --max-new-tokens: expected a w'),
    (['demo', '--draft-dtype=x'], "^error: --draft-dtype: .*, got 'x'"),
    (['demo', '--no-repeat-ngram-size=-1'], '^error: --no-repeat-ngram-size: '),
    (['demo', '--gin.EngineConfig.gamma=-1'], '^error: EngineConfig.gamma: '),
    (['demo', '--gin.Engine.gamma=5'], '^error: engine.Engine.gamma: .*Config'),
    (['demo', '--gin.draft/load.dtype=x'], '^error: draft/load.dtype: '),
  ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, argv, words):
  status, out, err = run(capsys, *argv)
  assert status == 2 and out == ''
  assert err.startswith('error: ') and err.count('\n') == 1, err
  assert re.search(words, err)


def macros(command, *argv, names=()):
  """Values of macros after a command line was loaded."""
  gin_flags.load(argv, commands.COMMANDS[command], command)
  full = {x: x if '.' in x else f'{x}/gin.macro.value' for x in names}
  return {name: gin.query_parameter(full[name]) for name in names}


def test_a_flag_binds_its_field_or_the_macro_that_sets_it():
  want = {
    'CHECKPOINT_PATH': '%T',
    'DRAFT_CHECKPOINT_PATH': 'D',
    'DTYPE': 'int8',  # what gin says goes first
    'engine.EngineConfig.max_decode_len': 60,
    'engine.EngineConfig.max_input_len': 9,
    'engine.EngineConfig.gamma': 'adaptive',
    'infer.DecodeConfig.input_file': '-',
    'infer.DecodeConfig.overwrite': True,
    'infer.Options.max_length': 7,
    'infer.Options.num_samples': 2,
    'infer.Options.stop_strings': ('.', '%X', "it's"),
    'target/engine.load.revision': 'v2',
  }
  flags = (
    *('--model', '%T', '--assistant-model=D', '-', '--max_new_tokens', '7'),
    *('--num-return-sequences=2', '--overwrite', '--stop', '.', '--stop', '%X'),
    *('--stop', "it's", '--gin.DTYPE=int8', '--dtype', 'x'),
    *('--max-decode-len', '60', '--max-input-length=9'),
    *('--revision', 'v2', '--gamma', '2', '--gamma', 'adaptive'),  # the last
  )
  assert macros('decode', *flags, names=want) == want


PAIR = 'CHECKPOINT_PATH DRAFT_CHECKPOINT_PATH VOCAB_PATH TARGET DRAFT'.split()
NONE = dict.fromkeys([*PAIR, 'MODEL_NAME'])  # of the demo pair
MINE = {'CHECKPOINT_PATH': 'mine'}
DRAFT = {'DRAFT_CHECKPOINT_PATH': 'small', 'MODEL_NAME': 'x'}


@pytest.mark.parametrize(
  ('line', 'want'),
  [
    (
      'calibrate a.txt --target=T --draft=D --batch-sizes=1,4',
      {'measure.calibrate.CalibrateConfig.batches': (1, 4)},
    ),
    ('serve --no-speculative', {'serving.ServeSettings.speculative': False}),
    ('score a.tsv --target=T', {'MIXTURE_OR_TASK_NAME': 'a.tsv'}),
    # A target brings nothing of the demo pair.
    ('serve', {PAIR[0]: 'demo', 'MODEL_NAME': 'specdec-demo'}),
    ('serve --target mine', NONE | MINE),
    ('serve --target mine --draft small --model-name x', NONE | MINE | DRAFT),
    # Outputs go to stdout where a file is given plainly.
    ('demo', {'STDOUT': 'report'}),
    ('demo --gin.DecodeConfig.input_file=a', {'STDOUT': 'report'}),
    ('demo a --gin.STDOUT=report', {'STDOUT': 'report'}),
    ('demo a', {'STDOUT': 'outputs'}),
    ('demo --input=a', {'STDOUT': 'outputs'}),
    ('demo - --mode=plain', {'STDOUT': 'outputs'}),
  ],
)
def test_what_else_a_line_binds(line, want):
  assert macros(*line.split(), names=want) == want
