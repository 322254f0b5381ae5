"""A calibration: the best gamma for a pair on a machine, from measurements.

Written by `specdec calibrate`, read by `specdec decode`. It holds for the
models and the device that it was made with, and for nothing else.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax import analysis
from specdec_jax.decoding import fallback
from specdec_jax.decoding.fallback import Fallback
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.monitor import Usual
from specdec_jax.engine.text_batch import Ends
from specdec_jax.files import same_run
from specdec_jax.measure import environment
from specdec_jax.measure import record as records
from specdec_jax.measure.beam_grid import BeamChoice
from specdec_jax.measure.lengths import Confidence, Prices, rule_of
from specdec_jax.measure.trees import TreeChoice
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import LengthRule

_KIND = 'calibration'
_DRAWS = 2000  # random draws for the interval of the speed-up
_INTERVAL = (2.5, 97.5)  # percent


class CalibrationError(ValueError):
  """A calibration is broken, or was made for something else."""


@dataclasses.dataclass(frozen=True)
class Measured:
  """A value and its standard error."""

  value: float
  error: float


@dataclasses.dataclass(frozen=True)
class Choice:
  """The best gamma for a number of rows, and its expected speed-up.

  Attributes:
    rows: rows that are decoded together.
    gamma: the gamma with the largest expected speed-up; 0 if none is above 1.
    expected_speed_up: expected speed-up at that gamma; 1 at gamma 0.
    interval: 95 % interval of the expected speed-up.
    factors: the expected speed-up at gamma 0, 1, ....
    prices: of a draft whose length adapts; None where the drafter does not.
    cost_ratio: c; None in a calibration of an earlier version.
    call_cost: v(1), v(2), ...; empty in one.
    round_cost: what a round takes besides its calls, in calls of the target
      over one token; 0 in one, where c has it.
    acceptance: accepted / judged proposals at that gamma; None in one.
    tree: the best tree of proposals; None where none was measured.
  """

  rows: int
  gamma: int
  expected_speed_up: float
  interval: tuple[float, float]
  factors: tuple[float, ...]
  prices: Prices | None = None
  cost_ratio: float | None = None
  call_cost: tuple[float, ...] = ()
  round_cost: float = 0.0
  acceptance: float | None = None
  tree: TreeChoice | None = None

  def fallback(self, gamma: int, adapts: bool) -> Fallback | None:
    """When the drafter rests, by these costs; None if they do not say.

    Args:
      gamma: proposals at most.
      adapts: whether drafts may end early.
    """
    if self.cost_ratio is None or gamma + 1 > len(self.call_cost):
      return None

    def call_cost(size: int) -> float:
      return self.call_cost[size - 1] + self.round_cost

    return fallback.of_costs(self.cost_ratio, call_cost, gamma, adapts)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The best gamma for each number of rows, for one pair on one device.

  Attributes:
    fingerprints: 'target' and 'draft' -> `checkpoints.fingerprint` of its
      parameters.
    device: `environment.describe()['device']`.
    temperature: temperature at which the acceptance rate was measured.
    choices: the choice for each number of rows that was measured, in ascending
      order.
    record: everything that was measured, for readers and reports.
    confidence: confidence -> acceptance, of a drafter whose drafts can adapt.
    spread: standard deviation of the acceptance between texts; None in a
      calibration of an earlier version.
    ranks: acceptance of the likeliest, second, ... of several tokens that are
      proposed for one place; empty where no trees were measured.
    beams: how a beam search is quickest; None where none was measured.
  """

  fingerprints: Mapping[str, str]
  device: str
  temperature: float
  choices: Sequence[Choice]
  record: Mapping[str, Any]
  confidence: Confidence | None = None
  spread: float | None = None
  ranks: Sequence[Measured] = ()
  beams: BeamChoice | None = None

  def tree(self, rows: int = 1) -> TreeShape:
    """The tree that pays best with so many rows, for `small_model_tree`.

    Raises:
      CalibrationError: the calibration has measured none.
    """
    found = self.at(rows).tree
    if found is None:
      raise CalibrationError(
        'A tree without a shape takes that of a calibration, and this one has'
        ' measured no trees. Give a shape (branching, best_tree), or run'
        " `specdec calibrate` with --gin.TREE_NODES='(4, 8, 16)' and a small"
        ' model as the drafter.'
      )
    return TreeShape(found.parents)

  def beams_of(self, num_beams: int) -> BeamChoice:
    """How a beam search of this width is quickest.

    Raises:
      CalibrationError: the calibration has not measured it.
    """
    if self.beams is None or self.beams.num_beams != num_beams:
      has = 'no beams'
      if self.beams is not None:
        has = f'a beam search of width {self.beams.num_beams} alone'
      raise CalibrationError(
        f'A beam search of width {num_beams} was asked for, and this'
        f' calibration has measured {has}. Run `specdec calibrate --num-beams'
        f' {num_beams}`, or leave the calibration out.'
      )
    return self.beams

  def usual(self, rows: int, adapts: bool) -> Usual | None:
    """The acceptance of the texts that were measured; None if unknown.

    Args:
      rows: rows that are decoded together.
      adapts: whether drafts end early by `rule`.
    """
    choice = self.at(rows)
    mean = choice.acceptance
    if adapts:
      mean = None if choice.prices is None else choice.prices.acceptance
    if mean is None or self.spread is None:
      return None
    return Usual(mean, self.spread)

  def rule(self, rows: int) -> LengthRule:
    """When a draft ends whose length adapts, with so many rows.

    Raises:
      CalibrationError: the calibration does not know.
    """
    prices = self.at(rows).prices
    if self.confidence is None or prices is None:
      raise CalibrationError(
        "gamma = 'adaptive' needs a calibration with a table of confidence, and"
        ' this one has none: it is of an earlier version, or of a drafter that'
        ' does not say how sure it is. Run `specdec calibrate` again, with a'
        ' small model as the drafter.'
      )
    return rule_of(self.confidence, prices)

  def ends(self, rows: int, engine: Engine) -> Ends:
    """Where an engine's drafts end with so many rows, and its drafter rests.

    Raises:
      CalibrationError: the engine's gamma adapts, and `rule` does not know how.
    """
    choice = self.at(rows)
    adapts = engine.rule is not None
    rule = self.rule(rows) if choice.gamma and adapts else None
    gamma = choice.gamma if rule is None else rule.most
    ends = engine.ends_of(gamma, rule)
    if ends.fallback is None:
      return ends
    costs = choice.fallback(gamma, adapts)
    return ends._replace(fallback=costs or ends.fallback)

  def at(self, rows: int) -> Choice:
    """The choice for a number of rows.

    It is that of the next larger number that was measured, or of the largest.
    More rows make a call more expensive, so that this rather proposes too few
    tokens.
    """
    larger = [one for one in self.choices if one.rows >= rows]
    return (larger or self.choices)[0 if larger else -1]

  def least_length(self, rows: int) -> int:
    """Tokens of an output from which on speculation pays; 0 if it never does.

    Args:
      rows: rows that are decoded together.
    """
    choice = self.at(rows)
    if not choice.gamma:
      return 0
    costs = self.record['costs'][list(self.choices).index(choice)]
    return least_length(costs['times_ms'], choice.expected_speed_up)

  def gammas(self, rows: int) -> dict[int, int]:
    """`schedule.PoolSettings.gammas` for `rows` rows, and for fewer of them."""
    fewer = {one.rows: one.gamma for one in self.choices if one.rows < rows}
    return fewer | {rows: self.at(rows).gamma}

  def check(self, fingerprints: Mapping[str, str]) -> None:
    """Raises CalibrationError if it is of other models or another device."""
    device = environment.describe()['device']
    differs = same_run.differences(
      {**self.fingerprints, 'device': self.device},
      {**fingerprints, 'device': device},
    )
    if differs:
      raise CalibrationError(
        f'This calibration was made for something else: {"; ".join(differs)}.'
        ' Run `specdec calibrate` with these models on this machine.'
      )

  def save(self, path: str) -> None:
    """Writes the calibration as JSON; makes its folder."""
    # Without a machine of its own: `record` has it.
    records.Record(_KIND, dataclasses.asdict(self), {}).save(path)


