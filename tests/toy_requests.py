"""Requests of toy models, as the loops take them; a compiler in a hurry."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.decoding.state import Request

# Most of a toy's time is the compiler's; the code need not be quick.
quick_jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


def request_of(
  rows, gamma, sampling, slots, *, inputs, seed, stop_ids=(-1,), **changes
):
  """All rows with the same inputs, each with random numbers of its own."""
  request = Request(
    inputs=jnp.tile(jnp.array(inputs, jnp.int32), (rows, 1)),
    keys=jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
      jax.random.key(seed), jnp.arange(rows)
    ),
    sampling=sampling.params(rows),
    stop_ids=jnp.array(stop_ids, jnp.int32),
    min_length=jnp.zeros((rows,), jnp.int32),
    max_length=jnp.full((rows,), slots, jnp.int32),
    slots=slots,
    gamma=gamma,
    greedy=sampling.greedy,
    with_log_probs=False,
  )
  return request.replace(**changes)
