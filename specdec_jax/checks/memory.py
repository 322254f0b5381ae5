"""How much memory there is, and the error if something needs more."""

import gc
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

GIB = 2**30
# Where Linux says how much memory there is, which control groups this process
# is in (of a container, a service or a job), and what they may use.
_MACHINE = pathlib.Path('/proc/meminfo')
_OWN_GROUPS = pathlib.Path('/proc/self/cgroup')
_GROUPS = pathlib.Path('/sys/fs/cgroup')
_BYTES = 'memory.max', 'memory.current'
_CACHED = re.compile(r'^(?:in)?active_file (\d+)$', re.M)  # pages of files


class DoesNotFitError(ValueError):
  """Something needs more memory than there is."""


def check_room(
  what: str, needed: int, free: Callable[[], int | None], advice: str
) -> None:
  """Raises an error if something cannot fit into memory, before it is made.

  Args:
    what: what needs the memory, as the beginning of a sentence.
    needed: bytes that it needs.
    free: returns the bytes that are free; None is unknown, and never raises.
    advice: what to do, as a sentence.

  Raises:
    DoesNotFitError: more is needed; the message gives both numbers.
  """
  there = free()
  if there is not None and needed > there:
    gc.collect()  # an engine that nobody uses any more may wait for this
    there = free()
  if there is not None and needed > there:
    raise DoesNotFitError(
      f'{what}: {gib(needed)} of memory are needed and {gib(there)} are'
      f' free. {advice}'
    )


def host_bytes() -> int | None:
  """Bytes of the machine's memory, or of the container's; None if unknown."""
  try:
    size = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (AttributeError, OSError, ValueError):
    return None  # not a Unix
  return min([size, *(limit for limit, _ in _groups())])


def free_bytes() -> int | None:
  """Bytes of the host's memory that nobody uses; None if unknown.

  What the system would give up, such as pages of files, is not in use.
  """
  machine = re.search(r'^MemAvailable: +(\d+) kB$', _text(_MACHINE), re.M)
  whole = int(machine[1]) << 10 if machine else host_bytes()
  left = [max(0, limit - used) for limit, used in _groups()]
  return None if whole is None else min([whole, *left])


def _groups() -> Iterator[tuple[int, int]]:
  """Limit and use, in bytes, of each control group that has a limit."""
  for line in _text(_OWN_GROUPS).splitlines():
    number, _, path = line.split(':', 2)
    if number != '0':  # of the first version of control groups
      continue
    group = _GROUPS / path.strip('/')
    # What is above a container it may not see; then its own group is the root.
    for folder in (group, *group.parents):
      limit, used = (_text(folder / name).strip() for name in _BYTES)
      if limit.isdigit() and used.isdigit():
        pages = _CACHED.findall(_text(folder / 'memory.stat'))
        yield int(limit), int(used) - sum(map(int, pages))
      if folder == _GROUPS:
        break


def _text(path: pathlib.Path) -> str:
  """What a file says; '' if there is none to be read."""
  try:
    return path.read_text('ascii')
  except (OSError, ValueError):
    return ''


def device_bytes(device: jax.Device | None = None) -> int | None:
  """Bytes of the device's memory that are free for this process.

  Args:
    device: the device; None is the first one.

  Returns:
    For an accelerator what its allocator may still give, None if that is
    unknown; for a CPU what is free of the machine's memory.
  """
  device = device or jax.devices()[0]
  if device.platform == 'cpu':
    return free_bytes()
  stats = device.memory_stats() or {}
  limit = stats.get('bytes_limit')
  return limit and limit - stats.get('bytes_in_use', 0)


def all_bytes() -> int | None:
  """Free bytes of all devices of all processes; None if one is unknown."""
  devices = jax.devices()
  if devices[0].platform == 'cpu':  # a process's CPU devices share its memory
    size = free_bytes()
    return size and size * len({device.process_index for device in devices})
  sizes = [device_bytes(device) for device in devices]
  return None if None in sizes else sum(size or 0 for size in sizes)


def most_bytes() -> int | None:
  """Bytes of the host or of all devices, whichever has more; None: unknown."""
  there = host_bytes(), all_bytes()
  return None if None in there else max(size or 0 for size in there)


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
  """Bytes of an array on a device, where numbers of four bits are packed."""
  bits = jax.dtypes.itemsize_bits(jax.numpy.dtype(dtype))
  return math.ceil(math.prod(shape) * bits / 8)


def gib(size: int) -> str:
  """Bytes as text: in GiB, or below a tenth of a GiB in MiB."""
  return (
    f'{size / GIB:.2f} GiB' if size >= GIB / 10 else f'{size / 2**20:.2f} MiB'
  )
