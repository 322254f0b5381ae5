"""Compiles programs from shapes alone, and records what they need."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from specdec_jax.measure.compiled import kernels, program_text
from specdec_jax.models import backend

_LEAST_WEIGHT = 1 << 16  # elements; smaller arrays are ignored


class Compiler:
  """Compiles for one device; keeps the results.

  Args:
    device: the described device.
    counts_kernels: whether records have `kernels.by_loop`, as for a GPU.
  """

  def __init__(self, device: Any, counts_kernels: bool = False):
    self._sharding = jax.sharding.SingleDeviceSharding(device)
    self._counts_kernels = counts_kernels
    self._found: dict[Any, tuple[dict[str, Any], Any]] = {}

  @property
  def num_programs(self) -> int:
    """How many programs have been compiled so far."""
    return len(self._found)

  def place(self, tree: Any) -> Any:
    """The same shapes, with shardings on the device."""

    def on_device(leaf):
      return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=self._sharding
      )

    return jax.tree.map(on_device, tree)

  def compile(
    self, key: Any, function: Callable, params: Any, *args: Any, donated=()
  ) -> tuple[dict[str, Any], Any]:
    """Compiles a function, unless it was compiled for such arguments already.

    Args:
      key: tells the function from others, for example by its networks.
      function: (params, *args) -> ...
      params: `ShapeDtypeStruct`s on the device, see `place`.
      *args: `ShapeDtypeStruct`s on the device, see `place`.
      donated: indices of arguments to update in place, as `jax.jit` counts.

    Returns:
      The program's record, with bytes and `program_text.Findings`, or only
      `refused` if the device cannot hold it; and the shapes of its result, on
      the device.
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
    leaves = jax.tree.leaves(params)
    caches = {leaf.shape for leaf in jax.tree.leaves(args) if leaf.ndim >= 4}
    record, text = record_of(lowered, leaves, caches)
    if self._counts_kernels:
      found = kernels.find(text, _whole_weights(leaves), caches)
      record['launched'] = dict(kernels.by_loop(found))
    return record, shapes


def record_of(
  lowered: Any,
  params: Sequence[Any],
  caches: Collection[tuple[int, ...]] = (),
) -> tuple[dict[str, Any], str]:
  """Compiles a program and returns what it needs.

  Args:
    lowered: result of `jax.jit(...).lower(...)`.
    params: shapes of the parameters, with shardings.
    caches: shapes of the caches that it updates.

  Returns:
    Bytes per device and `program_text.Findings`, or only `refused` if the
    device cannot hold it; and the program's text.
  """
  begin = time.perf_counter()
  try:
    compiled = lowered.compile(compiler_options=backend.compiler_options())
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return {'refused': str(error).splitlines()[0]}, ''
  seconds = time.perf_counter() - begin
  text = compiled.as_text() or ''
  findings = program_text.inspect(text, _whole_weights(params), caches)
  costs = compiled.cost_analysis() or {}
  record = {
    'compile_seconds': seconds,
    'xla_bytes_accessed': costs.get('bytes accessed'),
  }
  return record | _memory(compiled) | dataclasses.asdict(findings), text


def _whole_weights(params: Sequence[Any]) -> Collection[tuple[int, ...]]:
  """Shapes of the matrices on a device."""
  shapes = (leaf.sharding.shard_shape(leaf.shape) for leaf in params)
  return {
    shape
    for shape in shapes
    if len(shape) > 1 and math.prod(shape) >= _LEAST_WEIGHT
  }


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
