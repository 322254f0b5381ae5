"""Training data: pairs of token sequences, packed into batches.

A pair is a source and a target, both as ids without end-of-sequence ids and
padding. A training example concatenates one or more pairs; one end-of-sequence
id is then appended to its source and one to its target.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from specdec_jax.checks.fields import Bound, check_types, unexpected
from specdec_jax.text.tokenizer import EOS_ID, PAD_ID
from specdec_jax.types import Amount, Count, Positive

# Marks positions past a row's targets. Some vocabularies use 0 as a token.
NO_TOKEN = -1
# The default bucket lengths, in tokens.
_BUCKETS = (12, 16, 20, 26, 32, 40, 52, 68, 96)

# Source and target ids of each pair.
Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]


def lengths_of(pairs: Pairs) -> np.ndarray:
  """Returns the lengths of both sides of each pair, int64[2, N]."""
  sizes = [(len(source), len(target)) for source, target in pairs]
  return np.array(sizes, np.int64).reshape(-1, 2).T


def digest(pairs: Pairs) -> str:
  """Returns the sha256 (hex) of all ids and lengths, which identifies data."""
  sha256 = hashlib.sha256(lengths_of(pairs).tobytes())
  for ids in itertools.chain.from_iterable(pairs):
    sha256.update(np.asarray(ids, np.int32).tobytes())
  return sha256.hexdigest()


class Batch(NamedTuple):
  """A batch of N parts with B padded rows each.

  Rows that hold only padding do not count in the loss.

  Attributes:
    inputs: int32[N, B, L], in each row source ids, the end-of-sequence id and
      padding.
    targets: int32[N, B, S], in each row target ids, the end-of-sequence id and
      `NO_TOKEN`s.
    features: outputs of the model to learn from, as
      `losses.Distillation.features` returns them; None: the objective computes
      them.
  """

  inputs: Any
  targets: Any
  features: Any = None


@dataclasses.dataclass(frozen=True)
class PackingConfig:
  """The settings that decide how pairs are packed into batches.

  Attributes:
    weights: weights[k] is proportional to the number of examples that
      concatenate k + 1 pairs. To the model such an example looks like a text of
      several sentences.
    buckets: increasing row lengths in tokens; each batch has one of these. An
      example goes into the smallest bucket that holds its source and its
      target. One program is compiled for each bucket.
    tokens_per_batch: approximate number of token positions for the sources of a
      batch, and for its targets, padding included.
    tokens_per_part: approximate number of such positions in one part of a
      batch. The gradients of the parts are computed one after the other and
      summed, so that on a CPU the logits of a part stay in the processor's
      cache. 0, for a GPU or TPU, makes the whole batch one part.
    max_targets: if > 0, the most target positions per row, for data whose
      targets are much shorter than its sources; 0 allows as many target
      positions as source positions.
    seed: seed of the order of pairs and of the number of pairs per example. The
      seed and the step determine a batch.
    eos_id: the end-of-sequence id; a run over text uses its vocabulary's
      instead.
  """

  weights: tuple[Amount, ...] = (0.4, 0.25, 0.2, 0.15)
  buckets: Annotated[tuple[Positive, ...], Bound(1)] = _BUCKETS
  tokens_per_batch: int = 4096
  tokens_per_part: Count = 0
  max_targets: int = 0
  seed: int = 0
  eos_id: int = EOS_ID

  def __post_init__(self):
    check_types(self)
    if not any(self.weights):
      expected = 'weights, at least one of them above 0'
      raise unexpected('weights', expected, self.weights)
    if [*self.buckets] != sorted({*self.buckets}):
      raise unexpected('buckets', 'increasing numbers', self.buckets)
    # A batch must have room for one row, and a row for one token and the
    # end-of-sequence id.
    if (size := self.tokens_per_batch) < (least := self.buckets[-1]):
      raise unexpected('tokens_per_batch', f'a whole number from {least}', size)
    if self.max_targets < 0 or self.max_targets == 1:
      raise unexpected('max_targets', '0, or 2 or more', self.max_targets)

  def target_places(self, length: int) -> int:
    """Returns the number of target positions per row in a bucket."""
    return min(length, self.max_targets or length)


class _Plan(NamedTuple):
  """The order of the pairs in one epoch, its examples and its batches.

  Attributes:
    order: int64[N], indices of pairs.
    bounds: int64[M + 1]; example i concatenates the pairs
      order[bounds[i]:bounds[i + 1]].
    batches: for each batch, the length of its bucket and the indices of its
      examples.
  """

  order: np.ndarray
  bounds: np.ndarray
  batches: list[tuple[int, np.ndarray]]


class PackedBatches:
  """Packs pairs into batches of examples of similar lengths.

  For the same pairs and settings, a batch depends only on its index.

  Each epoch shuffles the pairs, concatenates neighbours into examples, and
  sorts the examples into buckets. Examples that do not fill a batch move on to
  the next longer bucket; the last batch is filled up with rows of padding.

  Attributes:
    num_dropped: number of pairs that are not used, because a side is empty or
      too long.
    regroups: whether each epoch packs the pairs anew; if False, later epochs
      only shuffle the batches of the first one.
  """

  regroups = True

  def __init__(self, pairs: Pairs, config: PackingConfig, pad_id: int = PAD_ID):
    """Drops the pairs that are empty or do not fit the longest bucket.

    Args:
      pairs: source and target ids of each pair.
      config: the settings of packing.
      pad_id: the id that fills inputs after the end-of-sequence id.

    Raises:
      ValueError: no pair is left.
    """
    self._pairs, self._config, self._pad_id = pairs, config, pad_id
    self._lengths = lengths_of(pairs)
    longest = config.buckets[-1]
    # The last position of a row is for the end-of-sequence id.
    self._limits = np.array([[longest], [config.target_places(longest)]]) - 1
    # Nothing can be learned from a pair with an empty side.
    is_usable = (self._lengths > 0) & (self._lengths <= self._limits)
    self._usable = np.flatnonzero(is_usable.all(0))
    self.num_dropped = len(pairs) - len(self._usable)
    if not len(self._usable):
      raise ValueError(
        f'None of the {len(pairs)} pairs is non-empty and fits into the longest'
        f' bucket of PackingConfig.buckets, {config.buckets[-1]}, and'
        f' max_targets, {config.max_targets}, with its end.'
      )
    # A plan takes a few MB; only those of the first and of the current epoch
    # are needed.
    self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

  @property
  def num_places(self) -> int:
    """The token positions of the first epoch's batches, padding included."""
    sides = [self._shapes(length)[:2] for length, _ in self._plan(0).batches]
    return sum(map(math.prod, itertools.chain(*sides)))

  def empty_batches(self) -> list[Batch]:
    """Returns a batch of padding for each bucket of the first epoch.

    Programs can be compiled with these batches before the training. A later
    epoch may use a bucket that the first one does not use.
    """
    plan = self._plan(0)
    lengths = sorted({length for length, _ in plan.batches})
    return [self._gather(plan, length, plan.order[:0]) for length in lengths]

  def _shapes(self, length: int) -> Batch:
    """Returns the shapes (N, B, L) and (N, B, S) of a bucket's batch."""
    config, budget = self._config, self._config.tokens_per_batch
    rows = max(1, (config.tokens_per_part or budget) // length)
    parts = max(1, budget // (rows * length))
    places = config.target_places(length)
    return Batch((parts, rows, length), (parts, rows, places))

  def epoch(self, number: int = 0, begin: int = 0) -> Iterator[Batch]:
    """Yields the batches of one epoch, from the index `begin` on."""
    plan = self._plan(number)
    for length, examples in plan.batches[begin:]:
      yield self._gather(plan, length, examples)

  def stream(self, step: int = 0) -> Iterator[tuple[float, Batch]]:
    """Yields the batches of all epochs, from a step on.

    Args:
      step: number of batches to skip, because a run has used them.

    Yields:
      The number of epochs before the batch, a float; and the batch.
    """
    for number in itertools.count():
      size = len(self._plan(number).batches)
      begin, step = min(step, size), max(step - size, 0)
      for index, batch in enumerate(self.epoch(number, begin), begin):
        yield number + index / size, batch

  def examples(self) -> Pairs:
    """Returns the first epoch's examples, each as a pair, in random order."""
    plan = self._plan(0)
    return [self._joined(plan, i) for i in range(len(plan.bounds) - 1)]

  def _joined(self, plan: _Plan, example: int) -> tuple[list[int], list[int]]:
    """Returns an example's concatenated sources and concatenated targets."""
    begin, end = plan.bounds[example : example + 2]
    pairs = [self._pairs[i] for i in plan.order[begin:end]]
    sources, targets = zip(*pairs, strict=True)
    return [*itertools.chain(*sources)], [*itertools.chain(*targets)]

  def _make_plan(self, number: int) -> _Plan:
    rng = np.random.default_rng([self._config.seed, number])
    if number and not self.regroups:
      plan = self._plan(0)
      shuffled = rng.permutation(len(plan.batches))
      return plan._replace(batches=[plan.batches[i] for i in shuffled])
    order = rng.permutation(self._usable)
    bounds = self._join(order, rng)
    sizes = np.add.reduceat(self._lengths[:, order], bounds[:-1], axis=1)
    batches = self._fill(sizes.max(0) + 1)
    rng.shuffle(batches)
    return _Plan(order, bounds, batches)

  def _join(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Divides pairs into examples that fit; returns `bounds` of a `_Plan`."""
    weights = np.asarray(self._config.weights, np.float64)
    weights = weights / weights.sum()
    ends = np.cumsum(1 + rng.choice(len(weights), len(order), p=weights))
    bounds = np.array([0, *ends[ends < len(order)], len(order)])
    totals = np.pad(self._lengths[:, order].cumsum(1), ((0, 0), (1, 0)))
    fits = (np.diff(totals[:, bounds]) <= self._limits).all(0)
    # An example that is too long is split into its single pairs again.
    starts = np.repeat(~fits, np.diff(bounds))
    starts[bounds[:-1]] = True
    return np.append(np.flatnonzero(starts), len(order))

  def _fill(self, lengths: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Returns `batches` of a `_Plan`, each of examples of one bucket.

    Args:
      lengths: int64[M], the length of each example, its end-of-sequence id
        included; the examples are in random order.
    """
    batches: list[tuple[int, np.ndarray]] = []
    waiting = np.empty(0, np.int64)
    bucket_of = np.searchsorted(self._config.buckets, lengths)
    last = bucket_of.max()
    for index, length in enumerate(self._config.buckets[: last + 1]):
      rows = math.prod(self._shapes(length).inputs[:2])
      waiting = np.concatenate([waiting, np.flatnonzero(bucket_of == index)])
      size = len(waiting) if index == last else len(waiting) // rows * rows
      full, waiting = waiting[:size], waiting[size:]
      batches += [(length, full[i : i + rows]) for i in range(0, size, rows)]
    return batches

  def _gather(self, plan: _Plan, length: int, examples: np.ndarray) -> Batch:
    shapes = self._shapes(length)[:2]
    fills = zip(shapes, (self._pad_id, NO_TOKEN), strict=True)
    batch = [np.full(shape, fill, np.int32) for shape, fill in fills]
    rows = np.ndindex(shapes[0][:2])
    # Rows without an example remain padding.
    for row, example in zip(rows, examples, strict=False):
      for side, ids in zip(batch, self._joined(plan, example), strict=True):
        side[row][: len(ids)] = ids
        side[row][len(ids)] = self._config.eos_id
    return Batch(*batch)
