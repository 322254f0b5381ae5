"""The command `specdec`, also `python -m specdec_jax`, and its exit statuses.

Slow imports happen only once a command runs, so that --help and mistyped names
are answered at once.
"""

import contextlib
import io
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import specdec_jax
from specdec_jax.checks.fields import nearest
from specdec_jax.cli import Command, commands, unfinished

_HEAD = """\
usage: specdec COMMAND ...

Speculative decoding in JAX: a small model drafts, a large one checks several
tokens in one call, and the output is exactly the large one's.

"""
_TAIL = """
`specdec COMMAND --help` describes its flags and shows examples.
"""
# How JAX's error for a wrong JAX_PLATFORMS begins.
_NO_BACKEND = 'Unable to initialize backend'
_NO_PLUG_IN = (
  'its plug-in for JAX is not installed. Install it, such as'
  " pip install 'specdec_jax[cuda]', or set JAX_PLATFORMS=cpu."
)
# Errors that begin like this are the machine's fault, not the program's.
_OF_MACHINE = (
  'RESOURCE_EXHAUSTED',  # JAX's error if memory is too small
  _NO_BACKEND,
  'The scheduler failed',  # the server has logged the reason
)
_INTERRUPTED = 130
_UNWIND_S = 1.0  # seconds that an interrupted command has to end by itself


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line `argv`, or the process's; returns the exit status."""
  if argv is None:
    return _as_process(lambda: _main(sys.argv[1:]))
  return _guarded(lambda: _main(list(argv)))


def script(name: str) -> int:
  """Runs `scripts/NAME.py` as a process; returns the exit status."""
  return _as_process(lambda: run(commands.SCRIPTS[name], sys.argv[1:], name))


def _main(argv: list[str]) -> int:
  name = argv[0] if argv else ''
  if name in ('-h', '--help', 'help'):
    print(_help(), end='')
    return 0
  if name == '--version':
    print(f'specdec_jax {specdec_jax.__version__}')
    return 0
  if name in commands.COMMANDS:
    return run(commands.COMMANDS[name], argv[1:], name)
  hint = nearest(name, commands.COMMANDS)
  if name.startswith('-'):
    hint = ' A command comes first, its flags after it; see `specdec --help`.'
  unknown = f'error: there is no command {name!r}.{hint}'
  print(unknown if name else _help(), file=sys.stderr)
  return 2


def _help() -> str:
  lines, width = '', max(map(len, commands.COMMANDS))
  for name, command in commands.COMMANDS.items():
    summary, *_ = str(command.function.__doc__).split('.\n')
    lines += f'  {name:{width}}  {summary}\n'
  return f'{_HEAD}{lines}{_TAIL}'


