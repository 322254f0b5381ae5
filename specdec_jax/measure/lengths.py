"""The rule of a draft whose length adapts, from what a calibration measures.

A drafter's confidence says how likely its next proposal is accepted: a table of
confidence bins. Costs say what a proposal must be worth. Both together are a
`LengthRule`; what it should gain is computed over the outputs that were
measured.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.decoding import fallback
from specdec_jax.drafters.length import unsure_below
from specdec_jax.measure.acceptance import Output, ratio
from specdec_jax.types import LengthRule

_BINS = 10  # of confidence, with equally many tokens
LEAST_GAMMA = 3  # that a calibration must have measured
_LONGEST = 15  # proposals at most
_TINY = 1e-9
# What drafts that may end early must gain over those of a fixed gamma, because
# deciding takes time, and what was measured is not exact.
_LEAST_GAIN = 1.02
_TURNS = 4  # to find the rate that a rule itself reaches


@dataclasses.dataclass(frozen=True)
class Confidence:
  """Confidence -> acceptance, as it was measured.

  Attributes:
    bounds: between bins, ascending.
    acceptance: acceptance probability in each bin, one more than `bounds`.
    errors: its standard errors, over texts; None where one text had them all.
    tokens: how many were measured in each.
    overall: the acceptance probability of all.
  """

  bounds: tuple[float, ...]
  acceptance: tuple[float, ...]
  errors: tuple[float | None, ...]
  tokens: tuple[int, ...]
  overall: float


@dataclasses.dataclass(frozen=True)
class Prices:
  """What a proposal must be worth; see `LengthRule` for the first two.

  Attributes:
    worth: the price of each proposal in the target's call.
    worth_asking: the price with that of asking the drafter.
    expected_speed_up: what the rule with these prices should gain.
    acceptance: accepted / judged proposals of that rule.
  """

  worth: tuple[float, ...]
  worth_asking: tuple[float, ...]
  expected_speed_up: float
  acceptance: float


class Costs(NamedTuple):
  """Times in calls of the target over one token.

  Attributes:
    cost_ratio: c.
    calls: float[G + 1], of the round's call with 0..G proposals, and of what a
      round takes besides.
  """

  cost_ratio: float
  calls: np.ndarray


class Expected(NamedTuple):
  """Expected sums over rounds, from every place that a round may begin at."""

  tokens: float
  time: float
  tested: float
  accepted: float


def table(outputs: Sequence[Output]) -> Confidence:
  """The table of at least two outputs' tokens."""
  betas, sure, texts = _joined(outputs)
  inner = np.quantile(sure, np.arange(1, _BINS) / _BINS)
  bounds = np.unique(inner.astype(np.float32))
  bounds = bounds[bounds > sure.min()]  # no bin is empty
  chosen = np.searchsorted(bounds, sure, side='right')
  bins = range(len(bounds) + 1)
  rates = []
  for one in bins:
    inside = chosen == one
    number = int(texts.max()) + 1
    hits = np.bincount(texts[inside], betas[inside], number)
    tries = np.bincount(texts[inside], minlength=number)
    rates.append(ratio(list(hits), list(tries)))
  return Confidence(
    bounds=tuple(bounds.tolist()),
    acceptance=tuple(rate.mean for rate in rates),
    errors=tuple(rate.standard_error for rate in rates),
    tokens=tuple(rate.num_tokens for rate in rates),
    overall=float(betas.mean()),
  )


def rule_of(found: Confidence, prices: Prices) -> LengthRule:
  """The rule of a table and of prices."""
  made: Any = LengthRule  # of NumPy arrays, which a call moves to the device
  rule: LengthRule = made(
    confidences=np.asarray(found.bounds, np.float32),
    acceptance=np.asarray(found.acceptance, np.float32),
    worth=np.asarray(prices.worth, np.float32),
    worth_asking=np.asarray(prices.worth_asking, np.float32),
    expected=np.float32(found.overall),
  )
  return rule


