"""Whether pairs fit on a device that is not there, and what bytes predict.

For each row of Table 2 the loop is compiled as `Engine` would run it. The
memory is what the compiler reports; the bytes that a call moves are counted
from shapes. libtpu and XLA's CUDA compiler need only a description of a device.
Kernels of a GPU are chosen by rules instead of by trial: products that a GPU at
hand would give to cuBLAS may come out as generated kernels.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
from jax._src import xla_bridge
from jax._src.lib import xla_client
from jax.experimental import topologies

from specdec_jax import analysis, files
from specdec_jax.checks.fields import (
  check_at_least,
  check_choice,
  check_types,
  unexpected,
)
from specdec_jax.checks.memory import GIB
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure import memory
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record, earlier
from specdec_jax.measure.table import Column, Table
from specdec_jax.measure.table import console as terminal
from specdec_jax.models import backend
from specdec_jax.models.base import LanguageModel
from specdec_jax.paper import printed
from specdec_jax.partitioning import Placement

KIND = 'pair_check'  # of the record


@dataclasses.dataclass(frozen=True)
class Device:
  """A device that programs are compiled for without being there.

  Attributes:
    platform: 'gpu' or 'tpu'.
    compiler: package that has its compiler; `extra` brings it.
    extra: of this package.
    topology: what the compiler calls the least slice that has it.
    usable_bytes: memory that programs may use.
    bytes_per_s: bandwidth of it.
    name: as a GPU's driver says it.
    numbers: of a GPU what XLA asks of a driver, the text of its
      `GpuTargetConfigProto`.
  """

  platform: str
  compiler: str
  extra: str
  topology: str
  usable_bytes: int
  bytes_per_s: float
  name: str = ''
  numbers: str = ''


_H200 = """
  gpu_device_info {
    cuda_compute_capability { major: 9 minor: 0 }
    core_count: 132
    fpus_per_core: 128
    threads_per_block_limit: 1024
    threads_per_warp: 32
    threads_per_core_limit: 2048
    shared_memory_per_block: 49152
    shared_memory_per_core: 233472
    shared_memory_per_block_optin: 232448
    registers_per_core_limit: 65536
    registers_per_block_limit: 65536
    block_dim_limit_x: 2147483647
    block_dim_limit_y: 65535
    block_dim_limit_z: 65535
    l2_cache_size: 62914560
    clock_rate_ghz: 1.98
    memory_bandwidth: 4800000000000
    device_memory_size: 150000000000
  }
  platform_name: "CUDA"
  dnn_version_info { major: 9 minor: 10 patch: 0 }
  runtime_version { major: 12 minor: 9 patch: 0 }
  device_description_str: "NVIDIA H200"
