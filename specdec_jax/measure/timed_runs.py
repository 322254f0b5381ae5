"""Timed runs through many texts: fixed batches, and continuous batching.

Latency means the same for both: the time from the start of a run, when all
texts are there, until a text's output is there. `watch_memory` measures whether
memory grows.
"""

import dataclasses
import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.engine.completion import Completion, CompletionStats, total
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.text.lines import read_inputs

_EVERY = 50  # completions between two looks at memory


@dataclasses.dataclass
class Timed:
  """One run through all texts.

  Attributes:
    seconds: time of the run.
    latency: seconds from its start to each completion, in order of arrival.
    num_tokens: tokens that were produced.
    occupancy: running rows / computed rows, summed over rounds.
    host_fraction: part of the time in which the device waited for the host;
      None in fixed batches.
    in_slot: mean seconds from when a text gets a slot to its output; None in
      fixed batches.
    accepted: share of the proposals that was accepted; None without proposals.
  """

  seconds: float
  latency: list[float]
  num_tokens: int
  occupancy: float
  host_fraction: float | None = None
  in_slot: float | None = None
  accepted: float | None = None

  def record(self) -> dict[str, Any]:
    """The numbers of the run as JSON values; times in seconds."""
    count = len(self.latency)
    return {
      'seconds': self.seconds,
      'tokens': self.num_tokens,
      'examples_per_second': count / self.seconds,
      'tokens_per_second': self.num_tokens / self.seconds,
      'median_latency': statistics.median(self.latency),
      'latency_90': float(np.percentile(self.latency, 90)),
      'occupancy': self.occupancy,
      'host_fraction': self.host_fraction,
      'in_slot': self.in_slot,
      'acceptance_rate': self.accepted,
    }


def read_examples(
  path: str,
  engine: Engine,
  count: int,
  join_weights: Sequence[float],
  seed: int,
) -> list[str]:
  """Texts of different lengths in random order, none too long for the engine.

  Each text is one line, or several lines joined.

  Args:
    path: one text per line, see `read_lines`. If it has too few lines, they
      are used again in another order.
    engine: the engine that will decode the texts.
    count: how many texts.
    join_weights: join_weights[k] is proportional to the number of texts that
      join k + 1 neighbouring lines.
    seed: seed of order and joining.

  Raises:
    ValueError: the file cannot be read, or nothing in it can be decoded.
  """
  lines = [line for line in read_inputs(path) if line.strip()]
  rng = np.random.default_rng(seed)
  weights = np.asarray(join_weights) / sum(join_weights)
  found: list[str] = []
  while len(found) < count:
    rest, before = iter(rng.permutation(len(lines))), len(found)
    while True:
      size = 1 + rng.choice(len(weights), p=weights)
      part = [lines[index] for index in itertools.islice(rest, size)]
      if not part:
        break
      text = ' '.join(part)
      if len(engine.input_ids(text)) <= engine.max_input_len:
        found.append(text)
    if len(found) == before:
      raise ValueError(
        f'{path!r} has no line of at most {engine.max_input_len}'
        f' tokens; it has {len(lines)} that are not empty.'
      )
  return found[:count]


def run_fixed(
  engine: Engine, texts: Sequence[str], rows: int, sort: bool, **options
) -> Timed:
  """Decodes batches of `rows` texts, one after the other, after compiling."""
  order = list(range(len(texts)))
  if sort:
    lengths = [len(engine.input_ids(text)) for text in texts]
    order.sort(key=lambda index: lengths[index])
  batches = [order[at : at + rows] for at in range(0, len(order), rows)]

  def arguments(batch):
    # Filled up: a shorter last batch would need another program.
    filled = [*batch, *[batch[-1]] * (rows - len(batch))]
    return [texts[index] for index in filled], {
      'example_ids': filled,
      'batch_size': rows,
      **options,
    }

  for batch in batches:
    given, asked = arguments(batch)
    if engine.warmup(given, **asked):
      engine.generate(given, **asked)

  computed = 0

  def decoded() -> Iterator[Completion]:
    nonlocal computed
    for batch in batches:
      given, asked = arguments(batch)
      found = engine.generate(given, **asked)[: len(batch)]
      computed += rows * max(one.stats.num_target_calls for one in found)
      yield from found

  timed, calls = _timed(decoded())
  return dataclasses.replace(timed, occupancy=calls / computed)


def run_continuous(
  decoder: Continuous, texts: Sequence[str], **options
) -> Timed:
  """Decodes all texts by continuous batching, after compiling."""
  decoder.warmup(texts, **options)
  found = decoder.run(texts, **options)
  timed, _ = _timed(completion for _, completion in found)
  stats = decoder.stats
  return dataclasses.replace(
    timed,
    occupancy=stats.occupancy,
    host_fraction=stats.host_fraction,
    in_slot=stats.in_slot,
  )


def _timed(found: Iterable[Completion]) -> tuple[Timed, int]:
  """Times completions as they come; also returns all calls of the target."""
  latency: list[float] = []
  done: list[CompletionStats] = []
  start = time.perf_counter()
  for one in found:
    latency.append(time.perf_counter() - start)
    done.append(one.stats)
  seconds = time.perf_counter() - start
  took = total(done)
  timed = Timed(
    seconds, latency, took.num_tokens, 1.0, accepted=took.acceptance_rate
  )
  return timed, took.num_target_calls


def watch_memory(
  decoder: Continuous, texts: Sequence[str], **options
) -> dict[str, Any]:
  """Decodes texts, keeps no output, and looks at memory on the way.

  Buffers come and go between two rounds, so the result has the maxima that were
  seen in the second fifth of the run and in the last.

  Args:
    decoder: its `run` is watched; it is warmed up first.
    texts: at least some hundred texts.
    **options: options of `Continuous.run`.

  Returns:
    'examples'; 'early' and 'late', each with 'resident_bytes' of the process
    (None if unknown), 'buffers', the number of live arrays, and 'buffer_bytes'.
  """
  decoder.warmup(texts, **options)
  seen: list[dict[str, Any]] = []
  for number, _ in enumerate(decoder.run(texts, **options)):
    if number % _EVERY == 0:
      seen.append(_now())
  fifth = max(1, len(seen) // 5)
  return {
    'examples': len(texts),
    'early': _most(seen[fifth : 2 * fifth] or seen),
    'late': _most(seen[-fifth:]),
  }


def _now() -> dict[str, Any]:
  arrays = jax.live_arrays()
  return {
    'resident_bytes': _resident_bytes(),
    'buffers': len(arrays),
    'buffer_bytes': sum(array.nbytes for array in arrays),
  }


def _most(seen: Sequence[dict[str, Any]]) -> dict[str, Any]:
  return {
    key: None if seen[0][key] is None else max(one[key] for one in seen)
    for key in seen[0]
  }


def _resident_bytes() -> int | None:
  path = pathlib.Path('/proc/self/statm')
  if not path.exists():
    return None  # not a Linux
  return int(path.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
