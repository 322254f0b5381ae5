"""Products of few rows, compiled for a GPU that is not there."""

import jax
import jax.numpy as jnp
import pytest

from gpu_check_test import _nothing_is_kept, needs_cuda  # noqa: F401
from specdec_jax.measure.compiled import devices, gpu
from specdec_jax.measure.compiled.compiler import Compiler
from specdec_jax.models import backend, products

ROWS, SIZE = 8, 4096


def written(name, rows=ROWS):
  """Kernels of one product and a sum, and bytes that they write."""
  compiler = Compiler(gpu.describe(devices.find('h200')), counts_kernels=True)
  kernel, x = (
    compiler.place(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    for shape in ((SIZE, SIZE), (1, rows, SIZE))
  )

  def residual(kernel, x):
    return products.dense_out_in(kernel, x, added=[x])

  with backend.compiled_for('gpu'):
    record, _ = compiler.compile(name, residual, kernel, x)
  once = record['launched']['once']
  return once['kernels'], once['written_bytes']


@needs_cuda
@pytest.mark.usefixtures('_nothing_is_kept')
def test_a_product_writes_no_partial_sums(monkeypatch):
  result = ROWS * SIZE * 2
  kernels, size = written('as it is')
  assert kernels <= 2 and size <= 2 * result
  # Control: what XLA would do by itself.
  monkeypatch.setattr(backend, 'compiler_options', dict)
  _, size = written('split')
  assert size > 4 * result


@needs_cuda
@pytest.mark.usefixtures('_nothing_is_kept')
def test_a_residual_of_one_row_is_no_kernel(monkeypatch):
  assert written('one row', 1) == (1, SIZE * 2)
  # Control: added behind the sum, it is.
  plain = products.dense_out_in

  def behind(kernel, x, added):
    return added[0] + plain(kernel, x)

  monkeypatch.setattr(products, 'dense_out_in', behind)
  assert written('behind', 1)[0] == 2
