"""A model with more layers that says what the smaller one says."""

import dataclasses

import jax
import numpy as np
import pytest

from slicing_test import TARGET, logits, make
from specdec_jax.training.growing import grown


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
  found = grown(params, TARGET, large)
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
  found = grown(make(TARGET), TARGET, large)['encoder']
  writes = [
    bool(found[f'layers_{k}']['mlp']['wo']['kernel'].any()) for k in range(6)
  ]
  assert writes == [True, False, False, True, False, False]


@pytest.mark.parametrize(
  'change', [dict(emb_dim=32), dict(num_encoder_layers=1), dict(mlp_dim=40)]
)
def test_other_sizes_are_refused(change):
  with pytest.raises(ValueError, match='grows by layers alone'):
    grown(make(TARGET), TARGET, dataclasses.replace(TARGET, **change))
