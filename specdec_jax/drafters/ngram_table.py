"""N-gram tables of any order: contexts and their continuations.

A table of order n has contexts of up to n - 1 tokens: order 1 is a unigram,
order 2 a bigram. The contexts form a tree that is read backwards, from the last
token on: a walk from the root (the empty context) until no child fits finds the
longest end of a text that is a context. No array is V x V: memory grows with
the number of contexts in the corpus. `fit` counts the continuations of each
context. Contexts with one more token are ordered by (number of the shorter
context, token), so that the sorted list of these pairs is the next level of the
tree.

    context 0 is the root; those of one token follow, then those of two, ...
    children[i]:children[i + 1]  contexts that put one more token in front of i
    tokens[i]                    the token that i puts in front of its parent;
                                 sorted among the children of one parent
    starts[i]:starts[i + 1]      the continuations of i in ids and log_probs,
                                 the likeliest first
"""

import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from specdec_jax import files
from specdec_jax.checks.fields import check_number, unexpected

_BROKEN = EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile
_ABOUT = 'order', 'vocab_size', 'fingerprint'
_INTEGERS = 'tokens', 'children', 'starts', 'ids'
_ARRAYS: dict[str, type] = dict.fromkeys(_INTEGERS, np.int32)
_ARRAYS['log_probs'] = np.float32


