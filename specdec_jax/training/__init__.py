"""Training with optax, for scripts/train.py.

`TrainRun` describes a run, `train` runs it.
"""

from specdec_jax.training.config import FromTarget, Likelihood, TrainRun
from specdec_jax.training.run import train

__all__ = ['FromTarget', 'Likelihood', 'TrainRun', 'train']
