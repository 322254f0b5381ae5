"""Command line shared by all commands: gin files and bindings, as in T5X.

  --gin_file=FILE           a gin file; repeatable, later files override
  --gin.NAME=VALUE          a macro (INPUT_FILE) or a binding (scope/fn.param)
  --gin_bindings=NAME=VALUE the same, in T5X's long form
  --gin_search_paths=A,B    folders searched for gin files and their includes
  --traceback               show where an error came from
  --multiprocess            one of several processes of a TPU pod, or of what
                            Slurm or Open MPI started
  --coordinator_address=HOST:PORT --process_count=N --process_index=I
                            one of several processes anywhere else

A VALUE that is no gin value is taken as text, so `--gin.DTYPE=int8` and
`--gin.DTYPE='"int8"'` mean the same. gin itself accepts a mistyped macro
or scope in silence; here a name that the gin files do not know is an error.

A command is a function whose docstring is its --help, see `commands`. It has
flags for the fields of what its gin files configure, see `options`.
"""

import argparse
import ast
import contextlib
import functools
import inspect
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import gin

from specdec_jax.checks.fields import nearest, unexpected
from specdec_jax.cli import Command, gin_checks, options
from specdec_jax.files import shipped

if TYPE_CHECKING:
  from specdec_jax.infer import processes

ROOT = shipped.ROOT  # the folder that holds gin/

_NAME = re.compile(r'([A-Za-z_]\w*/)*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*')
_NO_BACKEND = 'Unable to initialize backend'  # JAX, of JAX_PLATFORMS
_NO_PLUG_IN = (
  'its plug-in for JAX is not installed. Install it, such as'
  " pip install 'specdec_jax[cuda]', or set JAX_PLATFORMS=cpu."
)
# How errors begin that the machine is to blame for, not the program.
_OF_MACHINE = (
  'RESOURCE_EXHAUSTED',  # JAX, where memory is too small
  _NO_BACKEND,
  'The scheduler failed',  # the server, which has logged why
)

_GIN, _MORE = 'gin, as with T5X', 'more'
# The flags of all commands: group, name, argparse's action, what --help calls
# the value, help.
_COMMON = (
  (_GIN, '--gin_file', 'append', 'FILE', 'a run file instead of the usual one'),
  (_GIN, '--gin_bindings', 'append', 'NAME=VALUE', 'also --gin.NAME=VALUE'),
  (_GIN, '--gin_search_paths', 'store', 'A,B', 'folders with gin files'),
  (_MORE, '--traceback', 'store_true', '', 'show where an error came from'),
  (_MORE, '--multiprocess', 'store_true', '', 'one process of a pod or Slurm'),
  (_MORE, '--coordinator_address', 'store', 'HOST:PORT', 'of process 0'),
  (_MORE, '--process_count', 'store', 'N', 'how many processes there are'),
  (_MORE, '--process_index', 'store', 'N', 'which process this is, from 0'),
)

_T = TypeVar('_T')


def main(
  command: Command, argv: Sequence[str] | None = None, name: str = ''
) -> int:
  """Loads the configuration, runs a command and returns the exit status.

  Bad input (ValueError, OSError) ends as one line on stderr and status 2, too
  little memory, or a loss that diverges, as one line and status 1, an interrupt
  as status 130; `--traceback` lets the exception through instead.
  SIGTERM ends the process, as it does any.

  Args:
    command: what runs.
    argv: arguments after the program's name; those of the process by default.
    name: of the command, for --help.
  """
  warnings.formatwarning = _warning
  argv = sys.argv[1:] if argv is None else list(argv)
  raises = '--traceback' in argv

  def run() -> int:
    load(argv, command, name)
    return command.function() or 0

  def run_by_processes() -> int:
    meeting = meeting_of(argv)
    if meeting is None:
      return run()
    from specdec_jax.infer import processes

    def join_and_run() -> int:
      processes.join(meeting)
      return run()

    return processes.run(lambda: _complaining(join_and_run, raises))

  return _complaining(run_by_processes, raises)


def _complaining(function: Callable[[], int], raises: bool) -> int:
  """Calls a function; what is no bug ends as one line."""
  try:
    return function()
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  except Exception as error:
    if isinstance(error, AssertionError) and _lacks_devices(error):
      name = os.environ.get('JAX_PLATFORMS')
      error = RuntimeError(f'{_NO_BACKEND} {name!r}: {_NO_PLUG_IN}')
    status = _status(error)
    if raises or not status:
      raise
    print(f'error: {gin_checks.one_line(error)}', file=sys.stderr)
    return status


def _warning(message: Any, *args: Any, **kwargs: Any) -> str:
  """A warning as a command shows it: a line, without a place in the code."""
  del args, kwargs
  return f'warning: {" ".join(str(message).split())}\n'


