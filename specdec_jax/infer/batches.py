"""The loop over batches: runs all ways alternately, keeps finished chunks.

A way is plain decoding, speculative decoding or scoring. All ways return
`Completion`s, so that they share one loop, one kind of chunk and one summary.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import rich.console
import rich.progress

from specdec_jax.decoding import fallback
from specdec_jax.engine import scoring
from specdec_jax.engine.completion import (
  Completion,
  CompletionStats,
  no_distribution,
  passed_over,
)
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings, PoolStats
from specdec_jax.infer import report, resume
from specdec_jax.measure import environment
from specdec_jax.models.base import ends_inputs
from specdec_jax.probs import SamplingConfig

# Finished work is kept after so long, so that a kill costs a minute at most
# where a batch takes no longer than that.
_KEEP_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Item:
  """One row of a batch.

  Attributes:
    number: its place among the results.
    source: the input, as text or as ids.
    example_id: its random numbers derive from this and the seed.
    prompt: ids that the output begins with; None is none.
    target: ids to score.
  """

  number: int
  source: str | Sequence[int]
  example_id: int
  prompt: Sequence[int] | None = None
  target: Sequence[int] = ()


class Way(Protocol):
  """One way from items to results.

  Attributes:
    fixed: whether each run takes a batch of the same size; otherwise a run
      takes any number of items.
    pool_stats: stats of the last run in a pool, so far; None if there is no
      pool.
  """

  @property
  def fixed(self) -> bool: ...

  @property
  def pool_stats(self) -> PoolStats | None: ...

  def warmup(self, items: Sequence[Item]) -> float:
    """Compiles what `run` needs; returns seconds, 0.0 if it needs nothing."""
    ...

  def run(self, items: Sequence[Item]) -> Iterator[tuple[int, Completion]]:
    """Yields the place and the result of each item as it is finished."""
    ...


@dataclasses.dataclass(frozen=True)
class Decoding:
  """Plain or speculative decoding by an engine.

  Attributes:
    engine: the engine that decodes.
    speculative: whether its drafter helps.
    sampling: how tokens are drawn.
    seed: an item's random numbers derive from this and its `example_id`.
    log_probs: whether log-probabilities are wanted.
    lenience: lenience of speculative decoding; below 1 it is lossy.
    verification: how sampled drafts are judged, see `engine.options.Options`.
    slots: settings of continuous batching; None decodes fixed batches.
    stop_strings: strings that end an output.
    beams: options of a beam search; none is none.
    num_outputs: how many items follow one another that have one source.
  """

  engine: Engine
  speculative: bool
  sampling: SamplingConfig
  seed: int
  log_probs: bool = True
  lenience: float = 1.0
  verification: str | None = None
  slots: PoolSettings | None = None
  stop_strings: Sequence[str] = ()
  beams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  num_outputs: int = 1

  @functools.cached_property
  def _decoder(self) -> Engine | Continuous:
    if self.slots is None:
      return self.engine
    return Continuous(self.engine, self.slots)

  @property
  def fixed(self) -> bool:
    """Whether it decodes fixed batches."""
    return self.slots is None

  @property
  def pool_stats(self) -> PoolStats | None:
    """How full the rows of continuous batching were in the last run."""
    return getattr(self._decoder, 'stats', None)

  def warmup(self, items: Sequence[Item]) -> float:
    """Compiles the engine's program for a batch like this."""
    items = self._searched(items)
    return self._decoder.warmup(_sources(items), **self._options(items))

  def run(self, items: Sequence[Item]) -> Iterator[tuple[int, Completion]]:
    """Decodes the items together; yields each one's place and result."""
    items = self._searched(items)
    texts, options = _sources(items), self._options(items)
    if isinstance(self._decoder, Continuous):
      return self._decoder.run(texts, **options)
    return enumerate(self._decoder.generate(texts, **options))

  def _searched(self, items: Sequence[Item]) -> Sequence[Item]:
    """One beam search gives all outputs of a source."""
    return items[:: self.num_outputs] if self.beams else items

  def _options(self, items: Sequence[Item]) -> dict[str, Any]:
    options: dict[str, Any] = {
      'speculative': self.speculative,
      **dataclasses.asdict(self.sampling),
      'seed': self.seed,
      'example_ids': [item.example_id for item in items],
      'on_too_long': 'truncate',  # if it is an error, such items are left out
    }
    if self.slots is None:
      options['batch_size'] = max(1, len(items))
    if any(item.prompt is not None for item in items):
      options['prompts'] = [item.prompt or [] for item in items]
    if self.lenience != 1:
      options['lenience'] = self.lenience
    if self.verification is not None:
      options['verification'] = self.verification
    if self.stop_strings:
      options['stop_strings'] = tuple(self.stop_strings)
    if not self.log_probs:
      options['log_probs'] = False
    if self.beams:
      options |= {**self.beams, 'num_samples': self.num_outputs}
    return options


