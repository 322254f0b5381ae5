"""Beam searches as programs, and drafters near a target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.loop import Loop
from specdec_jax.drafters.small_model import small_model
from specdec_jax.request import BeamSettings


@functools.cache
def program(target, drafter):
  """One for all values of its arguments."""
  loop = Loop(target, drafter and small_model(drafter))
  return jax.jit(lambda *args: loop.decode(*args))


def near(params, noise):
  """Parameters that are nearly the same."""
  rng = np.random.default_rng(3)

  def moved(leaf):
    drawn = rng.standard_normal(leaf.shape).astype(np.float32)
    return leaf + noise * drawn * np.std(leaf)

  return jax.tree.map(moved, params)


def settings_of(width, draft_width, penalty, **others):
  return BeamSettings(jnp.float32(penalty), width, draft_width, **others)
