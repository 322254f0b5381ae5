"""Requests of toy models, as the loops take them; a compiler in a hurry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.state import Request

# Most of a toy's time is the compiler's; the code need not be quick.
quick_jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


@jax.jit
def keys_of(key, ids):
  """Random numbers of each example."""
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)


def request_of(
  rows, gamma, sampling, slots, *, inputs, seed, stop_ids=(-1,), **changes
):
  """All rows with the same inputs, each with random numbers of its own."""
  request = Request(
    # Made by NumPy, which compiles nothing for each shape.
    inputs=jnp.asarray(np.tile(np.array(inputs, np.int32), (rows, 1))),
    keys=keys_of(jax.random.key(seed), np.arange(rows, dtype=np.int32)),
    sampling=sampling.params(rows),
    stop_ids=jnp.asarray(np.array(stop_ids, np.int32)),
    min_length=jnp.asarray(np.zeros(rows, np.int32)),
    max_length=jnp.asarray(np.full(rows, slots, np.int32)),
    slots=slots,
    gamma=gamma,
    greedy=sampling.greedy,
    with_log_probs=False,
  )
  return request.replace(**changes)


def read(network, params, cache, tokens, tree=None):
  """Logits of the tokens that follow each of int32[B, S], and the cache."""
  features, cache = network.extend(params, cache, tokens, tree)
  return network.head(params, features), cache
