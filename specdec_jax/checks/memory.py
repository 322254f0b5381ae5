"""How much memory there is, and the error if something needs more."""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

GIB = 2**30
# The memory limit of a container; the machine may have more.
_CONTAINER = pathlib.Path('/sys/fs/cgroup/memory.max')


class DoesNotFitError(ValueError):
  """Something needs more memory than there is."""


def check_room(what: str, needed: int, there: int | None, advice: str) -> None:
  """Raises an error if something cannot fit into memory, before it is made.

  Args:
    what: what needs the memory, as the beginning of a sentence.
    needed: bytes that it needs.
    there: bytes that there are; None is unknown, and never raises.
    advice: what to do, as a sentence.

  Raises:
    DoesNotFitError: more is needed; the message gives both numbers.
  """
  if there is not None and needed > there:
    raise DoesNotFitError(
      f'{what}: {gib(needed)} of memory are needed and there are {gib(there)}.'
      f' {advice}'
    )


def host_bytes() -> int | None:
  """Bytes of the machine's memory, or of the container's; None if unknown."""
  try:
    size = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (AttributeError, OSError, ValueError):
    return None  # not a Unix
  try:
    return min(size, int(_CONTAINER.read_text()))
  except (OSError, ValueError):  # there is no such file, or it says 'max'
    return size


def device_bytes(device: jax.Device | None = None) -> int | None:
  """Bytes that the device's memory has for this process.

  Args:
    device: the device; None is the first one.

  Returns:
    For an accelerator the limit of its allocator, None if that is unknown; for
    a CPU the machine's memory.
  """
  device = device or jax.devices()[0]
  if device.platform != 'cpu':
    return (device.memory_stats() or {}).get('bytes_limit')
  return host_bytes()


def all_bytes() -> int | None:
  """Bytes of all devices of all processes; None if one of them is unknown."""
  devices = jax.devices()
  if devices[0].platform == 'cpu':  # a process's CPU devices share its memory
    size = host_bytes()
    return size and size * len({device.process_index for device in devices})
  sizes = [device_bytes(device) for device in devices]
  return None if None in sizes else sum(size or 0 for size in sizes)


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
  """Bytes of an array on a device, where numbers of four bits are packed."""
  bits = jax.dtypes.itemsize_bits(jax.numpy.dtype(dtype))
  return math.ceil(math.prod(shape) * bits / 8)


def gib(size: int) -> str:
  """Bytes as text: in GiB, or below a tenth of a GiB in MiB."""
  return (
    f'{size / GIB:.2f} GiB' if size >= GIB / 10 else f'{size / 2**20:.2f} MiB'
  )
