"""Whether memory grows while a data set is decoded."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from specdec_jax.engine.continuous import Continuous

_EVERY = 50  # completions between two looks


def watch(
  decoder: Continuous, texts: Sequence[str], **options
) -> dict[str, Any]:
  """Decodes texts, keeps nothing, and looks at memory on the way.

  Buffers come and go between two rounds, so the most that was seen in the
  second fifth of the run is compared with the most in the last.

  Args:
    decoder: its `run` is watched; it is warmed up first.
    texts: some hundred at least.
    **options: of `Continuous.run`.

  Returns:
    'examples'; 'early' and 'late', each with 'resident_bytes' of the process
    (None where it cannot be known), 'buffers', arrays that are alive, and
    'buffer_bytes'.
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
