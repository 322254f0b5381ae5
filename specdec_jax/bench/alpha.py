"""The acceptance rate of a pair: Corollary 3.6 on tokens of the target's own.

The target decodes; at each step the drafter proposes one token for the same
place, and the overlap of both distributions, sum of min, is the chance that it
would have been accepted (beta). Their mean is alpha. No proposal is ever used,
so that any drafter is measured over exactly the same prefixes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax import analysis, probs
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.base import LanguageModel
from specdec_jax.speculative import near_argmax


@struct.dataclass
class Overlap:
  """A plain decode and what its drafter would have been worth.

  Attributes:
    state: the decode.
    betas: float32[B, L], acceptance probability at each produced token; without
      meaning behind a row's end.
  """

  state: DecodeState
  betas: jax.Array


def decode(
  target: LanguageModel, drafter: Drafter, params: PairParams, request: Request
) -> Overlap:
  """Decodes plainly and records beta at every token.

  Args:
    target: whose tokens they are.
    drafter: any; it is asked for one token a step.
    params: of both.
    request: with gamma 1 and no prompt.
  """
  state = speculative.start(target, drafter, params, request)
  batch = request.inputs.shape[0]
  betas = jnp.zeros((batch, request.slots))

  def body(carry):
    return _step(target, drafter, params, request, carry)

  return lax.while_loop(
    lambda carry: jnp.any(carry.state.running), body, Overlap(state, betas)
  )


def _step(target, drafter, params, request, carry: Overlap) -> Overlap:
  state = carry.state
  keys = decode_state.round_keys(request, state)
  context = speculative.context_of(
    request, state.tokens, state.visible_length, keys
  )
  draft, drafter_state = drafter.propose(
    params.draft, state.drafter_state, context
  )
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  logits, cache = target.extend(params.target, cache, state.last_token[:, None])
  adjusted = decode_state.forbid_early_stops(logits, request, state)
  target_probs = probs.standardise_batch(adjusted, request.sampling)[:, 0]
  beta = _beta(request, draft, adjusted, target_probs)
  # A drafter that has nothing to propose has nothing accepted.
  beta = jnp.where(draft.length > 0, beta, 0.0)

  tokens = jax.vmap(probs.sample)(
    target_probs, jax.vmap(probs.resample_key)(keys)
  )
  index = jnp.minimum(state.visible_length - 1, request.slots - 1)
  rows = jnp.arange(beta.shape[0])
  kept = jnp.where(state.running, beta, carry.betas[rows, index])
  betas = carry.betas.at[rows, index].set(kept)

  one = jnp.ones_like(tokens)
  running = state.running.astype(jnp.int32)
  after = decode_state.append(request, state, tokens[:, None], one, logits)
  stats = state.stats
  after = after.replace(
    target_cache=cache,
    drafter_state=drafter.commit(drafter_state, after.visible_length),
    stats=stats.replace(num_rounds=stats.num_rounds + running),
  )
  return Overlap(after, betas)


def _beta(request, draft, logits, target_probs):
  """Acceptance probability of each row's first proposal, float32[B]."""
  proposed = draft.tokens[:, :1]
  lenience = 1.0 if request.lenience is None else request.lenience
  if draft.probs is None:
    beta = jnp.take_along_axis(target_probs, proposed, axis=1)[:, 0]
    beta = jnp.minimum(beta / lenience, 1.0)
  else:
    rows = draft.probs[:, 0]
    beta = analysis.lenient_acceptance_prob(target_probs, rows, lenience)
  if request.lenience is None:
    return beta
  near = near_argmax(proposed, logits, request.lenience)[:, 0]
  return jnp.where(request.sampling.temperature == 0, near, beta)


@dataclasses.dataclass(frozen=True)
class Rate:
  """An acceptance rate as it was measured.

  Attributes:
    alpha: the mean.
    standard_error: of it, with whole outputs as the units that are
      independent: tokens of one output are not.
    num_tokens: behind it.
    num_outputs: behind it.
  """

  alpha: float
  standard_error: float
  num_tokens: int
  num_outputs: int


def ratio(hits: Sequence[float], tries: Sequence[float]) -> Rate:
  """Returns sum(hits) / sum(tries), one entry an output, and its error.

  The error is that of a ratio of sums over independent outputs: the residuals
  hits - alpha * tries (Cochran, Sampling Techniques, Eq. 6.13).

  Raises:
    ValueError: there is nothing to divide by.
  """
  tops = np.asarray(hits, np.float64)
  bottoms = np.asarray(tries, np.float64)
  total = bottoms.sum()
  if not total > 0:
    raise ValueError(
      'No acceptance rate without tokens: expected at least one output that'
      f' is not empty, got {len(bottoms)} outputs of {total:.0f} tokens.'
    )
  alpha = tops.sum() / total
  count = len(bottoms)
  spread = np.sum((tops - alpha * bottoms) ** 2)
  error = np.sqrt(spread * count / max(count - 1, 1)) / total
  return Rate(float(alpha), float(error), int(total), count)


def of_outputs(
  target: LanguageModel,
  drafter: Drafter,
  params: PairParams,
  requests: Iterator[Request],
  num_tokens: int,
  advance: Callable[[int], None] = lambda count: None,
) -> Rate:
  """Alpha over at least `num_tokens` tokens that the target generates.

  Args:
    target: as for `decode`.
    drafter: as for `decode`.
    params: as for `decode`.
    requests: batches of one shape, until enough was generated or they end;
      rows with `max_length` 0 only fill up a batch.
    num_tokens: after which no batch is begun.
    advance: called with the tokens of each batch, for a progress bar.

  Raises:
    ValueError: nothing was generated, or the target's logits were invalid.
  """
  program: Any = jax.jit(functools.partial(decode, target, drafter))
  hits: list[float] = []
  tries: list[int] = []
  for request in requests:
    overlap = jax.device_get(program(params, request))
    lengths = overlap.state.length - 1
    for row, length in enumerate(lengths):
      if length == 0:
        continue
      betas = overlap.betas[row, :length]
      if not np.all(np.isfinite(betas)):
        raise ValueError(
          'An acceptance probability is not finite: the logits of the target'
          ' or of the drafter are NaN or infinite. Check both checkpoints.'
        )
      hits.append(float(betas.sum()))
      tries.append(int(length))
    advance(int(lengths.sum()))
    if sum(tries) >= num_tokens:
      break
  return ratio(hits, tries)
