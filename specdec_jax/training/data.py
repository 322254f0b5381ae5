"""The batches that a training run sees: pairs joined, padded, in buckets.

An example may join several pairs; it gets one end-of-sequence id, after it is
joined.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.checks.arguments import check_increasing
from specdec_jax.checks.fields import check_types
from specdec_jax.text.tokenizer import EOS_ID, PAD_ID
from specdec_jax.training.pairs import TokenPairs


class Batch(NamedTuple):
  """Padded rows in N parts; a row that is all padding has no weight.

  Attributes:
    inputs: int32[N, B, L], source ids, end of sequence, padding.
    targets: int32[N, B, S], target ids, end of sequence, padding.
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
  """

  weights: tuple[float, ...] = (0.4, 0.25, 0.2, 0.15)
  buckets: tuple[int, ...] = (12, 16, 20, 26, 32, 40, 52, 68, 96)
  tokens_per_batch: int = 4096
  tokens_per_part: int = 0
  max_targets: int = 0
  seed: int = 0

  def __post_init__(self):
    check_types(self)
    if not self.weights or min(self.weights) < 0 or sum(self.weights) <= 0:
      raise ValueError(
        f'PackingConfig.weights is {self.weights}; expected weights >= 0, at'
        ' least one of them > 0.'
      )
    check_increasing(self, buckets=1)
    if self.tokens_per_batch < self.buckets[-1]:
      raise ValueError(
        f'PackingConfig.tokens_per_batch is {self.tokens_per_batch}; expected'
        f' at least the longest bucket, {self.buckets[-1]}, for one row.'
      )
    if self.max_targets < 0 or self.max_targets == 1:
      raise ValueError(
        f'PackingConfig.max_targets is {self.max_targets}; expected 0, or at'
        ' least 2: a token and its end.'
      )

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
  """Length-bucketed batches; batch `step` depends only on seed and step.

  An epoch shuffles the pairs, joins neighbours, and sorts examples into
  buckets. Examples that do not fill a batch move on to the next longer bucket.
  Those left in the longest bucket are dropped for that epoch, or kept in a
  batch with empty rows if the caller needs every pair (evaluation) or there is
  no full batch at all.
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
    shortest = np.minimum(self._source_lengths, self._target_lengths)
    self._usable = np.flatnonzero(
      (self._source_lengths < config.buckets[-1])
      & (self._target_lengths < config.target_places(config.buckets[-1]))
      & (shortest > 0)
    )
    self.num_dropped = len(pairs) - len(self._usable)
    if not len(self._usable):
      raise ValueError(
        f'None of the {len(pairs)} pairs is non-empty and shorter than the'
        f' longest bucket ({config.buckets[-1]} source and'
        f' {config.target_places(config.buckets[-1])} target tokens with their'
        ' ends).'
      )
    # One plan is a few MB; it is enough to keep the current and the last epoch.
    self._plan = functools.lru_cache(maxsize=2)(self._make_plan)
    self._starts = [0]

  def shape(self, length: int) -> tuple[int, int, int]:
    """The shape (N, B, L) of the sources of a bucket's batch."""
    budget = self._config.tokens_per_batch
    rows = max(1, (self._config.tokens_per_part or budget) // length)
    return max(1, budget // (rows * length)), rows, length

  def shapes(self) -> list[Batch]:
    """Shapes of both sides of the first epoch's batches, one per bucket.

    A later epoch may have a bucket that the first one does not use.
    """
    lengths = {length for length, _ in self._plan(0).batches}
    return [self._shapes(length) for length in sorted(lengths)]

  def _shapes(self, length: int) -> Batch:
    *rows, _ = self.shape(length)
    return Batch((*rows, length), (*rows, self._config.target_places(length)))

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
    """The examples of one epoch in random order: the joined pairs."""
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
    """Batches that may not be full, in the bucket of the longest example."""
    index = int(np.searchsorted(self._config.buckets, lengths.max()))
    length = self._config.buckets[index]
    rows = math.prod(self.shape(length)[:2])
    return [
      (length, examples[at : at + rows]) for at in range(0, len(examples), rows)
    ]

  def _gather(self, number: int, index: int) -> Batch:
    plan = self._plan(number)
    length, examples = plan.batches[index]
    shapes = self._shapes(length)
    batch = [
      np.full((math.prod(shape[:2]), shape[2]), PAD_ID, np.int32)
      for shape in shapes
    ]
    for row, example in enumerate(examples):
      begin, end = plan.bounds[example : example + 2]
      pairs = [self._pairs[i] for i in plan.order[begin:end]]
      for side in range(2):
        ids = np.concatenate([pair[side] for pair in pairs])
        batch[side][row, : len(ids)] = ids
        batch[side][row, len(ids)] = EOS_ID
    return Batch(*map(np.reshape, batch, shapes))
