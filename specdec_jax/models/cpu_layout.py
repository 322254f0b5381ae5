"""Measures once which layout of kernels is quickest on this CPU.

XLA computes a product of one row by generated code and one of a few rows by a
library. The time of either depends on the instruction set, the number of cores
and the version of JAX: on a Zen 4 blocks are quickest, on a Zen 3 they take
more than twice the time of [out, in]. So this module times the products on this
processor, in a few seconds, and stores the result in the user's cache folder.
The chosen layout changes outputs only by rounding. The times also show how much
more a call over several tokens costs, see `call_cost`.
"""

import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.checks.fields import check_choice, unexpected
from specdec_jax.files import host_cache
from specdec_jax.models import backend

Layout = Literal['in_out', 'out_in', 'blocks']
LAYOUTS: tuple[str, ...] = get_args(Layout)
# A variable of the environment that may name a layout.
VARIABLE = 'SPECDEC_KERNEL_LAYOUT'
BLOCK = 64  # number of outputs per block
WIDTHS = (4, 8, 16)  # numbers of rows to which fewer rows may be padded
# Rows in a call of plain decoding, and in a round with a gamma of 4.
_TOKEN, _CALL = 1, 5
# Rows in these two calls if 32 outputs are decoded together. A layout that is
# quicker for them is not chosen if one output is slower by more than
# `_FEW_SLOWER`.
_BATCH = 32, 160
_FEW_SLOWER = 1.1
# Each is (number of pairs of kernels, model size, hidden size), of a larger and
# a small model. The kernels of one layout take 48 MiB.
_CHAINS = (2, 1024, 2048), (5, 256, 1664)
_COUNTS = _TOKEN, _CALL, *_BATCH
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class CpuLayout:
  """The quickest way to compute products of few rows on a CPU.

  Attributes:
    kernel_layout: order of a kernel's axes, 'in_out' or 'out_in', or 'blocks'
      of its outputs.
    widths: those of `WIDTHS` to which rows should be padded, because the padded
      product with an [out, in] kernel is quicker.
    times_ms: milliseconds of the products of 1, 5, 32 and 160 rows; () if they
      were not measured.
  """

  kernel_layout: str
  widths: tuple[int, ...] = WIDTHS
  times_ms: tuple[float, ...] = ()


def product_out_in(
  kernel: jax.Array, rows: jax.Array, result_dtype: str | None = None
) -> jax.Array:
  """Returns rows @ kernel.T with the kernel as the left operand.

  XLA copies the right operand in each call, to pack it. In this order the right
  operand is the few activations, not the weights. The barriers keep XLA from
  removing the transposes and exchanging the operands again.

  Args:
    kernel: [out, in].
    rows: [rows, in].
    result_dtype: dtype of the result, [rows, out]; None: that of the operands.
  """
  columns = lax.optimization_barrier(rows.T)
  product = jnp.matmul(kernel, columns, preferred_element_type=result_dtype)
  return lax.optimization_barrier(product).T


def in_blocks(kernel: Any) -> Any:
  """Maps a kernel, [in, out], to its blocks, [out / BLOCK, in, BLOCK]."""
  apart = kernel.reshape(kernel.shape[0], -1, BLOCK)
  return apart.swapaxes(0, 1)


def product_of_blocks(
  kernel: jax.Array,
  rows: jax.Array,
  matmul: Callable[..., jax.Array] = jnp.matmul,
) -> jax.Array:
  """Returns rows @ kernel for a kernel in blocks, with a product per block.

  Args:
    kernel: [N, in, `BLOCK`].
    rows: [rows, in], which are copied for each block.
    matmul: function that computes the products of the blocks.

  Returns:
    [N, rows, `BLOCK`].
  """
  return matmul(jnp.broadcast_to(rows, (len(kernel), *rows.shape)), kernel)


def cpu_layout() -> CpuLayout:
  """Returns the layout that the environment names, or else the measured one.

  Raises:
    ValueError: SPECDEC_KERNEL_LAYOUT names no layout.
  """
  forced = os.environ.get(VARIABLE)
  if forced:
    check_choice(f'{VARIABLE} of the environment', forced, LAYOUTS)
    return CpuLayout(forced)
  return _of_this_host()


def width(count: int) -> int:
  """Returns the padded number of rows for a product by an [out, in] kernel."""
  # This applies to all layouts, as an embedding that is also the output layer
  # is always [out, in].
  wider = min(size for size in WIDTHS if size >= count)
  return wider if wider in cpu_layout().widths else count


