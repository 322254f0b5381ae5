"""Continuous batching: many texts through an engine, a fixed number at once.

The host side of `decoding.slots`; `slot_pass` has one pass of the texts.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax

from specdec_jax.decoding.layout import Programs
from specdec_jax.decoding.state import Request
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.engine import Engine, Texts
from specdec_jax.engine.job import Job
from specdec_jax.engine.schedule import Load, Settings
from specdec_jax.engine.slot_pass import Part, Pass


class Continuous:
  """Decodes any number of texts with an engine, `settings.rows` at once.

  Attributes:
    engine: whose models decode.
    settings: how.
    load: of the run that was begun last.
  """

  def __init__(self, engine: Engine, settings: Settings | None = None):
    self.engine = engine
    self.settings = settings or Settings()
    self.load = Load()
    self._programs: dict[Any, Programs] = {}
    self._warm: set[Any] = set()

  def generate(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> list[Completion]:
    """`Engine.generate` of any number of texts: a completion each, in order.

    A text that cannot be decoded gives a completion with an error and the
    others go on, as if `on_too_long` were 'report'; it may be 'truncate'.

    Args:
      texts: as for `Engine.generate`.
      speculative: likewise.
      **options: likewise. Stop strings are looked for between rounds.

    Raises:
      ValueError: an option is out of range.
    """
    found = dict(self.run(texts, speculative=speculative, **options))
    return [found[index] for index in range(len(texts))]

  def run(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> Iterator[tuple[int, Completion]]:
    """Yields index and completion of each text as soon as it is finished.

    Nothing is kept of what has been yielded. Arguments and errors as of
    `generate`.
    """
    job = self._job(texts, speculative, options)
    self.load = Load()
    yield from sorted(job.passed_over.items())
    if job.rows:
      one = self._pass(job)
      self.load = one.load
      yield from one.completions()

  def warmup(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> float:
    """Compiles what `generate` of such texts needs; seconds, 0.0 if nothing."""
    begin = time.perf_counter()
    job = self._job(texts, speculative, options)
    if not job.rows:
      return 0.0
    one = self._pass(job)
    if one.shapes in self._warm:
      return 0.0
    for part in one.rehearsals():
      rehearsal = self._pass(job, part)
      for _ in rehearsal.completions():
        pass
    rehearsal.rehearse_smaller_pools()
    self._warm.add(one.shapes)
    return time.perf_counter() - begin

  def _job(self, texts: Texts, speculative: bool, options) -> Job:
    if options.get('on_too_long') != 'truncate':
      options = {**options, 'on_too_long': 'report'}
    job = self.engine.job(texts, speculative, **options)
    gammas = self.settings.gammas or {}
    varied = speculative and len(set(gammas.values())) > 1
    sampled = not job.options.sampling.greedy
    if varied and sampled and self.settings.deterministic:
      raise ValueError(
        f'gammas = {dict(gammas)} changes with the number of running rows, and'
        ' samples at a temperature above 0 would change with it. Give all the'
        ' same gamma, set temperature 0, or deterministic=False.'
      )
    return job

  def _pass(self, job: Job, part: Part | None = None) -> Pass:
    length = self.engine.max_decode_len
    made = Pass(self._compiled, job, self.settings, length, part)
    _, buckets, num_slots, rows = made.shapes
    inputs = max((inputs for inputs, _ in buckets), default=1)
    self.engine.check_room(rows, inputs, num_slots, job.request.gamma)
    return made

  def _compiled(
    self, speculative: bool, prompted: bool, example: Request
  ) -> Programs:
    key: Any = speculative, prompted, jax.tree.structure(example)
    key = *key, example.inputs.shape[0]
    if key not in self._programs:
      loop, params = self.engine.loop(speculative)
      self._programs[key] = Programs(loop, params, example, prompted)
    return self._programs[key]
