"""A lock on a file that is released with the process, however it ends."""

import contextlib
import errno
import os
import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import TextIO

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked(path: pathlib.Path, what: str) -> Iterator[None]:
  """Holds a lock that is released with the process, however it ends.

  Where a file system has no locks, a warning on stderr says so.

  Args:
    path: the file that is locked.
    what: what it guards, for messages; '' gives no warning.

  Raises:
    ValueError: another process has the lock; the message says which.
  """
  with _open_locked(path, what) as lock:
    lock.truncate(0)
    lock.write(f'process {os.getpid()} on {socket.gethostname()}')
    lock.flush()
    try:
      yield
    finally:
      path.unlink(missing_ok=True)


def _open_locked(path: pathlib.Path, what: str) -> TextIO:
  while True:
    lock = open(path, 'a+', encoding='utf-8')
    lock.seek(0)
    who = lock.read() or 'another process'
    try:
      if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      lock.close()
      raise ValueError(
        f'{what} is being written by {who}. Wait for it, or give another folder'
      ) from error
    except OSError as error:  # a file system without locks
      if what:
        print(
          f'warning: {what} cannot be locked ({error.strerror}), so nothing'
          f' keeps {who} from writing it at the same time. Start one run at a'
          ' time.',
          file=sys.stderr,
        )
      return lock
    # The last holder may have removed the file after it was opened here.
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
        return lock
    lock.close()
