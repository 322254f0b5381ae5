"""Fits an `NGramTable`: counts what follows each context.

Contexts with one more token are ordered by (number of the shorter context,
token), so that the sorted list of these pairs is the next level of the table's
tree.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.checks.arguments import check_number
from specdec_jax.drafters.ngram_table import NGramTable, from_arrays


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
  if order < 1:
    raise ValueError(
      f'order must be at least 1, got {order}. Order 1 is a unigram: no'
      ' context.'
    )
  check_number('vocab_size', vocab_size, 1)
  check_number('max_continuations', max_continuations, 1)
  check_number('min_count', min_count, 1)
  corpus = _flatten(sequences, vocab_size)
  # For each token that is predicted: its place in the corpus, and the number of
  # its context within the current level, that is among the contexts of the
  # current length. Level 0 is the empty context.
  place = np.flatnonzero(corpus.position > 0)
  node = np.zeros(len(place), np.int64)
  levels = [_Level(np.zeros(1, np.int64), np.zeros(1, np.int64))]
  if not len(place):
    raise ValueError(_too_small(corpus, 0, min_count))
  follow = [_continuations(corpus, place, node, 1, max_continuations)]
  for depth in range(1, order):
    level, place, node = _deeper(corpus, place, node, depth, min_count)
    size = len(level.tokens)
    if not size:
      raise ValueError(_too_small(corpus, depth, min_count))
    levels.append(level)
    follow.append(_continuations(corpus, place, node, size, max_continuations))
  return from_arrays(
    {
      'tokens': np.concatenate([level.tokens for level in levels]),
      'children': _children(levels),
      'starts': np.cumsum(np.concatenate([[0], *(f.counts for f in follow)])),
      'ids': np.concatenate([f.ids for f in follow]),
      'log_probs': np.concatenate([f.log_probs for f in follow]),
    },
    {
      'order': order,
      'vocab_size': vocab_size,
      'fingerprint': fingerprint,
    },
  )


class _Corpus(NamedTuple):
  """All sequences, one after the other."""

  tokens: np.ndarray  # int64[N]
  position: np.ndarray  # int64[N], place of each token in its sequence
  num_sequences: int


class _Level(NamedTuple):
  """The contexts of one length, ordered by parent and then token."""

  tokens: np.ndarray  # [N]
  parents: np.ndarray  # [N], numbers within the level before


class _Continuations(NamedTuple):
  counts: np.ndarray  # [N], entries of each context
  ids: np.ndarray  # [sum of counts]
  log_probs: np.ndarray  # [sum of counts]


def _flatten(sequences, vocab_size: int) -> _Corpus:
  rows = [np.asarray(row, np.int64).reshape(-1) for row in sequences]
  tokens = np.concatenate([np.zeros(0, np.int64), *rows])
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
      f'The corpus holds ids {tokens.min()}..{tokens.max()}; expected ids in'
      f' [0, {vocab_size}), the vocabulary. Was it tokenised by another one?'
    )
  lengths = np.array([len(row) for row in rows], np.int64)
  begins = np.cumsum(lengths) - lengths
  position = np.arange(len(tokens)) - np.repeat(begins, lengths)
  return _Corpus(tokens, position, len(rows))


def _deeper(
  corpus: _Corpus,
  place: np.ndarray,
  node: np.ndarray,
  depth: int,
  min_count: int,
) -> tuple[_Level, np.ndarray, np.ndarray]:
  """The contexts of `depth` tokens: shorter ones with one more token in front.

  Args:
    corpus: all tokens.
    place: places of the tokens that have a context of `depth` - 1 tokens.
    node: for each of these tokens, the number of that context.
    depth: >= 1.
    min_count: contexts seen less often are left out.

  Returns:
    The new contexts, and `place` and `node` of the tokens that have one.
  """
  reaches = corpus.position[place] >= depth
  place, node = place[reaches], node[reaches]
  base = int(corpus.tokens.max()) + 1
  key = node * base + corpus.tokens[place - depth]
  found, node, counts = np.unique(key, return_inverse=True, return_counts=True)
  kept = counts >= min_count
  number = np.cumsum(kept) - 1
  has_context = kept[node]
  return (
    _Level(found[kept] % base, found[kept] // base),
    place[has_context],
    number[node[has_context]],
  )


def _continuations(
  corpus: _Corpus, place: np.ndarray, node: np.ndarray, size: int, most: int
) -> _Continuations:
  """The most frequent tokens after each of `size` contexts.

  Args:
    corpus: all tokens.
    place: places of the tokens that are predicted.
    node: for each of them its context, 0..size - 1; every context has a token.
    size: number of contexts.
    most: entries kept per context.
  """
  base = int(corpus.tokens.max()) + 1
  key, counts = np.unique(
    node * base + corpus.tokens[place], return_counts=True
  )
  owner, ids = key // base, key % base
  total = np.bincount(owner, weights=counts, minlength=size)
  order = np.lexsort((ids, -counts, owner))
  owner, ids, counts = owner[order], ids[order], counts[order]
  per_node = np.bincount(owner, minlength=size)
  first = np.cumsum(per_node) - per_node
  kept = np.arange(len(owner)) - first[owner] < most
  owner, ids, counts = owner[kept], ids[kept], counts[kept]
  log_probs = np.log(counts / total[owner])
  return _Continuations(np.minimum(per_node, most), ids, log_probs)


def _children(levels: Sequence[_Level]) -> np.ndarray:
  """int64[N + 1]: where each context's children begin; the last have none."""
  sizes = [len(level.tokens) for level in levels]
  begins = [1]
  for above, level in zip(sizes, levels[1:], strict=False):
    counts = np.bincount(level.parents, minlength=above)
    begins += (begins[-1] + np.cumsum(counts)).tolist()
  return np.array(begins + [sum(sizes)] * sizes[-1])


def _too_small(corpus: _Corpus, depth: int, min_count: int) -> str:
  longest = int(corpus.position.max()) + 1 if len(corpus.position) else 0
  held = (
    f'The corpus holds {len(corpus.tokens)} tokens in'
    f' {corpus.num_sequences} sequences, the longest of {longest}'
  )
  if not depth:
    return (
      f'{held}; no token follows a start token, so even the empty context has'
      ' no continuation. Give more text.'
    )
  return (
    f'{held}: there are no contexts of {depth} tokens or more (none of them'
    f' was seen min_count = {min_count} times). Give more text, a smaller'
    f' min_count, or order {depth} at most.'
  )
