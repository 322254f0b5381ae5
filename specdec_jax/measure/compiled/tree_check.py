"""What the target's call over a tree takes on a GPU, computed without one.

A call over the last committed token and all nodes of a tree, with the move of
the path that is kept, stands beside a call over a chain as deep. Both are
compiled, and their time is predicted from kernels and bytes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.console

from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import check_choice
from specdec_jax.decoding import tree_round
from specdec_jax.measure import memory
from specdec_jax.measure.compiled import gpu, gpu_costs
from specdec_jax.measure.compiled.compiler import Compiler
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, show, started
from specdec_jax.models import backend
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.partitioning import Placement
from specdec_jax.tree_shape import ROOT, TreeShape


@dataclasses.dataclass(frozen=True)
class TreeCheckConfig(gpu_costs.OnGpu):
  """What to compile; `gpu_costs.OnGpu` says for which GPU.

  Attributes:
    target: the network that decides.
    shapes: the trees; each is compared with a chain of its levels.
    input_len: E.
    decode_len: the most tokens of a run.
    param_dtype: dtype of the parameters on the device.
    kernels: hand-written kernels, one of `backend.COMPILED_KERNELS`.
    output_file: path of the record, JSON; None writes none.
    name: of the target, for the title.

  Raises:
    ValueError: a number is too small, `kernels` is not known, or the device is
      no GPU that is known.
  """

  target: LanguageModel
  shapes: Sequence[TreeShape]
  input_len: int = 128
  decode_len: int = 128
  param_dtype: str = 'bfloat16'
  kernels: str = 'off'
  output_file: str | None = None
  name: str = 'The target'

  def __post_init__(self):
    check_types(self)
    check_at_least(self, input_len=1, decode_len=1)
    super().__post_init__()
    check_choice(
      'TreeCheckConfig.kernels', self.kernels, backend.COMPILED_KERNELS
    )


def check(
  config: TreeCheckConfig, console: rich.console.Console | None = None
) -> Record:
  """Compiles every call; prints a table, writes the record.

  Returns:
    The record: its table as `Table.to_json` has it, and `calls`: of each tree
    its parents, and what the 'tree' and the 'chain' cost, see `gpu_costs.cost`.

  Raises:
    ValueError: the GPU's compiler is missing.
  """
  console = started(config, console)
  compiler = Compiler(
    gpu.describe(config.gpu, config.kernels), counts_kernels=True
  )
  calls = []
  with (
    backend.compiled_for('gpu'),
    backend.kernels(config.kernels),
    bar(console, 'Calls', len(config.shapes)) as advance,
  ):
    for shape in config.shapes:
      chain = TreeShape(tuple(range(ROOT, shape.depth - 1)))
      calls.append(
        {
          'parents': shape.parents,
          'tree': _call(config, shape, compiler),
          'chain': _call(config, chain, compiler),
        }
      )
      advance()
  record = _record(config, config.gpu.name, calls)
  show(console, record, config.output_file)
  return record


def _call(
  config: TreeCheckConfig, shape: TreeShape, compiler: Compiler
) -> dict[str, Any]:
  """What a call over a tree's nodes costs; over a chain's if it is one."""
  target = config.target
  depth = shape.depth
  is_chain = depth == shape.num_nodes
  params = compiler.place(
    memory.param_shapes(target, Placement(config.param_dtype))
  )
  request = memory.request_shapes(
    1, config.input_len, config.decode_len, shape.num_nodes, greedy=True
  )
  cache = compiler.place(
    jax.eval_shape(
      lambda params, inputs: read_prompt(
        target, params, inputs, request.cache_slots, longest=request.longest
      ),
      params,
      request.inputs,
    )
  )

  def call(params, cache, tokens, kept, path):
    if is_chain:
      logits, cache = target.extend(params, cache, tokens)
      return logits, target.rewind(cache, kept)
    logits, cache = tree_round.read(
      target, params, cache, tokens, cache.num_slots, shape.parents
    )
    return logits, target.keep(cache, kept, path)

  def ints(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.int32)

  given = compiler.place(
    (ints(1, 1 + shape.num_nodes), ints(1), ints(1, depth))
  )
  program, _ = compiler.compile(
    ('call', shape), call, params, cache, *given, donated=1
  )
  read = memory.call_bytes(target, params, request, 1 + shape.num_nodes).total
  return gpu_costs.cost(config, read, program['launched']['once'])


def _record(
  config: TreeCheckConfig, device: str, calls: Sequence[Any]
) -> Record:
  columns: list[Column | str] = ['nodes', 'levels']
  for name in ('tree', 'chain'):
    columns += [
      Column(f'kernels, {name}'),
      Column(f'ms, {name}', '.2f'),
    ]
  columns += [Column('tree / chain', '.3f'), Column('by bytes', '.3f')]
  cells = []
  for row in calls:
    shape, both = TreeShape(row['parents']), (row['tree'], row['chain'])
    cells.append([shape.num_nodes, shape.depth])
    for one in both:
      cells[-1] += [one['kernels'], one['ms']]
    cells[-1] += [both[0][key] / both[1][key] for key in ('ms', 'bytes_ms')]
  title = (
    f'{config.name}: a call over a tree beside one over a chain as deep,'
    f' {config.param_dtype}, batch 1, {config.input_len} input tokens, kernels'
    f' {config.kernels}; {device}, compiled for and not run'
  )
  return Table(title, columns, cells).record(
    calls=list(calls), versions=gpu.versions()
  )
