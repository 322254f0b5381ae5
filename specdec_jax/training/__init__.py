"""Trains models and drafters, with optax.

`TrainRun` has the settings of training or distillation, and `train` runs it.
`distil` makes a drafter from texts alone and measures its best gamma. The
module `ngram` fits n-gram tables.
"""

from specdec_jax.training.own_drafter import DistilConfig, distil
from specdec_jax.training.run import FromTarget, TrainRun, train

__all__ = ['DistilConfig', 'FromTarget', 'TrainRun', 'distil', 'train']
