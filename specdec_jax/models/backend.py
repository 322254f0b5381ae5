"""What is done only for one kind of device, decided here for all others.

On a CPU a product of one row is slow, slots should be the vector lanes, and
work that a conditional avoids is time saved. On a GPU or TPU each such trick
costs a kernel, and a conditional waits for the host. On a GPU each kernel has a
price, whatever its size: the fewer, the better. A TPU has a unit for products
of matrices, and chooses layouts of its own.
"""

import contextlib
import functools
import importlib.util
import os
import pathlib
import platform
import re
import warnings
from typing import Any, NamedTuple

import jax

from specdec_jax.checks.names import check_choice

# Where one of these differs, JAX traces again.
_described = jax.make_user_context('')
_split = jax.make_user_context(False)
_kernels = jax.make_user_context('')

_NO_SPLIT = {'xla_gpu_experimental_force_split_k': '1'}
_GRAPHS = {  # XLA's own choice, and loops and conditionals
  'xla_gpu_enable_command_buffer': (
    'FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,'
    'WHILE,CONDITIONAL'
  ),
  'xla_gpu_graph_min_graph_size': '1',
}

# Hand-written kernels (Pallas): none; where they can be had; or an error where
# they cannot; with 'layers' a whole layer is one, and a draw. 'interpreted' is
# 'forced' on any device, slowly, for tests.
COMPILED_KERNELS = ('off', 'on', 'layers', 'forced', 'forced layers')
KERNELS = (*COMPILED_KERNELS, 'interpreted', 'interpreted layers')
_KERNELS = 'SPECDEC_KERNELS'  # in the environment: one of these
_CPUINFO = pathlib.Path('/proc/cpuinfo')
_DESCRIBED_CORES = 132  # of an H100 or H200, where no GPU is there


class Ways(NamedTuple):
  """How networks compute, and tokens are sampled, on a kind of device.

  Attributes:
    has_buckets: attention reads a prefix of the cache, chosen by a conditional.
    turns_operands: products with [out, in] kernels have the kernel on the left,
      and a number of rows for which that is quick, see `cpu_layout`.
    holds_floats: kernels of eight bits are held as float32. The compiler would
      make these in each call, before its loop.
    widens_bfloat16: the compiler makes float32 of bfloat16 parameters before a
      loop, all of them, and holds both until its end.
    sums_row: a product of one row with such a kernel is a sum over the kernel,
      and what is added to it, a bias or a residual, is one of the terms.
    joins_cache: a layer's keys and values are one array, slots before numbers.
    orders_layers: barriers keep XLA from joining work of several layers.
    prefers_out_in: on one device kernels are always [out, in].
    samples_by_need: sampling does as little work as it can: conditionals leave
      out what is off, and searches halve. Otherwise what is off is no part of
      the program, and sampling takes as few operations as it can.
    flattens_cache: a joined cache is written as an array of rows of D numbers:
      one kernel, which cannot ask for another layout of the cache.
    writes_by_row: slots-last caches are written row after row. All rows at once
      are a scatter, which a TPU runs as a loop over them with ten operations a
      row; and it would keep slots in lanes, where a write touches every tile.
    branches_write: a slots-last cache of one row is written in a branch. What
      is in a branch is done once; outside XLA would write for the attention and
      again for the cache, each time into a copy.
    least_rows: products with [in, out] kernels have as many rows at least. A
      TPU computes a product of one row without its matrix unit.
    holds_queries: a barrier behind the queries' product. Without it a TPU's
      compiler relays their kernel at each run, for queries by heads.
    narrows_calls: a call of the target is only as wide as the longest draft,
      where drafts end early. On a GPU or TPU a wide call costs what a narrow
      one does.
    drafts_beams: an engine with a drafter speculates on a beam search unless it
      is told not to. On a CPU a call over a tree costs more than it saves.
    doubles_norm: the norm of one row is computed as that of two. XLA then makes
      one kernel of norm, product and gate; of one row, whose sum is a scalar,
      it makes four.
  """

  has_buckets: bool = False
  turns_operands: bool = False
  holds_floats: bool = False
  widens_bfloat16: bool = False
  sums_row: bool = False
  joins_cache: bool = False
  orders_layers: bool = False
  prefers_out_in: bool = False
  samples_by_need: bool = False
  flattens_cache: bool = False
  writes_by_row: bool = False
  branches_write: bool = False
  least_rows: int = 1
  holds_queries: bool = False
  narrows_calls: bool = False
  drafts_beams: bool = True
  doubles_norm: bool = False


_WAYS = {
  'cpu': Ways(
    has_buckets=True,
    turns_operands=True,
    holds_floats=True,
    widens_bfloat16=True,
    samples_by_need=True,
    branches_write=True,
    narrows_calls=True,
    drafts_beams=False,
  ),
  'gpu': Ways(
    sums_row=True,
    joins_cache=True,
    orders_layers=True,
    prefers_out_in=True,
    flattens_cache=True,
    doubles_norm=True,
  ),
  # Eight rows are a tile of a TPU: they cost what one does.
  'tpu': Ways(writes_by_row=True, least_rows=8, holds_queries=True),
}


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
  if _CPUINFO.exists():
    for line in _CPUINFO.read_text(errors='replace').splitlines():
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.processor() or platform.machine()


