"""The memory that there is, and the error where something needs more."""

import os
import pathlib

import jax

GIB = 2**30
# Of a container; the machine may have more.
_CONTAINER = pathlib.Path('/sys/fs/cgroup/memory.max')


class DoesNotFitError(ValueError):
  """Something needs more memory than there is."""


def check_room(what: str, needed: int, there: int | None, advice: str) -> None:
  """Refuses what no memory could hold, before any of it is taken.

  Args:
    what: needs it, as the beginning of a sentence.
    needed: bytes.
    there: bytes that there are; None is not known and refuses nothing.
    advice: what to do, as a sentence.

  Raises:
    DoesNotFitError: more is needed; gives both numbers.
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
  except (OSError, ValueError):  # there is none, or it is 'max'
    return size


def device_bytes(device: jax.Device | None = None) -> int | None:
  """Bytes that the device's memory has for this process.

  Args:
    device: the first one unless given.

  Returns:
    Of an accelerator the limit of its allocator, None if it names none; of a
    CPU the machine's memory.
  """
  device = device or jax.devices()[0]
  if device.platform != 'cpu':
    return (device.memory_stats() or {}).get('bytes_limit')
  return host_bytes()


def all_bytes() -> int | None:
  """Bytes of all devices of all processes; None if one does not say."""
  devices = jax.devices()
  if devices[0].platform == 'cpu':  # those of a process share its machine
    size = host_bytes()
    return size and size * len({device.process_index for device in devices})
  sizes = [device_bytes(device) for device in devices]
  return None if None in sizes else sum(size or 0 for size in sizes)


def gib(size: int) -> str:
  """Bytes as text, in GiB, or MiB below a tenth of one."""
  return (
    f'{size / GIB:.2f} GiB' if size >= GIB / 10 else f'{size / 2**20:.2f} MiB'
  )
