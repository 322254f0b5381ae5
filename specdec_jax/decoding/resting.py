"""When the drafter rests: a drafter that is mostly wrong costs little.

Each row keeps an account, in calls of the target over one token: what its
rounds cost, less the tokens that they made, which plain decoding would have
made at one call each. Once the loss is above a limit the row's drafter rests:
its rounds have no draft. After a while a round probes; if that loses again, the
next rest is four times as long. How long the first one is follows from the
costs: so long that a drafter that is always wrong takes a few hundredths of the
time of any output of 128 tokens and more, its catching up counted.

Decided from counts and known costs, never from a clock: a run that is started
again, or that several processes share, decides alike, and a row does not depend
on its neighbours. The drafter's work is left out while all running rows rest,
and its cache then catches up by calls over several tokens each.
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
from specdec_jax.types import DecodeStats, Draft, Verdict

# Calls of the target over one token. With 1.5 a drafter that is right .7 of the
# time would rest at once in one of eleven outputs, for nothing.
_PATIENCE = 2.0
_FIRST_REST = 32  # rounds, at least
_GROWTH = 4  # of a rest, after a probe in vain
_MOST_REST = 1 << 20  # rounds: in effect for ever
_CREDIT = 4.0  # the most gains that are saved up, in multiples of patience
# What a drafter that is always wrong may take of an output's time; a hundredth
# more is left for its reading of the input.
_MOST_LOST = 0.04
LEAST_OUTPUT = 128  # tokens, from which on that holds


def of_costs(
  cost_ratio: float, call_cost: Callable[[int], float], gamma: int, adapts: bool
) -> RestPolicy:
  """Returns the policy of a pair with known costs.

  Args:
    cost_ratio: c.
    call_cost: m -> v(m), for m up to gamma + 1.
    gamma: proposals of a draft at most.
    adapts: whether a draft may have fewer.
  """
  calls = [call_cost(width) for width in widths(gamma, adapts, rests=True)]
  # Even a draft that ends before its first token has asked for that.
  asked = [max(i, 1) if adapts else gamma for i in range(gamma + 1)]
  costs: Any = np.asarray(calls, np.float32)
  costs += np.float32(cost_ratio) * np.asarray(asked, np.float32)
  first_rest = np.asarray(_enough_rest(costs, cost_ratio), np.int32)
  return RestPolicy(costs, np.asarray(_PATIENCE, np.float32), first_rest)


def _enough_rest(costs: np.ndarray, cost_ratio: float) -> int:
  """The least first rest with which a drafter may always be wrong.

  The longest outputs that are looked at have several probes; from then on the
  share falls, or a rest is as good as for ever. The calls that catch up make no
  logits and are taken to cost two calls of the drafter each.
  """
  loss = float(np.max(costs)) - 1  # of a round, the dearest

  def is_enough(rest):
    tokens = int(_PATIENCE // loss) + 1  # rounds before the first rest
    lost = loss * tokens
    while lost <= _MOST_LOST * max(tokens, LEAST_OUTPUT):
      lost += loss + 2 * cost_ratio * catch_up_calls(rest)  # of a probe in vain
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
  """Returns `Engine.fallback` as JSON can hold it."""
  if isinstance(policy, bool):
    return policy
  return np.asarray(policy.costs).tolist()


def guessed(gamma: int, adapts: bool) -> RestPolicy:
  """Returns the policy of guessed costs, without a calibration.

  A call of the drafter takes a fifth of one of the target; a token more in a
  call a tenth of a call on a CPU, and nothing elsewhere.
  """
  slope = 0.1 if backend.kind() == 'cpu' else 0.0
  return of_costs(0.2, lambda size: 1 + slope * (size - 1), gamma, adapts)


def widths(gamma: int, adapts: bool, rests: bool) -> list[int]:
  """Tokens of the target's call in a round with 0..gamma proposals.

  Where a longer call takes longer, it is one of a few widths, each of which is
  compiled: a token alone where nothing is proposed, and 2, 4, 8, 16, ... if
  drafts end early. On a CPU a call over two tokens took .77 to .98 of the time
  of one over four, and that width made an adaptive length up to a tenth
  quicker.
  """
  most = gamma + 1
  if backend.kind() != 'cpu' or not (adapts or rests):
    return [most] * most
  if not adapts:
    return [1, *[most] * gamma]
  powers = [1 << i.bit_length() for i in range(1, most)]
  return [1, *(min(width, most) for width in powers)]


@struct.dataclass
class Rests:
  """The accounts of the rows.

  Attributes:
    loss: float32[B].
    count: int32[B], rests in a row, without a gain between them.
    left: int32[B], rounds that the drafter still rests.
  """

  loss: jax.Array
  count: jax.Array
  left: jax.Array

  @classmethod
  def none(cls, batch: int) -> 'Rests':
    """The accounts before the first round."""
    zeros = jnp.zeros((batch,), jnp.int32)
    return cls(zeros.astype(jnp.float32), zeros, zeros)


def after_round(
  policy: RestPolicy | None,
  rests: Rests | None,
  stats: DecodeStats,
  running: jax.Array,
  draft: Draft,
  verdict: Verdict,
) -> tuple[Rests | None, DecodeStats]:
  """The accounts and the counts after a round.

  Args:
    policy: the costs; None leaves the accounts as they are.
    rests: the accounts before; None where no drafter ever rests.
    stats: the counts before.
    running: bool[B], rows that were unfinished before the round.
    draft: the proposals of the round.
    verdict: which of them were accepted.
  """
  stats = stats.after_round(running, draft.length, verdict)
  if policy is None or rests is None:
    return rests, stats
  limit = policy.patience
  rested = rests.left > 0
  lost = policy.costs[draft.length] - (verdict.num_accepted + 1)
  loss = jnp.where(rested, rests.loss, rests.loss + lost)
  begins = ~rested & (loss > limit)
  rest = jnp.float32(policy.first_rest) * jnp.float32(_GROWTH) ** rests.count
  rest = jnp.minimum(rest, _MOST_REST).astype(jnp.int32)
  count = jnp.where(loss <= 0, 0, rests.count + begins)
  after = Rests(
    # At the limit: a probe that loses is followed by the next rest.
    loss=jnp.clip(loss, -_CREDIT * limit, limit),
    count=count,
    left=jnp.where(begins, rest, jnp.maximum(rests.left - 1, 0)),
  )
  fallback_rounds = stats.fallback_rounds + (running & rested)
  return after, stats.replace(fallback_rounds=fallback_rounds)
