"""The kernel of a product with its norm and gate, beside the plain code."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_kernel_test import same, traced
from gpu_check_test import _nothing_is_kept, compiles_kernels  # noqa: F401
from specdec_jax.measure.compiled import devices, gpu
from specdec_jax.measure.compiled.compiler import Compiler
from specdec_jax.models import backend, integers, product_kernel, products
from specdec_jax.models.norms import Unnormed

GELU = 'gelu', 'linear'
CASES = [  # rows, in, out, dtype, of the kernel, norm, gate, added
  ((1, 48, 32), 'float32', 'float32', True, (), 0),
  ((8, 96, 64), 'bfloat16', 'int8', True, (), 2),
  ((5, 128, 96), 'float32', 'int8', True, GELU, 0),
  ((16, 528, 48), 'bfloat16', 'bfloat16', False, (), 2),
  ((3, 64, 2240), 'float32', 'float32', False, ('silu',), 1),
  ((2, 32, 50), 'float32', 'float32', True, GELU, 0),  # tiles overlap
]


def operands(sizes, dtype, kernel_dtype, has_norm, num_added):
  """Kernel [out, in], its factors, x, what is added; and x once more, plain."""
  rows, size, outputs = sizes
  rng = np.random.default_rng(0)
  draw = functools.partial(rng.normal, size=(size, outputs))
  kernel, scale = (draw() / np.sqrt(size)).astype(np.float32), None
  if kernel_dtype == 'int8':
    kernel, scale = map(jnp.asarray, integers.quantise(kernel, 'kernel'))
  kernel = jnp.asarray(kernel, kernel_dtype).T
  x = jnp.asarray(rng.normal(size=(1, rows, size)) * 3, dtype)
  shapes = (outputs,), (1, rows, outputs)
  added = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
  if has_norm:
    norm = jnp.asarray(rng.normal(size=size), jnp.float32)
    x = Unnormed(x, norm, 1e-6, dtype)
  return kernel, x, scale, added[:num_added]


def plain(kernel, x, scale, added, gate):
  """In float32 behind the product, as the kernel has it."""
  x = x.applied() if isinstance(x, Unnormed) else x
  found = products.dense_out_in(kernel.astype(x.dtype), x, 'float32', scale)
  for one in added:
    found = found + one.astype(jnp.float32)
  parts = jnp.split(found, max(1, len(gate)), -1)
  return products.gated(parts, gate) if gate else found


def by_kernel(kernel, x, scale, added, gate, dtype):
  activations = [products.ACTIVATIONS[name] for name in gate]
  with backend.kernels('interpreted'):
    return product_kernel.product(kernel, x, dtype, scale, added, activations)


@pytest.mark.parametrize(
  ('sizes', 'dtype', 'of_kernel', 'has_norm', 'gate', 'num_added'), CASES
)
def test_it_is_the_plain_product(
  sizes, dtype, of_kernel, has_norm, gate, num_added
):
  given = operands(sizes, dtype, of_kernel, has_norm, num_added)
  have = by_kernel(*given, gate, dtype)
  assert have.dtype == dtype
  same(have, plain(*given, gate), dtype)
  # Controls: without each of what belongs to it.
  kernel, x, scale, added = given
  wrong = [(kernel.at[:, -1].set(0), x, scale, added)]
  if has_norm:
    wrong.append((kernel, x.x, scale, added))
  if scale is not None:
    wrong.append((kernel, x, jnp.roll(scale, 1), added))
  wrong += [
    (kernel, x, scale, [*added[:i], *added[i + 1 :]]) for i in range(num_added)
  ]
  for other in wrong:
    with pytest.raises(AssertionError):
      same(have, plain(*other, gate), dtype)


def test_a_norm_is_of_float32():
  """A row of large numbers in bfloat16: their squares add up exactly."""
  kernel, x, *rest = operands((2, 512, 16), 'bfloat16', 'float32', True, 0)
  kernel = kernel.astype('bfloat16')
  large = Unnormed(x.x * 1000, *x[1:])
  have = by_kernel(kernel, large, *rest, (), 'bfloat16')
  same(have, plain(kernel, x, *rest, ()), 'bfloat16')


def test_rows_do_not_see_each_other():
  kernel, x, *rest = operands((7, 64, 32), 'float32', 'float32', True, 0)
  have = by_kernel(kernel, x, *rest, (), 'float32')
  spoilt = Unnormed(x.x.at[0, 3].set(jnp.nan), *x[1:])
  again = by_kernel(kernel, spoilt, *rest, (), 'float32')
  others = np.arange(7) != 3
  np.testing.assert_array_equal(again[0, others], have[0, others])
  assert np.isnan(again[0, 3]).all()


@pytest.mark.parametrize(
  ('shape', 'dtype', 'rows', 'parts', 'reason'),
  [
    ((64, 64), 'float32', 17, 1, '17 rows are more than 16'),
    ((15, 64), 'float32', 1, 1, '15 outputs are less than 16'),
    ((30, 64), 'float32', 1, 2, '30 outputs are less than 32'),
    ((40, 64), 'float32', 1, 1, ''),
    ((64, 40), 'float32', 1, 1, 'rows of 40 numbers'),
    ((64, 64), 'int4', 1, 1, 'four bits'),
    ((20480, 4096), 'int8', 16, 2, ''),
    ((32128, 512), 'bfloat16', 1, 1, ''),
  ],
)
def test_shapes_that_are_refused(shape, dtype, rows, parts, reason):
  kernel = jax.ShapeDtypeStruct(shape, dtype)
  said = product_kernel.refusal(kernel, rows, parts)
  assert reason in said and bool(said) == bool(reason)


def test_all_products_of_a_layer_are_kernels():
  # Two of attention, six products: of queries, keys and values; twice out; of
  # queries; and two of the feed-forward block.
  assert traced('forced').count('pallas_call[') == 2 * (2 + 6)
  with pytest.raises(ValueError, match='kernel of products .* 56 numbers'):
    traced('forced', mlp_dim=56)


SIZE = 4096


@compiles_kernels
@pytest.mark.usefixtures('_nothing_is_kept')
@pytest.mark.parametrize('dtype', ['bfloat16', 'int8'])
def test_compiled_it_is_one_kernel_that_writes_its_result(dtype):
  compiler = Compiler(gpu.describe(devices.find('h200')), counts_kernels=True)
  shapes = {
    'kernel': ((2 * SIZE, SIZE), dtype),
    'x': ((1, 8, SIZE), 'bfloat16'),
    'norm': ((SIZE,), 'float32'),
    'scale': ((2 * SIZE,), 'float32'),
  }
  given = {
    name: compiler.place(jax.ShapeDtypeStruct(*shape))
    for name, shape in shapes.items()
  }

  def call(kernel, x, norm, scale):
    x = Unnormed(x, norm, 1e-6, 'bfloat16')
    factors = scale if dtype == 'int8' else None
    activations = [products.ACTIVATIONS[name] for name in GELU]
    return product_kernel.product(
      kernel, x, 'bfloat16', factors, (), activations
    )

  with backend.compiled_for('gpu'), backend.kernels('forced'):
    record, _ = compiler.compile('product', call, *given.values())
  once = record['launched']['once']
  assert (once['kernels'], once['written_bytes']) == (1, 8 * SIZE * 2)
  assert any('triton' in name for name in record['custom_calls'])


_COMPILE = """
import sys
import jax
from specdec_jax.measure.compiled import devices, gpu
from specdec_jax.measure.compiled.compiler import Compiler
from specdec_jax.models import backend, product_kernel
from specdec_jax.models.norms import Unnormed

