"""The experiment with one proposal: exact law, Monte Carlo, command line."""

import io

import jax
import numpy as np
import pytest
import rich.console

import toy_models
from specdec_jax import analysis, verify
from specdec_jax.cli import simulate as script
from specdec_jax.paper import simulation
from specdec_jax.paper.simulation import SimulateConfig

TARGET, DRAFT = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)


def run(**options):
  """The record and what was printed."""
  stream = io.StringIO()
  console = rich.console.Console(file=stream, width=80)
  config = SimulateConfig(
    **({'target': TARGET, 'draft': DRAFT, 'num_samples': 50_000} | options)
  )
  return simulation.simulate(config, console), stream.getvalue()


def test_outcomes_by_hand():
  found = simulation.outcomes(TARGET, DRAFT)
  np.testing.assert_allclose(found.accepted, [0.2, 0.3, 0.2])
  np.testing.assert_allclose(found.resampled, [0.3, 0, 0], atol=1e-15)
  np.testing.assert_allclose(found.total, TARGET)
  # l = 0.5: beta 0.9; the residual has the rest.
  found = simulation.outcomes(TARGET, DRAFT, 0.5)
  np.testing.assert_allclose(found.accepted, [0.2, 0.3, 0.4])
  np.testing.assert_allclose(found.resampled, [0.1, 0, 0], atol=1e-15)


def test_outcomes_of_any_pair():
  rng = np.random.default_rng(0)
  for _ in range(50):
    target, draft = rng.dirichlet(np.full(6, 0.5), size=2)
    for lenience in (1.0, 0.9, 0.5, 0.1, 0.01):
      found = simulation.outcomes(target, draft, lenience)
      assert found.total.sum() == pytest.approx(1, abs=1e-12)
      assert np.all(found.total <= target / lenience + 1e-12)
      beta = analysis.lenient_acceptance_prob(target, draft, lenience)
      assert found.acceptance_prob == pytest.approx(float(beta), abs=1e-6)
      # As near to the target as any residual gets: beyond it lies only what
      # was accepted. That of l q, for one, goes further.
      beyond = np.maximum(found.accepted - target, 0).sum()
      moved = np.maximum(found.total - target, 0).sum()
      assert moved == pytest.approx(beyond, abs=1e-12)
      other = np.maximum(target - lenience * draft, 0)
      other = found.accepted + (1 - found.acceptance_prob) * other / other.sum()
      assert np.maximum(other - target, 0).sum() >= moved - 1e-12
      if lenience == 1:
        np.testing.assert_allclose(found.total, target, atol=1e-12)


@pytest.mark.parametrize(
  'target, draft', [(TARGET, TARGET), ((1, 0), (0, 1)), ((0, 1), (0, 1))]
)
def test_edges_have_their_total(target, draft):
  for lenience in (1.0, 0.5):
    found = simulation.outcomes(target, draft, lenience)
    np.testing.assert_allclose(found.total, target, atol=1e-15)
    record, _ = run(target=target, draft=draft, lenience=lenience)
    assert record['agrees'] and np.all(np.isfinite(record['z']['total']))


@pytest.mark.parametrize('lenience', [1.0, 0.5, 0.1])
def test_verify_agrees(lenience):
  """50,000 proposals: the exact law of `verify`, its keys and its sampler."""
  config = SimulateConfig(TARGET, DRAFT, 50_000, lenience)
  counts = simulation.measure(config)
  assert counts.shape == (2, 3) and counts.sum() == 50_000
  exact = simulation.outcomes(TARGET, DRAFT, lenience)
  law = np.stack([exact.accepted, exact.resampled])
  toy_models.assert_chi_squared(counts, law, 1e-3)
  # Control: another lenience is found out.
  other = simulation.outcomes(TARGET, DRAFT, 0.7)
  law = np.stack([other.accepted, other.resampled])
  assert toy_models.chi_squared_p_value(counts, law) < 1e-9