def least_length(
  times_ms: Mapping[str, Mapping[str, float]], speed_up: float
) -> int:
  """Tokens of an output from which on a speed-up above 1 pays.

  The drafter reads the input first, which takes as long for any output.

  Args:
    times_ms: as a benchmark's record has them.
    speed_up: of a token.
  """
  won = times_ms['call_1']['median'] * (1 - 1 / speed_up)
  return max(1, math.ceil(first_ms(times_ms) / won))


def first_ms(times_ms: Mapping[str, Mapping[str, float]]) -> float:
  """What the drafter takes to read an input, in a benchmark's record."""
  return times_ms.get('draft_encoder', {'median': 0.0})['median']


def load(path: str) -> Calibration:
  """Reads a calibration that `Calibration.save` wrote.

  Raises:
    CalibrationError: the file is missing, broken or of another kind.
  """
  try:
    found = dict(records.load(path, _KIND).content)
    found['choices'] = tuple(_choice(**one) for one in found['choices'])
    if found.get('confidence') is not None:
      found['confidence'] = _tuples(Confidence, found['confidence'])
    found['ranks'] = tuple(Measured(**one) for one in found.get('ranks', ()))
    if found.get('beams') is not None:
      found['beams'] = BeamChoice(**found['beams'])
    if not found['choices']:
      raise ValueError('no choices')
    return Calibration(**found)
  except (ValueError, LookupError, TypeError) as error:
    raise CalibrationError(
      f'{path!r} is not a calibration. Expected a file that `specdec calibrate`'
      f' wrote, found: {error}'
    ) from error