"""
# The numbers are NVIDIA's and Google's data sheets'. Another device is a line
# here; of a GPU, whatever the CUDA samples' deviceQuery prints of it.
KNOWN = {
  'tpu_v4': Device(
    'tpu', 'libtpu', 'tpu', 'v4:2x2x1', int(30.75 * GIB), 1.2e12
  ),
  'h200': Device(
    platform='gpu',
    compiler='jax_cuda12_plugin',
    extra='cuda',
    topology='1x1x1',
    usable_bytes=150 * 10**9,
    bytes_per_s=4.8e12,
    name='NVIDIA H200',
    numbers=_H200,
  ),
}
# Without these, libtpu asks a cloud machine's metadata server for its machine.
_TPU_DESCRIPTION = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  # Nothing runs on the chip, so other processes may use libtpu too.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_TPU_CHIP = 'megacore'  # both cores of a v4 chip as one device
_NO_TRIALS = '--xla_gpu_autotune_level=0'  # they need the device


def describe(name: str) -> tuple[Any, dict[str, str]]:
  """The device of that name, to compile for; what it is, and by what versions.

  Raises:
    ValueError: its compiler is missing, or does not know it.
  """
  known = KNOWN[name]
  if importlib.util.find_spec(known.compiler) is None:
    raise ValueError(
      f'To compile for {name!r}, {known.compiler} is needed: pip install'
      f" 'specdec_jax[{known.extra}]'."
    )
  versions = {
    package: importlib.metadata.version(package.replace('_', '-'))
    for package in ('jax', known.compiler)
  }
  try:
    (device, *_) = _described(known).devices
  except (jax.errors.JaxRuntimeError, NotImplementedError, KeyError) as error:
    raise ValueError(
      f'{known.compiler} {versions[known.compiler]} does not describe a device'
      f' {name!r}: {error}'
    ) from error
  said = known.name or f'{device.device_kind}, {known.topology}'
  return device, {'compiled_for': said} | versions


def _described(known: Device) -> Any:
  """The topology of a device; no driver is asked for anything."""
  if known.platform == 'tpu':
    for name, value in _TPU_DESCRIPTION.items():
      os.environ.setdefault(name, value)
    return topologies.get_topology_desc(
      known.topology, platform='tpu', chip_config_name=_TPU_CHIP
    )
  flags = os.environ.get('XLA_FLAGS', '')
  if 'xla_gpu_autotune_level' not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} {_NO_TRIALS}'.strip()
  with _without_a_driver():
    jax.devices('cpu')  # looks for plug-ins, unless told to keep to the CPU
    if not xla_client.pjrt_plugin_loaded('cuda'):
      xla_bridge.discover_pjrt_plugins()
  _say_cuda()
  return topologies.get_topology_desc(
    platform='cuda', target_config=known.numbers, topology=known.topology
  )


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


@dataclasses.dataclass(frozen=True)
class PairCheckConfig:
  """What to compile, and for which device.

  Attributes:
    target: the network that decides.
    drafts: name of a row's draft -> network.
    input_lens: task -> E.
    decode_lens: task -> the most tokens of a run.
    output_dir: folder of results.json and report.md.
    batch: examples that are decoded together.
    param_dtype: dtype of the parameters on the device.
    usable_gib: memory of the device that programs may use; None is what
      `KNOWN` says.
    gb_per_s: bandwidth of its memory, 1e9 bytes per second; None is what
      `KNOWN` says.
    name: name of the report.
    device: name of the device in `KNOWN`.

  Raises:
    ValueError: a number is too small, or the device is not known.
  """

  target: LanguageModel
  drafts: Mapping[str, LanguageModel]
  input_lens: Mapping[str, int]
  decode_lens: Mapping[str, int]
  output_dir: str
  batch: int = 1
  param_dtype: str = 'bfloat16'
  usable_gib: float | None = None
  gb_per_s: float | None = None
  name: str = 'Table 2, compiled'
  device: str = 'h200'

  def __post_init__(self):
    check_types(self)
    check_choice('device', self.device, KNOWN)
    known = KNOWN[self.device]
    if self.usable_gib is None:
      object.__setattr__(self, 'usable_gib', known.usable_bytes / GIB)
    if self.gb_per_s is None:
      object.__setattr__(self, 'gb_per_s', known.bytes_per_s / 1e9)
    check_at_least(self, batch=1, usable_gib=0.0, gb_per_s=1e-3)
    for name in ('input_lens', 'decode_lens'):
      for task, length in getattr(self, name).items():
        if length < 1:
          raise unexpected(f'{name}[{task!r}]', '1 or more', length)


def check(
  config: PairCheckConfig,
  rows: Sequence[printed.Table2Row],
  console: rich.console.Console | None = None,
) -> Record:
  """Compiles every row that has no result yet, and writes the report.

  Args:
    config: what to compile for.
    rows: rows of Table 2, such as `printed.TABLE2`.
    console: for the table; None is stdout.

  Returns:
    The contents of results.json: 'settings', 'rows' with results, and
    'missing', the names of those without.

  Raises:
    ValueError: the device's compiler is missing; a row names a draft or task
      that `config` does not have; the output folder holds results of other
      settings.
  """
  console = console or terminal()
  for row in rows:
    check_choice('drafts', row.draft, config.drafts)
    check_choice('input_lens', row.task, config.input_lens)
    check_choice('decode_lens', row.task, config.decode_lens)
  device, versions = describe(config.device)
  with backend.compiled_for(KNOWN[config.device].platform):
    record = _compile_rows(config, rows, device, versions, console)
  console.print(table(record))
  for line in _refusals(record['rows']):
    console.print(line)
  return record


def _name(row: Mapping[str, Any]) -> str:
  """The name of a row, from the row or from its result."""
  names = ('task', 'draft', 'temperature', 'gamma', 'acceptance_rate')
  return ' '.join(str(row[name]) for name in names)


def _compile_rows(config, rows, device, versions, console) -> Record:
  """Compiles rows without a result; writes the record after each of them."""
  settings = dataclasses.asdict(config) | versions
  folder = settings.pop('output_dir')
  settings = json.loads(json.dumps(settings))  # tuples become lists
  files.make_folder(folder)
  path = os.path.join(folder, 'results.json')
  done: dict[str, dict[str, Any]] = {}

  def settings_before(record: Record) -> dict[str, Any]:
    done.update((_name(row), row) for row in record['rows'])
    return dict(record['settings'])

  what_to_do = 'Choose another output folder, or move that file away.'
  earlier(path, KIND, settings, settings_before, what_to_do)
  names = [_name(row._asdict()) for row in rows]

  def write() -> Record:
    values = {
      'settings': settings,
      'rows': [done[name] for name in names if name in done],
      'missing': [name for name in names if name not in done],
    }
    record = Record(KIND, values, {})  # nothing ran on this machine
    record.save(path)
    report = os.path.join(folder, 'report.md')
    files.write_atomically(report, markdown(record).encode())
    return record

  compile_ = _compiler(device)
  with bar(console, 'Compiling', len(rows)) as advance:
    for name, row in zip(names, rows, strict=True):
      write()  # also before the first row: a resumed run shows what it has
      if name not in done:
        done[name] = _check_row(config, row, device, compile_)
      advance()
  return write()


def _place(tree: Any, device: Any) -> Any:
  """The same shapes, with shardings on the device."""
  sharding = jax.sharding.SingleDeviceSharding(device)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )


def _compiler(device: Any) -> Callable:
  """A function that compiles a program, and keeps it for later rows."""
  programs: dict[Any, tuple[dict[str, Any], Any]] = {}

  def compile_(key, function, *args, donated=()):
    """Returns bytes, or only `refused`; and the result's shapes."""
    leaves, tree = jax.tree.flatten(args)
    key = key, tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    if key not in programs:
      # Unused arguments count too: both models stay loaded.
      jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
      lowered = jitted.lower(*args)
      programs[key] = _memory(lowered), _place(lowered.out_info, device)
    return programs[key]

  return compile_