class Scoring:
  """Scores each item's target; results have the form of decoded outputs."""

  fixed = True
  pool_stats = None

  def __init__(self, engine: Engine):
    self._engine = engine
    self._network = engine.target
    self._params = engine.params.target
    self._known: set[tuple[int, ...]] = set()

  def warmup(self, items: Sequence[Item]) -> float:
    """Compiles and runs the program for a batch like this."""
    shape = scoring.shapes(self._network, *self._asked(items))
    if shape in self._known:
      return 0.0
    self._known.add(shape)
    begin = time.perf_counter()
    scoring.score(self._network, self._params, *self._asked(items))
    return time.perf_counter() - begin

  def run(self, items: Sequence[Item]) -> Iterator[tuple[int, Completion]]:
    """Scores the items together; yields each one's place and result."""
    asked = self._asked(items)
    scores = scoring.score(self._network, self._params, *asked)
    return enumerate(map(_scored, items, scores))

  def _asked(self, items: Sequence[Item]) -> tuple[list[Any], ...]:
    """Inputs, targets, and what all outputs begin with."""
    inputs: list[Any] = _sources(items)  # those for an encoder have their end
    network, languages = self._network, self._engine.languages()
    has_end = network.has_encoder and ends_inputs(network)
    if not has_end or languages.known:
      inputs = [self._engine.input_ids(source) for source in inputs]
    targets = [item.target for item in items]
    return inputs, targets, languages.before_output(())


def _sources(items: Sequence[Item]) -> list[Any]:
  return [item.source for item in items]


def _scored(item: Item, score: scoring.Score) -> Completion:
  if math.isnan(score.total):
    return passed_over('error', no_distribution())
  return Completion(
    text='',
    tokens=list(item.target),
    log_probs=list(score.log_probs),
    finish_reason='scored',
    stats=CompletionStats(num_tokens=len(item.target), num_target_calls=1),
  )


def engine_identity(engine: Engine) -> dict[str, Any]:
  """The properties of an engine that decide its outputs, as JSON values."""
  leaves = jax.tree.leaves(engine.params.target)
  return {
    'models': dict(engine.fingerprints),
    'dtype': sorted({str(leaf.dtype) for leaf in leaves}),
    'vocabulary': engine.tokenizer.fingerprint,
    'gamma': engine.gamma,
    'max_input_len': engine.max_input_len,
    'max_decode_len': engine.max_decode_len,
    'bos_id': engine.bos_id,
    'rule': None if engine.rule is None else engine.rule.to_json(),
    'fallback': fallback.to_json(engine.fallback),
    'languages': [engine.source_lang, engine.target_lang],
  }


