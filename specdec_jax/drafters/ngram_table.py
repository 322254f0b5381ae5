"""N-gram tables: what follows a context, kept compactly, for every order.

A table of order n knows contexts of up to n - 1 tokens: order 1 is a unigram,
order 2 a bigram. Contexts form a tree that is read backwards, beginning with
the last token, so that the longest known end of any text is found by walking
down from the root (the empty context) until no child fits. No array is V x V:
memory grows with the number of contexts that the corpus holds.

    context 0 is the root; those of one token follow, then those of two, ...
    children[i]:children[i + 1]  contexts that put one more token in front of i
    tokens[i]                    the token that i puts in front of its parent;
                                 sorted among the children of one parent
    starts[i]:starts[i + 1]      the entries of i in ids and log_probs, the
                                 likeliest first
"""

import io
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from flax import struct

from specdec_jax import files

_KIND = 'ngram table'
_ARRAYS = {
  'tokens': np.int32,
  'children': np.int32,
  'starts': np.int32,
  'ids': np.int32,
  'log_probs': np.float32,
}


class Vocabulary(Protocol):
  """The vocabulary that a table is fitted with; a `Tokenizer` is one."""

  vocab_size: int
  fingerprint: str


@struct.dataclass
class NGramTable:
  """The parameters of the `ngram` drafter; see the module for the layout.

  Attributes:
    tokens: int32[N], for each context the token in front of its parent's.
    children: int32[N + 1].
    starts: int32[N + 1].
    ids: int32[C], tokens that follow.
    log_probs: float32[C], natural logarithms of their relative frequencies.
    order: static, n.
    vocab_size: static, larger than all ids.
    fanouts: static, the most children of a context of 0, 1, ... n - 2 tokens.
    max_continuations: static, the most entries of a context.
    fingerprint: static, fingerprint of the tokenizer; '' if there was none.
  """

  tokens: jax.Array
  children: jax.Array
  starts: jax.Array
  ids: jax.Array
  log_probs: jax.Array
  order: int = struct.field(pytree_node=False)
  vocab_size: int = struct.field(pytree_node=False)
  fanouts: tuple[int, ...] = struct.field(pytree_node=False)
  max_continuations: int = struct.field(pytree_node=False)
  fingerprint: str = struct.field(pytree_node=False, default='')

  @property
  def num_contexts(self) -> tuple[int, ...]:
    """Contexts of 0, 1, ... n - 1 tokens."""
    edges = _edges(np.asarray(self.children), self.order)
    return tuple(int(size) for size in np.diff(edges))

  @property
  def num_bytes(self) -> int:
    """Bytes of the arrays on the device."""
    return sum(getattr(self, name).nbytes for name in _ARRAYS)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes an `.npz` file, whole or not at all; makes its folder.

    Raises:
      OSError: the folder cannot be made or written, or the disk is full.
    """
    about = {
      'kind': _KIND,
      'order': self.order,
      'vocab_size': self.vocab_size,
      'fingerprint': self.fingerprint,
    }
    arrays: dict[str, Any] = {
      name: np.asarray(getattr(self, name)) for name in _ARRAYS
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, about=np.array(json.dumps(about)), **arrays)
    os.makedirs(os.path.dirname(os.fspath(path)) or '.', exist_ok=True)
    files.write_atomically(path, buffer.getvalue())


def load(
  path: str | os.PathLike[str], vocabulary: Vocabulary | None = None
) -> NGramTable:
  """Reads a table that `NGramTable.save` wrote; gives NumPy arrays.

  Args:
    path: path of the `.npz` file.
    vocabulary: the vocabulary that the table must have been fitted with; None
      does not check it.

  Raises:
    ValueError: the file is missing or broken, or belongs to another
      vocabulary.
  """
  path = os.fspath(path)
  try:
    # Opened here, because NumPy does not close a file that it refuses.
    with files.open_regular(path) as stream:
      # For other files NumPy's error would say how to load them unsafely.
      if not zipfile.is_zipfile(stream):
        raise ValueError('it is not an .npz archive')
      stream.seek(0)
      with np.load(stream) as archive:
        about = json.loads(str(archive['about']))
        arrays = {name: archive[name] for name in _ARRAYS}
    if about['kind'] != _KIND:
      raise ValueError(f'its kind is {about["kind"]!r}')
    table = from_arrays(arrays, about)
  except OSError as error:
    raise ValueError(
      f'No n-gram table could be read at {path!r}: {error.strerror}. Expected'
      ' a file that `specdec train` wrote with gin/runs/fit_ngram.gin.'
    ) from error
  except (
    AttributeError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
  ) as error:
    raise ValueError(
      f'{path!r} is not a whole n-gram table: {error}. Expected a file that'
      ' `specdec train` wrote with gin/runs/fit_ngram.gin.'
    ) from error
  if vocabulary is not None:
    check_vocabulary(repr(os.fspath(path)), table, vocabulary)
  return table


def _edges(children: np.ndarray, order: int) -> list[int]:
  """Where the contexts of 0, 1, ... order - 1 tokens begin, and the end."""
  edges = [0, 1]
  for _ in range(order - 1):
    edges.append(int(children[edges[-1]]))
  return edges


def from_arrays(
  arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]
) -> NGramTable:
  """Makes a table, on the host, from the arrays that the module describes.

  Args:
    arrays: the five arrays, of any integer and floating types.
    about: order, vocab_size and fingerprint.

  Raises:
    ValueError: the parts do not fit.
  """
  order, vocab_size = int(about['order']), int(about['vocab_size'])
  children, starts = arrays['children'], arrays['starts']
  size = len(arrays['tokens'])
  for name, first, end in (
    ('children', 1, size),
    ('starts', 0, len(arrays['ids'])),
  ):
    bounds = arrays[name]
    fits = bounds.shape == (size + 1,) and bounds[0] == first
    if not fits or bounds[-1] != end or np.any(np.diff(bounds) < 0):
      raise ValueError(f'{name} does not divide up the array it points into')
  if arrays['log_probs'].shape != arrays['ids'].shape:
    raise ValueError('ids and log_probs differ in length')
  for name in ('tokens', 'ids'):
    if not 0 <= arrays[name].min() <= arrays[name].max() < vocab_size:
      raise ValueError(f'{name} holds ids outside [0, {vocab_size})')
  edges = _edges(children, order)
  if edges[-1] != size or order < 1 or np.any(np.diff(edges) < 1):
    raise ValueError(f'its contexts do not reach up to order {order}')
  widths = np.diff(children)
  cast: dict[str, Any] = {
    name: arrays[name].astype(kind) for name, kind in _ARRAYS.items()
  }
  return NGramTable(
    **cast,
    order=order,
    vocab_size=vocab_size,
    fanouts=tuple(
      int(widths[low:high].max())
      for low, high in zip(edges[:-2], edges[1:-1], strict=True)
    ),
    max_continuations=int(np.diff(starts).max()),
    fingerprint=str(about['fingerprint']),
  )


def check_vocabulary(
  which: str, table: NGramTable, vocabulary: Vocabulary
) -> None:
  """Raises ValueError unless a table has the ids of a vocabulary.

  Args:
    which: name of the table, for the message.
    table: the table to be used.
    vocabulary: vocabulary of the models that it is used with.
  """
  same = table.fingerprint in ('', vocabulary.fingerprint)
  if not same or table.vocab_size != vocabulary.vocab_size:
    raise ValueError(
      f'The n-gram table {which} was fitted for another vocabulary: of'
      f' {table.vocab_size} pieces, tokenizer'
      f' {table.fingerprint[:16] or "unknown"}; expected'
      f' {vocabulary.vocab_size}, tokenizer {vocabulary.fingerprint[:16]}.'
      ' Fit it again: `specdec train --gin_file=gin/runs/fit_ngram.gin`.'
    )
