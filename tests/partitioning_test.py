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


def test_auto_follows_the_device_and_the_size():
  """A model that a CPU's caches hold stays as T5X stores it."""
  on_cpu = jax.default_backend() == 'cpu'
  small = {'dense': {'kernel': jax.ShapeDtypeStruct((4096, 4095), 'float32')}}
  large = {'dense': {'kernel': jax.ShapeDtypeStruct((4096, 4097), 'float32')}}
  assert not Placement().transposes(small)
  assert Placement().transposes(large) == on_cpu
  assert not Placement('bfloat16').transposes(large)  # half the bytes


PROJECTIONS = {
  'decoder': {
    'self_attention': {
      name: {'kernel': np.full((2, 3), i, np.float32)}
      for i, name in enumerate(('query', 'key', 'value', 'out'))
    },
    'encoder_decoder_attention': {
      name: {'kernel': np.full((2, 3), i, np.float32)}
      for i, name in enumerate(('query', 'key', 'value', 'out'))
    },
    'mlp': {
      name: {'kernel': np.full((2, 3), i, np.float32)}
      for i, name in enumerate(('wi_0', 'wi_1', 'wo'))
    },
  }
}


@pytest.mark.parametrize('layout', ['in_out', 'out_in'])
def test_projections_of_one_input_are_joined(layout):
  decoder = place(PROJECTIONS, Placement(kernel_layout=layout))['decoder']
  assert set(decoder['self_attention']) == {'qkv', 'out'}
  assert set(decoder['mlp']) == {'wi_joined', 'wo'}
  # Its queries come from the decoder, its keys from the encoder.
  assert set(decoder['encoder_decoder_attention']) == {
    'query',
    'key',
    'value',
    'out',
  }
  (kernel,) = decoder['self_attention']['qkv'].values()
  if layout == 'out_in':
    kernel = kernel.T
  np.testing.assert_array_equal(kernel, [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 2)


def test_joining_can_be_turned_off():
  placement = Placement(kernel_layout='in_out', join_projections=False)
  placed = place(PROJECTIONS, placement)
  assert jax.tree.structure(placed) == jax.tree.structure(PROJECTIONS)


def test_placing_twice_changes_only_the_dtype():
  once = place(PARAMS | PROJECTIONS, Placement(kernel_layout='out_in'))
  again = place(once, Placement('bfloat16', kernel_layout='out_in'))
  assert jax.tree.structure(again) == jax.tree.structure(once)
  assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {
    jnp.dtype('bfloat16')
  }


def test_unknown_layout():
  with pytest.raises(ValueError, match="'auto', 'in_out' or 'out_in'"):
    Placement(kernel_layout='columns')
