"""Placement: names, layouts, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.partitioning import Placement, place

PARAMS = {
  'dense': {'kernel': np.arange(6.0, dtype=np.float32).reshape(2, 3)},
  'norm': {'scale': np.ones((3,), np.float32)},
  'token_embedder': {'embedding': np.ones((4, 2), np.float32)},
}


def test_out_in_transposes_kernels_only():
  placed = place(PARAMS, Placement(kernel_layout='out_in'))
  kernel = placed['dense'].pop('kernel_out_in')
  np.testing.assert_array_equal(kernel, PARAMS['dense']['kernel'].T)
  assert placed['dense'] == {}
  assert placed['token_embedder']['embedding'].shape == (4, 2)


def test_in_out_is_t5xs():
  placed = place(PARAMS, Placement(kernel_layout='in_out'))
  assert jax.tree.map(np.shape, placed) == jax.tree.map(np.shape, PARAMS)


def test_auto_is_out_in_on_a_cpu_only():
  assert Placement().transposed == (jax.default_backend() == 'cpu')


def test_placing_twice_changes_only_the_dtype():
  once = place(PARAMS, Placement(kernel_layout='out_in'))
  again = place(once, Placement('bfloat16', kernel_layout='out_in'))
  assert jax.tree.structure(again) == jax.tree.structure(once)
  assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {
    jnp.dtype('bfloat16')
  }


def test_unknown_layout():
  with pytest.raises(ValueError, match="'auto', 'in_out' or 'out_in'"):
    Placement(kernel_layout='columns')