def _memory(lowered: Any) -> dict[str, Any]:
  try:
    compiled = lowered.compile(compiler_options=backend.compiler_options())
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return {'refused': str(error).splitlines()[0]}
  sizes = compiled.memory_analysis()
  parts = {
    'arguments_bytes': sizes.argument_size_in_bytes,
    'outputs_bytes': sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
    'temporaries_bytes': sizes.temp_size_in_bytes,
    'code_bytes': sizes.generated_code_size_in_bytes,
  }
  peak = max(sum(parts.values()), sizes.peak_memory_in_bytes)
  in_place = sizes.alias_size_in_bytes
  return parts | {'in_place_bytes': in_place, 'peak_bytes': peak}


def _check_row(config, row, device, compile_) -> dict[str, Any]:
  """Compiles a row's loop, and predicts from the bytes of calls."""
  target, draft = config.target, config.drafts[row.draft]
  placement = Placement(config.param_dtype)
  place = functools.partial(_place, device=device)
  params = PairParams(
    *(place(memory.param_shapes(n, placement)) for n in (target, draft))
  )
  request = place(
    memory.request_shapes(
      config.batch,
      config.input_lens[row.task],
      config.decode_lens[row.task],
      row.gamma,
      greedy=row.temperature == 0,
      has_encoder=target.has_encoder,
    )
  )
  limit = place(jax.ShapeDtypeStruct((), jnp.int32))
  loop = Loop(target, small_model(draft))
  start, state = compile_(('start', draft), loop.start, params, request)
  run, after = compile_(
    ('run', draft), loop.run, params, request, state, limit, donated=2
  )
  programs = {'speculative_start': start, 'speculative_run': run}
  return row._asdict() | {
    'programs': programs,
    'state_keeps_its_shape': state == after,
    'memory': _fits(config, params, state, programs),
    **_predict(config, row, params, request),
  }


def _fits(config, params, state, programs) -> dict[str, Any]:
  """The largest memory of the pair's programs, compared with the device's."""
  usable = int(config.usable_gib * GIB)
  refused = [p['refused'] for p in programs.values() if 'refused' in p]
  peak = None
  if not refused:
    peak = max(program['peak_bytes'] for program in programs.values())
  return {
    'fits': peak is not None and peak <= usable,
    'peak_bytes': peak,
    'usable_bytes': usable,
    'refused': refused,
    'target_parameter_bytes': memory.tree_bytes(params.target),
    'draft_parameter_bytes': memory.tree_bytes(params.draft),
    'target_cache_bytes': memory.tree_bytes(state.target_cache),
    'draft_cache_bytes': memory.tree_bytes(state.drafter_state),
  }


