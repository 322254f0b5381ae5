"""Folders and files of a checkpoint, on this machine or in a bucket.

TensorStore's key-value stores read the files in a bucket, so that `gs://` needs
no other package. TensorStore is imported when it is needed.
"""

import bisect
import errno
import os
import pathlib
from collections.abc import Callable
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import unexpected
from specdec_jax.files import shipped

_SCHEME = '://'
_FEW = 8
# Errors that TensorStore raises for missing, forbidden or broken data.
STORE_ERRORS = (ValueError, RuntimeError, OSError, NotImplementedError)
# By default TensorStore would try 32 times, for a quarter of an hour. The first
# request, mostly a listing, has few retries, because it fails if there is no
# network. A later read has more, because the store may be busy for a minute.
_FIRST = {'max_retries': 3, 'initial_delay': '1s', 'max_delay': '4s'}
_READING = {'max_retries': 8, 'initial_delay': '1s', 'max_delay': '16s'}
FIRST_SECONDS = 60  # timeout of the first request
READ_SECONDS = 600  # timeout of a read
_ADVICE = (
  'Check the address, the network and the access rights (`gcloud auth'
  ' application-default login` for a bucket that is not public), or copy it to'
  ' this machine.'
)


def user_cache() -> pathlib.Path:
  """Returns the folder of this library in the user's cache folder."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'specdec_jax'


def open_location(path: str | os.PathLike[str]) -> 'Location':
  """Returns the `Location` of a path or a URL (`gs://bucket/folder`).

  A path such as 'demo/target.msgpack' leads to the shipped file, see
  `shipped.find`.
  """
  check_path(path)
  text = os.fspath(path)
  if _SCHEME not in text:
    return Location(shipped.find(text))
  import tensorstore

  try:
    spec = tensorstore.KvStore.Spec(text).to_json()
  except ValueError as error:
    why = f'is not an address that TensorStore knows ({reason(error)})'
    expected = 'a path, gs://bucket/folder or file:///folder'
    raise ValueError(f'{text!r} {why}; expected {expected}.') from error
  return RemoteLocation(text, spec)


def check_path(path: Any) -> None:
  """Raises ValueError for a value that is no path, such as a number or ''."""
  if not isinstance(path, str | os.PathLike) or not os.fspath(path):
    raise unexpected('path', 'text, or an address (gs://bucket/folder)', path)


class Location:
  """A file or a folder on this machine."""

  def __init__(self, path: str):
    self.path = path

  def __str__(self) -> str:
    return self.path

  def exists(self) -> bool:
    return os.path.lexists(self.path)

  def problem(self) -> str:
    """Returns why the path cannot be followed, such as a loop of links.

    The result is '' if the path can be followed, or nothing is there.
    """
    try:
      os.path.lexists(self.path) and os.stat(self.path)
    except OSError as error:
      return error.strerror or str(error)
    return ''

  def is_folder(self) -> bool:
    return os.path.isdir(self.path)

  def names(self) -> set[str]:
    """Returns the names of the files and folders in the folder."""
    return set(os.listdir(self.path))

  def child(self, name: str) -> 'Location':
    return Location(os.path.join(self.path, name))

  def parent(self) -> 'Location':
    return Location(os.path.dirname(self.path))

  def size(self) -> int:
    """Returns the number of bytes of the file.

    Raises:
      ValueError: the path is that of a pipe, a device or a folder; `read` and
        `read_all` raise this error too.
    """
    files.check_regular(self.path)
    return os.path.getsize(self.path)

  def read(self, offset: int, size: int) -> bytes:
    """Reads `size` bytes from `offset` on; fewer at the end of the file."""
    with files.open_regular(self.path) as stream:
      stream.seek(offset)
      return stream.read(size)

  def read_all(self, limit: int) -> bytes:
    """Reads the whole file, which may have at most `limit` bytes.

    Raises:
      ValueError: the file has more bytes.
    """
    return files.read_small(self.path, limit)

  def kvstore(self) -> dict[str, Any]:
    """Returns TensorStore's specification of the folder."""
    return {'driver': 'file', 'path': os.path.abspath(self.path) + '/'}


