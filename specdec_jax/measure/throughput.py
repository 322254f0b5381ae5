"""Throughput and latency of a data set: fixed against continuous batches.

Measures four ways to decode the same texts, interleaved: fixed batches in
random order, fixed batches sorted by length, continuous batching in random
order, and continuous batching with the shortest texts first.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.measure import calibration
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, between, started
from specdec_jax.measure.timed_runs import (
  Timed,
  read_examples,
  run_continuous,
  run_fixed,
  watch_memory,
)

FIXED_RANDOM, FIXED_SORTED = 'fixed, random order', 'fixed, sorted'
GIVEN, SHORTEST = 'continuous, random order', 'continuous'
PLAIN, SPECULATIVE, BY_LOAD = 'plain', 'speculative', 'gamma by rows'


@dataclasses.dataclass(frozen=True)
class ThroughputConfig:
  """A measurement of data-set decoding.

  Attributes:
    engine: makes the engine, with a drafter; called after all cheap checks.
    input_file: one text per line, plain or `.gz`; of a line with tabs the first
      column.
    num_examples: texts per run.
    join_weights: join_weights[k] is proportional to the number of examples that
      join k + 1 neighbouring lines, as in training, so that lengths differ
      more.
    batch_size: B, rows decoded together.
    speculative: whether the drafter helps in all four ways.
    temperature: temperature of the target.
    refill: `PoolSettings.refill`.
    max_rounds: `PoolSettings.max_rounds`.
    pools: sizes of smaller pools that the last rows may move to, with the
      engine's gamma; see `PoolSettings.gammas`. Only with `speculative`.
    repeats: interleaved rounds of the four ways.
    looks: pairs (max_rounds, refill) to compare, with `sweep_examples` texts.
    sweep_batches: batch sizes of the plot; empty leaves the plot out.
    sweep_examples: texts per run of the plot; B * 16 if that is more.
    calibration: file of scripts/calibrate.py for several numbers of rows, for a
      third curve; None leaves the curve out.
    memory_examples: texts of a run that watches memory; 0 leaves this run out.
    seed: seed of order, joining and samples.
    output_file: JSON; None writes nothing.
    plot_file: PNG of the sweep; None draws nothing.

  Raises:
    ValueError: a number is too small.
  """

  engine: Callable[[], Engine]
  input_file: str
  num_examples: int = 2000
  join_weights: Sequence[float] = (1.0,)
  batch_size: int = 16
  speculative: bool = True
  temperature: float = 0.0
  refill: int | None = None
  max_rounds: int = PoolSettings.max_rounds
  pools: Sequence[int] = ()
  repeats: int = 3
  looks: Sequence[Sequence[int]] = ()
  sweep_batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
  sweep_examples: int = 256
  calibration: str | None = None
  memory_examples: int = 0
  seed: int = 0
  output_file: str | None = None
  plot_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_at_least(self, num_examples=1, batch_size=1, repeats=1, seed=0)
    check_at_least(self, sweep_examples=1, memory_examples=0, temperature=0.0)
    check_all_at_least(self, join_weights=0)
    if self.sweep_batches:
      check_all_at_least(self, sweep_batches=1)
    self.settings(SHORTEST)  # raises if one of its numbers is too small

  def settings(self, way: str, **changes) -> PoolSettings:
    """Returns the settings of GIVEN or SHORTEST, with `changes`."""
    order = 'given' if way == GIVEN else 'shortest'
    values: dict[str, Any] = {
      'rows': self.batch_size,
      'refill': self.refill,
      'max_rounds': self.max_rounds,
      'order': order,
    }
    return PoolSettings(**(values | changes))


def measure_throughput(
  config: ThroughputConfig, console: rich.console.Console | None = None
) -> Mapping[str, Any]:
  """Measures what `config` asks for, prints it, writes the record.

  Returns:
    The record: 'ways' (medians over rounds for each way), 'ratios' between
    them, round by round, 'looks', 'sweep', 'memory', 'machine'.

  Raises:
    ValueError: nothing can be decoded, or the calibration is of other models.
    OSError: the record could not be written.
  """
  console = started(config, console)
  chosen = calibration.load(config.calibration) if config.calibration else None
  engine = config.engine()
  if chosen is not None:
    chosen.check(engine.fingerprints)
  texts = read_examples(
    config.input_file,
    engine,
    max(config.num_examples, config.memory_examples),
    config.join_weights,
    config.seed,
  )
  options: dict[str, Any] = {
    'speculative': config.speculative,
    'temperature': config.temperature,
    'seed': config.seed,
  }
  memory = None
  if config.memory_examples:
    # Measured first: memory that other runs have freed would hide its growth.
    # With order 'given', the slots have their full width from the start.
    decoder = Continuous(engine, config.settings(GIVEN))
    many = texts[: config.memory_examples]
    memory = watch_memory(decoder, many, **options)
  some = texts[: config.num_examples]
  with bar(console, 'Ways', 4 * config.repeats) as advance:
    rounds = _ways(config, engine, some, options, advance)
  values: dict[str, Any] = {
    'examples': len(some),
    'batch_size': config.batch_size,
    'speculative': config.speculative,
    'temperature': config.temperature,
    'gamma': engine.gamma if config.speculative else 0,
    'ways': {name: _medians(found) for name, found in rounds.items()},
    'ratios': _ratios(rounds),
  }
  values['looks'] = _looks(config, engine, texts, options)
  steps = len(config.sweep_batches) * (2 if chosen is None else 3)
  with bar(console, 'Batch sizes', steps) as advance:
    values['sweep'] = _sweep(config, engine, texts, options, chosen, advance)
  if memory is not None:
    values['memory'] = memory
  record = Record('throughput', values)
  show(console, record)
  if config.output_file:
    record.save(config.output_file)
  return record


def _ways(config, engine, texts, options, advance) -> dict[str, list[Any]]:
  """Way -> the records of its runs, one per round."""
  rows = config.batch_size
  changes: dict[str, Any] = {}
  if config.pools and config.speculative:
    changes['gammas'] = dict.fromkeys((*config.pools, rows), engine.gamma)
  decoders = {
    way: Continuous(engine, config.settings(way, **changes))
    for way in (GIVEN, SHORTEST)
  }
  ways: dict[str, Callable[[], Timed]] = {
    FIXED_RANDOM: lambda: run_fixed(engine, texts, rows, False, **options),
    FIXED_SORTED: lambda: run_fixed(engine, texts, rows, True, **options),
    GIVEN: lambda: run_continuous(decoders[GIVEN], texts, **options),
    SHORTEST: lambda: run_continuous(decoders[SHORTEST], texts, **options),
  }
  rounds: dict[str, list[Any]] = {name: [] for name in ways}
  for _ in range(config.repeats):
    for name, way in ways.items():
      rounds[name].append(way().record())
      advance()
  return rounds


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Each number's median; None stays None."""
  return {
    key: None
    if rounds[0][key] is None
    else statistics.median(one[key] for one in rounds)
    for key in rounds[0]
  }