def tree_of(path: str | None, rows: int = 1) -> TreeShape:
  """`Calibration.tree` of a file, for run files.

  Raises:
    CalibrationError: as `load` and `Calibration.tree`; or there is no file.
  """
  if path is None:
    raise CalibrationError(
      'A tree without a shape takes that of a calibration, and there is none:'
      ' give CALIBRATION, a file of `specdec calibrate` with TREE_NODES.'
    )
  return load(path).tree(rows)


def _choice(prices=None, tree=None, **rest) -> Choice:
  if prices is not None:
    prices = _tuples(Prices, prices)
  if tree is not None:
    tree = _tuples(TreeChoice, tree)
  return _tuples(Choice, rest | {'prices': prices, 'tree': tree})


def _tuples(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
  """A dataclass from JSON, whose lists are tuples."""
  return kind(
    **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
  )


def speed_up_of_outputs(
  lengths: Sequence[int],
  acceptance_rate: float,
  gamma: int,
  round_cost: float,
  start: float = 0.0,
  draft_start: float = 0.0,
) -> float:
  """The expected speed-up of whole outputs, one at a time.

  Unlike the factor of a token it counts what both loops begin with, and the
  tokens of the last round that lie behind an output's end. All costs are in
  calls of the target over one token.

  Args:
    lengths: tokens of each output, its end included.
    acceptance_rate: alpha.
    gamma: proposals per round.
    round_cost: v(gamma + 1) + gamma c + what a round takes besides.
    start: the encoder, and all else that an output takes besides its tokens.
    draft_start: what the drafter begins with.
  """
  plain = sum(start + length for length in lengths)
  speculative = sum(
    start
    + draft_start
    + round_cost * analysis.expected_rounds(acceptance_rate, gamma, length)
    for length in lengths
  )
  return plain / speculative


def choose_gamma(
  acceptance_rate: Measured,
  cost_ratio: Measured,
  call_cost: Sequence[Measured],
  round_cost: float = 0.0,
  rows: int = 1,
  seed: int = 0,
) -> Choice:
  """The gamma with the largest E(gamma, alpha) / (v(gamma + 1) + gamma c + r).

  Args:
    acceptance_rate: alpha.
    cost_ratio: c.
    call_cost: v(1), v(2), ...; gamma is less than the number of these.
    round_cost: r, what a round takes besides its calls.
    rows: the number of rows that these costs were measured with.
    seed: seed of the draws for the interval, which assumes normal errors.
  """
  gammas = np.arange(len(call_cost))
  values = np.array([cost.value for cost in call_cost])
  factors = np.asarray(
    analysis.measured_walltime_factor(
      acceptance_rate.value,
      gammas,
      cost_ratio.value,
      values / values[0] + round_cost * (gammas > 0),
    )
  )
  # Gamma 0 is the plain loop: its factor is 1 by definition.
  gamma = int(np.argmax(factors))
  draws = np.random.default_rng(seed).standard_normal((3, _DRAWS))
  rates = acceptance_rate.value + acceptance_rate.error * draws[0]
  costs = cost_ratio.value + cost_ratio.error * draws[1]
  verify = call_cost[gamma].value + call_cost[gamma].error * draws[2]
  drawn = analysis.measured_walltime_factor(
    np.clip(rates, 0.0, 1.0),
    gamma,
    np.maximum(costs, 0.0),
    np.maximum(verify, 1e-3) / values[0] + round_cost,
  )
  low, high = np.percentile(drawn, _INTERVAL) if gamma else (1.0, 1.0)
  return Choice(
    rows=rows,
    gamma=gamma,
    expected_speed_up=float(factors[gamma]),
    interval=(float(low), float(high)),
    factors=tuple(float(factor) for factor in factors),
    cost_ratio=cost_ratio.value,
    call_cost=tuple((values / values[0]).tolist()),
    round_cost=round_cost,
  )
