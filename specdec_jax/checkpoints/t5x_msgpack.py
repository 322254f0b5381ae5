"""The tree in a T5X msgpack file, without the bytes of its arrays.

The msgpack package would copy each array in the file, those of the optimiser
too. Here only headers are read (https://github.com/msgpack/msgpack spec.md),
and for each array only the place of its bytes is kept. Arrays are flax's
extension types: (shape, name of the dtype, bytes), see `flax.serialization`.
"""

import struct
from typing import Any

import numpy as np

from specdec_jax.checkpoints.disk_arrays import FileArray
from specdec_jax.files.locations import Location

_WINDOW = 1 << 16
_DEEPEST = 64
_NDARRAY, _SCALAR = 1, 3  # flax's codes of the two kinds of arrays
_CHUNKED = '__msgpack_chunked_array__'
# Errors that bytes can lead to which are read as a header and are not one.
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError)

_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
  0xCA: '>f',
  0xCB: '>d',
  0xCC: '>B',
  0xCD: '>H',
  0xCE: '>I',
  0xCF: '>Q',
  0xD0: '>b',
  0xD1: '>h',
  0xD2: '>i',
  0xD3: '>q',
}
_SIZED = {
  0xC4: ('bytes', '>B'),
  0xC5: ('bytes', '>H'),
  0xC6: ('bytes', '>I'),
  0xC7: ('extension', '>B'),
  0xC8: ('extension', '>H'),
  0xC9: ('extension', '>I'),
  0xD9: ('text', '>B'),
  0xDA: ('text', '>H'),
  0xDB: ('text', '>I'),
  0xDC: ('list', '>H'),
  0xDD: ('list', '>I'),
  0xDE: ('dict', '>H'),
  0xDF: ('dict', '>I'),
}


def read_tree(location: Location) -> Any:
  """Returns the file's tree, each array as a `FileArray` that is not read.

  Raises:
    ValueError: the file is cut short, has more than one tree or is not msgpack;
      the message names the entry where reading failed.
  """
  scanner = _Scanner(location)
  try:
    tree = scanner.value(0)
    if scanner.position != scanner.size:
      raise ValueError(f'{scanner.size - scanner.position} bytes too many')
  except _WRONG as error:
    place = '/'.join(scanner.path)
    raise ValueError(
      f'{str(location)!r} ({scanner.size} bytes) is cut short or not a T5X'
      f' checkpoint ({f"at {place}: " if place else ""}{error}); copy it again.'
    ) from error
  return tree


class _Scanner:
  """Walks over a file, from value to value."""

  def __init__(self, location: Location):
    self.size = location.size()
    self.position = 0
    self.path: list[str] = []
    self._location = location
    self._window = (0, b'')

  def value(self, depth: int) -> Any:
    if depth > _DEEPEST:
      raise ValueError(f'more than {_DEEPEST} levels')
    first = self._take(1)[0]
    if first < 0x80:
      return first
    if first >= 0xE0:
      return first - 0x100
    if first < 0xC0:
      kinds = (('dict', 15), ('list', 15), ('text', 31), ('text', 31))
      kind, mask = kinds[(first - 0x80) >> 4]
      return self._sized(kind, first & mask, depth)
    if first in _CONSTANTS:
      return _CONSTANTS[first]
    if first in _NUMBERS:
      return self._number(_NUMBERS[first])
    if 0xD4 <= first <= 0xD8:
      return self._sized('extension', 1 << (first - 0xD4), depth)
    if first not in _SIZED:
      raise ValueError(f'byte {first:#x} begins no value')
    kind, width = _SIZED[first]
    return self._sized(kind, self._number(width), depth)

  def _sized(self, kind: str, size: int, depth: int) -> Any:
    if kind == 'dict':
      return self._dict(size, depth)
    if kind == 'list':
      return [self.value(depth + 1) for _ in range(size)]
    if kind == 'text':
      return self._take(size).decode()
    if kind == 'bytes':
      return self._skip(size)
    return self._extension(size, depth)

  def _dict(self, size: int, depth: int) -> Any:
    found: dict[str, Any] = {}
    for _ in range(size):
      name = str(self.value(depth + 1))
      self.path.append(name)
      value = self.value(depth + 1)
      if name in found:
        raise ValueError('it is there twice')
      found[name] = value
      self.path.pop()
    return _joined(self._location, found) if _CHUNKED in found else found

  def _extension(self, size: int, depth: int) -> Any:
    code = self._take(1)[0]
    end = self.position + size
    if end > self.size:
      raise ValueError(f'it ends at byte {end}')
    if code not in (_NDARRAY, _SCALAR):
      self.position = end
      return None
    shape, name, span = self.value(depth + 1)
    if self.position != end:
      raise ValueError('an array of another length than its header says')
    return FileArray(self._location, shape, np.dtype(name), [span])

  def _number(self, code: str) -> Any:
    return struct.unpack(code, self._take(struct.calcsize(code)))[0]

  def _skip(self, size: int) -> tuple[int, int]:
    span = self.position, size
    self.position += size
    if self.position > self.size:
      raise ValueError(f'it ends at byte {self.position}')
    return span

  def _take(self, size: int) -> bytes:
    """The next bytes; the file is read in whole windows."""
    if self.position + size > self.size:
      raise ValueError(f'it ends at byte {self.position + size}')
    start, data = self._window
    begin = self.position - start
    if begin < 0 or begin + size > len(data):
      data = self._location.read(self.position, max(size, _WINDOW))
      self._window = self.position, data
      begin = 0
    taken = data[begin : begin + size]
    if len(taken) < size:
      raise ValueError(f'it ends before byte {self.position + size}')
    self.position += size
    return taken


def _joined(location: Location, chunked: dict[str, Any]) -> FileArray:
  """An array that flax has cut into chunks: msgpack holds at most 2 GiB."""
  shape = [chunked['shape'][str(i)] for i in range(len(chunked['shape']))]
  parts = [chunked['chunks'][str(i)] for i in range(len(chunked['chunks']))]
  spans = [span for part in parts for span in part.spans]
  return FileArray(location, shape, parts[0].dtype, spans)
