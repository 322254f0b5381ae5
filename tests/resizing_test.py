"""A model of other sizes that says what the smaller one says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicing_test import TARGET, TIED, logits, make
from specdec_jax.models import t5
from specdec_jax.training.resizing import resized


@pytest.mark.parametrize(
  'layers',
  [
    (3, 3),
    *(
      pytest.param(other, marks=pytest.mark.slow) for other in ((2, 3), (6, 7))
    ),
  ],
)
def test_what_is_grown_computes_the_same(layers):
  large = dataclasses.replace(
    TARGET, num_encoder_layers=layers[0], num_decoder_layers=layers[1]
  )
  params = make(TARGET)
  found = resized(params, TARGET, large)
  np.testing.assert_allclose(
    logits(large, found), logits(TARGET, params), rtol=1e-4, atol=1e-5
  )
  # Control: a copy that does write changes what is said.
  if layers != (2, 3):
    stack, k = next(
      (stack, k)
      for stack in ('encoder', 'decoder')
      for k in range(max(layers))
      if f'layers_{k}' in found[stack]
      and not found[stack][f'layers_{k}']['mlp']['wo']['kernel'].any()
    )
    loud = params[stack][f'layers_{k - 1}']
    found[stack][f'layers_{k}'] = jax.tree.map(np.asarray, loud)
    assert np.abs(logits(large, found) - logits(TARGET, params)).max() > 1e-2


def test_old_layers_are_spread_evenly():
  large = dataclasses.replace(TARGET, num_encoder_layers=6)
  found = resized(make(TARGET), TARGET, large)['encoder']
  writes = [
    bool(found[f'layers_{k}']['mlp']['wo']['kernel'].any()) for k in range(6)
  ]
  assert writes == [True, False, False, True, False, False]


WIDER = dict(emb_dim=32, num_heads=3, head_dim=12, mlp_dim=28)


@pytest.mark.parametrize(
  'config',
  [TARGET, pytest.param(TIED, marks=pytest.mark.slow)],
  ids=['untied', 'tied'],
)
def test_a_wider_one_computes_the_same_and_can_learn(config):
  large = dataclasses.replace(config, num_decoder_layers=4, **WIDER)
  params = make(config)
  found = resized(params, config, large)
  want = logits(config, params)
  np.testing.assert_allclose(logits(large, found), want, rtol=1e-3, atol=1e-4)

  def loss(tree):
    tokens = np.random.default_rng(2).integers(1, 40, (2, 2, 5))
    return jnp.square(t5.T5(large).logits(tree, tokens[0], tokens[1])).sum()

  slopes = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, found))
  written = slopes['decoder']['layers_0']['mlp']['wo']['kernel']
  # Places that nothing writes to yet are read, else they would stay silent.
  assert np.abs(written[:20, 24:]).min() > 0
  assert np.abs(written[20:]).min() > 0
  # Control: what writes to an added place changes what is said.
  found['decoder']['layers_0']['mlp']['wo']['kernel'][:20, 24:] = 1
  assert np.abs(logits(large, found) - want).max() > 1e-2


def test_fewer_layers_are_evenly_spaced_ones():
  params = make(TARGET)
  small = dataclasses.replace(TARGET, num_decoder_layers=2)
  found = resized(params, TARGET, small)['decoder']
  for new, old in ((0, 0), (1, 2)):
    jax.tree.map(
      np.testing.assert_array_equal,
      found[f'layers_{new}'],
      params['decoder'][f'layers_{old}'],
    )
  assert 'layers_2' not in found


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(emb_dim=16), 'expected emb_dim of 24 or more, got 16'),
    (dict(vocab_size=41), 'alone; expected sizes like'),
    (dict(num_encoder_layers=0), 'a stack is not left out'),
  ],
)
def test_other_sizes_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    resized(make(TARGET), TARGET, dataclasses.replace(TARGET, **change))


def test_a_decoder_alone_keeps_the_width_that_it_reads():
  alone = dataclasses.replace(TARGET, num_encoder_layers=0)
  with pytest.raises(ValueError, match='keeps its emb_dim'):
    resized({}, alone, dataclasses.replace(alone, emb_dim=32))