def best_prices(
  found: Confidence,
  outputs: Sequence[Output],
  cost_ratio: float,
  call_cost: Sequence[float],
  round_cost: float = 0.0,
  adapting_cost: float = 0.0,
) -> Prices:
  """The prices that gain most over the outputs.

  A proposal is worth its costs if they would not buy as many tokens elsewhere:
  at the rate, in tokens a unit of time, that the rule itself reaches. Of what a
  call with a draft takes more than one without, each proposal pays its share,
  or those behind the first one pay nothing. Prices of 0 are those of a fixed
  gamma, whose loop has less to do: they are taken unless others gain more.

  Args:
    found: the table.
    outputs: what it was made of.
    cost_ratio: c.
    call_cost: v(1), v(2), ..., at least v(4).
    round_cost: what a round takes besides its calls.
    adapting_cost: what one whose drafts adapt takes more than that.
  """
  if len(call_cost) <= LEAST_GAMMA:
    raise ValueError(
      f'best_prices needs v(1) to v({LEAST_GAMMA + 1}), got {len(call_cost)}'
      ' numbers: calibrate with max_gamma 3 at least.'
    )
  tried, fixed = [], []
  for most in range(1, min(_LONGEST, len(call_cost) - 1) + 1):
    calls = costs_of_calls(call_cost, most) + round_cost
    costs = Costs(cost_ratio, calls + adapting_cost)
    shared = np.diff(_convex(calls))
    behind = np.append(shared[:1], np.diff(_convex(calls[1:])))
    for more in (shared, behind):
      rate = 1.0
      for _ in range(_TURNS):
        prices = _valued(found, _prices(costs, more, rate), outputs, costs)
        rate = prices.expected_speed_up
      tried.append(prices)
    nothing = (0.0,) * most
    free = Prices(nothing, nothing, 0.0, 0.0)
    costs = Costs(cost_ratio, calls)
    fixed.append(_valued(found, free, outputs, costs))
  best, best_fixed = (
    max(these, key=lambda prices: prices.expected_speed_up)
    for these in (tried, fixed)
  )
  least = _LEAST_GAIN * best_fixed.expected_speed_up
  return best if best.expected_speed_up > least else best_fixed


def _valued(
  found: Confidence, prices: Prices, outputs: Sequence[Output], costs: Costs
) -> Prices:
  """The prices, with what their rule should gain over the outputs."""
  sums = expected(rule_of(found, prices), outputs, costs)
  return dataclasses.replace(
    prices,
    expected_speed_up=sums.tokens / sums.time,
    acceptance=sums.accepted / max(sums.tested, _TINY),
  )


def costs_of_calls(call_cost: Sequence[float], most: int) -> np.ndarray:
  """float[most + 1], the round's call with 0..most proposals, on this device.

  Args:
    call_cost: v(1), v(2), ..., at least v(most + 1).
    most: proposals at most, of a draft that may end early.
  """
  sizes = fallback.widths(most, adapts=True, rests=False)
  return np.asarray([call_cost[size - 1] for size in sizes], np.float64)


def _prices(costs: Costs, more: np.ndarray, rate: float) -> Prices:
  """What a unit of time is worth, times what each proposal takes.

  Args:
    costs: of a round.
    more: float[G], what each proposal adds to its call.
    rate: tokens a unit of time.
  """
  asking = costs.cost_ratio + more
  return Prices(
    tuple((rate * more).tolist()), tuple((rate * asking).tolist()), rate, 0.0
  )


def _convex(values: np.ndarray) -> np.ndarray:
  """The largest convex sequence below `values`, without a fall.

  A call costs the same for all lengths up to its width: a draft must not end
  before a step for what is cheap behind it.
  """
  values = np.maximum.accumulate(values)
  hull = values.copy()
  place = 0
  while place < len(values) - 1:
    slopes = (values[place + 1 :] - values[place]) / np.arange(
      1, len(values) - place
    )
    step = int(np.argmin(slopes)) + 1
    line = values[place] + slopes[step - 1] * np.arange(step + 1)
    hull[place : place + step + 1] = line
    place += step
  return hull


