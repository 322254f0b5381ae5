"""Interleaved timing: A B C A B C, medians, so that noise meets all alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

# () -> the run to time; what it needs afresh, such as a donated state, is made
# before the clock starts.
Prepare = Callable[[], Callable[[], Any]]


def interleave(
  functions: Mapping[str, Prepare],
  repeats: int,
  advance: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
  """Times each function once a round, `repeats` rounds, after one warm-up.

  Args:
    functions: name -> what prepares a run, untimed, and returns it.
    repeats: timed rounds.
    advance: called after each round, to move a progress bar.

  Returns:
    name -> seconds of each round.
  """
  for prepare in functions.values():
    jax.block_until_ready(prepare()())
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for _ in range(repeats):
    for name, prepare in functions.items():
      run = prepare()
      begin = time.perf_counter()
      jax.block_until_ready(run())
      seconds[name].append(time.perf_counter() - begin)
    advance()
  return seconds


def summarise(seconds: list[float], scale: float = 1.0) -> dict[str, float]:
  """Median, least and most of measured times, each multiplied by `scale`.

  `error` is the median's standard error as for normal noise, from the median
  absolute deviation, which one disturbed round does not move.
  """
  median = statistics.median(seconds)
  deviation = statistics.median(abs(value - median) for value in seconds)
  # 1.4826 MAD estimates sigma; a median's error is sqrt(pi / 2) of a mean's.
  error = 1.2533 * 1.4826 * deviation / math.sqrt(len(seconds))
  return {
    'median': median * scale,
    'min': min(seconds) * scale,
    'max': max(seconds) * scale,
    'error': error * scale,
  }