def run_all(
  items: Sequence[Item],
  folder: resume.Folder | None,
  done: Mapping[int, Mapping[str, Any]],
  *,
  ways: Mapping[str, Way],
  rows: int,
  period: int,
  console: rich.console.Console,
) -> dict[str, report.Mode]:
  """Runs all items, batch by batch, with all ways alternately.

  Args:
    items: the items in order, which alone decides the batches.
    folder: folder that finished work is kept in; None keeps none.
    done: number -> chunk that was kept; its items are not run again.
    ways: name -> way.
    rows: items per batch; if no way is `fixed`, a batch has `period` times as
      many.
    period: batches after which a chunk is kept, if half a minute has not
      passed before.
    console: shows progress if it is a terminal.

  Returns:
    All results of each way.

  Raises:
    OSError: a chunk could not be written.
  """
  modes = {name: report.Mode() for name in ways}
  for _, chunk in sorted(done.items()):
    for name, mode in modes.items():
      mode.add(report.Mode.from_json(chunk[name]))
  if not any(way.fixed for way in ways.values()):
    rows, period = rows * period, 1
  batches = [items[at : at + rows] for at in range(0, len(items), rows)]
  keeper = _Keeper(folder, done, ways)
  progress = rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.MofNCompleteColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  with progress:
    task = progress.add_task('Decoding', total=len(items))
    for number, batch in enumerate(batches, 1):
      for name, way in ways.items():
        known = modes[name].completions
        left = [item for item in batch if item.number not in known]
        for part in _run_batch(way, left, rows, keeper):
          modes[name].add(part)
          keeper.add(name, part)
          if not way.fixed and keeper.is_due:
            keeper.keep()
      if keeper.is_due or number % period == 0 or number == len(batches):
        keeper.keep()
      finished = min(len(mode.completions) for mode in modes.values())
      progress.update(task, completed=finished)
  return modes


class _Keeper:
  """Keeps finished work in a folder, in chunks of what came meanwhile."""

  def __init__(
    self,
    folder: resume.Folder | None,
    done: Mapping[int, Any],
    ways: Iterable[str],
  ):
    self._folder, self._ways = folder, tuple(ways)
    self._numbers = (n for n in itertools.count() if n not in done)
    self._restart()

  def _restart(self) -> None:
    self._modes = {name: report.Mode() for name in self._ways}
    self._since = time.monotonic()

  def add(self, name: str, part: report.Mode) -> None:
    """Takes finished results of a way."""
    self._modes[name].add(part)

  @property
  def is_due(self) -> bool:
    """Whether the last chunk was kept long ago."""
    waited = time.monotonic() - self._since
    return self._folder is not None and waited >= _KEEP_SECONDS

  def keep(self) -> None:
    """Writes a chunk, if anything was finished since the last one."""
    if not any(mode.completions for mode in self._modes.values()):
      return
    if self._folder is not None:
      chunk = {name: mode.to_json() for name, mode in self._modes.items()}
      self._folder.keep(next(self._numbers), chunk)
    self._restart()


def _run_batch(
  way: Way, batch: Sequence[Item], rows: int, keeper: _Keeper
) -> Iterator[report.Mode]:
  """Runs one batch with one way; yields its results.

  With continuous batching they come in parts, one whenever a chunk is due.
  """
  if not batch:
    return
  padded = list(batch)
  if way.fixed:
    # Filled up with its last item: a shorter last batch would need another
    # program.
    padded += [batch[-1]] * (rows - len(batch))
  part = report.Mode(compile_seconds=way.warmup(padded))
  if part.compile_seconds > 0 and way.fixed:
    # Not timed: the first run also compiles the code around the program.
    for _ in way.run(padded):
      pass
  part.first_output_seconds = environment.seconds_since_start()
  start, live, slots = time.perf_counter(), 0, 0

  def ended() -> report.Mode:
    nonlocal part, start, live, slots
    now = time.perf_counter()
    part.batches.append(list(part.completions))
    part.seconds.append(now - start)
    stats = way.pool_stats
    if stats is not None:
      part.live_rounds = stats.live_rounds - live
      part.slot_rounds = stats.slot_rounds - slots
      live, slots = stats.live_rounds, stats.slot_rounds
    whole, part, start = part, report.Mode(), now
    return whole

  for index, completion in way.run(padded):
    if index < len(batch):
      part.completions[batch[index].number] = completion
    if not way.fixed and keeper.is_due:
      yield ended()
  if part.completions:
    yield ended()
