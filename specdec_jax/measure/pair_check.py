"""Checks whether pairs fit on a device that this machine lacks; predicts times.

For each row of the paper's Table 2 the loop is compiled as `Engine` would run
it. The compiler reports the memory; the bytes that a call reads are counted
from shapes. libtpu and XLA's CUDA compiler need only a description of a device.
For a GPU, XLA chooses kernels by rules, because it cannot try them. So it may
generate a kernel for a product that it would give to cuBLAS on a real GPU.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src import xla_bridge
from jax._src.lib import xla_client
from jax.experimental import topologies
from rich.console import Console

from specdec_jax import analysis
from specdec_jax.checkpoints.families import read_tables
from specdec_jax.checks.fields import check_choice, check_types, unexpected
from specdec_jax.checks.memory import GIB
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure.calls import make_request
from specdec_jax.measure.memory import call_bytes, param_shapes
from specdec_jax.models import backend
from specdec_jax.models.base import LanguageModel
from specdec_jax.paper import printed
from specdec_jax.partitioning import Placement
from specdec_jax.report import Column, Record, Table, bar, record
from specdec_jax.types import Positive

KIND = 'pair_check'  # the record's kind


@dataclasses.dataclass(frozen=True)
class Device:
  """A device that programs are compiled for, although this machine lacks it.

  Attributes:
    platform: 'gpu' or 'tpu'.
    compiler: package that has the device's compiler.
    extra: the extra of this library that installs `compiler`.
    topology: the compiler's name of the smallest slice with this device.
    usable_bytes: memory that programs may use.
    bytes_per_s: bandwidth of the memory.
    name: name of a GPU, as its driver reports it; '' for a TPU.
    numbers: properties of a GPU that XLA otherwise gets from the driver, as
      text of a `GpuTargetConfigProto`.
  """

  platform: str
  compiler: str
  extra: str
  topology: str
  usable_bytes: int
  bytes_per_s: float
  name: str = ''
  numbers: str = ''


_TABLES = read_tables(pathlib.Path(__file__).with_name('devices.toml'))
DEVICES = {name: Device(**table) for name, table in _TABLES.items()}
# Without these variables, libtpu asks a cloud's metadata server about this
# machine.
_TPU_DESCRIPTION = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  # Nothing runs on the chip, so other processes may use libtpu too.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_TPU_CHIP = 'megacore'  # both cores of a v4 chip as one device
_NO_TRIALS = '--xla_gpu_autotune_level=0'  # XLA does not try kernels out


def describe(name: str) -> tuple[Any, dict[str, str]]:
  """Returns the device to compile for, and a description of it.

  The description has the device's full name and the versions of compilers.

  Args:
    name: name of the device in `DEVICES`.

  Raises:
    ValueError: the device's compiler is missing, or does not know the device.
  """
  spec = DEVICES[name]
  if importlib.util.find_spec(spec.compiler) is None:
    advice = f"pip install 'specdec_jax[{spec.extra}]'"
    raise unexpected('device', f'one with {spec.compiler} here', name, advice)
  packages = 'jax', spec.compiler
  versions = {name: importlib.metadata.version(name) for name in packages}
  try:
    (device, *_) = _described(spec).devices
  except (jax.errors.JaxRuntimeError, NotImplementedError, KeyError) as error:
    expected = f'one of {spec.compiler} {versions[spec.compiler]} ({error})'
    raise unexpected('device', expected, name) from error
  compiled_for = spec.name or f'{device.device_kind}, {spec.topology}'
  return device, {'compiled_for': compiled_for} | versions


def _described(spec: Device) -> Any:
  """Returns the topology of a device, without asking a driver."""
  if spec.platform == 'tpu':
    for name, value in _TPU_DESCRIPTION.items():
      os.environ.setdefault(name, value)
    chip = {'platform': 'tpu', 'chip_config_name': _TPU_CHIP}
    return topologies.get_topology_desc(spec.topology, **chip)
  flags = os.environ.get('XLA_FLAGS', '')
  if 'xla_gpu_autotune_level' not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} {_NO_TRIALS}'.strip()
  # JAX must neither look for a driver nor warn that there is none.
  skipped = {'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1'}
  disabled = logging.root.manager.disable
  logging.disable(logging.CRITICAL)
  try:
    with mock.patch.dict(os.environ, skipped, CUDA_VISIBLE_DEVICES='-1'):
      jax.devices('cpu')  # finds JAX's plug-ins, unless JAX_PLATFORMS is cpu
      if not xla_client.pjrt_plugin_loaded('cuda'):
        xla_bridge.discover_pjrt_plugins()
  finally:
    logging.disable(disabled)
  original = xla_bridge.canonicalize_platform

  def canonicalize(platform: str) -> str:
    """Accepts 'gpu' as CUDA where there is no GPU (jax issue 23971)."""
    try:
      return original(platform)
    except RuntimeError:
      if platform == 'gpu':
        return 'cuda'
      raise

  xla_bridge.canonicalize_platform = canonicalize
  gpu = {'target_config': spec.numbers, 'topology': spec.topology}
  return topologies.get_topology_desc(platform='cuda', **gpu)


@dataclasses.dataclass(frozen=True)
class PairCheckConfig:
  """Pairs to compile, and the device to compile them for.

  Attributes:
    target: the target's network.
    drafts: name of a draft model in Table 2 -> its network.
    input_lens: task -> tokens of an input.
    decode_lens: task -> the most tokens of an output.
    batch: examples that are decoded together.
    param_dtype: dtype of the parameters on the device.
    name: title of the table.
    device: name of the device, one of those in measure/devices.toml.
    output_file: path of the record, JSON; None writes no file.

  Raises:
    ValueError: a number is too small, or the device is not known.
  """

  target: LanguageModel
  drafts: Mapping[str, LanguageModel]
  input_lens: Mapping[str, Positive]
  decode_lens: Mapping[str, Positive]
  batch: Positive = 1
  param_dtype: str = 'bfloat16'
  name: str = 'Table 2, compiled'
  device: str = 'h200'
  output_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_choice('device', self.device, DEVICES)


def check(config: PairCheckConfig, console: Console | None = None) -> Record:
  """Compiles every row of Table 2; prints a table, writes the record.

  Args:
    config: the pairs and the device.
    console: shows the table; None uses stdout.

  Returns:
    The record. It has the settings and the rows. A row says whether the pair
    `fits`. `peak_bytes` are those of the larger of its two programs, with both
    models in memory; if the compiler does not accept a program, they are None,
    and `refused` is the compiler's message. `target_call_bytes` are those that
    a call of the target reads, in `target_call_ms`. `cost_ratio` is c, the
    ratio of the bytes of the drafter's call to those. `walltime_factor` is
    E(gamma, alpha) / (1 + gamma c) with the paper's alpha, the speed-up of a
    loop without other costs.

  Raises:
    ValueError: the device's compiler is missing, or a row names a draft or task
      that `config` does not have.
  """
  console, rows = record.begin(console, config.output_file), printed.TABLE2
  for row in rows:
    check_choice('drafts', row.draft, config.drafts)
    check_choice('input_lens', row.task, config.input_lens)
    check_choice('decode_lens', row.task, config.decode_lens)
  spec = DEVICES[config.device]
  device, versions = describe(config.device)
  results, compiling = [], backend.compiled_for(spec.platform)
  with compiling, bar(console, 'Compiling', len(rows)) as advance:
    for row in rows:
      results.append(row._asdict() | _checked(config, row, device))
      advance()
  names = 'name', 'batch', 'param_dtype', 'input_lens', 'decode_lens'
  settings = versions | {name: getattr(config, name) for name in names}
  settings |= {x: getattr(spec, x) for x in ('usable_bytes', 'bytes_per_s')}
  values = {'settings': settings, 'rows': results}
  done = record.new(KIND, values, has_run=False)
  reasons = {row['refused'] for row in results if row['refused']}
  refused = [f'Refused by the compiler: {reason}' for reason in reasons]
  parts: list[Table | str] = [conditions(done), table(done), *refused]
  record.finish(config.output_file, console, done, *parts)
  return done


def _checked(
  config: PairCheckConfig, row: printed.Table2Row, device: Any
) -> Record:
  """Compiles the loop of a row, and predicts times from bytes of calls."""
  target, draft = config.target, config.drafts[row.draft]
  placement = Placement(config.param_dtype)
  sharding = jax.sharding.SingleDeviceSharding(device)

  def place(tree: Any) -> Any:
    """Returns the shapes of a tree with a sharding on the device."""
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

  pair = (place(param_shapes(x, placement)) for x in (target, draft))
  params = PairParams(*pair)
  lengths = config.input_lens[row.task], config.decode_lens[row.task]
  args = target, config.batch, *lengths, row.temperature, 0, row.gamma
  request = place(jax.eval_shape(functools.partial(make_request, *args)))
  loop = Loop(target, small_model(draft))
  limit = place(jax.ShapeDtypeStruct((), jnp.int32))
  # Unused arguments are kept, because both models stay loaded.
  start = jax.jit(loop.start, keep_unused=True).lower(params, request)
  state = place(start.out_info)
  running = jax.jit(loop.run, donate_argnums=2, keep_unused=True)
  run = running.lower(params, request, state, limit)
  spec, peak, refused = DEVICES[config.device], None, None
  try:
    peak = max(_peak_bytes(lowered) for lowered in (start, run))
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    refused = str(error).splitlines()[0]
  read_bytes = call_bytes(target, params.target, request)
  cost_ratio = call_bytes(draft, params.draft, request) / read_bytes
  factor = analysis.walltime_factor(row.acceptance_rate, row.gamma, cost_ratio)
  return {
    'fits': peak is not None and peak <= spec.usable_bytes,
    'peak_bytes': peak,
    'refused': refused,
    'target_call_bytes': read_bytes,
    'target_call_ms': 1e3 * read_bytes / spec.bytes_per_s,
    'cost_ratio': cost_ratio,
    'walltime_factor': float(factor),
  }


def _peak_bytes(lowered: Any) -> int:
  sizes = lowered.compile().memory_analysis()
  made = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  held = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
  parts = made + held + sizes.generated_code_size_in_bytes
  return max(parts, sizes.peak_memory_in_bytes)


def table(checked: Record) -> Table:
  """Returns the table of a record, with a line for each row of Table 2."""

  def scaled(name: str, unit: float) -> Callable[[Record], float | None]:
    return lambda row: row[name] and row[name] / unit

  return Table.from_records(
    checked['settings']['name'],
    {
      'task': 'task',
      'draft': 'draft',
      Column('T', 'g'): 'temperature',
      'gamma': 'gamma',
      Column('alpha', '.2f'): 'acceptance_rate',
      'fits': lambda row: 'yes' if row['fits'] else 'NO',
      Column('peak, GiB', '.2f'): scaled('peak_bytes', GIB),
      Column('a token reads, GB', '.2f'): scaled('target_call_bytes', 1e9),
      Column('ms', '.2f'): 'target_call_ms',
      Column('c', '.3f'): 'cost_ratio',
      Column('predicted', '.2f'): 'walltime_factor',
      Column('paper', '.1f'): 'speedup',
    },
    checked['rows'],
  )


def conditions(checked: Record) -> str:
  """Returns a sentence on a record's device, sizes and versions."""
  settings = checked['settings']
  lengths = '; '.join(
    f'{task}: {length} input and {settings["decode_lens"][task]} output tokens'
    for task, length in settings['input_lens'].items()
  )
  names = 'jax', 'libtpu', 'jax_cuda12_plugin'
  versions = ', '.join(f'{x} {settings[x]}' for x in names if x in settings)
  return (
    f'One {settings["compiled_for"]}, compiled for and not run; {versions};'
    f' memory that programs may use {settings["usable_bytes"] / GIB:.2f} GiB,'
    f' bandwidth taken as {settings["bytes_per_s"] / 1e9:,.0f} GB/s; batch'
    f' {settings["batch"]}, {settings["param_dtype"]} parameters; {lengths}.'
  )
