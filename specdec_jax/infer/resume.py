"""The folder of a run: finished work, results, and how a killed run goes on.

While a run goes on, it appends the results of each batch to the log
`NAME.partial` (see `files.run_log`); each of several processes has a log of its
own. At the end the run writes its results and, last, the marker
`NAME.COMPLETED`. Meanwhile `.NAME.lock` keeps other runs out; the system
releases it with the process, however that ends.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.experimental import multihost_utils

from specdec_jax import files
from specdec_jax.files import same_run
from specdec_jax.files.run_log import RunLog

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None  # type: ignore[assignment]

_OVERWRITE = 'overwrite (--overwrite, in gin DecodeConfig.overwrite = True)'
_LOOK_S = 0.2  # time between two looks whether another process has written
# Longer than a program compiles, and than a batch or the metrics take.
_MOST_SILENCE_S = 1800.0


class Folder:
  """The output folder of one run, or of one shard of it.

  Attributes:
    path: the folder; other runs may share it.
    name: name of the file of records; other runs in the folder must have other
      names.
    process: which of the run's processes this is, from 0; the first one writes
      the files that belong to all.
  """

  def __init__(self, path: str, name: str, process: int = 0):
    self.path = pathlib.Path(path)
    self.name = name
    self.process = process
    share = f'-{process:05}' if process else ''
    self._lock = self.path / f'.{name}{share}.lock'
    self._partial = self.path / f'{name}.partial{share}'
    self._marker = self.path / f'{name}.COMPLETED'
    self._logs: dict[pathlib.Path, RunLog] = {}  # of all processes

  @contextlib.contextmanager
  def claimed(self) -> Iterator[None]:
    """Makes the folder, and keeps other processes from writing these results.

    Raises:
      ValueError: the folder cannot be made or written, or another process is
        writing these results.
    """
    files.make_folder(self.path)
    with locked(self._lock, f'{self.name} in {str(self.path)!r}'):
      yield

  @property
  def finished(self) -> bool:
    """Whether there are finished results."""
    return self._marker.exists() and (self.path / self.name).exists()

  def read_json(self, name: str, lines: bool = False) -> Any:
    """Reads a JSON file of finished results.

    Args:
      name: the file, of one object.
      lines: whether there is a value on each line; then a list is returned.

    Raises:
      ValueError: it cannot be read, or is not such JSON.
    """
    path = self.path / name
    try:
      with files.open_regular(path) as stream:
        data = stream.read()
      if not lines:
        return dict(json.loads(data))
      return [json.loads(line) for line in data.split(b'\n') if line]
    except (OSError, TypeError, ValueError, RecursionError) as error:
      raise ValueError(
        f'{str(path)!r}, a finished result, cannot be read: {error}. Give'
        f' another folder, or {_OVERWRITE} to make all of them again.'
      ) from error

  def check_same(
    self, before: Any, settings: Mapping[str, Any], kind: str
  ) -> None:
    """Raises ValueError if what is there comes from other settings."""
    name, other, same = 'examples_sha256', 'configuration', 'configuration'
    if isinstance(before, dict) and before.get(name) != settings.get(name):
      other, same = 'input, or of the file before it was changed', 'input'
    same_run.check(
      before,
      settings,
      f'{str(self.path)!r} holds {kind} of another {other} ({self.name})',
      f'Give another folder, the same {same}, or {_OVERWRITE}.',
    )

  def begin(
    self, settings: Mapping[str, Any], overwrite: bool
  ) -> list[dict[str, Any]]:
    """Starts the run, or goes on with it.

    Args:
      settings: everything that decides the output, as JSON values.
      overwrite: whether the work of other settings may be removed.

    Returns:
      What was appended so far, by all processes. Lines that are broken were
      reported on stderr.

    Raises:
      ValueError: an unfinished run of other settings is there.
      OSError: the folder could not be written.
    """
    self._logs = {self._partial: RunLog(self._partial, settings)}
    if self.process == 0:
      self._marker.unlink(missing_ok=True)
      for path in self._partials():
        try:
          before = RunLog(path).settings()
        except ValueError:
          _warn(f'{path} is no work of a run: it is removed, and made again')
        else:
          if not same_run.differences(before, settings):
            continue
          if not overwrite:
            self.check_same(before, settings, 'an unfinished run')
        path.unlink(missing_ok=True)
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    try:
      multihost_utils.sync_global_devices(f'{self.name} begins {digest}')
    except AssertionError as error:
      raise ValueError(
        f'Process {self.process} reads other inputs, or has other settings,'
        ' than process 0: give all of them the same command, and files that'
        ' nobody changes. Finished work is kept.'
      ) from error
    done = self.appended(own=True)
    multihost_utils.sync_global_devices(f'{self.name} was read')
    return done

  def _partials(self) -> list[pathlib.Path]:
    return sorted(self.path.glob(f'{glob.escape(self.name)}.partial*'))

  def appended(self, own: bool = False) -> list[dict[str, Any]]:
    """What was appended since the last call.

    Args:
      own: whether this process's file counts as well.
    """
    contents = []
    for path in self._partials():
      if path == self._partial and not own:
        continue
      log = self._logs.setdefault(path, RunLog(path))
      values, damaged = log.read_new()
      contents += values
      for line in damaged:
        _warn(f'{path}: {line[:18]!r}... is damaged: its work is done again')
    return contents

  def append(self, content: Mapping[str, Any]) -> None:
    """Keeps finished work; `content` must be JSON values.

    Raises:
      OSError: it could not be written; earlier work is kept.
    """
    with _explained(self._partial):
      self._logs[self._partial].append(content)

  def finish(self, contents: Mapping[str, str], failed: bool = False) -> None:
    """Writes the results, the marker last, and removes the finished work.

    Args:
      contents: file name -> text.
      failed: whether the results get no marker; another start makes them again.

    Raises:
      OSError: a file could not be written; then there is no marker.
    """
    if not failed:
      contents = {**contents, self._marker.name: ''}
    for name, text in contents.items():
      with _explained(self.path / name):
        # What a kill has left of it.
        for torn in self.path.glob(f'.{glob.escape(name)}.*.tmp'):
          torn.unlink(missing_ok=True)
        files.write_atomically(self.path / name, text.encode())
    self.clean()

  def clean(self) -> None:
    """Removes work that a finished run does not need."""
    for path in self._partials():
      path.unlink(missing_ok=True)

  def wait(self, is_there: Callable[[], bool]) -> None:
    """Waits for other processes, for as long as any of them writes something.

    Raises:
      ValueError: no process has written anything for `_MOST_SILENCE_S`.
    """
    seen, since = self._written(), time.monotonic()
    while not is_there():
      time.sleep(_LOOK_S)
      if (now := self._written()) != seen:
        seen, since = now, time.monotonic()
      elif time.monotonic() - since > _MOST_SILENCE_S:
        raise ValueError(
          f'Nothing was written in {str(self.path)!r} for'
          f' {_MOST_SILENCE_S / 60:g} minutes, where process {self.process}'
          ' waits for others. Do all of them still run, with the same folder?'
          ' Start all of them again: finished work is kept.'
        )

  def _written(self) -> list[int]:
    """When the files of this run were changed; none if one was just removed."""
    with contextlib.suppress(FileNotFoundError):
      paths = sorted(self.path.glob(f'{glob.escape(self.name)}*'))
      return [path.stat().st_mtime_ns for path in paths]
    return []


def _warn(message: str) -> None:
  print(f'warning: {message}.', file=sys.stderr)


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  """Adds to an OSError which file could not be written, and what to do."""
  try:
    yield
  except OSError as error:
    raise OSError(
      error.errno or errno.EIO,
      f'{path} could not be written ({error.strerror}); what was finished is'
      ' kept. Free space or give another output folder, and run again',
    ) from error


@contextlib.contextmanager
def locked(path: pathlib.Path, subject: str) -> Iterator[None]:
  """Holds a lock that is released with the process, however it ends.

  Where a file system has no locks, a warning on stderr says so.

  Args:
    path: the file that is locked.
    subject: what the lock guards, for messages.

  Raises:
    ValueError: another process has the lock; the message says which.
  """
  with open(path, 'a+', encoding='utf-8') as lock:
    lock.seek(0)
    holder = lock.read() or 'another process'
    try:
      if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f'{subject} is being written by {holder}. Wait for it, or give another'
        ' folder.'
      ) from error
    except OSError as error:  # a file system without locks
      why = f'({error.strerror}), so {holder} may write it as well'
      _warn(f'{subject} cannot be locked {why}. Start one run at a time')
    lock.truncate(0)
    lock.write(f'process {os.getpid()} on {socket.gethostname()}')
    lock.flush()
    try:
      yield
    finally:
      path.unlink(missing_ok=True)
