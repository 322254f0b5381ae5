"""N-gram tables: what follows a context, kept compactly, for every order.

A table of order n knows contexts of up to n - 1 tokens: order 1 is a unigram,
order 2 a bigram. Contexts form a tree that is read backwards, beginning with
the last token, so that the longest known end of any text is found by walking
down from the root (the empty context) until no child fits. No array is V x V:
memory grows with the number of contexts that the corpus holds. `fit` counts
what follows each context: contexts with one more token are ordered by (number
of the shorter context, token), so that the sorted list of these pairs is the
next level of the tree.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import struct

from specdec_jax import files
from specdec_jax.checks.fields import check_number, unexpected

_KIND = 'ngram table'
_BROKEN = (
  *(AttributeError, EOFError, KeyError, OSError, TypeError, ValueError),
  zipfile.BadZipFile,
)
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

  @property
  def fingerprint(self) -> str: ...


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
  except _BROKEN as error:
    reason = getattr(error, 'strerror', None) or error
    expected = 'a whole file that gin/runs/fit_ngram.gin wrote'
    raise unexpected('n-gram table', expected, path, f'{reason}.') from error
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
  same = table.fingerprint == vocabulary.fingerprint
  if not table.fingerprint:
    same = table.vocab_size == vocabulary.vocab_size
  if not same:
    wanted, given = (
      f'{of.vocab_size} pieces ({of.fingerprint[:16] or "unknown"})'
      for of in (vocabulary, table)
    )
    advice = 'Fit it again: `specdec train --gin_file=gin/runs/fit_ngram.gin`.'
    raise unexpected(f'vocabulary of table {which}', wanted, given, advice)


# --- Fitting ------------------------------------------------------------------


def fit(
  sequences: Iterable[Sequence[int] | np.ndarray],
  order: int,
  vocab_size: int,
  *,
  max_continuations: int = 32,
  min_count: int = 1,
  fingerprint: str = '',
) -> NGramTable:
  """Counts what follows each context of up to `order` - 1 tokens.

  Every token of a sequence but its first is predicted, so a sequence must begin
  with what a decoder begins with (T5's start token 0). Contexts never reach
  past the start of a sequence. It takes some 50 bytes of memory per token of
  the corpus.

  Args:
    sequences: the sequences of ids; read once.
    order: n >= 1.
    vocab_size: V; ids lie in [0, V).
    max_continuations: entries kept per context, the most frequent ones; ties go
      to the smaller id.
    min_count: contexts seen less often are left out, except the empty one.
    fingerprint: fingerprint of the tokenizer, kept for `load`.

  Returns:
    The table, with NumPy arrays.

  Raises:
    ValueError: a number is below 1, an id is outside the vocabulary, or the
      corpus is too small: for some length no context is left.
  """
  check_number('order', order, 1)
  check_number('vocab_size', vocab_size, 1)
  check_number('max_continuations', max_continuations, 1)
  check_number('min_count', min_count, 1)
  tokens, position = _flatten(sequences, vocab_size)
  # For each token that is predicted: its place in the corpus, and the number of
  # its context within the current level, that is among the contexts of the
  # current length. Level 0 is the empty context.
  place = np.flatnonzero(position > 0)
  node = np.zeros(len(place), np.int64)
  level, parents = np.zeros((2, 1), np.int64)
  levels, found = [], []
  for depth in range(order):
    if depth:
      reaches = position[place] >= depth
      level, parents, place, node = _deeper(
        tokens, place[reaches], node[reaches], depth, min_count
      )
    if not len(place):
      raise unexpected(
        'sequences',
        f'a token that follows {depth + 1} others {min_count} times',
        f'{len(tokens)} tokens in {np.sum(position == 0)} sequences',
        f'Give more text, a smaller min_count, or order {max(depth, 1)}.',
      )
    levels.append((level, parents))
    found.append(
      _continuations(tokens, place, node, len(level), max_continuations)
    )
  counts, ids, log_probs = map(np.concatenate, zip(*found, strict=True))
  return from_arrays(
    {
      'tokens': np.concatenate([level for level, _ in levels]),
      'children': _children([parents for _, parents in levels]),
      'starts': np.cumsum(np.append(0, counts)),
      'ids': ids,
      'log_probs': log_probs,
    },
    {
      'order': order,
      'vocab_size': vocab_size,
      'fingerprint': fingerprint,
    },
  )


def _flatten(sequences, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
  """All tokens, int64[N], and the place of each in its sequence, int64[N]."""
  rows = [np.asarray(row, np.int64).reshape(-1) for row in sequences]
  tokens = np.concatenate([np.zeros(0, np.int64), *rows])
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    given = int(tokens.min()), int(tokens.max())
    raise unexpected('sequences', f'ids in [0, {vocab_size})', given)
  lengths = np.array([len(row) for row in rows], np.int64)
  begins = np.cumsum(lengths) - lengths
  return tokens, np.arange(len(tokens)) - np.repeat(begins, lengths)


def _deeper(
  tokens: np.ndarray,
  place: np.ndarray,
  node: np.ndarray,
  depth: int,
  min_count: int,
) -> tuple[np.ndarray, ...]:
  """The contexts of `depth` tokens: shorter ones with one more token in front.

  Args:
    tokens: the corpus.
    place: places of the tokens that have `depth` others before them.
    node: for each of these tokens, the number of its shorter context.
    depth: >= 1.
    min_count: contexts seen less often are left out.

  Returns:
    The token and the parent of each new context, ordered by parent and then
    token; and `place` and `node` of the tokens that have one.
  """
  base = int(tokens.max()) + 1
  key = node * base + tokens[place - depth]
  keys, node, counts = np.unique(key, return_inverse=True, return_counts=True)
  kept = counts >= min_count
  number = np.cumsum(kept) - 1
  has_context = kept[node]
  return (
    keys[kept] % base,
    keys[kept] // base,
    place[has_context],
    number[node[has_context]],
  )


def _continuations(
  tokens: np.ndarray, place: np.ndarray, node: np.ndarray, size: int, most: int
) -> tuple[np.ndarray, ...]:
  """The most frequent tokens after each of `size` contexts.

  Args:
    tokens: the corpus.
    place: places of the tokens that are predicted.
    node: for each of them its context, 0..size - 1; every context has a token.
    size: number of contexts.
    most: entries kept per context.

  Returns:
    Entries of each context, [size]; their ids and log-probabilities.
  """
  base = int(tokens.max()) + 1
  key, counts = np.unique(node * base + tokens[place], return_counts=True)
  owner, ids = key // base, key % base
  total = np.bincount(owner, weights=counts, minlength=size)
  order = np.lexsort((ids, -counts, owner))
  owner, ids, counts = owner[order], ids[order], counts[order]
  per_node = np.bincount(owner, minlength=size)
  first = np.cumsum(per_node) - per_node
  kept = np.arange(len(owner)) - first[owner] < most
  owner, ids, counts = owner[kept], ids[kept], counts[kept]
  return np.minimum(per_node, most), ids, np.log(counts / total[owner])


def _children(parents: Sequence[np.ndarray]) -> np.ndarray:
  """int64[N + 1]: where each context's children begin; the last have none."""
  sizes = [len(level) for level in parents]
  begins = [1]
  for above, level in zip(sizes, parents[1:], strict=False):
    counts = np.bincount(level, minlength=above)
    begins += (begins[-1] + np.cumsum(counts)).tolist()
  return np.array(begins + [sum(sizes)] * sizes[-1])
