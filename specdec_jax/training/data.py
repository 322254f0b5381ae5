"""Pairs of token sequences and the batches a training run sees.

A `.npz` file of pre-tokenised pairs holds four arrays:

  inputs          int32[sum of source lengths]  all source ids in a row
  inputs_offsets  int64[N + 1]                  pair i is inputs[o[i]:o[i + 1]]
  targets         int32[sum of target lengths]
  targets_offsets int64[N + 1]

without end-of-sequence ids and padding: an example may join several pairs, and
gets its one end-of-sequence id when it is joined. Reading one needs NumPy only.
"""

import bisect
import dataclasses
import functools
import io
import itertools
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax import files
from specdec_jax.tokenizer import EOS_ID, PAD_ID, Tokenizer

_ARRAYS = ('inputs', 'inputs_offsets', 'targets', 'targets_offsets')


class Batch(NamedTuple):
  """Padded rows in N parts; a row that is all padding carries no weight.

  Attributes:
    inputs: int32[N, B, L], source ids, end of sequence, padding.
    targets: int32[N, B, L], likewise.
  """

  inputs: np.ndarray
  targets: np.ndarray


@dataclasses.dataclass(frozen=True)
class TokenPairs:
  """N pairs of ragged id sequences in four flat arrays (see the module)."""

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
    """Flattens equally many source and target sequences.

    Raises:
      ValueError: there are more of one than of the other.
    """
    if len(inputs) != len(targets):
      raise ValueError(
        f'{len(inputs)} source sequences came with {len(targets)} target'
        ' sequences; every pair needs both.'
      )
    return cls(*_flatten(inputs), *_flatten(targets))

  def joined(self, other: 'TokenPairs') -> 'TokenPairs':
    """These pairs and then those of `other`."""
    both = [pairs[i] for pairs in (self, other) for i in range(len(pairs))]
    sources, targets = zip(*both, strict=True) if both else ((), ())
    return TokenPairs.from_lists(sources, targets)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the `.npz` file, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{n: getattr(self, n) for n in _ARRAYS})
    files.write_atomically(path, buffer.getvalue())

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> 'TokenPairs':
    """Reads a `.npz` file.

    Raises:
      ValueError: the file is missing, cut short, lacks an array, or its
        offsets do not fit its tokens.
    """
    path = os.fspath(path)
    try:
      # NumPy would leave a file that it opened and refused open.
      with open(path, 'rb') as stream, np.load(stream) as archive:
        missing = [name for name in _ARRAYS if name not in archive]
        if missing:
          raise ValueError(f'it lacks the arrays {missing}')
        arrays = {name: archive[name] for name in _ARRAYS}
      _check_flat(arrays)
    except OSError as error:
      raise ValueError(
        f'No token arrays could be read at {path!r}: {error}'
      ) from error
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
      raise ValueError(
        f'{path!r} is not a whole .npz file of token pairs: {error}. Expected'
        f' the arrays {", ".join(_ARRAYS)}.'
      ) from error
    return cls(**arrays)


