"""Continuous batching: the scheduler, fed from a list of texts."""

import copy
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.checks.fields import unexpected
from specdec_jax.decoding.pool import PoolPrograms
from specdec_jax.decoding.state import Request
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.request import TextBatch
from specdec_jax.engine.scheduler import (
  PoolSettings,
  PoolStats,
  Row,
  Scheduler,
  Update,
)

Texts = Sequence[Any] | TextBatch


class Continuous:
  """Decodes any number of texts with an engine, `settings.rows` at a time.

  Attributes:
    engine: the engine whose models decode.
    settings: how the texts go through the slots.
    stats: times and counts of the run that was started last.
  """

  def __init__(self, engine: Any, settings: PoolSettings | None = None):
    """Takes an `Engine`, and the settings of the pool."""
    self.engine = engine
    self.settings = settings or PoolSettings()
    self.stats = PoolStats()
    self._programs: dict[Any, PoolPrograms] = {}
    self._warm: set[Any] = set()

  def generate(self, texts: Texts, **options: Any) -> list[Completion]:
    """`Engine.generate` for any number of texts: one completion each, in order.

    A text that cannot be decoded gives a completion with an error and the other
    texts go on, as with `on_too_long='report'`. The only other value that
    `on_too_long` can have here is 'truncate'.

    Args:
      texts: as for `Engine.generate`; or a batch that an engine has made.
      **options: as for `Engine.generate`. Stop strings are looked for between
        rounds.

    Raises:
      ValueError: an option is out of range.
    """
    done = dict(self.run(texts, **options))
    return [done[index] for index in sorted(done)]

  def run(
    self, texts: Texts, **options: Any
  ) -> Iterator[tuple[int, Completion]]:
    """Yields index and completion of each text as soon as it is finished.

    A completion that has been yielded is not kept. Arguments and errors are
    those of `generate`.
    """
    batch = self._batch(texts, options)
    self.stats = PoolStats()
    yield from sorted(batch.passed_over.items())
    if not batch.rows:
      return
    rows = self._rows(batch)
    scheduler = self._scheduler(batch, rows)
    self.stats = scheduler.stats
    scheduler.submit(rows)
    for row, update in scheduler.drain():
      if update.completion is not None:
        yield batch.rows[row.index], update.completion

  def stream(
    self, batch: TextBatch, shows_rounds: bool = False
  ) -> Iterator[Update]:
    """Yields what each round brings the only text of a batch.

    Raises:
      ValueError: the target's logits became invalid.
    """
    if batch.rows:
      row = Row(batch, streams=True, shows_rounds=shows_rounds)
      scheduler = self._scheduler(batch, [row])
      scheduler.submit([row])
      for _, update in scheduler.drain():
        done = update.completion
        if done is not None and done.finish_reason == 'error':
          raise ValueError(done.error)
        yield update

  def warmup(self, texts: Texts, **options: Any) -> float:
    """Compiles what `generate` needs for texts like these.

    Returns the seconds that it took; 0.0 if everything had been compiled.
    """
    begin = time.perf_counter()
    batch = self._batch(texts, options)
    if not batch.rows:
      return 0.0
    rows = self._rows(batch)
    by_width = {row.widths: row.index for row in rows}
    sizes = self.settings.pool_sizes(self.engine.batch_multiple)
    fits = [size for size in sizes if size >= len(rows)]
    first = min(fits, default=sizes[-1])
    key = jax.tree.structure(batch.request), first, *sorted(by_width)
    if key in self._warm:
      return 0.0
    scheduler = self._scheduler(batch, rows)
    short = _short(batch, scheduler.policy.room)
    widths = sorted(by_width)
    for width in widths:
      scheduler.rehearse([Row(short, by_width[width], streams=True)], first)
    smaller = [size for size in sizes[::-1] if size < first]
    for size, then in zip([first, *smaller], smaller, strict=False):
      row = Row(short, by_width[widths[-1]], streams=True)
      scheduler.rehearse([row], size, [then])
    self._warm.add(key)
    return time.perf_counter() - begin

  def _batch(self, texts: Texts, options: dict[str, Any]) -> TextBatch:
    """The batch of texts that are decoded one by one; raises for beams."""
    batch: Any = texts
    if not isinstance(texts, TextBatch):
      if options.get('on_too_long') != 'truncate':
        options = {**options, 'on_too_long': 'report'}
      batch = self.engine.text_batch(texts, **options)
    if batch.options.num_beams is not None:
      expected = 'None in a pool; Engine.generate searches'
      raise unexpected('num_beams', expected, batch.options.num_beams)
    return batch

  def _rows(self, batch: TextBatch) -> list[Row]:
    """The shortest first: rows that decode together are then alike."""
    rows = [Row(batch, index) for index in range(len(batch.rows))]

    def size(row):
      return row.widths, sum(map(len, batch.ids(row.index)))

    return sorted(rows, key=size)

  def _scheduler(self, batch: TextBatch, rows: Sequence[Row]) -> Scheduler:
    widths = [row.widths for row in rows]
    inputs, prompts = map(max, zip(*widths, strict=True))
    return Scheduler(
      self.engine,
      self.settings,
      batch.request,
      self._compiled,
      (inputs, prompts),
      widths[0][0],
      self.engine.batch_multiple,
    )

  def _compiled(self, example: Request, prompted: bool) -> PoolPrograms:
    key: Any = prompted, jax.tree.structure(example), example.inputs.shape[0]
    if key not in self._programs:
      loop, params = self.engine.loop(example.gamma > 0)
      self._programs[key] = PoolPrograms(loop, params, example, prompted)
    return self._programs[key]


def _short(batch: TextBatch, gamma: int) -> TextBatch:
  """The batch with outputs that end in their second round."""
  request: Any = batch.request
  short = copy.copy(batch)
  short.request = dataclasses.replace(
    request,
    max_length=np.full_like(request.max_length, min(gamma + 2, request.slots)),
    stop_ids=np.full_like(request.stop_ids, -1),
  )
  return short
