"""A row of a server: one output that is asked for, and the news of it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.pool import PoolView
from specdec_jax.decoding.state import Request, keys_of_rows
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.text_batch import TextBatch
from specdec_jax.engine.trace import Round
from specdec_jax.probs import SamplingParams


@dataclasses.dataclass(frozen=True)
class News:
  """What a look has brought for a row.

  Attributes:
    text: text that is new, and will not change.
    tokens: ids that are new.
    log_probs: of these, if the row wants them.
    completion: the whole output, at its end.
    beams: those of a beam search instead, the best one first.
    num_drafted: tokens that were proposed to the row so far.
    round: what became of the last draft, if it is known.
    error: why it ends without an output: 'deadline', 'stopped', 'failed', or
      'search failed', where the server goes on.
  """

  text: str = ''
  tokens: Sequence[int] = ()
  log_probs: Sequence[float] = ()
  completion: Completion | None = None
  beams: Sequence[Completion] = ()
  num_drafted: int = 0
  round: Round[int] | None = None
  error: str | None = None

  @property
  def is_last(self) -> bool:
    """Whether nothing follows."""
    known = self.completion is not None or bool(self.beams)
    return known or self.error is not None


@dataclasses.dataclass(eq=False)
class Row:
  """One output that is asked for.

  Attributes:
    batch: the text and its options, as the engine takes them.
    tell: is called with the news, by the thread of the scheduler.
    streams: whether there is news before the end.
    deadline: `time.monotonic()` at which it ends in any case.
    search: runs more rounds of a beam search, see `Engine.search`; None is
      none.
    is_plain: whether it is to be decoded without a drafter, where no other row
      runs beside it.
    shows_rounds: whether its news has rounds; then it streams.
  """

  batch: TextBatch
  tell: Callable[[News], None]
  streams: bool = False
  deadline: float = math.inf
  search: Callable[[int], list[Completion] | None] | None = None
  is_plain: bool = False
  shows_rounds: bool = False
  is_cancelled: bool = False
  num_rounds: int = 0
  num_drafted: int = 0
  num_accepted: int = 0
  num_passed: int = 0
  num_told: int = 0
  told: str = ''

  @property
  def is_simple(self) -> bool:
    """Whether the program without sampling and log-probabilities is enough."""
    options = self.batch.options
    greedy = options.sampling.greedy and not options.min_length
    return greedy and not options.log_probs

  def round_of(self, view: PoolView, slot: int) -> Round[int] | None:
    """The row's last round, if a chain was judged in it.

    Args:
      view: of a pool that has run one round.
      slot: the row's.
    """
    draft, found = view.draft, view.generation
    if draft is None or draft.parents is not None:
      return None
    length: Any = draft.length[slot]
    proposed: Any = draft.tokens[slot, :length]
    new: Any = found.tokens[slot, self.num_told : found.length[slot]]
    accepted = int(found.stats.num_accepted[slot]) - self.num_accepted
    self.num_accepted += accepted
    own = new[accepted : accepted + 1].tolist()
    passed = None
    # What is greedy is judged one by one, whatever the others are.
    if found.stats.num_passed is not None:
      passed = int(found.stats.num_passed[slot]) - self.num_passed
      self.num_passed += passed
    is_sampled = not self.batch.options.sampling.greedy
    return Round(
      proposed.tolist(),
      accepted,
      own[0] if own else None,
      passed if is_sampled else None,
    )


def read_together(
  rows: Sequence[Row],
  num_stops: int,
  verification: str,
  least: tuple[int, int] = (0, 0),
) -> Request:
  """One request of all rows: what they differ in is given for each.

  Args:
    rows: each with a text.
    num_stops: stop ids that a row has room for.
    verification: how sampled drafts are judged.
    least: widths that inputs and prompts have at least.
  """
  every: list[Any] = [row.batch.request for row in rows]

  def joined(name: str) -> np.ndarray:
    return np.concatenate([np.asarray(getattr(r, name))[:1] for r in every])

  def widest(arrays: Sequence[Any], width: int) -> np.ndarray:
    width = max(width, *(one.shape[-1] for one in arrays))
    # What is past a prompt does not matter, past an input it does.
    found = np.full((len(arrays), width), every[0].pad_id, np.int32)
    for row, one in zip(found, arrays, strict=True):
      row[: one.shape[-1]] = one
    return found

  asked = [row.batch.options for row in rows]
  from_host: Any = SamplingParams
  sampling = from_host(
    temperature=np.array([r.sampling.temperature[0] for r in every]),
    top_k=np.array([one.sampling.top_k for one in asked], np.int32),
    top_p=np.array([one.sampling.top_p for one in asked], np.float32),
  )
  stops = np.full((len(rows), num_stops), -1, np.int32)
  for row, one in zip(stops, every, strict=True):
    ids = one.stop_ids[one.stop_ids >= 0]
    row[: len(ids)] = ids
  changes: dict[str, Any] = {}
  if len(rows) > 1:
    changes['keys'] = keys_of_rows(
      np.array([one.seed & 0xFFFFFFFF for one in asked], np.uint32),
      np.array([(one.example_ids or [0])[0] for one in asked], np.uint32),
    )
  if every[0].prompt is not None:
    changes['prompt'] = widest([r.prompt[0] for r in every], least[1])
    changes['prompt_length'] = joined('prompt_length')
  return dataclasses.replace(
    every[0],
    inputs=widest([r.inputs[0] for r in every], least[0]),
    sampling=sampling,
    stop_ids=stops,
    min_length=joined('min_length'),
    max_length=joined('max_length'),
    greedy=False,
    forbids_stops=True,
    with_log_probs=True,
    verification=verification,
    **changes,
  )
