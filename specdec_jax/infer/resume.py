"""The output folder of a run, in which a killed run can be continued.

A run appends the results of each batch to the log `NAME.partial` (see
`files.run_log`); each of several processes has its own log. At the end the
run writes its results and, last, the marker `NAME.COMPLETED`. Meanwhile the
lock `.NAME.lock` keeps other runs out; the system releases it when the process
ends, even if it is killed.
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
except ImportError:  # Windows lacks this module
  fcntl = None  # type: ignore[assignment]

_OVERWRITE = 'overwrite (--overwrite, in gin DecodeConfig.overwrite = True)'
_POLL_S = 0.2  # a waiting process looks at the files at this interval
# A process counts as dead after this time without a write. Compiling a program,
# decoding a batch, and computing metrics each take less.
_MOST_SILENCE_S = 1800.0


class Folder:
  """The output folder of a run, or of a shard of it.

  Attributes:
    path: the folder; other runs may share it.
    name: name of the file of records; other runs in the folder must have other
      names.
    process: the index of this process, from 0; process 0 writes the files that
      all processes share.
  """

  def __init__(self, path: str, name: str, process: int = 0):
    self.path, self.name, self.process = pathlib.Path(path), name, process
    suffix = f'-{process:05}' if process else ''
    self._lock = self.path / f'.{name}{suffix}.lock'
    self._partial = self.path / f'{name}.partial{suffix}'
    self._marker = self.path / f'{name}.COMPLETED'
    self._logs: dict[pathlib.Path, RunLog] = {}  # each process has a log

  @contextlib.contextmanager
  def claimed(self) -> Iterator[None]:
    """Makes the folder, and locks this run's results against other runs.

    The system releases the lock even if the process is killed. A file system
    without locks leads to a warning on stderr.

    Raises:
      ValueError: the folder cannot be made or written, or another process is
        writing these results; the message names that process.
    """
    files.make_folder(self.path)
    subject = f'{self.name} in {str(self.path)!r}'
    with open(self._lock, 'a+', encoding='utf-8') as lock:
      lock.seek(0)
      holder = lock.read() or 'another process'
      try:
        if fcntl is None:
          raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise ValueError(
          f'{subject} is being written by {holder}. Wait for it, or give'
          ' another folder.'
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
        self._lock.unlink(missing_ok=True)

  def finished(self) -> bool:
    """Returns whether the folder has finished results."""
    return self._marker.exists() and (self.path / self.name).exists()

  def read_json(self, name: str, lines: bool = False) -> Any:
    """Reads a JSON file of finished results.

    Args:
      name: name of the file.
      lines: whether each line is a JSON value, so that a list is returned;
        otherwise the file is one object.

    Raises:
      ValueError: the file cannot be read, or is not such JSON.
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
    """Raises ValueError if earlier work has other settings than this run."""
    name, other, same = 'examples_sha256', 'configuration', 'configuration'
    if isinstance(before, dict) and before.get(name) != settings.get(name):
      other, same = 'input, or of the file before it was changed', 'input'
    what = f'{str(self.path)!r} holds {kind} of another {other} ({self.name})'
    advice = f'Give another folder, the same {same}, or {_OVERWRITE}.'
    same_run.check(before, settings, what, advice)

  def begin(
    self, settings: Mapping[str, Any], overwrite: bool
  ) -> list[dict[str, Any]]:
    """Starts the run, or continues it.

    Args:
      settings: everything that decides the output, as JSON values.
      overwrite: whether work with other settings may be removed.

    Returns:
      The work that all processes have appended so far. Damaged lines are left
      out and reported on stderr.

    Raises:
      ValueError: the folder has an unfinished run with other settings.
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
          if not overwrite:
            self.check_same(before, settings, 'an unfinished run')
          if not same_run.differences(before, settings):
            continue
        path.unlink(missing_ok=True)
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    try:
      multihost_utils.sync_global_devices(f'{self.name} begins {digest}')
    except AssertionError as error:
      raise ValueError(
        f'Process {self.process} and another one of this run have different'
        ' inputs or settings: give all the same command and files. Finished'
        ' work is kept.'
      ) from error
    done = self.new_work()
    multihost_utils.sync_global_devices(f'{self.name} was read')
    return done

  def _partials(self) -> list[pathlib.Path]:
    return sorted(self.path.glob(f'{glob.escape(self.name)}.partial*'))

  def new_work(self) -> list[dict[str, Any]]:
    """Returns work in the logs that this process neither read nor appended."""
    contents = []
    for path in self._partials():
      values, damaged = self._logs.setdefault(path, RunLog(path)).read_new()
      contents += values
      for line in damaged:
        _warn(f'{path}: {line[:18]!r}... is damaged: its work is done again')
    return contents

  def append(self, content: Mapping[str, Any]) -> None:
    """Appends finished work, as JSON values, to the log of this process.

    Raises:
      OSError: the log could not be written; earlier work is kept.
    """
    with _explained(self._partial):
      self._logs[self._partial].append(content)

  def finish(self, contents: Mapping[str, str], failed: bool = False) -> None:
    """Writes the results and then the marker, and removes the logs.

    Args:
      contents: file name -> text.
      failed: whether to leave the marker out, so that the next run makes the
        results again.

    Raises:
      OSError: a file could not be written; then no marker is written.
    """
    if not failed:
      contents = {**contents, self._marker.name: ''}
    for name, text in contents.items():
      with _explained(self.path / name):
        # An earlier run that was killed may have left temporary files.
        for torn in self.path.glob(f'.{glob.escape(name)}.*.tmp'):
          torn.unlink(missing_ok=True)
        files.write_atomically(self.path / name, text.encode())
    self.clean()

  def clean(self) -> None:
    """Removes the logs, which a finished run does not need."""
    for path in self._partials():
      path.unlink(missing_ok=True)

  def wait(self, is_done: Callable[[], bool]) -> None:
    """Waits until `is_done()`, as long as other processes write files.

    Raises:
      ValueError: no process has written anything for `_MOST_SILENCE_S`.
    """
    before, since = self._written(), time.monotonic()
    while not is_done():
      time.sleep(_POLL_S)
      if (now := self._written()) != before:
        before, since = now, time.monotonic()
      elif time.monotonic() - since > _MOST_SILENCE_S:
        raise ValueError(
          f'Nothing was written for {_MOST_SILENCE_S / 60:g} minutes, where'
          f' process {self.process} waits for others: {str(self.path)!r}. Start'
          ' all again, with one folder: finished work is kept.'
        )

  def _written(self) -> list[int]:
    """Returns when each file of this run was written; [] if one vanishes."""
    with contextlib.suppress(FileNotFoundError):
      paths = sorted(self.path.glob(f'{glob.escape(self.name)}*'))
      return [path.stat().st_mtime_ns for path in paths]
    return []


def _warn(message: str) -> None:
  print(f'warning: {message}.', file=sys.stderr)


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  """Adds the path and advice to an OSError."""
  try:
    yield
  except OSError as error:
    text = f'{path} could not be written ({error.strerror}); finished work is'
    text += ' kept. Free space or give another output folder, and run again'
    raise OSError(error.errno or errno.EIO, text) from error
