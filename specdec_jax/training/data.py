"""What a training run sees: pairs of token sequences, joined into batches.

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
import functools
import hashlib
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import (
  check_all_at_least,
  check_at_least,
  check_types,
  unexpected,
)
from specdec_jax.text.tokenizer import EOS_ID, PAD_ID

Path = str | os.PathLike[str]
NO_TOKEN = -1  # past the end of a row of targets; some vocabularies use 0


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

  @property
  def digest(self) -> str:
    """sha256 (hex) of all ids and offsets."""
    arrays = vars(self).values()
    return hashlib.sha256(b''.join(map(np.ndarray.tobytes, arrays))).hexdigest()

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


def _flatten(
  sequences: Sequence[Iterable[int]],
) -> tuple[np.ndarray, np.ndarray]:
  """All ids in a row, and where each sequence begins."""
  arrays = [np.asarray(ids, np.int32).reshape(-1) for ids in sequences]
  offsets = np.zeros(len(arrays) + 1, np.int64)
  np.cumsum([len(ids) for ids in arrays], out=offsets[1:])
  return np.concatenate([np.empty(0, np.int32), *arrays]), offsets


class Batch(NamedTuple):
  """Padded rows in N parts; a row that is all padding has no weight.

  Attributes:
    inputs: int32[N, B, L], source ids, end of sequence, `PAD_ID`.
    targets: int32[N, B, S], target ids, end of sequence, `NO_TOKEN`.
  """

  inputs: Any
  targets: Any


@dataclasses.dataclass(frozen=True)
class PackingConfig:
  """How pairs become batches.

  Attributes:
    weights: weights[k] is proportional to the number of examples that join
      k + 1 pairs. Joining is plain concatenation: to the model it looks like a
      text of several sentences.
    buckets: increasing lengths, the only ones a batch may have; an example goes
      into the smallest bucket that holds its source and its target. One program
      is compiled for each bucket.
    tokens_per_batch: about how many places a batch has on each side.
    tokens_per_part: about how many places a part of a batch has; a batch is
      computed part by part, and the gradients are summed. On a CPU the logits
      of a part then stay in its cache; 0 is one part, the whole batch, for a
      GPU or TPU.
    max_targets: if > 0, the most target places per row, for data whose targets
      are much shorter than its sources; 0 is as many as source places.
    seed: decides order and joining. Together with the step it decides a batch.
    eos_id: the end of sequence; of a run over text, its vocabulary's.
  """

  weights: tuple[float, ...] = (0.4, 0.25, 0.2, 0.15)
  buckets: tuple[int, ...] = (12, 16, 20, 26, 32, 40, 52, 68, 96)
  tokens_per_batch: int = 4096
  tokens_per_part: int = 0
  max_targets: int = 0
  seed: int = 0
  eos_id: int = EOS_ID

  def __post_init__(self):
    check_types(self)
    if not self.weights or min(self.weights) < 0 or sum(self.weights) <= 0:
      expected = 'weights >= 0, at least one of them > 0'
      raise unexpected('PackingConfig.weights', expected, self.weights)
    check_all_at_least(self, buckets=1)
    if [*self.buckets] != sorted({*self.buckets}):
      expected = 'increasing numbers'
      raise unexpected('PackingConfig.buckets', expected, self.buckets)
    # A batch has room for one row, and a row for a token and its end.
    check_at_least(self, tokens_per_batch=self.buckets[-1], tokens_per_part=0)
    check_at_least(self, max_targets=2 if self.max_targets else 0)

  def target_places(self, length: int) -> int:
    """Places on the target side of a bucket."""
    return min(length, self.max_targets or length)


class _Plan(NamedTuple):
  """One epoch: pairs in order, cut into examples, gathered into batches.

  Example i joins the pairs order[bounds[i]:bounds[i + 1]].
  """

  order: np.ndarray
  bounds: np.ndarray
  batches: list[tuple[int, np.ndarray]]


class PackedBatches:
  """Length-bucketed batches; they depend only on the seed and their place.

  An epoch shuffles the pairs, joins neighbours, and sorts examples into
  buckets. Examples that do not fill a batch move on to the next longer bucket;
  the last batch has empty rows.
  """

  def __init__(self, pairs: TokenPairs, config: PackingConfig):
    """Checks that there is something to train on.

    Raises:
      ValueError: no pair fits the longest bucket.
    """
    self._pairs = pairs
    self._config = config
    self._source_lengths = np.diff(pairs.inputs_offsets)
    self._target_lengths = np.diff(pairs.targets_offsets)
    # An end-of-sequence id follows the last pair. Empty sides teach nothing.
    shortest = np.minimum(self._source_lengths, self._target_lengths)
    self._usable = np.flatnonzero(
      (self._source_lengths < config.buckets[-1])
      & (self._target_lengths < config.target_places(config.buckets[-1]))
      & (shortest > 0)
    )
    self.num_dropped = len(pairs) - len(self._usable)
    if not len(self._usable):
      raise ValueError(
        f'None of the {len(pairs)} pairs is non-empty and fits into the longest'
        f' bucket of PackingConfig.buckets, {config.buckets[-1]}, and'
        f' max_targets, {config.max_targets}, with its end.'
      )
    # One plan is a few MB; it is enough to keep the first and the current one.
    self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

  def shapes(self) -> list[Batch]:
    """Shapes of both sides of the first epoch's batches, one per bucket.

    A later epoch may have a bucket that the first one does not use.
    """
    lengths = {length for length, _ in self._plan(0).batches}
    return [self._shapes(length) for length in sorted(lengths)]

  def _shapes(self, length: int) -> Batch:
    """The shapes (N, B, L) and (N, B, S) of a bucket's batch."""
    budget = self._config.tokens_per_batch
    rows = max(1, (self._config.tokens_per_part or budget) // length)
    parts = max(1, budget // (rows * length))
    places = self._config.target_places(length)
    return Batch((parts, rows, length), (parts, rows, places))

  def epoch(self, number: int = 0, begin: int = 0) -> Iterator[Batch]:
    """The batches of one epoch, from the one with the index `begin` on."""
    plan = self._plan(number)
    for length, examples in plan.batches[begin:]:
      yield self._gather(plan, length, examples)

  def stream(self, step: int = 0) -> Iterator[tuple[float, Batch]]:
    """The batches of all epochs, from a step on.

    Args:
      step: steps that have been done.

    Yields:
      How many times the data has been seen before a batch, and the batch.
    """
    for number in itertools.count():
      size = len(self._plan(number).batches)
      begin, step = min(step, size), max(step - size, 0)
      for index, batch in enumerate(self.epoch(number, begin), begin):
        yield number + index / size, batch

  def examples(self) -> TokenPairs:
    """The examples of the first epoch in random order: the joined pairs."""
    plan = self._plan(0)
    joined = [self._joined(plan, i) for i in range(len(plan.bounds) - 1)]
    return TokenPairs.from_lists(*zip(*joined, strict=True))

  def _joined(self, plan: _Plan, example: int) -> tuple[np.ndarray, ...]:
    """The source and the target of an example."""
    begin, end = plan.bounds[example : example + 2]
    pairs = [self._pairs[i] for i in plan.order[begin:end]]
    return tuple(map(np.concatenate, zip(*pairs, strict=True)))

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
    """Where examples begin in `order`, and the end; no example is too long."""
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
    longest = self._config.buckets[-1]
    room = longest - 1, self._config.target_places(longest) - 1
    # If joined pairs are too long, the example is split into its pairs again.
    bounds = np.flatnonzero(starts)
    for begin, end in itertools.pairwise(bounds):
      if (
        source[end] - source[begin] > room[0]
        or target[end] - target[begin] > room[1]
      ):
        starts[begin:end] = True
    return np.flatnonzero(starts)

  def _fill(self, lengths: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Groups examples (in random order) into batches of one bucket each."""
    batches: list[tuple[int, np.ndarray]] = []
    waiting = np.empty(0, np.int64)
    bucket_of = np.searchsorted(self._config.buckets, lengths)
    last = bucket_of.max()
    for index, length in enumerate(self._config.buckets[: last + 1]):
      rows = math.prod(self._shapes(length).inputs[:2])
      waiting = np.concatenate([waiting, np.flatnonzero(bucket_of == index)])
      full = len(waiting) if index == last else len(waiting) // rows * rows
      batches += [
        (length, waiting[at : min(at + rows, full)])
        for at in range(0, full, rows)
      ]
      waiting = waiting[full:]
    return batches

  def _gather(self, plan: _Plan, length: int, examples: np.ndarray) -> Batch:
    shapes = self._shapes(length)
    batch = [
      np.full((math.prod(shape[:2]), shape[2]), padding, np.int32)
      for shape, padding in zip(shapes, (PAD_ID, NO_TOKEN), strict=True)
    ]
    for row, example in enumerate(examples):
      for side, ids in zip(batch, self._joined(plan, example), strict=True):
        side[row, : len(ids)] = ids
        side[row, len(ids)] = self._config.eos_id
    return Batch(*map(np.reshape, batch, shapes))
