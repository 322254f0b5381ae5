"""Kernels of integers: what is rounded, where, and what comes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import small_vocabulary
from specdec_jax.checkpoints import save_t5x
from specdec_jax.engine.loading import load
from specdec_jax.models import backend, integers, products
from specdec_jax.partitioning import Placement, place


def kernel(shape=(64, 40), seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=shape).astype(np.float32) * np.arange(shape[1])


BOTH = pytest.mark.parametrize('dtype, most', [('int8', 127), ('int4', 7)])


@BOTH
@pytest.mark.parametrize('made', [np.asarray, jnp.asarray])
def test_rounded_to_a_part_of_the_largest(made, dtype, most):
  want = kernel()  # output 0 has only zeros
  found, scale = integers.quantise(made(want), 'it', dtype)
  assert found.dtype == dtype and scale.dtype == jnp.float32
  again = np.asarray(found, np.float32) * np.asarray(scale)
  step = np.abs(want).max(0) / most
  assert (np.abs(again - want) <= step * 0.501).all()
  numbers = np.asarray(found, np.float32)
  assert np.abs(numbers[:, 1:]).max(0).min() == most
  assert scale[0] == 1 and not numbers[:, 0].any()


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('made', [np.asarray, jnp.asarray])
def test_numbers_that_are_not_finite(bad, made):
  broken = kernel()
  broken[3, 7] = bad
  with pytest.raises(ValueError, match='layers_0/wo.*output 7 .1 of 40'):
    integers.quantise(made(broken), 'layers_0/wo/kernel')


@pytest.mark.parametrize(
  ('layout', 'kind', 'rows', 'dtype'),
  [
    ('in_out', 'cpu', 1, 'int4'),
    ('out_in', 'cpu', 3, 'int4'),
    ('in_out', 'gpu', 3, 'int8'),
    ('out_in', 'tpu', 1, 'int4'),
  ],
)
def test_a_product_is_that_of_the_rounded_numbers(layout, kind, rows, dtype):
  x = jnp.asarray(kernel((rows, 64), 1))
  dense = products.Dense(40)
  params = {'kernel': kernel()}
  found, scale = integers.quantise(params['kernel'], '', dtype)
  want = np.asarray(x) @ (found.astype(np.float32) * scale)
  with backend.compiled_for(kind):
    placed = place(params, Placement(dtype, kernel_layout=layout))
    assert len(placed) == 2
    have = dense.apply({'params': placed}, x)
  np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-3)
  # Control: the factors matter.
  without = {n: v for n, v in placed.items() if n != integers.SCALE}
  assert np.abs(dense.apply({'params': without}, x) - want).max() > 1


def on_a_cpu(rows):
  """A product of eight bits for each of the rows [rows, in], and its params."""
  params = place({'kernel': kernel()}, Placement('int8'))
  return np.asarray(products.Dense(40).apply({'params': params}, rows)), params


def test_on_a_cpu_rows_are_rounded_too():
  rows = kernel((5, 64), 1)
  rows[2] = 0
  have, params = on_a_cpu(rows)
  assert params['kernel_out_in'].dtype == 'int8'
  largest = np.abs(rows).max(1, keepdims=True)
  factors = np.where(largest > 0, largest / np.float32(127), np.float32(1))
  whole = np.rint(rows / factors).astype(np.int64)
  sums = whole @ np.asarray(params['kernel_out_in'], np.int64).T
  want = sums * factors * np.asarray(params[integers.SCALE])
  np.testing.assert_allclose(have, want, rtol=1e-6)
  exact = rows @ kernel()
  assert 1e-4 < np.abs(have - exact).max() / np.abs(exact).max() < 0.02
  for i in (0, 2, 4):  # beside others a row has the same product
    np.testing.assert_array_equal(on_a_cpu(rows[i : i + 1])[0][0], have[i])


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_on_a_cpu_bad_numbers_stay_bad(bad):
  rows = kernel((3, 64), 1)
  rows[1, 5] = bad
  is_finite = np.isfinite(on_a_cpu(rows)[0]).all(1)
  assert is_finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
  ('layout', 'dtype'), [('in_out', 'int4'), ('blocks', 'int8')]
)
def test_read_from_a_file_or_rounded_in_memory(tmp_path, layout, dtype):
  """A file of bfloat16, as most checkpoints are."""
  path, net = tmp_path / 'model.msgpack', small_vocabulary.network(1)
  params = small_vocabulary.weights(net, 0)
  save_t5x(path, params, step=0, dtype=jnp.dtype('bfloat16'))
  placement = Placement(dtype, kernel_layout=layout)
  read = load(path, net, dtype=dtype).read(dtype)
  kept = place(load(path, net).read('bfloat16'), placement)
  jax.tree.map(np.testing.assert_array_equal, place(read, placement), kept)
  for name, leaf in flatten_dict(read, sep='/').items():
    is_kernel = name.endswith('/kernel')
    assert leaf.dtype == (dtype if is_kernel else 'float32'), name
