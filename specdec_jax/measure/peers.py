"""Compares peers: interleaved repeats over the same lines, one table."""

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax.checks.arguments import check_at_least
from specdec_jax.measure import timing
from specdec_jax.measure.environment import describe
from specdec_jax.measure.peer_systems import (
  PLAIN,
  SYSTEMS,
  Generate,
  Output,
  Pair,
  PairConfig,
  System,
)
from specdec_jax.measure.progress import bar
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Cell, Column, Table, say, started

INSTALL = "pip install 'specdec_jax[peers]'"
# Versions that a result must be read with; transformers' assistant adapts its
# confidence threshold only where scikit-learn is installed.
_VERSIONS = (
  'transformers',
  'torch',
  'ctranslate2',
  'safetensors',
  'sentencepiece',
  'scikit-learn',
)
# OpenMP's threads spin for up to 0.2 s after their work; the pause keeps that
# out of the next system's time.
_PAUSE_SECONDS = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeersConfig(PairConfig):
  """One comparison of a `PairConfig`: batch 1, float32, greedy.

  Attributes:
    input_file: UTF-8 text, one input per line.
    num_lines: how many of its lines are used; None is all.
    systems: names from `peer_systems.SYSTEMS`; this project's plain loop, with
      which all others are compared, is always included.
    repeats: timed passes over all lines, interleaved.
    threads: threads of torch and CTranslate2; None is one for each core that
      this process may use, as in JAX.
    output_file: JSON; None writes nothing.
    name: name of the record.

  Raises:
    ValueError: a number is too small, or a system is unknown.
  """

  input_file: str
  num_lines: int | None = None
  systems: Sequence[str] = tuple(SYSTEMS)
  repeats: int = 5
  threads: int | None = None
  output_file: str | None = None
  name: str = 'peers'

  def __post_init__(self):
    check_at_least(self, gamma=1, lookup_tokens=1, repeats=1)
    check_at_least(self, max_input_len=2, max_decode_len=1)
    for field in ('num_lines', 'assistant_tokens', 'threads'):
      if getattr(self, field) is not None:
        check_at_least(self, **{field: 1})
    unknown = [name for name in self.systems if name not in SYSTEMS]
    if unknown or isinstance(self.systems, str):
      raise ValueError(
        f'PeersConfig.systems must be names from {list(SYSTEMS)}, got'
        f' {self.systems!r}.'
      )


@dataclasses.dataclass
class _Entrant:
  """One system in this comparison.

  Attributes:
    generate: decodes one text; None before it is loaded.
    outputs: output of each line, from the untimed pass.
    seconds: time of each timed pass over all lines.
    changed: lines whose tokens differed between two passes.
    failure: why it could not finish, or None.
  """

  generate: Generate | None = None
  outputs: list[Output] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)
  changed: set[int] = dataclasses.field(default_factory=set)
  failure: str | None = None


def compare(
  config: PeersConfig, console: rich.console.Console | None = None
) -> Record:
  """Times all systems in one process, prints the table, writes the JSON.

  If a system fails, its reason is reported and the other systems go on.

  Returns:
    The record. It is of kind 'table', so that README can show it.

  Raises:
    ValueError: a package is missing, the input has no line to decode, or this
      project's plain loop failed, with which all others are compared.
  """
  console = started(config, console)
  names = [name for name in SYSTEMS if name in {PLAIN, *config.systems}]
  _check_packages(names)
  encode = config.tokenizer.encode
  texts = read_prompts(config.input_file, lambda text: len(encode(text)))
  texts = texts[: config.num_lines]
  entrants = {name: _Entrant() for name in names}

  with tempfile.TemporaryDirectory() as folder:
    threads = config.threads or describe()['cores']
    pair = Pair(config, threads, pathlib.Path(folder))
    with bar(console, 'Loading', len(names)) as advance:
      for name, entrant in entrants.items():
        _guarded(entrant, _load, SYSTEMS[name], pair, entrant, texts)
        advance()
    if entrants[PLAIN].failure:
      raise ValueError(f'{PLAIN} failed: {entrants[PLAIN].failure}')
    with bar(console, 'Measuring', config.repeats * len(names)) as advance:
      for _ in range(config.repeats):
        for entrant in entrants.values():
          _guarded(entrant, _pass, entrant, texts)
          advance()
  record = _record(config, threads, texts, entrants)
  _print(console, record)
  if config.output_file:
    record.save(config.output_file)
  return record