def stops_below(acceptance: float, most: int, found: Confidence) -> LengthRule:
  """The plain rule to compare with: stop where less acceptance is expected.

  Args:
    acceptance: such as .4.
    most: proposals at most.
    found: says which acceptance a confidence has.
  """
  rule = unsure_below(0.0, most)
  kept: Any = (np.asarray(found.acceptance) >= acceptance).astype(np.float32)
  bounds: Any = np.asarray(found.bounds, np.float32)
  return dataclasses.replace(rule, confidences=bounds, acceptance=kept)


def expected(
  rule: LengthRule, outputs: Sequence[Output], costs: Costs
) -> Expected:
  """What a rule should gain over outputs whose tokens were measured.

  Rounds begin where the rounds before them end, each place by its probability:
  a round with n accepted proposals at place t ends at t + n + 1. The proposals
  are taken to be those tokens, as in Corollary 3.6.
  """
  total = np.zeros(4)
  for output in outputs:
    total += _of_output(rule, output.betas, output.confidences, costs)
  return Expected(*total.tolist())


def acceptance_at(
  gamma: int, outputs: Sequence[Output], otherwise: float
) -> float:
  """Accepted / judged proposals of rounds of a fixed gamma.

  Behind a rejection nothing is judged, so that this is not alpha where tokens
  that are hard to guess follow one another.

  Args:
    gamma: proposals per round.
    outputs: what was measured; may be empty.
    otherwise: what it is if nothing would be judged.
  """
  costs = Costs(0.0, np.ones(gamma + 1))
  found = expected(unsure_below(0.0, gamma), outputs, costs)
  return found.accepted / found.tested if found.tested else otherwise


def _of_output(rule, betas, sure, costs: Costs) -> np.ndarray:
  count, most = len(betas), rule.most
  believed = np.asarray(rule.acceptance)[
    np.searchsorted(np.asarray(rule.confidences), sure, side='right')
  ]
  starts = np.arange(count)
  room = np.minimum(most, count - starts - 1)  # the last is the target's own
  asks = room > 0
  survival, true = np.ones(count), np.ones(count)
  length, asked = np.zeros(count, int), np.ones(count)
  tested, accepted = np.zeros(count), np.zeros(count)
  ends = np.zeros((count, most + 1))  # probability of n accepted proposals
  for index in range(most):
    place = np.minimum(starts + index, count - 1)
    survival = survival * believed[place]
    makes = asks & (survival > rule.worth[index])
    tested += makes * true
    ends[:, index] = np.where(makes, true * (1 - betas[place]), 0.0)
    true = np.where(makes, true * betas[place], true)
    accepted += makes * true
    length += makes
    after = min(index + 1, most - 1)
    asks = makes & (index + 1 < room)
    asks &= survival * float(rule.expected) > rule.worth_asking[after]
    asked += asks
  ends[starts, length] += true
  visits = np.zeros(count + most + 1)
  visits[0] = 1.0
  for start in range(count):
    visits[start + 1 : start + most + 2] += visits[start] * ends[start]
  time = costs.cost_ratio * asked + costs.calls[length]
  sums = np.stack([accepted + 1, time, tested, accepted])
  return sums @ visits[:count]


def _joined(
  outputs: Sequence[Output],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Betas, confidences and numbers of texts of all tokens."""
  numbers: dict[Any, int] = {}
  texts = [
    np.full(len(one.betas), numbers.setdefault(one.text, len(numbers)))
    for one in outputs
  ]
  return (
    np.concatenate([one.betas for one in outputs]),
    np.concatenate([one.confidences for one in outputs]),
    np.concatenate(texts),
  )
