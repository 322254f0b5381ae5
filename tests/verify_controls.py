"""Pairs of laws and deliberately wrong residuals for the tests of `verify`.

A test of a distribution that cannot tell these from the right one is empty.
"""

import jax.numpy as jnp

import toy_models
from specdec_jax import verify
from specdec_jax.probs import SamplingConfig

_right_weights = verify.next_token_weights


def pair(seed, vocab_size, draft_config=None, target_config=None):
  """Target and draft laws of two unrelated order-2 chains."""
  configs = target_config or SamplingConfig(), draft_config or SamplingConfig()
  chains = [
    toy_models.random_markov(seed + i, vocab_size, order=2, scale=1.5)
    for i in range(2)
  ]
  return [
    chain.next_probs(config)
    for chain, config in zip(chains, configs, strict=True)
  ]


def plain_target_as_residual(draft, target_probs, num_accepted):
  """Resamples from the target itself after a rejection."""
  return target_probs[num_accepted]


def residual_of_single_tokens(draft, target_probs, num_accepted, share):
  """The residual of Algorithm 1 after a draft that was judged as a whole."""
  return _right_weights(draft, target_probs, num_accepted)


def residual_after_short_draft(draft, target_probs, num_accepted):
  """Forgets that `length` may be below G, and takes the end for a rejection."""
  gamma = jnp.int32(draft.tokens.shape[0])
  return _right_weights(draft.replace(length=gamma), target_probs, num_accepted)


def patch_weights(monkeypatch, wrong):
  """Replaces the residual inside the shipped `verify`.

  What was jitted before keeps the right one: trace anew.
  """
  monkeypatch.setattr(verify, 'next_token_weights', wrong)
