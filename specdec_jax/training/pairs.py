"""Pairs of token sequences: in memory, from text, and in a file.

A `.npz` file of pre-tokenised pairs holds four arrays:

  inputs          int32[sum of source lengths]  all source ids in a row
  inputs_offsets  int64[N + 1]                  pair i is inputs[o[i]:o[i + 1]]
  targets         int32[sum of target lengths]
  targets_offsets int64[N + 1]

They have no end-of-sequence ids and no padding: an example may join several
pairs, and gets one end-of-sequence id after it is joined. Reading such a file
needs only NumPy.
"""

import dataclasses
import io
import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from specdec_jax import files
from specdec_jax.text.tokenizer import PAD_ID, Tokenizer

_ARRAYS = ('inputs', 'inputs_offsets', 'targets', 'targets_offsets')
# Errors that NumPy and the modules it uses raise for a damaged file.
_BROKEN = (
  ValueError,
  EOFError,
  AttributeError,
  NotImplementedError,
  zipfile.BadZipFile,
  zlib.error,
)


@dataclasses.dataclass(frozen=True)
class TokenPairs:
  """N pairs of id sequences of any lengths in four flat arrays; see above."""

  inputs: np.ndarray
  inputs_offsets: np.ndarray
  targets: np.ndarray
  targets_offsets: np.ndarray

  def __len__(self) -> int:
    return len(self.inputs_offsets) - 1

  def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and target ids of one pair."""
    source, target = self.inputs_offsets, self.targets_offsets
    return (
      self.inputs[source[index] : source[index + 1]],
      self.targets[target[index] : target[index + 1]],
    )

  @classmethod
  def from_lists(
    cls,
    inputs: Sequence[Iterable[int]],
    targets: Sequence[Iterable[int]],
  ) -> 'TokenPairs':
    """Flattens source and target sequences, as many of each.

    Raises:
      ValueError: there are more sources than targets, or fewer.
    """
    if len(inputs) != len(targets):
      raise ValueError(
        f'{len(inputs)} source sequences came with {len(targets)} target'
        ' sequences; every pair needs both.'
      )
    return cls(*_flatten(inputs), *_flatten(targets))

  @classmethod
  def joined(cls, parts: Iterable['TokenPairs']) -> 'TokenPairs':
    """All pairs of all parts, in order."""
    pairs = [part[i] for part in parts for i in range(len(part))]
    return cls.from_lists([s for s, _ in pairs], [t for _, t in pairs])

  def to_bytes(self) -> bytes:
    """The contents of the `.npz` file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{n: getattr(self, n) for n in _ARRAYS})
    return buffer.getvalue()

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the `.npz` file, whole or not at all."""
    files.write_atomically(path, self.to_bytes())

  @classmethod
  def from_bytes(cls, data: bytes) -> 'TokenPairs':
    """The inverse of `to_bytes`, for bytes that are known to be undamaged."""
    with np.load(io.BytesIO(data)) as archive:
      return cls(**{name: archive[name] for name in _ARRAYS})

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> 'TokenPairs':
    """Reads a `.npz` file.

    Raises:
      ValueError: the file is missing, cut short, lacks an array, or its
        offsets do not fit its tokens.
    """
    path = os.fspath(path)
    try:
      # Opened here, because NumPy does not close a file that it refuses.
      with files.open_regular(path) as stream, np.load(stream) as archive:
        missing = [name for name in _ARRAYS if name not in archive]
        if missing:
          raise ValueError(f'it lacks the arrays {missing}')
        arrays = {name: archive[name] for name in _ARRAYS}
      _check_flat(arrays)
    except OSError as error:
      raise ValueError(
        f'No token arrays could be read at {path!r}: {error}'
      ) from error
    except _BROKEN as error:
      raise ValueError(
        f'{path!r} is not a whole .npz file of token pairs: {error}. Expected'
        f' the arrays {", ".join(_ARRAYS)}.'
      ) from error
    return cls(**arrays)


def read_tsv(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
  """Source and target text of a UTF-8 TSV file, plain or `.gz`.

  Raises:
    ValueError: the file cannot be read, or a line does not have two columns.
  """
  path = os.fspath(path)
  pairs = []
  for number, line in enumerate(files.text_lines(path), 1):
    columns = line.split('\t')
    if len(columns) != 2:
      raise ValueError(
        f'{path!r} line {number} has {len(columns)} columns; expected'
        ' source<TAB>target.'
      )
    pairs.append((columns[0], columns[1]))
  return pairs


def read_lines(path: str | os.PathLike[str]) -> list[str]:
  """The lines of a UTF-8 file, plain or `.gz`, without empty lines.

  Raises:
    ValueError: the file cannot be read, or has no line with text.
  """
  lines = [line for line in files.text_lines(path) if line.strip()]
  if not lines:
    raise ValueError(f'{os.fspath(path)!r} has no line with text.')
  return lines


def tokenise(
  pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> TokenPairs:
  """Ids of each source and target."""
  return TokenPairs.from_lists(
    tokenizer.encode_batch([source for source, _ in pairs]),
    tokenizer.encode_batch([target for _, target in pairs]),
  )


def tokenise_lines(lines: Sequence[str], tokenizer: Tokenizer) -> TokenPairs:
  """Lines as targets of a decoder-only model, which ignores sources.

  Each source is only the start token, which every text begins with.
  """
  # Decoders begin with id 0, the padding id (see `losses.shift_right`).
  sources = [[PAD_ID]] * len(lines)
  return TokenPairs.from_lists(sources, tokenizer.encode_batch(lines))


def _flatten(
  sequences: Sequence[Iterable[int]],
) -> tuple[np.ndarray, np.ndarray]:
  arrays = [np.asarray(ids, np.int32).reshape(-1) for ids in sequences]
  offsets = np.zeros(len(arrays) + 1, np.int64)
  np.cumsum([len(ids) for ids in arrays], out=offsets[1:])
  flat = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
  return flat.astype(np.int32), offsets


def _check_flat(arrays: dict[str, np.ndarray]) -> None:
  for name in ('inputs', 'targets'):
    tokens, offsets = arrays[name], arrays[f'{name}_offsets']
    if tokens.ndim != 1 or tokens.dtype.kind not in 'iu':
      raise ValueError(
        f'{name} is {tokens.dtype}{list(tokens.shape)}, not flat int32'
      )
    if (
      offsets.ndim != 1
      or len(offsets) < 1
      or offsets[0] != 0
      or offsets[-1] != len(tokens)
      or np.any(np.diff(offsets) < 0)
    ):
      raise ValueError(
        f'{name}_offsets must rise from 0 to the {len(tokens)} ids of {name}'
      )
  pairs = [len(arrays[f'{n}_offsets']) - 1 for n in ('inputs', 'targets')]
  if pairs[0] != pairs[1]:
    raise ValueError(f'it has {pairs[0]} sources and {pairs[1]} targets')
