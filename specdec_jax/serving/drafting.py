"""How a pool drafts: by its number of rows, and by what they ask for.

Greedy rows are the target's own whatever is proposed to them, so their drafts
may be what is quickest just now. Samples depend on where drafts end; theirs are
always the engine's.
"""

import dataclasses
from typing import Any

from specdec_jax.engine.engine import Engine
from specdec_jax.engine.text_batch import Ends, TextBatch
from specdec_jax.measure.calibration import Calibration
from specdec_jax.serving.settings import ServeSettings


@dataclasses.dataclass(frozen=True)
class RoundKind:
  """What rounds are like.

  Attributes:
    gamma: proposals at most; 0 leaves the drafter out.
    simply: whether there is neither sampling nor a log-probability.
    ends: where drafts end, and drafters rest.
  """

  gamma: int
  simply: bool
  ends: Ends = Ends()


class Drafting:
  """What an engine, settings and a calibration say about drafts.

  Attributes:
    speculates: whether a drafter helps at all.
    room: the longest draft.
    skips_rounds: whether rows that are to be drafted for go on without the
      drafter in some pools.
    least_length: greedy rows that may have fewer tokens are decoded plainly.
    reads_plainly: whether the drafter need not read rows that are.
  """

  def __init__(
    self,
    engine: Engine,
    settings: ServeSettings,
    measured: Calibration | None = None,
  ):
    """
    Args:
      engine: the engine; with a calibration, `calibrate` was called with it.
      settings: `gammas`, where there is no calibration, and `speculative`.
      measured: a calibration of the engine's pair on this device.

    Raises:
      ValueError: gammas are longer than the drafts of an engine that adapts.
    """
    self._engine = engine
    self._sampled = dataclasses.replace(self._own(engine.gamma), simply=False)
    pays = True
    self.least_length = 0
    if measured is None:
      gammas = settings.gammas or {settings.rows: engine.gamma}
      self._greedy = {n: self._own(gamma) for n, gamma in gammas.items()}
    else:
      self._greedy = _by_calibration(engine, settings, measured)
      pays = any(kind.gamma for kind in self._greedy.values())
      self.least_length = measured.least_length(1)
    told = settings.speculative
    self.speculates = engine.has_drafter and pays if told is None else told
    every = [engine.gamma, *(kind.gamma for kind in self._greedy.values())]
    self.room = max(every) if self.speculates else 0
    self.reads_plainly = self.speculates and self.least_length > 1
    self.skips_rounds = self.speculates and 0 in every

  def _own(self, gamma: int) -> RoundKind:
    ends = self._engine.ends_of(gamma, self._engine.rule)
    return RoundKind(gamma, True, ends)

  @property
  def said(self) -> dict[str, Any]:
    """What the log of a server says of it."""
    if not self.speculates:
      return {'gammas': {}}
    gammas = {rows: kind.gamma for rows, kind in self._greedy.items()}
    return {'gammas': gammas, 'least_length': self.least_length}

  def of(self, size: int, simply: bool, plainly: bool) -> RoundKind:
    """The rounds of a pool.

    Args:
      size: its rows.
      simply: whether all that run are greedy and want no log-probabilities.
      plainly: whether none of them is to be drafted for.
    """
    if not self.speculates or plainly:
      return RoundKind(0, simply)
    if not simply:
      return self._sampled
    larger = [rows for rows in self._greedy if rows >= size]
    return self._greedy[min(larger, default=max(self._greedy))]

  def is_too_short(self, batch: TextBatch) -> bool:
    """Whether a row ends before it has won what its drafter takes to begin."""
    if not self.reads_plainly or not batch.rows:
      return False
    return int(batch.request.max_length[0]) < self.least_length


def _by_calibration(
  engine: Engine, settings: ServeSettings, measured: Calibration
) -> dict[int, RoundKind]:
  """Rows -> rounds of greedy rows, by what was measured with so many."""
  found = {}
  for rows, gamma in measured.gammas(settings.rows).items():
    ends = measured.ends(rows, engine)
    gamma = gamma if ends.rule is None else ends.rule.most
    found[rows] = RoundKind(gamma, True, ends)
  return found


def calibrate(
  engine: Engine, settings: ServeSettings, measured: Calibration
) -> None:
  """Checks a calibration; an engine that adapts or rests goes by it.

  Raises:
    ValueError: it is of other models or another device (`CalibrationError`),
      there is no drafter or one that proposes trees, or gammas are given too.
  """
  if settings.gammas is not None:
    raise ValueError(
      f'gammas = {dict(settings.gammas)} and a calibration, which chooses them:'
      ' give one of the two.'
    )
  if not engine.has_drafter:
    raise ValueError(
      'A calibration says how to draft, and there is no drafter: give one, or'
      ' leave the calibration out.'
    )
  if engine.drafter.tree is not None:
    raise ValueError(
      'A calibration chooses the length of a chain of proposals, and this'
      ' drafter proposes a tree: leave the calibration out.'
    )
  measured.check(engine.fingerprints)
  if engine.rule is not None:
    engine.gamma = measured.rule(settings.rows)
  if engine.fallback:
    choice = measured.at(settings.rows)
    costs = choice.fallback(engine.gamma, engine.rule is not None)
    engine.fallback = costs or True
