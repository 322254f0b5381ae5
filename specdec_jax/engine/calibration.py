"""A calibration: the best gamma for a pair on a machine, from measurements.

Written by `specdec calibrate`, read by `specdec decode`. It holds for the
models and the device that it was made with, and for nothing else.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import unexpected
from specdec_jax.decoding import fallback
from specdec_jax.decoding.fallback import Fallback
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import Drafting
from specdec_jax.files import same_run
from specdec_jax.models import backend
from specdec_jax.types import LengthRule

_KIND, _VERSION = 'calibration', 1  # of the file


class CalibrationError(ValueError):
  """A calibration is broken, or was made for something else."""


@dataclasses.dataclass(frozen=True)
class Confidence:
  """Confidence of the drafter -> acceptance, as it was measured.

  Attributes:
    bounds: between bins, ascending.
    acceptance: acceptance probability in each bin, one more than `bounds`.
    overall: the acceptance probability of all.
  """

  bounds: tuple[float, ...]
  acceptance: tuple[float, ...]
  overall: float


@dataclasses.dataclass(frozen=True)
class Prices:
  """What a proposal must be worth; see `LengthRule` for the first two.

  Attributes:
    worth: the price of each proposal in the target's call.
    worth_asking: the price with that of asking the drafter.
    expected_speed_up: what the rule with these prices should gain.
  """

  worth: tuple[float, ...]
  worth_asking: tuple[float, ...]
  expected_speed_up: float


def rule_of(confidence: Confidence, prices: Prices) -> LengthRule:
  """The rule of a table and of prices, as NumPy arrays."""
  made: Any = LengthRule
  rule: LengthRule = made(
    confidences=np.asarray(confidence.bounds, np.float32),
    acceptance=np.asarray(confidence.acceptance, np.float32),
    worth=np.asarray(prices.worth, np.float32),
    worth_asking=np.asarray(prices.worth_asking, np.float32),
    expected=np.float32(confidence.overall),
  )
  return rule


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
    cost_ratio: c.
    call_cost: v(1), v(2), ....
    round_cost: what a round takes besides its calls, in calls of the target
      over one token.
  """

  rows: int
  gamma: int
  expected_speed_up: float
  interval: tuple[float, float]
  factors: tuple[float, ...]
  prices: Prices | None = None
  cost_ratio: float = 0.0
  call_cost: tuple[float, ...] = ()
  round_cost: float = 0.0

  def fallback(self, gamma: int, adapts: bool) -> Fallback | None:
    """When the drafter rests, by these costs; None if they do not say.

    Args:
      gamma: proposals at most.
      adapts: whether drafts may end early.
    """
    if gamma + 1 > len(self.call_cost):
      return None

    def call_cost(size: int) -> float:
      return self.call_cost[size - 1] + self.round_cost

    return fallback.of_costs(self.cost_ratio, call_cost, gamma, adapts)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The best gamma for each number of rows, for one pair on one device.

  Attributes:
    fingerprints: 'target' and 'draft' -> `disk_arrays.fingerprint` of its
      parameters.
    device: `device_name()` where it was measured.
    temperature: temperature at which the acceptance rate was measured.
    choices: the choice for each number of rows that was measured, in ascending
      order.
    record: everything that was measured, for readers and reports.
    confidence: confidence -> acceptance, of a drafter whose drafts can adapt.
  """

  fingerprints: Mapping[str, str]
  device: str
  temperature: float
  choices: Sequence[Choice]
  record: Mapping[str, Any]
  confidence: Confidence | None = None

  def rule(self, rows: int) -> LengthRule:
    """When a draft ends whose length adapts, with so many rows.

    Raises:
      CalibrationError: the calibration does not know.
    """
    prices = self.at(rows).prices
    if self.confidence is None or prices is None:
      raise CalibrationError(
        "gamma = 'adaptive' needs a calibration with a table of confidence:"
        ' calibrate with a small model as the drafter.'
      )
    return rule_of(self.confidence, prices)

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
    # The drafter reads the input first, which takes as long for any output.
    times = self.times_ms(rows)
    first = times.get('draft_encoder', {'median': 0.0})['median']
    won = 1 - 1 / choice.expected_speed_up
    return max(1, math.ceil(first / times['call_1']['median'] / won))

  def times_ms(self, rows: int) -> Mapping[str, Mapping[str, float]]:
    """What was timed for a number of rows, as a benchmark's record has it."""
    costs = self.record['costs'][list(self.choices).index(self.at(rows))]
    return costs['times_ms']

  def plan(self, rows: int, engine: Engine) -> dict[int, Drafting]:
    """How an engine's greedy rows are drafted for: `PoolSettings.gammas`.

    Args:
      rows: rows that are decoded together; fewer are left at a run's end.
      engine: whose gamma adapts or not, and whose drafter rests or not.

    Raises:
      CalibrationError: the engine's gamma adapts, and `rule` does not know how.
    """
    adapts = engine.rule is not None
    plan: dict[int, Drafting] = {}
    for size in {rows, *(one.rows for one in self.choices if one.rows < rows)}:
      choice = self.at(size)
      rule = self.rule(size) if choice.gamma and adapts else None
      gamma = choice.gamma if rule is None else rule.most
      drafting = engine.drafting_of(gamma, rule)
      if drafting.fallback is not None:
        costs = choice.fallback(gamma, adapts) or drafting.fallback
        drafting = drafting._replace(fallback=costs)
      plan[size] = drafting
    return plan

  def direct(self, engine: Engine, rows: int) -> None:
    """Makes an engine that adapts, or whose drafter rests, go by these costs.

    Args:
      engine: its `gamma` and `fallback` are set where they follow costs.
      rows: rows that are decoded together.

    Raises:
      ValueError: it is of other models or of another device
        (`CalibrationError`), or there is no drafter that proposes a chain.
    """
    if not engine.has_drafter or engine.tree is not None:
      expected = 'one that proposes a chain, whose length a calibration chooses'
      drafter = 'a tree' if engine.has_drafter else None
      raise unexpected('drafter', expected, drafter)
    self.check(engine.fingerprints)
    adapts = engine.rule is not None
    if adapts:
      engine.gamma = self.rule(rows)
    if engine.fallback:
      costs = self.at(rows).fallback(engine.gamma, adapts)
      engine.fallback = costs or True

  def check(self, fingerprints: Mapping[str, str]) -> None:
    """Raises CalibrationError if it is of other models or another device."""
    device = device_name()
    differs = same_run.differences(
      {**self.fingerprints, 'device': self.device},
      {**fingerprints, 'device': device},
    )
    if differs:
      raise CalibrationError(
        f'This calibration was made for something else: {"; ".join(differs)}.'
        ' Run `specdec calibrate` with these models on this machine.'
      )

  def to_json(self) -> dict[str, Any]:
    """The calibration as its file has it."""
    head = {'kind': _KIND, 'version': _VERSION}
    return head | dataclasses.asdict(self)

  def save(self, path: str) -> None:
    """Writes the calibration as JSON; makes its folder."""
    files.write_json(path, self.to_json())