def _check_packages(names: Sequence[str]) -> None:
  """Raises ValueError if packages that the chosen systems need are missing."""
  needed = dict.fromkeys(p for name in names for p in SYSTEMS[name].packages)
  missing = [p for p in needed if importlib.util.find_spec(p) is None]
  if missing:
    raise ValueError(
      f'The peers need packages that are not installed: {", ".join(missing)}.'
      f' Install them by {INSTALL}, or choose fewer systems.'
    )


def _guarded(entrant: _Entrant, function: Callable, *args: Any) -> None:
  """Calls `function` unless the system has failed; records a new failure."""
  if entrant.failure:
    return
  try:
    function(*args)
  except Exception as error:  # any error of a peer is part of the result
    entrant.failure = f'{type(error).__name__}: {error}'.strip()


def _load(
  system: System, pair: Pair, entrant: _Entrant, texts: Sequence[str]
) -> None:
  """Loads a system and runs it once over all lines, to compile and warm up."""
  entrant.generate = system.load(pair)
  entrant.outputs = [entrant.generate(text) for text in texts]


def _pass(entrant: _Entrant, texts: Sequence[str]) -> None:
  """One timed pass over all lines."""
  generate = entrant.generate
  assert generate is not None  # it was loaded, or has failed
  time.sleep(_PAUSE_SECONDS)
  begin = time.perf_counter()
  outputs = [generate(text) for text in texts]
  entrant.seconds.append(time.perf_counter() - begin)
  for i, (now, before) in enumerate(zip(outputs, entrant.outputs, strict=True)):
    if now.tokens != before.tokens:
      entrant.changed.add(i)


def _record(
  config: PeersConfig,
  threads: int,
  texts: Sequence[str],
  entrants: Mapping[str, _Entrant],
) -> Record:
  """All numbers, and the table of them as text."""
  reference = entrants[PLAIN]
  results = {
    name: _result(entrant, reference) for name, entrant in entrants.items()
  }
  title = (
    f'{config.input_file}, {len(texts)} lines, batch 1, float32, greedy, gamma'
    f' {config.gamma}, {threads} threads, median of {config.repeats}'
    ' interleaved passes'
  )
  rows = [_row(name, result) for name, result in results.items()]
  return Table(title, _COLUMNS, rows).record(
    name=config.name,
    results=results,
    input_file=config.input_file,
    lines=len(texts),
    gamma=config.gamma,
    assistant_tokens=config.assistant_tokens,
    lookup_tokens=config.lookup_tokens,
    max_input_len=config.max_input_len,
    max_decode_len=config.max_decode_len,
    repeats=config.repeats,
    threads=threads,
    versions={name: _version(name) for name in _VERSIONS},
  )


def _result(entrant: _Entrant, reference: _Entrant) -> dict[str, Any]:
  if entrant.failure:
    return {'failure': entrant.failure}
  tokens = sum(len(output.tokens) for output in entrant.outputs)
  calls = [output.target_calls for output in entrant.outputs]
  times = timing.summarise(entrant.seconds, 1e3 / max(tokens, 1))
  usual = sum(len(output.tokens) for output in reference.outputs)
  plain = timing.summarise(reference.seconds, 1e3 / max(usual, 1))
  pairs = zip(entrant.outputs, reference.outputs, strict=True)
  return {
    'failure': None,
    'tokens': tokens,
    'target_calls': None if None in calls else sum(calls),
    'ms_per_token': times,
    'seconds': entrant.seconds,
    'against_plain': plain['median'] / times['median'],
    'equal_lines': sum(one.tokens == other.tokens for one, other in pairs),
    'lines': len(entrant.outputs),
    'lines_that_changed': len(entrant.changed),
  }


_COLUMNS: tuple[Column | str, ...] = (
  'system',
  *(Column(name, '.2f') for name in ('ms/token', 'min', 'max')),
  Column(f'against {PLAIN}', '.2f'),
  Column('tokens', ','),
  Column('target calls', ','),
  'same lines',
)


def _row(name: str, result: Mapping[str, Any]) -> list[Cell]:
  if result['failure']:
    return [name, 'failed', *[None] * (len(_COLUMNS) - 2)]
  return [
    name,
    *(result['ms_per_token'][key] for key in ('median', 'min', 'max')),
    result['against_plain'],
    result['tokens'],
    result['target_calls'],
    f'{result["equal_lines"]}/{result["lines"]}',
  ]


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _print(console: rich.console.Console, record: Mapping[str, Any]) -> None:
  console.print(Table.from_json(record))
  versions = record['versions'].items()
  say(console, ', '.join(f'{name} {v or "absent"}' for name, v in versions))
  for name, result in record['results'].items():
    if result['failure']:
      say(console, f'{name} failed: {result["failure"]}')
    elif changed := result['lines_that_changed']:
      say(console, f'{name}: {changed} lines changed from pass to pass')