def _lacks_devices(error: AssertionError) -> bool:
  """Whether JAX asserted that it has a device, as it does for a missing one.

  It does so where JAX_PLATFORMS names what JAX knows, and no plug-in for it is
  installed; other names are RuntimeErrors with words.
  """
  *_, last = traceback.walk_tb(error.__traceback__)
  return last[0].f_code.co_filename.endswith('xla_bridge.py')


def _status(error: Exception) -> int:
  """The exit status for an error; 0 if it may be a bug."""
  if isinstance(error, ValueError | OSError) or gin_checks.is_unbound(error):
    return 2
  if isinstance(error, FloatingPointError | MemoryError):
    return 1
  of_machine = str(error).startswith(_OF_MACHINE)
  return 1 if isinstance(error, RuntimeError) and of_machine else 0


def load(
  argv: Sequence[str], command: Command | None = None, name: str = ''
) -> None:
  """Loads the gin files of a command line, and binds what its flags say.

  Args:
    argv: arguments after the program's name.
    command: that they are of; None has no flags of its own.
    name: of the command, for --help.

  Raises:
    ValueError: no gin file was given, or one is missing or broken; an unknown
      flag or name, with the nearest known ones; a wrong value; a required macro
      without a value.
  """
  argv = [_rewrite(arg) for arg in argv]
  run_file = command.run_file if command else None
  files = _load_files(argv, [run_file] if run_file else [])
  flags = options.flags(command.places if command else ())
  args = _parsed(argv, command, name, flags, files)
  # Of two flags with one binding the first is the main one.
  names = {flag.binding: flag.names[0] for flag in reversed(flags)}
  gin_checks.check_scopes()
  macros = gin_checks.macros()
  values = options.given(args, flags)
  implied = command.implied if command else {}
  for binding in values:
    for macro, value in implied.get(names[binding], {}).items():
      if macro in macros:
        gin.parse_config(f'{macro} = {value!r}')
  # gin keeps the last value of a name: explicit bindings go before flags.
  for binding, value in values.items():
    _bind(binding, repr(value))
  for text in args.gin_bindings or ():
    _bind(*_parse_binding(text))
  gin_checks.check_complete(ROOT / 'gin', names)
  with _explained('gin'):
    gin.finalize()


def _bind(name: str, value: str) -> None:
  """Binds a name to a value, which is gin's text for it."""
  gin_checks.check_name(name)
  shown = value if len(value) <= 80 else f'{value[:80]}...'
  with _explained(f'--gin.{name}={shown}'):
    gin_checks.check_single(name, value)
    gin.parse_config(f'{name} = {value}')
  gin_checks.check_effect(name)


def _parsed(
  argv: Sequence[str],
  command: Command | None,
  name: str,
  flags: Sequence[options.Flag],
  files: Sequence[str],
) -> argparse.Namespace:
  """The arguments by a command's flags and those of all commands."""
  places = ' '.join(f'[{flag.place}]' for flag in flags if flag.place)
  parser = _Parser(
    usage=' '.join(filter(None, ['specdec', name, places, '[FLAGS]'])),
    description=inspect.getdoc(command.function) if command else None,
  )
  options.add(parser, flags)
  parser.add_common(with_help=True)
  known = parser._option_string_actions  # noqa: SLF001
  args, unknown = parser.parse_known_args([_dashed(arg, known) for arg in argv])
  if unknown:
    name = unknown[0].split('=')[0]
    near = nearest(name, [*known, '--gin.NAME=VALUE'])
    raise ValueError(
      f'Unknown argument {name!r} of a run of {", ".join(files)}.{near}'
    )
  return args


def _dashed(arg: str, known: Collection[str]) -> str:
  """--max_length as --max-length, which is the flag."""
  name, equals, value = arg.partition('=')
  dashed = name.replace('_', '-')
  return f'{dashed}{equals}{value}' if dashed in known else arg


def meeting_of(argv: Sequence[str]) -> 'processes.Meeting | None':
  """Returns how several processes meet; None is one process.

  Raises:
    ValueError: the flags about processes are wrong or do not go together.
  """
  args = _common(argv)
  values = (args.coordinator_address, args.process_count, args.process_index)
  if args.multiprocess or any(value is not None for value in values):
    from specdec_jax.infer import processes

    return processes.Meeting(*values)
  return None


def _common(argv: Sequence[str]) -> argparse.Namespace:
  """The flags of all commands, of those that were given."""
  parser = _Parser()
  parser.add_common()
  return parser.parse_known_args(argv)[0]


