"""A network that learns to copy within seconds, and its pairs."""

import numpy as np

import small_vocabulary
from specdec_jax.training import data

MODEL = small_vocabulary.network(1, 16)
CONFIG = MODEL.config


def copy_pairs(number=400, seed=0):
  """Targets repeat their sources: something to learn in seconds."""
  rng = np.random.default_rng(seed)
  sizes = rng.integers(1, 6, number)
  return [
    (row, row) for row in (rng.integers(3, 16, n).tolist() for n in sizes)
  ]


def packing(**changes):
  defaults = dict(buckets=(6, 12), tokens_per_batch=192, weights=(0.5, 0.5))
  return data.PackingConfig(**(defaults | changes))


class Killed(Exception):
  pass
