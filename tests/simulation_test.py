"""Appendix A.1 as an experiment: exact law, Monte Carlo, a wrong `verify`."""

import functools

import jax
import numpy as np
import pytest

import toy_models
from specdec_jax import analysis, verify
from specdec_jax.paper import simulation

TARGET, DRAFT = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)


def test_outcomes_of_any_pair():
  rng = np.random.default_rng(0)
  pairs = [rng.dirichlet(np.full(6, 0.5), size=2) for _ in range(50)]
  edges = [(TARGET, TARGET), ((1, 0), (0, 1)), ((0, 1), (0, 1))]
  for target, draft in pairs + [np.array(pair, float) for pair in edges]:
    for lenience in (1.0, 0.5, 0.01):
      law = simulation.outcomes(target, draft, lenience)
      emitted = law.sum(axis=0)
      assert emitted.sum() == pytest.approx(1, abs=1e-12)
      assert np.all(emitted <= target / lenience + 1e-12)
      beta = analysis.acceptance_prob(target, draft, lenience)
      assert law[0].sum() == pytest.approx(float(beta), abs=1e-6)
      if lenience == 1:
        np.testing.assert_allclose(emitted, target, atol=1e-12)


@pytest.mark.parametrize('lenience', [1.0, 0.1])
def test_verify_agrees(lenience):
  """50,000 proposals: the exact law of `verify`, its keys and its sampler."""
  shown = simulation.simulate(TARGET, DRAFT, 50_000, lenience)
  assert shown.p_value > 1e-3 and shown.agrees
  assert shown.counts.sum() == 50_000
  text = str(shown)
  assert ('Lossy' in text) == (lenience != 1) and 'WRONG' not in text
  # Control: another lenience is found out.
  law = simulation.outcomes(TARGET, DRAFT, 0.7)
  assert toy_models.chi_squared_p_value(shown.counts, law) < 1e-9


def test_a_wrong_verify_is_reported(monkeypatch):
  monkeypatch.setattr(
    verify, 'next_token_weights', lambda draft, target, count: target[count]
  )
  # JAX knows what it has traced by the function: this one has the patch.
  anew = functools.partial(simulation._count.__wrapped__)
  traced = jax.jit(anew, static_argnames='num_samples')
  monkeypatch.setattr(simulation, '_count', traced)
  shown = simulation.simulate(TARGET, DRAFT, 50_000)
  assert not shown.agrees and 'WRONG' in str(shown)


@pytest.mark.parametrize(
  'target, draft, options, words',
  [
    ((0.5, 0.5), (0.2, 0.3, 0.5), {}, r'\(2,\), \(3,\)'),
    ((0.5, 0.4), (0.5, 0.5), {}, 'target_probs.*0.9'),
    ((0.5, 0.5), (1.5, -0.5), {}, 'draft_probs.*-0.5'),
    (np.ones((1, 1)), np.ones((1, 1)), {}, r'target_probs.*\(1, 1\)'),
    ((1,), (1,), {'lenience': 2.0}, 'lenience.*2.0'),
    ((1,), (1,), {'num_samples': 0}, 'num_samples.*0'),
  ],
)
def test_bad_input(target, draft, options, words):
  with pytest.raises(ValueError, match=words):
    simulation.simulate(target, draft, **options)
