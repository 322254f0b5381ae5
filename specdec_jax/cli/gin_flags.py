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

A command is a function whose docstring is its --help, see `commands`:

  def decode() -> None:
    config = gin_flags.build(infer.DecodeConfig)
    ...

It may have flags without gin as well, see `options`.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import pathlib
import re
import sys
import tokenize
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import gin

from specdec_jax.checks.fields import nearest, unexpected
from specdec_jax.cli import Command, gin_checks, options
from specdec_jax.files import shipped

if TYPE_CHECKING:
  from specdec_jax.infer import processes

ROOT = shipped.ROOT  # the folder that holds gin/

_NAME = re.compile(r'([A-Za-z_]\w*/)*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*')
# What gin raises for a file or binding that it cannot take.
_GIN_ERRORS = (
  AttributeError,
  ImportError,
  MemoryError,  # Python's own, of brackets without end
  NameError,
  OSError,
  RecursionError,
  SyntaxError,
  TypeError,
  ValueError,
  tokenize.TokenError,
)
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
# Of the flags of all commands: name, what --help calls its value, its help.
_COMMON = {
  _GIN: (
    ('--gin_file', 'FILE', 'a run file instead of the usual one; repeatable'),
    ('--gin_bindings', 'NAME=VALUE', 'a binding; also --gin.NAME=VALUE'),
    ('--gin_search_paths', 'A,B', 'folders that are searched for gin files'),
  ),
  _MORE: (
    ('--traceback', '', 'show where an error came from'),
    ('--multiprocess', '', 'one of several processes, of a TPU pod or Slurm'),
    ('--coordinator_address', 'HOST:PORT', 'the address of the first process'),
    ('--process_count', 'N', 'how many processes there are'),
    ('--process_index', 'I', 'which process this is, from 0'),
  ),
}
_SPECIAL: dict[str, dict[str, Any]] = {
  '--gin_file': {'action': 'append', 'default': []},
  '--gin_bindings': {'action': 'append', 'default': []},
  '--gin_search_paths': {'default': ''},
  '--process_count': {'type': int},
  '--process_index': {'type': int},
}

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Flags:
  """The parsed command line.

  Attributes:
    bindings: (name, gin value) pairs, in order; text is already quoted.
    implied: (macro, gin value) pairs that hold unless `bindings` or the user's
      own gin files say otherwise.
    spelled: name of a binding -> the flag that makes it.
  """

  bindings: tuple[tuple[str, str], ...]
  implied: tuple[tuple[str, str], ...] = ()
  spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)


def main(
  command: Command | Callable[[], int | None],
  argv: Sequence[str] | None = None,
  name: str = '',
) -> int:
  """Loads the configuration, runs a command and returns the exit status.

  Bad input (ValueError, OSError) ends as one line on stderr and status 2, too
  little memory, or a loss that diverges, as one line and status 1, an interrupt
  as status 130; `--traceback` lets the exception through instead.
  SIGTERM ends the process with one line and status 143.

  Args:
    command: to run; a function is one without flags of its own.
    argv: arguments after the program's name; those of the process by default.
    name: of the command, for --help.
  """
  warnings.formatwarning = _warning
  argv = sys.argv[1:] if argv is None else list(argv)
  if not isinstance(command, Command):
    command = Command(command)

  def run() -> int:
    load(parse_flags(argv, command, name))
    return command.function() or 0

  def run_by_processes() -> int:
    meeting = meeting_of(argv)
    from specdec_jax.infer import processes

    if meeting is None:
      with processes.ending_on_sigterm():
        return run()

    def join_and_run() -> int:
      processes.join(meeting)
      return run()

    return processes.run(lambda: _complaining(join_and_run, raises))

  raises = '--traceback' in argv
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


def parse_flags(
  argv: Sequence[str], command: Command | None = None, name: str = ''
) -> Flags:
  """Loads the gin files of a command line, and reads its flags.

  Args:
    argv: arguments after the program's name.
    command: that they are of; None has no flags of its own.
    name: of the command, for --help.

  Raises:
    ValueError: no gin file was given, or one is missing or broken; an unknown
      flag, a wrong value, or a binding without `=`.
  """
  argv = [_rewrite(arg) for arg in argv]
  common, rest = _common_parser().parse_known_args(argv)
  run_file = command.run_file if command else None
  gin_files = common.gin_file or ([run_file] if run_file else [])
  if not gin_files and not {'-h', '--help'} & set(argv):
    if rest:
      raise ValueError(_unknown(rest[0], _common_parser()))
    raise ValueError(
      'No --gin_file was given. Expected the path of a run, such as'
      ' --gin_file=gin/runs/demo.gin.'
    )
  _load_files(gin_files, common.gin_search_paths.split(','))
  known = options.flags(command.places if command else ())
  parser = _common_parser(
    usage=' '.join(
      [
        'specdec',
        name or 'COMMAND',
        *(f'[{flag.place}]' for flag in known if flag.place),
        '[FLAGS]',
      ]
    ),
    description=inspect.getdoc(command.function) if command else None,
    flags=known,
  )
  args, unknown = parser.parse_known_args(
    [options.dashed(arg, known) for arg in argv]
  )
  if unknown:
    raise ValueError(_unknown(unknown[0], parser, gin_files))
  given = options.given(args, known)
  # Of two flags with one binding the first is the main one.
  main_names = {flag.binding: flag.names[0] for flag in reversed(known)}
  places = {flag.binding: flag.place for flag in known if flag.place}
  implied = command.implied if command else {}
  return Flags(
    # gin keeps the last value of a binding: explicit ones go before flags.
    bindings=(
      *((binding, repr(value)) for binding, (_, value) in given.items()),
      *map(_parse_binding, args.gin_bindings),
    ),
    implied=tuple(
      (macro, repr(value))
      for binding in given
      for macro, value in implied.get(main_names[binding], {}).items()
    ),
    spelled=main_names | places,
  )


