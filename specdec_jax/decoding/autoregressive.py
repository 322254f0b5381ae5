"""The plain loop: one call of the target per token.

It is the baseline that every speed-up is measured against, so it is as fast as
this library can make it. The tests compare other outputs with its output.
"""

import jax
import jax.numpy as jnp

from specdec_jax import probs
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.models.base import LanguageModel, Params, read_prompt, start_id


def start(
  target: LanguageModel, params: Params, request: Request
) -> DecodeState:
  """Reads the inputs and returns the state before the first token."""
  cache = read_prompt(
    target, params, request.inputs, request.cache_slots, request.prompt
  )
  return decode_state.start(
    request, start_id(target), cache, drafter_state=None
  )


def step(
  target: LanguageModel, params: Params, request: Request, state: DecodeState
) -> DecodeState:
  """Produces one token in every running row."""
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  logits, cache = target.extend(params, cache, state.last_token[:, None])
  adjusted = decode_state.forbid_early_stops(logits, request, state)
  if request.greedy:
    tokens = probs.greedy_token(adjusted[:, 0])
  else:
    keys = decode_state.round_keys(request, state)
    rows = probs.standardise_batch(adjusted, request.sampling)[:, 0]
    tokens = jax.vmap(probs.sample)(rows, jax.vmap(probs.resample_key)(keys))
  one = jnp.ones_like(tokens)
  running = state.running.astype(jnp.int32)
  state = decode_state.append(request, state, tokens[:, None], one, logits)
  num_rounds = state.stats.num_rounds + running
  return state.replace(
    target_cache=cache,
    stats=state.stats.replace(
      num_rounds=num_rounds, histogram=num_rounds[:, None]
    ),
  )
