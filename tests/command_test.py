"""The command `specdec`: its names, its flags, and what they bind."""

import os
import pathlib
import re
import subprocess
import sys

import gin
import pytest

from specdec_jax.cli import commands, gin_flags, main, options


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


def test_help_needs_nothing_that_is_slow_to_import():
  code = (
    'import sys; from specdec_jax.cli import main\n'
    "assert main.main(['--help']) == 0\n"
    "slow = {'jax', 'numpy', 'rich', 'gin', 'flax'} & set(sys.modules)\n"
    'assert not slow, slow'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=gin_flags.ROOT, capture_output=True
  )
  assert done.returncode == 0, done.stderr.decode()


def test_an_interrupt_while_it_imports_is_one_line(capsys, monkeypatch):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(gin_flags, 'main', interrupted)
  assert run(capsys, 'demo') == (130, '', 'interrupted\n')


@pytest.mark.parametrize(
  'line, words',
  [
    ('specdec --help >&-', 'stdout is closed'),
    ('specdec decod 2>&-', ''),  # and not on stdout in its place
    ('specdec demo >&- 2>&- <&-', ''),
    ('mkdir a && cd a && rmdir ../a && specdec demo', 'working folder'),
    ('python scripts/decode.py >&-', 'stdout is closed'),
  ],
)
def test_what_a_shell_may_take_away(folder, line, words):
  """A closed stream or the working folder: a line at most, and status 2."""
  root = pathlib.Path(__file__).resolve().parent.parent
  line = line.replace('specdec', f'{sys.executable} -m specdec_jax')
  line = line.replace('python s', f'{sys.executable} {root}/s')
  done = subprocess.run(
    ['sh', '-c', line],
    cwd=folder,
    capture_output=True,
    env=os.environ | {'PYTHONPATH': str(root)},
  )
  err = done.stderr.decode()
  assert (done.returncode, done.stdout) == (2, b''), err
  assert words in err and err.count('\n') == bool(words)


@pytest.mark.parametrize('name', commands.COMMANDS)
def test_help_of_a_command_describes_every_flag(capsys, name):
  status, out, _ = run(capsys, name, '--help')
  assert status == 0
  examples = re.findall(rf'^  (?:echo .* \| )?specdec {name}\b', out, re.M)
  assert len(examples) >= 2
  assert max(map(len, out.splitlines())) <= 80
  for flag in options.flags(commands.COMMANDS[name].places):
    assert len(flag.help) > 5, flag
    assert not re.search('likewise|as of|see ', flag.help), flag
    for option in flag.names:
      assert option in out


def test_help_says_what_is_the_default(capsys):
  out = ' '.join(run(capsys, 'decode', '--help')[1].split())
  assert '(default: 4)' in out and '(default: speculative)' in out
  assert 'default: None' not in out and 'REQUIRED' not in out
  # No search is the default.
  assert re.search(r'--beam-size N [^-(]*asks for one --alpha', out), out


