"""What Table 2 would need and give on a GPU or TPU, computed without one.

For each row of Table 2 both loops are compiled as `Engine` would run them. The
memory is what the compiler reports. The bytes that a call moves are counted
from shapes. For a GPU, kernels per token and per round are counted too: for a
small model they cost more than its bytes. For a TPU, single calls are compiled
as well. The compiler's own figure of their bytes is shown only as a check,
because it also counts what is prefetched on the chip.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import rich.console

from specdec_jax import analysis
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.memory import GIB
from specdec_jax.checks.names import check_choice
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure import memory
from specdec_jax.measure.compiled import devices, gpu, gpu_costs, report, tpu
from specdec_jax.measure.compiled.compiler import Compiler
from specdec_jax.measure.compiled.rows import compile_rows
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import console as terminal
from specdec_jax.models import backend
from specdec_jax.models.base import LanguageModel
from specdec_jax.paper import printed
from specdec_jax.partitioning import Placement


@dataclasses.dataclass(frozen=True)
class PairCheckConfig:
  """What to compile, and for which device.

  Attributes:
    target: the network that decides.
    drafts: name of a row's draft -> network.
    input_lens: task -> E.
    decode_lens: task -> the most tokens of a run.
    output_dir: folder of results.json and report.md.
    batch: B.
    param_dtype: dtype of the parameters on the device.
    usable_gib: memory of the device that programs may use; None is what
      `devices.KNOWN` says.
    gb_per_s: bandwidth of its memory, 1e9 bytes per second; None likewise.
    name: name of the report.
    device: name of the device in `devices.KNOWN`.
    kernel_us: microseconds per kernel of a GPU, beside the time of its bytes.
    conditional_us: microseconds per conditional, which waits for the host.
    wait_us: microseconds that a kernel's programs wait for each other.
    t5x_kernels: kernels of T5X's own greedy loop per token of the target; 0
      compares with nothing.
    kernels: hand-written kernels, one of `backend.COMPILED_KERNELS`.

  Raises:
    ValueError: a number is too small, or the device or `kernels` is not known.
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
  kernel_us: float = 2.5
  conditional_us: float = 10.0
  wait_us: float = 1.5
  t5x_kernels: int = 595
  kernels: str = 'off'

  def __post_init__(self):
    check_types(self)
    check_choice(
      f'{_kind(self)}.kernels', self.kernels, backend.COMPILED_KERNELS
    )
    described = devices.find(self.device)
    own = {
      'usable_gib': described.usable_bytes / GIB,
      'gb_per_s': described.bytes_per_s / 1e9,
    }
    for field, value in own.items():
      if getattr(self, field) is None:
        object.__setattr__(self, field, value)
    numbers = {name: getattr(self, name) for name in ('batch', *own)}
    for lengths in ('input_lens', 'decode_lens'):
      for task, length in getattr(self, lengths).items():
        numbers[f'{lengths}[{task!r}]'] = length
    for field, value in numbers.items():
      if value <= 0:
        raise ValueError(f'{_kind(self)}.{field} must be positive: {value}.')
    for field in ('kernel_us', 'conditional_us', 'wait_us', 't5x_kernels'):
      if getattr(self, field) < 0:
        raise ValueError(
          f'{_kind(self)}.{field} must not be negative: {getattr(self, field)}.'
        )


