"""Facts about the device that a program is traced for, and about this host.

Some code depends on the kind of device. On a CPU cache slots should be the last
axis, which vector instructions process together; a call over more tokens takes
longer; and a conditional that skips work saves time. A GPU's or TPU's compiler
chooses its layouts itself; there the code keeps it from copying caches and
kernels. Code depends on the kind only if a measurement on a device, or the
bytes of the compiled program, show a gain.
"""

import os
import pathlib
import platform
import re
from typing import Any

import jax

# JAX traces a program again if one of these values has changed. Under
# `with compiled_for('tpu'):` it traces for a kind of device that is not there,
# and under `with split(True):` for arrays whose rows and heads may be split
# over devices.
compiled_for = jax.make_user_context('')
split = jax.make_user_context(False)

_CPUINFO = pathlib.Path('/proc/cpuinfo')


def kind() -> str:
  """Returns the device of the traced program: 'cpu', 'gpu' or 'tpu'."""
  return compiled_for.value or jax.default_backend()


def is_one_cpu() -> bool:
  """Returns whether programs run on one CPU, and arrays are not split."""
  return kind() == 'cpu' and jax.device_count() == 1


def num_cores() -> int:
  """Returns the number of CPU cores that this process may run on."""
  if hasattr(os, 'sched_getaffinity'):  # only Linux has this function
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def cpu_name() -> str:
  """Returns the processor's name."""
  named = re.search(r'^model name\s*:(.*)$', _cpuinfo(), re.M)
  if named:
    return named[1].strip()
  return platform.processor() or platform.machine()


def device_name() -> str:
  """Returns the name of the first device; for a CPU, the processor's name."""
  device = jax.devices()[0]
  return cpu_name() if device.platform == 'cpu' else str(device.device_kind)


def _cpuinfo() -> str:
  """Reads Linux's description of the processor; '' on other systems."""
  return _CPUINFO.read_text(errors='replace') if _CPUINFO.exists() else ''


def instruction_set() -> str:
  """Returns XLA's widest vector instructions: AVX-512, AVX2 or others.

  XLA_FLAGS=--xla_cpu_max_isa=AVX2 keeps XLA from using wider instructions, even
  if the processor has them.
  """
  match = re.search(r'xla_cpu_max_isa=(\w+)', os.environ.get('XLA_FLAGS', ''))
  limit = match[1] if match else ''
  text = _cpuinfo()
  if ' avx512f' in text and limit in ('', 'AVX512'):
    return 'AVX-512'
  if ' avx2' in text and limit in ('', 'AVX2', 'AVX512'):
    return 'AVX2'
  return limit or platform.machine()


def host() -> dict[str, Any]:
  """Returns, as a JSON object, what decides programs' speed on this CPU."""
  return {
    'processor': cpu_name(),
    'cores': num_cores(),
    'jax': jax.__version__,
    'flags': os.environ.get('XLA_FLAGS', ''),
  }


def is_whole_on(device: str) -> bool:
  """Whether a program is traced for this kind of device, without sharding.

  Some optimisations are not for sharded arrays: writing to an array of all rows
  would gather the rows and heads of all devices, and barriers would hide from
  XLA how their operands are split.
  """
  return kind() == device and not split.value


def precision(dtype: str) -> jax.lax.Precision:
  """Returns the precision of products of `dtype`.

  Products of float32 are computed in full float32, not in TF32 on a GPU and not
  in bfloat16 passes on a TPU.
  """
  kinds = jax.lax.Precision
  return kinds.HIGHEST if dtype == 'float32' else kinds.DEFAULT
