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
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import unexpected
from specdec_jax.text.tokenizer import PAD_ID, Tokenizer

Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class TokenPairs:
  """N pairs of id sequences of any lengths in four flat arrays; see above.

  Raises:
    ValueError: the offsets do not fit the tokens, or one side has more
      sequences than the other.
  """

  inputs: np.ndarray
  inputs_offsets: np.ndarray
  targets: np.ndarray
  targets_offsets: np.ndarray

  def __post_init__(self):
    for name in ('inputs', 'targets'):
      tokens, offsets = getattr(self, name), getattr(self, f'{name}_offsets')
      fits = (
        tokens.ndim == 1
        and tokens.dtype.kind in 'iu'
        and offsets.ndim == 1
        and len(offsets) > 0
        and offsets.shape == self.inputs_offsets.shape
        and (offsets[0], offsets[-1]) == (0, len(tokens))
        and not np.any(np.diff(offsets) < 0)
      )
      if not fits:
        expected = 'ids and increasing offsets, as many on both sides'
        raise unexpected(f'TokenPairs.{name}', expected, (tokens, offsets))

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
    """Flattens source and target sequences, as many of each."""
    return cls(*_flatten(inputs), *_flatten(targets))

  def save(self, path: Path, **others: Any) -> None:
    """Writes the `.npz` file, whole or not at all, with other arrays."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **vars(self), **others)
    files.write_atomically(path, buffer.getvalue())

  @classmethod
  def load(cls, path: Path) -> 'TokenPairs':
    """Reads a `.npz` file.

    Raises:
      ValueError: the file is missing, cut short, lacks an array, or its
        offsets do not fit its tokens.
    """
    arrays = read_arrays(path)
    names = [field.name for field in dataclasses.fields(cls)]
    if missing := [name for name in names if name not in arrays]:
      expected = f'token pairs, the arrays {", ".join(names)}'
      advice = f'Without {", ".join(missing)}.'
      raise unexpected(os.fspath(path), expected, sorted(arrays), advice)
    try:
      return cls(**{name: arrays[name] for name in names})
    except ValueError as error:
      raise ValueError(f'{os.fspath(path)!r}: {error}') from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
  """All arrays of a `.npz` file.

  Raises:
    ValueError: the file is missing or damaged.
  """
  try:
    # Opened here, because NumPy does not close a file that it refuses.
    with files.open_regular(path) as stream, np.load(stream) as archive:
      return dict(archive)
  except Exception as error:  # NumPy and zipfile raise many for damaged files
    raise ValueError(
      f'{os.fspath(path)!r}: expected a whole .npz file of token pairs, got'
      f' {type(error).__name__}: {error}.'
    ) from error


def read_tsv(path: Path) -> list[tuple[str, str]]:
  """Source and target text of a UTF-8 TSV file, plain or `.gz`.

  Raises:
    ValueError: the file cannot be read, or a line does not have two columns.
  """
  pairs = []
  for number, line in enumerate(files.text_lines(path), 1):
    columns = line.split('\t')
    if len(columns) != 2:
      place = f'{os.fspath(path)!r} line {number}'
      got = f'{len(columns)} columns'
      raise unexpected(place, 'source<TAB>target', got)
    pairs.append((columns[0], columns[1]))
  return pairs


def read_lines(path: Path) -> list[str]:
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
  """Ids of each source and target, with what a text begins with."""
  first = tokenizer.whole('')[:-1]
  return TokenPairs.from_lists(
    *(
      [[*first, *ids] for ids in tokenizer.encode_batch(texts)]
      for texts in zip(*pairs, strict=True)
    )
  )


def tokenise_lines(lines: Sequence[str], tokenizer: Tokenizer) -> TokenPairs:
  """Lines as targets of a decoder-only model, which ignores sources.

  Each source is one id, whatever it is: a pair needs two sides.
  """
  sources = [[PAD_ID]] * len(lines)
  return TokenPairs.from_lists(sources, tokenizer.encode_batch(lines))


def _flatten(
  sequences: Sequence[Iterable[int]],
) -> tuple[np.ndarray, np.ndarray]:
  """All ids in a row, and where each sequence begins."""
  arrays = [np.asarray(ids, np.int32).reshape(-1) for ids in sequences]
  offsets = np.zeros(len(arrays) + 1, np.int64)
  np.cumsum([len(ids) for ids in arrays], out=offsets[1:])
  return np.concatenate([np.empty(0, np.int32), *arrays]), offsets