def test_record_and_report():
  record, text = run(lenience=0.5)
  assert record['acceptance_prob'] == pytest.approx(0.9)
  assert np.abs(record['z']['total']).max() < 4
  assert record['agrees'] and record['p_value'] > simulation.ALPHA
  assert sum(record['measured']['total']) == pytest.approx(1)
  assert 'Lossy: lenience 0.5 moves 0.200000' in text
  assert 'comes 2.0000 times as often as it should, none more than 2.0' in text
  assert '0.400000' in text and 'at most' in text and '50,000' in text
  _, text = run()
  assert 'Lossy' not in text and 'at most' not in text
  assert 'Accepted: 0.700000 exactly' in text


def test_a_wrong_verify_is_reported(monkeypatch):
  def wrong(draft, target_probs, num_accepted):
    del draft
    return target_probs[num_accepted]

  monkeypatch.setattr(verify, 'next_token_weights', wrong)
  shipped = simulation._count.__wrapped__

  def anew(*args, chunk):
    return shipped(*args, chunk=chunk)

  # JAX knows what it has traced by the function: this one has the patch.
  traced = jax.jit(anew, static_argnames='chunk')
  monkeypatch.setattr(simulation, '_count', traced)
  record, text = run()
  assert not record['agrees'] and 'WRONG' in text
  assert np.abs(record['z']['resampled']).max() > 20
  monkeypatch.setattr(simulation, 'simulate', lambda config: record)
  assert script.main(['--target=0.5,0.5', '--draft=0.5,0.5']) == 1


def test_odd_numbers_of_samples():
  for count in (1, 3, 65_537):
    config = SimulateConfig(TARGET, DRAFT, count)
    assert simulation.measure(config).sum() == count


def test_z_score():
  errors = simulation.standard_error(np.array([0.5, 0.0, 1.0, 0.0]), 100)
  np.testing.assert_allclose(errors, [0.05, 0, 0, 0])
  measured = np.array([0.6, 0.0, 1.0, 0.1])
  found = simulation.z_score(measured, np.array([0.5, 0.0, 1.0, 0.0]), errors)
  np.testing.assert_allclose(found, [2, 0, 0, np.inf])


# --- The command line ---------------------------------------------------------


def test_script(capsys):
  flags = ['--target=0.5,0.3,0.2', '--draft', '0.2,0.3,0.5']
  assert script.main([*flags, '--num_samples=2000', '--lenience=0.5']) == 0
  assert 'Lossy: lenience 0.5' in capsys.readouterr().out


@pytest.mark.parametrize(
  'flags, message',
  [
    ([], '--target is missing; expected probabilities, as --target=0.5'),
    (['--target=1'], '--draft is missing'),
    (['--target=a,b'], "commas between them, got 'a,b'"),
    (['--taget=1'], "'--taget'. Nearest known: --target."),
    (
      ['--target=0.5,0.5', '--draft=0.2,0.3,0.5'],
      'one vocabulary as their last dimension, got shapes (2,) and (3,)',
    ),
    (
      ['--target=0.5,0.4', '--draft=0.5,0.5'],
      'target_probs must sum to 1 over the vocabulary, got 0.9',
    ),
    (
      ['--target=0.5,0.5', '--draft=1.5,-0.5'],
      'draft_probs must be finite and >= 0, got -0.5',
    ),
    (['--target=1', '--draft=1', '--lenience=0'], 'lenience must be in (0, 1]'),
    (['--target=1', '--draft=1', '--lenience=2'], 'got 2.0'),
    (['--target=1', '--draft=1', '--num_samples=0'], 'num_samples must be in'),
    (['--target=1', '--draft=1', '--seed=x'], "invalid int value: 'x'"),
    (['--target=1', '--draft=1', f'--seed={1 << 63}'], 'must fit in 64 bits'),
  ],
)
def test_bad_flags(capsys, flags, message):
  assert script.main(flags) == 2
  shown = capsys.readouterr()
  assert message in shown.err and shown.err.startswith('error: ')
  assert not shown.out
