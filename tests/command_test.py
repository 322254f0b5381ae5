"""The command `specdec`: its names, its flags, and what they bind."""

import re
import subprocess
import sys

import gin
import pytest

from specdec_jax.cli import (
  commands,
  gin_flags,
  gin_old_macros,
  main,
  plain_flags,
)


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
  for name in (*commands.COMMANDS, 'simulate'):
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


@pytest.mark.parametrize('name', commands.COMMANDS)
def test_help_of_a_command_describes_every_flag(capsys, name):
  status, out, _ = run(capsys, name, '--help')
  assert status == 0
  examples = re.findall(rf'^  (?:echo .* \| )?specdec {name}\b', out, re.M)
  assert len(examples) >= 2
  assert max(map(len, out.splitlines())) <= 80
  parser = gin_flags._parser(None, name, plain_flags.of(name), {})
  for action in parser._actions:
    assert action.help and len(action.help) > 5, action
    for option in action.option_strings:
      assert option in out


def test_help_says_what_is_the_default(capsys):
  out = ' '.join(run(capsys, 'decode', '--help')[1].split())
  assert 'proposes per round (default: 4)' in out
  assert "compared (default: 'speculative')" in out
  assert 'default: None' not in out
  assert 'and its best output --' in out  # without it there is no search
  text = "A = 3  # so\nB = %A\nC = None\nd.A = 5\nE = ('a', 'b')\n"
  assert plain_flags.defaults(text) == {'A': '3', 'E': "('a', 'b')"}


