"""Several processes of one run, joined by `jax.distributed`.

JAX watches them: if one ends without saying so, or never comes, JAX aborts the
others, which then print a trace of its internals. So each process that is
started leaves the work to a child process, and ends with one line of its own.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from specdec_jax.checks.fields import check_number, unexpected

# A process that gives no sign of life for so long counts as dead.
_HEARTBEAT_S = 10
_JOIN_S = 300
# The exit status of a process that ends because another one ended.
PEER_ENDED = 3
_CHILD = 'SPECDEC_JAX_CHILD'
_ENDED = (
  'error: another process of this run has ended, never came, or cannot be'
  ' reached; if it ended, its own message says why. Start all of them again, as'
  ' many as --process_count says: finished work is kept.'
)
# The exit status that shells report for a process ended by SIGTERM.
TERMINATED = 128 + signal.SIGTERM
_TERMINATED = (
  'error: ended by SIGTERM. Finished results on disk are kept: start the same'
  ' command again, and a run that keeps its results in a folder is resumed'
  ' there.'
)


@dataclasses.dataclass(frozen=True)
class Processes:
  """Which of how many processes this one is.

  Attributes:
    index: from 0; process 0 writes the files that belong to all.
    count: number of all processes.
  """

  index: int = 0
  count: int = 1

  @property
  def alone(self) -> bool:
    """Whether there are no other processes."""
    return self.count == 1

  def meet(self, name: str) -> None:
    """Waits until all processes have called it with this name."""
    if not self.alone:
      multihost_utils.sync_global_devices(name)


@dataclasses.dataclass(frozen=True)
class Meeting:
  """How the processes find each other; T5X's flags.

  Attributes:
    coordinator_address: host:port of the first process. If this and the next
      two are None, JAX finds them out, on TPU pods and under Slurm or Open MPI.
    process_count: how many processes there are.
    process_index: which of them this is, from 0.
    join_seconds: how long to wait for the other processes.

  Raises:
    ValueError: some of the first three are missing, or one is out of range.
  """

  coordinator_address: str | None = None
  process_count: int | None = None
  process_index: int | None = None
  join_seconds: int = _JOIN_S

  def __post_init__(self):
    address, count = self.coordinator_address, self.process_count
    given = {
      '--coordinator_address': address,
      '--process_count': count,
      '--process_index': self.process_index,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) not in (0, len(given)):
      raise ValueError(
        f'Missing: {", ".join(missing)}. Give all of {", ".join(given)}, or'
        ' only --multiprocess if JAX can find them out.'
      )
    if address is None or count is None or self.process_index is None:
      return
    port = address.rpartition(':')[2]
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
      where = 'HOST:PORT, where the first process can be reached'
      raise unexpected('--coordinator_address', where, address)
    check_number('--process_count', count, 1)
    if not 0 <= self.process_index < count:
      expected = f'from 0 to --process_count - 1 = {count - 1}'
      raise unexpected('--process_index', expected, self.process_index)


def run(function: Callable[[], int]) -> int:
  """Calls `function`, which joins other processes, and notices if one ends.

  Returns:
    The exit status: the function's, or `PEER_ENDED` with a message on stderr.
  """
  if _CHILD not in os.environ:
    return _watched()
  _end_with_parent()
  try:
    status = function()
  except jax.errors.JaxRuntimeError as error:
    print(f'{error}\n{_ENDED}', file=sys.stderr)
    status = PEER_ENDED
  if status:
    # A normal exit of JAX would wait for the processes that go on.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  return status


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
  """Inside, SIGTERM ends this process immediately, with one line on stderr.

  A compiled program may run for minutes, during which Python calls no signal
  handler, so a thread ends the process. Nothing is cleaned up: files on disk
  are whole at any moment, and the next start removes leftovers.
  """
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread may handle signals
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  # When a signal comes, C code writes its number to this pipe, even while
  # Python runs no handler.
  handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
  before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

  def wait():
    while numbers := os.read(reader, 64):
      if signal.SIGTERM in numbers:
        print(_TERMINATED, file=sys.stderr, flush=True)
        os._exit(TERMINATED)

  thread = threading.Thread(target=wait, daemon=True)
  thread.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    signal.signal(signal.SIGTERM, handler)
    os.close(writer)
    thread.join()
    os.close(reader)


def current() -> Processes:
  """This process among those that were joined; `Processes()` if none were."""
  if not jax.distributed.is_initialized():
    return Processes()
  return Processes(jax.process_index(), jax.process_count())


def join(meeting: Meeting) -> None:
  """Joins the other processes; call it before any other use of JAX.

  Raises:
    ValueError: the others cannot be found, or there are not as many as the
      flags say. If they do not come, JAX aborts this process.
  """
  flags = (
    meeting.coordinator_address,
    meeting.process_count,
    meeting.process_index,
  )
  print(
    f'Waiting for the other processes, {meeting.join_seconds} s at most.',
    file=sys.stderr,
  )
  # Python runs no handler inside JAX's code; with the default action an
  # interrupt ends the process immediately.
  handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    jax.distributed.initialize(
      *flags,
      initialization_timeout=meeting.join_seconds,
      heartbeat_timeout_seconds=_HEARTBEAT_S,
    )
  except (RuntimeError, ValueError) as error:
    raise ValueError(
      f'The processes could not be joined: {str(error).rstrip(".")}. If'
      ' --multiprocess cannot find the others, give --coordinator_address,'
      ' --process_count and --process_index.'
    ) from error
  finally:
    signal.signal(signal.SIGINT, handler)
  found = jax.process_count()
  if meeting.process_count not in (None, found):
    raise ValueError(
      f'--process_count is {meeting.process_count}, but {found} processes have'
      ' joined: give each of them the same number.'
    )


def _watched() -> int:
  """Runs this program again as a child, and says how it ended."""
  child = subprocess.Popen(
    [sys.executable, *sys.orig_argv[1:]],
    env=os.environ | {_CHILD: '1'},
    stdin=subprocess.PIPE,
  )
  signal.signal(signal.SIGINT, lambda number, _: child.send_signal(number))
  # Handled here, because JAX in the child takes SIGTERM only as a warning; the
  # child ends with this process.
  with ending_on_sigterm():
    status = child.wait()
  if status == -signal.SIGTERM:  # both processes got the signal
    print(_TERMINATED, file=sys.stderr)
  if status == -signal.SIGABRT:
    print(_ENDED, file=sys.stderr)
    return PEER_ENDED
  return status if status >= 0 else 128 - status


def _end_with_parent() -> None:
  """Ends this process when its parent, which watches it, is killed."""

  def wait():
    os.read(0, 1)  # returns only when the parent has ended
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()