class RemoteLocation(Location):
  """A `Location` in a bucket, or in another store of TensorStore's drivers."""

  def __init__(self, url: str, spec: dict[str, Any]):
    super().__init__(url.rstrip('/'))
    self._spec = {**spec, 'path': spec.get('path', '').rstrip('/')}
    # Cached, because listing a bucket takes some time.
    self._names: set[str] | None = None
    self._size: int | None = None

  def exists(self) -> bool:
    return self.is_folder() or not self._is_end(0)

  def is_folder(self) -> bool:
    return bool(self.names())

  def names(self) -> set[str]:
    if self._names is None:
      keys = self._ask(self.kvstore(), lambda store: store.list(), first=True)
      self._names = {key.decode().split('/')[0] for key in keys or []}
    return self._names

  def child(self, name: str) -> 'RemoteLocation':
    spec = {**self._spec, 'path': f'{self._spec["path"]}/{name}'}
    return RemoteLocation(f'{self.path}/{name}', spec)

  def parent(self) -> 'RemoteLocation':
    spec = {**self._spec, 'path': os.path.dirname(self._spec['path'])}
    return RemoteLocation(os.path.dirname(self.path), spec)

  def size(self) -> int:
    """Returns the number of bytes of the object.

    Stores do not tell this number, so bisection finds it by reading single
    bytes.
    """
    if self._size is None:
      above = 1
      while not self._is_end(above - 1):
        above *= 2
      sizes = range(above // 2, above)
      self._size = sizes[bisect.bisect_left(sizes, 1, key=self._is_end)]
    return self._size

  def read(self, offset: int, size: int) -> bytes:
    end = min(offset + size, self.size())
    return self._read(offset, end) if end > offset else b''

  def read_all(self, limit: int) -> bytes:
    if self._read(limit, limit + 1, first=True):
      files.check_size(self.path, self.size(), limit)
    if not (data := self._read(0, None, first=True)):
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return data

  def kvstore(self) -> dict[str, Any]:
    return {**self._spec, 'path': f'{self._spec["path"]}/'}

  def _is_end(self, position: int) -> bool:
    """Returns whether the object has no byte at this position."""
    return not self._read(position, position + 1)

  def _read(self, start: int, stop: int | None, first: bool = False) -> bytes:
    folder, name = os.path.split(self._spec['path'])
    spec = {**self._spec, 'path': f'{folder}/' if folder else ''}
    part = slice(start, stop)
    answer = self._ask(spec, lambda x: x.read(name, byte_range=part), first)
    return answer.value if answer else b''

  def _ask(self, spec: Any, ask: Callable[[Any], Any], first: bool) -> Any:
    """Sends a request to a store, and returns the answer.

    Args:
      spec: TensorStore's specification of the store.
      ask: function that sends a request to the opened store and returns its
        future.
      first: whether no earlier request has succeeded. Then this one gives up
        sooner, because there may be no network.

    Returns:
      The answer, or None if the object does not exist.

    Raises:
      ValueError: the store does not answer, or forbids the request.
    """
    import tensorstore

    context = reading(_FIRST if first else _READING)
    seconds = FIRST_SECONDS if first else READ_SECONDS
    try:
      store = tensorstore.KvStore.open(spec, context=context).result()
      return ask(store).result(timeout=seconds)
    except STORE_ERRORS as error:
      if str(error).startswith(('NOT_FOUND', 'OUT_OF_RANGE')):
        return None
      why = f'{reason(error)}. {_ADVICE}'
      raise ValueError(f'{self.path!r} cannot be read: {why}') from error


def reading(retries: dict[str, Any] = _READING) -> Any:
  """Returns a TensorStore context with limits on retries.

  The default limits are for reading arrays.
  """
  import tensorstore

  return tensorstore.Context(
    {f'{store}_request_retries': retries for store in ('gcs', 's3')}
  )


def reason(error: BaseException) -> str:
  """Returns the first line of an error of TensorStore, without its details."""
  if isinstance(error, TimeoutError):
    return 'no answer came'
  lines = str(error).partition(' [')[0].splitlines()
  return lines[0] if lines else type(error).__name__


def few(names: Any) -> str:
  """Returns the first few of many names as text, for a message."""
  names = sorted(names)
  more = f' and {len(names) - _FEW} more' if len(names) > _FEW else ''
  return ', '.join(names[:_FEW]) + more if names else 'nothing'