def read_tsv(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
  """Source and target text of a UTF-8 TSV file, plain or `.gz`.

  Raises:
    ValueError: the file cannot be read, or a line has not two columns.
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


def tokenise(
  pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> TokenPairs:
  """Ids of each source and target."""
  return TokenPairs.from_lists(
    tokenizer.encode_batch([source for source, _ in pairs]),
    tokenizer.encode_batch([target for _, target in pairs]),
  )


@dataclasses.dataclass(frozen=True)
class PackingConfig:
  """How pairs become batches.

  Attributes:
    weights: weights[k] is proportional to the number of examples that join
      k + 1 pairs. Joining is plain concatenation: what a text of several
      sentences looks like to the model.
    buckets: increasing lengths, the only ones a batch may have; an example
      takes the smallest that holds its source and its target. One program is
      compiled for each.
    tokens_per_batch: a batch has about so many places on each side.
    tokens_per_part: a batch is computed in parts of about so many places,
      whose gradients are summed. On a CPU the logits of a part then stay in
      its cache; a GPU or TPU takes a whole batch at once (0).
    seed: decides order and joining. Together with the step it decides a batch.
  """

  weights: tuple[float, ...] = (0.4, 0.25, 0.2, 0.15)
  buckets: tuple[int, ...] = (12, 16, 20, 26, 32, 40, 52, 68, 96)
  tokens_per_batch: int = 4096
  tokens_per_part: int = 0
  seed: int = 0

  def __post_init__(self):
    if not self.weights or min(self.weights) < 0 or sum(self.weights) <= 0:
      raise ValueError(
        f'PackingConfig.weights is {self.weights}; expected weights >= 0, at'
        ' least one of them > 0.'
      )
    if not self.buckets or any(
      low >= high for low, high in itertools.pairwise((0, *self.buckets))
    ):
      raise ValueError(
        f'PackingConfig.buckets is {self.buckets}; expected increasing'
        ' lengths >= 1.'
      )
    if self.tokens_per_batch < self.buckets[-1]:
      raise ValueError(
        f'PackingConfig.tokens_per_batch is {self.tokens_per_batch}; expected'
        f' at least the longest bucket, {self.buckets[-1]}, for one row.'
      )


class _Plan(NamedTuple):
  """One epoch: pairs in order, cut into examples, gathered into batches.

  Example i joins the pairs order[bounds[i]:bounds[i + 1]].
  """

  order: np.ndarray
  bounds: np.ndarray
  batches: list[tuple[int, np.ndarray]]


class PackedBatches:
  """Length-bucketed batches; batch `step` depends on (seed, step) alone.

  An epoch shuffles the pairs, joins neighbours, and sorts examples into
  buckets. What does not fill a batch moves on to the next longer bucket; what
  is left in the longest is dropped for that epoch, or kept in a batch with
  empty rows where the caller needs every pair (evaluation) or has no full
  batch at all.
  """

  def __init__(
    self, pairs: TokenPairs, config: PackingConfig, keep_all: bool = False
  ):
    """Checks that there is something to train on.

    Raises:
      ValueError: no pair fits the longest bucket.
    """
    self._pairs = pairs
    self._config = config
    self._keep_all = keep_all
    self._source_lengths = np.diff(pairs.inputs_offsets)
    self._target_lengths = np.diff(pairs.targets_offsets)
    # An end-of-sequence id follows the last pair. Empty sides teach nothing.
    longest = np.maximum(self._source_lengths, self._target_lengths)
    shortest = np.minimum(self._source_lengths, self._target_lengths)
    self._usable = np.flatnonzero(
      (longest < config.buckets[-1]) & (shortest > 0)
    )
    self.num_dropped = len(pairs) - len(self._usable)
    if not len(self._usable):
      raise ValueError(
        f'None of the {len(pairs)} pairs is non-empty and shorter than the'
        f' longest bucket ({config.buckets[-1]} tokens with its end).'
      )
    # One plan is a few MB; the current epoch and the last suffice.
    self._plan = functools.lru_cache(maxsize=2)(self._make_plan)
    self._starts = [0]

  def shape(self, length: int) -> tuple[int, int, int]:
    """(N, B, L) of a batch of a bucket."""
    budget = self._config.tokens_per_batch
    rows = max(1, (self._config.tokens_per_part or budget) // length)
    return max(1, budget // (rows * length)), rows, length

  def shapes(self) -> list[tuple[int, int, int]]:
    """The shapes of the first epoch's batches; a later one may add one."""
    lengths = {length for length, _ in self._plan(0).batches}
    return [self.shape(length) for length in sorted(lengths)]

  def epoch(self, number: int = 0) -> Iterator[Batch]:
    """All batches of one epoch."""
    for index in range(len(self._plan(number).batches)):
      yield self._gather(number, index)

  def batch(self, step: int) -> Batch:
    """The batch of a step, counted from 0 over all epochs."""
    while self._starts[-1] <= step:
      number = len(self._starts) - 1
      batches = len(self._plan(number).batches)
      self._starts.append(self._starts[-1] + batches)
    number = bisect.bisect_right(self._starts, step) - 1
    return self._gather(number, step - self._starts[number])

  def examples(self, number: int = 0) -> TokenPairs:
    """The examples of one epoch, in random order: pairs that are joined."""
    plan = self._plan(number)
    order, bounds = plan.order, plan.bounds
    joined = [
      [self._pairs[i] for i in order[begin:end]]
      for begin, end in itertools.pairwise(bounds)
    ]
    inputs, targets = (
      [np.concatenate([pair[side] for pair in pairs]) for pairs in joined]
      for side in range(2)
    )
    return TokenPairs.from_lists(inputs, targets)

  def epochs_done(self, step: int) -> float:
    """How many times the data has been seen before `step`."""
    self.batch(step)
    number = bisect.bisect_right(self._starts, step) - 1
    begin, end = self._starts[number : number + 2]
    return number + (step - begin) / (end - begin)

  def _make_plan(self, number: int) -> _Plan:
    rng = np.random.Generator(
      np.random.Philox(np.random.SeedSequence([self._config.seed, number]))
    )
    order = rng.permutation(self._usable)
    bounds = self._join(order, rng)
    lengths = np.maximum(
      np.add.reduceat(self._source_lengths[order], bounds[:-1]),
      np.add.reduceat(self._target_lengths[order], bounds[:-1]),
    )
    batches = self._fill(lengths + 1)
    rng.shuffle(batches)
    return _Plan(order, bounds, batches)

  def _join(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Where examples begin in `order`, and its end; none is too long."""
    weights = np.asarray(self._config.weights, np.float64)
    sizes = 1 + rng.choice(
      len(weights), size=len(order), p=weights / weights.sum()
    )
    starts = np.zeros(len(order) + 1, bool)
    ends = np.cumsum(sizes)
    starts[0] = starts[-1] = True
    starts[ends[ends < len(order)]] = True
    source = np.concatenate([[0], np.cumsum(self._source_lengths[order])])
    target = np.concatenate([[0], np.cumsum(self._target_lengths[order])])
    room = self._config.buckets[-1] - 1
    # Where joined pairs are too long, the example is cut apart again.
    bounds = np.flatnonzero(starts)
    for begin, end in itertools.pairwise(bounds):
      if max(source[end] - source[begin], target[end] - target[begin]) > room:
        starts[begin:end] = True
    return np.flatnonzero(starts)

  def _fill(self, lengths: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Groups examples (in random order) into batches of one bucket each."""
    batches: list[tuple[int, np.ndarray]] = []
    left = np.empty(0, np.int64)
    bucket_of = np.searchsorted(self._config.buckets, lengths)
    for index, length in enumerate(self._config.buckets):
      rows = math.prod(self.shape(length)[:2])
      waiting = np.concatenate([left, np.flatnonzero(bucket_of == index)])
      full = len(waiting) // rows * rows
      batches += [(length, chunk) for chunk in waiting[:full].reshape(-1, rows)]
      left = waiting[full:]
    if len(left) and (self._keep_all or not batches):
      batches += self._leftover(left, lengths[left])
    return batches

  def _leftover(
    self, examples: np.ndarray, lengths: np.ndarray
  ) -> list[tuple[int, np.ndarray]]:
    """Batches that are not full, in the longest bucket they need."""
    index = int(np.searchsorted(self._config.buckets, lengths.max()))
    length = self._config.buckets[index]
    rows = math.prod(self.shape(length)[:2])
    return [
      (length, examples[at : at + rows]) for at in range(0, len(examples), rows)
    ]

  def _gather(self, number: int, index: int) -> Batch:
    plan = self._plan(number)
    length, examples = plan.batches[index]
    shape = self.shape(length)
    batch = [np.full((shape[0] * shape[1], length), PAD_ID, np.int32)]
    batch.append(batch[0].copy())
    for row, example in enumerate(examples):
      begin, end = plan.bounds[example : example + 2]
      pairs = [self._pairs[i] for i in plan.order[begin:end]]
      for side in range(2):
        ids = np.concatenate([pair[side] for pair in pairs])
        batch[side][row, : len(ids)] = ids
        batch[side][row, len(ids)] = EOS_ID
    return Batch(*(rows.reshape(shape) for rows in batch))


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