def _unknown(
  arg: str, parser: argparse.ArgumentParser, gin_files: Sequence[str] = ()
) -> str:
  """Says which flags there are beside one that is not known."""
  known = [*parser._option_string_actions, '--gin.NAME=VALUE']  # noqa: SLF001
  run = f' of a run of {", ".join(gin_files)}' if gin_files else ''
  name = arg.split('=')[0]
  return f'Unknown argument {name!r}{run}.{nearest(name, known)}'


def _common_parser(
  usage: str | None = None,
  description: str | None = None,
  flags: Sequence[options.Flag] = (),
) -> '_Parser':
  """Returns a parser of the flags of all commands, and of a command's own."""
  parser = _Parser(
    usage=usage,
    description=description,
    formatter_class=_Help,
    add_help=False,
    allow_abbrev=False,
  )
  if flags:
    options.add(parser, flags)
  groups = {name: parser.add_argument_group(name) for name in (_GIN, _MORE)}
  if usage:
    groups[_MORE].add_argument(
      '-h', '--help', action='help', help='show this and do nothing'
    )
  for title, arguments in _COMMON.items():
    for name, value, text in arguments:
      settings: dict[str, Any] = {'metavar': value, **_SPECIAL.get(name, {})}
      if not value:
        settings = {'action': 'store_true'}
      groups[title].add_argument(name, help=text, **settings)
  return parser


def meeting_of(argv: Sequence[str]) -> 'processes.Meeting | None':
  """Returns how several processes meet; None is one process.

  Raises:
    ValueError: the flags about processes are wrong or do not go together.
  """
  args, _ = _common_parser().parse_known_args(argv)
  found = (args.coordinator_address, args.process_count, args.process_index)
  if args.multiprocess or any(value is not None for value in found):
    from specdec_jax.infer import processes

    return processes.Meeting(*found)
  return None


def _load_files(gin_files: Sequence[str], search_paths: Sequence[str]) -> None:
  """Loads gin files in place of what was loaded before.

  They are looked up in the working folder, in the search paths and in the
  repository, in this order.

  Raises:
    ValueError: a file is missing or not valid.
  """
  gin.clear_config()
  logging.getLogger().addFilter(_is_no_place_of_many)
  folders = [*filter(None, search_paths), str(ROOT)]
  for folder in folders:
    gin.add_config_file_search_path(folder)
  for gin_file in gin_files:
    _find(gin_file, folders)
    with _explained(gin_file):
      gin.parse_config_file(gin_file)


@contextlib.contextmanager
def _explained(where: str, hint: str = '') -> Iterator[None]:
  """Inside, what gin raises is a ValueError that says where."""
  try:
    yield
  except _GIN_ERRORS as error:
    raise ValueError(f'{where}: {gin_checks.explain(error)}{hint}') from error


def load(flags: Flags) -> None:
  """Completes gin's configuration by the flags of a command line.

  Raises:
    ValueError: a name that nothing knows, with the nearest known ones; a
      required macro without a value.
  """
  gin_checks.check_scopes()
  known = gin_checks.Known(flags.spelled)
  for name, value in flags.implied:
    if name in known.macros:
      gin.parse_config(f'{name} = {value}')
  for name, value in flags.bindings:
    known.check(name)
    shown = value if len(value) <= 80 else f'{value[:80]}...'
    with _explained(f'--gin.{name}={shown}', known.hint(name)):
      gin_checks.check_single(name, value)
      gin.parse_config(f'{name} = {value}')
    gin_checks.check_effect(name)
  gin_checks.check_complete(ROOT / 'gin', flags.spelled)
  with _no_circle():
    gin.finalize()


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
    found = ', '.join(gin_checks.configured()) or 'nothing'
    name = f'{cls.__module__}.{cls.__qualname__}'
    raise ValueError(
      f'The gin files configure {found}, not {name}, which this command needs.'
    ) from error
  try:
    with _no_circle():
      return configured()
  except TypeError as error:
    if not gin_checks.is_unbound(error):
      raise
    raise ValueError(gin_checks.one_line(error)) from error


@contextlib.contextmanager
def _no_circle() -> Iterator[None]:
  """Inside, values that need themselves are a ValueError."""
  try:
    yield
  except RecursionError as error:
    raise ValueError(gin_checks.explain(error)) from error


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


class _Help(argparse.RawDescriptionHelpFormatter):
  """Names of one flag with commas between them, its value behind the last."""

  def _format_action_invocation(self, action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
      return super()._format_action_invocation(action)
    value = self._format_args(action, str(action.metavar))
    return f'{", ".join(action.option_strings)} {value}'


class _Parser(argparse.ArgumentParser):
  """An argument parser whose errors are ValueErrors like all others."""

  def error(self, message: str) -> NoReturn:
    raise ValueError(message)


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


def _find(gin_file: str, folders: Sequence[str]) -> None:
  """Raises ValueError if a gin file is in none of the folders."""
  places = ['.', *folders]
  if any(pathlib.Path(place, gin_file).is_file() for place in places):
    return
  shipped = [
    path.relative_to(ROOT).as_posix() for path in ROOT.glob('gin/**/*.gin')
  ]
  near = nearest(gin_file, shipped)
  raise unexpected('--gin_file', f'a file in {places}', gin_file, near.strip())
