"""Lets the drafter of a row rest while it loses time, so that it costs little.

Each row has an account of its loss: the cost of its rounds, in calls of the
target over one token, less the number of their tokens, since plain decoding
makes each token with one such call. Once the loss is above a limit, the row's
drafter rests, and its rounds have no draft. After the rest, a round with a
draft is a probe; if the row loses again, the next rest is four times as long.
The first rest is so long that a drafter that is always wrong, with the calls
that catch up, takes a few hundredths of the time of any output of 128 tokens or
more.

All decisions follow from counts and given costs, never from a clock. So a run
that is started again, or that several processes share, decides in the same way,
and a row does not depend on its neighbours. The drafter does not run while all
running rows rest; its cache then catches up by calls over several tokens each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specdec_jax.drafters.small_model import catch_up_calls
from specdec_jax.models import backend
from specdec_jax.request import RestPolicy
from specdec_jax.types import Draft, Verdict

# The loss above which a drafter rests, in calls of the target over one token.
# With 1.5, a drafter that is right .7 of the time would needlessly rest at once
# in one of eleven outputs.
_PATIENCE = 2.0
_FIRST_REST = 32  # the least rounds of a first rest
# If the probe after a rest loses too, the next rest is longer by this factor.
_GROWTH = 4
# A rest of so many rounds lasts for ever in effect.
_MOST_REST = 1 << 20
# The most that a row may gain in advance, as a multiple of `_PATIENCE`.
_CREDIT = 4.0
# A drafter that is always wrong may take this share of an output's time, and a
# hundredth more to read the input.
_MOST_LOST = 0.04
# The bound holds for outputs of at least so many tokens.
LEAST_OUTPUT = 128


def of_costs(
  cost_ratio: float, call_cost: Callable[[int], float], gamma: int, adapts: bool
) -> RestPolicy:
  """Returns the policy of a pair with known costs.

  Args:
    cost_ratio: c, the time of a call of the drafter in calls of the target.
    call_cost: returns v(m), the time of a call of the target over m tokens in
      calls over one token, for m up to gamma + 1.
    gamma: the most proposals of a draft.
    adapts: whether a draft may have fewer.
  """
  calls = [call_cost(width) for width in widths(gamma, adapts, rests=True)]
  # Even a draft without a token takes a call of the drafter.
  drafted = [max(i, 1) if adapts else gamma for i in range(gamma + 1)]
  costs = np.asarray(calls, np.float32)
  costs += np.float32(cost_ratio) * np.asarray(drafted, np.float32)
  first_rest = np.asarray(_enough_rest(costs, cost_ratio), np.int32)
  return RestPolicy(costs, np.asarray(_PATIENCE, np.float32), first_rest)


def _enough_rest(costs: np.ndarray, cost_ratio: float) -> int:
  """Returns a first rest long enough for a drafter that is always wrong.

  Such a drafter then loses at most `_MOST_LOST` of the time of an output. The
  function checks outputs with up to several probes; in longer outputs the share
  of lost time falls, or the rest lasts for ever. A call that catches up makes
  no logits and is taken to cost two calls of the drafter.
  """
  loss = float(np.max(costs)) - 1  # the most that a round can lose

  def is_enough(rest):
    tokens = int(_PATIENCE // loss) + 1  # rounds before the first rest
    lost = loss * tokens
    while lost <= _MOST_LOST * max(tokens, LEAST_OUTPUT):
      lost += loss + 2 * cost_ratio * catch_up_calls(rest)  # the probe loses
      tokens += rest + 1
      rest = min(rest * _GROWTH, _MOST_REST)
      if tokens > 32 * LEAST_OUTPUT:
        return True
    return False

  rest = _FIRST_REST
  while loss > 0 and rest < _MOST_REST and not is_enough(rest):
    rest *= 2
  return rest


def to_json(policy: bool | RestPolicy) -> Any:
  """Returns the costs of a policy as JSON values; True or False as it is."""
  if isinstance(policy, bool):
    return policy
  return np.asarray(policy.costs).tolist()


def guessed(gamma: int, adapts: bool) -> RestPolicy:
  """Returns the policy of guessed costs, without a calibration.

  A call of the drafter costs a fifth of a call of the target. One more token in
  a call costs a tenth of a call on a CPU, and nothing elsewhere.
  """
  slope = 0.1 if backend.kind() == 'cpu' else 0.0
  return of_costs(0.2, lambda size: 1 + slope * (size - 1), gamma, adapts)


def widths(gamma: int, adapts: bool, rests: bool) -> list[int]:
  """Lists the tokens of the target's call for 0..gamma proposals.

  If longer calls take longer, the call has one of a few widths, each of which
  is compiled: 1 without proposals, and 2, 4, 8, 16, ... if drafts end early. On
  a CPU a call over two tokens took .77 to .98 of the time of a call over four,
  so that width 2 made drafts of adaptive length up to a tenth faster.
  """
  widest = gamma + 1
  if backend.kind() != 'cpu' or not (adapts or rests):
    return [widest] * widest
  if not adapts:
    return [1, *[widest] * gamma]
  powers = [1 << i.bit_length() for i in range(1, widest)]
  return [1, *(min(width, widest) for width in powers)]


@struct.dataclass
class Rests:
  """The accounts of the rows.

  Attributes:
    loss: float32[B], the time that speculation has lost, in calls of the target
      over one token; below 0 it is a gain.
    count: int32[B], number of rests since `loss` was last 0 or less.
    left: int32[B], number of rounds that the drafter still rests.
  """

  loss: jax.Array
  count: jax.Array
  left: jax.Array

  @classmethod
  def none(cls, batch: int) -> 'Rests':
    """Returns the accounts before the first round."""
    zeros = jnp.zeros((batch,), jnp.int32)
    return cls(zeros.astype(jnp.float32), zeros, zeros)

  def after_round(
    self, policy: RestPolicy, draft: Draft, verdict: Verdict
  ) -> 'Rests':
    """Returns the accounts after a round with this draft and verdict."""
    limit = policy.patience
    rested = self.left > 0
    lost = policy.costs[draft.length] - (verdict.num_accepted + 1)
    loss = jnp.where(rested, self.loss, self.loss + lost)
    begins = ~rested & (loss > limit)
    rest = jnp.float32(policy.first_rest) * jnp.float32(_GROWTH) ** self.count
    rest = jnp.minimum(rest, _MOST_REST).astype(jnp.int32)
    return Rests(
      # During a rest the loss stays at the limit. If the first round after the
      # rest loses time as well, another rest begins at once.
      loss=jnp.clip(loss, -_CREDIT * limit, limit),
      count=jnp.where(loss <= 0, 0, self.count + begins),
      left=jnp.where(begins, rest, jnp.maximum(self.left - 1, 0)),
    )
