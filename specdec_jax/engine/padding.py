"""Pads arrays of ids and rounds up their sizes, so that few shapes compile."""

from collections.abc import Sequence

import numpy as np

Ids = Sequence[int]
# The least widths of padded inputs and prompts. Larger ones would cost time in
# the encoder; smaller ones would need more programs.
SMALLEST_INPUT = 16
SMALLEST_PROMPT = 8


def padded(
  encoded: Sequence[Ids], batch: int, width: int, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ids as int32[batch, width], padded, and their lengths.

  The array has more rows than `encoded` where a batch is filled up; the length
  of such a row is 1.
  """
  array = np.full((batch, width), pad_id, np.int32)
  length = np.ones((batch,), np.int32)
  for row, ids in enumerate(encoded):
    array[row, : len(ids)] = ids
    length[row] = len(ids)
  return array, length


def padded_rows(number: int) -> int:
  """Returns the least size of a batch that holds `number` texts.

  The sizes are 1, 2, 4, 6, 8, 12, 16, 24, 32, ... They are few, so that few
  programs are compiled, and so close that few rows stay without a text.
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
