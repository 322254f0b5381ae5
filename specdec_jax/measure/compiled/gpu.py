"""Compiles for a GPU that is not there: XLA needs only its numbers.

No driver is asked for anything, so kernels are chosen by rules instead of by
trial: products that a GPU at hand would give to cuBLAS may come out as
generated kernels, and tiles may be others.
"""

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import xla_bridge
from jax._src.lib import xla_client
from jax.experimental import topologies

from specdec_jax.measure.compiled.devices import Gpu

_PLUGIN = 'jax_cuda12_plugin'
_NO_TRIALS = '--xla_gpu_autotune_level=0'  # they need the device
_CUDNN, _RUNTIME = (9, 10, 0), (12, 9, 0)


def describe(gpu: Gpu, kernels: str = 'off') -> Any:
  """The GPU as a device to compile for.

  Args:
    gpu: its numbers.
    kernels: the setting of hand-written kernels that will be compiled.

  Raises:
    ValueError: the CUDA compiler is not installed, or does not know it; or this
      JAX compiles no kernels without a GPU.
  """
  if kernels != 'off' and jax.__version_info__ >= (0, 11):
    raise ValueError(
      f"kernels must be 'off' here, got {kernels!r}: JAX {jax.__version__}"
      ' compiles hand-written kernels only where a GPU is; JAX 0.10 does'
      ' without.'
    )
  if importlib.util.find_spec(_PLUGIN) is None:
    raise ValueError(
      f'To compile for a {gpu.name} the CUDA compiler is needed, which is not'
      " installed: pip install 'specdec_jax[cuda]'."
    )
  flags = os.environ.get('XLA_FLAGS', '')
  if 'xla_gpu_autotune_level' not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} {_NO_TRIALS}'.strip()
  with _without_a_driver():
    jax.devices('cpu')  # looks for plug-ins, unless told to keep to the CPU
    if not xla_client.pjrt_plugin_loaded('cuda'):
      xla_bridge.discover_pjrt_plugins()
  _say_cuda()
  try:
    described = topologies.get_topology_desc(
      platform='cuda', target_config=_numbers(gpu), topology='1x1x1'
    )
  except (jax.errors.JaxRuntimeError, NotImplementedError, KeyError) as error:
    raise ValueError(
      f'{_PLUGIN} {versions()[_PLUGIN]} does not describe a {gpu.name}: {error}'
    ) from error
  return described.devices[0]


def versions() -> dict[str, str]:
  """Versions of the packages that compile."""
  return {
    name: importlib.metadata.version(name.replace('_', '-'))
    for name in ('jax', _PLUGIN)
  }


@contextlib.contextmanager
def _without_a_driver() -> Iterator[None]:
  """Keeps the plug-in from asking one, and from telling that there is none."""
  hidden = {
    'CUDA_VISIBLE_DEVICES': '-1',
    'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
  }
  before = {name: os.environ.get(name) for name in hidden}
  os.environ.update(hidden)
  disabled = logging.root.manager.disable
  logging.disable(logging.CRITICAL)
  try:
    yield
  finally:
    logging.disable(disabled)
    for name, value in before.items():
      os.environ.pop(name)
      if value is not None:
        os.environ[name] = value


def _say_cuda() -> None:
  """Lets JAX know that a 'gpu' is CUDA's where no GPU is (jax issue 23971)."""
  original = xla_bridge.canonicalize_platform
  if getattr(original, 'says_cuda', False):
    return

  def canonicalize(platform: str) -> str:
    try:
      return original(platform)
    except RuntimeError:
      if platform == 'gpu':
        return 'cuda'
      raise

  canonicalize.says_cuda = True  # type: ignore[attr-defined]
  xla_bridge.canonicalize_platform = canonicalize


def _numbers(gpu: Gpu) -> str:
  """The protobuf text of XLA's `GpuTargetConfigProto`."""
  major, minor = gpu.compute_capability
  cudnn, runtime = (
    f'{{ major: {a} minor: {b} patch: {c} }}' for a, b, c in (_CUDNN, _RUNTIME)
  )
  return f"""
    gpu_device_info {{
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      core_count: {gpu.cores}
      fpus_per_core: {gpu.fpus_per_core}
      threads_per_block_limit: 1024
      threads_per_warp: 32
      threads_per_core_limit: {gpu.threads_per_core}
      shared_memory_per_block: 49152
      shared_memory_per_core: {gpu.shared_per_core}
      shared_memory_per_block_optin: {gpu.shared_per_block}
      registers_per_core_limit: {gpu.registers_per_core}
      registers_per_block_limit: {gpu.registers_per_core}
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      l2_cache_size: {gpu.l2_bytes}
      clock_rate_ghz: {gpu.clock_ghz}
      memory_bandwidth: {int(gpu.bytes_per_s)}
      device_memory_size: {gpu.usable_bytes}
    }}
    platform_name: "CUDA"
    dnn_version_info {cudnn}
    runtime_version {runtime}
    device_description_str: "{gpu.name}"
  """
