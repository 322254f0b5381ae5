"""The kind of device that a program is traced for, and this host.

On a CPU slots should be the vector lanes, a call over more tokens takes longer,
and work that a conditional avoids is time saved. A GPU or TPU chooses layouts
of its own: what is done for them keeps their compilers from copying caches and
kernels. Code asks for the kind where that was measured on a device, or where
the bytes of the compiled program show what it saves.
"""

import contextlib
import os
import pathlib
import platform
import re
from typing import Any

import jax

# Where one of these differs, JAX traces again.
_described = jax.make_user_context('')
_split = jax.make_user_context(False)

_CPUINFO = pathlib.Path('/proc/cpuinfo')


def kind() -> str:
  """The device of the program that is traced: 'cpu', 'gpu' or 'tpu'."""
  return _described.value or jax.default_backend()


def num_cores() -> int:
  """Cores of the CPU that this process may run on."""
  if hasattr(os, 'sched_getaffinity'):  # not on each system
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def cpu_name() -> str:
  """What the processor is called."""
  named = re.search(r'^model name\s*:(.*)$', _cpuinfo(), re.M)
  if named:
    return named[1].strip()
  return platform.processor() or platform.machine()


def _cpuinfo() -> str:
  """What Linux says of the processor; '' on other systems."""
  there = _CPUINFO.exists()
  return _CPUINFO.read_text(errors='replace') if there else ''


def instruction_set() -> str:
  """The widest vectors that XLA's programs use here: AVX-512, AVX2 or others.

  XLA_FLAGS=--xla_cpu_max_isa=AVX2 has it use less than the processor has.
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
  """What the speed of programs on this CPU depends on, as JSON values."""
  return {
    'processor': cpu_name(),
    'cores': num_cores(),
    'jax': jax.__version__,
    'flags': os.environ.get('XLA_FLAGS', ''),
  }


def is_whole_on(device: str) -> bool:
  """Whether a program is for a kind of device, and its arrays are not split.

  Writes of all rows at once would gather the rows and heads of all devices, and
  barriers of turned operands would hide from XLA how these are split.
  """
  return kind() == device and not _split.value


def precision(dtype: str) -> jax.lax.Precision:
  """The precision of products of `dtype`.

  Float32 means float32: no TF32 on a GPU, no bfloat16 passes on a TPU.
  """
  kinds = jax.lax.Precision
  return kinds.HIGHEST if dtype == 'float32' else kinds.DEFAULT


def compiled_for(described: str) -> contextlib.AbstractContextManager[object]:
  """Traces for a device that is not there.

  Args:
    described: its kind, as `jax.default_backend` would name it.
  """
  return _described(described)


def split() -> contextlib.AbstractContextManager[object]:
  """Traces for arrays whose rows and heads may be split over devices."""
  return _split(True)
