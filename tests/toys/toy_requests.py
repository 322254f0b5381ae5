"""Requests of toy models, as the loops take them; a compiler in a hurry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.drafters.base import Context
from specdec_jax.request import Drafting, Request

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
    prompt=jnp.asarray(np.zeros((rows, 1), np.int32)),
    prompt_length=jnp.asarray(np.ones(rows, np.int32)),
    slots=slots,
    drafting=Drafting(gamma),
    greedy=sampling.greedy,
    with_log_probs=False,
  )
  drafting = {
    name: changes.pop(name)
    for name in ('draft_rule', 'rests')
    if name in changes
  }
  return request.with_drafting(**drafting).replace(**changes)


def context_of(texts, gamma, sampling, **changes):
  """What a drafter sees of some texts, behind whose ends there is noise."""
  batch = len(texts)
  tokens = np.full((batch, 40), 9, np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  request = request_of(batch, gamma, sampling, 40, inputs=(0,), seed=5)
  return context_in(request, tokens, [len(text) for text in texts], **changes)


def context_in(request, tokens, length, **changes):
  """What a drafter sees of a request's rows that have such tokens."""
  context = Context(
    request=request,
    tokens=jnp.asarray(tokens),
    length=jnp.asarray(np.array(length, np.int32)),
    keys=request.keys,
    running=jnp.asarray(np.ones(len(tokens), bool)),
  )
  return context.replace(**changes)


def read(network, params, cache, tokens, tree=None):
  """Logits of the tokens that follow each of int32[B, S], and the cache."""
  features, cache = network.extend(params, cache, tokens, tree)
  return network.head(params, features), cache
