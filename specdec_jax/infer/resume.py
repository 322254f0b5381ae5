"""A run that can be killed at any moment and started again.

What a run has finished lies in `NAME.parts/` of its output folder, a file for
each chunk of batches, beside what decides its output (`config.json`). Each file
is written whole or not at all, so a restart finds whole chunks only and goes on
behind them. Results are merged at the end, the marker `NAME.COMPLETED` last.
Meanwhile `.NAME.lock` keeps other processes out; a killed one lets go of it.
"""

import contextlib
import errno
import glob
import json
import os
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from specdec_jax import files

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None  # type: ignore[assignment]

_CONFIG = 'config.json'
_DECODED = 'decoded.json'


class Folder:
  """The output folder of one run, or of one shard of it.

  Attributes:
    path: the folder; other runs may share it.
    name: of the main file of results; no other run in the folder has it.
  """

  def __init__(self, path: str, name: str):
    self.path = pathlib.Path(path)
    self.name = name
    self._parts = self.path / f'{name}.parts'
    self._marker = self.path / f'{name}.COMPLETED'
    self._config = self.path / f'{name}.config.json'
    self._lock = self.path / f'.{name}.lock'

  @property
  def finished(self) -> bool:
    """Whether it holds finished results."""
    return self._marker.exists()

  @contextlib.contextmanager
  def claimed(self, overwrite: bool) -> Iterator[None]:
    """Makes the folder and keeps other processes from writing these results.

    Raises:
      ValueError: it cannot be made or written, it holds finished results and
        `overwrite` is not set, or another process is writing them.
    """
    self._check(overwrite)
    with _locked(self._lock, f'{self.name} in {str(self.path)!r}'):
      yield

  def _check(self, overwrite: bool) -> None:
    if self.finished and not overwrite:
      raise ValueError(
        f'{str(self.path)!r} already holds finished results ({self.name}); they'
        ' are kept. Give another folder, or set overwrite to True'
      )
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=self.path).close()
    except OSError as error:
      raise ValueError(
        f'The output folder {str(self.path)!r} cannot be written:'
        f' {error.strerror or error}'
      ) from error

  def read_json(self, name: str) -> Any:
    """A JSON file of finished results."""
    return _read(self.path / name)

  def check_finished(self, config: Mapping[str, Any]) -> None:
    """Raises ValueError if finished results come from another `config`."""
    if self._config.exists():
      self._refuse_other(self._config, config, 'finished results')

  def begin(self, config: Mapping[str, Any], overwrite: bool) -> list[Any]:
    """Starts the run, or goes on with it.

    Args:
      config: everything that decides the output, as JSON has it.
      overwrite: whether what another configuration left may be thrown away.

    Returns:
      The contents of the chunks that are done: the first ones, in order.

    Raises:
      ValueError: an unfinished run of another configuration is there.
      OSError: the folder could not be written.
    """
    known = self._parts / _CONFIG
    if known.exists() and not overwrite:
      self._refuse_other(known, config, 'an unfinished run')
    with _explained(self._parts):
      if not _same(known, config):
        # Chunks without a configuration are what a kill left of a removal.
        shutil.rmtree(self._parts, ignore_errors=True)
        self._parts.mkdir()
        files.write_json(known, config)
    return self.chunks()

  def keep(self, number: int, content: Any) -> None:
    """Writes chunk `number`, counted from 0; what JSON can hold.

    Raises:
      OSError: it could not be written; the chunks before it are there.
    """
    part = self._part(number)
    with _explained(part):
      # The library's own file: Python's NaN may come back as it went.
      files.write_atomically(part, json.dumps(content).encode())

  def finish(self, contents: Mapping[str, str]) -> None:
    """Writes the results, the marker last, and removes the chunks.

    Args:
      contents: file name -> text.

    Raises:
      OSError: a file could not be written; the marker is not there then.
    """
    known = self._parts / _CONFIG
    contents = dict(contents)
    if known.exists():
      contents[self._config.name] = known.read_text('utf-8')
    write_all(self.path, contents, self._marker.name)
    self.discard()

  def mark_decoded(self) -> None:
    """Says that all chunks are there, for `decoded` of another process."""
    files.write_json(self._parts / _DECODED, {})

  def decoded(self, like: 'Folder') -> list[Any] | None:
    """All chunks of a run like another; None while there are fewer."""
    if not (self._parts / _DECODED).exists():
      return None
    config = _read(like._parts / _CONFIG)
    return self.chunks() if _same(self._parts / _CONFIG, config) else None

  def discard(self) -> None:
    """Removes the chunks."""
    shutil.rmtree(self._parts, ignore_errors=True)

  def reopen(self) -> None:
    """Takes back that the results are finished; they are made anew."""
    self._marker.unlink(missing_ok=True)

  def chunks(self) -> list[Any]:
    """What was kept: the first chunks, in order."""
    chunks: list[Any] = []
    while (part := self._part(len(chunks))).exists():
      chunks.append(_read(part))
    return chunks

  def _part(self, number: int) -> pathlib.Path:
    return self._parts / f'{number:05}.json'

  def _refuse_other(
    self, path: pathlib.Path, config: Mapping[str, Any], what: str
  ) -> None:
    if found := differences(_read(path), config):
      raise ValueError(
        f'{str(self.path)!r} holds {what} of another configuration'
        f' ({self.name}): {"; ".join(found)}. Give another folder, the same'
        ' configuration, or set overwrite to True'
      )


@contextlib.contextmanager
def _locked(path: pathlib.Path, what: str) -> Iterator[None]:
  """Holds a lock that goes with the process, however that ends.

  Raises:
    ValueError: another process has it; says which.
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
    try:
      if fcntl is not None:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      with lock:
        lock.seek(0)
        who = lock.read() or 'another process'
      raise ValueError(
        f'{what} is being written by {who}. Wait for it, or give another folder'
      ) from error
    except OSError:
      return lock  # a file system without locks
    # Whoever had it may have removed the file after it was opened here.
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
        return lock
    lock.close()


def _read(path: pathlib.Path) -> Any:
  return json.loads(path.read_text('utf-8'))


def _same(path: pathlib.Path, config: Mapping[str, Any]) -> bool:
  return path.exists() and not differences(_read(path), config)


def differences(before: Any, now: Any, name: str = '') -> list[str]:
  """Says where two JSON values differ, one text a place."""
  before, now = json.loads(json.dumps([before, now]))
  if isinstance(before, dict) and isinstance(now, dict):
    found = []
    for key in sorted({*before, *now}):
      inner = f'{name}.{key}' if name else key
      found += differences(before.get(key), now.get(key), inner)
    return found
  return [] if before == now else [f'{name} was {before!r}, is {now!r}']


def write_all(
  folder: pathlib.Path, contents: Mapping[str, str], marker: str
) -> None:
  """Writes files, each one whole or not at all, the empty `marker` last.

  Raises:
    OSError: a file could not be written; the marker is not there then.
  """
  # While old files turn into new ones, the folder is not a finished result.
  (folder / marker).unlink(missing_ok=True)
  for name, text in {**contents, marker: ''}.items():
    with _explained(folder / name):
      # What a killed `write_atomically` had not renamed.
      for torn in folder.glob(f'.{glob.escape(name)}.*.tmp'):
        torn.unlink()
      files.write_atomically(folder / name, text.encode('utf-8'))


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  """Says of an OSError which file it was and what to do."""
  try:
    yield
  except OSError as error:
    raise OSError(
      error.errno or errno.EIO,
      f'{path} could not be written ({error.strerror}); no partial'
      ' file was left. Free space or give another output folder, and run'
      ' again',
    ) from error
