"""The small pytrees that all rooms exchange: `Draft`, `Verdict`, and results.

Dimension key, used in every docstring of the library:
  B batch, S tokens in a call, T cache slots, E encoder positions, G gamma,
  V vocabulary, H heads, D head size, M model size, L output tokens.
"""

import enum

import jax
from flax import struct


@struct.dataclass
class Draft:
  """What a drafter proposes: up to gamma tokens per row.

  **The output is lossless** under two conditions, which suffice: each x_i was
  drawn from its row of `probs`; and whether position i is proposed depends only
  on x_1..x_{i-1} and the distributions up to i, never on x_i itself. So a
  drafter may end its draft before it draws a token, if it is unsure, or after a
  token, for example after a stop id, which stays in the draft. It must not draw
  a token and then drop it. An example: let p be (.9, .1) and q (.5, .5). If the
  drafter drops every 1 that it draws, token 0 is drawn and accepted half of the
  time, and in the other half the target draws by itself: 0 comes with
  probability .5 + .5 * .9 = .95 instead of .9.

  Attributes:
    tokens: int32[B, G], the proposals x_1..x_gamma of Algorithm 1.
    probs: float32[B, G, V], the standardised distribution that each proposal
      was sampled from; None means one-hot at `tokens` (a deterministic
      drafter, or greedy decoding).
    length: int32[B], how many of the G positions were really proposed, by the
      rule above; later positions are neither verified nor counted.
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
  """Counts of one decode; every field has one entry per row.

  Attributes:
    num_rounds: int32[B], calls of the target while the row was unfinished.
    num_tested: int32[B], proposals that verification judged: the accepted ones
      and, in each round, the first rejected one if there was any.
    num_accepted: int32[B], proposals accepted.
    histogram: int32[B, G + 1], how many rounds accepted 0, 1, ..., G proposals.
  """

  num_rounds: jax.Array
  num_tested: jax.Array
  num_accepted: jax.Array
  histogram: jax.Array


@struct.dataclass
class Generation:
  """What a decoding loop returns.

  Attributes:
    tokens: int32[B, L], the produced tokens, a stop id included; 0 past
      `length`.
    length: int32[B], tokens produced.
    log_probs: float32[B, L], the target model's log-probability (natural
      logarithm, temperature 1, nothing filtered) of each produced token; 0
      past `length`.
    finish_reason: int32[B], a `FinishReason`.
    stats: the counts.
    scores: float32[B], of beams only: what they are sorted by.
  """

  tokens: jax.Array
  length: jax.Array
  log_probs: jax.Array
  finish_reason: jax.Array
  stats: DecodeStats
  scores: jax.Array | None = None
