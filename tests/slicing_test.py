"""A drafter cut out of its target: exact where nothing is left out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_vocabulary import weights
from specdec_jax.models import t5
from specdec_jax.training.slicing import sliced

TARGET = t5.T5Config(
  vocab_size=40,
  emb_dim=24,
  num_heads=2,
  head_dim=8,
  num_encoder_layers=2,
  num_decoder_layers=3,
  mlp_dim=20,
)
TIED = dataclasses.replace(
  TARGET, mlp_activations=('relu',), logits_via_embedding=True
)


def make(config):
  """Parameters whose norm scales are not all 1, so that folding matters."""
  params = weights(t5.T5(config), 0)
  rng = np.random.default_rng(0)

  def other_scale(path, leaf):
    if path[-1].key != 'scale':
      return leaf
    return jnp.asarray(rng.uniform(0.5, 2.0, leaf.shape), jnp.float32)

  return jax.tree_util.tree_map_with_path(other_scale, params)


def logits(config, params):
  rng = np.random.default_rng(1)
  inputs, targets = rng.integers(1, 40, (2, 7)), rng.integers(1, 40, (2, 5))
  return jax.jit(t5.T5(config).logits)(params, inputs, targets)


def test_a_slice_of_everything_is_the_target():
  params = make(TARGET)
  want = logits(TARGET, params)
  have = logits(TARGET, sliced(params, TARGET, TARGET))
  np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-3)


def test_a_stream_of_few_directions_loses_nothing():
  """A target that uses only 10 of its 24 directions fits into 10."""
  narrow = dataclasses.replace(TARGET, emb_dim=10)
  small = make(narrow)
  # The same network in 24 dimensions: a random 10-dimensional subspace.
  basis, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(24, 10)))
  folded = sliced(small, narrow, narrow)

  def lift(path, leaf):
    name = path[-1].key
    if name == 'embedding':
      return leaf @ basis.T
    if name == 'scale':
      # 10 squares spread over 24 places: the norm divides by less.
      return jnp.full((24,), np.sqrt(10 / 24), jnp.float32)
    if name == 'kernel':
      writes = path[-2].key in ('out', 'wo')
      return leaf @ basis.T if writes else basis @ leaf
    return leaf

  wide = jax.tree_util.tree_map_with_path(lift, folded)
  want = logits(TARGET, wide)
  have = logits(narrow, sliced(wide, TARGET, narrow))
  np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('config', [TARGET, TIED], ids=['1.1', '1.0'])
def test_names_and_shapes_are_the_drafters(config):
  draft = dataclasses.replace(
    config, emb_dim=12, num_encoder_layers=1, num_decoder_layers=2
  )
  have = jax.tree.map(jnp.shape, sliced(make(config), config, draft))
  model = t5.T5(draft)
  want = jax.tree.map(
    lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0))
  )
  assert have == want


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('num_heads', 4, 'same num_heads; got 4, the target has 2'),
    ('emb_dim', 32, 'at most its emb_dim; got 32, the target has 24'),
  ],
)
def test_sizes_that_cannot_be_cut(field, value, words):
  draft = dataclasses.replace(TARGET, **{field: value})
  with pytest.raises(ValueError, match=words):
    sliced(make(TARGET), TARGET, draft)
