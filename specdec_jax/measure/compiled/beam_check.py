"""What beam search would take on a GPU, computed without one.

The greedy loop, the plain beam search and the speculative one are compiled as
`Engine` would run them, and their time is predicted from kernels and bytes. The
levels a call, which decide what speculation is worth, are those that another
pair has been measured to have.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.console

from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.decoding.beams import BeamSettings
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure import memory
from specdec_jax.measure.beam_grid import Setting, levels_a_call
from specdec_jax.measure.compiled import beams_report, gpu, gpu_costs
from specdec_jax.measure.compiled.compiler import Compiler
from specdec_jax.measure.compiled.rows import compile_rows
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import console as terminal
from specdec_jax.models import backend
from specdec_jax.models.base import LanguageModel
from specdec_jax.partitioning import Placement


@dataclasses.dataclass(frozen=True)
class BeamCheckConfig(gpu_costs.OnGpu):
  """What to compile; `gpu_costs.OnGpu` says for which GPU.

  Attributes:
    target: the network that decides.
    draft: the drafter's network.
    settings: (gamma, beams of the drafter) of each speculative search.
    levels_file: a record of `beam_grid`, by gin/runs/beams_demo.gin, of whose
      levels a call the report takes those of these settings.
    output_dir: folder of results.json and report.md.
    width: K, beams.
    input_len: E.
    decode_len: the most tokens of a run.
    param_dtype: dtype of the parameters on the device.
    name: name of the report.

  Raises:
    ValueError: a number is too small, the device is no GPU that is known, or
      `levels_file` is no such record.
  """

  target: LanguageModel
  draft: LanguageModel
  settings: Sequence[tuple[int, int]]
  levels_file: str
  output_dir: str
  width: int = 4
  input_len: int = 128
  decode_len: int = 128
  param_dtype: str = 'bfloat16'
  name: str = 'Beam search, compiled'

  def __post_init__(self):
    check_types(self)
    check_at_least(self, width=1, input_len=1, decode_len=1)
    super().__post_init__()
    levels_a_call(self.levels_file)

  def searches(self) -> list[Setting]:
    """All that is compiled: the greedy loop and the plain search first."""
    speculative = [Setting(self.width, *one) for one in self.settings]
    return [Setting(0), Setting(self.width), *speculative]


def check(
  config: BeamCheckConfig, console: rich.console.Console | None = None
) -> Record:
  """Compiles every search that has no result yet, and writes the report.

  Returns:
    The contents of results.json: settings, and a result for each search.

  Raises:
    ValueError: the GPU's compiler is missing, or the output folder holds
      results of other settings.
  """
  console = console or terminal()
  compiler = Compiler(gpu.describe(config.gpu), counts_kernels=True)
  levels = levels_a_call(config.levels_file)
  with backend.compiled_for('gpu'):
    results = compile_rows(
      config,
      'beam_check',
      {'compiled_for': config.gpu.name} | gpu.versions(),
      {
        str(one): functools.partial(_compile_search, config, one, compiler)
        for one in config.searches()
      },
      lambda row: str(Setting.of(row)),
      lambda found: beams_report.markdown(found, levels),
      console,
    )
  console.print(beams_report.table(results, levels))
  return results


def _compile_search(
  config: BeamCheckConfig, one: Setting, compiler: Compiler
) -> dict[str, Any]:
  """Compiles one search, and predicts what a call and its proposals take."""
  networks = {'target': config.target, 'draft': config.draft}
  placement = Placement(config.param_dtype)
  params = {
    name: compiler.place(memory.param_shapes(network, placement))
    for name, network in networks.items()
    if one.gamma or name == 'target'
  }
  request = memory.request_shapes(
    1, config.input_len, config.decode_len, one.gamma, greedy=True
  )
  if one.width:
    penalty: Any = jax.ShapeDtypeStruct((), jnp.float32)
    own = one.draft_beams or one.width
    settings = BeamSettings(penalty, one.width, draft_width=own)
    request = dataclasses.replace(request, beams=settings)
  request = compiler.place(request)
  loop = Loop(config.target, small_model(config.draft) if one.gamma else None)
  both = PairParams(params['target'], params.get('draft'))
  state = compiler.place(jax.eval_shape(loop.start, both, request))
  program, _ = compiler.compile(
    one, loop.run, both, request, state, _limit(compiler), donated=2
  )

  def read(name: str, num_tokens: int) -> int:
    found = memory.call_bytes(networks[name], params[name], request, num_tokens)
    return found.total

  size = max(one.width, 1) + one.gamma * one.draft_beams
  moved = read('target', size)
  if one.gamma:
    moved += read('draft', 2 * one.width)
    moved += (one.gamma - 1) * read('draft', one.draft_beams)
  launched = program['launched']['round']
  return one._asdict() | {
    'cost': gpu_costs.cost(config, moved, launched),
    'program': program,
  }


def _limit(compiler: Compiler) -> Any:
  return compiler.place(jax.ShapeDtypeStruct((), jnp.int32))