def _load_files(argv: Sequence[str], usual: Sequence[str]) -> Sequence[str]:
  """Loads gin files in place of what was loaded before; returns their names.

  They are looked up in the working folder, in the search paths and in the
  repository, in this order.

  Args:
    argv: the command line.
    usual: files that are taken where it names none.

  Raises:
    ValueError: there is none, or a file is missing or not valid.
  """
  common = _common(argv)
  files = common.gin_file or usual
  if not files and not {'-h', '--help'} & set(argv):
    raise ValueError(
      'No --gin_file was given. Expected the path of a run, such as'
      ' --gin_file=gin/runs/demo.gin.'
    )
  gin.clear_config()
  logging.getLogger().addFilter(_is_no_place_of_many)
  paths = (common.gin_search_paths or '').split(',')
  folders = [*filter(None, paths), str(ROOT)]
  for folder in folders:
    gin.add_config_file_search_path(folder)
  for gin_file in files:
    with _explained(gin_file):
      gin.parse_config_file(gin_file)
  return files


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
  """Inside, what gin raises is a ValueError that says where."""
  try:
    yield
  except Exception as error:
    raise ValueError(f'{where}: {gin_checks.explain(error)}') from error


def _is_no_place_of_many(record: logging.LogRecord) -> bool:
  """False for an error that gin logs of each place but the right one."""
  return record.msg != 'Path not found: %s'


def build(cls: type[_T]) -> _T:
  """Returns the instance of `cls` that the loaded gin files describe.

  Raises:
    ValueError: no gin file configures `cls`, a field has no value, or values
      need each other without end.
  """
  try:
    configured = gin.get_configurable(cls)
  except ValueError as error:
    names = ', '.join(gin_checks.configured()) or 'nothing'
    name = f'{cls.__module__}.{cls.__qualname__}'
    raise ValueError(
      f'The gin files configure {names}, not {name}, which this command needs.'
    ) from error
  try:
    return configured()
  except (TypeError, RecursionError) as error:
    if isinstance(error, RecursionError):
      raise ValueError(gin_checks.explain(error)) from error
    if not gin_checks.is_unbound(error):
      raise
    raise ValueError(gin_checks.one_line(error)) from error


def builder(cls: type[_T]) -> Callable[[], _T]:
  """`build(cls)` for another process, to which the loaded values are sent."""
  return functools.partial(_built, cls, gin.config_str())


def _built(cls: type[_T], config: str) -> _T:
  gin.clear_config()
  gin.parse_config(config)
  return build(cls)


def operative_config() -> str:
  """Returns every value that was in force, defaults included, as gin text."""
  return gin.operative_config_str()


class _Parser(argparse.ArgumentParser):
  """A parser whose errors are ValueErrors like all others."""

  def __init__(self, **options: Any):
    shape = argparse.RawDescriptionHelpFormatter
    super().__init__(
      formatter_class=shape, add_help=False, allow_abbrev=False, **options
    )

  def error(self, message: str) -> NoReturn:
    raise ValueError(message)

  def add_common(self, with_help: bool = False) -> None:
    """Adds the flags of all commands."""
    groups = {name: self.add_argument_group(name) for name in (_GIN, _MORE)}
    if with_help:
      groups[_MORE].add_argument(
        '-h', '--help', action='help', help='show this and do nothing'
      )
    for group, name, action, value, text in _COMMON:
      settings: dict[str, Any] = {'action': action, 'help': text}
      if value:
        kind = int if value == 'N' else str
        settings |= {'metavar': value, 'type': kind}
      groups[group].add_argument(name, **settings)


def _rewrite(arg: str) -> str:
  """Turns --gin.NAME=VALUE into --gin_bindings=NAME=VALUE."""
  if not arg.startswith('--gin.'):
    return arg
  if '=' not in arg:
    raise ValueError(f'{arg}: expected --gin.NAME=VALUE, but there is no =.')
  return f'--gin_bindings={arg.removeprefix("--gin.")}'


def _parse_binding(text: str) -> tuple[str, str]:
  name, equals, value = (part.strip() for part in text.partition('='))
  if not equals or not _NAME.fullmatch(name):
    expected = 'NAME=VALUE, a macro or scope/function.parameter and its value'
    raise unexpected('--gin', expected, text)
  return name, _gin_value(name, value)


def _gin_value(name: str, value: str) -> str:
  """Returns `value` as gin text: as it is, or quoted if it is no literal."""
  if value[:1] in tuple('\'"[({@%'):
    return value
  if value.lower() in ('true', 'false', 'none'):
    # As text, `false` would be true; gin's own spelling is Python's.
    if value not in ('True', 'False', 'None'):
      expected = f'{value.capitalize()}, or text in quotes'
      raise unexpected(f'--gin.{name}', expected, value)
    return value
  try:
    # A `#` would start a comment inside a literal and cut the value short.
    is_literal = '#' not in value and ast.literal_eval(value) is not None
  except (SyntaxError, ValueError):
    is_literal = False
  return value if is_literal else repr(value)
