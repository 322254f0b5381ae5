"""Measures a server beside the library that it serves, on the same texts.

One client, in turn with `Engine.generate`; many clients, in turn with
continuous batching of all texts at once; and clients that come at random times,
for several shares of the requests that many clients were answered in a second.
The server is a process of its own, one for each way to decode.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.packages import package
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.measure import calibration
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import started
from specdec_jax.measure.throughput import BY_LOAD, PLAIN, SPECULATIVE
from specdec_jax.measure.timed_runs import read_examples
from specdec_jax.serving import load
from specdec_jax.serving.bench_report import tables
from specdec_jax.serving.run import ServeConfig

_PERCENTILES = (50, 95, 99)
_STEPS = 3  # of a way, without its rates


@dataclasses.dataclass(frozen=True)
class BenchServeConfig:
  """A measurement of a server.

  Attributes:
    serve: what is served. The library, in this process, has the same models.
    input_file: one text per line, plain or `.gz`; of a line with tabs the first
      column.
    join_weights: join_weights[k] is proportional to the number of examples that
      join k + 1 neighbouring lines, so that lengths differ more.
    texts: of the runs with many clients.
    texts_in_turn: of those with one client.
    clients: that wait for their answers, in the runs with many.
    openai_clients: of the package `openai`, in a run of their own; 0 leaves it
      out.
    repeats: rounds of many clients and of continuous batching, in turn.
    shares: of the requests a second that many clients were answered: the rates
      at which others come.
    seconds: of each rate.
    first_limit: seconds until the first token in which an answer is good.
    between_limit: seconds between tokens in which it is.
    calibration: file of `specdec calibrate` with several numbers of rows, for
      gamma by rows; None leaves that way out.
    url: of a server that runs already, which is measured as it is; None starts
      one for each way.
    seed: of texts and times.
    output_file: JSON; None writes nothing.
    plot_file: PNG of the rates; None draws nothing.

  Raises:
    ValueError: a number is too small.
  """

  serve: ServeConfig
  input_file: str
  join_weights: Sequence[float] = (1.0,)
  texts: int = 256
  texts_in_turn: int = 32
  clients: int = 64
  openai_clients: int = 64
  repeats: int = 2
  shares: Sequence[float] = (0.3, 0.5, 0.7, 0.9)
  seconds: float = 12.0
  first_limit: float = 0.2
  between_limit: float = 0.02
  calibration: str | None = None
  url: str | None = None
  seed: int = 0
  output_file: str | None = None
  plot_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_at_least(self, texts=1, texts_in_turn=1, clients=1, repeats=1)
    check_at_least(self, openai_clients=0, seed=0)
    check_all_at_least(self, join_weights=0)
    for name in ('seconds', 'first_limit', 'between_limit', 'shares'):
      given = getattr(self, name)
      if not all(one > 0 for one in (given if name == 'shares' else [given])):
        raise ValueError(f'{name} must be more than 0, got {given}.')


@dataclasses.dataclass(frozen=True)
class Way:
  """A way to decode: what the server and the library are told.

  Attributes:
    flags: of `specdec serve`.
    speculative: whether the drafter helps.
    gammas: rows -> gamma; None is the engine's.
  """

  flags: Sequence[str] = ()
  speculative: bool = True
  gammas: Mapping[int, int] | None = None


def bench_serve(
  config: BenchServeConfig,
  command: Sequence[str],
  console: rich.console.Console | None = None,
) -> Record:
  """Measures what `config` asks for, prints it, writes the record.

  Args:
    config: of the measurement.
    command: starts a server of `config.serve`; flags are added to it.
    console: where it is shown; standard output by default.

  Returns:
    The record: 'ways' with 'one_client', 'clients', 'openai' and 'rates'.

  Raises:
    ValueError: nothing can be decoded, the calibration is of other models, a
      package is missing, or the server does not start or answers wrongly.
    OSError: the record could not be written.
  """
  console = started(config, console)
  package('A load on a server', 'aiohttp', 'load')
  if config.openai_clients:
    package('A client of OpenAI', 'openai', 'load')
  engine = config.serve.load()
  ways = _ways(config, engine)
  count = max(config.texts, config.texts_in_turn)
  texts = read_examples(
    config.input_file, engine, count, config.join_weights, config.seed
  )
  steps = len(ways) * (_STEPS + len(config.shares))
  found = {}
  with bar(console, 'Server', steps) as advance:
    for name, way in ways.items():
      with _served(config, [*command, *way.flags]) as url:
        bench = _Bench(config, engine, way, texts, url, advance)
        found[name] = bench.measured()
  asked = (
    *('texts', 'texts_in_turn', 'clients', 'openai_clients', 'seconds'),
    *('first_limit', 'between_limit', 'seed'),
  )
  settings = {name: getattr(config, name) for name in asked}
  rows, gamma = config.serve.settings.rows, engine.gamma
  values = settings | {'rows': rows, 'gamma': gamma, 'ways': found}
  record = Record('serving', values)
  for table in tables(record):
    console.print(table)
  if config.output_file:
    record.save(config.output_file)
  return record


def _ways(config: BenchServeConfig, engine: Engine) -> dict[str, Way]:
  """The ways that are measured, by name."""
  settings, has_drafter = config.serve.settings, engine.has_drafter
  if config.url is not None:
    speculates = settings.speculative is not False and has_drafter
    return {'as it is': Way((), speculates, settings.gammas)}
  fixed = ('--gin.GAMMAS=None', '--gin.CALIBRATION=None')
  plain = Way(('--gin.SPECULATIVE=False', *fixed), False)
  if not has_drafter:
    return {PLAIN: plain}
  ways = {PLAIN: plain, SPECULATIVE: Way(fixed)}
  if config.calibration is not None:
    chosen = calibration.load(config.calibration)
    chosen.check(engine.fingerprints)
    told = '--gin.GAMMAS=None', f'--gin.CALIBRATION={config.calibration!r}'
    ways[BY_LOAD] = Way(told, True, chosen.gammas(settings.rows))
  return ways


@contextlib.contextmanager
def _served(config: BenchServeConfig, command: Sequence[str]) -> Iterator[str]:
  """The address of a server; one that is started here ends with the block.

  Raises:
    ValueError: it does not start.
  """
  if config.url is not None:
    yield config.url.rstrip('/')
    return
  own = ('--gin.PORT=0', '--gin.HOST=127.0.0.1', '--gin.API_KEY_FILE=None')
  environment = {k: v for k, v in os.environ.items() if k != 'SPECDEC_API_KEYS'}
  with subprocess.Popen(
    [*command, *own], env=environment, stderr=subprocess.PIPE, text=True
  ) as process:
    assert process.stderr is not None
    try:
      url, last = None, ''
      for line in process.stderr:
        said = json.loads(line) if line.startswith('{') else {}
        if said.get('event') == 'compiled':
          url = said['url']
          break
        last = line.strip() or last
      if url is None:
        raise ValueError(f'The server ended before it was ready: {last}')
      # Its log would fill the pipe.
      rest = threading.Thread(
        target=collections.deque, args=(process.stderr, 0), daemon=True
      )
      rest.start()
      yield url
      process.terminate()
      rest.join()
    finally:
      process.kill()


class _Bench:
  """The measurements of one server."""

  def __init__(self, config, engine, way, texts, url, advance):
    self._config, self._engine, self._way = config, engine, way
    self._texts, self._url, self._advance = texts, url, advance
    self._options = {'speculative': way.speculative}

  def measured(self) -> dict[str, Any]:
    """Everything that is measured of a way."""
    found: dict[str, Any] = {'one_client': self._one_client()}
    self._advance()
    found['clients'] = self._many_clients()
    self._advance()
    found['openai'] = self._openai()
    self._advance()
    capacity = found['clients']['requests_per_second']
    found['rates'] = [
      self._rate(share, share * capacity) for share in self._config.shares
    ]
    return found

  def _bodies(self, count: int, stream: bool = False) -> list[dict[str, Any]]:
    """Requests for texts, in order; again from the first one if need be."""
    texts, most = self._texts, self._engine.max_decode_len
    return [
      load.body(texts[i % len(texts)], stream, max_tokens=most)
      for i in range(count)
    ]

  def _one_client(self) -> dict[str, Any]:
    """One client, in turn with the library; then its streams."""
    engine, count = self._engine, self._config.texts_in_turn
    options = dict(self._options)
    if self._way.gammas is not None:
      options['gamma'] = max(1, self._way.gammas[min(self._way.gammas)])
    bodies, streams = self._bodies(count), self._bodies(count, True)

    async def in_turn() -> tuple[list[Any], list[load.Reply]]:
      pairs = []
      async with load.session() as client:
        for text, body in zip(self._texts, bodies, strict=False):
          engine.generate([text], **options)  # compiled, and in the cache
          reply = await load.ask(client, self._url, body)
          begin = time.perf_counter()
          (one,) = engine.generate([text], **options)
          pairs.append((reply, time.perf_counter() - begin, one.text))
        rest = [await load.ask(client, self._url, body) for body in streams]
      return pairs, rest

    pairs, streamed = asyncio.run(in_turn())
    _check_replies([reply for reply, *_ in pairs] + streamed)
    more = [reply.seconds - seconds for reply, seconds, _ in pairs]
    return {
      'server': statistics.median(reply.seconds for reply, *_ in pairs),
      'library': statistics.median(seconds for _, seconds, _ in pairs),
      'more': statistics.median(more),
      'first': statistics.median(one.first or 0.0 for one in streamed),
      'equal': sum(reply.text == text for reply, _, text in pairs),
    }

  def _many_clients(self) -> dict[str, Any]:
    """Clients that wait, in turn with continuous batching of the same texts."""
    config, texts = self._config, self._texts[: self._config.texts]
    rows, most = config.serve.settings.rows, self._engine.max_decode_len
    settings = PoolSettings(rows, order='given', gammas=self._way.gammas)
    decoder = Continuous(self._engine, settings)
    options: dict[str, Any] = {'max_length': most, **self._options}
    decoder.warmup(texts, **options)
    rounds, equal = [], 0
    for _ in range(config.repeats):
      busy, cpu = self._closed(load.closed, config.clients)
      begin = time.perf_counter()
      offline = decoder.generate(texts, **options)
      seconds = time.perf_counter() - begin
      rate = sum(len(one.tokens) for one in offline) / seconds
      mine = {'offline': rate, 'ratio': busy.num_tokens / busy.seconds / rate}
      rounds.append(_speed(busy, cpu) | mine)
      both = zip(busy.replies, offline, strict=True)
      equal = sum(reply.text == one.text for reply, one in both)
    medians = {
      name: statistics.median(one[name] for one in rounds) for name in rounds[0]
    }
    return medians | {'equal': equal, 'rounds': rounds}

  def _openai(self) -> dict[str, Any] | None:
    """As many clients of another package."""
    if not self._config.openai_clients:
      return None
    return _speed(*self._closed(load.by_openai, self._config.openai_clients))

  def _closed(self, send: Any, clients: int) -> tuple[load.Run, float]:
    """A run of clients that wait, and the server's CPU seconds."""
    before = load.counters(self._url)
    run = send(self._url, self._bodies(self._config.texts), clients)
    _check_replies(run.replies)
    name = 'process_cpu_seconds_total'  # not of every system
    after = load.counters(self._url)
    return run, after.get(name, 0.0) - before.get(name, 0.0)

  def _rate(self, share: float, rate: float) -> dict[str, Any]:
    """Clients that come at random times, so many a second."""
    config = self._config
    bodies = self._bodies(max(1, round(rate * config.seconds)), True)
    run = load.arriving(self._url, bodies, rate, config.seed)
    self._advance()
    ok = [one for one in run.replies if one.error is None]
    good = [
      one
      for one in ok
      if (one.first or 0.0) <= config.first_limit
      and (one.between or 0.0) <= config.between_limit
    ]
    return {
      'share': share,
      'rate': rate,
      'requests': len(run.replies),
      'errors': len(run.errors),
      'first': _percentiles([one.first for one in ok]),
      'between': _percentiles([one.between for one in ok]),
      'whole': _percentiles([one.seconds for one in ok]),
      'tokens_per_second': run.num_tokens / run.seconds,
      'good_share': len(good) / len(run.replies),
      'goodput': len(good) / run.seconds,
    }


def _speed(run: load.Run, server_cpu: float) -> dict[str, float]:
  return {
    'requests_per_second': len(run.replies) / run.seconds,
    'tokens_per_second': run.num_tokens / run.seconds,
    'server_cores': server_cpu / run.seconds,
    'client_cores': run.cpu_seconds / run.seconds,
  }


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
  known = [value for value in values if value is not None]
  return {
    str(percent): float(np.percentile(known, percent)) if known else None
    for percent in _PERCENTILES
  }


def _check_replies(replies: Sequence[load.Reply]) -> None:
  """Raises ValueError if an answer was an error: times would say nothing."""
  wrong = [one.error for one in replies if one.error is not None]
  if wrong:
    raise ValueError(
      f'{len(wrong)} of {len(replies)} requests were not answered, the first'
      f' with {wrong[0]}'
    )
