"""The small pytrees that every layer speaks: `Draft`, `Verdict`, and results.

Dimension key, used in every docstring of the library:
  B batch, S tokens in a call, T cache slots, E encoder positions, G gamma,
  V vocabulary, H heads, D head size, M model size, L output tokens.
"""

import enum

import jax
from flax import struct


@struct.dataclass
class Draft:
  """What a drafter proposes: up to gamma tokens a row.

  **What keeps the output lossless**, and all that does: each x_i was drawn from
  its row of `probs`; and whether position i is proposed depends on
  x_1..x_{i-1} and the distributions up to i alone, never on x_i itself. So a
  drafter may end its draft before it draws, where it is unsure, or behind what
  it drew, as behind a stop id, which stays in it. It must not draw a token and
  then drop it: let p be (.9, .1) and q (.5, .5). A drafter that drops each 1
  leaves 0 to be accepted as often as it is drawn, .5, and the target to draw
  by itself in the other half: 0 comes with .5 + .5 * .9 = .95.

  Attributes:
    tokens: int32[B, G], the proposals x_1..x_gamma of Algorithm 1.
    probs: float32[B, G, V], the standardised distribution that each proposal
      was sampled from; None means one-hot at `tokens` (a deterministic
      drafter, or greedy decoding).
    length: int32[B], how many of the G positions were really proposed, by the
      rule above; what lies behind is neither verified nor counted.
  """

  tokens: jax.Array
  probs: jax.Array | None
  length: jax.Array


@struct.dataclass
class Verdict:
  """What verification decides about a `Draft` (Algorithm 1's n and t).

  Attributes:
    num_accepted: int32[B], the leading proposals kept, <= `Draft.length`.
    next_token: int32[B], the token that follows them: resampled from the
      residual after a rejection, sampled from the target after a fully
      accepted draft.
  """

  num_accepted: jax.Array
  next_token: jax.Array


class FinishReason(enum.IntEnum):
  """Why a row stopped; RUNNING while it has not."""

  RUNNING = 0
  STOP = 1  # one of the stop ids was produced
  LENGTH = 2  # max_decode_len tokens were produced
  STOP_STRING = 3  # the caller saw one of its stop strings
  INVALID = 4  # the target's logits were NaN, infinite or all masked


@struct.dataclass
class DecodeStats:
  """Counts of one decode; every field is a row's own.

  Attributes:
    num_rounds: int32[B], calls of the target while the row was unfinished.
    num_tested: int32[B], proposals that verification judged: the accepted
      ones and, where there was one, the first that was rejected.
    num_accepted: int32[B], proposals accepted.
    histogram: int32[B, G + 1], rounds by the number of accepted proposals.
  """

  num_rounds: jax.Array
  num_tested: jax.Array
  num_accepted: jax.Array
  histogram: jax.Array


@struct.dataclass
class Generation:
  """What a decoding loop returns.

  Attributes:
    tokens: int32[B, L], the produced tokens, a stop id included; 0 behind
      `length`.
    length: int32[B], tokens produced.
    log_probs: float32[B, L], the target model's log-probability (natural
      logarithm, temperature 1, nothing filtered) of each produced token; 0
      behind `length`.
    finish_reason: int32[B], a `FinishReason`.
    stats: the counts.
  """

  tokens: jax.Array
  length: jax.Array
  log_probs: jax.Array
  finish_reason: jax.Array
  stats: DecodeStats
