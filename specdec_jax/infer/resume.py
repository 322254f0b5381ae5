"""A run that can be killed at any moment and started again.

What a run has finished lies in `NAME.parts/` of its output folder, a file for
each chunk of batches, beside what decides its output (`config.json`). Each file
is written whole or not at all, under a checksum of itself and of what it is a
part of, so a restart finds whole chunks of this run and decodes the others.
What does not fit its checksum is named and made again: a chunk alone, all of
them where it is `config.json`. So it is with what versions without checksums
left, whose chunks nothing vouches for. Results are merged at the end, the
marker `NAME.COMPLETED` last: it holds the size and checksum of each of them.
Meanwhile `.NAME.lock` keeps other processes out; a killed one lets go of it.
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
import tempfile
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
_ANEW = f'Give another folder, or {_OVERWRITE} to make them anew'

Chunks = dict[int, Any]


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
    self._begun: Any = None  # with which configuration, as JSON has it

  def share(self, index: int, count: int) -> 'Folder':
    """Where one of several processes keeps what it has decoded by itself."""
    name = f'{self.name}{_SHARE}{index:05}-of-{count:05}'
    return Folder(str(self.path), name)

  @property
  def finished(self) -> bool:
    """Whether it holds finished results."""
    return self._marker.exists()

  @contextlib.contextmanager
  def claimed(self, overwrite: bool) -> Iterator[None]:
    """Makes the folder and keeps other processes from writing these results.

    Raises:
      ValueError: it cannot be made or written, it holds finished results and
        `overwrite` is not set, or another process is writing them. Finished
        results of which some are gone are none.
    """
    self._make()
    with locked(self._lock, f'{self.name} in {str(self.path)!r}'):
      if not overwrite and self.missing() == []:
        self.clean()
        raise ValueError(
          f'{str(self.path)!r} already holds finished results ({self.name});'
          f' they are kept. {_ANEW}'
        )
      yield

  def _make(self) -> None:
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=self.path).close()
    except OSError as error:
      raise ValueError(
        f'The output folder {str(self.path)!r} cannot be written:'
        f' {error.strerror or error}'
      ) from error

  def missing(self) -> list[str] | None:
    """Which finished results are gone; None where none were finished.

    The marker of a version without checksums is empty: then the main file is
    all that is asked for.

    Raises:
      ValueError: a result is not what was finished, or the marker is broken.
    """
    if not self.finished:
      return None
    if self._marker.is_file() and not self._marker.stat().st_size:
      return [] if (self.path / self.name).exists() else [self.name]
    try:
      finished = json.loads(files.read_sealed(self._marker, self.name))
    except files.BrokenFileError as error:
      raise ValueError(
        f'{error}. So it is not known whether the results beside it are those'
        f' that were finished. {_ANEW}'
      ) from error
    gone = []
    for name, known in finished.items():
      if not (self.path / name).exists():
        gone.append(name)
      elif (found := self._described(name)) != known:
        raise ValueError(
          f'{str(self.path / name)!r} was changed after the run was finished:'
          f' it had {known["bytes"]} bytes of sha256 {known["sha256"][:12]},'
          f' has {found["bytes"]} of {found["sha256"][:12]}. Put it back as it'
          f' was, or make all results anew. {_ANEW}'
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
    """A JSON file of finished results.

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
    """Starts the run, or goes on with it.

    Args:
      config: everything that decides the output, as JSON has it.
      overwrite: whether what another configuration left may be thrown away.

    Returns:
      The chunks that are done: number -> content. Those that are broken were
      named on stderr and removed.

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
      # Until this start has made all chunks, other processes wait for them.
      (self._parts / _DECODED).unlink(missing_ok=True)
      return self._chunks()

  def _known(self) -> Any:
    """What the chunks that are there were begun with; None if nobody knows."""
    path = self._parts / _CONFIG
    # Chunks without a configuration are what a kill left of a removal.
    if not (path.exists() or self._chunk_files()):
      return None
    try:
      return json.loads(files.read_sealed(path, self.name))
    except files.BrokenFileError as error:
      _say(
        f'{error}. It says what the chunks beside it are of: they are thrown'
        ' away, and all is decoded again'
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
    for number, path in self._chunk_files().items():
      try:
        found[number] = self.chunk(number)
      except files.BrokenFileError as error:
        _say(f'{error}. It is decoded again')
        _remove(path)
    return found

  def chunk(self, number: int) -> Any:
    """What was kept as chunk `number` of this run.

    Raises:
      files.BrokenFileError: it, or the configuration, is missing or broken.
    """
    return json.loads(
      files.read_sealed(self._part(number), self._seal_of(number))
    )

  def keep(self, number: int, content: Any) -> None:
    """Writes chunk `number`, counted from 0; what JSON can hold.

    Raises:
      OSError: it could not be written; the chunks before it are there.
    """
    part = self._part(number)
    with _explained(part):
      # The library's own file: Python's NaN may come back as it went.
      data = json.dumps(content).encode()
      files.write_sealed(part, data, self._seal_of(number))

  def finish(self, contents: Mapping[str, str]) -> None:
    """Writes the results, the marker last, and removes the chunks.

    Args:
      contents: file name -> text.

    Raises:
      OSError: a file could not be written; the marker is not there then.
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
    """Writes the results of a run that failed: no marker, to be made again.

    Raises:
      OSError: a file could not be written.
    """
    self._write({name: text.encode() for name, text in contents.items()})
    self.clean()

  def _write(self, contents: Mapping[str, bytes]) -> None:
    # While old files turn into new ones, the folder is not a finished result.
    self.reopen()
    for name, data in contents.items():
      with self._writing(self.path / name):
        files.write_atomically(self.path / name, data)

  @contextlib.contextmanager
  def _writing(self, path: pathlib.Path) -> Iterator[None]:
    with _explained(path):
      # What a killed `write_atomically` had not renamed.
      for torn in path.parent.glob(f'.{glob.escape(path.name)}.*.tmp'):
        torn.unlink()
      yield

  def mark_decoded(self) -> None:
    """Says that all chunks are there, for `decoded` of another process."""
    count = json.dumps(len(self._chunk_files())).encode()
    path = self._parts / _DECODED
    with _explained(path):
      files.write_sealed(path, count, self._seal_of(_DECODED))

  def decoded(self, like: 'Folder') -> list[Any] | None:
    """All chunks of a run like another; None while there are fewer."""
    self._begun = like._begun
    try:
      path = self._parts / _DECODED
      count = json.loads(files.read_sealed(path, self._seal_of(_DECODED)))
      return [self.chunk(number) for number in range(count)]
    except files.BrokenFileError:
      return None  # its own process makes it again

  def discard(self) -> None:
    """Removes the chunks."""
    shutil.rmtree(self._parts, ignore_errors=True)

  def clean(self) -> None:
    """Removes what no finished run needs: chunks, and those of processes.

    What a kill left between the marker and this goes at the next start.
    """
    self.discard()
    name = glob.escape(self.name)
    for parts in self.path.glob(f'{name}{_SHARE}*.parts'):
      shutil.rmtree(parts, ignore_errors=True)
    for lock in self.path.glob(f'.{name}{_SHARE}*.lock'):
      with contextlib.suppress(ValueError, OSError), locked(lock, ''):
        pass  # it is free, so whoever had it was killed
    for torn in self.path.glob(f'.{name}.COMPLETED.*.tmp'):
      torn.unlink(missing_ok=True)

  def reopen(self) -> None:
    """Takes back that the results are finished; they are made anew."""
    self._marker.unlink(missing_ok=True)

  def make_again(self, gone: Iterable[str]) -> None:
    """Takes back finished results of which some are gone, and says so."""
    _say(
      f'{str(self.path)!r} held finished results, of which'
      f' {", ".join(gone)} is gone: all are made anew'
    )
    self.reopen()

  def _part(self, number: int) -> pathlib.Path:
    return self._parts / f'{number:05}.json'

  def _seal_of(self, part: int | str) -> str:
    """What a file of the chunks is a part of: this run, this place in it."""
    if self._begun is None:
      # Another process has begun it.
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
  """Removes a file, or what is in its place."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


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