def call_cost(rows: int, tokens: int) -> float | None:
  """Returns v(m), the cost of a call that reads m tokens per row of a batch.

  The cost is the time of the call's products divided by the time of the
  products of a call over one token. Times are interpolated between the numbers
  of rows that were measured.

  Args:
    rows: rows of the batch.
    tokens: m, the tokens of each row.

  Returns:
    The cost, in units of a call over one token; None if nothing was measured.
  """
  times = cpu_layout().times_ms
  if not times:
    return None
  most, most_ms = _COUNTS[-1], times[-1]

  def ms(count: int) -> float:
    if count > most:
      return most_ms * count / most
    log_ms = np.interp(math.log(count), np.log(_COUNTS), np.log(times))
    return math.exp(log_ms)

  return max(1.0, ms(rows * tokens) / ms(rows))


@functools.cache
def _of_this_host() -> CpuLayout:
  # With the sizes in the key, stored times of other kernels are not used.
  key = backend.host() | {'chains': [*map(list, _CHAINS)], 'counts': [*_COUNTS]}

  def measure() -> dict[str, Any]:
    return dataclasses.asdict(_chosen(_measured()))

  layout = host_cache.measured('kernel_layout', key, measure, _from_json)
  assert layout is not None  # it is None only if nothing may be measured
  return layout


def _from_json(value: Any) -> CpuLayout:
  lists = {name: tuple(value[name]) for name in ('widths', 'times_ms')}
  layout = CpuLayout(**value | lists)
  check_choice('kernel_layout', layout.kernel_layout, LAYOUTS)
  if not set(layout.widths) <= set(WIDTHS):
    raise ValueError(f'widths are of {WIDTHS}, got {layout.widths}')
  times = layout.times_ms
  fits = len(times) == len(_COUNTS) and [*times] == sorted(times)
  if not (fits and 0 < times[0] <= times[-1] < math.inf):
    expected = f'one for each of {_COUNTS} rows, more for more rows'
    raise unexpected('times_ms', expected, times)
  return layout


def _chosen(times_ms: Mapping[tuple[str, int], float]) -> CpuLayout:
  """Chooses the layout, and the numbers of rows worth padding to.

  Of the layouts that are nearly the quickest for a few rows, the one that is
  quickest for a batch is chosen.
  """
  below = {4: 2, 8: 5, 16: 9}
  widths = tuple(
    width
    for width in WIDTHS
    if times_ms['out_in', width] < times_ms['out_in', below[width]]
  )

  def total(name: str, counts: tuple[int, ...]) -> float:
    return sum(times_ms[name, count] for count in counts)

  few = {name: total(name, (_TOKEN, _CALL)) for name in LAYOUTS}
  bound = _FEW_SLOWER * min(few.values())
  quick = [name for name in LAYOUTS if few[name] <= bound]
  chosen = min(quick, key=lambda name: total(name, _BATCH))
  # Noise may make a product of more rows seem quicker, so each time is at least
  # that of fewer rows.
  times = itertools.accumulate((times_ms[chosen, n] for n in _COUNTS), max)
  return CpuLayout(chosen, widths, tuple(times))


def _measured() -> dict[tuple[str, int], float]:
  """Measures the milliseconds that chains of matrix products take.

  Returns:
    (layout of the kernels, number of rows) -> milliseconds.
  """
  runs = [(name, count) for name in LAYOUTS for count in _COUNTS]
  runs += [('out_in', count) for count in (2, 4, 8, 9, 16)]
  whole = [
    [jnp.full(x, 1e-3) for x in [(size, hidden), (hidden, size)] * pairs]
    for pairs, size, hidden in _CHAINS
  ]
  kernels = {
    'in_out': whole,
    'out_in': jax.tree.map(jnp.transpose, whole),
    'blocks': jax.tree.map(in_blocks, whole),
  }

  def chain(kernels, size, name, count):
    x = jnp.full((count, size), 0.5)
    for kernel in kernels:
      if name == 'in_out':
        x = x @ kernel
      elif name == 'out_in':
        x = product_out_in(kernel, x)
      else:
        x = product_of_blocks(kernel, x).swapaxes(0, 1).reshape(count, -1)
    return x.sum()

  # One program compiles in less time than many.
  @jax.jit
  def run(index, kernels):
    def chains(kernels, name, count):
      each = zip(kernels[name], _CHAINS, strict=True)
      return sum(chain(part, size, name, count) for part, (_, size, _) in each)

    branches = [
      functools.partial(chains, name=name, count=count) for name, count in runs
    ]
    return lax.switch(index, branches, kernels)

  seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
  for repeat, (index, key) in itertools.product(
    range(_REPEATS + 1), enumerate(runs)
  ):
    begin = time.perf_counter()
    jax.block_until_ready(run(index, kernels))
    if repeat:  # the first run has cold caches
      seconds[key].append(time.perf_counter() - begin)
  return {key: 1e3 * min(times) for key, times in seconds.items()}
