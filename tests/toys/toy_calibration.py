"""Calibrations of which nothing was measured."""

from specdec_jax.engine.calibration import Calibration, Choice
from specdec_jax.models import backend


def choice(rows, gamma):
  factors = tuple(1 + 0.1 * g for g in range(gamma + 1))
  return Choice(rows, gamma, factors[-1], (factors[-1] - 0.1, 9.0), factors)


def make(**changes):
  fields = {
    'fingerprints': {'target': 'aa', 'draft': 'bb'},
    'device': backend.device_name(),
    'temperature': 0.0,
    'choices': (choice(1, 5), choice(4, 2), choice(16, 0)),
    'record': {'cost_ratio': 0.1},
  }
  return Calibration(**fields | changes)
