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

A VALUE that is no gin value is taken as text, so `--gin.INPUT_FILE=a.txt` and
`--gin.INPUT_FILE='"a.txt"'` mean the same. gin itself accepts a mistyped macro
or scope in silence; here a name that the gin files do not know is an error.

A command is a function whose docstring is its --help, see `commands`:

  def decode() -> None:
    config = gin_flags.build(infer.DecodeConfig)
    ...

It may have flags without gin as well, see `plain_flags`.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import logging
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import gin

from specdec_jax.checks.names import nearest
from specdec_jax.cli import (
  gin_checks,
  gin_old_macros,
  plain_flags,
)
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
# How errors begin that the machine is to blame for, not the program.
_OF_MACHINE = (
  'RESOURCE_EXHAUSTED',  # JAX, where memory is too small
  'Unable to initialize backend',  # JAX, where JAX_PLATFORMS names another
  'The scheduler failed',  # the server, which has logged why
)

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Flags:
  """The parsed command line.

  Attributes:
    gin_files: paths as they were given, in order.
    bindings: (name, gin value) pairs, in order; text is already quoted.
    search_paths: folders given by --gin_search_paths.
    traceback: whether errors keep their traceback.
    meeting: of several processes; None is one process.
    written: macro -> the plain flag that bound it.
    command: whose flags these are; '' has no plain ones.
    also: (macro, gin value) pairs, for where the gin files have the macro.
  """

  gin_files: tuple[str, ...]
  bindings: tuple[tuple[str, str], ...]
  search_paths: tuple[str, ...]
  traceback: bool
  meeting: 'processes.Meeting | None' = None
  written: Mapping[str, str] = dataclasses.field(default_factory=dict)
  command: str = ''
  also: tuple[tuple[str, str], ...] = ()


