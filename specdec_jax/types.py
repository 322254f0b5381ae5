"""The small pytrees that all rooms exchange: `Draft`, `Verdict`, and results.

Dimension key, used in every docstring of the library:
  B batch, S tokens in a call, T cache slots, E encoder positions, G gamma,
  V vocabulary, H heads, D head size, M model size, L output tokens.
"""

import enum
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specdec_jax.checks.fields import Bound
from specdec_jax.tree_shape import TreeShape

# Arrays of a device or of the host; calling a program moves all of them.
Array: TypeAlias = jax.Array | np.ndarray
# Types of fields with a range, which `checks.fields.check_types` checks. int32
# holds the integers; float32 holds the floats, and products of a few of them.
_MOST, _MOST_FLOAT = np.iinfo(np.int32).max, 1e9
Count = Annotated[int, Bound(0, _MOST)]
Positive = Annotated[int, Bound(1, _MOST)]
Minutes = Annotated[float, Bound(0, 7 * 24 * 60.0)]
Amount = Annotated[float, Bound(0, _MOST_FLOAT)]
Above0 = Annotated[float, Bound(0, _MOST_FLOAT, is_open=True)]


@struct.dataclass
class Draft:
  """The proposals of a drafter: up to gamma tokens per row.

  **The output is lossless** under two conditions, which suffice: each x_i was
  drawn from its row of `probs`; and whether position i is proposed depends only
  on x_1..x_{i-1} and the distributions up to i, never on x_i itself. So a
  drafter may end its draft before it draws a token, if it is unsure, or after a
  token, for example after a stop id, which stays in the draft. It must not draw
  a token and then drop it. An example: let p be (.9, .1) and q (.5, .5). If the
  drafter drops every 1 that it draws, token 0 is drawn and accepted half of the
  time, and in the other half the target draws by itself: token 0 has
  probability .5 + .5 * .9 = .95 instead of .9.

  Attributes:
    tokens: int32[B, G], the proposals x_1..x_gamma of Algorithm 1.
    probs: float32[B, G, V], the standardised distribution that each proposal
      was sampled from; None means one-hot at `tokens` (a deterministic
      drafter, or greedy decoding).
    length: int32[B], the number of positions that are really proposed, by the
      conditions above; later positions are neither verified nor counted.
    tree: static; None for a chain. In a tree, G is the number N of its nodes,
      and `length` the number of proposed levels. A row of `probs` is the
      distribution of its node given its ancestors and its elder siblings, see
      `verify_tree`.

  Examples:
    >>> import jax.numpy as jnp
    >>> draft = sd.Draft(jnp.array([[5, 6, 7]]), None, jnp.array([2]))
    >>> draft.length.tolist()  # 5 and 6 are proposed
    [2]
  """

  tokens: jax.Array
  probs: jax.Array | None
  length: jax.Array
  tree: TreeShape | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class LengthRule:
  """The thresholds that end a draft, see `drafters.small_model`.

  A threshold is the cost of a proposal, as the number of tokens that could be
  decoded in its time. Changing the values does not recompile.

  Attributes:
    worth: float32[G], x_i is proposed if its probability to be accepted is
      above the i-th entry, the cost of one more token in the target's call.
    worth_asking: float32[G], the drafter is asked for x_i if its expected
      probability to be accepted is above the i-th entry, the cost of a call of
      the drafter and of that token. The drafter is always asked for x_1.
  """

  worth: Array
  worth_asking: Array

  @property
  def most(self) -> int:
    """G, the most proposals of a draft."""
    return self.worth.shape[0]

  def to_json(self) -> dict[str, Any]:
    """Returns the thresholds as JSON values."""
    return {name: np.asarray(x).tolist() for name, x in vars(self).items()}


@struct.dataclass
class Verdict:
  """The result of verifying a `Draft`: n and t of Algorithm 1.

  Attributes:
    num_accepted: int32[B], number of leading proposals that are kept, at most
      `Draft.length`.
    next_token: int32[B], the token that follows them: resampled from the
      residual after a rejection, sampled from the target after a fully
      accepted draft.
    path: int32[B, D], the kept nodes of a tree of D levels, from the first on;
      meaningless past `num_accepted`. None for a chain.
    num_passed: int32[B], number of leading proposals that pass when each is
      judged by itself; None if this is `num_accepted`, as it always is without
      block verification.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from specdec_jax.verify import verify
    >>> draft = sd.Draft(jnp.array([1, 2]), None, jnp.array(2))
    >>> target_probs = jax.nn.one_hot(jnp.array([1, 0, 3]), 4)
    >>> verdict = verify(draft, target_probs, jax.random.key(0))
    >>> int(verdict.num_accepted), int(verdict.next_token)
    (1, 0)
  """

  num_accepted: jax.Array
  next_token: jax.Array
  path: jax.Array | None = None
  num_passed: jax.Array | None = None


