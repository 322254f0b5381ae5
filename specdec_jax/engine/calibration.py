"""A calibration: the best gamma for a pair on a machine, from measurements.

`specdec calibrate` writes it, `specdec decode` reads it. It holds only for the
models and the device that it was measured with.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import Bound, Checked, check_types, unexpected
from specdec_jax.decoding import resting
from specdec_jax.drafters.small_model import plain_rule
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import drafting_of
from specdec_jax.files import same_run
from specdec_jax.models import backend
from specdec_jax.request import Drafting, RestPolicy
from specdec_jax.types import Above0, Amount, Count, LengthRule, Positive

_KIND, _VERSION = 'calibration', 1  # kind and version of the file's format
# The share by which noise may change the time of a call. On an idle machine,
# with special kernels for one row, a call over 2 to 4 tokens took 0.9 times as
# long as a call over 1 token.
_NOISE = 0.15


class CalibrationError(ValueError):
  """A calibration is broken, or was made for other models or another device."""


def contradiction(times: Mapping[str, float]) -> str:
  """Describes how times of calls and rounds contradict each other.

  Returns '' if they do not.

  A call over more tokens is never cheaper than one over fewer, nor is a round
  cheaper than the target's call in it, except for noise.

  Args:
    times: 'call_m' -> time of a call of the target over m tokens, 'round_g' ->
      time of a round with g proposals; other names are ignored.
  """
  for kind, unit in (('call_', 'tokens'), ('round_', 'proposals')):
    sizes, costs = numbered(times, kind)
    if not len(sizes):
      continue
    fitted = rising(costs)
    worst = int(np.argmin(costs / fitted))
    if costs[worst] < (1 - _NOISE) * fitted[worst]:
      dearest = int(np.argmax(costs[:worst]))
      part = f'{costs[worst] / costs[dearest]:.2f} of the time of one over'
      what = f'a {kind[:-1]} over {sizes[worst]} {unit}'
      return f'{what} took {part} {sizes[dearest]}'
  for gamma, cost in zip(*numbered(times, 'round_'), strict=True):
    call = times.get(f'call_{gamma + 1}', 0.0)
    if cost < (1 - _NOISE) * call:
      part = f'{cost / call:.2f} of the time of the call in it'
      return f'a round with {gamma} proposals took {part}'
  return ''


def numbered(times: Mapping[str, float], kind: str) -> tuple[np.ndarray, ...]:
  """Returns n and the time of each entry named `kind` + n, sorted by n."""
  names = [name for name in times if name.startswith(kind)]
  pairs = sorted((int(name.removeprefix(kind)), times[name]) for name in names)
  sizes, values = zip(*pairs, strict=True) if pairs else ((), ())
  return np.array(sizes, int), np.array(values, float)


def rising(costs: np.ndarray) -> np.ndarray:
  """Returns the non-decreasing costs that are nearest to the measured ones."""
  from scipy import optimize  # this import takes a third of a second

  fitted: np.ndarray = optimize.isotonic_regression(costs).x
  return fitted


@dataclasses.dataclass(frozen=True)
class Choice(Checked):
  """The best gamma for a number of rows, and its expected speed-up.

  Attributes:
    rows: rows that are decoded together.
    gamma: the gamma with the largest expected speed-up; 0 if none is above 1.
    expected_speed_up: expected speed-up at that gamma; 1 at gamma 0.
    interval: 95 % interval of the expected speed-up.
    factors: the speed-up that costs and acceptance predict at gamma 0, 1, ....
    cost_ratio: c, the time of a proposal, in calls of the target over one
      token.
    call_cost: v(1), v(2), ...: the time of a call over 1, 2, ... tokens, in the
      same unit.
    round_cost: the time of a round besides its calls, in the same unit.

  Raises:
    ValueError: a number is out of its range, or the costs contradict each
      other, see `contradiction`.
  """

  rows: Positive
  gamma: Count
  expected_speed_up: Above0
  interval: tuple[Amount, Amount]
  factors: Annotated[tuple[Amount, ...], Bound(1)]
  cost_ratio: Amount = 0.0
  call_cost: tuple[Above0, ...] = ()
  round_cost: Amount = 0.0

  def __post_init__(self):
    check_types(self)
    if self.gamma >= len(self.factors):
      expected = f'less than {len(self.factors)}, the number of its factors'
      raise unexpected('gamma', expected, self.gamma)
    calls = {f'call_{size}': v for size, v in enumerate(self.call_cost, 1)}
    if wrong := contradiction(calls):
      raise ValueError(f'call_cost: {wrong}.')

  def rests(self, gamma: int, adapts: bool) -> RestPolicy | None:
    """Returns the rule by which drafters rest; None if the costs are unknown.

    A row's drafter rests, so that nothing is proposed, while it loses time.

    Args:
      gamma: the most proposals of a draft.
      adapts: whether drafts may end early.
    """
    if gamma + 1 > len(self.call_cost):
      return None

    def call_cost(size: int) -> float:
      return self.call_cost[size - 1] + self.round_cost

    return resting.of_costs(self.cost_ratio, call_cost, gamma, adapts)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The best gamma for each number of rows, for one pair on one device.

  Attributes:
    fingerprints: 'target' and 'draft' -> a string that identifies the model's
      parameters.
    device: name of the device where it was measured.
    temperature: temperature at which the acceptance rate was measured.
    choices: the choice for each number of rows that was measured, in ascending
      order.
    record: everything that was measured, for readers and reports.
  """

  fingerprints: Mapping[str, str]
  device: str
  temperature: float
  choices: Sequence[Choice]
  record: Mapping[str, Any]

  def rule(self, rows: int) -> LengthRule:
    """Returns the rule by which adaptive drafts end, for a number of rows.

    A draft has at most as many proposals as the best gamma. A proposal is made
    if it is expected to add more tokens than decoding at the expected speed-up
    would make in the time that the proposal costs. For the target, the first
    proposal costs the difference between a call over two tokens and a call over
    one; the others share the further cost of the longest call equally.

    Raises:
      CalibrationError: the calibration lacks the times of the calls.
    """
    choice = self.at(rows)
    most = max(1, choice.gamma)
    if most + 1 > (known := len(choice.call_cost)):
      needed = f'the costs of calls over 1 to {most + 1} tokens'
      raise CalibrationError(
        f"gamma = 'adaptive' needs {needed}, not {known}: calibrate again."
      )
    sizes = resting.widths(most, adapts=True, rests=False)
    calls = np.asarray([choice.call_cost[size - 1] for size in sizes])
    more = np.full(most, calls[1] - calls[0])
    more[1:] = (calls[-1] - calls[1]) / max(1, most - 1)
    worth = choice.expected_speed_up * np.maximum(more, 0.0)
    asking = worth + choice.expected_speed_up * choice.cost_ratio
    return plain_rule(worth, asking)

  def at(self, rows: int) -> Choice:
    """Returns the choice for a number of rows.

    If that number was not measured, the choice is that of the next larger
    measured number, or of the largest. Calls over more rows cost more, so the
    gamma is too small rather than too large.
    """
    larger = (choice for choice in self.choices if choice.rows >= rows)
    return next(larger, self.choices[-1])

  def least_length(self, rows: int) -> int:
    """Returns the least output length for which speculation pays; 0 if never.

    Args:
      rows: rows that are decoded together.
    """
    choice = self.at(rows)
    if not choice.gamma:
      return 0
    # The drafter reads the input once; longer outputs make up for it.
    times = self.times_ms(rows)
    first = times.get('draft_encoder', {'median': 0.0})['median']
    saved = 1 - 1 / choice.expected_speed_up
    return max(1, math.ceil(first / times['call_1']['median'] / saved))

  def times_ms(self, rows: int) -> Mapping[str, Mapping[str, float]]:
    """Returns name of a call -> statistics of its times, for so many rows."""
    costs = self.record['costs'][list(self.choices).index(self.at(rows))]
    return costs['times_ms']

  def plan(self, rows: int, drafting: Drafting) -> dict[int, Drafting]:
    """Returns number of rows -> how drafts are made for so many greedy rows.

    Args:
      rows: rows that are decoded together; the result also has smaller numbers,
        because fewer rows are left at a run's end.
      drafting: says whether gamma adapts, and whether drafters rest.

    Raises:
      CalibrationError: gamma adapts, but the calibration lacks the times of
        calls that `rule` needs.
    """
    adapts = drafting.adapts
    plan: dict[int, Drafting] = {}
    for size in {rows, *(x.rows for x in self.choices if x.rows < rows)}:
      choice = self.at(size)
      rule = self.rule(size) if choice.gamma and adapts else None
      costs = choice.rests(choice.gamma, adapts)
      rests = (costs or drafting.rests) if drafting.rests else False
      plan[size] = drafting_of(rule or choice.gamma, rests)
    return plan

  def direct(self, engine: Engine, rows: int) -> None:
    """Sets an engine's adaptive `gamma` and its `fallback` by measured costs.

    Args:
      engine: the engine; if its gamma is fixed, or its fallback is off, that
        does not change.
      rows: rows that are decoded together.

    Raises:
      ValueError: the calibration is of other models or of another device
        (`CalibrationError`), or the engine has no drafter that proposes a
        chain.
    """
    if not engine.has_drafter or engine.tree is not None:
      expected = 'one that proposes a chain, whose length a calibration chooses'
      drafter = 'a tree' if engine.has_drafter else None
      raise unexpected('drafter', expected, drafter)
    self.check(engine.fingerprints)
    adapts = engine.drafting.adapts
    if adapts:
      engine.gamma = self.rule(rows)
    if engine.fallback:
      costs = self.at(rows).rests(engine.gamma, adapts)
      engine.fallback = costs or True

  def check(self, fingerprints: Mapping[str, str]) -> None:
    """Checks that the calibration is of these models and of this device.

    Args:
      fingerprints: 'target' and 'draft' -> a string that identifies the model's
        parameters.

    Raises:
      CalibrationError: it is not.
    """
    made_for = {**self.fingerprints, 'device': self.device}
    here = {**fingerprints, 'device': backend.device_name()}
    if differs := same_run.differences(made_for, here):
      advice = 'Run `specdec calibrate` with these models on this machine.'
      reason = f'was made for something else: {"; ".join(differs)}'
      raise CalibrationError(f'This calibration {reason}. {advice}')

  def to_json(self) -> dict[str, Any]:
    """Returns the calibration as the JSON object of its file."""
    return {'kind': _KIND, 'version': _VERSION} | dataclasses.asdict(self)

  def save(self, path: str) -> None:
    """Writes the calibration as JSON; makes its folder."""
    files.write_json(path, self.to_json())


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
    content['choices'] = [_from_json(Choice, x) for x in content['choices']]
    calibration: Calibration = _from_json(Calibration, content)
    for costs in calibration.record.get('costs', ()):
      times = {name: ms['median'] for name, ms in costs['times_ms'].items()}
      if wrong := contradiction(times):
        raise ValueError(f'{wrong}; more is never cheaper')
    return calibration
  except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    expected = 'Expected what `specdec calibrate` wrote'
    message = f'{path!r} is not a calibration. {expected}, found: {error}'
    raise CalibrationError(message) from error


def _from_json(kind: Any, values: Mapping[str, Any]) -> Any:
  """Makes a dataclass from JSON; drops names that are not fields any more."""
  names = {field.name for field in dataclasses.fields(kind)} & values.keys()
  items = {name: values[name] for name in names}
  lists = {k: tuple(v) for k, v in items.items() if isinstance(v, list)}
  return kind(**items | lists)