def _predict(config, row, params, request) -> dict[str, Any]:
  """Bytes of the calls, and the speed-up that they predict."""
  count = functools.partial(memory.call_bytes, config.target, params.target)
  one = count(request, 1).total
  several = count(request, row.gamma + 1).total
  proposals = memory.draft_round_bytes(
    config.drafts[row.draft], params.draft, request
  )
  cost_ratio, call_cost = proposals / row.gamma / one, several / one
  factor = analysis.measured_walltime_factor(
    row.acceptance_rate, row.gamma, cost_ratio, call_cost
  )
  return {
    'target_call_bytes': one,
    'verification_bytes': several,
    'draft_round_bytes': proposals,
    'cost_ratio': cost_ratio,
    'call_cost': call_cost,
    'target_call_ms': one / config.gb_per_s / 1e6,
    'walltime_factor': float(factor),
  }


def _in_gib(size: float | None) -> str | None:
  return None if size is None else f'{size / GIB:.2f}'


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
  'task': lambda r: r['task'],
  'draft': lambda r: r['draft'],
  'T': lambda r: f'{r["temperature"]:g}',
  'gamma': lambda r: str(r['gamma']),
  'alpha': lambda r: f'{r["acceptance_rate"]:.2f}',
  'fits': lambda r: 'yes' if r['memory']['fits'] else 'NO',
  'peak, GiB': lambda r: _in_gib(r['memory']['peak_bytes']),
  'a token reads, GB': lambda r: f'{r["target_call_bytes"] / 1e9:.2f}',
  'ms': lambda r: f'{r["target_call_ms"]:.2f}',
  'c': lambda r: f'{r["cost_ratio"]:.3f}',
  'v(gamma+1)': lambda r: f'{r["call_cost"]:.3f}',
  'predicted': lambda r: f'{r["walltime_factor"]:.2f}',
  'paper': lambda r: f'{r["speedup"]:.1f}',
}


def table(record: Mapping[str, Any]) -> Table:
  """A table of a record, with a line for each row of Table 2."""
  return Table(
    record['settings']['name'],
    [
      Column(name, align='left' if i < 2 else 'right')
      for i, name in enumerate(_COLUMNS)
    ],
    [[show(row) for show in _COLUMNS.values()] for row in record['rows']],
  )


def conditions(record: Mapping[str, Any]) -> str:
  """One sentence on the device, the sizes and the versions of a record."""
  settings = record['settings']
  lengths = '; '.join(
    f'{task}: {length} input and {settings["decode_lens"][task]} output tokens'
    for task, length in settings['input_lens'].items()
  )
  of = ', '.join(
    f'{name} {settings[name]}'
    for name in ('jax', 'libtpu', 'jax_cuda12_plugin')
    if name in settings
  )
  return (
    f'One {settings["compiled_for"]}, compiled for and not run; {of}; memory'
    f' that programs may use {settings["usable_gib"]:.2f} GiB, bandwidth taken'
    f' as {settings["gb_per_s"]:,.0f} GB/s; batch {settings["batch"]},'
    f' {settings["param_dtype"]} parameters; {lengths}.'
  )


def markdown(record: Mapping[str, Any]) -> str:
  """The report, made from the contents of results.json."""
  lines = [
    f'# {record["settings"]["name"]}',
    '',
    conditions(record),
    '',
    'Written by `specdec compile-check` from `results.json`. The peak is the'
    " compiler's, of the larger of the two speculative programs, both models"
    ' held. c and v are ratios of bytes, of parameters and live caches; the'
    ' predicted factor is E(gamma, alpha) / (v(gamma + 1) + gamma c), with the'
    " alpha of the paper's Table 2 and i.i.d. acceptance: what a loop without"
    " other costs would reach. The paper's speed-up is against T5X's decoding.",
    '',
    table(record).markdown(),
    '',
  ]
  if record['missing']:
    lines += [f'Not compiled yet: {", ".join(record["missing"])}.', '']
  if not all(row['state_keeps_its_shape'] for row in record['rows']):
    lines += [
      'A state leaves a loop in another shape: calls compile again.',
      '',
    ]
  return '\n'.join([*lines, *_refusals(record['rows'])]).rstrip() + '\n'


def _refusals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  texts = {text for row in rows for text in row['memory']['refused']}
  lines = [f'Refused by the compiler: {text}' for text in sorted(texts)]
  for row in rows:
    sizes = row['memory']
    if not sizes['fits'] and sizes['peak_bytes'] is not None:
      lines.append(
        f'{row["task"]} with {row["draft"]} does not fit: it needs'
        f' {sizes["peak_bytes"]:,} bytes, and {sizes["usable_bytes"]:,} can be'
        ' used.'
      )
  return list(dict.fromkeys(lines))
