"""Connects several processes of one run, by `jax.distributed`.

JAX watches the processes: if one crashes or never joins, the others end too.
Finished work is on disk, and all processes can be started again.
"""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable

import jax

from specdec_jax.checks.fields import check_number, unexpected

# A process that sends no heartbeat for so long counts as dead.
_HEARTBEAT_S = 10
_JOIN_S = 300  # a process waits so long for the others to join
# The exit status of a process that notices that another one ended. A process
# that is waiting is aborted by JAX, with JAX's own message.
PEER_ENDED = 3
_ENDED = (
  'error: another process of this run has ended, never came, or cannot be'
  ' reached; if it ended, its own message says why. Start all of them again, as'
  ' many as --process_count says: finished work is kept.'
)


@dataclasses.dataclass(frozen=True)
class Meeting:
  """T5X's flags, by which the processes find each other.

  Attributes:
    coordinator_address: host:port of the first process. If this and the next
      two are None, JAX finds them out on TPU pods and under Slurm or Open MPI.
    process_count: the number of processes.
    process_index: the index of this process, from 0.

  Raises:
    ValueError: one or two of the three are None, or one is out of range.
  """

  coordinator_address: str | None = None
  process_count: int | None = None
  process_index: int | None = None

  def __post_init__(self):
    flags = vars(self).items()
    missing = [f'--{name}' for name, value in flags if value is None]
    if len(missing) == len(flags):
      return
    if missing:
      expected = 'a value, or only --multiprocess if JAX can find all out'
      raise unexpected(', '.join(missing), expected, None)
    port = str(self.coordinator_address).rpartition(':')[2]
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
      where = 'HOST:PORT, where the first process can be reached'
      raise unexpected('--coordinator_address', where, self.coordinator_address)
    check_number('--process_count', self.process_count, 1)
    if self.process_index not in range(self.process_count or 0):
      expected = f'from 0 to --process_count - 1, of {self.process_count}'
      raise unexpected('--process_index', expected, self.process_index)


def run(function: Callable[[], int]) -> int:
  """Calls a function that joins other processes; exits if it fails.

  Args:
    function: returns an exit status.

  Returns:
    0, if the function returns 0. If it returns another status, this process
    exits with that status. If another process of the run has ended, this
    process exits with `PEER_ENDED`, after a message on stderr.
  """
  try:
    status = function()
  except jax.errors.JaxRuntimeError as error:
    print(f'{error}\n{_ENDED}', file=sys.stderr)
    status = PEER_ENDED
  if status:
    # A normal exit of JAX would wait for the other processes.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  return status


def join(meeting: Meeting) -> None:
  """Joins the other processes; must be called before any other use of JAX.

  Raises:
    ValueError: the other processes cannot be found, or their number is not that
      of the flags. If they do not join in time, JAX aborts this process.
  """
  message = f'Waiting for the other processes, {_JOIN_S} s at most.'
  print(message, file=sys.stderr)
  # With this service a SIGTERM would not end the process.
  jax.config.update('jax_enable_preemption_service', False)
  # Python runs no handler inside JAX's code; with the default action an
  # interrupt ends the process immediately.
  handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    jax.distributed.initialize(
      meeting.coordinator_address,
      meeting.process_count,
      meeting.process_index,
      initialization_timeout=_JOIN_S,
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
  joined, count = jax.process_count(), meeting.process_count
  if count not in (None, joined):
    expected = f'{joined}, as many as have joined, for each process'
    raise unexpected('--process_count', expected, count)