compiler = Compiler(gpu.describe(devices.find('h200')))

def call(kernel, x, norm):
  x = Unnormed(x, norm, 1e-6, 'bfloat16')
  return product_kernel.product(kernel, x, 'bfloat16')

with backend.compiled_for('gpu'), backend.kernels('forced'):
  for rows, size, outputs in SIZES:
    shapes = (outputs, size), (1, rows, size), (size,)
    given = [
      compiler.place(jax.ShapeDtypeStruct(one, 'bfloat16')) for one in shapes
    ]
    compiler.compile('product', call, *given)
"""


def loops(text):
  """The instructions of each loop of a program in PTX that multiplies."""
  lines = text.splitlines()
  places = {
    line.split(':')[0]: i for i, line in enumerate(lines) if line[:1] == '$'
  }
  for i, line in enumerate(lines):
    target = line.split()[-1].rstrip(';') if ' bra' in line else ''
    if places.get(target, i) < i:
      inside = '\n'.join(lines[places[target] : i])
      if 'mma.sync' in inside:
        yield inside


@compiles_kernels
def test_compiled_its_loop_waits_for_no_number(tmp_path):
  sizes = [(1, 4096, 12288), (8, 10240, 4096), (2, 1024, 512), (1, 512, 32128)]
  environment = dict(os.environ, XLA_FLAGS=f'--xla_dump_to={tmp_path}')
  subprocess.run(
    [sys.executable, '-c', _COMPILE.replace('SIZES', repr(sizes))],
    env=environment,
    check=True,
  )
  programs = [one.read_text() for one in tmp_path.glob('*.ptx')]
  found = [loop for text in programs for loop in loops(text)]
  assert len(found) == len(sizes)
  for loop in found:
    # Kernel, activations and norm are copied while earlier ones are multiplied.
    assert loop.count('cp.async.c') >= 3
    assert 'ld.global' not in loop
