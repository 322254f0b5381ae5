"""Rounds up rows, widths and arrays of ids, so that there are few shapes."""

from collections.abc import Sequence

import numpy as np

Ids = Sequence[int]
# Least padded widths. Wider ones cost time in the encoder; narrower ones would
# need more programs.
SMALLEST_INPUT = 16
SMALLEST_PROMPT = 8


def padded(
  encoded: Sequence[Ids], batch: int, width: int, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ids as int32[batch, width], padded, and their lengths.

  Each length is at least 1, also that of a row without ids.
  """
  array = np.full((batch, width), pad_id, np.int32)
  length = np.ones((batch,), np.int32)
  for row, ids in enumerate(encoded):
    array[row, : len(ids)] = ids
    length[row] = len(ids)
  return array, length


def padded_rows(number: int) -> int:
  """Rows of a batch for `number` texts: 1, 2, 4, 6, 8, 12, 16, 24, 32, ...

  There are few sizes, so that few programs are compiled; and they lie close
  enough that few rows stay without a text.
  """
  whole = next_power_of_two(number)
  between = 3 * whole // 4
  return between if number <= between and whole > 4 else whole


def next_power_of_two(number: int) -> int:
  """Returns the least power of two that is not below `number`."""
  return 1 << max(number - 1, 0).bit_length()


def rounded_up(number: int, multiple: int) -> int:
  """Returns the least multiple of `multiple` that is not below `number`."""
  return number + -number % multiple
