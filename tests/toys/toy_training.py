"""A network that learns to copy within seconds, and its pairs."""

import numpy as np

from specdec_jax.models import t5
from specdec_jax.training import data

CONFIG = t5.T5Config(
  vocab_size=16,
  emb_dim=16,
  num_heads=2,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=8,
  mlp_dim=32,
)
MODEL = t5.T5(CONFIG)


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
