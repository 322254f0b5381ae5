"""Measures free memory, and raises an error for work that needs more."""

import contextlib
import ctypes
import gc
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

GIB = 2**30
# On Linux, the first file has the memory of the machine. The second file lists
# the control groups of this process: those of its container, service or job.
# Each group has a folder below the third path, with files of its limit and of
# the memory that it uses.
_MACHINE = pathlib.Path('/proc/meminfo')
_OWN_GROUPS = pathlib.Path('/proc/self/cgroup')
_GROUPS = pathlib.Path('/sys/fs/cgroup')
_BYTES = 'memory.max', 'memory.current'
# Matches the lines of a group's statistics with the bytes of cached files.
_CACHED = re.compile(r'^(?:in)?active_file (\d+)$', re.M)


class DoesNotFitError(ValueError):
  """Something needs more memory than there is."""


def check_room(
  what: str, needed: int, free: Callable[[], int | None], advice: str
) -> None:
  """Raises an error, before arrays are made, if they cannot fit into memory.

  Args:
    what: names the arrays, as the beginning of a sentence.
    needed: bytes that they need.
    free: function that returns the free bytes, or None if they are unknown;
      then no error is raised.
    advice: a sentence that says what to do.

  Raises:
    DoesNotFitError: more bytes are needed than are free; the message has both
      numbers.
  """
  size = free()
  if size is not None and needed > size:
    gc.collect()  # frees engines that nothing refers to any more
    size = free()
  if size is not None and needed > size:
    sizes = f'{gib(needed)} of memory are needed and {gib(size)} are free'
    raise DoesNotFitError(f'{what}: {sizes}. {advice}')


def give_back() -> None:
  """Gives memory that was freed back to the system.

  glibc keeps a third of the memory that reading a model took, and about 100 MB
  of each compilation. Other allocators do not need this or cannot do it; then
  nothing happens.
  """
  with contextlib.suppress(AttributeError, OSError, TypeError):
    ctypes.CDLL(None).malloc_trim(0)


def host_bytes() -> int | None:
  """Returns the memory of the machine or container; None if unknown."""
  try:
    size = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (AttributeError, OSError, ValueError):
    return None  # this system is not a Unix
  return min([size, *(limit for limit, _ in _groups())])


def free_bytes() -> int | None:
  """Returns the free bytes of the host's memory; None if unknown.

  Memory that the system would give up, such as cached files, counts as free.
  """
  machine = re.search(r'^MemAvailable: +(\d+) kB$', _text(_MACHINE), re.M)
  available = int(machine[1]) << 10 if machine else host_bytes()
  left = [max(0, limit - used) for limit, used in _groups()]
  return None if available is None else min([available, *left])


def _groups() -> Iterator[tuple[int, int]]:
  """Yields the limit and the used bytes of each control group with a limit."""
  for line in _text(_OWN_GROUPS).splitlines():
    number, _, path = line.split(':', 2)
    if number != '0':  # the line is of a control group of version 1
      continue
    group = _GROUPS / path.strip('/')
    # A container may not see groups above it; then its own group is the root.
    for folder in (group, *group.parents):
      limit, used = (_text(folder / name).strip() for name in _BYTES)
      if limit.isdigit() and used.isdigit():
        pages = _CACHED.findall(_text(folder / 'memory.stat'))
        yield int(limit), int(used) - sum(map(int, pages))
      if folder == _GROUPS:
        break


def _text(path: pathlib.Path) -> str:
  """Reads a file; '' if it cannot be read."""
  try:
    return path.read_text('ascii')
  except (OSError, ValueError):
    return ''


def device_bytes(device: jax.Device | None = None) -> int | None:
  """Returns the bytes of the device's memory that this process may still use.

  Args:
    device: the device; None: the first one.

  Returns:
    For an accelerator, the bytes that its allocator may still give, or None if
    they are unknown; for a CPU, the result of `free_bytes`.
  """
  device = device or jax.devices()[0]
  if device.platform == 'cpu':
    return free_bytes()
  stats = device.memory_stats() or {}
  limit = stats.get('bytes_limit')
  return limit and limit - stats.get('bytes_in_use', 0)


def all_bytes() -> int | None:
  """Returns the sum of the free bytes of all devices; None if unknown.

  The devices are those of all processes.
  """
  devices = jax.devices()
  if devices[0].platform == 'cpu':  # a process's CPU devices share its memory
    size = free_bytes()
    return size and size * len({device.process_index for device in devices})
  sizes = [device_bytes(device) for device in devices]
  return None if None in sizes else sum(size or 0 for size in sizes)


def most_bytes() -> int | None:
  """Returns the host's memory or the free bytes of all devices in sum.

  It is the larger of the two numbers; None if one of them is unknown.
  """
  sizes = host_bytes(), all_bytes()
  return None if None in sizes else max(size or 0 for size in sizes)


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
  """Returns an array's bytes on a device, where four-bit numbers are packed."""
  bits = jax.dtypes.itemsize_bits(jax.numpy.dtype(dtype))
  return math.ceil(math.prod(shape) * bits / 8)


def gib(size: int) -> str:
  """Formats bytes in GiB, or below a tenth of a GiB in MiB."""
  return (
    f'{size / GIB:.2f} GiB' if size >= GIB / 10 else f'{size / 2**20:.2f} MiB'
  )
