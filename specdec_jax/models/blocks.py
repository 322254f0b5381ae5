"""How a kernel lies in blocks of outputs, for `products.dense_blocks`."""

from typing import Any

WIDTH = 64  # outputs of a block


def in_blocks(kernel: Any) -> Any:
  """Maps a kernel, [in, out], to its blocks, [out / WIDTH, in, WIDTH]."""
  apart = kernel.reshape(kernel.shape[0], -1, WIDTH)
  return apart.swapaxes(0, 1)


def out_of_blocks(kernel: Any) -> Any:
  """What `in_blocks` was given."""
  return kernel.swapaxes(0, 1).reshape(kernel.shape[1], -1)
