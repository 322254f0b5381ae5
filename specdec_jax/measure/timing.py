"""Interleaved timing: A B C A B C, medians, so that noise affects all alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

# () -> the run to time. It makes what each run needs afresh, such as a donated
# state, before the clock starts.
Prepare = Callable[[], Callable[[], Any]]


def interleave(
  functions: Mapping[str, Prepare],
  repeats: int,
  advance: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
  """Times each function once per round, in `repeats` rounds, after a warm-up.

  Args:
    functions: name -> function that prepares a run, untimed, and returns it.
    repeats: timed rounds.
    advance: called after each round, to move a progress bar.

  Returns:
    Name -> seconds of each round.
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
  """Median, minimum and maximum of measured times, multiplied by `scale`.

  `error` is the median's standard error, assuming normal noise. It is computed
  from the median absolute deviation, which a single disturbed round does not
  change.
  """
  median = statistics.median(seconds)
  deviation = statistics.median(abs(value - median) for value in seconds)
  # 1.4826 MAD estimates sigma; a median's error is sqrt(pi / 2) times a mean's.
  error = 1.2533 * 1.4826 * deviation / math.sqrt(len(seconds))
  return {
    'median': median * scale,
    'min': min(seconds) * scale,
    'max': max(seconds) * scale,
    'error': error * scale,
  }