def _ratios(rounds) -> dict[str, dict[str, Any]]:
  """Throughput and latency of continuous batching over those of fixed batches.

  Each ratio is the median over rounds, with minimum and maximum: runs of the
  same round, which ran one after the other, are compared.
  """

  def ratio(key, one, other):
    values = [
      a[key] / b[key] for a, b in zip(rounds[one], rounds[other], strict=True)
    ]
    return [statistics.median(values), min(values), max(values)]

  return {
    f'{one} / {other}': {
      key: ratio(key, one, other)
      for key in ('tokens_per_second', 'median_latency')
    }
    for one in (GIVEN, SHORTEST)
    for other in (FIXED_RANDOM, FIXED_SORTED)
  }


def _looks(config, engine, texts, options) -> list[dict[str, Any]]:
  """Records of runs in which the host looks more often, or less often."""
  found = []
  for max_rounds, refill in config.looks:
    changes = {'max_rounds': max_rounds, 'refill': refill}
    decoder = Continuous(engine, config.settings(SHORTEST, **changes))
    timed = run_continuous(decoder, texts[: config.sweep_examples], **options)
    found.append(changes | timed.record())
  return found


def _sweep(config, engine, texts, options, chosen, advance):
  """Records by batch size, plain and speculative."""
  found = []
  for rows in config.sweep_batches:
    some = texts[: max(config.sweep_examples, 16 * rows)]
    modes: dict[str, dict[str, Any]] = {PLAIN: {}, SPECULATIVE: {}}
    if chosen is not None:
      modes[BY_LOAD] = {'gammas': chosen.gammas(rows)}
    for mode, changes in modes.items():
      changes = {'rows': rows, 'refill': None, **changes}
      decoder = Continuous(engine, config.settings(SHORTEST, **changes))
      asked = options | {'speculative': mode != PLAIN}
      timed = run_continuous(decoder, some, **asked)
      found.append({'batch_size': rows, 'mode': mode, **timed.record()})
      advance()
  return found


# Columns of a run, and the names of their values in its record.
_COLUMNS: tuple[tuple[Column, str], ...] = (
  (Column('tokens/s', '.1f'), 'tokens_per_second'),
  (Column('median latency', '.2f', unit='s'), 'median_latency'),
  (Column('occupancy', '.3f'), 'occupancy'),
  (Column('host', '.1f', unit='%'), 'host_fraction'),
)


def tables(record: Mapping[str, Any]) -> list[Table]:
  """Tables of the ways, their ratios, the host's looks, and batch sizes."""

  def runs(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of runs: each row has the names' values, then its numbers."""
    columns: list[Column | str] = [*names, *(column for column, _ in _COLUMNS)]
    return Table('', columns, [[*of, *_cells(row)] for *of, row in rows])

  def ratio(values: Sequence[float]) -> str:
    middle, low, high = values
    return f'{middle:.2f} ({between(low, high)})'

  found = [
    runs(['way'], record['ways'].items()),
    Table(
      '',
      ['ratio', 'throughput', 'median latency'],
      [[of, *map(ratio, row.values())] for of, row in record['ratios'].items()],
    ),
    runs(
      ['rounds at most', 'rows finished'],
      [(row['max_rounds'], row['refill'], row) for row in record['looks']],
    ),
    runs(
      ['batch', 'decoding'],
      [(row['batch_size'], row['mode'], row) for row in record['sweep']],
    ),
  ]
  return [table for table in found if table.rows]


def show(console: rich.console.Console, record: Mapping[str, Any]) -> None:
  """Prints the tables of a record."""
  console.print(f'{record["examples"]} texts, batch {record["batch_size"]}')
  for table in tables(record):
    console.print(table)
  if 'memory' in record:
    console.print(f'memory: {record["memory"]}')


def _cells(row: Mapping[str, Any]) -> list[float | None]:
  values = [row[name] for _, name in _COLUMNS]
  *others, host = values
  return [*others, None if host is None else 100 * host]
