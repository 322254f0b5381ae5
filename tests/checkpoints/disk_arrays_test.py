"""Fingerprints: of the parameters, not of how they were read."""

import jax
import jax.numpy as jnp
import numpy as np

import small_vocabulary
from specdec_jax import checkpoints
from specdec_jax.checkpoints.disk_arrays import fingerprint

PARAMS = {'a': {'kernel': np.arange(300.0, dtype=np.float32).reshape(20, 15)}}
PARAMS['a']['kernel'] /= 7


def test_fingerprints_tell_parameters_apart():
  own = fingerprint(PARAMS)
  assert own == fingerprint(jax.tree.map(jnp.asarray, PARAMS))
  renamed = {'b': PARAMS['a']}
  reshaped = jax.tree.map(lambda leaf: leaf.reshape(15, 20), PARAMS)
  trained = jax.tree.map(lambda leaf: leaf * 1.01, PARAMS)
  others = {fingerprint(p) for p in (renamed, reshaped, trained)}
  assert len(others | {own}) == 4


def test_the_dtype_they_are_read_in_does_not_matter(tmp_path):
  network = small_vocabulary.network(1)
  params = small_vocabulary.weights(network, 0)
  path = tmp_path / 'model'
  checkpoints.save_orbax(path, params)
  for dtype in ('float32', 'bfloat16'):
    read = checkpoints.load(path, network, dtype=dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(read)} == {dtype}
    assert fingerprint(params) == fingerprint(read)
