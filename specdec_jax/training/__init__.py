"""Trains models and drafters, with optax.

`TrainRun` describes a run of training or distillation, `train` runs it.
`distil` makes a calibrated drafter from texts alone; `ngram` fits tables.
"""

from specdec_jax.training.own_drafter import DistilConfig, distil
from specdec_jax.training.run import FromTarget, TrainRun, train

__all__ = ['DistilConfig', 'FromTarget', 'TrainRun', 'distil', 'train']
