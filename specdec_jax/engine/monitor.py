"""Is the acceptance of a text what it was when the pair was calibrated?

A drafter that was fitted to one kind of text may be poor at another. A text's
acceptance rate then lies further from the usual one than texts differ among
themselves.
"""

import dataclasses
import math

from specdec_jax.engine.completion import Completion, CompletionStats

MOST_Z = 3.0  # standard deviations, beyond which a text is marked


@dataclasses.dataclass(frozen=True)
class Usual:
  """The acceptance of the texts that a calibration saw.

  Attributes:
    mean: accepted / judged proposals.
    spread: standard deviation between texts, of infinitely many tokens each.
  """

  mean: float
  spread: float

  def z_of(self, stats: CompletionStats) -> float | None:
    """How many standard deviations a text's acceptance is above the mean.

    Returns:
      None if nothing was judged.
    """
    rate = stats.acceptance_rate
    if rate is None:
      return None
    # That of one hit is added: an acceptance of 1 is not known without error.
    by_chance = self.mean * (1 - self.mean) + 1 / stats.num_tested
    error = math.sqrt(self.spread**2 + by_chance / stats.num_tested)
    return (rate - self.mean) / error

  def judged(self, completion: Completion) -> Completion:
    """The completion, marked where its acceptance is not usual."""
    found = self.z_of(completion.stats)
    return dataclasses.replace(
      completion,
      acceptance_z=found,
      out_of_distribution=found is not None and abs(found) > MOST_Z,
    )
