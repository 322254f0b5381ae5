"""Compiles for a TPU that is not there: libtpu needs only its description."""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from specdec_jax.measure.compiled import program_text

# Without these, libtpu asks a cloud machine's metadata server for its machine.
_DESCRIPTION = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  # Nothing runs on the chip, so other processes may use libtpu too.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
TOPOLOGY = 'v4:2x2x1'  # the smallest slice; one of its four chips is used
_CHIP = 'megacore'  # both cores of a v4 chip as one device
_LEAST_WEIGHT = 1 << 16  # elements; smaller arrays are ignored


def describe_chip() -> Any:
  """One chip of a TPU v4, to compile for; see `describe_slice`."""
  return describe_slice(TOPOLOGY)[0]


def describe_slice(topology: str) -> list[Any]:
  """The chips of a TPU slice, to compile for.

  Args:
    topology: such as 'v4:2x2x4'.

  Raises:
    ValueError: libtpu is not installed, or does not know the topology.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError("libtpu is not installed: pip install 'specdec_jax[tpu]'")
  for name, value in _DESCRIPTION.items():
    os.environ.setdefault(name, value)
  try:
    described = topologies.get_topology_desc(
      topology, platform='tpu', chip_config_name=_CHIP
    )
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    raise ValueError(
      f'libtpu {importlib.metadata.version("libtpu")} does not describe a TPU'
      f' {topology}: {error}'
    ) from error
  return list(described.devices)


def versions() -> dict[str, str]:
  """Versions of the packages that compile."""
  return {name: importlib.metadata.version(name) for name in ('jax', 'libtpu')}


class Compiler:
  """Compiles for one chip, from shapes alone; keeps the results."""

  def __init__(self, device: Any):
    self._sharding = jax.sharding.SingleDeviceSharding(device)
    self._found: dict[Any, tuple[dict[str, Any], Any]] = {}

  @property
  def num_programs(self) -> int:
    """How many programs have been compiled so far."""
    return len(self._found)

  def place(self, tree: Any) -> Any:
    """The same shapes, with shardings on the chip."""

    def on_chip(leaf):
      return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=self._sharding
      )

    return jax.tree.map(on_chip, tree)

  def compile(
    self, key: Any, function: Callable, params: Any, *args: Any, donated=()
  ) -> tuple[dict[str, Any], Any]:
    """Compiles a function, unless it was compiled for such arguments already.

    Args:
      key: tells the function from others, for example by its networks.
      function: (params, *args) -> ...
      params: `ShapeDtypeStruct`s on the chip, see `place`.
      *args: `ShapeDtypeStruct`s on the chip, see `place`.
      donated: indices of arguments to update in place, as `jax.jit` counts.

    Returns:
      The program's record, with bytes and `program_text.Findings`, or only
      `refused` if the chip cannot hold it; and the shapes of its result, on the
      chip.
    """
    leaves, tree = jax.tree.flatten((params, args))
    key = (key, tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
    if key not in self._found:
      self._found[key] = self._compile(function, params, args, donated)
    return self._found[key]

  def _compile(self, function, params, args, donated):
    # Unused arguments count too: both models stay loaded.
    jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
    lowered = jitted.lower(params, *args)
    shapes = self.place(lowered.out_info)
    return record_of(lowered, jax.tree.leaves(params))[0], shapes


def record_of(
  lowered: Any, params: Sequence[Any]
) -> tuple[dict[str, Any], str]:
  """Compiles a program and returns what it needs.

  Args:
    lowered: result of `jax.jit(...).lower(...)`.
    params: shapes of the parameters, with shardings.

  Returns:
    Bytes per chip and `program_text.Findings`, or only `refused` if a chip
    cannot hold it; and the program's text.
  """
  begin = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return {'refused': str(error).splitlines()[0]}, ''
  seconds = time.perf_counter() - begin
  weights = {
    shape
    for shape in (leaf.sharding.shard_shape(leaf.shape) for leaf in params)
    if len(shape) > 1 and math.prod(shape) >= _LEAST_WEIGHT
  }
  text = compiled.as_text() or ''
  findings = program_text.inspect(text, weights)
  costs = compiled.cost_analysis() or {}
  record = {
    'compile_seconds': seconds,
    'xla_bytes_accessed': costs.get('bytes accessed'),
  }
  return record | _memory(compiled) | dataclasses.asdict(findings), text


def _memory(compiled: Any) -> dict[str, int]:
  sizes = compiled.memory_analysis()
  parts = {
    'arguments': sizes.argument_size_in_bytes,
    'outputs': sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
    'temporaries': sizes.temp_size_in_bytes,
    'code': sizes.generated_code_size_in_bytes,
  }
  peak = max(sum(parts.values()), sizes.peak_memory_in_bytes)
  in_place = {'in_place': sizes.alias_size_in_bytes}
  return {f'{k}_bytes': v for k, v in (parts | in_place).items()} | {
    'peak_bytes': peak
  }
