"""Several parts of a computation in one kernel, for GPUs (Pallas).

The programs of the kernel, at most one for each core of the GPU, stay for all
parts: they share the pieces of the first, wait for each other, share those of
the second, and so on. What one part leaves to the next is small, and stays in
the GPU's cache.

Waiting is counting: all programs together add the number of cores to a number
in memory, and each looks at it until they have. So all programs must be on the
GPU at once. There are never more than cores, and each takes far less than a
core's memory and registers.

Interpreted, programs run one after another and could not wait: then each part
is a kernel.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specdec_jax.models import backend
from specdec_jax.models.product_kernel import STAGES, WARPS

Refs = Mapping[str, Any]  # what a kernel reads and writes, by name
TURNS = 'turns'  # the name of the number by which programs wait


class Part(NamedTuple):
  """A part: how many pieces, and what is done for each of them."""

  pieces: int
  run: Callable[[Any, Refs], None]


def no_turns() -> jax.Array:
  """The number by which programs wait, before the first of some kernels."""
  return jnp.zeros((1,), jnp.int32)


def run(
  name: str,
  parts: Sequence[Part],
  given: Mapping[str, Any],
  updated: Mapping[str, jax.Array],
  made: Mapping[str, jax.ShapeDtypeStruct],
  written: int,
) -> dict[str, jax.Array]:
  """Runs the parts, each over all its pieces, before the next one begins.

  Args:
    name: of the kernel.
    parts: what is done.
    given: what is read.
    updated: what is changed where it is, under jit. One is `TURNS`: of the
      kernel before, or `no_turns()`.
    made: shapes of what is written.
    written: bytes that change in `updated`.

  Returns:
    `updated` and `made`, afterwards.
  """
  cores = backend.gpu_cores()
  programs = min(cores, max(part.pieces for part in parts))
  names = [*updated, *made]

  def kernel(parts, given, results):
    refs = dict(given) | dict(zip(names, results, strict=True))
    program = pl.program_id(0)  # interpreted, it is not known in a loop
    for i, part in enumerate(parts):
      if i:
        _wait(refs[TURNS], program, programs, cores)
      mine = pl.cdiv(part.pieces - program, programs)

      def piece(i, nothing, part=part):
        part.run(program + i * programs, refs)
        return nothing

      lax.fori_loop(0, mine, piece, None)

  def call(parts, in_place):
    """One kernel of some parts; arrays `in_place` are inputs and outputs."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in in_place]
    shapes += list(made.values())[len(shapes) - len(updated) :]
    said = {'updated_bytes': written, 'waits': len(parts) - 1}
    return pl.pallas_call(
      lambda _, given, *results: kernel(parts, given, results),
      grid=(programs,),
      out_shape=shapes,
      input_output_aliases={i: i for i in range(len(in_place))},
      interpret=backend.interprets_kernels(),
      compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
      # For `measure.compiled`.
      metadata={name: json.dumps(one) for name, one in said.items()},
      name=name,
    )(in_place, given)

  arrays = list(updated.values())
  if not backend.interprets_kernels():
    arrays = call(parts, arrays)
  else:
    arrays += [jnp.zeros(one.shape, one.dtype) for one in made.values()]
    for part in parts:
      arrays = call([part], arrays)
  return dict(zip(names, arrays, strict=True))


def _wait(turns: Any, program: Any, programs: int, cores: int) -> None:
  """Waits until all programs have come here.

  Atomic operations of Pallas order what is before and behind them on the whole
  GPU; the barriers do so within a program.
  """
  triton.debug_barrier()
  mine = share(program, programs, cores)
  before = triton.atomic_add(turns, (0,), mine)
  all_are_here = until(before, cores)
  lax.while_loop(
    lambda count: count < all_are_here,
    lambda _: triton.atomic_add(turns, (0,), 0),
    before + mine,
  )
  triton.debug_barrier()


def share(program: Any, programs: int, cores: int) -> Any:
  """What a program adds when it comes to a wait; all of them add `cores`.

  So each wait begins with a multiple of it, whatever number of programs the
  kernels before had.
  """
  return 1 + (program == 0) * (cores - programs)


def until(before: Any, cores: int) -> Any:
  """What the number is when all have come, from what it was before one came."""
  return (before // cores + 1) * cores
