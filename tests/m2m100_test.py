"""M2M-100 and NLLB-200: against plain NumPy, and against themselves."""

import dataclasses
import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import m2m100_numpy
from specdec_jax import partitioning
from specdec_jax.engine.padding import padded
from specdec_jax.models import backend, sizes
from specdec_jax.models.m2m100 import M2M100, M2M100Config

SMALL = M2M100Config(
  vocab_size=60,
  emb_dim=24,
  num_heads=3,
  num_encoder_layers=2,
  num_decoder_layers=3,
  head_dim=10,  # heads * head_dim is not emb_dim
  mlp_dim=40,
)
LENGTHS = (9, 1, 20)  # of inputs
logits_of = jax.jit(M2M100.logits, static_argnums=0)
extend = jax.jit(M2M100.extend, static_argnums=0)
prefill = jax.jit(M2M100.prefill, static_argnums=(0, 3))


@functools.cache
def shapes(config):
  return jax.eval_shape(M2M100(config).init, jax.random.key(0))


@functools.cache
def make(config, seed=0):
  """A model whose biases are not 0 and whose scales are not 1."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    noise = rng.standard_normal(leaf.shape).astype(np.float32)
    return float(path[-1].key == 'scale') + noise / 3

  return M2M100(config), jax.tree_util.tree_map_with_path(draw, shapes(config))


def tokens(seed, *shape):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(2, 60, shape).astype(np.int32))


def rows(config=SMALL):
  """Inputs of several lengths; 0 is a token like any other."""
  rng = np.random.default_rng(5)
  ids = np.delete(np.arange(config.vocab_size), config.pad_id)
  found = [list(rng.choice(ids, length)) for length in LENGTHS]
  found[0][3] = found[2][-1] = 0
  return found


def inputs_of(config=SMALL, width=24):
  return padded(rows(config), len(LENGTHS), width, config.pad_id)[0]


@pytest.mark.parametrize(
  'change', [{}, {'scale_embeddings': False}, {'pad_id': 4}], ids=str
)
def test_logits_are_those_of_plain_numpy(change):
  config = dataclasses.replace(SMALL, **change)
  model, params = make(config)
  read = np.asarray(tokens(1, 3, 30))
  have = logits_of(model, params, inputs_of(config), read)
  for row, inputs in enumerate(rows(config)):
    want = m2m100_numpy.logits(config, params, inputs, read[row])
    assert np.std(want) > 0.1
    np.testing.assert_allclose(have[row], want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
  'change',
  [
    {'scale_embeddings': False},
    {'pad_id': 0},
    {'mlp_activations': ('gelu',)},
  ],
  ids=str,
)
def test_every_field_is_seen(change):
  """The negative control of the test above: one field differs."""
  model, params = make(SMALL)
  other = M2M100(dataclasses.replace(SMALL, **change))
  read = tokens(1, 3, 30)
  want = logits_of(model, params, inputs_of(), read)
  have = logits_of(other, params, inputs_of(), read)
  assert np.abs(have - want).max() > 1e-3 * np.abs(want).max()


def test_padding_does_not_matter_and_id_0_does():
  model, params = make(SMALL)
  read = tokens(1, 3, 12)
  want = np.asarray(logits_of(model, params, inputs_of(), read))
  wider = logits_of(model, params, inputs_of(width=40), read)
  np.testing.assert_allclose(wider, want, atol=1e-4)
  zeros = padded(rows(), len(LENGTHS), 24, 0)[0]
  other = np.asarray(logits_of(model, params, zeros, read))
  assert (np.abs(other - want).max((1, 2)) > 1e-2).all()


@pytest.mark.parametrize(
  ('layout', 'kind'),
  [
    ('out_in', 'cpu'),
    pytest.param('in_out', 'gpu', marks=pytest.mark.slow),
  ],
)
def test_extend_in_pieces_equals_teacher_forcing(layout, kind):
  model, params = make(SMALL)
  read = tokens(2, 3, 150)  # attended over 128 slots first, then over all
  expected = np.asarray(logits_of(model, params, inputs_of(), read))
  placed = partitioning.place(
    params, partitioning.Placement(kernel_layout=layout)
  )
  assert 'qkv' in placed['decoder']['layers_1']['self_attention']
  pieces, at = [], 0
  with backend.compiled_for(kind):
    cache = prefill(model, placed, inputs_of(), 150)
    for size in (1, 62, 1, 62, 12, 12):
      logits, cache = extend(model, placed, cache, read[:, at : at + size])
      pieces.append(logits)
      at += size
  np.testing.assert_array_equal(cache.length, [150] * 3)
  np.testing.assert_allclose(
    np.concatenate(pieces, 1), expected, atol=5e-5 * np.abs(expected).max()
  )


def test_rows_at_their_own_places():
  model, params = make(SMALL)
  read = tokens(3, 3, 20)
  expected = np.asarray(logits_of(model, params, inputs_of(), read))
  cache = prefill(model, params, inputs_of(), 24)
  _, cache = extend(model, params, cache, read[:, :16])
  starts = np.array([16, 11, 0])
  cache = model.rewind(cache, jnp.asarray(starts))
  new = np.stack([read[b, s : s + 4] for b, s in enumerate(starts)])
  logits, cache = extend(model, params, cache, jnp.asarray(new))
  for row, begin in enumerate(starts):
    np.testing.assert_allclose(
      logits[row], expected[row, begin : begin + 4], atol=1e-4
    )
  np.testing.assert_array_equal(cache.length, starts + 4)


def test_parameters_and_memory():
  _, params = make(SMALL)
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert sizes.num_params(SMALL) == count
  assert sizes.run_bytes(SMALL, 2, 16, 32, 5) > 0
  for name in flax.traverse_util.flatten_dict(params, sep='/'):
    partitioning.axes.axes_of_parameter(name)  # each has a rule


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'emb_dim': 25}, 'even number'),
    ({'num_heads': 0}, 'num_heads'),
    ({'mlp_activations': ('tanh',)}, 'mlp_activations'),
    ({'pad_id': -1}, 'pad_id'),
  ],
  ids=str,
)
def test_configurations_that_are_none(change, said):
  with pytest.raises(ValueError, match=said):
    dataclasses.replace(SMALL, **change)