@struct.dataclass
class NGramTable:
  """The parameters of the `ngram` drafter; see the module for the layout.

  Attributes:
    tokens: int32[N], the token that each context puts in front of its parent.
    children: int32[N + 1], the index of each context's first child; the last
      entry is N.
    starts: int32[N + 1], the index in `ids` of each context's first
      continuation; the last entry is C.
    ids: int32[C], tokens that follow a context, its continuations.
    log_probs: float32[C], natural logarithms of the relative frequencies of
      `ids` after their contexts.
    order: static, n.
    vocab_size: static, V.
    fanouts: static, the most children of a context of 0, 1, ... n - 2 tokens.
    max_continuations: static, the most continuations of a context.
    fingerprint: static, fingerprint of the tokenizer; '' if there was none.

  Examples:
    >>> table = sd.fit_ngram_table(
    ...   [[0, 5, 6], [0, 5, 7]], order=2, vocab_size=8
    ... )
    >>> table.num_contexts  # the empty one; (0,) and (5,)
    (1, 2)
    >>> table.save('bigram.npz')
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
    """The number of contexts with 0 tokens, with 1, ... and with n - 1."""
    edges = _edges(np.asarray(self.children), self.order)
    return tuple(int(size) for size in np.diff(edges))

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes an `.npz` file, whole or not at all; makes its folder.

    Raises:
      OSError: the folder cannot be made or written, or the disk is full.
    """
    about = {name: getattr(self, name) for name in _ABOUT}
    arrays = {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
    arrays['about'] = np.array(json.dumps(about))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    os.makedirs(os.path.dirname(os.fspath(path)) or '.', exist_ok=True)
    files.write_atomically(path, buffer.getvalue())


def load(path: str | os.PathLike[str], vocabulary: Any = None) -> NGramTable:
  """Reads a table that `NGramTable.save` wrote; its arrays are NumPy's.

  Args:
    path: path of the `.npz` file.
    vocabulary: the `Tokenizer` that the table must have been fitted with; None
      does not check it.

  Raises:
    ValueError: the file is missing or broken, or belongs to another
      vocabulary.

  Examples:
    >>> table = sd.fit_ngram_table(
    ...   [[0, 5, 6], [0, 5, 7]], order=2, vocab_size=8
    ... )
    >>> table.save('bigram.npz')
    >>> sd.load_ngram_table('bigram.npz').order
    2
  """
  path = os.fspath(path)
  try:
    # NumPy would not close a file that it refuses.
    with files.open_regular(path) as stream:
      # NumPy's error about another file would advise to load it unsafely.
      if not zipfile.is_zipfile(stream):
        raise ValueError('it is not an .npz archive')
      stream.seek(0)
      with np.load(stream) as archive:
        about = json.loads(str(archive['about']))
        arrays = {name: archive[name] for name in _ARRAYS}
    table = from_arrays(arrays, **{name: about[name] for name in _ABOUT})
  except _BROKEN as error:
    expected = 'a whole file that gin/runs/fit_ngram.gin wrote'
    reason = f'{files.reason(error)}.'
    raise unexpected('n-gram table', expected, path, reason) from error
  if vocabulary is not None:
    check_vocabulary(repr(path), table, vocabulary)
  return table


def _edges(children: np.ndarray, order: int) -> list[int]:
  """Lists the first index of the contexts of each length, and their end."""
  edges = [0, 1]
  for _ in range(order - 1):
    edges.append(int(children[edges[-1]]))
  return edges


def from_arrays(
  arrays: Mapping[str, np.ndarray],
  order: int,
  vocab_size: int,
  fingerprint: str = '',
) -> NGramTable:
  """Makes a table on the host from the arrays that the module describes.

  Args:
    arrays: the five arrays by name, of any integer and floating types.
    order: n; the longest contexts have n - 1 tokens.
    vocab_size: V; all ids lie in [0, V).
    fingerprint: fingerprint of the tokenizer; '' if there is none.

  Raises:
    ValueError: the arrays do not fit together, or have ids outside [0, V).
  """
  cast: dict[str, Any] = {
    name: arrays[name].astype(kind) for name, kind in _ARRAYS.items()
  }
  tokens, ids, children = cast['tokens'], cast['ids'], cast['children']
  for name, first, end in ('children', 1, len(tokens)), ('starts', 0, len(ids)):
    bounds = cast[name]
    fits = bounds.shape == (len(tokens) + 1,) and bounds[0] == first
    if not fits or bounds[-1] != end or np.any(np.diff(bounds) < 0):
      raise ValueError(f'{name} does not divide up the array it points into')
  if cast['log_probs'].shape != ids.shape:
    raise ValueError('ids and log_probs differ in length')
  both = np.concatenate([tokens, ids])
  if not 0 <= both.min() <= both.max() < vocab_size:
    raise ValueError(f'it holds ids outside [0, {vocab_size})')
  edges = _edges(children, order)
  if edges[-1] != len(tokens) or np.any(np.diff(edges) < 1):
    raise ValueError(f'its contexts do not reach up to order {order}')
  fanouts = np.maximum.reduceat(np.diff(children), edges[:-1])[:-1]
  return NGramTable(
    **cast,
    order=order,
    vocab_size=vocab_size,
    fanouts=tuple(fanouts.tolist()),
    max_continuations=int(np.diff(cast['starts']).max()),
    fingerprint=fingerprint,
  )


def check_vocabulary(which: str, table: NGramTable, vocabulary: Any) -> None:
  """Raises ValueError unless a table was made with the same vocabulary.

  Args:
    which: name of the table, for the message.
    table: the table to be used.
    vocabulary: the `Tokenizer` of the models that it is used with.
  """
  same = table.fingerprint == vocabulary.fingerprint
  if not table.fingerprint:
    same = table.vocab_size == vocabulary.vocab_size
  if not same:
    expected, got = (
      f'{side.vocab_size} pieces ({side.fingerprint[:16] or "unknown"})'
      for side in (vocabulary, table)
    )
    advice = 'Fit it again: `specdec train --gin_file=gin/runs/fit_ngram.gin`.'
    raise unexpected(f'vocabulary of table {which}', expected, got, advice)


# These functions fit a table to a corpus.


def fit(
  sequences: Iterable[Sequence[int] | np.ndarray],
  order: int,
  vocab_size: int,
  *,
  max_continuations: int = 32,
  min_count: int = 1,
  fingerprint: str = '',
) -> NGramTable:
  """Counts the continuations of each context of up to `order` - 1 tokens.

  Every token of a sequence but its first is predicted, so a sequence must begin
  with the decoder's first token (T5's start token 0). Contexts never reach past
  the start of a sequence. Fitting takes some 50 bytes of memory per token of
  the corpus.

  Args:
    sequences: the sequences of ids; read once.
    order: n >= 1.
    vocab_size: V; ids lie in [0, V).
    max_continuations: the most continuations of a context. The most frequent
      ones are kept; of equally frequent ones those with smaller ids.
    min_count: contexts that occur less often are left out, except the empty
      one.
    fingerprint: fingerprint of the tokenizer, which `load` compares.

  Returns:
    The table, with NumPy arrays.

  Raises:
    ValueError: a number is below 1, an id is outside the vocabulary, or the
      corpus is too small: for some length no context is left.

  Examples:
    >>> table = sd.fit_ngram_table(
    ...   [[0, 5, 6], [0, 5, 6]], order=2, vocab_size=8
    ... )
    >>> table.ids[
    ...   table.starts[1] :
    ... ].tolist()  # after 0 comes 5, after 5 comes 6
    [5, 6]
  """
  check_number('order', order, 1)
  check_number('vocab_size', vocab_size, 1)
  check_number('max_continuations', max_continuations, 1)
  check_number('min_count', min_count, 1)
  # The first row is empty, so that rows can be concatenated if there are none.
  rows = [np.zeros(0, np.int64)]
  rows += [np.asarray(row, np.int64).reshape(-1) for row in sequences]
  for row in rows:
    if row.size and not 0 <= row.min() <= row.max() < vocab_size:
      got = int(row.min()), int(row.max())
      raise unexpected('sequences', f'ids in [0, {vocab_size})', got)
  levels = list(_levels(rows, order, vocab_size, min_count))
  if (depth := len(levels)) < order:
    expected = f'a token that follows {depth + 1} others {min_count} times'
    corpus = f'{sum(map(len, rows))} tokens in {len(rows) - 1} sequences'
    advice = f'Give more text, a smaller min_count, or order {max(depth, 1)}.'
    raise unexpected('sequences', expected, corpus, advice)

  fronts, parents, owner, ids, counts = map(
    np.concatenate, zip(*levels, strict=True)
  )
  total = np.bincount(owner, weights=counts)
  likeliest = np.lexsort((ids, -counts, owner))
  rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
  best = likeliest[rank < max_continuations]
  owner = owner[best]
  bounds = np.arange(len(fronts) + 1)
  arrays = {
    'tokens': fronts,
    'children': np.searchsorted(parents, bounds),
    'starts': np.searchsorted(owner, bounds),
    'ids': ids[best],
    'log_probs': np.log(counts[best] / total[owner]),
  }
  return from_arrays(arrays, order, vocab_size, fingerprint)


def _levels(
  rows: list[np.ndarray], order: int, vocab_size: int, min_count: int
) -> Iterator[tuple[np.ndarray, ...]]:
  """Yields the contexts of 0, 1, ... order - 1 tokens, while there are any.

  Args:
    rows: int64[n], the sequences.
    order: n; contexts have up to n - 1 tokens.
    vocab_size: V.
    min_count: contexts that occur less often are left out.

  Yields:
    For each length, the first token and the parent of each context; and the
    context, the token and the count of each continuation. All are sorted.
  """
  tokens = np.concatenate(rows)
  position = np.concatenate([np.arange(len(row)) for row in rows])
  # `place` is the position of each predicted token, `node` the index of its
  # longest context so far.
  place = np.flatnonzero(position > 0)
  node = np.zeros(len(place), np.int64)
  fronts, parents = np.zeros(1, np.int64), np.full(1, -1)
  number = 1
  for depth in range(order):
    if depth:
      reaches = position[place] >= depth
      place, node = place[reaches], node[reaches]
      keys, index, counts = np.unique(
        node * vocab_size + tokens[place - depth],
        return_inverse=True,
        return_counts=True,
      )
      frequent = counts >= min_count
      fronts = keys[frequent] % vocab_size
      parents = keys[frequent] // vocab_size
      node = (number + np.cumsum(frequent) - 1)[index]
      place, node = place[frequent[index]], node[frequent[index]]
      number += len(fronts)
    if not len(place):
      return
    keys, counts = np.unique(
      node * vocab_size + tokens[place], return_counts=True
    )
    yield fronts, parents, keys // vocab_size, keys % vocab_size, counts