@pytest.mark.parametrize(
  'argv, words',
  [
    (['decod'], "no command 'decod'.*Nearest known: decode"),
    (['--target', 'x'], 'A command comes first'),
    (['decode', '--tempertaure=1'], 'Nearest known: --temperature'),
    (['decode', '--top-k', 'x'], "--top-k is 'x', expected a whole number"),
    (['calibrate', '--batch-sizes', '1,x'], 'whole number, with commas'),
    (['demo', '--temperature', 'nan'], "--temperature is 'nan', expected"),
    (['distil', '--minutes', '1e999'], "--minutes is '1e999', expected"),
    (['decode', 'a.txt', 'b.txt'], "Unknown argument 'b.txt'"),
    (['decode', 'a.txt', '--input', 'b.txt'], 'FILE.*--input.*one of'),
    (['decode'], 'Required and not given: .*--target'),
    (['decode', '--gin.GAMMA=3'], 'Give --gamma'),
    (['measure'], 'No --gin_file was given'),
    (['demo', '--port', '2'], "Unknown argument '--port'"),
    (
      ['measure', '--gin_file=gin/runs/demo.gin'],
      'one of `specdec decode`, not of `specdec measure`',
    ),
    (
      ['train', '--gin_file=gin/runs/alpha_demo.gin'],
      'configure none of TrainRun, FitNgramConfig',
    ),
    (['demo', '--alpha', '0.6'], 'alpha.*num_beams'),
  ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, argv, words):
  status, out, err = run(capsys, *argv)
  assert status == 2 and out == ''
  assert err.startswith('error: ') and err.count('\n') == 1, err
  assert re.search(words, err)


def bindings(command: str, *argv: str) -> dict[str, str]:
  """Short name of what is bound -> its value as gin has it."""
  parsed = gin_flags.parse_flags(argv, commands.COMMANDS[command], command)
  return {
    re.sub(r'specdec_jax[\w.]*\.(?=\w+\.\w+$)', '', name): value
    for name, value in parsed.bindings
  }


def test_a_flag_binds_its_field_or_the_macro_that_sets_it():
  found = bindings(
    'decode',
    *('--model', 'T', '--assistant-model=D', '-', '--max_new_tokens', '7'),
    *('--temperature', '0.5', '--num-return-sequences=2', '--overwrite'),
    *('--stop', '.', '--stop', '%X', '--gin.DTYPE=int8', '--dtype', 'x'),
    *('--revision', 'v2', '--gamma', 'adaptive'),
  )
  assert found == {
    'CHECKPOINT_PATH': "'T'",
    'target/load.revision': "'v2'",
    'DRAFT_CHECKPOINT_PATH': "'D'",
    'DecodeConfig.input_file': "'-'",
    'Engine.max_decode_len': '7',
    'Engine.gamma': "'adaptive'",
    'RunOptions.temperature': '0.5',
    'RunOptions.num_samples': '2',
    'DecodeConfig.overwrite': 'True',
    'RunOptions.stop_strings': "('.', '%X')",
    'DTYPE': "'int8'",  # what gin says goes first
  }
  found = bindings('calibrate', '--batch-sizes=1,4')
  assert found == {'CalibrateConfig.batches': '(1, 4)'}
  assert bindings('score', 'pairs.tsv', '--target=T') == {
    'CHECKPOINT_PATH': "'T'",
    'MIXTURE_OR_TASK_NAME': "'pairs.tsv'",
  }


@pytest.mark.parametrize(
  'name', [name for name, one in commands.COMMANDS.items() if one.run_file]
)
def test_every_flag_can_be_given(name):
  """No two flags of a command share a name."""
  command = commands.COMMANDS[name]
  gin_flags.parse_flags([], command, name)
  flags = options.flags(command.places)
  names = [spelling for flag in flags for spelling in flag.names]
  assert len(names) == len(set(names)) and all(flag.names for flag in flags)
  argv = []
  for flag in flags:
    value = 'x' if str in flag.kinds else '1'
    argv += [flag.names[0]] if flag.is_switch else [flag.names[0], value]
  parsed = gin_flags.parse_flags(argv, command, name)
  assert len(dict(parsed.bindings)) > 0.9 * len(flags)
  gin_flags.load(parsed)


def test_values_reach_the_run_file_as_they_are():
  flags = ['--target=%X', '--stop', "it's", '-', '--seed', '5']
  gin_flags.load(gin_flags.parse_flags(flags, commands.COMMANDS['decode']))
  assert gin.query_parameter('CHECKPOINT_PATH/gin.macro.value') == '%X'
  bound = gin.query_parameter('infer.RunOptions.stop_strings')
  assert bound == ("it's",)


def test_outputs_go_to_stdout_where_a_file_is_given_plainly():
  def of(*flags, file=''):
    command = commands.COMMANDS['demo']
    if file:
      flags = (*flags, f'--gin_file={file}')
    gin_flags.load(gin_flags.parse_flags(flags, command))
    return gin.query_parameter('STDOUT/gin.macro.value')

  assert of() == of('--gin.DecodeConfig.input_file=a') == 'report'
  assert of('a') == of('--input=a') == of('-', '--mode=plain') == 'outputs'
  assert of('a', '--gin.STDOUT=report') == 'report'


def test_t5x_names_stay():
  names = ('CHECKPOINT_PATH', 'MIXTURE_OR_TASK_NAME', 'INFER_OUTPUT_DIR')
  flags = ['--gin_file=gin/runs/infer.gin', '--gin.TASK_FEATURE_LENGTHS=None']
  flags += [f'--gin.{name}=a' for name in names]
  gin_flags.load(gin_flags.parse_flags(flags))
  with pytest.raises(ValueError, match='--output-dir'):
    gin_flags.load(gin_flags.parse_flags(flags[:-1]))
