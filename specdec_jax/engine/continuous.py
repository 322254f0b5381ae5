"""Continuous batching: an engine decodes many texts, a fixed number at a time.

The host side of `decoding.pool`; `pool_run` is one run of texts through a pool.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from specdec_jax.decoding.row_layout import PoolPrograms
from specdec_jax.decoding.state import Request
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.pool_run import PoolRun, Rehearsal
from specdec_jax.engine.schedule import PoolSettings, PoolStats
from specdec_jax.engine.text_batch import TextBatch


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

  def generate(
    self, texts: Sequence[Any], *, speculative: bool = True, **options
  ) -> list[Completion]:
    """`Engine.generate` for any number of texts: one completion each, in order.

    A text that cannot be decoded gives a completion with an error and the other
    texts go on, as with `on_too_long='report'`. The only other value that
    `on_too_long` can have here is 'truncate'.

    Args:
      texts: as for `Engine.generate`.
      speculative: as for `Engine.generate`.
      **options: as for `Engine.generate`. Stop strings are looked for between
        rounds.

    Raises:
      ValueError: an option is out of range.
    """
    batch = self._text_batch(texts, speculative, options)
    return self.completions(batch, speculative)

  def run(
    self, texts: Sequence[Any], *, speculative: bool = True, **options
  ) -> Iterator[tuple[int, Completion]]:
    """Yields index and completion of each text as soon as it is finished.

    A completion that has been yielded is not kept. Arguments and errors are
    those of `generate`.
    """
    batch = self._text_batch(texts, speculative, options)
    yield from self._run(batch, speculative)

  def completions(
    self, batch: TextBatch, speculative: bool
  ) -> list[Completion]:
    """Decodes a batch that an engine has made: a completion for each text."""
    found = dict(self._run(batch, speculative))
    return [found[index] for index in sorted(found)]

  def _run(
    self, batch: TextBatch, speculative: bool
  ) -> Iterator[tuple[int, Completion]]:
    self._check(batch, speculative)
    self.stats = PoolStats()
    yield from sorted(batch.passed_over.items())
    if batch.rows:
      one = self._pool_run(batch)
      self.stats = one.stats
      yield from one.completions()

  def warmup(
    self, texts: Sequence[Any], *, speculative: bool = True, **options
  ) -> float:
    """Compiles what `generate` needs for texts like these.

    Returns the seconds that it took; 0.0 if everything had been compiled.
    """
    batch = self._text_batch(texts, speculative, options)
    return self.warm_up(batch, speculative)

  def warm_up(self, batch: TextBatch, speculative: bool) -> float:
    """`warmup` for a batch that an engine has made."""
    begin = time.perf_counter()
    self._check(batch, speculative)
    if not batch.rows:
      return 0.0
    one = self._pool_run(batch)
    if one.shapes in self._warm:
      return 0.0
    for rehearsal in one.rehearsals():
      small = self._pool_run(batch, rehearsal)
      for _ in small.completions():
        pass
    small.rehearse_smaller_pools()
    self._warm.add(one.shapes)
    return time.perf_counter() - begin

  def _text_batch(
    self, texts: Sequence[Any], speculative: bool, options
  ) -> TextBatch:
    if options.get('on_too_long') != 'truncate':
      options = {**options, 'on_too_long': 'report'}
    batch: TextBatch = self.engine.text_batch(texts, speculative, **options)
    return batch

  def _check(self, batch: TextBatch, speculative: bool) -> None:
    """Raises ValueError for beams, or samples that depend on neighbours."""
    if batch.options.num_beams is not None:
      raise ValueError(
        f'num_beams = {batch.options.num_beams}: no place of a beam search is'
        ' given to another text while it runs; take Engine.generate.'
      )
    gammas = self.settings.gammas or {}
    varied = len(set(gammas.values())) > 1 or len(self.settings.ends or ()) > 1
    sampled = not batch.options.sampling.greedy
    if speculative and varied and sampled and self.settings.deterministic:
      raise ValueError(
        f'gammas = {dict(gammas)} changes with the number of running rows, and'
        ' samples at a temperature above 0 would change with it. Give all the'
        ' same gamma, set temperature 0, or deterministic=False.'
      )

  def _pool_run(
    self, batch: TextBatch, rehearsal: Rehearsal | None = None
  ) -> PoolRun:
    length, settings = self.engine.max_decode_len, self.settings
    if settings.gammas is not None and settings.ends is None:
      rule = batch.request.rule
      ends = {
        rows: self.engine.ends_of(gamma, rule)
        for rows, gamma in settings.gammas.items()
      }
      settings = dataclasses.replace(settings, ends=ends)
    made = PoolRun(self._compiled, batch, settings, length, rehearsal)
    _, buckets, num_slots, rows = made.shapes
    inputs = max((inputs for inputs, _ in buckets), default=1)
    self.engine.room.check(rows, inputs, num_slots, batch.request.call_tokens)
    return made

  def _compiled(
    self, speculative: bool, prompted: bool, example: Request
  ) -> PoolPrograms:
    key: Any = speculative, prompted, jax.tree.structure(example)
    key = *key, example.inputs.shape[0]
    if key not in self._programs:
      loop, params = self.engine.loop(speculative)
      self._programs[key] = PoolPrograms(loop, params, example, prompted)
    return self._programs[key]
