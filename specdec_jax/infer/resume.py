"""A run that can be killed at any moment and resumed.

Finished work lies in `NAME.parts/` of the output folder: a file for each chunk
of results, and `config.json` with everything that decides the output. Each file
is written whole or not at all, with a checksum of its content and of the run it
belongs to. So a resumed run finds its whole chunks and decodes the rest. A
chunk that does not fit its checksum is reported and made again; if
`config.json` does not, all chunks are. Results are merged at the end. The
marker `NAME.COMPLETED` is written last: it holds the size and checksum of each
result. Meanwhile `.NAME.lock` keeps other processes out; if a process is
killed, its lock is released.
"""

import contextlib
import errno
import glob
import hashlib
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from specdec_jax import files
from specdec_jax.files import same_run
from specdec_jax.infer.locks import locked

_CONFIG = 'config.json'
_DECODED = 'decoded.json'
_CHUNK = re.compile(r'\d{5,}\.json')
_SHARE = '.process-'
_OVERWRITE = 'overwrite (--overwrite, in gin OVERWRITE = True)'
_ANEW = f'Give another folder, or {_OVERWRITE} to make them again'

Chunks = dict[int, Any]


class Folder:
  """The output folder of one run, or of one shard of it.

  Attributes:
    path: the folder; other runs may share it.
    name: name of the main file of results; other runs in the folder must have
      other names.
  """

  def __init__(self, path: str, name: str):
    self.path = pathlib.Path(path)
    self.name = name
    self._parts = self.path / f'{name}.parts'
    self._marker = self.path / f'{name}.COMPLETED'
    self._config = self.path / f'{name}.config.json'
    self._lock = self.path / f'.{name}.lock'
    self._begun: Any = None  # configuration of the run, as JSON values

  def share(self, index: int, count: int) -> 'Folder':
    """The folder in which one of several processes keeps its own chunks."""
    name = f'{self.name}{_SHARE}{index:05}-of-{count:05}'
    return Folder(str(self.path), name)

  @property
  def finished(self) -> bool:
    """Whether the folder holds finished results."""
    return self._marker.exists()

  @contextlib.contextmanager
  def claimed(self, overwrite: bool) -> Iterator[None]:
    """Makes the folder and keeps other processes from writing these results.

    Raises:
      ValueError: the folder cannot be made or written, it holds finished
        results and `overwrite` is not set, or another process is writing them.
        Results of which some files are missing do not count as finished.
    """
    files.make_folder(self.path)
    with locked(self._lock, f'{self.name} in {str(self.path)!r}'):
      if not overwrite and self.missing() == []:
        self.clean()
        raise ValueError(
          f'{str(self.path)!r} already holds finished results ({self.name});'
          f' they are kept. {_ANEW}'
        )
      yield

  def missing(self) -> list[str] | None:
    """The finished results whose files are missing; None without a marker.

    Raises:
      ValueError: a result was changed after the run, or the marker is broken.
    """
    if not self.finished:
      return None
    try:
      finished = json.loads(files.read_sealed(self._marker, self.name))
    except files.BrokenFileError as error:
      raise ValueError(
        f'{error}. So it is unknown whether the results in this folder are'
        f' complete and unchanged. {_ANEW}'
      ) from error
    gone = []
    for name, known in finished.items():
      if not (self.path / name).exists():
        gone.append(name)
      elif (found := self._described(name)) != known:
        raise ValueError(
          f'{str(self.path / name)!r} was changed after the run was finished:'
          f' it had {known["bytes"]} bytes of sha256 {known["sha256"][:12]},'
          f' has {found["bytes"]} of {found["sha256"][:12]}. Restore the file,'
          f' or make all results again. {_ANEW}'
        )
    return gone

  def _described(self, name: str) -> dict[str, Any]:
    try:
      return _described((self.path / name).read_bytes())
    except OSError as error:
      raise ValueError(
        f'{str(self.path / name)!r}, a finished result, cannot be read:'
        f' {error.strerror or error}. {_ANEW}'
      ) from error

  def read_json(self, name: str) -> Any:
    """Reads a JSON file of finished results.

    Raises:
      ValueError: it cannot be read, or is not JSON.
    """
    return self._parsed(name, json.loads)

  def read_json_lines(self, name: str) -> list[Any]:
    """Likewise, a file with a value on each line."""
    return self._parsed(
      name, lambda text: [json.loads(line) for line in text.split('\n') if line]
    )

  def _parsed(self, name: str, parse: Callable[[str], Any]) -> Any:
    path = self.path / name
    try:
      return parse(path.read_text('utf-8'))
    except (OSError, ValueError, RecursionError) as error:
      raise ValueError(
        f'{str(path)!r}, a finished result, cannot be read as JSON: {error}.'
        f' {_ANEW}'
      ) from error

  def check_finished(self, config: Mapping[str, Any]) -> None:
    """Raises ValueError if finished results come from another `config`."""
    if self._config.exists():
      before = self.read_json(self._config.name)
      self._refuse_other(before, config, 'finished results')

  def begin(self, config: Mapping[str, Any], overwrite: bool) -> Chunks:
    """Starts the run, or resumes it.

    Args:
      config: everything that decides the output, as JSON values.
      overwrite: whether chunks of another configuration may be removed.

    Returns:
      The chunks that are done: number -> content. Broken chunks were reported
      on stderr and removed.

    Raises:
      ValueError: an unfinished run of another configuration is there.
      OSError: the folder could not be written.
    """
    before = self._known()
    if before is not None and not overwrite:
      self._refuse_other(before, config, 'an unfinished run')
    self._begun = json.loads(json.dumps(config))
    with _explained(self._parts):
      if before is None or same_run.differences(before, config):
        shutil.rmtree(self._parts, ignore_errors=True)
        self._parts.mkdir()
        files.write_sealed(
          self._parts / _CONFIG, json.dumps(self._begun).encode(), self.name
        )
      # Other processes then wait until this process has made all its chunks.
      (self._parts / _DECODED).unlink(missing_ok=True)
      return self._chunks()

  def _known(self) -> Any:
    """The configuration of the chunks that are there; None if it is unknown."""
    path = self._parts / _CONFIG
    # Without both there is nothing to resume. Chunks without a configuration
    # are left if a removal was killed; they are reported below.
    if not (path.exists() or self._chunk_files()):
      return None
    try:
      return json.loads(files.read_sealed(path, self.name))
    except files.BrokenFileError as error:
      _say(
        f'{error}. Without it, it is unknown which run the chunks belong to:'
        ' they are removed, and everything is decoded again'
      )
      return None

  def _chunk_files(self) -> dict[int, pathlib.Path]:
    return {
      int(path.stem): path
      for path in sorted(self._parts.glob('*'))
      if _CHUNK.fullmatch(path.name)
    }

  def _chunks(self) -> Chunks:
    found = {}
    for number in self._chunk_files():
      try:
        found[number] = self.chunk(number)
      except files.BrokenFileError as error:
        _say(f'{error}. It is decoded again')
        self.drop(number)
    return found

  def chunk(self, number: int) -> Any:
    """The content of chunk `number` of this run.

    Raises:
      files.BrokenFileError: the chunk, or the configuration, is missing or
        broken.
    """
    return json.loads(
      files.read_sealed(self._part(number), self._seal_of(number))
    )

  def drop(self, number: int) -> None:
    """Removes chunk `number`."""
    _remove(self._part(number))

  def keep(self, number: int, content: Any) -> None:
    """Writes chunk `number`, counted from 0; `content` must be JSON values.

    Raises:
      OSError: it could not be written; earlier chunks are kept.
    """
    part = self._part(number)
    with _explained(part):
      # Not strict JSON, which has no NaN: only this library reads the file.
      data = json.dumps(content).encode()
      files.write_sealed(part, data, self._seal_of(number))

  def finish(self, contents: Mapping[str, str]) -> None:
    """Writes the results, the marker last, and removes the chunks.

    Args:
      contents: file name -> text.

    Raises:
      OSError: a file could not be written; then there is no marker.
    """
    contents = dict(contents)
    if self._begun is not None:
      contents[self._config.name] = json.dumps(self._begun, indent=1) + '\n'
    texts = {name: text.encode('utf-8') for name, text in contents.items()}
    self._write(texts)
    finished = {name: _described(data) for name, data in texts.items()}
    with self._writing(self._marker):
      data = (json.dumps(finished, indent=1) + '\n').encode()
      files.write_sealed(self._marker, data, self.name)
    self.clean()

  def leave(self, contents: Mapping[str, str]) -> None:
    """Writes the results of a failed run, without the marker.

    They are made again when the run is started again.

    Raises:
      OSError: a file could not be written.
    """
    self._write({name: text.encode() for name, text in contents.items()})
    self.clean()

  def _write(self, contents: Mapping[str, bytes]) -> None:
    # Removes the marker while old files are replaced by new ones.
    self.reopen()
    for name, data in contents.items():
      with self._writing(self.path / name):
        files.write_atomically(self.path / name, data)

  @contextlib.contextmanager
  def _writing(self, path: pathlib.Path) -> Iterator[None]:
    with _explained(path):
      # Temporary files of a `write_atomically` that was killed.
      for torn in path.parent.glob(f'.{glob.escape(path.name)}.*.tmp'):
        torn.unlink()
      yield

  def mark_decoded(self) -> None:
    """Marks that all chunks are there, for `decoded` in another process."""
    numbers = json.dumps(list(self._chunk_files())).encode()
    path = self._parts / _DECODED
    with _explained(path):
      files.write_sealed(path, numbers, self._seal_of(_DECODED))

  def decoded(self, like: 'Folder') -> list[Any] | None:
    """All chunks, for the same run as `like`; None while some are missing."""
    self._begun = like._begun
    try:
      path = self._parts / _DECODED
      numbers = json.loads(files.read_sealed(path, self._seal_of(_DECODED)))
      return [self.chunk(number) for number in numbers]
    except files.BrokenFileError:
      return None  # the process that owns it makes it again

  def written(self) -> dict[str, int]:
    """When its files and folders, and those of all shares, were changed."""
    found = {}
    for path in self.path.glob(f'{glob.escape(self.name)}*'):
      with contextlib.suppress(FileNotFoundError):
        found[path.name] = path.stat().st_mtime_ns
    return found

  def discard(self) -> None:
    """Removes the chunks."""
    shutil.rmtree(self._parts, ignore_errors=True)

  def clean(self) -> None:
    """Removes files that a finished run does not need, such as chunks.

    If a run is killed before this, the next start removes them.
    """
    self.discard()
    name = glob.escape(self.name)
    for parts in self.path.glob(f'{name}{_SHARE}*.parts'):
      shutil.rmtree(parts, ignore_errors=True)
    for lock in self.path.glob(f'.{name}{_SHARE}*.lock'):
      with contextlib.suppress(ValueError, OSError), locked(lock, ''):
        pass  # it is free, so the process that had it was killed
    for torn in self.path.glob(f'.{name}.COMPLETED.*.tmp'):
      torn.unlink(missing_ok=True)

  def reopen(self) -> None:
    """Removes the marker: the results no longer count as finished."""
    self._marker.unlink(missing_ok=True)

  def make_again(self, gone: Iterable[str]) -> None:
    """Reopens finished results of which some are missing, with a warning."""
    _say(
      f'{str(self.path)!r} held finished results, of which'
      f' {", ".join(gone)} is missing: all are made again'
    )
    self.reopen()

  def _part(self, number: int) -> pathlib.Path:
    return self._parts / f'{number:05}.json'

  def _seal_of(self, part: int | str) -> str:
    """The text that seals a file of the chunks: this run, and its part."""
    if self._begun is None:
      # Another process has started the run.
      data = files.read_sealed(self._parts / _CONFIG, self.name)
      self._begun = json.loads(data)
    return f'{self.name} {part} {json.dumps(self._begun, sort_keys=True)}'

  def _refuse_other(
    self, before: Any, config: Mapping[str, Any], what: str
  ) -> None:
    same_run.check(
      before,
      config,
      f'{str(self.path)!r} holds {what} of another configuration ({self.name})',
      f'Give another folder, the same configuration, or {_OVERWRITE}',
    )


def _say(message: str) -> None:
  print(f'warning: {message}.', file=sys.stderr)


def _described(data: bytes) -> dict[str, Any]:
  return {'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}


def _remove(path: pathlib.Path) -> None:
  """Removes a file, or a folder in its place."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  """Adds to an OSError which file could not be written, and what to do."""
  try:
    yield
  except OSError as error:
    raise OSError(
      error.errno or errno.EIO,
      f'{path} could not be written ({error.strerror}); no partial'
      ' file was left. Free space or give another output folder, and run'
      ' again',
    ) from error