def _kind(config: PairCheckConfig) -> str:
  return type(config).__name__


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
    The contents of results.json: settings, and a result for each row.

  Raises:
    ValueError: the device's compiler is missing; a row names a draft or task
      that `config` does not have; the output folder holds results of other
      settings.
  """
  console = console or terminal()
  _check_rows(config, rows)
  device, compiled_for = _describe(config)
  is_gpu = isinstance(devices.find(config.device), devices.Gpu)
  compiler = Compiler(device, counts_kernels=is_gpu)
  check_row = _check_on_gpu if is_gpu else _check_on_tpu
  kind = 'gpu' if is_gpu else 'tpu'
  with backend.compiled_for(kind), backend.kernels(config.kernels):
    results = compile_rows(
      config,
      'gpu_check' if is_gpu else 'tpu_check',
      compiled_for,
      {
        _name(row._asdict()): functools.partial(
          check_row, config, row, compiler
        )
        for row in rows
      },
      _name,
      report.markdown,
      console,
    )
  report.show(console, results)
  return results


def _describe(config: PairCheckConfig) -> tuple[Any, dict[str, str]]:
  """The device, its name and the versions of its compiler."""
  described = devices.find(config.device)
  if isinstance(described, devices.Gpu):
    return gpu.describe(described, config.kernels), {
      'compiled_for': described.name
    } | gpu.versions()
  chip = tpu.describe_slice(described.topology)[0]
  kind = f'{chip.device_kind}, {described.topology}'
  return chip, {'compiled_for': kind} | tpu.versions()


def _check_rows(
  config: PairCheckConfig, rows: Sequence[printed.Table2Row]
) -> None:
  for row in rows:
    for field, known, name in (
      ('drafts', config.drafts, row.draft),
      ('input_lens', config.input_lens, row.task),
      ('decode_lens', config.decode_lens, row.task),
    ):
      if name not in known:
        raise ValueError(
          f'{_kind(config)}.{field} has no {name!r}, which a row needs; it has'
          f' {", ".join(sorted(known)) or "nothing"}.'
        )


def _name(row: Mapping[str, Any]) -> str:
  """The name of a row, from the row or from its result."""
  names = ('task', 'draft', 'temperature', 'gamma', 'acceptance_rate')
  return ' '.join(str(row[name]) for name in names)


class _Compiled(NamedTuple):
  """Both loops of a row, compiled.

  Attributes:
    params: shapes of the parameters, on the device.
    request: shapes of the speculative loop's request.
    state: shapes of its state.
    programs: name -> record.
    result: the part of a row's result that all devices have.
  """

  params: PairParams
  request: Request
  state: DecodeState
  programs: dict[str, Any]
  result: dict[str, Any]


def _compile_row(
  config: PairCheckConfig, row: printed.Table2Row, compiler: Compiler
) -> _Compiled:
  target, draft = config.target, config.drafts[row.draft]
  placement = Placement(config.param_dtype)
  params = PairParams(
    *(
      compiler.place(memory.param_shapes(n, placement)) for n in (target, draft)
    )
  )
  shapes = functools.partial(
    memory.request_shapes,
    config.batch,
    config.input_lens[row.task],
    config.decode_lens[row.task],
    greedy=row.temperature == 0,
    has_encoder=target.has_encoder,
  )
  plain, request = (
    compiler.place(shapes(gamma=gamma)) for gamma in (0, row.gamma)
  )
  programs, state, steady = _compile_loops(
    compiler, target, draft, params, plain, request
  )
  result = row._asdict() | {
    'input_len': config.input_lens[row.task],
    'decode_len': config.decode_lens[row.task],
    'target_layers': state.target_cache.num_layers,
    'draft_layers': state.drafter_state.num_layers,
    'programs': programs,
    'state_keeps_its_shape': steady,
    'memory': _fits(config, params, state, programs),
  }
  return _Compiled(params, request, state, programs, result)


def _check_on_gpu(
  config: PairCheckConfig, row: printed.Table2Row, compiler: Compiler
) -> dict[str, Any]:
  """Compiles both loops and predicts from their kernels and bytes."""
  made = _compile_row(config, row, compiler)
  return made.result | gpu_costs.predict(
    config, row, made.params, made.request, made.programs
  )


def _check_on_tpu(
  config: PairCheckConfig, row: printed.Table2Row, compiler: Compiler
) -> dict[str, Any]:
  """Compiles single calls, too, and predicts from their bytes."""
  before = compiler.num_programs
  params, request, state, programs, result = _compile_row(config, row, compiler)
  target, draft = config.target, config.drafts[row.draft]
  calls = {
    'target_call_1': (target, params.target, state.target_cache, 1),
    'target_call_n': (target, params.target, state.target_cache, row.gamma + 1),
    'draft_call_1': (draft, params.draft, state.drafter_state, 1),
  }
  for name, (network, weights, cache, size) in calls.items():
    tokens = compiler.place(
      jax.ShapeDtypeStruct((config.batch, size), jnp.int32)
    )
    programs[name], _ = compiler.compile(
      ('call', network), network.extend, weights, cache, tokens, donated=1
    )
  compiled = {'num_compiled': compiler.num_programs - before}
  return result | compiled | _predict(config, row, params, request, programs)


def _compile_loops(compiler, target, draft, params, plain, request):
  """Compiles both loops, each as a `start` and a `run`.

  Returns:
    Records by name; the speculative state's shapes; whether `run` returns
    states with the shapes that it took, so that later calls compile nothing.
  """
  limit = compiler.place(jax.ShapeDtypeStruct((), jnp.int32))
  programs, steady = {}, True
  for name, loop, networks, weights, asked in (
    ('plain', Loop(target), (target,), params._replace(draft=None), plain),
    (
      'speculative',
      Loop(target, small_model(draft)),
      (target, draft),
      params,
      request,
    ),
  ):
    programs[f'{name}_start'], state = compiler.compile(
      ('start', networks), loop.start, weights, asked
    )
    programs[f'{name}_run'], after = compiler.compile(
      ('run', networks), loop.run, weights, asked, state, limit, donated=2
    )
    steady = steady and state == after
  return programs, state, steady


def _fits(config, params, state, programs) -> dict[str, Any]:
  """The largest memory of the pair's programs, compared with the device's."""
  usable = int(config.usable_gib * GIB)
  loops = [programs[f'speculative_{name}'] for name in ('start', 'run')]
  refused = [p['refused'] for p in programs.values() if 'refused' in p]
  peak = None
  if not refused:
    peak = max(program['peak_bytes'] for program in loops)
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


def _predict(config, row, params, request, programs) -> dict[str, Any]:
  """Bytes of the calls, and the speed-up that they predict."""
  draft = config.drafts[row.draft]
  count = functools.partial(memory.call_bytes, config.target, params.target)
  counted = {
    'target_call_1': count(request, 1).total,
    'target_call_n': count(request, row.gamma + 1).total,
    'draft_call_1': memory.call_bytes(draft, params.draft, request).total,
  }
  a_round = memory.draft_round_bytes(draft, params.draft, request)
  xla = {name: programs[name].get('xla_bytes_accessed') for name in counted}
  one = counted['target_call_1']
  cost_ratio = a_round / row.gamma / one
  call_cost = counted['target_call_n'] / one
  alpha, gamma = row.acceptance_rate, row.gamma
  factor = analysis.measured_walltime_factor(
    alpha, gamma, cost_ratio, call_cost
  )
  return {
    'bytes_counted': counted,
    'bytes_xla': xla,
    'draft_round_bytes': a_round,
    'cost_ratio': cost_ratio,
    'call_cost': call_cost,
    'target_call_ms': one / config.gb_per_s / 1e6,
    'walltime_factor': float(factor),
    'theorem_3_8': float(analysis.walltime_factor(alpha, gamma, cost_ratio)),
  }