def _guarded(function: Callable[[], int], is_process: bool = False) -> int:
  """Calls a function with open standard streams; returns the exit status.

  If `is_process`, an interrupt ends the process soon.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      # This standard stream is closed: the next file that is opened would get
      # its number, and what is printed would go into that file.
      os.open(os.devnull, os.O_RDWR)
  if sys.stderr is None:  # `print` would use stdout instead
    sys.stderr = open(2, 'w', closefd=False)
  wrong = ''
  if sys.stdout is None:
    wrong = 'stdout is closed; send it to a file, a pipe or /dev/null'
  try:
    os.getcwd()
  except OSError:
    wrong = 'the working folder was removed; start in another one'
  if wrong:
    print(f'error: {wrong}', file=sys.stderr)
    return 2
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):  # UTF-8, as in all files
      stream.reconfigure(encoding='utf-8', errors=stream.errors)
  try:
    with _watched() if is_process else contextlib.nullcontext():
      return function()
  except KeyboardInterrupt:  # the interrupt may come during an import
    return _interrupted()


# These functions end an interrupted process.


def _as_process(function: Callable[[], int]) -> int:
  """Calls `_guarded`; an interrupt soon ends the process in any case.

  Python alone would wait until all compilations end, also those of other
  threads, which can take a minute or more.
  """
  _hide_hints()
  status = _guarded(function, is_process=True)
  if status == _INTERRUPTED:
    _leave(status)
  return status


def _hide_hints() -> None:
  """Keeps JAX 0.10, the version for Python 3.11, from logging false errors.

  On Intel processors that version logs kilobytes for each program in its cache,
  because it does not know two features of these processors, which are only
  hints to the compiler.
  """
  if sys.version_info < (3, 12):
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


@contextlib.contextmanager
def _watched() -> Iterator[None]:
  """Leaves the process if SIGINT does not end the block within `_UNWIND_S`."""
  ours, pythons = socket.socketpair()
  pythons.setblocking(False)

  def watch() -> None:
    while data := ours.recv(1):  # the loop ends when `pythons` is closed
      (number,) = data
      # A server handles the signal itself.
      python_raises = signal.getsignal(number) is signal.default_int_handler
      if number == signal.SIGINT and python_raises:
        time.sleep(_UNWIND_S)
        _leave(_interrupted())

  threading.Thread(target=watch, daemon=True).start()
  with pythons:
    signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    try:
      yield
    finally:
      signal.set_wakeup_fd(-1)


def _leave(status: int) -> None:
  """Ends the process without waiting for its threads."""
  if sys.stdout and sys.stdout.isatty():
    print('\x1b[?25h', end='')  # shows the cursor, which a progress bar hides
  for stream in filter(None, (sys.stdout, sys.stderr)):
    with contextlib.suppress(OSError):
      stream.flush()
  os._exit(status)


def _interrupted() -> int:
  """Prints how an unfinished run continues; returns the exit status."""
  message = 'interrupted'
  if unfinished:
    words = sys.orig_argv
    if words[1:] == sys.argv and not words[1].endswith('.py'):
      words = words[1:]  # the name of Python is left out: `specdec` starts it
    message += f'. {unfinished[0]!r} has what was finished; to go on'
    message += ', with the same input' * ('-' in words)
    message += f':\n  {shlex.join(words)}'
  print(message, file=sys.stderr)
  return _INTERRUPTED


def run(command: Command, argv: Sequence[str], name: str = '') -> int:
  """Loads the configuration, runs a command and returns the exit status.

  Bad input (ValueError, OSError) leads to one line on stderr and status 2; too
  little memory, or a loss that diverges, to one line and status 1; an interrupt
  to status 130. With `--traceback` the exception is raised instead. SIGTERM
  ends the process, as it ends any other.

  Args:
    command: the command to run.
    argv: arguments after the program's name.
    name: name of the command, for --help.
  """
  from specdec_jax.cli import gin_flags

  warnings.formatwarning = _warning

  def load_and_run() -> int:
    gin_flags.load(argv, command, name)
    return command.function() or 0

  def run_by_processes() -> int:
    meeting = gin_flags.meeting_of(argv)
    if meeting is None:
      return load_and_run()
    from specdec_jax.infer import processes

    def join_and_run() -> int:
      processes.join(meeting)
      return load_and_run()

    return processes.run(lambda: _complaining(join_and_run, argv))

  return _complaining(run_by_processes, argv)


def _complaining(function: Callable[[], int], argv: Sequence[str]) -> int:
  """Calls a function; prints an error as one line, unless it may be a bug."""
  from specdec_jax.cli import gin_flags

  try:
    return function()
  except KeyboardInterrupt:
    return _interrupted()
  except Exception as error:
    *_, last = traceback.walk_tb(error.__traceback__)
    where = last[0].f_code.co_filename
    # JAX's assertion that there is a device fails if JAX_PLATFORMS names a
    # platform whose plug-in is not installed. For an unknown platform JAX
    # raises a RuntimeError.
    if isinstance(error, AssertionError) and where.endswith('xla_bridge.py'):
      name = os.environ.get('JAX_PLATFORMS')
      error = RuntimeError(f'{_NO_BACKEND} {name!r}: {_NO_PLUG_IN}')
    is_input = isinstance(error, ValueError | OSError)
    is_input |= gin_flags.is_unbound(error)
    is_machine = isinstance(error, FloatingPointError | MemoryError)
    if isinstance(error, RuntimeError):
      is_machine |= str(error).startswith(_OF_MACHINE)
    if '--traceback' in argv or not (is_input or is_machine):
      raise
    print(f'error: {gin_flags.one_line(error, argv)}', file=sys.stderr)
    return 2 if is_input else 1


def _warning(message: Warning | str, *_: Any, **__: Any) -> str:
  """Formats a warning as one line, without its place in the code."""
  return f'warning: {" ".join(str(message).split())}\n'
