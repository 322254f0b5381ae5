"""A run that can be killed at any moment and started again.

`NAME.partial` in the output folder holds the finished work: an append-only
JSONL file. Its first line has everything that decides the output, and each
further line the results of a batch. Each line begins with a checksum of its
content and of the run, so that a line that was cut, changed or written by
another run is noticed, and its work done again. Of several processes each
appends to a file of its own. At the end the results are written, and last the
marker `NAME.COMPLETED`, which holds the size and checksum of each result.
Meanwhile `.NAME.lock` keeps other runs out; it is released with the process,
however that ends.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TextIO

from specdec_jax import files
from specdec_jax.files import same_run
from specdec_jax.infer.processes import Processes

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None  # type: ignore[assignment]

ALONE = Processes()
_OVERWRITE = 'overwrite (--overwrite, in gin DecodeConfig.overwrite = True)'
_AGAIN = f'Give another folder, or {_OVERWRITE} to make them again'
_LOOK_S = 0.2  # time between two looks whether another process has written
# Longer than a program compiles, and than a batch or the metrics take.
_MOST_SILENCE_S = 1800.0


class Folder:
  """The output folder of one run, or of one shard of it.

  Attributes:
    path: the folder; other runs may share it.
    name: name of the file of records; other runs in the folder must have other
      names.
    process: which of the run's processes this is.
  """

  def __init__(self, path: str, name: str, process: Processes = ALONE):
    self.path = pathlib.Path(path)
    self.name = name
    self.process = process
    share = ''
    if process.index:
      share = f'-{process.index:05}-of-{process.count:05}'
    self._lock = self.path / f'.{name}{share}.lock'
    self._partial = self.path / f'{name}.partial{share}'
    self._marker = self.path / f'{name}.COMPLETED'
    self._config = self.path / f'{name}.config.json'
    self._settings = ''  # of this run, as JSON
    self._stream: BinaryIO | None = None  # of `_partial`
    self._ends: dict[pathlib.Path, int] = {}  # of what was read of each file

  @contextlib.contextmanager
  def claimed(self) -> Iterator[None]:
    """Makes the folder, and keeps other processes from writing these results.

    Raises:
      ValueError: the folder cannot be made or written, or another process is
        writing these results.
    """
    files.make_folder(self.path)
    with locked(self._lock, f'{self.name} in {str(self.path)!r}'):
      try:
        yield
      finally:
        if self._stream is not None:
          with contextlib.suppress(OSError):  # of a disk that is full
            self._stream.close()
          self._stream = None

  @property
  def finished(self) -> bool:
    """Whether there are finished results."""
    return self._marker.exists()

  def missing(self) -> list[str] | None:
    """The finished results whose files are gone; None without a marker.

    Raises:
      ValueError: a result was changed after the run, or the marker is broken.
    """
    if not self.finished:
      return None
    finished = self.read_json(self._marker.name)
    if not isinstance(finished, dict) or not finished:
      raise ValueError(f'{str(self._marker)!r} is broken. {_AGAIN}.')
    gone = [name for name in finished if not (self.path / name).exists()]
    for name in finished.keys() - gone:
      before, now = finished[name], _described(self._bytes(self.path / name))
      if before != now:
        raise ValueError(
          f'{str(self.path / name)!r} was changed after the run was finished:'
          f' expected {before}, got {now}. {_AGAIN}.'
        )
    return gone

  def _bytes(self, path: pathlib.Path) -> bytes:
    try:
      with files.open_regular(path) as stream:
        return stream.read()
    except (OSError, ValueError) as error:
      raise ValueError(
        f'{str(path)!r}, a finished result, cannot be read: {error}. {_AGAIN}.'
      ) from error

  def read_json(self, name: str, lines: bool = False) -> Any:
    """Reads a JSON file of finished results.

    Args:
      name: the file.
      lines: whether there is a value on each line; then a list is returned.

    Raises:
      ValueError: it cannot be read, or is not JSON.
    """
    path = self.path / name
    data = self._bytes(path)
    try:
      if not lines:
        return json.loads(data)
      return [json.loads(line) for line in data.split(b'\n') if line]
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f'{str(path)!r}, a finished result, is not JSON: {error}. {_AGAIN}.'
      ) from error

  def check_finished(self, settings: Mapping[str, Any]) -> None:
    """Raises ValueError if finished results come from other settings."""
    if self._config.exists():
      before = self.read_json(self._config.name)
      self._check_same(before, settings, 'finished results')

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
    self._settings = json.dumps(settings, default=str, sort_keys=True)
    if self.process.index == 0:
      self._remove_others(overwrite)
    self.process.meet(f'{self.name} begins')
    done = self.appended(own=True)
    self.process.meet(f'{self.name} was read')
    return done

  def _remove_others(self, overwrite: bool) -> None:
    """Removes partial files that are not of this run, or refuses them."""
    settings = json.loads(self._settings)
    for path in self._partials():
      before = _header(path)
      if before == settings:
        continue
      if before is not None and not overwrite:
        self._check_same(before, settings, 'an unfinished run')
      elif before is None:
        _warn(f'{path} is no work of a run: it is removed, and made again')
      path.unlink(missing_ok=True)

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
      with open(path, 'rb') as stream:
        stream.seek(begin := self._ends.get(path, 0))
        data = stream.read()
      whole = data[: data.rfind(b'\n') + 1]  # a kill may have cut the rest
      self._ends[path] = begin + len(whole)
      lines = whole.split(b'\n')[:-1]
      for number, line in enumerate(lines):
        if not begin and not number:
          continue  # the settings
        content = _content(line, self._settings)
        if content is None:
          _warn(
            f'{path} line {line[:18]!r}... is damaged or of another run: its'
            ' work is done again'
          )
        else:
          contents.append(content)
    return contents

  def append(self, content: Mapping[str, Any]) -> None:
    """Keeps finished work; `content` must be JSON values.

    Raises:
      OSError: it could not be written; earlier work is kept.
    """
    with _explained(self._partial):
      if self._stream is None:
        self._stream = open(self._partial, 'ab')
        # Without a line that a kill has cut.
        self._stream.truncate(self._ends.get(self._partial, 0))
        if not self._ends.get(self._partial):
          self._stream.write(_line(json.loads(self._settings), ''))
      # A killed process loses nothing that was flushed. It is not synced: that
      # takes longer than many a batch, and the system does it within a minute.
      self._stream.write(_line(content, self._settings))
      self._stream.flush()

  def finish(self, contents: Mapping[str, str], failed: bool = False) -> None:
    """Writes the results, the marker last, and removes the finished work.

    Args:
      contents: file name -> text.
      failed: whether the results get no marker; another start makes them again.

    Raises:
      OSError: a file could not be written; then there is no marker.
    """
    contents = dict(contents)
    if self._settings and not failed:
      settings = json.dumps(json.loads(self._settings), indent=1)
      contents[self._config.name] = settings + '\n'
    self.reopen()  # while old files are replaced by new ones
    for name, text in contents.items():
      self._write(name, text)
    if not failed:
      finished = {n: _described(text.encode()) for n, text in contents.items()}
      self._write(self._marker.name, json.dumps(finished, indent=1) + '\n')
    self.clean()

  def _write(self, name: str, text: str) -> None:
    with _explained(self.path / name):
      # What a kill has left of it.
      for torn in self.path.glob(f'.{glob.escape(name)}.*.tmp'):
        torn.unlink(missing_ok=True)
      files.write_atomically(self.path / name, text.encode())

  def reopen(self, gone: Sequence[str] = ()) -> None:
    """Removes the marker: the results no longer count as finished.

    Args:
      gone: results that are missing, which a warning names.
    """
    if gone:
      _warn(
        f'{str(self.path)!r} held finished results, of which'
        f' {", ".join(gone)} is missing: all are made again'
      )
    self._marker.unlink(missing_ok=True)

  def clean(self) -> None:
    """Removes what a finished run does not need, and what kills have left."""
    for path in self._partials():
      path.unlink(missing_ok=True)
    for lock in self.path.glob(f'.{glob.escape(self.name)}-*.lock'):
      with contextlib.suppress(ValueError, OSError), locked(lock, ''):
        pass  # it is free, so the process that had it was killed

  def wait(self, look: Callable[[], bool]) -> None:
    """Waits for other processes, for as long as any of them writes something.

    Args:
      look: returns whether what is waited for is there.

    Raises:
      ValueError: no process has written anything for `_MOST_SILENCE_S`.
    """
    seen, since = self._written(), time.monotonic()
    while not look():
      time.sleep(_LOOK_S)
      now = self._written()
      if now != seen:
        seen, since = now, time.monotonic()
      elif time.monotonic() - since > _MOST_SILENCE_S:
        raise ValueError(
          f'Nothing was written in {str(self.path)!r} for'
          f' {_MOST_SILENCE_S / 60:g} minutes, and process'
          f' {self.process.index} waits for other processes there. Is it the'
          ' same folder for all processes, and do all of them still run? Start'
          ' all of them again: finished work is kept.'
        )

  def _written(self) -> dict[str, int]:
    """When the files of this run were changed."""
    times = {}
    for path in self.path.glob(f'{glob.escape(self.name)}*'):
      with contextlib.suppress(FileNotFoundError):
        times[path.name] = path.stat().st_mtime_ns
    return times

  def _check_same(
    self, before: Any, settings: Mapping[str, Any], kind: str
  ) -> None:
    same_run.check(
      before,
      settings,
      f'{str(self.path)!r} holds {kind} of another configuration ({self.name})',
      f'Give another folder, the same configuration, or {_OVERWRITE}.',
    )


def _line(content: Any, settings: str) -> bytes:
  """A JSON line: a checksum of content and run, and the content."""
  # Not strict JSON, which has no NaN: only this library reads the file.
  text = json.dumps(content)
  digest = hashlib.sha256(f'{settings}\0{text}'.encode()).hexdigest()[:16]
  return f'["{digest}", {text}]\n'.encode()


def _content(line: bytes, settings: str) -> Any:
  """The content of a line of `_line`; None if it is not one of this run."""
  try:
    _, content = json.loads(line)
  except (ValueError, TypeError, RecursionError):
    return None
  return content if _line(content, settings) == line + b'\n' else None


def _header(path: pathlib.Path) -> Any:
  """The settings that a partial file begins with; None if they are broken."""
  try:
    files.check_regular(path)
    with open(path, 'rb') as stream:
      return _content(stream.readline().removesuffix(b'\n'), '')
  except (OSError, ValueError):
    return None


def _described(data: bytes) -> dict[str, Any]:
  return {'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}


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
    subject: what the lock guards, for messages; '' gives no warning.

  Raises:
    ValueError: another process has the lock; the message says which.
  """
  with _open_locked(path, subject) as lock:
    lock.truncate(0)
    lock.write(f'process {os.getpid()} on {socket.gethostname()}')
    lock.flush()
    try:
      yield
    finally:
      path.unlink(missing_ok=True)


def _open_locked(path: pathlib.Path, subject: str) -> TextIO:
  while True:
    lock = open(path, 'a+', encoding='utf-8')
    lock.seek(0)
    holder = lock.read() or 'another process'
    try:
      if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      lock.close()
      raise ValueError(
        f'{subject} is being written by {holder}. Wait for it, or give another'
        ' folder.'
      ) from error
    except OSError as error:  # a file system without locks
      if subject:
        _warn(
          f'{subject} cannot be locked ({error.strerror}), so nothing keeps'
          f' {holder} from writing it at the same time. Start one run at a time'
        )
      return lock
    # The last holder may have removed the file after it was opened here.
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
        return lock
    lock.close()
