"""Training by optax; what scripts/train.py runs.

`TrainRun` describes a run, `train` does it.
"""

from specdec_jax.training.config import FromTarget, Likelihood, TrainRun
from specdec_jax.training.run import train

__all__ = ['FromTarget', 'Likelihood', 'TrainRun', 'train']
