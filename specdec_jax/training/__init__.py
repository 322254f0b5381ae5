"""Training by optax; what scripts/train.py runs.

`TrainRun` describes a run, `train` does it.
"""

from specdec_jax.training.run import FromTarget, Likelihood, TrainRun, train

__all__ = ['FromTarget', 'Likelihood', 'TrainRun', 'train']
