"""Describes the machine of a measurement: device, versions, load."""

import os
import pathlib
import platform
from typing import Any

import jax

from specdec_jax.models import backend


def describe() -> dict[str, Any]:
  """Returns device, cores, versions and load, to be kept with a measurement."""
  device = jax.devices()[0]
  is_cpu = device.platform == 'cpu'
  kernels = backend.kernel_setting()
  return {
    'device': backend.cpu_name() if is_cpu else device.device_kind,
    'platform': device.platform,
    'devices': jax.device_count(),
    'cores': backend.num_cores(),
    **({'isa': backend.instruction_set()} if is_cpu else {}),
    'jax': jax.__version__,
    'python': platform.python_version(),
    'load_average': _load_average(),
    # Hand-written ones, where they are asked for.
    **({} if kernels == 'off' else {'kernels': kernels}),
  }


def seconds_since_start() -> float | None:
  """Seconds since this process began, imports included; None if unknown."""
  stat, uptime = pathlib.Path('/proc/self/stat'), pathlib.Path('/proc/uptime')
  if not (stat.exists() and uptime.exists()):
    return None  # not a Linux
  # Field 22 of the file. Counted from after the process's name, which is in
  # brackets and may hold blanks.
  fields = stat.read_text().rpartition(')')[2].split()
  began = int(fields[19]) / os.sysconf('SC_CLK_TCK')
  return float(uptime.read_text().split()[0]) - began


def _load_average() -> float | None:
  """Mean number of processes that wanted a core in the last minute.

  It includes this process.
  """
  return round(os.getloadavg()[0], 2) if hasattr(os, 'getloadavg') else None