def device_name() -> str:
  """The device that a calibration made here is of."""
  device = jax.devices()[0]
  if device.platform == 'cpu':
    return backend.cpu_name()
  return str(device.device_kind)


def load(path: str) -> Calibration:
  """Reads a calibration that `Calibration.save` wrote.

  Raises:
    CalibrationError: the file is missing, broken or of another kind.
  """
  try:
    content = files.read_json(path)
    kind = content.pop('kind')
    version = content.pop('version', _VERSION)
    if (kind, version) != (_KIND, _VERSION):
      raise ValueError(f'{kind!r} of version {version!r}')
    if not content['choices']:
      raise ValueError('no choices')
    choices = []
    for one in content['choices']:
      prices = one.get('prices')
      choices.append(
        _made(Choice, one, prices=prices and _made(Prices, prices))
      )
    confidence = content.get('confidence')
    confidence = confidence and _made(Confidence, confidence)
    return _made(
      Calibration, content, choices=tuple(choices), confidence=confidence
    )
  except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    raise CalibrationError(
      f'{path!r} is not a calibration. Expected a file that `specdec calibrate`'
      f' wrote, found: {error}'
    ) from error


def _made(kind: Any, values: Mapping[str, Any], **changes: Any) -> Any:
  """A dataclass from JSON, whose lists are tuples; fields of today only."""
  names = [field.name for field in dataclasses.fields(kind)]
  known = {name: values[name] for name in names if name in values} | changes
  return kind(
    **{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
  )