def instruction_set() -> str:
  """The widest vectors that XLA's programs use here: AVX-512, AVX2 or others.

  XLA_FLAGS=--xla_cpu_max_isa=AVX2 has it use less than the processor has.
  """
  match = re.search(r'xla_cpu_max_isa=(\w+)', os.environ.get('XLA_FLAGS', ''))
  limit = match[1] if match else ''
  text = ''
  if _CPUINFO.exists():
    text = _CPUINFO.read_text(errors='replace')
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


def gpu_cores() -> int:
  """Cores of the GPU that is traced for (streaming multiprocessors)."""
  if _described.value or jax.default_backend() != 'gpu':
    return _DESCRIBED_CORES
  return int(jax.devices()[0].core_count)


def ways() -> Ways:
  """How things are done on that device."""
  found = _WAYS.get(kind(), Ways())
  if not _split.value:
    return found
  # Such writes would gather the rows and heads of all devices, and barriers of
  # turned operands would hide from XLA how these are split.
  return found._replace(
    flattens_cache=False,
    writes_by_row=False,
    branches_write=False,
    turns_operands=False,
  )


def kernels(setting: str) -> contextlib.AbstractContextManager[object]:
  """Traces with hand-written kernels, or without: one of `KERNELS`.

  Outside of such a context the environment's SPECDEC_KERNELS says it; else they
  are off: no GPU has measured them yet.

  Raises:
    ValueError: it is none of these.
  """
  check_choice('The setting of hand-written kernels', setting, KERNELS)
  return _kernels(setting)


def kernel_setting() -> str:
  """Which of `KERNELS` holds for what is traced now.

  Raises:
    ValueError: the environment says none of these.
  """
  if _kernels.value:
    return str(_kernels.value)
  setting = os.environ.get(_KERNELS) or 'off'
  check_choice(f'{_KERNELS} of the environment', setting, KERNELS)
  return setting


def takes_kernel(name: str, refusal: str = '') -> bool:
  """Whether a hand-written kernel is used for what is traced now.

  If it could be had only elsewhere or for other shapes, this is said once.

  Args:
    name: of the kernel, for messages.
    refusal: why it does not take these shapes; '' if it does.

  Raises:
    ValueError: the kernel is forced and cannot be had.
  """
  if kernel_setting() == 'off':
    return False
  reason = _lacks() or refusal
  if not reason:
    return True
  message = f'The kernel of {name} cannot be had: {reason}.'
  if kernel_setting() not in ('on', 'layers'):
    milder = 'layers' if wants_layers() else 'on'
    raise ValueError(
      f'{message} Set kernels to {milder!r}, which does without it here, or'
      " 'off'."
    )
  _say_once(message + ' XLA computes this instead.')
  return False


def wants_layers() -> bool:
  """Whether a layer is to be one kernel, where `takes_kernel` says so."""
  return kernel_setting().endswith('layers')


def interprets_kernels() -> bool:
  """Whether kernels are interpreted, a program after another."""
  return kernel_setting().startswith('interpreted')


def _lacks() -> str:
  """Why kernels cannot be had for this device; '' if they can."""
  if _split.value:
    return 'rows and heads may be split over several devices'
  if importlib.util.find_spec('jax.experimental.pallas.triton') is None:
    return f'jax {jax.__version__} has no Pallas for GPUs'
  if kind() != 'gpu' and not interprets_kernels():
    return f'it is written for GPUs, and this is a {kind().upper()}'
  return ''


@functools.cache
def _say_once(message: str) -> None:
  warnings.warn(message, stacklevel=2)


def precision(dtype: str) -> jax.lax.Precision:
  """The precision of products of `dtype`.

  Float32 means float32: no TF32 on a GPU, no bfloat16 passes on a TPU.
  """
  if dtype == 'float32':
    return jax.lax.Precision.HIGHEST
  return jax.lax.Precision.DEFAULT


def compiler_options() -> dict[str, str | bool]:
  """What XLA is told beside a program, for `jax.jit` or `Lowered.compile`.

  On a GPU XLA would share the terms of a sum among several blocks where a
  product has few rows, write partial sums in float32, and add them up in
  another kernel. A product with a kernel of 4096 columns is 256 blocks without
  that, enough for all cores of a GPU.

  With hand-written kernels loops are to be CUDA graphs, too, of any size: they
  start with one launch, and no conditional asks the host.
  """
  if kind() != 'gpu':
    return {}
  wanted = [_NO_SPLIT]
  if kernel_setting() != 'off':
    wanted.append(_GRAPHS)
  found: dict[str, str | bool] = {}
  for options in wanted:
    if _are_known(*options.items()):
      found |= options
  return found


@functools.cache
def _are_known(*options: tuple[str, str | bool]) -> bool:
  """Whether this jaxlib's XLA has such options; any compiler reads them."""
  lowered = jax.jit(lambda: 0).lower()
  try:
    lowered.compile(compiler_options=dict(options))
  except jax.errors.JaxRuntimeError:
    return False
  return True


def compiled_for(described: str) -> contextlib.AbstractContextManager[object]:
  """Traces for a device that is not there.

  Args:
    described: its kind, as `jax.default_backend` would name it.
  """
  return _described(described)


def split() -> contextlib.AbstractContextManager[object]:
  """Traces for arrays whose rows and heads may be split over devices."""
  return _split(True)