def main(
  function: Callable[[], int | None],
  argv: Sequence[str] | None = None,
  command: str = '',
  run_file: str | None = None,
) -> int:
  """Loads the configuration, calls `function` and returns the exit status.

  Bad input (ValueError, OSError) ends as one line on stderr and status 2, too
  little memory, or a loss that diverges, as one line and status 1, an interrupt
  as status 130; `--traceback` lets the exception through instead.
  SIGTERM ends the process with one line and status 143.

  Args:
    function: takes nothing and returns a status, None for 0; it fetches what
      it needs by `build`.
    argv: arguments after the program's name; those of the process by default.
    command: whose plain flags it has; '' has none.
    run_file: where no --gin_file is given; None requires one.
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  description = inspect.getdoc(function)

  def parsed() -> Flags:
    return parse_flags(argv, description, command, run_file)

  def configured() -> int:
    flags = parsed()
    if flags.meeting is not None:
      processes.join(flags.meeting)
    load(flags)
    return function() or 0

  def complaining() -> int:
    return _complaining(configured, '--traceback' in argv)

  try:
    meeting = parsed().meeting
  except ValueError:
    return complaining()
  from specdec_jax.infer import processes

  if meeting:
    return processes.run(complaining)
  with processes.ending_on_sigterm():
    return complaining()


def _complaining(function: Callable[[], int], traceback: bool) -> int:
  """Calls a function; what is no bug ends as one line."""
  try:
    return function()
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  except Exception as error:
    status = _status(error)
    if traceback or not status:
      raise
    print(f'error: {gin_checks.one_line(error)}', file=sys.stderr)
    return status


def _status(error: Exception) -> int:
  """The exit status for an error; 0 if it may be a bug."""
  if isinstance(error, ValueError | OSError) or gin_checks.is_unbound(error):
    return 2
  if isinstance(error, FloatingPointError | MemoryError):
    return 1
  of_machine = str(error).startswith(_OF_MACHINE)
  return 1 if isinstance(error, RuntimeError) and of_machine else 0


def parse_flags(
  argv: Sequence[str],
  description: str | None = None,
  command: str = '',
  run_file: str | None = None,
) -> Flags:
  """Reads the command line; touches no gin state, and no file but for --help.

  Args:
    argv: arguments after the program's name.
    description: what --help says first.
    command: whose plain flags it may have; '' has none.
    run_file: where no --gin_file is given; None requires one.

  Raises:
    ValueError: an unknown flag, a wrong value, a binding without `=`, or no
      --gin_file.
  """
  plain = plain_flags.of(command)
  defaults: Mapping[str, str] = {}
  if run_file and {'-h', '--help'} & set(argv):
    defaults = plain_flags.defaults((ROOT / run_file).read_text('utf-8'))
  parser = _parser(description, command, plain, defaults)
  args, unknown = parser.parse_known_args(
    [_rewrite(plain_flags.dashed(arg, plain)) for arg in argv]
  )
  if unknown:
    name = unknown[0].split('=')[0]
    known = [*parser._option_string_actions, '--gin.NAME=VALUE']  # noqa: SLF001
    raise ValueError(f'Unknown argument {name!r}.{nearest(name, known)}')
  gin_files = args.gin_file or ([run_file] if run_file else [])
  if not gin_files:
    raise ValueError(
      'No --gin_file was given. Expected the path of a run, such as'
      ' --gin_file=gin/runs/demo.gin.'
    )
  given = plain_flags.bindings(args, plain)
  # What gin says goes last, and so first.
  bindings = [(macro, repr(value)) for macro, (_, value) in given.items()]
  return Flags(
    gin_files=tuple(gin_files),
    bindings=(*bindings, *map(_parse_binding, args.gin_bindings)),
    search_paths=tuple(filter(None, args.gin_search_paths.split(','))),
    traceback=args.traceback,
    meeting=_meeting(args),
    written={macro: name for macro, (name, _) in given.items()},
    command=command,
    also=tuple((m, repr(v)) for m, v in plain_flags.also(args, plain)),
  )


def _parser(
  description: str | None,
  command: str,
  plain: Sequence[plain_flags.Flag],
  defaults: Mapping[str, str],
) -> '_Parser':
  places = [f'[{name}]' for name in plain_flags.places(plain)]
  parser = _Parser(
    usage=' '.join(['specdec', command or 'COMMAND', *places, '[FLAGS]']),
    description=description,
    formatter_class=_Help,
    add_help=False,
    allow_abbrev=False,
  )
  plain_flags.add(parser, plain, defaults)
  gin_group = parser.add_argument_group('gin, as with T5X')
  gin_group.add_argument(
    '--gin_file',
    action='append',
    default=[],
    metavar='FILE',
    help='a run file; repeatable, later ones override'
    + (', in the place of the usual one' if plain else ''),
  )
  gin_group.add_argument(
    '--gin_bindings',
    action='append',
    default=[],
    metavar='NAME=VALUE',
    help='a macro of the run file, or function.parameter; also written'
    ' --gin.NAME=VALUE',
  )
  gin_group.add_argument(
    '--gin_search_paths',
    default='',
    metavar='A,B',
    help='folders that are searched for gin files',
  )
  more = parser.add_argument_group('more')
  more.add_argument(
    '-h', '--help', action='help', help='show this and do nothing'
  )
  more.add_argument(
    '--traceback', action='store_true', help='show where an error came from'
  )
  more.add_argument(
    '--multiprocess',
    action='store_true',
    help='one of several processes of a TPU pod, of Slurm or of Open MPI',
  )
  more.add_argument(
    '--coordinator_address',
    metavar='HOST:PORT',
    help='one of several processes anywhere else: the address of the first',
  )
  more.add_argument(
    '--process_count', type=int, metavar='N', help='how many there are'
  )
  more.add_argument(
    '--process_index', type=int, metavar='I', help='which one this is, from 0'
  )
  return parser


def _meeting(args: argparse.Namespace) -> 'processes.Meeting | None':
  found = (args.coordinator_address, args.process_count, args.process_index)
  if args.multiprocess or any(value is not None for value in found):
    from specdec_jax.infer import processes

    return processes.Meeting(*found)
  return None


def load(flags: Flags) -> None:
  """Makes gin's configuration from `flags`, replacing any earlier one.

  Gin files are looked up in the working folder, in --gin_search_paths and in
  the repository, in this order.

  Raises:
    ValueError: a missing gin file; a name that nothing knows, with the nearest
      known ones; a required macro without a value.
  """
  gin.clear_config()
  logging.getLogger().addFilter(_is_no_place_of_many)
  for folder in (*flags.search_paths, str(ROOT)):
    gin.add_config_file_search_path(folder)
  for gin_file in flags.gin_files:
    _find(gin_file, flags.search_paths)
    places = ['.', *flags.search_paths, str(ROOT)]
    gin_checks.check_includes(gin_file, places)
    try:
      gin.parse_config_file(gin_file)
    except _GIN_ERRORS as error:
      raise ValueError(f'{gin_file}: {gin_checks.explain(error)}') from error
  gin_checks.check_scopes()
  used = gin_checks.used_macros()
  for name, value in gin_checks.given_macros().items():
    if (new := gin_old_macros.new_name(name, used)) != name:
      gin.bind_parameter(f'{new}/gin.macro.value', value)
  known = gin_checks.Known()
  for name, value in flags.also:
    if name in known.macros:
      gin.parse_config(f'{name} = {value}')
  for name, value in flags.bindings:
    name = gin_old_macros.new_name(name, used)
    _check_written(name, flags, known)
    known.check(name)
    try:
      gin.parse_config(f'{name} = {value}')
    except _GIN_ERRORS as error:
      raise ValueError(
        f'--gin.{name}={_short(value)}: {gin_checks.explain(error)}'
        f'{known.hint(name)}'
      ) from error
    known.check_effect(name)
  gin_checks.check_complete(
    ROOT / 'gin', lambda name: plain_flags.spelling(flags.command, name)
  )
  gin.finalize()


def _check_written(name: str, flags: Flags, known: gin_checks.Known) -> None:
  """Raises ValueError for a plain flag that the run file has no use for."""
  if name in flags.written and name not in known.macros:
    has = [
      flag.names[0]
      for flag in plain_flags.of(flags.command)
      if flag.macro in known.macros
    ]
    raise ValueError(
      f'{flags.written[name]} is nothing that {", ".join(flags.gin_files)} can'
      f' be told: it has no macro {name}. Known: {", ".join(sorted(has))}.'
    )


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
    raise ValueError(
      f'The gin files do not configure {cls.__module__}.{cls.__qualname__},'
      f' which this command needs; they configure {found}. Is it the'
      ' right run file?'
    ) from error
  try:
    return configured()
  except TypeError as error:
    if not gin_checks.is_unbound(error):
      raise
    raise ValueError(gin_checks.one_line(error)) from error
  except RecursionError as error:
    raise ValueError(
      f'{cls.__name__} cannot be made of the gin files: their values need each'
      ' other in too long a chain. Give some of them values of their own.'
    ) from error


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


def whole_config() -> str:
  """Returns everything that was configured, for another process."""
  return gin.config_str()


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
    raise ValueError(
      f'--gin.{text}: expected NAME=VALUE, where NAME is a macro (INPUT_FILE)'
      f' or a binding (scope/function.parameter); the name read {name!r}.'
    )
  value = _gin_value(name, value)
  try:
    gin_checks.check_single(value)
  except _GIN_ERRORS as error:
    raise ValueError(
      f'--gin.{name}={_short(value)}: {gin_checks.explain(error)}'
    ) from error
  return name, value


def _short(value: str) -> str:
  return value if len(value) <= 80 else f'{value[:80]}...'


def _gin_value(name: str, value: str) -> str:
  """Returns `value` as gin text: as it is, or quoted if it is no literal."""
  if value[:1] in tuple('\'"[({@%'):
    return value
  if value.lower() in ('true', 'false', 'none'):
    # As text, `false` would be true; gin's own spelling is Python's.
    if value not in ('True', 'False', 'None'):
      raise ValueError(
        f'--gin.{name}={value}: write {value.capitalize()}, or'
        f' \'"{value}"\' if the text is meant.'
      )
    return value
  try:
    # A `#` would start a comment inside a literal and cut the value short.
    is_literal = '#' not in value and ast.literal_eval(value) is not None
  except (SyntaxError, ValueError):
    is_literal = False
  return value if is_literal else repr(value)


def _find(gin_file: str, search_paths: Sequence[str]) -> None:
  """Raises ValueError if `gin_file` is in none of the places."""
  places = ['.', *search_paths, str(ROOT)]
  paths = [pathlib.Path(place, gin_file) for place in places]
  if any(path.is_file() for path in paths):
    return
  shipped = [
    path.relative_to(ROOT).as_posix() for path in ROOT.glob('gin/**/*.gin')
  ]
  raise ValueError(
    f'The gin file {gin_file!r} was not found; looked in'
    f' {", ".join(places)}.{nearest(gin_file, shipped)}'
  )
