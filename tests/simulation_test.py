"""Appendix A.1 as an experiment: exact law, Monte Carlo, a wrong law."""

import dataclasses

import numpy as np
import pytest

from specdec_jax.paper import simulation

TARGET, DRAFT = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)


@pytest.mark.parametrize('lenience', [1.0, 0.1])
def test_verify_agrees(lenience):
  """50,000 proposals: the exact law of `verify`, its keys and its sampler."""
  shown = simulation.simulate(TARGET, DRAFT, 50_000, lenience)
  assert shown.p_value > 1e-3 and shown.agrees
  assert shown.counts.sum() == 50_000
  text = str(shown)
  assert ('Lossy' in text) == (lenience != 1) and 'WRONG' not in text
  # Control: the law of another lenience.
  law = simulation.outcomes(TARGET, DRAFT, 0.7)
  wrong = dataclasses.replace(shown, law=law)
  assert wrong.p_value < 1e-9 and 'WRONG' in str(wrong)


def test_pairs_that_are_equal_or_have_nothing_in_common():
  for pair in (TARGET, TARGET), ((1, 0), (0, 1)), ((0, 1), (0, 1)):
    assert simulation.simulate(*pair, 1000).agrees


@pytest.mark.parametrize(
  'target, draft, options, words',
  [
    ((0.5, 0.4), (0.5, 0.5), {}, 'target_probs.*0.9'),
    (np.ones((1, 1)), np.ones((1, 1)), {}, r'target_probs.*\(1, 1\)'),
    ((1,), (1,), {'lenience': 2.0}, 'lenience.*2.0'),
    ((1,), (1,), {'num_samples': 0}, 'num_samples.*0'),
  ],
)
def test_bad_input(target, draft, options, words):
  with pytest.raises(ValueError, match=words):
    simulation.simulate(target, draft, **options)