class FinishReason(enum.IntEnum):
  """The reason why a row stopped.

  Attributes:
    RUNNING: the row has not stopped.
    STOP: one of the stop ids was produced.
    LENGTH: the row reached its max_length, was cancelled, or only fills up the
      batch.
    STOP_STRING: the caller found one of the row's stop strings.
    INVALID: the target's logits were NaN, infinite or all masked.
    RULES: the row's token rules allowed no further token.

  Examples:
    >>> sd.FinishReason.STOP.name, sd.FinishReason(2).name
    ('STOP', 'LENGTH')
  """

  RUNNING = 0
  STOP = 1
  LENGTH = 2
  STOP_STRING = 3
  INVALID = 4
  RULES = 5


@struct.dataclass
class DecodeStats:
  """Counts of the decoding of a batch; every field has one entry per row.

  Attributes:
    num_rounds: int32[B], calls of the target while the row was unfinished.
    num_tested: int32[B], proposals that Algorithm 1 judges: those that pass
      and, in each round, the first that fails if there is any.
    num_accepted: int32[B], proposals that were accepted.
    histogram: int32[B, G + 1], rounds that accepted 0, 1, ..., G proposals.
    num_passed: int32[B], proposals that pass Algorithm 1's test; more than
      `num_accepted` only in block verification. `num_passed` / `num_tested`
      estimates the acceptance rate.
    fallback_rounds: int32[B], rounds in which the drafter rested.
    num_drafted: int32[B], proposals of all drafts, without those past a row's
      token limit.

  Examples:
    >>> stats = sd.DecodeStats.none(batch=2, gamma=4)
    >>> stats.histogram.shape, stats.num_accepted.tolist()
    ((2, 5), [0, 0])
  """

  num_rounds: jax.Array
  num_tested: jax.Array
  num_accepted: jax.Array
  histogram: jax.Array
  num_passed: jax.Array
  fallback_rounds: jax.Array
  num_drafted: jax.Array

  @classmethod
  def none(cls, batch: int, gamma: int) -> 'DecodeStats':
    """Returns the counts before the first round of drafts of gamma tokens."""
    zeros = jnp.zeros((batch,), jnp.int32)
    histogram = jnp.zeros((batch, gamma + 1), jnp.int32)
    return cls(zeros, zeros, zeros, histogram, zeros, zeros, zeros)

  def after_round(
    self, running: jax.Array, length: jax.Array, verdict: Verdict
  ) -> 'DecodeStats':
    """Returns the counts after a round; those of finished rows stay the same.

    Args:
      running: bool[B], the rows that were unfinished before the round.
      length: int32[B], number of proposals in the round.
      verdict: has the number of accepted proposals.
    """
    counts = running.astype(jnp.int32)
    num_accepted = verdict.num_accepted
    passed = verdict.num_passed
    passed = num_accepted if passed is None else passed
    tested = jnp.minimum(passed + 1, length)
    rounds = jax.nn.one_hot(
      num_accepted, self.histogram.shape[1], dtype=jnp.int32
    )
    return DecodeStats(
      num_rounds=self.num_rounds + counts,
      num_tested=self.num_tested + tested * counts,
      num_accepted=self.num_accepted + num_accepted * counts,
      histogram=self.histogram + rounds * counts[:, None],
      num_passed=self.num_passed + passed * counts,
      fallback_rounds=self.fallback_rounds,
      num_drafted=self.num_drafted + length * counts,
    )


@struct.dataclass
class Generation:
  """The output of a decoding loop: tokens, log-probabilities and counts.

  Attributes:
    tokens: int32[B, L], the produced tokens, a stop id included; 0 past
      `length`.
    length: int32[B], tokens produced.
    log_probs: float32[B, L], the target model's log-probability (natural
      logarithm, temperature 1, nothing filtered) of each produced token; 0
      past `length`.
    finish_reason: int32[B], a `FinishReason`.
    stats: counts of rounds and proposals.
    scores: float32[B], the scores that beams are sorted by; None without beams.

  Examples:
    >>> import jax.numpy as jnp
    >>> generation = sd.Generation(
    ...   tokens=jnp.array([[5, 6, 1, 0]]),
    ...   length=jnp.array([3]),
    ...   log_probs=jnp.array([[-0.5, -0.1, -0.2, 0.0]]),
    ...   finish_reason=jnp.array([sd.FinishReason.STOP]),
    ...   stats=sd.DecodeStats.none(batch=1, gamma=4),
    ... )
    >>> generation.tokens[0, : int(generation.length[0])].tolist()
    [5, 6, 1]
  """

  tokens: jax.Array
  length: jax.Array
  log_probs: jax.Array
  finish_reason: jax.Array
  stats: DecodeStats
  scores: jax.Array | None = None