@pytest.mark.parametrize(
  'argv, words',
  [
    (['decod'], ["no command 'decod'", 'Nearest known: decode']),
    (['benchmark'], ['`specdec measure`']),
    (['tpu-check'], ['`specdec compile-check`']),
    (['--target', 'x'], ['A command comes first']),
    (['decode', '--tempertaure', '1'], ['Nearest known: --temperature']),
    (['decode', '--tempertaure=1'], ['Nearest known: --temperature']),
    (['decode', '--gamma', 'x'], ["--gamma is 'x', expected a whole number"]),
    (['calibrate', '--batch-sizes', '1,x'], ['whole numbers with commas']),
    (['decode', '--top-p', 'x'], ["--top-p is 'x', expected a finite"]),
    (['demo', '--temperature', 'nan'], ["--temperature is 'nan', expected"]),
    (['demo', '--alpha=-inf'], ["--alpha is '-inf', expected"]),
    (['distil', '--minutes', '1e999'], ["--minutes is '1e999', expected"]),
    (['decode', '--mode', 'speculativ'], ['Nearest known: speculative']),
    (['decode', 'a.txt', 'b.txt'], ["Unknown argument 'b.txt'"]),
    (['decode', 'a.txt', '--input', 'b.txt'], ['FILE', '--input', 'one of']),
    (['decode'], ['Required and not given: ', '--target', 'FILE']),
    (['decode', '--gin.GAMA=3'], ['Nearest known: GAMMA']),
    (['measure'], ['No --gin_file was given']),
    (['demo', '--num-samples', '2'], ["Unknown argument '--num-samples'"]),
    (
      ['decode', '--gin_file=gin/runs/demo.gin', '--num-samples', '2'],
      ['--num-samples', 'gin/runs/demo.gin', 'NUM_SAMPLES', '--gamma'],
    ),
    (
      ['measure', '--gin_file=gin/runs/demo.gin'],
      ['one of `specdec decode`, not of `specdec measure`'],
    ),
    (
      ['train', '--gin_file=gin/runs/alpha_demo.gin'],
      ['configure none of TrainRun, FitNgramConfig'],
    ),
    (['demo', '--alpha', '0.6'], ['is of a beam search', '--num-beams']),
    (['simulate', '--target=1'], ['--draft is missing']),
  ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, argv, words):
  status, out, err = run(capsys, *argv)
  assert status == 2 and out == ''
  assert err.startswith('error: ') and err.count('\n') == 1, err
  for word in words:
    assert word in err


def bindings(command: str, *argv: str) -> dict[str, str]:
  file = commands.COMMANDS[command].run_file
  return dict(gin_flags.parse_flags(argv, None, command, file).bindings)


def test_a_plain_flag_is_a_macro():
  found = bindings(
    'decode',
    *('--model', 'T', '--assistant-model=D', '-', '--max_new_tokens', '7'),
    *('--temperature', '0.5', '--num-return-sequences=2', '--overwrite'),
    *('--stop', '.', '--stop', '%X', '--gin.GAMMA=3', '--gamma', '2'),
  )
  assert found == {
    'CHECKPOINT_PATH': "'T'",
    'DRAFT_CHECKPOINT_PATH': "'D'",
    'INPUT_FILE': "'-'",
    'MAX_DECODE_LEN': '7',
    'TEMPERATURE': '0.5',
    'NUM_SAMPLES': '2',
    'OVERWRITE': 'True',
    'STOP_STRINGS': "('.', '%X')",
    'GAMMA': '3',  # what gin says goes first
  }
  assert bindings('calibrate', '--batch-sizes=1,4') == {'BATCHES': '(1, 4)'}
  assert bindings('score', 'pairs.tsv', '--target=T') == {
    'CHECKPOINT_PATH': "'T'",
    'INPUT_FILE': "'pairs.tsv'",
  }


@pytest.mark.parametrize('name', commands.COMMANDS)
def test_a_run_file_has_the_macros_of_its_command(name):
  """And no two flags of a command have a name in common."""
  command, flags = commands.COMMANDS[name], plain_flags.of(name)
  names = [one for flag in flags for one in flag.names]
  assert len(names) == len(set(names))
  if command.run_file is None:
    assert not flags
    return
  given = [f'--gin.{flag.macro}=x' for flag in flags if flag.kind is str]
  given += [f'--gin.{flag.macro}=1' for flag in flags if flag.kind is not str]
  gin_flags.load(gin_flags.parse_flags(given, None, name, command.run_file))


def test_values_reach_the_run_file_as_they_are():
  flags = ['--target=%X', '--stop', "it's", '-', '--seed', '5']
  file = commands.COMMANDS['decode'].run_file
  gin_flags.load(gin_flags.parse_flags(flags, None, 'decode', file))
  assert gin.query_parameter('CHECKPOINT_PATH/gin.macro.value') == '%X'
  assert gin.query_parameter('STOP_STRINGS/gin.macro.value') == ("it's",)


@pytest.mark.parametrize(
  'file, old, new',
  [
    ('gpt2', 'TARGET_PATH=a', 'CHECKPOINT_PATH'),
    ('gpt2', 'DRAFT_PATH=a', 'DRAFT_CHECKPOINT_PATH'),
    ('demo', 'MODE=plain', 'DECODING'),
    ('convert_checkpoint', 'OUTPUT=a', 'OUTPUT_DIR'),
    ('distill', 'TARGET_CHECKPOINT_PATH=a', 'CHECKPOINT_PATH'),
    ('eval', 'INFER_OUTPUT_DIR=a', 'OUTPUT_DIR'),
  ],
)
@pytest.mark.parametrize('own', [False, True])
def test_an_old_macro_binds_the_new_one(folder, capfd, file, old, new, own):
  """On the command line, and in a gin file of one's own."""
  gin_old_macros._tell.cache_clear()
  name, _, value = old.partition('=')
  flags = [f'--gin_file=gin/runs/{file}.gin', f'--gin.{old}']
  if own:
    (folder / 'own.gin').write_text(
      f"include 'gin/runs/{file}.gin'\n{name} = '{value}'\n"
    )
    flags = ['--gin_file=own.gin']
  parsed = gin_flags.parse_flags(flags)
  try:
    gin_flags.load(parsed)
  except ValueError as error:
    assert str(error).startswith('Required and not given'), error
  assert gin.query_parameter(f'{new}/gin.macro.value') == value
  assert capfd.readouterr().err == f'{name} is now {new}\n'


def test_outputs_go_to_stdout_where_a_file_is_given_plainly():
  def of(*flags, file='gin/runs/demo.gin'):
    gin_flags.load(gin_flags.parse_flags(flags, None, 'demo', file))
    return gin.query_parameter('STDOUT/gin.macro.value')

  assert of() == of('--gin.INPUT_FILE=a') == 'report'
  assert of('a') == of('--input=a') == of('-', '--mode=plain') == 'outputs'
  assert of('a', '--gin.STDOUT=report') == 'report'
  # A run file may have no such macro.
  flags = ['a', '--gin_file=gin/runs/alpha_demo.gin']
  gin_flags.load(gin_flags.parse_flags(flags, None, 'demo'))


def test_t5x_names_stay():
  """Where T5X has a name of its own, both are there, and need one value."""
  flags = ['--gin_file=gin/runs/infer.gin', '--gin.CHECKPOINT_PATH=a']
  flags += ['--gin.MIXTURE_OR_TASK_NAME=a', '--gin.TASK_FEATURE_LENGTHS=None']
  for name in ('INFER_OUTPUT_DIR', 'OUTPUT_DIR'):
    gin_flags.load(gin_flags.parse_flags([*flags, f'--gin.{name}=out']))
  with pytest.raises(ValueError, match='OUTPUT_DIR'):
    gin_flags.load(gin_flags.parse_flags(flags))
