"""The small pytrees that all rooms exchange: `Draft`, `Verdict`, and results.

Dimension key, used in every docstring of the library:
  B batch, S tokens in a call, T cache slots, E encoder positions, G gamma,
  V vocabulary, H heads, D head size, M model size, L output tokens.
"""

import dataclasses
import enum
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specdec_jax.checks.fields import Bound
from specdec_jax.tree_shape import TreeShape

# Arrays of a device, or of the host: a program's call moves them together.
Array: TypeAlias = jax.Array | np.ndarray
# Numbers that a field may be, see `checks.fields.check_types`: int32 holds the
# whole ones, and float32 the others, with products of a few of them.
_MOST, _MOST_FLOAT = np.iinfo(np.int32).max, 1e9
Count = Annotated[int, Bound(0, _MOST)]
Positive = Annotated[int, Bound(1, _MOST)]
Amount = Annotated[float, Bound(0, _MOST_FLOAT)]
Above0 = Annotated[float, Bound(0, _MOST_FLOAT, is_open=True)]


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
    tree: static; None is a chain. Else the proposals branch, G is the number N
      of nodes of the tree, and `length` the number of levels that were
      proposed. A row of `probs` is what its node was drawn from given its
      ancestors and its elder siblings, see `verify_tree`.

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
  """When a draft ends, see `drafters.length`; other values do not recompile.

  Times are in calls of the target over one token, and what they are worth is
  the number of tokens that would be decoded meanwhile.

  Attributes:
    worth: float32[G], x_i is proposed if the probability that it is kept is
      above the i-th: what a longer call of the target costs.
    worth_asking: float32[G], the drafter is asked for x_i if the probability
      that it will be kept is expected to be above the i-th: what the drafter
      and the target cost. x_1 is always asked for.
  """

  worth: Array
  worth_asking: Array

  @property
  def most(self) -> int:
    """G, proposals of a draft at most."""
    return self.worth.shape[0]

  def to_json(self) -> dict[str, Any]:
    """Its numbers, as JSON can hold them."""
    return {name: np.asarray(one).tolist() for name, one in vars(self).items()}


@struct.dataclass
class Verdict:
  """What verification decides about a `Draft` (Algorithm 1's n and t).

  Attributes:
    num_accepted: int32[B], the leading proposals kept, <= `Draft.length`.
    next_token: int32[B], the token that follows them: resampled from the
      residual after a rejection, sampled from the target after a fully
      accepted draft.
    path: int32[B, D], of a tree of D levels the nodes that are kept, from the
      first on; meaningless past `num_accepted`. None of a chain.
    num_passed: int32[B], of a draft judged as a whole: the leading proposals
      that pass when each is judged by itself; None is `num_accepted`.

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
    RUNNING: it has not stopped.
    STOP: one of the stop ids was produced.
    LENGTH: its own max_length was reached; also of no text, or cancelled.
    STOP_STRING: the caller saw one of its stop strings.
    INVALID: the target's logits were NaN, infinite or all masked.

  Examples:
    >>> sd.FinishReason.STOP.name, sd.FinishReason(2).name
    ('STOP', 'LENGTH')
  """

  RUNNING = 0
  STOP = 1
  LENGTH = 2
  STOP_STRING = 3
  INVALID = 4


@struct.dataclass
class DecodeStats:
  """Counts of one decode; every field has one entry per row.

  Attributes:
    num_rounds: int32[B], calls of the target while the row was unfinished.
    num_tested: int32[B], proposals that Algorithm 1 judges: those that pass
      and, in each round, the first that fails if there was any.
    num_accepted: int32[B], proposals accepted.
    histogram: int32[B, G + 1], how many rounds accepted 0, 1, ..., G proposals.
    num_passed: int32[B], proposals that pass Algorithm 1's test; more than
      `num_accepted` only where drafts are judged as a whole. Either way
      `num_passed` / `num_tested` estimates the acceptance rate.
    fallback_rounds: int32[B], rounds in which the drafter rested.
    num_drafted: int32[B], proposals of all drafts, cut to a row's budget.

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
    """The counts before the first round, of B rows and drafts of G tokens."""
    names = [field.name for field in dataclasses.fields(cls)]
    zeros = dict.fromkeys(names, jnp.zeros((batch,), jnp.int32))
    return cls(
      **zeros | {'histogram': jnp.zeros((batch, gamma + 1), jnp.int32)}
    )

  def after_round(
    self, running: jax.Array, length: jax.Array, verdict: Verdict
  ) -> 'DecodeStats':
    """The counts after a speculative round; a finished row counts nothing.

    Args:
      running: bool[B], the rows that were unfinished before the round.
      length: int32[B], proposals of the round.
      verdict: which of them were accepted.
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
    stats: the counts.
    scores: float32[B], of beams only: what they are sorted by.

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
